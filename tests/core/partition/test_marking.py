# SPDX-License-Identifier: Apache-2.0
"""Constraints that only leave their names in the program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import shardax as sx
from shardax.extend import AxisNameMarks, ScopeSettings

RULES = {"batch": "data", "embed": "model"}


def marks(jaxpr: Any) -> list[Any]:
    return [
        (tuple(e.outvars[0].aval.shape), AxisNameMarks.read(e.params["name"]))
        for e in jaxpr.eqns
        if e.primitive.name == "name"
    ]


def double(x: jax.Array) -> jax.Array:
    return sx.constrain(2 * x, ("batch", ("seq", "head"), PartitionSpec.UNCONSTRAINED, None))


def test_marked_program_holds_names_instead_of_constraints() -> None:
    with ScopeSettings.scope(rules={}, marking=True):
        jaxpr = jax.make_jaxpr(double)(jnp.ones((2, 6, 4, 1)))
    assert marks(jaxpr) == [((2, 6, 4, 1), ("batch", ("seq", "head"), None, None))]
    assert "sharding_constraint" not in str(jaxpr)


def test_marking_needs_no_mesh_and_changes_no_value() -> None:
    with ScopeSettings.scope(rules={}, marking=True):
        out = sx.constrain(jnp.arange(6.0).reshape(2, 3), ("batch", "embed"))
    assert out.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_marks_live_through_gradients() -> None:
    with ScopeSettings.scope(rules={}, marking=True):
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: double(x).sum()))(jnp.ones((2, 6, 4, 1)))
    assert marks(jaxpr)[0] == ((2, 6, 4, 1), ("batch", ("seq", "head"), None, None))


def test_marking_covers_nested_scopes_and_ends() -> None:
    with ScopeSettings.scope(rules={}, marking=True), sx.axis_rules(RULES):
        assert ScopeSettings.current().marking
    assert not ScopeSettings.current().marking


def test_programs_traced_while_marking_are_not_used_outside(auto_mesh: Mesh) -> None:
    compiled = jax.jit(lambda x: sx.constrain(x, ("batch", "embed")))
    x = jnp.ones((8, 16))
    with jax.set_mesh(auto_mesh):
        with ScopeSettings.scope(rules=RULES, marking=True):
            assert compiled(x).sharding.is_fully_replicated
        with sx.axis_rules(RULES):
            assert compiled(x).sharding.spec == PartitionSpec("data", "model")


def test_name_that_others_gave_is_no_mark() -> None:
    assert AxisNameMarks.read("activations") is None
