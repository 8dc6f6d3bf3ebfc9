# SPDX-License-Identifier: Apache-2.0
"""The benchmark of workers runs, and all of its programs compute the same."""

import json
import sys

import worker


def test_programs_with_and_without_worker_agree(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["worker", "--quick", "--layers", "1", "--json", str(path)])
    assert worker.main() == 0
    written = json.loads(path.read_text())
    assert [record["name"] for record in written["records"]] == ["cold", "cache", "worker"]
    assert all(len(record["seconds"]) == 1 for record in written["records"])
    assert not any("differ" in failure for failure in written["failures"])
