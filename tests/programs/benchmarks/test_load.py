# SPDX-License-Identifier: Apache-2.0
"""The benchmark of loading runs, its opponents load the same, and it says what is out of bounds."""

import json
import sys

import load
import numpy as np
import pytest


def test_quick_run_records_each_way_to_load(monkeypatch, tmp_path, capsys):
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["load", "--quick", "--json", str(path)])
    assert load.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("load", [])
    names = [record["name"] for record in written["records"]]
    assert names[:2] == [load.BASELINE, load.OURS]
    assert len({*names}) == 5
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == names
    assert {line.count("|") for line in lines} == {6}


def test_opponents_all_load_the_same_tensors(tmp_path):
    file = load.write_model(load.QUICK, "float32", tmp_path / "model")
    load.check_equal(file)
    ways = load.opponents(file)
    stored = ways["safe_open, as stored"]()
    transposed = ways[load.BASELINE]()
    assert sorted(ways["safetensors.flax.load_file"]()) == sorted(stored)
    for name, tensor in stored.items():
        np.testing.assert_array_equal(transposed[name], tensor.T)
    assert ways["bytes of the file"]() == file.read_bytes()


@pytest.mark.parametrize(
    ("beyond", "memory", "failures"),
    [
        (1.1, 1.25, []),
        (1.0, None, []),
        (1.2, 1.0, ["1.20 of safe_open, transposed, at most 1.1"]),
        (1.0, 2.0, ["memory of 2.00 of the parameters, at most 1.25"]),
    ],
)
def test_time_and_memory_of_loading_are_bounded(beyond, memory, failures):
    record = {"beyond_building": beyond, "memory": memory}
    assert load.bound_failures(record) == failures
