# SPDX-License-Identifier: Apache-2.0
"""Taking trees apart into what is selected and the rest, and putting them together."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import SelectionError
from tests.core.selection.test_edits import Layer, Model, Pair, takes
from tests.strategies import assert_same_model

HOLE = sx.Hole()


@pytest.fixture
def model() -> Model:
    """A new Model."""
    return Model()


def test_partition_leaves_holes_for_the_other_part(model: Model) -> None:
    selected, rest = sx.select(model).at(lambda m: (m.layers[0], m.pair[1])).partition()
    assert selected.first == HOLE and rest.first is model.first
    assert selected.layers == [model.layers[0], HOLE] and rest.layers == [HOLE, model.layers[1]]
    assert (selected.pair[0], selected.pair[2]) == (HOLE, HOLE)
    assert selected.pair[1] is model.pair[1] and rest.pair[1] == HOLE


def test_together_the_parts_are_the_tree(model: Model) -> None:
    for narrow in (
        lambda s: s.at_instances_of(sx.Param),
        lambda s: s.at_instances_of(jax.Array),
        lambda s: s.at(lambda m: (m.first.scale, m.layers)),
        lambda s: s.at_instances_of(bytes),
        lambda s: s,
    ):
        parts = narrow(sx.select(model)).partition()
        for whole in (sx.combine(*parts), sx.combine(*reversed(parts))):
            assert_same_model(whole, model)
            assert whole.first is whole.tied


def test_object_in_one_part_keeps_its_identity(model: Model) -> None:
    params, rest = sx.select(model).at_instances_of(sx.Param).partition()
    whole = sx.combine(params, rest)
    assert whole.first is not model.first and whole.first.w is model.first.w


def test_parts_are_pytrees_of_their_own_data(model: Model) -> None:
    params, rest = sx.select(model).at_instances_of(sx.Param).partition()
    assert len(jax.tree.leaves(params)) == 4 and len(jax.tree.leaves(rest)) == 5

    @jax.jit
    def loss(params: Any) -> Any:
        return sx.combine(params, rest)(jnp.ones(2)).sum()

    grads = jax.grad(loss)(params)
    assert grads.layers[0].w.value.tolist() == [1.0, 1.0] and grads.layers[0].scale == HOLE
    assert sx.jit(loss)(params) == model(jnp.ones(2)).sum()


def test_parts_of_values_are_taken_apart() -> None:
    model = sx.Module()
    model.w = sx.OptState({"m": jnp.ones(2), "v": [jnp.ones(3), jnp.zeros(1)]}, tag="moments")
    first, rest = sx.select(model).at(lambda m: m.w.value["v"][0]).partition()
    assert [leaf.shape for leaf in jax.tree.leaves(first)] == [(3,)]
    doubled = jax.tree.map(lambda x: 2 * x, first)
    whole = sx.combine(doubled, rest)
    assert whole.w.value["v"][0].tolist() == [2.0] * 3 and sx.graphdef(whole) == sx.graphdef(model)
    assert_same_model(sx.combine(first, rest), model)


def test_plain_pytrees_are_taken_apart() -> None:
    tree = {"a": Pair(1, [2.0, "x"]), "b": sx.State({"c": {"d": 3.0}}), "e": ()}
    floats, rest = sx.select(tree).at_instances_of(float).partition()
    assert floats["a"] == Pair(HOLE, [2.0, HOLE]) and rest["a"] == Pair(1, [HOLE, "x"])
    whole = sx.combine(floats, rest)
    assert whole["a"] == tree["a"] and whole["b"].flat() == tree["b"].flat() and whole["e"] == ()


def test_three_parts_make_a_whole(model: Model) -> None:
    params, rest = sx.select(model).at_instances_of(sx.Param).partition()
    first, second = sx.select(params).at(lambda m: m.first).partition()
    assert_same_model(sx.combine(second, rest, first), model)


def test_cycles_and_methods_are_put_together() -> None:
    root, child = sx.Module(), Layer()
    root.child, child.root, root.call = child, root, child.__call__
    parts = sx.select(root).at_instances_of(sx.Param).partition()
    whole = sx.combine(*parts)
    assert whole.child.root is whole and whole.call.__self__ is whole.child
    assert_same_model(whole, root)


def test_selected_object_contains_all_that_it_holds() -> None:
    shared = sx.Param(1.0)
    root = sx.Module()
    root.alone, root.row, root.between = shared, [shared, sx.Param(2.0)], Layer()
    root.between.row = root.row
    root.call = functools.partial(takes, shared, 3.0)
    selected, rest = sx.select(root).at(lambda m: m.row).partition()
    assert selected.alone is shared and selected.row is root.row and selected.between.w == HOLE
    assert rest.alone == HOLE and rest.row == HOLE and rest.between.w is root.between.w
    assert sx.select(root).at(lambda m: m.row).invert().keypaths()[0] == ("between", "w")
    assert_same_model(sx.combine(selected, rest), root)


def test_selected_object_contains_what_it_holds_deeply() -> None:
    shared, outer, inner = sx.Param(1.0), sx.Module(), sx.Module()
    inner.items = {"p": [shared]}
    outer.inner = inner
    root = sx.Module()
    root.alone, root.outer = shared, outer
    selected, rest = sx.select(root).at(lambda m: m.outer).partition()
    assert selected.alone is shared and rest.alone == HOLE
    assert_same_model(sx.combine(selected, rest), root)


def test_object_that_one_part_has_twice_is_whole() -> None:
    params, rest = sx.select(Layer(1)).at_instances_of(sx.Param).partition()
    for parts in (({"a": params, "b": params}, {"a": rest, "b": HOLE}),
                  ({"b": HOLE, "a": rest}, {"b": params, "a": params})):  # fmt: skip
        whole = sx.combine(*parts)
        assert whole["b"] is whole["a"]
        assert_same_model(whole["a"], Layer(1))


def test_child_that_refers_to_parent_is_partitioned() -> None:
    root = sx.Module()
    root.layers = [Layer(1), Layer(2)]
    for layer in root.layers:
        layer.parent = root
    selected, rest = sx.select(root).at_instances_of(Layer).pick_nth(0).partition()
    assert rest.layers[0] == HOLE and selected.layers[1].w == HOLE
    assert selected.layers[0].parent is selected and selected.layers[0].w is root.layers[0].w
    whole = sx.combine(selected, rest)
    assert_same_model(whole, root)
    assert all(layer.parent is whole for layer in whole.layers)


def test_lazy_values_stay_lazy_in_both_parts() -> None:
    model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    parts = sx.select(model).at(lambda m: m.up).partition()
    whole = sx.combine(*parts)
    assert all(variable.is_lazy for _, variable in sx.iter_variables(whole))


def test_missing_part_raises_with_its_path(model: Model) -> None:
    selected, rest = sx.select(model).at(lambda m: (m.first.w, m.layers)).partition()
    with pytest.raises(SelectionError, match=r"\.first\.w, \.layers:"):
        sx.combine(rest)
    with pytest.raises(SelectionError, match=r"\.first\.rate"):
        sx.combine(selected)
    with pytest.raises(SelectionError, match="combine"):
        sx.combine()


def test_parts_that_both_have_something_are_an_error(model: Model) -> None:
    with pytest.raises(SelectionError, match=r"\.w\.value: Array"):
        sx.combine(Layer(1), Layer(1))
    with pytest.raises(SelectionError, match=r"\[0\]"):
        sx.combine([jnp.ones(2)], [jnp.zeros(2)])
    with pytest.raises(SelectionError, match=r"\(root\)"):
        sx.combine({"a": 1}, {"b": 2})
    assert sx.combine({"a": 1}, {"a": 1}) == {"a": 1}
    with pytest.raises(SelectionError, match=r"\.a: 1 and True"):
        sx.combine({"a": 1}, {"a": True})


def test_holes_are_equal_pytrees_without_leaves() -> None:
    assert jax.tree.leaves(HOLE) == [] and jax.tree.map(lambda x: x, HOLE) == HOLE
    assert hash(HOLE) == hash(sx.Hole()) and repr(HOLE) == "Hole()" and HOLE != 1
