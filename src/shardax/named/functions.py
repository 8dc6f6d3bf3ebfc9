# SPDX-License-Identifier: Apache-2.0
"""Functions along names that layers are made of: sums of products, and softmax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from shardax.core.dtypes import cast_all
from shardax.core.errors import NamedAxesError
from shardax.named.align import Operand, check_sizes, listing
from shardax.named.array import NamedArray, as_named
from shardax.named.names import Dims, positional_places
from shardax.named.reductions import place_of
from shardax.partition.explicit import joined_sharding


def dot(x: NamedArray, y: NamedArray, axes: Any, *, dtype: Any = None) -> NamedArray:
    """Sums products of two arrays over names; other names that both have go together.

    It is ``(x * y).sum(axes)`` as one contraction.

    Args:
        x: A named array.
        y: Another; one of the two may have positional dimensions.
        axes: The name, or an iterable of names, to sum over; both arrays have them.
        dtype: Dtype of the sums and of the result; None for that of the products.

    Returns:
        Stored as: the names that go together, then what else ``x`` has, then what else ``y`` has.
        Over Explicit mesh axes these keep their layouts.

    Raises:
        NamedAxesError: If one is no named array or lacks a name, a name has two sizes, or both have
            positional dimensions.

    Example:
        >>> import shardax as sx
        >>> x = sx.named.ones({"batch": 2, "time": 3, "embed": 4})
        >>> w = sx.named.ones({"embed": 4, "mlp": 5})
        >>> sx.named.dot(x, w, "embed").axes
        {'batch': 2, 'time': 3, 'mlp': 5}
    """
    first, second = (Operand(*as_named(each, "dot")._parts()) for each in (x, y))
    names = _names(axes, first.dims, second.dims)
    check_sizes((first, second))
    if positional_places(first.dims) and positional_places(second.dims):
        raise NamedAxesError(
            f"dot cannot tell which positional dimensions belong together: "
            f"{listing((first, second))}. Name those of one array, x.tag(...)."
        )
    joint = [
        name
        for name in first.dims
        if name is not None and name in second.dims and name not in names
    ]
    free = [
        [place for place, name in enumerate(dims) if name not in (*names, *joint)]
        for dims in (first.dims, second.dims)
    ]
    left, right = cast_all(None, first.data, second.data)
    batch = tuple(map(first.dims.index, joint))
    data = jax.lax.dot_general(
        left,
        right,
        (
            (tuple(map(first.dims.index, names)), tuple(map(second.dims.index, names))),
            (batch, tuple(map(second.dims.index, joint))),
        ),
        preferred_element_type=left.dtype if dtype is None else dtype,
        out_sharding=joined_sharding(((left, (*batch, *free[0])), (right, free[1]))),
    )
    kept = (first.dims[place] for place in free[0]), (second.dims[place] for place in free[1])
    return NamedArray._make(data, (*joint, *kept[0], *kept[1]))


def _names(axes: Any, *dims: Dims) -> tuple[Any, ...]:
    single = isinstance(axes, str) or not isinstance(axes, Iterable) or _is_name(axes, dims)
    names = (axes,) if single else tuple(axes)
    for each in dims:
        for name in names:
            if name is None or name not in each:
                raise NamedAxesError(
                    f"dot sums over {', '.join(map(repr, names))}, which both arrays need; one "
                    f"has the dims {each}."
                )
    return names


def _is_name(axes: Any, dims: tuple[Dims, ...]) -> bool:
    return isinstance(axes, tuple) and any(axes in each for each in dims)


def softmax(x: NamedArray, axis: Any) -> NamedArray:
    """Returns exponentials along an axis, divided by their sum.

    Args:
        x: A named array.
        axis: A name, or the number of a positional dimension.

    Returns:
        The same axes.

    Raises:
        NamedAxesError: If there is no such axis.

    Example:
        >>> import shardax as sx
        >>> sx.named.softmax(sx.named.zeros({"a": 4}), "a").unwrap("a").tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    data, dims = as_named(x, "softmax")._parts()
    return NamedArray._make(jax.nn.softmax(data, axis=place_of(dims, axis)), dims)
