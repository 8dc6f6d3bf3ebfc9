# SPDX-License-Identifier: Apache-2.0
"""shard_map over meshes of either kind: which one, where arrays are, what cannot be taken apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

import shardax as sx
from shardax.errors import ModuleError, NoMeshError, PrefixError, TransformError
from tests.advice import run_advice
from tests.core.transforms.sharded import BY_TYPE, RULES, Block, P, Table, batch, close, spec_of
from tests.values import with_values


def test_mesh_in_scope_is_the_default(mesh: Mesh) -> None:
    run = sx.shard_map(
        sx.jit(lambda table, x: table(x)), in_specs=(BY_TYPE, P("data")), out_specs=P("data")
    )
    with jax.set_mesh(mesh):
        for call in (run, sx.jit(run)):
            table = Table()
            assert spec_of(call(table, jnp.ones(8))) == spec_of(table.rows) == ("data",)
    with pytest.raises(NoMeshError) as caught:
        run(Table(), jnp.ones(8))
    code = "sx.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)"
    names = {
        "sx": sx,
        "f": lambda x: x,
        "mesh": mesh,
        "in_specs": P("data"),
        "out_specs": P("data"),
    }
    assert run_advice(caught.value, code, names)(jnp.ones(8)).shape == (8,)


def test_invalid_and_conflicting_meshes_are_refused(auto_mesh: Mesh) -> None:
    def run(mesh: Any, **options: Any) -> Any:
        return sx.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P(), **options)(1.0)

    with pytest.raises(TransformError, match="not a mesh"):
        run("data")
    with pytest.raises(TransformError, match="axis_names="):
        run(auto_mesh, axis_names={"rows"})
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(other), pytest.raises(TransformError, match="differs from the mesh in scope"):
        run(auto_mesh)


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        ((P("rows"), P()), PrefixError, r"P\('rows',\).* \['data', 'model'\]"),
        ((P("data", "data"), P()), PrefixError, "twice"),
        ((P(), P("data", "model")), TransformError, r"\.x, which has shape \(6,\)"),
        ((P(), P("model")), TransformError, r"\.x,.* 0 .*\(6,\) .* 'model' of size 4.* of 4"),
        ((P(("data", "model")), P()), TransformError, r"\.table\.calls"),
        (
            (sx.StateSharding({sx.Param: P(None, "model"), ...: P()}), P()),
            TransformError,
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


def test_nonarrays_are_refused_with_path(auto_mesh: Mesh) -> None:
    run = sx.shard_map(lambda x: 1.0, mesh=auto_mesh, in_specs=P(), out_specs=P())
    with pytest.raises(TransformError, match=r"\.x\.mode is 'fast'"):
        run({"mode": "fast"})
    abstract = sx.eval_shape(lambda: Table())
    with pytest.raises(ModuleError, match=r"\.x\.rows") as caught:
        run(abstract)
    names = {"sx": sx, "model": abstract, "state": sx.state(Table())}
    run_advice(caught.value, "sx.update(model, state)", names)
    assert run(abstract) == 1.0
    with pytest.raises(TransformError, match="'text'"):
        sx.shard_map(lambda x: "text", mesh=auto_mesh, in_specs=P(), out_specs=P())(1.0)


def test_results_that_cannot_be_put_together_are_named(auto_mesh: Mesh) -> None:
    def call(x: Any) -> Any:
        return {"loss": x.sum()}

    with pytest.raises(TransformError, match=r"at \.result\.loss .* x\[None\]"):
        sx.shard_map(call, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))(jnp.ones(8))


@pytest.mark.parametrize("compiled", [False, True])
def test_read_only_parameters_move_once(mesh: Mesh, compiled: bool) -> None:
    specs = sx.StateSharding({sx.PathContains("kernel"): P("data"), ...: P()})
    call = sx.shard_map(
        sx.jit(lambda layer, x: x + jax.lax.psum(layer.kernel.value.sum(), "data")),
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=P("data"),
    )
    run = sx.jit(call) if compiled else call
    for layer in [with_values(sx.nn.Linear(8, 8, rngs=sx.Rngs(0)), seed) for seed in range(2)]:
        total = np.sum(layer.kernel.value)
        first = run(layer, jnp.zeros(8))
        np.testing.assert_allclose(first, total, rtol=1e-5, atol=1e-5)
        held = layer.kernel.value
        assert held.sharding == NamedSharding(mesh, P("data"))
        assert layer.bias.value.sharding == NamedSharding(mesh, P())
        run(layer, jnp.zeros(8))
        assert layer.kernel.value is held


def test_arrays_move_to_mesh_and_variables_stay(mesh: Mesh) -> None:
    one = jax.devices()[5]
    other = jax.make_mesh((8,), ("all",))
    run = sx.shard_map(
        lambda v, x: v + x, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )
    for place in (one, NamedSharding(other, P("all")), NamedSharding(mesh, P("model"))):
        variable = sx.Variable(jax.device_put(jnp.arange(8.0), place))
        x = jax.device_put(jnp.arange(8.0), place)
        assert run(variable, x).tolist() == [2.0 * i for i in range(8)]
        assert variable.value.sharding == NamedSharding(mesh, P("data"))
        assert x.sharding == place or isinstance(place, jax.Device)
    assert run(sx.Variable(np.arange(8.0)), np.arange(8.0)).tolist() == [2.0 * i for i in range(8)]


def test_lazy_model_materializes_in_its_shards(mesh: Mesh) -> None:
    block, x = Block(lazy=True), batch()
    expected = Block(lazy=True).up(x)
    run = sx.shard_map(
        lambda block, x: block.up(x),
        mesh=mesh,
        in_specs=(sx.partition_specs(block, RULES), P("data")),
        out_specs=P("data", "model"),
    )
    assert block.up.kernel.is_lazy
    close(sx.jit(run)(block, x), expected)
    assert spec_of(block.up.kernel) == (None, "model")


def test_unnamed_axes_are_left_to_the_compiler(mesh: Mesh) -> None:
    table, seen = Table(), []

    def call(table: Table, x: Any) -> Any:
        seen.append((table.rows.shape, sorted(jax.typeof(x).manual_axis_type.varying)))
        return table(x)

    run = sx.jit(
        sx.shard_map(
            call, mesh=mesh, in_specs=(BY_TYPE, P("data")), out_specs=P("data"), axis_names={"data"}
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
def test_shard_maps_nest_over_remaining_axes(mesh: Mesh, compiled: bool) -> None:
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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("size", "given", "inside"),
    [
        (8, P(("data", "model")), P("model")),
        (8, P("model"), P("model")),
        (8, P(), P(None)),
        (4, P("model"), P(None)),  # which cannot be divided over both axes
    ],
)
def test_unnamed_explicit_axes_keep_input_shardings(
    explicit_mesh: Mesh, size: int, given: P, inside: P, compiled: bool
) -> None:
    seen = []

    def call(variable: sx.Variable[Any], x: Any) -> Any:
        seen.append([jax.typeof(each).sharding.spec for each in (variable.value, x)])
        return variable + x

    run = sx.shard_map(
        call, mesh=explicit_mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    x = jax.device_put(jnp.arange(float(size)), NamedSharding(explicit_mesh, given))
    with jax.set_mesh(explicit_mesh):
        result = (sx.jit(run) if compiled else run)(sx.Variable(x), x)
    assert result.tolist() == [2.0 * i for i in range(size)]
    assert seen[0] == [inside, inside]
