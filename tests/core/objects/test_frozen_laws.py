# SPDX-License-Identifier: Apache-2.0
"""Laws of the three forms, over random object graphs: each way out of a form has a way back."""

from __future__ import annotations

from typing import Any

import jax
from hypothesis import given, note, settings

import shardax as sx
from tests.core.objects.copies import COPIES
from tests.strategies import (
    Edit,
    apply_edit,
    assert_equal_values,
    assert_same_model,
    edits,
    models,
    objects_of,
)
from tests.structure import structure_epoch

FILTERS: list[tuple[Any, ...]] = [(), (sx.Param,), ("slow",), (sx.PathContains("kernel"), sx.Cache)]


@given(model=models())
@settings(max_examples=15)
def test_bind_undoes_unbind(model: Any) -> None:
    for filters in FILTERS:
        note(repr(filters))
        slots, variables = sx.unbind(model, *filters)
        bound = sx.bind(slots, variables)
        assert sx.graphdef(bound) == sx.graphdef(model)
        pairs = zip(sx.iter_variables(bound), sx.iter_variables(model), strict=True)
        assert all(ours == theirs and v is w for (ours, v), (theirs, w) in pairs)


@given(model=models())
@settings(max_examples=15)
def test_law_unbind_takes_filter_matches_in_order(model: Any) -> None:
    for filters in FILTERS:
        note(repr(filters))
        expected = list(sx.iter_variables(model, *filters))
        slots, variables = sx.unbind(model, *filters)
        _, frozen = sx.unbind(model, *filters, freeze=True)
        assert [id(v) for v in variables] == [id(v) for _, v in expected]
        assert [v.label for v in frozen] == [path for path, _ in expected]
        taken = {id(v) for v in variables}
        rest = [id(v) for _, v in sx.iter_variables(model) if id(v) not in taken]
        assert sorted(id(v) for _, v in sx.iter_variables(slots)) == sorted(rest)


@given(model=models())
def test_thaw_undoes_freeze_with_new_variables(model: Any) -> None:
    thawed = sx.thaw(sx.freeze(model))
    assert_same_model(thawed, model)
    assert not {id(o) for o in objects_of(thawed)} & {id(o) for o in objects_of(model)}


@given(model=models())
def test_law_binding_frozen_values_restores_frozen_model(model: Any) -> None:
    slots, frozen = sx.unbind(model, freeze=True)
    assert_same_model(sx.bind(slots, frozen), sx.freeze(model))
    assert jax.tree.leaves(slots) == []


@given(model=models(), changes=edits())
@settings(max_examples=15)
def test_law_unbind_and_bind_leave_the_model_unchanged(model: Any, changes: list[Edit]) -> None:
    structure, values, at = sx.graphdef(model), sx.state(model), structure_epoch()
    slots, frozen = sx.unbind(model, freeze=True)
    other = sx.thaw(sx.bind(slots, frozen))
    assert structure_epoch() == at
    for change in changes:
        apply_edit(other, change)
    assert sx.graphdef(model) == structure
    assert_equal_values(sx.state(model), values)


@given(model=models())
@settings(max_examples=15)
def test_law_every_form_survives_every_copy(model: Any) -> None:
    slots, frozen = sx.unbind(model, sx.Param, freeze=True)
    half = sx.freeze(slots, sx.BatchStat)
    whole = sx.bind(half, frozen)
    for name, duplicate in COPIES.items():
        note(name)
        copied = duplicate(half)
        assert_same_model(copied, half)
        assert_same_model(sx.bind(copied, frozen), whole)
        assert all(map(_equal_and_hashed_alike, duplicate(frozen), frozen))


def _equal_and_hashed_alike(one: Any, other: Any) -> bool:
    return (one == other) is True and hash(one) == hash(other)
