# SPDX-License-Identifier: Apache-2.0
"""Targets: hardware, and how much of it a plan is for.

A *target* is written ``kind:hardware:topology``. The topology of a TPU slice is that of its torus,
``"tpu:v5e:4x4"``; several slices stand before it with a star, ``"tpu:v5e:2*4x4"``. That of GPUs is
nodes times GPUs of a node, ``"gpu:h100:8x8"``. CPU devices are only counted, ``"cpu:8"``. Hardware
of one's own is a TOML file in place of kind and name, ``"mine.toml:4x4"``.

The memory of GPUs may be followed by the share that a program gets, ``"gpu:h100:8x8@0.9"``, as
``XLA_PYTHON_CLIENT_MEM_FRACTION`` sets it; without, it is the 0.75 that JAX takes by default.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardax.partition.errors import did_you_mean
from shardax.partition.mesh import mesh_text
from shardax.plan.errors import TargetError
from shardax.plan.hardware.hardware import HARDWARE, KINDS, Hardware, find_hardware, load_hardware
from shardax.plan.hardware.links import Arrangement, Route, arrangement, route

_EXAMPLES = "'cpu:8', 'tpu:v5e:4x4', 'tpu:v5e:2*4x4' (two slices), 'gpu:h100:8x8' (nodes x GPUs)"


@dataclass(frozen=True)
class Target:
    """Hardware and how much of it.

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
        """Returns the target that a text names.

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
        found = re.fullmatch(r"(?:(\d+)\*)?(\d+(?:x\d+)*)", topology)
        if not head or not found:
            raise TargetError(_unreadable(text, head or topology))
        chip = _hardware_of(head, text)
        try:
            fraction = float(share) if share else None
        except ValueError:
            raise TargetError(
                f"In the target {text!r}, {share!r} is no share of the memory, such as "
                f"{body + '@0.9'!r}."
            ) from None
        sizes = tuple(int(size) for size in found[2].split("x"))
        return cls(chip, sizes, int(found[1] or 1), fraction)

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
        """Memory of a device that a program may use."""
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
        """Checks that mesh axes fit the target's devices and slices.

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
        """A sentence with sizes of these axes that fit."""
        found = factorizations(self.device_count, len(sizes))
        near = sorted(
            found,
            key=lambda each: sum(
                abs(math.log2(a / b)) for a, b in zip(each, sizes.values(), strict=True)
            ),
        )
        words = [mesh_text(dict(zip(sizes, each, strict=True))) for each in near[:3]]
        return f" These have {self.device_count}: {'; '.join(words)}."

    def _slices_by_axis(self, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """How many slices each mesh axis spans, if they can be split."""
        left, spans = self.slices, []
        for size in sizes.values():
            span = math.gcd(size, left)
            if left > 1 and span < size and span != left:
                return None
            spans.append(span)
            left //= span
        return tuple(spans) if left == 1 else None

    def arrangement(self, sizes: Mapping[str, int]) -> Arrangement:
        """Returns where each position of a mesh stands in the hardware.

        Args:
            sizes: Sizes of the mesh axes, in order.
        """
        self.check_mesh(sizes)
        spans = self._slices_by_axis(sizes) or (1,) * len(sizes)
        return arrangement(self.hardware, self.topology, self.slices, tuple(sizes.items()), spans)

    def route(self, sizes: Mapping[str, int], axes: Iterable[str]) -> Route:
        """Returns how the devices along some mesh axes reach each other.

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
    known = [each for each, chip in HARDWARE.items() if chip.kind == kind]
    try:
        chip = find_hardware(name or "cpu")
    except ValueError:
        chip = None
    if chip is None or chip.kind != kind:
        raise TargetError(
            f"There is no target {text!r}: {kind} hardware is {', '.join(known)}."
            f"{did_you_mean(name, known)} Your own: a TOML file in its place, 'mine.toml:4x4'."
        )
    return chip


def _unreadable(text: str, kind: str) -> str:
    by_kind = "; ".join(
        f"{each}: {', '.join(name for name, chip in HARDWARE.items() if chip.kind == each)}"
        for each in ("tpu", "gpu")
    )
    return (
        f"There is no target {text!r}.{did_you_mean(kind, KINDS)} Targets are written like "
        f"{_EXAMPLES}. Hardware that is known: {by_kind}. Your own: 'mine.toml:4x4'."
    )


def _problem(target: Target) -> str:
    """What is wrong with a target, or nothing."""
    chip, topology = target.hardware, target.topology
    if not all(map(_is_count, (*topology, target.slices))) or not topology:
        return "sizes are numbers from 1."
    share = target.memory_fraction
    if share is not None and (chip.kind != "gpu" or not 0 < share <= 1):
        return "@ is for the share of a GPU's memory, above 0 and at most 1, such as @0.9."
    wanted = chip.torus_dimensions or (1 if chip.kind == "cpu" else 2)
    if len(topology) != wanted:
        form = {
            "cpu": "a number of devices, such as 8",
            "gpu": f"nodes times GPUs of a node, such as 2x{chip.node_size}",
        }
        torus = {2: "two sizes, such as 4x4", 3: "three sizes, such as 4x4x4"}
        return f"a shape of {chip.name} is {form.get(chip.kind) or torus[wanted]}."
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
    """Returns topologies that exist and have about as many chips."""
    found = _named_topologies(chip)
    if chip.torus_dimensions == 3 and chip.pod and chip.wraparound:
        step = chip.wraparound
        sizes = (range(step, most + 1, step) for most in sorted(chip.pod))
        found += [each for each in itertools.product(*sizes) if list(each) == sorted(each)]
    chips = math.log2(math.prod(topology))

    def distance(each: tuple[int, ...]) -> tuple[float, float]:
        pairs = zip(sorted(each), sorted(topology), strict=True)
        shape = sum(abs(math.log2(a / b)) for a, b in pairs)
        return abs(math.log2(math.prod(each)) - chips), shape

    return ["x".join(map(str, each)) for each in sorted(found, key=distance)[:count]]


def _named_topologies(chip: Hardware) -> list[tuple[int, ...]]:
    return [tuple(map(int, text.split("x"))) for text in chip.shapes]


def factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    """Returns all ways to write a number as an ordered product."""
    if parts == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in factorizations(number // first, parts - 1)
    ]
