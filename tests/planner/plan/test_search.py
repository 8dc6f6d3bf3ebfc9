# SPDX-License-Identifier: Apache-2.0
"""Searches: what is found, and what the plan says of how; interrupted ones go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import pytest

import shardax as sx
from shardax import plan
from shardax.partition.context import current_rules
from shardax.plan import NamedShape
from shardax.plan.compile.pool import make_evaluator
from shardax.plan.inputs import Inputs
from shardax.plan.report.progress import progress_for
from shardax.plan.searching import stages
from tests.planner.plan.steps import Perceptron, perceptron, perceptron_loss

EIGHT = [{"data": 8}]
FAST: dict[str, Any] = {"cache": None, "progress": False, "effort": "screen"}


def sequences(model: Perceptron, x: jax.Array) -> jax.Array:
    def loss(model: Perceptron, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ model.up.value) @ model.down.value
        return (sx.constrain(hidden, ("batch", "seq", "embed")) ** 2).sum()

    grads = sx.grad(loss)(model, x)
    model.up.value -= 0.1 * grads["up"]
    model.down.value -= 0.1 * grads["down"]
    return grads["up"].sum()


def long_sequence() -> tuple[Any, tuple[Any, ...]]:
    x = NamedShape((1, 8192, 64), "float32", ("batch", "seq", "embed"))
    return sequences, (Perceptron(64, 256), x)


@pytest.mark.parametrize(
    ("case", "best", "worst"),
    [
        (perceptron(8192, 64, 256), "batch=data embed=data (8)", "embed=data (8)"),
        (perceptron(2, 256, 1024), "mlp=data (8)", "embed=data (8)"),
        (long_sequence(), "seq=data embed=data (8)", "embed=data (8)"),
    ],
    ids=["a large batch: FSDP", "a small batch: tensors", "one long sequence: sequences"],
)
def test_search_finds_names_to_split_without_hints(case: Any, best: str, worst: str) -> None:
    step, args = case
    found = plan.search(step, args, "cpu:8", meshes=EIGHT, top=None, within=None, **FAST)
    compiled = [report.layout.name for report in found if report.outcome == "fits"]
    assert (compiled[0], compiled[-1]) == (best, worst)
    assert found.reports[-1].outcome == "rejected"


def test_plan_notes_count_candidates_by_outcome() -> None:
    found = plan.search(*perceptron(), "cpu:8", meshes=EIGHT, top=2, within=None, **FAST)
    assert len(found) == 2
    tried, compiled = found.notes
    assert tried == (
        "8 assignments of batch, embed, mlp over 1 meshes; 5 of them possible and different; "
        "rejected without compiling: 1 that repeat work, 0 whose arguments do not fit; "
        "4 candidates"
    )
    assert compiled == "compiled: 4 fits"


def test_search_compiles_only_finalists_with_full_effort() -> None:
    options = {**FAST, "effort": "full"}
    fixed = {"embed": None}
    found = plan.search(*perceptron(), "cpu:8", meshes=EIGHT, fix=fixed, finalists=1, **options)
    efforts = [report.provenance.effort for report in found if report.provenance]
    # The best as traced, the best as compiled where that is another one, and no more.
    assert efforts[0] == "full" and efforts.count("full") <= 2
    assert efforts.count("screen") == 3 - efforts.count("full")


def test_batch_sizes_are_compared_by_time_per_example() -> None:
    def make(batch: int) -> Any:
        return perceptron(batch, 64, 256)

    fixed = dict.fromkeys(("embed", "mlp"))
    options: dict[str, Any] = {**FAST, "fix": fixed, "batch": [64, 8192]}
    found = plan.search(make, (), "cpu:8", meshes=EIGHT, **options)
    assert found.reports[0].layout.name == "batch=data (8) batch:8192"
    assert {report.examples for report in found} == {64.0, 8192.0}


def test_interrupted_search_returns_partial_plan_and_resumes(tmp_path: Path) -> None:
    seen: list[sx.Rules] = []

    def step(model: Perceptron, x: jax.Array) -> jax.Array:
        rules = current_rules()
        if rules.mesh_axes and rules not in seen:
            seen.append(rules)
            if len(seen) == 2:
                raise KeyboardInterrupt
        return perceptron_loss(model, x)

    _, args = perceptron()
    options: dict[str, Any] = {**FAST, "meshes": EIGHT, "cache": tmp_path, "fix": {"embed": None}}
    with pytest.raises(KeyboardInterrupt) as error:
        plan.search(step, args, "cpu:8", **options)
    interrupted = error.value
    assert isinstance(interrupted, sx.errors.PlanInterrupted)
    assert "interrupted after 1 of 3 layouts" in str(interrupted)
    assert f"kept in {tmp_path}: the same call goes on from there" in str(interrupted)
    assert isinstance(interrupted.plan, plan.Plan)
    done = interrupted.plan.reports[0]
    again = plan.search(step, args, "cpu:8", **options)
    assert len(again) == 3
    assert again[done.layout.name].compile_seconds == 0.0 < done.compile_seconds


def test_search_in_other_processes_finds_the_same() -> None:
    options: dict[str, Any] = {**FAST, "fix": {"embed": None}}
    here = plan.search(*perceptron(), "cpu:8", meshes=EIGHT, **options)
    there = plan.search(*perceptron(), "cpu:8", meshes=EIGHT, processes=1, **options)
    assert [(r.layout, r.outcome, r.time, r.collectives) for r in here] == [
        (r.layout, r.outcome, r.time, r.collectives) for r in there
    ]


def crashing(model: Perceptron, x: jax.Array) -> jax.Array:
    """A step by which a compiler dies if the hidden layer is split."""
    if dict(current_rules().pairs).get("mlp"):
        os.kill(os.getpid(), signal.SIGKILL)
    return perceptron_loss(model, x)


def test_compiler_crashes_do_not_end_the_search() -> None:
    _, args = perceptron()
    options: dict[str, Any] = {**FAST, "fix": {"embed": None}, "top": None}
    found = plan.search(crashing, args, "cpu:8", meshes=EIGHT, processes=1, **options)
    outcomes = {each.layout.name: each.outcome for each in found if each.outcome != "rejected"}
    assert outcomes == {
        "batch=data (8)": "fits",
        "batch=data mlp=data (8)": "failed",
        "mlp=data (8)": "failed",
    }
    assert "was killed by SIGKILL" in found["mlp=data (8)"].reason
    assert "compiled: 2 failed, 1 fits" in found.notes


def test_nothing_is_compiled_to_see_what_would_be() -> None:
    dimensions, candidates = plan.explore(*perceptron(), "tpu:v5p:8x8x8")
    assert dimensions.flops == 5 * 2.0 * 32 * 16 * 64
    assert {layout.sizes["data"] * layout.sizes["model"] for layout in candidates.layouts} == {512}


def test_finalists_of_one_batch_size_are_compiled_alone() -> None:
    options: dict[str, Any] = {**FAST, "effort": "full", "finalists": 1, "batch": [64, 8192]}
    fixed = dict.fromkeys(("embed", "mlp"))

    def make(batch: int) -> Any:
        return perceptron(batch, 64, 256)

    found = plan.search(make, (), "cpu:8", meshes=EIGHT, fix=fixed, **options)
    efforts = {r.layout.name: r.provenance.effort for r in found if r.provenance}
    assert efforts == {"batch=data (8) batch:8192": "full", "batch=data (8) batch:64": "screen"}


def test_search_without_room_compiles_nothing() -> None:
    step, args = perceptron(64, 1024, 4096)
    options: dict[str, Any] = {**FAST, "meshes": EIGHT, "top": None, "compiler": "estimate"}
    found = plan.search(step, args, "gpu:h100:1x8@0.000001", **options)
    assert {report.outcome for report in found} == {"rejected"}
    [note] = found.notes
    assert note.endswith("4 whose arguments do not fit; 0 candidates")


def test_candidate_without_room_for_gradients_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FEW", 0)
    step, args = perceptron(64, 1024, 4096)
    options: dict[str, Any] = {**FAST, "meshes": EIGHT, "top": None, "compiler": "estimate"}
    donating = sx.jit(donate_argnums=0)(step)
    found = plan.search(donating, args, "gpu:h100:1x8@0.0004", within=1.0, **options)
    # Of 34 MB, arguments take 33.6, and gradients as many.
    assert found["batch=data (8)"].reason == (
        "not compiled: its arguments and gradients alone need more than a device's memory; "
        "within=None compiles all"
    )
    assert found["mlp=data (8)"].outcome == "fits"


def test_step_on_no_rows_multiplies_nothing() -> None:
    x = NamedShape((0, 8), "float32", ("batch", "embed"))
    weight = Perceptron(8, 16)
    found = plan.search(
        lambda model, x: x @ model.up.value, (weight, x), "gpu:h100:1x8", meshes=EIGHT,
        effort="trace", top=None,
    )  # fmt: skip
    assert {r.expected.parts.products for r in found if r.expected} == {0.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"effort": "high"}, "effort is 'trace', 'screen' or 'full'"),
        ({"top": 0}, "top=0"),
        ({"finalists": -1}, "finalists=-1"),
        ({"batch": [8, "16"]}, "batch='16' must be an integer of at least 1"),
        ({"batch": 8}, "batch is a int, not a sequence of sizes"),
        ({"batch": [8.5]}, "batch=8.5"),
        ({"meshes": []}, "meshes is empty"),
        ({"mesh_axes": "data"}, "mesh_axes='data'"),
        ({"fix": {"mpl": None}}, "Did you mean 'mlp'"),
        ({"batch": [8]}, r"plan.search\(make_step, \(\), target, batch=\[32, 64\]\)"),
    ],
)
def test_search_refuses_what_cannot_be_searched(options: Any, said: str) -> None:
    with pytest.raises(sx.errors.PlanInputError, match=said):
        plan.search(*perceptron(), "cpu:8", **{**FAST, **options})


def test_mesh_without_the_targets_devices_is_refused() -> None:
    with pytest.raises(sx.errors.TargetError):
        plan.search(*perceptron(), "cpu:8", meshes=[{"data": 4}], **FAST)
    with pytest.raises(sx.errors.TargetError, match=r"slice=2 has 2 devices and .* has 16"):
        plan.search(*perceptron(), "tpu:v5e:2*2x4", mesh_axes=("slice",), **FAST)


def test_choices_that_make_no_step_are_refused() -> None:
    with pytest.raises(sx.errors.PlanInputError, match="returned function; with batch it returns"):
        plan.search(lambda batch: perceptron(batch)[0], (), "cpu:8", batch=[8], **FAST)


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress_for(True)
    inputs = Inputs(*perceptron())
    layout = plan.Layout("dp", (("batch", "data"),), (("data", 8),))
    target = plan.Target.parse("cpu:8")
    with shown, make_evaluator(inputs, target, "auto", None, None) as evaluator:
        shown.expect(1, "screening")
        for answer in evaluator.evaluate([layout], begun=shown.begin):
            shown.end(answer.report, answer.cached)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("screening: 1\n[1/1] dp: fits, ")


def test_unpromising_candidates_are_skipped_once_enough_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "FEW", 0)
    options: dict[str, Any] = {**FAST, "meshes": EIGHT, "within": 1.0, "finalists": 0}
    found = plan.search(*perceptron(), "cpu:8", top=1, **options)
    assert found.notes[1] == "compiled: 1 fits; left out by expected time: 3"
    every = plan.search(*perceptron(), "cpu:8", top=4, **options)
    assert every.notes[1] == "compiled: 4 fits"
    assert {report.outcome for report in every} == {"fits"}
