# SPDX-License-Identifier: Apache-2.0
"""Comparing layouts, plans as files, and assertions about layouts."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import plan
from shardax.errors import LayoutAssertionError, PlanFileError, PlanInputError, TargetError
from shardax.partition.context import current_rules

BATCH, EMBED, MLP = 32, 64, 256
MESH = {"data": 2, "model": 4}
TP = [("batch", "data"), ("mlp", "model")]
FSDP = [("batch", ("data", "model")), ("embed", ("data", "model"))]
X = plan.NamedShape((BATCH, EMBED), "float32", ("batch", "embed"))


class Mlp(sx.Module):
    """Two kernels; the activations are laid out by the batch."""

    def __init__(self) -> None:
        ones = jax.nn.initializers.ones
        self.up = sx.Param(sx.Init(ones, (EMBED, MLP)), axes=("embed", "mlp"))
        self.down = sx.Param(sx.Init(ones, (MLP, EMBED)), axes=("mlp", "embed"))

    def __call__(self, x: Any) -> Any:
        y = jax.nn.relu(x @ self.up.value) @ self.down.value
        return sx.constrain(y, ("batch", "embed"))


@sx.jit(donate_argnums=0)
def train_step(model: Any, x: Any) -> Any:
    loss, gradients = sx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    sx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, sx.state(model), gradients))
    return loss


def compared(rules: Any = None, **options: Any) -> plan.Plan:
    rules = rules or {"tp": TP, "fsdp": FSDP, "odd": {"batch": "data", "embed": "nowhere"}}
    return plan.compare(train_step, (Mlp(), X), rules, MESH, "cpu:8", cache=None, **options)


def test_undonated_state_is_counted_twice() -> None:
    """8 GiB in and 8 GiB out, of the 15.75 GiB of a device."""

    def step(x: Any) -> Any:
        return x * 2 + 1

    def report(step: Any) -> plan.LayoutReport:
        x = plan.NamedShape((2**31,), "float32", ("batch",))
        found = plan.compare(
            step,
            (x,),
            {"whole": {"batch": None}},
            {"data": 1},
            "tpu:v5e:1x1",
            compiler="estimate",
            cache=None,
        )
        return found["whole"]

    plain, jitted, donating = (
        report(each) for each in (step, jax.jit(step), jax.jit(step, donate_argnums=0))
    )
    assert [each.outcome for each in (plain, jitted, donating)] == [
        "does not fit",
        "does not fit",
        "fits",
    ]
    assert (plain.peak_bytes, donating.peak_bytes) == (2**34, 2**33)
    assert (
        "A plain function donates nothing; with jax.jit(step, donate_argnums=...)" in plain.reason
    )
    assert "donates nothing" not in jitted.reason


def test_reports_cover_every_rule_set_failures_last() -> None:
    model = Mlp()
    found = plan.compare(
        train_step, (model, X), {"tp": TP, "odd": {"embed": "nowhere"}}, MESH, "cpu:8"
    )
    assert [(each.layout.name, each.outcome) for each in found] == [
        ("tp", "fits"),
        ("odd", "rejected"),
    ]
    assert "nowhere" in found["odd"].reason
    assert all(v.is_lazy for _, v in sx.iter_variables(model))
    tp = found["tp"]
    # 2 products forward, 4 backward without the gradient of x: 5 of 2 BDF each, over 8 devices.
    assert tp.flops == 5 * 2 * BATCH * EMBED * MLP / 8
    assert tp.replicated_compute == 1
    kernel = 4 * EMBED * MLP / 4
    gradients = 2 * (1 / 2) * 2 * kernel
    activations = 2 * (3 / 4) * 4 * (BATCH / 2) * EMBED
    loss = tp.wire_bytes("axes").get(("data", "model"), 0) + 2 * (1 / 2) * 4
    assert tp.wire_bytes("axes")[("data",)] == pytest.approx(gradients, abs=8)
    assert tp.wire_bytes("axes")[("model",)] == activations
    assert loss < 16
    assert tp.argument_bytes == {
        "parameters": 2 * int(kernel),
        "optimizer": 0,
        "batch": 4 * BATCH * EMBED // 2,
        "other": 0,
    }


def test_meshes_are_compared_under_distinct_names() -> None:
    meshes = [{"data": 8, "model": 1}, {"data": 2, "model": 4}]
    found = plan.compare(train_step, (Mlp(), X), {"tp": TP}, meshes, "cpu:8", cache=None)
    assert {each.layout.name for each in found} == {"tp data=8,model=1", "tp data=2,model=4"}
    assert dict(found["tp data=2,model=4"].layout.rules) == dict(TP)


def test_plan_compares_rules_and_searches_without_them() -> None:
    args = (train_step, (Mlp(), X), "cpu:8")
    found = plan.plan(*args, rules={"tp": TP}, meshes=[MESH], cache=None)
    assert [each.layout.name for each in found] == ["tp"]
    options: dict[str, Any] = {"cache": None, "progress": False, "effort": "screen"}
    fixed = {"batch": "data", "embed": None}
    searched = plan.plan(*args, meshes=[MESH], fix=fixed, **options)
    assert searched.best().outcome == "fits"
    with pytest.raises(PlanInputError, match="no meshes to compare them over"):
        plan.plan(*args, rules={"tp": TP})


def test_plan_round_trips_through_json(tmp_path: Any) -> None:
    found = compared()
    found.to_json(tmp_path / "plan.json")
    again = plan.Plan.from_json(tmp_path / "plan.json")
    assert again == found
    assert str(again) == str(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_layouts_of_numpy_integers_are_written(tmp_path: Any) -> None:
    sizes, settings = {"data": 2, "model": 4}, {"microbatches": 2}
    layouts = [
        plan.Layout("tp", tuple(TP), tuple(mesh.items()), parallel=tuple(parallel.items()))
        for mesh, parallel in (
            (sizes, settings),
            ({k: np.int64(v) for k, v in sizes.items()}, {"microbatches": np.int32(2)}),
        )
    ]
    assert repr(layouts[0]) == repr(layouts[1])
    plan.Plan("cpu:8", (plan.LayoutReport(layouts[1], "fits"),)).to_json(tmp_path / "plan.json")
    assert plan.Plan.from_json(tmp_path / "plan.json").reports[0].layout == layouts[0]


def test_plan_json_includes_total_wire_bytes(tmp_path: Any) -> None:
    found = compared()
    found.to_json(tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())["reports"]
    assert {each["layout"]["name"]: each["total_wire_bytes"] for each in written} == {
        "tp": found["tp"].total_wire_bytes,
        "fsdp": found["fsdp"].total_wire_bytes,
        "odd": None,  # it was not compiled
    }
    assert found["tp"].total_wire_bytes > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 10**5, "cannot be read as JSON"),
        ("[]", "holds no plan of shardax"),
        (json.dumps({"shardax plan": 99}), "a plan of format 99"),
        (json.dumps({"shardax plan": 1, "target": "cpu:8"}), "damaged"),
    ],
)
def test_files_that_are_no_plans_are_refused(tmp_path: Any, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanFileError, match=message):
        plan.Plan.from_json(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="there is no such file"):
        plan.Plan.from_json(tmp_path / "other.json")


def test_best_layout_leaves_the_requested_headroom() -> None:
    found = compared({"tp": TP, "fsdp": FSDP})
    limit = found.best().limit_bytes
    assert limit is not None
    peaks = {each.layout.name: each.peak_bytes or 0 for each in found}
    least = min(peaks, key=lambda name: peaks[name])
    assert found.best(fits=(peaks[least] + 1) / limit).layout.name == least
    with pytest.raises(PlanInputError, match=f"{least!r} needs least"):
        found.best(fits=(peaks[least] - 1) / limit)
    with pytest.raises(PlanInputError, match=r"has no layout 'fdsp'.*Did you mean 'fsdp'"):
        found["fdsp"]


def test_activation_losing_batch_axis_to_parameter_is_reported() -> None:
    wrong = [("embed", "data"), *TP]
    found = compared({"wrong": wrong, "right": [*TP, ("embed", "data")]})
    (said,) = [text for text in found["wrong"].warnings if "not split by" in text]
    assert said == (
        "Arrays of shape (32, 64) and names ('batch', 'embed') are not split by 'batch': the "
        "mesh axis 'data' goes to 'embed', whose rule comes first. Put the rule of 'batch' before "
        "it."
    )
    assert not [text for text in found["right"].warnings if "not split by" in text]


def test_bad_comparisons_are_refused_before_anything_is_compiled() -> None:
    def never(model: Any, x: Any) -> Any:
        raise AssertionError("was traced")

    args = (never, (Mlp(), X))
    with pytest.raises(TargetError, match="8"):
        plan.compare(*args, {"tp": TP}, {"data": 3}, "cpu:8")
    with pytest.raises(PlanInputError, match="nothing to compare"):
        plan.compare(*args, {}, MESH, "cpu:8")
    with pytest.raises(PlanInputError, match="mapping from names to rules"):
        plan.compare(*args, TP, MESH, "cpu:8")  # pyright: ignore[reportArgumentType]  (tested)
    free = {"mlp": jax.sharding.PartitionSpec.UNCONSTRAINED}
    with pytest.raises(PlanInputError, match="UNCONSTRAINED"):
        plan.compare(*args, {"free": free}, MESH, "cpu:8")


def test_passing_layout_assertion_returns_its_report() -> None:
    report = plan.assert_layout(
        train_step,
        (Mlp(), X),
        TP,
        MESH,
        wire_bytes={"model": 2 * (3 / 4) * 4 * (BATCH / 2) * EMBED, "data": "<= 40 kB"},
        peak_bytes="< 1 MiB",
        replicated_params=0,
    )
    assert report.outcome == "fits"


def test_named_replicated_parameters_pass_the_assertion() -> None:
    weight = sx.Param(jnp.ones((8, 8)), axes=("a", "b"))
    report = plan.assert_layout(
        lambda weight: weight.value * 2, (weight,), {}, {"x": 2}, replicated_params={"weight"}
    )
    assert report.replicated == ("weight",)


def test_program_that_cannot_be_compiled_is_reported() -> None:
    def step(x: Any) -> Any:
        return jax.ffi.ffi_call("nobody", jax.ShapeDtypeStruct((8,), jnp.float32))(x)

    x = plan.NamedShape((8,), "float32", ("batch",))
    options: Any = {"target": "cpu:8", "cache": None}
    [report] = plan.compare(step, (x,), {"dp": {"batch": "data"}}, {"data": 8}, **options)
    assert (report.outcome, report.compiled) == ("failed", False)
    assert "nobody" in report.reason


def test_step_reading_values_under_rules_is_refused() -> None:
    def step(x: Any) -> Any:
        return x * float(x.sum()) if current_rules().mesh_axes else x

    x = plan.NamedShape((8,), "float32", ("batch",))
    with pytest.raises(PlanInputError, match=r"concrete values at .*test_comparison\.py"):
        plan.compare(step, (x,), {"dp": {"batch": "data"}}, {"data": 8}, "cpu:8", cache=None)


def test_steps_without_named_arguments_number_them() -> None:
    def step(*args: Any) -> Any:
        return args[0]["x"] * args[1]

    x = plan.NamedShape((8,), "float32", ("batch",))
    options: Any = {"target": "cpu:8", "cache": None}
    for given, args, paths in (
        (dict, ({"x": x},), ["args[0].x"]),  # a class written in C has no signature
        (step, ({"x": x}, x), ["args[0].x", "args[1]"]),
    ):
        [report] = plan.compare(given, args, {"dp": {"batch": "data"}}, {"data": 8}, **options)
        assert [array.path for array in report.arrays] == paths


def test_layout_assertion_lists_differences_with_largest_collectives() -> None:
    with pytest.raises(LayoutAssertionError) as caught:
        plan.assert_layout(
            train_step,
            (Mlp(), X),
            {"batch": "data"},
            MESH,
            wire_bytes={"data": "< 1 kB", "modle": 0},
            peak_bytes="< 1 kB",
            replicated_params={"model.up"},
        )
    text = str(caught.value)
    assert "Over data=2, model=4 on cpu:8 the layout is another" in text
    assert "wire_bytes names ['modle'], but the mesh has ['data', 'model']" in text
    assert "wire_bytes['data'] is" in text and "all-reduce over data (1 x) at" in text
    assert "test_comparison.py" in text
    assert "peak_bytes is" in text
    assert "replicated are ['model.down', 'model.up'], not ['model.up']" in text


def test_impossible_layout_fails_the_assertion() -> None:
    with pytest.raises(LayoutAssertionError, match=r"it was rejected.*'embed'"):
        plan.assert_layout(train_step, (Mlp(), X), {"embed": "data"}, {"data": 7}, wire_bytes=0)


@pytest.mark.parametrize("bound", ["26 GB", "<= many", "", "<= 3 GBs", None])
def test_assert_layout_refuses_what_is_no_bound(bound: Any) -> None:
    with pytest.raises(PlanInputError, match="is no bound"):
        plan.assert_layout(train_step, (Mlp(), X), TP, MESH, wire_bytes={"data": bound})


def test_failed_assertion_is_also_an_assertion_error() -> None:
    weight = sx.Param(jnp.ones((8, 8)), axes=("a", "b"))
    with pytest.raises(AssertionError, match="1 parameters are replicated, not 0: weight"):
        plan.assert_layout(
            lambda weight: weight.value * 2, (weight,), {}, {"x": 2}, replicated_params=0
        )


def test_times_use_the_dtype_of_most_products() -> None:
    def step(up: Any, down: Any, x: Any) -> Any:
        return (x @ up.value).astype(jnp.float32) @ down.value

    ones, half = jax.nn.initializers.ones, jnp.bfloat16
    up = sx.Param(sx.Init(ones, (EMBED, MLP), half), axes=("embed", "mlp"))
    down = sx.Param(sx.Init(ones, (MLP, 8)), axes=("mlp", None))
    x = plan.NamedShape((BATCH, EMBED), half, ("batch", "embed"))
    cpu = plan.find_hardware("cpu")
    hardware = cpu.like(peak_flops={"bf16": 1e9, "f32": 1e6})
    args = (step, (up, down, x), {"dp": {"batch": "data"}}, {"data": 8})
    report = plan.compare(*args, plan.Target(hardware, (8,)), cache=None)["dp"]
    assert report.time is not None
    assert report.time.compute == report.flops / 1e9
