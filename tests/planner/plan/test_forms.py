# SPDX-License-Identifier: Apache-2.0
"""Pipelines, split sequences, experts and ZeRO are candidates, with exact figures."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax import plan
from shardax.plan import NamedShape
from shardax.plan.searching import stages
from shardax.plan.searching.search import explore
from tests.planner.plan.absent import TPU
from tests.planner.plan.steps import Perceptron, decoder, param, perceptron_loss
from tests.values import with_values

FAST: dict[str, Any] = {"cache": None, "progress": False, "effort": "screen"}
# What is not the point of a search, which then has few candidates.
WHOLE = dict.fromkeys(("embed", "heads", "kv_heads", "head_dim"))
BATCH, EMBED, MLP, LAYERS = 16, 8, 16, 4
WEIGHTS = 2 * 2 * EMBED * MLP * 4  # bytes of the moments of both weights
SCALES = 2 * 3 * 4  # and of the vector
COUNTS = 2 * 4  # the numbers of steps, of Adam and of the optimizer


class Block(sx.Module):
    def __init__(self) -> None:
        self.kernel = param((EMBED, EMBED), "in", "out")

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.numpy.tanh(x @ self.kernel.value)


def apply(stack: Any, x: jax.Array) -> jax.Array:
    return stack(x)


def stacked() -> tuple[Any, tuple[Any, ...]]:
    x = NamedShape((BATCH, EMBED), "float32", ("batch", "embed"))
    return apply, (sx.nn.Stack(Block, LAYERS), x)


class Scaled(Perceptron):
    """A perceptron with a vector of three numbers, which eight devices do not divide."""

    def __init__(self) -> None:
        super().__init__(EMBED, MLP)
        self.scale = param((3,), "scale")

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) * self.scale.value.sum()


def with_adam() -> tuple[Any, tuple[Any, ...]]:
    """A perceptron's step with Adam, which keeps two moments of each parameter and a count."""
    model = Scaled()
    optimizer = sx.train.Optimizer(model, optax.adam(1e-3))

    @sx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        loss, gradients = sx.value_and_grad(perceptron_loss)(model, x)
        optimizer.update(gradients)
        return loss

    return step, (model, optimizer, NamedShape((BATCH, EMBED), "float32", ("batch", "embed")))


def trained(**changes: Any) -> tuple[Any, tuple[Any, ...]]:
    """A decoder's step with Adam."""
    _, (model, batch) = decoder(**changes)
    optimizer = sx.train.Optimizer(model, optax.adam(1e-3))

    @sx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, gradients = sx.value_and_grad(sx.models.next_token_loss)(model, batch)
        optimizer.update(gradients)
        return loss

    return step, (model, optimizer, batch)


@pytest.mark.parametrize("microbatches", [4, 8])
def test_pipeline_plan_has_bubble_sends_and_idle_work(microbatches: int) -> None:
    (report,) = plan.compare(
        *stacked(),
        {"pipeline": {"layers": "stage"}},
        {"stage": 4},
        "cpu:4",
        parallel={"microbatches": microbatches},
        compiler="estimate",
        cache=None,
    )
    ticks = microbatches + 4 - 1
    assert report.bubble_share == pytest.approx(3 / ticks)
    assert report.replicated_compute == pytest.approx(ticks / microbatches)
    rows = BATCH // microbatches * EMBED * 4
    assert report.wire_bytes("kind")["collective-permute"] == ticks * rows
    text = str(plan.Plan("cpu:4", (report,)))
    assert "bubble" in text and f"microbatches {microbatches}" in text
    assert f"pipeline idle for {3 / ticks:.0%}" in plan.explain(report)


def test_stage_search_varies_microbatches_that_divide_rows() -> None:
    _, found = explore(*stacked(), "cpu:8", mesh_axes=("data", "stage"))
    by_mesh: dict[Any, set[Any]] = {}
    for layout in found.layouts:
        rules, settings = dict(layout.rules), dict(layout.parallel)
        assert rules["layers"] == "stage"
        assert bool(settings) == (layout.sizes["stage"] > 1)
        if rules["batch"] == "data" and rules["in"] is rules["out"] is None:
            by_mesh.setdefault(layout.mesh, set()).add(settings.get("microbatches"))
    assert by_mesh == {
        (("data", 8), ("stage", 1)): {None},
        (("data", 4), ("stage", 2)): {2, 4},  # of 4 rows of a device
        (("data", 2), ("stage", 4)): {4, 8},
    }


@pytest.mark.parametrize(("of_each", "forms"), [(0, 1), (1, 2)])
def test_best_of_each_form_is_always_compiled(
    of_each: int, forms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "FEW", 0)
    monkeypatch.setattr(stages, "OF_EACH_FORM", of_each)
    found = plan.search(
        *stacked(),
        "cpu:8",
        mesh_axes=("data", "stage"),
        parallel={"microbatches": [4], "schedule": ["gpipe"]},
        top=1,
        within=1e6,
        finalists=0,
        effort="screen",
        compiler="estimate",
        cache=None,
        progress=False,
    )
    fitting = re.search(r"compiled: (\d+) fits; left out by expected time", found.notes[1])
    assert fitting is not None and int(fitting[1]) == forms


def test_vocabulary_is_split_over_stages() -> None:
    step, args = trained(num_layers=4)
    _, found = explore(
        step,
        args,
        "cpu:8",
        meshes=[{"data": 2, "stage": 4}],
        parallel={"microbatches": [4], "schedule": ["gpipe"]},
    )
    assert {dict(each.rules)["vocab"] for each in found.layouts} <= {"stage", ("data", "stage")}
    settings = {each.parallel for each in found.layouts}
    assert settings == {(("microbatches", 4), ("schedule", "gpipe"))}


def test_indivisible_vocabulary_and_rows_stay_off_stages() -> None:
    step, args = decoder(vocab_size=63)
    meshes, fixed = [{"data": 4, "stage": 2}], {"heads": None, "seq": None}
    for count, rows in ((2, True), (3, False)):  # microbatches of two rows of a device
        settings = {"microbatches": [count], "schedule": ["gpipe"]}
        _, found = explore(step, args, "cpu:8", meshes=meshes, parallel=settings, fix=fixed)
        assert {dict(each.rules)["vocab"] for each in found.layouts} == ({None} if rows else set())


def test_planned_layout_runs_with_single_device_results() -> None:
    _, (model, batch) = decoder(num_layers=4)
    step = sx.models.next_token_loss
    with_values(model)
    found = plan.search(
        step,
        (model, batch),
        "cpu:8",
        meshes=[{"data": 2, "stage": 2, "context": 2}],
        fix=WHOLE | {"mlp": None, "vocab": None, "batch": "data"},
        parallel={"microbatches": [2], "schedule": ["gpipe"], "context": ["ring"]},
        compiler="estimate",
        top=1,
        **FAST,
    )
    layout = found.best().layout
    assert dict(layout.parallel) == {"microbatches": 2, "schedule": "gpipe", "context": "ring"}
    assert {"layers": "stage", "seq": "context"}.items() <= dict(layout.rules).items()
    generator = np.random.default_rng(0)
    tokens = {
        name: jnp.asarray(generator.integers(0, 64, each.shape), jnp.int32)
        for name, each in batch.items()
    }
    expected = sx.jit(step)(model, tokens)
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), tuple(layout.sizes), axis_types=kinds)
    sx.shard(model, mesh, layout.as_rules)
    with jax.set_mesh(mesh), sx.axis_rules(layout.as_rules), sx.parallel(**dict(layout.parallel)):
        loss = sx.jit(step)(model, tokens)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_zero_splits_only_the_optimizer_state() -> None:
    found = plan.search(
        *with_adam(),
        "cpu:8",
        meshes=[{"data": 8}],
        fix={"embed": None},
        parallel={"zero": [0, 1]},
        compiler="estimate",
        within=None,
        top=None,
        **FAST,
    )
    plain, split = found["batch=data (8)"], found["batch=data (8) zero:1"]
    count = plain.argument_bytes["optimizer"] - WEIGHTS - SCALES
    assert count == COUNTS
    # What no dimension divides stays whole; all else is split by eight.
    assert split.argument_bytes == plain.argument_bytes | {
        "optimizer": WEIGHTS // 8 + SCALES + count
    }
    assert split.layout.optimizer_rules and not plain.layout.optimizer_rules
    # Where parameters are split over the same axis, there is nothing left to split by it.
    assert not any("mlp=data" in each.layout.name and "zero" in each.layout.name for each in found)


def test_experts_share_the_batch_axis_with_stated_assumption() -> None:
    x = NamedShape((64, 8), "float32", ("batch", "embed"))
    moe = sx.nn.MoE(8, 16, num_experts=4, rngs=sx.Rngs(0))

    def step(moe: Any, x: Any) -> Any:
        return moe(x)

    found = plan.search(
        step, (moe, x), "cpu:4", meshes=[{"data": 1, "expert": 4}], compiler="estimate", **FAST
    )
    best = found.best()
    assert {"expert": "expert", "batch": "expert"}.items() <= dict(best.layout.rules).items()
    assert best.argument_bytes["batch"] == 64 * 8 * 4 // 4
    assert any("all experts get equally many tokens" in each for each in best.warnings)


def test_optimizer_state_accepts_host_memory_and_own_rules() -> None:
    step, args = with_adam()
    rules = {"plain": [("batch", "data")]}

    def report(**parallel: Any) -> Any:
        options: dict[str, Any] = {"compiler": "estimate", "parallel": parallel, **FAST}
        return plan.compare(step, args, rules, {"data": 8}, "cpu:8", **options)["plain"]

    plain, host = report(), report(optimizer_memory="pinned_host")
    assert host.argument_bytes == plain.argument_bytes | {"optimizer": 0}
    assert any("Times leave out" in each for each in host.warnings)
    zero = report(optimizer_rules=[("embed", "data")])
    assert plain.argument_bytes["optimizer"] == WEIGHTS + SCALES + COUNTS
    assert zero.argument_bytes == plain.argument_bytes | {
        "optimizer": WEIGHTS // 8 + SCALES + COUNTS
    }
    for wrong in ({"optimizer_memory": 3}, {"optimizer_rules": 3}):
        with pytest.raises(sx.errors.PlanInputError, match="optimizer_"):
            report(**wrong)
    found = plan.search(
        step,
        args,
        "cpu:8",
        meshes=[{"data": 8}],
        fix={"embed": None, "mlp": None},
        parallel={"optimizer_memory": [None, "pinned_host"]},
        compiler="estimate",
        **FAST,
    )
    assert {each.layout.optimizer_memory for each in found} == {"", "pinned_host"}


def made_with(remat: Any) -> tuple[Any, tuple[Any, ...]]:
    sizes = {"embed_dim": 256, "mlp_dim": 512, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128}
    step, (model, optimizer, _) = trained(num_layers=8, remat=remat, dtype="bfloat16", **sizes)
    tokens = NamedShape((8, 2048), "int32", ("batch", "seq"))
    return step, (model, optimizer, {"inputs": tokens, "targets": tokens})


@pytest.mark.parametrize("target", [TPU])
def test_host_offloaded_activations_lower_the_device_peak(target: str) -> None:
    found = plan.search(
        made_with,
        (),
        target,
        meshes=[{"data": 8}],
        fix={"batch": "data", "embed": "data"},
        tie=[["vocab", "heads", "kv_heads", "mlp", "head_dim", "seq"]],
        remat=["full", {"layer_input": "pinned_host"}],
        within=None,
        top=None,
        **FAST,
    )
    by_label = {each.layout.name.partition("remat:")[2]: each for each in found}
    assert all(each.outcome == "fits" for each in by_label.values()), by_label
    assert set(by_label) == {"full", "{'layer_input': 'pinned_host'}"}
    device, host = by_label["full"], by_label["{'layer_input': 'pinned_host'}"]
    assert host.peak_bytes is not None and device.peak_bytes is not None
    layer_input = 2048 * 256 * 2  # one row a device, in bfloat16
    # Eight are kept; the compiler has up to two on their way at the peak.
    assert 5.9 * layer_input < device.peak_bytes - host.peak_bytes < 8.1 * layer_input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": {"microbatch": [4]}}, r"no setting.*Did you mean 'microbatches'"),
        ({"parallel": {"microbatches": 4}}, "give a list of values"),
        ({"parallel": {"microbatches": [0]}}, "microbatches=0 must be an integer of at least 1"),
        ({"parallel": {"context": ["zigzag"]}}, "ring-zigzag"),
        ({"parallel": {"zero": [3]}}, "levels to compare are 0 and 1"),
        ({"mesh_axes": ("data", "stage")}, "'stage' needs a loop over layers"),
        ({"mesh_axes": ("data", "context")}, "'context' needs a dimension called 'seq'"),
        ({"mesh_axes": ("data", "expert")}, "'expert' needs a dimension called 'expert'"),
    ],
)
def test_unsearchable_options_are_refused_before_compiling(
    options: dict[str, Any], message: str
) -> None:
    kernel = param((EMBED, EMBED), "in", "out")
    x = NamedShape((BATCH, EMBED), "float32", ("batch", "in"))
    with pytest.raises(sx.errors.PlanInputError, match=message):
        plan.search(lambda kernel, x: x @ kernel.value, (kernel, x), "cpu:8", **options, **FAST)


def test_optimizer_memory_without_optimizer_is_refused() -> None:
    with pytest.raises(sx.errors.PlanInputError, match=r"has none.*sx.train.Optimizer"):
        plan.search(*stacked(), "cpu:8", parallel={"optimizer_memory": ["pinned_host"]}, **FAST)


def test_parallel_settings_round_trip_through_files(tmp_path: Any) -> None:
    layout = plan.Layout(
        "all",
        (("layers", "stage"),),
        (("stage", 4), ("data", 2)),
        parallel=(("microbatches", 8), ("schedule", "gpipe")),
        optimizer_rules=(("embed", "data"), ("mlp", ("data", "stage"))),
        optimizer_memory="pinned_host",
    )
    written = plan.Plan("cpu:8", (plan.LayoutReport(layout, "fits", bubble_share=0.25),))
    written.to_json(tmp_path / "plan.json")
    assert plan.Plan.from_json(tmp_path / "plan.json") == written
    entry = plan.named_rules(layout)
    assert plan.read_rules(plan.write_rules(tmp_path / "best.toml", [entry])) == (entry,)
    assert entry.overrides == {sx.OptState: list(layout.optimizer_rules)}
    assert entry.memory_kind == {sx.OptState: "pinned_host"}
    wrong = tmp_path / "wrong.toml"
    for line, message in (
        ("parallel = { microbatches = 0 }", "microbatches=0 must be an integer of at least 1"),
        ("parallel = { stages = 2 }", "stages"),
        ("optimizer_rules = 3", "optimizer_rules"),
        ("optimizer_memory = 3", "not a kind of memory"),
    ):
        wrong.write_text(f'rules = [["batch", "data"]]\n{line}\n')
        with pytest.raises(sx.errors.PartitionError, match=message):
            plan.read_rules(wrong)
