# SPDX-License-Identifier: Apache-2.0
"""Boxes as ``flax.core.meta`` has them: a user's classes, parameters of axes, short names, NNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.core.meta as flax_meta
import flax.linen
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PartitionCheckError, PrefixError
from shardax.partition import (
    PARTITION_NAME,
    AxisMetadata,
    LogicallyPartitioned,
    Partitioned,
    add_axis,
    get_partition_spec,
    get_sharding,
    is_axis_metadata,
    map_axis_meta,
    remove_axis,
    replace_boxed,
    to_boxes,
    to_variables,
    unbox,
)

LAYERS = {PARTITION_NAME: "layers", "group": 7}


@dataclasses.dataclass(frozen=True)
class Grouped(AxisMetadata[Any]):
    """A box whose value is called otherwise, and whose ``unbox`` takes no argument."""

    array: Any
    group: int = 0

    def unbox(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.array

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Grouped:
        return dataclasses.replace(self, group=self.group + params["group"])

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Grouped:
        return dataclasses.replace(self, group=self.group - params["group"])

    def get_partition_spec(self) -> P:
        return P("data")


class Plain(AxisMetadata[Any]):
    """A box that is no dataclass."""

    def __init__(self, value: Any, note: str) -> None:
        self.value, self.note = value, note

    def unbox(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * self.value

    def add_axis(self, index: int, params: Any) -> Plain:
        return self

    def remove_axis(self, index: int, params: Any) -> Plain:
        return self


def test_custom_box_needs_no_unbox_argument_or_value(mesh: Mesh) -> None:
    tree = {"x": Grouped(jnp.ones((8, 3)), 1), "p": [Plain(jnp.ones(2), "n")]}
    assert jax.tree.map(jnp.shape, tree) == {"x": Grouped((8, 3), 1), "p": [Plain((2,), "n")]}
    values = unbox(tree)
    assert values["x"].shape == (8, 3) and values["p"][0].tolist() == [2.0, 2.0]
    assert replace_boxed(tree, {"x": 3, "p": [4]}) == {"x": Grouped(3, 1), "p": [Plain(4, "n")]}
    assert get_partition_spec(tree) == {"x": P("data"), "p": [P()]}
    placed = sx.shard(tree, mesh)
    assert placed["x"].array.sharding == NamedSharding(mesh, P("data"))
    assert jax.jit(lambda tree: tree)(placed)["x"].group == 1
    with jax.set_mesh(mesh):
        assert jax.jit(lambda tree: unbox(tree)["p"][0])(placed).tolist() == [2.0, 2.0]


def test_further_entries_of_metadata_reach_the_boxes(auto_mesh: Mesh) -> None:
    make = lambda x: {"g": Grouped(x, 1), "p": Partitioned(x, ())}  # noqa: E731
    stacked = sx.vmap(make, metadata=LAYERS)(jnp.arange(3.0))
    assert (stacked["g"].group, stacked["p"].names) == (8, ("layers",))
    seen = []

    def body(carry: Any, boxes: Any) -> Any:
        seen.append((boxes["g"].group, boxes["p"].names))
        return carry, boxes

    _, out = sx.scan(body, metadata=LAYERS)(0.0, stacked)
    assert seen[0] == (1, ()) and out["g"].group == 8 and out["p"].names == ("layers",)
    assert add_axis(remove_axis(stacked, 0, LAYERS), 0, LAYERS) == stacked
    assert sx.vmap(lambda x: Grouped(x), metadata={"group": 2})(jnp.arange(3.0)).group == 2
    with pytest.raises(PrefixError, match="partition_nam"):
        sx.vmap(make, metadata={"partition_nam": "layers"})(jnp.arange(3.0))


def test_boxes_are_found_and_mapped(auto_mesh: Mesh) -> None:
    tree = {"w": Partitioned(jnp.ones(2), ("model",)), "v": sx.Param(jnp.ones(2), axes=("a",))}
    assert [is_axis_metadata(each) for each in (tree["w"], tree["v"], 3)] == [True, False, False]
    renamed = map_axis_meta(lambda box: box.replace(names=("data",)), {**tree, "n": 3})
    assert renamed["w"] == Partitioned(jnp.ones(2), ("data",)) and renamed["n"] == 3
    assert renamed["v"].axes == ("data",) and tree["v"].axes == ("a",)
    assert map_axis_meta(lambda box: box.names, [tree]) == [{"w": ("model",), "v": ("a",)}]
    logical = LogicallyPartitioned(1, ("a",), rules={"a": "data"})
    assert logical.replace(names=("b",)) == LogicallyPartitioned(1, ("b",), rules={"a": "data"})
    assert to_boxes(tree["v"]).replace(names=("b",)).variable_type is sx.Param


def test_conversions_to_and_from_nnx_match_flax() -> None:
    array = jnp.ones((2, 3))
    ours, theirs = Partitioned(array, ("a", None)), flax_meta.Partitioned(array, ("a", None))
    assert ours.to_nnx_metadata() == theirs.to_nnx_metadata()
    assert nnx.Param(**ours.to_nnx_metadata(), eager_sharding=False).out_sharding == ("a", None)
    rules = (("a", "data"),)
    logical = LogicallyPartitioned(array, ("a", None), rules=rules)
    flax_logical = flax.linen.LogicallyPartitioned(array, ("a", None), rules=rules)
    assert logical.to_nnx_metadata() == flax_logical.to_nnx_metadata()
    for box in (ours, logical):
        assert type(box).from_nnx_metadata({**box.to_nnx_metadata(), "tag": "slow"}) == box
        for option in ("sharding", "sharding_names"):
            named = {"value": array, option: ("a", None)}
            assert type(box).from_nnx_metadata(named) == type(box)(array, ("a", None))


def test_names_shorter_than_rank_leave_dimensions_whole(mesh: Mesh) -> None:
    def tree(kind: Any) -> Any:
        several = {"a": jnp.ones((4, 3)), "b": jnp.ones(4)}
        return {"w": kind(jnp.ones((4, 3)), ("data",)), "several": kind(several, ("data",))}

    ours, theirs = tree(Partitioned), tree(flax_meta.Partitioned)
    assert get_partition_spec(ours) == flax_meta.get_partition_spec(theirs)
    assert get_sharding(ours, mesh) == flax_meta.get_sharding(theirs, mesh)
    placed = sx.shard(ours, mesh)
    split = NamedSharding(mesh, P("data"))
    assert all(array.sharding == split for array in jax.tree.leaves(placed))
    assert Partitioned(jnp.ones((4, 3)), ("data",)).get_sharding(mesh) == split
    with jax.set_mesh(mesh):
        values = jax.jit(unbox)(placed)
    assert values["w"].sharding.is_equivalent_to(split, 2)
    assert values["several"]["b"].sharding.is_equivalent_to(split, 1)
    with pytest.raises(PartitionCheckError, match=r"\.w: 2 axis names"):
        get_sharding({"w": Partitioned(jnp.ones(4), ("data", "model"))}, mesh)


def test_box_of_arrays_of_several_ranks_shares_spec(mesh: Mesh) -> None:
    arrays = {"a": jnp.ones((4, 3)), "b": jnp.ones(4)}
    for names in (("data", None), ("data", "model")):
        box, theirs = Partitioned(arrays, names), flax_meta.Partitioned(arrays, names)
        assert get_partition_spec([box]) == flax_meta.get_partition_spec([theirs])
    assert get_sharding([Partitioned(arrays, ("data", None))], mesh)[0].spec == P("data")
    with pytest.raises(PartitionCheckError, match=r"\[0\]\.b: 2 axis names"):
        get_sharding([Partitioned(arrays, ("data", "model"))], mesh)


def test_optimizer_states_keep_dimensions_with_short_names(mesh: Mesh) -> None:
    params: Any = {"w": Partitioned(jnp.ones((4, 8)), ("data",))}
    state = optax.adam(1e-3).init(params)
    places = get_sharding((params, state), mesh)
    assert places[1][0].mu == places[0] == {"w": NamedSharding(mesh, P("data"))}


def test_added_axes_with_short_names_get_their_position(auto_mesh: Mesh) -> None:
    x = jnp.ones((3, 4, 5))
    for axis, names in ((0, ("layers", "data")), (1, ("data", "layers"))):
        stacked = sx.vmap(lambda x: Partitioned(x, ("data",)), out_axes=axis, metadata=LAYERS)(x)
        assert stacked.names == names
    for axis in (2, -1):
        stacked = sx.vmap(lambda x: Partitioned(x, ("data",)), out_axes=axis, metadata=LAYERS)(x)
        assert stacked.names == ("data", None, "layers") and stacked.value.shape == (4, 5, 3)
        assert add_axis(Partitioned(stacked.value, ("data",)), 2, LAYERS).names == stacked.names
    short = Partitioned(jnp.ones((4, 5, 3)), ("data",))
    seen = []
    sx.vmap(lambda box: seen.append((box.names, box.value.shape)), in_axes=-1, out_axes=None)(short)
    assert seen == [(("data",), (4, 5))]


def test_variable_of_short_named_box_is_laid_out(mesh: Mesh) -> None:
    box = Partitioned(jnp.ones((4, 3)), ("data",))
    variable = to_variables(box)
    assert variable.axes == ("data", None) and to_boxes(variable) == box
    assert sx.shard(variable, mesh).sharding == NamedSharding(mesh, P("data", None))
