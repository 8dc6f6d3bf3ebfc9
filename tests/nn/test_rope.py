# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: rotations, so lengths stay and only differences of positions count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.errors import LayerConfigError, LayerInputError
from shardax.nn import rotate, rotation

QUERY, KEY = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)


def at(vector: np.ndarray, position: int) -> jax.Array:
    """One head of one item, turned by its position."""
    turned = rotate(jnp.asarray(vector)[None, None], rotation(jnp.array([position]), 8))
    return turned[0, 0]


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_the_product_of_query_and_key_depends_on_the_difference_of_positions(
    query: int, key: int, shift: int
):
    near = at(QUERY, query) @ at(KEY, key)
    far = at(QUERY, query + shift) @ at(KEY, key + shift)
    np.testing.assert_allclose(near, far, atol=2e-3)


@given(st.integers(0, 10_000))
def test_lengths_stay(position: int):
    np.testing.assert_allclose(
        jnp.linalg.norm(at(QUERY, position)), np.linalg.norm(QUERY), rtol=1e-5
    )


def test_pairs_are_turned_as_complex_numbers_by_their_angle():
    turned = at(QUERY, 3)
    angles = 3 * 10_000.0 ** (-np.arange(4) / 4)
    expected = (QUERY[:4] + 1j * QUERY[4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned, [*expected.real, *expected.imag], rtol=1e-4, atol=1e-5)


def test_positions_may_differ_between_items_of_a_batch():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 4, 8)), jnp.float32)
    positions = jnp.array([[0, 1, 2], [5, 6, 7]])
    together = rotate(x, rotation(positions, 8))
    apart = [rotate(item, rotation(row, 8)) for item, row in zip(x, positions, strict=True)]
    np.testing.assert_allclose(together, jnp.stack(apart), rtol=1e-5, atol=1e-6)


def test_bfloat16_is_turned_in_float32_and_returned_as_it_came():
    x = jnp.asarray(QUERY, jnp.bfloat16)[None, None]
    turn = rotation(jnp.array([7]), 8)
    expected = rotate(x.astype(jnp.float32), turn).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotate(x, turn), expected)


def test_odd_heads_and_positions_of_another_rank_are_refused():
    with pytest.raises(LayerConfigError, match="head_dim=7"):
        rotation(jnp.arange(3), 7)
    with pytest.raises(LayerInputError, match=r"int32\[\]"):
        rotation(jnp.array(3), 8)
