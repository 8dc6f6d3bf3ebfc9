# SPDX-License-Identifier: Apache-2.0
"""Linear, embedding, normalization and attention layers over named axes.

A parameter of such a layer is an ordinary lazy ``Param`` with one axis name per dimension, so
layouts, optimizers and checkpoints treat it as any other. The layer names its dimensions where it
computes. The names of a layer's inputs and results are those of its parameters' axes, which is what
rules map to mesh axes. Statistics and the scaling by them are computed in float32 or wider whatever
the input's dtype, and the result is cast to the compute dtype at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Module, Param, Rngs
from shardax.errors import PartitionError
from shardax.extend import align, joined_sharding
from shardax.named.array import NamedArray, as_named
from shardax.named.base import (
    Axes,
    NamedAxesError,
    check_sizes_by_name,
    from_parts,
    parts_of,
    shown,
)
from shardax.named.functions import dot, softmax
from shardax.named.make import arange, where
from shardax.nn import arithmetic, parameters
from shardax.nn.embedding import look_up
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.kernels.equation import Equation
from shardax.nn.kernels.layer import KernelLayer, KernelMap
from shardax.nn.masks import as_mask
from shardax.nn.parameters import Initializer


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


def check_axes(layer: str, option: str, axes: object, *, empty: bool = False) -> AxisSizes:
    """Returns the axes of a layer, or raises ``LayerConfigError``."""
    try:
        names, sizes = check_sizes_by_name(axes, least=1)
    except (PartitionError, NamedAxesError) as error:
        raise LayerConfigError(
            f"{layer} needs sizes by name: {option}={axes!r}. {error}"
        ) from error
    if not names and not empty:
        raise LayerConfigError(f"{layer} needs an axis at least, but {option}={axes!r}.")
    return AxisSizes(names, sizes)


def parameter(
    initializer: Initializer, axes: AxisSizes, dtype: jax.typing.DTypeLike, rngs: Rngs | None
) -> Param:
    """Makes a lazy parameter with the given names and sizes."""
    return parameters.make_parameter(initializer, axes.sizes, dtype, axes.names, rngs)


def _axis_misfits(
    own_axes: Mapping[Any, int], expected: AxisSizes, absent: Iterable[object]
) -> Iterator[str]:
    """Yields unexpected, missing and wrongly sized axes of an input."""
    for name, size in expected.items():
        if own_axes.get(name) != size:
            actual = own_axes.get(name, "no such axis")
            yield f"axis {name!r}: expected size {size}, found {actual}"
    for name in absent:
        if name in own_axes:
            expectation = "expected no such axis, as the layer makes it"
            yield f"axis {name!r}: {expectation}, found size {own_axes[name]}"


def check_input(
    layer: str, x: Any, expected: AxisSizes, absent: Iterable[object] = ()
) -> NamedArray:
    """Returns an input with the expected axes, or raises LayerInputError."""
    if not isinstance(x, NamedArray):
        shape = f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else ""
        raise LayerInputError(
            f"{layer} takes a NamedArray, but was given {type(x).__name__}{shape}. Name the "
            f"dimensions: named.wrap(x, {', '.join(map(repr, ('batch', *expected.names)))})."
        )
    lines = "".join(f"\n  {line}" for line in _axis_misfits(x.axes, expected, absent))
    if lines:
        raise LayerInputError(
            f"{layer} was given {x.dtype}{shown(x.dims, x.shape)}, whose axes do not fit:{lines}\n"
            f"Exchange names with x.rename({{found: expected}})."
        )
    return x


def beside(variable: Param, axes: AxisSizes, x: NamedArray) -> NamedArray:
    """Returns a parameter, laid out and cast for elementwise use."""
    dimensions = [x.dims.index(name) for name in axes.names]
    return from_parts(
        NamedArray, align(variable.value.astype(x.dtype), x.data, dimensions), axes.names
    )


class Linear(KernelLayer):
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
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
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
        outputs_made = AxisSizes(tuple(self.output_names().values()), outputs.sizes)

        if kernel_init is None:
            first, second = len(batch.names), len(batch.names) + len(inputs.names)
            last = second + len(outputs.names)
            kernel_init = parameters.lecun_normal(
                tuple(range(first, second)), tuple(range(second, last)), tuple(range(first))
            )

        self.kernel = parameter(kernel_init, batch + inputs + outputs_made, param_dtype, rngs)
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
        names = self.output_names()
        made_names = dict.fromkeys(n for n in (*names, *names.values()) if n not in inputs.names)
        x = check_input(self._shown(), x, inputs + batch, made_names)

        data, kernel = arithmetic.cast_all(self.dtype, x.data, self.kernel.value)
        dims = (*batch.names, *inputs.names, *names.values())
        y = dot(
            from_parts(NamedArray, data, x.dims), from_parts(NamedArray, kernel, dims), inputs.names
        )

        y = y.rename({new: name for name, new in names.items() if new != name})
        return y if self.bias is None else y + beside(self.bias, batch + self.output_axes, y)

    def kernel_maps(self) -> dict[str, KernelMap]:
        """Returns the product over the input axes, with a letter for each axis of the kernel."""
        shape = (*self.batch_axes.sizes, *self.input_axes.sizes, *self.output_axes.sizes)
        letters, batch = string.ascii_letters[: len(shape)], len(self.batch_axes.names)
        end = batch + len(self.input_axes.names)

        made = letters[:batch] + letters[end:]
        equation = Equation(letters[:end], letters, made, ellipsis=False)
        return {"kernel": KernelMap(equation, shape)}

    def low_rank_term(
        self, x: NamedArray, y: NamedArray, a: jax.Array, b: jax.Array, out_sharding: Any
    ) -> NamedArray:
        """Multiplies by ``a`` and ``b``, by names."""
        rank = ("lora", "rank")
        batch, inputs, made = self.batch_axes.names, self.input_axes.names, self.output_names()

        data, a, b = arithmetic.cast_all(self.dtype, x.data, a, b)
        first = from_parts(NamedArray, a, (*batch, *inputs, rank))
        second = from_parts(NamedArray, b, (*batch, rank, *made.values()))

        middle = dot(from_parts(NamedArray, data, x.dims), first, inputs)
        term = dot(middle, second, (rank,))
        return term.rename({new: name for name, new in made.items() if new != name})

    def output_names(self) -> dict[Any, Any]:
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
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
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
            indices: Integers with any axes but those of the result. One out of range, also a
                negative one, gives NaN, as it must not pass unseen.

        Returns:
            An array with the axes of the indices and the output axes, in the compute dtype.

        Raises:
            LayerInputError: If the indices are not integers, or have an output axis.
        """
        indices = check_input(self._shown(), indices, AxisSizes((), ()), self.output_axes.names)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise LayerInputError(
                f"{self._shown()} looks up integers, but was given {indices.dtype}"
                f"{shown(indices.dims, indices.shape)}. Cast them: indices.astype(int)."
            )

        (table,) = arithmetic.cast_all(self.dtype, self.embedding.value)
        data, remaining = indices.data, range(1, table.ndim)
        out_sharding = joined_sharding(((data, range(data.ndim)), (table, remaining)))
        rows = look_up(table, data, out_sharding)
        return from_parts(NamedArray, rows, (*indices.dims, *self.output_axes.names))

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
        data, table = arithmetic.cast_all(self.dtype, x.data, self.embedding.value)
        kernel = from_parts(NamedArray, table, self.vocab_axis.names + self.output_axes.names)
        return dot(from_parts(NamedArray, data, x.dims), kernel, self.output_axes.names)

    def _shown(self) -> str:
        return f"Embed(vocab_axis={self.vocab_axis}, output_axes={self.output_axes})"


class _Normalization(Module):
    """Division by the root of the mean square along axes."""

    scale: Param | None
    bias: Param | None = None
    _centred = False
    direct_inputs = frozenset({"mask"})  # as of nn's norms

    def _declare(
        self,
        axes: Axes,
        epsilon: float,
        dtype: jax.typing.DTypeLike | None,
        param_dtype: jax.typing.DTypeLike,
        rngs: Rngs | None,
        **initializers: Initializer | None,
    ) -> None:
        layer = type(self).__name__
        self.axes = check_axes(layer, "axes", axes)
        self.epsilon = parameters.check_epsilon(layer, epsilon)
        for name, init in initializers.items():
            parameter_made = None if init is None else parameter(init, self.axes, param_dtype, rngs)
            setattr(self, name, parameter_made)
        self.dtype = parameters.canonical_dtype(dtype)

    def __call__(self, x: NamedArray, *, mask: Any = None) -> NamedArray:
        """Normalises an input.

        Args:
            x: Has the layer's axes, and any others.
            mask: Which elements count for the statistics; booleans with axes of ``x``. Where none
                counts all do.

        Returns:
            The same axes, in the compute dtype.

        Raises:
            LayerInputError: If an axis is missing or has another size, or the mask has numbers.
            NamedAxesError: If the mask has an axis that ``x`` lacks.
        """
        layer = f"{type(self).__name__}({self.axes})"
        x = check_input(layer, x, self.axes)
        arithmetic.uses_tokamax("norms", layer, x, lambda: "it takes arrays without names")
        names = list(self.axes.names)
        where = None
        if mask is not None:
            mask = as_named(mask, f"The mask of {layer}")
            data, dims = parts_of(mask)
            where = from_parts(NamedArray, as_mask(layer, data), dims)
            within = [name for name in names if name in mask.axes]
            # Where none counts all do; a mask without these axes says no more than that.
            where = where | ~where.any(within) if within else where | ~where

        wide = x.astype(arithmetic.at_least_float32(x.dtype))
        if self._centred:  # the variance is that of centred values: an offset costs no precision
            wide = wide - wide.mean(names, where=where)
        data, dims = parts_of((wide * wide).mean(names, where=where) + self.epsilon)
        y = wide * from_parts(NamedArray, jax.lax.rsqrt(data), dims)

        if self.scale is not None:
            y = y * beside(self.scale, self.axes, y)
        if self.bias is not None:
            y = y + beside(self.bias, self.axes, y)

        learnt = [
            None if learnable is None else learnable.value for learnable in (self.scale, self.bias)
        ]
        return y.astype(arithmetic.result_dtype(self.dtype, x.data, *learnt))


class RMSNorm(_Normalization):
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
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        scale_init: Initializer = parameters.ones,
        rngs: Rngs | None = None,
    ) -> None:
        scale = scale_init if use_scale else None
        self._declare(axes, epsilon, dtype, param_dtype, rngs, scale=scale)


class LayerNorm(_Normalization):
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

    _centred = True

    def __init__(
        self,
        axes: Axes,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        scale_init: Initializer = parameters.ones,
        bias_init: Initializer = parameters.zeros,
        rngs: Rngs | None = None,
    ) -> None:
        scale, bias = scale_init if use_scale else None, bias_init if use_bias else None
        self._declare(axes, epsilon, dtype, param_dtype, rngs, scale=scale, bias=bias)


class Attention(Module):
    """Multi-head attention along one axis, to itself or to another array.

    Vaswani et al., "Attention Is All You Need", 2017; with a group, that of Ainslie et al., 2023.
    Positions that read and positions that are read are one axis of the input, but two of the
    weights; there, the latter is named ``"time_read"`` if the former is ``"time"``.

    Args:
        axes: The axes of features, of input and output.
        heads: The axis of heads, sizes by name.
        head: The axis of features within a head.
        group: The axis of queries that share a key, or None.
        along: The name of the axis whose positions read from each other.
        causal: Whether a position reads only from itself and earlier ones.
        use_bias: Whether the four projections have biases.
        dtype: Compute dtype; None promotes input and parameters. Weights are computed in float32 or
            wider.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernels; None for LeCun normal.
        rngs: Random streams; ``params`` is used.

    Attributes:
        q: ``Linear`` from features to heads, group and head.
        k: ``Linear`` from features to heads and head.
        v: Likewise.
        out: ``Linear`` from heads, group and head to features.

    Raises:
        LayerConfigError: If axes are not sizes by name, or a name occurs twice among them.

    Example:
        >>> import shardax as sx
        >>> attention = sx.named.Attention(
        ...     {"embed": 16}, {"heads": 4}, {"head": 8}, causal=True, rngs=sx.Rngs(0))
        >>> attention(sx.named.ones({"batch": 2, "time": 5, "embed": 16})).axes
        {'batch': 2, 'time': 5, 'embed': 16}
        >>> attention.q.kernel.axes
        ('embed', 'heads', 'head')
    """

    def __init__(
        self,
        axes: Axes,
        heads: Axes,
        head: Axes,
        *,
        group: Axes | None = None,
        along: Any = "time",
        causal: bool = False,
        use_bias: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        kernel_init: Initializer | None = None,
        rngs: Rngs | None,
    ) -> None:
        self.axes = check_axes("Attention", "axes", axes)
        self.head = check_axes("Attention", "head", head)
        self.along, self.causal = along, bool(causal)
        self._read = f"{along}_read" if isinstance(along, str) else (along, "read")

        shared = check_axes("Attention", "heads", heads)
        queries = check_axes("Attention", "group", group or {}, empty=True)
        names = (*self.axes.names, *shared.names, *queries.names, *self.head.names)
        if len(set(names)) < len(names) or {along, self._read} & set(names):
            raise LayerConfigError(
                f"Attention needs different names for features, heads, group, head and the axis "
                f"{along!r}, along which it reads {self._read!r}, but was given {names}."
            )

        keys = dict((shared + self.head).items())
        all_heads = dict((shared + queries + self.head).items())
        project = functools.partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            rngs=rngs,
        )

        self.q = project(axes, all_heads)
        self.k = project(axes, keys)
        self.v = project(axes, keys)
        self.out = project(all_heads, axes)

    def __call__(
        self, x: NamedArray, context: NamedArray | None = None, *, mask: NamedArray | None = None
    ) -> NamedArray:
        """Attends.

        Args:
            x: Has the features' axes and the axis to read along: where queries come from.
            context: Likewise: where keys and values come from; None for ``x``. Other axes of the
                two meet by name.
            mask: Booleans with any of the axes of the weights: which positions may read which. The
                positions that are read have the axis ``"time_read"``, if the axis is ``"time"``.

        Returns:
            The axes of ``x``, in the compute dtype.

        Raises:
            LayerInputError: If an axis is missing, has another size, or is there already; or if the
                mask is not of booleans.
        """
        source = x if context is None else context
        for argument in (x, source):
            self._check(argument)

        read = {self.along: self._read}
        query, key, value = self.q(x), self.k(source).rename(read), self.v(source).rename(read)

        wide = arithmetic.at_least_float32(query.dtype)
        scale = 1 / math.sqrt(math.prod(self.head.sizes))
        logits = dot(query * scale, key, self.head.names, dtype=wide)
        allowed = self._allowed(logits, mask)
        if allowed is not None:
            # Not infinite: a position that may read nothing then reads all alike, and not NaN.
            logits = where(allowed, logits, -0.7 * float(jnp.finfo(wide).max))

        weights = softmax(logits, self._read).astype(value.dtype)
        return self.out(dot(weights, value, [self._read]))

    def _allowed(self, logits: NamedArray, mask: NamedArray | None) -> NamedArray | None:
        """Returns a mask of readable positions, or None for all."""
        if mask is not None:
            is_fitting = isinstance(mask, NamedArray) and set(mask.dims) <= set(logits.dims)
            if is_fitting:
                data, dims = parts_of(mask)
                mask = from_parts(NamedArray, as_mask(self._shown(), data), dims)
            else:
                mask_text = (
                    f"{mask.dtype}{shown(mask.dims, mask.shape)}"
                    if isinstance(mask, NamedArray)
                    else type(mask).__name__
                )
                raise LayerInputError(
                    f"{self._shown()} takes a mask of booleans with axes among those of the "
                    f"weights, {shown(logits.dims, logits.shape)}, but was given {mask_text}."
                )

        if not self.causal:
            return mask
        read_size, key_size = (logits.axes[name] for name in (self.along, self._read))
        causal = arange({self.along: read_size}) >= arange({self._read: key_size})
        return causal if mask is None else causal & mask

    def _check(self, x: NamedArray) -> None:
        x = check_input(self._shown(), x, self.axes, [self._read])
        if self.along not in x.axes:
            raise LayerInputError(
                f"{self._shown()} was given {x.dtype}{shown(x.dims, x.shape)}:\n  axis "
                f"{self.along!r}: expected any size, found no such axis\nIt reads along this axis; "
                f"Attention(..., along=...) chooses another."
            )

    def _shown(self) -> str:
        return f"Attention(axes={self.axes}, along={self.along!r})"
