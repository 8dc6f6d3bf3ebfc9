# SPDX-License-Identifier: Apache-2.0
"""Layout checks: every diagnostic, its severity, its path, and the facts in its message."""

from __future__ import annotations

import math
import pickle
from typing import Any, NamedTuple

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

from shardax.errors import PartitionCheckError, ShardaxError
from shardax.partition import Diagnostic, LogicallyPartitioned, Rules
from shardax.partition.assignment import mesh_axes_of
from shardax.partition.errors import raise_on_errors
from shardax.partition.resolved import ResolvedRules
from shardax.partition.tree.inventory import TreeInventory
from shardax.partition.tree.layout import TreeLayout

ANY = PartitionSpec.UNCONSTRAINED
MESH = AbstractMesh((2, 4), ("data", "model"))
PATH = ("layers", 0, "kernel")
RULES = Rules({"batch": "data", "embed": None, "mlp": "model", "wide": ("data", "model")})


class ArrayRecord(NamedTuple):
    """Names and shape of one array at a path."""

    path: tuple[Any, ...]
    axes: Any
    shape: tuple[int, ...]


def record(axes: Any, shape: tuple[int, ...], *path: Any) -> ArrayRecord:
    return ArrayRecord(path or PATH, axes, shape)


class Boxes:
    """A tree of boxes of float32 shapes, in order, at any paths, which may be the same."""

    def __init__(self, records: list[ArrayRecord]) -> None:
        self.children = [(DictKey(r.path[0]), _nested(r.path[1:], _box(r))) for r in records]


def _box(record: ArrayRecord) -> LogicallyPartitioned:
    return LogicallyPartitioned(jax.ShapeDtypeStruct(record.shape, "float32"), record.axes)


def _nested(path: tuple[Any, ...], leaf: Any) -> Any:
    return {path[0]: _nested(path[1:], leaf)} if path else leaf


jax.tree_util.register_pytree_with_keys(
    Boxes, lambda tree: (tree.children, None), lambda _, each: Boxes([])
)


def specs_for(
    records: list[ArrayRecord], mesh: Any, rules: Rules, **options: Any
) -> tuple[list[PartitionSpec], list[Diagnostic]]:
    """Specs and diagnostics of many arrays, but for that of boxes where there are no rules."""
    layout = TreeLayout(TreeInventory(Boxes(records)), mesh, rules, **options)
    diagnostics = [d for d in layout.diagnostics if d.code != "no-rules"]
    return [spec for specs in layout.specs for spec in specs], diagnostics


def only(findings: list[Diagnostic]) -> Diagnostic:
    assert len(findings) == 1, [str(finding) for finding in findings]
    return findings[0]


def check_facts(finding: Diagnostic, severity: str, code: str, *facts: str) -> None:
    """Asserts severity and code, that the message begins with the path, and each fact in it."""
    assert (finding.severity, finding.code, finding.path) == (severity, code, PATH)
    assert str(finding).startswith(".layers[0].kernel: ")
    assert [fact for fact in facts if fact not in str(finding)] == [], str(finding)


# --- one array ------------------------------------------------------------------------------------


def test_sound_array_has_its_spec_and_no_findings() -> None:
    assert ResolvedRules(MESH, RULES).spec(("embed", "mlp"), (6, 8), PATH) == (P(None, "model"), [])


def test_array_without_names_is_replicated() -> None:
    assert ResolvedRules(MESH, RULES).spec(None, (6, 8), PATH) == (P(), [])


def test_scalar_has_an_empty_spec() -> None:
    assert ResolvedRules(MESH, RULES).spec((), (), PATH) == (P(), [])


def test_indivisible_dimension_error_suggests_dividing_sizes() -> None:
    spec, findings = ResolvedRules(MESH, RULES).spec(("embed", "wide"), (6, 30), PATH)
    assert spec == P(None, ("data", "model"))
    facts = (
        "dimension 1 ('wide') has size 30, which is not divisible by 8",
        "mesh axes data = 2 * model = 4, rule ('wide', ('data', 'model'))",
        "Make the size 24 or 32",
    )
    check_facts(only(findings), "error", "indivisible", *facts)


def test_dimension_smaller_than_parts_suggests_only_larger_size() -> None:
    _, findings = ResolvedRules(MESH, RULES).spec(("mlp",), (3,), PATH)
    check_facts(only(findings), "error", "indivisible", "has size 3,", "Make the size 4,")


def test_dimension_of_size_zero_divides() -> None:
    assert ResolvedRules(MESH, RULES).spec(("mlp",), (0,), PATH) == (P("model"), [])


def test_unknown_mesh_axis_error_omits_it_from_spec() -> None:
    rules = Rules({"mlp": ("data", "modle")})
    spec, findings = ResolvedRules(MESH, rules).spec(("embed", "mlp"), (6, 8), PATH)
    assert spec == P(None, ("data",))
    facts = (
        "dimension 1 ('mlp')",
        "mesh axis 'modle' by rule ('mlp', ('data', 'modle'))",
        "the mesh has the axes (data=2, model=4). Did you mean 'model'?",
    )
    check_facts(only(findings), "error", "unknown-mesh-axis", *facts)


def test_resolved_rules_without_mesh_follow_the_rules_alone() -> None:
    rules = Rules({"mlp": "anything"})
    assert ResolvedRules(None, rules).spec(("mlp",), (7,), PATH) == (P("anything"), [])


def test_number_of_names_must_be_the_rank() -> None:
    spec, findings = ResolvedRules(MESH, RULES).spec(("embed",), (6, 8), PATH)
    assert spec == P()
    facts = ("1 axis names ('embed',)", "2 dimensions, shape (6, 8)")
    check_facts(only(findings), "error", "rank-mismatch", *facts)


@pytest.mark.parametrize("axes", [("mlp", "mlp"), ("mlp", 3), "mlp"])
def test_malformed_names_are_an_error(axes: Any) -> None:
    spec, findings = ResolvedRules(MESH, RULES).spec(axes, (8, 8), PATH)
    assert spec == P()
    check_facts(only(findings), "error", "axis-names", "'mlp'")


def test_name_left_without_mesh_axes_is_a_warning() -> None:
    rules = Rules([("mlp", "model"), ("embed", "model")])
    spec, findings = ResolvedRules(MESH, rules).spec(("embed", "mlp"), (8, 8), PATH)
    assert spec == P(None, "model")
    facts = (
        "the rule ('embed', 'model') was passed over",
        "mesh axis 'model' already splits 'mlp' of the same array by ('mlp', 'model')",
        "'embed' is not split at all",
    )
    check_facts(only(findings), "warning", "mesh-axis-conflict", *facts)


def test_name_served_by_a_later_rule_is_information() -> None:
    rules = Rules([("mlp", "model"), ("embed", "model"), ("embed", "data")])
    spec, findings = ResolvedRules(MESH, rules).spec(("embed", "mlp"), (8, 8), PATH)
    assert spec == P("data", "model")
    fact = "the later rule ('embed', 'data') was used for 'embed'"
    check_facts(only(findings), "info", "mesh-axis-conflict", fact)


def test_conflict_is_an_error_under_that_policy() -> None:
    rules = Rules([("mlp", "model"), ("embed", "model")], on_conflict="error")
    _, findings = ResolvedRules(MESH, rules).spec(("embed", "mlp"), (8, 8), PATH)
    facts = ("mesh axis 'model' is wanted by 'embed'", "'mlp' already has it", "('mlp', 'model')")
    check_facts(only(findings), "error", "mesh-axis-conflict", *facts)


def test_unmapped_name_is_an_error_under_that_policy() -> None:
    rules = RULES.replace(on_unmapped="error")
    spec, findings = ResolvedRules(MESH, rules).spec(("mlp", "embdd"), (8, 8), PATH)
    assert spec == P("model", None)
    facts = ("no rule mentions 'embdd'", "Did you mean 'embed'")
    check_facts(only(findings), "error", "unmapped-name", *facts)


def test_unmapped_name_warns_only_when_likely_misspelled() -> None:
    assert ResolvedRules(MESH, RULES).spec(("mlp", "head_dim"), (8, 8), PATH) == (
        P("model", None),
        [],
    )
    _, findings = ResolvedRules(MESH, RULES).spec(("mlp", "embd"), (8, 8), PATH)
    check_facts(only(findings), "warning", "unmapped-name", "'embd'", "rules for 'embed'")


def test_unconstrained_means_nothing_where_an_array_is_placed() -> None:
    spec, findings = ResolvedRules(MESH, Rules({"free": ANY})).spec(("free", ANY), (8, 8), PATH)
    assert spec == P(None, None)
    for finding, dimension in zip(findings, (0, 1), strict=True):
        check_facts(finding, "warning", "unconstrained", f"dimension {dimension} is UNCONSTRAINED")


def test_resolved_rules_report_all_findings_of_an_array() -> None:
    rules = Rules([("a", "model"), ("b", "model"), ("c", "pipe"), ("d", "data")], "error", "error")
    _, findings = ResolvedRules(MESH, rules).spec(("a", "b", "c", "d", "e"), (5, 8, 8, 3, 8), PATH)
    assert [finding.code for finding in findings] == [
        "unmapped-name",
        "mesh-axis-conflict",
        "unknown-mesh-axis",
        "indivisible",
        "indivisible",
    ]


def test_concrete_and_abstract_meshes_give_the_same() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    for shape in ((6, 8), (6, 30)):
        expected = ResolvedRules(MESH, RULES).spec(("embed", "mlp"), shape, PATH)
        assert ResolvedRules(mesh, RULES).spec(("embed", "mlp"), shape, PATH) == expected


targets = st.sampled_from([None, ANY, "data", "model", "pipe", ("data", "model"), ("pipe", "data")])
rules_of_all_kinds = st.builds(
    Rules, st.lists(st.tuples(st.sampled_from("abc"), targets), max_size=6)
)
arrays = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 16)), unique_by=lambda d: d[0])


@given(arrays, rules_of_all_kinds)
def test_law_without_errors_sharding_exists_and_divides_evenly(dims: Any, rules: Any) -> None:
    names, shape = tuple(name for name, _ in dims), tuple(size for _, size in dims)
    spec, findings = ResolvedRules(MESH, rules).spec(names, shape, PATH)
    sharding = NamedSharding(MESH, spec)  # never raises: unknown mesh axes are left out
    parts = [math.prod(MESH.shape[axis] for axis in mesh_axes_of(entry)) for entry in spec]
    uneven = [size % count != 0 for size, count in zip(shape, parts, strict=True)]
    assert any(uneven) == any(finding.code == "indivisible" for finding in findings)
    if not any(uneven):
        local = tuple(size // count for size, count in zip(shape, parts, strict=True))
        assert sharding.shard_shape(shape) == local


# --- many arrays ----------------------------------------------------------------------------------


def test_specs_come_in_order_and_findings_by_array() -> None:
    records = [
        record(("embed", "mlp"), (8, 30), "up"),
        record(None, (3,), "scale"),
        record(("mlp", "embed"), (8,), "down"),
    ]
    specs, findings = specs_for(records, MESH, Rules({"mlp": "model", "embed": None}))
    assert specs == [P(None, "model"), P(), P()]
    assert [(finding.path, finding.code) for finding in findings] == [
        (("up",), "indivisible"),
        (("down",), "rank-mismatch"),
    ]


def unused(records: list[ArrayRecord], rules: Rules) -> list[tuple[str, str]]:
    _, findings = specs_for(records, MESH, rules)
    return [(f.severity, str(f)) for f in findings if f.code == "unused-rule" and f.path == ()]


def test_rule_whose_name_no_array_has_is_information() -> None:
    found = unused([record(("mlp",), (8,))], Rules({"mlp": "model", "batch": "data"}))
    assert found == [
        (
            "info",
            (
                "The rule ('batch', 'data') was used for no array: none that rules lay out has an "
                "axis 'batch'. It still serves constraints inside programs."
            ),
        )
    ]


def test_rule_that_looks_misspelt_is_a_warning() -> None:
    severity, message = only_pair(unused([record(("embed",), (8,))], Rules({"embd": "data"})))
    assert severity == "warning"
    assert "Did you mean 'embed', which has no rule?" in message


def test_rule_that_an_earlier_one_may_always_serve_is_reported() -> None:
    shadowed = Rules([("mlp", "model"), ("mlp", "data")])
    _, findings = specs_for([record(("mlp",), (8,))], MESH, shadowed)
    assert findings == [f for f in shadowed.check(MESH) if f.code == "shadowed-rule"]
    rules = Rules([("heads", "model"), ("mlp", "model"), ("mlp", "data")])
    records = [record(("mlp",), (8,)), record(("heads",), (8,))]
    _, message = only_pair(unused(records, rules))
    assert "('mlp', 'data') was used for no array: an earlier rule served 'mlp', or" in message


def test_rule_always_losing_its_mesh_axis_is_reported() -> None:
    rules = Rules([("mlp", "model"), ("heads", "model")])
    _, message = only_pair(unused([record(("mlp", "heads"), (8, 8))], rules))
    assert (
        "('heads', 'model') was used for no array: an earlier rule served 'heads', or took"
        in message
    )


def test_rule_used_by_any_array_counts_as_used() -> None:
    rules = Rules([("mlp", "model"), ("heads", "model")])
    assert unused([record(("mlp", "heads"), (8, 8)), record(("heads",), (8,))], rules) == []


def only_pair(found: list[tuple[str, str]]) -> tuple[str, str]:
    assert len(found) == 1, found
    return found[0]


def test_unknown_mesh_axis_in_unused_rule_is_reported() -> None:
    rules = Rules({"mlp": "model", "batch": "replica"})
    _, findings = specs_for([record(("mlp",), (8,))], MESH, rules)
    finding = only(findings)
    assert (finding.severity, finding.code, finding.path) == ("error", "unknown-mesh-axis", ())
    assert "('batch', 'replica') names the mesh axis 'replica'" in str(finding)
    assert "(data=2, model=4)" in str(finding)


def large(records: list[ArrayRecord], rules: Rules, mesh: Any = MESH, **options: Any) -> list[str]:
    _, findings = specs_for(records, mesh, rules, **options)
    assert {f.severity for f in findings if f.code == "large-replicated"} <= {"warning"}
    return [str(finding) for finding in findings if finding.code == "large-replicated"]


BIG = (1024, 1024)


def test_large_replicated_array_warning_names_its_axes() -> None:
    message = large([record(("embed", "heads"), BIG)], Rules({"embed": None}))
    assert len(message) == 1
    assert message[0].startswith(".layers[0].kernel: 4.0 MiB (100 % of all arrays), shape (1024,")
    assert "held whole by each of 8 devices" in message[0]
    assert "Map one of its axes ('embed', 'heads') to a mesh axis" in message[0]


@pytest.mark.parametrize("axes", [None, (None, None)])
def test_large_unnamed_array_warning_asks_for_names(axes: Any) -> None:
    message = large([record(axes, BIG)], RULES)
    assert len(message) == 1 and "Give its dimensions names, axes=(...)" in message[0]


def test_split_or_deliberately_replicated_large_array_is_fine() -> None:
    purposeful = Rules({"embed": None, "heads": None, "mlp": "model"})
    records = [record(("embed", "mlp"), BIG, "a"), record(("embed", "heads"), BIG, "b")]
    assert large(records, purposeful) == []


def test_large_array_without_several_devices_is_fine() -> None:
    records = [record(("embed", "heads"), BIG)]
    assert large(records, Rules(), AbstractMesh((1, 1), ("data", "model"))) == []
    assert large(records, Rules(), None) == []


def test_mesh_axis_of_size_one_is_no_split() -> None:
    mesh = AbstractMesh((8, 1), ("data", "model"))
    assert len(large([record(("embed", "mlp"), BIG)], Rules({"mlp": "model"}), mesh)) == 1


def test_large_is_above_both_thresholds() -> None:
    records = [record(("a",), (1024,), "small"), record(("b",), (7168,), "rest")]
    mib = {"large_bytes": 4096, "large_fraction": 0.0}
    assert len(large(records, Rules(), **mib)) == 1
    assert len(large(records, Rules(), **{**mib, "large_bytes": 4095})) == 2
    assert len(large(records, Rules(), large_bytes=0, large_fraction=0.125)) == 1
    assert len(large(records, Rules(), large_bytes=0, large_fraction=0.12)) == 2
    assert large(records, Rules()) == []


def test_erroneous_array_is_not_also_reported_large() -> None:
    assert large([record(("mlp",), (2**20 + 1,))], RULES.override({"mlp": "pipe"})) == []


def test_specs_for_no_arrays_and_no_rules_finds_nothing() -> None:
    assert specs_for([], MESH, Rules()) == ([], [])


# --- raising --------------------------------------------------------------------------------------


def test_errors_are_raised_together_and_nothing_else_is() -> None:
    records = [record(("mlp",), (30,), "up", "kernel"), record(("mlp",), (31,), "down", "kernel")]
    _, findings = specs_for(records, MESH, Rules({"mlp": "model", "batch": "data"}))
    assert [finding.severity for finding in findings] == ["error", "error", "info"]
    with pytest.raises(PartitionCheckError) as caught:
        raise_on_errors(findings)
    error = caught.value
    assert isinstance(error, ShardaxError) and isinstance(error, ValueError)
    assert error.findings == tuple(findings[:2])
    assert str(error) == (
        f"The layout has 2 problems; nothing was moved.\n  {findings[0]}\n  {findings[1]}"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.findings, str(copy)) == (error.findings, str(error))


def test_nothing_is_raised_without_errors() -> None:
    raise_on_errors([])
    raise_on_errors([Diagnostic("warning", PATH, "unconstrained", "text")])
