# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the blockwise loss runs, its opponents agree, and says what is out of bounds."""

import json
import sys

import blockwise_loss
import numpy as np
import pytest


def test_quick_run_records_losses_dtypes_and_peaks(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["blockwise_loss", "--quick", "--json", str(path)])
    assert blockwise_loss.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("blockwise_loss", [])
    names = blockwise_loss.BASELINE, blockwise_loss.OURS
    rows = [(record["dtype"], record["name"]) for record in written["records"]]
    assert rows == [(dtype, name) for dtype in blockwise_loss.DTYPES for name in names]
    for who in ("compiler", "planner, cpu:1"):
        peaks = [record["peak_ratios"][who] for record in written["records"]]
        assert all(plain == 1 for plain in peaks[::2])
        assert all(ours < blockwise_loss.PEAK_BOUND for ours in peaks[1::2])


def test_peak_of_a_call_is_measured():
    arrays = blockwise_loss.inputs(blockwise_loss.QUICK | {"vocab": 65_536}, "float32")
    steps = blockwise_loss.compiled(16, arrays)
    peak = blockwise_loss.measured_peak(steps[blockwise_loss.BASELINE], arrays)
    if peak is None:
        pytest.skip("the peak of a process is known on Linux alone")
    logits = 2 * 64 * 65_536 * 4
    assert logits / 2 < peak < 8 * logits


def test_disagreeing_opponents_are_an_error():
    arrays = blockwise_loss.inputs(blockwise_loss.QUICK, "float32")
    steps = blockwise_loss.compiled(16, arrays)
    blockwise_loss.check_equal(steps, arrays, 1e-4)
    half = blockwise_loss.compiled(16, arrays)[blockwise_loss.OURS]
    steps["half"] = lambda hidden, kernel, targets: half(hidden / 2, kernel, targets)
    del steps[blockwise_loss.OURS]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        blockwise_loss.check_equal(steps, arrays, 1e-4)
    assert np.isfinite(float(half(*arrays)[0]))


@pytest.mark.parametrize(
    ("peak", "time", "failures"),
    [
        (0.25, 1.5, []),
        (0.26, 1.5, ["bfloat16: compiler peak 0.26 of that with all logits, at most 0.25"]),
        (0.1, 1.51, ["bfloat16: time 1.51 of that with all logits, at most 1.5"]),
    ],
)
def test_peak_and_time_are_bounded(peak, time, failures):
    record = {"dtype": "bfloat16", "ratio_median": time}
    record["peak_ratios"] = {"compiler": peak, "planner, cpu:4": 0.4}
    assert blockwise_loss.bound_failures(record) == failures
