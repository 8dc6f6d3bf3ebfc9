# SPDX-License-Identifier: Apache-2.0
"""Positions, different values and counts of the elements of named arrays.

Where elements have an order (``nonzero``), it is that of canonical storage: names sorted, the last
one fastest. So it does not depend on how an array is stored.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardax.extend import explicit_sharding, joined_sharding, with_layout
from shardax.named import base
from shardax.named.array import NamedArray, as_named, dimension_of, refuse_positional
from shardax.named.base import from_parts, parts_of
from shardax.named.elementwise import align
from shardax.named.lift import run_lifted
from shardax.nn.parameters import canonical_dtype

_EXAMPLE = "Give a name and a size: {'vocab': 5}."


def one_hot(x: object, axes: base.Axes, dtype: jax.typing.DTypeLike = float) -> NamedArray:
    """Returns vectors of one at a position and zero elsewhere.

    Args:
        x: A named array of integers. One out of range gives zeros.
        axes: Name and size of the axis of the vectors.
        dtype: The dtype of the result.

    Returns:
        The axes of ``x`` and the new one, stored last.

    Raises:
        NamedAxesError: If there is not one axis, or ``x`` does not hold integers.
        PartitionError: If ``x`` has the axis.

    Example:
        >>> import shardax as sx
        >>> vectors = sx.named.one_hot(sx.named.wrap([2, 0], "time"), {"vocab": 3})
        >>> vectors.unwrap("time", "vocab").tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    data, dims = parts_of(_integers("one_hot", x))
    name, size = base.one_axis("one_hot", axes, _EXAMPLE)
    dims = base.check_dims((*dims, name))
    return from_parts(NamedArray, jax.nn.one_hot(data, size, dtype=canonical_dtype(dtype)), dims)


def nonzero(
    x: object, axis: object, *, size: int | None = None, fill_value: int = 0
) -> dict[Any, NamedArray]:
    """Returns where elements are not zero, as an index.

    Args:
        x: A named array without positional dimensions.
        axis: Name of the axis of the positions.
        size: How many positions; needed inside of a trace, where their number is not known. None:
            as many as there are.
        fill_value: Position that fills up to the size.

    Returns:
        A named array of positions for each name, which together are an index: ``x[positions]`` are
        the elements. Positions are in the order of canonical storage.

    Raises:
        NamedAxesError: If ``x`` has positional dimensions or no names, or no size is given inside
            of a trace.

    Example:
        >>> import shardax as sx
        >>> x = sx.named.wrap([[0, 7], [5, 0]], "a", "b")
        >>> places = sx.named.nonzero(x, "found")
        >>> {name: place.unwrap("found").tolist() for name, place in places.items()}
        {'a': [0, 1], 'b': [1, 0]}
        >>> x[places].unwrap("found").tolist()
        [7, 5]
    """
    array = as_named(x, "nonzero").canonical()
    if array.positional_shape or not array.axes:
        raise base.NamedAxesError(
            f"nonzero returns positions by name, but the axes are "
            f"{base.shown(array.dims, array.shape)}. Name all dimensions, x.tag(...)."
        )
    _check_size("nonzero", array, size)
    positions = jnp.nonzero(_gathered(array.data), size=size, fill_value=fill_value)
    return {
        name: NamedArray(indices, (axis,))
        for name, indices in zip(array.dims, positions, strict=True)
    }


def unique(
    x: object,
    axis: object,
    *,
    size: int | None = None,
    fill_value: Any = None,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    """Returns the different values of an array, sorted.

    Args:
        x: A named array, of which all elements are compared.
        axis: Name of the axis of the values.
        size: How many values; needed inside of a trace, where their number is not known. If there
            are more, the largest are left out; None: as many as there are.
        fill_value: What fills up to the size; None for the least value.
        return_inverse: Whether to return which value each element of ``x`` is, with its axes.
        return_counts: Whether to return how often each value is there.

    Returns:
        The values, or a tuple of values, inverse and counts, of these what was asked for.

    Raises:
        NamedAxesError: If no size is given inside of a trace.

    Example:
        >>> import shardax as sx
        >>> values, counts = sx.named.unique(
        ...     sx.named.wrap([3, 1, 3], "time"), "value", return_counts=True)
        >>> values.unwrap("value").tolist(), counts.unwrap("value").tolist()
        ([1, 3], [1, 2])
    """
    array = as_named(x, "unique")
    _check_size("unique", array, size)
    data, dims = parts_of(array)
    values, inverse, counts = jnp.unique(
        _gathered(data), return_inverse=True, return_counts=True, size=size, fill_value=fill_value
    )
    results = [NamedArray(values, (axis,))]
    if return_inverse:
        results.append(from_parts(NamedArray, inverse.reshape(data.shape), dims))
    if return_counts:
        results.append(NamedArray(counts, (axis,)))
    return results[0] if len(results) == 1 else tuple(results)


def bincount(x: object, axes: base.Axes, *, weights: object = None) -> NamedArray:
    """Counts how often each integer is in an array.

    Args:
        x: A named array of integers, of which all elements are counted. One out of range is not.
        axes: Name and size of the axis of the counts.
        weights: What each element counts, a named array or a number that meets ``x`` by name; None
            for 1.

    Returns:
        Counts along the axis: integers, or in the dtype of the weights.

    Raises:
        NamedAxesError: If there is not one axis, ``x`` does not hold integers, or a name has two
            sizes.

    Example:
        >>> import shardax as sx
        >>> tokens = sx.named.wrap([[2, 0], [2, -1]], "batch", "time")
        >>> sx.named.bincount(tokens, {"vocab": 3}).unwrap("vocab").tolist()
        [1, 0, 2]
    """
    array = _integers("bincount", x)
    name, size = base.one_axis("bincount", axes, _EXAMPLE)
    weights = np.int32(1) if weights is None else weights
    weights = weights if isinstance(weights, NamedArray) else NamedArray(weights, ())
    (values, amounts), _ = align([parts_of(array), parts_of(weights)])

    def count(values: jax.Array, amounts: jax.Array) -> jax.Array:
        values, amounts = jnp.broadcast_arrays(values, amounts)
        # Negative positions would count from the end.
        values = jnp.where(values < 0, size, values).ravel()
        return jnp.zeros(size, amounts.dtype).at[values].add(amounts.ravel(), mode="drop")

    layout = joined_sharding([(values, ()), (amounts, ())])  # no dimension keeps its own
    layout = None if layout is None else NamedSharding(layout.mesh, PartitionSpec(None))
    return NamedArray(with_layout(count, layout, values, amounts), (name,))


def searchsorted(array: object, values: object, axis: object, side: str = "left") -> NamedArray:
    """Returns where values belong along a sorted axis.

    Args:
        array: A named array that is sorted along the axis, without positional dimensions.
        values: A named array without that axis, or a number; names that both have go together.
        axis: The name of the axis.
        side: Where a value that is there belongs: ``"left"`` before the first, ``"right"`` behind
            the last.

    Returns:
        Integers with the other axes of both.

    Raises:
        NamedAxesError: If there is no such axis, the values have it too, or a name has two sizes.

    Example:
        >>> import shardax as sx
        >>> edges = sx.named.wrap([0.0, 1.0, 2.0], "edge")
        >>> values = sx.named.wrap([0.5, 2.0], "time")
        >>> sx.named.searchsorted(edges, values, "edge").unwrap("time").tolist()
        [1, 2]
    """
    sorted_array = as_named(array, "searchsorted")
    dimension_of(sorted_array, axis)
    refuse_positional(sorted_array, f"searchsorted searches along {axis!r} at every other name")
    if isinstance(values, NamedArray) and axis in values.axes:
        raise base.NamedAxesError(
            f"searchsorted searches along {axis!r}, which the values have too. Rename it there: "
            f"values.rename({{{axis!r}: 'value'}})."
        )
    find = functools.partial(jnp.searchsorted, side=side)
    values = values if isinstance(values, NamedArray) else NamedArray(values, ())
    edges, searched = parts_of(sorted_array), parts_of(values)
    names = base.sorted_names({*sorted_array.axes, *values.axes} - {axis})
    positional = base.positional_dimensions(searched.dims)

    def run(edge_data: jax.Array, data: jax.Array) -> jax.Array:
        pair = (
            from_parts(NamedArray, edge_data, edges.dims).untag(axis),
            from_parts(NamedArray, data, searched.dims),
        )
        return run_lifted(NamedArray, find, pair, {}).data

    owners = [searched if name in searched.dims else edges for name in names]
    parts = [
        (owner.data, (owner.dims.index(name),)) for name, owner in zip(names, owners, strict=True)
    ]
    layout = joined_sharding([(searched.data, positional), *parts])
    data = with_layout(run, layout, edges.data, searched.data)
    return from_parts(NamedArray, data, (*(None for _ in positional), *names))


def _gathered(data: jax.Array) -> jax.Array:
    """Returns an array whole on every device, over Explicit mesh axes."""
    layout = explicit_sharding(data)
    if layout is None:
        return data
    return jax.sharding.reshard(data, NamedSharding(layout.mesh, PartitionSpec()))


def _integers(function: str, x: object) -> NamedArray:
    array = as_named(x, function)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise base.NamedAxesError(
            f"{function} takes integers, but was given {array.dtype}"
            f"{base.shown(array.dims, array.shape)}. Cast them: x.astype(int)."
        )
    return array


def _check_size(function: str, array: NamedArray, size: int | None) -> None:
    if size is None and isinstance(array.data, Tracer):
        raise base.NamedAxesError(
            f"{function} was called inside of a trace, where the number of results is not known. "
            f"Give one: size=8."
        )
