# SPDX-License-Identifier: Apache-2.0
"""Dropout: what it drops, when, and where its randomness comes from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError, ModuleError
from tests.advice import run_advice

ONES = np.ones((200, 100), np.float32)


@sx.jit
def call(layer: Any, x: Any) -> Any:
    return layer(x)


def test_rate_is_dropped_and_the_rest_scaled():
    dropped = call(sx.nn.Dropout(0.25, rngs=sx.Rngs(0)), ONES)
    values, counts = np.unique(np.asarray(dropped), return_counts=True)
    np.testing.assert_allclose(values, [0, 4 / 3], rtol=1e-6)
    assert counts[0] / ONES.size == pytest.approx(0.25, abs=0.01)


def test_calls_draw_anew_and_equal_seeds_equally():
    one, other = (sx.nn.Dropout(0.5, rngs=sx.Rngs(dropout=3)) for _ in range(2))
    first, second = call(one, ONES), call(one, ONES)
    assert (np.asarray(first) != np.asarray(second)).any()
    np.testing.assert_array_equal(first, other(ONES))  # compiled or not
    np.testing.assert_array_equal(second, call(other, ONES))


def test_eval_mode_argument_and_rate_zero_disable_dropout():
    dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    x = jnp.asarray(ONES)
    assert dropout(x, deterministic=True) is x
    dropout.eval()
    assert dropout(x) is x
    assert (np.asarray(dropout(x, deterministic=False)) == 0).any()
    dropout.train()
    assert (np.asarray(call(dropout, x)) == 0).any()
    assert sx.nn.Dropout(0.0)(x) is x


def test_rate_one_drops_everything_with_zero_gradient():
    value_and_grad = jax.value_and_grad(lambda x: sx.nn.Dropout(1.0)(x).sum())
    value, gradient = jax.jit(value_and_grad)(ONES)
    assert value == 0
    assert not np.asarray(gradient).any()


def test_broadcast_dimensions_are_dropped_together():
    layer = sx.nn.Dropout(0.5, broadcast_dims=(-1,), rngs=sx.Rngs(0))
    dropped = np.asarray(call(layer, ONES))
    assert (dropped == dropped[:, :1]).all()
    assert set(np.unique(dropped)) == {0.0, 2.0}


def test_layers_share_one_stream_with_different_masks():
    rngs = sx.Rngs(params=0, dropout=1)
    model = sx.nn.Sequential(sx.nn.Dropout(0.5, rngs=rngs), sx.nn.Dropout(0.5, rngs=rngs))
    assert model.layers[0].stream is model.layers[1].stream
    assert [path for path, _ in sx.iter_variables(model)] == [
        ("layers", 0, "stream", "key"),
        ("layers", 0, "stream", "count"),
    ]
    kept = np.asarray(call(model, ONES)) == 4  # by both; by equal masks it would be half
    assert kept.mean() == pytest.approx(0.25, abs=0.01)
    assert int(model.layers[0].stream.count) == 2


def test_stream_given_to_the_call_is_used_instead():
    dropout, rngs = sx.nn.Dropout(0.5, rngs=sx.Rngs(0)), sx.Rngs(dropout=7)
    expected = call(sx.nn.Dropout(0.5, rngs=sx.Rngs(dropout=7)), ONES)
    np.testing.assert_array_equal(dropout(ONES, rngs=rngs), expected)
    assert (int(dropout.stream.count), int(rngs.dropout.count)) == (0, 1)


def test_dtype_is_kept():
    layer = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    dropped = call(layer, ONES.astype(jnp.bfloat16))
    assert dropped.dtype == jnp.bfloat16
    assert set(np.unique(np.asarray(dropped, np.float32))) == {0.0, 2.0}


def test_split_input_gives_numbers_of_the_whole(mesh: Mesh):
    x = jax.device_put(ONES, NamedSharding(mesh, PartitionSpec("data", "model")))
    with jax.set_mesh(mesh):
        found = call(sx.nn.Dropout(0.5, rngs=sx.Rngs(0)), x)
    np.testing.assert_array_equal(found, call(sx.nn.Dropout(0.5, rngs=sx.Rngs(0)), ONES))


def test_wrong_rates_missing_streams_and_dimensions_are_refused():
    with pytest.raises(LayerConfigError, match=r"rate=1\.5"):
        sx.nn.Dropout(1.5)
    with pytest.raises(ModuleError, match="made without rngs") as caught:
        sx.nn.Dropout(0.5)(ONES)
    names = {"sx": sx, "Dropout": sx.nn.Dropout, "rngs": sx.Rngs(dropout=0), "x": ONES}
    dropout = run_advice(caught.value, "Dropout(0.5, rngs=sx.Rngs(dropout=0))", names)
    names["dropout"] = sx.nn.Dropout(0.5)
    np.testing.assert_array_equal(
        run_advice(caught.value, "dropout(x, rngs=rngs)", names), dropout(ONES)
    )
    with pytest.raises(LayerInputError, match="no dimension 2"):
        sx.nn.Dropout(0.5, broadcast_dims=(2,), rngs=sx.Rngs(0))(ONES)
