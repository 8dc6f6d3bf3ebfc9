# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: positions as rotations of queries and keys.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, in the half-split
form: the first half of a head is the real part and the second half the imaginary part of
``head_dim / 2`` complex numbers. The i-th is turned by the *angle*
``position * base ** (-2 * i / head_dim)``, so that the product of a query and a key depends on the
difference of their positions alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardax.core.errors import LayerConfigError


class Rotation(NamedTuple):
    """Cosine and sine of the angles, float32, each of shape (..., time, 1, head_dim / 2).

    The dimension of size one is for the heads.
    """

    cosine: jax.Array
    sine: jax.Array


def rotation(positions: jax.Array, head_dim: int, base: float = 10_000.0) -> Rotation:
    """Computes the rotations of positions.

    Args:
        positions: Integers of shape (..., time).
        head_dim: Size of a head, even.
        base: Sets the longest wavelength, ``2 * pi * base`` positions nearly.

    Returns:
        The rotation of each position.

    Raises:
        LayerConfigError: If ``head_dim`` is odd.

    Example:
        >>> rotation(jnp.arange(5), head_dim=8).cosine.shape
        (5, 1, 4)
    """
    check_head_dim("Rotary position embedding", head_dim)
    half = head_dim // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    spread = jax.lax.expand_dims(frequencies, range(positions.ndim + 1))
    angles = positions.astype(jnp.float32)[..., None, None] * spread
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Turns queries or keys, in float32.

    Args:
        x: Shape (..., time, heads, head_dim).
        by: The rotations of the positions; broadcast over dimensions of ``x`` that they lack.

    Returns:
        The shape and dtype of ``x``.

    Example:
        >>> x = jnp.ones((2, 5, 3, 8))
        >>> y = rotate(x, rotation(jnp.arange(5), head_dim=8))
        >>> y.shape, bool(jnp.allclose(y[:, 0], x[:, 0]))
        ((2, 5, 3, 8), True)
    """
    missing = range(x.ndim - by.cosine.ndim)
    cosine = jax.lax.expand_dims(by.cosine, missing)
    sine = jax.lax.expand_dims(by.sine, missing)
    real, imaginary = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [real * cosine - imaginary * sine, imaginary * cosine + real * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def check_head_dim(layer: str, head_dim: int) -> None:
    """Raises if heads of this size cannot be split into real and imaginary halves.

    Raises:
        LayerConfigError: If ``head_dim`` is odd.
    """
    if head_dim % 2:
        raise LayerConfigError(
            f"{layer} needs an even head_dim, to split heads into halves, but head_dim={head_dim}."
        )
