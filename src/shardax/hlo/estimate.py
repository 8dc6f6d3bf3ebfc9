# SPDX-License-Identifier: Apache-2.0
"""Known rewrites of collectives by compilers of accelerators.

XLA's partitioner places a collective wherever an array must change its layout. The compilers of
TPUs and GPUs then simplify. Those of their simplifications that change how much is sent are done
here, so that a program which was partitioned on CPU (``partitioned_text``) gives the bytes that
they would send:

* common subexpressions, but for collectives, and dead code are eliminated, also in loop state;
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
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardax.hlo.groups import groups_of
from shardax.hlo.program import ArrayShape, Computation, Instruction, Program

DeviceGroups = tuple[tuple[int, ...], ...]

_METADATA = re.compile(r',? *metadata=\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}')
_COLLECTIVES = frozenset(
    {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
)
_EFFECTS = frozenset({"send", "recv", "send-done", "recv-done", "outfeed", "infeed", "custom-call"})
_UNIQUE = _EFFECTS | _COLLECTIVES
_UNIQUE |= {"parameter", "while", "conditional", "call", "rng", "rng-bit-generator"}
_UNIQUE |= {"opt-barrier", "fusion", "after-all"}
_LAYOUT = frozenset({"copy", "reshape", "transpose", "bitcast", "convert"})


class ComputationGraph:
    """A computation to be changed: instructions in topological order, with users."""

    def __init__(self, program: Program, computation: Computation) -> None:
        self.program = program
        self.root = computation.root.name
        self._name = computation.name
        self._groups: dict[str, DeviceGroups] = {}
        self._set(computation.instructions)

    def _set(self, instructions: Iterable[Instruction]) -> None:
        self.instructions = {op.name: op for op in instructions}
        self.users: dict[str, list[str]] = {}
        for op in self.instructions.values():
            for operand in op.operands:
                self.users.setdefault(operand, []).append(op.name)

    def computation(self) -> Computation:
        """Returns it as it is now."""
        ops = self.instructions.values()
        marked = [dataclasses.replace(op, is_root=op.name == self.root) for op in ops]
        return Computation(self._name, tuple(marked))

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands]

    def only_user(self, name: str) -> Instruction | None:
        """Returns the only user of an instruction, if there is one."""
        users = self.users.get(name, [])
        return self.instructions[users[0]] if len(users) == 1 and name != self.root else None

    def groups(self, reduced: Instruction) -> DeviceGroups:
        """Returns the groups of an all-reduce, sorted, as their order does not matter to it."""
        text = reduced.attributes
        if text not in self._groups:
            lists = groups_of(reduced, self.program.device_count).lists()
            self._groups[text] = tuple(sorted(tuple(sorted(group)) for group in lists))
        return self._groups[text]

    def replace(self, changes: Changes) -> None:
        """Replaces instructions; the last new one keeps the name."""
        ops = self.instructions.items()
        self._set(replacement for name, op in ops for replacement in changes.get(name, (op,)))

    def eliminate_dead_code(self) -> None:
        ops = list(self.instructions.values())
        needed = _needed(ops, {self.root})
        self._set([op for op in ops if op.name in needed or op.opcode == "parameter"])

    def eliminate_common_subexpressions(self) -> None:
        first: dict[object, str] = {}
        same: dict[str, str] = {}
        renamed: list[Instruction] = []
        for name, op in self.instructions.items():
            operands = tuple(same.get(operand, operand) for operand in op.operands)
            op = dataclasses.replace(op, operands=operands)
            renamed.append(op)

            if op.opcode in _UNIQUE or "..." in op.literal:
                continue
            attributes = _METADATA.sub("", op.attributes)
            key = (op.opcode, op.shapes, op.operands, op.literal, attributes)
            if first.setdefault(key, name) != name:
                same[name] = first[key]

        self.root = same.get(self.root, self.root)
        self._set(renamed)
        self.eliminate_dead_code()


def _needed(instructions: Sequence[Instruction], results: set[str]) -> set[str]:
    """Returns the names of results, of effects, and of all that these are computed from."""
    needed = set(results)
    for op in reversed(instructions):  # users before what they use
        if op.name in needed or op.opcode in _EFFECTS:
            needed.update((op.name, *op.operands))
    return needed


def reduction(program: Program, collective: Instruction) -> str:
    """Returns the opcode of a collective's reduction, or ""."""
    for name in collective.computations("to_apply"):
        return program.computations[name].root.opcode
    return ""


# Dead state of loops.


def _without_dead_state(program: Program) -> Program:
    """Eliminates dead elements of loop states."""
    # An element is dead that neither the condition, nor another element that is needed, nor
    # anything after the loop reads. It goes through its loop unchanged, so shapes stay.
    computations = dict(program.computations)

    # Outer loops first, as they say what inner ones are needed for.
    pending = [program.entry]
    while pending:
        computation = computations[pending.pop()]
        for op in computation.instructions:
            if op.opcode == "while":
                (name,) = op.computations("body")
                computations[name] = _without_unread(computations, computation, op)
                pending.append(name)
            elif op.opcode == "call":
                pending.extend(op.called)
            pending.extend(op.branches)
    return dataclasses.replace(program, computations=computations)


def _without_unread(
    computations: Mapping[str, Computation], outside: Computation, loop: Instruction
) -> Computation:
    """Returns the body of a loop without what it computes for dead elements."""
    body = computations[loop.computations("body")[0]]
    condition = computations[loop.computations("condition")[0]]
    (state,) = body.parameters.values()

    # The state must be taken apart and put together element by element.
    users = outside.users[loop.name]
    readers = (*users, *body.users[state.name])
    by_element = all(reader.opcode == "get-tuple-element" for reader in readers)
    if not by_element or body.root.opcode != "tuple" or loop.is_root:
        return body
    read = _elements_read(condition.instructions) | {user.element for user in users}

    # What is read needs more elements, until it needs no further ones.
    root = body.root
    while True:
        results = {name for index, name in enumerate(root.operands) if index in read}
        needed = _needed(body.instructions, {state.name, *results})
        instructions = [op for op in body.instructions if op.name in needed]
        more = _elements_read(instructions)
        if more <= read:
            break
        read |= more

    # The others pass through.
    operands = list(root.operands)
    for index, name in enumerate(root.operands):
        if index not in read:
            operands[index] = f"{root.name}.unread.{index}"
            shapes, element = body.by_name[name].shapes, f"index={index}"
            instructions.append(
                Instruction(operands[index], "get-tuple-element", shapes, (state.name,), element)
            )
    root = dataclasses.replace(root, operands=tuple(operands))
    return Computation(body.name, (*instructions, root))


def _elements_read(instructions: Iterable[Instruction]) -> set[int]:
    """Elements read of the only parameter of some instructions."""
    ops = list(instructions)
    state = next(op for op in ops if op.opcode == "parameter")
    reads = [op for op in ops if op.opcode == "get-tuple-element"]
    return {op.element for op in reads if op.operands == (state.name,)}


# A device finds the part of an array that is its own by its number (*partition id*), by arithmetic
# on it or in a table.

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_NUMBER = re.compile(r"-?\d+|true|false")
_ARITHMETIC = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "divide": np.floor_divide,
    "remainder": np.mod,
}


def _scattered_dimension(
    graph: ComputationGraph, cut: Instruction, groups: DeviceGroups
) -> int | None:
    """The dimension of equal slices by the devices of a group."""
    array, *starts = graph.operands(cut)
    whole, part = array.shapes[0].dims, cut.shapes[0].dims
    sizes = zip(whole, part, strict=True)
    dimensions = [d for d, (whole_size, part_size) in enumerate(sizes) if whole_size != part_size]
    size = len(groups[0])
    if len(dimensions) != 1 or any(len(group) != size for group in groups):
        return None
    (dimension,) = dimensions
    offsets = _offsets(graph, starts[dimension])
    if part[dimension] * size != whole[dimension] or offsets is None:
        return None

    expected = np.arange(size) * part[dimension]
    return dimension if (np.sort(offsets[np.array(groups)], axis=1) == expected).all() else None


def _is_sliced_alike(graph: ComputationGraph, cut: Instruction, groups: DeviceGroups) -> bool:
    """Whether the devices of every group keep the same slice."""
    for start in graph.operands(cut)[1:]:
        offsets = _offsets(graph, start)
        if offsets is None:
            return False
        if any(len(set(offsets[list(group)].tolist())) != 1 for group in groups):
            return False
    return True


def _offsets(graph: ComputationGraph, scalar: Instruction) -> Numbers | None:
    """The value of an integer on each device, a function of its number; None if unknown."""
    opcode, operands = scalar.opcode, graph.operands(scalar)
    devices = np.arange(graph.program.device_count)

    # The device number, constants, and tables of them.
    if opcode == "partition-id":
        return devices
    if opcode == "constant":
        numbers = _numbers(scalar)
        return np.full_like(devices, numbers[0]) if numbers and len(numbers) == 1 else None
    if opcode == "dynamic-slice" and operands[0].opcode == "constant" and len(operands) == 2:
        table, index = _numbers(operands[0]), _offsets(graph, operands[1])
        if table is None or index is None:
            return None
        return np.array(table)[np.clip(index, 0, len(table) - 1)]

    # Arithmetic.
    values: list[Numbers] = []
    for operand in operands:
        value = _offsets(graph, operand)
        if value is None:
            return None
        values.append(value)
    if opcode in ("reshape", "convert", "copy", "bitcast"):
        return values[0]
    if opcode == "clamp":
        return np.clip(values[1], values[0], values[2])
    # Of numbers that are not negative, as these are, HLO's division is that of Python.
    if opcode in ("divide", "remainder") and not np.all(values[1]):
        return None
    return _ARITHMETIC[opcode](*values) if opcode in _ARITHMETIC else None


def _numbers(constant: Instruction) -> list[int] | None:
    """The integers of a constant of at most one dimension."""
    (shape,) = constant.shapes
    if len(shape.dims) > 1 or "..." in constant.literal or shape.dtype[0] not in "su":
        return None
    return [int(digits) for digits in _NUMBER.findall(constant.literal)]


# Rewrites of collectives.

Changes = Mapping[str, tuple[Instruction, ...]]
# Yields names of instructions that belong together, and what takes the place of some of them.
Rewrite = Callable[[ComputationGraph], Iterator[tuple[set[str], Changes]]]


def rewritten(program: Program) -> Program:
    """Returns a partitioned program with an accelerator's collectives."""
    # Its shapes, operands and groups are true; it is to be counted, not compiled.
    program = _without_dead_state(program)
    computations = dict(program.computations)
    for name, computation in program.computations.items():
        if not any(op.opcode in _COLLECTIVES for op in computation.instructions):
            continue
        graph = ComputationGraph(program, computation)
        graph.eliminate_dead_code()
        graph.eliminate_common_subexpressions()
        for rewrite in (_cut_first, _sum_over_both, _add_first, _scatter):
            while _apply(rewrite, graph):
                graph.eliminate_dead_code()
        computations[name] = graph.computation()
    return dataclasses.replace(program, computations=computations)


def _apply(rewrite: Rewrite, graph: ComputationGraph) -> bool:
    """Makes all independent changes; whether there was one."""
    changes: dict[str, tuple[Instruction, ...]] = {}
    touched: set[str] = set()
    for names, changed in rewrite(graph):
        if touched.isdisjoint(names):
            touched |= names
            changes.update(changed)
    graph.replace(changes)
    return bool(changes)


def _is_reduction(op: Instruction) -> bool:
    return op.opcode == "all-reduce" and len(op.operands) == 1


def _cut_first(graph: ComputationGraph) -> Iterator[tuple[set[str], Changes]]:
    """Sums only the part kept by all devices of a group."""
    for reduced in graph.instructions.values():
        cut = graph.only_user(reduced.name) if _is_reduction(reduced) else None
        if cut is None or cut.opcode != "dynamic-slice" or cut.operands[0] != reduced.name:
            continue
        groups = graph.groups(reduced)
        if len(groups[0]) < 2 or not _is_sliced_alike(graph, cut, groups):
            continue

        operands = (reduced.operands[0], *cut.operands[1:])
        part = dataclasses.replace(cut, name=f"{cut.name}.first", operands=operands)
        total = dataclasses.replace(
            reduced, name=cut.name, operands=(part.name,), shapes=cut.shapes
        )
        yield {reduced.name, cut.name}, {cut.name: (part, total)}


def _sum_over_both(graph: ComputationGraph) -> Iterator[tuple[set[str], Changes]]:
    """Joins a reduction of a reduction, over other devices, to one."""
    for outer in graph.instructions.values():
        if not _is_reduction(outer):
            continue
        (inner,) = graph.operands(outer)
        if not _is_reduction(inner) or graph.only_user(inner.name) is None:
            continue
        if reduction(graph.program, inner) != reduction(graph.program, outer):
            continue
        both = _product(graph.groups(inner), graph.groups(outer))
        if both is None:
            continue

        text = ",".join("{" + ",".join(map(str, group)) + "}" for group in both)
        reduces = outer.attribute("to_apply")
        joined = dataclasses.replace(
            outer,
            operands=inner.operands,
            attributes=f"replica_groups={{{text}}}, use_global_device_ids=true, to_apply={reduces}",
        )
        yield {inner.name, outer.name}, {outer.name: (joined,)}


def _product(first: DeviceGroups, second: DeviceGroups) -> DeviceGroups | None:
    """The common groups of two sets of groups, if regular."""
    group_of = {device: group for group in second for device in group}
    product: set[tuple[int, ...]] = set()
    for group in first:
        joined = {member for device in group for member in group_of.get(device, ())}
        product.add(tuple(sorted(joined)))

    size = len(first[0]) * len(second[0])
    devices = sum(map(len, first))
    if any(len(group) != size for group in product) or sum(map(len, product)) != devices:
        return None
    return tuple(sorted(product))


def _add_first(graph: ComputationGraph) -> Iterator[tuple[set[str], Changes]]:
    """Adds before two sums over the devices, to make them one."""
    for added in graph.instructions.values():
        if added.opcode != "add" or len(set(added.operands)) != 2:
            continue
        left, right = (_summed(graph, name) for name in added.operands)
        if left is None or right is None:
            continue
        (first, on_first), (second, on_second) = left, right
        if graph.groups(first) != graph.groups(second):
            continue
        if added.shapes[0].bytes > max(first.bytes, second.bytes):
            continue  # sent before it was widened

        # The sum takes what is summed, through the same changes of layout; then all is reduced.
        inputs_of = {op.name: op.operands[0] for op in (first, second)}
        moved: dict[str, Instruction] = {}
        for name in {added.name, *on_first, *on_second}:
            op = graph.instructions[name]
            operands = tuple(inputs_of.get(operand, operand) for operand in op.operands)
            moved[name] = dataclasses.replace(op, operands=operands)
        inner = dataclasses.replace(moved[added.name], name=f"{added.name}.before")
        total = dataclasses.replace(
            first, name=added.name, shapes=added.shapes, operands=(inner.name,)
        )
        changes = {name: (op,) for name, op in moved.items()} | {added.name: (inner, total)}
        yield {first.name, second.name, *changes}, changes


def _summed(graph: ComputationGraph, name: str) -> tuple[Instruction, set[str]] | None:
    """The all-reduce under layout changes, and names of these changes."""
    changes: set[str] = set()
    while graph.only_user(name) is not None:
        op = graph.instructions[name]
        if _is_reduction(op):
            return (op, changes) if reduction(graph.program, op) == "add" else None
        if op.opcode not in _LAYOUT:
            return None
        changes.add(name)
        (name,) = op.operands
    return None


def _scatter(graph: ComputationGraph) -> Iterator[tuple[set[str], Changes]]:
    """Makes a sum with one part kept by each device a reduce-scatter."""
    for reduced in graph.instructions.values():
        if not _is_reduction(reduced):
            continue

        # From the sum, through changes of layout, to where it is cut.
        path, cut = [reduced], graph.only_user(reduced.name)
        while cut is not None and cut.opcode in _LAYOUT:
            path.append(cut)
            cut = graph.only_user(cut.name)
        if cut is None or cut.opcode != "dynamic-slice" or cut.operands[0] != path[-1].name:
            continue
        dimension = _scattered_dimension(graph, cut, graph.groups(reduced))
        if dimension is None:
            continue

        # What is sent is as wide as it was, also if it is converted on the way.
        array, dtype = path[-1], reduced.shapes[0].dtype
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
        names = {cut.name, *(op.name for op in path)}
        yield names, {reduced.name: (local,), cut.name: (narrow, scatter, part)}
