# SPDX-License-Identifier: Apache-2.0
"""Boxes of other libraries, and classes of boxes that other libraries register."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import partition as part
from shardax.errors import MetadataError
from shardax.partition import PARTITION_NAME, AxisMetadata
from tests.advice import run_advice
from tests.core.partition.own_boxes import Split

ARRAY = np.arange(128.0, dtype=np.float32).reshape(8, 16)
RULES = {"embed": "data", "mlp": "model"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Foreign:
    """A box with the methods of Flax's ``Partitioned``, and no class of shardax."""

    value: Any
    names: Any = dataclasses.field(metadata={"static": True})
    mesh: Any = dataclasses.field(default=None, metadata={"static": True})

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The value; Flax's fails over Explicit axes."""
        assert not apply_constraint
        return self.value

    def replace_boxed(self, value: Any) -> Any:
        """A box of another value."""
        return dataclasses.replace(self, value=value)

    def replace(self, **changes: Any) -> Any:
        """A box with other fields."""
        return dataclasses.replace(self, **changes)

    def add_axis(self, index: int, params: Any) -> Any:
        """Counts from the end of the old names, as Flax's does."""
        names = list(self.names)
        names.insert(index, params[PARTITION_NAME])
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: Any) -> Any:
        """Removes the name of a dimension."""
        names = list(self.names)
        assert names.pop(index) == params[PARTITION_NAME]
        return self.replace(names=tuple(names))

    def get_partition_spec(self) -> P:
        """The names."""
        return P(*self.names)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForeignLogical(Foreign):
    """The same of logical names."""

    rules: Any = dataclasses.field(default=None, metadata={"static": True})


class Unregistered:
    """A box that is no pytree node and knows its spec alone."""

    def __init__(self, value: Any) -> None:
        self.content = value

    def unbox(self) -> Any:
        """The value."""
        return self.content

    def replace_boxed(self, value: Any) -> Unregistered:
        """A box of another value."""
        return Unregistered(value)

    def get_partition_spec(self) -> P:
        """The last dimension is split."""
        return P(None, "model")


def _flax(kind: str) -> Any:
    from flax import linen as meta

    return getattr(meta, kind)


@pytest.fixture(params=["equivalent", "flax"])
def kinds(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Classes of boxes, of mesh axes and of logical names."""
    if request.param == "equivalent":
        return Foreign, ForeignLogical
    return _flax("Partitioned"), _flax("LogicallyPartitioned")


def test_foreign_boxes_are_laid_out(kinds: Any, mesh: Mesh) -> None:
    array = jnp.asarray(ARRAY)
    tree = {
        "m": kinds[0](array, (None, "model")),
        "l": [kinds[1](array, ("embed", "mlp"))],
        "own": kinds[1](array, ("embed", None), rules=(("embed", "model"),)),
        "n": 3,
    }
    specs = {"m": P(None, "model"), "l": [P("data", "model")], "own": P("model", None), "n": None}
    logical = {**specs, "l": [P("embed", "mlp")], "own": P("embed", None)}
    assert part.get_partition_spec(tree) == logical
    assert sx.partition_specs(tree, RULES) == specs
    places = {"m": specs["m"], "l": specs["l"][0], "own": specs["own"]}
    placed = sx.shard(tree, mesh, RULES)
    boxes = {"m": placed["m"], "l": placed["l"][0], "own": placed["own"]}
    for name, box in boxes.items():
        assert type(box) is type(tree["l"][0] if name == "l" else tree[name])
        assert box.value.sharding.is_equivalent_to(NamedSharding(mesh, places[name]), 2)
        assert np.array_equal(box.value, ARRAY)
    assert not [d for d in sx.check(placed, mesh, RULES) if d.severity != "info"]
    assert part.is_axis_metadata(placed["m"]) and part.is_box(placed["m"])

    def initial(key: Any) -> Any:
        return {"w": kinds[1](jax.random.normal(key, (8, 16)), ("embed", "mlp"))}

    made = sx.initialise(initial, jax.random.key(0), mesh=mesh, rules=RULES)["w"]
    assert type(made) is kinds[1] and made.value.sharding.spec == P("data", "model")


def test_foreign_boxes_find_wrong_names(kinds: Any, mesh: Mesh) -> None:
    tree = {"w": kinds[0](jnp.ones((8, 15)), (None, "model"))}
    assert [d.code for d in sx.check(tree, mesh)] == ["indivisible"]
    with pytest.raises(sx.errors.PartitionCheckError, match=r"w: .*15"):
        sx.shard(tree, mesh)
    with pytest.raises(sx.errors.PartitionError, match="embed"):
        sx.shard({"w": kinds[1](jnp.ones((8, 16)), ("embed", "mlp"))}, mesh)


def test_foreign_boxes_are_unboxed_and_refilled(kinds: Any, mesh: Mesh) -> None:
    box = kinds[1](jnp.asarray(ARRAY), ("embed", "mlp"))
    tree = {"w": [box]}
    assert part.unbox(tree, apply_constraint=False)["w"][0] is box.value
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        assert jax.jit(part.unbox)(tree)["w"][0].sharding.spec == P("data", "model")
    again = part.replace_boxed(tree, {"w": [jnp.zeros((8, 16))]})["w"][0]
    assert type(again) is kinds[1] and again.names == ("embed", "mlp") and not again.value.any()
    stacked = {"w": kinds[1](jnp.ones((3, 8, 16)), ("embed", "mlp"))}
    for axis, names in ((0, ("L", "embed", "mlp")), (-1, ("embed", "mlp", "L"))):
        named = part.add_axis(stacked, axis, {PARTITION_NAME: "L"})
        assert type(named["w"]) is kinds[1] and named["w"].names == names
        assert part.remove_axis(named, axis, {PARTITION_NAME: "L"})["w"].names == ("embed", "mlp")
    variable = part.to_variables(tree)["w"][0]
    assert variable.axes == ("embed", "mlp") and np.array_equal(variable.value, ARRAY)


@pytest.mark.parametrize("axis", [0, -1, -2])
def test_vmap_names_foreign_boxes_in_place(kinds: Any, axis: int) -> None:
    def make(x: Any) -> Any:
        return kinds[0](jnp.ones((2, 3)) * x, ("a", "b"))

    box = sx.vmap(make, out_axes=axis, metadata={PARTITION_NAME: "L"})(jnp.arange(5.0))
    assert dict(zip(box.names, box.value.shape, strict=True)) == {"a": 2, "b": 3, "L": 5}


def test_unregistered_foreign_boxes_are_laid_out(mesh: Mesh) -> None:
    tree = {"w": Unregistered(jnp.asarray(ARRAY))}
    placed = sx.shard(tree, mesh)["w"]
    assert type(placed) is Unregistered and placed.content.sharding.spec == P(None, "model")
    assert np.array_equal(part.unbox({"w": placed})["w"], ARRAY)


# --- classes of boxes that are registered by others ----------------------------------------------


class Noted(AxisMetadata[Any]):
    """A value and a note."""

    def __init__(self, value: Any, note: int) -> None:
        self.value, self.note = value, note

    def unbox(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The value."""
        return self.value

    def replace_boxed(self, value: Any) -> Any:
        """A box of another value."""
        return type(self)(value, self.note)

    def add_axis(self, index: int, params: Any) -> Any:
        """No names."""
        return self

    def remove_axis(self, index: int, params: Any) -> Any:
        """No names."""
        return self


def _by_node_class() -> Any:
    @jax.tree_util.register_pytree_node_class
    class Box(Noted):
        def tree_flatten(self) -> Any:
            return (self.value,), self.note

        @classmethod
        def tree_unflatten(cls, note: Any, children: Any) -> Any:
            return cls(children[0], note)

    return Box


def _by_dataclass() -> Any:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box(Noted):
        value: Any
        note: int = dataclasses.field(metadata={"static": True})

    return Box


def _by_hand() -> Any:
    class Box(Noted, register=False):
        pass

    jax.tree_util.register_pytree_node(
        Box, lambda box: ((box.value,), box.note), lambda note, children: Box(*children, note)
    )
    return Box


def _by_flax() -> Any:
    from flax import struct

    class Box(struct.PyTreeNode, Noted):
        value: Any
        note: int = struct.field(pytree_node=False)

        def replace_boxed(self, value: Any) -> Any:
            return self.replace(value=value)

    return Box


@pytest.mark.parametrize(
    "define", [lambda: Noted, _by_node_class, _by_dataclass, _by_hand, _by_flax]
)
def test_classes_of_boxes_are_registered_once(define: Any, mesh: Mesh) -> None:
    kind = define()
    box = kind(jnp.ones(2), 1)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))({"q": box})["q"]
    assert type(doubled) is kind and doubled.note == 1
    assert sx.unbox({"q": doubled})["q"].tolist() == [2.0, 2.0]
    placed = sx.shard({"q": box}, mesh)["q"]
    assert type(placed) is kind and placed.note == 1 and placed.value.sharding.spec == P()


def test_boxes_without_constructor_take_no_arguments() -> None:
    class Empty(AxisMetadata[Any]):
        add_axis = remove_axis = Noted.add_axis

    with pytest.raises(TypeError, match="argument"):
        Empty(*[1])


# --- Variables of boxes ---------------------------------------------------------------------------


def test_param_of_a_box_unwraps(kinds: Any, mesh: Mesh) -> None:
    array = jnp.asarray(ARRAY)
    for box in (
        part.Partitioned(array, (None, "model")),
        kinds[0](array, (None, "model")),
        kinds[1](array, (None, "mlp"), rules=(("mlp", "model"),)),
    ):
        param = sx.Param(box, tag="slow")
        assert list(param.axes or ()) == list(box.names or ()) and param.shape == (8, 16)
        assert np.array_equal(jnp.ones(8) @ param, ARRAY.sum(0))
        sx.shard(param, mesh)
        assert param.value.sharding.spec == P(None, "model") and param.metadata["tag"] == "slow"
    param.value = kinds[0](array + 1, (None, "mlp"))
    param[...] = kinds[0](array + 2, (None, "mlp"))
    assert np.array_equal(param.value, ARRAY + 2)
    with pytest.raises(MetadataError, match="the names"):
        param.value = kinds[0](array, ("data", None))
    with pytest.raises(MetadataError, match="the names"):
        sx.Param(box, axes=("embed", "mlp"))
    assert part.to_boxes(sx.Param(part.Partitioned(array, (None, "model")))) == part.Partitioned(
        array, (None, "model")
    )


def test_param_of_an_own_box_is_laid_out(mesh: Mesh) -> None:
    param = sx.Param(Split(jnp.asarray(ARRAY), "model"))
    assert param.axes == ("model", None)
    sx.shard(param, mesh)
    assert param.value.sharding.spec == P("model", None)
    assert np.array_equal(param.value, ARRAY)


def test_names_beyond_the_dimensions_are_left_out() -> None:
    assert sx.Param(part.Partitioned(jnp.ones(8), ("embed", None, None))).axes == ("embed",)


def test_param_of_a_box_trains() -> None:
    init = part.with_partitioning(jax.nn.initializers.ones, (None, "model"))

    class Model(sx.Module):
        def __init__(self) -> None:
            self.w = sx.Param(init(jax.random.key(0), (3, 2)))

        def __call__(self, x: Any) -> Any:
            return x @ self.w

    model = Model()
    gradients = sx.grad(lambda model: model(jnp.arange(3.0)).sum())(model)
    assert gradients["w"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_param_of_nested_boxes_is_refused() -> None:
    nested = part.Partitioned(part.Partitioned(jnp.ones(2), (None,)), (None,))
    with pytest.raises(sx.errors.PartitionError, match="another box") as caught:
        sx.Param(nested)
    names = {"sx": sx, "box": nested, "rest": ("model",)}
    param = run_advice(caught.value, "sx.Param(sx.unbox(box), axes=...)", names)
    assert param.axes == ("model",) and param.value.tolist() == [1, 1]
    assert run_advice(caught.value, "sx.unbox(box)", names).tolist() == [1, 1]
