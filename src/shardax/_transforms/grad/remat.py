# SPDX-License-Identifier: Apache-2.0
"""``remat``: a function over Modules that is run again when it is differentiated.

Between its run and its gradient a function keeps what it computed on the way (its *residuals*).
Under ``remat`` it keeps its inputs instead, and computes the rest once more. Inputs are all the
values that it read, random streams among them, so the second run draws the same numbers. It writes
nothing: what the function does to Variables and structure is carried back once, from the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardax._transforms.errors import StaticArgumentError
from shardax._transforms.lift.call import Once, check_operands, wraps
from shardax._transforms.lift.engine import check_result
from shardax._transforms.lift.functions import (
    NUMBERS,
    check_static_option,
    resolve_arguments,
    static_argument,
)


def remat(
    function: Callable[..., Any] | None = None,
    *,
    policy: Callable[..., bool] | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    static: str | None = None,
) -> Any:
    """Makes a function over Modules compute its intermediate values anew when differentiated.

    Results, gradients, random numbers and writes are those of the function itself; only memory and
    time change.

    Args:
        function: A function, method or callable Module. Left out: returns a decorator.
        policy: Which intermediate values are kept all the same, one of
            ``jax.checkpoint_policies``; None: none.
        prevent_cse: As in ``jax.checkpoint``; False is faster inside ``scan`` and under ``jit``
            with a loop around.
        static_argnums: Positions of arguments that are passed on as they are; they must be
            hashable. Booleans and strings that decide what the function does belong here.
        static_argnames: Their names.
        static: ``"auto"`` makes every leaf of the arguments static that is no array, number, Module
            or Variable; ``"numbers"`` Python's numbers, too; as in ``jit``.

    Returns:
        A function of the same arguments.

    Raises:
        StaticArgumentError: If there is no such argument, or when called, if one is a Module or
            not hashable.
        ArgumentError: When called, if another argument is neither arrays nor objects.
        OutputError: When called, if the result holds something else than arrays and objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> block = sx.nn.MLP(4, 16, rngs=sx.Rngs(0))
        >>> loss = lambda block, x: sx.remat(block)(x).sum()
        >>> grads = sx.grad(loss)(block, jnp.ones((2, 4)))
        >>> plain = sx.grad(lambda block, x: block(x).sum())(block, jnp.ones((2, 4)))
        >>> all(bool(jnp.array_equal(grads.flat()[p], g)) for p, g in plain.flat().items())
        True
    """
    if function is None:
        return functools.partial(
            remat,
            policy=policy,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            static=static,
        )
    check_static_option(static)
    positions, names = resolve_arguments(
        function, static_argnums, static_argnames, "static", StaticArgumentError
    )
    fixed = {*positions, *names}

    @wraps(function)
    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        check_static(function, fixed, args, kwargs)
        once = Once(
            "remat",
            function,
            args,
            kwargs,
            static=fixed,
            auto_static=static is not None,
            static_numbers=static == NUMBERS,
        )
        check_operands(once.call, "make it static: sx.remat(f, static_argnames=...)")

        def pure(values: Any, plain: Any, plain_named: Any) -> Any:
            return once.run(values, plain, plain_named, split)[1]

        transformed = jax.checkpoint(pure, policy=policy, prevent_cse=prevent_cse)
        values, plain = once.graph.values(), list(once.arguments.plain)
        return once.finish(transformed(values, plain, once.arguments.plain_named))

    return rematerialised


def split(result: Any) -> tuple[None, Any]:
    """Everything is the rest, for ``Once.run``."""
    check_result(result, "remat")
    return None, result


def check_static(
    function: Any, static: set[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises if a static argument is a Module or not hashable.

    Raises:
        StaticArgumentError: Naming the argument.
    """
    for key in static:
        if isinstance(key, int) and -len(args) <= key < len(args):
            static_argument(args[key], function, key)
        elif isinstance(key, str) and key in kwargs:
            static_argument(kwargs[key], function, key)
