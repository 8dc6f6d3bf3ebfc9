# SPDX-License-Identifier: Apache-2.0
"""Layers with masks in part and whole, ids out of range and padding, in each dtype, by NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import nn
from shardax.errors import LayerConfigError, LayerInputError
from tests.advice import run_advice
from tests.values import with_values

BATCH, TIME, FEATURES, HEADS = 2, 4, 8, 4
X = np.random.default_rng(0).normal(size=(BATCH, TIME, FEATURES))
REAL = {
    "part": np.array([[True, True, False, True], [False, True, True, False]]),
    "a row": np.array([[False] * 4, [True, False, True, True]]),
    "whole": np.zeros((BATCH, TIME), bool),
}
SEGMENTS = np.array([[0, 0, 1, 1], [-1, 3, 3, -1]], np.int32)
IDS = {
    "part": np.array([[0, 5, 6, -1], [1, -6, -7, 2]], np.int32),
    "a row": np.array([[6, 7, 100, -100], [0, 1, 2, 3]], np.int32),
    "whole": np.full((BATCH, TIME), -1, np.int32),
}
NORMS = ("layer norm", "rms norm", "group norm", "instance norm")
ELEMENTS = np.arange(BATCH * TIME * FEATURES).reshape(BATCH, TIME, FEATURES) % 3 > 0
ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {},
    "attention, grouped": {"num_kv_heads": 2, "use_bias": True},
    "attention, window": {"num_kv_heads": 1, "causal": True, "window": 2},
    "attention, softcap": {"num_kv_heads": 2, "causal": True, "softcap": 2.0},
}


def make(dtype: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"param_dtype": dtype, "rngs": sx.Rngs(0)}
    layers: dict[str, Any] = {
        name: nn.MultiHeadAttention(FEATURES, HEADS, **more, **options)
        for name, more in ATTENTION.items()
    }
    layers["batch norm"] = nn.BatchNorm(FEATURES, **options)
    layers["layer norm"] = nn.LayerNorm(FEATURES, **options)
    layers["rms norm"] = nn.RMSNorm(FEATURES, **options)
    layers["group norm"] = nn.GroupNorm(FEATURES, 2, **options)
    layers["instance norm"] = nn.InstanceNorm(FEATURES, **options)
    layers["embed"] = nn.Embed(6, FEATURES, **options)
    layers["rnn"] = nn.RNN(nn.SimpleCell(FEATURES, FEATURES, **options))
    layers["reversed rnn"] = nn.RNN(nn.SimpleCell(FEATURES, FEATURES, **options), reverse=True)
    for dispatch in ("dense", "dropless"):
        sizes: dict[str, Any] = {"num_experts": 4, "top_k": 4, "dispatch": dispatch}
        layers[f"moe, {dispatch}"] = nn.MoE(FEATURES, FEATURES, **sizes, **options)
    return {name: with_values(layer) for name, layer in layers.items()}


@sx.jit
def run(layers: dict[str, Any], x: Any, real: Any, segments: Any, ids: Any) -> dict[str, Any]:
    results: dict[str, Any] = {"embed": layers["embed"](ids)}
    for name in ATTENTION:
        readable = real[:, None, None, :]
        results[name] = layers[name](x, mask=readable)
        results[f"{name}, segments"] = layers[name](x, mask=readable, segment_ids=segments)
        results[f"{name}, context"] = layers[name](
            x, x[:, :3], mask=readable[..., :3], segment_ids=(segments, segments[:, :3])
        )
    norm = layers["batch norm"]
    results["batch norm"] = norm(x, mask=real[..., None])
    for name in NORMS:
        results[name] = layers[name](x, mask=real[..., None])
        results[f"{name}, elements"] = layers[name](x, mask=ELEMENTS)
    results["running mean"], results["running variance"] = norm.mean.value, norm.var.value
    for name in ("rnn", "reversed rnn"):
        carry, y = layers[name](x, mask=real, return_carry=True)
        results |= {name: y, f"{name}, carry": carry}
    for name in ("moe, dense", "moe, dropless"):
        results[name] = layers[name](x, mask=real)
        results[f"{name}, loss"] = layers[name].load_balance_loss.value
    return results


# --- in NumPy -------------------------------------------------------------------------------------


def wide(parameter: Any) -> np.ndarray:
    return np.asarray(parameter.value, np.float64)


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attended(layer: Any, x: np.ndarray, context: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    def heads(linear: Any, x: np.ndarray) -> np.ndarray:
        y = np.einsum("btd,dhk->bhtk", x, wide(linear.kernel))
        y = y if linear.bias is None else y + wide(linear.bias)[:, None]
        return np.repeat(y, HEADS // y.shape[1], axis=1)

    scores = heads(layer.q, x) @ heads(layer.k, context).swapaxes(-1, -2)
    scores /= np.sqrt(layer.head_dim)
    if layer.softcap is not None:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    offset = np.arange(scores.shape[-2])[:, None] - np.arange(scores.shape[-1])
    if layer.causal:
        allowed = allowed & (offset >= 0) & (offset < (layer.window or TIME))
    # A position that may read nothing reads all alike.
    read = softmax(np.where(allowed, scores, -1e30)) @ heads(layer.v, context)
    y = np.einsum("bhtk,hkd->btd", read, wide(layer.out.kernel))
    return y if layer.out.bias is None else y + wide(layer.out.bias)


def normalized(layer: Any, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    groups = getattr(layer, "num_groups", 1)
    # Of a group norm one group is over time too; of others each row is a group.
    lead, dims = ((BATCH, TIME), (1, 3)) if hasattr(layer, "num_groups") else ((-1, 1), (1, 3))
    parts = [
        array.reshape(*lead, groups, FEATURES // groups) for array in np.broadcast_arrays(x, mask)
    ]
    grouped, counts = parts
    counts = counts | ~counts.any(dims, keepdims=True)
    is_rms = isinstance(layer, nn.RMSNorm)
    mean = 0.0 if is_rms else grouped.mean(dims, keepdims=True, where=counts)
    variance = ((grouped - mean) ** 2).mean(dims, keepdims=True, where=counts)
    y = ((grouped - mean) / np.sqrt(variance + layer.epsilon)).reshape(x.shape) * wide(layer.scale)
    return y if is_rms else y + wide(layer.bias)


def steps(cell: Any, x: np.ndarray, real: np.ndarray, order: Any) -> tuple[Any, Any]:
    hidden, y = np.zeros((BATCH, FEATURES)), np.zeros_like(x)
    for step in order:
        new = x[:, step] @ wide(cell.input.kernel)[:, 0] + wide(cell.input.bias)[0]
        new = np.tanh(new + hidden @ wide(cell.recurrent.kernel)[:, 0])
        hidden = np.where(real[:, step, None], new, hidden)
        y[:, step] = np.where(real[:, step, None], new, 0)
    return hidden, y


def experts(layer: Any, x: np.ndarray, real: np.ndarray) -> tuple[Any, Any]:
    weights = softmax(x @ wide(layer.router.kernel))  # all four are chosen
    gate, up = (np.einsum("btd,edh->beth", x, wide(k)) for k in (layer.gate, layer.up))
    hidden = gate / (1 + np.exp(-gate)) * up
    y = np.einsum("bte,beth,ehd->btd", weights, hidden, wide(layer.down))
    return y, 4 * weights[real].mean(0).sum() if real.any() else 0.0


def expected(layers: dict[str, Any], x: Any, real: Any, segments: Any, ids: Any) -> dict[str, Any]:
    table = wide(layers["embed"].embedding)
    in_range = (ids >= 0) & (ids < len(table))
    embedded = np.where(in_range[..., None], table[np.where(in_range, ids, 0)], np.nan)
    results: dict[str, Any] = {"embed": embedded}
    same = segments[:, None, :, None] == segments[:, None, None, :]
    readable = np.broadcast_to(real[:, None, None, :], same.shape)
    for name in ATTENTION:
        results[name] = attended(layers[name], x, x, readable)
        results[f"{name}, segments"] = attended(layers[name], x, x, readable & same)
        within = (readable & same)[..., :3]
        results[f"{name}, context"] = attended(layers[name], x, x[:, :3], within)
    mean, variance = (x[real].mean(0), x[real].var(0)) if real.any() else (0.0, 1.0)
    norm = layers["batch norm"]
    y = (x - mean) / np.sqrt(variance + norm.epsilon) * wide(norm.scale) + wide(norm.bias)
    results["batch norm"] = y
    results["running mean"] = np.broadcast_to(0.01 * mean, FEATURES)
    results["running variance"] = np.broadcast_to(0.99 + 0.01 * variance, FEATURES)
    for name in NORMS:
        results[name] = normalized(layers[name], x, real[..., None])
        results[f"{name}, elements"] = normalized(layers[name], x, ELEMENTS)
    for name, order in (("rnn", range(TIME)), ("reversed rnn", reversed(range(TIME)))):
        carry, y = steps(layers[name].cell, x, real, order)
        results |= {name: y, f"{name}, carry": carry}
    for name in ("moe, dense", "moe, dropless"):
        results[name], results[f"{name}, loss"] = experts(layers[name], x, real)
    return results


@pytest.mark.parametrize(
    ("dtype", "x64", "tolerance"),
    [
        (jnp.float32, False, 2e-5),
        (jnp.float32, True, 2e-5),
        (jnp.bfloat16, False, 0.06),
        (jnp.float16, False, 8e-3),
    ],
    ids=["float32", "float32, 64 bits", "bfloat16", "float16"],
)
def test_masked_layers_are_right_in_every_dtype(dtype: Any, x64: bool, tolerance: float) -> None:
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        x = np.asarray(X.astype(dtype))
        for part, real in REAL.items():
            layers = make(dtype)
            references = expected(layers, x.astype(np.float64), real, SEGMENTS, IDS[part])
            results = run(layers, x, real, SEGMENTS, IDS[part])
            assert results.keys() == references.keys()
            for name, result in results.items():
                statistic = name.startswith("running") or name.endswith("loss")
                assert result.dtype == (jnp.float32 if statistic else dtype), (part, name)
                scale = max(1.0, np.nanmax(np.abs(references[name]), initial=0.0))
                np.testing.assert_allclose(
                    np.asarray(result, np.float64) / scale,
                    references[name] / scale,
                    rtol=0,
                    atol=tolerance,
                    err_msg=f"{part}, {name}",
                )


def test_gradients_of_masked_layers_are_finite() -> None:
    dtype: Any = jnp.float16
    layers = make(dtype)

    def total(layers: dict[str, Any], x: Any, real: Any) -> Any:
        results = run(layers, x, real, SEGMENTS, np.zeros((BATCH, TIME), np.int32))
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in results.values())

    gradient = sx.jit(sx.grad(total))
    for part, real in REAL.items():
        gradients = gradient(layers, X.astype(dtype), real)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
            assert np.isfinite(np.asarray(leaf)).all(), (part, jax.tree_util.keystr(path))


ATTEND = lambda **options: nn.MultiHeadAttention(8, 2, rngs=sx.Rngs(0))(X, **options)  # noqa: E731
RECUR = nn.RNN(nn.SimpleCell(8, 8, rngs=sx.Rngs(0)))
EXPERTS = nn.MoE(8, 8, num_experts=2, rngs=sx.Rngs(0))
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "attention, shape": (lambda: ATTEND(mask=REAL["part"]), LayerInputError, "mask of booleans"),
    "attention, numbers": (
        lambda: ATTEND(mask=np.ones((2, 1, 1, 4))),
        LayerInputError,
        "mask of booleans",
    ),
    "attention, segments": (
        lambda: ATTEND(segment_ids=np.ones((2, 4))),
        LayerInputError,
        "segment_ids, integers",
    ),
    "batch norm, shape": (
        lambda: nn.BatchNorm(8)(X, mask=REAL["part"]),
        LayerInputError,
        r"broadcasts to \(2, 4, 8\), but was given bool\[2, 4\].*mask\[..., None\]",
    ),
    "batch norm, weights": (
        lambda: nn.BatchNorm(8)(X, mask=np.full((2, 4, 1), 0.5)),
        LayerInputError,
        "Of weights: mask > 0",
    ),
    "layer norm, shape": (
        lambda: nn.LayerNorm(8)(X, mask=REAL["part"]),
        LayerInputError,
        r"LayerNorm\(8\) takes a mask.* broadcasts to \(2, 4, 8\)",
    ),
    "rnn, shape": (lambda: RECUR(X, mask=np.ones(4, bool)), LayerInputError, "mask of booleans"),
    "rnn, numbers": (lambda: RECUR(X, mask=np.ones((2, 4))), LayerInputError, "mask of booleans"),
    "moe, shape": (
        lambda: EXPERTS(X, mask=np.ones(4, bool)),
        LayerInputError,
        r"a mask of booleans of shape \(2, 4\)",
    ),
    "embed, floats": (
        lambda: nn.Embed(6, 8, rngs=sx.Rngs(0))(X),
        LayerInputError,
        "integers to look up",
    ),
    "max pool": (
        lambda: nn.max_pool(X, 2, padding=2),
        LayerConfigError,
        "max_pool with window=.* has windows of padding alone",
    ),
    "avg pool, at the end": (
        lambda: nn.avg_pool(X, 2, padding=[(0, 2)], count_include_pad=False),
        LayerConfigError,
        "avg_pool with window=.* has windows of padding alone",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_cannot_be_are_refused(case: str) -> None:
    call, error, says = REFUSED[case]
    with pytest.raises(error, match=says):
        call()


def test_masks_of_refusals_are_taken() -> None:  # as the errors of the pools say
    assert nn.max_pool(X, 2, padding="SAME").shape == (2, 2, 8)


def layers_with_masks() -> dict[str, Any]:
    """Returns functions of a mask of tokens, each of which has one for its argument."""
    options: dict[str, Any] = {"rngs": sx.Rngs(0)}
    cell, conv = nn.SimpleCell(8, 8, **options), nn.ShortConvolution(8, **options)
    latent = nn.MultiHeadLatentAttention(
        8, 2, latent_dim=8, head_dim=6, rope_dim=2, value_dim=4, **options
    )
    x, heads = X.astype(np.float32), X.reshape(BATCH, TIME, 2, 4)
    dims = ("batch", "time", "embed")
    named = sx.named.NamedArray(x, dims)
    norm = sx.named.LayerNorm({"embed": 8})
    attention = sx.named.Attention({"embed": 8}, {"heads": 2}, {"head": 4}, **options)
    cache = nn.AttentionCache(BATCH, TIME, 2, 4)
    attention_layer, qkv = nn.MultiHeadAttention(8, 2, **options), nn.QueryKeyValue(*[heads] * 3)
    both = nn.Bidirectional(cell, sx.clone(cell))

    def readable(mask: Any) -> Any:
        return mask[:, None, None, :]

    def of_names(mask: Any, time: str = "time") -> Any:
        return sx.named.NamedArray(mask, ("batch", time))

    def written(mask: Any) -> Any:
        context = nn.ContextCache(BATCH, TIME, 2, 4)
        context.write(heads, heads, mask)
        return context.position.value

    takers: dict[str, Any] = {
        "attention": lambda mask: ATTEND(mask=readable(mask)),
        "latent attention": lambda mask: latent(x, mask=readable(mask)),
        "the method attend": lambda mask: attention_layer.attend(qkv, readable(mask)),
        "latent attend": lambda mask: latent.attend(latent.project(x), readable(mask)),
        "attend": lambda mask: nn.dot_product_attention(heads, heads, heads, mask=readable(mask)),
        "combine_masks": lambda mask: nn.combine_masks(mask, mask),
        "layer norm": lambda mask: nn.LayerNorm(8)(x, mask=mask[..., None]),
        "rms norm": lambda mask: nn.RMSNorm(8)(x, mask=mask[..., None]),
        "group norm": lambda mask: nn.GroupNorm(8, 2)(x, mask=mask[..., None]),
        "batch norm": lambda mask: nn.BatchNorm(8)(x, mask=mask[..., None]),
        "rnn": lambda mask: RECUR(x, mask=mask),
        "bidirectional": lambda mask: both(x, mask=mask),
        "mixer": lambda mask: conv(x, mask=mask),
        "moe": lambda mask: (EXPERTS(x, mask=mask), EXPERTS.load_balance_loss.value)[1],
        "cache": lambda mask: cache.places(TIME, mask=mask),
        "context cache": written,
        "named norm": lambda mask: norm(named, mask=of_names(mask)).unwrap(*dims),
        "named attention": lambda mask: attention(named, mask=of_names(mask, "time_read")).unwrap(
            *dims
        ),
    }
    return takers


def test_masks_are_of_booleans_or_of_the_integers_0_and_1() -> None:
    real = REAL["part"]
    additive = np.where(real, 0, -1e9).astype(np.float32)
    segments = np.where(real, 7, 0)
    for name, take in layers_with_masks().items():
        expected = take(real)
        for dtype in (np.int32, np.uint8, jnp.int4):
            np.testing.assert_array_equal(take(real.astype(dtype)), expected, err_msg=name)
        compiled = sx.jit(take)(real.astype(np.int32))
        np.testing.assert_allclose(compiled, expected, atol=1e-6, err_msg=name)

        # Of floating numbers none is a mask: those of PyTorch say the opposite of ones and zeros.
        for numbers, code in ((real.astype(np.float32), "mask > 0"), (additive, "mask == 0")):
            with pytest.raises(LayerInputError, match="takes a mask of booleans") as caught:
                take(numbers)
            taken = take(run_advice(caught.value, code, {"mask": numbers}))
            np.testing.assert_array_equal(taken, expected, err_msg=name)
        with pytest.raises(LayerInputError, match="takes a mask of booleans"):
            sx.jit(take)(additive)

        # Nor are other integers where they are known.
        with pytest.raises(LayerInputError, match=r"integers 0 and 1, .* number 7") as caught:
            take(segments)
        taken = take(run_advice(caught.value, "mask > 0", {"mask": segments}))
        np.testing.assert_array_equal(taken, expected, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, bool])
def test_pools_are_right_in_every_dtype(dtype: Any) -> None:
    x = np.arange(BATCH * 5 * 3).reshape(BATCH, 5, 3) % 7 > 2
    x = x if dtype is bool else (x * 1000).astype(dtype)
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (0, 0)), constant_values=np.nan)
    windows = np.stack([padded[:, start : start + 3] for start in (0, 2, 4)], axis=1)
    largest = nn.max_pool(x, 3, strides=2, padding=1)
    means = nn.avg_pool(x, 3, strides=2, padding=1, count_include_pad=False)
    whole = nn.avg_pool(x, 3, strides=2, padding=1)
    assert largest.dtype == x.dtype
    assert means.dtype == whole.dtype == (x.dtype if dtype not in (jnp.int32, bool) else np.float32)
    np.testing.assert_array_equal(largest, np.nanmax(windows, 2))
    rtol = 5e-3 if means.dtype.itemsize < 4 else 1e-6
    np.testing.assert_allclose(np.asarray(means, np.float32), np.nanmean(windows, 2), rtol=rtol)
    np.testing.assert_allclose(np.asarray(whole, np.float32), np.nansum(windows, 2) / 3, rtol=rtol)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_means_of_large_windows_neither_stall_nor_overflow(dtype: Any) -> None:
    ones = jnp.ones((1, 1024, 1), dtype)
    assert float(nn.avg_pool(ones, 1024)[0, 0, 0]) == 1
    assert float(nn.avg_pool(ones, 1024, count_include_pad=False)[0, 0, 0]) == 1
    assert float(nn.avg_pool(512 * ones, 1024)[0, 0, 0]) == 512
