# SPDX-License-Identifier: Apache-2.0
"""Linear, embedding and normalization layers over named axes.

A parameter of such a layer is an ordinary lazy ``Param`` with one axis name per dimension, so
layouts, optimizers and checkpoints treat it as any other. The layer names its dimensions where it
computes. The names of a layer's inputs and results are those of its parameters' axes, which is what
rules map to mesh axes. Statistics and the scaling by them are computed in float32 or wider whatever
the input's dtype, and the result is cast to the compute dtype at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.init.lazy import Initializer
from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax._core.variable import Param
from shardax._transforms.errors import LayerConfigError
from shardax.named.array import NamedArray
from shardax.named.base import Axes, NamedAxesError, check_sizes_by_name, shown
from shardax.named.functions import dot
from shardax.nn import linear, parameters
from shardax.partition.errors import AxisNamesError


@dataclasses.dataclass(frozen=True)
class AxisSizes:
    """Hashable names and sizes of axes."""

    names: tuple[Any, ...]
    sizes: tuple[int, ...]

    def __add__(self, other: AxisSizes) -> AxisSizes:
        return AxisSizes(self.names + other.names, self.sizes + other.sizes)

    def items(self) -> Iterator[tuple[Any, int]]:
        """Yields names with sizes."""
        return zip(self.names, self.sizes, strict=True)

    def __repr__(self) -> str:
        return shown(self.names, self.sizes)


def check_axes(layer: str, option: str, axes: Any, *, empty: bool = False) -> AxisSizes:
    """Returns the axes that a layer was made with, or raises ``LayerConfigError``."""
    try:
        names, sizes = check_sizes_by_name(axes, least=1)
    except (AxisNamesError, NamedAxesError) as error:
        raise LayerConfigError(
            f"{layer} needs sizes by name: {option}={axes!r}. {error}"
        ) from error
    if not names and not empty:
        raise LayerConfigError(f"{layer} needs an axis at least, but {option}={axes!r}.")
    return AxisSizes(names, sizes)


def parameter(
    initializer: Initializer, axes: AxisSizes, dtype: Any, rngs: Rngs | None
) -> Param[Any]:
    """Makes a lazy parameter whose dimensions have the given names and sizes."""
    return parameters.make_parameter(initializer, axes.sizes, dtype, axes.names, rngs)


def check_input(layer: str, x: Any, expected: AxisSizes, absent: Iterable[Any] = ()) -> NamedArray:
    """Returns an input with the expected axes, or raises LayerInputError."""
    if not isinstance(x, NamedArray):
        shape = f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else ""
        raise parameters.LayerInputError(
            f"{layer} takes a NamedArray, but was given {type(x).__name__}{shape}. Name the "
            f"dimensions: named.wrap(x, {', '.join(map(repr, ('batch', *expected.names)))})."
        )
    own = x.axes
    wrong = [
        f"axis {name!r}: expected size {size}, found {own.get(name, 'no such axis')}"
        for name, size in expected.items()
        if own.get(name) != size
    ]
    wrong += [
        f"axis {name!r}: expected no such axis, as the layer makes it, found size {own[name]}"
        for name in absent
        if name in own
    ]
    if wrong:
        lines = "".join(f"\n  {each}" for each in wrong)
        raise parameters.LayerInputError(
            f"{layer} was given {x.dtype}{shown(x.dims, x.shape)}, whose axes do not fit:{lines}\n"
            f"Exchange names with x.rename({{found: expected}})."
        )
    return x


def beside(variable: Param[Any], x: NamedArray, dtype: Any) -> NamedArray:
    """Returns a parameter, laid out and cast for elementwise use."""
    names = variable.axes or ()
    data = linear.align(
        variable.value.astype(dtype), x.data, [x.dims.index(name) for name in names]
    )
    return NamedArray._make(data, names)


class Linear(Module):
    """Affine map from some named axes to others.

    ``dot(x, kernel, input_axes) + bias``. The map is the same along all other axes of the input.

    Args:
        input_axes: The axes that are summed over, sizes by name.
        output_axes: The axes that take their place.
        batch_axes: Axes that stay, along which there are as many maps: ``{"expert": 8}``.
        use_bias: Whether to add a bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernel; None for LeCun normal (variance 1 / fan-in).
        bias_init: Initializer of the bias.
        rngs: Random streams; ``params`` is used.

    Attributes:
        kernel: ``Param`` whose axes are those of batch, input and output, in this order. One that
            is both an input and an output, ``"embed"``, is named ``"embed_out"`` as an output.
        bias: ``Param`` whose axes are those of batch and output, or None.

    Raises:
        LayerConfigError: If axes are not sizes by name, or a name is a batch axis and another.

    Example:
        >>> import shardax as sx
        >>> heads = sx.named.Linear({"embed": 8}, {"heads": 4, "head": 2}, rngs=sx.Rngs(0))
        >>> heads(sx.named.ones({"batch": 3, "embed": 8})).axes
        {'batch': 3, 'heads': 4, 'head': 2}
        >>> heads.kernel.axes, heads.bias.axes
        (('embed', 'heads', 'head'), ('heads', 'head'))
    """

    def __init__(
        self,
        input_axes: Axes,
        output_axes: Axes,
        *,
        batch_axes: Axes | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = parameters.zeros,
        rngs: Rngs | None,
    ) -> None:
        inputs = self.input_axes = check_axes("Linear", "input_axes", input_axes)
        outputs = self.output_axes = check_axes("Linear", "output_axes", output_axes, empty=True)
        batch = self.batch_axes = check_axes("Linear", "batch_axes", batch_axes or {}, empty=True)
        twice = [name for name in batch.names if name in (*inputs.names, *outputs.names)]
        if twice:
            raise LayerConfigError(
                f"{self._shown()} has the axis {twice[0]!r} among batch_axes, which stay, and "
                f"among those that it sums over or makes. It can be one of these."
            )
        made = AxisSizes(tuple(self._out_names().values()), outputs.sizes)
        if kernel_init is None:
            first, second = len(batch.names), len(batch.names) + len(inputs.names)
            last = second + len(outputs.names)
            kernel_init = parameters.lecun_normal(
                tuple(range(first, second)), tuple(range(second, last)), tuple(range(first))
            )
        self.kernel = parameter(kernel_init, batch + inputs + made, param_dtype, rngs)
        self.bias = parameter(bias_init, batch + outputs, param_dtype, rngs) if use_bias else None
        self.dtype = parameters.canonical_dtype(dtype)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps an input.

        Args:
            x: Has the input axes and the batch axes, and not the output axes.

        Returns:
            An array with the output axes in the place of the input axes, in the compute dtype.
            Positional dimensions stay.

        Raises:
            LayerInputError: If an axis is missing, has another size, or is there already.
        """
        inputs, batch = self.input_axes, self.batch_axes
        names = self._out_names()
        made = dict.fromkeys(n for n in (*names, *names.values()) if n not in inputs.names)
        x = check_input(self._shown(), x, inputs + batch, made)
        data, kernel = linear.cast_all(self.dtype, x.data, self.kernel.value)
        dims = (*batch.names, *inputs.names, *names.values())
        y = dot(NamedArray._make(data, x.dims), NamedArray._make(kernel, dims), inputs.names)
        y = y.rename({new: name for name, new in names.items() if new != name})
        return y if self.bias is None else y + beside(self.bias, y, y.dtype)

    def _out_names(self) -> dict[Any, Any]:
        """Returns the names of the output axes in the kernel."""
        return {
            name: (f"{name}_out" if isinstance(name, str) else (name, "out"))
            if name in self.input_axes.names
            else name
            for name in self.output_axes.names
        }

    def _shown(self) -> str:
        batch = f", batch_axes={self.batch_axes}" if self.batch_axes.names else ""
        return f"Linear(input_axes={self.input_axes}, output_axes={self.output_axes}{batch})"


class Embed(Module):
    """Table with an array of the output axes for every integer.

    Args:
        vocab_axis: The one axis that is looked up along, its size by its name.
        output_axes: The axes that a lookup gives.
        dtype: Compute dtype; None for the parameter dtype (and promotion in ``attend``).
        param_dtype: Parameter dtype.
        embedding_init: Initializer of the table; None for normal with variance 1 / features, so
            that a lookup has length one on average.
        rngs: Random streams; ``params`` is used.

    Attributes:
        embedding: ``Param`` whose axes are the vocabulary's and the output axes.

    Raises:
        LayerConfigError: If axes are not sizes by name, or there is not one vocabulary axis.

    Example:
        >>> import shardax as sx
        >>> embed = sx.named.Embed({"vocab": 10}, {"embed": 4}, rngs=sx.Rngs(0))
        >>> vectors = embed(sx.named.arange({"time": 3}))
        >>> vectors.axes, embed.attend(vectors).axes
        ({'time': 3, 'embed': 4}, {'time': 3, 'vocab': 10})
    """

    def __init__(
        self,
        vocab_axis: Axes,
        output_axes: Axes,
        *,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        embedding_init: Initializer | None = None,
        rngs: Rngs | None,
    ) -> None:
        self.vocab_axis = check_axes("Embed", "vocab_axis", vocab_axis)
        self.output_axes = check_axes("Embed", "output_axes", output_axes)
        axes = self.vocab_axis + self.output_axes
        if len(self.vocab_axis.names) != 1 or len(set(axes.names)) < len(axes.names):
            raise LayerConfigError(
                f"{self._shown()} needs one axis to look up along, and others for the result."
            )
        if embedding_init is None:
            embedding_init = jax.nn.initializers.variance_scaling(
                1.0, "fan_in", "normal", in_axis=tuple(range(1, len(axes.names))), out_axis=0
            )
        self.embedding = parameter(embedding_init, axes, param_dtype, rngs)
        self.dtype = parameters.canonical_dtype(dtype)

    def __call__(self, indices: NamedArray) -> NamedArray:
        """Looks integers up.

        Args:
            indices: Integers with any axes but those of the result. A negative one counts from the
                end; one out of range gives NaN, as it must not pass unseen.

        Returns:
            An array with the axes of the indices and the output axes, in the compute dtype.

        Raises:
            LayerInputError: If the indices are not integers, or have an output axis.
        """
        indices = check_input(self._shown(), indices, AxisSizes((), ()), self.output_axes.names)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise parameters.LayerInputError(
                f"{self._shown()} looks up integers, but was given {indices.dtype}"
                f"{shown(indices.dims, indices.shape)}. Cast them: indices.astype(int)."
            )
        (table,) = linear.cast_all(self.dtype, self.embedding.value)
        data, rest = indices.data, range(1, table.ndim)
        found = table.at[data].get(
            mode="fill",
            fill_value=jnp.nan,
            out_sharding=linear.joined_sharding(((data, range(data.ndim)), (table, rest))),
        )
        return NamedArray._make(found, (*indices.dims, *self.output_axes.names))

    def attend(self, x: NamedArray) -> NamedArray:
        """Multiplies by the table: logits of a model with a tied head.

        Args:
            x: Has the output axes, and not the vocabulary's.

        Returns:
            An array with the vocabulary axis in the place of the output axes.

        Raises:
            LayerInputError: If an axis is missing, has another size, or is there already.
        """
        layer = f"{self._shown()}.attend"
        x = check_input(layer, x, self.output_axes, self.vocab_axis.names)
        data, table = linear.cast_all(self.dtype, x.data, self.embedding.value)
        kernel = NamedArray._make(table, self.vocab_axis.names + self.output_axes.names)
        return dot(NamedArray._make(data, x.dims), kernel, self.output_axes.names)

    def _shown(self) -> str:
        return f"Embed(vocab_axis={self.vocab_axis}, output_axes={self.output_axes})"


class RMSNorm(Module):
    """Normalization by the root of the mean square.

    ``x / sqrt(mean(x**2) + epsilon) * scale``; Zhang and Sennrich, "Root Mean Square Layer
    Normalization", 2019.

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
        scale_init: Initializer = parameters.ones,
        rngs: Rngs | None = None,
    ) -> None:
        self.axes = check_axes("RMSNorm", "axes", axes)
        self.epsilon = parameters.check_epsilon("RMSNorm", epsilon)
        self.scale = parameter(scale_init, self.axes, param_dtype, rngs) if use_scale else None
        self.dtype = parameters.canonical_dtype(dtype)

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
        wide = x.astype(linear.at_least_float32(x.dtype))
        normed = _over_root_mean_square(wide, self.axes, self.epsilon, self.scale)
        return normed.astype(linear.result_dtype(self.dtype, x.data, _value(self.scale)))


class LayerNorm(Module):
    """Normalization by mean and standard deviation.

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
        scale_init: Initializer = parameters.ones,
        bias_init: Initializer = parameters.zeros,
        rngs: Rngs | None = None,
    ) -> None:
        self.axes = check_axes("LayerNorm", "axes", axes)
        self.epsilon = parameters.check_epsilon("LayerNorm", epsilon)
        self.scale = parameter(scale_init, self.axes, param_dtype, rngs) if use_scale else None
        self.bias = parameter(bias_init, self.axes, param_dtype, rngs) if use_bias else None
        self.dtype = parameters.canonical_dtype(dtype)

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
        wide = x.astype(linear.at_least_float32(x.dtype))
        centred = wide - wide.mean(list(self.axes.names))
        # Of centred values, so that a large common offset costs no precision.
        normed = _over_root_mean_square(centred, self.axes, self.epsilon, self.scale)
        if self.bias is not None:
            normed = normed + beside(self.bias, normed, normed.dtype)
        scale, bias = _value(self.scale), _value(self.bias)
        return normed.astype(linear.result_dtype(self.dtype, x.data, scale, bias))


def _over_root_mean_square(
    wide: NamedArray, axes: AxisSizes, epsilon: float, scale: Param[Any] | None
) -> NamedArray:
    data, dims = ((wide * wide).mean(list(axes.names)) + epsilon)._parts()
    normed = wide * NamedArray._make(jax.lax.rsqrt(data), dims)
    return normed if scale is None else normed * beside(scale, normed, normed.dtype)


def _value(variable: Any) -> Any:
    return None if variable is None else variable.value
