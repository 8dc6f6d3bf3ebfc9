# SPDX-License-Identifier: Apache-2.0
"""MultiHeadAttention against a plain NumPy version, and what it refuses."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from tests.advice import run_advice
from tests.needs import needs
from tests.values import with_values

FEATURES, HEADS, TIME = 12, 4, 5
CAUSAL = np.tril(np.ones((TIME, TIME), bool))


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(11).normal(size=shape).astype(np.float32)


def attention(**options: Any) -> sx.nn.MultiHeadAttention:
    return with_values(sx.nn.MultiHeadAttention(FEATURES, HEADS, rngs=sx.Rngs(0), **options))


@sx.jit
def call(layer: Any, *args: Any, **options: Any) -> Any:
    return layer(*args, **options)


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


@pytest.mark.parametrize(("kv_heads", "causal"), [(1, False), (2, True), (4, False)])
def test_heads_weigh_the_values_they_may_read(kv_heads: int, causal: bool):
    layer, x = attention(num_kv_heads=kv_heads, causal=causal), floats(2, TIME, FEATURES)
    allowed = CAUSAL if causal else np.ones((TIME, TIME), bool)
    close(call(layer, x), [by_hand(layer, item, item, allowed) for item in x])


def test_context_is_read_instead_of_the_input():
    layer, x, context = attention(), floats(2, TIME, FEATURES), floats(2, 3, FEATURES)
    allowed = np.ones((TIME, 3), bool)
    pairs = zip(x, context, strict=True)
    close(call(layer, x, context), [by_hand(layer, one, other, allowed) for one, other in pairs])


def test_mask_says_what_may_be_read():
    layer, x = attention(), floats(2, TIME, FEATURES)
    allowed = np.random.default_rng(0).random((2, TIME, TIME)) > 0.4
    allowed |= np.eye(TIME, dtype=bool)
    pairs = zip(x, allowed, strict=True)
    expected = [by_hand(layer, item, item, mask) for item, mask in pairs]
    close(call(layer, x, mask=allowed[:, None]), expected)


def test_rotary_attention_depends_on_differences_of_positions():
    layer, x = attention(rope_base=100.0, head_dim=4), floats(TIME, FEATURES)
    found = call(layer, x)
    assert not np.allclose(found, call(attention(head_dim=4), x), atol=1e-3)
    close(found, call(layer, x, positions=np.arange(TIME)))
    close(found, call(layer, x, positions=np.arange(TIME) + 40))
    assert not np.allclose(found, call(layer, x, positions=np.arange(TIME) * 2), atol=1e-3)
    close(found, call(layer, x, positions=sx.nn.rotation(np.arange(TIME), 4, 100.0)))


def test_context_has_positions_of_its_own():
    layer, x = attention(rope_base=100.0, head_dim=4), floats(TIME, FEATURES)
    plain, order = call(layer, x), np.arange(TIME)
    close(call(layer, x, x), plain)
    close(call(layer, x, x, positions=order, context_positions=order), plain)
    moved = call(layer, x, x, positions=order, context_positions=order + 3)
    assert not np.allclose(moved, plain, atol=1e-3)
    close(moved, call(layer, x, x, context_positions=order + 3))


def test_causal_attention_does_not_see_later_steps():
    layer, x = attention(causal=True, rope_base=100.0, head_dim=4), floats(TIME, FEATURES)
    changed = x.copy()
    changed[3:] += 1
    found, before = call(layer, changed), call(layer, x)
    close(found[:3], before[:3])
    assert not np.allclose(found[3:], before[3:], atol=1e-3)


def test_biases_and_kernels_have_the_given_axes():
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


class FlatOut(sx.Module):
    def __init__(self, kernel: Any, axes: Any) -> None:
        self.kernel = sx.Param(kernel, axes=axes)

    def __call__(self, heads: jax.Array, out_sharding: Any = None) -> jax.Array:
        return heads.reshape(*heads.shape[:-2], -1) @ self.kernel.value


@pytest.mark.parametrize("axes", [None, ("flat", "embed")])
def test_output_without_heads_needs_no_names(axes: Any):
    layer, x = attention(), floats(2, TIME, FEATURES)
    expected = call(layer, x)
    layer.out = FlatOut(np.reshape(layer.out.kernel.value, (-1, FEATURES)), axes)
    close(call(layer, x), expected)


@sx.jit
@sx.value_and_grad
def value_and_grad_of_sine(layer: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(layer(x)))


def test_whole_kv_heads_meet_split_query_heads(mesh: Mesh):
    """Two kv heads cannot be split over four devices, eight query heads can."""
    layer = with_values(sx.nn.MultiHeadAttention(8, 8, num_kv_heads=2, head_dim=2, rngs=sx.Rngs(0)))
    x = floats(4, TIME, 8)
    expected, expected_gradients = value_and_grad_of_sine(layer, x)
    sx.shard(layer, mesh, {"heads": "model"})
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        found, gradients = value_and_grad_of_sine(layer, x)
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


def test_features_not_divisible_by_heads_are_refused():
    with pytest.raises(LayerConfigError, match="features=10 into num_heads=4"):
        sx.nn.MultiHeadAttention(10, 4, rngs=sx.Rngs(0))


def test_inputs_that_do_not_fit_are_refused():
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


@needs("torch")
@pytest.mark.parametrize("mesh_kind", [None, "Auto", "Explicit"])
@pytest.mark.parametrize("kv_heads", [4, 8])
def test_attention_with_every_option_equals_pytorch(mesh_kind: str | None, kv_heads: int):
    import torch

    layer = sx.nn.MultiHeadAttention(
        16,
        8,
        num_kv_heads=kv_heads,
        head_dim=6,
        causal=True,
        use_bias=True,
        out_bias=False,
        window=3,
        softcap=0.7,
        scale=0.5,
        query_norm=lambda: sx.nn.RMSNorm(6),
        key_norm=lambda: sx.nn.LayerNorm(6),
        bias_init=jax.nn.initializers.normal(0.5),
        rngs=sx.Rngs(0),
    )
    x, ids = floats(4, TIME, 16), np.array([[0, 0, 0, 1, 1]] * 2 + [[0, 1, 1, 1, 1]] * 2)
    mask = np.random.default_rng(0).random((4, 8, TIME, TIME)) > 0.3
    mask |= np.eye(TIME, dtype=bool)
    t = torch.tensor

    def heads(linear: Any) -> Any:
        kernel, bias = (t(np.array(one.value)) for one in (linear.kernel, linear.bias))
        return torch.einsum("btf,fnh->bnth", t(x), kernel) + bias[:, None]

    q = torch.nn.functional.rms_norm(heads(layer.q), (6,), eps=layer.query_norm.epsilon)
    k = torch.nn.functional.layer_norm(heads(layer.k), (6,), eps=layer.key_norm.epsilon)
    k, v = (one.repeat_interleave(8 // kv_heads, 1) for one in (k, heads(layer.v)))
    scores = 0.7 * torch.tanh(q @ k.mT * 0.5 / 0.7)
    gap = np.arange(TIME)[:, None] - np.arange(TIME)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    allowed = mask & same & (gap >= 0) & (gap < 3)
    weights = scores.masked_fill(~t(allowed), -torch.inf).softmax(-1)
    out = t(np.array(layer.out.kernel.value))
    expected = torch.einsum("bnth,nhf->btf", weights @ v, out).numpy()
    if mesh_kind is None:
        close(layer(x, mask=mask, segment_ids=ids), expected)
        return
    types = (getattr(jax.sharding.AxisType, mesh_kind),) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    with jax.set_mesh(mesh):
        sx.shard(layer, mesh, {"heads": "model", "kv_heads": "model"})
        split = NamedSharding(mesh, PartitionSpec("data"))
        x, mask, ids = (jax.device_put(one, split) for one in (x, mask, ids))
        call = sx.jit(lambda layer, x: layer(x, mask=mask, segment_ids=ids))
        close(call(layer, x), expected)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_fused_kernel_applies_windows_and_scales(implementation: Any):
    options = {"causal": True, "window": 2, "scale": 0.7}
    layer, x = attention(**options, implementation=implementation), floats(2, TIME, FEATURES)
    found = call(layer, x)
    close(found, call(attention(**options, softcap=1e4), x))
    assert not np.allclose(found, call(attention(causal=True, scale=0.7), x), atol=1e-3)


@pytest.mark.parametrize("softcap", [None, 1e4], ids=["fused", "unfused"])
def test_window_without_order_reads_both_sides(softcap: Any):
    x = floats(2, TIME, FEATURES)
    place = np.arange(TIME)
    near = np.abs(place[:, None] - place) < 2
    expected = call(attention(), x, mask=near[None, None])
    close(call(attention(window=2, softcap=softcap), x), expected)


@pytest.mark.parametrize("softcap", [None, 1e4], ids=["fused", "unfused"])
def test_bias_is_added_to_the_scores(softcap: Any):
    x, seen = floats(2, TIME, FEATURES), np.arange(TIME) < 3
    bias = np.where(seen, 0.5, -1e9).astype(np.float32)[None, None]
    layer = attention(softcap=softcap)
    close(call(layer, x, bias=bias), call(layer, x, mask=seen[None, None, None]))


def test_functions_of_attention_take_no_bias():
    layer = attention(attention_fn=sx.nn.dot_product_attention)
    with pytest.raises(LayerInputError, match="with attention_fn takes no bias of scores"):
        layer(floats(2, TIME, FEATURES), bias=np.zeros((TIME, TIME), np.float32))


# --- chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_chunk_reads_itself_alone(kind: AxisType | None):
    options = {"causal": True, "window": 2, "rope_base": 100.0, "head_dim": 4}
    layer, x = attention(chunked=True, **options), floats(4, TIME, FEATURES)
    places, segments = np.arange(TIME), np.array([[1, 1, 1, 2, 2]] * 4)
    alike = (places[:, None] // 2 == places // 2)[None, None]
    within = np.array([0, 1, 2, 0, 1])
    expected = call(attention(**options), x, mask=alike)
    same = segments[:, None, :, None] == segments[:, None, None]
    apart = same & (within[:, None] // 2 == within // 2)
    packed = call(attention(**options), x, mask=apart, positions=within)
    given = {"positions": within, "segment_ids": segments}
    if kind is None:
        close(call(layer, x), expected)
        close(call(layer, x, **given), packed)
        cache = sx.nn.AttentionCache(4, 2, HEADS, 4, ring=True)
        parts = [call(layer, x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 5))]
        close(np.concatenate(parts, 1), expected)
        return
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        sx.shard(layer, mesh, {"heads": "model"})
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        close(call(layer, placed), expected)
        close(call(layer, placed, **given), packed)


def test_chunks_and_segments_are_compared_exactly() -> None:
    layer, x = attention(chunked=True, causal=True, window=2), floats(1, TIME, FEATURES)
    expected = call(layer, x, segment_ids=np.array([[1, 1, 1, 2, 2]]))
    close(call(layer, x, segment_ids=np.array([[1, 1, 1, 1 + 2**22, 1 + 2**22]])), expected)
    sparse = {"positions": np.array([0, 2**12, 2**12 + 1, 2**13, 2**13 + 1])}
    one_segment = np.ones((1, TIME), np.int32)
    close(call(layer, x, **sparse, segment_ids=one_segment), call(layer, x, **sparse))


@pytest.mark.parametrize("kind", [None, AxisType.Explicit], ids=str)
def test_queries_grow_with_their_position(kind: AxisType | None):
    layer, x = attention(causal=True, query_growth=(0.5, 2)), floats(4, TIME, FEATURES)
    places = np.arange(TIME) + np.arange(4)[:, None]
    growth = (1 + 0.5 * np.log1p(np.floor((places + 1) / 2))).astype(np.float32)
    qkv = attention(causal=True).project(jnp.asarray(x))
    query = qkv.query * growth[:, :, None, None]
    expected = layer.out(sx.nn.dot_product_attention(query, qkv.key, qkv.value, causal=True))
    if kind is None:
        close(call(layer, x, positions=places), expected)
        cache = sx.nn.AttentionCache(1, TIME, HEADS, 3)
        parts = [call(layer, x[:1, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 5))]
        close(np.concatenate(parts, 1), expected[:1])
        return
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        sx.shard(layer, mesh, {"heads": "model"})
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        close(call(layer, placed, positions=places), expected)


def test_chunks_and_growth_need_positions():
    x, turned = floats(1, TIME, FEATURES), sx.nn.rotation(jnp.arange(TIME), 4)
    chunked = {"chunked": True, "causal": True, "window": 2}
    for options in (chunked, {"query_growth": (0.5, 2)}):
        with pytest.raises(LayerInputError, match="needs integer positions"):
            attention(**options)(x, positions=turned)
    with pytest.raises(LayerInputError, match="no context, and is causal with a window"):
        attention(**chunked)(x, x)
    with pytest.raises(LayerInputError, match="no context, and is causal with a window"):
        attention(chunked=True)(x)


# --- gates ----------------------------------------------------------------------------------------


@sx.jit
def gated_by_hand(layer: Any, x: Any) -> Any:
    plain = attention(causal=True, use_bias=True)
    for name in ("q", "k", "v", "out"):
        setattr(plain, name, getattr(layer, name))
    read = plain.attend(layer.project(x)) * jax.nn.sigmoid(layer.gate(x))
    return layer.out(read)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gate_multiplies_what_is_read(kind: AxisType):
    layer, x = attention(gated=True, causal=True, use_bias=True), floats(4, TIME, 12)
    expected = gated_by_hand(layer, x)
    close(call(layer, x), expected)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        sx.shard(layer, mesh, {"heads": "model"})
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        assert layer.gate.kernel.value.sharding.spec == PartitionSpec(None, "model", None)
        close(call(layer, placed), expected)
        cache = sx.shard(sx.nn.AttentionCache(4, TIME, HEADS, 3), mesh, {"batch": "data"})
        parts = [call(layer, placed[:, a:b], cache=cache) for a, b in ((0, 3), (3, TIME))]
        close(np.concatenate(parts, 1), expected)


# --- sinks ----------------------------------------------------------------------------------------


def with_key_of_zeros(layer: Any, x: Any, mask: Any) -> Any:
    """Attention whose heads read one key more, of the score of their sink, and no value."""
    qkv = layer.project(x)
    key, value = (jnp.repeat(heads, HEADS // 2, axis=-2) for heads in (qkv.key, qkv.value))
    scores = jnp.einsum("bthd,bshd->bhts", qkv.query, key) / np.sqrt(layer.head_dim)
    sinks = jnp.broadcast_to(layer.sinks.value[:, None, None], (*scores.shape[:-1], 1))
    scores = jnp.concatenate([jnp.where(mask, scores, -1e9), sinks], -1)
    weights = jax.nn.softmax(scores, -1)[..., :-1]
    return layer.out(jnp.einsum("bhts,bshd->bthd", weights, value))


def mean_square(function: Any) -> Any:
    return sx.jit(sx.value_and_grad(lambda layer, *args: (function(layer, *args) ** 2).sum()))


mean_square_with_key_of_zeros = mean_square(with_key_of_zeros)


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_sink_is_a_key_without_a_value(kind: AxisType | None):
    layer, x = attention(sinks=True, num_kv_heads=2, window=3, causal=True), floats(4, TIME, 12)
    segments = np.array([[1, 1, 1, 2, 2]] * 4)
    gap = np.arange(TIME)[:, None] - np.arange(TIME)
    allowed = (segments[:, None, :, None] == segments[:, None, None]) & (gap >= 0) & (gap < 3)
    expected = mean_square_with_key_of_zeros(layer, x, allowed)
    assert layer.sinks.axes == ("heads",)
    function = mean_square(lambda layer, x: layer(x, segment_ids=segments))
    if kind is None:
        jax.tree.map(close, function(layer, x), expected)
        return
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        sx.shard(layer, mesh, {"heads": "model"})
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        assert layer.sinks.value.sharding.spec == PartitionSpec("model")
        jax.tree.map(close, function(layer, placed), expected)


def test_position_with_sinks_may_read_nothing():
    layer, x = attention(sinks=True), floats(2, TIME, FEATURES)
    real = np.arange(TIME) < np.array([[TIME], [0]])
    result = call(layer, x, mask=real[:, None, None])
    np.testing.assert_array_equal(result[1], np.zeros_like(x[1]))
    heads = np.split(floats(1, TIME, HEADS, 12), 3, axis=-1)
    far = sx.nn.dot_product_attention(*heads, sinks=jnp.full(HEADS, -1e9))
    close(far, sx.nn.dot_product_attention(*heads))
    with pytest.raises(LayerInputError, match=r"sinks of shape \(4,\)"):
        sx.nn.dot_product_attention(*heads, sinks=np.zeros(3))


def test_sinks_with_another_softmax_are_refused():
    x = floats(1, TIME, FEATURES)
    for name, function in (("softmax", even), ("attention_fn", sx.nn.dot_product_attention)):
        layer = attention(sinks=True)
        setattr(layer, name, function)
        with pytest.raises(LayerInputError, match="sinks has a softmax of its own") as refusal:
            layer(x)
        assert "layer.sinks = None" in str(refusal.value)
        layer.sinks = None
        assert layer(x).shape == x.shape


@pytest.mark.parametrize("kernel", ["splash", "tokamax", "cudnn"])
def test_kernels_without_sinks_are_refused(kernel: Any):
    layer, x = attention(sinks=True), floats(2, TIME, FEATURES)
    with sx.kernels(attention=kernel, interpret=True):
        with pytest.raises(LayerInputError, match=f'"{kernel}".*sinks'):
            call(layer, x)
        layer.implementation = "auto"
        assert call(layer, x).shape == x.shape


def test_ring_with_sinks_is_refused():
    layer, x = attention(sinks=True, causal=True), floats(2, 8, FEATURES)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), sx.axis_rules({"seq": "data"}), sx.parallel(context="ring"):
        with pytest.raises(LayerInputError, match="without sinks, dropout") as refusal:
            layer(x)
        scope = run_advice(refusal.value, 'sx.parallel(context="all-gather")', {"sx": sx})
        with scope:
            result = call(layer, x)
    close(result, call(layer, x))


def test_cudnn_off_gpu_is_refused():
    if jax.default_backend() == "gpu":
        pytest.skip("here it may run")
    x = floats(2, TIME, FEATURES)
    for layer, scope in (
        (attention(implementation="cudnn"), contextlib.nullcontext()),
        (attention(), sx.kernels(attention="cudnn")),
    ):
        says = r'"cudnn"\) does not run for queries float32.*: .*[^.]\. cuDNN takes float16'
        with scope, pytest.raises(LayerInputError, match=says) as refusal:
            layer(x)
        layer.implementation = None
        with run_advice(refusal.value, 'sx.kernels(attention="auto")', {"sx": sx}):
            assert layer(x).shape == x.shape
        assert 'or implementation="auto" on the layer.' in str(refusal.value)


def test_context_has_segments_of_its_own():
    layer, x, context = attention(), floats(1, 2, FEATURES), floats(1, 3, FEATURES)
    found = call(layer, x, context, segment_ids=(np.array([[0, 1]]), np.array([[0, 1, 1]])))
    same = np.array([[True, False, False], [False, True, True]])
    close(found[0], by_hand(layer, x[0], context[0], same))
    for ids in (np.zeros((1, 2), int), (np.zeros((1, 2), int), np.zeros((1, 2), int))):
        with pytest.raises(LayerInputError, match="segment_ids"):
            layer(x, context, segment_ids=ids)


def test_dropout_keeps_the_mean_while_training():
    layer, x = attention(dropout=0.5), floats(1, TIME, FEATURES)
    many = sx.jit(
        sx.scan(lambda layer, _: (layer, layer(x)), in_axes=(sx.Carry, 0), out_axes=(sx.Carry, 0))
    )
    drawn = np.asarray(many(layer, np.arange(600))[1])
    assert len(np.unique(drawn[:, 0, 0, 0])) > 20
    layer.eval()
    expected = by_hand(layer, x[0], x[0], np.ones((TIME, TIME), bool))
    close(call(layer, x)[0], expected)
    np.testing.assert_allclose(drawn.mean(0)[0], expected, atol=4 * drawn.std(0).max() / 600**0.5)


def even(scores: jax.Array) -> jax.Array:
    """Weighs all positions alike."""
    return jnp.ones_like(scores) / scores.shape[-1]


@pytest.mark.parametrize("stacked", [False, True])
def test_softmax_of_every_attention_can_be_replaced(stacked: bool):
    model = sx.nn.Sequential(attention(), attention())
    if stacked:
        model = with_values(sx.nn.Stack(attention, 2))
    places = sx.select(model).at_instances_of(sx.nn.MultiHeadAttention).at(lambda one: one.softmax)
    flat = places.apply(lambda _: even)
    x = floats(2, TIME, FEATURES)
    mean = x.mean(1, keepdims=True)
    for place in range(2):
        layer = model[place] if stacked else model.layers[place]
        values = np.einsum("btf,fnh->btnh", mean, layer.v.kernel.value)
        mean = np.einsum("btnh,nhf->btf", values, layer.out.kernel.value)
    for found in (flat(x), call(flat, x)):
        close(found, np.broadcast_to(mean, x.shape))


def test_partial_rotation_leaves_the_rest_of_a_head():
    layer, x = attention(rope_base=100.0, head_dim=8), floats(2, TIME, FEATURES)
    frequencies = np.array([1.0, 0.25], np.float32)

    @sx.jit
    def rotated_heads(layer: Any, x: Any) -> Any:
        turned = sx.nn.rotation(np.arange(TIME), 8, frequencies=frequencies)
        heads = layer.q(x)
        return heads, sx.nn.rotate(heads, turned), layer.project(x, positions=turned).query

    heads, rotated, query = map(np.asarray, rotated_heads(layer, x))
    close(rotated[..., 4:], heads[..., 4:])
    whole = heads[..., :2] + 1j * heads[..., 2:4]
    whole = whole * np.exp(1j * np.arange(TIME)[:, None, None] * frequencies)
    close(rotated[..., :2], whole.real)
    close(rotated[..., 2:4], whole.imag)
    close(query, rotated)
    with pytest.raises(LayerInputError, match=r"frequencies of shape \(at most 4,\)"):
        sx.nn.rotation(np.arange(TIME), 8, frequencies=np.ones(5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0, "causal": True}, "window=0"),
        ({"softcap": 0.0}, r"softcap=0\.0"),
        ({"implementation": "flash"}, "'splash' or 'tokamax'"),
        ({"implementation": "cudnn", "softcap": 1.0}, "has no soft cap"),
        ({"attention_fn": sx.nn.dot_product_attention, "sinks": True}, "cannot follow sinks"),
        ({"dropout": 2.0}, r"rate=2\.0"),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(LayerConfigError, match=message):
        attention(**options)


@pytest.mark.parametrize(  # each case with and without a scope, compiled and not
    ("case", "scope", "compiled"),
    [
        *((case, at, at) for case in ("plain", "segments", "cache") for at in (False, True)),
        *((case, at, not at) for case in ("mask", "softcap") for at in (False, True)),
    ],
)
def test_explicit_axes_need_no_mesh_in_scope(case: str, scope: bool, compiled: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    soft: dict[str, Any] = {"softcap": 5.0, "window": 3} if case == "softcap" else {}
    layer = with_values(
        sx.nn.MultiHeadAttention(16, 4, causal=True, rope_base=100.0, rngs=sx.Rngs(0), **soft)
    )
    cache = sx.nn.AttentionCache(4, 8, 4, 4) if case == "cache" else None
    x = np.random.default_rng(0).normal(size=(4, 6, 16)).astype(np.float32)
    given: dict[str, Any] = {
        "mask": {"mask": np.tril(np.ones((4, 1, 6, 6), bool), k=-1) | np.eye(6, dtype=bool)},
        "segments": {"segment_ids": np.array([[0, 0, 0, 1, 1, 1]] * 4)},
    }.get(case, {})
    expected = call(layer, x, **given)
    sx.shard(layer, mesh, [("heads", "model")])
    rules = [("batch", "data"), ("kv_heads", "model")]
    if cache is not None:
        sx.shard(cache, mesh, rules)
        given = {"cache": cache}
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh) if scope else contextlib.nullcontext():
        found = (call if compiled else type(layer).__call__)(layer, placed, **given)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    assert found.sharding.spec == PartitionSpec("data", None, None)
    if cache is not None and not scope:
        assert int(cache.count) == 6
        assert cache.key.value.sharding.spec == PartitionSpec("data", None, "model", None)
        alone = sx.nn.AttentionCache(4, 8, 4, 4)
        with pytest.raises(LayerInputError, match=r"on one device") as caught:
            layer(placed, cache=alone)
        names = {"sx": sx, "cache": alone, "mesh": mesh, "rules": rules}
        run_advice(caught.value, "sx.shard(cache, mesh, rules)", names)
        np.testing.assert_allclose(call(layer, placed, cache=alone), found, rtol=1e-5, atol=1e-6)
