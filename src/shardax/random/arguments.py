# SPDX-License-Identifier: Apache-2.0
"""Arguments of draws: operands as arrays, and checks of those on the host.

Numbers, lists and NumPy arrays are on the host, become NumPy arrays and are checked. An array of
JAX is not waited for, and not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from shardax._core.init.rng import is_integer
from shardax.random import errors
from shardax.random.errors import Operand

# What users give for the options of a draw.
Shape = int | Sequence[int]
Device = jax.Device | str | None
Placement = Sharding | PartitionSpec | None


def as_operand(value: ArrayLike | jax.Array, dtype: DTypeLike | None = None) -> Operand:
    """Returns a value as an array, of NumPy where it is on the host."""
    if isinstance(value, (bool, int, float, complex, list, tuple, np.ndarray, np.generic)):
        array = np.asarray(value)
        return array.astype(dtype or jax.dtypes.canonicalize_dtype(array.dtype))
    return jnp.asarray(value, dtype)


def is_on_host(operand: Operand) -> bool:
    """Whether an operand is checked."""
    return not isinstance(operand, jax.Array)


# --- parameters of distributions ---


def positive(
    function: str, dtype: DTypeLike, **parameters: ArrayLike | jax.Array
) -> dict[str, Operand]:
    """Returns parameters as operands, by name; raises unless all are above 0."""
    operands = {name: as_operand(value, dtype) for name, value in parameters.items()}
    check_positive(function, **operands)
    return operands


def check_positive(function: str, **operands: Operand) -> None:
    """Raises unless all operands on the host are above 0; NaN is not."""
    for name, operand in operands.items():
        if is_on_host(operand) and not np.all(operand > 0):
            raise errors.not_a_number(function, name, operand, "above 0")


def nonnegative(
    function: str, dtype: DTypeLike, **parameters: ArrayLike | jax.Array
) -> dict[str, Operand]:
    """Returns parameters as operands, by name; raises unless all are at least 0."""
    operands = {name: as_operand(value, dtype) for name, value in parameters.items()}
    for name, operand in operands.items():
        if is_on_host(operand) and not np.all(operand >= 0):
            raise errors.not_a_number(function, name, operand, "of at least 0")
    return operands


def probabilities(function: str, p: ArrayLike | jax.Array, add_up_to_one: bool = False) -> Operand:
    """Returns probabilities as an operand; raises unless each is one, and the sum if asked for."""
    operand = as_operand(p)
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        operand = as_operand(p, jnp.float32)
    if not is_on_host(operand):
        return operand

    if not np.all((operand >= 0) & (operand <= 1)):
        raise errors.not_a_probability(function, operand)

    # The tolerance is for probabilities that were rounded, such as those of bfloat16.
    total = float(np.sum(operand, dtype=np.float64))
    if add_up_to_one and abs(total - 1) > 1e-3:
        raise errors.not_a_distribution(function, operand)
    return operand


def triangle(
    left: ArrayLike | jax.Array,
    mode: ArrayLike | jax.Array,
    right: ArrayLike | jax.Array,
    dtype: DTypeLike,
) -> dict[str, Operand]:
    """Returns the ends and the mode of triangles; raises unless they are in order."""
    left, mode, right = (as_operand(value, dtype) for value in (left, mode, right))
    are_on_host = is_on_host(left) and is_on_host(mode) and is_on_host(right)
    if are_on_host and not np.all((left <= mode) & (mode <= right) & (left < right)):
        raise errors.not_a_triangle(left, mode, right)
    return {"left": left, "mode": mode, "right": right}


# --- bounds ---


def finite_interval(
    minval: ArrayLike | jax.Array, maxval: ArrayLike | jax.Array, dtype: DTypeLike
) -> dict[str, Operand]:
    """Returns the bounds of ``uniform``; raises unless numbers can be spread evenly between."""
    low, high = as_operand(minval, dtype), as_operand(maxval, dtype)
    if is_on_host(low) and is_on_host(high):
        with np.errstate(over="ignore", invalid="ignore"):
            is_interval = np.all((low <= high) & np.isfinite(high - low))
        if not is_interval:
            raise errors.not_an_interval("uniform", minval=low, maxval=high)
    return {"minval": low, "maxval": high}


def open_interval(
    lower: ArrayLike | jax.Array, upper: ArrayLike | jax.Array, dtype: DTypeLike
) -> dict[str, Operand]:
    """Returns the bounds of ``truncated_normal``; raises unless the first is below the second."""
    low, high = as_operand(lower, dtype), as_operand(upper, dtype)
    if is_on_host(low) and is_on_host(high) and not np.all(low < high):
        raise errors.not_an_interval("truncated_normal", lower=low, upper=high)
    return {"lower": low, "upper": high}


def integer_range(
    minval: ArrayLike | jax.Array, maxval: ArrayLike | jax.Array, dtype: np.dtype
) -> dict[str, Operand]:
    """Returns the bounds of ``randint``: the lowest integers, and one above the highest."""
    bounds: dict[str, Operand] = {}
    for name, bound in (("minval", minval), ("maxval", maxval)):
        operand = bound if isinstance(bound, jax.Array) else np.asarray(bound)
        if not jnp.issubdtype(operand.dtype, jnp.integer):
            raise errors.bound_not_integer(name, operand)
        bounds[name] = operand

    low, high = bounds["minval"], bounds["maxval"]
    if is_on_host(low) and is_on_host(high) and not np.all(low < high):
        raise errors.not_an_interval("randint", **bounds)
    if not jnp.issubdtype(dtype, jnp.integer):
        return bounds  # JAX says what is wrong

    # One above the highest is no number of the dtype itself, and so needs a wider one.
    limits = jnp.iinfo(dtype)
    default = jax.dtypes.canonicalize_dtype(int)
    above_highest = limits.max
    if limits.max < jnp.iinfo(default).max:
        above_highest += 1

    for name, most in (("minval", limits.max), ("maxval", above_highest)):
        bound = bounds[name]
        if not is_on_host(bound):
            continue
        if not np.all((limits.min <= bound) & (bound <= most)):
            raise errors.bound_outside_of_dtype(name, bound, dtype, limits.min, most)
        fits_dtype = np.all(bound <= limits.max)
        bounds[name] = bound.astype(dtype if fits_dtype else default)
    return bounds


# --- arrays to choose from ---


def entries(name: str, array: ArrayLike | jax.Array) -> tuple[dict[str, Operand], dict[str, int]]:
    """Returns operands and options of an array to choose from, or of a number of entries."""
    if is_integer(array):
        return {}, {name: int(np.asarray(array))}
    return {name: as_operand(array)}, {}
