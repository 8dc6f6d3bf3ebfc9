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

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.init.defaults import exact_dtype, float_dtype
from shardax._core.init.rng import is_integer
from shardax.random.stream import DrawError, draw


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
    shape: object = (),
    dtype: jax.typing.DTypeLike = jnp.uint32,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("bits", device=device, sharding=sharding, shape=shape, dtype=dtype)


def uniform(
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    minval: object = 0.0,
    maxval: object = 1.0,
    *,
    device: object = None,
    sharding: object = None,
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
    bounds = {"minval": as_operand(minval, dtype), "maxval": as_operand(maxval, dtype)}
    _check_order("uniform", bounds, _is_finite_interval)
    return draw("uniform", bounds, device=device, sharding=sharding, shape=shape, dtype=dtype)


def normal(
    shape: object = (),
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("normal", device=device, sharding=sharding, shape=shape, dtype=dtype)


def truncated_normal(
    lower: object,
    upper: object,
    shape: object = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    device: object = None,
    sharding: object = None,
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
    bounds = {"lower": as_operand(lower, dtype), "upper": as_operand(upper, dtype)}
    _check_order("truncated_normal", bounds, np.less)
    return draw(
        "truncated_normal", bounds, device=device, sharding=sharding, shape=shape, dtype=dtype
    )


def randint(
    shape: object,
    minval: object,
    maxval: object,
    dtype: jax.typing.DTypeLike = int,
    *,
    device: object = None,
    sharding: object = None,
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
    bounds = _integer_bounds("randint", {"minval": minval, "maxval": maxval}, dtype)
    return draw("randint", bounds, device=device, sharding=sharding, shape=shape, dtype=dtype)


def bernoulli(
    p: object = 0.5, shape: object = None, *, device: object = None, sharding: object = None
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
    operands = {"p": as_probabilities("bernoulli", p)}
    return draw("bernoulli", operands, device=device, sharding=sharding, shape=shape)


def categorical(
    logits: object,
    axis: int = -1,
    shape: object = None,
    *,
    device: object = None,
    sharding: object = None,
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
    return draw("categorical", operands, device=device, sharding=sharding, axis=axis, shape=shape)


def choice(
    a: object,
    shape: object = (),
    replace: bool = True,
    p: object = None,
    axis: int = 0,
    *,
    device: object = None,
    sharding: object = None,
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
    operands, options = _entries("a", a)
    if p is not None:
        operands["p"] = as_probabilities("choice", p, total=True)
    options.update(shape=shape, replace=bool(replace), axis=axis)
    return draw("choice", operands, device=device, sharding=sharding, **options)


def permutation(
    x: object,
    axis: int = 0,
    independent: bool = False,
    *,
    device: object = None,
    sharding: object = None,
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
    operands, options = _entries("x", x)
    options.update(axis=axis, independent=bool(independent))
    return draw("permutation", operands, device=device, sharding=sharding, **options)


def _entries(name: str, array) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands and options of an array or a number of entries."""
    return ({}, {name: int(array)}) if is_integer(array) else ({name: as_operand(array)}, {})


# --- Arguments ---


def as_operand(value: Any, dtype: jax.typing.DTypeLike | None = None) -> np.ndarray | jax.Array:
    """An operand as an array, a NumPy one on the host."""
    if isinstance(value, (bool, int, float, complex, list, tuple, np.ndarray, np.generic)):
        array = np.asarray(value)
        return array.astype(dtype or jax.dtypes.canonicalize_dtype(array.dtype))
    return jnp.asarray(value, dtype)


def _check_order(name: str, bounds: Mapping[str, Any], in_order: Callable[[Any, Any], Any]) -> None:
    """Raises unless bounds on the host are in order."""
    (low_name, low), (high_name, high) = bounds.items()
    if not _is_jax(low) and not _is_jax(high) and not np.all(in_order(low, high)):
        raise DrawError(
            f"shardax.random.{name} was given {low_name}={low} and {high_name}={high}, which is no "
            f"interval to draw from. Give a {low_name} below {high_name}, both finite."
        )


def _is_finite_interval(low, high):
    """Whether numbers can be spread evenly from one to the other."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (low <= high) & np.isfinite(high - low)


def _integer_bounds(name: str, bounds: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """The lowest integer and one above the highest, by name, as operands."""
    given = {text: bound if _is_jax(bound) else np.asarray(bound) for text, bound in bounds.items()}
    for text, bound in given.items():
        if not jnp.issubdtype(bound.dtype, jnp.integer):
            raise DrawError(
                f"shardax.random.{name} was given {text}={bound} of dtype {bound.dtype}; the "
                f"bounds of integers are integers."
            )
    _check_order(name, given, np.less)
    if not jnp.issubdtype(dtype, jnp.integer):
        return given  # JAX says what is wrong
    limits = jnp.iinfo(dtype)
    default = jax.dtypes.canonicalize_dtype(int)
    # One above the highest is no number of the dtype itself, and so needs a wider one.
    above = limits.max + (limits.max < jnp.iinfo(default).max)
    for (text, bound), highest in zip(list(given.items()), (limits.max, above), strict=True):
        if _is_jax(bound):
            continue
        if not np.all((limits.min <= bound) & (bound <= highest)):
            raise DrawError(
                f"shardax.random.{name} was given {text}={bound}, but {dtype.name} allows "
                f"{limits.min} to {highest} there. Give a wider dtype."
            )
        given[text] = bound.astype(dtype if np.all(bound <= limits.max) else default)
    return given


def as_probabilities(name: str, p: object, total: bool = False) -> np.ndarray | jax.Array:
    """Probabilities as an operand; under ``total`` they must add up to 1."""
    operand = as_operand(p)
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        operand = as_operand(p, jnp.float32)
    if not _is_jax(operand):
        if not np.all((operand >= 0) & (operand <= 1)):
            raise DrawError(
                f"shardax.random.{name} was given p={operand}; a probability is a number from 0 to "
                f"1. To draw in proportion to weights, divide them by their sum."
            )
        if total and abs(float(np.sum(operand, dtype=np.float64)) - 1) > 1e-3:  # for rounded ones
            raise DrawError(
                f"shardax.random.{name} was given p={operand}, which adds up to {operand.sum()}. "
                f"Probabilities add up to 1: p / p.sum()."
            )
    return operand


def _is_jax(value: object) -> bool:
    return isinstance(value, jax.Array)
