# SPDX-License-Identifier: Apache-2.0
"""Prefixes: one entry of an option, spread over everything that it covers."""

from __future__ import annotations

import collections
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax._core.graph.flatten import flatten
from shardax._transforms.lift.alias_paths import alias_paths
from shardax._transforms.lift.prefixes import consistent, expand
from shardax.errors import FilterError, PrefixError, TransformError
from tests.core.transforms.examples import Box, Scale, Tied
from tests.strategies import models

Two = collections.namedtuple("Two", "left right")


def _spread(prefix: Any, tree: Any) -> dict[Any, Any]:
    return {path: entry for path, _, entry in expand(prefix, tree, "in_axes", ("x",))}


# --- filter mappings ---


def test_first_filter_that_matches_gives_the_value() -> None:
    model = Scale()
    mapping = sx.StateSharding({sx.PathContains("calls"): 1, sx.Variable: 2, ...: 3})
    assert _spread(mapping, model) == {("x", "factor"): 2, ("x", "calls"): 1}


def test_filter_mapping_is_immutable_and_compares_entries() -> None:
    entries: dict[Any, Any] = {sx.Param: 0, "tag": None, ...: 2}
    mapping = sx.StateSharding(entries)
    assert list(mapping) == list(entries) and [mapping[key] for key in entries] == [0, None, 2]
    assert len(mapping) == 3 and sx.BatchStat not in mapping
    same = sx.StateSharding(list(entries.items()))
    assert (mapping == same, hash(mapping) == hash(same)) == (True, True)
    assert mapping != sx.StateSharding({**entries, ...: 3}) and mapping != entries
    assert repr(mapping) == "StateSharding({Param: 0, 'tag': None, ...: 2})"


@pytest.mark.parametrize("entries", [{...: 1, sx.Param: 2}, {True: 1, "tag": 2}, {3: 1}])
def test_filters_that_cannot_match_are_refused(entries: Any) -> None:
    with pytest.raises(FilterError):
        sx.StateSharding(entries)


def test_mapping_from_state_matches_exact_paths() -> None:
    model = Box()
    model.a, model.b = Scale(), Scale()
    values = sx.State({"a": {"factor": 1, "calls": 2}, "b": {"factor": 3, "calls": 4}})
    assert _spread(sx.StateSharding(values), model) == {
        ("x", "a", "factor"): 1,
        ("x", "a", "calls"): 2,
        ("x", "b", "factor"): 3,
        ("x", "b", "calls"): 4,
    }


# --- prefixes of trees ---


def test_expand_spreads_one_entry_over_everything_below() -> None:
    tree = {"m": Scale(), "y": [jnp.ones(1), 2.0], "n": None}
    assert _spread(7, tree) == {
        ("x", "m", "factor"): 7,
        ("x", "m", "calls"): 7,
        ("x", "y", 0): 7,
        ("x", "y", 1): 7,
    }
    assert set(_spread(None, tree).values()) == {None}


def test_containers_are_matched_level_by_level() -> None:
    tree = Two([Scale(), 1.0], {"k": (Tied(), 2.0)})
    prefix = Two([sx.StateSharding({sx.Param: "p", ...: "v"}), "a"], {"k": ({"embed": "e"}, "b")})
    assert _spread(prefix, tree) == {
        ("x", "left", 0, "factor"): "p",
        ("x", "left", 0, "calls"): "v",
        ("x", "left", 1): "a",
        ("x", "right", "k", 0, "embed"): "e",
        ("x", "right", "k", 1): "b",
    }


def test_variable_on_its_own_takes_an_entry() -> None:
    assert _spread(5, sx.Param(1.0)) == {("x",): 5}
    assert _spread(sx.StateSharding({sx.Param: 6}), sx.Param(1.0)) == {("x",): 6}


def test_shared_variable_is_listed_by_first_path() -> None:
    assert _spread(1, Tied()) == {("x", "embed"): 1}


@pytest.mark.parametrize(
    ("prefix", "tree", "message"),
    [
        ((1, 2), [1.0, 2.0], r"at \.x: it has a tuple of 2 where the argument has a list of 2"),
        ([1], [1.0, 2.0], r"at \.x: it has a list of 1 where the argument has a list of 2"),
        ({"a": 1, "c": 2}, {"a": 1.0, "b": 2.0}, r"a dict of 'a', 'c' where .* a dict of 'a', 'b'"),
        ({"a": [1]}, {"a": Scale()}, r"argument at \.x\.a, a Scale, is a list"),
        ({"factor": 1}, Scale(), r"no entry for the Variable at \.x\.calls"),
        ((1,), jnp.ones(2), r"has a tuple of 1 where the argument has an array float32\[2\]"),
        (Scale(), Scale(), r"at \.x, a Scale, is a Scale\. Give one entry"),
        (sx.State({"factor": 1}), {"m": Scale()}, r"a State of 'factor' where .* a dict of 'm'"),
        (sx.StateSharding({sx.Param: 1}), Scale(), r"argument at \.x: No filter matches the Var"),
        (
            sx.StateSharding({...: 1}),
            [Scale(), 1.0],
            r"a StateSharding for the argument at \.x\[1\], which",
        ),
    ],
)
def test_unfitting_prefix_names_the_path(prefix: Any, tree: Any, message: str) -> None:
    with pytest.raises(PrefixError, match=message):
        _spread(prefix, tree)


# --- sharing ---


def test_consistent_entries_are_returned_by_variable() -> None:
    model = Tied()
    found = consistent(expand((1, 1), (model, model), "in_axes"), "in_axes")
    assert found == {id(model.embed): ((0, "embed"), 1)}


def test_conflicting_entries_name_both_paths() -> None:
    model = Tied()
    with pytest.raises(TransformError) as caught:
        consistent(expand((1, {"embed": 2}), (model, model), "in_axes"), "in_axes")
    assert "One Param is reached by two paths with different in_axes" in str(caught.value)
    assert "\n  [0].embed: 1\n  [1].embed: 2\n" in str(caught.value)


def test_further_paths_pass_shared_modules_without_cycles() -> None:
    model = Box()
    model.a = Tied()
    model.b = [model.a, model]
    model.a.up = model
    assert alias_paths(flatten(model).graphdef) == ((0, ("a", "head")), (0, ("b", 0, "embed")))


def test_further_paths_may_use_back_references() -> None:
    model = Box()
    model.a = Box()
    model.a.b = Box()
    model.a.b.up = model.a
    model.a.w = sx.Param(jnp.float32(0))
    model.c = model.a.b
    assert alias_paths(flatten(model).graphdef) == ((0, ("c", "up", "w")),)


@given(models())
def test_further_paths_are_valid_paths(model: Any) -> None:
    flat = flatten(model)
    further = alias_paths(flat.graphdef)
    every = {paths[0]: paths[1:] for paths in sx.find_duplicates(model)}
    assert all(path in every[flat.leaf_paths[position]] for position, path in further)
    assert {flat.leaf_paths[position] for position, _ in further} == set(every)


@given(models(), st.integers())
def test_expand_gives_every_variable_exactly_one_entry(model: Any, entry: int) -> None:
    spread = list(expand(entry, model, "in_axes"))
    assert [path for path, _, _ in spread] == list(sx.state(model).flat())
    assert {value for _, _, value in spread} <= {entry}
    by_filter = sx.StateSharding({sx.Param: "param", ...: "other"})
    for _, variable, value in expand(by_filter, model, "in_axes"):
        assert value == ("param" if isinstance(variable, sx.Param) else "other")
