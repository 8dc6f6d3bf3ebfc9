# SPDX-License-Identifier: Apache-2.0
"""What can be said of rules by themselves: against a mesh, before there is any array."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

import shardax as sx
from shardax.errors import NoMeshError, PartitionCheckError, TransformError
from shardax.partition.assignment import assign

MESH = AbstractMesh((2, 4), ("data", "model"))


def found(rules: sx.Rules, mesh: Any = MESH) -> list[tuple[str, str]]:
    """Severity and code of each finding; none of them is about an array."""
    findings = rules.check(mesh)
    assert {finding.path for finding in findings} <= {()}
    return [(finding.severity, finding.code) for finding in findings]


def test_sound_rules_have_nothing_said_of_them() -> None:
    assert found(sx.Rules({"embed": "data", "mlp": "model", "seq": None})) == []
    assert sx.Rules().check() == []


def test_missing_mesh_axis_error_names_the_rule() -> None:
    rules = sx.Rules([("embed", "dta"), ("mlp", ("model", "pipe")), ("seq", ("data", "expert"))])
    findings = rules.check(MESH)
    assert [(f.severity, f.code) for f in findings] == [("error", "unknown-mesh-axis")] * 3
    texts = [str(finding) for finding in findings]
    assert "('embed', 'dta')" in texts[0] and "Did you mean 'data'?" in texts[0]
    assert "'pipe'" in texts[1] and "(data=2, model=4)" in texts[1]
    assert "'expert'" in texts[2]


def test_check_without_mesh_judges_the_rules_alone() -> None:
    assert found(sx.Rules([("embed", "dta"), ("embed", "dta")]), None) == [
        ("warning", "shadowed-rule")
    ]


SHADOWED: dict[str, tuple[Any, str, str]] = {
    "the same rule again": ([("mlp", "model"), ("mlp", "model")], "first", "always serves 'mlp'"),
    "below a rule to None": ([("mlp", None), ("mlp", "model")], "first", "always serves 'mlp'"),
    "below a rule without rivals": (
        [("mlp", "model"), ("mlp", "data")],
        "first",
        "('mlp', 'model') always serves 'mlp'",
    ),
    "wanting what the earlier wants and more": (
        [("vocab", "model"), ("mlp", "model"), ("mlp", ("data", "model"))],
        "first",
        "this one does too",
    ),
    "below a rule that must not lose": (
        [("vocab", "model"), ("mlp", "model"), ("mlp", "data")],
        "error",
        "under on_conflict='error'",
    ),
}


@pytest.mark.parametrize("case", SHADOWED)
def test_unusable_rule_is_a_warning(case: str) -> None:
    pairs, on_conflict, why = SHADOWED[case]
    rules = sx.Rules(pairs, on_conflict=on_conflict)  # pyright: ignore[reportArgumentType] (a str)
    [finding] = [f for f in rules.check(MESH) if f.code != "unused-mesh-axis"]
    assert (finding.severity, finding.code) == ("warning", "shadowed-rule")
    assert str(sx.Rules(pairs[-1:]))[7:-2] in str(finding)
    assert why in str(finding)


@pytest.mark.parametrize("case", SHADOWED)
def test_check_of_a_tree_says_the_same_of_an_unusable_rule(case: str) -> None:
    pairs, on_conflict, _ = SHADOWED[case]
    rules = sx.Rules(pairs, on_conflict=on_conflict)  # pyright: ignore[reportArgumentType] (a str)
    tree = {name: sx.Param(jnp.ones(8), axes=(name,)) for name, _ in rules}
    in_tree = [f for f in sx.check(tree, MESH, rules) if f.code == "shadowed-rule"]
    assert in_tree == [f for f in rules.check(MESH) if f.code == "shadowed-rule"] != []
    position = str(sx.Rules(pairs[-1:]))[7:-2]
    assert not any(
        f.code == "unused-rule" and position in str(f) for f in sx.check(tree, MESH, rules)
    )


def test_second_choice_for_a_name_is_fine() -> None:
    rules = sx.Rules([("vocab", "model"), ("mlp", "model"), ("mlp", "data")])
    assert found(rules) == []


NAMES = ("a", "b", "c")
targets = st.none() | st.lists(st.sampled_from("xyz"), unique=True, max_size=2).map(tuple)
rule_lists = st.lists(st.tuples(st.sampled_from(NAMES), targets), max_size=6)


@given(rule_lists)
def test_law_unusable_rules_are_never_chosen(pairs: Any) -> None:
    rules = sx.Rules(pairs)
    shadowed = [f for f in rules.check() if f.code == "shadowed-rule"]
    arrays = [names for count in range(4) for names in itertools.combinations(NAMES, count)]
    chosen = {i for names in arrays for i in assign(names, rules.pairs).chosen.values()}
    unused = [rule for i, rule in enumerate(rules.pairs) if i not in chosen]
    for finding in shadowed:
        rule = str(finding).removeprefix("The rule ").partition(" is never used")[0]
        assert rule in [str(sx.Rules([pair]))[7:-2] for pair in unused]


def test_mesh_axis_without_rule_is_a_note() -> None:
    mesh = AbstractMesh((2, 4, 1), ("data", "model", "pipe"))
    [finding] = sx.Rules({"mlp": "model"}).check(mesh)
    assert (finding.severity, finding.code) == ("info", "unused-mesh-axis")
    assert "'data' of size 2" in str(finding)
    manual = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Manual, AxisType.Auto))
    assert sx.Rules({"mlp": "model"}).check(manual) == []


# --- validate -------------------------------------------------------------------------------------


def test_valid_rules_are_returned_unchanged(mesh: Mesh) -> None:
    rules = sx.Rules([("embed", "data"), ("mlp", "model"), ("mlp", "data")])  # a warning only
    assert rules.validate(mesh) is rules
    with jax.set_mesh(mesh), sx.axis_rules(rules.validate()):
        assert sx.partition.current_rules() == rules


def test_validate_raises_all_errors_at_once(mesh: Mesh) -> None:
    rules = sx.Rules([("embed", "dta"), ("mlp", "model"), ("heads", "modle")])
    with pytest.raises(PartitionCheckError) as caught:
        rules.validate(mesh)
    assert list(caught.value.findings) == rules.check(mesh)[:2]
    assert "'dta'" in str(caught.value) and "'modle'" in str(caught.value)


def test_validation_without_a_mesh_is_refused() -> None:
    with pytest.raises(NoMeshError, match=r"rules\.validate\(mesh\)"):
        sx.Rules().validate()
    with pytest.raises(TransformError, match="not a mesh"):
        sx.Rules().check("data=2")  # pyright: ignore[reportArgumentType] (on purpose)
