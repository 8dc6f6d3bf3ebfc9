# SPDX-License-Identifier: Apache-2.0
"""The benchmark of training in fp8 runs, and says what is out of bounds."""

import json
import sys

import precision


def test_quick_run_records_losses_by_precision(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["precision", "--quick", "--json", str(path)])
    assert precision.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("precision", [])
    assert [record["name"] for record in written["records"]] == [*precision.PRECISIONS]
    baseline, *others = (record["held_out"] for record in written["records"])
    assert all(0 < abs(other - baseline) < 0.1 for other in others)


def test_losses_are_bounded():
    records = [{"name": "fp8", "above": above} for above in (-0.1, 0.03, 0.031, float("nan"))]
    assert precision.bound_failures(records) == [
        "fp8: 0.031 nats above bfloat16, at most 0.03",
        "fp8: nan nats above bfloat16, at most 0.03",
    ]
