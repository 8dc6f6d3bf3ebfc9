# SPDX-License-Identifier: Apache-2.0
"""Layer, root mean square and batch normalization.

Statistics and the scaling by them are computed in float32 or wider whatever the input's dtype, and
the result is cast to the compute dtype at the end.

``BatchNorm`` (Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by
Reducing Internal Covariate Shift", 2015) computes mean and variance of each feature from the batch
while training, and running statistics, which are state (``BatchStat``), follow them. In evaluation
the running ones are used. Where a batch is spread over the batch elements of ``vmap`` or the shards
of ``shard_map``, ``axis_name`` makes its statistics those of the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.init.lazy import Init, Initializer
from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax._core.variable import BatchStat
from shardax._transforms.errors import LayerConfigError
from shardax.nn import parameters
from shardax.nn.linear import align, as_array, at_least_float32, result_dtype


class RMSNorm(Module):
    """Normalization by the root of the mean square.

    ``x / sqrt(mean(x**2) + epsilon) * scale``; Zhang and Sennrich, "Root Mean Square Layer
    Normalization", 2019.

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
        scale_init: Initializer = parameters.ones,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        self.features = parameters.as_size("RMSNorm", "features", features)
        self.epsilon = parameters.check_epsilon("RMSNorm", epsilon)
        names = parameters.as_axes("RMSNorm", "axis names", axes, 1)
        self.scale = (
            parameters.make_parameter(scale_init, (self.features,), param_dtype, names, rngs)
            if use_scale
            else None
        )
        self.dtype = parameters.canonical_dtype(dtype)

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
    """Normalization by mean and standard deviation over the last dimension.

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
        scale_init: Initializer = parameters.ones,
        bias_init: Initializer = parameters.zeros,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        self.features = parameters.as_size("LayerNorm", "features", features)
        self.epsilon = parameters.check_epsilon("LayerNorm", epsilon)
        names, shape = parameters.as_axes("LayerNorm", "axis names", axes, 1), (self.features,)
        make = functools.partial(
            parameters.make_parameter, shape=shape, dtype=param_dtype, axes=names, rngs=rngs
        )
        self.scale = make(scale_init) if use_scale else None
        self.bias = make(bias_init) if use_bias else None
        self.dtype = parameters.canonical_dtype(dtype)

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
        parameters.refuse_input(
            f"{layer}({features})",
            f"an input of shape {parameters.shown_sizes((features,))}",
            x,
            f"Make the layer with features={x.shape[-1] if x.ndim else 1}, or bring the features "
            f"to the end.",
        )
    return x


def _over_root_mean_square(wide: jax.Array, epsilon: float, scale: jax.Array | None) -> jax.Array:
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + epsilon)
    return normed if scale is None else normed * _spread(scale, normed)


def _spread(parameter: jax.Array, x: jax.Array, dimension: int | None = None) -> jax.Array:
    """Returns a parameter of one dimension, to be combined with ``x``."""
    dimension = x.ndim - 1 if dimension is None else dimension
    parameter = align(parameter.astype(x.dtype), x, (dimension,))
    return jax.lax.expand_dims(parameter, [i for i in range(x.ndim) if i != dimension])


class BatchNorm(Module):
    """Normalization of each feature by mean and standard deviation over the batch.

    ``(x - mean) / sqrt(var + epsilon) * scale + bias``. Variances are those of the batch itself
    (divided by its size, not by one less). After a call in training the running statistics are
    ``momentum * running + (1 - momentum) * batch``; no gradient goes through them.
    ``model.train()`` and ``model.eval()`` choose the statistics by ``use_running_average``.

    Args:
        features: Size of the dimension ``axis``.
        axis: The dimension of the features; negative counts from the end.
        momentum: How much of the running statistics is kept in each call, from 0 to 1.
        epsilon: Added to the variance, against division by zero.
        use_running_average: Whether it starts in evaluation.
        axis_name: Name of the axes of ``vmap`` or ``shard_map`` over which the batch is spread.
        use_scale: Whether to multiply by a learnt scale.
        use_bias: Whether to add a learnt bias.
        dtype: Compute dtype, that of the result; None promotes input and parameters.
        param_dtype: Parameter dtype. Statistics are float32.
        scale_init: Initializer of the scale.
        bias_init: Initializer of the bias.
        axes: Axis name of parameters and statistics.
        rngs: Random streams; only needed by initializers that draw.

    Attributes:
        mean: ``BatchStat`` of shape (features,), the running mean.
        var: ``BatchStat`` of shape (features,), the running variance.
        scale: ``Param`` of shape (features,), or None.
        bias: ``Param`` of shape (features,), or None.
        use_running_average: Whether the running statistics are used.

    Raises:
        LayerConfigError: If a size or number is out of range.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> norm = sx.nn.BatchNorm(1, momentum=0.5, epsilon=0.0)
        >>> norm(jnp.array([[1.0], [3.0]])).ravel().tolist()
        [-1.0, 1.0]
        >>> norm.mean.value.tolist(), norm.var.value.tolist()
        ([1.0], [1.0])
        >>> norm.eval()
        >>> norm(jnp.array([[1.0], [3.0]])).ravel().tolist()
        [0.0, 2.0]
    """

    def __init__(
        self,
        features: int,
        *,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        use_running_average: bool = False,
        axis_name: Hashable | tuple[Hashable, ...] | None = None,
        use_scale: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        scale_init: Initializer = parameters.ones,
        bias_init: Initializer = parameters.zeros,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        if not 0 <= momentum <= 1:
            raise LayerConfigError(
                f"BatchNorm needs a momentum from 0 to 1, the part of the running statistics to "
                f"keep, but momentum={momentum!r}."
            )
        self.features = parameters.as_size("BatchNorm", "features", features)
        self.axis = int(axis)
        self.momentum = float(momentum)
        self.epsilon = parameters.check_epsilon("BatchNorm", epsilon)
        self.use_running_average = bool(use_running_average)
        self.axis_name = axis_name
        names, shape = parameters.as_axes("BatchNorm", "axis names", axes, 1), (self.features,)
        self.mean = BatchStat(Init(parameters.zeros, shape, np.float32), axes=names)
        self.var = BatchStat(Init(parameters.ones, shape, np.float32), axes=names)
        make = functools.partial(
            parameters.make_parameter, shape=shape, dtype=param_dtype, axes=names, rngs=rngs
        )
        self.scale = make(scale_init) if use_scale else None
        self.bias = make(bias_init) if use_bias else None
        self.dtype = parameters.canonical_dtype(dtype)

    def __call__(
        self, x: Any, *, use_running_average: bool | None = None, mask: Any = None
    ) -> jax.Array:
        """Normalises an input, and in training follows its statistics.

        Args:
            x: Any shape of rank 1 or more; the dimension ``axis`` has size ``features``.
            use_running_average: Overrides the attribute for this call.
            mask: Which elements count for the statistics; booleans that broadcast to ``x``, such
                as (batch, length, 1). All are normalised.

        Returns:
            The same shape, in the compute dtype.

        Raises:
            LayerInputError: If the dimension of the features has another size, or there is no axis
                ``axis_name`` here.
        """
        x = as_array(x)
        if not -x.ndim <= self.axis < x.ndim or x.shape[self.axis] != self.features:
            parameters.refuse_input(
                f"BatchNorm({self.features})",
                f"an input whose dimension {self.axis} has size {self.features}",
                x,
                "Make the layer with the features that the input has, and axis=... for where they "
                "stand.",
            )
        dimension = self.axis % x.ndim
        wide = x.astype(at_least_float32(x.dtype))
        running = self.use_running_average if use_running_average is None else use_running_average
        if running:
            mean, var = self.mean.value, self.var.value
        else:
            mean, var = self._batch_statistics(wide, dimension, mask)
        scale = None if self.scale is None else self.scale.value
        bias = None if self.bias is None else self.bias.value
        normed = wide - _spread(mean, wide, dimension)
        normed = normed * jax.lax.rsqrt(_spread(var, wide, dimension) + self.epsilon)
        if scale is not None:
            normed = normed * _spread(scale, wide, dimension)
        if bias is not None:
            normed = normed + _spread(bias, wide, dimension)
        return normed.astype(result_dtype(self.dtype, x, scale, bias))

    def _batch_statistics(
        self, x: jax.Array, dimension: int, mask: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns mean and variance of features, and updates the running ones."""
        others = tuple(axis for axis in range(x.ndim) if axis != dimension)
        where = None if mask is None else jnp.broadcast_to(as_array(mask).astype(bool), x.shape)
        count = None if where is None else self._over_axis(jax.lax.psum, where.sum(others))

        def average(values: jax.Array) -> jax.Array:
            if where is None or count is None:
                return self._over_axis(jax.lax.pmean, values.mean(others))
            total = self._over_axis(jax.lax.psum, values.sum(others, where=where))
            return total / jnp.maximum(count, 1)

        mean = average(x)
        # Of centred values, so that a large common offset costs no precision.
        var = average(jnp.square(x - _spread(mean, x, dimension)))
        for statistic, batch in ((self.mean, mean), (self.var, var)):
            before = statistic.value
            batch = align(jax.lax.stop_gradient(batch).astype(before.dtype), before)
            after = self.momentum * before + (1 - self.momentum) * batch
            if count is not None:  # a batch without any element leaves it
                after = jnp.where(align(count, before) > 0, after, before)
            statistic.value = after
        return mean, var

    def _over_axis(self, collective: Any, x: jax.Array) -> jax.Array:
        if self.axis_name is None:
            return x
        try:
            return collective(x, self.axis_name)
        except NameError as error:
            raise parameters.LayerInputError(
                f"BatchNorm(axis_name={self.axis_name!r}) was called where there is no such axis. "
                f"Call it inside sx.vmap(..., axis_name={self.axis_name!r}) or sx.shard_map over a "
                f"mesh with that axis, or in evaluation, model.eval()."
            ) from error
