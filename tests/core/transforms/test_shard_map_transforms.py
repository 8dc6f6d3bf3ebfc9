# SPDX-License-Identifier: Apache-2.0
"""shard_map together with other transforms, inside and around."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import shardax as sx
from shardax.errors import TransformError
from tests.core.transforms.sharded import BY_TYPE, RULES, P, Table, batch, close


@pytest.mark.parametrize("inside", [True, False], ids=["grad inside", "grad outside"])
def test_custom_vjp_rule_is_used_with_its_writes(auto_mesh: Mesh, inside: bool) -> None:
    @sx.custom_vjp
    def scale(table: Table, x: Any) -> Any:
        table.calls += 1
        return table.rows * x

    def bwd(residuals: Any, cotangent: Any) -> Any:
        rows, x = residuals
        return {"rows": 10 * cotangent * x}, cotangent * rows

    scale.defvjp(lambda table, x: (scale(table, x), (table.rows.value, x)), bwd)

    def loss(table: Table, x: Any) -> Any:
        return jax.lax.psum(scale(table, x).sum(), "data")

    shard = functools.partial(sx.shard_map, mesh=auto_mesh, in_specs=(BY_TYPE, P("data")))
    gradient = (
        shard(sx.grad(loss), out_specs=P("data")) if inside else sx.grad(shard(loss, out_specs=P()))
    )
    table = Table()
    assert sx.jit(gradient)(table, jnp.arange(8.0))["rows"].tolist() == [10.0 * i for i in range(8)]
    assert int(table.calls) == 1


def test_rematerialized_dropout_replays_in_every_shard(auto_mesh: Mesh) -> None:
    specs = sx.StateSharding({sx.RngState: P("data"), ...: P()})

    def loss(model: Any, x: Any) -> Any:
        return jax.lax.psum((model.layers[1](model.layers[0](x)) ** 2).sum(), "data")

    def gradient(loss: Any) -> Any:
        rngs = sx.Rngs(params=0, dropout=1)
        layers = sx.nn.Linear(4, 4, rngs=rngs), sx.nn.Dropout(0.5, rngs=rngs)
        run = sx.shard_map(
            sx.grad(loss), mesh=auto_mesh, in_specs=(specs, P("data")), out_specs=P()
        )
        return sx.jit(run)(sx.nn.Sequential(*layers), batch())

    jax.tree.map(close, gradient(sx.remat(loss)), gradient(loss))


def test_custom_derivatives_are_used_inside(auto_mesh: Mesh) -> None:
    @jax.custom_vjp
    def triple(x: Any) -> Any:
        return 3 * x

    triple.defvjp(lambda x: (3 * x, None), lambda _, g: (100 * g,))

    def loss(table: Table) -> Any:
        return jax.lax.psum(triple(table.rows.value).sum(), "data")

    run = sx.shard_map(sx.grad(loss), mesh=auto_mesh, in_specs=BY_TYPE, out_specs=P("data"))
    assert sx.jit(run)(Table())["rows"].tolist() == [100.0] * 8


def test_compiled_functions_loops_and_maps_inside(auto_mesh: Mesh) -> None:
    table = Table()

    def body(table: Table, x: Any) -> tuple[Table, Any]:
        return table, table(x)

    def call(table: Table, x: Any) -> Any:
        table, rows = sx.scan(body, in_axes=(sx.Carry, 0), out_axes=(sx.Carry, 0))(
            table, jnp.stack([x, x])
        )
        doubled = sx.vmap(lambda table, row: table.rows * row, in_axes=(None, 0))(table, rows)
        return sx.jit(lambda table, x: table(x))(table, x) + doubled.sum(0)

    def plain(rows: Any, x: Any) -> tuple[Any, Any]:
        first, second = 2 * rows + x, 4 * rows + x
        return 8 * rows + x + 4 * rows * (first + second), 8 * rows

    x = np.arange(8, dtype=np.float32) / 8
    run = sx.shard_map(call, mesh=auto_mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data"))
    result = sx.jit(run)(table, x)
    expected, rows = plain(np.arange(8), x)
    close(result, expected)
    close(table.rows, rows)
    assert int(table.calls) == 3


def test_shard_dependent_cond_results_vary_by_shard(auto_mesh: Mesh) -> None:
    """``jax.lax.cond`` counts such results as equal in all shards, and is silently wrong."""

    def choose(table: Table, x: Any) -> Any:
        return sx.cond(x.sum() > 10, lambda t, x: t(x), lambda t, x: x, table, x)

    run = sx.shard_map(choose, mesh=auto_mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data"))
    table = Table()
    with pytest.raises(TransformError, match=r"\.table\.calls"):
        run(table, jnp.arange(8.0))
    assert int(table.calls) == 0

    def pick(weight: Any) -> Any:
        shard = jax.lax.axis_index("data")
        by_cond = sx.cond(shard == 0, lambda w: 2 * w, lambda w: 3 * w, weight.value)
        by_switch = sx.switch(shard, [lambda w, n: n * w, lambda w, n: 1.0], weight.value, 10)
        return (by_cond + by_switch)[None]

    both = sx.shard_map(pick, mesh=auto_mesh, in_specs=P(), out_specs=P("data"))
    weight = sx.Param(jnp.float32(1))
    assert sx.jit(both)(weight).tolist() == [12.0, 4.0]
    assert float(sx.jit(sx.grad(lambda w: both(w).sum()))(weight)) == 15.0


@pytest.mark.parametrize("kind", ["while_loop", "fori_loop", "bounded_while_loop"])
def test_loops_of_shard_dependent_length_vary_by_shard(auto_mesh: Mesh, kind: str) -> None:
    """``jax.lax.while_loop`` counts such results as equal in all shards, and is silently wrong."""

    def loop(step: Any, steps: Any) -> Any:
        if kind == "while_loop":
            return sx.while_loop(lambda n: n < steps, step, 0)
        if kind == "fori_loop":
            return sx.fori_loop(0, steps, lambda _, n: step(n), 0)
        return sx.bounded_while_loop(lambda n: n < steps, step, 0, max_steps=8).final

    def shard(step: Any, out_specs: Any) -> Any:
        run = sx.shard_map(
            lambda x: loop(step, x[0])[None] if out_specs else loop(step, x[0]),
            mesh=auto_mesh,
            in_specs=P("data"),
            out_specs=P(out_specs),
        )
        return sx.jit(run)

    steps, table = jnp.array([2, 5]), Table()
    assert shard(lambda n: n + 1, "data")(steps).tolist() == [2, 5]
    with pytest.raises(TransformError, match=r"\.result"):
        shard(lambda n: n + 1, None)(steps)

    def count(table: Table, x: Any) -> None:
        def step(n: Any) -> Any:
            table.calls += 1
            return n + 1

        loop(step, x[0])

    with pytest.raises(TransformError, match=r"\.table\.calls"):
        sx.shard_map(count, mesh=auto_mesh, in_specs=(BY_TYPE, P("data")), out_specs=None)(
            table, steps
        )
    assert int(table.calls) == 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_maps_and_loops_around(mesh: Mesh, compiled: bool) -> None:
    wrap = sx.jit if compiled else lambda f: f
    run = sx.shard_map(
        lambda table, x: table(x), mesh=mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data")
    )
    xs = np.arange(24, dtype=np.float32).reshape(3, 8)
    table = Table()
    mapped = wrap(sx.vmap(run, in_axes=(None, 0)))(table, xs)
    close(mapped, 2 * np.arange(8) + xs)
    assert table.rows.value.tolist() == [2 * i for i in range(8)] and int(table.calls) == 1
    looped = Table()

    def body(table: Table, x: Any) -> tuple[Table, Any]:
        return table, run(table, x)

    loop = sx.scan(body, in_axes=(sx.Carry, 0), out_axes=(sx.Carry, 0))
    _, rows = wrap(loop)(sx.shard(looped, mesh, RULES), xs)
    close(rows, np.stack([2.0 ** (i + 1) * np.arange(8) + xs[i] for i in range(3)]))
    assert int(looped.calls) == 3


def test_shapes_are_known_without_running(mesh: Mesh) -> None:
    run = sx.shard_map(
        lambda table, x: table(x), mesh=mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data")
    )
    table = Table()
    assert sx.eval_shape(run, table, jnp.ones(8)).shape == (8,)
    assert int(table.calls) == 0
    abstract = AbstractMesh((2, 4), ("data", "model"))
    there = sx.shard_map(lambda x: 2 * x, mesh=abstract, in_specs=P("data"), out_specs=P("data"))
    assert sx.eval_shape(there, jax.ShapeDtypeStruct((8,), jnp.float32)).shape == (8,)


def test_compiled_step_is_traced_once(auto_mesh: Mesh) -> None:
    traces = []

    def call(table: Table, x: Any) -> Any:
        traces.append(1)
        return table(x)

    run = sx.jit(
        sx.shard_map(call, mesh=auto_mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data"))
    )
    table = sx.shard(Table(), auto_mesh, RULES)
    x = jax.device_put(jnp.ones(8), NamedSharding(auto_mesh, P("data")))
    for _ in range(3):
        run(table, x)
    assert len(traces) == 1 and int(table.calls) == 3
