# SPDX-License-Identifier: Apache-2.0
"""Bytes that a device would read and write for a partitioned program, were it compiled."""

from __future__ import annotations

from collections.abc import Mapping

from shardax.hlo.live_buffers import Buffers
from shardax.hlo.program import Computation, Instruction, Program

_NAMES = frozenset({"parameter", "tuple", "get-tuple-element", "while", "call", "conditional"})
_VIEWS = frozenset({"bitcast", "copy", "opt-barrier", "optimization-barrier", "reshape"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})


def estimated_hbm_bytes(program: Program, runs: Mapping[str, int]) -> float:
    """Estimates the bytes read and written by a program that is not compiled yet.

    What is computed on the way to something else is neither written nor read (see
    ``shardax.hlo.live_buffers``).

    Args:
        program: A partitioned program, best after ``rewritten``.
        runs: How often each computation runs, by name.

    Returns:
        Bytes of one device in one run.
    """
    return float(sum(runs[name] * _of_computation(program.computations[name]) for name in runs))


def _of_computation(inside: Computation) -> int:
    buffers = Buffers(inside, {}, None)
    total = 0
    reduced: dict[str, int] = {}
    for each in inside.instructions:
        if each.opcode in _NAMES or not buffers.is_done(each):
            continue
        # Reductions of one array are mostly done together, as in a softmax: it is read once.
        read = reduced if each.opcode == "reduce" else {}
        for place, name in enumerate(each.operands if each.opcode != "constant" else ()):
            if place > 0 or each.opcode not in _UPDATES:
                _read(inside, buffers, inside.by_name[name], _limit(each, place), read)
        written = each
        if each.opcode in _UPDATES:
            written = inside.by_name[each.operands[-1 if each.opcode == "scatter" else 1]]
        total += written.bytes + (sum(read.values()) if read is not reduced else 0)
    return total + sum(reduced.values())


def _limit(user: Instruction, place: int) -> int | None:
    """The most bytes that a user reads of an operand: of an array that it slices, the slice."""
    return user.bytes if user.opcode in _SLICES and place == 0 else None


def _read(
    inside: Computation,
    buffers: Buffers,
    each: Instruction,
    limit: int | None,
    read: dict[str, int],
) -> None:
    """Adds what is read for a value, by the name of what is in memory."""
    if each.opcode in _VIEWS:
        _read(inside, buffers, inside.by_name[each.operands[0]], limit, read)
    elif each.opcode in ("parameter", "get-tuple-element") or buffers.is_done(each):
        size = each.bytes if limit is None else min(limit, each.bytes)
        read[each.name] = max(size, read.get(each.name, 0))
    elif each.opcode not in ("constant", "tuple"):
        for place, name in enumerate(each.operands):
            own = _limit(each, place)
            least = own if limit is None else min(limit, own or limit)
            _read(inside, buffers, inside.by_name[name], least, read)
