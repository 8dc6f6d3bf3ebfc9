# SPDX-License-Identifier: Apache-2.0
"""Laws of selections over random models: with sharing, cycles, containers and any value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax._core.object import epoch
from shardax._core.variable_types import ArrayAttribute
from shardax._select.holders import HolderGraph
from shardax._select.places import children
from shardax.errors import ShardaxError
from tests.strategies import Node, OtherNode, Pair, assert_same_model, models, objects_of


class Around(sx.Module):
    """Holds one thing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


OF_VARIABLES: list[Any] = [
    lambda s: s.at_instances_of(sx.Param),
    lambda s: s.at_instances_of(sx.Variable),
    lambda s: s.at_instances_of(sx.Variable).where(lambda path, _: len(path) % 2),
]
NARROWINGS: list[Any] = [
    *OF_VARIABLES,
    lambda s: s.at_instances_of(jax.Array),
    lambda s: s.at_instances_of(OtherNode),
    lambda s: s.at_instances_of((sx.Module, sx.List), innermost=True),
    lambda s: s.at_children(),
    lambda s: s.at_children().at_instances_of((sx.Variable, str, int, jax.Array)),
    lambda s: s.at_subtrees_where(lambda x: isinstance(x, Pair | sx.List | sx.Dict)),
    lambda s: s.at_equal_to(1),
    lambda s: s.at_instances_of(sx.Variable).invert(),
]
NARROW = st.sampled_from(NARROWINGS)
MANY = settings(max_examples=30)
NARROW_TO_VARIABLES = st.sampled_from(OF_VARIABLES)


def doubled(value: Any) -> Any:
    """A float array twice itself; a Variable anew; anything else as it is."""
    if isinstance(value, sx.Variable):
        return value.replace(value.value)
    is_number = isinstance(value, jax.Array) and jax.numpy.issubdtype(
        value.dtype, jax.numpy.inexact
    )
    return value + value if is_number else value


EDITS: list[Any] = [
    lambda s, **options: s.set(("configuration", 1), allow_empty=True, **options),
    lambda s, **options: s.apply(Around, allow_empty=True, **options),
    lambda s, **options: s.apply(doubled, allow_empty=True, **options),
    lambda s, **options: s.remove(allow_empty=True, **options),
    lambda s, **options: s.insert_after("beside", allow_empty=True, **options),
]


def user_variables(tree: Any) -> set[int]:
    """Identities of the Variables that users see."""
    return {
        id(item)
        for item in objects_of(tree)
        if isinstance(item, sx.Variable) and not isinstance(item, ArrayAttribute)
    }


def stand_apart(selection: sx.Selection) -> bool:
    """Whether no selected value leads, by another path, to something else that is selected.

    What is set is taken as it is, so an edit of that something would not be seen in it.
    """
    nodes = HolderGraph(selection.tree, selection._places, every_path=False).nodes
    leading = {id(node.place.holder) for node in nodes if node.leads}
    waiting, met = list(selection._places), set[int]()
    for place in waiting:
        if not place.is_holder or id(place.holder) not in met:
            met.update([id(place.holder)] if place.is_holder else [])
            waiting.extend(children(place))
    return not met & leading


def outcome(edit: Callable[[], Any]) -> Any:
    """What an edit returns, or why it is refused."""
    try:
        return edit()
    except ShardaxError as error:
        return error


@MANY
@given(models(), NARROW)
def test_setting_current_values_changes_nothing(model: Node, narrow: Any) -> None:
    selection = narrow(sx.select(model))
    assume(stand_apart(selection))
    assert_same_model(selection.set_all(selection.get_all(), allow_empty=True), model)
    assert_same_model(selection.apply(lambda value: value, allow_empty=True), model)


@MANY
@given(models(), NARROW)
def test_keypaths_select_the_same_places(model: Node, narrow: Any) -> None:
    selection = narrow(sx.select(model))
    again = [sx.select(model).at_keypaths(path) for path in selection.keypaths()]
    assert [one.keypaths() for one in again] == [(path,) for path in selection.keypaths()]
    assert list(selection.get_by_path()) == list(selection.keypaths())


@MANY
@given(models(), NARROW)
def test_taking_apart_and_putting_together_gives_the_same(model: Node, narrow: Any) -> None:
    selected, rest = narrow(sx.select(model)).partition()
    assert_same_model(sx.combine(selected, rest), model)
    assert_same_model(sx.combine(rest, selected), model)
    assert not user_variables(selected) & user_variables(rest)


@MANY
@given(models(), NARROW_TO_VARIABLES)
def test_partition_puts_every_variable_in_one_part(model: Node, narrow: Any) -> None:
    selection = narrow(sx.select(model))
    selected, rest = selection.partition()
    assert user_variables(selected) == {id(variable) for variable in selection}
    assert user_variables(rest) == user_variables(model) - user_variables(selected)
    assert user_variables(sx.combine(selected, rest)) == user_variables(model)


@MANY
@given(models(), NARROW_TO_VARIABLES)
def test_edit_then_inverse_edit_restores_the_model(model: Node, narrow: Any) -> None:
    wrapped = narrow(sx.select(model)).apply(Around, allow_empty=True)
    around = sx.select(wrapped).at_instances_of(Around)
    back = around.apply(lambda held: held.inner, allow_empty=True)
    assert_same_model(back, model)
    assert user_variables(back) == user_variables(model)


@MANY
@given(models(), NARROW_TO_VARIABLES)
def test_ties_stay_and_unedited_objects_are_shared(model: Node, narrow: Any) -> None:
    sx.graphdef(model)
    copy, at = sx.clone(model), epoch.current
    selection = narrow(sx.select(model))
    new = selection.apply(sx.clone, allow_empty=True)
    assert_same_model(new, model)
    kept = user_variables(model) - {id(variable) for variable in selection}
    assert user_variables(new) & user_variables(model) == kept
    assert_same_model(model, copy)
    assert epoch.current == at


@MANY
@given(models(), NARROW, st.sampled_from(EDITS))
def test_inplace_edit_matches_the_functional_edit(model: Node, narrow: Any, edit: Any) -> None:
    before, copy = sx.clone(model), sx.clone(model)
    selection = narrow(sx.select(model))
    assume(selection.keypaths() != ((),))  # the tree itself cannot change into another
    assume(stand_apart(selection))
    new = outcome(lambda: edit(selection))
    changed = outcome(lambda: edit(narrow(sx.select(copy)), inplace=True))
    if isinstance(new, ShardaxError):
        assert type(changed) is type(new)
        assert_same_model(copy, before)
    else:
        assert changed is copy
        assert_same_model(copy, new)
    assert_same_model(model, before)


@MANY
@given(models(), NARROW, st.sampled_from(EDITS))
def test_exception_undoes_edits_in_place(model: Node, narrow: Any, edit: Any) -> None:
    copy = sx.clone(model)
    try:
        with sx.select(model).edit() as editing:
            edit(narrow(editing.at_children()))
            edit(narrow(editing.at_children()))
            raise KeyError
    except (KeyError, ShardaxError):
        assert_same_model(model, copy)


@MANY
@given(models(), NARROW)
def test_selection_has_a_text_and_stays_lazy(model: Node, narrow: Any) -> None:
    lazy = [variable.is_lazy for _, variable in sx.iter_variables(model)]
    selection = narrow(sx.select(model))
    assert repr(selection).startswith(f"Selection of {selection.count()} place")
    assert [variable.is_lazy for _, variable in sx.iter_variables(model)] == lazy
