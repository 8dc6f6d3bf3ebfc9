# SPDX-License-Identifier: Apache-2.0
"""The numbers that control flow asks for: a predicate, an index or a bound.

Each is one number: a Python number, an array of shape (), or a Variable that holds one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardax._core.variable import Variable
from shardax._transforms.errors import TransformError
from shardax._transforms.lift.engine import ARRAY_OR_NUMBER

Number = jax.typing.ArrayLike


def as_predicate(value: object, name: str) -> Number:
    """Returns a predicate as a boolean of shape ()."""
    number = _one_number(value, name, "one boolean", "Reduce it: x.all(), x.any(), x[0] > 0.")
    dtype = jnp.result_type(number)
    if dtype == jnp.bool_:
        return number
    if jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating):
        return number != 0
    raise TransformError(f"{name} must be one boolean, but has dtype {dtype}. Compare it: x != y.")


def as_integer(value: object, name: str) -> Number:
    """Returns an index or bound, an integer of shape ()."""
    number = _one_number(value, name, "one integer", "Take one of them: x[0].")
    dtype = jnp.result_type(number)
    if jnp.issubdtype(dtype, jnp.integer):
        return number
    hint = "jnp.int32(x)" if dtype == jnp.bool_ else "x.astype(int)"
    raise TransformError(f"{name} must be one integer, but has dtype {dtype}. Convert it: {hint}.")


def _one_number(value: Any, name: str, expected: str, hint: str) -> Number:
    number: Any = value.value if isinstance(value, Variable) else value
    if not isinstance(number, ARRAY_OR_NUMBER):
        raise TransformError(f"{name} must be {expected}, but is a {type(value).__name__}.")
    if jnp.shape(number) != ():
        raise TransformError(
            f"{name} must be {expected}, but has shape {jnp.shape(number)}. {hint}"
        )
    result: Any = number
    return result
