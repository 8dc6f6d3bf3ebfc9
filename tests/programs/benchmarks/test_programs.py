# SPDX-License-Identifier: Apache-2.0
"""Each benchmark runs and leaves its figures; the compiled programs are the same."""

import json
import sys

import _decoder_steps
import bounded_while
import dispatch
import eager
import init
import jax
import numpy as np
import program
import pytest
import raw_decoder
import trace_time
from raw_decoder import Config

import shardax as sx

RUNS = {
    dispatch: ["--sizes", "2", "--opponents", "shardax.jit"],
    program: ["--opponents", "shardax"],
    trace_time: ["--opponents", "shardax"],
    bounded_while: [
        "--opponents",
        "lax.while_loop",
        "bounded",
        'bounded, "recompute"',
        "scan + cond",
    ],
    eager: [],
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


def test_quick_run_compares_ways_to_write_in_place(monkeypatch, tmp_path):
    flags = ["--references", "--opponents", *dispatch.REFERENCES, "--block-ms", "1"]
    status, written = figures(dispatch, monkeypatch, tmp_path, *flags)
    assert (status, written["benchmark"]) == (0, "dispatch")
    measured = {(record["work"], record["name"]) for record in written["records"]}
    names = ["jax.jit", *dispatch.REFERENCES]
    assert measured == {(work, name) for work in ("update", "forward") for name in names}
    ratios = [record[key] for record in written["records"] for key in ("ratio_min", "ratio_median")]
    assert all(ratio > 0 for ratio in ratios)


def test_eager_calls_are_measured_and_compile_nothing(monkeypatch, tmp_path):
    status, written = figures(eager, monkeypatch, tmp_path)
    assert (status, written["benchmark"]) == (0, "eager")
    forms = {(record["name"], record["form"]) for record in written["records"]}
    assert {("cond", form) for form in eager.FORMS} < forms
    assert all(record["compilations"] == 0 for record in written["records"])


def test_compiled_train_step_equals_that_of_raw_jax(monkeypatch, tmp_path):
    status, written = figures(program, monkeypatch, tmp_path, "--check")
    assert (status, written["failures"]) == (0, [])
    compared = {record["figure"] for record in written["records"]}
    assert {"flops", "bytes accessed", "argument bytes", "output bytes", "temp bytes"} <= compared
    assert all(set(record["ratios"]) == {"raw jax", "shardax"} for record in written["records"])


@pytest.mark.parametrize("tied", [False, True])
def test_decoders_of_shardax_and_jax_give_equal_loss_and_gradients(tied):
    config = Config(layers=1, tied=tied)
    params = raw_decoder.init(config, jax.random.key(0))
    model = _decoder_steps.shardax_decoder(config)
    leaves = jax.tree.leaves(params)
    for (_, variable), leaf in zip(sx.iter_variables(model), leaves, strict=True):
        variable.value = leaf
    batch = _decoder_steps.batch(config)

    def objective(model):
        return raw_decoder.cross_entropy(model(batch["inputs"]), batch["targets"])

    ours = sx.jit(sx.value_and_grad(objective))(model)
    theirs = jax.jit(jax.value_and_grad(lambda p: raw_decoder.loss(config, p, batch)))(params)
    for mine, its in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)


def test_bounded_loops_are_timed_and_their_memory_counted(monkeypatch, tmp_path):
    status, written = figures(bounded_while, monkeypatch, tmp_path)
    assert (status, written["failures"]) == (0, [])
    works = {record["work"] for record in written["records"]}
    forward, gradient = "forward", "gradient"
    assert works == {
        forward, f"{forward} with history", "lanes with history",
        gradient, f"{gradient} of all steps", "memory",
    }  # fmt: skip
    kept = {(r["name"], r["limit"]): r.get("temp_bytes") for r in written["records"]}
    assert kept['bounded, "recompute"', 64] < kept["scan + cond", 64]


def test_bounded_loops_of_all_opponents_agree():
    given = bounded_while.inputs(5)
    last, rows, length, converged = bounded_while.raw_with_buffer(7)(*given)
    loops = bounded_while.forward(7) | bounded_while.forward_with_history(7)
    for run in loops.values():
        result = run(*given)
        assert np.allclose(result[0], last)
        assert result[1] is None or np.allclose(result[1][:5], rows[:5])
        assert (int(result[2]), bool(result[3])) == (int(length), bool(converged)) == (5, True)
    grads = [jax.jit(run)(*given) for run in bounded_while.gradients(16).values()]
    for gradient in grads[1:]:
        assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(gradient, grads[0], strict=True))
