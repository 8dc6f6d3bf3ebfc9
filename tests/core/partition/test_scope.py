# SPDX-License-Identifier: Apache-2.0
"""The rules in scope and the mesh in scope."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shardax.errors import PartitionError, TransformError
from shardax.partition.context import axis_rules, current_rules, logical_to_mesh_axes, resolve_rules
from shardax.partition.mesh import resolve_mesh
from shardax.partition.rules import Rules
from tests.advice import run_advice

A, B = Rules({"embed": "x"}), Rules({"embed": "y"})


# --- rules ----------------------------------------------------------------------------------------


def test_current_rules_without_scope_are_empty_and_replicate_everything() -> None:
    assert current_rules() == Rules()
    assert logical_to_mesh_axes(("embed", "mlp")) == P(None, None)


def test_scope_is_pickled_with_its_rules() -> None:
    again = pickle.loads(pickle.dumps(axis_rules(A)))
    with axis_rules(B), again:
        assert current_rules() == A
    assert current_rules() == Rules()


def test_inner_rules_replace_outer_until_exit() -> None:
    with axis_rules(A) as outer:
        with axis_rules({"mlp": "y"}):
            assert logical_to_mesh_axes(("embed", "mlp")) == P(None, "y")
        assert current_rules() == outer == A
    assert current_rules() == Rules()


def test_rules_come_back_after_an_exception() -> None:
    with pytest.raises(KeyError), axis_rules(A):
        raise KeyError("inside")
    assert current_rules() == Rules()


def test_decorated_function_uses_rules_and_may_recurse() -> None:
    @axis_rules(A)
    def count(depth: int, *, rules: Any = None) -> list[Rules]:
        """Counts."""
        return [current_rules()] + (count(depth - 1) if depth else [])

    assert count(2) == [A, A, A]
    assert (count.__name__, count.__doc__) == ("count", "Counts.")
    assert current_rules() == Rules()


def test_scope_object_can_be_reentered_and_nested() -> None:
    scope = axis_rules(A)
    with scope:
        with axis_rules(B), scope:
            assert current_rules() == A
        assert current_rules() == A
    with scope:
        assert current_rules() == A
    assert current_rules() == Rules()


def test_scopes_belong_to_a_thread() -> None:
    seen: dict[str, Rules] = {}
    scope = axis_rules(A)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        seen["before"] = current_rules()
        with scope:
            inside.set()
            leave.wait(10)
            seen["inside"] = current_rules()
        seen["after"] = current_rules()

    thread = threading.Thread(target=other)
    with axis_rules(B):
        with scope:
            thread.start()
            assert inside.wait(10)
        assert current_rules() == B
        leave.set()
    thread.join(10)
    assert seen == {"before": Rules(), "inside": A, "after": Rules()}


def test_malformed_rules_raise_before_the_scope_begins() -> None:
    with pytest.raises(PartitionError, match="Rule 0"):
        axis_rules([("embed",)])


def _generator() -> Any:
    yield


async def _coroutine() -> None: ...


async def _async_generator() -> Any:
    yield


@pytest.mark.parametrize("function", [_generator, _coroutine, _async_generator])
def test_generators_and_coroutines_cannot_be_decorated(function: Callable[..., Any]) -> None:
    with pytest.raises(PartitionError, match="after the call") as caught:
        axis_rules(A)(function)
    names = {"axis_rules": axis_rules, "rest": A, "body": current_rules}
    assert run_advice(caught.value, "with axis_rules(...)", names) == A


def test_axis_rules_retrace_a_jitted_function_only_when_changed() -> None:
    traced: list[Rules] = []

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        traced.append(current_rules())
        return 2 * x

    for rules in (A, B, Rules(A.pairs), Rules(B.pairs), Rules(), A):
        with axis_rules(rules):
            double(jnp.ones(2))
    double(jnp.ones(2))
    assert traced == [A, B, Rules()]


def test_rules_given_come_before_rules_in_scope() -> None:
    with axis_rules(A):
        assert resolve_rules() == A
        assert resolve_rules(B) is B
        assert resolve_rules({"embed": "y"}) == B


@given(st.lists(st.sampled_from(["x", "y", "z"]), max_size=6), st.integers(0, 6))
def test_law_nested_scopes_restore_in_reverse_order(axes: Any, depth: int) -> None:
    def descend(rest: list[str]) -> None:
        before = current_rules()
        if len(axes) - len(rest) == depth:
            raise StopIteration
        if rest:
            try:
                with axis_rules({"embed": rest[0]}):
                    assert logical_to_mesh_axes(("embed",)) == P(rest[0])
                    descend(rest[1:])
            finally:
                assert current_rules() is before

    try:
        descend(axes)
    except StopIteration:
        assert depth <= len(axes)
    assert current_rules() == Rules()


# --- mesh -----------------------------------------------------------------------------------------


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(request.param,) * 2)


def test_mesh_given_is_returned_as_it_is(mesh: Mesh) -> None:
    other = AbstractMesh((2,), ("z",))
    with jax.set_mesh(mesh):
        assert resolve_mesh(other) is other
    assert resolve_mesh(mesh) is mesh


def test_something_else_given_raises() -> None:
    with pytest.raises(TransformError, match=r"\{'data': 2\}.*jax\.make_mesh"):
        resolve_mesh({"data": 2})  # type: ignore[arg-type]  # the wrong type is the point


def test_resolve_mesh_without_mesh_in_scope_is_none_under_jit() -> None:
    seen = []
    jax.jit(lambda x: (seen.append(resolve_mesh()), x)[1])(1.0)
    assert [*seen, resolve_mesh()] == [None, None]


def test_set_mesh_is_concrete_outside_abstract_inside_tracing(mesh: Mesh) -> None:
    seen = []
    with jax.set_mesh(mesh):
        assert resolve_mesh() is mesh
        jax.jit(lambda x: (seen.append(resolve_mesh()), x)[1])(1.0)
    assert seen == [mesh.abstract_mesh]
    assert resolve_mesh() is None


def test_mesh_of_use_abstract_mesh_is_found(mesh: Mesh) -> None:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert resolve_mesh() == mesh.abstract_mesh


def test_use_abstract_mesh_inside_set_mesh_comes_first(mesh: Mesh) -> None:
    inner = AbstractMesh((8,), ("z",))
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(inner):
        assert resolve_mesh() == inner


def test_inside_shard_map_the_mesh_has_manual_axes(mesh: Mesh) -> None:
    seen: list[Any] = []

    def body(x: jax.Array) -> jax.Array:
        seen.append(resolve_mesh())
        return x

    sharded = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P("data")))
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(sharded)
    assert {found.manual_axes for found in seen} == {("data", "model")}


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_mesh_of_with_statement_is_found_while_tracing() -> None:
    mesh = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), ("p", "q"))
    seen = []
    with mesh:
        seen.append(resolve_mesh())
        jax.jit(lambda x: (seen.append(resolve_mesh()), x)[1])(1.0)
        jax.vmap(lambda x: (seen.append(resolve_mesh()), x)[1])(jnp.ones(2))
        jax.grad(lambda x: (seen.append(resolve_mesh()), x)[1])(1.0)
    assert seen == [mesh] * 4
    assert resolve_mesh() is None


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_set_mesh_comes_before_a_with_statement(mesh: Mesh) -> None:
    with Mesh(np.array(jax.devices()[:2]), ("p",)), jax.set_mesh(mesh):
        assert resolve_mesh() is mesh
