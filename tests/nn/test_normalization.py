# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm against their formulas, and the precision of their statistics."""

from __future__ import annotations

from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError


def rows(scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
    drawn = np.random.default_rng(5).normal(size=(4, 16))
    return (offset + scale * drawn).astype(np.float32)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm_is_its_formula(epsilon: float):
    layer = sx.nn.RMSNorm(16, epsilon=epsilon)
    layer.scale.value = rows()[1]
    x = rows().astype(np.float64)
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon) * rows()[1]
    np.testing.assert_allclose(layer(rows()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_layer_norm_is_its_formula(epsilon: float):
    layer = sx.nn.LayerNorm(16, epsilon=epsilon)
    layer.scale.value, layer.bias.value = rows()[1], rows()[2]
    x = rows().astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt(np.mean(centred**2, -1, keepdims=True) + epsilon)
    expected = centred / deviation * rows()[1] + rows()[2]
    np.testing.assert_allclose(layer(rows()), expected, rtol=1e-5, atol=1e-5)


@given(factor=st.floats(0.01, 100), offset=st.floats(-10, 10))
def test_layer_norm_forgets_scale_and_offset_of_its_input(factor: float, offset: float):
    layer = sx.nn.LayerNorm(16, epsilon=0.0)
    moved = (factor * rows() + offset).astype(np.float32)
    np.testing.assert_allclose(
        layer(moved), layer(rows()), atol=2e-5 * (1 + abs(offset) / factor), rtol=1e-4
    )


def test_a_large_offset_costs_layer_norm_no_precision():
    layer = sx.nn.LayerNorm(16)
    np.testing.assert_allclose(layer(rows(1.0, 1000.0)), layer(rows()), atol=1e-3)


@pytest.mark.parametrize("norm", [sx.nn.RMSNorm, sx.nn.LayerNorm])
def test_statistics_of_bfloat16_are_computed_in_float32(norm: Any):
    layer, x = norm(16, dtype=jnp.bfloat16), rows(300.0).astype(jnp.bfloat16)
    wide = norm(16)(x.astype(np.float32))
    assert layer(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(layer(x), wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("norm", [sx.nn.RMSNorm, sx.nn.LayerNorm])
def test_the_result_is_promoted_without_a_compute_dtype(norm: Any):
    small = jnp.ones(16, jnp.bfloat16)
    assert norm(16)(small).dtype == jnp.float32
    assert norm(16, param_dtype=jnp.bfloat16)(small).dtype == jnp.bfloat16
    assert norm(16)(np.arange(16)).dtype == jnp.float32


def test_scale_and_bias_can_be_left_out():
    layer = sx.nn.LayerNorm(16, use_scale=False, use_bias=False)
    assert list(sx.state(layer)) == []
    np.testing.assert_allclose(layer(rows()), sx.nn.LayerNorm(16)(rows()), rtol=1e-6)
    assert sx.nn.RMSNorm(16, use_scale=False)(np.arange(16)).dtype == jnp.float32


@pytest.mark.parametrize("norm", [sx.nn.RMSNorm, sx.nn.LayerNorm])
def test_norms_refuse_what_does_not_fit(norm: Any):
    with pytest.raises(LayerInputError, match=rf"{norm.__name__}\(16\) takes .*float32\[16, 4\]"):
        norm(16)(rows().T)
    with pytest.raises(LayerConfigError, match="features=-1"):
        norm(-1)
    with pytest.raises(LayerConfigError, match="epsilon=-1"):
        norm(2, epsilon=-1)
    with pytest.raises(LayerConfigError, match="1 axis names"):
        norm(2, axes=("a", "b"))


@pytest.mark.parametrize("shape", [(3, 8), (3, 5, 8), (2, 3, 4, 8), (2, 3, 2, 2, 8)])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_group_norm_and_its_gradients_are_those_of_flax(groups: int, shape: tuple[int, ...]):
    x, scale, bias = (
        np.asarray(jax.random.normal(jax.random.key(seed), size), np.float32)
        for seed, size in enumerate((shape, (8,), (8,)))
    )
    instance = groups == 8
    layer = sx.nn.InstanceNorm(8) if instance else sx.nn.GroupNorm(8, groups)
    layer.scale.value, layer.bias.value = scale, bias
    peer = linen.GroupNorm(groups)

    def loss(layer: Any, x: Any) -> Any:
        y = layer(x)
        return jnp.sum(jnp.sin(y)), y

    def peer_loss(params: Any, x: Any) -> Any:
        y: Any = peer.apply({"params": params}, x)
        return jnp.sum(jnp.sin(y)), y

    params = {"scale": scale, "bias": bias}
    found, y = sx.jit(sx.grad(loss, argnums=(0, 1), has_aux=True))(layer, x)
    wanted, of_peer = jax.jit(jax.grad(peer_loss, argnums=(0, 1), has_aux=True))(params, x)
    np.testing.assert_allclose(y, of_peer, rtol=1e-4, atol=1e-4)
    if x[0].size == groups:  # of one number there is no deviation: all is epsilon
        return
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-3, atol=1e-4)
    for name in params:
        np.testing.assert_allclose(found[0][name], wanted[0][name], rtol=1e-3, atol=1e-4)


def test_group_norm_refuses_groups_that_do_not_divide_and_inputs_without_batch():
    with pytest.raises(LayerConfigError, match=r"features=8 into num_groups=3 equal"):
        sx.nn.GroupNorm(8, 3)
    with pytest.raises(LayerInputError, match=r"\(batch, \.\.\., 8\).*layer\(x\[None\]\)\[0\]"):
        sx.nn.GroupNorm(8, 2)(np.ones(8, np.float32))
