# SPDX-License-Identifier: Apache-2.0
"""The benchmark of named axes runs, its opponents agree, and it says when a bound does not hold."""

import json
import sys

import jax
import named
import numpy as np
import pytest


def test_quick_run_records_each_work_and_opponent(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    argv = ["named", "--quick", "--json", str(path), "--opponents", "shardax.named"]
    monkeypatch.setattr(sys, "argv", argv)
    assert named.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("named", [])
    works = [*named.plain().works]
    rows = [(record["work"], record["name"]) for record in written["records"]]
    both = [(work, name) for work in works for name in (named.BASELINE, "shardax.named")]
    assert rows == [*both, ("program", "shardax.named")]


@pytest.mark.parametrize("name", ["shardax.named", "penzai"])
def test_opponents_equal_plain_arrays(name):
    expected, found = named.plain().works, named.MAKERS[name]().works
    assert found.keys() == expected.keys()
    for work, run in found.items():
        (leaf,) = jax.tree.leaves(run())
        np.testing.assert_array_equal(np.sort(leaf, None), np.sort(expected[work](), None))


@pytest.mark.parametrize(
    ("changes", "failures"),
    [
        ({}, []),
        ({"ratio_median": 15.1}, ["add: 15.1 of plain arrays, at most 15.0"]),
        (
            {"ratio_median": 3.1, "work": "compiled call"},
            ["compiled call: 3.1 of plain arrays, at most 3.0"],
        ),
        ({"ratio_median": 99.0, "name": "penzai"}, []),
        ({"ratio_median": 99.0, "work": "sum"}, []),
    ],
)
def test_addition_and_the_compiled_call_are_bounded(changes, failures):
    record = {"name": "shardax.named", "work": "add", "ratio_median": 14.0} | changes
    assert named.bound_failures(record) == failures
