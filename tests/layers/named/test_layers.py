# SPDX-License-Identifier: Apache-2.0
"""Layers over named axes compute what those of ``sx.nn`` do, and are laid out by the same rules."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import named
from shardax.named import NamedArray, wrap, zeros
from tests.layers.named.arrays import stored_as
from tests.values import with_values


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(found, expected, *names):
    np.testing.assert_allclose(found.unwrap(*names), expected, rtol=2e-5, atol=2e-5)


NUMBERS = numbers(2, 5, 8)
X = wrap(NUMBERS, "batch", "time", "embed")
REORDERED = stored_as(X, ("embed", "batch", "time"))


def results(layer, *others):
    """What a layer over names and others over plain arrays return for ``X``, in one program."""

    @sx.jit
    def run(layer, others):
        return layer(NamedArray(REORDERED.data, REORDERED.dims)), [o(NUMBERS) for o in others]

    return run(layer, others)


def test_linear_equals_that_of_nn():
    layer = named.Linear({"embed": 8}, {"heads": 4, "head": 2}, rngs=sx.Rngs(0))
    other = sx.nn.Linear(8, (4, 2), rngs=sx.Rngs(0))
    layer.bias.value = other.bias.value = numbers(4, 2, seed=1)
    np.testing.assert_array_equal(layer.kernel.value, other.kernel.value)
    found, (expected,) = results(layer, other)
    assert_close(found, expected, "batch", "time", "heads", "head")
    # Eager calls, by any storage.
    for x in (X, REORDERED):
        assert_close(layer(x), expected, "batch", "time", "heads", "head")


def test_linear_has_batch_axes_and_positional_dimensions():
    layer = named.Linear({"embed": 8}, {"mlp": 3}, batch_axes={"time": 5}, rngs=sx.Rngs(0))
    layer = with_values(layer)
    layer.bias.value = np.zeros(layer.bias.shape, np.float32)
    assert layer.kernel.axes == ("time", "embed", "mlp")
    found = layer(NamedArray(X.data, (None, "time", "embed")))
    assert (found.axes, found.positional_shape) == ({"time": 5, "mlp": 3}, (2,))
    expected = np.einsum("bte,tem->btm", NUMBERS, layer.kernel.value)
    assert_close(found.tag("batch"), expected, "batch", "time", "mlp")


def test_linear_to_its_own_axes_names_both_apart():
    layer = named.Linear({"embed": 8}, {"embed": 8}, use_bias=False, rngs=sx.Rngs(0))
    layer = with_values(layer)
    assert layer.kernel.axes == ("embed", "embed_out")
    assert_close(layer(X), NUMBERS @ np.asarray(layer.kernel.value), "batch", "time", "embed")


def test_layers_are_lazy_and_constants_draw_nothing():
    layer = named.Linear({"embed": 8}, {"mlp": 3}, rngs=sx.Rngs(0))
    assert all(variable.is_lazy for _, variable in sx.iter_variables(layer))
    np.testing.assert_array_equal(
        named.Linear({"embed": 8}, {"mlp": 3}, use_bias=False, rngs=sx.Rngs(0)).kernel.value,
        layer.kernel.value,
    )


def test_embed_equals_that_of_nn():
    tokens = np.array([[1, 9, -1], [0, 10, 3]])
    layer = named.Embed({"vocab": 10}, {"embed": 4}, rngs=sx.Rngs(0))
    other = sx.nn.Embed(10, 4, rngs=sx.Rngs(0))
    np.testing.assert_array_equal(layer.embedding.value, other.embedding.value)
    x = numbers(2, 3, 4)

    @sx.jit
    def run(layer, other):
        named_results = layer(wrap(tokens, "batch", "time")), layer.attend(wrap(x, *names))
        return named_results, (other(tokens), other.attend(x))

    names = ("batch", "time", "embed")
    (vectors, scores), expected = run(layer, other)
    assert_close(vectors, expected[0], *names)
    assert np.isnan(vectors.unwrap(*names)[1, 1]).all()
    assert_close(scores, expected[1], "batch", "time", "vocab")


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_masked_norms_equal_those_over_positions(kind: str) -> None:
    numbers = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    mask = np.arange(80).reshape(2, 5, 8) % 3 > 0
    mask[1, 2] = False
    layer, reference = getattr(named, kind)({"embed": 8}), getattr(sx.nn, kind)(8)
    x, seen = (
        named.wrap(numbers, "batch", "time", "embed"),
        named.wrap(mask, "batch", "time", "embed"),
    )
    y = layer(x.order_as("embed", "batch", "time"), mask=seen).unwrap("batch", "time", "embed")
    np.testing.assert_allclose(y, reference(numbers, mask=mask), rtol=1e-5, atol=1e-5)
    rows = named.wrap(mask.any(-1), "batch", "time")  # of a row all elements count, or none
    expected = layer(x).unwrap("batch", "time", "embed")
    np.testing.assert_array_equal(layer(x, mask=rows).unwrap("batch", "time", "embed"), expected)
    with pytest.raises(sx.errors.LayerInputError, match="mask > 0"):
        layer(x, mask=seen.astype(np.float32))
    with pytest.raises(sx.errors.NamedAxesError, match="head"):
        layer(x, mask=named.ones({"head": 2}, bool))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_equal_those_of_nn(kind, dtype):
    layer, other = getattr(named, kind)({"embed": 8}), getattr(sx.nn, kind)(8)
    layer.scale.value = other.scale.value = numbers(8)

    @sx.jit
    def run(layer, other):
        x = NamedArray(REORDERED.data, REORDERED.dims).astype(dtype)
        return layer(x), other(NUMBERS.astype(dtype))

    found, expected = run(layer, other)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(
        np.float32(found.unwrap("batch", "time", "embed")),
        np.float32(expected),
        rtol=2e-5 if dtype == jnp.float32 else 0.02,
    )


def test_norms_take_several_axes_and_no_parameters():
    layer = named.LayerNorm({"time": 5, "embed": 8}, use_scale=False, use_bias=False)
    assert not list(sx.iter_variables(layer))
    found = np.asarray(jax.jit(layer)(X).unwrap("batch", "time", "embed"))
    np.testing.assert_allclose(found.mean((1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(found.std((1, 2)), 1, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_equals_that_of_nn(causal, grouped):
    heads, group = (2, {"group": 2}) if grouped else (4, None)
    layer = named.Attention(
        {"embed": 8}, {"heads": heads}, {"head": 2}, group=group, causal=causal, rngs=sx.Rngs(0)
    )
    other = sx.nn.MultiHeadAttention(
        8, 4, num_kv_heads=heads, causal=causal, use_bias=False, rngs=sx.Rngs(1)
    )
    with_values(other)
    for name in ("q", "k", "v", "out"):
        mine, its = getattr(layer, name).kernel, getattr(other, name).kernel
        mine.value = np.asarray(its.value).reshape(mine.shape)
    found, (expected,) = results(layer, other)
    assert_close(found, expected, "batch", "time", "embed")


def test_attention_reads_another_array_through_a_mask():
    layer = named.Attention({"embed": 8}, {"heads": 2}, {"head": 4}, rngs=sx.Rngs(0))
    context = wrap(numbers(2, 3, 8, seed=1), "batch", "time", "embed")
    mask = wrap(np.arange(3) < 2, "time_read")

    @sx.jit
    def run(layer, x, context):
        return (
            layer(x, context, mask=mask),
            layer(x, context[{"time": slice(2)}]),
            layer(x, context),
            layer(x, context, mask=mask & False),
        )

    names = ("batch", "time", "embed")
    found, of_two, of_all, of_none = run(with_values(layer), X, context)
    assert_close(found, of_two.unwrap(*names), *names)
    assert not np.allclose(found.unwrap(*names), of_all.unwrap(*names))
    assert np.isfinite(of_none.unwrap(*names)).all()


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


TOKENS = wrap(np.arange(24).reshape(4, 6) % 16, "batch", "time")
RULES = {"batch": "data", "mlp": "model", "heads": "model", "vocab": "model"}


@sx.jit
@sx.value_and_grad
def loss_and_gradients(model, tokens):
    logits = model(tokens)
    return (logits * logits).mean().unwrap()


@functools.cache
def of_one_device():
    return loss_and_gradients(with_values(Model(sx.Rngs(0))), TOKENS)


def test_model_trains_over_a_mesh_as_without(mesh):
    expected, gradients = of_one_device()
    model = with_values(Model(sx.Rngs(0)))
    assert sx.shard(model, mesh, RULES) is model
    specs = {path: v.sharding.spec for path, v in sx.iter_variables(model)}
    assert specs["up", "kernel"] == P(None, "model")
    assert specs["down", "kernel"] == P("model", None)
    assert specs["attention", "q", "kernel"] == P(None, "model", None)
    assert specs["embed", "embedding"] == P("model", None)
    with jax.set_mesh(mesh):
        data = jax.device_put(TOKENS.data, jax.sharding.NamedSharding(mesh, P("data")))
        tokens = NamedArray(data, TOKENS.dims)
        found, found_gradients = loss_and_gradients(model, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found_gradients.flat().keys() == gradients.flat().keys()
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
            ["mask of booleans", "float32[5]", "mask > 0"],
        ),
    ],
)
def test_unfit_input_error_names_layer_and_axes(call, lines):
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
def test_unfit_layer_configuration_is_refused(make):
    with pytest.raises(sx.errors.LayerConfigError, match=r"needs|has the axis"):
        make()
