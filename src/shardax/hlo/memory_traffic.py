# SPDX-License-Identifier: Apache-2.0
"""Bytes that a device reads from its memory and writes to it.

What an instruction takes is read and what it gives is written, once each, for every run; inside a
*fusion* nothing is written but its result. Of an array that is only sliced, or of which only a
slice is updated, the slice counts. It is an *estimate*: caches, which keep what is read again, and
what compilers keep in faster memory are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardax.hlo.program import Computation, Instruction, Program

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
_VIEWS = frozenset({"bitcast", "reshape", "copy"})
_INSIDE = ("while", "call", "conditional")


def hbm_bytes(program: Program, runs: Mapping[str, int]) -> float:
    """Counts bytes read and written.

    Args:
        program: A compiled program.
        runs: How often each computation runs, by name (``runs_of(...).counts``).

    Returns:
        Bytes of one device in one run of the program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax.hlo.program import parse
        >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((2, 3)), jnp.ones((3, 4))).compile()
        >>> program = parse(compiled.as_text())
        >>> hbm_bytes(program, {program.entry: 1})  # 6 and 12 elements are read, 8 written
        104.0
    """
    inner = _inner(program)
    return float(
        sum(
            runs.get(name, 0) * sum(_bytes(program, inside, each) for each in inside.instructions)
            for name, inside in program.computations.items()
            if name not in inner
        )
    )


def _inner(program: Program) -> set[str]:
    """Computations that run within an instruction, without reading or writing memory themselves."""
    return {
        name
        for inside in program.computations.values()
        for each in inside.instructions
        if each.opcode not in _INSIDE
        for name in each.computations("calls", "to_apply", "called_computations")
    }


def _bytes(program: Program, inside: Computation, each: Instruction) -> int:
    """Bytes that one run of an instruction reads and writes."""
    if each.opcode in _FREE or each.opcode.endswith(_LATER):
        return 0
    operands = inside.operands(each)
    if each.opcode == "fusion":
        return _of_fusion(program, each, operands)
    return _touched(each, operands)


def _touched(each: Instruction, operands: tuple[Instruction, ...]) -> int:
    if each.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * each.bytes + _sum(operands[1:])
    if each.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes + _sum(operands[2:])
    if each.opcode == "scatter":
        arrays = len(operands) // 2
        return 3 * _sum(operands[arrays + 1 :]) + operands[arrays].bytes
    if each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
        return each.bytes  # its result holds what it takes too
    return _result_bytes(each) + _sum(operands)


def _result_bytes(each: Instruction) -> int:
    """Bytes of results, without the room that a library's matrix product works in."""
    if each.opcode == "custom-call" and len(each.shapes) > 1 and each.shapes[-1].dtype == "s8":
        return sum(shape.bytes for shape in each.shapes[:-1])
    return each.bytes


def _sum(instructions: Iterable[Instruction]) -> int:
    return sum(each.bytes for each in instructions)


def _of_fusion(program: Program, each: Instruction, operands: tuple[Instruction, ...]) -> int:
    (name,) = each.computations("calls")
    inside = program.computations[name]
    read = sum(
        _read(program, inside, inside.parameters[number], operand.bytes)
        for number, operand in enumerate(operands)
    )
    root = inside.root
    results = inside.operands(root) if root.opcode == "tuple" else (root,)
    return read + sum(_written(inside, result) for result in results)


def _read(program: Program, inside: Computation, value: Instruction, whole: int) -> int:
    """Bytes of a value that a fused computation reads: the slices, if it only takes slices."""
    total = 0
    for user in inside.instructions:
        if user.opcode in ("parameter", "constant") or value.name not in user.operands:
            continue
        first = user.operands[0] == value.name and user.operands.count(value.name) == 1
        if first and user.opcode == "dynamic-update-slice":
            continue  # updated in place; what is written counts as the result
        if first and user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.bytes
        elif user.opcode in _VIEWS:
            total += _read(program, inside, user, whole)
        elif user.opcode == "fusion":
            (name,) = user.computations("calls")
            called = program.computations[name]
            total += sum(
                _read(program, called, called.parameters[number], whole)
                for number, operand in enumerate(user.operands)
                if operand == value.name
            )
        else:
            return whole
    return min(total, whole)


def _written(inside: Computation, result: Instruction) -> int:
    """Bytes that a fused computation writes of a result: the slice, of an update in place."""
    while result.opcode in _VIEWS:
        (result,) = inside.operands(result)
    if result.opcode == "dynamic-update-slice":
        return inside.by_name[result.operands[1]].bytes
    return result.bytes
