# SPDX-License-Identifier: Apache-2.0
"""Arrangement of meshes in the hardware, and routes between their devices.

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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardax.plan.hardware.hardware import Hardware

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Arrangement:
    """Where the positions of a mesh are in the hardware."""

    hardware: Hardware
    topology: tuple[int, ...]  # of a slice; nodes and GPUs of a node; or the number of devices
    mesh: tuple[tuple[str, int], ...]  # names and sizes of the mesh axes
    # Of each position, in row-major order: the slice or node, coordinates in it, core of the chip.
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Dimension:
    """A dimension of the fabric that a group uses."""

    size: int  # devices of the group along it
    ring: bool  # whether they go all the way round
    bandwidth: float  # bytes a second that a device sends along it, both ways in a ring
    hops: int  # links between the two devices that are farthest from each other


@dataclass(frozen=True)
class Route:
    """How the devices of a group reach each other."""

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
    """Returns where the positions of a mesh stand."""
    sizes = tuple(size for _, size in mesh)
    if chip.kind == "tpu":
        from jax.experimental import mesh_utils

        inner = tuple(size // span for size, span in zip(sizes, spans, strict=True))
        made = mesh_utils.create_device_mesh(
            inner, list(_places(chip, topology)), allow_split_physical_axes=True
        )
        rows = [(*device.coords, device.core_on_chip) for device in made.flat]
        one = np.array(rows).reshape(*inner, -1)
        blocks = np.stack([np.insert(one, 0, number, axis=-1) for number in range(slices)])
        # Slices as blocks of the mesh: each axis runs through slices first, then within them.
        axes = len(sizes)
        order = [each for axis in range(axes) for each in (axis, axes + axis)]
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
    """What ``mesh_utils`` asks of a TPU device."""

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
    """Returns how the devices of a group reach each other."""
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
    crosses = len(slices) > 1
    return Route(
        inner=within.shape[1],
        outer=len(slices),
        dimensions=dimensions,
        bandwidth=sum(each.bandwidth for each in dimensions),
        wraparound=all(each.ring for each in dimensions),
        network_bandwidth=chip.network_bandwidth,
        latency=chip.link_latency * sum(each.hops for each in dimensions),
        network_latency=chip.network_latency * crosses,
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
    """Dimensions of a torus that groups use."""
    # A group with all devices of its chips sends what is for another chip once, by all links of its
    # own.
    devices = len(np.unique(groups[0, :, -1])) if chip.devices_per_chip > 1 else 1
    used = 0
    for number, length in enumerate(topology):
        spans = {tuple(sorted(set(row))) for row in groups[:, :, number].tolist()}
        size = len(next(iter(spans)))
        if size == 1:
            continue
        ring = chip.wraps(topology, number) and all(_evenly_round(each, length) for each in spans)
        shared = length // size if ring else _most_on_a_link(spans)
        ways = 2 if ring else 1
        hops = length // 2 if ring else max(each[-1] - each[0] for each in spans)
        used += 1
        yield Dimension(size, ring, chip.link_bandwidth * devices * ways / shared, hops)
    if devices > 1 and not used:
        yield Dimension(chip.devices_per_chip, True, chip.chip_bandwidth, 1)


def _evenly_round(places: tuple[int, ...], length: int) -> bool:
    """Whether coordinates have equal distances all the way round."""
    steps = {b - a for a, b in itertools.pairwise(places)}
    return steps == {places[0] + length - places[-1]}


def _most_on_a_link(spans: set[tuple[int, ...]]) -> int:
    """How many groups of a line share its busiest link."""
    ends = [(each[0], each[-1]) for each in spans]
    return max(sum(first <= link < last for first, last in ends) for link, _ in ends)
