# SPDX-License-Identifier: Apache-2.0
"""Figures: what treescope learns of an array that it draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.view.figures import ADAPTER, ArrayFigure, as_figure, sharding_part

nda = treescope.ndarray_adapters


@pytest.mark.parametrize(
    ("array", "summary"),
    [
        (jnp.float32(1.5), "float32[] 1.5"),
        (jnp.array([[7]]), "int32[1, 1] 7"),
        (np.array([True, False, True]), "bool[3] 2 of 3 true"),
        (jnp.array([0, 4], jnp.bfloat16), "bfloat16[2] mean 2, std 2, from 0 to 4"),
        (
            jnp.array([1.0, jnp.nan, -jnp.inf]),
            "float32[3] mean 1, std 0, from 1 to 1, 2 not finite",
        ),
        (jnp.full(2, jnp.nan), "float32[2], 2 not finite"),
        (jnp.zeros((0, 3)), "float32[0, 3]"),
        (jnp.zeros(2, jnp.complex64), "complex64[2]"),
        (jax.random.key(0), "key<fry>[]"),
        (jnp.zeros(2**20 + 1, jnp.int8), "int8[1048577]"),
    ],
)
def test_summary_says_where_numbers_lie(array: Any, summary: str) -> None:
    assert as_figure(array).summary() == summary


def test_summary_says_why_there_are_no_numbers() -> None:
    gone = jnp.ones(2)
    gone.delete()
    assert as_figure(gone).summary() == "float32[2], deleted"
    assert not ADAPTER.should_autovisualize(as_figure(gone))
    seen: list[str] = []
    jax.jit(lambda x: seen.append(as_figure(x).summary()))(jnp.ones(2))
    assert seen == ["float32[2], traced"]


def test_dimensions_of_a_variable_have_names_and_positions() -> None:
    figure = ArrayFigure(jnp.zeros((2, 3)), ("embed", None))
    assert ADAPTER.get_axis_info_for_array_data(figure) == (
        nda.NamedPositionalAxisInfo(0, "embed", 2),
        nda.PositionalAxisInfo(1, 3),
    )


def test_dimensions_of_a_named_array_go_by_name() -> None:
    array = sx.named.zeros({"batch": 2, "embed": 3}).untag("batch")
    infos = ADAPTER.get_axis_info_for_array_data(array)
    assert set(infos) == {nda.PositionalAxisInfo(0, 2), nda.NamedPositionlessAxisInfo("embed", 3)}
    assert treescope.render_array(array, rows=["embed"]) is not None
    whole = sx.named.zeros({"batch": 2, "embed": 3})
    assert as_figure(whole).summary() == (
        "NamedArray float32[batch: 2, embed: 3] mean 0, std 0, from 0 to 0"
    )


@pytest.mark.parametrize("limit", [10**6, 4])
def test_array_figure_reads_only_the_ends_of_long_dimensions(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardax.view.figures._MOST_READ", limit)
    array = jnp.arange(30.0).reshape(3, 10)
    figure = ArrayFigure(array, None)
    data, counts = ADAPTER.get_array_data_with_truncation(figure, None, (None, 2))
    assert data[:, [0, 1, 3, 4]].tolist() == np.asarray(array)[:, [0, 1, 8, 9]].tolist()
    assert counts.tolist() == [[True, True, False, True, True]] * 3
    whole, all_count = ADAPTER.get_array_data_with_truncation(figure, None, (None, None))
    assert whole.tolist() == array.tolist() and all_count.all()
    _, masked = ADAPTER.get_array_data_with_truncation(
        figure, array > 0, edge_items_per_axis=(1, None)
    )
    assert masked.tolist() == [[False] + [True] * 9, [False] * 10, [True] * 10]


def test_array_sharding_is_described_and_drawn(auto_mesh: Mesh) -> None:
    place = NamedSharding(auto_mesh, PartitionSpec("data", "model"))
    array = jax.device_put(np.zeros((4, 8)), place)
    planned = jax.ShapeDtypeStruct(
        (4, 8), np.float32, sharding=NamedSharding(auto_mesh.abstract_mesh, place.spec)
    )
    real, plan = (ADAPTER.get_sharding_info_for_array_data(as_figure(a)) for a in (array, planned))
    assert real.shard_shape == plan.shard_shape == (2, 2)
    assert real.device_index_to_shard_slices == plan.device_index_to_shard_slices
    assert real.device_index_to_shard_slices[5] == (slice(2, 4), slice(2, 4))
    assert (real.device_type, plan.device_type) == ("CPU", "device")
    assert (real.fully_replicated, plan.fully_replicated) == (False, False)
    for value in (array, planned):
        assert "arrayviz" in repr(type(sharding_part(value, ("a", "b")))).lower()
        assert sharding_part(value, ("a", "a")) is not None  # one name twice: by position


def test_sharding_part_is_none_for_what_treescope_cannot_draw() -> None:
    mesh = AbstractMesh((2,), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    for shape in ((), (0, 2)):
        struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=whole)
        assert sharding_part(struct, None) is None
    assert sharding_part(jax.ShapeDtypeStruct((2,), np.float32), None) is None
