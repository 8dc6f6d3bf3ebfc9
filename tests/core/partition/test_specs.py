# SPDX-License-Identifier: Apache-2.0
"""Specs, shardings and abstract copies of trees, and what there is to find about them."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import NoMeshError, PartitionCheckError
from shardax.partition import batch_sharding, logical_to_mesh_axes
from tests.core.partition.models import RULES, Tower, kernel

TOWER_SPECS = {
    ("embed",): P("model", "data"),
    ("layers", 0, "up"): P("data", "model"),
    ("layers", 0, "down"): P("model", "data"),
    ("layers", 1, "up"): P("data", "model"),
    ("layers", 1, "down"): P("model", "data"),
    ("count",): P(),
    ("stats",): {"mean": P(), "var": P()},
    ("dropout", "dropout", "key"): P(),
    ("dropout", "dropout", "count"): P(),
    ("scale",): P(),
}


def lazy_paths(tree: Any) -> list[Any]:
    return [path for path, variable in sx.iter_variables(tree) if variable.is_lazy]


# --- specs ----------------------------------------------------------------------------------------


def test_module_has_one_spec_per_distinct_variable() -> None:
    specs = sx.partition_specs(Tower(), RULES)
    assert isinstance(specs, sx.State)
    assert specs.flat() == TOWER_SPECS


def test_module_specs_know_their_variables() -> None:
    specs = sx.partition_specs(Tower(depth=1), RULES)
    assert list(specs.filter(sx.Param).flat()) == [
        ("embed",),
        ("layers", 0, "up"),
        ("layers", 0, "down"),
    ]


def test_specs_shardings_and_findings_keep_values_lazy(mesh: Mesh) -> None:
    model = Tower()
    before = lazy_paths(model)
    sx.partition_specs(model, RULES)
    sx.shardings(model, mesh, RULES)
    sx.abstract(model, mesh, RULES)
    sx.check(model, mesh, RULES)
    assert lazy_paths(model) == before
    assert len(before) == 6  # five kernels and a key


def test_pytree_structure_is_kept_and_non_arrays_unspecified() -> None:
    Pair = namedtuple("Pair", ["left", "right"])
    weight = kernel(sx.Rngs(0), (8, 4), ("embed", "mlp"))
    tree = {"pair": Pair(weight, [1.5, "name"]), "array": jnp.ones(3), "none": None}
    assert sx.partition_specs(tree, RULES) == {
        "pair": Pair(P("data", "model"), [None, None]),
        "array": P(),
        "none": None,
    }


def test_classes_of_numbers_are_no_arrays() -> None:
    assert sx.partition_specs([jnp.float32, jnp.zeros(()), int]) == [None, P(), None]


def test_module_inside_pytree_becomes_a_state() -> None:
    first, second = sx.partition_specs((Tower(), {"again": Tower(depth=0)}), RULES)
    assert first.flat() == TOWER_SPECS
    layers = {path: spec for path, spec in TOWER_SPECS.items() if path[0] != "layers"}
    assert second["again"].flat() == layers


def test_state_has_the_specs_of_its_model() -> None:
    state = sx.state(Tower())
    assert sx.partition_specs(state, RULES).flat() == TOWER_SPECS
    assert sx.partition_specs([state], RULES)[0].flat() == TOWER_SPECS


def test_pytree_value_of_one_array_takes_the_names() -> None:
    variable = sx.Variable((jnp.ones((4, 8)),), axes=("embed", "mlp"))
    assert sx.partition_specs(variable, RULES) == (P("data", "model"),)


def test_current_rules_apply_by_default_else_names() -> None:
    weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
    with sx.axis_rules({"mlp": "model"}):
        assert sx.partition_specs(weight) == P(None, "model")
    assert sx.partition_specs(weight) == P("embed", "mlp")


def test_names_are_seen_inside_a_compiled_function_too() -> None:
    seen = []

    @sx.jit
    def look(model: Any) -> None:
        seen.append(sx.partition_specs(model, RULES).flat())

    look(Tower())
    assert seen == [TOWER_SPECS]


@given(
    st.lists(st.sampled_from([None, "embed", "mlp", "vocab", "other"]), max_size=4).filter(
        lambda names: len({n for n in names if n}) == sum(n is not None for n in names)
    )
)
def test_array_spec_is_its_names_under_the_rules(names: list[Any]) -> None:
    variable = sx.Param(jax.ShapeDtypeStruct((8,) * len(names), jnp.float32), axes=tuple(names))
    assert sx.partition_specs(variable, RULES) == logical_to_mesh_axes(names, RULES)


def test_names_on_several_arrays_are_refused_by_path() -> None:
    model = Tower(depth=0)
    model.stats.set_metadata(axes=("embed",))
    with pytest.raises(PartitionCheckError) as caught:
        sx.partition_specs(model, RULES)
    found = [(finding.path, finding.code) for finding in caught.value.findings]
    assert found == [(("stats",), "axes-of-many")]


def test_error_policy_lists_unmapped_names_by_path() -> None:
    rules = sx.Rules({"embed": "data", "vocab": None}, on_unmapped="error")
    with pytest.raises(PartitionCheckError) as caught:
        sx.partition_specs((Tower(depth=1), 1), rules)
    found = [(finding.path, finding.code) for finding in caught.value.findings]
    assert found == [
        ((0, "layers", 0, "up"), "unmapped-name"),
        ((0, "layers", 0, "down"), "unmapped-name"),
    ]
    assert "[0].layers[0].up" in str(caught.value)


# --- shardings ------------------------------------------------------------------------------------


def test_shardings_are_the_specs_over_the_mesh(mesh: Mesh) -> None:
    expected = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), TOWER_SPECS, is_leaf=lambda x: isinstance(x, P)
    )
    assert sx.shardings(Tower(), mesh, RULES).flat() == expected
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        assert sx.shardings(Tower()).flat() == expected


def test_shardings_need_no_devices() -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"))
    weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
    assert sx.shardings([weight], mesh, RULES) == [NamedSharding(mesh, P("data", "model"))]


def test_shardings_without_mesh_error_shows_the_fix() -> None:
    with pytest.raises(NoMeshError, match=r"with jax\.set_mesh\(mesh\)"):
        sx.shardings(Tower(), rules=RULES)


def test_indivisible_and_unknown_axes_are_listed_together(mesh: Mesh) -> None:
    rngs = sx.Rngs(0)
    tree = {
        "fine": kernel(rngs, (8, 8), ("embed", "mlp")),
        "odd": kernel(rngs, (7, 8), ("embed", "mlp")),
        "stray": kernel(rngs, (8, 6), (None, "heads")),
    }
    with pytest.raises(PartitionCheckError) as caught:
        sx.shardings(tree, mesh, {"embed": "data", "mlp": "model", "heads": "tensor"})
    found = [(finding.path, finding.code) for finding in caught.value.findings]
    assert found == [(("odd",), "indivisible"), (("stray",), "unknown-mesh-axis")]


def test_state_of_shardings_works_as_in_shardings(auto_mesh: Mesh) -> None:
    model, tokens = Tower(), jnp.arange(4)
    to = (sx.shardings(model, auto_mesh, RULES), NamedSharding(auto_mesh, P()))
    run = sx.jit(lambda model, tokens: model(tokens), in_shardings=to)
    found = run.lower(model, tokens).compile().input_shardings[0][0]
    assert found["layers"][0]["up"].spec == P("data", "model")
    assert np.allclose(run(model, tokens), Tower()(tokens), atol=1e-5)


def test_batch_sharding_is_determined_by_names(mesh: Mesh) -> None:
    rules = {"batch": "data", "seq": None, "odd": P.UNCONSTRAINED}
    expected = NamedSharding(mesh, P("data", None, None))
    assert batch_sharding(("batch", "seq", "odd"), mesh, rules) == expected
    with pytest.raises(PartitionCheckError, match="tensor"):
        batch_sharding(("batch",), mesh, {"batch": "tensor"})
    with pytest.raises(NoMeshError, match="batch_sharding"):
        batch_sharding(("batch",), None, rules)


# --- abstract copies ------------------------------------------------------------------------------


def test_abstract_copy_has_shapes_shardings_and_sharing(mesh: Mesh) -> None:
    model = Tower()
    copy = sx.abstract(model, mesh, RULES)
    assert type(copy) is Tower
    assert copy is not model
    assert copy.head is copy.embed
    assert sx.graphdef(copy) == sx.graphdef(model)
    described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), sx.state(copy).flat())
    expected = {
        path: jax.tree.map(
            lambda x, s: (x.shape, x.dtype, s), value, sx.shardings(model, mesh, RULES).flat()[path]
        )
        for path, value in sx.state(model).flat().items()
    }
    assert described == expected


def test_abstract_copy_lowers_without_allocating(auto_mesh: Mesh) -> None:
    model = Tower()
    copy = sx.abstract(model, auto_mesh, RULES)
    tokens = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=NamedSharding(auto_mesh, P()))
    compiled = sx.jit(lambda model, tokens: model(tokens)).lower(copy, tokens).compile()
    found = compiled.input_shardings[0][0]["layers"][1]["down"]
    assert found.is_equivalent_to(NamedSharding(auto_mesh, P("model", "data")), 2)
    assert lazy_paths(model)[0] == ("embed",)


def test_abstract_pytree_keeps_sharing_between_its_modules(mesh: Mesh) -> None:
    model = Tower(depth=0)
    first, (second, number), state = sx.abstract((model, [model.embed, 3], sx.state(model)), mesh)
    assert second is first.embed
    assert number is None
    assert state["embed"] == jax.ShapeDtypeStruct(
        (12, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, None))
    )


def test_abstract_copy_without_mesh_keeps_existing_shardings(mesh: Mesh) -> None:
    placed = NamedSharding(mesh, P("data"))
    here = sx.Param(jax.device_put(jnp.ones(8), placed))
    anywhere = kernel(sx.Rngs(0), (8, 4), ("embed", "mlp"))
    here_copy, anywhere_copy = sx.abstract([here, anywhere], rules=RULES)
    assert here_copy.value == jax.ShapeDtypeStruct((8,), jnp.float32, sharding=placed)
    assert anywhere_copy.value == jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert anywhere_copy.sharding is None


# --- findings -------------------------------------------------------------------------------------


def test_check_finds_problems_of_trees_and_rules(mesh: Mesh) -> None:
    big = sx.Param(jax.ShapeDtypeStruct((1024, 1024), jnp.float32), axes=("rows", None))
    odd = sx.Param(jax.ShapeDtypeStruct((6,), jnp.float32), axes=("mlp",))
    found = sx.check({"big": big, "odd": odd}, mesh, {"mlp": "model", "expert": "data"})
    assert [(finding.severity, finding.path, finding.code) for finding in found] == [
        ("warning", ("big",), "large-replicated"),
        ("error", ("odd",), "indivisible"),
        ("info", (), "unused-rule"),
    ]
    assert str(found[1]).startswith(".odd: dimension 0 ('mlp') has size 6")


def test_check_judges_rules_alone_and_accepts_sound_models(mesh: Mesh) -> None:
    assert sx.check(Tower(), mesh, RULES) == []
    assert sx.check(Tower(), None, RULES) == []
    assert [finding.code for finding in sx.check(Tower(), None, {**dict(RULES), "mpl": None})] == [
        "unused-rule"
    ]
