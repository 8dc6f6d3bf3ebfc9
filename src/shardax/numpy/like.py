# SPDX-License-Identifier: Apache-2.0
"""Arrays of the shape and dtype of another one.

The dtype is that of the array; of Python floats it is the default. Without a place the new array is
where the given one is, if that is an array of JAX.
"""

from __future__ import annotations

from typing import Any

import jax

from shardax.numpy.creation import create, has_floats


def zeros_like(
    a: Any,
    dtype: jax.typing.DTypeLike | None = None,
    shape: Any = None,
    *,
    device: Any = None,
    sharding: Any = None,
) -> jax.Array:
    """Returns an array of zeros like another one.

    Args:
        a: An array, a ``jax.ShapeDtypeStruct`` or a number.
        dtype: The dtype; None for that of ``a``, the default of floats for a Python float.
        shape: Another shape; None for that of ``a``.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Raises:
        ModuleError: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> with sx.default_dtype("bfloat16"):
        ...     of_array = sx.numpy.zeros_like(sx.numpy.ones(3, "float16"))
        ...     of_array.dtype.name, sx.numpy.zeros_like(0.5).dtype.name
        ('float16', 'bfloat16')
    """
    return create("zeros_like", (a,), dtype, device, sharding, has_floats(a), shape=shape)


def ones_like(
    a: Any,
    dtype: jax.typing.DTypeLike | None = None,
    shape: Any = None,
    *,
    device: Any = None,
    sharding: Any = None,
) -> jax.Array:
    """Returns an array of ones like another one.

    Args:
        a: As for ``zeros_like``.
        dtype: As for ``zeros_like``.
        shape: As for ``zeros_like``.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.ones_like(sx.numpy.arange(3)).tolist()
        [1, 1, 1]
    """
    return create("ones_like", (a,), dtype, device, sharding, has_floats(a), shape=shape)


def empty_like(
    prototype: Any,
    dtype: jax.typing.DTypeLike | None = None,
    shape: Any = None,
    *,
    device: Any = None,
    sharding: Any = None,
) -> jax.Array:
    """Returns an array of any content like another one.

    Args:
        prototype: As ``a`` of ``zeros_like``.
        dtype: As for ``zeros_like``.
        shape: As for ``zeros_like``.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.empty_like(sx.numpy.eye(2), shape=(2, 5)).shape
        (2, 5)
    """
    floats = has_floats(prototype)
    return create("empty_like", (prototype,), dtype, device, sharding, floats, shape=shape)


def full_like(
    a: Any,
    fill_value: Any,
    dtype: jax.typing.DTypeLike | None = None,
    shape: Any = None,
    *,
    device: Any = None,
    sharding: Any = None,
) -> jax.Array:
    """Returns an array of one value like another one.

    Args:
        a: As for ``zeros_like``.
        fill_value: A number, or an array that is broadcast.
        dtype: As for ``zeros_like``.
        shape: As for ``zeros_like``.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.full_like(sx.numpy.zeros(2), 7).tolist()
        [7.0, 7.0]
    """
    floats = has_floats(a)
    return create("full_like", (a, fill_value), dtype, device, sharding, floats, shape=shape)
