# SPDX-License-Identifier: Apache-2.0
"""Edits of selections: what changes, what is shared, and what is refused."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.object import epoch
from shardax.errors import MetadataError, ModuleError, SelectionError, StaticAttributeError
from tests.core.selection.test_selecting import takes
from tests.strategies import Pair, assert_same_model


class Layer(sx.Module):
    """A weight, an array and configuration."""

    def __init__(self, seed: int = 0) -> None:
        self.w = sx.Param(jnp.full(2, float(seed)), axes=("embed",), tag="weight")
        self.scale = jnp.ones(2)
        self.rate = 0.5

    def __call__(self, x: Any) -> Any:
        return self.scale * x + self.w


class Model(sx.Module):
    """Layers in a row, one of them twice."""

    def __init__(self) -> None:
        self.first = Layer(1)
        self.layers = [Layer(2), Layer(3)]
        self.tied = self.first
        self.pair = (Layer(4), jnp.zeros(1), "name")

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model() -> Model:
    """A new Model."""
    return Model()


def unchanged(model: Any) -> tuple[Any, int]:
    """What must be the same after an edit that made a new tree, or was refused."""
    return repr(model), epoch.current


# --- what an edit shares ---


def test_set_makes_anew_only_what_leads_to_an_edit(model: Model) -> None:
    sx.graphdef(model)
    before = unchanged(model)
    new = sx.select(model).at(lambda m: m.layers[1].rate).set(0.1)
    assert type(new) is Model and new is not model
    assert new.layers is not model.layers and new.layers[1] is not model.layers[1]
    assert (new.layers[1].rate, model.layers[1].rate) == (0.1, 0.5)
    assert new.layers[1].w is model.layers[1].w
    assert new.layers[0] is model.layers[0] and new.first is model.first
    assert new.pair[0] is model.pair[0]
    assert unchanged(model) == before


def test_ties_stay_ties(model: Model) -> None:
    weight = sx.Param(jnp.ones(3))
    new = sx.select(model).at(lambda m: m.first.w).set(weight)
    assert new.first is new.tied and new.first is not model.first
    assert new.first.w is weight and model.first.w is not weight
    layer = Layer(9)
    other = sx.select(model).at(lambda m: m.tied).set(layer)
    assert other.first is other.tied is layer


def test_with_every_path_an_edit_unties(model: Model) -> None:
    every = sx.select(model, every_path=True)
    new = every.at(lambda m: m.tied.w).set(sx.Param(jnp.zeros(2)))
    assert new.first is model.first and new.tied is not model.first
    assert new.tied.w is not model.first.w
    both = every.at_instances_of(Layer).where(lambda path, _: path in {("first",), ("tied",)})
    cloned = both.apply(sx.clone)
    assert both.count() == 2 and cloned.first is not cloned.tied


def test_cycles_stay_cycles() -> None:
    root, child = sx.Module(), sx.Module()
    root.child, child.root, child.w = child, root, sx.Param(1.0)
    root.other = Layer()
    new = sx.select(root).at(lambda m: m.child.w).set(sx.Param(2.0))
    assert new.child.root is new and new.child.root.child.w == 2.0
    assert root.child.root is root and root.child.w == 1.0
    assert new.other is root.other


def test_cyclic_reference_to_edited_object_is_copied() -> None:
    root = sx.Module()
    root.layers = [Layer(), Layer()]
    for layer in root.layers:
        layer.parent = root
    new = sx.select(root).at(lambda m: m.layers[0].rate).set(0.0)
    assert new.layers[1] is not root.layers[1] and new.layers[1].parent is new
    assert new.layers[1].w is root.layers[1].w


def test_copy_has_array_attributes_of_its_own(model: Model) -> None:
    new = sx.select(model).at(lambda m: m.first.rate).set(0.1)
    new.first.scale = jnp.zeros(2)
    assert model.first.scale.tolist() == [1.0, 1.0] and new.tied.scale.tolist() == [0.0, 0.0]
    assert new.layers[0].scale is model.layers[0].scale


def test_attributes_keep_their_order(model: Model) -> None:
    new = sx.select(model).at(lambda m: (m.first.w, m.first.rate)).set_all([sx.Param(0.0), 3])
    assert list(vars(new.first)) == list(vars(model.first)) == ["w", "rate"]


# --- what an edit puts where ---


def test_set_puts_one_value_at_every_place(model: Model) -> None:
    layer = Layer(7)
    new = sx.select(model).at(lambda m: m.layers).at_children().set(layer)
    assert list(new.layers) == [layer, layer]


def test_function_is_called_once_for_each_place(model: Model) -> None:
    calls: list[Any] = []

    def replaced(path: Any, layer: Any) -> Any:
        calls.append(path)
        return sx.nn.Sequential(layer)

    new = sx.select(model).at_instances_of(Layer).apply(replaced)
    assert calls == [("first",), ("layers", 0), ("layers", 1), ("pair", 0)]
    assert new.first is new.tied and new.first.layers[0] is model.first
    assert isinstance(new.pair, tuple) and new.pair[0].layers[0] is model.pair[0]


def test_values_are_set_in_the_order_of_selection(model: Model) -> None:
    backwards = sx.select(model).at(lambda m: (m.layers[1].rate, m.layers[0].rate))
    new = backwards.set_all(iter([1, 2]))
    assert [layer.rate for layer in new.layers] == [2, 1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_set_all_needs_as_many_values_as_places(model: Model, count: int) -> None:
    before = unchanged(model)
    with pytest.raises(SelectionError, match=r"2 places; .*\n.*\.layers\[0\]: Layer"):
        sx.select(model).at(lambda m: m.layers).at_children().set_all([0] * count)
    assert unchanged(model) == before


def test_values_are_set_by_path(model: Model) -> None:
    new = sx.select(model).set_by_path({".layers[0].rate": 1, ("tied", "rate"): 2})
    assert (new.layers[0].rate, new.first.rate, new.layers[1].rate) == (1, 2, 0.5)
    with pytest.raises(SelectionError, match=r"\.layers\[0\]\.rat .*mean \.layers\[0\]\.rate"):
        sx.select(model).set_by_path({".layers[0].rat": 1})


def test_whole_tree_can_be_replaced(model: Model) -> None:
    assert sx.select(model).apply(sx.nn.Sequential).layers[0] is model
    assert sx.select(3).set(4) == 4
    with pytest.raises(SelectionError, match="root"):
        sx.select(model).remove()
    with pytest.raises(SelectionError, match="Sequential"):
        sx.select(model).insert_after(Layer())


def test_set_lists_are_tracked_and_unstorable_values_refused(model: Model) -> None:
    new = sx.select(model).at(lambda m: m.layers).set([Layer()])
    assert isinstance(new.layers, sx.List)
    before = unchanged(model)
    with pytest.raises(StaticAttributeError, match=r"\.layers\[0\]\.rate"):
        sx.select(model).at(lambda m: m.layers[0].rate).set(set())
    assert unchanged(model) == before


def test_array_cannot_replace_a_variable(model: Model) -> None:
    weights = sx.select(model).at_instances_of(sx.Param)
    for inplace in (False, True):
        before = unchanged(model)
        with pytest.raises(SelectionError, match=r"Param at \.first\.w.*replace"):
            weights.apply(lambda w: 2 * w, inplace=inplace)
        assert unchanged(model) == before
    new = weights.apply(lambda w: w.replace(2 * w))
    assert new.layers[0].w.value.tolist() == [4.0, 4.0] and new.layers[0].w.axes == ("embed",)


def test_in_a_plain_container_it_may() -> None:
    tree = {"w": sx.Param(jnp.ones(2))}
    assert sx.select(tree).at_instances_of(sx.Param).apply(lambda w: w.value)["w"].shape == (2,)


# --- inside values ---


def test_value_edit_keeps_the_variable_type(model: Model) -> None:
    new = sx.select(model).at(lambda m: m.first.w.value).apply(lambda value: value + 1)
    assert type(new.first.w) is sx.Param and new.first.w is new.tied.w
    assert (new.first.w.axes, dict(new.first.w.metadata)) == (("embed",), {"tag": "weight"})
    assert (new.first.w.value.tolist(), model.first.w.value.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    with pytest.raises(MetadataError):
        sx.select(model).at(lambda m: m.first.w.value).set(jnp.ones((2, 2)))


def test_parts_of_values_and_arrays_are_edited() -> None:
    model = sx.Module()
    model.moments = sx.OptState({"m": jnp.ones(2), "v": (jnp.ones(3), jnp.zeros(1))})
    model.array = jnp.ones(2)
    model.pair = (jnp.ones(2), "name")
    model.box = sx.Partitioned(jnp.ones(2), names=("x",))
    new = sx.select(model).at_instances_of(jax.Array).apply(lambda array: 3 * array)
    assert new.moments.value["v"][0].tolist() == [3.0] * 3 and new.array.tolist() == [3.0, 3.0]
    assert new.pair[0].tolist() == [3.0, 3.0] and new.pair[1] == "name"
    assert new.box.value.tolist() == [3.0, 3.0] and new.box.names == ("x",)
    assert sx.graphdef(new) == sx.graphdef(model) and model.array.tolist() == [1.0, 1.0]
    smaller = sx.select(model).at(lambda m: m.moments.value["v"][1]).remove()
    assert len(smaller.moments.value["v"]) == 1 and len(model.moments.value["v"]) == 2


def test_array_attribute_can_become_anything_and_back() -> None:
    layer = Layer()
    whole = sx.select(layer).at(lambda m: m.scale)
    assert whole.set(2).scale == 2 and whole.set(sx.Param(1.0)).scale == 1.0
    back = sx.select(whole.set("none")).at(lambda m: m.scale).set(jnp.ones(2))
    assert_same_model(back, layer)


def test_lazy_values_stay_lazy() -> None:
    model = sx.nn.Sequential(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), sx.nn.MLP(2, 4, rngs=sx.Rngs(1)))
    model.w = sx.Init(jax.nn.initializers.normal(), (2,), rngs=sx.Rngs(2))
    linears = sx.select(model).at_instances_of(sx.nn.Linear)
    new = linears.apply(lambda linear: sx.nn.Sequential(linear, jax.nn.relu))
    new = sx.select(new).at(lambda m: m.layers[0].layers[0].kernel.value).set(jnp.ones((2, 2)))
    lazy = [variable.is_lazy for _, variable in sx.iter_variables(model)]
    assert all(lazy) and [v.is_lazy for _, v in sx.iter_variables(new)].count(False) == 1
    assert bool((new.w == model.w).all())


def test_abstract_models_are_edited_without_numbers() -> None:
    model = sx.eval_shape(Model)
    new = (
        sx.select(model)
        .at_instances_of(jax.ShapeDtypeStruct)
        .apply(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16))
    )
    assert {str(v.dtype) for _, v in sx.iter_variables(new)} == {"bfloat16"}
    assert {str(v.dtype) for _, v in sx.iter_variables(model)} == {"float32"}


# --- empty selections, stale selections ---


def test_empty_selection_raises_unless_allowed(model: Model) -> None:
    nothing = sx.select(model).at_instances_of(bytes)
    edits: list[Any] = [
        functools.partial(nothing.set, 1),
        functools.partial(nothing.apply, lambda x: x),
        functools.partial(nothing.set_all, []),
        functools.partial(nothing.insert_before, 1),
        functools.partial(nothing.insert_after, 1),
        nothing.remove,
    ]
    for edit in edits:
        for inplace in (False, True):
            with pytest.raises(SelectionError, match=r"Model.*allow_empty"):
                edit(inplace=inplace)
            assert edit(inplace=inplace, allow_empty=True) is model


def test_edit_of_removed_place_raises(model: Model) -> None:
    removed = sx.select(model).at(lambda m: m.layers[1].rate)
    replaced = sx.select(model).at(lambda m: m.layers[1])
    model.layers[1] = Layer(8)
    for selection in (removed, replaced):
        with pytest.raises(SelectionError, match=r"\.layers\[1\]"):
            selection.set(1)


def test_places_nested_through_aliases_are_refused() -> None:
    root, child = sx.Module(), Layer()
    root.child, root.itself = child, root
    selection = sx.select(root).at(lambda m: (m.itself.child, m.child.w))
    with pytest.raises(SelectionError, match=r"\.child\.w lies within"):
        selection.set("new")


def test_attribute_that_refers_to_root_is_editable() -> None:
    root = sx.Module()
    root.itself, root.w = root, sx.Param(1.0)
    new = sx.select(root).at(lambda m: m.itself).set("gone")
    assert new.itself == "gone" and new.w is root.w and root.itself is root
    assert not hasattr(sx.select(root).at(lambda m: m.itself).remove(), "itself")


def test_edit_sees_values_written_since(model: Model) -> None:
    weight = sx.select(model).at(lambda m: m.first.w.value)
    model.first.w[...] = jnp.full(2, 5.0)
    assert weight.apply(lambda value: value + 1).first.w.value.tolist() == [6.0, 6.0]


# --- every kind of container ---


def test_rebuilt_containers_keep_their_types() -> None:
    holder = Layer()
    holder.call = Layer(1).__call__
    holder.partial = functools.partial(takes, sx.Param(1.0), end=sx.Param(2.0))
    holder.compiled = sx.jit(Layer(3).__call__)
    default: dict[str, Any] = collections.defaultdict(list, a=sx.Param(3.0))
    tree = (
        {"b": sx.Param(3.0), "a": [sx.Param(4.0)]},
        Pair(sx.Param(5.0), None),
        holder,
        default,
        collections.OrderedDict(z=sx.Param(1.0), a=2),
        sx.State({"p": {"q": sx.Param(1.0)}}),
        [sx.List([sx.Param(7.0)]), sx.Dict(x=sx.Param(8.0))],
    )
    params = sx.select(tree).at_instances_of(sx.Param)
    new = params.apply(lambda p: sx.BatchStat(p.value + 1))
    assert [type(item) for item in new] == [type(item) for item in tree]
    assert new[0]["a"][0] == 5.0 and new[1].first == 6.0 and list(new[0]) == ["b", "a"]
    assert new[2].call(0.0).tolist() == [2.0, 2.0]
    assert new[2].partial.args[0] == 2.0 and new[2].partial.keywords["end"] == 3.0
    assert new[2].compiled(0.0).tolist() == [4.0, 4.0]
    assert new[3]["missing"] == [] and list(new[4]) == ["z", "a"]
    assert not sx.select(new).at_instances_of(sx.Param).count()
    assert sx.select(new).at_instances_of(sx.BatchStat).keypaths() == params.keypaths()
    assert sx.select(tree).at_instances_of(sx.Param).count() == params.count()


def test_plain_list_met_twice_is_one() -> None:
    shared = [1, 2]
    new = sx.select({"a": shared, "b": (shared,)}).at_equal_to(1).set(5)
    assert new["a"] is new["b"][0] and new["a"] == [5, 2] and shared == [1, 2]


# --- inside transforms ---


def test_edits_work_while_tracing(model: Model) -> None:
    @sx.jit
    def run(model: Model, x: Any) -> Any:
        doubled = sx.select(model).at_instances_of(sx.Param).apply(lambda w: w.replace(2 * w))
        return sx.select(doubled).at(lambda m: m.layers[1]).insert_after(jnp.negative)(x)

    x = jnp.ones(2)
    assert run(model, x).tolist() == [-11.0, -11.0] and model(x).tolist() == [6.0, 6.0]


def test_captured_model_is_edited_while_tracing(model: Model) -> None:
    @sx.jit
    def run(x: Any) -> Any:
        new = sx.select(model).at(lambda m: m.layers[0].w.value).set(x)
        new = sx.select(new).at(lambda m: m.layers[1].scale).apply(lambda scale: 2 * scale)
        return new(x)

    assert run(jnp.ones(2)).tolist() == [7.0, 7.0]
    model.layers[1].scale = jnp.zeros(2)
    assert run(jnp.ones(2)).tolist() == [3.0, 3.0] and model.layers[0].w[0] == 2.0


def test_edited_model_is_differentiated(model: Model) -> None:
    new = sx.select(model).at(lambda m: m.layers[0]).set(model.layers[1])
    grads = sx.grad(lambda m: m(jnp.ones(2)).sum())(new)
    assert grads["layers"][0]["w"].tolist() == [2.0, 2.0]
    assert ("layers", 1, "w") not in grads.flat()


# --- views of a stack ---


def test_layers_of_a_stack_are_edited_together() -> None:
    stack = sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), 3)
    new = sx.select(stack).at(lambda s: s.stacked.bias.value).set(jnp.ones((3, 2)))
    assert new(jnp.zeros(2)).shape == (2,) and stack.stacked.bias.value.sum() == 0
    assert new[1].bias.value.tolist() == [1.0, 1.0]


def test_edited_layer_view_shares_the_stack_variables() -> None:
    stack = sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), 3)
    layer = sx.select(stack[1]).at(lambda m: m.bias).set(None)
    assert layer.bias is None and stack[1].bias is not None
    layer.kernel[...] = jnp.zeros((2, 2))
    assert not stack.stacked.kernel.value[1].any() and stack.stacked.kernel.value[0].any()


def test_layer_view_allows_writes_but_no_rebuild() -> None:
    stack = sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), 3)
    sx.select(stack[1]).at(lambda m: m.bias.value).set(jnp.ones(2), inplace=True)
    assert stack.stacked.bias.value.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(Exception, match="unstack_layers") as caught:
        sx.select(stack[1]).at(lambda m: m.bias).set(None, inplace=True)
    assert isinstance(caught.value, ModuleError | sx.errors.ForeignMutationError)


# --- forms of Variables ---


def test_slots_and_frozen_values_are_selected_and_set(model: Model) -> None:
    slots, variables = sx.unbind(model)
    found = sx.select(slots).at_instances_of(sx.Slot)
    assert found.where("weight").count() == 0
    with pytest.raises(SelectionError, match=r"slot of a Param at \.first\.w: .*bind"):
        found.pick_nth(0).set(jnp.ones(2))
    assert sx.select(slots).at(lambda m: m.first.scale).set(jnp.zeros(2)).tied.scale.sum() == 0
    assert found.at_subtrees_where(sx.All(sx.Param)).count() == 4 < len(variables)
    frozen = sx.select(model).at_instances_of(sx.Param).apply(lambda w: w.freeze())
    assert frozen.first.w is frozen.tied.w and isinstance(frozen.first.w, sx.FrozenVariable)
    new = sx.select(frozen).at(lambda m: m.first.w.value).set(jnp.zeros(2))
    assert isinstance(new.first.w, sx.FrozenVariable) and not new.tied.w.value.any()
