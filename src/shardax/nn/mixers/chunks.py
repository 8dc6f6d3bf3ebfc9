# SPDX-License-Identifier: Apache-2.0
"""Recurrences with a decay in chunks of time, and gated norms.

A state decays at every position and takes what the position writes. Within a chunk that is a
product of matrices, as attention is, with the decays between positions as its mask; from chunk to
chunk the state is handed on by a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Module
from shardax.extend import align, explicit_entries, explicit_sharding, with_layout
from shardax.nn.arithmetic import uses_tokamax
from shardax.nn.parameters import make_parameter, ones


def scan_chunks(
    chunk: Callable[..., tuple[jax.Array, jax.Array]],
    state: jax.Array,
    arrays: tuple[jax.Array, ...],
    starts: jax.Array | None,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results at all positions, and the last state."""
    # The arrays are (batch, time, ...), those of padding zeros; starts says where states begin
    # anew. A chunk is called as chunk(state, (*arrays, starts)).
    batch, time = arrays[0].shape[:2]
    if starts is None:
        starts = jnp.zeros((batch, time), bool)
    length = max(min(size, time), 1)  # without tokens, no chunk
    count = -(-time // length)

    def cut(x: jax.Array) -> jax.Array:  # (chunks, batch, length, ...)
        padding = [(0, 0), (0, count * length - time)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, padding).reshape(batch, count, length, *x.shape[2:]), 1, 0)

    parts = tuple(map(cut, (*arrays, starts)))
    if count == 1:
        state, y = chunk(state, tuple(part[0] for part in parts))
        return y, state

    state, y = jax.lax.scan(chunk, state, parts)
    y = jnp.moveaxis(y, 0, 1).reshape(batch, count * length, *y.shape[3:])
    return y[:, :time], state


def decays_within(decay: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns decays from earlier positions, and from the state before the chunk."""
    # Of logarithms (batch, time, ...): (batch, time, earlier time, ...), 0 where nothing is read,
    # and (batch, time, ...). Nothing passes a border.
    names = tuple(range(3, decay.ndim + 1))
    segment = jnp.cumsum(starts, axis=1, dtype=np.int32)
    position = np.arange(decay.shape[1])
    allowed = segment[:, :, None] == segment[:, None]
    allowed &= (position[:, None] >= position[None])[None]

    # Summed for each pair: differences of two long sums would lose what is small beside them.
    later = np.expand_dims(position[:, None] > position[None], (0, *names))
    gap = jnp.cumsum(jnp.where(later, decay[:, :, None], 0), axis=1)
    between = jnp.exp(jnp.where(jax.lax.expand_dims(allowed, names), gap, -jnp.inf))

    # The state before the chunk reaches positions before its first border.
    is_reached = jax.lax.expand_dims(segment == 0, range(2, decay.ndim))
    return between, jnp.where(is_reached, jnp.exp(jnp.cumsum(decay, axis=1)), 0)


def as_auto(
    function: Callable[..., Any], state_axes: tuple[int | None, ...], x: jax.Array, *arrays: Any
) -> Any:
    """Runs a function of two results with Explicit axes as Auto."""
    # The first is laid out as ``x``, dimensions of the second as these of ``x``.
    entries = explicit_entries(x)
    if entries is None:
        return function(x, *arrays)
    specs = (entries, tuple(None if axis is None else entries[axis] for axis in state_axes))
    mesh = jax.typeof(x).sharding.mesh
    layouts = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    return with_layout(function, layouts, x, *arrays)


def of_heads(variable: Any, like: jax.Array, dtype: Any) -> jax.Array:
    """Returns a number of each head beside an array (batch, time, heads...)."""
    value = align(variable.value.astype(dtype), like, range(2, like.ndim))
    return jax.lax.expand_dims(value, (0, 1))


class GatedRMSNorm(Module):
    """Root mean square normalization of heads, before or behind gates."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        epsilon: float,
        param_dtype: Any,
        *,
        groups: int | None = None,
        gate_first: bool = False,
    ) -> None:
        # With groups the norm is over the heads of each, (heads, head_dim); else over the last
        # dimension.
        self.scale = make_parameter(ones, shape, param_dtype, axes, None)
        self.groups, self.epsilon, self.gate_first = groups, epsilon, gate_first

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        uses_tokamax("norms", "GatedRMSNorm", x, lambda: "it norms heads with gates")
        gate = jax.nn.silu(gate.astype(x.dtype))
        x = x * gate if self.gate_first else x

        def normed(x: jax.Array) -> jax.Array:
            grouped = x
            if self.groups is not None:  # with its size, which JAX cannot infer without tokens
                size = math.prod(x.shape[-2:]) // self.groups
                grouped = x.reshape(*x.shape[:-2], self.groups, size)
            square = jnp.mean(jnp.square(grouped), -1, keepdims=True)
            return (grouped * jax.lax.rsqrt(square + self.epsilon)).reshape(x.shape)

        y = with_layout(normed, explicit_sharding(x), x)

        scale = self.scale.value.astype(x.dtype)
        first = x.ndim - scale.ndim
        y = y * jax.lax.expand_dims(align(scale, y, range(first, x.ndim)), range(first))
        return y if self.gate_first else y * gate


def logarithms(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws nothing: the logarithms of 1, 2, 3 and so on."""
    count = math.prod(shape)
    return jnp.log(jnp.arange(1, count + 1, dtype=np.float32)).reshape(shape).astype(dtype)


def step_biases(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws biases with steps from 0.001 to 0.1, even by their logarithm."""
    logs = jax.random.uniform(key, shape, minval=math.log(0.001), maxval=math.log(0.1))
    step = jnp.exp(logs)
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)
