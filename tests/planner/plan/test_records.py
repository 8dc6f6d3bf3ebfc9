# SPDX-License-Identifier: Apache-2.0
"""What a report says of a layout follows from its figures and collectives."""

from __future__ import annotations

import dataclasses

import pytest

from shardax import plan
from shardax.errors import PlanInputError
from shardax.hlo import Collective
from shardax.plan import Layout, LayoutReport, TimeBand
from shardax.plan.compile.evaluate import _flops_warnings

GATHER = Collective(
    "all-gather", "ag", "bf16", 800, 600.0, 4, ("model",),
    asynchronous=True, source="model.py:3", parameters=("up.kernel",),
)  # fmt: skip
SUMS = Collective(
    "all-reduce", "ar", "f32", 800, 1400.0, 8, ("data", "model"),
    crosses_slices=True, source="model.py:9", parameters=("up.kernel", "down.kernel"),
)  # fmt: skip
LAYOUT = Layout("both", (("embed", "data"),), (("data", 2), ("model", 4)))
REPORT = LayoutReport(
    LAYOUT, "fits", peak_bytes=12, limit_bytes=10, flops=30.0, program_flops=120.0,
    collectives=(GATHER, SUMS, GATHER),
)  # fmt: skip


@pytest.mark.parametrize(
    ("by", "totals"),
    [
        ("axes", {("data", "model"): 1400.0, ("model",): 1200.0}),
        ("kind", {"all-reduce": 1400.0, "all-gather": 1200.0}),
        ("source", {"model.py:9": 1400.0, "model.py:3": 1200.0}),
        ("dtype", {"f32": 1400.0, "bf16": 1200.0}),
        ("parameters", {("up.kernel", "down.kernel"): 1400.0, ("up.kernel",): 1200.0}),
    ],
)
def test_wire_bytes_are_summed_by_key_largest_first(by: str, totals: object) -> None:
    assert list(REPORT.wire_bytes(by).items()) == list(dict(totals).items())  # pyright: ignore[reportCallIssue, reportArgumentType, reportUnknownArgumentType]
    assert REPORT.total_wire_bytes == 2600.0


def test_shares_of_cross_slice_and_overlapped_wire_bytes() -> None:
    assert REPORT.cross_slice_bytes == 1400.0
    assert REPORT.asynchronous_share == 1200.0 / 2600.0
    silent = dataclasses.replace(REPORT, collectives=())
    assert (silent.cross_slice_bytes, silent.asynchronous_share) == (0.0, 0.0)


def test_replicated_compute_and_missing_memory_are_computed() -> None:
    assert REPORT.replicated_compute == 30.0 * 8 / 120.0
    assert REPORT.headroom_bytes == -2
    unknown = LayoutReport(LAYOUT, "rejected")
    assert (unknown.replicated_compute, unknown.headroom_bytes) == (1.0, None)


def test_compiled_report_needs_peak_or_time() -> None:
    band = TimeBand(1.0, 3.0, 1.0, 1.0, 1.0, 0.0, "compute")
    timed = LayoutReport(LAYOUT, "fits", time=band, examples=4.0)
    assert (timed.compiled, timed.seconds_per_example) == (True, 0.5)
    refused = LayoutReport(LAYOUT, "does not fit", peak_bytes=12)
    assert (refused.compiled, refused.seconds_per_example) == (True, None)
    assert not LayoutReport(LAYOUT, "rejected").compiled


def test_devices_computing_less_than_program_is_a_warning() -> None:
    assert _flops_warnings(15.0, 120.0, LAYOUT) == []
    assert _flops_warnings(30.0, 120.0, LAYOUT) == []  # done twice, not too little
    (warning,) = _flops_warnings(14.0, 120.0, LAYOUT)
    assert warning.startswith(
        "The counted operations of 8 devices, 112, are fewer than the 120 of the whole program"
    )


def test_settings_are_words_beside_rules_and_mesh() -> None:
    assert LAYOUT.settings == {}
    layout = dataclasses.replace(
        LAYOUT,
        parallel=(("microbatches", 8), ("schedule", "gpipe")),
        optimizer_rules=(("embed", ("data", "model")), ("mlp", "data"), ("norm", None)),
        optimizer_memory="pinned_host",
    )
    assert layout.settings == {
        "microbatches": "8",
        "schedule": "gpipe",
        "optimizer": "embed=data+model mlp=data norm=",
        "optimizer_memory": "pinned_host",
    }


def test_best_says_why_no_layout_fits() -> None:
    refused = [
        LayoutReport(dataclasses.replace(LAYOUT, name=name), "rejected", f"{name} is odd")
        for name in "abcd"
    ]
    with pytest.raises(PlanInputError) as none_compiled:
        plan.Plan("cpu:8", tuple(refused)).best()
    assert str(none_compiled.value) == (
        "None of 4 layouts fits into 1 of the memory of cpu:8. "
        "'a': a is odd; 'b': b is odd; 'c': c is odd"
    )
    with pytest.raises(PlanInputError, match=r"No layout was compiled for cpu:8\. 0 candidates$"):
        plan.Plan("cpu:8", (), ("0 candidates",)).best()
    with pytest.raises(PlanInputError, match=r"into 0\.5 of the memory of cpu:8\. 'both' needs"):
        plan.Plan("cpu:8", (REPORT, *refused)).best(fits=0.5)
