# SPDX-License-Identifier: Apache-2.0
"""The benchmark of depth runs, compares equal programs, and says when a bound does not hold."""

import json
import re
import sys

import depth
import pytest


def test_quick_run_records_each_tower_and_depth(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    argv = ["depth", "--quick", "--json", str(path), "--opponents", "shardax unrolled"]
    monkeypatch.setattr(sys, "argv", argv)
    assert depth.main() == 0
    written = json.loads(path.read_text())
    assert written["benchmark"] == "depth"
    rows = [(record["name"], record["layers"]) for record in written["records"]]
    assert rows == [(name, n) for name in ("shardax.nn.Stack", "shardax unrolled") for n in (2, 4)]


def instructions(name, layers):
    """How many instructions a tower compiles to."""
    return len(re.findall(r"^ +(?:ROOT )?%\S+ = ", depth.TOWERS[name](layers)().as_text(), re.M))


def test_program_size_of_scans_is_independent_of_depth():
    ours = instructions("shardax.nn.Stack", 3)
    assert instructions("shardax.nn.Stack", 6) == ours > 100
    assert abs(ours / instructions("nnx.scan", 3) - 1) < 0.05


def test_penzais_tower_compiles_every_layer():
    assert instructions("penzai LayerStack", 4) > 1.4 * instructions("penzai LayerStack", 2)


def record(name, layers, *, ratio=1.0, to_least=1.0):
    return {"name": name, "layers": layers, "ratio_median": ratio, "ratio_to_least": to_least}


@pytest.mark.parametrize(
    ("ours", "nnx", "failures"),
    [
        (1.19, 0.96, []),
        (1.21, 0.96, ["96 layers take 1.21 of 12, at most 1.2"]),
        (1.0, 0.5, ["96 layers: 2.00 of nnx.scan, at most 1.05"]),
    ],
)
def test_growth_and_the_ratio_to_nnx_are_bounded(ours, nnx, failures):
    records = [
        record(depth.BASELINE, 12),
        record(depth.BASELINE, 96, to_least=ours),
        record("nnx.scan", 96, ratio=nnx),
        record("shardax unrolled", 96, ratio=9.0, to_least=8.0),
    ]
    assert depth.failures_of(records) == failures
