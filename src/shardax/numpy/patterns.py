# SPDX-License-Identifier: Apache-2.0
"""Arrays whose numbers follow from their positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from shardax.numpy.creation import create, has_floats
from shardax.random.arguments import Device, Placement


def logspace(
    start: object,
    stop: object,
    num: int = 50,
    endpoint: bool = True,
    base: object = 10.0,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    axis: int = 0,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns numbers evenly spaced on a logarithmic scale.

    Args:
        start: The exponent of the first number, or an array of such.
        stop: That of the last, or of the end if ``endpoint`` is False.
        num: How many.
        endpoint: Whether ``stop`` is one of them.
        base: What is raised to these powers.
        dtype: The dtype; None for that of the arrays given, the default of floats for numbers.
        axis: Of the result, where the numbers are along.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.logspace(0, 3, 4, base=2).tolist()
        [1.0, 2.0, 4.0, 8.0]
    """
    arguments, floats = (start, stop, num, endpoint, base), has_floats((start, stop, 1.0))
    return create("logspace", arguments, dtype, device, sharding, floats, axis=axis)


def geomspace(
    start: object,
    stop: object,
    num: int = 50,
    endpoint: bool = True,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    axis: int = 0,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns numbers, each the same multiple of the one before.

    Args:
        start: The first number, or an array of such.
        stop: The last, or the end if ``endpoint`` is False.
        num: How many.
        endpoint: Whether ``stop`` is one of them.
        dtype: The dtype; None for that of the arrays given, the default of floats for numbers.
        axis: Of the result, where the numbers are along.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.geomspace(1, 8, 4).round(3).tolist()
        [1.0, 2.0, 4.0, 8.0]
    """
    arguments, floats = (start, stop, num, endpoint), has_floats((start, stop, 1.0))
    return create("geomspace", arguments, dtype, device, sharding, floats, axis=axis)


def tri(
    rows: int,
    columns: int | None = None,
    k: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns a matrix with ones on a diagonal and below it.

    Args:
        rows: Number of rows.
        columns: Number of columns; None for as many.
        k: Which diagonal; above the main one if positive.
        dtype: The dtype; None for the default of floats.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.tri(2, 3).tolist()
        [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    return create("tri", (rows, columns, k), dtype, device, sharding)


def indices(
    dimensions: Sequence[int],
    dtype: jax.typing.DTypeLike | None = None,
    sparse: bool = False,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> Any:
    """Returns the positions in an array along each dimension.

    Args:
        dimensions: The shape of the array.
        dtype: The dtype; None for JAX's integers.
        sparse: Whether each dimension has an array of its own, to be broadcast.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        ``[len(dimensions), *dimensions]``, or with ``sparse`` a tuple of arrays.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.indices((2, 2)).tolist()
        [[[0, 0], [1, 1]], [[0, 1], [0, 1]]]
    """
    return create("indices", (dimensions,), dtype, device, sharding, False, sparse=sparse)


def fromfunction(
    function: Callable[..., Any],
    shape: Sequence[int],
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
    **kwargs: Any,
) -> Any:
    """Returns what a function makes of the positions in an array.

    Args:
        function: Called with one number per dimension, mapped over all positions.
        shape: The shape of the array.
        dtype: That of the positions; None for the default of floats.
        device: As for ``zeros``.
        sharding: As for ``zeros``.
        **kwargs: Further arguments of the function.

    Returns:
        The results, ``[*shape, ...]``.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.fromfunction(lambda i, j: 10 * i + j, (2, 3), "int32").tolist()
        [[0, 1, 2], [10, 11, 12]]
    """
    return create("fromfunction", (function, tuple(shape)), dtype, device, sharding, True, **kwargs)
