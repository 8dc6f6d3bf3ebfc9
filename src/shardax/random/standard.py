# SPDX-License-Identifier: Apache-2.0
"""Draws of numbers from distributions without parameters, without a key.

Shift and scale them as needed: ``loc + scale * shardax.random.laplace(shape)``. The normal and the
uniform distribution are in ``draws``.
"""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from shardax._core.init.defaults import float_dtype
from shardax.random.arguments import Device, Placement, Shape
from shardax.random.programs import draw


def cauchy(
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from the standard Cauchy distribution.

    Args:
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.cauchy(3).shape
        (3,)
    """
    dtype = float_dtype(dtype)
    return draw("cauchy", shape=shape, dtype=dtype, device=device, sharding=sharding)


def exponential(
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from the exponential distribution of mean 1.

    Args:
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.exponential(100) >= 0).all())
        True
    """
    dtype = float_dtype(dtype)
    return draw("exponential", shape=shape, dtype=dtype, device=device, sharding=sharding)


def gumbel(
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from the standard Gumbel distribution.

    Args:
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.gumbel((2, 3)).shape
        (2, 3)
    """
    dtype = float_dtype(dtype)
    return draw("gumbel", shape=shape, dtype=dtype, device=device, sharding=sharding)


def laplace(
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from the standard Laplace distribution.

    Args:
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.laplace(3).shape
        (3,)
    """
    dtype = float_dtype(dtype)
    return draw("laplace", shape=shape, dtype=dtype, device=device, sharding=sharding)


def logistic(
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from the standard logistic distribution.

    Args:
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.logistic(3).shape
        (3,)
    """
    dtype = float_dtype(dtype)
    return draw("logistic", shape=shape, dtype=dtype, device=device, sharding=sharding)


def maxwell(
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from the one-sided Maxwell distribution of scale 1.

    Args:
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.maxwell(100) >= 0).all())
        True
    """
    dtype = float_dtype(dtype)
    return draw("maxwell", shape=shape, dtype=dtype, device=device, sharding=sharding)
