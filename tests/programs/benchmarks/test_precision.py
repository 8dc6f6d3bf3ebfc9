# SPDX-License-Identifier: Apache-2.0
"""The benchmark of training in fp8 runs, and says what is out of bounds."""

import json
import sys

import precision
import pytest


def test_quick_run_records_losses_by_precision(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["precision", "--quick", "--json", str(path)])
    assert precision.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("precision", [])
    assert [record["name"] for record in written["records"]] == [*precision.PRECISIONS]
    baseline, *others = (record["held_out"] for record in written["records"])
    assert all(0 < abs(other - baseline) < 0.1 for other in others)


def test_means_over_seeds_are_bounded():
    records = [
        {"name": name, "loss": 1.0, "held_out": held_out}
        for name, *seeds in (("bfloat16", 2.0, 1.0), ("fp8", 2.1, 0.95), ("other", 2.1, 1.0))
        for held_out in seeds
    ]
    means = precision.means_of(records)
    assert means["fp8"]["above"] == pytest.approx(0.025)
    means["nan"] = {"above": float("nan")}
    assert precision.bound_failures(means) == [
        "other: 0.050 nats above bfloat16, at most 0.03",
        "nan: nan nats above bfloat16, at most 0.03",
    ]
