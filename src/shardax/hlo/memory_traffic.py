# SPDX-License-Identifier: Apache-2.0
"""Bytes that a program reads from a device's memory and writes to it.

What an instruction takes is read and what it gives is written, once each, for every run; inside a
*fusion* nothing is written but its result. Of an array that is only sliced, or of which only a
slice is updated, the slice counts. It is an *estimate*: caches, which keep what is read again, and
what compilers keep in faster memory are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from shardax.hlo.live_memory import UPDATES, BufferTable
from shardax.hlo.program import VIEWS, Computation, Instruction, Program

_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert"),
        *("after-all", "add-dependency", "domain", "opt-barrier", "optimization-barrier"),
        *("partition-id", "replica-id", "while", "call", "conditional"),
        # A copy that brings data closer ahead of time; what uses the copy counts as reading it.
        "copy-start",
    }
)
# The later parts of what runs meanwhile; the first has read and written.
_LATER = ("-done", "-update")
_FUSED_VIEWS = frozenset({"bitcast", "reshape", "copy"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_INSIDE = ("while", "call", "conditional")
# Pallas's kernels say what they cost, if their authors did.
_COST_BYTES = re.compile(r'"cost_estimate": *\{[^{}]*"bytes_accessed": *"?(\d+)')


def hbm_bytes(program: Program, runs: Mapping[str, int]) -> float:
    """Counts bytes of memory traffic of a compiled program."""
    # Computations that run within an instruction do not read or write memory themselves.
    inner: set[str] = set()
    for computation in program.computations.values():
        for op in computation.instructions:
            if op.opcode not in _INSIDE:
                inner.update(op.computations("calls", "to_apply", "called_computations"))

    total = 0
    for name in runs.keys() - inner:
        computation = program.computations[name]
        total += runs[name] * sum(
            _bytes(program, computation, op) for op in computation.instructions
        )
    return float(total)


def _bytes(program: Program, computation: Computation, op: Instruction) -> int:
    """Bytes read and written by one run of an instruction."""
    if op.opcode in _FREE or op.opcode.endswith(_LATER):
        return 0
    operands = computation.operands(op)
    if op.opcode == "fusion":
        return _fusion_bytes(program, operands, op)

    # Of these a part is read or written only.
    if op.opcode in _SLICES:
        return 2 * op.bytes + _sum(operands[1:])
    if op.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes + _sum(operands[2:])
    if op.opcode == "scatter":
        arrays = len(operands) // 2
        return 3 * _sum(operands[arrays + 1 :]) + operands[arrays].bytes

    if op.opcode.endswith("-start") and op.opcode != "all-reduce-start":
        return op.bytes  # its result holds what it takes too
    if op.opcode == "custom-call":
        said = _COST_BYTES.search(op.attributes)
        if said:
            return int(said[1])
        if len(op.shapes) > 1 and op.shapes[-1].dtype == "s8":
            # The last result is room that a library's matrix product works in.
            return sum(shape.bytes for shape in op.shapes[:-1]) + _sum(operands)
    return op.bytes + _sum(operands)


def _sum(instructions: Iterable[Instruction]) -> int:
    return sum(op.bytes for op in instructions)


def _fusion_bytes(program: Program, operands: Iterable[Instruction], op: Instruction) -> int:
    (name,) = op.called
    fused = program.computations[name]
    results = fused.operands(fused.root) if fused.root.opcode == "tuple" else (fused.root,)
    total = sum(_written(fused, result) for result in results)
    for number, operand in enumerate(operands):
        total += _read(program, fused, fused.parameters[number], operand.bytes)
    return total


def _read(program: Program, computation: Computation, value: Instruction, whole: int) -> int:
    """Bytes of a value read by a fusion: of slices, these."""
    total = 0
    for user in computation.users[value.name]:
        is_array = user.operands[0] == value.name and user.operands.count(value.name) == 1
        if is_array and user.opcode == "dynamic-update-slice":
            continue  # updated in place; what is written counts as the result

        if is_array and user.opcode in _SLICES:
            total += user.bytes
        elif user.opcode in _FUSED_VIEWS:
            total += _read(program, computation, user, whole)
        elif user.opcode == "fusion":
            (name,) = user.called
            within = program.computations[name]
            for number, operand in enumerate(user.operands):
                if operand == value.name:
                    total += _read(program, within, within.parameters[number], whole)
        else:
            return whole
    return min(total, whole)


def _written(computation: Computation, result: Instruction) -> int:
    """Bytes of a result written by a fusion: of updates, the slice."""
    while result.opcode in _FUSED_VIEWS:
        (result,) = computation.operands(result)
    if result.opcode == "dynamic-update-slice":
        return computation.by_name[result.operands[1]].bytes
    return result.bytes


def estimated_hbm_bytes(program: Program, runs: Mapping[str, int]) -> float:
    """Estimates bytes of memory traffic of a partitioned program, best after ``rewritten``."""
    return float(sum(runs[name] * _estimated_bytes(program.computations[name]) for name in runs))


def _estimated_bytes(computation: Computation) -> int:
    buffers = BufferTable(computation, {})
    total = 0
    reduced: dict[str, int] = {}
    for op in buffers.scheduled():
        if op.opcode in _INSIDE:
            continue

        # Reductions of one array are mostly done together, as in a softmax: it is read once.
        read = reduced if op.opcode == "reduce" else {}
        for number, name in enumerate(op.operands):
            if number > 0 or op.opcode not in UPDATES:
                limit = op.bytes if op.opcode in _SLICES and number == 0 else None
                _add_read(computation, buffers, computation.by_name[name], limit, read)
        if read is not reduced:
            total += sum(read.values())

        written = op
        if op.opcode in UPDATES:
            written = computation.by_name[op.operands[-1 if op.opcode == "scatter" else 1]]
        total += written.bytes
    return total + sum(reduced.values())


def _add_read(
    computation: Computation,
    buffers: BufferTable,
    op: Instruction,
    limit: int | None,  # of bytes: of an array that is sliced, those of the slice
    read: dict[str, int],
) -> None:
    """Adds the bytes read for a value, by buffer."""
    if op.opcode in VIEWS:
        _add_read(computation, buffers, computation.by_name[op.operands[0]], limit, read)
    elif op.opcode in ("parameter", "get-tuple-element") or buffers.fills_buffer(op):
        size = op.bytes if limit is None else min(limit, op.bytes)
        read[op.name] = max(size, read.get(op.name, 0))
    elif op.opcode not in ("constant", "tuple"):
        for number, name in enumerate(op.operands):
            least = limit
            if op.opcode in _SLICES and number == 0:
                least = op.bytes if limit is None else min(limit, op.bytes or limit)
            _add_read(computation, buffers, computation.by_name[name], least, read)
