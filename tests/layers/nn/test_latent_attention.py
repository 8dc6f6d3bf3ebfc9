# SPDX-License-Identifier: Apache-2.0
"""Latent attention: what latents stand for, read at once, in parts and over meshes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from tests.values import with_values

FEATURES, HEADS, TIME = 16, 4, 8
SIZES: dict[str, Any] = {"head_dim": 6, "rope_dim": 2, "value_dim": 5, "latent_dim": 8}
RULES = sx.Rules([("batch", "data"), ("heads", "model")])


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def attention(**options: Any) -> sx.nn.MultiHeadLatentAttention:
    options = {**SIZES, "causal": True, "query_latent_dim": 7, "use_bias": True, **options}
    layer = sx.nn.MultiHeadLatentAttention(FEATURES, HEADS, rngs=sx.Rngs(0), **options)
    return with_values(layer)


def cache(batch: int = 2, length: int = TIME + 2, **options: Any) -> sx.nn.LatentCache:
    return sx.nn.LatentCache(batch, length, SIZES["latent_dim"], SIZES["rope_dim"], **options)


def close(result: Any, expected: Any) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@sx.jit
def call(layer: Any, x: Any, kept: Any = None, options: Any = None) -> Any:
    return layer(x, cache=kept, **(options or {}))


def in_parts(layer: Any, x: Any, sizes: list[int], kept: Any) -> Any:
    """Calls a layer on consecutive parts of a sequence, with a cache."""
    ends = np.cumsum([0, *sizes])
    return np.concatenate(
        [call(layer, x[:, a:b], kept) for a, b in itertools.pairwise(ends)], axis=1
    )


@pytest.mark.parametrize("query_latent_dim", [None, 7])
def test_heads_are_made_of_the_latent(query_latent_dim: int | None) -> None:
    @sx.jit
    def by_hand(layer: Any, x: Any) -> jax.Array:
        if query_latent_dim is None:
            query = layer.q(x)
        else:
            query = layer.q_up(layer.q_latent_norm(layer.q_down(x)))
        down = layer.kv_down(x)
        made = layer.kv_up(layer.latent_norm(down[..., :8]))
        angles = sx.nn.rotation(jnp.arange(TIME), 2, 100.0)
        turn = lambda heads: sx.nn.rotate(heads, angles, interleaved=True)  # noqa: E731
        shared = jnp.repeat(turn(down[..., None, 8:]), HEADS, axis=-2)
        key = jnp.concatenate([made[..., :4], shared], axis=-1)
        query = jnp.concatenate([query[..., :4], turn(query[..., 4:])], axis=-1)
        read = sx.nn.dot_product_attention(query, key, made[..., 4:], causal=True)
        return layer.out(read)

    layer = attention(query_latent_dim=query_latent_dim, rope=sx.nn.Rope(100.0, interleaved=True))
    x = floats(2, TIME, FEATURES)
    close(call(layer, x), by_hand(layer, x))


# Of two sizes of the latent it is less work to read the latents of one, and to make the keys and
# values of the other, where all is read at once.
@pytest.mark.parametrize("latent_dim", [8, 64])
@pytest.mark.parametrize("sizes", [[1] * TIME, [4, 1, 3], [TIME]])
def test_sequence_in_parts_equals_the_whole(sizes: list[int], latent_dim: int) -> None:
    layer, x = attention(latent_dim=latent_dim, window=5), floats(2, TIME, FEATURES)
    kept = sx.nn.LatentCache(2, TIME + 2, latent_dim, 2)
    close(in_parts(layer, x, sizes, kept), call(layer, x))


# A latent larger than a key and a value is not read itself where a whole sequence is.
@pytest.mark.parametrize("latent_dim", [8, 64])
def test_cached_call_does_the_smaller_work(latent_dim: int) -> None:
    def operations(time: int, kept: Any) -> float:
        return call.lower(layer, floats(2, time, FEATURES), kept).cost_analysis()["flops"]

    layer, kept = attention(latent_dim=latent_dim), sx.nn.LatentCache(2, TIME, latent_dim, 2)
    whole = operations(TIME, None)
    assert operations(TIME, kept) < 1.1 * whole
    assert operations(1, kept) < 0.3 * whole


def adapt(layer: Any) -> Any:
    up = sx.select(layer).at(lambda layer: layer.kv_up)
    adapted = sx.surgery.lora(up, 2, rngs=sx.Rngs(1))
    adapted.kv_up.b.value = floats(*adapted.kv_up.b.shape)
    return adapted


EDITS: dict[str, Callable[[Any], Any]] = {
    "adapter": adapt,
    "bias": lambda layer: setattr(layer.kv_up, "bias", sx.Param(floats(HEADS, 9))),
    "softcap": lambda layer: setattr(layer, "softcap", 0.5),
    "no scale": lambda layer: setattr(layer, "scale", None),
    "precision": lambda layer: setattr(layer, "precision", "highest"),
    "softmax": lambda layer: setattr(layer, "softmax", lambda scores: jax.nn.softmax(2 * scores)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edited_layer_reads_its_cache_as_whole(edit: Any) -> None:
    layer, x = attention(), floats(2, TIME, FEATURES)
    layer = edit(layer) or layer
    close(in_parts(layer, x, [1] * TIME, cache()), call(layer, x))


def test_left_padded_rows_equal_rows_alone() -> None:
    layer, x = attention(), floats(2, TIME, FEATURES)
    real, kept = np.arange(6) >= np.array([[0], [3]]), cache()
    first = call(layer, x[:, :6], kept, {"mask": real[:, None, None]})
    others = [call(layer, x[:, i : i + 1], kept) for i in range(6, TIME)]
    result = np.concatenate([first, *others], axis=1)
    close(result[0], call(layer, x[0]))
    close(result[1, 3:], call(layer, x[1, 3:]))


def test_slot_holds_one_latent_for_all_heads() -> None:
    kept = cache(num_layers=3)
    shapes = {path[-1]: variable.shape for path, variable in sx.iter_variables(kept)}
    assert shapes == {"key": (3, 2, 10, 1, 2), "value": (3, 2, 10, 1, 8)} | {
        "position": (3, 2, 10),
        "count": (3,),
    }
    assert kept.value.axes == ("layers", "batch", "cache", None, "latent")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_cache_and_heads_are_split_by_rules(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    layer, x, kept = attention(), floats(2, TIME, FEATURES), cache()
    expected = call(layer, x)
    with jax.set_mesh(mesh):
        sx.shard((layer, kept), mesh, RULES)
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        close(in_parts(layer, x, [4, 1, 3], kept), expected)
    assert tuple(layer.kv_up.kernel.value.sharding.spec)[:2] == (None, "model")
    assert tuple(kept.value.value.sharding.spec)[:1] == ("data",)


@pytest.mark.parametrize("how", ["all-gather", "ring"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_split_sequence_is_read_whole(kind: AxisType, how: str) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "model"), axis_types=(kind,) * 3)
    segments = np.repeat(np.arange(2), TIME // 2)[None].repeat(2, 0)
    layer, x = attention(), floats(2, TIME, FEATURES)
    expected = call(layer, x, None, {"segment_ids": segments})
    with jax.set_mesh(mesh), sx.axis_rules([*RULES, ("seq", "context")]), sx.parallel(context=how):
        place = NamedSharding(mesh, PartitionSpec("data", "context"))
        x, segments = jax.device_put((x, segments), place)
        close(call(sx.shard(layer, mesh), x, None, {"segment_ids": segments}), expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rope_dim": 3}, "rope_dim=3 of head_dim=6"),
        ({"rope_dim": 6}, "rope_dim=6 of head_dim=6"),
        ({"latent_dim": 0}, "latent_dim to be a positive integer"),
        ({"axes": ("embed",)}, "needs 4 axis names"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(LayerConfigError, match=says):
        attention(**options)


def test_latent_attention_refuses_another_cache_by_shape() -> None:
    x = floats(1, 3, FEATURES)
    with pytest.raises(LayerInputError, match=r"LatentCache\(1, 10, 8, 2\), one for each layer"):
        attention()(x, cache=cache())
    plain = sx.nn.MultiHeadAttention(FEATURES, HEADS, causal=True, rngs=sx.Rngs(0))
    with pytest.raises(LayerInputError, match="LatentCache"):
        plain(x, cache=cache(1))


def test_settings_of_other_attention_are_refused() -> None:
    layer, x = attention(), floats(1, TIME, FEATURES)
    layer.query_norm = sx.nn.RMSNorm(6)
    with pytest.raises(LayerConfigError, match="none of heads"):
        call(layer, x)
    layer.query_norm = None
    kept = cache(1)
    with (
        sx.kernels(attention="splash", interpret=True),
        pytest.raises(LayerInputError, match='implementation="splash"'),
    ):
        call(layer, x[:, :1], kept)
    assert kept.count.value == 0


@pytest.mark.parametrize(
    "setting",
    [
        {"softcap": 2.0},
        {"qk_norm": "head"},
        {"out_bias": True},
        {"local_rope": sx.nn.Rope(10.0)},
        {"rope_layers": (True, False)},
    ],
    ids=str,
)
def test_config_refuses_what_attention_lacks(setting: dict[str, Any]) -> None:
    latent = sx.models.LatentConfig(dim=8, rope_dim=2, value_dim=4)
    with pytest.raises(LayerConfigError, match="with latent"):
        sx.models.AttentionConfig(num_kv_heads=4, head_dim=6, latent=latent, **setting)
