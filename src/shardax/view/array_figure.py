# SPDX-License-Identifier: Apache-2.0
"""Arrays as treescope draws them: with names on the dimensions, and their sharding.

A *figure* is an array together with what its dimensions are called. treescope asks the figure's
*adapter* for its numbers, and gets only as many as it draws. Drawing a large array therefore costs
no more than drawing a small one, and nothing is ever brought here that lies on other machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from shardax.core._jax import Tracer
from shardax.named import NamedArray
from shardax.view.pictures import platform_of, spans_by_device

_MOST_READ = 2**20  # elements; of larger arrays neither statistics nor a copy are made


class ArrayFigure:
    """An array to be drawn.

    Args:
        array: A JAX or NumPy array.
        names: What its dimensions are called, None for what has no name.
        positional: Whether dimensions are addressed by position all the same.

    Example:
        >>> import jax.numpy as jnp
        >>> figure = ArrayFigure(jnp.arange(6.0).reshape(2, 3), ("embed", None))
        >>> figure.summary()
        'float32[2, 3] mean 2.5, std 1.71, from 0 to 5'
    """

    __slots__ = ("array", "names", "positional")

    def __init__(self, array: Any, names: Sequence[Any] | None, positional: bool = True) -> None:
        self.array = array
        self.names = tuple(names or (None,) * array.ndim)
        self.positional = positional

    def __treescope_ndarray_adapter__(self) -> FigureAdapter:
        return ADAPTER

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """What is shown where no picture is drawn: of scalars, or because none was asked for."""
        from treescope import rendering_parts as parts

        text = parts.abbreviation_color(parts.text(f"<{self.summary()}>"))
        return parts.build_one_line_tree_node(text, path)

    @property
    def is_here(self) -> bool:
        """Whether this process can read the numbers."""
        array = self.array
        if not isinstance(array, jax.Array):
            return True
        return (
            not isinstance(array, Tracer) and not array.is_deleted() and array.is_fully_addressable
        )

    @property
    def head(self) -> str:
        """Dtype and shape, with the names where dimensions go by name."""
        sizes: Any = list(self.array.shape)
        if self.positional:
            return f"{self.array.dtype}{sizes}"
        pairs = zip(self.names, sizes, strict=True)
        named = ", ".join(str(size) if name is None else f"{name}: {size}" for name, size in pairs)
        return f"NamedArray {self.array.dtype}[{named}]"

    def summary(self) -> str:
        """Returns dtype, shape and, of an array of numbers, where these lie."""
        array, head = self.array, self.head
        if not self.is_here:
            return f"{head}{_why_absent(array)}"
        if not 0 < array.size <= _MOST_READ or not _is_real(array.dtype):
            return head
        numbers = np.asarray(array)
        if array.size == 1:
            return f"{head} {numbers.reshape(())[()]}"
        if numbers.dtype == np.bool_:
            return f"{head} {np.count_nonzero(numbers):,} of {array.size:,} true"
        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        strange = f", {array.size - finite.size:,} not finite" if finite.size < array.size else ""
        if not finite.size:
            return head + strange
        return (
            f"{head} mean {finite.mean():.3g}, std {finite.std():.3g}, "
            f"from {finite.min():.3g} to {finite.max():.3g}{strange}"
        )


def _why_absent(array: Any) -> str:
    if isinstance(array, Tracer):
        return ", traced"
    return ", deleted" if array.is_deleted() else ", in part on other machines"


def _is_real(dtype: Any) -> bool:
    kinds = (np.bool_, np.integer, np.floating)
    return any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)


def sharding_part(array: Any, names: Sequence[Any] | None) -> Any:
    """Draws which device holds which part of an array.

    Args:
        array: An array or ``jax.ShapeDtypeStruct`` with a sharding, over any mesh.
        names: What its dimensions are called.

    Returns:
        A treescope part; None for what treescope cannot draw: scalars, empty arrays, uneven parts.
    """
    import treescope

    known = [name for name in names or () if name is not None]
    figure = ArrayFigure(array, names, positional=len(set(known)) < len(known))
    if ADAPTER.get_sharding_info_for_array_data(figure) is None:
        return None
    return treescope.render_array_sharding(figure).treescope_part


def as_figure(array: Any) -> ArrayFigure:
    """Returns what to draw of an array.

    Args:
        array: A figure, a ``NamedArray``, or any other array.

    Example:
        >>> import shardax as sx
        >>> as_figure(sx.named.zeros({"batch": 2})).names
        ('batch',)
    """
    if isinstance(array, ArrayFigure):
        return array
    if isinstance(array, NamedArray):
        return ArrayFigure(array.data, array.dims, positional=False)
    return ArrayFigure(array, None)


class FigureAdapter:
    """What treescope asks of a figure or named array; the parameters' names are treescope's."""

    def get_axis_info_for_array_data(self, array: ArrayFigure | NamedArray) -> tuple[Any, ...]:
        """Returns the name, position and size of every dimension."""
        from treescope import ndarray_adapters as nda

        figure = as_figure(array)
        infos: list[Any] = []
        for name, size in zip(figure.names, figure.array.shape, strict=True):
            place = sum(not isinstance(info, nda.NamedPositionlessAxisInfo) for info in infos)
            if name is None:
                infos.append(nda.PositionalAxisInfo(place, size))
            elif figure.positional:
                infos.append(nda.NamedPositionalAxisInfo(place, name, size))
            else:
                infos.append(nda.NamedPositionlessAxisInfo(name, size))
        return tuple(infos)

    def get_array_data_with_truncation(
        self,
        array: ArrayFigure | NamedArray,
        mask: Any,
        edge_items_per_axis: tuple[int | None, ...],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers at both ends of every dimension, and which of them count."""
        numbers: Any = as_figure(array).array
        shape = numbers.shape
        if numbers.size <= _MOST_READ:  # else the ends are taken where the array lies
            numbers = np.asarray(numbers)
        counts = np.broadcast_to(True if mask is None else np.asarray(as_figure(mask).array), shape)
        for dimension, edge in enumerate(edge_items_per_axis):
            if edge is not None:
                kept = np.r_[0 : edge + 1, shape[dimension] - edge : shape[dimension]]
                place = (slice(None),) * dimension
                numbers, counts = numbers[(*place, kept)], counts[(*place, kept)].copy()
                counts[(*place, edge)] = False  # only there to show that something is left out
        return np.asarray(numbers), counts

    def get_array_summary(self, array: ArrayFigure | NamedArray, fast: bool) -> Any:
        """Returns the line above the picture."""
        from treescope import rendering_parts as parts

        figure = as_figure(array)
        text = parts.text(figure.head if fast else figure.summary())
        return parts.abbreviatable(text, parts.text(figure.head))

    def get_numpy_dtype(self, array: ArrayFigure | NamedArray) -> np.dtype | None:
        """Returns the dtype, or None if NumPy has none such."""
        dtype = as_figure(array).array.dtype
        return dtype if isinstance(dtype, np.dtype) else None

    def get_sharding_info_for_array_data(self, array: ArrayFigure | NamedArray) -> Any:
        """Returns what each device holds; None if it is unknown or cannot be drawn."""
        from treescope import ndarray_adapters as nda

        inner = as_figure(array).array
        shape, place = inner.shape, getattr(inner, "sharding", None)
        if isinstance(inner, Tracer) or not isinstance(place, Sharding) or 0 in shape:
            return None
        spans = spans_by_device(shape, place)
        sizes = {tuple(stop - start for start, stop in own) for own in spans.values()}
        if not shape or len(sizes) != 1:
            return None
        return nda.ShardingInfo(
            shard_shape=next(iter(sizes)),
            device_index_to_shard_slices={
                device: tuple(slice(*span) for span in own) for device, own in spans.items()
            },
            device_type=platform_of(place),
            fully_replicated=sizes == {tuple(shape)},
        )

    def should_autovisualize(self, array: ArrayFigure | NamedArray) -> bool:
        """Whether there is a picture to draw."""
        figure = as_figure(array)
        return figure.is_here and 0 not in figure.array.shape


ADAPTER = FigureAdapter()
