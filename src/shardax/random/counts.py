# SPDX-License-Identifier: Apache-2.0
"""Draws of counts and signs from discrete distributions, without a key.

As in ``jax.random``, a count has a floating dtype where the distribution is computed in floats.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from shardax._core.init.defaults import exact_dtype, float_dtype
from shardax.random.arguments import (
    Device,
    Placement,
    Shape,
    check_positive,
    nonnegative,
    probabilities,
)
from shardax.random.programs import draw


def binomial(
    n: ArrayLike,
    p: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers of successes from a binomial distribution.

    Args:
        n: Numbers of trials, at least 0.
        p: Probabilities of success.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If n is below 0, or p is no probability, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.binomial(5, [0.0, 1.0]).tolist()
        [0.0, 5.0]
    """
    dtype = float_dtype(dtype)
    operands = nonnegative("binomial", dtype, n=n)
    operands["p"] = probabilities("binomial", p)
    return draw("binomial", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def geometric(
    p: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike = int,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers of trials up to the first success.

    Args:
        p: Probabilities of success, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: An integer dtype; ``int`` for JAX's default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If p is not above 0, or p is no probability, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.geometric([1.0, 1.0]).tolist()
        [1, 1]
    """
    dtype = exact_dtype(dtype)
    operands = {"p": probabilities("geometric", p)}
    check_positive("geometric", **operands)
    return draw("geometric", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def multinomial(
    n: ArrayLike,
    p: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers of outcomes from a multinomial distribution.

    Args:
        n: Numbers of trials, at least 0.
        p: Probabilities of the outcomes, along the last dimension.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If n is below 0, or p is no probability, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> float(sx.random.multinomial(10, [0.2, 0.3, 0.5]).sum())
        10.0
    """
    dtype = float_dtype(dtype)
    operands = nonnegative("multinomial", dtype, n=n)
    operands["p"] = probabilities("multinomial", p)
    return draw("multinomial", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def poisson(
    lam: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike = int,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a Poisson distribution.

    Args:
        lam: Means, at least 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: An integer dtype; ``int`` for JAX's default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If lam is below 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.poisson(0.0, 3).tolist()
        [0, 0, 0]
    """
    dtype = exact_dtype(dtype)
    operands = nonnegative("poisson", np.float32, lam=lam)
    return draw("poisson", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def rademacher(
    shape: Shape = (), dtype: DTypeLike = int, *, device: Device = None, sharding: Placement = None
) -> jax.Array:
    """Draws 1 or -1, each with probability 0.5.

    Args:
        shape: An integer or a tuple.
        dtype: An integer dtype; ``int`` for JAX's default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> set(sx.random.rademacher(100).tolist()) == {-1, 1}
        True
    """
    dtype = exact_dtype(dtype)
    return draw("rademacher", shape=shape, dtype=dtype, device=device, sharding=sharding)
