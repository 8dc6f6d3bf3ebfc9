# SPDX-License-Identifier: Apache-2.0
"""MultiHeadAttention against a plain NumPy version, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax._transforms.errors import LayerConfigError
from shardax.nn.parameters import LayerInputError

FEATURES, HEADS, TIME = 12, 4, 5


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(11).normal(size=shape).astype(np.float32)


def attention(**options: Any) -> sx.nn.MultiHeadAttention:
    return sx.nn.MultiHeadAttention(FEATURES, HEADS, rngs=sx.Rngs(0), **options)


def by_hand(layer: Any, x: np.ndarray, context: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Attention of one item, head by head, in float64."""
    kernels = [np.asarray(one.kernel.value, float) for one in (layer.q, layer.k, layer.v)]
    out = np.asarray(layer.out.kernel.value, float)
    share = layer.num_heads // layer.num_kv_heads
    result = np.zeros((len(x), layer.features))
    for head in range(layer.num_heads):
        q = x @ kernels[0][:, head]
        k, v = (context @ kernel[:, head // share] for kernel in kernels[1:])
        scores = np.where(allowed, q @ k.T / np.sqrt(layer.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        result += weights / weights.sum(-1, keepdims=True) @ v @ out[head]
    return result


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_weigh_the_values_they_may_read(kv_heads: int, causal: bool):
    layer, x = attention(num_kv_heads=kv_heads, causal=causal), floats(2, TIME, FEATURES)
    allowed = np.tril(np.ones((TIME, TIME), bool)) if causal else np.ones((TIME, TIME), bool)
    close(layer(x), [by_hand(layer, item, item, allowed) for item in x])


def test_a_context_is_read_instead_of_the_input():
    layer, x, context = attention(), floats(2, TIME, FEATURES), floats(2, 3, FEATURES)
    allowed = np.ones((TIME, 3), bool)
    pairs = zip(x, context, strict=True)
    close(layer(x, context), [by_hand(layer, one, other, allowed) for one, other in pairs])


def test_a_mask_says_what_may_be_read():
    layer, x = attention(), floats(2, TIME, FEATURES)
    allowed = np.random.default_rng(0).random((2, TIME, TIME)) > 0.4
    allowed |= np.eye(TIME, dtype=bool)
    pairs = zip(x, allowed, strict=True)
    expected = [by_hand(layer, item, item, mask) for item, mask in pairs]
    close(layer(x, mask=allowed[:, None]), expected)


def test_with_rotary_positions_only_their_differences_count():
    layer, x = attention(rope_base=100.0, head_dim=4), floats(TIME, FEATURES)
    plain = attention(head_dim=4)
    assert not np.allclose(layer(x), plain(x), atol=1e-3)
    close(layer(x), layer(x, positions=np.arange(TIME) + 40))
    rotation = sx.nn.rotation(jnp.arange(TIME), 4, 100.0)
    close(layer(x), layer(x, positions=rotation))
    assert not np.allclose(layer(x), layer(x, positions=np.arange(TIME) * 2), atol=1e-3)


def test_a_context_has_positions_of_its_own():
    layer, x = attention(rope_base=100.0, head_dim=4), floats(TIME, FEATURES)
    close(layer(x, x), layer(x))
    close(layer(x, x, positions=np.arange(TIME), context_positions=np.arange(TIME)), layer(x))
    moved = layer(x, x, context_positions=np.arange(TIME) + 3)
    assert not np.allclose(moved, layer(x), atol=1e-3)


def test_causal_attention_does_not_see_what_comes_later():
    layer, x = attention(causal=True, rope_base=100.0, head_dim=4), floats(TIME, FEATURES)
    changed = x.copy()
    changed[3:] += 1
    close(layer(changed)[:3], layer(x)[:3])
    assert not np.allclose(layer(changed)[3:], layer(x)[3:], atol=1e-3)


def test_biases_and_other_names_for_the_axes():
    layer = attention(use_bias=True, axes=("model", "h", "kv", None))
    assert {path: variable.axes for path, variable in sx.iter_variables(layer)} == {
        ("q", "kernel"): ("model", "h", None),
        ("q", "bias"): ("h", None),
        ("k", "kernel"): ("model", "kv", None),
        ("k", "bias"): ("kv", None),
        ("v", "kernel"): ("model", "kv", None),
        ("v", "bias"): ("kv", None),
        ("out", "kernel"): ("h", None, "model"),
        ("out", "bias"): ("model",),
    }


def test_kv_heads_that_are_whole_meet_query_heads_that_are_split(mesh: Mesh):
    """Two kv heads cannot be split over four devices, eight query heads can."""
    layer = sx.nn.MultiHeadAttention(8, 8, num_kv_heads=2, head_dim=2, rngs=sx.Rngs(0))
    x = floats(4, TIME, 8)

    def step(layer: Any, x: Any) -> Any:
        return sx.value_and_grad(lambda layer: jnp.sum(jnp.sin(layer(x))))(layer)

    expected, expected_gradients = sx.jit(step)(layer, x)
    sx.shard(layer, mesh, {"heads": "model"})
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        found, gradients = sx.jit(step)(layer, x)
    close(found, expected)
    jax.tree.map(close, gradients, expected_gradients)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"rope_base": 100.0}, "even head_dim.*head_dim=3"),
        ({"axes": ("embed", "heads")}, "4 axis names"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(LayerConfigError, match=message):
        attention(**options)


def test_features_that_do_not_split_into_heads_are_refused():
    with pytest.raises(LayerConfigError, match="features=10 into num_heads=4"):
        sx.nn.MultiHeadAttention(10, 4, rngs=sx.Rngs(0))


def test_inputs_that_do_not_fit_are_refused_by_name():
    layer, x = attention(), floats(2, TIME, FEATURES)
    with pytest.raises(
        LayerInputError, match=r"takes x of shape .*, but was given float32\[2, 5\]"
    ):
        layer(x[..., 0])
    with pytest.raises(LayerInputError, match=r"takes context of shape \(batch, time, 12\)"):
        layer(x, x[0])
    with pytest.raises(LayerInputError, match=r"a mask of booleans.* given float32\[1, 1, 5, 5\]"):
        layer(x, mask=np.zeros((1, 1, TIME, TIME), np.float32))
    with pytest.raises(LayerInputError, match=r"given bool\[5, 5\]"):
        layer(x, mask=np.ones((TIME, TIME), bool))
