# SPDX-License-Identifier: Apache-2.0
"""Caches in int8: what they hold, what attention reads of them, and generated tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax import errors, nn
from shardax.models import generate
from tests.tools.surgery.decoders import decoder
from tests.values import with_values

X = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0}


def attention(**options: Any) -> Any:
    return with_values(
        nn.MultiHeadAttention(8, 4, num_kv_heads=2, causal=True, rngs=sx.Rngs(0), **options)
    )


@sx.jit
def call(layer: Any, x: Any, cache: Any = None) -> Any:
    return layer(x, cache=cache)


def test_int8_cache_has_a_scale_for_each_head_and_position() -> None:
    cache: Any = nn.AttentionCache(1, 3, 1, 2, dtype="int8")
    key = np.array([[[[1.0, -0.5]], [[0.0, 0.0]]]], np.float32)
    keys, values, _, _ = cache.update(
        jnp.asarray(key), jnp.asarray(100 * key), jnp.zeros((1, 2), jnp.int32)
    )
    assert cache.key.value[0, :, 0].tolist() == [[127, -64], [0, 0], [0, 0]]
    scales = np.asarray(cache.value_scale.value)[0, :, 0] * 127.5
    np.testing.assert_allclose(scales, [100, 127.5, 0])
    np.testing.assert_allclose(keys[:, :2], key, atol=0.5 / 127.5 + 1e-6)
    np.testing.assert_allclose(values[:, :2], 100 * key, atol=50 / 127.5 + 1e-4)


@pytest.mark.parametrize("ring", [False, True])
def test_attention_reads_rounded_keys_and_values(ring: bool) -> None:
    layer = attention(window=3, rope_base=10_000.0)
    expected = np.asarray(call(layer, X))
    cache = nn.AttentionCache(2, 3 if ring else 8, 2, 2, dtype="int8", ring=ring)
    parts = [call(layer, X[:, start:end], cache) for start, end in ((0, 4), (4, 5), (5, 7))]
    error = np.abs(np.concatenate(parts, 1) - expected).max()
    assert 0 < error < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("scanned", [False, True])
def test_generated_tokens_are_those_of_floats(scanned: bool) -> None:
    model = decoder(scanned)
    expected = generate(model, [[3, 1, 4], [2]], **GREEDY)
    found = generate(model, [[3, 1, 4], [2]], cache_dtype="int8", **GREEDY)
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    both = generate(sx.quantize(model, "int8"), [[3, 1, 4], [2]], cache_dtype="int8", **GREEDY)
    assert [row.tolist() for row in both] == [row.tolist() for row in expected]


def test_cache_takes_half_of_bfloat16() -> None:
    config = sx.models.DecoderConfig(num_layers=1, head_dim=64, dtype="bfloat16")
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))

    def nbytes(dtype: Any) -> int:
        (cache,) = model.make_cache(2, 32, dtype)
        names = ("key", "value", "key_scale", "value_scale")
        variables = [getattr(cache, name) for name in names]
        return sum(v.value.nbytes for v in variables if v is not None)

    assert nbytes("int8") / nbytes(None) == (64 + 4) / (2 * 64)


def test_refused_calls_leave_the_scales() -> None:
    layer = attention(implementation="splash")
    cache = nn.AttentionCache(2, 8, 2, 2, dtype="int8")
    before = [np.asarray(v.value) for _, v in sx.iter_variables(cache)]
    with pytest.raises(errors.LayerInputError):
        layer(X, cache=cache)
    for old, (path, variable) in zip(before, sx.iter_variables(cache), strict=True):
        np.testing.assert_array_equal(variable.value, old, str(path))


def test_meshes_split_the_scales(mesh: Mesh) -> None:
    rules = sx.Rules({"batch": "data", "kv_heads": None})
    layer, cache = attention(), nn.AttentionCache(2, 8, 2, 2, dtype="int8")
    expected = layer(X, cache=nn.AttentionCache(2, 8, 2, 2, dtype="int8"))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        laid_out, placed = sx.shard(layer, mesh, rules), sx.shard(cache, mesh, rules)
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        found = sx.jit(lambda layer, x, cache: layer(x, cache=cache))(laid_out, x, placed)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-4)


def test_integer_caches_of_other_kinds_are_refused() -> None:
    with pytest.raises(errors.LayerConfigError, match="dtype=int32, but it must be int8 or a fl"):
        nn.AttentionCache(1, 4, 1, 2, dtype=np.int32)
    with pytest.raises(errors.LayerConfigError, match="dtype=int8, but it must be a floating"):
        nn.LatentCache(1, 4, latent_dim=4, rope_dim=2, dtype="int8")

    class Uncached(sx.Module):
        def __call__(self, tokens: Any) -> jax.Array:
            return jnp.zeros((*tokens.shape, 4))

    with pytest.raises(errors.GenerationError, match="Uncached has no make_cache"):
        generate(Uncached(), [[1]], cache_dtype="int8", **GREEDY)
