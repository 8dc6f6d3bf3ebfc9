# SPDX-License-Identifier: Apache-2.0
"""shard_map: shards of Variables, what is written, and ways to call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

import shardax as sx
from shardax.errors import PrefixError, TransformError
from tests.advice import run_advice
from tests.core.transforms.examples import Tied
from tests.core.transforms.sharded import (
    BY_TYPE,
    RULES,
    Block,
    P,
    Table,
    batch,
    close,
    mean_over,
    spec_of,
)
from tests.strategies import assert_same_model

# --- shards and writes ---


def test_function_sees_shards_and_writes_follow_specs(mesh: Mesh) -> None:
    table, shapes = Table(), []

    def call(table: Table, x: Any) -> Any:
        shapes.append((table.rows.shape, table.calls.shape, x.shape))
        return table(x)

    run = sx.shard_map(call, mesh=mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data"))
    result = run(table, jnp.ones(8))
    assert shapes == [((4,), (), (4,))]
    assert result.tolist() == [1 + 2 * i for i in range(8)]
    assert table.rows.value.tolist() == [2 * i for i in range(8)] and int(table.calls) == 1
    assert spec_of(result) == spec_of(table.rows) == ("data",)
    assert spec_of(table.calls) == ()
    assert table.rows.axes == ("rows",)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_sharded_model_matches_one_device(mesh: Mesh, compiled: bool) -> None:
    block, alone, x = Block(), Block(), batch()
    specs = sx.partition_specs(block, RULES)
    run = sx.shard_map(
        lambda block, x: block(x), mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data")
    )
    result = (sx.jit(run) if compiled else run)(block, x)
    close(result, alone(x))
    close(block.mean, alone.mean)
    assert spec_of(block.mean) == ("model",)


def test_gradients_inside_and_outside_match_one_device(mesh: Mesh) -> None:
    x = batch()
    specs = sx.partition_specs(Block(), RULES)

    def loss(block: Block, x: Any) -> Any:
        return mean_over("data", jnp.mean(block(x) ** 2))

    expected = sx.jit(sx.grad(loss))(Block(), x)
    entries = {"mesh": mesh, "in_specs": (specs, P("data"))}
    inside = sx.jit(sx.shard_map(sx.grad(loss), out_specs=specs.filter(sx.Param), **entries))
    outside = sx.jit(sx.grad(sx.shard_map(loss, out_specs=P(), **entries)))
    found = inside(Block(), x)
    for gradient in (found, outside(Block(), x)):
        assert list(gradient.flat()) == list(expected.flat())
        jax.tree.map(close, gradient, expected)
    assert spec_of(found["up"]["kernel"]) == (None, "model")


def test_equal_writes_of_replicated_values_are_kept(mesh: Mesh) -> None:
    seen = sx.BatchStat(jnp.float32(0))

    def record(seen: Any, x: Any) -> None:
        seen[...] = jax.lax.psum(x.sum(), ("data", "model"))

    entries = {"in_specs": (None, P(("data", "model"))), "out_specs": None}
    sx.jit(sx.shard_map(record, mesh=mesh, **entries))(seen, jnp.arange(8.0))
    assert float(seen) == 28.0 and seen.value.sharding.is_fully_replicated


def test_objects_keep_identity_and_structural_changes_return(auto_mesh: Mesh) -> None:
    table = Table()

    def grow(table: Table, x: Any) -> Any:
        table.name = "grown"
        table.squares = sx.Param(table.rows**2)
        table.rows.set_metadata(note="inside")
        return table, {"new": sx.Variable(x), "same": table.rows}

    specs = sx.StateSharding({sx.PathContains("calls"): P(), ...: P("data")})
    run = sx.shard_map(
        grow,
        mesh=auto_mesh,
        in_specs=(specs, P("data")),
        out_specs=(specs, {"new": P("data"), "same": P("data")}),
    )
    returned, rest = sx.jit(run)(table, jnp.ones(8))
    assert returned is table and rest["same"] is table.rows
    assert table.name == "grown" and table.squares.value.tolist() == [i * i for i in range(8)]
    assert dict(table.rows.metadata) == {"note": "inside"}
    assert spec_of(table.squares) == spec_of(rest["new"]) == ("data",)


def test_pytree_values_take_one_spec_or_several(auto_mesh: Mesh) -> None:
    pair = sx.Variable({"a": jnp.arange(4.0), "b": jnp.float32(3)})

    def double(pair: Any) -> Any:
        pair.value = jax.tree.map(lambda x: 2 * x, pair.value)
        return pair["a"].shape

    specs = sx.State.from_flat({(): {"a": P("data"), "b": P()}})
    shape = sx.jit(sx.shard_map(double, mesh=auto_mesh, in_specs=(specs,), out_specs=P()))(pair)
    assert list(map(int, shape)) == [2]
    assert pair["a"].tolist() == [0, 2, 4, 6] and float(pair["b"]) == 6
    assert (spec_of(pair["a"]), spec_of(pair["b"])) == (("data",), ())
    wrong = sx.State.from_flat({(): {"a": P("data")}})
    with pytest.raises(PrefixError, match=r"\.pair"):
        sx.shard_map(double, mesh=auto_mesh, in_specs=(wrong,), out_specs=P())(pair)


def test_exception_leaves_everything_as_it_was(auto_mesh: Mesh) -> None:
    table = Table()
    before = sx.clone(table)

    def fail(table: Table) -> None:
        table(1.0)
        table.new = sx.Param(jnp.ones(2))
        raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        sx.shard_map(fail, mesh=auto_mesh, in_specs=BY_TYPE, out_specs=P())(table)
    assert_same_model(table, before)


# --- ways to call ---


def test_functions_methods_partials_and_callable_modules(auto_mesh: Mesh) -> None:
    expected = [1 + 2 * i for i in range(8)]

    class Decorated(Table):
        @sx.shard_map(mesh=auto_mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data"))
        def step(self, x: Any) -> Any:
            """Doc."""
            return self(x)

    by_method = Decorated()
    result = sx.jit(lambda model, x: model.step(x))(by_method, jnp.ones(8))
    assert result.tolist() == expected and int(by_method.calls) == 1
    assert Decorated.step.__doc__ == "Doc."

    def scaled(scale: float, table: Table, x: Any) -> Any:
        return scale * table(x)

    entries = {"mesh": auto_mesh, "out_specs": P("data")}
    partial = sx.shard_map(functools.partial(scaled, 1.0), in_specs=(BY_TYPE, P("data")), **entries)
    assert sx.jit(partial)(Table(), jnp.ones(8)).tolist() == expected

    whole, bound = Table(), Table()  # what a function is bound to is whole in every shard
    for function, table in [(whole, whole), (bound.__call__, bound)]:
        run = sx.shard_map(function, mesh=auto_mesh, in_specs=P(), out_specs=P())
        assert sx.jit(run)(jnp.ones(8)).tolist() == expected and int(table.calls) == 1


def test_flax_11_arguments_may_be_given_by_name(auto_mesh: Mesh) -> None:
    def call(table: Table, x: Any, offset: Any = 0.0, scale: Any = 1.0) -> Any:
        return scale * (table(x) + offset)

    specs = (BY_TYPE, P("data"), P(), P("data"))
    run = sx.shard_map(call, mesh=auto_mesh, in_specs=specs, out_specs=P("data"))
    x, scale = jnp.ones(8), jnp.full(8, 2.0)
    expected = [2 * (1 + 2 * i) for i in range(8)]

    @sx.jit
    def called_in_all_ways() -> Any:
        return [
            run(Table(), x, 0.0, scale),
            run(Table(), scale=scale, x=x),
            run(x=x, offset=0.0, scale=scale, table=Table()),
            run(Table(), x),
        ]

    *by_name, by_default = called_in_all_ways()
    assert [result.tolist() for result in by_name] == [expected] * 3
    assert by_default.tolist() == [1 + 2 * i for i in range(8)]
    with pytest.raises(TypeError, match=r"missing .* argument: 'x'"):
        run(table=Table())


def test_keyword_only_arguments_take_the_single_spec(auto_mesh: Mesh) -> None:
    def add(x: Any, *, y: Any) -> Any:
        return x + y

    x = jnp.arange(8.0)
    both = sx.shard_map(add, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))
    assert both(x, y=x).tolist() == (2 * x).tolist()
    one = sx.shard_map(add, mesh=auto_mesh, in_specs=(P("data"),), out_specs=P("data"))
    assert one(x, y=1.0).tolist() == (x + 1).tolist()


@pytest.mark.parametrize(
    ("specs", "arguments", "message"),
    [
        ((P("data"),), (1.0, 2.0), "1 entry.* takes x, y, z.* gives x, y"),
        ((P(), P(), P(), P()), (1.0, 2.0), "4 entries"),
        (({"a": P()}, P()), (1.0, 2.0), r"in_specs .*\.x"),
        ((BY_TYPE, P()), (1.0, 2.0), r"StateSharding .* at \.x"),
        ((sx.StateSharding({sx.Param: P()}), P()), (Table(), 2.0), r"\.calls"),
        ((sx.State({"rows": P()}), P()), (Table(), 2.0), r"\.x\.calls"),
    ],
)
def test_unfitting_specs_are_refused(
    auto_mesh: Mesh, specs: Any, arguments: Any, message: str
) -> None:
    def first(x: Any, y: Any, z: Any = 0) -> Any:
        return y

    run = sx.shard_map(first, mesh=auto_mesh, in_specs=specs, out_specs=P())
    with pytest.raises(PrefixError, match=message):
        run(*arguments)


@pytest.mark.parametrize(
    "entry",
    [
        0,
        "data",
        sx.StateAxes({...: 0}),
        sx.StateSharding({...: 0}),
        (P(), {"x": 1}),
        P(P.UNCONSTRAINED),
        NamedSharding(jax.make_mesh((1,), ("data",)), P()),
    ],
)
def test_invalid_specs_are_refused_at_definition(entry: Any) -> None:
    with pytest.raises(PrefixError, match="in_specs gives") as caught:
        sx.shard_map(lambda x: x, in_specs=entry, out_specs=P())
    if "an entry is a PartitionSpec" in str(caught.value):
        names = {"sx": sx, "model": Table()}
        specs = run_advice(caught.value, "sx.partition_specs(model)", names)
        sx.shard_map(lambda x: x, in_specs=specs, out_specs=P())
    with pytest.raises(PrefixError, match="out_specs gives"):
        sx.shard_map(lambda x: x, in_specs=P(), out_specs=entry)


def test_axis_names_as_string_is_refused() -> None:
    with pytest.raises(PrefixError, match=r"axis_names='data' .* \{'data'\}"):
        sx.shard_map(lambda x: x, in_specs=P(), out_specs=P(), axis_names="data")


# --- sharing ---


def test_shared_variable_has_one_spec(auto_mesh: Mesh) -> None:
    table = Table()
    rows = table.rows

    def call(table: Table, rows: Any) -> Any:
        assert table.rows is rows
        rows[...] = rows + 1
        return rows

    def run(second: Any, out: Any = None) -> Any:
        entries = {"in_specs": (BY_TYPE, second), "out_specs": out or P("data")}
        return sx.jit(sx.shard_map(call, mesh=auto_mesh, **entries))(table, rows)

    assert run(P("data")) is rows and rows.value.tolist() == [i + 1 for i in range(8)]
    assert run(P("data", None)) is rows
    assert run(sx.StateSharding({sx.Variable: P("data")})) is rows
    assert run(sx.State.from_flat({(): P("data")})) is rows
    before = rows.value.tolist()
    with pytest.raises(TransformError, match=r"\.table\.rows: .*\n +\.rows: ") as found:
        run(P())
    assert "P('data',)" in str(found.value) and "P()" in str(found.value)
    with pytest.raises(TransformError, match="in_specs and out_specs"):
        run(P("data"), P(None))
    assert rows.value.tolist() == before


def test_tied_parameters_have_one_gradient(auto_mesh: Mesh) -> None:
    def loss(tied: Tied, x: Any) -> Any:
        return jax.lax.pmean((tied.embed * tied.head * x).mean(), "data")

    run = sx.shard_map(sx.grad(loss), mesh=auto_mesh, in_specs=(P(), P("data")), out_specs=P())
    gradient = sx.jit(run)(Tied(3.0), jnp.ones(4))
    assert {path: float(g) for path, g in gradient.flat().items()} == {("embed",): 6.0}
