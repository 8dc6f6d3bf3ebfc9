# SPDX-License-Identifier: Apache-2.0
"""``custom_vjp``: functions over Modules with a derivative that their author gives.

A *rule* is two functions. ``fwd`` takes the arguments of the function and returns (result,
residuals); it runs in place of the function when that is differentiated. ``bwd`` takes the
residuals and the cotangent of the result and returns one gradient per argument.

JAX may run ``fwd`` and ``bwd`` long after the call, when the transforms around it are over: a
compiled function is differentiated when its trace has ended. What they use must be known by then.
So ``fwd`` is *explored* first, that is, traced once for what it captures and writes. Captured
Variables become inputs of the call; ``bwd`` gets what it needs from ``fwd``, as residuals.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardax.core.errors import DifferentiationError
from shardax.core.packing import PickledByName
from shardax.core.variables import Param, Variable
from shardax.transforms.call import retry_captured, wraps
from shardax.transforms.custom_call import RuleCall


def custom_vjp(
    function: Callable[..., Any] | None = None,
    *,
    nondiff_argnums: Any = (),
    wrt: Any = Param,
) -> Any:
    """Makes a function over Modules whose derivative is given by ``defvjp``.

    Values that the function, or ``fwd`` in its place, writes into Variables are carried back. They
    carry no gradient, unless ``bwd`` asks for it (``defvjp(..., state_cotangents=True)``).

    Args:
        function: A function, method or callable Module that returns arrays. Left out: returns a
            decorator.
        nondiff_argnums: Positions of arguments without a gradient: static values, functions,
            Modules, arrays. ``bwd`` gets them first. A ``DiffState`` in their place says which
            Variables of that argument have one.
        wrt: Filter of the Variables that have a gradient in other Module arguments.

    Returns:
        A function of the same arguments, with a method ``defvjp``. Arguments may be passed by name,
        but keyword-only ones have no gradient.

    Raises:
        DifferentiationError: When called without ``defvjp``, or when something is differentiated
            for which the rule gives no gradient.
        TangentError: When differentiated, if a gradient that ``bwd`` returned fits nothing.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> @sx.custom_vjp
        ... def apply(layer, x):
        ...     return layer(x)
        >>> def fwd(layer, x):
        ...     return layer(x), (layer, x)
        >>> def bwd(residuals, ct):
        ...     layer, x = residuals
        ...     return {"kernel": jnp.outer(x, ct).clip(-1, 1)}, layer.kernel.value @ ct
        >>> apply.defvjp(fwd, bwd)
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> loss = lambda layer, x: apply(layer, x).sum()
        >>> sx.grad(loss)(layer, jnp.array([0.5, 2.0]))["kernel"].tolist()
        [[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]]
    """
    if function is None:
        return functools.partial(custom_vjp, nondiff_argnums=nondiff_argnums, wrt=wrt)
    return CustomVjp(function, nondiff_argnums, wrt)


class CustomVjp(PickledByName):
    """A function made by ``custom_vjp``.

    Args:
        function: The user's function.
        nondiff_argnums: As for ``custom_vjp``.
        wrt: As for ``custom_vjp``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> @sx.custom_vjp
        ... def straight_through(x):
        ...     return jnp.round(x)
        >>> straight_through.defvjp(lambda x: (jnp.round(x), None), lambda residuals, ct: (ct,))
        >>> float(sx.grad(straight_through)(1.7))
        1.0
    """

    def __init__(self, function: Callable[..., Any], nondiff_argnums: Any, wrt: Any) -> None:
        wraps(function)(self)
        self.function = function
        self.nondiff_argnums = nondiff_argnums
        self.wrt = wrt
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None
        self.state_cotangents = False

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        *,
        state_cotangents: bool = False,
    ) -> None:
        """Gives the derivative.

        Args:
            fwd: Takes the arguments of the function; returns (result, residuals). Residuals may
                hold arrays, Variables, Modules (as ``fwd`` left them) and static values. It may
                write Variables, and should write those that the function does: when the function is
                differentiated, what ``fwd`` writes is what is carried back.
            bwd: Called as ``bwd(*nondiff, residuals, cotangent)`` with the cotangent arranged like
                the result. Returns a tuple with one gradient per argument that is not in
                ``nondiff_argnums``: for a Module a ``State`` or nested mapping by path, for a
                Variable an array, for anything else the same pytree; ``None``, and what is left
                out, is zero. The Modules it gets are copies of its own, and what it writes into
                them goes nowhere.
            state_cotangents: Whether ``bwd`` also gets the cotangents of what ``fwd`` wrote, as a
                last argument: a ``State`` by path, the first step being the argument's name.
                Without it, gradients stop at written values.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> @sx.custom_vjp(wrt=sx.Cache)
            ... def put(cache, x):
            ...     cache[...] = 2 * x
            ...     return x
            >>> def fwd(cache, x):
            ...     return put(cache, x), None
            >>> def bwd(residuals, ct, written):
            ...     return None, ct + 2 * written["cache"]
            >>> put.defvjp(fwd, bwd, state_cotangents=True)
            >>> cache = sx.Cache(jnp.zeros(()))
            >>> def loss(x):
            ...     put(cache, x)
            ...     return 10 * cache.value
            >>> float(sx.grad(loss)(1.0))
            20.0
        """
        self.fwd, self.bwd, self.state_cotangents = fwd, bwd, bool(state_cotangents)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.fwd is None or self.bwd is None:
            raise DifferentiationError(
                f"{self!r} has no derivative yet. Give it one before the first call: "
                f"f.defvjp(fwd, bwd)."
            )
        positional, named = by_position(self.function, args, kwargs)

        def attempt(captured: list[Variable[Any]]) -> Any:
            return RuleCall(self, positional, named, captured).run()

        return retry_captured(attempt)

    def __repr__(self) -> str:
        return f"<custom_vjp of {getattr(self.function, '__qualname__', self.function)}>"


def by_position(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with as many as possible by position, defaults among them.

    Args:
        function: The function.
        args: Arguments given by position.
        kwargs: Arguments given by name.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return tuple(args), dict(kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs
