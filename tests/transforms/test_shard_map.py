# SPDX-License-Identifier: Apache-2.0
"""shard_map: shards of Variables, what is written, what is refused, and other transforms around."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from tests.strategies import Edit, apply_edit, assert_same_model, edits, models
from tests.transforms.examples import Box, Tied

import shardax as sx
from shardax.core.errors import (
    AbstractValueError,
    ArgumentError,
    AxisSizeError,
    ForeignMutationError,
    InconsistentAliasingError,
    MeshError,
    NoMeshError,
    OutputError,
    PrefixError,
    SharedWriteError,
)

P = PartitionSpec
RULES = {"rows": "data", "mlp": "model"}
BY_TYPE = sx.StateSharding({sx.Param: P("data"), ...: P()})


class Table(sx.Module):
    """Eight rows, which a call doubles, and a count of calls."""

    def __init__(self) -> None:
        self.rows = sx.Param(jnp.arange(8.0), axes=("rows",))
        self.calls = sx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.rows[...] = self.rows * 2
        return self.rows + x


class Block(sx.Module):
    """A feed-forward block whose hidden units are split, with a running mean of them."""

    def __init__(self) -> None:
        rngs = sx.Rngs(0)
        self.up = sx.nn.Linear(4, 8, kernel_axes=("embed", "mlp"), rngs=rngs)
        self.down = sx.nn.Linear(8, 4, kernel_axes=("mlp", "embed"), use_bias=False, rngs=rngs)
        self.mean = sx.BatchStat(jnp.zeros(8), axes=("mlp",))

    def __call__(self, x: Any) -> Any:
        hidden = jax.nn.relu(self.up(x))
        self.mean[...] = mean_over("data", hidden.mean(0))
        return sum_over("model", self.down(hidden))


def mean_over(axis: str, x: Any) -> Any:
    return jax.lax.pmean(x, axis) if is_manual(axis) else x


def sum_over(axis: str, x: Any) -> Any:
    return jax.lax.psum(x, axis) if is_manual(axis) else x


def is_manual(axis: str) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return types.get(axis) is AxisType.Manual


def batch() -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).normal(size=(4, 4)), jnp.float32)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def spec_of(array: Any) -> tuple[Any, ...]:
    """The spec of an array on a mesh, without None at its end."""
    spec = list(array.sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return tuple(spec)


# --- shards and writes ---


def test_the_function_sees_shards_and_writes_land_by_their_specs(mesh: Mesh) -> None:
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
def test_a_model_laid_out_by_name_gives_the_result_and_state_of_one_device(
    mesh: Mesh, compiled: bool
) -> None:
    block, alone, x = Block(), Block(), batch()
    specs = sx.partition_specs(block, RULES)
    run = sx.shard_map(
        lambda block, x: block(x), mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data")
    )
    result = (sx.jit(run) if compiled else run)(block, x)
    close(result, alone(x))
    close(block.mean, alone.mean)
    assert spec_of(block.mean) == ("model",)


def test_gradients_inside_and_outside_are_those_of_one_device(mesh: Mesh) -> None:
    x = batch()
    specs = sx.partition_specs(Block(), RULES)

    def loss(block: Block, x: Any) -> Any:
        return mean_over("data", jnp.mean(block(x) ** 2))

    expected = sx.grad(loss)(Block(), x)
    entries = {"mesh": mesh, "in_specs": (specs, P("data"))}
    inside = sx.jit(sx.shard_map(sx.grad(loss), out_specs=specs.filter(sx.Param), **entries))
    outside = sx.jit(sx.grad(sx.shard_map(loss, out_specs=P(), **entries)))
    for gradient in (inside(Block(), x), outside(Block(), x)):
        assert list(gradient.flat()) == list(expected.flat())
        jax.tree.map(close, gradient, expected)
    assert spec_of(inside(Block(), x)["up"]["kernel"]) == (None, "model")


def test_what_is_replicated_and_written_equally_stays_one(mesh: Mesh) -> None:
    seen = sx.BatchStat(jnp.float32(0))

    def record(seen: Any, x: Any) -> None:
        seen[...] = jax.lax.psum(x.sum(), ("data", "model"))

    sx.shard_map(record, mesh=mesh, in_specs=(None, P(("data", "model"))), out_specs=None)(
        seen, jnp.arange(8.0)
    )
    assert float(seen) == 28.0 and seen.value.sharding.is_fully_replicated


def test_objects_keep_their_identity_and_structural_changes_are_carried_back(
    auto_mesh: Mesh,
) -> None:
    table = Table()

    def grow(table: Table, x: Any) -> Any:
        table.name = "grown"
        table.squares = sx.Param(table.rows**2)
        table.rows.set_metadata(note="inside")
        return table, {"new": sx.Variable(x), "same": table.rows}

    specs = sx.StateSharding({sx.PathContains("calls"): P(), ...: P("data")})
    returned, rest = sx.shard_map(
        grow,
        mesh=auto_mesh,
        in_specs=(specs, P("data")),
        out_specs=(specs, {"new": P("data"), "same": P("data")}),
    )(table, jnp.ones(8))
    assert returned is table and rest["same"] is table.rows
    assert table.name == "grown" and table.squares.value.tolist() == [i * i for i in range(8)]
    assert dict(table.rows.metadata) == {"note": "inside"}
    assert spec_of(table.squares) == spec_of(rest["new"]) == ("data",)


def test_values_that_are_pytrees_have_one_spec_or_one_for_each_array(auto_mesh: Mesh) -> None:
    pair = sx.Variable({"a": jnp.arange(4.0), "b": jnp.float32(3)})

    def double(pair: Any) -> Any:
        pair.value = jax.tree.map(lambda x: 2 * x, pair.value)
        return pair["a"].shape

    specs = sx.State.from_flat({(): {"a": P("data"), "b": P()}})
    shape = sx.shard_map(double, mesh=auto_mesh, in_specs=(specs,), out_specs=P())(pair)
    assert list(map(int, shape)) == [2]
    assert pair["a"].tolist() == [0, 2, 4, 6] and float(pair["b"]) == 6
    assert (spec_of(pair["a"]), spec_of(pair["b"])) == (("data",), ())
    wrong = sx.State.from_flat({(): {"a": P("data")}})
    with pytest.raises(PrefixError, match=r"\.pair"):
        sx.shard_map(double, mesh=auto_mesh, in_specs=(wrong,), out_specs=P())(pair)


def test_an_exception_leaves_everything_as_it_was(auto_mesh: Mesh) -> None:
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
    assert by_method.step(jnp.ones(8)).tolist() == expected and int(by_method.calls) == 1
    assert Decorated.step.__doc__ == "Doc."

    def scaled(scale: float, table: Table, x: Any) -> Any:
        return scale * table(x)

    entries = {"mesh": auto_mesh, "out_specs": P("data")}
    partial = sx.shard_map(functools.partial(scaled, 1.0), in_specs=(BY_TYPE, P("data")), **entries)
    assert partial(Table(), jnp.ones(8)).tolist() == expected

    whole, bound = Table(), Table()  # what a function is bound to is whole in every shard
    for function, table in [(whole, whole), (bound.__call__, bound)]:
        run = sx.shard_map(function, mesh=auto_mesh, in_specs=P(), out_specs=P())
        assert run(jnp.ones(8)).tolist() == expected and int(table.calls) == 1


def test_flax_11_arguments_may_be_given_by_name(auto_mesh: Mesh) -> None:
    def call(table: Table, x: Any, offset: Any = 0.0, scale: Any = 1.0) -> Any:
        return scale * (table(x) + offset)

    specs = (BY_TYPE, P("data"), P(), P("data"))
    run = sx.shard_map(call, mesh=auto_mesh, in_specs=specs, out_specs=P("data"))
    x, scale = jnp.ones(8), jnp.full(8, 2.0)
    expected = [2 * (1 + 2 * i) for i in range(8)]
    assert run(Table(), x, 0.0, scale).tolist() == expected
    assert run(Table(), scale=scale, x=x).tolist() == expected
    assert run(x=x, offset=0.0, scale=scale, table=Table()).tolist() == expected
    assert run(Table(), x).tolist() == [1 + 2 * i for i in range(8)]
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        run(table=Table())


def test_an_argument_that_can_only_be_given_by_name_has_the_entry_for_everything(
    auto_mesh: Mesh,
) -> None:
    def add(x: Any, *, y: Any) -> Any:
        return x + y

    x = jnp.arange(8.0)
    both = sx.shard_map(add, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))
    assert both(x, y=x).tolist() == (2 * x).tolist()
    one = sx.shard_map(add, mesh=auto_mesh, in_specs=(P("data"),), out_specs=P("data"))
    with pytest.raises(PrefixError, match="'y'"):
        one(x, y=x)


@pytest.mark.parametrize(
    ("specs", "arguments", "message"),
    [
        ((P("data"),), (1.0, 2.0), "1 entries.* 2 positional"),
        ((P(), P(), P(), P()), (1.0, 2.0), "4 entries"),
        (({"a": P()}, P()), (1.0, 2.0), r"in_specs .*\.x"),
        ((BY_TYPE, P()), (1.0, 2.0), r"StateSharding .* at \.x"),
        ((sx.StateSharding({sx.Param: P()}), P()), (Table(), 2.0), r"\.calls"),
        ((sx.State({"rows": P()}), P()), (Table(), 2.0), r"\.x\.calls"),
    ],
)
def test_specs_that_do_not_fit_the_arguments_are_refused(
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
def test_what_is_no_spec_is_refused_before_any_call(entry: Any) -> None:
    with pytest.raises(PrefixError, match="in_specs gives"):
        sx.shard_map(lambda x: x, in_specs=entry, out_specs=P())
    with pytest.raises(PrefixError, match="out_specs gives"):
        sx.shard_map(lambda x: x, in_specs=P(), out_specs=entry)


def test_a_single_string_is_no_set_of_axis_names() -> None:
    with pytest.raises(PrefixError, match=r"axis_names='data' .* \{'data'\}"):
        sx.shard_map(lambda x: x, in_specs=P(), out_specs=P(), axis_names="data")


# --- meshes and shapes ---


def test_the_mesh_in_scope_is_taken_where_none_is_given(mesh: Mesh) -> None:
    run = sx.shard_map(
        lambda table, x: table(x), in_specs=(BY_TYPE, P("data")), out_specs=P("data")
    )
    with jax.set_mesh(mesh):
        for call in (run, sx.jit(run)):
            table = Table()
            assert spec_of(call(table, jnp.ones(8))) == spec_of(table.rows) == ("data",)
    with pytest.raises(NoMeshError):
        run(Table(), jnp.ones(8))


def test_meshes_that_are_none_or_others_than_in_scope_are_refused(auto_mesh: Mesh) -> None:
    def run(mesh: Any, **options: Any) -> Any:
        return sx.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P(), **options)(1.0)

    with pytest.raises(MeshError, match="not a mesh"):
        run("data")
    with pytest.raises(MeshError, match="axis_names="):
        run(auto_mesh, axis_names={"rows"})
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(other), pytest.raises(MeshError, match="differs from the mesh in scope"):
        run(auto_mesh)


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        ((P("rows"), P()), PrefixError, r"P\('rows',\).* \['data', 'model'\]"),
        ((P("data", "data"), P()), PrefixError, "twice"),
        ((P(), P("data", "model")), AxisSizeError, r"\.x, which has shape \(6,\)"),
        ((P(), P("model")), AxisSizeError, r"\.x,.* 0 .*\(6,\) .* 'model' of size 4.* of 4"),
        (
            (
                P(
                    ("data", "model"),
                ),
                P(),
            ),
            AxisSizeError,
            r"\.table\.calls",
        ),
        (
            (sx.StateSharding({sx.Param: P(None, "model"), ...: P()}), P()),
            AxisSizeError,
            r"\.table\.rows",
        ),
    ],
)
def test_arrays_that_cannot_be_taken_apart_are_named(
    auto_mesh: Mesh, specs: Any, error: type[Exception], message: str
) -> None:
    def call(table: Table, x: Any) -> Any:
        return x

    with pytest.raises(error, match=message):
        sx.shard_map(call, mesh=auto_mesh, in_specs=specs, out_specs=P())(Table(), jnp.ones(6))


def test_what_is_no_array_is_refused_by_its_path(auto_mesh: Mesh) -> None:
    run = sx.shard_map(lambda x: 1.0, mesh=auto_mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ArgumentError, match=r"\.x\.mode is 'fast'"):
        run({"mode": "fast"})
    abstract = sx.eval_shape(lambda: Table())
    with pytest.raises(AbstractValueError, match=r"\.x\.rows"):
        run(abstract)
    with pytest.raises(OutputError, match="'text'"):
        sx.shard_map(lambda x: "text", mesh=auto_mesh, in_specs=P(), out_specs=P())(1.0)


def test_results_that_cannot_be_put_together_are_named(auto_mesh: Mesh) -> None:
    def call(x: Any) -> Any:
        return {"loss": x.sum()}

    with pytest.raises(AxisSizeError, match=r"at \.result\.loss .* x\[None\]"):
        sx.shard_map(call, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))(jnp.ones(8))


def test_arrays_are_brought_to_the_mesh_from_wherever_they_are(mesh: Mesh) -> None:
    one = jax.devices()[5]
    other = jax.make_mesh((8,), ("all",))
    run = sx.shard_map(
        lambda v, x: v + x, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )
    for place in (one, NamedSharding(other, P("all")), NamedSharding(mesh, P("model"))):
        variable = sx.Variable(jax.device_put(jnp.arange(8.0), place))
        x = jax.device_put(jnp.arange(8.0), place)
        assert run(variable, x).tolist() == [2.0 * i for i in range(8)]
        assert variable.value.sharding == (
            place if isinstance(place, NamedSharding) else x.sharding
        )
    assert run(sx.Variable(np.arange(8.0)), np.arange(8.0)).tolist() == [2.0 * i for i in range(8)]


def test_a_lazy_model_is_made_straight_in_its_shards(mesh: Mesh) -> None:
    block, x = Block(), batch()
    expected = Block().up(x)
    run = sx.shard_map(
        lambda block, x: block.up(x),
        mesh=mesh,
        in_specs=(sx.partition_specs(block, RULES), P("data")),
        out_specs=P("data", "model"),
    )
    assert block.up.kernel.is_lazy
    close(run(block, x), expected)
    assert spec_of(block.up.kernel) == (None, "model")


def test_axes_that_are_not_named_are_left_to_the_compiler(mesh: Mesh) -> None:
    table, seen = Table(), []

    def call(table: Table, x: Any) -> Any:
        seen.append((table.rows.shape, sorted(jax.typeof(x).manual_axis_type.varying)))
        return table(x)

    run = sx.jit(
        sx.shard_map(
            call,
            mesh=mesh,
            in_specs=(BY_TYPE, P("data")),
            out_specs=P("data"),
            axis_names={"data"},
        )
    )
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh, P(("data", "model"))))
    with jax.set_mesh(mesh):
        assert run(table, x).tolist() == [1 + 2 * i for i in range(8)]
    assert table.rows.value.tolist() == [2 * i for i in range(8)] and int(table.calls) == 1
    assert seen == [((4,), ["data"])]
    bad = sx.shard_map(
        call, mesh=mesh, in_specs=(P(), P("model")), out_specs=P(), axis_names={"data"}
    )
    with pytest.raises(PrefixError, match=r"\['data'\]"):
        bad(table, x)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_one_shard_map_inside_another_over_the_remaining_axes(mesh: Mesh, compiled: bool) -> None:
    by_model = sx.StateSharding({sx.Param: P("model"), ...: P()})
    table = Table()
    inner = sx.shard_map(
        lambda table, x: table(x),
        mesh=mesh,
        in_specs=(by_model, P("model")),
        out_specs=P("model"),
        axis_names={"model"},
    )
    outer = sx.shard_map(
        lambda table, x: inner(table, x),
        mesh=mesh,
        in_specs=(BY_TYPE, P("data")),
        out_specs=P("data"),
        axis_names={"data"},
    )
    result = (sx.jit(outer) if compiled else outer)(table, jnp.ones(8))
    assert result.tolist() == [1 + 2 * i for i in range(8)]
    assert table.rows.value.tolist() == [2 * i for i in range(8)] and int(table.calls) == 1


# --- sharing ---


def test_a_shared_variable_has_one_spec(auto_mesh: Mesh) -> None:
    table = Table()
    rows = table.rows

    def call(table: Table, rows: Any) -> Any:
        assert table.rows is rows
        rows[...] = rows + 1
        return rows

    def run(second: Any, out: Any = None) -> Any:
        entries = {"in_specs": (BY_TYPE, second), "out_specs": out or P("data")}
        return sx.shard_map(call, mesh=auto_mesh, **entries)(table, rows)

    assert run(P("data")) is rows and rows.value.tolist() == [i + 1 for i in range(8)]
    assert run(P("data", None)) is rows
    assert run(sx.StateSharding({sx.Variable: P("data")})) is rows
    assert run(sx.State.from_flat({(): P("data")})) is rows
    before = rows.value.tolist()
    with pytest.raises(InconsistentAliasingError, match=r"\.table\.rows: .*\n +\.rows: ") as found:
        run(P())
    assert "P('data',)" in str(found.value) and "P()" in str(found.value)
    with pytest.raises(InconsistentAliasingError, match="in_specs and out_specs"):
        run(P("data"), P(None))
    assert rows.value.tolist() == before


def test_tied_parameters_have_one_gradient(auto_mesh: Mesh) -> None:
    def loss(tied: Tied, x: Any) -> Any:
        return jax.lax.pmean((tied.embed * tied.head * x).mean(), "data")

    run = sx.shard_map(sx.grad(loss), mesh=auto_mesh, in_specs=(P(), P("data")), out_specs=P())
    assert {path: float(g) for path, g in run(Tied(3.0), jnp.ones(4)).flat().items()} == {
        ("embed",): 6.0
    }


# --- what would have two values in one place ---


def test_different_values_for_a_variable_that_is_not_split_are_refused(mesh: Mesh) -> None:
    table = Table()
    before = sx.clone(table)

    def count(table: Table, x: Any) -> None:
        table.rows[...] = table.rows * 2
        table.calls[...] = x.sum().astype(jnp.int32)

    for wrap in (lambda f: f, sx.jit):
        run = wrap(sx.shard_map(count, mesh=mesh, in_specs=(BY_TYPE, P("data")), out_specs=None))
        with pytest.raises(SharedWriteError) as found:
            run(table, jnp.ones(8))
        assert ".table.calls has the spec P()" in str(found.value)
        assert "over the mesh axes 'data'" in str(found.value)
        assert "jax.lax.pmean(x, 'data')" in str(found.value)
    assert_same_model(table, before)


def test_a_spec_must_name_all_axes_over_which_a_value_differs(auto_mesh: Mesh) -> None:
    variable = sx.Variable(jnp.zeros(2))

    def write(variable: Any, x: Any) -> None:
        variable[...] = variable + x.sum()

    both = P("data", "model")
    run = sx.shard_map(write, mesh=auto_mesh, in_specs=(P("data"), both), out_specs=None)
    with pytest.raises(SharedWriteError, match=r"\.variable .* 'model'\. "):
        run(variable, jnp.ones((2, 4)))


def test_different_values_for_one_place_in_the_result_are_refused(auto_mesh: Mesh) -> None:
    def call(x: Any) -> Any:
        return {"sum": x.sum(), "new": sx.Variable(x.sum())}

    for out, where in [
        ({"sum": P(), "new": P()}, r"at \.result\.sum"),
        ({"sum": P(), "new": P()}, r"at \.result\.new"),
    ]:
        function = call if "sum" in where else lambda x: {**call(x), "sum": 0.0}
        with pytest.raises(SharedWriteError, match=where):
            sx.shard_map(function, mesh=auto_mesh, in_specs=P("data"), out_specs=out)(jnp.ones(8))


def test_without_check_vma_the_caller_vouches_for_equality(mesh: Mesh) -> None:
    table = Table()
    run = sx.shard_map(
        lambda table, x: table(x),
        mesh=mesh,
        in_specs=(BY_TYPE, P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    assert run(table, jnp.ones(8)).tolist() == [1 + 2 * i for i in range(8)]
    assert int(table.calls) == 1 and spec_of(table.rows) == ("data",)


def test_sown_values_are_put_together_by_the_spec_of_their_type(auto_mesh: Mesh) -> None:
    class Probe(sx.Module):
        def __init__(self) -> None:
            self.scale = sx.Param(jnp.float32(2))

        def __call__(self, x: Any) -> Any:
            self.sow("seen", self.scale * x)
            return x

    probe = Probe()
    specs = sx.partition_specs(probe, {})
    mixed = sx.StateSharding([(sx.Intermediate, P("data")), *sx.StateSharding(specs).items()])
    run = sx.shard_map(
        lambda probe, x: probe(x), mesh=auto_mesh, in_specs=(mixed, P("data")), out_specs=P("data")
    )
    for _ in range(2):
        run(probe, jnp.arange(4.0))
    assert [row.tolist() for row in probe.seen.value] == [[0, 2, 4, 6]] * 2
    with pytest.raises(SharedWriteError, match=r"new Intermediate at \.probe\.seen"):
        sx.shard_map(
            lambda probe, x: probe(x),
            mesh=auto_mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
        )(Probe(), jnp.arange(4.0))


# --- random streams ---


def test_a_stream_under_mesh_axes_is_split_and_moves_on_by_one_draw(mesh: Mesh) -> None:
    rngs = sx.Rngs(dropout=0, noise=1)

    def draw(rngs: sx.Rngs) -> Any:
        return jnp.stack([jax.random.normal(rngs.dropout(), ()) for _ in range(2)])[None]

    grid = P(("data", "model"))
    run = sx.shard_map(draw, mesh=mesh, in_specs=grid, out_specs=grid)
    first, second = run(rngs), sx.jit(run)(rngs)
    assert len({*first.ravel().tolist(), *second.ravel().tolist()}) == 2 * 8 * 2
    assert (int(rngs.dropout.count), int(rngs.noise.count)) == (2, 0)
    again = run(sx.Rngs(dropout=0, noise=1))
    assert again.tolist() == first.tolist()


def test_a_split_stream_differs_along_the_axes_of_its_spec_only(auto_mesh: Mesh) -> None:
    rows = sx.shard_map(
        lambda rngs: jax.random.normal(rngs.params(), (1,)),
        mesh=auto_mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )(sx.Rngs(0))
    assert len(set(rows.tolist())) == 2
    draw = jax.random.fold_in(sx.Rngs(0).default.key.value, 0)
    expected = [
        jax.random.normal(jax.random.fold_in(jax.random.fold_in(draw, shard), 0), (1,))[0]
        for shard in range(2)
    ]
    assert rows.tolist() == [float(x) for x in expected]


def test_a_stream_that_is_not_split_draws_the_same_everywhere(auto_mesh: Mesh) -> None:
    rngs, alone = sx.Rngs(0), sx.Rngs(0)
    run = sx.shard_map(
        lambda rngs: jax.random.normal(rngs.params(), (2,)),
        mesh=auto_mesh,
        in_specs=P(),
        out_specs=P(),
    )
    assert run(rngs).tolist() == jax.random.normal(alone.params(), (2,)).tolist()
    assert int(rngs.default.count) == 1


def test_dropout_drops_other_elements_in_every_shard(auto_mesh: Mesh) -> None:
    dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(dropout=0))
    split = sx.StateSharding({sx.RngState: P("data"), ...: P()})
    run = sx.shard_map(
        lambda dropout, x: dropout(x),
        mesh=auto_mesh,
        in_specs=(split, P("data")),
        out_specs=P("data"),
    )
    upper, lower = jnp.split(run(dropout, jnp.ones(64)), 2)
    assert upper.tolist() != lower.tolist()
    assert set(upper.tolist()) == set(lower.tolist()) == {0.0, 2.0}


def test_a_split_stream_cannot_be_given_another_key(auto_mesh: Mesh) -> None:
    def reseed(rngs: sx.Rngs) -> None:
        rngs.default.key.value = jax.random.key(1)

    with pytest.raises(OutputError, match=r"\.rngs\.default\.key"):
        sx.shard_map(reseed, mesh=auto_mesh, in_specs=P("data"), out_specs=None)(sx.Rngs(0))


# --- captured Variables ---


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("laid_out", [False, True], ids=["one device", "laid out"])
def test_captured_variables_are_read_whole(mesh: Mesh, compiled: bool, laid_out: bool) -> None:
    block, x = Block(), batch()
    expected = block.down(jax.nn.relu(block.up(x)))
    if laid_out:
        sx.shard(block, mesh, RULES)
    run = sx.shard_map(
        lambda x: block.down(jax.nn.relu(block.up(x))),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    run = sx.jit(run) if compiled else run
    close(run(x), expected)
    block.up.kernel[...] = jnp.zeros_like(block.up.kernel.value)
    close(run(x), jnp.zeros_like(expected))


def test_gradients_reach_captured_variables(mesh: Mesh) -> None:
    weight, x = sx.Param(jnp.arange(1.0, 4)), jnp.arange(12.0).reshape(4, 3)

    def loss(weight: Any) -> Any:
        def part(x: Any) -> Any:
            return jax.lax.psum(((weight.value[None] * x) ** 2).sum(), "data")

        return sx.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P())(x)

    expected = jax.grad(lambda w: ((w[None] * x) ** 2).sum())(weight.value)
    close(sx.jit(sx.grad(loss))(weight), expected)


def test_a_write_to_a_captured_variable_names_it_and_the_way_out(auto_mesh: Mesh) -> None:
    table, count = Table(), sx.Variable(jnp.float32(0))

    def writes(x: Any) -> Any:
        table.calls += 1
        return x

    def writes_in_jit(x: Any) -> Any:
        sx.jit(lambda c: c.set_metadata(note="seen"))(count)
        return x

    def draws(x: Any) -> Any:
        return jax.random.normal(rngs.noise(), ())

    rngs = sx.Rngs(0)
    for function, name in [
        (writes, r"table\.calls"),
        (writes_in_jit, "count"),
        (draws, r"rngs\.default\.count"),
    ]:
        run = sx.shard_map(function, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))
        with pytest.raises(ForeignMutationError, match=name + r".*in_specs"):
            run(jnp.ones(2))
    assert (int(table.calls), float(count), int(rngs.default.count)) == (0, 0.0, 0)


def test_the_structure_of_a_captured_module_cannot_be_changed(auto_mesh: Mesh) -> None:
    box = Box()

    def change(x: Any) -> Any:
        box.new = 1
        return x

    with pytest.raises(ForeignMutationError, match=r"inside sx\.shard_map"):
        sx.shard_map(change, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))(jnp.ones(2))
    with pytest.raises(OutputError, match="not passed in"):
        sx.shard_map(lambda x: box, mesh=auto_mesh, in_specs=P(), out_specs=P())(jnp.ones(2))


# --- with other transforms ---


@pytest.mark.parametrize("inside", [True, False], ids=["grad inside", "grad outside"])
def test_a_rule_of_sx_custom_vjp_is_used_and_its_writes_carried(
    auto_mesh: Mesh, inside: bool
) -> None:
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


def test_rematerialised_dropout_replays_in_every_shard(auto_mesh: Mesh) -> None:
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
    assert run(Table())["rows"].tolist() == [100.0] * 8


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

    x = jnp.arange(8.0) / 8
    result = sx.shard_map(call, mesh=auto_mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data"))(
        table, x
    )
    expected, rows = plain(jnp.arange(8.0), x)
    close(result, expected)
    close(table.rows, rows)
    assert int(table.calls) == 3


def test_a_decision_that_differs_between_shards_makes_what_it_decides_differ(
    auto_mesh: Mesh,
) -> None:
    """``jax.lax.cond`` counts such results as equal in all shards, and is silently wrong."""

    def choose(table: Table, x: Any) -> Any:
        return sx.cond(x.sum() > 10, lambda t, x: t(x), lambda t, x: x, table, x)

    run = sx.shard_map(choose, mesh=auto_mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data"))
    table = Table()
    with pytest.raises(SharedWriteError, match=r"\.table\.calls"):
        run(table, jnp.arange(8.0))
    assert int(table.calls) == 0

    def pick(weight: Any) -> Any:
        shard = jax.lax.axis_index("data")
        by_cond = sx.cond(shard == 0, lambda w: 2 * w, lambda w: 3 * w, weight.value)
        by_switch = sx.switch(shard, [lambda w, n: n * w, lambda w, n: 1.0], weight.value, 10)
        return (by_cond + by_switch)[None]

    both = sx.shard_map(pick, mesh=auto_mesh, in_specs=P(), out_specs=P("data"))
    weight = sx.Param(jnp.float32(1))
    assert both(weight).tolist() == [12.0, 4.0]
    assert float(sx.jit(sx.grad(lambda w: both(w).sum()))(weight)) == 15.0


@pytest.mark.parametrize("kind", ["while_loop", "fori_loop", "bounded_while_loop"])
def test_loops_of_different_lengths_leave_values_that_differ(auto_mesh: Mesh, kind: str) -> None:
    """``jax.lax.while_loop`` counts such results as equal in all shards, and is silently wrong."""

    def loop(step: Any, steps: Any) -> Any:
        if kind == "while_loop":
            return sx.while_loop(lambda n: n < steps, step, 0)
        if kind == "fori_loop":
            return sx.fori_loop(0, steps, lambda _, n: step(n), 0)
        return sx.bounded_while_loop(lambda n: n < steps, step, 0, max_steps=8).final

    def shard(step: Any, out_specs: Any) -> Any:
        return sx.shard_map(
            lambda x: loop(step, x[0])[None] if out_specs else loop(step, x[0]),
            mesh=auto_mesh,
            in_specs=P("data"),
            out_specs=P(out_specs),
        )

    steps, table = jnp.array([2, 5]), Table()
    assert shard(lambda n: n + 1, "data")(steps).tolist() == [2, 5]
    with pytest.raises(SharedWriteError, match=r"\.result"):
        shard(lambda n: n + 1, None)(steps)

    def count(table: Table, x: Any) -> None:
        def step(n: Any) -> Any:
            table.calls += 1
            return n + 1

        loop(step, x[0])

    with pytest.raises(SharedWriteError, match=r"\.table\.calls"):
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
    xs = jnp.arange(24.0).reshape(3, 8)
    table = Table()
    mapped = wrap(sx.vmap(run, in_axes=(None, 0)))(table, xs)
    close(mapped, 2 * jnp.arange(8.0)[None] + xs)
    assert table.rows.value.tolist() == [2 * i for i in range(8)] and int(table.calls) == 1
    looped = Table()

    def body(table: Table, x: Any) -> tuple[Table, Any]:
        return table, run(table, x)

    loop = sx.scan(body, in_axes=(sx.Carry, 0), out_axes=(sx.Carry, 0))
    _, rows = wrap(loop)(sx.shard(looped, mesh, RULES), xs)
    close(rows, jnp.stack([2.0 ** (i + 1) * jnp.arange(8.0) + xs[i] for i in range(3)]))
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


def test_a_compiled_step_is_traced_once(auto_mesh: Mesh) -> None:
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


# --- laws ---

ONE = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
FEW = settings(max_examples=10)


@given(models(), edits())
@FEW
def test_on_one_device_shard_map_is_the_function(model: Any, changes: list[Edit]) -> None:
    expected = sx.clone(model)

    def change(m: Any) -> Any:
        for edit in changes:
            apply_edit(m, edit)
        return m

    change(expected)
    assert sx.shard_map(change, mesh=ONE, in_specs=P(), out_specs=P())(model) is model
    assert_same_model(model, expected)


SIZES = st.sampled_from([1, 2, 4, 8])


@given(st.integers(1, 3), SIZES, st.integers(0, 100), st.booleans())
@FEW
def test_sums_over_shards_are_sums_over_the_whole(
    count: int, size: int, seed: int, grow: bool
) -> None:
    """A model of several Variables, split or not, on a mesh of any size."""
    draw = np.random.default_rng(seed)
    split = [bool(draw.integers(2)) for _ in range(count)]
    mesh = jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,))

    def make() -> Any:
        values = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
        return sx.List(
            [
                sx.Param(value, axes=("rows" if s else None,))
                for value, s in zip(values, split, strict=True)
            ]
        )

    def total(x: Any, over_mesh: bool) -> Any:
        return jax.lax.psum(x, "data") if over_mesh else x

    def call(model: Any, x: Any, over_mesh: bool) -> Any:
        seen = total((x**2).sum(), over_mesh)
        for variable, is_split in zip(list(model), split, strict=True):
            own = variable.value.sum()
            seen = seen + (total(own, over_mesh) if is_split else own)
            variable[...] = variable * seen
        if grow:
            model.append(sx.Variable(seen))
        return seen

    whole, parts = make(), make()
    x = jnp.asarray(draw.normal(size=8), jnp.float32)
    specs = sx.StateSharding(
        [
            (lambda path, v: bool(v.axes) and v.axes == ("rows",), P("data")),
            (..., P()),
        ]
    )
    run = sx.shard_map(
        functools.partial(call, over_mesh=True),
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=P(),
    )
    close(run(parts, x), call(whole, x, False))
    assert sx.graphdef(parts) == sx.graphdef(whole)
    jax.tree.map(close, sx.state(parts), sx.state(whole))
