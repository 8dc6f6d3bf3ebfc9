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


@sx.jit
def call(layer: Any, x: Any) -> Any:
    return layer(x)


def rows(scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
    drawn = np.random.default_rng(5).normal(size=(4, 16))
    return (offset + scale * drawn).astype(np.float32)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm_equals_its_formula(epsilon: float):
    layer = sx.nn.RMSNorm(16, epsilon=epsilon)
    layer.scale.value = rows()[1]
    x = rows().astype(np.float64)
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon) * rows()[1]
    np.testing.assert_allclose(call(layer, rows()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_layer_norm_equals_its_formula(epsilon: float):
    layer = sx.nn.LayerNorm(16, epsilon=epsilon)
    layer.scale.value, layer.bias.value = rows()[1], rows()[2]
    x = rows().astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt(np.mean(centred**2, -1, keepdims=True) + epsilon)
    expected = centred / deviation * rows()[1] + rows()[2]
    np.testing.assert_allclose(call(layer, rows()), expected, rtol=1e-5, atol=1e-5)


@given(factor=st.floats(0.01, 100), offset=st.floats(-10, 10))
def test_layer_norm_forgets_scale_and_offset(factor: float, offset: float):
    layer = sx.nn.LayerNorm(16, epsilon=0.0)
    x = rows().astype(np.float64)
    expected = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    moved = (factor * rows() + offset).astype(np.float32)
    np.testing.assert_allclose(
        call(layer, moved), expected, atol=2e-5 * (1 + abs(offset) / factor), rtol=1e-4
    )


def test_large_offset_costs_no_precision():
    layer = sx.nn.LayerNorm(16)
    np.testing.assert_allclose(call(layer, rows(1.0, 1000.0)), call(layer, rows()), atol=1e-3)


@pytest.mark.parametrize("norm", [sx.nn.RMSNorm, sx.nn.LayerNorm])
def test_statistics_of_bfloat16_are_computed_in_float32(norm: Any):
    layer, x = norm(16, dtype=jnp.bfloat16), rows(300.0).astype(jnp.bfloat16)
    wide = np.asarray(call(norm(16), x.astype(np.float32)))
    found = call(layer, x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("norm", [sx.nn.RMSNorm, sx.nn.LayerNorm])
def test_result_is_promoted_without_a_compute_dtype(norm: Any):
    small = np.ones(16, jnp.bfloat16)
    assert sx.eval_shape(call, norm(16), small).dtype == jnp.float32
    narrow = norm(16, param_dtype=jnp.bfloat16)
    assert sx.eval_shape(call, narrow, small).dtype == jnp.bfloat16
    assert norm(16)(np.arange(16)).dtype == jnp.float32


def test_scale_and_bias_can_be_left_out():
    layer = sx.nn.LayerNorm(16, use_scale=False, use_bias=False)
    assert list(sx.state(layer)) == []
    np.testing.assert_allclose(call(layer, rows()), call(sx.nn.LayerNorm(16), rows()), rtol=1e-6)
    bare, full = sx.nn.RMSNorm(16, use_scale=False), sx.nn.RMSNorm(16)
    assert list(sx.state(bare)) == []
    np.testing.assert_allclose(call(bare, rows()), call(full, rows()), rtol=1e-6)
    assert sx.eval_shape(call, bare, np.arange(16)).dtype == jnp.float32


@pytest.mark.parametrize("norm", [sx.nn.RMSNorm, sx.nn.LayerNorm])
def test_unsuitable_options_and_inputs_are_refused(norm: Any):
    with pytest.raises(LayerInputError, match=rf"{norm.__name__}\(16\) takes .*float32\[16, 4\]"):
        norm(16)(rows().T)
    with pytest.raises(LayerConfigError, match="features=-1"):
        norm(-1)
    with pytest.raises(LayerConfigError, match="epsilon=-1"):
        norm(2, epsilon=-1)
    with pytest.raises(LayerConfigError, match="1 axis names"):
        norm(2, axes=("a", "b"))


@pytest.mark.parametrize(
    ("groups", "shape"),
    [
        *((groups, (3, 5, 8)) for groups in (1, 2, 4, 8)),
        *((groups, (3, 8)) for groups in (1, 8)),
        (2, (2, 3, 4, 8)),
        (8, (2, 3, 4, 8)),
        (4, (2, 3, 2, 2, 8)),
    ],
)
def test_group_norm_and_its_gradients_equal_flax(groups: int, shape: tuple[int, ...]):
    x, scale, bias = (
        np.random.default_rng(seed).normal(size=size).astype(np.float32)
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


def test_group_norm_refuses_uneven_groups_and_missing_batch():
    with pytest.raises(LayerConfigError, match=r"features=8 into num_groups=3 equal"):
        sx.nn.GroupNorm(8, 3)
    with pytest.raises(LayerInputError, match=r"\(batch, \.\.\., 8\).*layer\(x\[None\]\)\[0\]"):
        sx.nn.GroupNorm(8, 2)(np.ones(8, np.float32))
