# SPDX-License-Identifier: Apache-2.0
"""Dropout: what it drops, when, and where its randomness comes from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError, MissingRngsError

ONES = np.ones((200, 100), np.float32)


def test_elements_are_zero_at_the_rate_and_otherwise_scaled_so_that_the_mean_stays():
    dropped = sx.nn.Dropout(0.25, rngs=sx.Rngs(0))(ONES)
    values, counts = np.unique(np.asarray(dropped), return_counts=True)
    np.testing.assert_allclose(values, [0, 4 / 3], rtol=1e-6)
    assert counts[0] / ONES.size == pytest.approx(0.25, abs=0.01)


def test_each_call_draws_anew_and_equal_seeds_draw_equally():
    one, other = (sx.nn.Dropout(0.5, rngs=sx.Rngs(dropout=3)) for _ in range(2))
    first, second = one(ONES), one(ONES)
    assert (first != second).any()
    np.testing.assert_array_equal(first, other(ONES))
    np.testing.assert_array_equal(second, other(ONES))


def test_evaluation_mode_an_argument_and_rate_zero_switch_it_off():
    dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    x = jnp.asarray(ONES)
    assert dropout(x, deterministic=True) is x
    dropout.eval()
    assert dropout(x) is x
    assert (dropout(x, deterministic=False) == 0).any()
    dropout.train()
    assert (dropout(x) == 0).any()
    assert sx.nn.Dropout(0.0)(x) is x


def test_rate_one_drops_everything_without_dividing_by_zero():
    gradient = jax.grad(lambda x: sx.nn.Dropout(1.0)(x).sum())(ONES)
    assert not sx.nn.Dropout(1.0)(ONES).any()
    assert not gradient.any()


def test_broadcast_dimensions_are_dropped_together():
    dropped = np.asarray(sx.nn.Dropout(0.5, broadcast_dims=(-1,), rngs=sx.Rngs(0))(ONES))
    assert (dropped == dropped[:, :1]).all()
    assert set(np.unique(dropped)) == {0.0, 2.0}


def test_layers_of_one_rngs_share_one_stream_and_draw_different_masks():
    rngs = sx.Rngs(params=0, dropout=1)
    model = sx.nn.Sequential(sx.nn.Dropout(0.5, rngs=rngs), sx.nn.Dropout(0.5, rngs=rngs))
    assert model.layers[0].stream is model.layers[1].stream
    assert [path for path, _ in sx.iter_variables(model)] == [
        ("layers", 0, "stream", "key"),
        ("layers", 0, "stream", "count"),
    ]
    kept = np.asarray(sx.jit(model)(ONES)) == 4  # by both; by equal masks it would be half
    assert kept.mean() == pytest.approx(0.25, abs=0.01)
    assert int(model.layers[0].stream.count) == 2


def test_a_stream_given_to_the_call_is_used_instead():
    dropout, rngs = sx.nn.Dropout(0.5, rngs=sx.Rngs(0)), sx.Rngs(dropout=7)
    expected = sx.nn.Dropout(0.5, rngs=sx.Rngs(dropout=7))(ONES)
    np.testing.assert_array_equal(dropout(ONES, rngs=rngs), expected)
    assert (int(dropout.stream.count), int(rngs.dropout.count)) == (0, 1)


def test_dtype_is_kept():
    assert sx.nn.Dropout(0.5, rngs=sx.Rngs(0))(ONES.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_split_input_gives_the_numbers_of_the_whole_one(mesh: Mesh):
    x = jax.device_put(ONES, NamedSharding(mesh, PartitionSpec("data", "model")))
    with jax.set_mesh(mesh):
        found = sx.jit(sx.nn.Dropout(0.5, rngs=sx.Rngs(0)))(x)
    np.testing.assert_array_equal(found, sx.nn.Dropout(0.5, rngs=sx.Rngs(0))(ONES))


def test_dropout_refuses_what_is_no_rate_a_missing_stream_and_missing_dimensions():
    with pytest.raises(LayerConfigError, match=r"rate=1\.5"):
        sx.nn.Dropout(1.5)
    with pytest.raises(MissingRngsError, match="made without rngs"):
        sx.nn.Dropout(0.5)(ONES)
    with pytest.raises(LayerInputError, match="no dimension 2"):
        sx.nn.Dropout(0.5, broadcast_dims=(2,), rngs=sx.Rngs(0))(ONES)
