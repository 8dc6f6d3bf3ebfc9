# SPDX-License-Identifier: Apache-2.0
"""Layer, root mean square, group and batch normalization.

Statistics and the scaling by them are computed in float32 or wider whatever the input's dtype, and
the result is cast to the compute dtype at the end.

A mask says which elements count for the statistics; all elements are normalized by them. Where a
group has none that counts, as in padding, all of its elements do (``BatchNorm`` has its running
statistics for that).

``BatchNorm`` (Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by
Reducing Internal Covariate Shift", 2015) computes mean and variance of each feature from the batch
while training, and running statistics, which are state (``BatchStat``), follow them. In evaluation
the running ones are used. Where a batch is spread over the batch elements of ``vmap`` or the shards
of ``shard_map``, ``axis_name`` makes its statistics those of the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import BatchStat, Init, Module, Param, Rngs
from shardax._parallel.kernels import against_arrays, is_choosing, normalized, rows_split
from shardax.extend import INLINE, Options, align, explicit_sharding, with_layout
from shardax.nn import parameters
from shardax.nn.arithmetic import (
    as_array,
    at_least_float32,
    result_dtype,
    take_features,
    uses_tokamax,
)
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.masks import as_mask
from shardax.nn.parameters import Initializer


class _Norm(Module):
    """Base of normalizations, with a scale and a bias."""

    scale: Param | None
    bias: Param | None = None
    # The mask of a ``Sequential`` is mostly one of attention, which says something else.
    direct_inputs = frozenset({"mask"})
    _scale_offset = 0.0  # added to the scale

    def _take_options(
        self,
        features: int,
        epsilon: float,
        axes: Sequence[str | None],
        dtype: jax.typing.DTypeLike | None,
    ) -> parameters.AxisNames:
        layer = type(self).__name__
        self.features = parameters.as_size(layer, "features", features)
        self.epsilon = parameters.check_epsilon(layer, epsilon)
        self.dtype = parameters.canonical_dtype(dtype)
        return parameters.as_axes(layer, "axis names", axes, 1)

    def _make(
        self,
        axes: parameters.AxisNames,
        dtype: jax.typing.DTypeLike,
        rngs: Rngs | None,
        **initializers: Initializer | None,
    ) -> None:
        for name, init in initializers.items():
            weight = init and parameters.make_parameter(init, (self.features,), dtype, axes, rngs)
            setattr(self, name, weight)

    def _refuse_kernel(self, x: Any) -> None:
        """Raises if the scope asks for another kernel by name."""
        layer = f"{type(self).__name__}({self.features})"
        uses_tokamax("norms", layer, x, lambda: "it norms the last dimension of each row alone")

    def _by_statistics(
        self, function: Callable[..., jax.Array], wide: jax.Array, mask: object
    ) -> jax.Array:
        """Runs a function of an input and a mask, or None."""
        if mask is None:
            return function(wide, None)
        mask = _check_mask(f"{type(self).__name__}({self.features})", mask, wide)
        # Over Explicit axes JAX does not choose between arrays that are laid out differently.
        return with_layout(function, explicit_sharding(wide), wide, mask)

    def _scaled(self, x: jax.Array, normed: jax.Array, dimension: int | None = None) -> jax.Array:
        """Applies scale and bias, and casts to the compute dtype."""
        scale = None if self.scale is None else self.scale.value
        bias = None if self.bias is None else self.bias.value
        return _scale_and_shift(
            normed,
            scale,
            bias,
            normed.ndim - 1 if dimension is None else dimension,
            jnp.dtype(result_dtype(self.dtype, x, scale, bias)),
        )


# These two are units: called eagerly, each operation in them would take as long as the whole.
@functools.partial(jax.jit, static_argnums=(2, 3), inline=INLINE)
def _normalize(
    wide: jax.Array, where: jax.Array | None, epsilon: float, is_centred: bool
) -> jax.Array:
    """Divides by the root mean square over the last dimension."""
    if is_centred:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True, where=where)
    # Of centred values, so that a large common offset costs no precision.
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True, where=where)
    return wide * jax.lax.rsqrt(mean_square + epsilon)


@functools.partial(jax.jit, static_argnums=(3, 4), inline=INLINE)
def _scale_and_shift(
    normed: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dimension: int,
    dtype: np.dtype,
) -> jax.Array:
    if scale is not None:
        normed = normed * _spread(scale, normed, dimension)
    if bias is not None:
        normed = normed + _spread(bias, normed, dimension)
    return normed.astype(dtype)


class _RowNorm(_Norm):
    """Base of normalizations over the last dimension."""

    _is_centred: bool  # whether the mean is subtracted

    def __call__(self, x: Any, *, mask: Any = None) -> jax.Array:
        """Normalises an input.

        Args:
            x: Shape (..., features).
            mask: Which elements count for the statistics; booleans that broadcast to ``x``.

        Returns:
            The same shape, in the compute dtype.

        Raises:
            LayerInputError: If the last dimension is not ``features``, or the mask is none for the
                input.
        """
        x = take_features(f"{type(self).__name__}({self.features})", x, (self.features,))
        result = self._by_kernel(x, mask)
        if result is not None:
            return result

        wide = x.astype(at_least_float32(x.dtype))
        return self._scaled(x, self._by_statistics(self._normed, wide, mask))

    def _normed(self, wide: jax.Array, mask: jax.Array | None) -> jax.Array:
        return _normalize(wide, _counting(mask, (-1,)), self.epsilon, self._is_centred)

    def _by_kernel(self, x: jax.Array, mask: object) -> jax.Array | None:
        """Returns the result of another library's kernel, if one is taken."""
        if not is_choosing("norms"):
            return None

        scale = None if self.scale is None else self.scale.value
        bias = None if self.bias is None else self.bias.value
        dtype = result_dtype(self.dtype, x, scale, bias)

        # Widened first where the result is, as the kernel's has the dtype of its input.
        wide = x.astype(jnp.promote_types(x.dtype, dtype))

        names = None if self.scale is None else self.scale.axes
        split = rows_split(x, names[-1] if names else None)
        options = [] if mask is None else ["mask"]
        layer = f"{type(self).__name__}({self.features})"
        if not uses_tokamax("norms", layer, wide, lambda: against_arrays(wide, options, split)):
            return None

        result = normalized(
            wide,
            scale,
            bias,
            split,
            epsilon=self.epsilon,
            scale_offset=self._scale_offset,
            subtract_mean=self._is_centred,
        )
        return result.astype(dtype)


class RMSNorm(_RowNorm):
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

    _is_centred = False

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        scale_init: Initializer = parameters.ones,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        names = self._take_options(features, epsilon, axes, dtype)
        self._make(names, param_dtype, rngs, scale=scale_init if use_scale else None)


class LayerNorm(_RowNorm):
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

    _is_centred = True

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        scale_init: Initializer = parameters.ones,
        bias_init: Initializer = parameters.zeros,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        names = self._take_options(features, epsilon, axes, dtype)
        inits = {
            "scale": scale_init if use_scale else None,
            "bias": bias_init if use_bias else None,
        }
        self._make(names, param_dtype, rngs, **inits)


class GroupNorm(_Norm):
    """Normalization by mean and standard deviation of groups of channels.

    Both are over a group's channels and all dimensions between the batch and the channels; Wu and
    He, "Group Normalization", 2018.

    Args:
        features: Channels, the last dimension.
        num_groups: Into how many groups of neighbours the channels are split.
        epsilon: Added to the variance, against division by zero.
        use_scale: Whether to multiply by a learnt scale, one for each channel.
        use_bias: Whether to add a learnt bias, likewise.
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
        LayerConfigError: If sizes are not positive or do not divide, or ``epsilon`` is negative.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> x = jnp.array([[1.0, 3.0, 10.0, 30.0]])
        >>> sx.nn.GroupNorm(4, 2, epsilon=0.0)(x).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]
    """

    def __init__(
        self,
        features: int,
        num_groups: int = 32,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        scale_init: Initializer = parameters.ones,
        bias_init: Initializer = parameters.zeros,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        names = self._take_options(features, epsilon, axes, dtype)
        name = type(self).__name__
        self.num_groups = parameters.as_size(name, "num_groups", num_groups)

        if self.features % self.num_groups:
            raise LayerConfigError(
                f"{name} cannot split features={features} into num_groups={num_groups} equal "
                f"groups. Give a divisor of features."
            )

        inits = {
            "scale": scale_init if use_scale else None,
            "bias": bias_init if use_bias else None,
        }
        self._make(names, param_dtype, rngs, **inits)

    def __call__(self, x: Any, *, mask: Any = None) -> jax.Array:
        """Normalises an input.

        Args:
            x: Shape (batch, ..., features).
            mask: Which elements count for the statistics; booleans that broadcast to ``x``, such
                as (batch, length, 1).

        Returns:
            The same shape, in the compute dtype.

        Raises:
            LayerInputError: If the last dimension is not ``features``, there is no batch, or the
                mask is none for the input.
        """
        layer = f"{type(self).__name__}({self.features})"
        x = take_features(layer, x, (self.features,))
        if x.ndim < 2:
            expected = f"an input of shape (batch, ..., {self.features})"
            parameters.refuse_input(layer, expected, x, "Of one example: layer(x[None])[0].")
        self._refuse_kernel(x)
        wide = x.astype(at_least_float32(x.dtype))
        if mask is not None:
            return self._scaled(x, self._by_statistics(self._normed, wide, mask))
        # Over Explicit axes a split of the channels has no layout by groups that JAX could infer.
        return self._scaled(x, with_layout(self._normed, explicit_sharding(x), wide))

    def _normed(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        shape = (*x.shape[:-1], self.num_groups, self.features // self.num_groups)
        grouped, dimensions = x.reshape(shape), (*range(1, x.ndim - 1), x.ndim)
        where = None if mask is None else _counting(mask.reshape(shape), dimensions)
        centred = grouped - jnp.mean(grouped, axis=dimensions, keepdims=True, where=where)
        variance = jnp.mean(jnp.square(centred), axis=dimensions, keepdims=True, where=where)
        return (centred * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)


class InstanceNorm(GroupNorm):
    """Normalization of each channel of each example: one channel a group.

    Ulyanov, Vedaldi and Lempitsky, "Instance Normalization", 2016.

    Args:
        features: Channels, the last dimension.
        **options: As for ``GroupNorm``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> x = jnp.array([[[1.0], [3.0]], [[10.0], [30.0]]])
        >>> sx.nn.InstanceNorm(1, epsilon=0.0)(x)[..., 0].tolist()
        [[-1.0, 1.0], [-1.0, 1.0]]
    """

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(features, features, **options)


def _spread(parameter: jax.Array, x: jax.Array, dimension: int | None = None) -> jax.Array:
    """Returns a parameter of one dimension, to be combined with ``x``."""
    dimension = x.ndim - 1 if dimension is None else dimension
    parameter = align(parameter.astype(x.dtype), x, (dimension,))
    return jax.lax.expand_dims(parameter, [i for i in range(x.ndim) if i != dimension])


class BatchNorm(_Norm):
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

    direct_inputs = frozenset()

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
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        scale_init: Initializer = parameters.ones,
        bias_init: Initializer = parameters.zeros,
        axes: Sequence[str | None] = ("embed",),
        rngs: Rngs | None = None,
    ) -> None:
        options = Options(LayerConfigError, "BatchNorm")
        expected = "from 0 to 1, the part of the running statistics to keep"
        options.check("momentum", momentum, 0 <= momentum <= 1, expected)

        names = self._take_options(features, epsilon, axes, dtype)

        self.axis = int(axis)
        self.momentum = float(momentum)
        self.use_running_average = bool(use_running_average)
        self.axis_name = axis_name

        self.mean = BatchStat(Init(parameters.zeros, (self.features,), np.float32), axes=names)
        self.var = BatchStat(Init(parameters.ones, (self.features,), np.float32), axes=names)

        inits = {
            "scale": scale_init if use_scale else None,
            "bias": bias_init if use_bias else None,
        }
        self._make(names, param_dtype, rngs, **inits)

    def __call__(
        self, x: Any, *, use_running_average: bool | None = None, mask: Any = None
    ) -> jax.Array:
        """Normalises an input, and in training follows its statistics.

        Args:
            x: Any shape of rank 1 or more; the dimension ``axis`` has size ``features``.
            use_running_average: Overrides the attribute for this call.
            mask: Which elements count for the statistics; booleans that broadcast to ``x``, such
                as (batch, length, 1). All are normalised; a feature without any that counts, by
                the running statistics.

        Returns:
            The same shape, in the compute dtype.

        Raises:
            LayerInputError: If the dimension of the features has another size, the mask is none for
                the input, or there is no axis ``axis_name`` here.
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
        self._refuse_kernel(x)

        dimension = self.axis % x.ndim
        wide = x.astype(at_least_float32(x.dtype))

        running = self.use_running_average if use_running_average is None else use_running_average
        if running:
            mean, var = self.mean.value, self.var.value
        else:
            mean, var = self._batch_statistics(wide, dimension, mask)

        normed = wide - _spread(mean, wide, dimension)
        normed = normed * jax.lax.rsqrt(_spread(var, wide, dimension) + self.epsilon)
        return self._scaled(x, normed, dimension)

    def _batch_statistics(
        self, x: jax.Array, dimension: int, mask: object
    ) -> tuple[jax.Array, jax.Array]:
        """Returns mean and variance of features, and updates the running ones."""
        reduced = tuple(axis for axis in range(x.ndim) if axis != dimension)
        where = None if mask is None else _check_mask("BatchNorm", mask, x)
        count = None if where is None else self._over_axis(jax.lax.psum, where.sum(reduced))

        def average(values: jax.Array) -> jax.Array:
            if where is None or count is None:
                return self._over_axis(jax.lax.pmean, values.mean(reduced))
            total = self._over_axis(jax.lax.psum, values.sum(reduced, where=where))
            return total / jnp.maximum(count, 1).astype(total.dtype)

        mean = average(x)
        # Of centred values, so that a large common offset costs no precision.
        var = average(jnp.square(x - _spread(mean, x, dimension)))
        return self._followed(self.mean, mean, count), self._followed(self.var, var, count)

    def _followed(self, statistic: BatchStat[Any], batch: jax.Array, count) -> jax.Array:
        """Updates a running statistic; returns the one to normalize by."""
        running = statistic.value
        new = align(jax.lax.stop_gradient(batch).astype(running.dtype), running)
        new = self.momentum * running + (1 - self.momentum) * new
        if count is None:
            statistic.value = new
            return batch
        has_elements = align(count, running) > 0
        statistic.value = jnp.where(has_elements, new, running)
        running = align(running.astype(batch.dtype), batch)
        return jnp.where(count > 0, batch, running)

    def _over_axis(self, collective, x: jax.Array) -> jax.Array:
        if self.axis_name is None:
            return x
        try:
            return collective(x, self.axis_name)
        except NameError as error:
            raise LayerInputError(
                f"BatchNorm(axis_name={self.axis_name!r}) was called where there is no such axis. "
                f"Call it inside sx.vmap(..., axis_name={self.axis_name!r}) or sx.shard_map over a "
                f"mesh with that axis, or in evaluation, model.eval()."
            ) from error


def _counting(mask: jax.Array | None, dimensions: tuple[int, ...]) -> jax.Array | None:
    """Returns a mask in which no group is without elements."""
    return None if mask is None else mask | ~mask.any(axis=dimensions, keepdims=True)


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of a shape broadcasts to another shape."""
    trailing = whole[len(whole) - len(shape) :] if len(shape) <= len(whole) else ()
    return len(trailing) == len(shape) and all(
        size in (1, length) for size, length in zip(shape, trailing, strict=True)
    )


def _check_mask(layer: str, mask: object, x: jax.Array) -> jax.Array:
    """Returns a mask in the shape of an input, or raises."""
    shape = f"that broadcasts to {x.shape}"
    booleans = as_mask(layer, mask, shape)
    if not _broadcasts(booleans.shape, x.shape):
        hint = "Without the dimension of the features: mask[..., None]."
        parameters.refuse_input(layer, f"a mask of booleans {shape}", booleans, hint)
    return jnp.broadcast_to(booleans, x.shape)
