# SPDX-License-Identifier: Apache-2.0
"""Sums and marks along manual mesh axes, inside ``shard_map``."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sum_over(x: jax.Array, axes: object) -> jax.Array:
    """Returns the sum over manual mesh axes (``shard_map``)."""
    return _wide_on_cpu(lambda x: jax.lax.psum(x, axes), x)


def mark_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Marks a value as one that may differ along manual axes."""
    # Its gradient is summed over them.
    return _wide_on_cpu(lambda x: jax.lax.pcast(x, axes, to="varying"), x) if axes else x


def _wide_on_cpu(function, x: jax.Array) -> jax.Array:
    """Runs a function, and its transpose, in float32 on CPUs."""
    # XLA for CPU ends the process where narrow floats are summed over some of a mesh's axes while
    # it lays out the others ("Invalid binary instruction opcode copy"; 0.10 to 0.12).
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4):
        return function(x)
    return jax.lax.platform_dependent(
        x, cpu=lambda x: function(x.astype(jnp.float32)).astype(x.dtype), default=function
    )
