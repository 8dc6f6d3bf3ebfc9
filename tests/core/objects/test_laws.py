# SPDX-License-Identifier: Apache-2.0
"""Laws of random object graphs: every way to copy a model keeps structure, sharing and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st

import shardax as sx
from tests.core.objects import copies
from tests.strategies import (
    Edit,
    apply_edit,
    assert_equal_values,
    assert_same_model,
    edits,
    models,
    objects_of,
)
from tests.structure import advance_structure_epoch


def through_many_states(model: Any) -> Any:
    graphdef, *states = sx.split(model, sx.PathContains("kernel0"), sx.Param, "slow", ...)
    return sx.merge(graphdef, *states)


def through_pure_dict(model: Any) -> Any:
    graphdef, state = sx.split(model)
    return sx.merge(graphdef, state.to_pure_dict())


COPIES: dict[str, Callable[[Any], Any]] = {
    **copies.COPIES,
    "split by filters and merge": through_many_states,
    "pure dict": through_pure_dict,
}


@given(model=models())
@settings(max_examples=25)
def test_copies_of_models_have_equal_structure_sharing_values(model: Any) -> None:
    for name, duplicate in COPIES.items():
        note(name)
        assert_same_model(duplicate(model), model)


@given(model=models(), changes=edits())
@settings(max_examples=15)
def test_law_copy_is_independent_of_its_original(model: Any, changes: list[Edit]) -> None:
    structure, values = sx.graphdef(model), sx.state(model)
    for name, duplicate in COPIES.items():
        note(name)
        duplicated = duplicate(model)
        assert not {id(o) for o in objects_of(duplicated)} & {id(o) for o in objects_of(model)}
        for change in changes:
            apply_edit(duplicated, change)
        assert sx.graphdef(model) == structure
        assert_equal_values(sx.state(model), values)


@given(model=models(), changes=edits())
def test_law_cached_flattening_equals_fresh_one(model: Any, changes: list[Edit]) -> None:
    for change in changes:
        sx.graphdef(model)
        apply_edit(model, change)
    remembered = sx.graphdef(model)
    advance_structure_epoch()
    assert remembered == sx.graphdef(model)


@given(model=models(), changes=edits())
def test_equal_edits_of_equal_models_give_equal_models(model: Any, changes: list[Edit]) -> None:
    other = sx.clone(model)
    for change in changes:
        apply_edit(model, change)
        apply_edit(other, change)
    assert_same_model(model, other)


@given(model=models())
def test_variables_are_numbered_by_their_first_path(model: Any) -> None:
    paths = [path for path, _ in sx.iter_variables(model)]
    assert paths == list(sx.state(model).flat()) == sx.graphdef(model).leaf_paths
    assert len({id(variable) for _, variable in sx.iter_variables(model)}) == len(paths)
    for shared in sx.find_duplicates(model):
        assert shared[0] in paths
        assert not set(shared[1:]) & set(paths)


@given(model=models())
def test_update_with_the_models_own_state_changes_nothing(model: Any) -> None:
    before = sx.clone(model)
    sx.update(model, sx.state(model))
    assert_same_model(model, before)


@given(model=models())
def test_jit_identity_returns_the_same_objects_unchanged(model: Any) -> None:
    before, objects = sx.clone(model), objects_of(model)
    assert sx.jit(lambda m: m)(model) is model
    assert [id(item) for item in objects_of(model)] == [id(item) for item in objects]
    assert_same_model(model, before)


@given(model=models(), changes=edits(), times=st.integers(1, 2))
@settings(max_examples=40)
def test_edits_inside_jit_equal_edits_outside(model: Any, changes: list[Edit], times: int) -> None:
    outside = sx.clone(model)

    @sx.jit
    def edit(inner: Any) -> None:
        for change in changes:
            apply_edit(inner, change)

    for _ in range(times):
        edit(model)
        for change in changes:
            apply_edit(outside, change)
    assert_same_model(model, outside)
