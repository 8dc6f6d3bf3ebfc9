# SPDX-License-Identifier: Apache-2.0
"""``safe_where``: a choice per element whose derivative is right where the function has none.

``jnp.where(x > 0, jnp.log(x), 0.0)`` computes the logarithm of every element, and zero times its
infinite derivative at zero is NaN. The cure is to choose before the function as well as after it,
by a *stand-in* at which it is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shardax._transforms.grad import errors
from shardax._transforms.lift.transformed import takes_options


@takes_options
def safe_where(
    condition: ArrayLike,
    function: Callable[..., ArrayLike],
    *operands: ArrayLike,
    otherwise: ArrayLike | Callable[..., ArrayLike],
    stand_in: complex,
) -> jax.Array:
    """Applies a function per element where a condition holds.

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
        TransformError: If the condition is not boolean; if there are no operands, or one cannot
            hold the stand-in without changing its dtype.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> x = jnp.array([0.0, 2.0])
        >>> wrong = lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum()
        >>> right = lambda x: sx.safe_where(x > 0, jnp.log, x, otherwise=0.0, stand_in=1.0).sum()
        >>> jax.grad(wrong)(x).tolist(), jax.grad(right)(x).tolist()
        ([nan, 0.5], [0.0, 0.5])
    """
    holds = jnp.asarray(condition)
    if holds.dtype != jnp.bool_:
        raise errors.condition_not_boolean(holds.dtype)
    if not operands:
        raise errors.no_operands()

    arrays = [jnp.asarray(operand) for operand in operands]
    for position, array in enumerate(arrays):
        if jnp.result_type(array, stand_in) != array.dtype:
            raise errors.cannot_hold_stand_in(position, array.dtype, stand_in)

    value = function(*(jnp.where(holds, array, stand_in) for array in arrays))
    if callable(otherwise):
        elsewhere = [jnp.where(holds, stand_in, array) for array in arrays]
        otherwise = cast("ArrayLike", otherwise(*elsewhere))
    return jnp.where(holds, value, otherwise)
