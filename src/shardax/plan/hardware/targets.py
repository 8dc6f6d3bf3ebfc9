# SPDX-License-Identifier: Apache-2.0
"""Targets, the places of meshes in them, and routes between devices.

A *target* is written ``kind:hardware:topology``. The topology of a TPU slice is that of its torus,
``"tpu:v5e:4x4"``; several slices stand before it with a star, ``"tpu:v5e:2*4x4"``. That of GPUs is
nodes times GPUs of a node, ``"gpu:h100:8x8"``. CPU devices are only counted, ``"cpu:8"``. Hardware
of one's own is a TOML file in place of kind and name, ``"mine.toml:4x4"``. The memory of GPUs may
be followed by the share that a program gets, ``"gpu:h100:8x8@0.9"``, as
``XLA_PYTHON_CLIENT_MEM_FRACTION`` sets it; without, it is the 0.75 that JAX takes by default.

An *arrangement* gives each position of a mesh its place: slice or node, then coordinates in the
torus (or the number in the node). TPUs are arranged by ``jax.experimental.mesh_utils``, as
``jax.make_mesh`` does it, so that mesh axes run along the torus; everything else in order.

A *route* is how the devices of a *group*, those that differ along some mesh axes only, reach each
other. Within the fabric a device sends by all links that its group uses: both ways round a ring,
one way along a line (the devices at its ends have one neighbour), in each dimension at the same
time. Groups that lie across each other on the same links share them. This is how
jax-ml.github.io/scaling-book/sharding counts.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardax.extend import did_you_mean, mesh_text
from shardax.plan.errors import TargetError
from shardax.plan.hardware.hardware import HARDWARE, KINDS, Hardware, find_hardware, load_hardware

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Arrangement:
    """Places of the positions of a mesh in the hardware."""

    hardware: Hardware
    topology: tuple[int, ...]  # of a slice; nodes and GPUs of a node; or the number of devices
    mesh: tuple[tuple[str, int], ...]  # names and sizes of the mesh axes
    # Of each position, in row-major order: the slice or node, coordinates in it, core of the chip.
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Dimension:
    """A dimension of the fabric, as used by a group."""

    size: int  # devices of the group along it
    ring: bool  # whether they go all the way round
    bandwidth: float  # bytes a second that a device sends along it, both ways in a ring
    hops: int  # links between the two devices that are farthest from each other


@dataclass(frozen=True)
class Route:
    """The route between the devices of a group."""

    inner: int  # devices of a group in one slice or node
    outer: int  # slices or nodes that a group spans
    dimensions: tuple[Dimension, ...]  # one for a switch
    bandwidth: float  # bytes a second that a device sends within the fabric, by all its links
    wraparound: bool  # whether every dimension is a ring; also of a switch
    network_bandwidth: float  # bytes a second that a device sends over the network
    latency: float  # seconds of a message through the fabric at the least
    network_latency: float  # 0 if the group stays within the fabric

    @property
    def group_size(self) -> int:
        return self.inner * self.outer

    @property
    def crosses(self) -> bool:
        """Whether it goes over the network."""
        return self.outer > 1


@functools.lru_cache(maxsize=256)
def arrangement(
    chip: Hardware,
    topology: tuple[int, ...],
    slices: int,
    mesh: tuple[tuple[str, int], ...],
    spans: tuple[int, ...],
) -> Arrangement:
    """Returns the places of the positions of a mesh."""
    sizes = tuple(size for _, size in mesh)
    if chip.kind == "tpu":
        from jax.experimental import mesh_utils

        inner = tuple(size // span for size, span in zip(sizes, spans, strict=True))
        grid = mesh_utils.create_device_mesh(
            inner, list(_places(chip, topology)), allow_split_physical_axes=True
        )
        rows = [(*device.coords, device.core_on_chip) for device in grid.flat]
        chips_of_slice = np.array(rows).reshape(*inner, -1)
        blocks = np.stack(
            [np.insert(chips_of_slice, 0, number, axis=-1) for number in range(slices)]
        )
        # Slices as blocks of the mesh: each axis runs through slices first, then within them.
        axes = len(sizes)
        order = [part for axis in range(axes) for part in (axis, axes + axis)]
        places = blocks.reshape(*spans, *inner, -1).transpose(*order, 2 * axes)
    elif chip.kind == "gpu":
        places = np.stack(np.unravel_index(np.arange(math.prod(sizes)), topology), axis=-1)
    else:
        numbers = np.arange(math.prod(sizes))
        places = np.stack([np.zeros_like(numbers), numbers], axis=-1)
    rows = places.reshape(-1, places.shape[-1]).tolist()
    return Arrangement(chip, topology, mesh, tuple(map(tuple, rows)))


@dataclass(frozen=True)
class _TpuDevice:
    """The attributes of a TPU device used by ``mesh_utils``."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    process_index: int
    device_kind: str
    platform: str = "tpu"


def _places(chip: Hardware, topology: tuple[int, ...]) -> Iterator[_TpuDevice]:
    """Devices in libtpu's order: by hosts of 2x2, x first."""
    x, y, z = (*topology, 1)[:3]
    across, along = min(x, 2), min(y, 2)
    hosts = itertools.product(range(z), range(y // along), range(x // across))
    kind = str(chip.compiler.get("device_kind", "TPU"))
    number = 0
    for process, (plane, row, column) in enumerate(hosts):
        chips = itertools.product(range(along), range(across), range(chip.devices_per_chip))
        for down, right, core in chips:
            place = (column * across + right, row * along + down, plane)
            yield _TpuDevice(number, place, core, process, kind)
            number += 1


@functools.lru_cache(maxsize=4096)
def route(where: Arrangement, along: tuple[bool, ...]) -> Route:
    """Returns the route between the devices of a group."""
    # A group's part in its first slice or node, as all have the same form.
    groups = _groups(where, along)
    first = groups[0]
    slices = np.unique(first[:, 0])
    within = groups[:, first[:, 0] == slices[0], 1:]

    chip = where.hardware
    if chip.torus_dimensions:
        dimensions = tuple(_torus_dimensions(chip, where.topology, within))
    elif within.shape[1] > 1:
        dimensions = (Dimension(within.shape[1], True, chip.link_bandwidth, 1),)
    else:
        dimensions = ()
    return Route(
        inner=within.shape[1],
        outer=len(slices),
        dimensions=dimensions,
        bandwidth=sum(dimension.bandwidth for dimension in dimensions),
        wraparound=all(dimension.ring for dimension in dimensions),
        network_bandwidth=chip.network_bandwidth,
        latency=chip.link_latency * sum(dimension.hops for dimension in dimensions),
        network_latency=chip.network_latency if len(slices) > 1 else 0.0,
    )


def _groups(where: Arrangement, along: tuple[bool, ...]) -> NDArray[Any]:
    """Places by group: groups, their devices, coordinates."""
    sizes = [size for _, size in where.mesh]
    places = np.array(where.places).reshape(*sizes, -1)
    last = [axis for axis, chosen in enumerate(along) if chosen]
    first = [axis for axis, chosen in enumerate(along) if not chosen]
    count = math.prod(sizes[axis] for axis in last)
    return places.transpose(*first, *last, len(sizes)).reshape(-1, count, places.shape[-1])


def _torus_dimensions(
    chip: Hardware, topology: tuple[int, ...], groups: NDArray[Any]
) -> Iterator[Dimension]:
    """Dimensions of a torus used by groups."""
    # A group with all devices of its chips sends what is for another chip once, by all links of its
    # own.
    devices = len(np.unique(groups[0, :, -1])) if chip.devices_per_chip > 1 else 1
    used = 0
    for number, length in enumerate(topology):
        spans = {tuple(sorted(set(row))) for row in groups[:, :, number].tolist()}
        size = len(next(iter(spans)))
        if size == 1:
            continue

        ring = chip.wraps(topology, number) and all(_evenly_round(span, length) for span in spans)
        shared = length // size if ring else _most_on_a_link(spans)
        ways = 2 if ring else 1
        hops = length // 2 if ring else max(span[-1] - span[0] for span in spans)
        used += 1
        yield Dimension(size, ring, chip.link_bandwidth * devices * ways / shared, hops)
    if devices > 1 and not used:
        yield Dimension(chip.devices_per_chip, True, chip.chip_bandwidth, 1)


def _evenly_round(places: tuple[int, ...], length: int) -> bool:
    """Whether coordinates have equal distances all the way round."""
    steps = {b - a for a, b in itertools.pairwise(places)}
    return steps == {places[0] + length - places[-1]}


def _most_on_a_link(spans: set[tuple[int, ...]]) -> int:
    """Number of groups of a line on its busiest link."""
    ends = [(span[0], span[-1]) for span in spans]
    return max(sum(first <= link < last for first, last in ends) for link, _ in ends)


# Each CPU device takes threads of the process that compiles.
_MOST_DEVICES = {"cpu": 8_192, "tpu": 65_536, "gpu": 65_536}
_EXAMPLES = "'cpu:8', 'tpu:v5e:4x4', 'tpu:v5e:2*4x4' (two slices), 'gpu:h100:8x8' (nodes x GPUs)"


@dataclass(frozen=True)
class Target:
    """Hardware, with its topology and number of slices.

    Attributes:
        hardware: What each device can do.
        topology: Sizes of a slice's torus; nodes and GPUs of a node; or the number of devices.
        slices: How many slices the network joins; 1 for GPUs, whose nodes are in ``topology``.
        memory_fraction: Share of a device's memory that a program gets; None for what the hardware
            names as usable.

    Raises:
        TargetError: There is no slice of this shape; names those of about its size.

    Example:
        >>> from shardax import plan
        >>> target = plan.Target.parse("tpu:v5e:2*4x4")
        >>> target.device_count, target.slices, target.limit_bytes / 2**30
        (32, 2, 15.75)
        >>> plan.Target(plan.find_hardware("h100"), (8, 8)).text
        'gpu:h100:8x8'
    """

    hardware: Hardware
    topology: tuple[int, ...]
    slices: int = 1
    memory_fraction: float | None = None

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise TargetError(f"There is no target {self.text!r}: {problem}")

    @classmethod
    def parse(cls, target: str | Target) -> Target:
        """Returns the target named by a text.

        Args:
            target: Such as ``"tpu:v5e:4x4"``. A Target is returned as it is.

        Raises:
            TargetError: There is no such target; lists those that there are.
            HardwareError: A TOML file of hardware is wrong.
        """
        if isinstance(target, Target):
            return target
        if not isinstance(target, str):
            raise TargetError(
                f"A target is text such as {_EXAMPLES}, or a plan.Target; this is a "
                f"{type(target).__name__}."
            )
        text = target.strip()
        body, _, share = text.partition("@")
        head, _, topology = body.rpartition(":")
        match = re.fullmatch(r"(?:(\d{1,18})\*)?(\d{1,18}(?:x\d{1,18})*)", topology)
        if not head or not match:
            raise TargetError(_unreadable(text, head or topology))

        chip = _hardware_of(head, text)
        try:
            fraction = float(share) if share else None
        except ValueError:
            raise TargetError(
                f"In the target {text!r}, {share!r} is no share of the memory, such as "
                f"{body + '@0.9'!r}."
            ) from None
        sizes = tuple(int(size) for size in match[2].split("x"))
        return cls(chip, sizes, int(match[1] or 1), fraction)

    @property
    def text(self) -> str:
        """The target as ``parse`` reads it."""
        slices = f"{self.slices}*" if self.slices > 1 else ""
        shape = slices + "x".join(map(str, self.topology))
        share = "" if self.memory_fraction is None else f"@{self.memory_fraction:g}"
        name = "" if self.hardware.name == self.kind else f":{self.hardware.name}"
        return f"{self.kind}{name}:{shape}{share}"

    @property
    def kind(self) -> str:
        """``"tpu"``, ``"gpu"`` or ``"cpu"``."""
        return self.hardware.kind

    @property
    def device_count(self) -> int:
        """Devices of all slices."""
        return math.prod(self.topology) * self.slices * self.hardware.devices_per_chip

    @property
    def limit_bytes(self) -> int:
        """Memory of a device available to a program."""
        if self.kind == "cpu" and self.hardware.name == "cpu":
            names = getattr(os, "sysconf_names", {})
            if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
                memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
                return memory // self.device_count
            return HARDWARE["cpu"].memory_bytes // self.device_count
        if self.memory_fraction is not None:
            return int(self.hardware.memory_bytes * self.memory_fraction)
        return self.hardware.usable_bytes

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Checks mesh axes against the target's devices and slices.

        Args:
            sizes: Sizes of the mesh axes, in order. Slices are split over the leading axes.

        Raises:
            TargetError: They do not; names sizes that would.
        """
        wrong = {name: size for name, size in sizes.items() if not _is_count(size)}
        if not sizes or wrong:
            raise TargetError(
                f"A mesh is sizes by axis, such as {{'data': {self.device_count}}}; this is "
                f"{dict(sizes)!r}."
            )

        count = math.prod(sizes.values())
        if count != self.device_count:
            raise TargetError(
                f"The mesh {mesh_text(sizes)} has {count} devices and {self.text!r} has "
                f"{self.device_count}.{self._fitting(sizes)}"
            )

        if self.slices > 1 and self._slices_by_axis(sizes) is None:
            raise TargetError(
                f"The mesh {mesh_text(sizes)} cannot be split into the {self.slices} slices of "
                f"{self.text!r}: the leading axes are split over slices, the first of them first. "
                f"An axis of its own does it: {{'slice': {self.slices}, ...}}."
            )

    def _fitting(self, sizes: Mapping[str, int]) -> str:
        """A sentence with fitting sizes of these axes."""

        def distance(shape: tuple[int, ...]) -> float:
            pairs = zip(shape, sizes.values(), strict=True)
            return sum(abs(math.log2(a / b)) for a, b in pairs)

        shapes = sorted(factorizations(self.device_count, len(sizes)), key=distance)
        texts = [mesh_text(dict(zip(sizes, shape, strict=True))) for shape in shapes[:3]]
        return f" These have {self.device_count}: {'; '.join(texts)}."

    def _slices_by_axis(self, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """Number of slices along each mesh axis, if they can be split."""
        left, spans = self.slices, []
        for size in sizes.values():
            span = math.gcd(size, left)
            if left > 1 and span < size and span != left:
                return None
            spans.append(span)
            left //= span
        return tuple(spans) if left == 1 else None

    def arrangement(self, sizes: Mapping[str, int]) -> Arrangement:
        """Returns the place of each position of a mesh in the hardware.

        Args:
            sizes: Sizes of the mesh axes, in order.
        """
        self.check_mesh(sizes)
        spans = self._slices_by_axis(sizes) or (1,) * len(sizes)
        return arrangement(self.hardware, self.topology, self.slices, tuple(sizes.items()), spans)

    def route(self, sizes: Mapping[str, int], axes: Iterable[str]) -> Route:
        """Returns the route between the devices along some mesh axes.

        Args:
            sizes: Sizes of all mesh axes, in order.
            axes: Those that the devices differ in.

        Example:
            >>> from shardax import plan
            >>> v5e = plan.Target.parse("tpu:v5e:4x4")
            >>> v5e.route({"data": 4, "model": 4}, ["model"]).bandwidth
            45000000000.0
            >>> whole_pod = plan.Target.parse("tpu:v5e:16x16")
            >>> whole_pod.route({"data": 16, "model": 16}, ["model"]).bandwidth
            90000000000.0
        """
        chosen = frozenset(axes)
        unknown = chosen - set(sizes)
        if unknown:
            name = min(unknown)
            raise TargetError(
                f"The mesh {mesh_text(sizes)} has no axis {name!r}.{did_you_mean(name, sizes)}"
            )
        along = tuple(name in chosen for name in sizes)
        return route(self.arrangement(sizes), along)

    def links(self, sizes: Mapping[str, int]) -> dict[str, Route]:
        """Returns the route along each mesh axis by itself.

        Args:
            sizes: Sizes of all mesh axes, in order.
        """
        return {name: self.route(sizes, [name]) for name in sizes}

    def __str__(self) -> str:
        return self.text


def _hardware_of(head: str, text: str) -> Hardware:
    if head.lower().endswith(".toml"):
        return load_hardware(head)
    kind, _, name = head.partition(":")
    if kind not in KINDS or (kind != "cpu" and not name):
        raise TargetError(_unreadable(text, kind))

    names = [title for title, chip in HARDWARE.items() if chip.kind == kind]
    try:
        chip = find_hardware(name or "cpu")
    except ValueError:
        chip = None
    if chip is None or chip.kind != kind:
        raise TargetError(
            f"There is no target {text!r}: {kind} hardware is {', '.join(names)}."
            f"{did_you_mean(name, names)} Your own: a TOML file in its place, 'mine.toml:4x4'."
        )
    return chip


def _unreadable(text: str, kind: str) -> str:
    by_kind = "; ".join(
        f"{kind_}: {', '.join(name for name, chip in HARDWARE.items() if chip.kind == kind_)}"
        for kind_ in ("tpu", "gpu")
    )
    return (
        f"There is no target {text!r}.{did_you_mean(kind, KINDS)} Targets are written like "
        f"{_EXAMPLES}. Hardware that is known: {by_kind}. Your own: 'mine.toml:4x4'."
    )


def _problem(target: Target) -> str:
    """The fault of a target, or nothing."""
    chip, topology = target.hardware, target.topology
    if not all(map(_is_count, (*topology, target.slices))) or not topology:
        return "sizes are numbers from 1."

    # What every kind has.
    most = _MOST_DEVICES[chip.kind]
    if target.device_count > most:
        return f"a plan is for at most {most:,} {chip.kind.upper()} devices."
    share = target.memory_fraction
    if share is not None and (chip.kind != "gpu" or not 0 < share <= 1):
        return "@ is for the share of a GPU's memory, above 0 and at most 1, such as @0.9."

    # The shape of a slice or of nodes.
    rank = chip.torus_dimensions or (1 if chip.kind == "cpu" else 2)
    if len(topology) != rank:
        form = {
            "cpu": "a number of devices, such as 8",
            "gpu": f"nodes times GPUs of a node, such as 2x{chip.node_size}",
        }
        torus = {2: "two sizes, such as 4x4", 3: "three sizes, such as 4x4x4"}
        return f"a shape of {chip.name} is {form.get(chip.kind) or torus[rank]}."
    if target.slices > 1 and not chip.torus_dimensions:
        return "only tori have slices; GPUs are nodes times GPUs, such as 'gpu:h100:16x8'."
    if chip.kind == "gpu" and topology[1] > chip.node_size:
        return (
            f"a node of {chip.name} has {chip.node_size} GPUs, and the shape is nodes x GPUs: "
            f"{math.ceil(math.prod(topology) / chip.node_size)}x{chip.node_size}."
        )
    if not topology_exists(chip, topology):
        near = ", ".join(nearest_topologies(chip, topology))
        return f"{chip.name} has no slice of this shape; of about its size are {near}."
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def topology_exists(chip: Hardware, topology: tuple[int, ...]) -> bool:
    """Whether there are slices of a topology, in any order."""
    if not chip.shapes or sorted(topology) in map(sorted, _named_topologies(chip)):
        return True
    step = chip.wraparound
    if chip.torus_dimensions != 3 or not step or any(size % step for size in topology):
        return False
    pod = sorted(chip.pod or topology)  # whole cubes, not larger than the pod
    return all(size <= most for size, most in zip(sorted(topology), pod, strict=True))


def nearest_topologies(chip: Hardware, topology: tuple[int, ...], count: int = 4) -> list[str]:
    """Returns existing topologies with about as many chips."""
    shapes = _named_topologies(chip)
    if chip.torus_dimensions == 3 and chip.pod and chip.wraparound:
        step = chip.wraparound
        sizes = (range(step, most + 1, step) for most in sorted(chip.pod))
        shapes += [shape for shape in itertools.product(*sizes) if list(shape) == sorted(shape)]
    chips = math.log2(math.prod(topology))

    def distance(candidate: tuple[int, ...]) -> tuple[float, float]:
        pairs = zip(sorted(candidate), sorted(topology), strict=True)
        shape = sum(abs(math.log2(a / b)) for a, b in pairs)
        return abs(math.log2(math.prod(candidate)) - chips), shape

    return ["x".join(map(str, shape)) for shape in sorted(shapes, key=distance)[:count]]


def _named_topologies(chip: Hardware) -> list[tuple[int, ...]]:
    return [tuple(map(int, text.split("x"))) for text in chip.shapes]


def factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    """Returns all ways to write a number as an ordered product."""
    if parts == 1:
        return [(number,)]
    return [
        (first, *factors)
        for first in range(1, number + 1)
        if number % first == 0
        for factors in factorizations(number // first, parts - 1)
    ]
