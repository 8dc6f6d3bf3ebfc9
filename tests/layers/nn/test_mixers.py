# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers of tokens, against loops over time in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from shardax import nn
from shardax.errors import LayerConfigError, LayerInputError
from tests.advice import run_advice
from tests.values import with_values

FEATURES, TIME = 8, 11
X = np.random.default_rng(0).normal(size=(2, TIME, FEATURES)).astype(np.float32)
# Padding on the left, on the right and within.
MASK = np.ones((2, TIME), bool)
MASK[0, [0, 1, 5]] = MASK[1, [4, 9, 10]] = False
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 3, 0, 0], [4, 4, 4, 4, 4, 4, 1, 1, 1, 1, 1]])


def convolution_by_hand(layer: Any, x: np.ndarray) -> np.ndarray:
    """The outputs of a ``ShortConvolution`` for one row, position by position."""
    kernel, bias = np.asarray(layer.kernel.value), np.asarray(layer.bias.value)
    into, out = np.asarray(layer.into.kernel.value), np.asarray(layer.out.kernel.value)
    before, after, value = np.moveaxis(
        np.tensordot(x, into, 1) + np.asarray(layer.into.bias.value)[None], 1, 0
    )
    inputs, results = before * value, []
    for time in range(len(x)):
        total = np.array(bias)
        for back in range(min(layer.size, time + 1)):
            total += kernel[layer.size - 1 - back] * inputs[time - back]
        results.append((after[time] * total) @ out + np.asarray(layer.out.bias.value))
    return np.array(results)


SPACE = {"num_heads": 4, "head_dim": 3, "state_dim": 5, "num_groups": 2, "size": 3, "chunk": 4}
SPACE |= {"step_limits": (0.05, 1.5), "use_bias": True, "norm_epsilon": 0.01}


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def gelu(x: Any) -> Any:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def state_space_by_hand(layer: Any, x: np.ndarray) -> np.ndarray:
    """The outputs of a ``StateSpaceMixer`` for one row, position by position."""
    parameters = {p: np.asarray(v.value, np.float64) for p, v in sx.iter_variables(layer, sx.Param)}
    names = ("gate", "value", "write", "read", "step")
    projected = {
        name: factor * (np.tensordot(x, parameters[name, "kernel"], 1) + parameters[name, "bias"])
        for name, factor in zip(names, layer.scales, strict=True)
    }
    state, results = np.zeros((4, 3, 5)), []
    for time in range(len(x)):
        now = {}
        for name in ("value", "write", "read"):
            total = np.array(parameters["convolution", f"{name}_bias"])
            for back in range(min(3, time + 1)):
                kernel = parameters["convolution", f"{name}_kernel"][2 - back]
                total += kernel * projected[name][time - back]
            now[name] = silu(total)
        step = np.log1p(np.exp(projected["step"][time] + parameters["step_bias",]))
        step = np.clip(step, *layer.step_limits)
        y = np.zeros((4, 3))
        for head in range(4):
            written = step[head] * np.outer(now["value"][head], now["write"][head // 2])
            decay = np.exp(-step[head] * np.exp(parameters["decay_log",][head]))
            state[head] = decay * state[head] + written
            y[head] = state[head] @ now["read"][head // 2]
            y[head] += parameters["skip",][head] * now["value"][head]
        gate = silu(projected["gate"][time])
        y *= gate if layer.gate_norm != "before" else 1
        for heads in (slice(0, 2), slice(2, 4)) if layer.gate_norm else ():
            y[heads] /= np.sqrt(np.mean(y[heads] ** 2) + layer.norm.epsilon)
            y[heads] *= parameters["norm", "scale"][heads]
        y *= gate if layer.gate_norm == "before" else 1
        out = np.tensordot(y, parameters["out", "kernel"], 2)
        results.append(out + parameters.get(("out", "bias"), 0))
    return np.array(results)


DELTA = {"num_heads": 2, "head_dim": 3, "num_value_heads": 4, "value_dim": 5, "size": 3}
DELTA |= {"chunk": 5, "activation": "gelu", "norm_epsilon": 0.01}


def delta_rule_by_hand(layer: Any, x: np.ndarray) -> np.ndarray:
    """The outputs of a ``GatedDeltaNet`` for one row, position by position."""
    parameters = {p: np.asarray(v.value, np.float64) for p, v in sx.iter_variables(layer, sx.Param)}
    names = ("query", "key", "value", "gate", "beta", "step")
    projected = {name: np.tensordot(x, parameters[name, "kernel"], 1) for name in names}
    state, results = np.zeros((2, 2, 3, 5)), []
    for time in range(len(x)):
        now = {}
        for name in ("query", "key", "value"):
            total = np.zeros_like(projected[name][time])
            for back in range(min(3, time + 1)):
                kernel = parameters["convolution", f"{name}_kernel"][2 - back]
                total += kernel * projected[name][time - back]
            now[name] = gelu(total)
        for name in ("query", "key"):
            now[name] /= np.sqrt(np.sum(now[name] ** 2, -1, keepdims=True) + 1e-6)
        beta = 1 / (1 + np.exp(-projected["beta"][time]))
        step = np.log1p(np.exp(projected["step"][time] + parameters["step_bias",]))
        y = np.zeros((2, 2, 5))
        for head, values in np.ndindex(2, 2):
            key, value = now["key"][head], now["value"][head, values]
            held = state[head, values]
            held *= np.exp(-step[head, values] * np.exp(parameters["decay_log",][head, values]))
            held += np.outer(key, beta[head, values] * (value - key @ held))
            y[head, values] = now["query"][head] @ held / np.sqrt(3)
        y /= np.sqrt(np.mean(y**2, -1, keepdims=True) + 0.01)
        y *= parameters["norm", "scale"] * silu(projected["gate"][time])
        results.append(np.tensordot(y, parameters["out", "kernel"], 3))
    return np.array(results)


MIXERS: dict[str, tuple[Callable[..., Any], Callable[[Any, np.ndarray], np.ndarray]]] = {
    "convolution": (
        lambda **options: nn.ShortConvolution(FEATURES, size=4, use_bias=True, **options),
        convolution_by_hand,
    ),
    "state space": (
        lambda **options: nn.StateSpaceMixer(FEATURES, **SPACE, **options),
        state_space_by_hand,
    ),
    "delta rule": (
        lambda **options: nn.GatedDeltaNet(FEATURES, **DELTA, **options),
        delta_rule_by_hand,
    ),
}
KINDS = pytest.mark.parametrize("kind", MIXERS)


def make(kind: str, **options: Any) -> Any:
    return with_values(MIXERS[kind][0](rngs=sx.Rngs(0), **options))


@sx.jit
def call(layer: Any, x: Any, **options: Any) -> Any:
    return layer(x, **options)


def by_hand(kind: str, layer: Any, x: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Computes each part of each row alone."""
    result = np.zeros_like(x)
    for row, numbers in enumerate(parts):
        for number in np.unique(numbers):
            place = numbers == number
            result[row, place] = MIXERS[kind][1](layer, x[row, place])
    return result


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def close_to_largest(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@KINDS
@pytest.mark.parametrize("time", [0, 1, TIME])
def test_mixer_equals_a_loop_over_time(kind: str, time: int):
    layer = make(kind)
    x = X[:, :time]
    expected = by_hand(kind, layer, x, np.ones(x.shape[:2], int))
    close(call(layer, x), expected)
    if time == TIME:
        close(call(layer, x[0]), expected[0])


@pytest.mark.parametrize("place", ["before", None])
def test_state_spaces_have_scales_and_other_norms(place: str | None):
    options = {"gate_norm": place, "out_bias": False, "scales": (0.3, 1.5, 0.7, 1.4, 0.6)}
    layer = with_values(nn.StateSpaceMixer(FEATURES, **SPACE, **options, rngs=sx.Rngs(0)))
    assert layer.out.bias is None and (layer.norm is None) == (place is None)
    close(call(layer, X[:1])[0], state_space_by_hand(layer, X[0]))


@KINDS
def test_padding_and_segments_leave_rows_as_alone(kind: str):
    layer = make(kind)
    close(call(layer, X, mask=MASK)[MASK], by_hand(kind, layer, X, MASK)[MASK])
    close(call(layer, X, segment_ids=SEGMENTS), by_hand(kind, layer, X, SEGMENTS))
    result = call(layer, X, segment_ids=SEGMENTS, mask=MASK[:, None, None])
    alone = by_hand(kind, layer, X, np.where(MASK, SEGMENTS, -1))
    close(result[MASK], alone[MASK])


@KINDS
@pytest.mark.parametrize(
    ("sizes", "has_mask"),
    [([1] * TIME, False), ([5, 1, 5], True), ([TIME], False), ([TIME], True)],
    ids=str,
)
def test_parts_with_a_cache_equal_the_whole(kind: str, sizes: list[int], has_mask: bool):
    layer = make(kind)
    real = MASK if has_mask else np.ones_like(MASK)
    options = {"mask": MASK} if has_mask else {}
    cache, ends = layer.make_cache(2), np.cumsum([0, *sizes])
    parts = [
        call(layer, X[:, a:b], cache=cache, **{k: v[:, a:b] for k, v in options.items()})
        for a, b in itertools.pairwise(ends)
    ]
    close(np.concatenate(parts, 1)[real], np.asarray(call(layer, X, **options))[real])
    assert cache.position[...].tolist() == (real.sum(1, keepdims=True) - 1).tolist()


@sx.jit
def value_and_gradients(layer: Any, x: Any, **options: Any) -> Any:
    return sx.value_and_grad(lambda layer: (layer(x, **options) ** 2).sum())(layer)


@KINDS
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_mixer_over_a_mesh_equals_one_device(kind: str, types: AxisType):
    rules = {"batch": "data", "mlp": "model", "heads": "model"}
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(types, types))
    options = {"mask": MASK, "segment_ids": SEGMENTS}
    expected, layer = value_and_gradients(make(kind), X, **options), make(kind)
    whole = np.asarray(call(layer, X, mask=MASK))
    with jax.set_mesh(mesh):
        sx.shard(layer, mesh, rules)
        rows = NamedSharding(mesh, PartitionSpec("data"))
        placed = jax.device_put(options, rows)
        found = value_and_gradients(layer, jax.device_put(X, rows), **placed)
        jax.tree.map(close_to_largest, found, expected)
        for cache_rules in (rules, {}):  # those of generation leave states whole
            cache = sx.shard(layer.make_cache(2), mesh, cache_rules)
            for start in (0, 5):
                part = (slice(None), slice(start, start + 5))
                x, mask = jax.device_put((X[part], MASK[part]), rows)
                result = call(layer, x, cache=cache, mask=mask)
                close(np.asarray(result)[MASK[part]], whole[part][MASK[part]])


@KINDS
def test_calls_that_do_not_fit_are_refused(kind: str):
    layer = make(kind)
    cache = layer.make_cache(2)
    before = sx.state(cache)
    for options, text in (
        ({"segment_ids": SEGMENTS, "cache": cache}, "no call with segment ids"),
        ({"mask": MASK[:, None, :, None]}, "a mask of booleans of shape"),
        ({"mask": MASK.astype(np.float32)}, "a mask of booleans"),
        ({"segment_ids": SEGMENTS[:1]}, "segment_ids, integers of shape"),
        ({"cache": make(kind).make_cache(3)}, "a cache with states of the shapes"),
    ):
        with pytest.raises(LayerInputError, match=text):
            layer(X, **options)
    with pytest.raises(LayerInputError, match="no call with an input without batch"):
        layer(X[0], cache=cache)
    with pytest.raises(LayerInputError, match="an input of shape"):
        layer(X[..., 1:])
    jax.tree.map(np.testing.assert_array_equal, sx.state(cache), before)
    with pytest.raises(LayerConfigError, match="must be a floating dtype"):
        layer.make_cache(2, dtype="int8")
    with pytest.raises(LayerInputError) as refusal:
        layer(X, cache=layer.make_cache(3))
    cache = run_advice(refusal.value, "mixer.make_cache(2)", {"mixer": layer})
    assert call(layer, X, cache=cache).shape == X.shape


@pytest.mark.parametrize(
    ("kind", "option", "text"),
    [
        (nn.ShortConvolution, {"size": 0}, "positive"),
        (nn.ShortConvolution, {"features": 0}, "positive"),
        (nn.StateSpaceMixer, {**SPACE, "state_dim": 0}, "positive"),
        (nn.StateSpaceMixer, {**SPACE, "num_groups": 3}, "groups that divide num_heads=4"),
        (nn.StateSpaceMixer, {**SPACE, "step_limits": (2, 1)}, "limits from 0 up"),
        (nn.StateSpaceMixer, {**SPACE, "gate_norm": "after"}, "gate_norm to be one of"),
        (nn.StateSpaceMixer, {**SPACE, "scales": (1, 1)}, "scales of gate, value, write, read"),
        (nn.GatedDeltaNet, {**DELTA, "value_dim": 0}, "positive"),
        (nn.GatedDeltaNet, {**DELTA, "num_value_heads": 3}, "a multiple of num_heads=2"),
    ],
)
def test_sizes_of_mixers_are_checked(kind: Any, option: dict[str, Any], text: str):
    with pytest.raises(LayerConfigError, match=text):
        kind(**{"features": 8, **option}, rngs=sx.Rngs(0))
