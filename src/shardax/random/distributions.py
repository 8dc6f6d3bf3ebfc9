# SPDX-License-Identifier: Apache-2.0
"""Draws from further distributions of ``jax.random``, without a key.

As for the other draws, arguments on the host are checked, and each takes ``device`` or
``sharding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shardax._core.init.defaults import exact_dtype, float_dtype
from shardax.random.draws import as_operand, as_probabilities
from shardax.random.stream import DrawError, draw


def _require(
    function: str, values: Mapping[str, Any], kind: str = "above 0", *, zero: bool = False
) -> None:
    """Raises unless numbers on the host are above 0, or with ``zero`` at least 0."""
    for name, value in values.items():
        if isinstance(value, jax.Array):
            continue
        fits = value >= 0 if zero else value > 0
        if not np.all(fits):
            raise DrawError(
                f"shardax.random.{function} was given {name}={value}. Give a number {kind}."
            )


def ball(
    d: int,
    p: float = 2.0,
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    _require("ball", {"d": np.asarray(d), "p": np.asarray(p)})
    return draw(
        "ball", device=device, sharding=sharding, shape=shape, dtype=dtype, d=int(d), p=float(p)
    )


def beta(
    a: object,
    b: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"a": as_operand(a, dtype), "b": as_operand(b, dtype)}
    _require("beta", operands)
    return draw("beta", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def binomial(
    n: object,
    p: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"n": as_operand(n, dtype), "p": as_probabilities("binomial", p)}
    _require("binomial", {"n": operands["n"]}, "of at least 0", zero=True)
    return draw("binomial", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def cauchy(
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("cauchy", device=device, sharding=sharding, shape=shape, dtype=dtype)


def chisquare(
    df: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"df": as_operand(df, dtype)}
    _require("chisquare", operands)
    return draw("chisquare", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def dirichlet(
    alpha: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"alpha": as_operand(alpha, dtype)}
    _require("dirichlet", operands)
    return draw("dirichlet", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def double_sided_maxwell(
    loc: object,
    scale: object,
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"loc": as_operand(loc, dtype), "scale": as_operand(scale, dtype)}
    _require("double_sided_maxwell", {"scale": operands["scale"]})
    return draw(
        "double_sided_maxwell", operands, device=device, sharding=sharding, shape=shape, dtype=dtype
    )


def exponential(
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("exponential", device=device, sharding=sharding, shape=shape, dtype=dtype)


def f(
    dfnum: object,
    dfden: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"dfnum": as_operand(dfnum, dtype), "dfden": as_operand(dfden, dtype)}
    _require("f", operands)
    return draw("f", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def gamma(
    a: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"a": as_operand(a, dtype)}
    _require("gamma", operands)
    return draw("gamma", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def generalized_normal(
    p: float,
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    _require("generalized_normal", {"p": np.asarray(p)})
    return draw(
        "generalized_normal", device=device, sharding=sharding, shape=shape, dtype=dtype, p=float(p)
    )


def geometric(
    p: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike = int,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"p": as_probabilities("geometric", p)}
    _require("geometric", operands)
    return draw("geometric", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def gumbel(
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("gumbel", device=device, sharding=sharding, shape=shape, dtype=dtype)


def laplace(
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("laplace", device=device, sharding=sharding, shape=shape, dtype=dtype)


def loggamma(
    a: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"a": as_operand(a, dtype)}
    _require("loggamma", operands)
    return draw("loggamma", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def logistic(
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("logistic", device=device, sharding=sharding, shape=shape, dtype=dtype)


def lognormal(
    sigma: object = 1.0,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"sigma": as_operand(sigma, dtype)}
    _require("lognormal", {"sigma": operands["sigma"]}, "of at least 0", zero=True)
    return draw("lognormal", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def maxwell(
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("maxwell", device=device, sharding=sharding, shape=shape, dtype=dtype)


def multinomial(
    n: object,
    p: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"n": as_operand(n, dtype), "p": as_probabilities("multinomial", p)}
    _require("multinomial", {"n": operands["n"]}, "of at least 0", zero=True)
    return draw("multinomial", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def multivariate_normal(
    mean: object,
    cov: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    method: str = "cholesky",
    *,
    device: object = None,
    sharding: object = None,
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
        device=device,
        sharding=sharding,
        shape=shape,
        dtype=dtype,
        method=method,
    )


def orthogonal(
    n: int,
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    m: int | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
        "orthogonal", device=device, sharding=sharding, shape=shape, dtype=dtype, n=int(n), m=m
    )


def pareto(
    b: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"b": as_operand(b, dtype)}
    _require("pareto", operands)
    return draw("pareto", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def poisson(
    lam: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike = int,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"lam": as_operand(lam, np.float32)}
    _require("poisson", {"lam": operands["lam"]}, "of at least 0", zero=True)
    return draw("poisson", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def rademacher(
    shape: object = (),
    dtype: jax.typing.DTypeLike = int,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("rademacher", device=device, sharding=sharding, shape=shape, dtype=dtype)


def rayleigh(
    scale: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"scale": as_operand(scale, dtype)}
    _require("rayleigh", operands)
    return draw("rayleigh", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def t(
    df: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"df": as_operand(df, dtype)}
    _require("t", operands)
    return draw("t", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def triangular(
    left: object,
    mode: object,
    right: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {
        "left": as_operand(left, dtype),
        "mode": as_operand(mode, dtype),
        "right": as_operand(right, dtype),
    }
    _require_order(operands)
    return draw("triangular", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def wald(
    mean: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {"mean": as_operand(mean, dtype)}
    _require("wald", operands)
    return draw("wald", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def weibull_min(
    scale: object,
    concentration: object,
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    operands = {
        "scale": as_operand(scale, dtype),
        "concentration": as_operand(concentration, dtype),
    }
    _require("weibull_min", operands)
    return draw("weibull_min", operands, device=device, sharding=sharding, shape=shape, dtype=dtype)


def _require_order(ends: Mapping[str, Any]) -> None:
    """Raises unless the numbers of a triangle that are on the host are in order."""
    left, mode, right = (ends[name] for name in ("left", "mode", "right"))
    if any(isinstance(end, jax.Array) for end in (left, mode, right)):
        return
    if not np.all((left <= mode) & (mode <= right) & (left < right)):
        raise DrawError(
            f"shardax.random.triangular was given left={left}, mode={mode} and right={right}. "
            "Give left <= mode <= right, and left < right."
        )
