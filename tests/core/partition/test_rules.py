# SPDX-License-Identifier: Apache-2.0
"""Rules: priority semantics, policies, validation, and agreement with flax.linen."""

from __future__ import annotations

import copy
import enum
import itertools
import json
import pathlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from jax.sharding import PartitionSpec as P

from shardax.errors import PartitionError, ShardaxError
from shardax.partition.assignment import mesh_axes_of
from shardax.partition.context import logical_to_mesh_axes
from shardax.partition.rules import Rules

ANY = PartitionSpec.UNCONSTRAINED
GOLDEN = json.loads(pathlib.Path(__file__).with_name("golden_linen_rules.json").read_text())

LOGICAL = ("a", "b", "c", "d")
MESH_AXES = ("x", "y", "z")
targets = st.one_of(
    st.none(),
    st.just(ANY),
    st.sampled_from(MESH_AXES),
    st.lists(st.sampled_from(MESH_AXES), unique=True, min_size=1).map(tuple),
)
rule_lists = st.lists(st.tuples(st.sampled_from(LOGICAL), targets), max_size=8)
plain_names = st.permutations((*LOGICAL, None, ANY)).flatmap(
    lambda order: st.integers(0, len(order)).map(lambda count: tuple(order[:count]))
)
merged_names = st.permutations(LOGICAL).flatmap(
    lambda order: st.integers(1, 3).map(lambda cut: (tuple(order[:cut]), *order[cut:]))
)
all_names = st.one_of(plain_names, merged_names)


# --- agreement with flax --------------------------------------------------------------------------


def _read(word: str) -> Any:
    if word in ("-", "*"):
        return None if word == "-" else ANY
    return tuple(word.split("+")) if "+" in word else word


def test_logical_to_mesh_axes_agrees_with_flax_linen() -> None:
    assert len(GOLDEN["rules"]) * len(GOLDEN["names"]) > 6000
    different = []
    for text, row in GOLDEN["rules"].items():
        rules = Rules([(pair.split("=")[0], _read(pair.split("=")[1])) for pair in text.split()])
        for names, expected in zip(GOLDEN["names"], row, strict=True):
            spec = logical_to_mesh_axes(map(_read, names.split()), rules)
            if spec != P(*map(_read, expected.split())):
                different.append((text, names, expected, spec))
    assert different == []


def test_names_none_give_none() -> None:
    assert logical_to_mesh_axes(None, {"a": "x"}) is None


def test_logical_to_mesh_axes_of_no_names_is_an_empty_spec() -> None:
    assert logical_to_mesh_axes((), {"a": "x"}) == P()


# --- priority -------------------------------------------------------------------------------------


def test_order_of_rules_not_of_dimensions_decides() -> None:
    rules = [("mlp", "x"), ("embed", "x"), ("embed", "y")]
    assert logical_to_mesh_axes(("embed", "mlp"), rules) == P("y", "x")
    assert logical_to_mesh_axes(("mlp", "embed"), rules) == P("x", "y")


def test_first_rule_of_a_name_wins() -> None:
    assert logical_to_mesh_axes(("embed",), [("embed", "x"), ("embed", "y")]) == P("x")


def test_target_with_taken_mesh_axis_falls_through() -> None:
    rules = [("a", "x"), ("b", ("x", "y")), ("b", "z")]
    assert logical_to_mesh_axes(("b", "a"), rules) == P("z", "x")


def test_rule_to_none_ends_the_search() -> None:
    assert logical_to_mesh_axes(("a",), [("a", None), ("a", "x")]) == P(None)


def test_merged_dimension_splits_over_axes_of_all_names() -> None:
    rules = {"batch": "x", "length": ("y", "z"), "embed": "x", "heads": None}
    assert logical_to_mesh_axes((("batch", "length"), "embed"), rules) == P(("x", "y", "z"), None)
    assert logical_to_mesh_axes((("heads", "unknown"),), rules) == P(None)
    assert logical_to_mesh_axes((("a", "b"),), {"a": "x", "b": ANY}) == P(ANY)


@given(all_names, rule_lists)
def test_law_spec_has_entry_per_dimension_without_repeats(names: Any, pairs: Any) -> None:
    spec = Rules(pairs).spec(names)
    used = [axis for entry in spec for axis in mesh_axes_of(entry)]
    assert len(spec) == len(names)
    assert len(used) == len(set(used))


@given(all_names, rule_lists)
def test_law_rules_of_absent_names_change_nothing(names: Any, pairs: Any) -> None:
    flat = {part for name in names for part in (name if isinstance(name, tuple) else (name,))}
    related = [pair for pair in pairs if pair[0] in flat]
    assert Rules(pairs).spec(names) == Rules(related).spec(names)


@given(plain_names, st.permutations(list(zip(LOGICAL, (*MESH_AXES, None), strict=True))))
def test_law_order_of_independent_rules_is_irrelevant(names: Any, pairs: Any) -> None:
    assert Rules(pairs).spec(names) == Rules(sorted(pairs)).spec(names)


@given(st.permutations(LOGICAL), rule_lists)
def test_law_transposed_names_give_the_transposed_spec(order: Any, pairs: Any) -> None:
    by_name = dict(zip(LOGICAL, Rules(pairs).spec(LOGICAL), strict=True))
    assert Rules(pairs).spec(order) == P(*(by_name[name] for name in order))


@given(plain_names, rule_lists)
def test_law_all_rules_to_none_replicate(names: Any, pairs: Any) -> None:
    spec = Rules([(name, None) for name, _ in pairs]).spec(names)
    assert spec == P(*(ANY if name is ANY else None for name in names))


# --- policies -------------------------------------------------------------------------------------


def test_unmapped_name_is_replicated_by_default() -> None:
    assert Rules({"embed": "x"}).spec(("embed", "mlp")) == P("x", None)


def test_error_policy_names_unmapped_and_similar_names() -> None:
    rules = Rules({"embed": "x", "mlp": "y"}, on_unmapped="error")
    with pytest.raises(PartitionError) as caught:
        rules.spec(("embd", "other"))
    message = str(caught.value)
    assert "no rule mentions 'embd', 'other'" in message
    assert "Did you mean 'embed' for 'embd'?" in message
    assert "('embd', None)" in message


def test_rule_to_none_counts_as_mapped() -> None:
    assert Rules({"embed": None}, on_unmapped="error").spec(("embed", None)) == P(None, None)


def test_name_with_only_late_rules_counts_as_mapped() -> None:
    rules = Rules([("a", "x"), ("b", "x")], on_unmapped="error")
    assert rules.spec(("a", "b")) == P("x", None)


def test_conflict_raises_under_error_and_names_both_rules() -> None:
    rules = Rules([("embed", "x"), ("mlp", ("y", "x")), ("mlp", "z")], on_conflict="error")
    with pytest.raises(PartitionError) as caught:
        rules.spec(("mlp", "embed"))
    message = str(caught.value)
    assert "mesh axis 'x' is wanted by 'mlp' through the rule ('mlp', ('y', 'x'))" in message
    assert "'embed' already has it through ('embed', 'x')" in message


@given(all_names, rule_lists)
def test_law_policies_raise_or_agree(names: Any, pairs: Any) -> None:
    lenient, strict = Rules(pairs), Rules(pairs, on_conflict="error", on_unmapped="error")
    assignment = lenient.assign(names)
    if assignment.unmapped or assignment.passed_over:
        with pytest.raises(PartitionError):
            strict.spec(names)
    else:
        assert strict.spec(names) == lenient.spec(names)


# --- names that are wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("embed", r"one string; .* \('embed',\)"),
        (3, "3 of type int"),
        (("embed", 4), "entry 1 is 4 of type int"),
        ((("embed", None), "mlp"), "entry 0 is"),
        (("embed", "mlp", "embed"), "'embed' more than once.*'embed_in'"),
        ((("a", "b"), "b"), "'b' more than once"),
    ],
)
def test_malformed_names_raise(names: Any, text: str) -> None:
    with pytest.raises(PartitionError, match=text):
        logical_to_mesh_axes(names, {"embed": "x"})


def test_blank_entries_may_repeat() -> None:
    assert logical_to_mesh_axes((None, ANY, None, ANY), {}) == P(None, ANY, None, ANY)


# --- the object -----------------------------------------------------------------------------------


def test_pairs_mappings_lists_and_rules_are_equivalent() -> None:
    expected = (("a", "x"), ("b", ("x", "y")), ("c", None))
    forms: list[Any] = [
        expected,
        [["a", "x"], ["b", ["x", "y"]], ["c", []]],
        {"a": "x", "b": ("x", "y"), "c": None},
        iter(expected),
        Rules(expected),
    ]
    assert [Rules(form).pairs for form in forms] == [expected] * len(forms)


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        (None, "not of None"),
        ("embed", "not of 'embed'"),
        ([("a", "x"), "bx"], "Rule 1 is 'bx', not a pair"),
        ([("a", "x", "y")], "Rule 0 is .* not a pair"),
        ([(None, "x")], "the logical name None is of type NoneType"),
        ([("a", 3)], "Rule 0 for 'a' has the target 3 of type int"),
        ([("a", ("x", None))], "Rule 0 for 'a' .* names of mesh axes only"),
        ([("a", ("x", ("y",)))], "write a second rule for 'a'"),
        ({"a": ("x", "y", "x")}, r"holds a mesh axis twice.*Write \('x', 'y'\)"),
    ],
)
def test_malformed_rules_raise(pairs: Any, text: str) -> None:
    with pytest.raises(PartitionError, match=text) as caught:
        Rules(pairs)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ShardaxError)


def test_unknown_policies_raise() -> None:
    with pytest.raises(PartitionError, match="on_conflict='last'"):
        Rules([], on_conflict="last")  # type: ignore[arg-type]  # the wrong value is the point
    with pytest.raises(PartitionError, match="on_unmapped=''"):
        Rules([], on_unmapped="")  # type: ignore[arg-type]  # the wrong value is the point


def test_rules_of_rules_keep_policies_unless_told_otherwise() -> None:
    strict = Rules({"a": "x"}, "error", "error")
    assert (Rules(strict).on_conflict, Rules(strict).on_unmapped) == ("error", "error")
    assert Rules(strict, on_conflict="first").on_conflict == "first"
    assert strict.extend({"b": "y"}).on_unmapped == "error"


def test_extend_adds_below_and_override_above() -> None:
    rules = Rules({"a": "x"})
    assert rules.extend({"a": "y"}).pairs == (("a", "x"), ("a", "y"))
    assert rules.override({"a": "y"}).pairs == (("a", "y"), ("a", "x"))
    assert rules.pairs == (("a", "x"),)


def test_iteration_length_names_and_mesh_axes() -> None:
    rules = Rules([("a", "x"), ("b", ("y", "x")), ("a", None)])
    assert list(rules) == [("a", "x"), ("b", ("y", "x")), ("a", None)]
    assert (len(rules), rules.names, rules.mesh_axes) == (3, ("a", "b"), ("x", "y"))
    assert not Rules()


def test_repr_is_the_code_that_makes_the_rules() -> None:
    rules = Rules([("a", "x"), ("b", ("x", "y")), ("c", None), ("d", ANY)], on_conflict="error")
    assert repr(rules) == (
        "Rules([('a', 'x'), ('b', ('x', 'y')), ('c', None), "
        "('d', PartitionSpec.UNCONSTRAINED)], on_conflict='error')"
    )
    assert eval(repr(rules)) == rules


def test_members_of_string_enumerations_count_as_their_values() -> None:
    class Name(enum.StrEnum):
        EMBED = "embed"
        MODEL = "model"

    rules = Rules([(Name.EMBED, Name.MODEL), ("mlp", (Name.MODEL, "data"))])
    assert repr(rules) == "Rules([('embed', 'model'), ('mlp', ('model', 'data'))])"
    assert rules.spec((Name.EMBED, None)) == P("model", None)


def test_rules_are_immutable() -> None:
    rules = Rules({"a": "x"})
    with pytest.raises(AttributeError, match=r"immutable.*rules\.replace"):
        rules.pairs = ()
    with pytest.raises(AttributeError, match="immutable"):
        del rules.pairs
    assert rules.pairs == (("a", "x"),)


@given(rule_lists, rule_lists, *[st.sampled_from(["first", "error"])] * 2)
def test_law_equal_exactly_when_pairs_and_policies_are(
    one: Any, other: Any, policy: Any, other_policy: Any
) -> None:
    left, right = Rules(one, policy), Rules(other, other_policy)
    assert (left == right) == ((one, policy) == (other, other_policy))
    if left == right:
        assert hash(left) == hash(right)
    assert left != left.replace(on_unmapped="error")
    assert (left == right) == (repr(left) == repr(right))


@given(rule_lists)
def test_law_copies_and_pickles_are_equal(pairs: Any) -> None:
    rules = Rules(pairs, on_unmapped="error")
    for same in (copy.copy(rules), copy.deepcopy(rules), pickle.loads(pickle.dumps(rules))):
        assert same == rules and hash(same) == hash(rules)


def test_rules_compare_with_other_types_as_different() -> None:
    assert Rules({"a": "x"}) != (("a", "x"),)
    assert Rules({"a": "x"}) != Mesh


def test_assignment_reports_what_happened() -> None:
    rules = Rules([("a", "x"), ("b", "x"), ("c", ("y", "x")), ("c", "y")])
    assignment = rules.assign(("c", "b", "a", "d"))
    assert assignment.entries == ("y", None, "x", None)
    assert assignment.chosen == {"a": 0, "c": 3}
    assert [(loss.rule, loss.mesh_axis, loss.winner) for loss in assignment.passed_over] == [
        (("b", "x"), "x", ("a", "x")),
        (("c", ("y", "x")), "x", ("a", "x")),
    ]
    assert assignment.unmapped == ("d",)


def test_merged_names_cannot_share_a_mesh_axis() -> None:
    for first, second in itertools.permutations(("a", "b")):
        assert Rules([(first, "x"), (second, "x")]).spec((("a", "b"),)) == P(("x",))
