# SPDX-License-Identifier: Apache-2.0
"""Edits in place: what changes, what is undone, what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.object import epoch
from shardax.errors import (
    ModuleAttributeError,
    SelectionError,
    StaticAttributeError,
    TraceLeakError,
)
from tests.core.selection.test_edits import Layer, Model


@pytest.fixture
def model() -> Model:
    """A new Model."""
    return Model()


def test_tree_itself_changes_and_is_returned(model: Model) -> None:
    layers, first = model.layers, model.layers[0]
    assert sx.select(model).at(lambda m: m.layers[0].rate).set(0.1, inplace=True) is model
    assert model.layers is layers and model.layers[0] is first and first.rate == 0.1


def test_shared_object_is_replaced_wherever_it_stands(model: Model) -> None:
    layer = Layer(9)
    sx.select(model).at(lambda m: m.tied).set(layer, inplace=True)
    assert model.first is model.tied is layer


def test_with_every_path_only_one_place_changes(model: Model) -> None:
    layer = Layer(9)
    first = model.first
    sx.select(model, every_path=True).at(lambda m: m.tied).set(layer, inplace=True)
    assert model.first is first and model.tied is layer


def test_shared_object_cannot_change_at_one_path_only(model: Model) -> None:
    weight = sx.select(model, every_path=True).at(lambda m: m.tied.w)
    with pytest.raises(SelectionError, match=r"\.first and \.tied"):
        weight.set(sx.Param(0.0), inplace=True)
    assert model.tied.w.value.tolist() == [1.0, 1.0]


def test_values_are_written_into_their_variables(model: Model) -> None:
    sx.graphdef(model)
    before, weight, scale = epoch.current, model.first.w, model.first._array_attributes["scale"]
    selection = sx.select(model).at(lambda m: (m.first.w.value, m.first.scale))
    selection.apply(lambda array: array + 1, inplace=True)
    assert model.first.w is weight and weight.value.tolist() == [2.0, 2.0]
    assert model.first._array_attributes["scale"] is scale and model.first.scale.tolist() == [
        2.0,
        2.0,
    ]
    assert epoch.current == before


def test_compiled_function_notices_a_structural_edit(model: Model) -> None:
    run = sx.jit(lambda model, x: model(x))
    x = jnp.ones(2)
    assert run(model, x).tolist() == [6.0, 6.0]
    sx.select(model).at(lambda m: m.layers[0]).insert_after(jnp.negative, inplace=True)
    assert run(model, x).tolist() == [0.0, 0.0]


def test_arrays_become_attributes_of_other_kinds(model: Model) -> None:
    sx.select(model).at(lambda m: m.first.scale).set("none", inplace=True)
    assert model.tied.scale == "none"
    sx.select(model).at(lambda m: m.first.scale).set(jnp.zeros(2), inplace=True)
    assert model.tied.scale.tolist() == [0.0, 0.0]


def test_plain_lists_and_dicts_change_tuples_do_not() -> None:
    tree: Any = {"a": [1, (2, 3)]}
    assert sx.select(tree).at_equal_to(2).remove(inplace=True) is tree
    assert tree == {"a": [1, (3,)]}
    for fixed in ((1, 2), 1, sx.State({"a": 1})):
        with pytest.raises(SelectionError, match="inplace"):
            sx.select(fixed).at_equal_to(1).set(5, inplace=True)


def test_mutable_parts_of_an_immutable_tree_change(model: Model) -> None:
    tree = (model, {"steps": 1})
    sx.select(tree).at(lambda t: (t[0].first.rate, t[1]["steps"])).set(7, inplace=True)
    assert model.first.rate == 7 and tree[1] == {"steps": 7}


def test_tree_itself_cannot_be_replaced_in_place(model: Model) -> None:
    with pytest.raises(SelectionError, match="Model cannot be changed in place"):
        sx.select(model).set(Layer(), inplace=True)


def test_refused_edit_changes_nothing(model: Model) -> None:
    before = repr(model)
    second: Any = model.layers[1]
    frozen = second.w.freeze()
    second.w = frozen
    values = sx.select(model).at(lambda m: (m.first.w.value, m.layers[1].w.value))
    with pytest.raises(ModuleAttributeError):
        values.apply(lambda value: value + 1, inplace=True)
    assert model.first.w.value.tolist() == [1.0, 1.0]
    with pytest.raises(StaticAttributeError):
        sx.select(model).at(lambda m: (m.first.rate, m.layers[0].rate)).set_all(
            [1, set()], inplace=True
        )
    second.w = frozen.thaw()
    assert repr(model) == before


def test_captured_model_cannot_be_rebuilt_inside_a_trace(model: Model) -> None:
    @sx.remat
    def run(x: Any) -> Any:
        sx.select(model).at(lambda m: m.first.rate).set(1, inplace=True)
        return x

    with pytest.raises(sx.errors.ForeignMutationError):
        sx.grad(run)(1.0)
    with pytest.raises(TraceLeakError):
        jax.jit(lambda x: sx.select(model).at(lambda m: m.first.w.value).set(x, inplace=True))(
            jnp.ones(2)
        )
    assert model.first.rate == 0.5 and model.first.w.value.tolist() == [1.0, 1.0]


def test_structural_edits_inside_jit_reach_the_caller(model: Model) -> None:
    @sx.jit
    def prune(model: Model) -> None:
        sx.select(model).at(lambda m: m.layers[0]).remove(inplace=True)
        sx.select(model).at(lambda m: m.first.w.value).apply(jnp.negative, inplace=True)

    prune(model)
    assert len(model.layers) == 1 and model.tied.w.value.tolist() == [-1.0, -1.0]


# --- the context ---


def test_edits_in_one_context_apply_in_order(model: Model) -> None:
    second = model.layers[1]
    with sx.select(model).edit() as editing:
        editing.at(lambda m: m.layers[0]).remove()
        editing.at(lambda m: m.layers[0].rate).set(0.1)
        editing.at_instances_of(Layer).where(lambda layer: layer.rate == 0.1).insert_before("x")
    assert list(model.layers) == ["x", second] and second.rate == 0.1


def test_context_edits_what_is_selected(model: Model) -> None:
    with sx.select(model).at(lambda m: m.layers).at_children().edit() as layers:
        layers.at(lambda layer: layer.rate).set(3)
    assert [layer.rate for layer in model.layers] == [3, 3] and model.first.rate == 0.5


def test_exception_undoes_every_edit(model: Model) -> None:
    sx.graphdef(model)
    before, values = repr(model), sx.state(model).flat()

    def edit() -> None:
        with sx.select(model).edit() as editing:
            editing.at_instances_of(sx.Param).at_children().apply(lambda value: value + 1)
            editing.at(lambda m: m.layers[0]).remove()
            editing.at(lambda m: m.pair[1]).insert_after("more")
            editing.at(lambda m: m.first.scale).set("none")
            editing.at(lambda m: m.nothing).set("never")

    with pytest.raises(AttributeError, match="nothing"):
        edit()
    assert repr(model) == before
    after = sx.state(model).flat()
    assert list(after) == list(values)
    assert all(bool((after[path] == values[path]).all()) for path in values)


def test_outside_of_the_context_edits_make_new_trees(model: Model) -> None:
    with sx.select(model).edit():
        new = sx.select(model).at(lambda m: m.first.rate).set(1)
    assert (new.first.rate, model.first.rate) == (1, 0.5)


def test_taking_apart_in_the_context_leaves_the_tree(model: Model) -> None:
    before = repr(model)
    with sx.select(model).edit() as editing:
        selected, rest = editing.at_instances_of(sx.Param).partition()
    assert repr(model) == before and sx.combine(selected, rest).first.w is model.first.w
