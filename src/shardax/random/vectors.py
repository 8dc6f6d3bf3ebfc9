# SPDX-License-Identifier: Apache-2.0
"""Draws of vectors and matrices, without a key.

The result has the shape that is asked for and then the dimensions of one vector or matrix.
"""

from __future__ import annotations

from typing import Literal

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from shardax._core.init.defaults import float_dtype
from shardax.random.arguments import Device, Placement, Shape, as_operand, check_positive, positive
from shardax.random.programs import draw


def ball(
    d: int,
    p: float = 2.0,
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws points uniformly from the unit ball of an lp norm.

    Args:
        d: Number of dimensions of the ball.
        p: Which norm: 2 is the Euclidean one.
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        ``[*shape, d]``.

    Raises:
        DrawError: If d or p is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> bool((jnp.linalg.norm(sx.random.ball(3, shape=50), axis=1) <= 1).all())
        True
    """
    dtype = float_dtype(dtype)
    check_positive("ball", d=np.asarray(d), p=np.asarray(p))
    return draw(
        "ball", shape=shape, dtype=dtype, d=int(d), p=float(p), device=device, sharding=sharding
    )


def dirichlet(
    alpha: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws points from a Dirichlet distribution.

    Args:
        alpha: Concentrations, above 0; the last dimension is that of a point.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        ``[*shape, alpha.shape[-1]]``.

    Raises:
        DrawError: If alpha is not above 0, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sx.random.dirichlet([1.0, 2.0, 3.0], 4).sum(-1).round(3).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    dtype = float_dtype(dtype)
    operands = positive("dirichlet", dtype, alpha=alpha)
    return draw("dirichlet", operands, shape=shape, dtype=dtype, device=device, sharding=sharding)


def multivariate_normal(
    mean: ArrayLike,
    cov: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    method: Literal["cholesky", "eigh", "svd"] = "cholesky",
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws points from a normal distribution with a covariance.

    Args:
        mean: Means, along the last dimension.
        cov: Covariances, positive definite matrices.
        shape: An integer or a tuple; None for that of the arguments.
        dtype: A floating dtype; None for the default.
        method: How the covariance is factored: ``"cholesky"``, ``"eigh"`` or ``"svd"``.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        ``[*shape, mean.shape[-1]]``.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import numpy as np, shardax as sx
        >>> sx.random.multivariate_normal(np.zeros(2), np.eye(2), 5).shape
        (5, 2)
    """
    dtype = float_dtype(dtype)
    operands = {"mean": as_operand(mean, dtype), "cov": as_operand(cov, dtype)}
    return draw(
        "multivariate_normal",
        operands,
        shape=shape,
        dtype=dtype,
        method=method,
        device=device,
        sharding=sharding,
    )


def orthogonal(
    n: int,
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    m: int | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws orthogonal matrices uniformly.

    Args:
        n: Number of rows.
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        m: Number of columns; None for as many as rows.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        ``[*shape, n, m]``.

    Raises:
        DrawError: While a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> matrix = sx.random.orthogonal(3)
        >>> bool(jnp.allclose(matrix @ matrix.T, jnp.eye(3), atol=1e-5))
        True
    """
    dtype = float_dtype(dtype)
    return draw(
        "orthogonal", shape=shape, dtype=dtype, n=int(n), m=m, device=device, sharding=sharding
    )
