# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that rules split is attention over the whole sequence."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import hlo
from tests.advice import run_advice
from tests.values import with_values

BATCH, TIME, WIDTH = 2, 16, 8
RULES = {"batch": "data", "seq": "context", "heads": "model", "kv_heads": "model"}
SEGMENTS = np.repeat(np.arange(4, dtype=np.int32), TIME // 4)[None].repeat(BATCH, 0)


def floats(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attention(**options: Any) -> sx.nn.MultiHeadAttention:
    layer = sx.nn.MultiHeadAttention(WIDTH, 4, rngs=sx.Rngs(0), **options)
    for seed, (_, kernel) in enumerate(sx.iter_variables(layer, sx.Param)):
        kernel.value = floats(*kernel.shape, seed=seed) / WIDTH**0.5
    return layer


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((1, 4, 2), ("data", "context", "model"), axis_types=(kind,) * 3)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({"scale": 0.3}, {}),
    "softcap": ({"causal": True, "softcap": 2.0}, {}),
    "rotary, grouped": ({"causal": True, "rope_base": 1e4, "num_kv_heads": 2}, {}),
    "window": ({"causal": True, "window": 3}, {}),
    "segments": ({"causal": True}, {"segment_ids": SEGMENTS}),
    "context": ({}, {"context": floats(BATCH, 24, WIDTH, seed=2)}),
    "mask": ({}, {"mask": np.tri(TIME, dtype=bool)[None, None]}),
    "padding": ({}, {"mask": (np.arange(TIME) < 11)[None, None, None]}),
}


HOW = ["all-gather", "ring", "ring-zigzag"]
KINDS = [AxisType.Auto, AxisType.Explicit]


@sx.jit
@sx.value_and_grad(has_aux=True)
def sine(layer: Any, x: Any, given: Any) -> Any:
    y = layer(x, **given)
    return jnp.sum(jnp.sin(y)), y


@functools.cache
def of_the_whole(variant: str) -> Any:
    """The layer of a variant, its input, result and gradients on one device."""
    layer, x = attention(**VARIANTS[variant][0]), floats(BATCH, TIME, WIDTH)
    (_, y), gradients = sine(layer, x, VARIANTS[variant][1])
    return layer, x, y, gradients


# A ring is in zigzag order only where it is causal; one of the others has a window.
ZIGZAG = {"softcap", "rotary, grouped", "window", "segments"}


# Every variant each way; every variant, and every way, over both kinds of axes.
@pytest.mark.parametrize(
    ("how", "variant", "kind"),
    [
        (how, variant, KINDS[(i + j) % 2])
        for i, how in enumerate(HOW)
        for j, variant in enumerate(VARIANTS)
        if (variant in ZIGZAG if how == "ring-zigzag" else (i + j) % 2 or how == "ring")
    ],
    ids=str,
)
def test_split_attention_and_its_gradients_equal_whole(
    how: Any, variant: str, kind: AxisType
) -> None:
    alone, x, y, gradients = of_the_whole(variant)
    mesh, layer, given = mesh_of(kind), sx.clone(alone), VARIANTS[variant][1]
    sx.shard(layer, mesh, RULES)
    with jax.set_mesh(mesh), sx.axis_rules(RULES), sx.parallel(context=how):
        spec = jax.P("data", "context")
        split = jax.device_put(x, jax.NamedSharding(mesh, spec))
        laid_out = {
            name: jax.device_put(array, jax.NamedSharding(mesh, spec))
            if name in ("segment_ids", "context")
            else array
            for name, array in given.items()
        }
        (_, found), found_gradients = sine(layer, split, laid_out)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
    for one, other in zip(
        jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@functools.cache
def packed_and_whole(scanned: bool) -> Any:
    """A decoder, a packed batch, and on one device: loss, gradients and bytes of its step."""
    config = sx.models.DecoderConfig(
        num_layers=1 + scanned,
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=32,
        scan_layers=scanned,
    )
    random = np.random.default_rng(0)
    documents = [random.integers(1, 256, n) for n in (40, 9, 30, 64, 5, 22, 17)]
    batch = next(sx.train.PackedBatches(documents, batch_size=2, seq_len=64, passes=1))
    step = sx.jit(sx.value_and_grad(sx.models.next_token_loss))
    model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
    arrays = jax.tree.map(np.asarray, batch)
    program = step.lower(model, arrays).compile()
    held = program.memory_analysis().temp_size_in_bytes
    return model, batch, step, program(model, arrays), held


# Each way in both forms of the model; each way, and each form, over both kinds of axes.
@pytest.mark.parametrize(
    ("how", "scanned", "kind"),
    [(how, scanned, KINDS[(i + scanned) % 2]) for i, how in enumerate(HOW) for scanned in (0, 1)],
    ids=str,
)
def test_split_packed_batch_trains_equally_in_less_memory(
    how: Any, scanned: int, kind: AxisType
) -> None:
    alone, batch, step, (expected, gradients), whole = packed_and_whole(bool(scanned))
    model = sx.clone(alone)
    mesh = jax.make_mesh((8,), ("context",), axis_types=(kind,))
    rules = {"seq": "context"}
    sx.shard(model, mesh, rules)
    with jax.set_mesh(mesh), sx.axis_rules(rules), sx.parallel(context=how):
        spec = jax.NamedSharding(mesh, jax.P(None, "context"))
        placed = jax.device_put(batch, spec)
        program = step.lower(model, placed).compile()
        found, found_gradients = program(model, placed)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(
        jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert program.memory_analysis().temp_size_in_bytes < whole / 2


@sx.jit
def call(layer: Any, x: Any) -> Any:
    return layer(x)


@sx.jit
@sx.grad
def gradients_of_sine(layer: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(layer(x)))


def split_call(kind: AxisType, how: Any, time: int, **options: Any) -> tuple[Any, Any]:
    """Gradients of attention over eight parts of a sequence, compiled, and its result."""
    mesh = jax.make_mesh((8,), ("context",), axis_types=(kind,))
    layer, x = attention(**options), floats(BATCH, time, WIDTH)
    sx.shard(layer, mesh, {"seq": "context"})
    with jax.set_mesh(mesh), sx.axis_rules({"seq": "context"}), sx.parallel(context=how):
        split = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "context")))
        return gradients_of_sine.lower(layer, split).compile(), call(layer, split)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_ring_gathers_nothing_and_holds_less_memory(kind: AxisType) -> None:
    gathered, whole = split_call(kind, "all-gather", 512, causal=True)
    ring, found = split_call(kind, "ring", 512, causal=True)
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
    assert "all-gather" in gathered.as_text() and "collective-permute" not in gathered.as_text()
    assert "collective-permute" in ring.as_text() and "all-gather" not in ring.as_text()
    sizes = [each.memory_analysis().temp_size_in_bytes for each in (ring, gathered)]
    assert sizes[0] < sizes[1] / 3


SENT = 2 * BATCH * 64 * WIDTH * 4  # bytes of the keys and values of one of eight parts of 512


@pytest.mark.parametrize(
    ("how", "options", "sent", "blocks"),
    [
        ("all-gather", {"causal": True}, 7 * SENT, 8),
        ("ring", {"causal": True}, 7 * SENT, 8),
        # Queries, keys, values and results change places; then one half is read of each part.
        ("ring-zigzag", {"causal": True}, 7 * SENT + 2 * SENT, 1 + 7 / 2),
        ("ring-zigzag", {}, 7 * SENT, 8),  # balanced as it is
        # The window reaches into the part before, and by one position into that before it.
        ("ring", {"causal": True, "window": 65}, SENT, 2),
        ("ring-zigzag", {"causal": True, "window": 66}, 2 * SENT, 3),
        ("ring", {"causal": True, "window": 1}, 0, 1),
    ],
)
def test_wire_bytes_and_operations_equal_hand_count(
    how: str, options: dict[str, Any], sent: int, blocks: float
) -> None:
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    layer, x = attention(**options), jax.ShapeDtypeStruct((BATCH, 512, WIDTH), np.float32)
    sx.shard(layer, mesh, {"seq": "context"})
    with jax.set_mesh(mesh), sx.axis_rules({"seq": "context"}), sx.parallel(context=how):
        split = x.update(sharding=jax.NamedSharding(mesh, jax.P(None, "context")))
        program = call.lower(layer, split).compile()
    facts = hlo.read_program(program.as_text(), {"context": 8})
    assert sum(each.wire_bytes for each in facts.collectives) == sent
    projections = 4 * 2 * BATCH * 64 * WIDTH * WIDTH
    assert facts.matmul_flops == projections + blocks * 2 * 2 * BATCH * 64 * 64 * WIDTH


@pytest.mark.parametrize("how", ["all-gather", "ring", "ring-zigzag"])
def test_activations_shrink_with_the_number_of_devices(how: str) -> None:
    config = sx.models.DecoderConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32)
    step = sx.jit(sx.value_and_grad(sx.models.next_token_loss))
    held = {}
    for count in (2, 8):
        mesh = jax.make_mesh((count,), ("context",), axis_types=(AxisType.Auto,))
        model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
        sx.shard(model, mesh, {"seq": "context"})
        place = jax.NamedSharding(mesh, jax.P(None, "context"))
        tokens = jax.ShapeDtypeStruct((1, 2048), np.int32, sharding=place)
        with jax.set_mesh(mesh), sx.axis_rules({"seq": "context"}), sx.parallel(context=how):
            program = step.lower(model, {"inputs": tokens, "targets": tokens}).compile()
        held[count] = program.memory_analysis().temp_size_in_bytes
    assert held[8] < held[2] / 4 * 1.05


def test_unsupported_rings_are_refused_with_the_alternative() -> None:
    with pytest.raises(sx.errors.LayerInputError, match="without sinks, dropout") as caught:
        split_call(AxisType.Auto, "ring", 16, dropout=0.5)
    scopes = jax.set_mesh(mesh_of(AxisType.Auto)), sx.axis_rules(RULES)
    gathered = run_advice(caught.value, 'sx.parallel(context="all-gather")', {"sx": sx})
    with scopes[0], scopes[1], gathered:
        assert attention(dropout=0.5)(floats(BATCH, TIME, WIDTH)).shape == (BATCH, TIME, WIDTH)
    layer, mesh = attention(), mesh_of(AxisType.Auto)
    for rules, time, message in (
        (RULES, 10, "divisible by 4, the devices of 'context'"),
        ({"seq": ("context", "model")}, TIME, "split over context, model: map seq to one"),
    ):
        scopes = jax.set_mesh(mesh), sx.axis_rules(rules), sx.parallel(context="ring")
        refused = pytest.raises(sx.errors.LayerInputError, match=message)
        with scopes[0], scopes[1], scopes[2], refused:
            layer(floats(BATCH, time, WIDTH))
    ring = jax.set_mesh(mesh), sx.axis_rules(RULES), sx.parallel(context="ring")
    refused = pytest.raises(sx.errors.LayerInputError, match="no window to both sides")
    with ring[0], ring[1], ring[2], refused:
        attention(window=3)(floats(BATCH, TIME, WIDTH))
    causal = attention(causal=True)
    scopes = jax.set_mesh(mesh), sx.axis_rules(RULES), sx.parallel(context="ring-zigzag")
    refused = pytest.raises(sx.errors.LayerInputError, match="divisible by 8, twice the devices")
    with scopes[0], scopes[1], scopes[2], refused:
        causal(floats(BATCH, 12, WIDTH))
    with pytest.raises(sx.errors.PartitionError, match="'all-gather', 'ring' or 'ring-zigzag'"):
        sx.parallel(context="zigzag")


def test_ring_without_split_sequence_equals_plain_attention() -> None:
    layer, x = attention(), floats(BATCH, 5, WIDTH)
    expected = call(layer, x)
    with sx.parallel(context="ring"):
        np.testing.assert_array_equal(call(layer, x), expected)
        mesh = mesh_of(AxisType.Auto)
        with jax.set_mesh(mesh), sx.axis_rules({"batch": "data", "heads": "model"}):
            np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-6)


def test_gradient_is_finite_where_everything_is_masked() -> None:
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
    layer, x, mask = attention(), floats(BATCH, 8, WIDTH), np.zeros((1, 1, 8, 8), bool)
    step = sx.jit(sx.value_and_grad(lambda layer, x: jnp.sum(jnp.sin(layer(x, mask=mask)))))
    expected, gradients = step(layer, x)
    with jax.set_mesh(mesh), sx.axis_rules({"seq": "context"}), sx.parallel(context="ring"):
        found, others = step(layer, x)
    assert np.isfinite(float(expected))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(jax.tree.leaves(others), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@functools.cache
def decoder_and_logits() -> Any:
    """A small decoder, tokens, and its logits on one device."""
    config = sx.models.DecoderConfig(
        vocab_size=8, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8, num_layers=1
    )
    model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 8, (1, 512)).astype(np.int32)
    return model, tokens, call(model, tokens)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("context", ["all-gather", "ring"])
def test_sequence_rule_alone_splits_unplaced_tokens(kind: AxisType, context: str) -> None:
    mesh = jax.make_mesh((4,), ("context",), axis_types=(kind,))
    alone, tokens, expected = decoder_and_logits()
    rules = [("seq", "context")]
    with jax.set_mesh(mesh), sx.axis_rules(rules), sx.parallel(context=context):
        model = sx.shard(sx.clone(alone), mesh, rules)
        compiled = call.lower(model, tokens).compile()
        result = compiled(model, tokens)
    assert not re.search(r"f32\[[\d,]*512,512\]", compiled.as_text())
    assert np.allclose(result, expected, atol=1e-4)


def test_sequence_rule_alone_leaves_the_batch_placed() -> None:
    rules = [("seq", "context")]
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(kind,) * 2)
        config = sx.models.DecoderConfig(vocab_size=8, num_layers=1)
        with jax.set_mesh(mesh), sx.axis_rules(rules):
            model = sx.shard(with_values(sx.models.Decoder(config, rngs=sx.Rngs(0))), mesh, rules)
            tokens = jax.device_put(jnp.zeros((4, 8), int), NamedSharding(mesh, P("data")))
            hidden = sx.jit(lambda model, tokens: model.layers[0](model.embed(tokens)))
            assert hidden(model, tokens).sharding.shard_shape((4, 8, 64)) == (2, 4, 64)


def test_ring_alone_splits_what_rules_say() -> None:
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Explicit,))
    layer, x = attention(causal=True), floats(1, 256, WIDTH)
    expected = call(layer, x)
    with jax.set_mesh(mesh), sx.axis_rules([("seq", "context")]), sx.parallel(context="ring"):
        sx.shard(layer, mesh)
        program = call.lower(layer, x).compile()
    assert not re.search(r"f32\[[\d,]*256,256\]", program.as_text())
    assert np.allclose(program(layer, x), expected, atol=1e-5)
