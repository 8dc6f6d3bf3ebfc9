# SPDX-License-Identifier: Apache-2.0
"""The arguments of draws: shapes, operands, and whether they make sense.

Values are looked at where they are on the host. What is on a device is passed on unseen: looking
would mean to wait for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.errors import DrawError


def as_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Returns a shape as a tuple; an integer is the size of one dimension.

    Raises:
        DrawError: If it is not a shape.
    """
    try:
        sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
        checked = tuple(operator.index(size) for size in sizes)
    except TypeError:
        checked = (-1,)
    if any(size < 0 for size in checked):
        raise DrawError(
            f"shardax.random.{name} was given the shape {shape!r}; a shape is an integer or a "
            f"tuple of integers, none below 0."
        )
    return checked


def as_operand(value: Any, dtype: Any = None) -> Any:
    """Returns an operand as an array: NumPy's for what is on the host, JAX's for what is not.

    Args:
        value: A number, array or Variable.
        dtype: Its dtype; None for its own, canonical for JAX.
    """
    if isinstance(value, (bool, int, float, complex, list, tuple, np.ndarray, np.generic)):
        array = np.asarray(value)
        return array.astype(dtype or jax.dtypes.canonicalize_dtype(array.dtype))
    return jnp.asarray(value, dtype)


def check_order(name: str, bounds: Mapping[str, Any], in_order: Callable[[Any, Any], Any]) -> None:
    """Refuses bounds that are none.

    Args:
        name: Of the public function, for errors.
        bounds: The lower and the upper bound, by the name of the argument.
        in_order: Whether two numbers are the bounds of an interval.

    Raises:
        DrawError: If one is not, for bounds on the host.
    """
    (low_name, low), (high_name, high) = bounds.items()
    if _on_host(low, high) and not np.all(in_order(low, high)):
        raise DrawError(
            f"shardax.random.{name} was given {low_name}={low} and {high_name}={high}, which is no "
            f"interval to draw from. Give a {low_name} below {high_name}, both finite."
        )


def finite_interval(low: Any, high: Any) -> Any:
    """Whether numbers can be spread evenly from one to the other."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (low <= high) & np.isfinite(high - low)


def integer_bounds(name: str, bounds: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Returns the bounds of random integers as operands.

    Args:
        name: Of the public function, for errors.
        bounds: The lowest integer and one above the highest, by the name of the argument.
        dtype: Dtype of the integers.

    Raises:
        DrawError: If they are not integers, leave nothing between them, or numbers on the host that
            the dtype does not hold.
    """
    given = {text: bound if _is_jax(bound) else np.asarray(bound) for text, bound in bounds.items()}
    for text, bound in given.items():
        if not jnp.issubdtype(bound.dtype, jnp.integer):
            raise DrawError(
                f"shardax.random.{name} was given {text}={bound} of dtype {bound.dtype}; the "
                f"bounds of integers are integers."
            )
    check_order(name, given, np.less)
    if not jnp.issubdtype(dtype, jnp.integer):
        return given  # JAX says what is wrong
    limits = jnp.iinfo(dtype)
    default = jax.dtypes.canonicalize_dtype(int)
    # One above the highest is no number of the dtype itself, and so needs a wider one.
    above = limits.max + (limits.max < jnp.iinfo(default).max)
    operands = {}
    for (text, bound), highest in zip(given.items(), (limits.max, above), strict=True):
        if _is_jax(bound):
            operands[text] = bound
            continue
        if not np.all((limits.min <= bound) & (bound <= highest)):
            raise DrawError(
                f"shardax.random.{name} was given {text}={bound}, but {dtype.name} allows "
                f"{limits.min} to {highest} there. Give a wider dtype."
            )
        operands[text] = bound.astype(dtype if np.all(bound <= limits.max) else default)
    return operands


def probabilities(name: str, p: Any, total: bool = False) -> Any:
    """Returns probabilities as an operand.

    Args:
        name: Of the public function, for errors.
        p: The probabilities.
        total: Whether they must add up to 1.

    Raises:
        DrawError: If one on the host is not in [0, 1], or they do not add up to 1.
    """
    operand = as_operand(p)
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        operand = as_operand(p, jnp.float32)
    if _on_host(operand):
        if not np.all((operand >= 0) & (operand <= 1)):
            raise DrawError(
                f"shardax.random.{name} was given p={operand}; a probability is a number from 0 to "
                f"1. To draw in proportion to weights, divide them by their sum."
            )
        if total and abs(float(np.sum(operand, dtype=np.float64)) - 1) > _NEAR_ONE:
            raise DrawError(
                f"shardax.random.{name} was given p={operand}, which adds up to {operand.sum()}. "
                f"Probabilities add up to 1: p / p.sum()."
            )
    return operand


_NEAR_ONE = 1e-3
"""How far the sum of probabilities may be from 1, for those that were rounded."""


def _on_host(*arrays: Any) -> bool:
    return not any(map(_is_jax, arrays))


def _is_jax(value: Any) -> bool:
    return isinstance(value, jax.Array)
