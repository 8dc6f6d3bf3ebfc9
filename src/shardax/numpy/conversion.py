# SPDX-License-Identifier: Apache-2.0
"""Arrays made of other arrays, of bytes and of text."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.frames import is_eager
from shardax._core.init.defaults import creation_device
from shardax.numpy.creation import asarray, resolved_dtype


def astype(
    x: Any,
    dtype: jax.typing.DTypeLike | None,
    /,
    *,
    copy: bool = False,
    device: Any = None,
    sharding: Any = None,
) -> jax.Array:
    """Returns an array in another dtype.

    Args:
        x: An array or a number.
        dtype: The dtype; None for the default of floats.
        copy: Whether an array that has it already is copied.
        device: As for ``zeros``; without one a JAX array stays where it is.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import shardax as sx
        >>> with sx.default_dtype("bfloat16"):
        ...     sx.numpy.astype(sx.numpy.arange(3), None).dtype.name
        'bfloat16'
    """
    made = resolved_dtype("astype", dtype)
    with creation_device() if is_eager() else contextlib.nullcontext():
        converted = jnp.astype(jnp.asarray(x), made, copy=copy)
    return asarray(converted, device=device, sharding=sharding)


def from_dlpack(
    x: Any, /, *, copy: bool | None = None, device: Any = None, sharding: Any = None
) -> jax.Array:
    """Returns an array of another library, by the protocol of DLPack.

    Args:
        x: An array with ``__dlpack__``.
        copy: As for ``jax.numpy.from_dlpack``.
        device: As for ``zeros``; without one it stays where it is.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import numpy as np, shardax as sx
        >>> sx.numpy.from_dlpack(np.arange(3, dtype=np.int32)).tolist()
        [0, 1, 2]
    """
    return asarray(jnp.from_dlpack(x, copy=copy), device=device, sharding=sharding)


def frombuffer(
    buffer: Any,
    dtype: Any = float,
    count: int = -1,
    offset: int = 0,
    *,
    device: Any = None,
    sharding: Any = None,
) -> jax.Array:
    """Returns the numbers that bytes hold.

    Args:
        buffer: Bytes, or what gives such by the buffer protocol.
        dtype: How the bytes are read, as by NumPy; so the default of floats plays no part.
        count: How many numbers; -1 for all.
        offset: Bytes before the first.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array, in 32 bits where JAX has no more.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.frombuffer(b"abc", "uint8", offset=1).tolist()
        [98, 99]
    """
    numbers = np.frombuffer(buffer, dtype, count, offset)
    of_jax = jax.dtypes.canonicalize_dtype(numbers.dtype)
    return asarray(numbers.astype(of_jax), device=device, sharding=sharding)


def fromstring(
    string: str,
    dtype: jax.typing.DTypeLike | None = None,
    count: int = -1,
    *,
    sep: str,
    device: Any = None,
    sharding: Any = None,
) -> jax.Array:
    """Returns the numbers that stand in a text.

    Args:
        string: The text.
        dtype: The dtype; None for the default of floats.
        count: How many numbers; -1 for all.
        sep: What stands between them.
        device: As for ``zeros``.
        sharding: As for ``zeros``.

    Returns:
        The array.

    Example:
        >>> import shardax as sx
        >>> sx.numpy.fromstring("1, 2, 3", sep=",").tolist()
        [1.0, 2.0, 3.0]
    """
    made = resolved_dtype("fromstring", dtype)

    # NumPy reads no text as bfloat16.
    read_as = np.float64 if jnp.issubdtype(made, jnp.floating) else made
    numbers = np.fromstring(string, read_as, count, sep=sep)
    return asarray(numbers.astype(made), device=device, sharding=sharding)
