# SPDX-License-Identifier: Apache-2.0
"""shard_map of functions that use Variables which were not passed in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import shardax as sx
from shardax.errors import ForeignMutationError, TransformError
from tests.core.transforms.examples import Box
from tests.core.transforms.sharded import RULES, Block, P, Table, batch, close


@pytest.mark.parametrize(
    ("mesh", "compiled", "laid_out"),
    [
        (AxisType.Auto, False, False),
        (AxisType.Auto, True, True),
        (AxisType.Explicit, False, True),
        (AxisType.Explicit, True, False),
    ],
    indirect=["mesh"],
)
def test_captured_variables_are_read_whole(mesh: Mesh, compiled: bool, laid_out: bool) -> None:
    block, x = Block(), batch()
    expected = block.down(jax.nn.relu(block.up(x)))
    if laid_out:
        sx.shard(block, mesh, RULES)
    run = sx.shard_map(
        sx.jit(lambda x: block.down(jax.nn.relu(block.up(x)))),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    run = sx.jit(run) if compiled else run
    close(run(x), expected)
    block.up.kernel[...] = jnp.zeros_like(block.up.kernel.value)
    row = np.maximum(block.up.bias.value, 0) @ np.asarray(block.down.kernel.value)
    close(run(x), np.broadcast_to(row, expected.shape))


def test_gradients_reach_captured_variables(mesh: Mesh) -> None:
    weight, x = sx.Param(jnp.arange(1.0, 4)), jnp.arange(12.0).reshape(4, 3)

    def loss(weight: Any) -> Any:
        def part(x: Any) -> Any:
            return jax.lax.psum(((weight.value[None] * x) ** 2).sum(), "data")

        return sx.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P())(x)

    expected = 2 * np.arange(1, 4) * (np.asarray(x) ** 2).sum(0)
    close(sx.jit(sx.grad(loss))(weight), expected)


def test_write_to_captured_variable_raises_with_fix(auto_mesh: Mesh) -> None:
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


def test_structure_of_captured_module_cannot_change(auto_mesh: Mesh) -> None:
    box = Box()

    def change(x: Any) -> Any:
        box.new = 1
        return x

    with pytest.raises(ForeignMutationError, match=r"inside sx\.shard_map"):
        sx.shard_map(change, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))(jnp.ones(2))
    with pytest.raises(TransformError, match="not passed in"):
        sx.shard_map(lambda x: box, mesh=auto_mesh, in_specs=P(), out_specs=P())(jnp.ones(2))
