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

A computation of a program that can be changed: instructions by name, with who uses them.

Loops without what they compute for nobody.

The state of a loop is a tuple. An element that neither the condition, nor another element that is
needed, nor anything after the loop reads is computed for nobody, and compilers leave it out.

Where each device slices an array: offsets that a program computes from the device's number.

A program is the same for all devices, so a device finds the part of an array that is its own by its
number (*partition id*), by arithmetic on it or in a table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shardax.hlo.collectives import groups_of
from shardax.hlo.execution_counts import branches, called
from shardax.hlo.program import ArrayShape, Computation, Instruction, Program

# --- Estimate graph ---

Groups = tuple[tuple[int, ...], ...]

_METADATA = re.compile(r',? *metadata=\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}')
COLLECTIVES = frozenset(
    {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
)
_EFFECTS = frozenset({"send", "recv", "send-done", "recv-done", "outfeed", "infeed", "custom-call"})
_UNIQUE = (
    _EFFECTS
    | COLLECTIVES
    | {
        *("parameter", "while", "conditional", "call", "rng", "rng-bit-generator"),
        *("opt-barrier", "fusion", "after-all"),
    }
)


class Graph:
    """A computation that can be changed."""

    def __init__(self, program: Program, computation: Computation) -> None:
        self.program = program
        self.device_count = program.device_count
        self.instructions = {each.name: each for each in computation.instructions}
        self.root = computation.root.name
        self._name = computation.name
        self.users: dict[str, list[str]] = {}
        self._find_users()

    def computation(self) -> Computation:
        """Returns it as it is now."""
        return Computation(
            self._name,
            tuple(
                dataclasses.replace(each, is_root=each.name == self.root)
                for each in self.instructions.values()
            ),
        )

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that one takes its operands from."""
        if instruction.opcode == "parameter":
            return []
        return [self.instructions[name] for name in instruction.operands]

    def only_user(self, name: str) -> Instruction | None:
        """Returns the instruction that alone uses another, once; None if there is no such one."""
        users = self.users.get(name, [])
        return self.instructions[users[0]] if len(users) == 1 and name != self.root else None

    def replace(self, changed: Mapping[str, Instruction | tuple[Instruction, ...]]) -> None:
        """Puts others in the place of instructions."""
        updated: dict[str, Instruction] = {}
        for name, each in self.instructions.items():
            new = changed.get(name, each)
            for one in new if isinstance(new, tuple) else (new,):
                updated[one.name] = one
        self.instructions = updated
        self._find_users()

    def rename_uses(self, names: Mapping[str, str]) -> None:
        """Lets the users of instructions use others that come before."""
        self.instructions = {
            name: each
            if each.opcode == "parameter"
            else dataclasses.replace(each, operands=tuple(names.get(o, o) for o in each.operands))
            for name, each in self.instructions.items()
        }
        self.root = names.get(self.root, self.root)
        self._find_users()

    def remove_unused(self) -> None:
        """Removes what nothing uses and has no effect of its own."""
        needed = {self.root}
        for name, each in reversed(self.instructions.items()):
            if name in needed or each.opcode == "parameter" or each.opcode in _EFFECTS:
                needed.add(name)
                needed.update(() if each.opcode == "parameter" else each.operands)
        self.instructions = {n: each for n, each in self.instructions.items() if n in needed}
        self._find_users()

    def merge_equal(self) -> None:
        """Lets one of several equal instructions do for all; collectives stay, as in compilers."""
        first: dict[object, str] = {}
        same: dict[str, str] = {}
        for name, each in self.instructions.items():
            if each.opcode in _UNIQUE or "..." in each.literal:
                continue
            operands = tuple(same.get(operand, operand) for operand in each.operands)
            attributes = _METADATA.sub("", each.attributes)
            key = (each.opcode, each.shapes, operands, each.literal, attributes)
            if first.setdefault(key, name) != name:
                same[name] = first[key]
        self.rename_uses(same)
        self.remove_unused()

    def _find_users(self) -> None:
        self.users = {}
        for name, each in self.instructions.items():
            for operand in () if each.opcode == "parameter" else each.operands:
                self.users.setdefault(operand, []).append(name)


def reduction(program: Program, collective: Instruction) -> str:
    """Returns the opcode by which a collective reduces (``"add"``), or "" if it does not."""
    for name in collective.computations("to_apply"):
        return program.computations[name].root.opcode
    return ""


def chains(graph: Graph, opcodes: frozenset[str], start: Instruction) -> Iterator[Instruction]:
    """Yields an instruction and what uses it alone, one after another, while these are of opcodes.

    The last that is yielded is of another opcode, if there is a last that one alone uses.
    """
    current: Instruction | None = start
    while current is not None:
        yield current
        if current is not start and current.opcode not in opcodes:
            return
        current = graph.only_user(current.name)


# --- Estimate loops ---


def without_unused_results(program: Program) -> Program:
    """Returns a program whose loops leave elements alone that nobody needs."""
    computations = dict(program.computations)
    pending = [program.entry]
    while pending:  # outer loops first, as they say what inner ones are needed for
        computation = computations[pending.pop()]
        for loop in computation.instructions:
            pending.extend(called(loop) if loop.opcode == "call" else branches(loop))
            if loop.opcode != "while":
                continue
            (name,) = loop.computations("body")
            (condition,) = loop.computations("condition")
            read = _read_after(computation, loop)
            body = computations[name]
            if read is not None and _has_plain_state(body):
                read |= _elements_read(computations[condition], None)
                computations[name] = _without(body, read)
            pending.append(name)
    return dataclasses.replace(program, computations=computations)


def _read_after(computation: Computation, loop: Instruction) -> set[int] | None:
    """Elements of a loop's state that are read after it; None if it is used as a whole."""
    if loop.is_root:
        return None
    users = [each for each in computation.instructions if loop.name in each.inputs]
    if any(each.opcode != "get-tuple-element" for each in users):
        return None
    return {each.element for each in users}


def _has_plain_state(body: Computation) -> bool:
    """Whether a body takes its state apart and puts it together, element by element."""
    (state,) = body.parameters.values()
    uses = [each for each in body.instructions if state.name in each.inputs]
    return body.root.opcode == "tuple" and all(e.opcode == "get-tuple-element" for e in uses)


def _elements_read(computation: Computation, needed: set[str] | None) -> set[int]:
    """Elements of a computation's only argument that it reads, for the named ones of it."""
    return {
        each.element
        for each in computation.instructions
        if each.opcode == "get-tuple-element" and (needed is None or each.name in needed)
        if each.operands == (next(iter(computation.parameters.values())).name,)
    }


def _without(body: Computation, read: set[int]) -> Computation:
    """A body without what computes other elements than those read after it."""
    root = body.root
    by_name = body.by_name
    while True:
        kept = [operand for index, operand in enumerate(root.operands) if index in read]
        needed = _needed(body.instructions, by_name, kept)
        more = read | _elements_read(body, needed)
        if more == read:
            break
        read = more
    (state,) = body.parameters.values()
    unread = [index for index in range(len(root.operands)) if index not in read]
    passed = {index: f"{root.name}.unread.{index}" for index in unread}
    through = [
        Instruction(
            passed[index],
            "get-tuple-element",
            by_name[root.operands[index]].shapes,
            (state.name,),
            f"index={index}",
        )
        for index in unread
    ]
    operands = tuple(passed.get(index, name) for index, name in enumerate(root.operands))
    inside = [each for each in body.instructions if each.name in needed or each is state]
    return Computation(body.name, (*inside, *through, dataclasses.replace(root, operands=operands)))


def _needed(
    instructions: tuple[Instruction, ...], by_name: Mapping[str, Instruction], names: list[str]
) -> set[str]:
    """Names of what instructions need, and of what has an effect of its own with what it needs."""
    needed: set[str] = set()
    pending = [*names, *(each.name for each in instructions if each.opcode in _EFFECTS)]
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            pending.extend(by_name[name].inputs)
    return needed


# --- Estimate slices ---

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_NUMBER = re.compile(r"-?\d+|true|false")
_ARITHMETIC = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
}


def scattered_dimension(graph: Graph, cut: Instruction, groups: Groups) -> int | None:
    """Finds the dimension along which the devices of every group share an array out."""
    array, *starts = graph.operands(cut)
    whole, part = array.shapes[0].dims, cut.shapes[0].dims
    dimensions = [d for d, (all_, some) in enumerate(zip(whole, part, strict=True)) if all_ != some]
    size = len(groups[0])
    if len(dimensions) != 1 or any(len(group) != size for group in groups):
        return None
    (dimension,) = dimensions
    if part[dimension] * size != whole[dimension]:
        return None
    devices = np.arange(graph.device_count)
    offsets = _values(graph, starts[dimension], devices)
    if offsets is None:
        return None
    expected = np.arange(size) * part[dimension]
    parts = np.sort(np.broadcast_to(offsets, devices.shape)[np.array(groups)], axis=1)
    return dimension if (parts == expected).all() else None


def is_cut_alike(graph: Graph, cut: Instruction, groups: Groups) -> bool:
    """Whether the devices of every group keep the same part of an array."""
    devices = np.arange(graph.device_count)
    for start in graph.operands(cut)[1:]:
        offsets = _values(graph, start, devices)
        if offsets is None:
            return False
        everywhere = np.broadcast_to(offsets, devices.shape)
        if any(len(set(everywhere[list(group)].tolist())) > 1 for group in groups):
            return False
    return True


def _values(graph: Graph, scalar: Instruction, devices: Numbers) -> Numbers | None:
    """The value of an integer on each device, as far as it depends on the device's number alone."""
    if scalar.opcode == "partition-id":
        return devices
    if scalar.opcode == "constant":
        numbers = _numbers(scalar)
        return np.array(numbers[0]) if numbers and len(numbers) == 1 else None
    operands = graph.operands(scalar)
    if scalar.opcode == "dynamic-slice" and operands[0].opcode == "constant" and len(operands) == 2:
        table, place = _numbers(operands[0]), _values(graph, operands[1], devices)
        if table is None or place is None:
            return None
        return np.array(table)[np.clip(place, 0, len(table) - 1)]
    values = [found for each in operands if (found := _values(graph, each, devices)) is not None]
    if not values or len(values) < len(operands):
        return None
    return _arithmetic(scalar.opcode, values)


def _arithmetic(opcode: str, values: list[Numbers]) -> Numbers | None:
    if opcode in ("reshape", "convert", "copy", "bitcast"):
        return values[0]
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](*values)
    if opcode in ("divide", "remainder") and np.all(values[1] != 0):
        # Of numbers that are not negative, as these are, HLO's are those of Python.
        return (np.floor_divide if opcode == "divide" else np.mod)(*values)
    if opcode == "clamp":
        least, value, most = values
        return np.clip(value, least, most)
    return None


def _numbers(constant: Instruction) -> list[int] | None:
    """The integers of a constant of at most one dimension; None if it is not one of these."""
    (shape,) = constant.shapes
    if len(shape.dims) > 1 or "..." in constant.literal or shape.dtype[0] not in "su":
        return None
    return [int(each) for each in _NUMBER.findall(constant.literal)]


# --- Estimate ---

_LAYOUT = frozenset({"copy", "reshape", "transpose", "bitcast", "convert"})

FindGroups = Callable[[Instruction], Groups | None]
Changes = dict[str, Instruction | tuple[Instruction, ...]]
Rewrite = Callable[[Graph, FindGroups], Iterator[tuple[set[str], Changes]]]
"""Yields names of instructions that belong together, and what takes the place of some of them."""


def rewritten(program: Program) -> Program:
    """Returns a partitioned program with the collectives that an accelerator would run."""
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
