# SPDX-License-Identifier: Apache-2.0
"""Bad boxes: whatever names, rules and values, our errors with paths, and nothing half done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PartitionCheckError, ShardaxError
from shardax.partition import (
    PARTITION_NAME,
    LogicallyPartitioned,
    Partitioned,
    add_axis,
    get_partition_spec,
    get_sharding,
    logical_to_mesh,
    logical_to_mesh_sharding,
    remove_axis,
    to_boxes,
    to_variables,
    unbox,
)

NAME = st.sampled_from(["a", "b", "x", "y", "", "a b"])
ENTRY = st.one_of(
    NAME, st.none(), st.just(P.UNCONSTRAINED), st.tuples(NAME, NAME), st.sampled_from([3, 1.5, ()])
)
NAMES = st.one_of(st.none(), st.lists(ENTRY, max_size=3).map(tuple))
SIZES = st.lists(st.sampled_from([0, 1, 2, 6, 8]), max_size=3)
TARGET = st.one_of(
    st.none(), NAME, st.just(P.UNCONSTRAINED), st.tuples(NAME, NAME), st.just(("x", "y"))
)
RULES = st.lists(st.tuples(NAME, TARGET), max_size=4)
POLICY = st.sampled_from([{}, {"on_conflict": "error"}, {"on_unmapped": "error"}])


@st.composite
def values(draw: st.DrawFn) -> Any:
    """What may stand in a box: arrays, abstract, deleted, several, boxes, or no arrays at all."""
    shape = tuple(draw(SIZES))
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return jax.ShapeDtypeStruct(shape, np.float32)
    if kind == 1:
        gone = jax.device_put(np.ones(shape, np.float32))
        gone.delete()
        return gone
    if kind == 2:
        return draw(st.sampled_from([None, "text", 3.5, {}, ["text", None]]))
    array = np.ones(shape, np.float32)
    if kind == 3:
        return {"m": array, "v": [jax.device_put(np.ones(tuple(draw(SIZES)), np.int32)), "text"]}
    if kind == 4:
        return {"inner": Partitioned(array, draw(NAMES))}
    return jax.device_put(array) if kind == 5 else array


@st.composite
def boxes(draw: st.DrawFn) -> Any:
    """A box, or what a box is refused for."""
    mesh = draw(st.one_of(st.none(), meshes()))
    names, value = draw(NAMES), draw(values())
    if draw(st.booleans()):
        return Partitioned(value, names, mesh)
    rules = draw(st.one_of(st.none(), RULES))
    return LogicallyPartitioned(value, names, mesh, rules)


@st.composite
def meshes(draw: st.DrawFn) -> Any:
    """A mesh of 1 to 4 devices."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (1, 4)]))
    kinds = tuple(draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])) for _ in sizes)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=kinds, devices=devices)


def maybe(function: Callable[[], Any]) -> Any:
    """Calls a function; returns None if it refuses by an error of ours."""
    try:
        return function()
    except ShardaxError as error:
        event(type(error).__name__)
        return None


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """A tree of boxes that could be made, beside a live Variable, and an optimizer's path."""
    made = [b for b in (maybe(lambda: draw(boxes())) for _ in range(3)) if b is not None]
    weight = sx.Param(jax.device_put(np.ones((2, 6), np.float32)), axes=("a", "b"))
    return {"list": made[:1], "opt": {"mu": {"w": made[1:]}}, "w": made[1:2], "v": weight}


def arrays(tree: Any) -> list[Any]:
    """The arrays of a tree, as they are."""
    return jax.tree.leaves(tree, is_leaf=lambda item: isinstance(item, sx.Variable))


@settings(max_examples=150)
@given(trees(), meshes(), RULES, POLICY)
def test_law_shard_places_every_box_or_nothing(
    tree: Any, mesh: Any, pairs: Any, policy: Any
) -> None:
    rules = maybe(lambda: sx.Rules(pairs, **policy))
    before, variable = arrays(tree), tree["v"].value
    findings = sx.check(tree, mesh, rules)
    placed = maybe(lambda: sx.shard(tree, mesh, rules))
    if placed is None:
        assert tree["v"].value is variable
        assert all(a is b for a, b in zip(arrays(tree), before, strict=True))
        return
    assert [f for f in findings if f.severity == "error"] == []
    event("placed")
    placed, tree = dict(placed), dict(tree)  # one and the same where there is no box
    del placed["v"], tree["v"]
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(placed), jax.tree.leaves(tree), strict=True):
        assert np.array_equal(one, other)
    assert all(
        isinstance(leaf.sharding, NamedSharding)
        for leaf in jax.tree.leaves(placed)
        if isinstance(leaf, jax.Array)
    )
    again = [f for f in sx.check(placed, mesh, rules) if f.code in ("misplaced", "elsewhere")]
    assert again == []


@pytest.mark.filterwarnings("ignore:Names of axes look misspelt")
@settings(max_examples=100)
@given(trees(), meshes(), RULES)
def test_law_box_functions_answer_or_raise_shardax_errors(tree: Any, mesh: Any, pairs: Any) -> None:
    rules = maybe(lambda: sx.Rules(pairs))
    specs = maybe(lambda: sx.partition_specs(tree, rules))
    places = maybe(lambda: sx.shardings(tree, mesh, rules))
    strict = maybe(lambda: get_sharding(tree, mesh, rules))
    if strict is not None:
        assert strict == places
    if places is not None:
        assert specs is not None
    maybe(lambda: sx.abstract(tree, mesh, rules))
    maybe(lambda: sx.unshard(tree))
    maybe(lambda: logical_to_mesh(tree, rules))
    maybe(lambda: logical_to_mesh_sharding(maybe(lambda: get_partition_spec(tree)), mesh, rules))
    with sx.axis_rules(rules or ()), jax.set_mesh(mesh):
        maybe(lambda: unbox(tree))
    for index in (0, -1, 5):
        maybe(lambda index=index: add_axis(tree, index, {PARTITION_NAME: "n"}))
        maybe(lambda index=index: remove_axis(tree, index, {PARTITION_NAME: "a"}))
    variables = maybe(lambda: to_variables(tree))
    if variables is not None:
        again = maybe(lambda: sx.shardings(variables, mesh, rules))
        assert places is None or again is not None
        to_boxes(variables)


def test_fuzzer_reaches_both_outcomes() -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    assert maybe(lambda: sx.shard({"w": Partitioned(np.ones(2), ("x",))}, mesh)) is not None
    with pytest.raises(PartitionCheckError):
        sx.shard({"w": Partitioned(np.ones(3), ("x",))}, mesh)
