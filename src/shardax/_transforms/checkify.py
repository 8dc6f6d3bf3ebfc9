# SPDX-License-Identifier: Apache-2.0
"""Checks in compiled functions over Modules, by ``jax.experimental.checkify``."""

from __future__ import annotations

from typing import Any

from jax.experimental import checkify as jax_checkify

from shardax._core.graph.paths import PyTree
from shardax._transforms.lift.engine import SingleRunCall, check_operands
from shardax._transforms.lift.transformed import decorator, wraps


@decorator
def checkify(function: Any = None, *, errors: Any = jax_checkify.user_checks) -> Any:
    """Makes a function that returns its first error beside its result.

    Values that the function writes into Variables are carried back, also where a check failed.

    Args:
        function: A function over Modules, Variables and arrays. Left out: returns a decorator.
        errors: Which checks are made, as in ``jax.experimental.checkify.checkify``: by default
            those of ``checkify.check`` in the function.

    Returns:
        A function of the same arguments that returns (error, result); ``error.throw()`` raises if a
        check failed, and ``error.get()`` is the text or None. It can be compiled by ``jit``.

    Raises:
        TransformError: When called, if an argument is neither arrays nor objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from jax.experimental import checkify
        >>> count = sx.Variable(jnp.float32(0))
        >>> def divide(count, x):
        ...     count += 1
        ...     return 1 / x
        >>> error, y = sx.jit(sx.checkify(divide, errors=checkify.float_checks))(count, 0.0)
        >>> error.get().startswith("division by zero"), float(count)
        (True, 1.0)
    """

    @wraps(function)
    def checked(*args, **kwargs) -> PyTree:
        call = SingleRunCall("checkify", function, args, kwargs)
        check_operands(call)
        values, plain = call.graph.values(), list(call.arguments.plain)

        transformed = jax_checkify.checkify(call.run_whole, errors)
        error, leaving = transformed(values, plain, call.arguments.plain_named)
        return error, call.finish(leaving)

    return checked
