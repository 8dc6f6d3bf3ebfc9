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

from shardax.core.errors import LayerConfigError, LayerInputError


class Rotation(NamedTuple):
    """Cosine and sine of the angles, float32, each of shape (batch or 1, time, 1, head_dim / 2).

    The last dimension of size one is for the heads.

    Example:
        >>> import jax.numpy as jnp
        >>> rotation(jnp.arange(8), 16).cosine.shape
        (1, 8, 1, 8)
    """

    cosine: jax.Array
    sine: jax.Array


def rotation(positions: jax.Array, head_dim: int, base: float = 10_000.0) -> Rotation:
    """Computes the rotations of positions.

    Args:
        positions: Integers of shape (time,) or (batch, time).
        head_dim: Size of a head, even.
        base: Sets the longest wavelength, ``2 * pi * base`` positions nearly.

    Returns:
        The rotation of each position.

    Raises:
        LayerConfigError: If ``head_dim`` is odd.
        LayerInputError: If the positions have another rank.

    Example:
        >>> rotation(jnp.arange(5), head_dim=8).cosine.shape
        (1, 5, 1, 4)
    """
    check_head_dim("Rotary position embedding", head_dim)
    if positions.ndim not in (1, 2):
        raise LayerInputError(
            f"Rotary position embedding takes positions of shape (time,) or (batch, time), but was "
            f"given {positions.dtype}{list(positions.shape)}."
        )
    half = head_dim // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    new = (0, 2, 3) if positions.ndim == 1 else (2, 3)
    spread = jax.lax.expand_dims(positions.astype(jnp.float32), new)
    angles = spread * jax.lax.expand_dims(frequencies, (0, 1, 2))
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Turns queries or keys, in float32.

    Args:
        x: Shape (batch, time, heads, head_dim), or without the batch.
        by: The rotations of the positions; those of a batch only with a batch.

    Returns:
        The shape and dtype of ``x``.

    Example:
        >>> x = jnp.ones((2, 5, 3, 8))
        >>> y = rotate(x, rotation(jnp.arange(5), head_dim=8))
        >>> y.shape, bool(jnp.allclose(y[:, 0], x[:, 0]))
        ((2, 5, 3, 8), True)
    """
    cosine, sine = by
    if x.ndim == 3:
        cosine, sine = jnp.squeeze(cosine, 0), jnp.squeeze(sine, 0)
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
