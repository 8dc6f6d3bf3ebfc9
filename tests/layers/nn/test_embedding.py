# SPDX-License-Identifier: Apache-2.0
"""Embed: lookup, tied output, and indices that it refuses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from tests.values import with_values


def test_lookup_takes_rows_and_attend_multiplies_them():
    embed = with_values(sx.nn.Embed(5, 3, rngs=sx.Rngs(0)))
    table = np.asarray(embed.embedding.value)
    indices = np.array([[0, 4, 2], [1, 1, 3]])
    np.testing.assert_array_equal(embed(indices), table[indices])
    np.testing.assert_allclose(embed.attend(table), table @ table.T, rtol=1e-5, atol=1e-6)


def test_vectors_start_with_length_one_on_average():
    table = sx.nn.Embed(512, 64, rngs=sx.Rngs(0)).embedding.value
    assert (np.asarray(table) ** 2).sum(1).mean() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_index_out_of_range_gives_nan(dtype):
    embed = with_values(sx.nn.Embed(5, 3, rngs=sx.Rngs(0)))
    vectors = np.asarray(embed(np.array([5, -1, -100, 4], dtype)))
    np.testing.assert_array_equal(vectors[:3], np.full((3, 3), np.nan))
    np.testing.assert_array_equal(vectors[3], embed.embedding.value[4])
    gradient = sx.grad(lambda embed: embed(np.array([-1, 2], dtype))[1].sum())(embed)["embedding"]
    np.testing.assert_array_equal(gradient, np.eye(5)[2][:, None] * np.ones(3))


def test_named_index_out_of_range_gives_nan():
    embed = with_values(sx.named.Embed({"vocab": 5}, {"embed": 3}, rngs=sx.Rngs(0)))
    vectors = embed(sx.named.wrap(jnp.array([-1, 5, 0]), "time")).unwrap("time", "embed")
    assert np.isnan(vectors).tolist() == [[True] * 3, [True] * 3, [False] * 3]


def test_tied_table_has_the_summed_gradient():
    embed = with_values(sx.nn.Embed(5, 3, rngs=sx.Rngs(0)))
    indices = np.array([1, 2])

    def tied(embed: sx.nn.Embed) -> jax.Array:
        return jnp.sum(jnp.sin(embed.attend(embed(indices))))

    def untied(lookup: sx.nn.Embed, head: sx.nn.Embed) -> jax.Array:
        return jnp.sum(jnp.sin(head.attend(lookup(indices))))

    whole = sx.jit(sx.grad(tied))(embed)["embedding"]
    of_both = sx.jit(sx.grad(untied, argnums=(0, 1)))(embed, sx.clone(embed))
    first, second = (np.asarray(each["embedding"]) for each in of_both)
    np.testing.assert_allclose(whole, first + second, rtol=1e-5, atol=1e-6)


def test_embed_refuses_floats_wrong_features_and_sizes():
    embed = with_values(sx.nn.Embed(5, 3, rngs=sx.Rngs(0)))
    with pytest.raises(LayerInputError, match=r"Embed\(5, 3\) takes integers .* float32\[2\]"):
        embed(np.zeros(2, np.float32))
    with pytest.raises(LayerInputError, match=r"Embed\(5, 3\)\.attend takes .* \(\.\.\., 3\)"):
        embed.attend(np.zeros((2, 4), np.float32))
    with pytest.raises(LayerConfigError, match="num_embeddings=0"):
        sx.nn.Embed(0, 3, rngs=sx.Rngs(0))
    with pytest.raises(LayerConfigError, match="2 axis names"):
        sx.nn.Embed(5, 3, axes=("vocab",), rngs=sx.Rngs(0))
    assert sx.nn.Embed(5, 3, axes=None, rngs=sx.Rngs(0)).embedding.axes == ("vocab", "embed")


@pytest.mark.parametrize("interleaved", [True, False])
def test_sinusoidal_positions_equal_their_formula(interleaved: bool):
    positions = np.array([[0, 1, 7], [100, 5, 2]])
    encode = functools.partial(sx.nn.sinusoidal, base=50.0, interleaved=interleaved)
    found = jax.jit(lambda positions: encode(positions, 6))(positions)
    wanted = np.zeros((2, 3, 6))
    for i in range(3):
        angle = positions * 50.0 ** (-2 * i / 6)
        sine, cosine = (2 * i, 2 * i + 1) if interleaved else (i, 3 + i)
        wanted[..., sine], wanted[..., cosine] = np.sin(angle), np.cos(angle)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_sinusoidal_positions_need_pairs_of_features():
    with pytest.raises(LayerConfigError, match=r"features to be even.*features=5"):
        sx.nn.sinusoidal(np.arange(3), 5)
