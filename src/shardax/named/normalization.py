# SPDX-License-Identifier: Apache-2.0
"""Normalisation along named axes: ``RMSNorm`` and ``LayerNorm``.

Statistics and the scaling by them are computed in float32 or wider whatever the input's dtype, and
the result is cast to the compute dtype at the end.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardax.core.dtypes import at_least_float32, canonical_dtype, result_dtype
from shardax.core.lazy import Initializer
from shardax.core.modules import Module
from shardax.core.normalization import check_epsilon
from shardax.core.rng import Rngs
from shardax.core.variables import Param
from shardax.named.array import NamedArray
from shardax.named.layer_parts import (
    Axes,
    AxisSizes,
    beside,
    check_axes,
    check_input,
    ones,
    parameter,
    zeros,
)


class RMSNorm(Module):
    """Divides by the root of the mean square: ``x / sqrt(mean(x**2) + epsilon) * scale``.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        axes: The axes along which means are taken, sizes by name.
        epsilon: Added to the mean square, against division by zero.
        use_scale: Whether to multiply by a learnt scale.
        dtype: Compute dtype, that of the result; None promotes input and scale.
        param_dtype: Parameter dtype.
        scale_init: Initializer of the scale.
        rngs: Random streams; only needed by a ``scale_init`` that draws.

    Attributes:
        scale: ``Param`` with these axes, or None.

    Raises:
        LayerConfigError: If axes are not sizes by name, or ``epsilon`` is negative.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> x = sx.named.wrap(jnp.array([2.0, -2.0]), "embed")
        >>> sx.named.RMSNorm({"embed": 2}, epsilon=0.0)(x).unwrap("embed").tolist()
        [1.0, -1.0]
    """

    def __init__(
        self,
        axes: Axes,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        scale_init: Initializer = ones,
        rngs: Rngs | None = None,
    ) -> None:
        self.axes = check_axes("RMSNorm", "axes", axes)
        self.epsilon = check_epsilon("RMSNorm", epsilon)
        self.scale = parameter(scale_init, self.axes, param_dtype, rngs) if use_scale else None
        self.dtype = canonical_dtype(dtype)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Normalises an input.

        Args:
            x: Has the layer's axes, and any others.

        Returns:
            The same axes, in the compute dtype.

        Raises:
            LayerInputError: If an axis is missing or has another size.
        """
        x = check_input(f"RMSNorm({self.axes})", x, self.axes)
        wide = x.astype(at_least_float32(x.dtype))
        normed = _over_root_mean_square(wide, self.axes, self.epsilon, self.scale)
        return normed.astype(result_dtype(self.dtype, x.data, _value(self.scale)))


class LayerNorm(Module):
    """Subtracts the mean and divides by the standard deviation, then scales and shifts.

    ``(x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias``; Ba, Kiros and Hinton, "Layer
    Normalization", 2016.

    Args:
        axes: The axes along which mean and variance are taken, sizes by name.
        epsilon: Added to the variance, against division by zero.
        use_scale: Whether to multiply by a learnt scale.
        use_bias: Whether to add a learnt bias.
        dtype: Compute dtype, that of the result; None promotes input and parameters.
        param_dtype: Parameter dtype.
        scale_init: Initializer of the scale.
        bias_init: Initializer of the bias.
        rngs: Random streams; only needed by initializers that draw.

    Attributes:
        scale: ``Param`` with these axes, or None.
        bias: ``Param`` with these axes, or None.

    Raises:
        LayerConfigError: If axes are not sizes by name, or ``epsilon`` is negative.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> x = sx.named.wrap(jnp.array([3.0, 5.0]), "embed")
        >>> sx.named.LayerNorm({"embed": 2}, epsilon=0.0)(x).unwrap("embed").tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        axes: Axes,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        scale_init: Initializer = ones,
        bias_init: Initializer = zeros,
        rngs: Rngs | None = None,
    ) -> None:
        self.axes = check_axes("LayerNorm", "axes", axes)
        self.epsilon = check_epsilon("LayerNorm", epsilon)
        self.scale = parameter(scale_init, self.axes, param_dtype, rngs) if use_scale else None
        self.bias = parameter(bias_init, self.axes, param_dtype, rngs) if use_bias else None
        self.dtype = canonical_dtype(dtype)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Normalises an input.

        Args:
            x: Has the layer's axes, and any others.

        Returns:
            The same axes, in the compute dtype.

        Raises:
            LayerInputError: If an axis is missing or has another size.
        """
        x = check_input(f"LayerNorm({self.axes})", x, self.axes)
        wide = x.astype(at_least_float32(x.dtype))
        centred = wide - wide.mean(list(self.axes.names))
        # Of centred values, so that a large common offset costs no precision.
        normed = _over_root_mean_square(centred, self.axes, self.epsilon, self.scale)
        if self.bias is not None:
            normed = normed + beside(self.bias, normed, normed.dtype)
        parameters = _value(self.scale), _value(self.bias)
        return normed.astype(result_dtype(self.dtype, x.data, *parameters))


def _over_root_mean_square(
    wide: NamedArray, axes: AxisSizes, epsilon: float, scale: Param[Any] | None
) -> NamedArray:
    data, dims = ((wide * wide).mean(list(axes.names)) + epsilon)._parts()
    normed = wide * NamedArray._make(jax.lax.rsqrt(data), dims)
    return normed if scale is None else normed * beside(scale, normed, normed.dtype)


def _value(variable: Any) -> Any:
    return None if variable is None else variable.value
