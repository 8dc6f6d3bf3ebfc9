# SPDX-License-Identifier: Apache-2.0
"""Convolutions and pooling, channels last.

The rank of the kernel says over how many dimensions: an input has the shape (..., spatial, in),
with any batch dimensions in front. A dimension that is convolved comes out whole over Explicit mesh
axes; batch and channels keep their layout.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Module, Rngs, Variable
from shardax.extend import align, explicit_sharding, joined_sharding, with_layout
from shardax.nn import parameters
from shardax.nn.arithmetic import add_bias, as_array, at_least_float32, cast_all, take_precision
from shardax.nn.errors import LayerConfigError
from shardax.nn.kernels.layer import KernelLayer, KernelMap
from shardax.nn.linear import numbered
from shardax.nn.parameters import Initializer
from shardax.partition import resolve_mesh

Padding = str | int | Sequence[int | tuple[int, int]]
Window = int | Sequence[int]

_MODES = {"CIRCULAR": "wrap", "REFLECT": "reflect"}
_NAMED = ("SAME", "SAME_LOWER", "VALID", "CIRCULAR", "REFLECT", "CAUSAL")


class ConvBase(KernelLayer):
    """Base of convolutions."""

    _paddings: tuple[str, ...] = _NAMED
    precision: Any = None
    preferred_element_type: Any = None
    input_dilation: tuple[int, ...] | None = None
    mask: Variable | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Window,
        *,
        strides: Window | None = 1,
        padding: Padding = "SAME",
        dilation: Window | None = 1,
        input_dilation: Window | None = 1,
        groups: int = 1,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = parameters.zeros,
        kernel_axes: Sequence[str | None] | None = None,
        mask: Any = None,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        rngs: Rngs | None,
    ) -> None:
        name = type(self).__name__
        self.in_features = parameters.as_size(name, "in_features", in_features)
        self.out_features = parameters.as_size(name, "out_features", out_features)
        self.kernel_size = parameters.as_sizes(name, "kernel_size", kernel_size)
        rank = len(self.kernel_size)
        if rank > 3:
            raise LayerConfigError(
                f"{name} has kernels of 1 to 3 dimensions, but kernel_size={kernel_size!r}."
            )

        self.strides = _per_dimension(name, "strides", strides, rank)
        self.dilation = _per_dimension(name, "dilation", dilation, rank)
        spread = _per_dimension(name, "input_dilation", input_dilation, rank)
        if max(spread) > 1:  # set only where given, as take_precision does
            self.input_dilation = spread

        self.padding = _as_padding(name, padding, rank, self._paddings)
        self.groups = parameters.as_size(name, "groups", groups)
        if in_features % groups or out_features % groups:
            raise LayerConfigError(
                f"{name} needs in_features and out_features to be multiples of groups, but "
                f"in_features={in_features}, out_features={out_features}, groups={groups}."
            )

        shape = (*self.kernel_size, in_features // groups, out_features)
        names = (*numbered("window", rank), "in", "out") if kernel_axes is None else kernel_axes
        axes = parameters.as_axes(name, "kernel_axes", names, len(shape))
        if kernel_init is None:
            kernel_init = parameters.lecun_normal(tuple(range(rank + 1)), (rank + 1,))
        self.kernel = parameters.make_parameter(kernel_init, shape, param_dtype, axes, rngs)
        bias = (bias_init, (out_features,), param_dtype, axes[-1:], rngs)
        self.bias = parameters.make_parameter(*bias) if use_bias else None

        if mask is not None:
            if np.shape(mask) != shape:
                raise LayerConfigError(
                    f"{name} multiplies its kernel, of shape {shape}, by a mask of that shape, but "
                    f"mask has the shape {np.shape(mask)}. Repeat it: "
                    f"np.broadcast_to(mask, {shape})."
                )
            self.mask = Variable(mask, axes=axes)

        self.dtype = parameters.canonical_dtype(dtype)
        take_precision(self, precision, preferred_element_type, has_fp8=False)

    def __call__(self, x: Any, out_sharding: Any = None) -> jax.Array:
        """Convolves (..., spatial, in_features) to (..., spatial, out_features)."""
        kernel = self.kernel.value
        if self.mask is not None:
            kernel = kernel * align(self.mask.value.astype(kernel.dtype), kernel)
        y = self.convolve(x, kernel, out_sharding)
        return y if self.bias is None else add_bias(y, self.bias.value)

    def convolve(self, x: object, kernel: jax.Array, out_sharding: object) -> jax.Array:
        """Convolves with a given kernel, without bias."""
        rank = len(self.kernel_size)
        x = _take_window(
            f"{type(self).__name__}({self.in_features}, {self.out_features}, {self.kernel_size})",
            x,
            rank,
            self.in_features,
        )

        x, kernel = cast_all(self.dtype, x, kernel)
        wide = self.preferred_element_type
        if wide is not None:  # the derivative of a mixed convolution is refused by JAX
            x, kernel = x.astype(wide), kernel.astype(wide)
        return with_layout(
            lambda x, kernel: self._run(x, kernel),
            _layout(x, rank, kernel) if out_sharding is None else out_sharding,
            x,
            kernel,
        )

    def kernel_maps(self) -> dict[str, KernelMap]:
        """Returns the product of the input's windows with the kernel."""
        letters = string.ascii_letters[: len(self.kernel_size) + 2]
        shape = (*self.kernel_size, self.in_features // self.groups, self.out_features)
        return {"kernel": KernelMap.of(f"...{letters[:-1]},{letters}->...{letters[-1]}", shape)}

    def low_rank_problem(self) -> str | None:
        """Refuses a masked kernel."""
        if self.mask is None:
            return None
        return "with a mask of its kernel, and the sum of two masked kernels has no low rank"

    def low_rank_term(
        self, x: Any, y: jax.Array, a: jax.Array, b: jax.Array, out_sharding: Any
    ) -> jax.Array:
        """Convolves with ``a``, in each group, and mixes the channels with ``b``."""
        groups = self.groups
        middle = self.convolve(x, jnp.tile(a, groups), None)

        def mix(middle: jax.Array, b: jax.Array) -> jax.Array:
            parts = middle.reshape(*middle.shape[:-1], groups, -1)
            mixed = jnp.einsum("...gr,rgo->...go", parts, b.reshape(len(b), groups, -1))
            return mixed.reshape(y.shape)

        return with_layout(mix, explicit_sharding(y), *cast_all(None, middle, b))

    def _run(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        rank = len(self.kernel_size)
        front = x.shape[: x.ndim - rank - 1]
        x = x.reshape((math.prod(front), *x.shape[len(front) :]))

        if self.input_dilation is not None:
            between = [(0, 0, size - 1) for size in self.input_dilation]
            x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *between, (0, 0, 0)])

        pairs, lhs_dilation, strides = self._arithmetic()
        if self.padding in _MODES:
            if lhs_dilation is not None:  # one period of the result
                between = [(0, size - 1, size - 1) for size in lhs_dilation]
                x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *between, (0, 0, 0)])
            x = self._extended(x, pairs)
            pairs, lhs_dilation = "VALID", None

        # XLA's partitioner aborts where groups meet a kernel that is split (seen with JAX 0.10).
        if self.groups > 1:
            mesh = resolve_mesh()
            if not jax.sharding.get_abstract_mesh().empty:
                kernel = jax.lax.with_sharding_constraint(kernel, PartitionSpec())
            elif mesh is not None:
                kernel = jax.lax.with_sharding_constraint(
                    kernel, NamedSharding(mesh, PartitionSpec())
                )

        letters = "XYZ"[:rank]
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            strides,
            pairs,
            lhs_dilation=lhs_dilation,
            rhs_dilation=self.dilation,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            feature_group_count=self.groups,
            precision=self.precision,
        )
        return y.reshape((*front, *y.shape[1:]))

    def _extended(self, x: jax.Array, pairs) -> jax.Array:
        """Pads with the input's own ends."""
        for size, (low, high) in zip(x.shape[1:-1], pairs, strict=True):
            most = size if self.padding == "CIRCULAR" else size - 1
            if max(low, high) > most:
                parameters.refuse_input(
                    f"{type(self).__name__}(padding={self.padding!r})",
                    f"at least {max(low, high) + size - most} along each dimension",
                    x,
                    "Use padding='SAME', or a smaller kernel.",
                )
        return jnp.pad(x, ((0, 0), *pairs, (0, 0)), mode=_MODES[str(self.padding)])

    def _spans(self) -> list[int]:
        """Returns the reach of each dimension of the kernel."""
        pairs = zip(self.kernel_size, self.dilation, strict=True)
        return [dilation * (size - 1) + 1 for size, dilation in pairs]

    def _arithmetic(self) -> tuple[Any, Any, tuple[int, ...]]:
        raise NotImplementedError


class Conv(ConvBase):
    """Convolution in 1 to 3 dimensions, channels last.

    Args:
        in_features: Channels of the input, its last dimension.
        out_features: Channels of the result.
        kernel_size: Size of the kernel in each dimension; a number is one dimension.
        strides: Step of the kernel, one for all dimensions or one each; None for 1.
        padding: ``"SAME"``, ``"SAME_LOWER"`` or ``"VALID"`` as in JAX; ``"CIRCULAR"`` and
            ``"REFLECT"``, which extend the input by itself; ``"CAUSAL"`` (1-D), where a result
            depends on nothing behind it; or numbers: one, or one or a pair a dimension.
        dilation: Distance between the kernel's elements.
        input_dilation: Distance of the input's elements, between which zeros are put; padding and
            strides are those of the result.
        groups: Into how many groups the channels are split; each is convolved by itself. Over
            Auto mesh axes that split the kernel of several groups, compute under
            ``jax.set_mesh(mesh)``, as a Trainer does: otherwise XLA can abort in the gradient.
        use_bias: Whether to add a bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernel; None for LeCun normal (variance 1 / fan-in).
        bias_init: Initializer of the bias.
        kernel_axes: Axis names of the kernel; None for ``("window_0", "window_1", "in", "out")``
            in two dimensions, ``("window", "in", "out")`` in one.
        mask: What the kernel is multiplied by in each call, an array of its shape, such as booleans
            that hide what comes later; None for nothing. It is kept as a ``Variable``, not trained.
        precision: As in ``jax.lax.conv_general_dilated``.
        preferred_element_type: Dtype of the sums and of the result; None for the compute dtype.
        rngs: Random streams; ``params`` is used.

    Attributes:
        kernel: ``Param`` of shape ``(*kernel_size, in_features // groups, out_features)``.
        bias: ``Param`` of shape ``(out_features,)``, or None.
        mask: ``Variable`` of the kernel's shape, or None.

    Raises:
        LayerConfigError: If a size is not positive or options do not fit together.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> conv = sx.nn.Conv(3, 8, (3, 3), strides=2, rngs=sx.Rngs(0))
        >>> conv(jnp.ones((2, 16, 16, 3))).shape, conv.kernel.axes
        ((2, 8, 8, 8), ('window_0', 'window_1', 'in', 'out'))
    """

    def _arithmetic(self) -> tuple[Any, Any, tuple[int, ...]]:
        spans, padding = self._spans(), self.padding
        if padding in _MODES:
            padding = tuple(((span - 1) // 2, span // 2) for span in spans)
        elif padding == "CAUSAL":
            padding = tuple((span - 1, 0) for span in spans)
        return padding, None, self.strides


class ConvTranspose(ConvBase):
    """Transposed convolution in 1 to 3 dimensions, channels last.

    The input is spread by ``strides`` and then convolved, as by ``jax.lax.conv_transpose``.

    Args:
        in_features: Channels of the input, its last dimension.
        out_features: Channels of the result.
        kernel_size: Size of the kernel in each dimension; a number is one dimension.
        strides: How much larger the result is, one for all dimensions or one each; None for 1.
        padding: ``"SAME"`` (the result is ``strides`` times as large), ``"CIRCULAR"`` (the same
            size, and what reaches over one end continues at the other) or ``"VALID"``; or numbers:
            one, one or a pair (before, after) a dimension, around the input that was spread.
        dilation: Distance between the kernel's elements.
        input_dilation: Distance of the input's elements, between which zeros are put; padding and
            strides are those of the result.
        groups: Into how many groups the channels are split; each is convolved by itself.
        use_bias: Whether to add a bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernel; None for LeCun normal (variance 1 / fan-in).
        bias_init: Initializer of the bias.
        kernel_axes: Axis names of the kernel, as for ``Conv``.
        mask: What the kernel is multiplied by in each call, an array of its shape, such as booleans
            that hide what comes later; None for nothing. It is kept as a ``Variable``, not trained.
        precision: As in ``jax.lax.conv_general_dilated``.
        preferred_element_type: Dtype of the sums and of the result; None for the compute dtype.
        rngs: Random streams; ``params`` is used.

    Attributes:
        kernel: ``Param`` of shape ``(*kernel_size, in_features // groups, out_features)``.
        bias: ``Param`` of shape ``(out_features,)``, or None.
        mask: ``Variable`` of the kernel's shape, or None.

    Raises:
        LayerConfigError: If a size is not positive or options do not fit together.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> larger = sx.nn.ConvTranspose(8, 3, (4, 4), strides=2, rngs=sx.Rngs(0))
        >>> larger(jnp.ones((2, 8, 8, 8))).shape
        (2, 16, 16, 3)
    """

    _paddings = ("SAME", "VALID", "CIRCULAR")

    def _arithmetic(self) -> tuple[Any, Any, tuple[int, ...]]:
        padding = self.padding
        if isinstance(padding, str):
            pairs = zip(self._spans(), self.strides, strict=True)
            padding = tuple(self._around(span, stride) for span, stride in pairs)
        return padding, self.strides, (1,) * len(self.strides)

    def _around(self, span: int, stride: int) -> tuple[int, int]:
        # The result has stride * size elements, or, valid, all that the kernel touches.
        if self.padding == "VALID":
            return span - 1, max(span, stride) - 1
        total = span + stride - 2
        low = min(span - 1, (total + 1) // 2)
        return low, (span - 1 if self.padding == "CIRCULAR" else total) - low


def _per_dimension(layer: str, name: str, sizes: object, rank: int) -> tuple[int, ...]:
    sizes = 1 if sizes is None else sizes  # as Flax has it
    all_sizes = parameters.as_sizes(layer, name, sizes)
    all_sizes = all_sizes * rank if not isinstance(sizes, (tuple, list)) else all_sizes
    if len(all_sizes) != rank:
        raise LayerConfigError(
            f"{layer} needs one number of {name} for each of {rank} dimensions, but "
            f"{name}={sizes!r}."
        )
    return all_sizes


def _as_padding(layer: str, padding, rank: int, named: tuple[str, ...]):
    """Returns a padding's name, or its pairs."""
    if isinstance(padding, str) and padding in named:
        if padding == "CAUSAL" and rank > 1:
            raise LayerConfigError(
                f"{layer} has padding='CAUSAL' for kernels of one dimension. Give pairs: "
                f"padding=[(before, after), ...]."
            )
        return padding

    many = padding if isinstance(padding, (tuple, list)) else (padding,) * rank
    pairs = [tuple(pair) if isinstance(pair, (tuple, list)) else (pair, pair) for pair in many]
    whole = [
        len(pair) == 2 and all(isinstance(n, (int, np.integer)) and n >= 0 for n in pair)
        for pair in pairs
    ]

    if len(pairs) != rank or not all(whole):
        raise LayerConfigError(
            f"{layer} needs padding to be one of {', '.join(map(repr, named))}, or numbers of at "
            f"least 0, one or a pair for each of {rank} dimensions, but padding={padding!r}."
        )
    return tuple((int(low), int(high)) for low, high in pairs)


def _take_window(layer: str, x: object, rank: int, features: int | None) -> jax.Array:
    x = as_array(x)
    if x.ndim < rank + 1 or (features is not None and x.shape[-1] != features):
        last = "features" if features is None else str(features)
        parameters.refuse_input(
            layer,
            f"an input of shape ({', '.join(['...', *numbered('window', rank), last])})",
            x,
            "Channels come last.",
        )
    return x


def _layout(x: jax.Array, rank: int, kernel: jax.Array | None = None) -> NamedSharding | None:
    """Layout of a result: batch and channels keep theirs."""
    last = (x, (x.ndim - 1,)) if kernel is None else (kernel, (kernel.ndim - 1,))
    sharding = joined_sharding(((x, range(x.ndim - rank - 1)), last))
    if sharding is None:
        return None
    spec = (*sharding.spec[:-1], *(None,) * rank, sharding.spec[-1])
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def max_pool(
    x: object, window: Window, *, strides: Window | None = None, padding: Padding = "VALID"
) -> jax.Array:
    """Takes the maximum over windows, channels last.

    Args:
        x: Shape (..., spatial, features); any dimensions before.
        window: Size of the window in each dimension; a number is one dimension.
        strides: Step of the window; None for its size.
        padding: ``"SAME"``, ``"VALID"`` or numbers: one, one or a pair a dimension.

    Returns:
        The maxima; padding is never among them.

    Raises:
        LayerConfigError: If a size is not positive, options do not fit together, or a window would
            be padding alone.
        LayerInputError: If dimensions are missing.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.nn.max_pool(jnp.arange(6.0).reshape(1, 6, 1), 2).ravel().tolist()
        [1.0, 3.0, 5.0]
    """
    x = as_array(x)
    return _pooled("max_pool", x, window, strides, padding, jax.lax.max, _least(x.dtype))


def _least(dtype: jax.typing.DTypeLike):
    """Returns the least number of a dtype."""
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def avg_pool(
    x: object,
    window: Window,
    *,
    strides: Window | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """Takes the mean over windows, channels last.

    Args:
        x: Shape (..., spatial, features); any dimensions before.
        window: Size of the window in each dimension; a number is one dimension.
        strides: Step of the window; None for its size.
        padding: ``"SAME"``, ``"VALID"`` or numbers: one, one or a pair a dimension.
        count_include_pad: Whether padding counts, as zeros.

    Returns:
        The means, in the dtype of ``x`` or float32 for integers; sums are in float32 or wider.

    Raises:
        LayerConfigError: If a size is not positive, options do not fit together, or a window would
            be padding alone where that does not count.
        LayerInputError: If dimensions are missing.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.nn.avg_pool(jnp.arange(6.0).reshape(1, 6, 1), 2).ravel().tolist()
        [0.5, 2.5, 4.5]
    """
    x = as_array(x)
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32

    # A sum in bfloat16 stops growing at 256 terms, one in float16 is soon infinite.
    x = x.astype(at_least_float32(x.dtype))

    pool = functools.partial(
        _pooled, "avg_pool", combine=jax.lax.add, start=0.0, padding_counts=count_include_pad
    )
    total = pool(x, window, strides, padding)

    # The number of elements in a window: all of them, or those that are no padding.
    sizes = parameters.as_sizes("avg_pool", "window", window)
    if count_include_pad:
        return (total / math.prod(sizes)).astype(dtype)

    front = (1,) * (x.ndim - len(sizes) - 1)
    ones = np.ones((*front, *x.shape[len(front) : -1], 1), x.dtype)
    return (total / pool(ones, window, strides, padding)).astype(dtype)


def _pooled(
    name: str,
    x: object,
    window: Window,
    strides: Window | None,
    padding: Padding,
    combine: Callable[..., object],
    start: object,
    *,
    padding_counts: bool = False,
) -> jax.Array:
    sizes = parameters.as_sizes(name, "window", window)
    rank = len(sizes)
    steps = sizes if strides is None else _per_dimension(name, "strides", strides, rank)
    pairs = _as_padding(name, padding, rank, ("SAME", "VALID"))
    x = _take_window(name, x, rank, None)
    front = (1,) * (x.ndim - rank - 1)
    if not isinstance(pairs, str):
        if not padding_counts:
            _check_windows(name, x.shape[len(front) : -1], sizes, steps, pairs)
        pairs = (*((0, 0) for _ in front), *pairs, (0, 0))

    def run(x: jax.Array) -> jax.Array:
        first = np.asarray(start, x.dtype)
        return jax.lax.reduce_window(
            x, first, combine, (*front, *sizes, 1), (*front, *steps, 1), pairs
        )

    return with_layout(run, _layout(x, rank) if explicit_sharding(x) else None, x)


def _check_windows(
    name: str,
    shape: Sequence[int],
    sizes: Sequence[int],
    steps: Sequence[int],
    pairs: Sequence[tuple[int, int]],
) -> None:
    """Raises for a window over padding alone."""
    # It has no maximum and no mean.
    for length, size, step, (front, end) in zip(shape, sizes, steps, pairs, strict=True):
        last = (front + length + end - size) // step * step - front
        if front >= size or last >= length > 0:
            raise LayerConfigError(
                f"{name} with window={tuple(sizes)} and padding={tuple(pairs)} has windows of "
                f"padding alone, of which there is no maximum or mean. Give a padding smaller than "
                f'the window, or padding="SAME".'
            )


class _AdaptivePool(Module):
    """Base of pools to a given size."""

    def __init__(self, output_size: int | Sequence[int | None] | None) -> None:
        name = type(self).__name__
        sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
        if not sizes:
            raise LayerConfigError(f"{name} needs a size for each dimension, but was given none.")
        self.output_size = tuple(
            None if size is None else parameters.as_size(name, "output_size", size)
            for size in sizes
        )

    def __call__(self, x: object) -> jax.Array:
        """Pools (..., spatial, features) to (..., *output_size, features)."""
        rank = len(self.output_size)
        x = _take_window(f"{type(self).__name__}({self.output_size})", x, rank, None)
        if 0 in x.shape[x.ndim - rank - 1 : -1]:
            parameters.refuse_input(
                type(self).__name__, "at least one element in each dimension", x, "Pad it."
            )
        return with_layout(self._run, _layout(x, rank) if explicit_sharding(x) else None, x)

    def _run(self, x: jax.Array) -> jax.Array:
        # A window of several dimensions is a product of windows of one.
        for axis, count in enumerate(self.output_size, x.ndim - len(self.output_size) - 1):
            if count is not None and count != x.shape[axis]:
                x = self._along(x, axis, count)
        return x

    def _along(self, x: jax.Array, axis: int, count: int) -> jax.Array:
        length = x.shape[axis]
        starts = np.arange(count) * length // count
        ends = -(-(np.arange(count) + 1) * length // count)
        # Windows differ in length by one at most; the positions after a shorter one are hidden.
        positions = starts[:, None] + np.arange((ends - starts).max())
        windows = jnp.take(x, np.minimum(positions, length - 1).astype(np.int32), axis=axis)
        inside = (positions < ends[:, None]).reshape(
            (1,) * axis + positions.shape + (1,) * (x.ndim - axis - 1)
        )
        return self._reduced(windows, axis + 1, inside)

    def _reduced(self, windows: jax.Array, axis: int, inside: np.ndarray) -> jax.Array:
        raise NotImplementedError


class AdaptiveAvgPool(_AdaptivePool):
    """Means over windows, as many as the result shall have, channels last.

    Window ``i`` of ``n`` over a dimension of size ``s`` goes from ``floor(i * s / n)`` to
    ``ceil((i + 1) * s / n)``, as in PyTorch: windows overlap where ``n`` does not divide ``s``.

    Args:
        output_size: Size of the result in each dimension, larger or smaller than that of the input;
            None for one that stays as it is. A number is one dimension.

    Raises:
        LayerConfigError: If a size is not positive.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.nn.AdaptiveAvgPool(2)(jnp.arange(5.0)[:, None]).ravel().tolist()
        [1.0, 3.0]
        >>> sx.nn.AdaptiveAvgPool((1, 1))(jnp.ones((4, 7, 6, 3))).shape
        (4, 1, 1, 3)
    """

    def _run(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32
        return super()._run(x.astype(at_least_float32(x.dtype))).astype(dtype)

    def _reduced(self, windows: jax.Array, axis: int, inside: np.ndarray) -> jax.Array:
        return jnp.mean(windows, axis=axis, where=inside)


class AdaptiveMaxPool(_AdaptivePool):
    """Maxima over windows, as many as the result shall have, channels last.

    The windows are those of ``AdaptiveAvgPool``.

    Args:
        output_size: As for ``AdaptiveAvgPool``.

    Raises:
        LayerConfigError: If a size is not positive.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.nn.AdaptiveMaxPool(2)(jnp.arange(5.0)[:, None]).ravel().tolist()
        [2.0, 4.0]
    """

    def _reduced(self, windows: jax.Array, axis: int, inside: np.ndarray) -> jax.Array:
        return jnp.max(windows, axis=axis, where=inside, initial=_least(windows.dtype))
