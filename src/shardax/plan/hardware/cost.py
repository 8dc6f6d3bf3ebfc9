# SPDX-License-Identifier: Apache-2.0
"""Time model of compiled programs.

*Arithmetic* takes operations over the peak of the dtype, *memory* takes bytes over its bandwidth,
and a collective takes wire bytes over the links that its group uses, at least their latency.
Collectives take place one after another. The *lower* end of the band is the longest of the three:
everything overlaps. The *upper* end is their sum: nothing does. Figures of hardware are peaks, so
the lower end is a bound; ``Efficiency`` scales them.

A collective over several slices or nodes runs within the fabric, over the network with each
device's own part, and within the fabric again; at the same time in the lower end, in turn in the
upper. What an all-to-all sends along a ring or line passes the devices between, on average a
quarter of them (jax-ml.github.io/scaling-book/sharding).

Virtual CPU devices have no links (``Hardware.copy_bandwidth``): a collective copies its payload, at
a rate that depends on its kind alone. What copies is what computes, so both ends of the band are
the sum (``calibration.py`` measures their figures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardax.extend import Options
from shardax.hlo import Collective, ProgramFacts
from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.targets import Route, Target
from shardax.plan.records import LayoutReport, TimeBand

_TIE = 0.1  # layouts whose times differ by less than this share are a tie


@dataclass(frozen=True)
class Efficiency:
    """Share of the hardware's figures reached by programs, in (0, 1].

    Attributes:
        compute: Of the peak of matrix products.
        memory: Of the memory's bandwidth.
        links: Of links within the fabric.
        network: Of the network between slices or nodes.

    Example:
        >>> Efficiency(compute=0.5).network
        1.0
    """

    compute: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    network: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "links", "network"):
            share = getattr(self, name)
            expected = "a share of the peak, above 0 and at most 1"
            Options(PlanInputError).check(name, share, 0 < share <= 1, expected)


_PEAK = Efficiency()


class CollectiveTime(NamedTuple):
    """Seconds of a collective in all its runs."""

    fabric: float  # within slices or nodes
    network: float  # between them


def time_band(
    facts: ProgramFacts,
    target: Target,
    mesh: Mapping[str, int],
    dtype: str = "bf16",
    *,
    efficiency: Efficiency = _PEAK,
) -> TimeBand:
    """Returns the time of a program on a target, as a band.

    Args:
        facts: What one device does.
        target: The hardware.
        mesh: Sizes of the mesh axes, in order.
        dtype: Of the matrix products, as HLO or JAX names it.
        efficiency: Share of the hardware's figures that is reached.

    Raises:
        TargetError: The mesh does not fit the target.

    Example:
        >>> from shardax import hlo, plan
        >>> target = plan.Target.parse("tpu:v5e:4x4")
        >>> gather = hlo.Collective(
        ...     "all-gather", "ag", "bf16", 120_000_000, 90e6, 4, axes=("model",)
        ... )
        >>> facts = hlo.ProgramFacts((gather,), matmul_flops=1.97e11, hbm_bytes=8.1e8)
        >>> band = plan.time_band(facts, target, {"data": 4, "model": 4})
        >>> band.compute, band.memory, band.communication, band.binding
        (0.001, 0.001, 0.002, 'communication')
        >>> band.lower, band.upper
        (0.002, 0.004)
    """
    target.check_mesh(mesh)
    chip = target.hardware
    compute = facts.matmul_flops / (chip.peak(dtype) * efficiency.compute)

    # What collectives of virtual devices copy is in their own time.
    traffic = facts.hbm_bytes
    for collective in facts.collectives if chip.copy_bandwidth else ():
        # Of one side of these a device has its part only.
        whole = collective.kind not in ("all-gather", "reduce-scatter")
        copies = 2.0 if whole else 1.0 + 1.0 / collective.group_size
        traffic -= collective.runs * collective.payload * copies
    memory = max(0.0, traffic) / (chip.memory_bandwidth * efficiency.memory)

    times = [
        collective_time(collective, target, mesh, efficiency) for collective in facts.collectives
    ]
    communication = sum(max(pair) for pair in times)
    parts = {"compute": compute, "memory": memory, "communication": communication}
    return TimeBand(
        lower=sum(parts.values()) if chip.copy_bandwidth else max(parts.values()),
        upper=compute + memory + sum(map(sum, times)),
        **parts,
        cross_slice=sum(pair.network for pair in times),
        binding=max(parts, key=lambda name: parts[name]),
    )


def collective_time(
    collective: Collective, target: Target, mesh: Mapping[str, int], efficiency: Efficiency = _PEAK
) -> CollectiveTime:
    """Returns the time of a collective in all its runs."""
    if collective.group_size < 2 or not collective.wire_bytes:
        return CollectiveTime(0.0, 0.0)

    # Virtual devices copy the payload.
    if target.hardware.copy_bandwidth:
        # Of an unknown kind at the least rate.
        rates = target.hardware.copy_bandwidth
        rate = rates.get(collective.kind, min(rates.values()))
        seconds = (collective.payload / rate + target.hardware.link_latency) * collective.runs
        return CollectiveTime(seconds, 0.0)

    # Links send bytes, and messages take their latency at least.
    route, (inner, outer) = _reach(collective, target, mesh)
    within, between = _shares(collective, inner, outer)
    fabric = network = 0.0
    if within:
        if collective.kind == "all-to-all":
            seconds = _all_to_all(within, inner, route, efficiency.links)
        else:
            seconds = within / (route.bandwidth * efficiency.links)
        fabric = max(seconds, route.latency * collective.runs)
    if between:
        seconds = between / (route.network_bandwidth * efficiency.network)
        network = max(seconds, route.network_latency * collective.runs)
    return CollectiveTime(fabric, network)


def _reach(
    collective: Collective, target: Target, mesh: Mapping[str, int]
) -> tuple[Route, tuple[int, int]]:
    """The route of a group, and its devices within and across fabrics."""
    # A group along part of a mesh axis takes the axis's way, within a slice unless the collective
    # says that it crosses, and within a node as far as that has room. Groups along no mesh axes are
    # taken to be along as many of the last axes as hold them, or along all if they cross slices.
    axes, size = list(collective.axes), collective.group_size
    if not axes:
        covered = 1
        for name in reversed(list(mesh)):
            if covered >= size and not collective.crosses_slices:
                break
            axes.append(name)
            covered *= mesh[name]

    route = target.route(mesh, axes)
    if size == route.group_size:
        return route, (route.inner, route.outer)
    if target.slices > 1:
        outer = min(route.outer, size) if collective.crosses_slices else 1
    else:
        outer = -(-size // route.inner)
    return route, (max(1, size // outer), outer)


def _shares(collective: Collective, inner: int, outer: int) -> tuple[float, float]:
    """Wire bytes of all runs within the fabric, and over the network."""
    if outer == 1:
        return collective.wire_bytes, 0.0
    if inner == 1 or collective.kind == "collective-permute":
        return 0.0, collective.wire_bytes
    if collective.kind == "all-to-all":
        away = (outer - 1) * inner / (inner * outer - 1)
        return collective.wire_bytes * (1 - away), collective.wire_bytes * away
    times = 2 if collective.kind == "all-reduce" else 1
    whole = times * collective.payload * collective.runs
    return whole * (inner - 1) / inner, whole * (outer - 1) / outer / inner


def _all_to_all(wire: float, inner: int, route: Route, efficiency: float) -> float:
    """Time of the wire bytes of an all-to-all within the fabric."""
    # A device has B bytes for all ``inner`` devices, and its wire bytes are those for the others.
    # In a dimension of k devices, B k/4 pass the busiest link: on a ring each byte goes k/4 links
    # far on average, and the middle of a line parts k/2 devices from k/2. Dimensions work at the
    # same time.
    whole = wire * inner / max(inner - 1, 1)
    longest = 0.0
    for dimension in route.dimensions:
        size = dimension.size
        sent = wire
        if dimension.hops > 1 or size == 2:
            sent = whole * (size * size // 4) / size
        longest = max(longest, sent / (dimension.bandwidth * efficiency))
    return longest


def ties(reports: Sequence[LayoutReport]) -> tuple[tuple[LayoutReport, ...], ...]:
    """Returns layouts of equal time, as far as the model can tell.

    Args:
        reports: Of one plan; those without a time are left out.

    Returns:
        Groups of at least two, fastest first: those whose middle (of one example) is less than 10 %
        above that of the fastest of the group. No layout is in two groups.

    Example:
        >>> from shardax.plan import Layout, LayoutReport, TimeBand
        >>> def report(name, seconds):
        ...     band = TimeBand(seconds, seconds, seconds, 0.0, 0.0, 0.0, "compute")
        ...     return LayoutReport(Layout(name, (), (("data", 8),)), "fits", time=band)
        >>> found = ties([report("a", 1.0), report("b", 2.0), report("c", 1.05)])
        >>> [[each.layout.name for each in group] for group in found]
        [['a', 'c']]
    """
    every = [(report.seconds_per_example, report) for report in reports]
    timed = [(seconds, report) for seconds, report in every if seconds is not None]
    groups: list[list[tuple[float, LayoutReport]]] = []
    for seconds, report in sorted(timed, key=lambda pair: pair[0]):
        if groups and seconds <= groups[-1][0][0] * (1 + _TIE):
            groups[-1].append((seconds, report))
        else:
            groups.append([(seconds, report)])
    return tuple(tuple(report for _, report in group) for group in groups if len(group) > 1)
