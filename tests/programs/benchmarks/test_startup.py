# SPDX-License-Identifier: Apache-2.0
"""The benchmark of starting programs runs: both programs take a step, both are imported."""

import json
import sys

import startup


def test_startup_programs_both_take_a_first_step(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["startup", "--quick", "--json", str(path)])
    assert startup.main() == 0
    written = json.loads(path.read_text())
    names = [record["name"] for record in written["records"]]
    assert names == ["raw jax", "shardax", "import jax", "import shardax"]
    assert written["failures"] == []
