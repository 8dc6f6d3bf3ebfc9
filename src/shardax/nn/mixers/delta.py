# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, in chunks.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024. Each head keeps a
matrix that maps keys to values. At every position it decays, and then takes the difference of the
token's value from what it returns for the token's key:

    state = exp(decay) * state
    state = state + outer(key, beta * (value - key @ state))
    y     = query @ state

Within a chunk the differences follow from each other by a triangular system of equations (the WY
form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
2024, with decays), whose matrix is inverted block by block: products of matrices alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Rngs
from shardax.extend import Options
from shardax.nn.arithmetic import at_least_float32
from shardax.nn.errors import LayerConfigError
from shardax.nn.linear import Linear
from shardax.nn.mixers.cache import MixerInput, MixerState, RecurrentCache, RecurrentMixer
from shardax.nn.mixers.chunks import (
    GatedRMSNorm,
    as_auto,
    decays_within,
    logarithms,
    of_heads,
    scan_chunks,
    step_biases,
)
from shardax.nn.mixers.convolution import ChannelKernels
from shardax.nn.mlp import Activation, find_activation
from shardax.nn.parameters import Initializer, as_axes, as_size, make_parameter

# What passes a short convolution before it is used.
CONVOLVED = ("query", "key", "value")
# Added to the squared length of queries and keys.
LENGTH_EPSILON = 1e-6


class GatedDeltaNet(RecurrentMixer):
    """The gated delta rule between a convolution and a gated norm.

    It mixes tokens as attention does, and is called and cached like it. A head of queries and keys
    serves ``num_value_heads / num_heads`` heads of values, each with a state of its own.

    Args:
        features: Size of the last dimension of input and output.
        num_heads: Heads of queries and keys.
        head_dim: Size of a head of queries and keys, which are scaled to length 1.
        num_value_heads: Heads of values, a multiple of ``num_heads``; None for as many.
        value_dim: Size of a head of values; None for ``head_dim``.
        size: How many positions the convolution reads.
        chunk: How many positions are computed together; it changes rounding alone.
        activation: Function behind the convolution, or the name of one of ``jax.nn``.
        norm_epsilon: That of the norm.
        dtype: Compute dtype; None promotes input and parameters. States are float32 at least.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the projections; None for LeCun normal.
        axes: Axis names of features, heads and head dimension.
        rngs: Random streams; ``params`` is used.

    Attributes:
        query: ``Linear`` with a kernel of shape (features, num_heads, head_dim).
        key: Likewise.
        value: ``Linear`` with a kernel of shape (features, num_heads, value heads of each,
            value_dim).
        gate: Likewise.
        beta: ``Linear`` with a kernel of shape (features, num_heads, value heads of each), whose
            sigmoid is the share of the difference that is written.
        step: Likewise; its softplus multiplies the decay.
        convolution: Kernels of the convolution, for ``query``, ``key`` and ``value``.
        step_bias: ``Param`` of shape (num_heads, value heads of each), added before the softplus.
        decay_log: Likewise: the logarithm of the decay.
        norm: The norm of each head, whose result is multiplied by the silu of the gate.
        out: ``Linear`` with a kernel of shape (num_heads, value heads of each, value_dim,
            features).

    Raises:
        LayerConfigError: If a size is not positive, heads of values are no multiple of those of
            keys, or the activation is unknown.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.GatedDeltaNet(
        ...     8, num_heads=2, head_dim=4, num_value_heads=4, rngs=sx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 8))).shape, layer.states()["state"].shape
        ((2, 5, 8), (2, 2, 4, 4))
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_dim: int,
        num_value_heads: int | None = None,
        value_dim: int | None = None,
        size: int = 4,
        chunk: int = 64,
        activation: Activation = "silu",
        norm_epsilon: float = 1e-6,
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
        self.head_dim = as_size(name, "head_dim", head_dim)

        count = heads if num_value_heads is None else num_value_heads
        self.num_value_heads = as_size(name, "num_value_heads", count)
        self.value_dim = as_size(name, "value_dim", head_dim if value_dim is None else value_dim)
        self.size, self.chunk = as_size(name, "size", size), as_size(name, "chunk", chunk)

        find_activation(activation, name)
        self.activation = activation

        fits = self.num_value_heads % heads == 0
        checks = Options(LayerConfigError, name)
        expected = f"a multiple of num_heads={heads}"
        checks.check("num_value_heads", num_value_heads, fits, expected)

        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        options |= {"use_bias": False, "kernel_init": kernel_init}

        one = (heads, self.num_value_heads // heads)
        keys, values = (heads, self.head_dim), (*one, self.value_dim)
        key_names, value_names = (head, within), (head, None, within)

        self.query = Linear(self.features, keys, kernel_axes=(embed, *key_names), **options)
        self.key = Linear(self.features, keys, kernel_axes=(embed, *key_names), **options)
        self.value = Linear(self.features, values, kernel_axes=(embed, *value_names), **options)
        self.gate = Linear(self.features, values, kernel_axes=(embed, *value_names), **options)
        self.beta = Linear(self.features, one, kernel_axes=(embed, head, None), **options)
        self.step = Linear(self.features, one, kernel_axes=(embed, head, None), **options)

        channels = {
            "query": (keys, key_names),
            "key": (keys, key_names),
            "value": (values, value_names),
        }
        self.convolution = ChannelKernels(channels, self.size, False, param_dtype, rngs)

        numbers = (one, param_dtype, (head, None), rngs)
        self.step_bias = make_parameter(step_biases, *numbers)
        self.decay_log = make_parameter(logarithms, *numbers)
        self.norm = GatedRMSNorm(values[-1:], (within,), norm_epsilon, param_dtype)
        self.out = Linear(values, self.features, kernel_axes=(*value_names, embed), **options)

    def states(self) -> dict[str, MixerState]:
        """Describes windows of the convolution, and the state."""
        axes = self.out.kernel.axes
        head, within = ("heads", "head_dim") if axes is None else (axes[-4], axes[-2])
        values = (self.num_heads, self.num_value_heads // self.num_heads, self.value_dim)
        key = MixerState((self.size - 1, self.num_heads, self.head_dim), (None, head, within))
        value = MixerState((self.size - 1, *values), (None, head, None, within))
        shape = (*values[:2], self.head_dim, self.value_dim)
        state = MixerState(shape, (head, None, None, within), np.float32)
        windows = {"query_window": key, "key_window": key, "value_window": value}
        return {**windows, "state": state}

    def _mix(
        self, tokens: MixerInput, cache: RecurrentCache | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        activate = find_activation(self.activation, type(self).__name__)
        projected = {name: getattr(self, name)(tokens.x) for name in CONVOLVED}

        mixed, states = self.convolution(projected, tokens, cache)
        gate, beta, step = self.gate(tokens.x), self.beta(tokens.x), self.step(tokens.x)
        wide = at_least_float32(gate.dtype)

        query, key, value = (activate(mixed[name]).astype(wide) for name in CONVOLVED)
        bias, decay = (of_heads(v, step, wide) for v in (self.step_bias, self.decay_log))
        decay = -jax.nn.softplus(step.astype(wide) + bias) * jnp.exp(decay)
        beta = jax.nn.sigmoid(beta.astype(wide))

        if tokens.real is not None:  # padding neither decays nor writes
            real = tokens.real[..., None, None]
            decay, beta = jnp.where(real, decay, 0), jnp.where(real, beta, 0)

        state = None if cache is None else cache.read("state", wide)
        arrays = (value, _of_length_1(query) * self.head_dim**-0.5, _of_length_1(key), beta, decay)
        scan = functools.partial(gated_delta_rule, chunk=self.chunk)
        y, states["state"] = as_auto(scan, (0, 2, 3, None, 4), *arrays, state, tokens.starts)
        return self.out(self.norm(y, gate).astype(gate.dtype)), states


def gated_delta_rule(
    value: jax.Array,
    query: jax.Array,
    key: jax.Array,
    beta: jax.Array,
    decay: jax.Array,
    state: jax.Array | None,
    starts: jax.Array | None,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results at all positions, and the last state."""
    # value (batch, time, heads, values, value_dim); query and key (batch, time, heads, head_dim);
    # beta and decay, a logarithm, (batch, time, heads, values); starts (batch, time).
    if state is None:
        batch, _, *heads, value_dim = value.shape
        state = jnp.zeros((batch, *heads, key.shape[-1], value_dim), value.dtype)
    return scan_chunks(_chunk, state, (value, query, key, beta, decay), starts, chunk)


def _chunk(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Runs one chunk from the state before it."""
    value, query, key, beta, decay, starts = parts
    between, reaches = decays_within(decay, starts)
    left = between[:, -1, ..., None]  # of what each position writes, at the end
    between = jnp.moveaxis(between, (1, 2), (3, 4))  # (batch, heads, values, time, earlier time)

    # What a position writes depends on what those before it wrote: system @ written = value.
    overlap = jnp.einsum("bthk,bshk->bhts", key, key)[:, :, None] * between
    system = overlap * jnp.moveaxis(beta, 1, 3)[..., None]
    read = jnp.einsum("bthk,bhrkv->bthrv", key, state) * reaches[..., None]
    written = (value - read) * beta[..., None]
    written = jnp.einsum("bhrts,bshrv->bthrv", _inverse_of_lower(system), written)

    scores = jnp.einsum("bthk,bshk->bhts", query, key)[:, :, None] * between
    y = jnp.einsum("bhrts,bshrv->bthrv", scores, written)
    y += jnp.einsum("bthk,bhrkv->bthrv", query, state) * reaches[..., None]

    state = state * reaches[:, -1, ..., None, None]
    return state + jnp.einsum("bshk,bshrv->bhrkv", key, written * left), y


def _inverse_of_lower(matrix: jax.Array) -> jax.Array:
    """Inverts a lower triangular matrix with ones in place of its diagonal."""
    # Two neighboring blocks make one: -inverse(last) @ below @ inverse(first) is below them.
    size = matrix.shape[-1]
    place, width = np.arange(size), 1
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=matrix.dtype), matrix.shape)
    while width < size:
        is_last = place[:, None] // width % 2 == 1
        below = is_last & (place[:, None] // width - 1 == place[None] // width)
        step = jnp.matmul(jnp.where(below, matrix, 0), inverse, precision="highest")
        inverse = inverse - jnp.matmul(inverse, step, precision="highest")
        width *= 2
    return inverse


def _of_length_1(x: jax.Array) -> jax.Array:
    """Scales vectors to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + LENGTH_EPSILON)
