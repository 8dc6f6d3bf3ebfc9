# SPDX-License-Identifier: Apache-2.0
"""Contractions: the sums of products that layers are made of.

One function contracts an input with a parameter over some of their dimensions, the other by an
equation. Where the caller does not say how to lay the result out, ``shardax.partition.explicit``
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax.partition.explicit import joined_sharding


def contract(
    x: jax.Array, kernel: jax.Array, dimensions: Sequence[int], out_sharding: Any = None
) -> jax.Array:
    """Sums products over the last dimensions of the input and given dimensions of the kernel.

    Args:
        x: Shape (..., *contracted).
        kernel: Has the contracted sizes at ``dimensions``; of the dtype of ``x``.
        dimensions: Dimensions of the kernel, in the order of the last dimensions of ``x``.
        out_sharding: Sharding of the result, for Explicit mesh axes; by default that of the
            dimensions that remain.

    Returns:
        Shape (..., *remaining dimensions of the kernel), of the dtype of ``x``.

    Example:
        >>> contract(jnp.ones((2, 3)), jnp.ones((4, 3)), (1,)).shape
        (2, 4)
    """
    free = x.ndim - len(dimensions)
    if out_sharding is None:
        rest = [axis for axis in range(kernel.ndim) if axis not in dimensions]
        out_sharding = joined_sharding(((x, range(free)), (kernel, rest)))
    # In this order and not by jnp.einsum, which contracts several dimensions last one first: XLA
    # on CPU then copies both operands.
    contracted = (tuple(range(free, x.ndim)), tuple(dimensions))
    return jax.lax.dot_general(
        x,
        kernel,
        (contracted, ((), ())),
        preferred_element_type=x.dtype,
        out_sharding=out_sharding,
    )


def einsum(equation: str, x: jax.Array, kernel: jax.Array, out_sharding: Any = None) -> jax.Array:
    """``jnp.einsum`` of an input and a kernel, laid out also over Explicit mesh axes.

    Args:
        equation: Two operands and a result, all spelled out by letters, without ellipses.
        x: The first operand.
        kernel: The second, of the dtype of ``x``.
        out_sharding: As for ``contract``.

    Returns:
        The result, of the dtype of ``x``.

    Example:
        >>> einsum("te,hed->thd", jnp.ones((2, 3)), jnp.ones((4, 3, 5))).shape
        (2, 4, 5)
    """
    if out_sharding is None:
        inputs, output = equation.split("->")
        first, second = inputs.split(",")
        parts = [
            (x, (first.index(letter),)) if letter in first else (kernel, (second.index(letter),))
            for letter in output
        ]
        out_sharding = joined_sharding(parts)
    return jnp.einsum(equation, x, kernel, out_sharding=out_sharding)
