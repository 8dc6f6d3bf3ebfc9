# SPDX-License-Identifier: Apache-2.0
"""Putting named arrays together and taking them apart along one axis, and choosing between them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.errors import NamedAxesError
from shardax.named.align import Operand, align, check_sizes, expand, joined
from shardax.named.array import NamedArray, as_named
from shardax.named.names import Dims, check_dims, shown
from shardax.named.operators import operand_of


def concatenate(arrays: Sequence[Any], axis: Any) -> NamedArray:
    """Puts arrays one after another along an axis that all of them have.

    Args:
        arrays: Named arrays; one that lacks another name is repeated along it.
        axis: The name.

    Raises:
        NamedAxesError: If an array lacks the axis, or another axis has two sizes.

    Example:
        >>> import shardax as sx
        >>> parts = [sx.named.ones({"a": 2, "b": 3}), sx.named.zeros({"b": 3, "a": 4})]
        >>> sx.named.concatenate(parts, "a").axes
        {'a': 6, 'b': 3}
    """
    operands = _operands(arrays, "concatenate")
    for data, dims in operands:
        if axis is None or axis not in dims:
            raise NamedAxesError(
                f"concatenate along {axis!r} was given an array with axes "
                f"{shown(dims, data.shape)}. Every array needs it; stack makes a new axis."
            )
    lengths = [data.shape[dims.index(axis)] for data, dims in operands]
    datas, dims = _expanded(operands, axis)
    place = dims.index(axis)
    shape = _common_shape(datas, place)
    full = [
        _repeated(data, (*shape[:place], length, *shape[place + 1 :]))
        for data, length in zip(datas, lengths, strict=True)
    ]
    return NamedArray._make(jnp.concatenate(full, axis=place), dims)


def stack(arrays: Sequence[Any], axis: Any) -> NamedArray:
    """Puts arrays beside each other along a new axis, which is stored first.

    Args:
        arrays: Named arrays, or numbers; one that lacks a name is repeated along it.
        axis: The new name.

    Raises:
        NamedAxesError: If an axis has two sizes.
        AxisNamesError: If an array has the new axis already.

    Example:
        >>> import shardax as sx
        >>> sx.named.stack([sx.named.ones({"a": 2}), sx.named.zeros({"a": 2})], "part").axes
        {'part': 2, 'a': 2}
    """
    datas, dims = align(_operands(arrays, "stack"))
    shape = np.broadcast_shapes(*(data.shape for data in datas))
    full = [_repeated(data, shape) for data in datas]
    return NamedArray._make(jnp.stack(full), check_dims((axis, *dims)))


def unstack(array: NamedArray, axis: Any) -> tuple[NamedArray, ...]:
    """Returns the slices along an axis; the inverse of ``stack``.

    Args:
        array: A named array.
        axis: The name of one of its axes.

    Raises:
        NamedAxesError: If it has no such axis.

    Example:
        >>> import shardax as sx
        >>> [part.item() for part in sx.named.unstack(sx.named.arange({"a": 3}), "a")]
        [0, 1, 2]
    """
    array = as_named(array, "unstack")
    data, dims = array._parts()
    place = array._place(axis)
    rest = (*dims[:place], *dims[place + 1 :])
    return tuple(NamedArray._make(part, rest) for part in jnp.unstack(data, axis=place))


def split(array: NamedArray, axis: Any, sizes: int | Sequence[int]) -> tuple[NamedArray, ...]:
    """Cuts an array into parts along an axis; the inverse of ``concatenate``.

    Args:
        array: A named array.
        axis: The name of one of its axes.
        sizes: The size of each part, which together are that of the axis; or a number of equal
            parts.

    Raises:
        NamedAxesError: If it has no such axis, or the sizes do not add up.

    Example:
        >>> import shardax as sx
        >>> head, tail = sx.named.split(sx.named.arange({"a": 5}), "a", [2, 3])
        >>> head.axes, tail.unwrap("a").tolist()
        ({'a': 2}, [2, 3, 4])
    """
    array = as_named(array, "split")
    data, dims = array._parts()
    place = array._place(axis)
    whole = data.shape[place]
    if isinstance(sizes, int):
        parts = sizes
        sizes = (whole // parts,) * parts if parts > 0 else ()
    if sum(sizes) != whole or any(size < 0 for size in sizes):
        raise NamedAxesError(
            f"The axis {axis!r} has size {whole}, which the parts {tuple(sizes)} are not. Give "
            f"sizes that add up, or a number of parts that divides it."
        )
    return tuple(
        NamedArray._make(part, dims) for part in jax.lax.split(data, tuple(sizes), axis=place)
    )


def where(condition: Any, x: Any, y: Any) -> NamedArray:
    """Takes elements of ``x`` where a condition is true, and of ``y`` elsewhere.

    Args:
        condition: Booleans, a named array.
        x: A named array or a number.
        y: Likewise.

    Returns:
        An array with all their names.

    Raises:
        NamedAxesError: If a name has two sizes.

    Example:
        >>> import shardax as sx
        >>> x = sx.named.arange({"a": 4})
        >>> sx.named.where(x % 2 == 0, x, -1).unwrap("a").tolist()
        [0, -1, 2, -1]
    """
    first = next((each for each in (x, y, condition) if isinstance(each, NamedArray)), None)
    if first is None:
        raise NamedAxesError(
            "named.where chooses between named arrays, but none was given; for plain ones there "
            "is jnp.where."
        )
    beside = Operand(*first._parts())
    found = [operand_of(each, beside) for each in (x, y, condition)]
    for each, given in zip(found, (x, y, condition), strict=True):
        if each is NotImplemented:
            raise NamedAxesError(f"named.where takes arrays and numbers, but was given {given!r}.")
    datas, dims = align([each for each in found if isinstance(each, Operand)])
    expanded = iter(datas)
    chosen, other, mask = (next(expanded) if isinstance(e, Operand) else e for e in found)
    return NamedArray._make(jnp.where(mask, chosen, other), dims)


def _operands(arrays: Sequence[Any], function: str) -> list[Operand]:
    operands = [
        Operand(jnp.asarray(array), ())
        if isinstance(array, (bool, int, float, complex))
        else Operand(*as_named(array, function)._parts())
        for array in arrays
    ]
    if not operands:
        raise NamedAxesError(f"{function} needs at least one array.")
    return operands


def _expanded(operands: Sequence[Operand], axis: Any) -> tuple[list[Any], Dims]:
    """Aligns arrays whose sizes may differ along one axis."""
    others = []
    for data, dims in operands:
        place = dims.index(axis)
        shape = (*data.shape[:place], *data.shape[place + 1 :])
        struct = jax.ShapeDtypeStruct(shape, data.dtype)
        others.append(Operand(struct, (*dims[:place], *dims[place + 1 :])))
    check_sizes(others)
    dims = functools.reduce(joined, (operand.dims for operand in operands))
    return [expand(operand, dims) for operand in operands], dims


def _common_shape(datas: Sequence[Any], place: int) -> tuple[int, ...]:
    without = [(*data.shape[:place], 1, *data.shape[place + 1 :]) for data in datas]
    return np.broadcast_shapes(*without)


def _repeated(data: Any, shape: tuple[int, ...]) -> Any:
    return data if data.shape == shape else jnp.broadcast_to(data, shape)
