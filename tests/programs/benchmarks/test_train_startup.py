# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the training command takes both opponents to their first step."""

import json
import sys

import pytest
import train_startup


def test_quick_run_records_wall_and_processor_time(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["train_startup", "--quick", "--json", str(path)])
    assert train_startup.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("train_startup", [])
    assert [record["name"] for record in written["records"]] == [
        f"{name}, {kind} time" for kind in ("wall", "processor") for name in train_startup.OPPONENTS
    ]
    assert all(record["min_us"] > 0 for record in written["records"])


def test_opponent_without_a_first_step_is_an_error(tmp_path):
    words = [sys.executable, "-c", "print('step 0/1')"]
    with pytest.raises(RuntimeError, match="ended with 0 before its first step"):
        train_startup.first_step(words, str(tmp_path))
