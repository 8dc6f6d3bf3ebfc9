# SPDX-License-Identifier: Apache-2.0
"""What compilers of accelerators make of a partitioned program's collectives, where that is known.

XLA's partitioner places a collective wherever an array must change its layout. The compilers of
TPUs and GPUs then simplify. Those of their simplifications that change how much is sent are done
here, so that a program which was partitioned on CPU (``partitioned_text``) gives the bytes that
they would send:

* equal instructions are done once, what nothing uses is not done, also not in loops;
* a part that all devices of a group keep is cut out before they sum it;
* a sum over one set of groups and then over another is one sum over both;
* two sums that are added are added first, and summed over the devices once;
* a sum of which each device keeps only its part is a reduce-scatter.

It is an *estimate*: what compilers do to suit one kind of device, such as sending the parts of a
matrix product while others are computed, is not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shardax.hlo.estimate_graph import COLLECTIVES, Graph, Groups, chains, reduction
from shardax.hlo.estimate_loops import without_unused_results
from shardax.hlo.estimate_slices import is_cut_alike, scattered_dimension
from shardax.hlo.groups import groups_of
from shardax.hlo.program import ArrayShape, Instruction, Program

_LAYOUT = frozenset({"copy", "reshape", "transpose", "bitcast", "convert"})

FindGroups = Callable[[Instruction], Groups | None]


def rewritten(program: Program) -> Program:
    """Returns a partitioned program with the collectives that an accelerator would run.

    Args:
        program: As ``partitioned_text`` gives it.

    Returns:
        The program, of which shapes, operands and groups are true. It is to be counted, not
        compiled.

    Raises:
        HloReadError: If the groups of a collective cannot be read.
    """
    program = without_unused_results(program)
    groups = _finder(program.device_count)
    computations = dict(program.computations)
    for name, computation in program.computations.items():
        if not any(each.opcode in COLLECTIVES for each in computation.instructions):
            continue
        graph = Graph(program, computation)
        graph.remove_unused()
        graph.merge_equal()
        for rewrite in (_cut_first, _sum_over_both, _add_first, _scatter):
            while rewrite(graph, groups):
                graph.remove_unused()
        computations[name] = graph.computation()
    return dataclasses.replace(program, computations=computations)


def _finder(device_count: int) -> FindGroups:
    known: dict[str, Groups] = {}

    def find(each: Instruction) -> Groups | None:
        if each.opcode not in COLLECTIVES:
            return None
        if each.attributes not in known:
            lists = groups_of(each, device_count).lists()
            # For a reduction neither the order in a group nor that of groups matters.
            if each.opcode == "all-reduce":
                lists = sorted(sorted(group) for group in lists)
            known[each.attributes] = tuple(tuple(group) for group in lists)
        return known[each.attributes]

    return find


def _cut_first(graph: Graph, groups: FindGroups) -> bool:
    """Sums only the part that all devices of a group keep."""
    for reduced in graph.instructions.values():
        cut = graph.only_user(reduced.name) if _is_reduction(reduced) else None
        if cut is None or cut.opcode != "dynamic-slice" or cut.operands[0] != reduced.name:
            continue
        found = groups(reduced)
        if found is None or len(found[0]) < 2 or not is_cut_alike(graph, cut, found):
            continue
        part = dataclasses.replace(
            cut, name=f"{cut.name}.first", operands=(reduced.operands[0], *cut.operands[1:])
        )
        total = dataclasses.replace(
            reduced, name=cut.name, operands=(part.name,), shapes=cut.shapes
        )
        graph.replace({cut.name: (part, total)})
        return True
    return False


def _sum_over_both(graph: Graph, groups: FindGroups) -> bool:
    """Joins a reduction of a reduction, over other devices, to one."""
    for outer in graph.instructions.values():
        if not _is_reduction(outer):
            continue
        (inner,) = graph.operands(outer)
        if not _is_reduction(inner) or graph.only_user(inner.name) is None:
            continue
        if reduction(graph.program, inner) != reduction(graph.program, outer):
            continue
        both = _product(groups(inner), groups(outer))
        if both is None:
            continue
        joined = _with_groups(outer, both)
        graph.replace({outer.name: dataclasses.replace(joined, operands=inner.operands)})
        return True
    return False


def _product(first: Groups | None, second: Groups | None) -> Groups | None:
    """The groups of devices that two sets of groups connect, if each pair connects all."""
    if first is None or second is None:
        return None
    of_first = {device: group for group in first for device in group}
    of_second = {device: group for group in second for device in group}
    joined: dict[int, tuple[int, ...]] = {}
    for device, group in of_first.items():
        all_ = sorted({d for each in group for d in of_second[each]})
        joined[device] = tuple(all_)
    size = len(first[0]) * len(second[0])
    found = set(joined.values())
    if any(len(group) != size for group in found) or sum(map(len, found)) != len(joined):
        return None
    return tuple(sorted(found))


def _with_groups(each: Instruction, groups: Groups) -> Instruction:
    text = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    reduces = each.attribute("to_apply")
    attributes = f"replica_groups={{{text}}}, use_global_device_ids=true, to_apply={reduces}"
    return dataclasses.replace(each, attributes=attributes)


def _add_first(graph: Graph, groups: FindGroups) -> bool:
    """Adds before two sums over the devices, which makes them one."""
    for added in graph.instructions.values():
        if added.opcode != "add" or len(set(added.operands)) != 2:
            continue
        sums = [_summed(graph, name) for name in added.operands]
        if any(each is None for each in sums):
            continue
        (first, on_first), (second, on_second) = [each for each in sums if each is not None]
        if groups(first) != groups(second):
            continue
        if added.shapes[0].bytes > max(first.bytes, second.bytes):
            continue  # sent before it was widened
        # The sum takes what is summed, through the same changes of layout; then all is reduced.
        changed = {
            name: dataclasses.replace(
                graph.instructions[name],
                operands=tuple(
                    {first.name: first.operands[0], second.name: second.operands[0]}.get(o, o)
                    for o in graph.instructions[name].operands
                ),
            )
            for name in {*on_first, *on_second, added.name}
        }
        inner = dataclasses.replace(changed.pop(added.name), name=f"{added.name}.before")
        total = dataclasses.replace(
            first, name=added.name, shapes=added.shapes, operands=(inner.name,)
        )
        graph.replace({**changed, added.name: (inner, total)})
        return True
    return False


def _summed(graph: Graph, name: str) -> tuple[Instruction, set[str]] | None:
    """The sum over devices that an instruction is, up to its layout, and what changes that."""
    on_the_way: set[str] = set()
    while graph.only_user(name) is not None:
        each = graph.instructions[name]
        if _is_reduction(each):
            return (each, on_the_way) if reduction(graph.program, each) == "add" else None
        if each.opcode not in _LAYOUT:
            return None
        on_the_way.add(name)
        (name,) = each.operands
    return None


def _is_reduction(each: Instruction) -> bool:
    return each.opcode == "all-reduce" and len(each.operands) == 1


def _scatter(graph: Graph, groups: FindGroups) -> bool:
    """Makes a sum of which each device keeps its part a reduce-scatter."""
    for reduced in graph.instructions.values():
        if not _is_reduction(reduced):
            continue
        *changes, cut = list(chains(graph, _LAYOUT, reduced))
        found = groups(reduced)
        if cut.opcode != "dynamic-slice" or cut.operands[0] != changes[-1].name or found is None:
            continue
        dimension = scattered_dimension(graph, cut, found)
        if dimension is None:
            continue
        array, dtype = changes[-1], reduced.shapes[0].dtype
        # What is sent is as wide as it was, also if it is converted on the way.
        narrow = dataclasses.replace(
            array,
            name=f"{cut.name}.whole",
            opcode="convert",
            operands=(array.name,),
            shapes=(ArrayShape(dtype, array.shapes[0].dims),),
        )
        scatter = dataclasses.replace(
            reduced,
            name=f"{cut.name}.part",
            opcode="reduce-scatter",
            operands=(narrow.name,),
            shapes=(ArrayShape(dtype, cut.shapes[0].dims),),
            attributes=f"{reduced.attributes}, dimensions={{{dimension}}}",
        )
        part = dataclasses.replace(cut, opcode="convert", operands=(scatter.name,), attributes="")
        local = dataclasses.replace(reduced, opcode="copy", attributes="")
        graph.replace({reduced.name: local, cut.name: (narrow, scatter, part)})
        return True
    return False
