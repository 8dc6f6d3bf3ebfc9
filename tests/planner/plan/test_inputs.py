# SPDX-License-Identifier: Apache-2.0
"""What a step is planned for: names, kinds, bytes of a device, and what is refused."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax import models, train
from shardax.errors import PlanInputError
from shardax.partition import LogicallyPartitioned
from shardax.plan.compile.evaluate import lower, lower_alone
from shardax.plan.inputs import Inputs, NamedShape
from shardax.plan.records import ArrayLayout, Layout
from tests.advice import run_advice

MESH = (("data", 2), ("model", 4))
TOKENS = NamedShape((8, 16), "int32", ("batch", "seq"))
BATCH = {"inputs": TOKENS, "targets": TOKENS}
RULES = models.DECODER_RULES.override({"kv_heads": None})
CONFIG = models.DecoderConfig(num_layers=2, scan_layers=True)


@sx.jit(donate_argnums=(0, 1))
def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
    loss, gradients = sx.value_and_grad(models.next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def decoder() -> tuple[Any, Any, Any]:
    model = models.Decoder(CONFIG, rngs=sx.Rngs(0))
    return model, train.Optimizer(model, optax.adamw(1e-3)), BATCH


def boxed(shape: tuple[int, ...], *names: str | None) -> LogicallyPartitioned[Any]:
    return LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def apply(weight: Any, x: Any) -> Any:
    return x @ weight.value


def test_planning_takes_lazy_models_and_leaves_them_lazy() -> None:
    args = decoder()
    placed = Inputs(train_step, args).place(Layout("tp", RULES.pairs, MESH))
    assert placed.errors == ()
    lazy = [v.is_lazy for _, v in sx.iter_variables(args[0], sx.Param)]
    assert lazy and all(lazy)
    structs = jax.tree.leaves(placed.args)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in structs)
    assert {leaf.sharding.mesh.shape_tuple for leaf in structs} == {MESH}


def test_argument_bytes_per_device_are_summed_by_kind() -> None:
    inputs = Inputs(train_step, decoder())
    whole = inputs.place(Layout("one", (), (("data", 1),))).argument_bytes
    split = inputs.place(Layout("tp", RULES.pairs, MESH)).argument_bytes
    counters = 2 * 4  # the optimizer's steps, and adam's
    parameters = sum(4 * math.prod(v.shape) for _, v in sx.iter_variables(decoder()[0], sx.Param))
    assert whole == {
        "parameters": parameters,
        "optimizer": 2 * parameters + counters,
        "batch": 2 * 8 * 16 * 4,
        "other": 0,
    }
    # 8 * 64 numbers of norms (2 a layer and a last one; scale) and kv kernels stay whole.
    kept = 4 * (5 * 64 + 2 * 2 * 64 * 2 * 16)
    assert split == {
        "parameters": kept + (parameters - kept) // 4,
        "optimizer": 2 * (kept + (parameters - kept) // 4) + counters,
        "batch": 8 * 16 * 4,
        "other": 0,
    }


def test_argument_bytes_are_what_the_compiled_program_takes() -> None:
    inputs = Inputs(train_step, decoder())
    layout = Layout("tp", RULES.pairs, MESH)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = inputs.place(layout, mesh)
    compiled = lower(inputs, layout, placed, mesh)[0].compile()
    taken = compiled.memory_analysis().argument_size_in_bytes
    assert sum(placed.argument_bytes.values()) == taken


def test_fully_replicated_parameters_are_listed_largest_first() -> None:
    placed = Inputs(train_step, decoder()).place(Layout("tp", RULES.pairs, MESH))
    assert placed.replicated == (
        "model.layers.stacked.attn.k.kernel",
        "model.layers.stacked.attn.v.kernel",
        "model.layers.stacked.attn_norm.scale",
        "model.layers.stacked.mlp_norm.scale",
        "model.final_norm.scale",
    )


def test_plain_tree_arrays_are_classified_by_position() -> None:
    params = {"w": boxed((8, 16), "embed", "mlp")}
    state = optax.adam(1e-3).init(cast("Any", params))
    inputs = Inputs(lambda params, state, x: x, (params, state, TOKENS))
    placed = inputs.place(Layout("tp", (("mlp", "model"),), MESH))
    count = 4
    assert placed.argument_bytes == {
        "parameters": 8 * 4 * 4,
        "optimizer": count + 2 * 8 * 4 * 4,
        "batch": 8 * 16 * 4,
        "other": 0,
    }
    assert placed.arrays == (
        ArrayLayout(
            "params.w", "parameters", (8, 16), "float32", ("embed", "mlp"), ((), ("model",))
        ),
        ArrayLayout("x", "batch", (8, 16), "int32", ("batch", "seq"), ((), ())),
    )
    assert inputs.logical_names == ("embed", "mlp", "batch", "seq")


def test_function_over_boxes_receives_boxes_and_shapes() -> None:
    seen: list[Any] = []

    def step(params: Any, x: Any) -> Any:
        seen.extend([type(params["w"]), x.shape])
        return x.astype(jnp.float32) @ jnp.ones((16, 8)) @ params["w"].value

    lower_alone(Inputs(step, ({"w": boxed((8, 16), "embed", "mlp")}, TOKENS)))
    assert set(map(str, seen)) == {str(LogicallyPartitioned), "(8, 16)"}


def doubled(params: Any, x: Any) -> Any:
    return jax.tree.map(lambda p: p * 2, params), x.sum()


@pytest.mark.parametrize(
    ("step", "reused"),
    [
        (doubled, 0),
        (jax.jit(doubled), 0),
        (jax.jit(doubled, donate_argnums=0), 8 * 16),
        (functools.partial(jax.jit(doubled, donate_argnums=0)), 8 * 16),
        (sx.jit(doubled, donate_argnums=0), 8 * 16),
    ],
    ids=["plain", "jit", "jit that donates", "partial", "sx.jit that donates"],
)
def test_step_returns_state_in_place_and_reuses_donated(step: Any, reused: int) -> None:
    params = {"w": boxed((8, 16), "embed", "mlp")}
    inputs = Inputs(step, (params, TOKENS))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = Layout("tp", (("mlp", "model"), ("batch", "data")), MESH)
    compiled = lower(inputs, layout, inputs.place(layout, mesh), mesh)[0].compile()
    back = compiled.output_shardings[0]["w"].value
    assert back.spec == jax.sharding.PartitionSpec(None, "model")
    assert compiled.memory_analysis().alias_size_in_bytes == reused


def test_unplaceable_argument_is_reported_by_name() -> None:
    weight = sx.Param(jnp.ones((6, 8)), axes=("embed", "mlp"))
    x = NamedShape((4, 6), "float32", ("batch", "embed"))
    placed = Inputs(apply, (weight, x)).place(Layout("fsdp", (("embed", "model"),), MESH))
    assert [error.partition(":")[0] for error in placed.errors] == [".weight", ".x"]
    assert placed.args == ()


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((sx.Param(jnp.ones((2, 3))), TOKENS), "1 arrays have no axis names.*: weight"),
        (({"w": jnp.ones((2, 3))}, np.ones(4)), r"2 arrays have no axis names.*: weight\.w, x"),
        ((boxed((2,), "a"),), "takes.*was given 1 arguments"),
        ({"weight": 1}, "arguments are dict"),
        ("weight", "arguments are str"),
    ],
)
def test_arguments_that_cannot_be_planned_are_refused(args: Any, found: str) -> None:
    with pytest.raises(PlanInputError, match=found) as caught:
        Inputs(apply, args)
    if "no axis names" in found:
        code = 'sx.Param(init, axes=("embed", "mlp"))'
        weight = run_advice(caught.value, code, {"sx": sx, "init": jnp.ones((2, 3))})
        code = 'plan.NamedShape((64, 2048), "int32", ("batch", "seq"))'
        batch = run_advice(caught.value, code, {"plan": sx.plan})
        assert Inputs(apply, (weight, batch)).logical_names == ("embed", "mlp", "batch", "seq")


def test_step_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(PlanInputError, match="int, which cannot be called"):
        Inputs(3, ())  # pyright: ignore[reportArgumentType]  (what is tested)


def test_step_reading_values_is_refused_with_its_line() -> None:
    def step(weight: Any, x: Any) -> Any:
        return weight.value if float(x.sum()) > 0 else x

    weight = sx.Param(jnp.ones((8, 16)), axes=("embed", "mlp"))
    with pytest.raises(PlanInputError, match=r"concrete values at .*test_inputs\.py:\d+"):
        lower_alone(Inputs(step, (weight, TOKENS)))


def test_named_shape_needs_a_name_per_dimension() -> None:
    with pytest.raises(PlanInputError, match=r"shape \(2, 3\) and axes \('batch',\)"):
        NamedShape((2, 3), "float32", ("batch",))


@given(
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=2),
    rules=st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["data", "model", ("data", "model"), None]),
    ),
)
def test_law_device_bytes_equal_size_times_copies(sizes: list[int], rules: dict[str, Any]) -> None:
    weight = sx.Param(jnp.zeros((64, 64)), axes=("a", "b"))
    x = NamedShape((64, 64), "float32", ("c", "a"))
    mesh = (("data", sizes[0]), ("model", sizes[1]))
    placed = Inputs(apply, (weight, x)).place(Layout("any", tuple(rules.items()), mesh))
    assert placed.errors == ()
    for array in placed.arrays:
        parts = math.prod(dict(mesh)[axis] for entry in array.spec for axis in entry)
        assert placed.argument_bytes[array.kind] * parts == 64 * 64 * 4


@pytest.mark.parametrize(("kind", "share"), [("int8", 1 / 4), ("int4", 1 / 8)])
def test_quantized_kernels_count_their_bits(kind: Any, share: float) -> None:
    layer = sx.nn.Linear(64, 32, use_bias=False, rngs=sx.Rngs(0))
    small = sx.quantize(sx.abstract(layer), kind)
    rules = (("in", "data"), ("out", "model"))
    placed = Inputs(lambda layer: layer.kernel.value, (small,)).place(Layout("both", rules, MESH))
    assert placed.argument_bytes["parameters"] == 64 * 32 * 4 * share / 8 + 32 * 4 / 4
    row, _ = sx.view.table(small).rows
    assert row.nbytes == 64 * 32 * 4 * share
