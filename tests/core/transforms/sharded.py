# SPDX-License-Identifier: Apache-2.0
"""Models that the tests of shard_map share, and how to look at what is split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import shardax as sx
from tests.values import with_values

# Without compilation shard_map runs each operation as a program of its own. Where that is not what
# a test is about, shard_map is in a compiled function, or its function is a compiled one.

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

    def __init__(self, lazy: bool = False) -> None:
        rngs = sx.Rngs(0)
        self.up = sx.nn.Linear(4, 8, kernel_axes=("embed", "mlp"), rngs=rngs)
        self.down = sx.nn.Linear(8, 4, kernel_axes=("mlp", "embed"), use_bias=False, rngs=rngs)
        self.mean = sx.BatchStat(jnp.zeros(8), axes=("mlp",))
        if not lazy:
            with_values(self)

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
