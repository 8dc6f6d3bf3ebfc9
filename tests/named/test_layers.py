# SPDX-License-Identifier: Apache-2.0
"""Layers over named axes compute what those of ``sx.nn`` do, and are laid out by the same rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import named
from shardax.named import NamedArray, wrap, zeros


def numbers(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_close(found, expected, *names):
    np.testing.assert_allclose(found.unwrap(*names), expected, rtol=2e-5, atol=2e-5)


X = wrap(numbers(2, 5, 8), "batch", "time", "embed")
REORDERED = X.order_as("embed", "batch", "time")


@pytest.mark.parametrize("x", [X, REORDERED], ids=["as nn", "stored otherwise"])
def test_linear_is_that_of_nn(x):
    layer = named.Linear({"embed": 8}, {"heads": 4, "head": 2}, rngs=sx.Rngs(0))
    other = sx.nn.Linear(8, (4, 2), rngs=sx.Rngs(0))
    layer.bias[...] = other.bias[...] = numbers(4, 2, seed=1)
    np.testing.assert_array_equal(layer.kernel.value, other.kernel.value)
    expected = other(X.unwrap("batch", "time", "embed"))
    assert_close(layer(x), expected, "batch", "time", "heads", "head")


def test_linear_runs_along_batch_axes_and_keeps_positional_dimensions():
    layer = named.Linear({"embed": 8}, {"mlp": 3}, batch_axes={"time": 5}, rngs=sx.Rngs(0))
    assert layer.kernel.axes == ("time", "embed", "mlp")
    found = layer(X.untag("batch"))
    assert (found.axes, found.positional_shape) == ({"time": 5, "mlp": 3}, (2,))
    expected = jnp.einsum("bte,tem->btm", X.data, layer.kernel.value)
    assert_close(found.tag("batch"), expected, "batch", "time", "mlp")


def test_linear_to_its_own_axes_has_a_kernel_with_two_names():
    layer = named.Linear({"embed": 8}, {"embed": 8}, use_bias=False, rngs=sx.Rngs(0))
    assert layer.kernel.axes == ("embed", "embed_out")
    assert_close(layer(X), X.data @ layer.kernel.value, "batch", "time", "embed")


def test_layers_are_lazy_and_constants_draw_nothing():
    layer = named.Linear({"embed": 8}, {"mlp": 3}, rngs=sx.Rngs(0))
    assert all(variable.is_lazy for _, variable in sx.iter_variables(layer))
    np.testing.assert_array_equal(
        named.Linear({"embed": 8}, {"mlp": 3}, use_bias=False, rngs=sx.Rngs(0)).kernel.value,
        layer.kernel.value,
    )


def test_embed_is_that_of_nn():
    tokens = wrap(jnp.array([[1, 9, -1], [0, 10, 3]]), "batch", "time")
    layer = named.Embed({"vocab": 10}, {"embed": 4}, rngs=sx.Rngs(0))
    other = sx.nn.Embed(10, 4, rngs=sx.Rngs(0))
    assert_close(layer(tokens), other(tokens.data), "batch", "time", "embed")
    assert np.isnan(layer(tokens)[{"batch": 1, "time": 1}].data).all()
    x = layer(tokens.clip(0, 9))
    assert_close(layer.attend(x), other.attend(x.data), "batch", "time", "vocab")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_are_those_of_nn(kind, dtype):
    layer, other = getattr(named, kind)({"embed": 8}), getattr(sx.nn, kind)(8)
    layer.scale[...] = other.scale[...] = numbers(8)
    found, expected = layer(REORDERED.astype(dtype)), other(X.data.astype(dtype))
    assert found.dtype == expected.dtype
    found, expected = (each.astype(jnp.float32) for each in (found, expected))
    np.testing.assert_allclose(
        found.unwrap("batch", "time", "embed"),
        expected,
        rtol=2e-5 if dtype == jnp.float32 else 0.02,
    )


def test_norms_take_several_axes_and_no_parameters():
    layer = named.LayerNorm({"time": 5, "embed": 8}, use_scale=False, use_bias=False)
    found = layer(X)
    assert not list(sx.iter_variables(layer))
    np.testing.assert_allclose(found.mean(["time", "embed"]).data, 0, atol=1e-6)
    np.testing.assert_allclose(found.std(["time", "embed"]).data, 1, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_is_that_of_nn(causal, grouped):
    heads, group = (2, {"group": 2}) if grouped else (4, None)
    layer = named.Attention(
        {"embed": 8}, {"heads": heads}, {"head": 2}, group=group, causal=causal, rngs=sx.Rngs(0)
    )
    other = sx.nn.MultiHeadAttention(
        8, 4, num_kv_heads=heads, causal=causal, use_bias=False, rngs=sx.Rngs(1)
    )
    for mine, its in ((layer.q, other.q), (layer.k, other.k), (layer.v, other.v)):
        mine.kernel[...] = its.kernel.value.reshape(mine.kernel.shape)
    layer.out.kernel[...] = other.out.kernel.value.reshape(layer.out.kernel.shape)
    assert_close(layer(REORDERED), other(X.data), "batch", "time", "embed")


def test_attention_reads_from_another_array_through_a_mask():
    layer = named.Attention({"embed": 8}, {"heads": 2}, {"head": 4}, rngs=sx.Rngs(0))
    context = wrap(numbers(2, 3, 8, seed=1), "batch", "time", "embed")
    mask = named.arange({"time_read": 3}) < 2
    found = layer(X, context, mask=mask)
    assert_close(found, layer(X, context[{"time": slice(2)}]).data, "batch", "time", "embed")
    assert not np.allclose(found.data, layer(X, context).data)
    nothing = layer(X, context, mask=mask & False)
    assert bool(jnp.isfinite(nothing.data).all())


# --- a model of them ---


class Model(sx.Module):
    """A small language model over named axes."""

    def __init__(self, rngs):
        self.embed = named.Embed({"vocab": 16}, {"embed": 8}, rngs=rngs)
        self.norm = named.RMSNorm({"embed": 8})
        self.attention = named.Attention(
            {"embed": 8}, {"heads": 4}, {"head": 2}, causal=True, rngs=rngs
        )
        self.up = named.Linear({"embed": 8}, {"mlp": 16}, rngs=rngs)
        self.down = named.Linear({"mlp": 16}, {"embed": 8}, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        x = x + self.down(named.nmap(jax.nn.gelu)(self.up(self.norm(x))))
        return self.embed.attend(x)


TOKENS = wrap(jnp.arange(24).reshape(4, 6) % 16, "batch", "time")
RULES = {"batch": "data", "mlp": "model", "heads": "model", "vocab": "model"}


def loss(model, tokens):
    logits = model(tokens)
    return (logits * logits).mean().unwrap()


def test_rules_lay_a_model_out_and_training_over_a_mesh_is_as_without(mesh):
    alone, laid_out = Model(sx.Rngs(0)), Model(sx.Rngs(0))
    expected, gradients = sx.jit(sx.value_and_grad(loss))(alone, TOKENS)
    assert sx.shard(laid_out, mesh, RULES) is laid_out
    specs = {path: v.sharding.spec for path, v in sx.iter_variables(laid_out)}
    assert specs["up", "kernel"] == P(None, "model")
    assert specs["down", "kernel"] == P("model", None)
    assert specs["attention", "q", "kernel"] == P(None, "model", None)
    assert specs["embed", "embedding"] == P("model", None)
    with jax.set_mesh(mesh):
        data = jax.device_put(TOKENS.data, jax.sharding.NamedSharding(mesh, P("data")))
        tokens = NamedArray(data, TOKENS.dims)
        found, found_gradients = sx.jit(sx.value_and_grad(loss))(laid_out, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for path, gradient in gradients.flat().items():
        np.testing.assert_allclose(found_gradients.flat()[path], gradient, rtol=1e-3, atol=1e-6)


# --- errors ---


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        (
            lambda: named.Linear({"embed": 8}, {"mlp": 3}, rngs=sx.Rngs(0))(
                zeros({"embed": 4, "mlp": 2})
            ),
            [
                "Linear(input_axes={'embed': 8}, output_axes={'mlp': 3})",
                "axis 'embed': expected size 8, found 4",
                "axis 'mlp': expected no such axis, as the layer makes it, found size 2",
            ],
        ),
        (
            lambda: named.RMSNorm({"embed": 8})(zeros({"embd": 8})),
            ["RMSNorm({'embed': 8})", "axis 'embed': expected size 8, found no such axis"],
        ),
        (
            lambda: named.LayerNorm({"embed": 8})(jnp.zeros((2, 8))),
            ["LayerNorm({'embed': 8})", "shape (2, 8)", "named.wrap(x, 'batch', 'embed')"],
        ),
        (
            lambda: named.Embed({"vocab": 9}, {"embed": 4}, rngs=sx.Rngs(0))(zeros({"time": 2})),
            ["Embed(vocab_axis={'vocab': 9}, output_axes={'embed': 4})", "float32{'time': 2}"],
        ),
        (
            lambda: named.Embed({"vocab": 9}, {"embed": 4}, rngs=sx.Rngs(0)).attend(
                zeros({"embed": 4, "vocab": 2})
            ),
            ["attend", "axis 'vocab': expected no such axis"],
        ),
        (
            lambda: named.Attention({"embed": 8}, {"heads": 2}, {"head": 4}, rngs=sx.Rngs(0))(
                zeros({"batch": 2, "embed": 8})
            ),
            ["Attention(axes={'embed': 8}, along='time')", "axis 'time': expected any size"],
        ),
        (
            lambda: named.Attention({"embed": 8}, {"heads": 2}, {"head": 4}, rngs=sx.Rngs(0))(
                X, mask=zeros({"time": 5})
            ),
            ["mask of booleans", "'time_read': 5", "float32{'time': 5}"],
        ),
    ],
)
def test_an_input_that_does_not_fit_is_an_error_that_names_layer_and_axes(call, lines):
    with pytest.raises(sx.errors.LayerInputError) as error:
        call()
    for line in lines:
        assert line in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: named.Linear(8, {"mlp": 3}, rngs=None),
        lambda: named.Linear({}, {"mlp": 3}, rngs=None),
        lambda: named.Linear({"embed": 0}, {"mlp": 3}, rngs=None),
        lambda: named.Linear({"embed": 8}, {"mlp": 3}, batch_axes={"mlp": 3}, rngs=None),
        lambda: named.Embed({"vocab": 9, "other": 2}, {"embed": 4}, rngs=None),
        lambda: named.RMSNorm({"embed": 8}, epsilon=-1.0),
        lambda: named.LayerNorm({None: 8}),
        lambda: named.Attention({"embed": 8}, {"heads": 2}, {"heads": 4}, rngs=None),
        lambda: named.Attention({"time": 8}, {"heads": 2}, {"head": 4}, rngs=None),
    ],
)
def test_a_layer_that_cannot_be_made_is_an_error(make):
    with pytest.raises(sx.errors.LayerConfigError, match=r"needs|has the axis"):
        make()
