# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of several processes run: what they cost, and what faults do to them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_cost_of_processes_is_measured(tmp_path):
    written = run("processes.py", tmp_path)
    names = [record["steps"]["name"] for record in written["records"][:2]]
    assert names == ["1 x 8", "2 x 4"]
    once = written["records"][2:]
    assert [(row["processes"], row["layers"]) for row in once] == [(1, 1), (2, 1)]
    alone, two = once
    for phase in ("agree", "program", "copies"):
        assert alone[f"{phase}_seconds"] == 0 < two[f"{phase}_seconds"], phase
    assert all(row["save_seconds"] > 0 and row["metadata_bytes"] > 0 for row in once)
    assert written["failures"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="limits the files of a process, as Linux can")
def test_job_with_killed_coordinator_resumes_bit_for_bit(tmp_path):
    (record,) = run("faults.py", tmp_path)["records"]
    assert (record["fault"], record["process"], record["while writing"]) == ("kill", 0, True)
    assert record["statuses"][0] == -9 and record["statuses"][1] not in (0, None)
    assert record["resumed"] and record["same bits"]
    assert record["resumed at"] in (5, 10)


def run(program: str, folder: Path) -> dict:
    """What a benchmark writes, run as the command that it is."""
    file = folder / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / program), "--quick", "--json", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(file.read_text())
