# SPDX-License-Identifier: Apache-2.0
"""MLP and Sequential."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError, SeedError

MASK = jnp.tril(jnp.ones((1, 3, 3), bool))
X = np.random.default_rng(4).normal(size=(3, 4)).astype(np.float32)


def test_gated_mlp_multiplies_the_activated_gate_with_the_hidden_layer():
    mlp = sx.nn.MLP(4, 6, rngs=sx.Rngs(0))
    gate, up, down = (one.kernel.value for one in (mlp.gate, mlp.up, mlp.down))
    expected = (jax.nn.silu(X @ gate) * (X @ up)) @ down
    np.testing.assert_allclose(mlp(X), expected, rtol=1e-5, atol=1e-6)


def test_mlp_without_gate_activates_the_hidden_layer():
    mlp = sx.nn.MLP(4, 6, out_features=2, gated=False, activation=jnp.tanh, rngs=sx.Rngs(0))
    assert mlp.gate is None
    expected = jnp.tanh(X @ mlp.up.kernel.value) @ mlp.down.kernel.value
    np.testing.assert_allclose(mlp(X), expected, rtol=1e-5, atol=1e-6)


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
    model = sx.nn.Sequential(first, jnp.tanh, last)
    np.testing.assert_array_equal(model(X), last(jnp.tanh(first(X))))
    assert sx.nn.Sequential()(X) is X


def test_layers_can_be_added_replaced_and_tied_afterwards():
    layer = sx.nn.Linear(4, 4, rngs=sx.Rngs(0))
    model = sx.nn.Sequential(layer)
    once = sx.jit(model)(X)
    model.layers.append(layer)
    np.testing.assert_allclose(sx.jit(model)(X), layer(once), rtol=1e-5, atol=1e-6)
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


def test_side_inputs_reach_by_name_the_layers_that_take_them_also_inside_other_layers():
    rngs = sx.Rngs(0)

    def attention() -> sx.nn.MultiHeadAttention:
        return sx.nn.MultiHeadAttention(4, 2, rngs=rngs)

    first, second, third = attention(), attention(), attention()
    stack = sx.nn.Stack(attention, 2)
    inner = sx.nn.Sequential(jnp.tanh, sx.Remat(second), sx.nn.Dropout(0.5, rngs=rngs))
    model = sx.nn.Sequential(first, jax.nn.gelu, sx.Jitted(third), inner, stack)
    expected = stack(
        second(jnp.tanh(third(jax.nn.gelu(first(X, mask=MASK)), mask=MASK)), mask=MASK), mask=MASK
    )
    found = [model(X, mask=MASK, deterministic=True, positions=None)]
    model.eval()
    found += [call(X, mask=MASK) for call in (model, sx.jit(model), sx.remat(model))]
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5)


def test_a_side_input_that_no_layer_takes_or_without_a_name_is_refused():
    model = sx.nn.Sequential(jnp.tanh, sx.nn.Linear(4, 4, rngs=sx.Rngs(0)))
    with pytest.raises(LayerInputError, match=r"no layer takes mask.*tanh, Linear.*mask=mask"):
        model(X, mask=MASK)
    with pytest.raises(LayerInputError, match=r"have no names.*mask=mask"):
        model(X, MASK)
    assert model(X, anything=None).shape == (3, 4)


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
def test_a_seed_or_key_in_place_of_rngs_is_an_error_with_the_fix(rngs, shown, make):
    with pytest.raises(SeedError, match=rf"(?s)^rngs takes .*{shown}"):
        make(rngs)
