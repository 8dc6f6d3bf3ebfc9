# SPDX-License-Identifier: Apache-2.0
"""Edits that put something beside what is selected, or remove it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import SelectionError
from tests.advice import run_advice
from tests.core.selection.test_edits import Layer, Model, Pair


@pytest.fixture
def model() -> Model:
    """A new Model."""
    return Model()


def test_layers_are_inserted_before_and_after(model: Model) -> None:
    layers = sx.select(model).at(lambda m: m.layers).at_children()
    after, before = layers.insert_after(jnp.negative), layers.insert_before(jnp.negative)
    first, second = model.layers
    assert list(after.layers) == [first, jnp.negative, second, jnp.negative]
    assert list(before.layers) == [jnp.negative, first, jnp.negative, second]
    assert list(model.layers) == [first, second]
    x = jnp.arange(2.0)
    assert after(x).tolist() == (-second(-first(x))).tolist()


def test_insert_shares_one_object_or_makes_several(model: Model) -> None:
    layers = sx.select(model).at(lambda m: m.layers).at_children()
    one = layers.insert_after(Layer()).layers
    assert one[1] is one[3]
    many = layers.insert_before(make=lambda path, layer: Layer(path[-1])).layers
    assert [float(layer.w[0]) for layer in many] == [0.0, 2.0, 1.0, 3.0]
    with pytest.raises(SelectionError, match="make="):
        layers.insert_after()
    with pytest.raises(SelectionError, match="make="):
        layers.insert_after(Layer(), make=Layer)


def test_insertion_follows_a_shared_item_wherever_it_stands() -> None:
    layer = Layer()
    model = sx.nn.Sequential(layer, jnp.negative, layer)
    new = sx.select(model).at_instances_of(Layer).insert_after("x")
    assert list(new.layers) == [layer, "x", jnp.negative, layer, "x"]


def test_plain_lists_and_tuples_take_insertions(model: Model) -> None:
    assert sx.select([1, (2, 3)]).at_equal_to(2).insert_before(9) == [1, (9, 2, 3)]
    new = sx.select(model).at(lambda m: m.pair[1]).insert_after(jnp.ones(3))
    assert [type(item).__name__ for item in new.pair] == ["Layer", "ArrayImpl", "ArrayImpl", "str"]


@pytest.mark.parametrize(
    "select",
    [
        lambda: sx.select(Model()).at(lambda m: m.first),
        lambda: sx.select(Model()).at(lambda m: m.first.scale),
        lambda: sx.select(Model()).at(lambda m: m.first.w.value),
        lambda: sx.select({"a": 1}).at_equal_to(1),
        lambda: sx.select(Pair(1, 2)).at_equal_to(1),
        lambda: sx.select(Pair(abs, 2)).at_equal_to(abs),
        lambda: sx.select(sx.Partitioned(jnp.ones(1), names=("x",))).at_instances_of(jax.Array),
        lambda: sx.select(sx.State({"a": 1})).at_equal_to(1),
    ],
)
def test_insertion_elsewhere_is_refused_with_the_way_out(select: Any) -> None:
    selection = select()
    before = repr(selection.tree)
    for insert in (selection.insert_before, selection.insert_after):
        with pytest.raises(SelectionError) as caught:
            insert("new")
        if callable(selection.get()):
            names = {"sx": sx, "new": abs}
            both = run_advice(caught.value, "lambda old: sx.nn.Sequential(old, new)", names)
            assert selection.apply(both) is not None
        else:
            assert str(caught.value).endswith(".set(value).")
    assert repr(selection.tree) == before


def test_items_entries_and_attributes_are_removed(model: Model) -> None:
    new = sx.select(model).at(lambda m: (m.layers[0], m.pair[1], m.first.scale)).remove()
    assert list(new.layers) == [model.layers[1]] and new.pair == (model.pair[0], "name")
    assert not hasattr(new.tied, "scale") and hasattr(model.first, "scale")
    tree = {"a": [1, 2], "b": sx.State({"c": {"d": 1, "e": 2}})}
    found = sx.select(tree).at_equal_to(1).remove()
    assert found["a"] == [2] and found["b"].flat() == {("c", "e"): 2}


def test_fixed_size_containers_cannot_lose_items(model: Model) -> None:
    for selection in (
        sx.select(Pair(1, 2)).at_equal_to(1),
        sx.select(Pair(abs, 2)).at_equal_to(abs),
        sx.select(model).at(lambda m: m.first.w.value),
    ):
        with pytest.raises(SelectionError, match="fixed number") as caught:
            selection.remove()
        if callable(selection.get()):
            nothing = run_advice(caught.value, "sx.nn.Sequential()", {"sx": sx})
            assert selection.set(nothing).first(2) == 2
        else:
            assert str(caught.value).endswith(".set(value).")
