# SPDX-License-Identifier: Apache-2.0
"""Selective state spaces with one decay per head, in chunks.

Dao and Gu, "Transformers are SSMs", 2024 (Mamba-2). Each head keeps a matrix of its values and the
components of a state. At every position it decays, and takes what the token writes:

    state = exp(step * decay) * state + step * outer(value, write)
    y     = state @ read + skip * value

``step``, ``write`` and ``read`` follow from the token, the last two for a group of heads together.
Within a chunk of positions that is a product of matrices, as attention is, with the decay between
two positions as its mask; from chunk to chunk the state is handed on by a loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.init.lazy import Initializer
from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax.nn.arithmetic import as_array, at_least_float32, uses_tokamax
from shardax.nn.errors import LayerConfigError
from shardax.nn.linear import Linear
from shardax.nn.mixers.cache import MixerInput, MixerState, RecurrentCache
from shardax.nn.mixers.convolution import causal_convolution
from shardax.nn.mlp import Activation, find_activation
from shardax.nn.parameters import as_axes, as_size, lecun_normal, make_parameter, ones, zeros
from shardax.partition.explicit import align, explicit_entries, with_layout

# What passes a short convolution before it is used.
CONVOLVED = ("value", "write", "read")


class StateSpaceMixer(Module):
    """A selective state space between a convolution and a gated norm.

    It mixes tokens as attention does, and is called and cached like it.

    Args:
        features: Size of the last dimension of input and output.
        num_heads: Number of heads.
        head_dim: Size of a head's values.
        state_dim: Number of components of a head's state.
        num_groups: Number of groups of heads, of one ``write`` and ``read`` each.
        size: How many positions the convolution reads.
        chunk: How many positions are computed together; it changes rounding alone.
        step_limits: Bounds of the steps.
        activation: Function behind the convolution, or the name of one of ``jax.nn``.
        use_bias: Whether the projections have biases.
        conv_bias: Whether the convolution has biases.
        norm_epsilon: That of the norm.
        dtype: Compute dtype; None promotes input and parameters. States are float32 at least.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the projections; None for LeCun normal.
        axes: Axis names of features, heads and head dimension.
        rngs: Random streams; ``params`` is used.

    Attributes:
        gate: ``Linear`` with a kernel of shape (features, num_heads, head_dim).
        value: Likewise.
        write: ``Linear`` with a kernel of shape (features, num_groups, state_dim).
        read: Likewise.
        step: ``Linear`` with a kernel of shape (features, num_heads).
        convolution: Kernels and biases of the convolution, for ``value``, ``write`` and ``read``.
        step_bias: ``Param`` of shape (num_heads,), added before the softplus.
        decay_log: ``Param`` of shape (num_heads,): the logarithm of the decay.
        skip: ``Param`` of shape (num_heads,).
        norm: The norm, whose input is multiplied by the silu of the gate.
        out: ``Linear`` with a kernel of shape (num_heads, head_dim, features).

    Raises:
        LayerConfigError: If a size is not positive, groups do not divide heads, or the activation
            is unknown.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.StateSpaceMixer(
        ...     8, num_heads=4, head_dim=4, state_dim=6, num_groups=2, rngs=sx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 8))).shape, layer.states()["state"].shape
        ((2, 5, 8), (4, 4, 6))
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_dim: int,
        state_dim: int,
        num_groups: int = 1,
        size: int = 4,
        chunk: int = 256,
        step_limits: tuple[float, float] = (0.0, math.inf),
        activation: Activation = "silu",
        use_bias: bool = False,
        conv_bias: bool = True,
        norm_epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        axes: Sequence[str | None] = ("embed", "heads", "head_dim"),
        rngs: Rngs | None,
    ) -> None:
        name = type(self).__name__
        embed, head, within = as_axes(name, "axis names", axes, 3)
        self.features = as_size(name, "features", features)
        heads = self.num_heads = as_size(name, "num_heads", num_heads)
        self.head_dim, self.size = (
            as_size(name, option, value)
            for option, value in (("head_dim", head_dim), ("size", size))
        )
        self.state_dim = as_size(name, "state_dim", state_dim)
        self.num_groups = as_size(name, "num_groups", num_groups)
        find_activation(activation, name)
        self.chunk, self.activation = as_size(name, "chunk", chunk), activation
        low, high = self.step_limits = (float(step_limits[0]), float(step_limits[1]))
        if heads % self.num_groups or not 0 <= low < high:
            raise LayerConfigError(
                f"{name} needs groups that divide num_heads={heads} and limits from 0 up, but "
                f"num_groups={num_groups} and step_limits={step_limits}."
            )
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        options |= {"use_bias": use_bias, "kernel_init": kernel_init}
        wide, names = (heads, self.head_dim), (head, within)
        grouped = (self.num_groups, self.state_dim)
        self.gate = Linear(self.features, wide, kernel_axes=(embed, *names), **options)
        self.value = Linear(self.features, wide, kernel_axes=(embed, *names), **options)
        self.write = Linear(self.features, grouped, kernel_axes=(embed, None, None), **options)
        self.read = Linear(self.features, grouped, kernel_axes=(embed, None, None), **options)
        self.step = Linear(self.features, heads, kernel_axes=(embed, head), **options)
        self.convolution = ChannelKernels(
            {
                "value": (wide, names),
                "write": (grouped, (None,) * 2),
                "read": (grouped, (None,) * 2),
            },
            self.size,
            conv_bias,
            param_dtype,
            rngs,
        )
        vector = ((heads,), param_dtype, (head,), rngs)
        self.step_bias = make_parameter(_step_biases, *vector)
        self.decay_log = make_parameter(_logarithms, *vector)
        self.skip = make_parameter(ones, *vector)
        self.norm = GatedRMSNorm(wide, names, self.num_groups, norm_epsilon, param_dtype)
        self.out = Linear(wide, self.features, kernel_axes=(*names, embed), **options)

    def __call__(
        self,
        x: Any,
        *,
        mask: Any = None,
        positions: Any = None,
        segment_ids: Any = None,
        cache: RecurrentCache | None = None,
    ) -> jax.Array:
        """Mixes each position with all before it.

        Args:
            x: Shape (batch, time, features), or (time, features).
            mask: As for ``ShortConvolution``.
            positions: Not read, as in ``ShortConvolution``.
            segment_ids: Integers of shape (batch, time); states begin anew at their borders.
            cache: What ``make_cache`` returned: what earlier calls left, written anew.

        Returns:
            The shape of ``x``, in the compute dtype.

        Raises:
            LayerInputError: If a shape does not fit, or segments come with a cache.
        """
        x = as_array(x)
        shape = x.shape
        tokens = MixerInput.of(self, x, mask, segment_ids, cache)
        activate = find_activation(self.activation, type(self).__name__)
        mixed, kept = dict[str, jax.Array](), dict[str, jax.Array]()
        for name in CONVOLVED:
            projected = getattr(self, name)(tokens.x)
            window = None if cache is None else cache.read(f"{name}_window", projected.dtype)
            parameters = self.convolution.values(name)
            y, kept[f"{name}_window"] = causal_convolution(projected, *parameters, tokens, window)
            mixed[name] = activate(y)
        gate, step = self.gate(tokens.x), self.step(tokens.x)
        kind = at_least_float32(gate.dtype)
        value, write, read = (mixed[name].astype(kind) for name in CONVOLVED)
        bias, decay, skip = (
            jax.lax.expand_dims(align(v.value.astype(kind), step, (2,)), (0, 1))
            for v in (self.step_bias, self.decay_log, self.skip)
        )
        step = jnp.clip(jax.nn.softplus(step.astype(kind) + bias), *self.step_limits)
        if tokens.real is not None:  # padding neither decays nor writes
            step = jnp.where(tokens.real[..., None], step, 0)
        state = None if cache is None else cache.read("state", kind)
        places = tokens.places
        starts = None if places is None else places == 0
        scan = functools.partial(selective_scan, chunk=self.chunk)
        y, kept["state"] = _as_auto(
            scan, value, step, -step * jnp.exp(decay), write, read, state, starts
        )
        y = y + value * skip[..., None]
        if cache is not None:
            cache.update(kept, shape[-2], tokens.real)
        y = self.norm(y, gate).astype(gate.dtype)
        return tokens.in_order(self.out(y)).reshape(shape)

    def states(self) -> dict[str, MixerState]:
        """Says what it keeps of a row between calls.

        Returns:
            The last inputs of the convolution, and the state.

        Example:
            >>> import shardax as sx
            >>> sizes = {"num_heads": 2, "head_dim": 4, "state_dim": 6}
            >>> layer = sx.nn.StateSpaceMixer(8, **sizes, rngs=sx.Rngs(0))
            >>> {name: state.shape for name, state in layer.states().items()}["value_window"]
            (3, 2, 4)
        """
        names = (
            ("heads", "head_dim") if self.out.kernel.axes is None else self.out.kernel.axes[-3:-1]
        )
        grouped = MixerState((self.size - 1, self.num_groups, self.state_dim), (None,) * 3)
        values = MixerState((self.size - 1, self.num_heads, self.head_dim), (None, *names))
        shape = (self.num_heads, self.head_dim, self.state_dim)
        state = MixerState(shape, (*names, None), np.float32)
        windows = {"value_window": values, "write_window": grouped, "read_window": grouped}
        return {**windows, "state": state}

    def make_cache(self, batch: int, **options: Any) -> RecurrentCache:
        """Makes a cache of it, lazy.

        Args:
            batch: How many rows.
            **options: As for ``RecurrentCache``.

        Returns:
            The cache.

        Example:
            >>> import shardax as sx
            >>> sizes = {"num_heads": 2, "head_dim": 4, "state_dim": 6}
            >>> layer = sx.nn.StateSpaceMixer(8, **sizes, rngs=sx.Rngs(0))
            >>> layer.make_cache(3).states["state"].shape
            (3, 2, 4, 6)
        """
        return RecurrentCache(batch, self.states(), **options)


class ChannelKernels(Module):
    """Kernels of causal convolutions by name, one per channel."""

    def __init__(
        self, channels: dict[str, Any], size: int, use_bias: bool, param_dtype: Any, rngs: Any
    ) -> None:
        self.use_bias = use_bias
        for name, (shape, axes) in channels.items():
            batch = tuple(range(1, len(shape) + 1))
            initializer = lecun_normal((0,), (), batch)
            names = (None, *axes)
            kernel = make_parameter(initializer, (size, *shape), param_dtype, names, rngs)
            setattr(self, f"{name}_kernel", kernel)
            if use_bias:
                setattr(self, f"{name}_bias", make_parameter(zeros, shape, param_dtype, axes, rngs))

    def values(self, name: str) -> tuple[jax.Array, jax.Array | None]:
        """Returns the kernel of a name, and its bias."""
        bias = getattr(self, f"{name}_bias").value if self.use_bias else None
        return getattr(self, f"{name}_kernel").value, bias


class GatedRMSNorm(Module):
    """Root mean square normalization of gated heads, by groups of them."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        groups: int,
        epsilon: float,
        param_dtype: Any,
    ) -> None:
        self.scale = make_parameter(ones, shape, param_dtype, axes, None)
        self.groups, self.epsilon = groups, epsilon

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        uses_tokamax("norms", "GatedRMSNorm", x, lambda: "it norms no groups of heads")
        x = x * jax.nn.silu(gate.astype(x.dtype))

        def normed(x: jax.Array) -> jax.Array:
            grouped = x.reshape(*x.shape[:-2], self.groups, -1)
            square = jnp.mean(jnp.square(grouped), -1, keepdims=True)
            return (grouped * jax.lax.rsqrt(square + self.epsilon)).reshape(x.shape)

        sharding = None if explicit_entries(x) is None else jax.typeof(x).sharding
        y = with_layout(normed, sharding, x)
        scale = align(self.scale.value.astype(x.dtype), y)
        return y * jax.lax.expand_dims(scale, range(x.ndim - 2))


def selective_scan(
    value: jax.Array,
    step: jax.Array,
    decay: jax.Array,
    write: jax.Array,
    read: jax.Array,
    state: jax.Array | None,
    starts: jax.Array | None,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results at all positions, and the last state."""
    # value (batch, time, heads, head_dim); step and decay, a logarithm, (batch, time, heads);
    # write and read (batch, time, groups, state_dim); starts (batch, time).
    batch, time, heads, head_dim = value.shape
    if state is None:
        state = jnp.zeros((batch, heads, head_dim, write.shape[-1]), value.dtype)
    if starts is None:
        starts = jnp.zeros((batch, time), bool)
    length = min(chunk, time)
    count = -(-time // length)

    def cut(x: jax.Array) -> jax.Array:  # (chunks, batch, length, ...)
        padding = [(0, 0), (0, count * length - time)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, padding).reshape(batch, count, length, *x.shape[2:]), 1, 0)

    parts = tuple(map(cut, (value * step[..., None], decay, write, read, starts)))
    if count == 1:
        state, y = _chunk(state, tuple(part[0] for part in parts))
        return y, state
    state, y = jax.lax.scan(_chunk, state, parts)
    y = jnp.moveaxis(y, 0, 1).reshape(batch, count * length, heads, head_dim)
    return y[:, :time], state


def _chunk(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Runs one chunk from the state before it."""
    value, decay, write, read, starts = parts
    repeats = value.shape[2] // write.shape[2]
    total = jnp.cumsum(decay, axis=1)  # (batch, time, heads)
    segment = jnp.cumsum(starts, axis=1, dtype=np.int32)
    place = np.arange(value.shape[1])
    allowed = segment[:, :, None] == segment[:, None]  # (batch, time, earlier time)
    allowed &= (place[:, None] >= place[None])[None]
    # Summed for each pair: differences of two long sums would lose what is small beside them.
    later = (place[:, None] > place[None])[None, :, :, None]
    gap = jnp.cumsum(jnp.where(later, decay[:, :, None], 0), axis=1)
    gap = jnp.where(allowed[..., None], gap, -jnp.inf)
    scores = jnp.einsum("btgn,bsgn->btsg", read, write)
    scores = jnp.repeat(scores, repeats, axis=-1) * jnp.exp(gap)
    y = jnp.einsum("btsh,bshp->bthp", scores, value)
    write, read = (jnp.repeat(x, repeats, axis=2) for x in (write, read))
    # The state before the chunk reaches positions before its first border.
    reaches = jnp.where((segment == 0)[..., None], jnp.exp(total), 0)
    y += jnp.einsum("bthn,bhpn->bthp", read, state) * reaches[..., None]
    left = jnp.exp(gap[:, -1])[..., None]  # of what each position writes, at the end
    state = state * reaches[:, -1, :, None, None]
    return state + jnp.einsum("bshp,bshn->bhpn", value * left, write), y


def _as_auto(function: Callable[..., Any], x: jax.Array, *arrays: Any) -> Any:
    """Runs a function of two results with Explicit axes as Auto."""
    # The first is laid out as ``x``, the second by its batch and heads.
    entries = explicit_entries(x)
    if entries is None:
        return function(x, *arrays)
    specs = (entries, (entries[0], entries[2], entries[3], None))
    mesh = jax.typeof(x).sharding.mesh
    layouts = tuple(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*s)) for s in specs)
    return jax.sharding.auto_axes(function, out_sharding=layouts)(x, *arrays)


def _logarithms(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws nothing: the logarithms of 1, 2, 3 and so on."""
    return jnp.log(jnp.arange(1, shape[0] + 1, dtype=np.float32)).astype(dtype)


def _step_biases(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws biases with steps from 0.001 to 0.1, even by their logarithm."""
    logs = jax.random.uniform(key, shape, minval=math.log(0.001), maxval=math.log(0.1))
    step = jnp.exp(logs)
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)
