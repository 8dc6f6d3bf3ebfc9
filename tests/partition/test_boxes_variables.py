# SPDX-License-Identifier: Apache-2.0
"""Variables as boxes, and boxes as Variables: nothing is lost on the way, in either direction."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from tests.strategies import assert_equal_values, variables

import shardax as sx
from shardax.core.errors import BoxError, VariableValueError
from shardax.partition import (
    PARTITION_NAME,
    LogicallyPartitioned,
    Partitioned,
    VariableBox,
    add_axis,
    is_box,
    to_boxes,
    to_variables,
)

MESH = AbstractMesh((2,), ("x",))


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


def test_what_changed_meanwhile_has_changed() -> None:
    variable = to_variables(Partitioned(jnp.ones(2), ("a",), MESH))
    variable[...] = jnp.zeros(2)
    variable.set_metadata(axes=("b",))
    assert to_boxes(variable) == Partitioned(jnp.zeros(2), ("b",), MESH)
    variable.set_metadata(tag="slow")
    assert_same_variable(to_variables(to_boxes(variable)), variable)


def test_the_type_may_be_chosen_and_is_kept() -> None:
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


def test_a_variable_box_goes_through_transforms() -> None:
    box = to_boxes({"w": sx.BatchStat(jnp.ones((2, 3)), axes=("a", "b"), tag="t")})
    result = jax.jit(jax.vmap(lambda tree: jax.tree.map(lambda x: 2 * x, tree)))(box)
    assert_same_variable(
        to_variables(result)["w"], sx.BatchStat(2 * jnp.ones((2, 3)), axes=("a", "b"), tag="t")
    )


def test_one_variable_at_two_places_becomes_two() -> None:
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


def test_what_is_no_variable_cannot_become_one() -> None:
    with pytest.raises(BoxError, match="holds another"):
        to_variables(Partitioned(LogicallyPartitioned(1.0, ()), ()))
    with pytest.raises(VariableValueError, match="text"):
        to_variables(Partitioned("text", ()))
    with pytest.raises(BoxError, match="Linear"):
        to_boxes({"m": sx.nn.Linear(2, 3, rngs=sx.Rngs(0))})
    assert to_boxes({"x": 3, "b": Partitioned(1.0, ())}) == {"x": 3, "b": Partitioned(1.0, ())}
    assert to_variables(["text", None, 3]) == ["text", None, 3]
