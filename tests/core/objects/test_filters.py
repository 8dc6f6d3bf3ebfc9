# SPDX-License-Identifier: Apache-2.0
"""Filters: which Variables are meant, and in which order filters decide."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax._core.state.filters import to_predicate, to_predicates
from shardax.errors import FilterError
from tests.strategies import Custom, models

PARAM, CUSTOM, STAT = sx.Param(1.0), Custom(1.0), sx.BatchStat(1.0)
TAGGED = sx.Param(1.0, tag="slow")
MANY_TAGS = sx.Param(1.0, tags=("slow", "head"))
PATH = ("layers", 0, "attn", "kernel")


@pytest.mark.parametrize(
    ("filter", "matched"),
    [
        (..., [PARAM, CUSTOM, STAT, TAGGED, MANY_TAGS]),
        (True, [PARAM, CUSTOM, STAT, TAGGED, MANY_TAGS]),
        (None, []),
        (False, []),
        (sx.Param, [PARAM, CUSTOM, TAGGED, MANY_TAGS]),
        (Custom, [CUSTOM]),
        ("slow", [TAGGED, MANY_TAGS]),
        ("head", [MANY_TAGS]),
        ("hea", []),
        (lambda path, variable: variable is STAT, [STAT]),
        ([sx.BatchStat, "slow"], [STAT, TAGGED, MANY_TAGS]),
        ((Custom, sx.BatchStat), [CUSTOM, STAT]),
        (sx.All(sx.Param, "slow"), [TAGGED, MANY_TAGS]),
        (sx.All(), [PARAM, CUSTOM, STAT, TAGGED, MANY_TAGS]),
        (sx.Any(Custom, "head"), [CUSTOM, MANY_TAGS]),
        (sx.Any(), []),
        (sx.Not(sx.Param), [STAT]),
        (sx.Not(sx.All(sx.Param, sx.Not("slow"))), [STAT, TAGGED, MANY_TAGS]),
        (sx.PathContains("attn"), [PARAM, CUSTOM, STAT, TAGGED, MANY_TAGS]),
        (sx.PathContains("mlp"), []),
    ],
)
def test_filter_matches_what_it_says(filter: Any, matched: list[Any]) -> None:
    predicate = to_predicate(filter)
    candidates = [PARAM, CUSTOM, STAT, TAGGED, MANY_TAGS]
    assert [id(v) for v in candidates if predicate(PATH, v)] == [id(v) for v in matched]


def test_string_given_as_tags_is_one_tag() -> None:
    variable = sx.Param(1.0, tags="dropout_rate")
    assert to_predicate("dropout_rate")((), variable)
    assert not to_predicate("dropout")((), variable)


@pytest.mark.parametrize(
    ("key", "exact", "matches"),
    [
        (0, True, True), (False, True, False), ("0", True, False), ("att", True, False),
        ("att", False, True), (1, True, False),
    ],
)  # fmt: skip
def test_path_contains_compares_steps_exactly_unless_told_otherwise(
    key: Any, exact: bool, matches: bool
) -> None:
    assert sx.PathContains(key, exact=exact)(PATH, PARAM) is matches


def test_filters_apply_to_states_as_to_models() -> None:
    model = sx.List([PARAM, STAT, TAGGED])
    state = sx.state(model)
    for item in (sx.Param, "slow", sx.Not("slow"), sx.PathContains(2)):
        assert list(state.filter(item).flat()) == list(sx.state(model, item).flat())


def test_combinations_compare_by_content() -> None:
    assert sx.All(sx.Param, "a") == sx.All(sx.Param, "a")
    assert hash(sx.Not(sx.Any("a"))) == hash(sx.Not(sx.Any("a")))
    assert sx.All(sx.Param, "a") != sx.Any(sx.Param, "a")
    assert sx.Not("a") != sx.Not("b")
    assert sx.PathContains("a") != sx.PathContains("a", exact=False)


def test_filters_of_frozen_values_compare_by_content() -> None:
    frozen = sx.Frozen(sx.PathContains("bias"))
    assert {frozen, sx.Frozen(sx.PathContains("bias"))} == {frozen}
    assert frozen != sx.Frozen(sx.PathContains("kernel")) and frozen != sx.PathContains("bias")


def test_filters_show_what_they_are_made_of() -> None:
    bias = "PathContains(key='bias', exact=True)"
    assert repr(sx.Frozen(sx.PathContains("bias"))) == f"Frozen({bias})"
    both = sx.Any(sx.Not(None), sx.All(sx.PathContains("bias"), ...))
    assert repr(both) == f"Any(Not(Nothing()), All({bias}, Everything()))"


def test_everything_must_come_last() -> None:
    with pytest.raises(FilterError, match=r"Filter 1 of 2 is `\.\.\.`.*Put `\.\.\.` last"):
        to_predicates((..., sx.Param))
    with pytest.raises(FilterError, match="Filter 2 of 3"):
        sx.split(sx.List([PARAM]), sx.Param, True, "slow")
    assert len(to_predicates((sx.Param, ..., None))) == 3


@pytest.mark.parametrize("wrong", [1, 1.5, {"a": 1}, PARAM], ids=["int", "float", "dict", "Param"])
def test_to_predicate_refuses_what_is_no_filter(wrong: Any) -> None:
    with pytest.raises(FilterError, match=r"not a filter\. Use a Variable type"):
        to_predicate(wrong)


def test_variable_that_no_filter_matches_is_named() -> None:
    model = sx.Dict(layers=[STAT])
    with pytest.raises(FilterError, match=r"BatchStat at \.layers\[0\].*\(Param, 'slow'\).*`...`"):
        sx.split(model, sx.Param, "slow")


@given(
    model=models(),
    filters=st.permutations([sx.Param, "slow", Custom, sx.PathContains("kernel0"), sx.BatchStat]),
)
@settings(max_examples=20)
def test_split_partitions_and_the_first_matching_filter_takes(
    model: Any, filters: list[Any]
) -> None:
    _, *states = sx.split(model, *filters, ...)
    by_path = dict(sx.iter_variables(model))
    taken = [path for state in states for path in state.flat()]
    assert sorted(map(repr, taken)) == sorted(map(repr, by_path))
    predicates = [to_predicate(item) for item in (*filters, ...)]
    for position, state in enumerate(states):
        for path in state.flat():
            matching = [i for i, p in enumerate(predicates) if p(path, by_path[path])]
            assert matching[0] == position
