# SPDX-License-Identifier: Apache-2.0
"""``safe_where``: a choice for each element, whose derivative is that of the chosen side alone.

``jnp.where(x > 0, jnp.log(x), 0.0)`` computes the logarithm of every element, and its derivative,
too. Where an element is left out, the derivative is multiplied by zero; but at zero that of the
logarithm is infinite, and zero times infinity is NaN. The cure is old: choose before the function
as well as after it, so that it never sees the elements that are left out. It sees a *stand-in*
there, a number at which it is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardax.core.errors import ArgumentError, DecisionError


def safe_where(
    condition: Any,
    function: Callable[..., Any],
    *operands: Any,
    otherwise: Any,
    stand_in: complex,
) -> jax.Array:
    """Applies a function where a condition holds; elsewhere it has no part in value or derivative.

    The function is computed for all elements, as by ``jnp.where``, but on the stand-in where the
    condition does not hold. To leave the computation out, use ``cond``.

    Args:
        condition: Booleans of shape (...), as ``jnp.where`` takes them.
        function: Takes the operands, gives an array; element for element, or along dimensions in
            which the condition has size 1.
        *operands: Arrays or Variables of shape (...), each broadcast with the condition.
        otherwise: What stands where the condition does not hold: a number, an array, or a function
            of the operands, which in turn sees the stand-in where the condition holds.
        stand_in: A number at which the function (and ``otherwise``, if that is one) and its
            derivatives are finite; 1 for a logarithm, a root or a division.

    Returns:
        The array of chosen values; dtype as of ``jnp.where``.

    Raises:
        DecisionError: If the condition is not boolean.
        ArgumentError: If there are no operands, or one cannot hold the stand-in without changing
            its dtype.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> x = jnp.array([0.0, 2.0])
        >>> wrong = lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum()
        >>> right = lambda x: sx.safe_where(x > 0, jnp.log, x, otherwise=0.0, stand_in=1.0).sum()
        >>> jax.grad(wrong)(x).tolist(), jax.grad(right)(x).tolist()
        ([nan, 0.5], [0.0, 0.5])
    """
    chosen = jnp.asarray(condition)
    if chosen.dtype != jnp.bool_:
        raise DecisionError(
            f"The condition of sx.safe_where must be boolean, but has dtype {chosen.dtype}. "
            f"Compare it: x != 0."
        )
    if not operands:
        raise ArgumentError(
            "sx.safe_where was given no operands. What the function finds in a closure cannot be "
            "kept from it; pass it: sx.safe_where(x > 0, jnp.log, x, otherwise=0, stand_in=1)."
        )
    arrays = [jnp.asarray(operand) for operand in operands]
    for position, array in enumerate(arrays):
        if jnp.result_type(array, stand_in) != array.dtype:
            raise ArgumentError(
                f"Operand {position} of sx.safe_where has dtype {array.dtype} and cannot hold the "
                f"stand-in {stand_in!r}. Give another stand-in, or convert the operand."
            )
    value = function(*(jnp.where(chosen, array, stand_in) for array in arrays))
    if callable(otherwise):
        otherwise = otherwise(*(jnp.where(chosen, stand_in, array) for array in arrays))
    return jnp.where(chosen, value, otherwise)
