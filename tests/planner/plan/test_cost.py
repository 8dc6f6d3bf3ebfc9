# SPDX-License-Identifier: Apache-2.0
"""The time band: hand counts per collective and fabric, laws, ties, and figures of this machine."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax import hlo, plan
from shardax.errors import HardwareError, PlanInputError, TargetError
from shardax.plan.hardware.cost import collective_time
from shardax.plan.records import Layout, LayoutReport, TimeBand

V5E, POD = plan.Target.parse("tpu:v5e:4x4"), plan.Target.parse("tpu:v5e:16x16")
SLICES, H100 = plan.Target.parse("tpu:v5e:2*4x4"), plan.Target.parse("gpu:h100:8x8")
LINK, DCN, NVLINK, IB = 4.5e10, 3.125e9, 4.5e11, 5e10
BYTES = 1_200_000_000


def collective(kind: str, axes: tuple[str, ...], size: int, **more: object) -> hlo.Collective:
    """A collective of 1.2 GB that runs once, and what it sends by the formulas of ``hlo.facts``."""
    sent = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}
    wire = sent.get(kind, (size - 1) / size) * BYTES
    return hlo.Collective(kind, kind, "bf16", BYTES, wire, size, axes, **more)  # pyright: ignore[reportArgumentType]


def facts(*collectives: hlo.Collective, flops: float = 0, hbm: float = 0) -> hlo.ProgramFacts:
    return hlo.ProgramFacts(collectives, flops, hbm)


# --- collectives by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-gather", 3 / 4 * BYTES / LINK),
        ("reduce-scatter", 3 / 4 * BYTES / LINK),
        ("all-reduce", 2 * 3 / 4 * BYTES / LINK),
        ("collective-permute", BYTES / LINK),
        # The middle link of four in a line carries half of the bytes of two devices.
        ("all-to-all", 2 * BYTES / 2 / LINK),
    ],
)
def test_collectives_on_a_line_of_four(kind: str, seconds: float) -> None:
    found = collective_time(collective(kind, ("model",), 4), V5E, {"data": 4, "model": 4})
    assert found.fabric == pytest.approx(seconds)
    assert found.network == 0


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-gather", 15 / 16 * BYTES / (2 * LINK)),
        ("all-reduce", 2 * 15 / 16 * BYTES / (2 * LINK)),
        # A quarter of the ring on average, both ways: 16 B/4 bytes pass a device's two links.
        ("all-to-all", 16 / 4 * BYTES / (2 * LINK)),
    ],
)
def test_collectives_on_a_ring_of_sixteen(kind: str, seconds: float) -> None:
    found = collective_time(collective(kind, ("model",), 16), POD, {"data": 16, "model": 16})
    assert found.fabric == pytest.approx(seconds)


def test_two_dimensions_halve_the_time_of_a_gather() -> None:
    found = collective_time(collective("all-gather", ("data",), 256), POD, {"data": 256})
    assert found.fabric == pytest.approx(255 / 256 * BYTES / (4 * LINK))


def test_switched_all_to_all_sends_its_wire_bytes() -> None:
    mesh = {"data": 8, "model": 8}
    found = collective_time(collective("all-to-all", ("model",), 8), H100, mesh)
    assert found.fabric == pytest.approx(7 / 8 * BYTES / NVLINK)


def test_all_reduce_over_nodes_uses_all_adapters() -> None:
    """Within each node 2 (7/8) B; then every GPU an eighth of it, 2 (7/8) B/8, over the network."""
    found = collective_time(collective("all-reduce", ("data",), 64), H100, {"data": 64})
    assert found.fabric == pytest.approx(2 * 7 / 8 * BYTES / NVLINK)
    assert found.network == pytest.approx(2 * 7 / 8 * BYTES / 8 / IB)
    assert max(found) == found.network


def test_multi_node_exchange_is_bound_by_network() -> None:
    found = collective_time(collective("all-to-all", ("data",), 64), H100, {"data": 64})
    assert found.fabric == pytest.approx(7 / 64 * BYTES / NVLINK)
    assert found.network == pytest.approx(56 / 64 * BYTES / IB)


def test_collective_between_slices_uses_only_the_network() -> None:
    mesh = {"slice": 2, "data": 4, "model": 4}
    between = collective("all-reduce", ("slice",), 2, crosses_slices=True)
    found = collective_time(between, SLICES, mesh)
    assert (found.fabric, found.network) == (0, pytest.approx(BYTES / DCN))


def test_repeated_collective_takes_at_least_its_latencies() -> None:
    """1,000 runs along a line of four, three hops of a microsecond."""
    tiny = hlo.Collective("all-reduce", "r", "f32", 4, 6_000.0, 4, ("model",), runs=1000)
    found = collective_time(tiny, V5E, {"data": 4, "model": 4})
    assert found.fabric == pytest.approx(1000 * 3e-6)


def test_unaligned_groups_use_the_last_fitting_axis() -> None:
    mesh = {"data": 4, "model": 4}
    found = collective_time(collective("all-gather", (), 2), V5E, mesh)
    assert found.fabric == pytest.approx(1 / 2 * BYTES / LINK)
    whole = collective_time(collective("all-gather", (), 8), V5E, mesh)
    assert whole.fabric == pytest.approx(7 / 8 * BYTES / (2 * LINK))


@pytest.mark.parametrize(
    ("size", "crosses", "fabric", "network"),
    [
        (4, False, 3 / 4 * BYTES / LINK, 0.0),
        (2, True, 0.0, 1 / 2 * BYTES / DCN),
        (4, True, 1 / 2 * BYTES / LINK, 1 / 2 * BYTES / 2 / DCN),
    ],
)
def test_partial_axis_groups_stay_within_a_slice(
    size: int, crosses: bool, fabric: float, network: float
) -> None:
    """``data`` is 4 devices in each of two slices."""
    part = collective("all-gather", ("data",), size, crosses_slices=crosses)
    found = collective_time(part, SLICES, {"data": 8, "model": 4})
    assert (found.fabric, found.network) == (pytest.approx(fabric), pytest.approx(network))


def test_partial_axis_groups_fill_nodes_first() -> None:
    found = collective_time(collective("all-gather", ("data",), 16), H100, {"data": 64})
    assert found.fabric == pytest.approx(7 / 8 * BYTES / NVLINK)
    assert found.network == pytest.approx(1 / 2 * BYTES / 8 / IB)


def test_group_of_one_takes_no_time() -> None:
    alone = hlo.Collective("all-reduce", "r", "f32", 4, 0.0, 1, ())
    assert max(collective_time(alone, V5E, {"data": 16})) == 0


# --- the band -------------------------------------------------------------------------------------


def test_band_spans_longest_part_to_sum_of_parts() -> None:
    program = facts(collective("all-gather", ("model",), 4), flops=1.97e12, hbm=8.1e9)
    gather = 0.75 * BYTES / LINK
    assert plan.time_band(program, V5E, {"data": 4, "model": 4}) == TimeBand(
        lower=gather,
        upper=pytest.approx(0.01 + 0.01 + gather),
        compute=pytest.approx(0.01),
        memory=pytest.approx(0.01),
        communication=gather,
        cross_slice=0,
        binding="communication",
    )


def test_fabric_and_network_overlap_only_in_lower_bound() -> None:
    band = plan.time_band(facts(collective("all-reduce", ("data",), 64)), H100, {"data": 64})
    fabric, network = 2 * 7 / 8 * BYTES / NVLINK, 2 * 7 / 8 * BYTES / 8 / IB
    assert (band.lower, band.upper) == (pytest.approx(network), pytest.approx(fabric + network))
    assert band.cross_slice == pytest.approx(network)


def test_known_limits_of_two_layouts_on_v5p() -> None:
    """By jax-ml.github.io/scaling-book/training, an MLP of D and F features along one ring of v5p.

    Data-parallel with gathered weights it is bound by arithmetic from C/W = 2550 tokens a device,
    tensor-parallel over Y devices as long as Y < F/2550, where W is the bandwidth both ways. A ring
    of n sends (n-1)/n of what is gathered, which the book leaves out.
    """
    target, mesh = plan.Target.parse("tpu:v5p:8x8x8"), {"other": 64, "data": 8}
    ratio, d, f = 4.59e14 / (2 * 9e10), 4096, 16384
    assert ratio == 2550

    def gathered(elements: float) -> hlo.Collective:
        size = int(2 * elements)
        return hlo.Collective("all-gather", "g", "bf16", size, 7 / 8 * size, 8, ("data",))

    tokens = ratio * 7 / 8
    band = plan.time_band(facts(gathered(2 * d * f), flops=4 * tokens * d * f), target, mesh)
    assert band.compute == pytest.approx(band.communication)

    features, tokens = ratio * 7 / 8 * 8, 10_000
    moved = gathered(2 * tokens * d)  # in before the first product, out after the second
    work = 4 * tokens * d * features / 8
    band = plan.time_band(facts(moved, flops=work), target, mesh)
    assert band.compute == pytest.approx(band.communication, rel=1e-6)


def test_dtype_of_the_products_sets_the_peak() -> None:
    program, mesh = facts(flops=1e12), {"data": 64}
    times = {dtype: plan.time_band(program, H100, mesh, dtype).compute for dtype in ("bf16", "f8")}
    assert times == {"bf16": 1e12 / 9.89e14, "f8": 1e12 / 1.979e15}


def test_efficiency_scales_its_own_part() -> None:
    program = facts(collective("all-gather", ("data",), 16), flops=1e12, hbm=1e9)
    peak = plan.time_band(program, V5E, {"data": 16})
    half = plan.time_band(program, V5E, {"data": 16}, efficiency=plan.Efficiency(compute=0.5))
    assert half.compute == 2 * peak.compute
    assert (half.memory, half.communication) == (peak.memory, peak.communication)


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_efficiency_is_a_share(value: float) -> None:
    with pytest.raises(PlanInputError, match=r"links=.*above 0 and at most 1"):
        plan.Efficiency(links=value)


def test_mesh_of_another_size_is_an_error() -> None:
    with pytest.raises(TargetError, match="has 8 devices"):
        plan.time_band(facts(), V5E, {"data": 8})


amounts = st.floats(0, 1e15)
KINDS = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@given(
    flops=amounts,
    hbm=amounts,
    kinds=st.lists(st.sampled_from(KINDS), max_size=4),
    axes=st.sampled_from([("data",), ("model",), ("data", "model")]),
    target=st.sampled_from([V5E, plan.Target.parse("gpu:h100:2x8"), plan.Target.parse("cpu:16")]),
)
def test_law_band_contains_parts_and_is_monotonic(
    flops: float, hbm: float, kinds: list[str], axes: tuple[str, ...], target: plan.Target
) -> None:
    mesh = {"data": 4, "model": 4}
    found = [collective(kind, axes, 4 ** len(axes)) for kind in kinds]
    band = plan.time_band(facts(*found, flops=flops, hbm=hbm), target, mesh)
    parts = {name: getattr(band, name) for name in ("compute", "memory", "communication")}
    assert band.lower == max(parts.values()) == parts[band.binding]
    assert band.upper >= sum(parts.values()) or math.isclose(band.upper, sum(parts.values()))
    assert band.lower <= band.middle <= band.upper
    more = plan.time_band(facts(*found, *found, flops=flops, hbm=hbm), target, mesh)
    assert more.lower >= band.lower and more.upper >= band.upper
    assert more.communication == pytest.approx(2 * band.communication)


# --- ties -----------------------------------------------------------------------------------------


def report(name: str, lower: float | None, upper: float = 0.0) -> LayoutReport:
    band = None if lower is None else TimeBand(lower, upper, 0, 0, lower, 0, "communication")
    return LayoutReport(Layout(name, (), (("data", 8),)), "fits", time=band)


def _names(groups: tuple[tuple[LayoutReport, ...], ...]) -> list[list[str]]:
    return [[each.layout.name for each in group] for group in groups]


def test_near_equal_layouts_tie_with_their_fastest() -> None:
    reports = [
        report("c", 1.0, 1.3), report("a", 1.0, 1.0), report("b", 1.0, 1.19),
        report("alone", 4.0, 4.0), report("none", None), report("d", 1.0, 1.4),
    ]  # fmt: skip
    assert _names(plan.ties(reports)) == [["a", "b"], ["c", "d"]]


def test_batch_sizes_tie_by_time_per_example() -> None:
    small, large, slow = report("small", 1.0, 1.0), report("large", 4.0, 4.2), report("slow", 1.0)
    every = [
        dataclasses.replace(each, examples=count)
        for each, count in ((small, 8.0), (large, 32.0), (slow, 2.0))
    ]
    assert _names(plan.ties(every)) == [["small", "large"]]


@given(times=st.lists(st.floats(0.1, 10), max_size=8))
def test_law_ties_are_disjoint_and_within_ten_percent(times: list[float]) -> None:
    reports = [report(f"layout {i}", time, time) for i, time in enumerate(times)]
    groups = plan.ties(reports)
    names = [name for group in _names(groups) for name in group]
    assert len(names) == len(set(names))
    for group in groups:
        first = group[0].time
        assert first is not None and len(group) > 1
        assert all(each.time and each.time.lower <= first.lower * 1.1 for each in group)


# --- this machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 8])
def test_shared_processor_devices_copy_serially_without_overlap(size: int) -> None:
    cpu = plan.find_hardware("cpu").like(
        peak_flops={"f32": 1e9},
        memory_bandwidth=1e9,
        link_latency=0.5,
        copy_bandwidth={"all-gather": 6e8, "all-reduce": 1.2e9},
    )
    mesh = {"data": 8 // size, "model": size}
    gather, reduce = (collective(kind, ("model",), size) for kind in ("all-gather", "all-reduce"))
    target = plan.Target(cpu, (8,))
    # What the collectives read and write is part of how long they take.
    own = gather.payload * (1 + 1 / size) + 2 * reduce.payload
    band = plan.time_band(facts(gather, reduce, flops=3e9, hbm=4e9 + own), target, mesh, "f32")
    assert (band.compute, band.memory, band.communication) == (3.0, 4.0, 2.5 + 1.5)
    assert (band.lower, band.upper, band.binding) == (11.0, 11.0, "memory")
    kept_in_caches = plan.time_band(facts(gather, reduce, hbm=own / 2), target, mesh, "f32")
    assert kept_in_caches.memory == 0.0


def test_rate_of_copying_is_above_zero() -> None:
    with pytest.raises(HardwareError, match=r"copy_bandwidth is .*by kind of collective"):
        plan.find_hardware("cpu").like(copy_bandwidth={"all-reduce": 0.0})
