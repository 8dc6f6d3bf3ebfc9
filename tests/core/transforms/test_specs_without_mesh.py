# SPDX-License-Identifier: Apache-2.0
"""Specs in ``in_shardings`` and ``out_shardings`` mean the mesh in scope, and are refused without.

A sharding over an empty mesh would end the process, so what is refused is refused at every call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import NoMeshError
from tests.advice import run_advice
from tests.core.transforms.sharded import spec_of

P = PartitionSpec
X = jnp.ones((8, 8))


class Form(NamedTuple):
    """One way to declare a spec."""

    call: Callable[[sx.Variable[Any], sx.Module], Any]
    place: str  # that the error names


def _apply(m: Any, x: Any) -> Any:
    return m(x)


def _double(v: Any) -> Any:
    return v * 2


def _make(key: Any) -> Any:
    return sx.nn.Linear(8, 8, rngs=sx.Rngs(key))


_numbers = itertools.count()


def _inside() -> Any:
    """Returns a compiled function that shares no program with earlier ones."""
    number = next(_numbers)
    return sx.jit(lambda v, number=number: of_variable(v))


def _specs(tree: Any) -> list[Any]:
    return [spec_of(leaf) for leaf in jax.tree.leaves(tree)]


BY_FILTER = sx.StateSharding({sx.Param: P("data"), ...: P()})

# Functions that are compiled once, so that later calls find what earlier ones left.
of_variable = sx.jit(_double, in_shardings=(P("data"),))
of_module = sx.jit(_apply, in_shardings=(P(), P("data")))
of_filters = sx.jit(_apply, in_shardings=(BY_FILTER, None))
of_state = sx.jit(_apply, in_shardings=({"kernel": P("data"), "bias": P()}, None))
of_container = sx.jit(lambda tree: tree["m"](X), in_shardings=({"m": P("data"), "n": None},))
of_arrays = sx.jit(lambda w, x: w @ x, in_shardings=(P(), P("data")))
of_result = sx.jit(_apply, out_shardings=P("data"))
of_results = sx.jit(lambda m, x: (x, {"y": m(x)}), out_shardings=(None, {"y": P("data")}))
of_made = sx.jit(_make, out_shardings=BY_FILTER)
of_both = sx.jit(_apply, in_shardings=(P(), None), out_shardings=P("data"))

FORMS = {
    "Variable": Form(lambda v, m: of_variable(v), "for v"),
    "Module": Form(lambda v, m: of_module(m, X), "for m"),
    "filters": Form(lambda v, m: of_filters(m, X), "for m"),
    "state": Form(lambda v, m: of_state(m, X), "for m.bias"),
    "container": Form(lambda v, m: of_container({"m": m, "n": X}), "for tree.m"),
    "arrays": Form(lambda v, m: of_arrays(X, X), "for w"),
    "result": Form(lambda v, m: of_result(m, X), "for the result,"),
    "results": Form(lambda v, m: of_results(m, X), "for the result at [1].y"),
    "made": Form(lambda v, m: of_made(jax.random.key(0)), "for the result (and"),
    "both": Form(lambda v, m: of_both(m, X), "for m"),
    "keyword": Form(lambda v, m: of_module(m, x=X), "for m"),
    "lower": Form(lambda v, m: of_module.lower(m, X).compile()(m, X), "for m"),
    "trace": Form(lambda v, m: of_result.trace(m, X).out_info, "for the result,"),
    "inside jit": Form(lambda v, m: _inside()(v), "for v"),
    "inside vmap": Form(lambda v, m: sx.vmap(of_variable, in_axes=None, axis_size=2)(v), "for v"),
    "inside grad": Form(lambda v, m: sx.grad(lambda v: of_variable(v).sum())(v), "for v"),
    "Jitted": Form(lambda v, m: sx.Jitted(m, in_shardings=P("data"))(X), "for x"),
    "Jitted result": Form(lambda v, m: sx.Jitted(m, out_shardings=P())(X), "for the result,"),
}


def _no_scope(mesh: Mesh) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _with_statement(mesh: Mesh) -> AbstractContextManager[Any]:
    return mesh


def _names_only(mesh: Mesh) -> AbstractContextManager[Any]:
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "scope"),
    [
        *((name, _no_scope) for name in FORMS),
        *zip(FORMS, itertools.cycle([_with_statement, _names_only]), strict=False),
    ],
)
def test_spec_without_mesh_is_refused_at_every_call(
    name: str, scope: Callable[[Mesh], AbstractContextManager[Any]], auto_mesh: Mesh
) -> None:
    form = FORMS[name]
    v, lazy = sx.Param(jnp.arange(8.0)), _make(0)
    array, sharding = v.value, v.value.sharding

    refused: list[NoMeshError] = []
    for _ in range(3):
        with scope(auto_mesh), pytest.raises(NoMeshError) as caught:
            form.call(v, lazy)
        refused.append(caught.value)
    assert [form.place in str(error) for error in refused] == [True] * 3

    # Nothing was changed.
    assert v.value is array and v.value.sharding == sharding
    assert "lazy" in repr(lazy.kernel) and "lazy" in repr(lazy.bias)

    # The advised scope makes the same call work; without it the call is refused again.
    names = {"jax": jax, "mesh": auto_mesh, "body": lambda: form.call(v, lazy)}
    expected = run_advice(refused[-1], "with jax.set_mesh(mesh): ...", names)
    with jax.set_mesh(auto_mesh):
        assert _specs(form.call(v, lazy)) == _specs(expected)
    with scope(auto_mesh), pytest.raises(NoMeshError):
        form.call(v, lazy)


def test_spec_without_mesh_names_sharding_that_works(auto_mesh: Mesh) -> None:
    v = sx.Param(jnp.arange(8.0))
    with pytest.raises(NoMeshError) as caught:
        of_variable(v)
    code = f"jax.NamedSharding(mesh, jax.{P('data')!r})"
    sharding = run_advice(caught.value, code, {"jax": jax, "mesh": auto_mesh})
    assert sharding == NamedSharding(auto_mesh, P("data"))
    assert sx.jit(_double, in_shardings=(sharding,))(v).sharding == sharding


def test_eval_shape_of_jit_looks_at_no_spec() -> None:
    form = of_both.eval_shape(_make(0), X)
    assert (form.shape, form.dtype) == ((8, 8), jnp.float32)


def test_specs_follow_mesh_in_scope_of_each_call(auto_mesh: Mesh) -> None:
    kinds = (AxisType.Auto, AxisType.Auto)
    transposed = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    v = sx.Param(jnp.arange(8.0))
    for mesh in (auto_mesh, transposed, transposed, auto_mesh, auto_mesh):
        with jax.set_mesh(mesh):
            result = of_variable(v)
        expected = NamedSharding(mesh, P("data"))
        assert (result.sharding, v.value.sharding) == (expected, expected)


def test_compiled_keeps_mesh_that_it_was_traced_with(auto_mesh: Mesh) -> None:
    v = sx.Param(jnp.arange(8.0))
    with jax.set_mesh(auto_mesh):
        compiled = of_variable.lower(v).compile()
    assert compiled(v).tolist() == (2 * jnp.arange(8.0)).tolist()
    assert v.value.sharding == NamedSharding(auto_mesh, P("data"))
