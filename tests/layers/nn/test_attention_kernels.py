# SPDX-License-Identifier: Apache-2.0
"""Each kernel of attention computes what XLA's operations do, or says why it cannot."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax.errors import LayerInputError, PartitionError
from tests.advice import run_advice
from tests.needs import needs, needs_no

TIME, HEAD_DIM = 256, 128
SEGMENTS = np.repeat(np.arange(2, dtype=np.int32), TIME // 2)[None]


def floats(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def heads_of(batch: int, heads: int, kv_heads: int, time: int = TIME) -> list[np.ndarray]:
    sizes = (heads, kv_heads, kv_heads)
    return [floats(batch, time, size, HEAD_DIM, seed=i) for i, size in enumerate(sizes)]


def result_and_gradients(arrays: Any, **options: Any) -> Any:
    def sine(*arrays: Any) -> Any:
        result = sx.nn.dot_product_attention(*arrays, **options)
        return jnp.sin(result).sum(), result

    return jax.jit(jax.grad(sine, (0, 1, 2), has_aux=True))(*arrays)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window, soft cap and scale": {"causal": True, "window": 40, "softcap": 3.0, "scale": 0.1},
    "segments": {"causal": True, "segment_ids": SEGMENTS},
    "window to both sides": {"window": 9},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_splash_equals_xla_with_gradients(options: dict[str, Any]) -> None:
    arrays = heads_of(1, 2, 1)
    with sx.kernels(attention="splash", interpret=True):
        actual = result_and_gradients(arrays, **options)
    assert_close(actual, result_and_gradients(arrays, **options))


def test_splash_passes_over_blocks_behind() -> None:
    arrays = heads_of(1, 1, 1, time=384)  # three blocks of 128
    with sx.kernels(attention="splash", interpret=True):
        actual = sx.nn.dot_product_attention(*arrays, causal=True)
    assert_close(actual, sx.nn.dot_product_attention(*arrays, causal=True))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_splash_over_a_mesh_equals_one_device(kind: AxisType, kv_heads: int) -> None:
    layer = sx.nn.MultiHeadAttention(
        8,
        2,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        causal=True,
        axes=("embed", "queries", "kv_heads", "head_dim"),
        rngs=sx.Rngs(0),
    )
    x, segments = floats(2, TIME, 8), SEGMENTS.repeat(2, 0)
    expected = layer(x, segment_ids=segments)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    rules = {"batch": "data", "queries": "model", "kv_heads": "model" if kv_heads == 2 else None}
    sx.shard(layer, mesh, rules)
    places = jax.NamedSharding(mesh, jax.P("data"))
    with jax.set_mesh(mesh), sx.axis_rules(rules), sx.kernels(attention="auto", interpret=True):
        split, ids = jax.device_put((x, segments), places)
        choice = sx.nn.choose_attention(
            jax.ShapeDtypeStruct((2, TIME, 2, HEAD_DIM), "float32"),
            jax.ShapeDtypeStruct((2, TIME, kv_heads, HEAD_DIM), "float32"),
            causal=True,
        )
        actual = sx.jit(lambda layer, x, ids: layer(x, segment_ids=ids))(layer, split, ids)
    assert choice.implementation == "splash"
    assert actual.sharding.spec[0] == "data"
    assert_close(actual, expected)


@pytest.mark.parametrize("place", [(None, None, "data"), ("data",), ()], ids=str)
def test_fewer_kv_heads_than_shards_are_repeated(place: tuple[str | None, ...]) -> None:
    query, key, value = arrays = heads_of(2, 4, 2, time=128)
    expected = sx.nn.dot_product_attention(*arrays, causal=True)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), sx.kernels(attention="splash", interpret=True):
        split = jax.device_put(query, jax.NamedSharding(mesh, jax.P(None, None, ("data", "model"))))
        key, value = jax.device_put((key, value), jax.NamedSharding(mesh, jax.P(*place)))
        actual = jax.jit(lambda *arrays: sx.nn.dot_product_attention(*arrays, causal=True))(
            split, key, value
        )
    assert_close(actual, expected)


def attend(x: Any) -> Any:
    return sx.nn.dot_product_attention(x, x, x)


STATEMENTS: dict[str, Any] = {
    "sx.jit": sx.jit(attend),
    "jax.jit": jax.jit(attend),
    "eager": attend,
    "scan": lambda x: sx.scan(lambda carry, _: (attend(carry), None), length=2)(x, None)[0],
    "cond": lambda x: sx.cond(True, attend, lambda x: x, x),
}


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
def test_programs_of_other_kernels_are_not_reused(statement: Any) -> None:
    x = floats(1, 4, 1, 8)
    expected = statement(x)
    with sx.kernels(attention="splash"), pytest.raises(LayerInputError, match="runs on TPUs"):
        statement(x)
    np.testing.assert_array_equal(statement(x), expected)


SHAPE = jax.ShapeDtypeStruct((2, TIME, 4, HEAD_DIM), "bfloat16")
MASK = np.ones((1, 1, TIME, TIME), bool)


@pytest.mark.parametrize(
    ("query", "key", "options", "reason"),
    [
        (SHAPE, SHAPE, {"mask": MASK}, "it takes no mask"),
        (SHAPE, SHAPE, {"bias": MASK, "mask": MASK}, "it takes no mask, no bias"),
        (SHAPE, SHAPE, {"sinks": np.zeros(4, np.float32)}, "it takes no sinks"),
        (SHAPE.update(dtype="float16"), SHAPE, {}, "it takes float32 and bfloat16"),
        (SHAPE.update(shape=(2, TIME, 4, 64)),) * 2 + ({}, "here it is 64"),
        (SHAPE.update(shape=(2, 100, 4, HEAD_DIM)),) * 2 + ({}, "here are 100 and 100"),
        (SHAPE, SHAPE.update(shape=(2, 128, 4, HEAD_DIM)), {"causal": True}, "as many keys"),
        (SHAPE, SHAPE, {"segment_ids": (SEGMENTS, SEGMENTS)}, "segments of one sequence"),
    ],
)
def test_auto_passes_over_splash_where_named_is_refused(
    query: Any, key: Any, options: dict[str, Any], reason: str
) -> None:
    with sx.kernels(interpret=True):
        choice = sx.nn.choose_attention(query, key, **options)
        assert choice.implementation == "xla" and reason in choice.reasons["splash"]
        with pytest.raises(LayerInputError, match='implementation="splash"') as refusal:
            sx.nn.choose_attention(query, key, implementation="splash", **options)
    with (
        sx.kernels(interpret=True),
        run_advice(refusal.value, 'sx.kernels(attention="auto")', {"sx": sx}),
    ):
        assert sx.nn.choose_attention(query, key, **options) == choice
    assert choice.reasons["splash"] in str(refusal.value)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({}, "no rules in scope say how the mesh"),
        ({"batch": "data", "seq": "model"}, "the sequence is split over model"),
    ],
)
def test_splash_needs_batches_and_heads_split(rules: Any, reason: str) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), sx.axis_rules(rules), sx.kernels(interpret=True):
        choice = sx.nn.choose_attention(SHAPE, SHAPE, causal=True)
    assert choice.implementation == "xla" and reason in choice.reasons["splash"]


def test_layers_own_kernel_outranks_the_scope() -> None:
    layer = sx.nn.MultiHeadAttention(8, 2, implementation="xla", rngs=sx.Rngs(0))
    x = floats(1, 3, 8)
    with sx.kernels(attention="splash"):
        np.testing.assert_array_equal(layer(x), layer(x))
        with sx.kernels(attention="xla"):
            layer.implementation = None
            layer(x)
        with pytest.raises(LayerInputError, match=r"MultiHeadAttention.*runs on TPUs"):
            layer(x)


def test_ring_refuses_a_kernel_by_name() -> None:
    layer = sx.nn.MultiHeadAttention(8, 2, rngs=sx.Rngs(0))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    scopes = sx.axis_rules({"seq": "data"}), sx.parallel(context="ring")
    by_name, refused = sx.kernels(attention="tokamax"), pytest.raises(LayerInputError)
    with jax.set_mesh(mesh), scopes[0], scopes[1], by_name, refused as refusal:
        layer(floats(1, 4, 8))
    assert "sent round" in str(refusal.value)
    with (
        jax.set_mesh(mesh),
        scopes[0],
        scopes[1],
        run_advice(refusal.value, 'sx.kernels(attention="auto")', {"sx": sx}),
    ):
        assert layer(floats(1, 4, 8)).shape == (1, 4, 8)


def test_splash_off_tpus_is_interpreted_on_request() -> None:
    arrays = heads_of(1, 1, 1, time=128)
    with pytest.raises(LayerInputError) as refusal:
        sx.nn.dot_product_attention(*arrays, implementation="splash")
    advice = 'sx.kernels(attention="splash", interpret=True)'
    with run_advice(refusal.value, advice, {"sx": sx}):
        actual = sx.nn.dot_product_attention(*arrays)
    assert_close(actual, sx.nn.dot_product_attention(*arrays))


def test_log_names_kernel_and_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardax.kernels"), sx.kernels(attention="auto"):
        sx.jit(attend)(floats(1, 4, 1, 8))
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "dot_product_attention of float32[1, 4, 1, 8]: xla (not splash: it runs on TPUs, and this "
        "is cpu"
    )


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(PartitionError, match="attention='flash' must be 'auto', 'xla'"):
        sx.kernels(attention="flash")


@needs_no("tokamax")
def test_absent_tokamax_is_refused_with_its_install_command() -> None:
    with pytest.raises(LayerInputError, match=r"pip install 'shardax\[kernels\]'"):
        sx.nn.dot_product_attention(*heads_of(1, 1, 1, time=2), implementation="tokamax")


@needs("tokamax")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokamax_equals_xla_with_gradients(options: dict[str, Any]) -> None:
    arrays = heads_of(1, 2, 1)
    with sx.kernels(attention="tokamax"):
        actual = result_and_gradients(arrays, **options)
    assert_close(actual, result_and_gradients(arrays, **options))
