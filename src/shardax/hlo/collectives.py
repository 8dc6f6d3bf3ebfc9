# SPDX-License-Identifier: Apache-2.0
"""Finding the collectives of a program and what they send.

An instruction of a collective is plain (``all-gather``), or *begun and ended* by two
(``all-gather-start``, ``all-gather-done``), between which other instructions run; or it stands in a
computation of its own that an ``async-start`` runs. TPU compilers also put collectives into
fusions: an all-reduce of which each device keeps its part is a reduce-scatter, and a collective
that goes on during several fusions is repeated in each of them, of which the one that calls
``AsyncCollectiveStart`` counts. Between slices TPU programs send and receive through the host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardax.core.errors import HloReadError
from shardax.hlo.facts import Collective
from shardax.hlo.groups import Groups, groups_of
from shardax.hlo.program import ArrayShape, Computation, Instruction, Program
from shardax.hlo.runs import Runs, branches, called
from shardax.hlo.slices import is_between_slices, rendezvous, slice_groups, slice_kind

KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "broadcast",
}
"""Kinds of collectives by opcode."""

_LOOKS_COLLECTIVE = re.compile(
    r"all[_-]?reduce|all[_-]?gather|reduce[_-]?scatter|all[_-]?to[_-]?all|collective|permute|nccl|"
    r"nvshmem|megascale|ppermute|broadcast_from|(?:^|[_-])(?:send|recv)(?:$|[_-])",
    re.IGNORECASE,
)
_STARTS_FUSED = "AsyncCollectiveStart"
_KNOWN_CALLS = frozenset({_STARTS_FUSED, "AsyncCollectiveDone"})
_FUSED = '"async_collective_fusion_config"'
_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?(\{\{.*?\}\}|\{\})")
_IDLE = frozenset(
    {"bitcast", "tuple", "get-tuple-element", "constant", "parameter", "after-all", "copy"}
)


@dataclass(frozen=True)
class Found:
    """A collective in its place.

    Attributes:
        inside: The computation that holds the instruction.
        instruction: The instruction that says what is sent.
        collective: What was read of it.
    """

    inside: Computation
    instruction: Instruction
    collective: Collective


def find_collectives(
    program: Program,
    runs: Runs,
    mesh: Mapping[str, int],
    slices: int = 1,
    device_ids: Sequence[int] = (),
) -> tuple[Found, ...]:
    """Finds the collectives that a program runs.

    Args:
        program: The program.
        runs: How often its computations run.
        mesh: Sizes of the mesh axes, in order.
        slices: Of how many slices the mesh is; each has as many devices, consecutive in the mesh.
        device_ids: Ids of the mesh's devices, in its order, by which some programs name them.

    Returns:
        The collectives, in the order of the text.

    Raises:
        HloReadError: If something that looks like a collective is not known.
    """
    _check_runs(program)
    finder = _Finder(program, runs, mesh, slices, device_ids)
    return tuple(
        found
        for name, inside in program.computations.items()
        if name in runs.counts
        for found in finder.find(inside)
    )


class _Finder:
    def __init__(
        self,
        program: Program,
        runs: Runs,
        mesh: Mapping[str, int],
        slices: int,
        device_ids: Sequence[int],
    ) -> None:
        self._runs = runs
        self._mesh = dict(mesh)
        self._devices = math.prod(self._mesh.values())
        self._slices = slices
        self._ids = device_ids
        self._callers = _callers(program)
        self._begun = _begun_channels(program)
        self._lines = program.sources  # for a collective that was merged and lost its line

    def find(self, inside: Computation) -> Iterator[Found]:
        for each in inside.instructions:
            base = each.opcode.removesuffix("-start")
            if base in KINDS:
                yield from self._plain(inside, each, base)
            elif each.opcode == "send":
                yield from self._send(inside, each)
            else:
                _refuse_unknown(each)

    def _plain(self, inside: Computation, each: Instruction, base: str) -> Iterator[Found]:
        """A collective with groups, in a fusion or not."""
        caller = self._callers.get(inside.name)
        kind, overlapped = KINDS[base], each.opcode.endswith("-start") and overlaps(inside, each)
        if caller is not None and caller[1].opcode.endswith("-start"):
            overlapped = overlaps(*caller)
        elif caller is not None and caller[1].opcode == "fusion":
            begins = _begins(inside, each)
            if not begins and _FUSED in each.attributes:
                self._expect_begun(each)
                return
            overlapped = begins
            if kind == "all-reduce" and _keeps_part(inside, each):
                kind = "reduce-scatter"
        groups = groups_of(each, self._devices)
        origin = caller[1] if caller else each
        yield self._found(inside, each, origin, kind, groups, overlapped)

    def _expect_begun(self, each: Instruction) -> None:
        if each.attribute("channel_id") not in self._begun:
            raise HloReadError(
                f"{each.opcode} {each.name!r} goes on with a collective of a fusion of which the "
                f"start, a call of {_STARTS_FUSED}, is not in the program; it would not be counted."
            )

    def _send(self, inside: Computation, each: Instruction) -> Iterator[Found]:
        if is_between_slices(each):
            groups = slice_groups(each, self._devices, self._slices, self._ids)
            kind = slice_kind(each)
            yield self._found(
                inside, each, each, kind, groups, overlaps(inside, each, rendezvous(each))
            )
        elif each.attribute("is_host_transfer") != "true":
            pairs = _PAIRS.search(each.attributes)
            if pairs is None:
                raise _unknown(each, "it sends to devices that it does not name")
            named = Instruction(each.name, each.opcode, (), (), f"source_target_pairs={pairs[1]}")
            groups = groups_of(named, self._devices)
            yield self._found(
                inside, each, each, "collective-permute", groups, overlaps(inside, each)
            )

    def _found(
        self,
        inside: Computation,
        each: Instruction,
        origin: Instruction,
        kind: str,
        groups: Groups,
        overlapped: bool,
    ) -> Found:
        arrays = _sent(inside, each)
        payload = sum(shape.bytes for shape in arrays)
        if kind == "all-gather":
            payload *= groups.size
        runs = self._runs.counts[inside.name]
        block = max(1, self._devices // self._slices)
        between = is_between_slices(each)
        op_name = each.op_name or origin.op_name
        return Found(
            inside,
            each,
            Collective(
                kind=kind,
                name=each.name,
                dtype=arrays[0].dtype,
                payload=payload,
                wire_bytes=runs * wire_bytes(kind, payload, groups.size),
                group_size=groups.size,
                axes=groups.axes(self._mesh),
                runs=runs,
                runs_known=inside.name not in self._runs.unknown,
                asynchronous=overlapped,
                crosses_slices=self._slices > 1 and (between or groups.crosses(block)),
                op_name=op_name,
                source=each.source or origin.source or self._lines.get(op_name, ""),
            ),
        )


def wire_bytes(kind: str, payload: int, size: int) -> float:
    """Returns the bytes that one device sends in one run, on a ring.

    Args:
        kind: Of the collective.
        payload: Bytes of the whole array of a group.
        size: Devices of a group.
    """
    if size < 2:
        return 0.0
    if kind in ("collective-permute", "broadcast"):
        return float(payload)
    times = 2 if kind == "all-reduce" else 1
    return times * (size - 1) / size * payload


def overlaps(inside: Computation, start: Instruction, meeting: str = "") -> bool:
    """Whether other work stands between the start of a collective and its end.

    Args:
        inside: The computation that holds it.
        start: The instruction that begins it.
        meeting: Of a send through the host, the name by which a ``recv`` belongs to it; then the
            end is that of the ``recv``.
    """
    if '"is_sync":true' in start.attributes:
        return False
    place = next(i for i, each in enumerate(inside.instructions) if each.name == start.name)
    later = inside.instructions[place + 1 :]
    begun = {start.name}
    if meeting:
        begun = {each.name for each in inside.instructions if _receives(each, meeting)}
    for each in later:
        if each.opcode.endswith("-done") and begun & set(each.operands):
            return False
        base = each.opcode.removesuffix("-start").removesuffix("-done")
        if base not in _IDLE and base not in KINDS and base not in ("send", "recv", "async"):
            return True
    return False


def _receives(each: Instruction, meeting: str) -> bool:
    return each.opcode == "recv" and rendezvous(each) == meeting


def _sent(inside: Computation, each: Instruction) -> list[ArrayShape]:
    """Types of the arrays that a collective takes."""
    # Others of these hold offsets and sizes, a place for the result, or the order of sends.
    first_only = each.opcode == "send" or each.opcode.startswith("ragged-")
    count = 1 if first_only or each.attribute("slice_sizes") else None
    return [shape for name in each.operands[:count] for shape in inside.by_name[name].shapes]


def _check_runs(program: Program) -> None:
    """Raises if nothing that is known runs a computation that holds a collective."""
    reached = {program.entry}
    pending = [program.entry]
    while pending:
        for each in program.computations[pending.pop()].instructions:
            new = {*called(each), *branches(each)} - reached
            reached |= new
            pending.extend(new)
    for name, inside in program.computations.items():
        for each in inside.instructions:
            if name not in reached and each.opcode.removesuffix("-start") in {*KINDS, "send"}:
                raise HloReadError(
                    f"{each.opcode} {each.name!r} is in computation {name!r}, which nothing known "
                    "runs, so it would not be counted. Please report it with the versions of jax "
                    "and of the compiler."
                )


def _callers(program: Program) -> dict[str, tuple[Computation, Instruction]]:
    """By a computation's name, what runs it as a fusion or meanwhile, and where that stands."""
    return {
        name: (inside, each)
        for inside in program.computations.values()
        for each in inside.instructions
        if each.opcode == "fusion" or each.opcode.endswith("-start")
        for name in called(each)
    }


def _begun_channels(program: Program) -> set[str | None]:
    """Channels of collectives that a fusion begins."""
    return {
        each.attribute("channel_id")
        for inside in program.computations.values()
        for each in inside.instructions
        if each.opcode in KINDS and _begins(inside, each)
    }


def _begins(inside: Computation, each: Instruction) -> bool:
    return any(
        user.opcode == "custom-call"
        and each.name in user.operands
        and _target(user) == _STARTS_FUSED
        for user in inside.instructions
    )


def _keeps_part(inside: Computation, each: Instruction) -> bool:
    """Whether what follows a collective takes a part of its result only."""
    users = [user for user in inside.instructions if each.name in user.operands]
    return bool(users) and all(user.opcode in ("dynamic-slice", "slice") for user in users)


def _target(each: Instruction) -> str:
    return (each.attribute("custom_call_target") or "").strip('"')


def _refuse_unknown(each: Instruction) -> None:
    """Raises if an instruction looks like a collective; those that are known are not passed."""
    if each.opcode.endswith("-done") or each.opcode in ("recv", "partition-id", "replica-id"):
        return
    if each.opcode == "custom-call":
        target = _target(each)
        if target not in _KNOWN_CALLS and _LOOKS_COLLECTIVE.search(target):
            raise _unknown(each, f"it calls {target!r}")
    elif _LOOKS_COLLECTIVE.search(each.opcode):
        raise _unknown(each, "its opcode is new")


def _unknown(each: Instruction, why: str) -> HloReadError:
    return HloReadError(
        f"{each.opcode} {each.name!r} looks like a collective that is not known: {why}. Its bytes "
        "would be counted as none, so the program is not read. Please report it with the versions "
        "of jax and of the compiler."
    )
