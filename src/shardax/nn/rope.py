# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, also stretched to longer texts.

Rotary position embedding (Su et al., "RoFormer: Enhanced Transformer with Rotary Position
Embedding", 2021) in the half-split form: the first half of a head is the real part and the second
half the imaginary part of ``head_dim / 2`` complex numbers. The i-th is turned by the angle
``position * base ** (-2 * i / head_dim)``, so that the product of a query and a key depends on the
difference of their positions alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax.extend import explicit_entries, explicit_sharding, with_layout
from shardax.nn.arithmetic import as_array
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.parameters import refuse_input


class Rotation(NamedTuple):
    """Cosine and sine of the angles of positions.

    Each is float32 of shape (batch or 1, time, 1, head_dim / 2); the 1 before the last dimension is
    for the heads.

    Example:
        >>> import jax.numpy as jnp
        >>> rotation(jnp.arange(8), 16).cosine.shape
        (1, 8, 1, 8)
    """

    cosine: jax.Array
    sine: jax.Array


class PlacedRotation(NamedTuple):
    """The rotation of positions, and the positions."""

    cosine: jax.Array
    sine: jax.Array
    positions: jax.Array


def rotation(
    positions: jax.Array, head_dim: int, base: float = 10_000.0, frequencies: object = None
) -> Rotation:
    """Computes the rotations of positions.

    Args:
        positions: Integers of shape (time,) or (batch, time).
        head_dim: Size of a head, even.
        base: Sets the longest wavelength, ``2 * pi * base`` positions nearly.
        frequencies: Angles per position, of shape (at most head_dim / 2,), instead of those that
            ``base`` gives. With fewer, the rest of a head is not turned.

    Returns:
        The rotation of each position.

    Raises:
        LayerConfigError: If ``head_dim`` is odd.
        LayerInputError: If positions or frequencies have another shape.

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
    if frequencies is None:
        frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    frequencies = as_array(frequencies).astype(jnp.float32)
    if frequencies.ndim != 1 or not 0 < frequencies.shape[0] <= half:
        refuse_input(
            "Rotary position embedding",
            f"frequencies of shape (at most {half},), half of head_dim={head_dim}",
            frequencies,
            "",
        )

    new = (0, 2, 3) if positions.ndim == 1 else (2, 3)
    spread = jax.lax.expand_dims(positions.astype(jnp.float32), new)
    angles = spread * jax.lax.expand_dims(frequencies, (0, 1, 2))
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation, *, interleaved: bool = False) -> jax.Array:
    """Turns queries or keys, in float32.

    With fewer angles than half a head, what is behind twice their number is left as it is.

    Args:
        x: Shape (batch, time, heads, head_dim), or without the batch.
        by: The rotations of the positions; those of a batch only with a batch.
        interleaved: Whether real and imaginary parts alternate, instead of standing in halves.

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

    half = cosine.shape[-1]
    if 2 * half > x.shape[-1]:
        refuse_input("rotate", f"heads of at least {2 * half}, for {half} angles", x, "")

    turn = _rotate_pairs if interleaved else _rotate_halves
    entries = explicit_entries(x)
    if entries is None or entries[-1] is None:
        return turn(x, cosine, sine)

    # What is turned together may be on two devices.
    return with_layout(turn, explicit_sharding(x), x, cosine, sine)


def _rotate_halves(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turns halves as real and imaginary parts."""
    half = cosine.shape[-1]
    # No part without elements, as its gradient would be a part of the program.
    cuts = [end for end in (half, 2 * half) if end < x.shape[-1]]
    real, imaginary, *remaining = jnp.split(x, cuts, axis=-1)
    real, imaginary = real.astype(jnp.float32), imaginary.astype(jnp.float32)
    rotated = [real * cosine - imaginary * sine, imaginary * cosine + real * sine]
    rotated = [part.astype(x.dtype) for part in rotated]
    return jnp.concatenate([*rotated, *remaining], axis=-1)


def _rotate_pairs(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turns neighbours as real and imaginary parts."""
    size = 2 * cosine.shape[-1]
    pairs = x[..., :size].reshape(*x.shape[:-1], size // 2, 2).astype(jnp.float32)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    rotated = [real * cosine - imaginary * sine, imaginary * cosine + real * sine]
    turned = jnp.stack(rotated, axis=-1).reshape(*x.shape[:-1], size).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def check_head_dim(layer: str, head_dim: int) -> None:
    """Raises if heads of this size cannot be split into halves."""
    if head_dim % 2:
        raise LayerConfigError(
            f"{layer} needs an even head_dim, to split heads into halves, but head_dim={head_dim}."
        )


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, also stretched to longer texts.

    Attributes:
        base: Base of the wavelengths.
        fraction: The part of a head that is turned.
        kind: ``"default"``, ``"linear"``, ``"llama3"`` or ``"yarn"``.
        factor: By how much the longest wavelengths are stretched.
        low: Llama3: wavelengths above ``length / low`` are stretched. YaRN: ``beta_slow``.
        high: Llama3: wavelengths below ``length / high`` are kept. YaRN: ``beta_fast``.
        length: Length of the texts before stretching.
        attention_factor: YaRN: multiplies cosine and sine; None follows from ``factor``.
        truncate: YaRN: whether the bounds of the ramp are whole numbers.
        interleaved: Whether real and imaginary parts alternate in a head, instead of being its
            halves.

    Example:
        >>> Rope(kind="linear", factor=2.0).rotation(jnp.arange(3), 4).cosine.shape
        (1, 3, 1, 2)
    """

    base: float = 10_000.0
    fraction: float = 1.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    length: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    interleaved: bool = False

    def rotated_size(self, head_dim: int) -> int:
        """Returns the size of the rotated part of a head."""
        return int(head_dim * self.fraction)

    def rotation(self, positions: jax.Array, head_dim: int) -> Rotation:
        """Computes the rotations of integer positions."""
        size = self.rotated_size(head_dim)
        if self.kind == "default":
            return rotation(positions, size, self.base)
        rotated = rotation(positions, size, self.base, frequencies=self._frequencies(size))
        factor = 1.0
        if self.kind == "yarn":
            factor = self.attention_factor
            factor = max(0.1 * math.log(self.factor) + 1, 1.0) if factor is None else factor
        return rotated if factor == 1 else Rotation(*(factor * table for table in rotated))

    def _frequencies(self, size: int) -> np.ndarray:
        """Returns the angle of each pair per position."""
        plain = 1 / self.base ** (np.arange(0, size, 2) / size)
        if self.kind == "linear":
            return np.asarray(plain / self.factor, np.float32)

        if self.kind == "llama3":
            turns = self.length * plain / (2 * math.pi)
            width = self.high - self.low or 1e-9  # a step where both are one
            plain_share = np.clip((turns - self.low) / width, 0, 1)
        else:
            ends = [
                size * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(self.base))
                for turns in (self.high, self.low)
            ]
            first, last = (math.floor(ends[0]), math.ceil(ends[1])) if self.truncate else ends
            first, last = max(first, 0), min(last, size - 1)
            width = last - first or 0.001
            plain_share = 1 - np.clip((np.arange(size // 2) - first) / width, 0, 1)

        return np.asarray(plain_share * plain + (1 - plain_share) * plain / self.factor, np.float32)
