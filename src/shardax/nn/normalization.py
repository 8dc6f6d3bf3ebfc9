# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension: ``RMSNorm`` and ``LayerNorm``.

*Statistics* (means over the features) and the scaling by them are computed in float32 or wider
whatever the input's dtype, and the result is cast to the compute dtype at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.dtypes import as_array, at_least_float32, canonical_dtype, result_dtype
from shardax.core.lazy import Initializer
from shardax.core.modules import Module
from shardax.core.normalization import check_epsilon
from shardax.core.rng import Rngs
from shardax.nn.parameters import (
    as_axes,
    as_size,
    make_parameter,
    ones,
    refuse_input,
    shown_sizes,
    zeros,
)
from shardax.partition.explicit import align


class RMSNorm(Module):
    """Divides by the root of the mean square: ``x / sqrt(mean(x**2) + epsilon) * scale``.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        features: Size of the last dimension.
        epsilon: Added to the mean square, against division by zero.
        use_scale: Whether to multiply by a learnt scale.
        dtype: Compute dtype, that of the result; None promotes input and scale.
        param_dtype: Parameter dtype.
        scale_init: Initializer of the scale.
        axes: Axis name of the scale.
        rngs: Random streams; only needed by a ``scale_init`` that draws.

    Attributes:
        scale: ``Param`` of shape (features,), or None.

    Raises:
        LayerConfigError: If ``features`` is not positive or ``epsilon`` is negative.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.nn.RMSNorm(2, epsilon=0.0)(jnp.array([[2.0, -2.0]])).tolist()
        [[1.0, -1.0]]
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        scale_init: Initializer = ones,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        self.features = as_size("RMSNorm", "features", features)
        self.epsilon = check_epsilon("RMSNorm", epsilon)
        names = as_axes("RMSNorm", "axis names", axes, 1)
        self.scale = (
            make_parameter("RMSNorm", scale_init, (self.features,), param_dtype, names, rngs)
            if use_scale
            else None
        )
        self.dtype = canonical_dtype(dtype)

    def __call__(self, x: Any) -> jax.Array:
        """Normalises an input.

        Args:
            x: Shape (..., features).

        Returns:
            The same shape, in the compute dtype.

        Raises:
            LayerInputError: If the last dimension is not ``features``.
        """
        x = _check_input("RMSNorm", self.features, x)
        scale = None if self.scale is None else self.scale.value
        wide = x.astype(at_least_float32(x.dtype))
        normed = _over_root_mean_square(wide, self.epsilon, scale)
        return normed.astype(result_dtype(self.dtype, x, scale))


class LayerNorm(Module):
    """Subtracts the mean and divides by the standard deviation, then scales and shifts.

    ``(x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias``; Ba, Kiros and Hinton, "Layer
    Normalization", 2016.

    Args:
        features: Size of the last dimension.
        epsilon: Added to the variance, against division by zero.
        use_scale: Whether to multiply by a learnt scale.
        use_bias: Whether to add a learnt bias.
        dtype: Compute dtype, that of the result; None promotes input and parameters.
        param_dtype: Parameter dtype.
        scale_init: Initializer of the scale.
        bias_init: Initializer of the bias.
        axes: Axis name of scale and bias.
        rngs: Random streams; only needed by initializers that draw.

    Attributes:
        scale: ``Param`` of shape (features,), or None.
        bias: ``Param`` of shape (features,), or None.

    Raises:
        LayerConfigError: If ``features`` is not positive or ``epsilon`` is negative.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.nn.LayerNorm(2, epsilon=0.0)(jnp.array([[3.0, 5.0]])).tolist()
        [[-1.0, 1.0]]
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        scale_init: Initializer = ones,
        bias_init: Initializer = zeros,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        self.features = as_size("LayerNorm", "features", features)
        self.epsilon = check_epsilon("LayerNorm", epsilon)
        names, shape = as_axes("LayerNorm", "axis names", axes, 1), (self.features,)
        make = functools.partial(
            make_parameter, "LayerNorm", shape=shape, dtype=param_dtype, axes=names, rngs=rngs
        )
        self.scale = make(scale_init) if use_scale else None
        self.bias = make(bias_init) if use_bias else None
        self.dtype = canonical_dtype(dtype)

    def __call__(self, x: Any) -> jax.Array:
        """Normalises an input.

        Args:
            x: Shape (..., features).

        Returns:
            The same shape, in the compute dtype.

        Raises:
            LayerInputError: If the last dimension is not ``features``.
        """
        x = _check_input("LayerNorm", self.features, x)
        scale = None if self.scale is None else self.scale.value
        bias = None if self.bias is None else self.bias.value
        wide = x.astype(at_least_float32(x.dtype))
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        # Of centred values, so that a large common offset costs no precision.
        normed = _over_root_mean_square(centred, self.epsilon, scale)
        if bias is not None:
            normed = normed + _spread(bias, normed)
        return normed.astype(result_dtype(self.dtype, x, scale, bias))


def _check_input(layer: str, features: int, x: Any) -> jax.Array:
    x = as_array(x)
    if x.shape[-1:] != (features,):
        refuse_input(
            f"{layer}({features})",
            f"an input of shape {shown_sizes((features,))}",
            x,
            f"Make the layer with features={x.shape[-1] if x.ndim else 1}, or bring the features "
            f"to the end.",
        )
    return x


def _over_root_mean_square(wide: jax.Array, epsilon: float, scale: jax.Array | None) -> jax.Array:
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + epsilon)
    return normed if scale is None else normed * _spread(scale, normed)


def _spread(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a parameter of shape (features,) ready to be combined with ``x`` elementwise."""
    parameter = align(parameter.astype(x.dtype), x)
    return jax.lax.expand_dims(parameter, range(x.ndim - 1))
