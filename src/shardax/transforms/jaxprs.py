# SPDX-License-Identifier: Apache-2.0
"""``make_jaxpr``: the program that a function over Modules stands for, without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardax.core.errors import StaticArgumentError
from shardax.transforms.call import wraps
from shardax.transforms.lift import check_result
from shardax.transforms.once import Once
from shardax.transforms.remat import check_static
from shardax.transforms.shapes import AbstractFrame, abstract_copy, abstract_inputs
from shardax.transforms.static_arguments import resolve_arguments


def make_jaxpr(
    function: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    return_shape: bool = False,
) -> Any:
    """Makes a function that returns the program of a function over Modules.

    Nothing is computed and nothing is changed: the given Modules keep their values and structure,
    lazy ones stay lazy.

    Args:
        function: A function, method or callable Module. Left out: returns a decorator.
        static_argnums: Positions of arguments that are passed on as they are.
        return_shape: Whether to return also what ``sx.eval_shape`` does.

    Returns:
        A function of the same arguments (arrays may be ``jax.ShapeDtypeStruct``) that returns a
        closed jaxpr of ``jax``, or (jaxpr, shape). Its inputs are the values of all Variables
        that were passed in, in the order of ``sx.state`` for a single Module, each shared one
        once; then the other arrays, keyword arguments last, by name. Its outputs are the arrays of
        the result, the new values of Variables that were written, the values of new Variables, and
        those written through a closure. What is only read through a closure is a constant of the
        program.

    Raises:
        StaticArgumentError: If there is no such argument, or when called, if one is a Module or
            not hashable.
        OutputError: When called, if the result holds something else than arrays and objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> jaxpr = sx.make_jaxpr(lambda layer, x: layer(x))(layer, jnp.ones(2))
        >>> [v.aval.str_short() for v in jaxpr.jaxpr.invars], layer.kernel.is_lazy
        (['float32[2,3]', 'float32[3]', 'float32[2]'], True)
    """
    if function is None:
        return functools.partial(
            make_jaxpr, static_argnums=static_argnums, return_shape=return_shape
        )
    positions, names = resolve_arguments(
        function, static_argnums, (), "static", StaticArgumentError
    )
    static = {*positions, *names}

    @wraps(function)
    def jaxpr_of(*args: Any, **kwargs: Any) -> Any:
        check_static(function, static, args, kwargs)
        once = Once("make_jaxpr", function, args, kwargs, AbstractFrame, static)

        def pure(values: Any, plain: Any, plain_named: Any) -> Any:
            return once.run(values, plain, plain_named, split)[1]

        def split(result: Any) -> tuple[None, Any]:
            check_result(result, "make_jaxpr")
            return None, result

        jaxpr, shapes = jax.make_jaxpr(pure, return_shape=True)(*abstract_inputs(once))
        return (jaxpr, once.finish_on(abstract_copy(once), shapes)) if return_shape else jaxpr

    return jaxpr_of
