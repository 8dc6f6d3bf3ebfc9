# SPDX-License-Identifier: Apache-2.0
"""Random draws: the functions of ``jax.random`` without a key.

Each takes the next draw of the global stream (``shardax.random.stream``) and gives the numbers of
the function of the same name in ``jax.random``, of the key that ``key`` would have returned.
Arguments on the host (numbers, lists, NumPy arrays) are checked; an array on a device is not waited
for.

All take ``device``, a ``jax.Device`` or its name such as ``"cpu"``, or ``sharding``, a
``jax.sharding.Sharding`` or a ``PartitionSpec`` over the mesh in scope. The numbers do not depend
on them. Without either the array is on the default device and may be used together with others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from shardax._core.init.defaults import exact_dtype, float_dtype
from shardax.random.arguments import (
    Device,
    Placement,
    Shape,
    as_operand,
    entries,
    finite_interval,
    integer_range,
    open_interval,
    probabilities,
)
from shardax.random.programs import draw


def key() -> jax.Array:
    """Draws a random key, for other functions of ``jax.random``.

    Returns:
        A typed key of shape ().

    Raises:
        DrawError: While a transform is tracing.

    Example:
        >>> import jax, shardax as sx
        >>> sx.random.seed(0)
        >>> bool(sx.random.key() == sx.Rngs(0)())
        True
        >>> jax.random.split(sx.random.key(), 3).shape
        (3,)
    """
    return draw("key")


def bits(
    shape: Shape = (),
    dtype: DTypeLike = jnp.uint32,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws random bits.

    Args:
        shape: An integer or a tuple.
        dtype: An unsigned integer dtype.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> sx.random.bits(4, "uint8").dtype.name
        'uint8'
    """
    dtype = exact_dtype(dtype)
    return draw("bits", shape=shape, dtype=dtype, device=device, sharding=sharding)


def uniform(
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    minval: ArrayLike = 0.0,
    maxval: ArrayLike = 1.0,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers uniformly from ``[minval, maxval)``.

    Args:
        shape: An integer or a tuple.
        dtype: A floating dtype; None for the default.
        minval: Lower bounds, broadcast to ``shape``.
        maxval: Upper bounds, broadcast to ``shape``.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If a lower bound is above its upper bound, or their difference is not finite, or
            while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> numbers = sx.random.uniform((2, 3), minval=-1.0)
        >>> bool(((-1 <= numbers) & (numbers < 1)).all())
        True
    """
    dtype = float_dtype(dtype)
    bounds = finite_interval(minval, maxval, dtype)
    return draw("uniform", bounds, shape=shape, dtype=dtype, device=device, sharding=sharding)


def normal(
    shape: Shape = (),
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from the normal distribution of mean 0 and variance 1.

    Args:
        shape: An integer or a tuple.
        dtype: A floating or complex dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        ModuleError: If the dtype has 64 bits while JAX uses 32.
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> weights = 0.02 * sx.random.normal((4, 8), "bfloat16")
        >>> weights.shape, weights.dtype.name
        ((4, 8), 'bfloat16')
    """
    dtype = float_dtype(dtype)
    return draw("normal", shape=shape, dtype=dtype, device=device, sharding=sharding)


def truncated_normal(
    lower: ArrayLike,
    upper: ArrayLike,
    shape: Shape | None = None,
    dtype: DTypeLike | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws numbers from the normal distribution truncated to an interval.

    Args:
        lower: Lower bounds, in standard deviations.
        upper: Upper bounds, in standard deviations.
        shape: An integer or a tuple; None for that of the bounds.
        dtype: A floating dtype; None for the default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If a lower bound is not below its upper bound, or while a transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> bool((abs(sx.random.truncated_normal(-2, 2, 100)) <= 2).all())
        True
    """
    dtype = float_dtype(dtype)
    bounds = open_interval(lower, upper, dtype)
    return draw(
        "truncated_normal", bounds, shape=shape, dtype=dtype, device=device, sharding=sharding
    )


def randint(
    shape: Shape,
    minval: ArrayLike,
    maxval: ArrayLike,
    dtype: DTypeLike = int,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws integers from ``minval`` to ``maxval - 1``.

    Args:
        shape: An integer or a tuple.
        minval: Lowest integers, broadcast to ``shape``.
        maxval: One above the highest, broadcast to ``shape``.
        dtype: An integer dtype; ``int`` for JAX's default.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array of ``shape`` and dtype.

    Raises:
        DrawError: If there is no integer in a range, or a bound does not fit the dtype, or while a
            transform is tracing.
        ModuleError: If the dtype has 64 bits while JAX uses 32.

    Example:
        >>> import shardax as sx
        >>> sorted(set(sx.random.randint(100, 1, 7).tolist()))
        [1, 2, 3, 4, 5, 6]
    """
    dtype = exact_dtype(dtype)
    bounds = integer_range(minval, maxval, dtype)
    return draw("randint", bounds, shape=shape, dtype=dtype, device=device, sharding=sharding)


def bernoulli(
    p: ArrayLike = 0.5,
    shape: Shape | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws True with probability ``p``, else False.

    Args:
        p: Probabilities.
        shape: An integer or a tuple; None for that of ``p``.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        ``bool[*shape]``.

    Raises:
        DrawError: If a probability is not in [0, 1], or while a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> int(sx.random.bernoulli(1.0, 5).sum())
        5
    """
    operands = {"p": probabilities("bernoulli", p)}
    return draw("bernoulli", operands, shape=shape, device=device, sharding=sharding)


def categorical(
    logits: ArrayLike,
    axis: int = -1,
    shape: Shape | None = None,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws positions along an axis, with the probabilities of logits.

    Args:
        logits: Logarithms of probabilities, up to a constant along ``axis``.
        axis: The axis of ``logits`` that a position is drawn from.
        shape: Shape of the result, which ends in that of ``logits`` without ``axis``; None for just
            that.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        Integers from 0 to ``logits.shape[axis] - 1``.

    Raises:
        DrawError: While a transform is tracing.

    Example:
        >>> import numpy as np, shardax as sx
        >>> sx.random.categorical(np.log([[1, 1e-9], [1e-9, 1]])).tolist()
        [0, 1]
    """
    operands = {"logits": as_operand(logits)}
    return draw("categorical", operands, axis=axis, shape=shape, device=device, sharding=sharding)


def choice(
    a: ArrayLike,
    shape: Shape = (),
    replace: bool = True,
    p: ArrayLike | None = None,
    axis: int = 0,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Draws from the entries of an array.

    Args:
        a: An array of which to choose along ``axis``, or an integer for the numbers below it.
        shape: How many: an integer or a tuple.
        replace: Whether an entry may be chosen several times.
        p: Probability of each entry; None: all are equally likely.
        axis: The axis of ``a`` that an entry is chosen from.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        ``a`` with ``axis`` replaced by the dimensions of ``shape``.

    Raises:
        DrawError: If ``p`` is no distribution over the entries, or while a transform is tracing.
        ValueError: If there are too few entries to choose from without replacement.

    Example:
        >>> import shardax as sx
        >>> sorted(sx.random.choice(5, 5, replace=False).tolist())
        [0, 1, 2, 3, 4]
    """
    operands, options = entries("a", a)
    if p is not None:
        operands["p"] = probabilities("choice", p, add_up_to_one=True)
    return draw(
        "choice",
        operands,
        shape=shape,
        replace=bool(replace),
        axis=axis,
        device=device,
        sharding=sharding,
        **options,
    )


def permutation(
    x: ArrayLike,
    axis: int = 0,
    independent: bool = False,
    *,
    device: Device = None,
    sharding: Placement = None,
) -> jax.Array:
    """Shuffles an array along an axis.

    Args:
        x: The array, or an integer for the numbers below it.
        axis: The axis.
        independent: Whether every line along the axis is shuffled by itself.
        device: Device, or its name.
        sharding: Where each part goes.

    Returns:
        An array like ``x``.

    Raises:
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> sorted(sx.random.permutation(4).tolist())
        [0, 1, 2, 3]
    """
    operands, options = entries("x", x)
    return draw(
        "permutation",
        operands,
        axis=axis,
        independent=bool(independent),
        device=device,
        sharding=sharding,
        **options,
    )
