# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that rules split is attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx

BATCH, TIME, WIDTH = 2, 16, 8
RULES = {"batch": "data", "seq": "context", "heads": "model", "kv_heads": "model"}
SEGMENTS = jnp.repeat(jnp.arange(4), TIME // 4)[None].repeat(BATCH, 0)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((1, 4, 2), ("data", "context", "model"), axis_types=(kind,) * 3)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {}),
    "causal": ({"causal": True}, {}),
    "window": ({"causal": True, "window": 3}, {}),
    "rotary": ({"causal": True, "rope_base": 1e4}, {}),
    "grouped": ({"causal": True, "num_kv_heads": 2}, {}),
    "softcap": ({"causal": True, "softcap": 2.0}, {}),
    "scale": ({"scale": 0.3}, {}),
    "context": ({}, {"context": jax.random.normal(jax.random.key(2), (BATCH, 24, WIDTH))}),
    "segments": ({"causal": True}, {"segment_ids": SEGMENTS}),
    "mask": ({}, {"mask": jnp.tri(TIME, dtype=bool)[None, None]}),
    "padding": ({}, {"mask": (jnp.arange(TIME) < 11)[None, None, None]}),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_and_its_gradients_are_those_of_the_whole_sequence(
    kind: AxisType, variant: str
) -> None:
    options, given = VARIANTS[variant]
    mesh = mesh_of(kind)

    def make() -> sx.nn.MultiHeadAttention:
        return sx.nn.MultiHeadAttention(WIDTH, 4, rngs=sx.Rngs(0), **options)

    def loss(layer: Any, x: Any, given: Any) -> Any:
        y = layer(x, **given)
        return jnp.sum(jnp.sin(y)), y

    x = jax.random.normal(jax.random.key(1), (BATCH, TIME, WIDTH))
    step = sx.jit(sx.value_and_grad(loss, has_aux=True))
    (_, y), gradients = step(make(), x, given)
    layer = make()
    sx.shard(layer, mesh, RULES)
    with jax.set_mesh(mesh), sx.partition.axis_rules(RULES):
        spec = jax.P("data", "context")
        split = jax.device_put(x, jax.NamedSharding(mesh, spec))
        laid_out = {
            name: jax.device_put(array, jax.NamedSharding(mesh, spec))
            if name in ("segment_ids", "context")
            else array
            for name, array in given.items()
        }
        (_, found), found_gradients = step(layer, split, laid_out)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
    for one, other in zip(
        jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("scanned", [False, True], ids=["layers", "scanned"])
def test_a_packed_batch_trains_split_as_whole_and_each_device_holds_less(
    kind: AxisType, scanned: bool
) -> None:
    config = sx.models.DecoderConfig(
        num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, scan_layers=scanned
    )
    random = np.random.default_rng(0)
    documents = [random.integers(1, 256, n) for n in (40, 9, 30, 64, 5, 22, 17)]
    batch = next(sx.train.PackedBatches(documents, batch_size=2, seq_len=64, passes=1))
    step = sx.jit(sx.value_and_grad(sx.models.next_token_loss))
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    expected, gradients = step(model, jax.tree.map(jnp.asarray, batch))
    whole = step.lower(model, jax.tree.map(jnp.asarray, batch)).compile().memory_analysis()
    mesh = jax.make_mesh((8,), ("context",), axis_types=(kind,))
    rules = {"seq": "context"}
    sx.shard(model, mesh, rules)
    with jax.set_mesh(mesh), sx.partition.axis_rules(rules):
        spec = jax.NamedSharding(mesh, jax.P(None, "context"))
        placed = jax.device_put(batch, spec)
        found, found_gradients = step(model, placed)
        split = step.lower(model, placed).compile().memory_analysis()
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(
        jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert split.temp_size_in_bytes < whole.temp_size_in_bytes / 2
