# SPDX-License-Identifier: Apache-2.0
"""Products in fp8: operands in e4m3, gradients of results in e5m2.

Operands are rounded in each call, by the largest magnitude that they have in it (current scaling),
so there is no history of earlier steps to keep, save and resume; Micikevicius et al., "FP8 Formats
for Deep Learning", 2022. A scale is a power of two, by which nothing is rounded a second time. The
product is that of ``fp8 * scale`` in the compute dtype: the form in which XLA looks for products of
fp8 on devices that have them, and which has the same operands on others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Multiply = Callable[[jax.Array, jax.Array], jax.Array]

_OPERAND = jnp.float8_e4m3fn, 448.0
_GRADIENT = jnp.float8_e5m2, 57344.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_product(multiply: Multiply, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies operands that are rounded to fp8; so are gradients of the result."""
    return _forward(multiply, x, kernel)[0]


def _forward(multiply: Multiply, x: jax.Array, kernel: jax.Array):
    # What is kept for the backward pass has a byte for each number.
    rounded = [(*_rounded(array, *_OPERAND), jnp.zeros(0, array.dtype)) for array in (x, kernel)]
    return multiply(*map(_widened, rounded)), rounded


def _backward(multiply: Multiply, rounded, cotangent: jax.Array) -> tuple[Any, ...]:
    numbers, scale = _rounded(cotangent, *_GRADIENT)
    _, pull = jax.vjp(multiply, *map(_widened, rounded))
    return pull(numbers.astype(cotangent.dtype) * scale)


fp8_product.defvjp(_forward, _backward)


def _rounded(x: jax.Array, dtype: Any, largest: float) -> tuple[jax.Array, jax.Array]:
    """Returns fp8 numbers and the scale of them all."""
    most = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    limits = jnp.finfo(x.dtype)
    _, exponent = jnp.frexp(most / largest)
    exponent = jnp.clip(exponent, max(int(limits.minexp), -126), min(int(limits.maxexp), 128) - 1)
    scale = jnp.ldexp(jnp.float32(1), exponent)
    scale = jnp.where(jnp.isfinite(most), scale, jnp.nan).astype(x.dtype)
    return (x / scale).astype(dtype), scale


def _widened(rounded: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    numbers, scale, like = rounded
    return numbers.astype(like.dtype) * scale
