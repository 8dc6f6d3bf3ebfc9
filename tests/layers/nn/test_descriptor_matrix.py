# SPDX-License-Identifier: Apache-2.0
"""What holds for every layer: each is listed once, and every check runs on each."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx

RULES = sx.partition.Rules(
    {
        "in": "data",
        "embed": "data",
        "e": "data",
        "out": "model",
        "mlp": "model",
        "heads": "model",
        "kv_heads": "model",
        "h": "model",
        "vocab": "model",
    }
)
"""Splits the features over ``data``, as the batch is, so that layers must settle who gets it."""


@dataclass(frozen=True, eq=False)
class Descriptor:
    """A layer to check.

    Attributes:
        make: Makes it from (rngs, compute dtype).
        x: An input with a batch dimension in front.
        out: Shape of the result.
        axes: Axis names of every parameter, by path.
        call: How to call it.
    """

    make: Callable[[sx.Rngs, Any], Any]
    x: np.ndarray
    out: tuple[int, ...]
    axes: dict[tuple[Any, ...], tuple[str, ...]]
    call: Callable[[Any, Any], Any] = lambda layer, x: layer(x)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def integers(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 16, shape, np.int32)


def attention_axes(*path: str) -> dict[tuple[Any, ...], tuple[str, ...]]:
    return {
        (*path, "q", "kernel"): ("embed", "heads", "head_dim"),
        (*path, "k", "kernel"): ("embed", "kv_heads", "head_dim"),
        (*path, "v", "kernel"): ("embed", "kv_heads", "head_dim"),
        (*path, "out", "kernel"): ("heads", "head_dim", "embed"),
    }


def mlp_axes(*path: str) -> dict[tuple[Any, ...], tuple[str, ...]]:
    return {
        (*path, "gate", "kernel"): ("embed", "mlp"),
        (*path, "up", "kernel"): ("embed", "mlp"),
        (*path, "down", "kernel"): ("mlp", "embed"),
    }


def attention(rngs: sx.Rngs, dtype: Any, **options: Any) -> Any:
    return sx.nn.MultiHeadAttention(8, 8, head_dim=2, dtype=dtype, rngs=rngs, **options)


DESCRIPTORS = {
    "Linear": Descriptor(
        lambda rngs, dtype: sx.nn.Linear(8, 12, dtype=dtype, rngs=rngs),
        floats(4, 8),
        (4, 12),
        {("kernel",): ("in", "out"), ("bias",): ("out",)},
    ),
    "Linear, several dimensions": Descriptor(
        lambda rngs, dtype: sx.nn.Linear((2, 4), (3, 2), dtype=dtype, rngs=rngs),
        floats(4, 5, 2, 4),
        (4, 5, 3, 2),
        {("kernel",): ("in_0", "in_1", "out_0", "out_1"), ("bias",): ("out_0", "out_1")},
    ),
    "Einsum": Descriptor(
        lambda rngs, dtype: sx.nn.Einsum(
            "...te,ehd->...htd", (8, 4, 2), (4, 2), dtype=dtype, rngs=rngs
        ),
        floats(4, 3, 8),
        (4, 4, 3, 2),
        {("kernel",): ("e", "h", "d"), ("bias",): ("h", "d")},
    ),
    "Conv": Descriptor(
        lambda rngs, dtype: sx.nn.Conv(8, 12, (3, 2), dtype=dtype, rngs=rngs),
        floats(4, 5, 6, 8),
        (4, 5, 6, 12),
        {("kernel",): ("window_0", "window_1", "in", "out"), ("bias",): ("out",)},
    ),
    "ConvTranspose": Descriptor(
        lambda rngs, dtype: sx.nn.ConvTranspose(8, 12, 3, strides=2, dtype=dtype, rngs=rngs),
        floats(4, 5, 8),
        (4, 10, 12),
        {("kernel",): ("window", "in", "out"), ("bias",): ("out",)},
    ),
    "Embed": Descriptor(
        lambda rngs, dtype: sx.nn.Embed(16, 8, dtype=dtype, rngs=rngs),
        integers(4, 3),
        (4, 3, 8),
        {("embedding",): ("vocab", "embed")},
    ),
    "Embed.attend": Descriptor(
        lambda rngs, dtype: sx.nn.Embed(16, 8, dtype=dtype, rngs=rngs),
        floats(4, 3, 8),
        (4, 3, 16),
        {("embedding",): ("vocab", "embed")},
        call=lambda layer, x: layer.attend(x),
    ),
    "RMSNorm": Descriptor(
        lambda rngs, dtype: sx.nn.RMSNorm(8, dtype=dtype),
        floats(4, 3, 8),
        (4, 3, 8),
        {("scale",): ("embed",)},
    ),
    "LayerNorm": Descriptor(
        lambda rngs, dtype: sx.nn.LayerNorm(8, dtype=dtype),
        floats(4, 3, 8),
        (4, 3, 8),
        {("scale",): ("embed",), ("bias",): ("embed",)},
    ),
    "GroupNorm": Descriptor(
        lambda rngs, dtype: sx.nn.GroupNorm(8, 2, dtype=dtype),
        floats(4, 8),
        (4, 8),
        {("scale",): ("embed",), ("bias",): ("embed",)},
        # The first dimension is always the batch; here each row is an example.
        call=lambda layer, x: layer(x) if x.ndim > 1 else layer(x[None])[0],
    ),
    "Einsum, ellipses and a shared bias": Descriptor(
        lambda rngs, dtype: sx.nn.Einsum(
            "b...e,...ed->b...d", (3, 8, 2), (3, 2), dtype=dtype, rngs=rngs
        ),
        floats(4, 3, 8),
        (4, 3, 2),
        {("kernel",): (None, "e", "d"), ("bias",): (None, "d")},
        call=lambda layer, x: layer(x) if x.ndim > 2 else layer(x[None])[0],
    ),
    "Conv, masked": Descriptor(
        lambda rngs, dtype: sx.nn.Conv(
            8, 12, 3, mask=np.tri(36, 8, dtype=bool).reshape(3, 8, 12), dtype=dtype, rngs=rngs
        ),
        floats(4, 5, 8),
        (4, 5, 12),
        {("kernel",): ("window", "in", "out"), ("bias",): ("out",)},
    ),
    "ConvTranspose, circular": Descriptor(
        lambda rngs, dtype: sx.nn.ConvTranspose(
            8, 12, 3, strides=2, padding="CIRCULAR", dtype=dtype, rngs=rngs
        ),
        floats(4, 5, 8),
        (4, 10, 12),
        {("kernel",): ("window", "in", "out"), ("bias",): ("out",)},
    ),
    "LayerNorm, masked": Descriptor(
        lambda rngs, dtype: sx.nn.LayerNorm(8, dtype=dtype),
        floats(4, 3, 8),
        (4, 3, 8),
        {("scale",): ("embed",), ("bias",): ("embed",)},
        call=lambda layer, x: layer(x, mask=np.arange(8) < 5),
    ),
    "GroupNorm, masked": Descriptor(
        lambda rngs, dtype: sx.nn.GroupNorm(8, 2, dtype=dtype),
        floats(4, 8),
        (4, 8),
        {("scale",): ("embed",), ("bias",): ("embed",)},
        call=lambda layer, x: layer(jnp.atleast_2d(x), mask=np.arange(8) % 4 < 3).reshape(x.shape),
    ),
    "PReLU": Descriptor(
        lambda rngs, dtype: sx.nn.PReLU(features=8, dtype=dtype),
        floats(4, 8),
        (4, 8),
        {("negative_slope",): ("embed",)},
    ),
    "WeightNorm": Descriptor(
        lambda rngs, dtype: sx.nn.WeightNorm(sx.nn.Linear(8, 12, dtype=dtype, rngs=rngs)),
        floats(4, 8),
        (4, 12),
        {
            ("body", "kernel"): ("in", "out"),
            ("body", "bias"): ("out",),
            ("scale", "kernel"): ("out",),
        },
    ),
    "SpectralNorm": Descriptor(
        lambda rngs, dtype: sx.nn.SpectralNorm(
            sx.nn.Linear(8, 12, dtype=dtype, rngs=rngs), n_steps=30, rngs=rngs
        ),
        floats(4, 8),
        (4, 12),
        {("body", "kernel"): ("in", "out"), ("body", "bias"): ("out",)},
    ),
    "BatchNorm, running statistics": Descriptor(
        lambda rngs, dtype: sx.nn.BatchNorm(8, dtype=dtype, use_running_average=True),
        floats(4, 3, 8),
        (4, 3, 8),
        {("scale",): ("embed",), ("bias",): ("embed",)},
    ),
    "Stack": Descriptor(
        lambda rngs, dtype: sx.nn.Stack(lambda: sx.nn.RMSNorm(8, dtype=dtype), 2),
        floats(4, 3, 8),
        (4, 3, 8),
        {("stacked", "scale"): ("layers", "embed")},
        call=lambda stack, x: stack(x.astype(stack.stacked.dtype)),  # what goes around keeps dtype
    ),
    "MultiHeadAttention": Descriptor(attention, floats(4, 3, 8), (4, 3, 8), attention_axes()),
    "MultiHeadAttention, to another size by a function": Descriptor(
        lambda rngs, dtype: attention(
            rngs,
            dtype,
            out_features=12,
            causal=True,
            num_kv_heads=4,
            attention_fn=sx.nn.dot_product_attention,
        ),
        floats(4, 3, 8),
        (4, 3, 12),
        attention_axes(),
    ),
    "MultiHeadAttention, causal, grouped, rotary": Descriptor(
        lambda rngs, dtype: attention(rngs, dtype, num_kv_heads=4, causal=True, rope_base=100.0),
        floats(4, 3, 8),
        (4, 3, 8),
        attention_axes(),
    ),
    "MLP": Descriptor(
        lambda rngs, dtype: sx.nn.MLP(8, 16, dtype=dtype, rngs=rngs),
        floats(4, 3, 8),
        (4, 3, 8),
        mlp_axes(),
    ),
    "MLP, not gated": Descriptor(
        lambda rngs, dtype: sx.nn.MLP(
            8, 16, gated=False, activation="gelu", use_bias=True, dtype=dtype, rngs=rngs
        ),
        floats(4, 8),
        (4, 8),
        {
            ("up", "kernel"): ("embed", "mlp"),
            ("up", "bias"): ("mlp",),
            ("down", "kernel"): ("mlp", "embed"),
            ("down", "bias"): ("embed",),
        },
    ),
    "Sequential with Dropout": Descriptor(
        lambda rngs, dtype: sx.nn.Sequential(
            sx.nn.Linear(8, 8, use_bias=False, dtype=dtype, rngs=rngs),
            sx.nn.Dropout(0.5, rngs=rngs),
            sx.nn.RMSNorm(8, dtype=dtype),
        ),
        floats(4, 8),
        (4, 8),
        {("layers", 0, "kernel"): ("in", "out"), ("layers", 2, "scale"): ("embed",)},
    ),
}


@pytest.fixture(params=list(DESCRIPTORS))
def case(request: pytest.FixtureRequest) -> Descriptor:
    return DESCRIPTORS[request.param]


def make(case: Descriptor, dtype: Any = None, training: bool = False) -> Any:
    """Makes the layer with drawn parameters, none of which is like its default."""
    layer = case.make(sx.Rngs(params=0, dropout=1), dtype)
    for path, variable in sx.iter_variables(layer, sx.Param):
        centre = 1 if path[-1] == "scale" else 0
        variable.value = centre + floats(*variable.shape) / 3
    if not training:
        layer.eval()
    return layer


def loss(call: Callable[[Any, Any], Any], layer: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(call(layer, x)))


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(
        np.asarray(found, np.float32),
        np.asarray(expected, np.float32),
        rtol=tolerance,
        atol=tolerance,
    )


@functools.cache
def eager_result(case: Descriptor) -> jax.Array:
    """What a layer in evaluation mode gives outside of programs."""
    return case.call(make(case), case.x)


@functools.cache
def compiled(case: Descriptor) -> Any:
    """The call of a layer, compiled."""
    return sx.jit(case.call)


@sx.jit(static_argnames="call")
def value_and_grad(layer: Any, x: Any, call: Callable[[Any, Any], Any]) -> Any:
    return sx.value_and_grad(lambda layer: loss(call, layer, x))(layer)


def test_result_has_documented_shape_in_input_precision(case: Descriptor):
    y = eager_result(case)
    assert (y.shape, y.dtype) == (case.out, jnp.float32)


def test_layer_parameters_carry_their_documented_axes(case: Descriptor):
    found = {path: variable.axes for path, variable in sx.iter_variables(make(case), sx.Param)}
    assert found == case.axes
    state = sx.state(make(case), sx.Param).flat()
    assert {path: len(axes) for path, axes in case.axes.items()} == {
        path: value.ndim for path, value in state.items()
    }


@pytest.mark.usefixtures("without_collections")
def test_building_computes_nothing_and_knows_shapes(case: Descriptor):
    before = len(jax.live_arrays())
    layer = case.make(sx.Rngs(0), None)
    variables = [variable for _, variable in sx.iter_variables(layer, sx.Param)]
    assert all(variable.is_lazy for variable in variables)
    assert [len(variable.axes) for variable in variables] == [v.ndim for v in variables]
    assert len(jax.live_arrays()) == before


def test_eval_shape_leaves_the_layer_lazy(case: Descriptor):
    layer = case.make(sx.Rngs(0), None)
    x = jax.ShapeDtypeStruct(case.x.shape, case.x.dtype)
    found = sx.eval_shape(case.call, layer, x)
    assert (found.shape, found.dtype) == (case.out, jnp.float32)
    assert all(variable.is_lazy for _, variable in sx.iter_variables(layer, sx.Param))


def test_compiled_equals_eager_and_advances_equal_streams(case: Descriptor):
    eager, other = make(case, training=True), make(case, training=True)
    for _ in range(2):
        close(compiled(case)(other, case.x), case.call(eager, case.x))
    assert [int(v.value) for path, v in sx.iter_variables(other) if path[-1] == "count"] == [
        int(v.value) for path, v in sx.iter_variables(eager) if path[-1] == "count"
    ]


def test_jax_jit_and_vmap_take_a_pytree(case: Descriptor):
    mapped = jax.jit(jax.vmap(case.call, in_axes=(None, 0)))(make(case), case.x)
    close(mapped, eager_result(case))


def test_gradients_agree_with_finite_differences(case: Descriptor):
    layer = make(case)
    _, gradients = value_and_grad(layer, case.x, call=case.call)
    assert all(bool(np.isfinite(g).all() and (g != 0).any()) for g in jax.tree.leaves(gradients))
    draw = np.random.default_rng(1)
    params = {path: np.asarray(value) for path, value in sx.state(layer, sx.Param).flat().items()}
    step = {path: 1e-3 * draw.normal(size=p.shape).astype(np.float32) for path, p in params.items()}

    def value(sign: int) -> Any:
        moved = {path: params[path] + sign * step[path] for path in params}
        sx.update(layer, sx.State.from_flat(moved))
        return value_and_grad(layer, case.x, call=case.call)[0]

    expected = sum(float(np.vdot(g, step[path])) for path, g in gradients.flat().items())
    assert abs(expected) > 1e-4
    assert float(value(1) - value(-1)) / 2 == pytest.approx(expected, rel=2e-2, abs=2e-5)


@sx.jit(static_argnames="call")
def narrow_step(layer: Any, x: Any, call: Callable[[Any, Any], Any]) -> Any:
    """Gradients of a layer that computes in bfloat16, and its result."""

    def narrow_loss(layer: Any) -> Any:
        y = call(layer, x)
        return jnp.sum(jnp.sin(y)).astype(jnp.float32), y

    return sx.grad(narrow_loss, has_aux=True)(layer)


def test_bfloat16_compute_keeps_float32_parameters_and_gradients(case: Descriptor):
    layer = make(case, jnp.bfloat16)
    gradients, y = narrow_step(layer, case.x, call=case.call)
    assert y.dtype == jnp.bfloat16
    close(y, eager_result(case), tolerance=0.1)
    assert {v.dtype.name for _, v in sx.iter_variables(layer, sx.Param)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}


def test_sharded_layer_equals_one_device(case: Descriptor, mesh: Mesh):
    layer = make(case)
    expected, expected_gradients = value_and_grad(layer, case.x, call=case.call)
    sx.shard(layer, mesh, RULES)
    x = jax.device_put(case.x, NamedSharding(mesh, PartitionSpec("data")))
    found, gradients = value_and_grad(layer, x, call=case.call)
    close(found, expected, 1e-4)
    jax.tree.map(lambda one, other: close(one, other, 1e-4), gradients, expected_gradients)
    if AxisType.Explicit in mesh.axis_types:  # over Auto axes the compiler chooses
        parameters = sx.state(layer, sx.Param).flat()
        assert {path: g.sharding.spec for path, g in gradients.flat().items()} == {
            path: value.sharding.spec for path, value in parameters.items()
        }


@pytest.mark.parametrize(
    "copied",
    [
        sx.clone,
        copy.deepcopy,
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: sx.merge(*sx.split(layer, sx.Param, ...)),
    ],
    ids=["clone", "deepcopy", "pickle", "split by type and merge"],
)
def test_copies_are_equal_and_independent(case: Descriptor, copied: Callable[[Any], Any]):
    layer = make(case, training=True)
    twin = copied(layer)
    assert sx.graphdef(twin) == sx.graphdef(layer)
    own = {id(variable) for _, variable in sx.iter_variables(layer)}
    assert not own & {id(variable) for _, variable in sx.iter_variables(twin)}
    call = compiled(case)
    close(call(twin, case.x), call(layer, case.x), 0)


def test_repr_shows_every_parameter_with_its_axes(case: Descriptor):
    layer = make(case)
    text = repr(layer)
    assert text.startswith(f"{type(layer).__name__}(  # ")
    for _, variable in sx.iter_variables(layer, sx.Param):
        assert repr(variable) in text


def test_equal_seeds_give_equal_structure_and_numbers(case: Descriptor):
    one, other = (case.make(sx.Rngs(params=0, dropout=1), None) for _ in range(2))
    assert sx.graphdef(one) == sx.graphdef(other)
    one, other = (sx.state(layer, sx.Param) for layer in (one, other))
    jax.tree.map(np.testing.assert_array_equal, one, other)
