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

A *group* is the numbers of devices that exchange data; a device's number is its position in the
mesh, row-major. XLA prints groups as lists, as the numbers from 0 on reshaped and transposed
(*iota*), as axes of a mesh of its own (which is not the user's), and, of a permutation, as pairs of
a source and a target.

A *slice* is TPUs with links of their own; several are joined by the network of the data centre, to
which programs send through the host. Such a send has a type and a *target*: slices, numbered from
1, and the numbers of devices in each (``{1,2}x{0:3}``), of which those with the same number
exchange data; or groups of device ids (``{{100000,200000}}``), or pairs (``{{100000->200000}}``).
An id is the slice's number times 100,000 and the device's in it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardax.hlo.execution_counts import ExecutionCounts, branches, called
from shardax.hlo.program import Computation, HloReadError, Instruction, Program

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

# Groups of devices
_LISTS = re.compile(r"\{(?:\{[\d, ]*\}(?:, *)?)*\}")
_LIST = re.compile(r"\{([\d, ]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, *device_ids=\((.*)\))? *\{([^}]*)\}")
_AXIS = re.compile(r"'?([^'=:,]+)'?=(\d+)")
_REFERENCE = re.compile(r"'?([^':,(]+)'?(?::\((\d+)\)(\d+))?")
# Sends between slices
_MEGASCALE = "_xla_megascale_"
_TYPE = re.compile(r'_xla_megascale_transfer_type="?(\w+)"?')
_TARGET = re.compile(r'_xla_megascale_target=(?:"([^"]*)"|(\{\{.*?\}\}))')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="?([^",}]+)"?')
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")
_SLICE = 100_000

_LOOKS_COLLECTIVE = re.compile(
    r"all[_-]?reduce|all[_-]?gather|reduce[_-]?scatter|all[_-]?to[_-]?all|collective|permute|nccl|"
    r"nvshmem|megascale|ppermute|broadcast_from|(?:^|[_-])(?:send|recv)(?:$|[_-])",
    re.IGNORECASE,
)
_STARTS_FUSED = "AsyncCollectiveStart"
_KNOWN_CALLS = frozenset({_STARTS_FUSED, "AsyncCollectiveDone"})
_FUSED = '"async_collective_fusion_config"'
_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?(\{\{.*?\}\}|\{\})")
_VIEWS = frozenset(
    {"bitcast", "convert", "copy", "reshape", "transpose", "opt-barrier", "optimization-barrier"}
)
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


Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Groups:
    """Groups of one collective."""

    # numbers of the devices, a row for each group; of groups of different sizes, and of
    # permutations, -1 fills the row
    devices: Array
    pairs: Array | None = None  # of a permutation its pairs of a source and a target, else None

    @property
    def size(self) -> int:
        """Number of devices of the largest group."""
        return int((self.devices >= 0).sum(axis=1).max(initial=0))

    def lists(self) -> list[list[int]]:
        """Returns the groups as lists of device numbers."""
        return [[device for device in group if device >= 0] for group in self.devices.tolist()]

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes of groups, in order."""
        places = np.unravel_index(self._links(), tuple(mesh.values()))
        pairs = zip(mesh, places, strict=True)
        return tuple(name for name, place in pairs if bool((place != place[:, :1]).any()))

    def crosses(self, block: int) -> bool:
        """Whether a group holds devices of several blocks."""
        blocks = self._links() // block
        return bool((blocks != blocks[:, :1]).any())

    def _links(self) -> Array:
        """Rows of devices in exchange, filled up with their first."""
        links = self.devices if self.pairs is None else self.pairs
        return np.where(links < 0, links[:, :1], links)


def groups_of(instruction: Instruction, devices: int) -> Groups:
    """Reads the groups of a collective; by default of all devices."""
    pairs = instruction.attribute("source_target_pairs")
    if pairs is not None:
        return _permutation(_lists(pairs, instruction), instruction, devices)
    text = instruction.attribute("replica_groups")
    start = instruction.attributes.find("replica_groups=mesh[")
    if start >= 0:  # this form holds a comma outside brackets
        start += len("replica_groups=")
        match = _MESH.match(instruction.attributes, start)
        text = match[0] if match else instruction.attributes[start:]
    if text is None or text in ("{}", "{{}}"):
        return Groups(np.arange(devices, dtype=np.int64)[None])
    array = _iota(text)
    if array is None:
        array = _mesh(text)
    if array is None:
        array = _rows(_lists(text, instruction))
    return Groups(_checked(array, instruction, devices))


def _lists(text: str, instruction: Instruction) -> list[list[int]]:
    if not _LISTS.fullmatch(text):
        raise _unread(instruction, text)
    return [_numbers(inner) for inner in _LIST.findall(text[1:-1])]


def _iota(text: str) -> Array | None:
    match = _IOTA.fullmatch(text)
    if match is None:
        return None
    shape, reshaped = _numbers(match[1]), _numbers(match[2])
    if math.prod(shape) != math.prod(reshaped):
        return None
    numbers = np.arange(math.prod(reshaped), dtype=np.int64).reshape(reshaped)
    if match[3] is not None:
        order = _numbers(match[3])
        if sorted(order) != list(range(len(reshaped))):
            return None
        numbers = numbers.transpose(order)
    return numbers.reshape(shape[0], -1) if len(shape) == 2 else numbers.reshape(1, -1)


def _mesh(text: str) -> Array | None:
    """Groups along axes, or parts of axes, of a printed mesh."""
    match = _MESH.fullmatch(text)
    if match is None:
        return None
    sizes = {name: int(size) for name, size in _AXIS.findall(match[1])}
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    references: list[tuple[str, int, int]] = []  # axis, and its part between two cuts
    for text_name, divisor_text, size in _REFERENCE.findall(match[3]):
        name = text_name.strip()
        start = int(divisor_text or 1)
        end = start * (int(size) if size else sizes.get(name, 0))
        if not name:
            continue
        if name not in sizes or not end or sizes[name] % end:
            return None
        cuts[name] |= {start, end}
        references.append((name, start, end))
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name in sizes:  # each axis becomes the parts between its cuts
        for inner, outer in itertools.pairwise(sorted(cuts[name])):
            if outer % inner:
                return None
            place[name, inner] = len(shape)
            shape.append(outer // inner)
    numbers = _mesh_devices(match[2], math.prod(sizes.values()))
    if numbers is None:
        return None
    grouped = [
        index
        for name, start, end in references
        for (axis_name, cut), index in sorted(place.items())
        if axis_name == name and start <= cut < end
    ]
    ungrouped = [index for index in range(len(shape)) if index not in grouped]
    size = math.prod(shape[index] for index in grouped)
    return numbers.reshape(shape).transpose([*ungrouped, *grouped]).reshape(-1, size)


def _mesh_devices(text: str | None, count: int) -> Array | None:
    """Devices of the mesh in a form of XLA's, in order."""
    if text is None:
        return np.arange(count, dtype=np.int64)
    match = _IOTA.fullmatch(text)
    if match is None and re.fullmatch(r"\[[\d,]+\](?:T\([\d,]+\))?", text):
        text = f"[{count}]<={text}"
    iota = _iota(text)
    numbers = iota.reshape(-1) if iota is not None else np.array(_numbers(text), np.int64)
    return numbers if sorted(numbers.tolist()) == list(range(count)) else None


def _permutation(lists: list[list[int]], instruction: Instruction, devices: int) -> Groups:
    if any(len(pair) != 2 for pair in lists):
        raise _unread(instruction, str(lists))
    pairs = _checked(np.array(lists, np.int64).reshape(-1, 2), instruction, devices)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    group: dict[int, list[int]] = {}  # devices that a chain of pairs connects
    for source, target in pairs.tolist():
        left, right = group.setdefault(source, [source]), group.setdefault(target, [target])
        small, large = sorted((left, right), key=len)
        if small is not large:
            large.extend(small)
            group.update(dict.fromkeys(small, large))
    linked = {id(ids): sorted(ids) for ids in group.values()}
    return Groups(_rows(list(linked.values())), pairs)


def _rows(lists: Sequence[Sequence[int]]) -> Array:
    width = max(map(len, lists), default=0)
    rows = [[*row, *[-1] * (width - len(row))] for row in lists]
    return np.array(rows, np.int64).reshape(len(rows), width)


def _checked(array: Array, instruction: Instruction, devices: int) -> Array:
    if array.size and int(array.max()) >= devices:
        raise HloReadError(
            f"{instruction.opcode} {instruction.name!r} connects device {int(array.max())}, but "
            f"the program runs on {devices} devices (numbers 0 to {devices - 1}). Pass the mesh "
            "that it was compiled for."
        )
    return array


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _unread(instruction: Instruction, text: str) -> HloReadError:
    excerpt = text if len(text) <= 100 else f"{text[:97]}..."
    return HloReadError(
        f"The groups of {instruction.opcode} {instruction.name!r} cannot be read: {excerpt!r}. The "
        "forms known are {{0,1},{2,3}}, [4,2]<=[2,4]T(1,0) and mesh['a'=2,'b'=4] {'a'}; a newer "
        "XLA may print another."
    )


def rendezvous(op: Instruction) -> str:
    """Returns the common name of a send and its receive."""
    match = _RENDEZVOUS.search(op.attributes)
    return match[1] if match else ""


def _slice_groups(
    op: Instruction, devices: int, slices: int, device_ids: Sequence[int] = ()
) -> Groups:
    """Reads the groups of a send between slices, as mesh positions."""
    # Without ids, a device's number in its slice is its position in the slice's part of the mesh.
    match = _TARGET.search(op.attributes)
    text = (match[1] or match[2]) if match else ""
    block = devices // slices
    products = _PRODUCT.findall(text)
    if products and _PRODUCT.sub("", text).strip(", ") == "":
        ids = [
            [number * _SLICE + device for number in _range(numbers)]
            for numbers, members in products
            for device in _range(members)
        ]
    else:
        ids = [_numbers(group) for group in re.findall(r"\{([\d,\->]+)\}", text)]
    positions = {device_id: position for position, device_id in enumerate(device_ids)} or {
        (number + 1) * _SLICE + device: number * block + device
        for number in range(slices)
        for device in range(block)
    }
    groups = [[positions.get(number, -1) for number in group] for group in ids]
    if not groups or any(position < 0 for group in groups for position in group):
        raise HloReadError(
            f"The target of {op.opcode} {op.name!r}, which exchanges data between slices, "
            f"cannot be read: {text!r}. The mesh has {slices} slices of {block} devices."
        )
    if "->" in text:
        return _permutation(groups, op, devices)
    return Groups(_checked(_rows(groups), op, devices))


def _range(text: str) -> list[int]:
    """Numbers of a list with ranges, ``0:3`` for 0 to 3."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


class LocatedCollective(NamedTuple):
    """A collective in its place."""

    inside: Computation
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
    running = [inside for name, inside in program.computations.items() if name in runs.counts]
    return tuple(collective for inside in running for collective in finder.find(inside))


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
        for inside in self.program.computations.values():
            for op in inside.instructions:
                if op.opcode in KINDS and _begins(inside, op):
                    self._begun.add(op.attribute("channel_id"))
                if op.opcode == "fusion" or op.opcode.endswith("-start"):
                    self._callers |= dict.fromkeys(called(op), (inside, op))

    def find(self, inside: Computation) -> Iterator[LocatedCollective]:
        for op in inside.instructions:
            base = op.opcode.removesuffix("-start")
            if base in KINDS:
                yield from self._grouped(inside, op, base)
            elif op.opcode == "send":
                yield from self._send(inside, op)
            else:
                _refuse_unknown(op)

    def _grouped(
        self, inside: Computation, op: Instruction, base: str
    ) -> Iterator[LocatedCollective]:
        callers: list[tuple[Computation, Instruction]] = []
        computation = inside
        while computation.name in self._callers:
            callers.append(self._callers[computation.name])
            computation = callers[-1][0]
        starts = [(inside, op), *callers]
        overlapped = any(
            origin.opcode.endswith("-start") and _overlaps(where, origin)
            for where, origin in starts
        )
        if callers and callers[0][1].opcode == "fusion" and not overlapped:
            overlapped = _begins(inside, op)
            if not overlapped and _FUSED in op.attributes:
                if op.attribute("channel_id") not in self._begun:
                    raise HloReadError(
                        f"{op.opcode} {op.name!r} goes on with a collective of a fusion of "
                        f"which the start, a call of {_STARTS_FUSED}, is not in the program; "
                        "it would not be counted."
                    )
                return
        groups = groups_of(op, self._devices)
        # Offsets, sizes, and a place for the result are no data.
        data = 1 if base.startswith("ragged-") or op.attribute("slice_sizes") else None
        numbers = range(len(op.operands[:data]))
        scattered = [
            number
            for number in numbers
            if callers and base == "all-reduce" and self._scatters(inside, op, number, groups)
        ]
        whole = [number for number in numbers if number not in scattered]
        origin = callers[0][1] if callers else op
        for kind, operands in (("reduce-scatter", scattered), (KINDS[base], whole)):
            if operands:
                yield self._located(inside, op, origin, kind, groups, overlapped, operands)

    def _scatters(self, inside: Computation, op: Instruction, number: int, groups: Groups) -> bool:
        """Whether devices keep only their parts of a sum in a fusion."""
        path = (number,) if len(op.operands) > 1 else ()
        slices = {
            cut and (cut.operands, cut.attributes): cut for cut in self._kept(inside, op, path)
        }
        size = sum(cut.shapes[0].size for cut in slices.values() if cut)
        whole = inside.by_name[op.operands[number]].shapes[0].size
        return bool(slices) and None not in slices and size * groups.size <= whole

    def _kept(
        self, inside: Computation, op: Instruction, path: tuple[int, ...]
    ) -> Iterator[Instruction | None]:
        """Yields the slices a fusion takes; None for the whole value."""
        # ``path`` is where the value is in the result of the instruction, by numbers of elements.
        if op is inside.root:
            outside, caller = self._callers[inside.name]
            if caller.opcode == "fusion" and outside.name in self._callers:
                yield from self._kept(outside, caller, path)
            else:
                yield None
        for user in inside.users[op.name]:
            places = [place for place, name in enumerate(user.operands) if name == op.name]
            if user.opcode == "get-tuple-element":
                if path[:1] == (user.element,):
                    yield from self._kept(inside, user, path[1:])
            elif user.opcode == "tuple":
                for place in places:
                    yield from self._kept(inside, user, (place, *path))
            elif user.opcode == "fusion":
                for name in user.computations("calls"):
                    within = self.program.computations[name]
                    for place in places:
                        yield from self._kept(within, within.parameters[place], path)
            elif user.opcode in _VIEWS or user.opcode.endswith("-done"):
                yield from self._kept(inside, user, path)
            else:
                is_cut = user.opcode in ("dynamic-slice", "slice") and places[0] == 0
                yield user if is_cut else None

    def _send(self, inside: Computation, op: Instruction) -> Iterator[LocatedCollective]:
        if _MEGASCALE in op.attributes:
            groups = _slice_groups(op, self._devices, self.slices, self.device_ids)
            match = _TYPE.search(op.attributes)
            kind = match[1] if match else "nothing known"
            if kind not in _SLICE_KINDS:
                raise HloReadError(
                    f"{op.opcode} {op.name!r} exchanges data between slices as {kind!r}; known "
                    f"are {', '.join(_SLICE_KINDS)}."
                )
            overlapped = _overlaps(inside, op, rendezvous(op))
            yield self._located(inside, op, op, _SLICE_KINDS[kind], groups, overlapped, [0])
        elif op.attribute("is_host_transfer") != "true":
            pairs = _PAIRS.search(op.attributes)
            if pairs is None:
                raise _unknown(op, "it sends to devices that it does not name")
            groups = _permutation(_lists(pairs[1], op), op, self._devices)
            overlapped = _overlaps(inside, op)
            kind = "collective-permute"
            yield self._located(inside, op, op, kind, groups, overlapped, [0])

    def _located(
        self,
        inside: Computation,
        op: Instruction,
        origin: Instruction,
        kind: str,
        groups: Groups,
        overlapped: bool,
        numbers: Sequence[int],
    ) -> LocatedCollective:
        names = [op.operands[number] for number in numbers]
        arrays = [shape for name in names for shape in inside.by_name[name].shapes]
        payload = sum(shape.bytes for shape in arrays)
        if kind == "all-gather":
            payload *= groups.size
        runs = self.runs.counts[inside.name]
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
            runs_known=inside.name not in self.runs.unknown,
            asynchronous=overlapped,
            crosses_slices=self.slices > 1 and (crosses or _MEGASCALE in op.attributes),
            op_name=op_name,
            # One that was merged has lost its line; others of the same operation have it.
            source=op.source or origin.source or self.program.sources.get(op_name, ""),
        )
        return LocatedCollective(inside, op, collective, tuple(numbers))


def wire_bytes(kind: str, payload: int, size: int) -> float:
    """Returns the bytes sent by one device in one run."""
    if size < 2:
        return 0.0
    if kind in ("collective-permute", "broadcast"):
        return float(payload)
    times = 2 if kind == "all-reduce" else 1
    return times * (size - 1) / size * payload


def _overlaps(inside: Computation, start: Instruction, meeting: str = "") -> bool:
    """Whether other work runs between start and end of a collective."""
    # Of a send through the host the end is that of the ``recv`` with the same rendezvous.
    if '"is_sync":true' in start.attributes:
        return False
    begun = {start.name}
    if meeting:
        receivers = [receiver for receiver in inside.instructions if receiver.opcode == "recv"]
        begun = {receiver.name for receiver in receivers if rendezvous(receiver) == meeting}
    place = next(i for i, op in enumerate(inside.instructions) if op.name == start.name)
    for op in inside.instructions[place + 1 :]:
        if op.opcode.endswith("-done") and begun & set(op.operands):
            return False
        base = op.opcode.removesuffix("-start").removesuffix("-done")
        if base not in _IDLE and base not in KINDS and base not in ("send", "recv", "async"):
            return True
    return False


def _begins(inside: Computation, op: Instruction) -> bool:
    """Whether a fusion begins a collective continued in others."""
    return any(
        user.opcode == "custom-call" and user.call_target == _STARTS_FUSED
        for user in inside.users[op.name]
    )


def _reached(program: Program) -> set[str]:
    """Returns the computations known to run."""
    reached = {program.entry}
    pending = [program.entry]
    while pending:
        for op in program.computations[pending.pop()].instructions:
            new = {*called(op), *branches(op)} - reached
            reached |= new
            pending.extend(new)
    return reached


def _check_reached(program: Program) -> None:
    """Raises if a computation with a collective is not known to run."""
    reached = _reached(program)
    for name, inside in program.computations.items():
        for op in inside.instructions if name not in reached else ():
            if op.opcode.removesuffix("-start") in {*KINDS, "send"}:
                raise HloReadError(
                    f"{op.opcode} {op.name!r} is in computation {name!r}, which nothing known "
                    "runs, so it would not be counted. Please report it with the versions of jax "
                    "and of the compiler."
                )


def _refuse_unknown(op: Instruction) -> None:
    """Raises if an instruction looks like an unknown collective."""
    if op.opcode.endswith("-done") or op.opcode in ("recv", "partition-id", "replica-id"):
        return
    if op.opcode == "custom-call":
        target = op.call_target
        if target not in _KNOWN_CALLS and _LOOKS_COLLECTIVE.search(target):
            raise _unknown(op, f"it calls {target!r}")
    elif _LOOKS_COLLECTIVE.search(op.opcode):
        raise _unknown(op, "its opcode is new")


def _unknown(op: Instruction, why: str) -> HloReadError:
    return HloReadError(
        f"{op.opcode} {op.name!r} looks like a collective that is not known: {why}. Its bytes "
        "would be counted as none, so the program is not read. Please report it with the versions "
        "of jax and of the compiler."
    )
