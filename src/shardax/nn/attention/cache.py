# SPDX-License-Identifier: Apache-2.0
"""The cache of attention: keys and values of earlier calls.

What may be read of it follows from the position that each slot holds, never from the slot's number;
so padding, and a ring whose slots are used again, need no rule of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Cache, Init, Module
from shardax.extend import (
    INLINE,
    explicit_entries,
    explicit_sharding,
    gathered,
    is_eager,
    with_layout,
)
from shardax.nn.arithmetic import as_array
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.masks import as_mask
from shardax.nn.parameters import as_size, refuse_input
from shardax.nn.quantization import RANGES, dequantized, round_to_format


class AttentionCache(Module):
    """Keys and values of one attention, kept between calls.

    It is lazy and has axis names, so ``sx.shard(cache, mesh, rules)`` makes it where the model is.

    Args:
        batch: How many rows.
        length: How many slots each row has.
        num_kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        dtype: Dtype of keys and values, a floating one; or int8, in which they are rounded, with a
            scale for each head of each position.
        ring: Whether slots are used again, oldest first; for attention with a window of at most
            ``length``.
        num_layers: Size of a leading dimension, for the layers of a ``Stack``; None for one layer.
        axis_name: Name of that dimension; that of the ``Stack``.

    Attributes:
        key: ``Cache`` of shape (batch, length, num_kv_heads, head_dim).
        value: Likewise.
        key_scale: Scales of int8 keys, ``Cache`` of shape (batch, length, num_kv_heads); else None.
        value_scale: Likewise.
        position: ``Cache`` of shape (batch, length): the position that a slot holds, or -1.
        count: ``Cache`` of no dimensions: how many slots were written.

    Raises:
        LayerConfigError: If a size is not positive, or for another dtype of integers.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> attention = sx.nn.MultiHeadAttention(8, 2, causal=True, rngs=sx.Rngs(0))
        >>> cache = sx.nn.AttentionCache(1, 4, num_kv_heads=2, head_dim=4)
        >>> x = jnp.arange(32.0).reshape(1, 4, 8)
        >>> parts = [attention(x[:, :3], cache=cache), attention(x[:, 3:], cache=cache)]
        >>> bool(jnp.allclose(jnp.concatenate(parts, 1), attention(x), atol=1e-5))
        True
        >>> cache.position[...].tolist()
        [[0, 1, 2, 3]]
    """

    key_scale: Cache[Any] | None = None
    value_scale: Cache[Any] | None = None

    def __init__(
        self,
        batch: int,
        length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any = np.float32,
        ring: bool = False,
        num_layers: int | None = None,
        axis_name: str = "layers",
    ) -> None:
        names = ("batch", "length", "num_kv_heads", "head_dim")
        values = (batch, length, num_kv_heads, head_dim)
        sizes = [
            as_size("AttentionCache", name, size) for name, size in zip(names, values, strict=True)
        ]
        layers = (
            () if num_layers is None else (as_size("AttentionCache", "num_layers", num_layers),)
        )
        axes = ("batch", "cache", "kv_heads", "head_dim")

        def make(fill: int, dtype: Any, count: int) -> Cache[Any]:
            init = Init(
                jax.nn.initializers.constant(fill), (*layers, *sizes[:count]), dtype, rngs=None
            )
            return Cache(init, axes=(*(axis_name,) * len(layers), *axes[:count]))

        is_int8 = jnp.dtype(dtype) == jnp.int8
        if not (is_int8 or jnp.issubdtype(dtype, jnp.floating)):
            raise LayerConfigError(
                f"AttentionCache has dtype={jnp.dtype(dtype)}, but it must be int8 or a floating "
                f"dtype."
            )
        self.key, self.value = make(0, dtype, 4), make(0, dtype, 4)
        if is_int8:  # set only where there are some
            self.key_scale, self.value_scale = make(0, np.float32, 3), make(0, np.float32, 3)
        self.position, self.count = make(-1, np.int32, 2), make(0, np.int32, 0)
        self.length = sizes[1]
        self.ring = bool(ring)

    def check(self, attention: Any, batch: int) -> None:
        """Raises if it does not fit an attention and its rows.

        Args:
            attention: The attention.
            batch: Rows of its input.
        """
        shape = (batch, self.length, attention.num_kv_heads, attention.head_dim)
        if self.key.shape != shape:
            refuse_input(
                "MultiHeadAttention",
                f"a cache with keys of shape {shape}",
                self.key,
                f"Make it with nn.AttentionCache{shape}, one for each layer.",
            )

        if self.ring and (attention.window is None or attention.window > self.length):
            raise LayerInputError(
                f"A ring of {self.length} slots forgets positions that attention with "
                f"window={attention.window} reads. Make the cache with ring=False, or as long as "
                f"the window."
            )

    def places(self, time: int, positions: Any = None, mask: Any = None) -> jax.Array:
        """Returns the positions of the next tokens, -1 for padding.

        Args:
            time: How many tokens in each row.
            positions: Integers of shape (time,) or (batch, time); None counts on in each row.
            mask: Booleans of shape (batch, time), True for real tokens; None for all.

        Returns:
            Integers of shape (batch, time).
        """
        if mask is not None:
            shape = f"of shape {(self.position.shape[0], time)}"
            mask = as_mask(type(self).__name__, mask, shape, "True is for real tokens.")
        return _next_positions(self.position.value, time, positions, mask)

    def update(
        self, key: jax.Array, value: jax.Array, positions: jax.Array, window: int | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Writes keys and values to the next slots.

        Args:
            key: Shape (batch, time, kv heads, head_dim).
            value: Likewise.
            positions: Shape (batch, time), what ``places`` returned.
            window: How many positions the reader reads at most.

        Returns:
            Keys, values and positions to read, and whether more was written than there are slots
            (None if that cannot be).

        Raises:
            LayerInputError: If there are not as many slots left.
        """
        time, count = positions.shape[1], self.count.value
        pairs: list[tuple[Any, Any]] = [
            (self.key, key),
            (self.value, value),
            (self.position, positions),
        ]

        if self.key_scale is not None:
            numbers, scales = zip(*map(_rounded_heads, (key, value)), strict=True)
            variables = (self.key, self.value, self.position, self.key_scale, self.value_scale)
            pairs = list(zip(variables, (*numbers, positions, *scales), strict=True))

        old = [variable.value for variable, _ in pairs]
        if any(jax.typeof(array).sharding.mesh.empty for array in old) and (
            explicit_entries(key) is not None
        ):
            raise LayerInputError(
                f"The AttentionCache is on one device, but keys are "
                f"{jax.typeof(key)} over Explicit mesh axes. Lay it out as the model: "
                f"sx.shard(cache, mesh, rules)."
            )

        new = [_laid_out_rows(array.astype(v.dtype), v.value) for v, array in pairs]

        is_full = None
        if not self.ring:
            is_full = count + time > self.length
            if time > self.length or (is_eager() and bool(is_full)):
                raise LayerInputError(
                    f"An AttentionCache of {self.length} slots is full: it was to take {time} more "
                    f"positions. Make a longer one, or one with ring=True for attention with a "
                    f"window."
                )
            written = [_written(_write, *pair, count) for pair in zip(old, new, strict=True)]
            read = written
        else:
            kept_count = min(time, self.length)
            start = count + (time - kept_count)
            last = [array[:, time - kept_count :] for array in new]
            written = [_written(_write_ring, *pair, start) for pair in zip(old, last, strict=True)]
            # What is overwritten may still be read by the first of many new positions.
            fits = time == 1 or time + (window or 0) <= self.length + 1
            read = (
                written
                if fits
                else [
                    jnp.concatenate([gathered(before, 1), after], axis=1)
                    for before, after in zip(old, new, strict=True)
                ]
            )

        for (variable, _), array in zip(pairs, written, strict=True):
            variable.value = array
        self.count.value = count + time

        keys, values, positions_held, *read_scales = read
        if read_scales:
            keys, values = (
                dequantized(numbers, scale[..., None], key.dtype)
                for numbers, scale in zip((keys, values), read_scales, strict=True)
            )
        return keys, values, positions_held, is_full


class ContextCache(AttentionCache):
    """Keys and values of a context, computed once for many calls.

    Attention that is called with it and a context writes the keys and values of the context to it,
    in the place of what it held. Called without a context, it reads these.

    Args:
        batch: How many rows.
        length: How many positions of a context it holds at most.
        num_kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        dtype: As for ``AttentionCache``.
        num_layers: As for ``AttentionCache``.
        axis_name: As for ``AttentionCache``.

    Raises:
        LayerConfigError: If a size is not positive, or for another dtype of integers.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> attention = sx.nn.MultiHeadAttention(8, 2, rngs=sx.Rngs(0))
        >>> cache = sx.nn.ContextCache(1, 4, num_kv_heads=2, head_dim=4)
        >>> x, context = jnp.ones((1, 1, 8)), jnp.arange(24.0).reshape(1, 3, 8)
        >>> first = attention(x, context, cache=cache)
        >>> bool(jnp.allclose(attention(x, cache=cache), first))
        True
    """

    def __init__(
        self,
        batch: int,
        length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any = np.float32,
        num_layers: int | None = None,
        axis_name: str = "layers",
    ) -> None:
        super().__init__(
            batch,
            length,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            num_layers=num_layers,
            axis_name=axis_name,
        )

    def write(self, key: jax.Array, value: jax.Array, mask: Any = None) -> None:
        """Writes keys and values of a whole context.

        Args:
            key: Shape (batch, other time, kv heads, head_dim).
            value: Likewise.
            mask: Booleans of shape (batch, other time), True for what may be read; None for all.

        Raises:
            LayerInputError: If the context is longer than the cache.
        """
        time = key.shape[1]
        if time > self.length:
            raise LayerInputError(
                f"A ContextCache of {self.length} slots was to take a context of {time} positions. "
                f"Make a longer one."
            )
        self.count.value = jnp.zeros_like(self.count.value)
        self.position.value = jnp.full_like(self.position.value, -1)
        self.update(key, value, self.places(time, mask=mask))

    def read(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns keys, values, and which slots may be read.

        Args:
            dtype: Dtype of the result.

        Returns:
            Keys and values in the dtype; booleans of shape (batch, 1, 1, length); and whether
            nothing was written.

        Raises:
            LayerInputError: If nothing was written.
        """
        is_empty = self.count.value == 0
        if is_eager() and bool(is_empty):
            raise LayerInputError(
                "A ContextCache was read before a context was written to it. Call the attention "
                "with the context first: attention(x, context, cache=cache)."
            )

        keys, values = self.key.value, self.value.value
        if self.key_scale is not None and self.value_scale is not None:
            keys = dequantized(keys, self.key_scale.value[..., None], dtype)
            values = dequantized(values, self.value_scale.value[..., None], dtype)

        allowed = (self.position.value >= 0)[:, None, None, :]
        return keys.astype(dtype), values.astype(dtype), allowed, is_empty


def _rounded_heads(heads: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns heads in int8 and their scales."""
    numbers, scale = round_to_format(heads, (-1,), RANGES["int8"])
    return numbers, scale[..., 0]


@functools.partial(jax.jit, static_argnums=1, inline=INLINE)
def _next_positions(positions_held: jax.Array, time: int, positions: Any, mask: Any) -> jax.Array:
    shape = (positions_held.shape[0], time)
    if positions is None:
        real = jnp.ones(shape, np.int32) if mask is None else mask.astype(np.int32)
        last = jnp.max(positions_held, 1, keepdims=True)
        positions = _laid_out_rows(jnp.cumsum(real, 1), positions_held) + last
    positions = jnp.broadcast_to(as_array(positions), shape).astype(np.int32)
    positions = positions if mask is None else jnp.where(mask, positions, -1)
    return _laid_out_rows(positions, positions_held)


@functools.partial(jax.jit, static_argnums=(2, 3), inline=INLINE)
def readable(
    positions_held: jax.Array, places: jax.Array, causal: bool, window: int | None
) -> jax.Array:
    """Says which slots each position may read."""
    seen, own_position = positions_held[:, None, None, :], places[:, None, :, None]
    allowed = seen >= 0
    if causal:
        allowed &= seen <= own_position
    return allowed if window is None else allowed & (seen > own_position - window)


def _written(
    write: Callable[..., jax.Array], old: jax.Array, new: jax.Array, start: Any
) -> jax.Array:
    """Writes new slots; where slots are split, the compiler finds the devices."""
    entries = explicit_entries(old)
    is_split = entries is not None and entries[1] is not None
    return with_layout(write, explicit_sharding(old) if is_split else None, old, new, start)


def _write(old: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)


def _write_ring(old: jax.Array, new: jax.Array, start: Any) -> jax.Array:
    length, time = old.shape[1], new.shape[1]
    start %= length
    if time == 1:
        return _write(old, new, start)
    # Slot s takes what is new at (s - start) modulo the length.
    source = (jnp.arange(length, dtype=np.int32) - start) % length
    trailing = (1,) * (old.ndim - 2)
    source_rows = jnp.take(new, jnp.minimum(source, time - 1), axis=1)
    return jnp.where((source < time).reshape(1, length, *trailing), source_rows, old)


def _laid_out_rows(new: jax.Array, old: jax.Array) -> jax.Array:
    """Lays new slots out as those of a cache, but whole along the slots."""
    # There are fewer of them, mostly one.
    entries = explicit_entries(old)
    if entries is None or entries[1] is None:
        return laid_out(new, old)
    spec = PartitionSpec(entries[0], None, *entries[2:])
    return jax.sharding.reshard(new, NamedSharding(jax.typeof(old).sharding.mesh, spec))


def laid_out(new: jax.Array, old: jax.Array) -> jax.Array:
    """Lays an array out as another, over Explicit mesh axes."""
    present, target = jax.typeof(new).sharding, jax.typeof(old).sharding
    if explicit_entries(new) == explicit_entries(old):
        return new
    mesh = target.mesh if explicit_entries(old) is not None else present.mesh
    return jax.sharding.reshard(new, NamedSharding(mesh, target.spec))
