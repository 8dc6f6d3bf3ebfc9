# SPDX-License-Identifier: Apache-2.0
"""MLP and Sequential."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError, ModuleError
from tests.advice import run_advice
from tests.values import with_values

MASK = np.tril(np.ones((1, 3, 3), bool))
X = np.random.default_rng(4).normal(size=(3, 4)).astype(np.float32)


@sx.jit
def call(layer: Any, x: Any, **side: Any) -> Any:
    return layer(x, **side)


def test_gated_mlp_multiplies_activated_gate_with_hidden_layer():
    mlp = with_values(sx.nn.MLP(4, 6, rngs=sx.Rngs(0)))
    gate, up, down = (np.asarray(one.kernel.value) for one in (mlp.gate, mlp.up, mlp.down))
    silu = X @ gate / (1 + np.exp(-X @ gate))
    np.testing.assert_allclose(call(mlp, X), (silu * (X @ up)) @ down, rtol=1e-5, atol=1e-6)


def test_mlp_without_gate_activates_the_hidden_layer():
    mlp = with_values(
        sx.nn.MLP(4, 6, out_features=2, gated=False, activation=jnp.tanh, rngs=sx.Rngs(0))
    )
    assert mlp.gate is None
    up, down = (np.asarray(one.kernel.value) for one in (mlp.up, mlp.down))
    np.testing.assert_allclose(call(mlp, X), np.tanh(X @ up) @ down, rtol=1e-5, atol=1e-6)


def test_axes_are_those_of_features_and_hidden_layer():
    mlp = sx.nn.MLP(4, 6, use_bias=True, axes=("d", "f"), rngs=sx.Rngs(0))
    assert [variable.axes for _, variable in sx.iter_variables(mlp)] == [
        ("d", "f"),
        ("f",),
        ("d", "f"),
        ("f",),
        ("f", "d"),
        ("d",),
    ]


def test_mlp_refuses_unknown_activations_sizes_and_inputs():
    with pytest.raises(LayerConfigError, match="activation='swish2'"):
        sx.nn.MLP(4, 6, activation="swish2", rngs=sx.Rngs(0))
    with pytest.raises(LayerConfigError, match="hidden_features=0"):
        sx.nn.MLP(4, 0, rngs=sx.Rngs(0))
    with pytest.raises(LayerConfigError, match="2 axis names"):
        sx.nn.MLP(4, 6, axes=("embed",), rngs=sx.Rngs(0))
    with pytest.raises(LayerInputError, match=r"\(\.\.\., 4\)"):
        sx.nn.MLP(4, 6, rngs=sx.Rngs(0))(X.T)


def test_sequential_calls_modules_and_functions_in_order():
    rngs = sx.Rngs(0)
    first, last = sx.nn.Linear(4, 3, rngs=rngs), sx.nn.Linear(3, 2, rngs=rngs)
    model = with_values(sx.nn.Sequential(first, jnp.tanh, last))
    kernels = [np.asarray(one.kernel.value) for one in (first, last)]
    biases = [np.asarray(one.bias.value) for one in (first, last)]
    expected = np.tanh(X @ kernels[0] + biases[0]) @ kernels[1] + biases[1]
    np.testing.assert_allclose(call(model, X), expected, rtol=1e-5, atol=1e-6)
    assert sx.nn.Sequential()(X) is X


def test_layers_can_be_added_replaced_and_tied_afterwards():
    layer = with_values(sx.nn.Linear(4, 4, rngs=sx.Rngs(0)))
    model = sx.nn.Sequential(layer)
    once = call(model, X)
    model.layers.append(layer)
    np.testing.assert_allclose(call(model, X), call(layer, once), rtol=1e-5, atol=1e-6)
    assert sx.find_duplicates(model) == [
        [("layers", 0, "kernel"), ("layers", 1, "kernel")],
        [("layers", 0, "bias"), ("layers", 1, "bias")],
    ]
    twin = pickle.loads(pickle.dumps(model))
    assert twin.layers[0] is twin.layers[1]


def test_sequential_refuses_what_cannot_be_called():
    with pytest.raises(LayerConfigError, match="the one at 1 is 3 of type int"):
        sx.nn.Sequential(jnp.tanh, 3)
    with pytest.raises(LayerConfigError, match=r"Write Sequential\(\*layers\)"):
        sx.nn.Sequential([jnp.tanh])


def test_side_inputs_reach_nested_layers_by_name():
    rngs = sx.Rngs(0)

    def attention() -> sx.nn.MultiHeadAttention:
        return sx.nn.MultiHeadAttention(4, 2, rngs=rngs)

    first, second, third = attention(), attention(), attention()
    stack = sx.nn.Stack(attention, 2)
    inner = sx.nn.Sequential(jnp.tanh, sx.Remat(second), sx.nn.Dropout(0.5, rngs=rngs))
    model = sx.nn.Sequential(first, jax.nn.gelu, sx.Jitted(third), inner, stack)
    with_values(model)

    @sx.jit
    def by_hand(first: Any, second: Any, third: Any, stack: Any, x: Any) -> Any:
        y = third(jax.nn.gelu(first(x, mask=MASK)), mask=MASK)
        return stack(second(jnp.tanh(y), mask=MASK), mask=MASK)

    expected = by_hand(first, second, third, stack, X)
    found = [model(X, mask=MASK, deterministic=True, positions=None)]
    model.eval()
    found += [call(model, X, mask=MASK), sx.jit(sx.remat(model))(X, mask=MASK)]
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)


def test_layer_with_keyword_arguments_gets_every_one():
    class Scaled(sx.Module):
        def __call__(self, x: Any, **side: Any) -> Any:
            return x * (side["factor"] if side else 1.0)

    linear = with_values(sx.nn.Linear(4, 4, rngs=sx.Rngs(0)))
    model = sx.nn.Sequential(linear, Scaled())
    np.testing.assert_allclose(call(model, X, factor=3.0), 3 * call(linear, X), rtol=1e-6)
    np.testing.assert_array_equal(call(model, X), call(linear, X))


def test_mask_of_attention_does_not_reach_norms():
    attention = with_values(sx.nn.MultiHeadAttention(4, 2, rngs=sx.Rngs(0)))
    alone = sx.surgery.LoRA(None, 2, in_features=4, out_features=4)
    for norm in (sx.nn.RMSNorm(4), sx.nn.LayerNorm(4), sx.nn.GroupNorm(4, 2)):
        model = sx.nn.Sequential(attention, norm, alone)
        by_hand = sx.jit(lambda attention, norm, x: alone(norm(attention(x, mask=MASK))))
        expected = by_hand(attention, norm, X)
        np.testing.assert_allclose(call(model, X, mask=MASK), expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(LayerInputError, match="no layer takes mask"):
            sx.nn.Sequential(norm)(X, mask=MASK)


def test_unknown_and_unnamed_side_inputs_are_refused():
    linear = with_values(sx.nn.Linear(4, 4, rngs=sx.Rngs(0)))
    model = sx.nn.Sequential(jnp.tanh, linear)
    with pytest.raises(LayerInputError, match=r"no layer takes mask.*tanh, Linear.*mask=mask"):
        model(X, mask=MASK)
    with pytest.raises(LayerInputError, match=r"have no names.*mask=mask"):
        model(X, MASK)
    np.testing.assert_array_equal(call(model, X, anything=None), call(model, X))


@pytest.mark.parametrize(
    ("rngs", "shown"),
    [
        (5, r"given 5 of type int.*rngs=sx\.Rngs\(5\)"),
        (np.int64(5), r"int64\[\].*rngs=sx\.Rngs\(key\)"),
        (jax.random.key(0), r"key<fry>\[\].*rngs=sx\.Rngs\(key\)"),
        (jax.random.PRNGKey(0), r"uint32\[2\].*rngs=sx\.Rngs\(key\)"),
        (sx.Rngs(0).params, r"RngStream.*rngs=sx\.Rngs\(0\)"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: sx.nn.Linear(2, 3, rngs=rngs),
        lambda rngs: sx.nn.Einsum("ab,bc->ac", (2, 3), rngs=rngs),
        lambda rngs: sx.nn.Embed(2, 3, rngs=rngs),
        lambda rngs: sx.nn.MLP(2, 3, rngs=rngs),
        lambda rngs: sx.nn.MultiHeadAttention(2, 1, rngs=rngs),
        lambda rngs: sx.nn.RMSNorm(2, rngs=rngs),
        lambda rngs: sx.nn.LayerNorm(2, rngs=rngs),
        lambda rngs: sx.nn.BatchNorm(2, rngs=rngs),
        lambda rngs: sx.nn.Dropout(0.5, rngs=rngs),
        lambda rngs: sx.nn.Dropout(0.5)(jnp.ones(2), rngs=rngs),
        lambda rngs: sx.named.Linear({"a": 2}, {"b": 2}, rngs=rngs),
        lambda rngs: sx.models.Decoder(sx.models.DecoderConfig(), rngs=rngs),
        lambda rngs: sx.Param(sx.Init(jax.nn.initializers.normal(), (2,), rngs=rngs)),
    ],
)
def test_seed_or_key_as_rngs_is_refused(rngs, shown, make):
    with pytest.raises(ModuleError, match=rf"(?s)^rngs takes .*{shown}") as caught:
        make(rngs)
    if "sx.Rngs(0)" in str(caught.value):
        make(run_advice(caught.value, "sx.Rngs(0)", {"sx": sx}))
