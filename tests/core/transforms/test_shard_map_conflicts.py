# SPDX-License-Identifier: Apache-2.0
"""shard_map: different values for one place are refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import shardax as sx
from shardax.errors import TransformError
from tests.advice import run_advice
from tests.core.transforms.sharded import BY_TYPE, P, Table, spec_of
from tests.strategies import assert_same_model


def test_different_values_of_replicated_variable_are_refused(mesh: Mesh) -> None:
    table = Table()
    before = sx.clone(table)

    def count(table: Table, x: Any) -> None:
        table.rows[...] = table.rows * 2
        table.calls[...] = x.sum().astype(jnp.int32)

    for wrap in (lambda f: f, sx.jit):
        run = wrap(sx.shard_map(count, mesh=mesh, in_specs=(BY_TYPE, P("data")), out_specs=None))
        with pytest.raises(TransformError) as found:
            run(table, jnp.ones(8))
        assert ".table.calls has the spec P()" in str(found.value)
        assert "over the mesh axes 'data'" in str(found.value)
        assert "jax.lax.pmean(x, 'data')" in str(found.value)
    assert_same_model(table, before)


def test_spec_must_name_all_varying_axes(auto_mesh: Mesh) -> None:
    variable = sx.Variable(jnp.zeros(2))

    def write(variable: Any, x: Any) -> None:
        variable[...] = variable + x.sum()

    both = P("data", "model")
    run = sx.shard_map(write, mesh=auto_mesh, in_specs=(P("data"), both), out_specs=None)
    with pytest.raises(TransformError, match=r"\.variable .* 'model'\. "):
        run(variable, jnp.ones((2, 4)))


def test_different_values_of_replicated_result_are_refused(auto_mesh: Mesh) -> None:
    def call(x: Any) -> Any:
        return {"sum": x.sum(), "new": sx.Variable(x.sum())}

    for out, where in [
        ({"sum": P(), "new": P()}, r"at \.result\.sum"),
        ({"sum": P(), "new": P()}, r"at \.result\.new"),
    ]:
        function = call if "sum" in where else lambda x: {**call(x), "sum": 0.0}
        with pytest.raises(TransformError, match=where):
            sx.shard_map(function, mesh=auto_mesh, in_specs=P("data"), out_specs=out)(jnp.ones(8))


def test_shard_map_without_check_vma_trusts_the_caller_for_equality(mesh: Mesh) -> None:
    table = Table()
    run = sx.shard_map(
        lambda table, x: table(x),
        mesh=mesh,
        in_specs=(BY_TYPE, P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    assert sx.jit(run)(table, jnp.ones(8)).tolist() == [1 + 2 * i for i in range(8)]
    assert int(table.calls) == 1 and spec_of(table.rows) == ("data",)


def test_sown_values_follow_the_spec_of_type(auto_mesh: Mesh) -> None:
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
    run = sx.jit(run)
    for _ in range(2):
        run(probe, jnp.arange(4.0))
    assert [row.tolist() for row in probe.seen.value] == [[0, 2, 4, 6]] * 2

    def sow(spec: Any) -> Any:
        run = sx.shard_map(
            lambda probe, x: probe(x),
            mesh=auto_mesh,
            in_specs=(spec, P("data")),
            out_specs=P("data"),
        )
        run(probe := Probe(), jnp.arange(4.0))
        return probe.seen.value

    with pytest.raises(TransformError, match=r"new Intermediate at \.probe\.seen") as caught:
        sow(P())
    names = {"sx": sx, "P": P, "Intermediate": sx.Intermediate}
    code = "sx.StateSharding([(Intermediate, P('data')), (..., P())])"
    assert sow(run_advice(caught.value, code, names))[0].tolist() == [0, 2, 4, 6]
