# SPDX-License-Identifier: Apache-2.0
"""Kernels in int8, int4 or fp8, with scales.

A kernel is rounded to ``values * scale``: one scale for each channel of the layer's output, or for
each part of its inputs. The largest magnitude of a channel gets the largest number of the format,
so zero stays zero and no offset is needed. Halves of a step beyond it are cut: 127.5 steps of int8
on either side, 7.5 of int4. fp8 is e4m3, whose largest number is 448.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Module, Param, Quantized
from shardax.extend import INLINE, explicit_entries, explicit_sharding, with_layout
from shardax.nn.arithmetic import at_least_float32

Format = Literal["int8", "int4", "fp8"]
"""The formats of quantized kernels."""


class _Range(NamedTuple):
    """A format's dtype, and what the largest magnitude is scaled to."""

    dtype: Any
    largest: float


RANGES: Mapping[str, _Range] = {
    "int8": _Range(jnp.int8, 127.5),
    "int4": _Range(jnp.int4, 7.5),
    "fp8": _Range(jnp.float8_e4m3fn, 448.0),
}


class QuantizedKernel(Module):
    """A kernel in few bits; made by ``sx.quantize``.

    What a layer reads of its kernel, ``value``, ``shape`` and ``axes``, it reads here too.

    Args:
        kernel: The ``Param``.
        dimensions: Those that the layer sums over, counted from the last: negative.
        format: ``"int8"``, ``"int4"`` or ``"fp8"``.
        tile_size: How many elements of the last of these dimensions share a scale; None for all.

    Attributes:
        values: ``Quantized`` of the kernel's shape, axes and metadata.
        scale: ``Quantized`` in float32 or wider, or as the files have it that ``from_pretrained``
            read; in dimensions that are summed over of size 1, or one for each tile.

    Example:
        >>> import shardax as sx
        >>> kernel = sx.quantize(sx.nn.Linear(64, 4, rngs=sx.Rngs(0)), "int8").kernel
        >>> kernel.values.dtype.name, kernel.scale.shape, kernel.value.dtype.name
        ('int8', (1, 4), 'float32')
    """

    variable_type: type[Param[Any]] = Param

    def __init__(
        self,
        kernel: Param[Any],
        dimensions: tuple[int, ...],
        format: Format,
        tile_size: int | None = None,
    ) -> None:
        self._hold(kernel, *_quantized(kernel, dimensions, RANGES[format], tile_size))

    def _hold(self, kernel: Param[Any], values: Any, scale: Any) -> None:
        """Sets numbers and scales, also abstract ones."""
        self.values = Quantized(values, axes=kernel.axes, **kernel.metadata)
        scale_axes = None
        if kernel.axes is not None:
            sizes = zip(kernel.axes, kernel.shape, scale.shape, strict=True)
            scale_axes = tuple(name if size == count else None for name, size, count in sizes)
        self.scale = Quantized(scale, axes=scale_axes)
        self.dtype: Any = jnp.dtype(kernel.dtype)
        if type(kernel) is not Param:  # set only where it says more
            self.variable_type = type(kernel)

    @property
    def value(self) -> jax.Array:
        """The numbers times their scales, in the dtype that the kernel had."""
        if self.values.is_abstract:
            abstract: Any = jax.ShapeDtypeStruct(self.shape, self.dtype)
            return abstract
        return dequantized(self.values.value, self.scale.value, self.dtype)

    def __getitem__(self, index: object) -> jax.Array:
        """Reads a part of the value."""
        return self.value[index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.values.size

    @property
    def axes(self) -> tuple[Any, ...] | None:
        """Axis names of the kernel."""
        return self.values.axes

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the kernel."""
        return self.values.metadata

    @property
    def sharding(self) -> Any:
        """Sharding of the kernel, or None."""
        return self.values.sharding

    def as_param(self) -> Param[Any]:
        """Makes a ``Param`` of the value.

        Returns:
            A Variable of the type, axes and metadata that the kernel had.
        """
        return self.variable_type(self.value, axes=self.axes, **self.metadata)


def kernel_of_parts(kernel: Param[Any], values: Any, scale: Any) -> QuantizedKernel:
    """Returns the kernel of numbers and scales, in place of a parameter."""
    module = QuantizedKernel.__new__(QuantizedKernel)
    Module.__init__(module)
    module._hold(kernel, values, scale)
    return module


def round_to_format(
    x: jax.Array, dimensions: tuple[int, ...], range_: _Range, tile_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns numbers of a format and their scales."""
    wide = x.astype(at_least_float32(x.dtype))
    tiled, shared = _in_tiles(wide, dimensions, tile_size)

    scale = jnp.max(jnp.abs(tiled), axis=shared, keepdims=True) / range_.largest
    scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)

    numbers = tiled / scale
    if jnp.issubdtype(range_.dtype, jnp.integer):
        limits = jnp.iinfo(range_.dtype)
        numbers = jnp.clip(jnp.round(numbers), int(limits.min), int(limits.max))

    sizes = list(x.shape)
    for dimension in dimensions if tile_size is None else ():
        sizes[dimension] = 1
    if tile_size is not None:
        sizes[dimensions[-1]] = x.shape[dimensions[-1]] // tile_size
    return numbers.astype(range_.dtype).reshape(x.shape), scale.reshape(sizes)


def _in_tiles(
    x: jax.Array, dimensions: tuple[int, ...], tile_size: int | None
) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits the last dimension in tiles; returns the shared dimensions."""
    if tile_size is None:
        return x, dimensions
    split = dimensions[-1] % x.ndim
    shape = (*x.shape[:split], x.shape[split] // tile_size, tile_size, *x.shape[split + 1 :])
    return x.reshape(shape), (split + 1,)


def dequantized(values: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns numbers times their scales, each for one number or a tile."""
    layout = explicit_sharding(values)
    if layout is None and explicit_entries(scale) is not None:
        layout = NamedSharding(jax.typeof(scale).sharding.mesh, PartitionSpec())
    compute = functools.partial(_dequantized, dtype=jnp.dtype(dtype))
    return with_layout(compute, layout, values, scale)


def quantized_rows(
    table: QuantizedKernel,
    look_up: Callable[[jax.Array, jax.Array], jax.Array],
    indices: jax.Array,
    dtype: jax.typing.DTypeLike | None,
) -> jax.Array:
    """Looks rows up, without a table of floating numbers."""
    values, scale = (look_up(part.value, indices) for part in (table.values, table.scale))
    return dequantized(values, scale, table.dtype if dtype is None else dtype)


# A unit, so that kernels of one shape are traced once.
@functools.partial(jax.jit, static_argnames="dtype", inline=INLINE)
def _dequantized(values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    for place, (size, count) in enumerate(zip(values.shape, scale.shape, strict=True)):
        if 1 < count < size:
            scale = jnp.repeat(scale, size // count, axis=place)
    scale = scale.astype(at_least_float32(scale.dtype))
    return (values.astype(scale.dtype) * scale).astype(dtype)


def _quantized(
    kernel: Param[Any], dimensions: tuple[int, ...], range_: _Range, tile_size: int | None
) -> Any:
    """Returns numbers and scales of a Variable, laid out as it is."""
    options = (dimensions, range_, tile_size)
    if kernel.is_abstract:
        shape = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
        numbers, scale = jax.eval_shape(functools.partial(_round, *options), shape, range_.largest)
        return numbers, scale

    value = kernel.value
    layout, layouts = getattr(value, "sharding", None), None
    typed = explicit_sharding(value)
    if isinstance(value, Tracer) or not isinstance(layout, NamedSharding):
        layout = typed

    if layout is not None:
        entries = list((*layout.spec, *(None,) * value.ndim)[: value.ndim])
        whole = list(entries)
        for dimension in dimensions if tile_size is None else dimensions[-1:]:
            entries[dimension] = None
        layouts = tuple(
            NamedSharding(layout.mesh, PartitionSpec(*part)) for part in (whole, entries)
        )

    return _rounding(*options, layouts, typed is not None)(value, range_.largest)


def _round(
    dimensions: tuple[int, ...], range_: _Range, tile_size: int | None, x: jax.Array, largest: Any
) -> Any:
    return round_to_format(x, dimensions, range_._replace(largest=largest), tile_size)


# One program for kernels of a shape. It divides by an argument: by a constant XLA multiplies with
# its inverse, which rounds differently.
@functools.lru_cache(maxsize=256)
def _rounding(
    dimensions: tuple[int, ...], range_: _Range, tile_size: int | None, layouts: Any, is_typed: bool
) -> Any:
    compute: Any = functools.partial(_round, dimensions, range_, tile_size)
    if is_typed:
        return jax.jit(functools.partial(with_layout, compute, layouts))
    return jax.jit(compute, out_shardings=layouts)
