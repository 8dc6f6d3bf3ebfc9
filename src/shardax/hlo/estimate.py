# SPDX-License-Identifier: Apache-2.0
"""What compilers of accelerators make of a partitioned program's collectives, where that is known.

XLA's partitioner places a collective wherever an array must change its layout. The compilers of
TPUs and GPUs then simplify. Those of their simplifications that change how much is sent are done
here, so that a program which was partitioned on CPU (``partitioned_text``) gives the bytes that
they would send:

* equal instructions but collectives are done once, what nothing uses is not done, nor in loops;
* a part that all devices of a group keep is cut out before they sum it;
* a sum over one set of groups and then over another is one sum over both;
* two sums that are added are added first, and summed over the devices once;
* a sum of which each device keeps only its part is a reduce-scatter.

It is an *estimate*: what only some compilers do is not in it. The TPU's sends the parts of a matrix
product while others are computed, one part more than an all-gather, and sums some gradients whole
of which each device keeps a part. The GPU's sums gradients that a loop accumulates once, after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from shardax.hlo.estimate_graph import COLLECTIVES, Graph, Groups, chains, reduction
from shardax.hlo.estimate_loops import without_unused_results
from shardax.hlo.estimate_slices import is_cut_alike, scattered_dimension
from shardax.hlo.groups import groups_of
from shardax.hlo.program import ArrayShape, Instruction, Program

_LAYOUT = frozenset({"copy", "reshape", "transpose", "bitcast", "convert"})

FindGroups = Callable[[Instruction], Groups | None]
Changes = dict[str, Instruction | tuple[Instruction, ...]]
Rewrite = Callable[[Graph, FindGroups], Iterator[tuple[set[str], Changes]]]
"""Yields names of instructions that belong together, and what takes the place of some of them."""


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
            while _rewrite_all(rewrite, graph, groups):
                graph.remove_unused()
        computations[name] = graph.computation()
    return dataclasses.replace(program, computations=computations)


def _rewrite_all(rewrite: Rewrite, graph: Graph, groups: FindGroups) -> bool:
    """Makes all changes that do not meet each other; whether there was one."""
    changes: Changes = {}
    touched: set[str] = set()
    for names, changed in rewrite(graph, groups):
        if touched.isdisjoint(names):
            touched |= names
            changes.update(changed)
    graph.replace(changes)
    return bool(changes)


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


def _cut_first(graph: Graph, groups: FindGroups) -> Iterator[tuple[set[str], Changes]]:
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
        yield {reduced.name, cut.name}, {cut.name: (part, total)}


def _sum_over_both(graph: Graph, groups: FindGroups) -> Iterator[tuple[set[str], Changes]]:
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
        joined = dataclasses.replace(joined, operands=inner.operands)
        yield {inner.name, outer.name}, {outer.name: joined}


def _product(first: Groups | None, second: Groups | None) -> Groups | None:
    """The groups of devices that two sets of groups connect, if each pair connects all."""
    if first is None or second is None:
        return None
    of_first = {device: group for group in first for device in group}
    of_second = {device: group for group in second for device in group}
    joined: dict[int, tuple[int, ...]] = {}
    for device, group in of_first.items():
        joined[device] = tuple(sorted({d for each in group for d in of_second.get(each, ())}))
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


def _add_first(graph: Graph, groups: FindGroups) -> Iterator[tuple[set[str], Changes]]:
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
        taken = {each.name: each.operands[0] for each in (first, second)}
        # The sum takes what is summed, through the same changes of layout; then all is reduced.
        changed: Changes = {
            name: dataclasses.replace(
                graph.instructions[name],
                operands=tuple(taken.get(o, o) for o in graph.instructions[name].operands),
            )
            for name in {*on_first, *on_second}
        }
        names = {first.name, second.name, *changed}
        inner = dataclasses.replace(
            added,
            name=f"{added.name}.before",
            operands=tuple(taken.get(name, name) for name in added.operands),
        )
        total = dataclasses.replace(
            first, name=added.name, shapes=added.shapes, operands=(inner.name,)
        )
        yield {*names, added.name}, {**changed, added.name: (inner, total)}


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


def _scatter(graph: Graph, groups: FindGroups) -> Iterator[tuple[set[str], Changes]]:
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
        names = {cut.name, *(each.name for each in changes)}
        yield names, {reduced.name: local, cut.name: (narrow, scatter, part)}
