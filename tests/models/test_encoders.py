# SPDX-License-Identifier: Apache-2.0
"""What encoders have of their own: padded positions, distances, local windows, pooled states."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import shardax as sx
from shardax.errors import LayerInputError
from shardax.models import (
    AttentionConfig,
    MLPConfig,
    NormConfig,
    PositionsConfig,
    Transformer,
    TransformerConfig,
    pool_tokens,
)
from tests.needs import needs
from tests.values import with_values

ENCODER = TransformerConfig(
    vocab_size=16,
    num_layers=2,
    embed_dim=8,
    causal=False,
    head=None,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, rope=None),
    mlp=MLPConfig(dim=8, gated=False),
    norms=NormConfig(kind="layer"),
    positions=PositionsConfig(max_positions=8),
)
PADDED = dataclasses.replace(ENCODER, positions=PositionsConfig(max_positions=8, pad_token=1))
TOKENS = np.array([[5, 6, 7, 1, 1]])


@sx.jit
def run(model: Any, tokens: Any, **options: Any) -> jax.Array:
    return model(tokens, **options)


def make(config: TransformerConfig) -> Any:
    return with_values(Transformer(config, rngs=sx.Rngs(0)))


# --- positions ------------------------------------------------------------------------------------


def test_positions_count_behind_the_padding_token():
    model = make(PADDED)
    counted = run(model, TOKENS)
    np.testing.assert_array_equal(
        run(model, TOKENS, positions=np.array([[0, 1, 2, -1, -1]])), counted
    )
    padded_left = np.array([[1, 1, 5, 6, 7]])
    left = run(model, padded_left, mask=padded_left != 1)
    right = run(model, TOKENS, mask=TOKENS != 1)
    np.testing.assert_allclose(left[:, 2:], right[:, :3], rtol=1e-5, atol=1e-5)


def test_tokens_beyond_the_positions_are_refused():
    model = make(PADDED)
    full = np.arange(2, 8)[None]
    assert model(np.concatenate([full, [[1, 1, 1]]], 1)).shape == (1, 9, 8)
    with pytest.raises(LayerInputError, match=r"max_positions=8, 2 of them .* tokens\[:, :6\]"):
        model(np.arange(2, 9)[None])


def test_token_types_without_an_embedding_are_refused():
    with pytest.raises(LayerInputError, match="has no token_types"):
        make(ENCODER)(TOKENS, token_types=np.zeros_like(TOKENS))


# --- distances ------------------------------------------------------------------------------------


@needs("torch", "transformers")
def test_buckets_of_distances_equal_transformers():
    import torch
    from transformers.models.mpnet import modeling_mpnet as mpnet

    from shardax.nn.attention.dot_product import distance_buckets

    place = torch.arange(600)
    buckets = mpnet.MPNetEncoder.relative_position_bucket(place[None] - place[:, None])
    np.testing.assert_array_equal(distance_buckets(600, 32), buckets.numpy())


# --- pooled states --------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "places"), [("mean", (1, 2)), ("first", (1,)), ("last", (2,))])
def test_tokens_are_pooled_without_padding(how: str, places: tuple[int, ...]):
    hidden = np.arange(16.0, dtype=np.float32).reshape(1, 4, 4)
    mask = np.array([[False, True, True, False]])
    expected = hidden[:, list(places)].mean(1)
    np.testing.assert_allclose(pool_tokens(hidden, mask, how), expected, rtol=1e-6)
    whole = {"mean": hidden.mean(1), "first": hidden[:, 0], "last": hidden[:, -1]}
    np.testing.assert_allclose(pool_tokens(hidden, how=how), whole[how], rtol=1e-6)


def test_pool_tokens_refuses_other_ways_to_pool():
    with pytest.raises(LayerInputError, match="how='max'"):
        pool_tokens(np.ones((1, 2, 3)), how="max")
    with pytest.raises(LayerInputError, match=r"a mask of shape \(2,\)"):
        pool_tokens(np.ones((1, 2, 3)), np.ones(2, bool))
