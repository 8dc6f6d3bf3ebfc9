# SPDX-License-Identifier: Apache-2.0
"""Dot-product attention, masks for it, and attention by a given function."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from tests.advice import run_advice
from tests.values import with_values

BATCH, TIME, OTHER, HEADS, SIZE = 2, 3, 5, 4, 8


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance
    )


QUERY, KEY, VALUE = floats(BATCH, TIME, HEADS, SIZE), floats(BATCH, OTHER, 2, SIZE), None
VALUE = 2 * KEY[..., ::-1]
MASK = np.random.default_rng(1).integers(0, 2, (BATCH, 1, TIME, OTHER)).astype(bool)
MASK[0, 0, 0] = False  # reads nothing, so all alike
BIAS = floats(HEADS, TIME, OTHER)


def by_numpy(query: Any, key: Any, value: Any, bias: Any = 0.0, mask: Any = True, **options: Any):
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    key, value = (
        np.repeat(array, query.shape[-2] // array.shape[-2], -2) for array in (key, value)
    )
    scores = np.einsum("...tnh,...snh->...nts", query, key) * options.get("scale", SIZE**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * np.tanh(scores / options["softcap"])
    scores = scores + bias
    offset = np.arange(scores.shape[-2])[:, None] - np.arange(scores.shape[-1])
    if options.get("causal"):
        mask = mask & (offset >= 0)
    mask = mask & (abs(offset) < options.get("window", OTHER))
    scores = np.where(mask, scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("...nts,...snh->...tnh", weights, value)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"mask": MASK},
    "bias and mask": {"bias": BIAS, "mask": MASK, "scale": 0.5},
    "window": {"causal": True, "window": 2, "bias": BIAS},
    "window to both sides": {"window": 2, "mask": MASK},
    "window to both sides, softcap": {"window": 2, "softcap": 2.0},
    "softcap": {"softcap": 2.0, "mask": MASK, "bias": BIAS},
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", OPTIONS)
def test_dot_product_attention_equals_numpy(case: str, dtype: Any) -> None:
    arrays = [array.astype(dtype) for array in (QUERY, KEY, VALUE)]
    options = OPTIONS[case]
    run = jax.jit(functools.partial(sx.nn.dot_product_attention, **options))
    with jax.numpy_dtype_promotion("strict"):
        y = run(*arrays)
    assert y.dtype == dtype
    close(y, by_numpy(*arrays, **options), 2e-5 if dtype == jnp.float32 else 0.05)


def test_flax_gives_the_same_attention() -> None:
    key, value = np.repeat(KEY, 2, -2), np.repeat(VALUE, 2, -2)
    peer, ours = jax.jit(nnx.dot_product_attention), jax.jit(sx.nn.dot_product_attention)
    expected = peer(QUERY, key, value, bias=BIAS[None], mask=MASK)
    close(ours(QUERY, KEY, VALUE, bias=BIAS, mask=MASK), expected)


def test_attention_takes_more_batch_dimensions_and_value_sizes() -> None:
    y = sx.nn.dot_product_attention(QUERY[None], KEY[None], VALUE[None, ..., :3], mask=MASK[None])
    close(y, by_numpy(QUERY, KEY, VALUE[..., :3], mask=MASK)[None])
    close(
        sx.nn.dot_product_attention(QUERY[0], KEY[0], VALUE[0], causal=True),
        by_numpy(QUERY[0], KEY[0], VALUE[0], causal=True),
    )


def test_dropout_is_applied_to_the_weights() -> None:
    drop = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    first, second = (sx.nn.dot_product_attention(QUERY, KEY, VALUE, dropout=drop) for _ in range(2))
    assert not np.array_equal(first, second)
    drop.eval()
    close(sx.nn.dot_product_attention(QUERY, KEY, VALUE, dropout=drop), by_numpy(QUERY, KEY, VALUE))


def test_masks_are_those_of_flax() -> None:
    real, ids = np.array([[1, 1, 0], [1, 0, 1]], bool), np.array([[0, 0, 1], [2, 1, 1]])
    masks = [
        sx.nn.make_causal_mask(real),
        sx.nn.make_attention_mask(real, real),
        sx.nn.make_attention_mask(ids, ids, jnp.equal),
    ]
    expected = [
        nnx.make_causal_mask(real),
        nnx.make_attention_mask(real, real),
        nnx.make_attention_mask(ids, ids, jnp.equal),
    ]
    for mask, of_peer in zip(masks, expected, strict=True):
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, np.asarray(of_peer).astype(bool))
    both = sx.nn.combine_masks(*masks, None)
    np.testing.assert_array_equal(both, np.asarray(nnx.combine_masks(*expected)).astype(bool))
    assert sx.nn.combine_masks(None, None) is None
    np.testing.assert_array_equal(sx.nn.combine_masks(real.astype(np.int32)), real)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: sx.nn.combine_masks(np.ones((2, 2))), "mask of booleans.*mask > 0"),
        (lambda: sx.nn.combine_masks(np.ones((2, 2), bool), np.ones((3, 3), bool)), "broadcast"),
        (lambda: sx.nn.dot_product_attention(QUERY, KEY[..., :3, :4], VALUE), "kv heads"),
        (lambda: sx.nn.dot_product_attention(QUERY, KEY, VALUE, mask=MASK[0]), "mask of booleans"),
        (lambda: sx.nn.dot_product_attention(QUERY, KEY, VALUE, mask=1.0 * MASK), "of booleans"),
    ],
)
def test_unsuitable_masks_and_shapes_are_refused(refused: Any, message: str) -> None:
    with pytest.raises(LayerInputError, match=message):
        refused()


def test_errors_of_masks_and_shapes_advise_what_works() -> None:
    with pytest.raises(LayerInputError) as caught:
        sx.nn.combine_masks(np.ones((2, 3), bool), MASK)
    mask = run_advice(caught.value, "mask[:, None, None, :]", {"mask": np.ones((2, 5), bool)})
    np.testing.assert_array_equal(sx.nn.combine_masks(mask, MASK), MASK)
    with pytest.raises(LayerInputError) as caught:
        sx.nn.combine_masks(np.ones((2, 3)))
    code, names = "mask > 0", {"mask": np.array([0.5, 0.0])}
    assert run_advice(caught.value, code, names).tolist() == [True, False]
    flipped = np.swapaxes(QUERY, -2, -3)
    with pytest.raises(LayerInputError) as caught:
        sx.nn.dot_product_attention(flipped, KEY, VALUE)
    names = {"jnp": jnp, "query": flipped}
    np.testing.assert_array_equal(
        run_advice(caught.value, "jnp.swapaxes(query, -2, -3)", names), QUERY
    )


# --- in MultiHeadAttention ---

X = floats(BATCH, TIME, SIZE)


def attention(**options: Any) -> Any:
    return with_values(sx.nn.MultiHeadAttention(SIZE, HEADS, rngs=sx.Rngs(0), **options))


READABLE = (
    np.array([True, True, False])[None, None, None] | (np.arange(BATCH) == 0)[:, None, None, None]
)
SEGMENTS = np.array([[0, 0, 1], [0, 1, 1]])
run = sx.jit(lambda layer, x: layer(x, mask=READABLE, segment_ids=SEGMENTS))


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2, "causal": True}, {"causal": True, "window": 2, "use_bias": True}],
    ids=["plain", "grouped", "window"],
)
@pytest.mark.parametrize("function", ["shardax", "jax", "flax"])
def test_given_attention_functions_replace_the_weighting(function: str, options: Any) -> None:
    functions: dict[str, Any] = {
        "shardax": sx.nn.dot_product_attention,
        "jax": jax.nn.dot_product_attention,
        "flax": nnx.dot_product_attention,
    }
    layer = attention(**options, attention_fn=functions[function])
    close(run(layer, X), run(attention(**options), X))


def test_given_functions_read_a_cache() -> None:
    plain, layer = (
        attention(causal=True),
        attention(causal=True, attention_fn=jax.nn.dot_product_attention),
    )
    for one in (plain, layer):
        one.cache = sx.nn.AttentionCache(BATCH, 4, HEADS, SIZE // HEADS)

    @sx.jit
    def in_parts(layer: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        return layer(x[:, :2], cache=layer.cache), layer(x[:, 2:], cache=layer.cache)

    parts = [in_parts(one, X) for one in (layer, plain)]
    close(np.concatenate(parts[0], 1), np.concatenate(parts[1], 1))


def test_results_have_out_features() -> None:
    layer = attention(out_features=6, out_bias=True)
    assert layer.out.kernel.shape == (HEADS, 2, 6)
    assert layer.out.kernel.axes == ("heads", "head_dim", "embed")
    peer = nnx.MultiHeadAttention(HEADS, SIZE, SIZE, 6, decode=False, rngs=nnx.Rngs(0))
    for name, theirs in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "out")):
        getattr(peer, theirs).kernel[...] = getattr(layer, name).kernel.value
    peer.out.bias[...] = layer.out.bias.value
    close(sx.jit(lambda layer, x: layer(x))(layer, X), peer(X), 1e-4)
    with pytest.raises(LayerConfigError, match="out_features=0"):
        attention(out_features=0)


def test_options_that_a_function_cannot_follow_are_refused() -> None:
    function = sx.nn.dot_product_attention
    with pytest.raises(LayerConfigError, match="cannot follow scale, dropout") as caught:
        attention(attention_fn=function, scale=0.5, dropout=0.5)
    code = "functools.partial(sx.nn.dot_product_attention, scale=0.5)"
    function = run_advice(caught.value, code, {"functools": functools, "sx": sx})
    close(attention(attention_fn=function)(X), attention(scale=0.5)(X))
    short = lambda query, key, value, mask: query[:, :1]  # noqa: E731
    with pytest.raises(LayerInputError, match=r"shape of the queries, \(2, 3, 4, 2\)"):
        attention(attention_fn=short)(X)
