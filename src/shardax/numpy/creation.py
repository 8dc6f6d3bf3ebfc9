# SPDX-License-Identifier: Apache-2.0
"""Creation functions of ``jax.numpy`` with default dtype and device.

Where no dtype is given, a result of Python floats has the default of ``shardax.default_dtype`` or
``configure(dtype=)``; where no device is given, it is on that of ``shardax.default_device`` or
``configure(create_on=)``. Integers, booleans and arrays keep the dtype that ``jax.numpy`` gives
them.

A compiled program would keep the default of its trace, so inside of programs a dtype that is left
to the default is an error.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from shardax._core.errors import ModuleError
from shardax._core.frames import is_eager
from shardax._core.init.defaults import creation_device, exact_dtype, float_dtype
from shardax.random.arguments import Device, Placement
from shardax.random.programs import placement


def zeros(
    shape: Any,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns an array of zeros.

    Args:
        shape: An integer or a tuple.
        dtype: The dtype; None for the default of floats.
        device: A ``jax.Device``, its name such as ``"cpu:1"``, or a ``Sharding``.
        sharding: A ``Sharding``, or a ``PartitionSpec`` over the mesh in scope.

    Returns:
        The array; without a place it may be used together with arrays on other devices.

    Raises:
        ModuleError: If the dtype has 64 bits while JAX uses 32, or is left out inside a program; if
            there is no such device.

    Example:
        >>> import shardax as sx
        >>> with sx.default_dtype("bfloat16"):
        ...     sx.numpy.zeros((2, 3)).dtype.name, sx.numpy.arange(3).dtype.name
        ('bfloat16', 'int32')
    """
    return create("zeros", (shape,), dtype, device, sharding)


def ones(
    shape: Any,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns an array of ones.

    Args:
        shape: An integer or a tuple.
        dtype: The dtype; None for the default of floats.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.ones(2).tolist()
        [1.0, 1.0]
    """
    return create("ones", (shape,), dtype, device, sharding)


def empty(
    shape: Any,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns an array of any content.

    Args:
        shape: An integer or a tuple.
        dtype: The dtype; None for the default of floats.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.empty((2, 3)).shape
        (2, 3)
    """
    return create("empty", (shape,), dtype, device, sharding)


def full(
    shape: Any,
    fill_value: Any,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns an array of one value.

    Args:
        shape: An integer or a tuple.
        fill_value: A number, or an array that is broadcast.
        dtype: The dtype; None for that of the value, the default of floats for a Python float.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.full(2, 7).dtype.name, sx.numpy.full(2, 0.5).dtype.name
        ('int32', 'float32')
    """
    return create("full", (shape, fill_value), dtype, device, sharding, has_floats(fill_value))


def eye(
    rows: int,
    columns: int | None = None,
    k: int = 0,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns a matrix with ones on a diagonal.

    Args:
        rows: Number of rows.
        columns: Number of columns; None for as many.
        k: Which diagonal; above the main one if positive.
        dtype: The dtype; None for the default of floats.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.eye(2).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    return create("eye", (rows, columns, k), dtype, device, sharding)


def identity(
    n: int,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns an identity matrix.

    Args:
        n: Number of rows and columns.
        dtype: The dtype; None for the default of floats.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> float(sx.numpy.identity(3).sum())
        3.0
    """
    return create("eye", (n,), dtype, device, sharding)


def arange(
    start: Any,
    stop: Any = None,
    step: Any = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns numbers in equal steps.

    Args:
        start: The first number; the end, if it is the only argument.
        stop: The end, which is left out.
        step: From each number to the next; None for 1.
        dtype: The dtype; None for that of the numbers, the default of floats for Python floats.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.arange(1.0, 2.0, 0.5).tolist()
        [1.0, 1.5]
    """
    numbers = (start, stop, step)
    return create("arange", numbers, dtype, device, sharding, has_floats(numbers))


def linspace(
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
    """Returns evenly spaced numbers.

    Args:
        start: The first number, or an array of such.
        stop: The last, or the end if ``endpoint`` is False.
        num: How many.
        endpoint: Whether ``stop`` is one of them.
        dtype: The dtype; None for that of the arrays given, the default of floats for numbers.
        axis: Of the result, where the numbers are along.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.linspace(0, 1, 3).tolist()
        [0.0, 0.5, 1.0]
    """
    arguments, floats = (start, stop, num, endpoint), has_floats((start, stop, 1.0))
    return create("linspace", arguments, dtype, device, sharding, floats, axis=axis)


def array(
    value: Any,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    copy: bool = True,
    ndmin: int = 0,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns an array of numbers, lists or arrays.

    Args:
        value: A number, nested lists or an array.
        dtype: The dtype; None for that of the value, the default of floats for Python floats.
        copy: Whether an array is copied.
        ndmin: Dimensions at least.
        device: As for ``zeros``; without one a JAX array stays where it is.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> with sx.default_dtype("float16"):
        ...     sx.numpy.array([1.0, 2.0]).dtype.name, sx.numpy.array([1, 2]).dtype.name
        ('float16', 'int32')
    """
    options = {"copy": copy, "ndmin": ndmin}
    return create("array", (value,), dtype, device, sharding, has_floats(value), **options)


def asarray(
    value: Any,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: Device | Sharding = None,
    sharding: Placement = None,
) -> jax.Array:
    """Returns a value as an array, not copied if it is one.

    Args:
        value: A number, nested lists or an array.
        dtype: The dtype; None for that of the value, the default of floats for Python floats.
        device: As for ``zeros``; without one a JAX array stays where it is.
        sharding: As for ``zeros``.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.asarray(0.5).dtype.name
        'float32'
    """
    return create("asarray", (value,), dtype, device, sharding, has_floats(value))


# The others JAX makes whole first.
_INTO_SHARDS = (
    "zeros",
    "ones",
    "empty",
    "full",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
)


def has_floats(value: object) -> bool:
    """Whether a value of Python numbers makes an array of floats."""
    leaves = jax.tree.leaves(value)
    numbers = all(type(leaf) in (bool, int, float) for leaf in leaves)
    return numbers and (not leaves or float in map(type, leaves))


def resolved_dtype(name: str, dtype: jax.typing.DTypeLike | None, floats: bool = True) -> Any:
    """Returns a dtype that was given, or the default of floats; None to leave it to JAX."""
    if dtype is not None:
        return exact_dtype(dtype)
    if not floats:
        return None
    if not is_eager():
        raise ModuleError(
            f"shardax.numpy.{name} was called inside a program, which would keep the default dtype "
            f"of its trace. Give it: {name}(..., dtype=...); or use jax.numpy.{name}."
        )
    return float_dtype()


def create(
    name: str,
    arguments: tuple[object, ...],
    dtype: jax.typing.DTypeLike | None,
    device: Device | Sharding,
    sharding: Placement,
    floats: bool = True,
    **options: object,
) -> jax.Array:
    """Calls a function of ``jax.numpy`` with the defaults."""
    place = placement(f"shardax.numpy.{name}", device, sharding, ModuleError)
    dtype = resolved_dtype(name, dtype, floats)
    function = getattr(jnp, name)
    if place is None:
        with creation_device() if is_eager() else contextlib.nullcontext():
            return function(*arguments, dtype=dtype, **options)
    if name in _INTO_SHARDS:
        return function(*arguments, dtype=dtype, device=place, **options)
    return jax.device_put(function(*arguments, dtype=dtype, **options), place)
