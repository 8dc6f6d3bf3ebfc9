# SPDX-License-Identifier: Apache-2.0
"""Methods that a class of boxes writes itself are asked, and its attributes are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.core.meta as flax_meta
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import nn
from shardax.partition import (
    PARTITION_NAME,
    AxisMetadata,
    LogicallyPartitioned,
    Partitioned,
    VariableBox,
    add_axis,
    get_partition_spec,
    get_sharding,
    remove_axis,
    to_boxes,
    to_variables,
    unbox,
)

EIGHT = np.arange(8.0, dtype=np.float32)
LAYERS = {PARTITION_NAME: "layers", "unit": "kg"}


# --- boxes whose unbox computes -------------------------------------------------------------------


class Unnamed(AxisMetadata[Any]):
    """A box for which new axes mean nothing."""

    def add_axis(self, index: int, params: Any) -> Any:
        return self

    def remove_axis(self, index: int, params: Any) -> Any:
        return self


@dataclasses.dataclass(frozen=True)
class Quantised(Unnamed):
    """Integers and a scale."""

    value: Any
    scale: float = 0.5

    def unbox(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.value.astype(jnp.float32) * self.scale


@dataclasses.dataclass(frozen=True)
class Requantised(Quantised):
    """The same, where ``replace_boxed`` is the inverse of ``unbox``."""

    def replace_boxed(self, value: Any) -> Requantised:
        return dataclasses.replace(self, value=(value / self.scale).astype(jnp.int8))


@dataclasses.dataclass(frozen=True)
class Grouped(Unnamed):
    """A box with an ``unbox`` of its own that computes nothing."""

    array: Any
    group: int

    def unbox(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.array


class Scaled(Partitioned[Any]):
    """A box of names with a value ten times as large."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        return 10 * super().unbox(apply_constraint)


class FlaxScaled(flax_meta.Partitioned[Any]):
    """The same, of Flax."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        return 10 * super().unbox(apply_constraint)


class FlaxQuantised(flax.struct.PyTreeNode, flax_meta.AxisMetadata[Any]):
    """Integers and a scale, by the classes of Flax."""

    value: Any
    scale: float = flax.struct.field(pytree_node=False, default=0.5)

    def unbox(self) -> Any:
        return self.value.astype(jnp.float32) * self.scale

    def replace_boxed(self, val: Any) -> Any:
        return self.replace(value=val)

    def add_axis(self, index: int, params: Any) -> Any:
        return self

    def remove_axis(self, index: int, params: Any) -> Any:
        return self


INTEGERS = jnp.arange(8, dtype=jnp.int8)
COMPUTING: dict[str, Any] = {
    "Quantised": Quantised(INTEGERS),
    "Requantised": Requantised(INTEGERS),
    "Scaled": Scaled(jnp.asarray(EIGHT / 20), (None,)),
    "FlaxScaled": FlaxScaled(jnp.asarray(EIGHT / 20), (None,)),
    "FlaxQuantised": FlaxQuantised(INTEGERS),
}
computing = pytest.mark.parametrize("box", COMPUTING.values(), ids=list(COMPUTING))


@computing
def test_param_has_the_value_that_its_box_unboxes(box: Any, mesh: Mesh) -> None:
    class Model(sx.Module):
        def __init__(self) -> None:
            self.w = sx.Param(box)

    for param in (sx.Param(box), to_variables({"w": box})["w"], Model().w):
        np.testing.assert_array_equal(param.value, EIGHT / 2)
        np.testing.assert_array_equal(unbox({"w": param})["w"], EIGHT / 2)
        np.testing.assert_array_equal(to_boxes(param).unbox(), EIGHT / 2)
        np.testing.assert_array_equal(to_variables(to_boxes(param)).value, EIGHT / 2)
        sx.shard(param, mesh)
        np.testing.assert_array_equal(param.value, EIGHT / 2)
    param.value = box
    param[...] = box
    np.testing.assert_array_equal(param.value, EIGHT / 2)


@computing
def test_layout_moves_the_stored_arrays_of_a_box(box: Any, mesh: Mesh) -> None:
    tree = {"w": [box]}
    [stored] = jax.tree.leaves(box)
    for placed in (sx.shard(tree, mesh), sx.initialise(lambda: tree, mesh=mesh)):
        assert type(placed["w"][0]) is type(box)
        [array] = jax.tree.leaves(placed)
        assert array.dtype == stored.dtype and array.sharding.mesh == mesh
        np.testing.assert_array_equal(placed["w"][0].unbox(), EIGHT / 2)
    [abstract] = jax.tree.leaves(sx.abstract(tree, mesh))
    assert abstract.dtype == stored.dtype
    renamed = remove_axis(add_axis(tree, 0, LAYERS), 0, LAYERS)
    np.testing.assert_array_equal(renamed["w"][0].unbox(), EIGHT / 2)


def test_param_becomes_the_box_again_where_that_unboxes_its_value() -> None:
    scaled_by_one = Quantised(jnp.asarray(EIGHT), 1.0)
    plain = Grouped(jnp.asarray(EIGHT), 7)
    assert to_boxes(sx.Param(plain)) == plain and to_boxes(sx.Param(scaled_by_one)).unbox()[1] == 1
    for box in (Quantised(INTEGERS), Requantised(INTEGERS)):
        again = to_boxes(sx.Param(box))
        assert type(again) is VariableBox
        assert again.entries.entries["box"] == dataclasses.replace(box, value=None)
    lazy = sx.Param(sx.Init(lambda *args: Quantised(jnp.ones(8, jnp.int8)), (8,)))
    assert type(to_boxes(lazy)) is VariableBox and lazy.is_lazy


# --- attributes of a class of the user's ----------------------------------------------------------


class Units(AxisMetadata[Any]):
    """A box with a unit for each dimension."""

    def __init__(self, value: Any, units: tuple[str | None, ...]) -> None:
        self.value, self.units = value, units

    def add_axis(self, index: int, params: Any) -> Units:
        units = (*self.units[:index], params.get("unit"), *self.units[index:])
        return type(self)(self.value, units)

    def remove_axis(self, index: int, params: Any) -> Units:
        return type(self)(self.value, (*self.units[:index], *self.units[index + 1 :]))


class Split(Units):
    """The same, with the last dimension split, which needs the value."""

    def get_partition_spec(self) -> P:
        return P(*(None,) * (self.value.ndim - 1), "model")


@pytest.mark.parametrize("kind", [Units, Split])
def test_param_keeps_class_and_attributes_of_its_box(kind: Any) -> None:
    box = kind(jnp.ones((2, 4)), ("m", "s"))
    param = sx.Param(box)
    assert param.metadata["box"] == kind(None, ("m", "s"))
    assert to_boxes([param]) == [box] and to_boxes(to_variables([box])) == [box]
    assert to_boxes(sx.clone(param)) == box
    param[...] = jnp.zeros((2, 4))
    assert to_boxes(param) == kind(jnp.zeros((2, 4)), ("m", "s"))
    batch_stat = to_boxes(to_variables(box, sx.BatchStat))
    assert batch_stat.variable_type is sx.BatchStat
    assert batch_stat.entries.entries["box"] == kind(None, ("m", "s"))


def test_box_of_a_variable_is_told_of_mapped_axes() -> None:
    def make(x: Any) -> Any:
        return sx.Param(Units(jnp.ones((2, 4)) * x, ("m", "s")))

    stacked = sx.vmap(make, metadata=LAYERS, out_axes=1)(jnp.arange(3.0))
    assert stacked.axes == (None, "layers", None)
    assert stacked.metadata["box"] == Units(None, ("m", "kg", "s"))
    assert to_boxes(stacked).entries.entries["box"] == Units(None, ("m", "kg", "s"))

    inside: list[Any] = []

    def body(param: Any) -> Any:
        inside.append(to_boxes(param))
        return param

    back = sx.vmap(body, in_axes=1, out_axes=1, metadata=LAYERS)(stacked)
    assert inside[0].units == ("m", "s") and inside[0].value.shape == (2, 4)
    assert back.metadata["box"] == Units(None, ("m", "kg", "s"))
    first = remove_axis(sx.Param(stacked.value[:, 0], axes=(None, None)), 0, {PARTITION_NAME: None})
    assert first.axes == (None,)

    class Layer(sx.Module):
        def __init__(self) -> None:
            self.w = sx.Param(Units(jnp.ones((2, 2)), ("m", "s")))

        def __call__(self, x: Any) -> Any:
            return x @ self.w

    stack = nn.Stack(Layer, 3, axis_name="layers")
    assert stack.stacked.w.metadata["box"] == Units(None, (None, "m", "s"))
    assert stack[0].w.metadata["box"] == Units(None, ("m", "s"))
    unnamed = sx.vmap(make, metadata={"unit": "kg"})(jnp.arange(3.0))
    assert to_boxes(unnamed).units == ("kg", "m", "s")
    for tree in ({"w": stacked}, sx.State.from_flat({("w",): stacked.value})):
        grown = add_axis(tree, 0, LAYERS)
        assert jax.tree.structure(remove_axis(grown, 0, LAYERS)) == jax.tree.structure(tree)
    assert add_axis(stacked, 0, LAYERS).metadata["box"].units == ("kg", "m", "kg", "s")


def test_layout_of_a_variable_asks_its_box_with_the_value(mesh: Mesh) -> None:
    stacked = sx.vmap(lambda x: sx.Param(Split(jnp.ones((2, 4)) * x, ("m", "s"))), metadata=LAYERS)(
        jnp.arange(3.0)
    )
    assert stacked.axes == ("layers", None, "model")
    for param, spec in ((sx.Param(Split(jnp.ones((2, 4)), ("m", "s"))), P(None, "model")),):
        assert sx.shardings(param, mesh) == NamedSharding(mesh, spec)
        assert sx.shardings(sx.state({"w": param}), mesh)["w"].spec == spec
    assert sx.shardings(stacked, mesh).spec == P(None, None, "model")
    pair = sx.vmap(lambda x: sx.Param(Split(jnp.ones(4) * x, ("m",))), metadata=LAYERS)(jnp.ones(2))
    assert sx.shardings(pair, mesh, {"layers": "data"}).spec == P("data", "model")
    stacked.set_metadata(axes=("data", None, None))
    assert sx.partition_specs(stacked) == P("data", None, None)


# --- layouts that a subclass decides --------------------------------------------------------------


class Ours(Partitioned[Any]):
    """A box that is laid out by its method, whatever its names."""

    def get_partition_spec(self) -> P:
        return P("model", None)


class OursLogical(LogicallyPartitioned[Any]):
    """The same, with logical names."""

    def get_partition_spec(self) -> P:
        return P("embed", None)


class Renamed(Partitioned[Any]):
    """A box that calls its names otherwise."""

    def get_partition_spec(self) -> P:
        return P(*({"width": "model", "model": None}.get(name) for name in self.names or ()))


RULES = {"embed": "model"}
DECIDING: dict[str, Any] = {
    "Ours": Ours(jnp.ones((8, 8)), (None, "data")),
    "without names": Ours(jnp.ones((8, 8)), None),
    "OursLogical": OursLogical(jnp.ones((8, 8)), (None, "data")),
    "baked": OursLogical(jnp.ones((8, 8)), (None, "data"), rules=RULES),
    "Renamed": Renamed(jnp.ones((8, 8)), ("width", None)),
}


@pytest.mark.parametrize("box", DECIDING.values(), ids=list(DECIDING))
def test_get_partition_spec_of_a_subclass_lays_out(box: Any, mesh: Mesh, auto_mesh: Mesh) -> None:
    split = NamedSharding(mesh, P("model", None))
    logical = box.get_partition_spec()
    assert get_partition_spec({"w": box}) == {"w": logical}
    assert box.replace_boxed(None).layout()[0] == tuple(logical)
    for tree in (box, sx.Param(box), to_boxes(sx.Param(box)), sx.state({"w": sx.Param(box)})["w"]):
        if not isinstance(tree, jax.Array):
            assert get_sharding([tree], mesh, RULES) == [split]
            assert get_partition_spec([tree]) == [logical]
        assert sx.shard([tree], mesh, RULES) is not None
    assert sx.state({"w": sx.shard(sx.Param(box), mesh, RULES)})["w"].sharding == split
    assert type(to_boxes(sx.Param(box))) is type(box) and to_boxes(sx.Param(box)) == box
    with jax.set_mesh(auto_mesh), sx.axis_rules(RULES):
        value = jax.jit(lambda box: box.unbox())(box)
    assert value.sharding.is_equivalent_to(NamedSharding(auto_mesh, P("model")), 2)
    with sx.axis_rules(RULES):
        assert box.get_sharding(mesh).spec == P("model", None)


def test_axes_set_later_come_before_the_method_of_the_box(mesh: Mesh) -> None:
    param = sx.Param(Ours(jnp.ones((8, 8)), (None, "data")))
    param.set_metadata(axes=("data", None))
    assert sx.shardings(param, mesh).spec == P("data", None)
    assert type(to_boxes(param)) is VariableBox
    assert sx.shardings(to_boxes(param), mesh).spec == P("data", None)


class OnHost(Partitioned[Any]):
    """A box that makes its sharding itself."""

    def get_sharding(self, mesh: Any = None) -> NamedSharding:
        return super().get_sharding(mesh).with_memory_kind("pinned_host")


def test_get_sharding_of_a_subclass_lays_out(mesh: Mesh) -> None:
    box = OnHost(jnp.ones((8, 8)), ("data", None))
    there = NamedSharding(mesh, P("data", None), memory_kind="pinned_host")
    for tree in ({"w": box}, {"w": sx.Param(box)}):
        assert get_sharding(tree, mesh) == sx.shardings(tree, mesh) == {"w": there}
        assert jax.tree.leaves(sx.shard(tree, mesh))[0].sharding == there
    param = sx.Param(box)
    assert sx.shardings(param, mesh, overrides={...: P()}).spec == P()
    param.set_metadata(axes=("model", None))
    assert sx.shardings(param, mesh) == NamedSharding(mesh, P("model", None))
