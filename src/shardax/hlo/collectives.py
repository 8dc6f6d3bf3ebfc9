# SPDX-License-Identifier: Apache-2.0
"""The collectives of a program: their kinds, groups, mesh axes and bytes.

A *collective* is an instruction by which devices exchange data. *Wire bytes* are those that one
device sends, on a ring of its group, in one run of the program: of n devices and an array of B
bytes, ``2 (n-1)/n B`` for an all-reduce, ``(n-1)/n B`` for an all-gather (B of its result), a
reduce-scatter (B of its operand) and an all-to-all, and B for a permutation. An instruction in a
loop counts as often as the loop runs.

A collective is one instruction (``all-gather``), or two (``all-gather-start``, ``all-gather-done``)
between which others run, or a computation that an ``async-start`` runs. TPU compilers also put
collectives into fusions: an all-reduce of which each device keeps its part is a reduce-scatter
(array by array, if it sums several), and a collective that goes on during several fusions is
repeated in each of them, of which the one that calls ``AsyncCollectiveStart`` counts.

Slices of TPUs, joined by the network of the data centre, exchange data by sends through the host,
each with a type such as ``ALL_REDUCE``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardax.hlo import errors
from shardax.hlo.execution_counts import ExecutionCounts
from shardax.hlo.groups import Groups, groups_of, read_pairs, slice_groups_of
from shardax.hlo.program import VIEWS, Computation, Instruction, Program

KINDS = {  # of collectives, by opcode
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "broadcast",
}
_SLICE_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "RAGGED_ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}

# Sends between slices
_MEGASCALE = "_xla_megascale_"
_TYPE = re.compile(r'_xla_megascale_transfer_type="?(\w+)"?')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="?([^",}]+)"?')

_LOOKS_COLLECTIVE = re.compile(
    r"all[_-]?reduce|all[_-]?gather|reduce[_-]?scatter|all[_-]?to[_-]?all|collective|permute|nccl|"
    r"nvshmem|megascale|ppermute|broadcast_from|(?:^|[_-])(?:send|recv)(?:$|[_-])",
    re.IGNORECASE,
)
_STARTS_FUSED = "AsyncCollectiveStart"
_KNOWN_CALLS = frozenset({_STARTS_FUSED, "AsyncCollectiveDone"})
_FUSED = '"async_collective_fusion_config"'
_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?(\{\{.*?\}\}|\{\})")
_SAME_ELEMENTS = VIEWS | {"convert", "transpose"}
_IDLE = frozenset(
    {"bitcast", "tuple", "get-tuple-element", "constant", "parameter", "after-all", "copy"}
)


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``,
            ``"collective-permute"`` or ``"broadcast"``.
        name: The instruction's name in the program.
        dtype: Of what travels, as HLO names it (``"bf16"``); of several arrays the first's.
        payload: Bytes of the whole array of a group, of one run: of the result of an all-gather, of
            the operand of the others.
        wire_bytes: Bytes that one device sends in all runs.
        group_size: Devices of a group.
        axes: Mesh axes that the groups run along, in the mesh's order; empty if they are not those
            of any set of mesh axes.
        runs: How often it runs in one run of the program.
        runs_known: Whether that is known; it counts once for a loop of unknown length.
        asynchronous: Whether other work can go on meanwhile.
        crosses_slices: Whether its groups hold devices of several slices.
        op_name: The operation that it comes from, such as ``jit(step)/layers/dot_general``.
        source: The user's line that it comes from, ``"model.py:12"``, or "".
        parameters: Paths of the arguments that travel, as far as can be told.
        why: What the source line does that needs it, in a few words, or "".

    Example:
        >>> each = Collective("all-gather", "ag.1", "bf16", 64, 48.0, 4, ("model",), runs=1)
        >>> each.wire_bytes / each.payload
        0.75
    """

    kind: str
    name: str
    dtype: str
    payload: int
    wire_bytes: float
    group_size: int
    axes: tuple[str, ...]
    runs: int = 1
    runs_known: bool = True
    asynchronous: bool = False
    crosses_slices: bool = False
    op_name: str = ""
    source: str = ""
    parameters: tuple[str, ...] = ()
    why: str = ""


def rendezvous(op: Instruction) -> str:
    """Returns the common name of a send and its receive."""
    match = _RENDEZVOUS.search(op.attributes)
    return match[1] if match else ""


class LocatedCollective(NamedTuple):
    """A collective in its place."""

    computation: Computation
    instruction: Instruction  # that says what is sent
    collective: Collective
    numbers: tuple[int, ...]  # of its operands, those that travel


def find_collectives(
    program: Program,
    runs: ExecutionCounts,
    mesh: Mapping[str, int],
    slices: int = 1,
    device_ids: Sequence[int] = (),
) -> tuple[LocatedCollective, ...]:
    """Finds the collectives of a program, in the order of the text."""
    _check_reached(program)
    finder = _CollectiveFinder(program, runs, mesh, slices, device_ids)
    running = [
        computation for name, computation in program.computations.items() if name in runs.counts
    ]
    return tuple(collective for computation in running for collective in finder.find(computation))


def _check_reached(program: Program) -> None:
    """Raises if a computation with a collective is not known to run."""
    reached = program.reached([program.entry])
    for name, computation in program.computations.items():
        for op in computation.instructions if name not in reached else ():
            if op.opcode.removesuffix("-start") in {*KINDS, "send"}:
                raise errors.unreached_collective(op, name)


@dataclass
class _CollectiveFinder:
    program: Program
    runs: ExecutionCounts
    mesh: Mapping[str, int]
    slices: int
    device_ids: Sequence[int]

    def __post_init__(self) -> None:
        self._devices = math.prod(self.mesh.values())
        self._begun: set[str | None] = set()  # channels of collectives that a fusion begins
        # By a computation's name, what runs it as a fusion or meanwhile, and where that stands.
        self._callers: dict[str, tuple[Computation, Instruction]] = {}
        for computation in self.program.computations.values():
            for op in computation.instructions:
                if op.opcode in KINDS and _begins(computation, op):
                    self._begun.add(op.attribute("channel_id"))
                if op.opcode == "fusion" or op.opcode.endswith("-start"):
                    self._callers |= dict.fromkeys(op.called, (computation, op))

    def find(self, computation: Computation) -> Iterator[LocatedCollective]:
        for op in computation.instructions:
            base = op.opcode.removesuffix("-start")
            if base in KINDS:
                yield from self._grouped(computation, op, base)
            elif op.opcode == "send":
                yield from self._send(computation, op)
            else:
                _refuse_unknown(op)

    def _grouped(
        self, computation: Computation, op: Instruction, base: str
    ) -> Iterator[LocatedCollective]:
        """Yields a collective of groups; two, if it sums some arrays whole and others in parts."""
        # What runs the collective, from the inside out.
        starts = [(computation, op)]
        while starts[-1][0].name in self._callers:
            starts.append(self._callers[starts[-1][0].name])
        callers = [caller for _, caller in starts[1:]]

        # Of one that is repeated in several fusions the first counts.
        overlapped = any(
            start.opcode.endswith("-start") and _overlaps(where, start) for where, start in starts
        )
        if callers and callers[0].opcode == "fusion" and not overlapped:
            overlapped = _begins(computation, op)
            if not overlapped and _FUSED in op.attributes:
                if op.attribute("channel_id") not in self._begun:
                    raise errors.collective_without_start(op, _STARTS_FUSED)
                return

        # Offsets, sizes, and a place for the result are no data.
        groups = groups_of(op, self._devices)
        data = 1 if base.startswith("ragged-") or op.attribute("slice_sizes") else None
        scattered: list[int] = []
        whole: list[int] = []
        may_scatter = bool(callers) and base == "all-reduce"
        for number in range(len(op.operands[:data])):
            is_scattered = may_scatter and self._scatters(computation, op, number, groups)
            (scattered if is_scattered else whole).append(number)
        origin = callers[0] if callers else op
        for kind, numbers in (("reduce-scatter", scattered), (KINDS[base], whole)):
            if numbers:
                yield self._located(computation, op, origin, kind, groups, overlapped, numbers)

    def _scatters(
        self, computation: Computation, op: Instruction, number: int, groups: Groups
    ) -> bool:
        """Whether devices keep only their parts of a sum in a fusion."""
        path = (number,) if len(op.operands) > 1 else ()
        kept = list(self._kept(computation, op, path))
        cuts = {(cut.operands, cut.attributes): cut for cut in kept if cut is not None}
        size = sum(cut.shapes[0].size for cut in cuts.values())
        whole = computation.by_name[op.operands[number]].shapes[0].size
        return bool(kept) and None not in kept and size * groups.size <= whole

    def _kept(
        self, computation: Computation, op: Instruction, path: tuple[int, ...]
    ) -> Iterator[Instruction | None]:
        """Yields the slices a fusion takes; None for the whole value."""
        # ``path`` is where the value is in the result of the instruction, by numbers of elements.
        if op is computation.root:
            outside, caller = self._callers[computation.name]
            if caller.opcode == "fusion" and outside.name in self._callers:
                yield from self._kept(outside, caller, path)
            else:
                yield None

        for user in computation.users[op.name]:
            numbers = [number for number, name in enumerate(user.operands) if name == op.name]
            if user.opcode == "get-tuple-element":
                if path[:1] == (user.element,):
                    yield from self._kept(computation, user, path[1:])
            elif user.opcode == "tuple":
                for number in numbers:
                    yield from self._kept(computation, user, (number, *path))
            elif user.opcode == "fusion":
                for name in user.called:
                    within = self.program.computations[name]
                    for number in numbers:
                        yield from self._kept(within, within.parameters[number], path)
            elif user.opcode in _SAME_ELEMENTS or user.opcode.endswith("-done"):
                yield from self._kept(computation, user, path)
            else:
                is_cut = user.opcode in ("dynamic-slice", "slice") and numbers[0] == 0
                yield user if is_cut else None

    def _send(self, computation: Computation, op: Instruction) -> Iterator[LocatedCollective]:
        if _MEGASCALE in op.attributes:
            groups = slice_groups_of(op, self._devices, self.slices, self.device_ids)
            match = _TYPE.search(op.attributes)
            name = match[1] if match else "nothing known"
            if name not in _SLICE_KINDS:
                raise errors.unknown_slice_kind(op, name, _SLICE_KINDS)
            kind, overlapped = _SLICE_KINDS[name], _overlaps(computation, op, rendezvous(op))

        # The host is no device.
        elif op.attribute("is_host_transfer") == "true":
            return
        else:
            pairs = _PAIRS.search(op.attributes)
            if pairs is None:
                raise errors.unknown_collective(op, "it sends to devices that it does not name")
            groups = read_pairs(pairs[1], op, self._devices)
            kind, overlapped = "collective-permute", _overlaps(computation, op)
        yield self._located(computation, op, op, kind, groups, overlapped, [0])

    def _located(
        self,
        computation: Computation,
        op: Instruction,
        origin: Instruction,
        kind: str,
        groups: Groups,
        overlapped: bool,
        numbers: Sequence[int],
    ) -> LocatedCollective:
        names = [op.operands[number] for number in numbers]
        arrays = [shape for name in names for shape in computation.by_name[name].shapes]
        payload = sum(shape.bytes for shape in arrays)
        if kind == "all-gather":
            payload *= groups.size

        runs = self.runs.counts[computation.name]
        crosses = groups.crosses(max(1, self._devices // self.slices))
        op_name = op.op_name or origin.op_name
        collective = Collective(
            kind=kind,
            name=op.name,
            dtype=arrays[0].dtype,
            payload=payload,
            wire_bytes=runs * wire_bytes(kind, payload, groups.size),
            group_size=groups.size,
            axes=groups.axes(self.mesh),
            runs=runs,
            runs_known=computation.name not in self.runs.unknown,
            asynchronous=overlapped,
            crosses_slices=self.slices > 1 and (crosses or _MEGASCALE in op.attributes),
            op_name=op_name,
            # One that was merged has lost its line; others of the same operation have it.
            source=op.source or origin.source or self.program.sources.get(op_name, ""),
        )
        return LocatedCollective(computation, op, collective, tuple(numbers))


def wire_bytes(kind: str, payload: int, size: int) -> float:
    """Returns the bytes sent by one device in one run."""
    if size < 2:
        return 0.0
    if kind in ("collective-permute", "broadcast"):
        return float(payload)
    times = 2 if kind == "all-reduce" else 1
    return times * (size - 1) / size * payload


def _overlaps(computation: Computation, start: Instruction, meeting: str = "") -> bool:
    """Whether other work runs between start and end of a collective."""
    if '"is_sync":true' in start.attributes:
        return False

    # Of a send through the host the end is that of the ``recv`` with the same rendezvous.
    begun = {start.name}
    if meeting:
        receivers = [receiver for receiver in computation.instructions if receiver.opcode == "recv"]
        begun = {receiver.name for receiver in receivers if rendezvous(receiver) == meeting}

    for op in computation.instructions[computation.instructions.index(start) + 1 :]:
        if op.opcode.endswith("-done") and begun & set(op.operands):
            return False
        base = op.opcode.removesuffix("-start").removesuffix("-done")
        if base not in _IDLE and base not in KINDS and base not in ("send", "recv", "async"):
            return True
    return False


def _begins(computation: Computation, op: Instruction) -> bool:
    """Whether a fusion begins a collective continued in others."""
    return any(
        user.opcode == "custom-call" and user.call_target == _STARTS_FUSED
        for user in computation.users[op.name]
    )


def _refuse_unknown(op: Instruction) -> None:
    """Raises if an instruction looks like an unknown collective."""
    if op.opcode.endswith("-done") or op.opcode in ("recv", "partition-id", "replica-id"):
        return
    if op.opcode == "custom-call":
        target = op.call_target
        if target not in _KNOWN_CALLS and _LOOKS_COLLECTIVE.search(target):
            raise errors.unknown_collective(op, f"it calls {target!r}")
    elif _LOOKS_COLLECTIVE.search(op.opcode):
        raise errors.unknown_collective(op, "its opcode is new")
