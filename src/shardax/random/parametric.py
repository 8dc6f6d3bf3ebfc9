# SPDX-License-Identifier: Apache-2.0
"""Draws of numbers from distributions with parameters, without a key.

Parameters are arrays that broadcast. Those on the host (numbers, lists, NumPy arrays) are checked;
an array on a device is not waited for.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from shardax._core.init.defaults import float_dtype
from shardax.random.arguments import (
    Device,
    Placement,
    Shape,
    as_operand,
    check_positive,
    nonnegative,
    positive,
    triangle,
)
from shardax.random.programs import draw


def beta(
    a: ArrayLike,
    b: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a beta distribution.

    Args:
        a: First shape parameters, above 0.
        b: Second shape parameters, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If a or b is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> numbers = sx.random.beta(2.0, [1.0, 3.0])
        >>> numbers.shape, bool(((0 <= numbers) & (numbers <= 1)).all())
        ((2,), True)
    """
    dtype = float_dtype(dtype)
    operands = positive("beta", dtype, a=a, b=b)
    return draw("beta", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def chisquare(
    df: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a chi-squared distribution.

    Args:
        df: Degrees of freedom, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If df is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.chisquare(2.0, 100) >= 0).all())
        True
    """
    dtype = float_dtype(dtype)
    operands = positive("chisquare", dtype, df=df)
    return draw("chisquare", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def double_sided_maxwell(
    loc: ArrayLike,
    scale: ArrayLike,
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a double-sided Maxwell distribution.

    Args:
        loc: Centres.
        scale: Scales, above 0.
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If scale is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.double_sided_maxwell(0.0, 1.0, 3).shape
        (3,)
    """
    dtype = float_dtype(dtype)
    operands = positive("double_sided_maxwell", dtype, scale=scale)
    operands["loc"] = as_operand(loc, dtype)
    return draw(
        "double_sided_maxwell", operands, shape=shape, dtype=dtype, device=device, sharding=sharding
    )


def f(
    dfnum: ArrayLike,
    dfden: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from an F distribution.

    Args:
        dfnum: Degrees of freedom of the numerator, above 0.
        dfden: Degrees of freedom of the denominator, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If dfnum or dfden is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.f(2.0, 5.0, 100) >= 0).all())
        True
    """
    dtype = float_dtype(dtype)
    operands = positive("f", dtype, dfnum=dfnum, dfden=dfden)
    return draw("f", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def gamma(
    a: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a gamma distribution of scale 1.

    Args:
        a: Shape parameters, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If a is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.gamma([1.0, 2.0]).shape
        (2,)
    """
    dtype = float_dtype(dtype)
    operands = positive("gamma", dtype, a=a)
    return draw("gamma", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def generalized_normal(
    p: float,
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a generalized normal distribution.

    Args:
        p: The exponent: 2 is nearly a normal distribution, 1 one of Laplace.
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If p is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.generalized_normal(1.5, (2, 3)).shape
        (2, 3)
    """
    dtype = float_dtype(dtype)
    check_positive("generalized_normal", p=np.asarray(p))
    return draw(
        "generalized_normal", shape=shape, dtype=dtype, p=float(p), device=device, sharding=sharding
    )


def loggamma(
    a: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws logarithms of numbers from a gamma distribution of scale 1.

    Args:
        a: Shape parameters, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If a is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.loggamma(1e-3, 4).shape
        (4,)
    """
    dtype = float_dtype(dtype)
    operands = positive("loggamma", dtype, a=a)
    return draw("loggamma", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def lognormal(
    sigma: ArrayLike = 1.0,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers whose logarithm is normally distributed around 0.

    Args:
        sigma: Standard deviations of the logarithm, at least 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If sigma is below 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.lognormal(0.5, 100) > 0).all())
        True
    """
    dtype = float_dtype(dtype)
    operands = nonnegative("lognormal", dtype, sigma=sigma)
    return draw("lognormal", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def pareto(
    b: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a Pareto distribution of scale 1.

    Args:
        b: Shape parameters, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If b is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.pareto(3.0, 100) >= 1).all())
        True
    """
    dtype = float_dtype(dtype)
    operands = positive("pareto", dtype, b=b)
    return draw("pareto", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def rayleigh(
    scale: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a Rayleigh distribution.

    Args:
        scale: Scales, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If scale is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.rayleigh(1.0, 100) >= 0).all())
        True
    """
    dtype = float_dtype(dtype)
    operands = positive("rayleigh", dtype, scale=scale)
    return draw("rayleigh", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def t(
    df: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from Student's t distribution.

    Args:
        df: Degrees of freedom, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If df is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.t(3.0, (2, 2)).shape
        (2, 2)
    """
    dtype = float_dtype(dtype)
    operands = positive("t", dtype, df=df)
    return draw("t", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def triangular(
    left: ArrayLike,
    mode: ArrayLike,
    right: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a triangular distribution.

    Args:
        left: Lower ends.
        mode: Where the distribution is highest, between the ends.
        right: Upper ends.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If the three are not in order, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> numbers = sx.random.triangular(0.0, 1.0, 3.0, 100)
        >>> bool(((0 <= numbers) & (numbers <= 3)).all())
        True
    """
    dtype = float_dtype(dtype)
    operands = triangle(left, mode, right, dtype)
    return draw("triangular", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def wald(
    mean: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a Wald distribution of scale 1.

    Args:
        mean: Means, above 0.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If mean is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.wald(1.0, 100) >= 0).all())
        True
    """
    dtype = float_dtype(dtype)
    operands = positive("wald", dtype, mean=mean)
    return draw("wald", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def weibull_min(
    scale: ArrayLike,
    concentration: ArrayLike,
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from a Weibull distribution.

    Args:
        scale: Scales, above 0.
        concentration: Shape parameters, above 0.
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If scale or concentration is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((sx.random.weibull_min(1.0, 2.0, 100) >= 0).all())
        True
    """
    dtype = float_dtype(dtype)
    operands = positive("weibull_min", dtype, scale=scale, concentration=concentration)
    return draw("weibull_min", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)
