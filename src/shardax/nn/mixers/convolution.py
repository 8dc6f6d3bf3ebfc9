# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions over time, one kernel per channel, between gates.

Liquid AI, "LFM2 Technical Report", 2025, section 2: a short convolution between two gates,

    before, after, value = project(x)
    y = out(after * convolve(before * value))

A kernel of size 3 reads a position and the two before it. Kernels are short, so the sum over a
kernel is a sum of shifted arrays, which compilers fuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Module, Rngs
from shardax.extend import align
from shardax.nn.arithmetic import add_bias
from shardax.nn.attention.cache import laid_out
from shardax.nn.linear import Linear
from shardax.nn.mixers.cache import MixerInput, MixerState, RecurrentCache, RecurrentMixer
from shardax.nn.parameters import Initializer, as_axes, as_size, lecun_normal, make_parameter, zeros


class ShortConvolution(RecurrentMixer):
    """A short causal convolution of each channel between two gates.

    It mixes tokens as attention does, and is called and cached like it.

    Args:
        features: Size of the last dimension of input and output, and number of channels.
        size: How many positions the kernel reads, the present one included.
        use_bias: Whether the projections and the convolution have biases.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the projections; None for LeCun normal.
        axes: Axis names of features and channels.
        rngs: Random streams; ``params`` is used.

    Attributes:
        into: ``Linear`` with a kernel of shape (features, 3, features): what is multiplied before
            the convolution, after it, and what is convolved.
        kernel: ``Param`` of shape (size, features); its last row multiplies the present position.
        bias: ``Param`` of shape (features,), or None.
        out: ``Linear`` with a kernel of shape (features, features).

    Raises:
        LayerConfigError: If a size is not positive.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.ShortConvolution(8, size=4, rngs=sx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 8))).shape, layer.kernel.shape
        ((2, 5, 8), (4, 8))
    """

    def __init__(
        self,
        features: int,
        *,
        size: int = 3,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        axes: Sequence[str | None] = ("embed", "mlp"),
        rngs: Rngs | None,
    ) -> None:
        name = type(self).__name__
        embed, channel = as_axes(name, "axis names", axes, 2)
        self.features = as_size(name, "features", features)
        self.size = as_size(name, "size", size)

        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        options |= {"use_bias": use_bias, "kernel_init": kernel_init}
        self.into = Linear(
            self.features, (3, self.features), kernel_axes=(embed, None, channel), **options
        )

        shape, names = (self.size, self.features), (None, channel)
        initializer = lecun_normal((0,), (), (1,))
        self.kernel = make_parameter(initializer, shape, param_dtype, names, rngs)
        self.bias = (
            make_parameter(zeros, shape[1:], param_dtype, names[1:], rngs) if use_bias else None
        )
        self.out = Linear(self.features, self.features, kernel_axes=(channel, embed), **options)

    def states(self) -> dict[str, MixerState]:
        """Describes the window: the last inputs of the convolution."""
        names = (None, "mlp") if self.kernel.axes is None else self.kernel.axes[-2:]
        return {"window": MixerState((self.size - 1, self.features), (None, names[-1]))}

    def _mix(
        self, tokens: MixerInput, cache: RecurrentCache | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        before, after, value = jnp.unstack(self.into(tokens.x), axis=-2)
        window = None if cache is None else cache.read("window", value.dtype)
        bias = None if self.bias is None else self.bias.value
        kernel = self.kernel.value
        convolved, window = causal_convolution(before * value, kernel, bias, tokens, window)
        return self.out(after * convolved), {"window": window}


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

    def __call__(
        self, arrays: Mapping[str, jax.Array], tokens: MixerInput, cache: RecurrentCache | None
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Convolves arrays by name; returns their windows too."""
        convolved, windows = dict[str, jax.Array](), dict[str, jax.Array]()
        for name, x in arrays.items():
            kernel, state = getattr(self, f"{name}_kernel").value, f"{name}_window"
            bias = getattr(self, f"{name}_bias").value if self.use_bias else None
            window = None if cache is None else cache.read(state, x.dtype)
            convolved[name], windows[state] = causal_convolution(x, kernel, bias, tokens, window)
        return convolved, windows


def causal_convolution(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    tokens: MixerInput,
    window: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolves each channel over time; returns the last inputs too."""
    # x is (batch, time, *channels), the kernel (size, *channels), and the window what stands
    # before x, (batch, size - 1, *channels).
    kernel = kernel.astype(x.dtype)  # x is in the compute dtype

    size, time = kernel.shape[0], x.shape[1]
    if window is None:
        padded = jnp.pad(x, [(0, 0), (size - 1, 0)] + [(0, 0)] * (x.ndim - 2))
    else:
        padded = jnp.concatenate([laid_out(window.astype(x.dtype), x), x], axis=1)

    places, y = tokens.places, jnp.zeros_like(x)
    for index in range(size):
        weight = align(kernel[index], x, range(2, x.ndim))
        term = padded[:, index : index + time] * jax.lax.expand_dims(weight, (0, 1))
        if places is not None:
            is_same = places >= size - 1 - index
            term = jnp.where(jax.lax.expand_dims(is_same, range(2, x.ndim)), term, 0)
        y = y + term

    y = y if bias is None else add_bias(y, bias)
    return y, tokens.last(padded, size - 1)
