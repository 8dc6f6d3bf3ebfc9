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
from shardax.nn import Rope, rotate, rotation

QUERY, KEY = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)


turn = jax.jit(lambda x, positions: rotate(x, rotation(positions, 8)))


def at(vector: np.ndarray, position: int) -> np.ndarray:
    """One head of one item, turned by its position."""
    return np.asarray(turn(vector[None, None], np.array([position], np.int32)))[0, 0]


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_products_depend_on_differences_of_positions(query: int, key: int, shift: int):
    near = at(QUERY, query) @ at(KEY, key)
    far = at(QUERY, query + shift) @ at(KEY, key + shift)
    np.testing.assert_allclose(near, far, atol=2e-3)


@given(st.integers(0, 10_000))
def test_rotation_keeps_lengths(position: int):
    found = np.linalg.norm(at(QUERY, position))
    np.testing.assert_allclose(found, np.linalg.norm(QUERY), rtol=1e-5)


def test_pairs_turn_like_complex_numbers():
    turned = at(QUERY, 3)
    angles = 3 * 10_000.0 ** (-np.arange(4) / 4)
    expected = (QUERY[:4] + 1j * QUERY[4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned, [*expected.real, *expected.imag], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turned", [4, 8])
def test_interleaved_pairs_turn_as_those_of_halves(turned: int):
    x = np.random.default_rng(3).normal(size=(2, 3, 4, 8)).astype(np.float32)
    by = rotation(np.arange(3), 8, frequencies=np.array([1.0, 0.5, 0.2, 0.1])[: turned // 2])
    halves = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, 8)]
    expected = rotate(x[..., halves], by)
    np.testing.assert_array_equal(rotate(x, by, interleaved=True)[..., halves], expected)


def test_positions_may_differ_within_a_batch():
    x = np.random.default_rng(2).normal(size=(2, 3, 4, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2], [5, 6, 7]], np.int32)
    together = turn(x, positions)
    apart = [turn(item, row) for item, row in zip(x, positions, strict=True)]
    np.testing.assert_allclose(together, np.stack(apart), rtol=1e-5, atol=1e-6)


def test_bfloat16_is_turned_in_float32():
    x, positions = QUERY.astype(jnp.bfloat16)[None, None], np.array([7], np.int32)
    found = turn(x, positions)
    assert found.dtype == jnp.bfloat16
    expected = np.asarray(turn(x.astype(np.float32), positions)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, expected)


def test_odd_heads_and_scalar_positions_are_refused():
    with pytest.raises(LayerConfigError, match="head_dim=7"):
        rotation(np.arange(3), 7)
    with pytest.raises(LayerInputError, match=r"int32\[\]"):
        rotation(np.array(3, np.int32), 8)
    with pytest.raises(LayerInputError, match="heads of at least 8, for 4 angles"):
        rotate(np.ones((1, 3, 1, 6), np.float32), rotation(np.arange(3), 8))


def test_yarn_scales_slow_pairs_as_in_its_paper():
    # Peng et al. 2023, equations 17, 18 and 23: by how often a pair turns within the length.
    base, length, factor, size = 10_000.0, 256.0, 4.0, 16
    rope = Rope(
        base, kind="yarn", factor=factor, length=length, low=1.0, high=32.0, attention_factor=1.0
    )
    plain = base ** (-np.arange(0, size, 2) / size)
    first, last = (
        size * np.log(length / (2 * np.pi * turns)) / (2 * np.log(base)) for turns in (32.0, 1.0)
    )
    first, last = np.floor(first), np.ceil(last)
    share = np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
    expected = plain * (1 - share) + plain / factor * share
    assert 0 <= first < last - 1  # so that some pairs lie between
    cosine, sine = rope.rotation(np.arange(2), size)
    np.testing.assert_allclose(np.arctan2(sine, cosine)[0, 1, 0], expected, rtol=1e-5)
