# SPDX-License-Identifier: Apache-2.0
"""Dynamic slices, padding and repetition, by names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Variable
from shardax.extend import Options, explicit_sharding, with_layout
from shardax.named import base
from shardax.named.array import NamedArray, as_named, dimension_of
from shardax.named.base import from_parts, parts_of
from shardax.named.elementwise import dimension_of_axis, expand
from shardax.named.lift import run_lifted


def dynamic_slice(array: Any, starts: Mapping[Any, Any], sizes: base.Axes) -> NamedArray:
    """Returns a part of fixed size from any start.

    Args:
        array: A named array.
        starts: First position by name: integers, also ones that only a running program knows. A
            named array of them takes a part for each of its positions: along an axis that the
            array has too, each from its own.
        sizes: Sizes by name, of the same names.

    Returns:
        The array with these sizes, and the axes of the starts. As in JAX, a start that is known
        only while running is moved so that the part is inside.

    Raises:
        NamedAxesError: If there is no such axis, sizes are larger than it, or names differ.
        NamedIndexError: If a start that is known before running is out of range.

    Example:
        >>> import jax, shardax as sx
        >>> x = sx.named.arange({"time": 6})
        >>> window = jax.jit(lambda x, now: sx.named.dynamic_slice(x, {"time": now}, {"time": 3}))
        >>> window(x, 2).unwrap("time").tolist()
        [2, 3, 4]
        >>> starts = sx.named.wrap([0, 3], "batch")
        >>> parts = sx.named.dynamic_slice(x, {"time": starts}, {"time": 2})
        >>> parts.unwrap("batch", "time").tolist()
        [[0, 1], [3, 4]]
    """
    array = as_named(array, "dynamic_slice")
    base.check_sizes_by_name(sizes)
    if sizes.keys() != starts.keys():
        raise base.NamedAxesError(
            f"dynamic_slice takes a start and a size for each name, but was given starts of "
            f"{list(starts)} and sizes of {list(sizes)}. To take the rest of an axis whole leave "
            f"it out of both."
        )
    values = _as_starts("dynamic_slice", array, starts, sizes)

    def take(data: jax.Array, dimensions: tuple[int, ...], firsts: list[Any]) -> jax.Array:
        shape, begin = list(data.shape), [np.int32(0)] * data.ndim
        for dimension, size, first in zip(dimensions, sizes.values(), firsts, strict=True):
            shape[dimension], begin[dimension] = size, first
        return jax.lax.dynamic_slice(data, begin, shape)

    return _along_starts(take, (array,), values)


def dynamic_update_slice(array: Any, update: Any, starts: Mapping[Any, Any]) -> NamedArray:
    """Returns an array with a part from any start replaced.

    Args:
        array: A named array.
        update: A named array with the names of ``starts``; one that lacks another name is repeated
            along it. It is cast to the dtype of the array.
        starts: As for ``dynamic_slice``.

    Returns:
        The axes of the array, and those of the starts.

    Raises:
        NamedAxesError: If there is no such axis, or the update has other axes or larger sizes.
        NamedIndexError: If a start that is known before running is out of range.

    Example:
        >>> import shardax as sx
        >>> x, ones = sx.named.zeros({"time": 5}), sx.named.ones({"time": 2})
        >>> sx.named.dynamic_update_slice(x, ones, {"time": 3}).unwrap("time").tolist()
        [0.0, 0.0, 0.0, 1.0, 1.0]
    """
    array, update = (as_named(x, "dynamic_update_slice") for x in (array, update))
    further = [name for name in update.axes if name not in array.axes]
    unsized = [name for name in starts if name not in update.axes]
    others = {name: size for name, size in update.axes.items() if name not in starts}
    differing = [name for name, size in others.items() if array.axes.get(name, size) != size]
    if (
        further
        or unsized
        or differing
        or len(update.positional_shape) > len(array.positional_shape)
    ):
        raise base.NamedAxesError(
            f"dynamic_update_slice puts a part with the axes "
            f"{base.shown(update.dims, update.shape)} at {list(starts)} into "
            f"{base.shown(array.dims, array.shape)}. The part has each of these names, and others "
            f"of the array in the array's sizes."
        )
    sizes = {name: update.axes[name] for name in starts}
    values = _as_starts("dynamic_update_slice", array, starts, sizes)
    data, dims = parts_of(array)
    shape = [sizes.get(name, size) for name, size in zip(dims, data.shape, strict=True)]
    part = jnp.broadcast_to(expand(parts_of(update), dims), shape).astype(data.dtype)

    def put(
        data: jax.Array, part: jax.Array, dimensions: tuple[int, ...], firsts: list[Any]
    ) -> jax.Array:
        begin = [np.int32(0)] * data.ndim
        for dimension, first in zip(dimensions, firsts, strict=True):
            begin[dimension] = first
        return jax.lax.dynamic_update_slice(data, part, begin)

    return _along_starts(put, (array, from_parts(NamedArray, part, dims)), values)


def _as_starts(
    function: str, array: NamedArray, starts: Mapping[Any, object], sizes: base.Axes
) -> dict[Any, Any]:
    """Returns starts as integers and arrays, or raises."""
    values: dict[Any, Any] = {}
    for name, start in starts.items():
        length, size = array.data.shape[dimension_of(array, name)], sizes[name]
        if size > length:
            raise base.NamedAxesError(
                f"{function} has {size} positions along {name!r}, of which the array has {length}."
            )

        value: Any = start.value if isinstance(start, Variable) else start
        if Options.is_integer(value):
            value = value + length if value < 0 else value
            if not 0 <= value <= length - size:
                raise base.NamedIndexError(
                    f"{function} begins at {start} along {name!r} of size {length}, where a part "
                    f"of {size} begins at {length - size} at most."
                )
            value = np.int32(value)

        is_named = isinstance(value, NamedArray)
        unfit = np.ndim(value) > 0 and (not is_named or value.positional_shape)
        if unfit or not jnp.issubdtype(getattr(value, "dtype", type(value)), np.integer):
            raise base.NamedAxesError(
                f"{function} begins at integers, also named arrays of them, but the start along "
                f"{name!r} is {value!r}. Name its dimensions: named.wrap(starts, 'batch')."
            )
        if is_named and any(key in starts for key in value.axes):
            raise base.NamedAxesError(
                f"{function} has a start along {name!r} with the axes "
                f"{base.shown(value.dims, value.shape)}, of which one is sliced. Rename it, "
                f"starts.rename({{old: new}})."
            )
        values[name] = value
    return values


def _along_starts(function, arrays: tuple[NamedArray, ...], values: Mapping[Any, Any]):
    """Runs a function of data, the places of names, and starts."""
    array, names, starts = arrays[0], list(values), list(values.values())
    if not any(isinstance(start, NamedArray) and start.axes for start in starts):
        firsts = [start.data if isinstance(start, NamedArray) else start for start in starts]
        dimensions = tuple(dimension_of(array, name) for name in names)

        def run_whole(*datas: jax.Array) -> jax.Array:
            return function(*datas[: len(arrays)], dimensions, list(datas[len(arrays) :]))

        layout = explicit_sharding(array.data)
        if layout is not None and len(arrays) == 1:  # what is sliced comes out whole
            entries = [None if i in dimensions else entry for i, entry in enumerate(layout.spec)]
            layout = NamedSharding(layout.mesh, PartitionSpec(*entries))
        firsts = map(jnp.asarray, firsts)
        data = with_layout(run_whole, layout, *(x.data for x in arrays), *firsts)
        return from_parts(NamedArray, data, array.dims)

    count = len(array.positional_shape)
    dimensions = tuple(range(count, count + len(names)))

    def run(datas: tuple[jax.Array, ...], firsts: list[Any]) -> jax.Array:
        return function(*datas, dimensions, firsts)

    untagged = tuple(x.untag(*names) for x in arrays)
    result = run_lifted(NamedArray, run, (untagged, starts), {})
    return result.tag(*(None,) * count, *names)


def pad(
    array: Any, widths: Mapping[Any, int | tuple[int, int]], mode: str = "constant", **options: Any
) -> NamedArray:
    """Makes axes longer at their ends.

    Args:
        array: A named array.
        widths: How many positions are added before and after, by name or by the number of a
            positional dimension; one number for both.
        mode: As in ``jnp.pad``: with ``constant_values``, zeros by default, or from the array
            itself.
        **options: Those of the mode in ``jnp.pad``.

    Returns:
        The array with longer axes.

    Raises:
        NamedAxesError: If there is no such axis, or a width is no integer of at least 0.

    Example:
        >>> import shardax as sx
        >>> sx.named.pad(sx.named.ones({"a": 2}), {"a": (1, 2)}).unwrap("a").tolist()
        [0.0, 1.0, 1.0, 0.0, 0.0]
    """
    data, dims = parts_of(as_named(array, "pad"))
    pairs = [(0, 0)] * len(dims)
    for axis, width in widths.items():
        pair = (width, width) if Options.is_integer(width) else width
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(_is_count, pair)):
            raise base.NamedAxesError(
                f"pad adds a number of positions at least 0, or a pair of them, before and after, "
                f"but was given {width!r} for {axis!r}."
            )
        pairs[dimension_of_axis(dims, axis)] = (int(pair[0]), int(pair[1]))
    return from_parts(NamedArray, jnp.pad(data, pairs, mode, **options), dims)


def tile(array: object, counts: Mapping[Any, int]) -> NamedArray:
    """Repeats an array along axes, one whole after another.

    Args:
        array: A named array.
        counts: How often, by name or by the number of a positional dimension.

    Returns:
        The array with axes so many times as long.

    Raises:
        NamedAxesError: If there is no such axis, or a count is no integer of at least 0.

    Example:
        >>> import shardax as sx
        >>> sx.named.tile(sx.named.arange({"a": 2}), {"a": 2}).unwrap("a").tolist()
        [0, 1, 0, 1]
    """
    data, dims = parts_of(as_named(array, "tile"))
    repeats = [1] * len(dims)
    for axis, count in counts.items():
        if axis not in dims and not Options.is_integer(axis):
            raise base.NamedAxesError(
                f"tile repeats along axes that are there, but {axis!r} is not in "
                f"{base.shown(dims, data.shape)}. A new one is made by "
                f"x.broadcast_axes({{{axis!r}: {count}}})."
            )
        if not _is_count(count):
            raise base.NamedAxesError(f"tile repeats a number of times, but not {count!r}.")
        repeats[dimension_of_axis(dims, axis)] = int(count)
    return from_parts(NamedArray, jnp.tile(data, repeats), dims)


def _is_count(value: object) -> bool:
    return Options.is_integer(value) and value >= 0
