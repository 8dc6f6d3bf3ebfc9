# SPDX-License-Identifier: Apache-2.0
"""A cache: what is read call by call is what one call over everything reads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerInputError
from shardax.partition import Rules
from tests.values import with_values

FEATURES, HEADS, KV_HEADS, HEAD, TIME = 16, 8, 4, 4, 9
RULES = Rules([("batch", "data"), ("heads", "model"), ("kv_heads", "model")])


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def initialized(**options: Any) -> sx.nn.MultiHeadAttention:
    """Attention whose own initializers keep the scale of what passes through many layers."""
    options = {"causal": True, "rope_base": 100.0, **options}
    return sx.nn.MultiHeadAttention(
        FEATURES, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD, rngs=sx.Rngs(0), **options
    )


def attention(**options: Any) -> sx.nn.MultiHeadAttention:
    return with_values(initialized(**options))


def cache(batch: int, length: int, **options: Any) -> sx.nn.AttentionCache:
    return sx.nn.AttentionCache(batch, length, KV_HEADS, HEAD, **options)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@sx.jit
def call(layer: Any, x: Any, kept: Any = None, given: Any = None) -> Any:
    return layer(x, cache=kept, **(given or {}))


def in_parts(layer: Any, x: Any, sizes: list[int], kept: Any) -> Any:
    """Calls a layer on consecutive parts of a sequence, with a cache."""
    parts, start = [], 0
    for size in sizes:
        parts.append(call(layer, x[:, start : start + size], kept))
        start += size
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("sizes", [[1] * TIME, [4, 1, 4], [TIME]])
@pytest.mark.parametrize(
    "options",
    [{"window": 3, "softcap": 0.5}, {"rope_base": None, "use_bias": True}, {"sinks": True}, {}],
    ids=str,
)
def test_sequence_in_parts_equals_the_whole(sizes: list[int], options: dict[str, Any]):
    layer, x = attention(**options), floats(2, TIME, FEATURES)
    close(in_parts(layer, x, sizes, cache(2, TIME + 2)), call(layer, x))


@pytest.mark.parametrize("length", [3, 4, 6])
@pytest.mark.parametrize("sizes", [[1] * TIME, [4, 1, 4], [1, 4, 4], [TIME]])
def test_ring_holds_what_a_window_reads(length: int, sizes: list[int]):
    layer, x = attention(window=3), floats(2, TIME, FEATURES)
    kept = cache(2, length, ring=True)
    close(in_parts(layer, x, sizes, kept), call(layer, x))
    held = np.sort(np.asarray(kept.position.value))
    assert held.tolist() == [list(range(TIME - length, TIME))] * 2


@pytest.mark.parametrize("ring", [False, True])
def test_left_padded_rows_equal_rows_alone(ring: bool):
    layer, x = attention(window=4), floats(2, TIME, FEATURES)
    real = np.arange(6) >= np.array([[0], [3]])
    kept = cache(2, 4 if ring else 12, ring=ring)
    first = call(layer, x[:, :6], kept, {"mask": real[:, None, None]})
    rest = [call(layer, x[:, i : i + 1], kept) for i in range(6, TIME)]
    found = np.concatenate([first, *rest], axis=1)
    close(found[0], call(layer, x[0]))
    close(found[1, 3:], call(layer, x[1, 3:]))
    # The same by positions, where -1 is padding.
    other = cache(2, 12)
    by_position = {"positions": np.cumsum(real, 1) - 1}
    close(call(layer, x[:, :6], other, by_position)[1, 3:], first[1, 3:])
    assert other.position.value[1, :6].tolist() == [-1, -1, -1, 0, 1, 2]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("ring", [False, True])
def test_cache_is_split_like_the_model(kind: str, ring: bool):
    axis_types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axis_types)
    layer, x = attention(window=3), floats(4, TIME, FEATURES)
    expected = call(layer, x)
    kept = cache(4, 4 if ring else TIME, ring=ring)
    with jax.set_mesh(mesh):
        sx.shard((layer, kept), mesh, RULES)
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        close(in_parts(layer, x, [4, 1, 4], kept), expected)
    assert tuple(kept.key.value.sharding.spec)[:3] == ("data", None, "model")


class Block(sx.Module):
    def __init__(self, rngs: sx.Rngs) -> None:
        self.attention = initialized()
        self.scale = sx.nn.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x: Any, cache: Any = None) -> Any:
        return x + self.attention(self.scale(x), cache=cache)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_stacked_layers_share_one_stacked_cache(kind: str):
    rngs = sx.Rngs(1)
    stack, x = sx.nn.Stack(lambda: Block(rngs), 3), floats(4, TIME, FEATURES)
    expected, caches = call(stack, x), in_list(stack, x)
    kept = cache(4, TIME, num_layers=3)
    assert kept.key.axes == ("layers", "batch", "cache", "kv_heads", "head_dim")
    axis_types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axis_types)
    with jax.set_mesh(mesh):
        sx.shard((stack, kept), mesh, RULES)
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        close(in_parts(stack, x, [4, 1, 4], kept), expected)
    assert kept.count.value.tolist() == [TIME] * 3
    close(np.asarray(kept.key.value)[1], caches[1].key.value)


def in_list(stack: Any, x: Any) -> list[Any]:
    """Runs the layers of a stack one by one; returns their caches."""
    caches = [cache(4, TIME) for _ in range(len(stack))]
    for layer, kept in zip(sx.nn.unstack_layers(stack), caches, strict=True):
        x = call(layer, x, kept)
    return caches


def test_full_cache_raises_or_gives_nan_when_compiled():
    layer, x = attention(), floats(1, 3, FEATURES)
    kept = cache(1, 4)
    call(layer, x, kept)
    with pytest.raises(LayerInputError, match="4 slots is full: it was to take 3 more"):
        layer(x, cache=kept)
    assert np.isnan(call(layer, x, kept)).all()
    with pytest.raises(LayerInputError, match="to take 3 more"):
        call(layer, x, cache(1, 2))


@pytest.mark.parametrize(
    ("kept", "options", "message"),
    [
        (cache(2, 9), {}, r"keys of shape \(1, 9, 4, 4\)"),
        (sx.nn.AttentionCache(1, 9, 2, HEAD), {}, r"AttentionCache\(1, 9, 4, 4\)"),
        (cache(1, 9, ring=True), {}, "ring of 9 slots forgets .* window=None"),
        (cache(1, 9), {"context": floats(1, 3, FEATURES)}, "no call with a context"),
        (cache(1, 9), {"segment_ids": np.zeros((1, 3), int)}, "no call with segment ids"),
        (cache(1, 9), {"mask": np.ones((1, 1, 3, 3), bool)}, r"a mask of shape \(1, 1, 1, 3\)"),
        (cache(1, 9), {"bias": np.zeros((3, 3))}, "a bias that is no function of positions"),
    ],
)
def test_unsupported_calls_with_a_cache_are_refused(
    kept: Any, options: dict[str, Any], message: str
):
    with pytest.raises(LayerInputError, match=message):
        attention()(floats(1, 3, FEATURES), cache=kept, **options)


def test_window_to_both_sides_takes_no_cache():
    layer, x, kept = attention(causal=False, window=2), floats(1, 3, FEATURES), cache(1, 9)
    with pytest.raises(LayerInputError, match="no call with a window to both sides"):
        layer(x, cache=kept)
    assert not np.asarray(kept.count).any()


def test_cache_without_order_reads_all_that_is_held():
    layer, x, kept = attention(causal=False), floats(2, TIME, FEATURES), cache(2, TIME)
    call(layer, x[:, :4], kept)
    last = call(layer, x[:, 4:], kept)
    np.testing.assert_allclose(last, call(layer, x)[:, 4:], rtol=2e-5, atol=2e-6)


def test_cache_keeps_its_dtype():
    layer, x = attention(), floats(2, TIME, FEATURES)
    kept = cache(2, TIME, dtype=jnp.bfloat16)
    found = in_parts(layer, x, [4, 1, 4], kept)
    assert found.dtype == jnp.float32 and kept.key.value.dtype == jnp.bfloat16
    np.testing.assert_allclose(found, call(layer, x), atol=0.05)
