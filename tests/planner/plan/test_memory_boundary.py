# SPDX-License-Identifier: Apache-2.0
"""Peak memory against the TPU compiler's own verdict, around the batch from which it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardax import plan
from shardax.plan.compile.compilers import CompileResult, TargetCompiler
from tests.needs import needs_compiler

SIZES = {"data": 2, "model": 2}
ROWS = 4096
"""Rows of a step of the batch."""

pytestmark = needs_compiler("tpu")


def compiled(compiler: TargetCompiler, batch: int) -> CompileResult:
    """A training step of 16 layers in a loop, whose activations are kept for the gradient."""
    mesh = compiler.mesh(SIZES)

    def shape(*sizes: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ weight), None

        return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32).sum()

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 0.001 * jax.grad(loss)(weights, x)

    weights = shape(16, 1024, 1024, spec=PartitionSpec(None, None, "model"))
    x = shape(batch * ROWS, 1024, spec=PartitionSpec("data"))
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=0).trace(weights, x).lower()
    return compiler.compile(lowered)


def test_peak_reaches_limit_where_compiler_starts_to_refuse() -> None:
    """The last batch that fits is within 1 % of the limit, and so is what the next one asks for.

    Arguments and temporaries together, which are often taken for the peak, are above the limit for
    that last batch. Measured with libtpu 0.0.42.1: it fits with 15.716 GiB of 15.75, arguments and
    temporaries 17.9; the next asks for 15.76.
    """
    compiler = plan.compiler_for(plan.Target.parse("tpu:v5e:2x2"), compiler="target")
    limit = compiler.target.limit_bytes
    fits, refused = 344, 392
    last, first = compiled(compiler, fits), compiled(compiler, refused)
    assert last.text is not None and first.text is None
    while refused - fits > 1:
        middle = (fits + refused) // 2
        found = compiled(compiler, middle)
        if found.text is None:
            refused, first = middle, found
        else:
            fits, last = middle, found
    assert last.peak_bytes is not None and first.peak_bytes is not None
    # What was refused is told in GiB with two digits: from libtpu 0.0.50 just over is the limit.
    assert 0.99 * limit < last.peak_bytes <= limit <= first.peak_bytes < 1.01 * limit
    assert last.temp_bytes is not None and last.temp_bytes > limit
