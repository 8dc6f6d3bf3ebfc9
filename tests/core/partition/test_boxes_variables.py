# SPDX-License-Identifier: Apache-2.0
"""Variables as boxes, and boxes as Variables: nothing is lost on the way, in either direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PartitionError, VariableValueError
from shardax.partition import (
    PARTITION_NAME,
    LogicallyPartitioned,
    Partitioned,
    VariableBox,
    add_axis,
    get_partition_spec,
    get_sharding,
    is_box,
    logical_to_mesh,
    logical_to_mesh_sharding,
    remove_axis,
    replace_boxed,
    to_boxes,
    to_variables,
    unbox,
)
from tests.advice import run_advice
from tests.strategies import assert_equal_values, variables

MESH = AbstractMesh((2,), ("x",))
MODEL_MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
RULES = sx.Rules({"embed": "data", "mlp": "model"})
ARRAY = np.arange(128.0, dtype=np.float32).reshape(8, 16)


def assert_same_variable(first: Any, second: Any) -> None:
    """Asserts that two Variables differ in identity alone."""
    assert type(first) is type(second) and first is not second
    assert first.axes == second.axes and dict(first.metadata) == dict(second.metadata)
    assert_equal_values(first.value, second.value)


@given(st.lists(variables(), max_size=3))
def test_law_a_variable_comes_back_as_it_was(originals: list[Any]) -> None:
    boxes = to_boxes(originals)
    assert [type(box) for box in boxes] == [VariableBox] * len(originals)
    again = to_variables(boxes)
    for original, copy in zip(originals, again, strict=True):
        assert_same_variable(original, copy)


@st.composite
def named_boxes(draw: st.DrawFn) -> Any:
    """Boxes of mesh axes and of logical names, with and without a mesh and rules."""
    names = draw(st.sampled_from([None, (), ("a",), ("a", None), (("a", "b"), "c", None)]))
    array = np.ones((2,) * len(names or ()), np.float32)
    value = draw(st.sampled_from([array, {"m": array, "v": (array,)}]))
    mesh = draw(st.sampled_from([None, MESH]))
    rules = draw(st.sampled_from([None, {"a": "x"}, sx.Rules([("a", None)], "error")]))
    if draw(st.booleans()):
        return Partitioned(value, names, mesh)
    return LogicallyPartitioned(value, names, mesh, rules)


@given(named_boxes())
def test_law_a_box_comes_back_as_it_was(box: Any) -> None:
    variable = to_variables({"w": box})["w"]
    assert type(variable) is sx.Param and variable.axes == box.names
    assert to_boxes({"w": variable})["w"] == box


def test_to_boxes_takes_over_what_changed_meanwhile() -> None:
    variable = to_variables(Partitioned(jnp.ones(2), ("a",), MESH))
    variable[...] = jnp.zeros(2)
    variable.set_metadata(axes=("b",))
    assert to_boxes(variable) == Partitioned(jnp.zeros(2), ("b",), MESH)
    variable.set_metadata(tag="slow")
    assert_same_variable(to_variables(to_boxes(variable)), variable)


def test_type_may_be_chosen_and_is_kept() -> None:
    variable = to_variables(LogicallyPartitioned(jnp.ones(2), ("a",)), sx.BatchStat)
    assert type(variable) is sx.BatchStat
    box = to_boxes(variable)
    assert box.variable_type is sx.BatchStat
    assert_same_variable(to_variables(box), variable)


def test_lazy_and_abstract_values_stay_so() -> None:
    lazy = sx.Param(sx.Init(jax.nn.initializers.ones, (2,)), axes=("a",))
    assert to_variables(to_boxes(lazy)).is_lazy and lazy.is_lazy
    abstract = sx.Param(jax.ShapeDtypeStruct((2,), jnp.float32), axes=("a",))
    assert to_variables(to_boxes(abstract)).is_abstract


def test_variable_box_goes_through_transforms() -> None:
    box = to_boxes({"w": sx.BatchStat(jnp.ones((2, 3)), axes=("a", "b"), tag="t")})
    result = jax.jit(jax.vmap(lambda tree: jax.tree.map(lambda x: 2 * x, tree)))(box)
    assert_same_variable(
        to_variables(result)["w"], sx.BatchStat(2 * jnp.ones((2, 3)), axes=("a", "b"), tag="t")
    )


def test_to_boxes_makes_two_of_one_variable_at_two_places() -> None:
    shared = sx.Param(jnp.ones(2), axes=("a",))
    first, second = to_variables(to_boxes([shared, shared]))
    assert first is not second and first is not shared


def test_variables_count_as_boxes_inside_programs() -> None:
    @sx.jit
    def grow(variable: Any) -> Any:
        return add_axis(variable.replace(jnp.stack([variable.value] * 3)), 0, {PARTITION_NAME: "n"})

    assert is_box(sx.Param(1.0)) and not is_box(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
    unnamed = grow(sx.Param(jnp.ones(2)))
    assert unnamed.axes is None and unnamed.shape == (3, 2)


def test_to_variables_refuses_what_cannot_become_a_variable() -> None:
    nested = Partitioned(LogicallyPartitioned(1.0, ()), ())
    with pytest.raises(PartitionError, match="holds another") as caught:
        to_variables(nested)
    names = {"sx": sx, "box": nested, "rest": ()}
    assert float(run_advice(caught.value, "sx.Param(sx.unbox(box), axes=...)", names)) == 1.0
    with pytest.raises(VariableValueError, match="text"):
        to_variables(Partitioned("text", ()))
    model = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    with pytest.raises(PartitionError, match="Linear") as caught:
        to_boxes({"m": model})
    names = {"sx": sx, "to_boxes": to_boxes, "model": model}
    taken = run_advice(caught.value, "to_boxes(dict(sx.iter_variables(model)))", names)
    assert taken[("kernel",)].names == ("in", "out")
    assert to_boxes({"x": 3, "b": Partitioned(1.0, ())}) == {"x": 3, "b": Partitioned(1.0, ())}
    assert to_variables(["text", None, 3]) == ["text", None, 3]


# --- Variables made of boxes ----------------------------------------------------------------------


def boxes_for_variables() -> dict[str, Any]:
    """Boxes that turn into Variables."""
    own = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return {
        "mesh": Partitioned(ARRAY, ("data", "model")),
        "logical": LogicallyPartitioned(ARRAY, ("embed", "mlp")),
        "baked": LogicallyPartitioned(ARRAY, ("embed", "mlp"), rules={"mlp": "data"}),
        "over": Partitioned(ARRAY, ("model", None), own),
    }


@pytest.mark.parametrize("rules", [RULES, {"embed": "data", "model": "data", "mlp": None}])
def test_variable_from_box_has_the_same_layout(rules: Any, auto_mesh: Mesh) -> None:
    boxes = boxes_for_variables()
    variables = to_variables(boxes)
    with jax.set_mesh(auto_mesh):
        expected = sx.shardings(boxes, None, rules)
        assert expected["over"].mesh.shape == {"data": 4, "model": 2}
        for same in (variables, to_variables(boxes, sx.BatchStat), to_boxes(variables)):
            assert sx.shardings(same, None, rules) == expected
            assert get_sharding(same, None, rules) == expected
        assert sx.shardings(sx.state(variables), None, rules).flat() == {
            (key,): place for key, place in expected.items()
        }
        sx.shard(variables, None, rules)
    assert {key: v.sharding for key, v in variables.items()} == expected
    assert sx.partition_specs(variables, rules) == sx.partition_specs(boxes, rules)


def test_names_apply_to_each_array_of_the_value(auto_mesh: Mesh) -> None:
    box = Partitioned({"m": ARRAY, "v": 2 * ARRAY}, (None, "model"))
    variable = to_variables(box)
    assert sx.partition_specs(variable) == {"m": P(None, "model"), "v": P(None, "model")}
    assert to_boxes(sx.shard(variable, auto_mesh)) == box
    assert {x.sharding.spec for x in variable.value.values()} == {P(None, "model")}


def test_variable_from_box_unboxes_and_changes_axes_alike(auto_mesh: Mesh) -> None:
    variable = to_variables(Partitioned(jnp.asarray(ARRAY), ("data", None)))
    variable.set_metadata(axes=(None, "model"))
    assert sx.partition_specs(variable) == P(None, "model")
    with jax.set_mesh(auto_mesh):
        value = jax.jit(unbox)(variable)
    assert value.sharding.is_equivalent_to(NamedSharding(auto_mesh, P(None, "model")), 2)
    variable.set_metadata(axes=None)
    assert sx.partition_specs(variable) == P()


def test_module_holds_boxed_variables_and_optimizer_follows(auto_mesh: Mesh) -> None:
    class Model(sx.Module):
        def __init__(self, boxes: Any) -> None:
            self.weights = to_variables(boxes)

    model = Model({"w": Partitioned(jnp.asarray(ARRAY), ("data", "model"))})
    optimizer = sx.train.Optimizer(model, optax.adam(1e-3))
    sx.shard((model, optimizer), auto_mesh, RULES)
    assert model.weights["w"].sharding.spec == P("data", "model")
    assert optimizer.opt_state[0]["mu"]["weights"]["w"].sharding.spec == P("data", "model")


# --- Variables in place of boxes ------------------------------------------------------------------

LAYERS = {PARTITION_NAME: "layers"}
RENAMED: dict[str, Callable[[Any], Any]] = {
    "add_axis": lambda tree: add_axis(tree, -1, LAYERS),
    "remove_axis": lambda tree: remove_axis(add_axis(tree, 1, LAYERS), 1, LAYERS),
    "replace_boxed": lambda tree: replace_boxed(tree, {"w": [jnp.asarray(2 * ARRAY)]}),
    "vmap": lambda tree: sx.vmap(lambda t: t, in_axes=1, out_axes=1)(tree),
    "shard": lambda tree: sx.shard(tree, MODEL_MESH, RULES),
    "unshard": sx.unshard,
    "abstract": lambda tree: sx.abstract(tree, MODEL_MESH, RULES),
}
LAID_OUT: dict[str, Callable[[Any], Any]] = {
    "unbox": lambda tree: jax.tree.map(np.asarray, unbox(tree))["w"][0].tolist(),
    "get_partition_spec": get_partition_spec,
    "logical_to_mesh": lambda tree: logical_to_mesh(tree, RULES),
    "logical_to_mesh_sharding": lambda tree: logical_to_mesh_sharding(tree, MODEL_MESH, RULES),
    "get_sharding": lambda tree: get_sharding(tree, MODEL_MESH, RULES),
    "partition_specs": lambda tree: sx.partition_specs(tree, RULES),
    "shardings": lambda tree: sx.shardings(tree, MODEL_MESH, RULES),
    "check": lambda tree: sx.check(tree, MODEL_MESH, RULES),
    "view": lambda tree: str(sx.view.sharding(tree, MODEL_MESH, RULES)),
    "is_box": lambda tree: is_box(tree["w"][0]),
}


def variable() -> dict[str, Any]:
    """A Variable in a tree."""
    return {"w": [sx.BatchStat(jnp.asarray(ARRAY), axes=("embed", "mlp"), tag="slow")]}


@pytest.mark.parametrize("function", LAID_OUT.values(), ids=LAID_OUT)
def test_variables_stand_for_boxes_when_laid_out(function: Any) -> None:
    assert function(variable()) == function(to_boxes(variable()))


@pytest.mark.parametrize("function", RENAMED.values(), ids=RENAMED)
def test_variables_stand_for_boxes_when_returned(function: Any) -> None:
    result = function(variable())
    assert isinstance(result["w"][0], sx.BatchStat)
    boxes = function(to_boxes(variable()))
    assert to_boxes(result) == boxes
    assert jax.tree.leaves(to_boxes(result)["w"][0].value)[0].sharding == (
        jax.tree.leaves(boxes["w"][0].value)[0].sharding
    )
