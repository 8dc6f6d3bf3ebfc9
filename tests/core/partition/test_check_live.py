# SPDX-License-Identifier: Apache-2.0
"""What ``check`` sees in a tree as a whole: states of optimizers, and live arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import train
from tests.core.partition.models import RULES, Layer, Tower


def found(tree: Any, mesh: Any, rules: Any = RULES, **options: Any) -> dict[Any, tuple[str, str]]:
    """Path to (severity, code), without the notes about unused rules."""
    findings = sx.check(tree, mesh, rules, **options)
    return {f.path: (f.severity, f.code) for f in findings if f.code != "unused-rule"}


# --- states of optimizers -------------------------------------------------------------------------


def pair(axes: bool = True) -> tuple[Any, Any]:
    model = Layer(sx.Rngs(0))
    optimizer = train.Optimizer(model, optax.adam(1e-3))
    if not axes:
        optimizer.opt_state[0]["nu"]["up"].set_metadata(axes=None)
    return model, optimizer


def test_state_split_at_least_like_parameter_is_fine(mesh: Mesh) -> None:
    assert found(pair(), mesh) == {}
    assert found(pair(), mesh, {"mlp": "model"}, overrides={sx.OptState: {"embed": "data"}}) == {}


def test_state_split_less_than_its_parameter_warns(mesh: Mesh) -> None:
    tree = pair(axes=False)
    path = (1, "opt_state", 0, "nu", "up")
    assert found(tree, mesh) == {path: ("warning", "state-larger-than-parameter")}
    [finding] = [f for f in sx.check(tree, mesh, RULES) if f.path == path]
    facts = ["[1].opt_state[0].nu.up: ", "into 1 part,", "[0].up into 8", "8 times as much"]
    assert [fact for fact in facts if fact not in str(finding)] == [], str(finding)
    assert tree[0].up.is_lazy


def test_override_splitting_states_less_warns_for_each(mesh: Mesh) -> None:
    warned = found(pair(), mesh, overrides={sx.OptState: P()})
    assert set(warned.values()) == {("warning", "state-larger-than-parameter")}
    assert len(warned) == 4


def test_optimizer_alone_is_enough(auto_mesh: Mesh) -> None:
    assert list(found(pair(axes=False)[1], auto_mesh)) == [("opt_state", 0, "nu", "up")]


def test_state_of_unclear_parameter_is_not_judged(auto_mesh: Mesh) -> None:
    tree = {
        "a": {"w": sx.Param(jnp.ones((8, 8)), axes=("embed", "mlp"))},
        "b": {"w": sx.Param(jnp.ones((8, 8)), axes=("mlp", "embed"))},
        "mu": {"w": sx.OptState(jnp.ones((8, 8)))},
    }
    assert found(tree, auto_mesh) == {}


def test_states_of_a_functional_state_are_judged(auto_mesh: Mesh) -> None:
    tree = {"params": sx.state(pair()[0]), "opt": sx.state(pair(axes=False)[1], sx.OptState)}
    assert found(tree, auto_mesh) == {
        ("opt", "opt_state", 0, "nu", "up"): ("warning", "state-larger-than-parameter")
    }


# --- live arrays ----------------------------------------------------------------------------------


def test_model_laid_out_by_names_has_no_findings(mesh: Mesh) -> None:
    model = sx.shard(Tower(), mesh, RULES)
    assert found(model, mesh) == {}
    assert found(model, mesh.abstract_mesh) == {}


@pytest.mark.parametrize("abstract", [False, True])
def test_array_laid_out_otherwise_than_named_warns(mesh: Mesh, abstract: bool) -> None:
    model = sx.shard(Tower(), mesh, RULES)
    weight = model.layers[1].up
    weight.value = jax.device_put(weight.value, NamedSharding(mesh, P("model", "data")))
    where = mesh.abstract_mesh if abstract else mesh
    assert found(model, where) == {("layers", 1, "up"): ("warning", "misplaced")}
    [finding] = [f for f in sx.check(model, where, RULES) if f.code == "misplaced"]
    facts = [
        ".layers[1].up: ",
        "P('data', 'model')",
        "P('model', 'data')",
        "shard(model, mesh, rules)",
    ]
    assert [fact for fact in facts if fact not in str(finding)] == [], str(finding)
    sx.shard(model, mesh, RULES)
    assert found(model, where) == {}


def test_model_placed_by_other_rules_is_reported(mesh: Mesh) -> None:
    model = sx.shard(Layer(sx.Rngs(0)), mesh, RULES)
    warned = found(model, mesh, {"mlp": "model"})
    assert warned == {("up",): ("warning", "misplaced"), ("down",): ("warning", "misplaced")}


def test_specs_that_mean_the_same_agree(auto_mesh: Mesh) -> None:
    flat = jax.make_mesh((8, 1), ("data", "model"))
    weight = sx.Param(jnp.ones((8, 8)), axes=("embed", "mlp"))
    weight.value = jax.device_put(weight.value, NamedSharding(flat, P("data")))
    assert found(weight, flat) == {}
    assert found(weight, flat.abstract_mesh) == {}


def test_check_reports_another_memory_than_was_asked_for(mesh: Mesh) -> None:
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    if len(kinds) < 2:
        pytest.skip("the devices have one memory only")
    model = sx.shard(Layer(sx.Rngs(0)), mesh, RULES, memory_kind={is_up: "pinned_host"})
    assert found(model, mesh) == {("up",): ("warning", "misplaced")}
    assert found(model, mesh, memory_kind={is_up: "pinned_host"}) == {}


def is_up(path: Any, variable: Any) -> bool:
    return path[-1] == "up"


def test_array_left_elsewhere_is_a_warning(mesh: Mesh) -> None:
    model = sx.shard(Layer(sx.Rngs(0)), mesh, RULES)
    model.up.value = jax.device_put(model.up.value, jax.devices()[3])
    assert found(model, mesh) == {("up",): ("warning", "elsewhere")}


def test_model_not_on_mesh_has_no_findings(mesh: Mesh) -> None:
    lazy, live = Tower(), Tower()
    sx.unshard(sx.shard(live, mesh, RULES))
    assert found(lazy, mesh) == {}
    assert found(live, mesh) == {}
    assert lazy.embed.is_lazy


# --- thresholds -----------------------------------------------------------------------------------


def test_check_takes_what_counts_as_large() -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"))
    weight = sx.Param(jnp.ones((16, 16)))
    assert found(weight, mesh) == {}
    assert found(weight, mesh, large_bytes=1023) == {(): ("warning", "large-replicated")}
    assert found(weight, mesh, large_bytes=1024) == {}
    assert found([weight, sx.Param(jnp.ones(1))], mesh, large_bytes=0, large_fraction=0.5) == {
        (0,): ("warning", "large-replicated")
    }


# --- Auto and Explicit axes for one dimension -----------------------------------------------------

MIXED = jax.make_mesh((2, 4), ("auto", "typed"), axis_types=(AxisType.Auto, AxisType.Explicit))


def both(order: tuple[str, ...]) -> tuple[Any, sx.Rules]:
    """A model of one array and rules that split its first dimension over both axes."""
    weight = sx.Param(jnp.arange(128.0).reshape(16, 8), axes=("both", None))
    return {"weight": weight}, sx.Rules({"both": order})


def test_auto_axis_before_explicit_warns_with_better_order() -> None:
    model, rules = both(("auto", "typed"))
    [finding] = sx.check(model, MIXED, rules)
    assert (finding.severity, finding.code) == ("warning", "axis-type-order")
    assert finding.path == ("weight",)
    assert "('both', ('auto', 'typed'))" in str(finding)
    assert "Split by ('typed', 'auto')" in str(finding)
    overrides = {...: P(("auto", "typed"))}
    [given] = sx.check({"w": model["weight"]}, MIXED, {}, overrides=overrides)
    assert (given.severity, given.code, given.path) == ("warning", "axis-type-order", ("w",))


@pytest.mark.parametrize("order", [("auto", "typed"), ("typed", "auto")])
def test_mixed_axis_types_survive_a_program_in_recommended_order_only(order: Any) -> None:
    model, rules = both(order)
    sx.shard(model, MIXED, rules)
    assert model["weight"].sharding.is_equivalent_to(NamedSharding(MIXED, P(order)), 2)

    @sx.jit
    def double(model: Any) -> None:
        model["weight"].value *= 2

    with jax.set_mesh(MIXED):
        double(model)
    codes = [finding.code for finding in sx.check(model, MIXED, rules)]
    wrong = order == ("auto", "typed")
    assert codes == (["axis-type-order", "misplaced"] if wrong else [])
    assert model["weight"].value.tolist() == (2 * np.arange(128.0).reshape(16, 8)).tolist()


def test_axis_of_size_one_has_no_order() -> None:
    mesh = AbstractMesh((1, 4), ("auto", "typed"), axis_types=MIXED.axis_types)
    model, rules = both(("auto", "typed"))
    assert sx.check(model, mesh, rules) == []
