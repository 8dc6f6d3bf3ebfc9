# SPDX-License-Identifier: Apache-2.0
"""Each benchmark runs and leaves its figures; the compiled programs are the same."""

import json
import sys

import dispatch
import init
import program
import pytest
import trace_time

RUNS = {
    dispatch: ["--sizes", "2", "--opponents", "shardax.jit"],
    program: ["--opponents", "shardax"],
    trace_time: ["--opponents", "shardax"],
    init: ["--layers", "1", "--methods", "raw jax", "shardax.shard"],
}


def figures(benchmark, monkeypatch, tmp_path, *flags):
    """Run a benchmark's main with `--quick`; its exit status and the JSON it wrote."""
    path = tmp_path / "figures.json"
    argv = [benchmark.__name__, "--quick", "--json", str(path), *RUNS[benchmark], *flags]
    monkeypatch.setattr(sys, "argv", argv)
    return benchmark.main(), json.loads(path.read_text())


@pytest.mark.parametrize("benchmark", [dispatch, trace_time, init])
def test_quick_run_compares_shardax_with_raw_jax(benchmark, monkeypatch, tmp_path):
    status, written = figures(benchmark, monkeypatch, tmp_path)
    assert (status, written["benchmark"]) == (0, benchmark.__name__)
    names = {record["name"] for record in written["records"]}
    ours = {"shardax", "shardax.jit", "shardax.shard"}
    theirs = {"raw jax", "jax.jit"}
    assert (len(names), len(names & ours), len(names & theirs)) == (2, 1, 1)


def test_compiled_train_step_is_the_one_of_raw_jax(monkeypatch, tmp_path):
    status, written = figures(program, monkeypatch, tmp_path, "--check")
    assert (status, written["failures"]) == (0, [])
    compared = {record["figure"] for record in written["records"]}
    assert {"flops", "bytes accessed", "argument bytes", "output bytes", "temp bytes"} <= compared
    assert all(set(record["ratios"]) == {"raw jax", "shardax"} for record in written["records"])
