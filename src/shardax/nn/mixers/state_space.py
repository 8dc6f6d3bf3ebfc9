# SPDX-License-Identifier: Apache-2.0
"""Selective state spaces with one decay per head, in chunks.

Dao and Gu, "Transformers are SSMs", 2024 (Mamba-2). Each head keeps a matrix of its values and the
components of a state. At every position it decays, and takes what the token writes:

    state = exp(step * decay) * state + step * outer(value, write)
    y     = state @ read + skip * value

``step``, ``write`` and ``read`` follow from the token, the last two for a group of heads together.
"""

from __future__ import annotations

import functools
import math
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
from shardax.nn.parameters import Initializer, as_axes, as_size, make_parameter, ones

# What passes a short convolution before it is used, and all projections.
CONVOLVED = ("value", "write", "read")
PROJECTED = ("gate", *CONVOLVED, "step")
GATE_NORMS = ("behind", "before", None)


class StateSpaceMixer(RecurrentMixer):
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
        out_bias: Whether that of the result has one; None for as ``use_bias``.
        conv_bias: Whether the convolution has biases.
        gate_norm: Where the norm stands: ``"behind"`` the gate, ``"before"`` it, or None for no
            norm.
        norm_epsilon: That of the norm.
        scales: Factors of what ``gate``, ``value``, ``write``, ``read`` and ``step`` project to.
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
        norm: The norm of groups of heads, with the silu of the gate as a factor; or None.
        out: ``Linear`` with a kernel of shape (num_heads, head_dim, features).

    Raises:
        LayerConfigError: If a size is not positive, groups do not divide heads, there are not five
            scales, or the activation or place of the norm is unknown.

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
        out_bias: bool | None = None,
        conv_bias: bool = True,
        gate_norm: str | None = "behind",
        norm_epsilon: float = 1e-5,
        scales: Sequence[float] = (1.0,) * 5,
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

        checks, divides = Options(LayerConfigError, name), heads % self.num_groups == 0
        checks.check("num_groups", num_groups, divides, f"groups that divide num_heads={heads}")
        checks.check("step_limits", step_limits, 0 <= low < high, "limits from 0 up")

        self.gate_norm, self.scales = gate_norm, tuple(map(float, scales))
        checks.check("gate_norm", gate_norm, gate_norm in GATE_NORMS, f"one of {GATE_NORMS}")
        fits = len(self.scales) == len(PROJECTED)
        checks.check("scales", scales, fits, f"scales of {', '.join(PROJECTED)}")

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
        self.step_bias = make_parameter(step_biases, *vector)
        self.decay_log = make_parameter(logarithms, *vector)
        self.skip = make_parameter(ones, *vector)

        norm_options = {"groups": self.num_groups, "gate_first": gate_norm == "behind"}
        self.norm = None
        if gate_norm is not None:
            self.norm = GatedRMSNorm(wide, names, norm_epsilon, param_dtype, **norm_options)

        options["use_bias"] = use_bias if out_bias is None else out_bias
        self.out = Linear(wide, self.features, kernel_axes=(*names, embed), **options)

    def states(self) -> dict[str, MixerState]:
        """Describes windows of the convolution, and the state."""
        names = (
            ("heads", "head_dim") if self.out.kernel.axes is None else self.out.kernel.axes[-3:-1]
        )
        grouped = MixerState((self.size - 1, self.num_groups, self.state_dim), (None,) * 3)
        values = MixerState((self.size - 1, self.num_heads, self.head_dim), (None, *names))
        shape = (self.num_heads, self.head_dim, self.state_dim)
        state = MixerState(shape, (*names, None), np.float32)
        windows = {"value_window": values, "write_window": grouped, "read_window": grouped}
        return {**windows, "state": state}

    def _mix(
        self, tokens: MixerInput, cache: RecurrentCache | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        activate = find_activation(self.activation, type(self).__name__)
        projected = {name: self._project(name, tokens.x) for name in CONVOLVED}
        mixed, states = self.convolution(projected, tokens, cache)

        gate, step = self._project("gate", tokens.x), self._project("step", tokens.x)
        wide = at_least_float32(gate.dtype)

        value, write, read = (activate(mixed[name]).astype(wide) for name in CONVOLVED)
        bias, decay, skip = (
            of_heads(v, step, wide) for v in (self.step_bias, self.decay_log, self.skip)
        )
        step = jnp.clip(jax.nn.softplus(step.astype(wide) + bias), *self.step_limits)

        if tokens.real is not None:  # padding neither decays nor writes
            step = jnp.where(tokens.real[..., None], step, 0)

        state = None if cache is None else cache.read("state", wide)
        arrays = (value, step, -step * jnp.exp(decay), write, read)
        scan = functools.partial(selective_scan, chunk=self.chunk)
        y, states["state"] = as_auto(scan, (0, 2, 3, None), *arrays, state, tokens.starts)

        y = y + value * skip[..., None]
        y = y * jax.nn.silu(gate.astype(wide)) if self.norm is None else self.norm(y, gate)
        return self.out(y.astype(gate.dtype)), states

    def _project(self, name: str, x: jax.Array) -> jax.Array:
        """Projects tokens, with the factor of the projection."""
        y, scale = getattr(self, name)(x), self.scales[PROJECTED.index(name)]
        return y if scale == 1 else y * jnp.asarray(scale, y.dtype)


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
    if state is None:
        batch, _, heads, head_dim = value.shape
        state = jnp.zeros((batch, heads, head_dim, write.shape[-1]), value.dtype)
    return scan_chunks(_chunk, state, (value * step[..., None], decay, write, read), starts, chunk)


def _chunk(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Runs one chunk from the state before it."""
    value, decay, write, read, starts = parts
    repeats = value.shape[2] // write.shape[2]
    between, reaches = decays_within(decay, starts)

    scores = jnp.einsum("btgn,bsgn->btsg", read, write)
    scores = jnp.repeat(scores, repeats, axis=-1) * between
    y = jnp.einsum("btsh,bshp->bthp", scores, value)

    write, read = (jnp.repeat(x, repeats, axis=2) for x in (write, read))
    y += jnp.einsum("bthn,bhpn->bthp", read, state) * reaches[..., None]

    state = state * reaches[:, -1, :, None, None]
    return state + jnp.einsum("bshp,bshn->bhpn", value * between[:, -1, ..., None], write), y
