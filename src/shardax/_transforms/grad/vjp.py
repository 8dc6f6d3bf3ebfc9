# SPDX-License-Identifier: Apache-2.0
"""``vjp`` and ``jvp``: derivatives of functions over Modules that return arrays.

``vjp`` goes backward: from a *cotangent* of the result, which says how much each of its numbers
counts, to one gradient per argument. ``jvp`` goes forward: from a *tangent* of the arguments, which
says in what direction they move, to that of the result.

What a function writes into Variables is carried back, but is no part of its result: no cotangent
arrives at it, and it has no tangent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import path_step
from shardax._core.object import Object
from shardax._core.variable import Param
from shardax._transforms.errors import DifferentiationError, TangentError
from shardax._transforms.grad.targets import DiffState, Tangents, Target, replaced
from shardax._transforms.lift.call import Once, check_operands, wraps
from shardax._transforms.lift.error_context import explained_reverse_mode


def vjp(
    function: Callable[..., Any] | None = None,
    *primals: Any,
    has_aux: bool = False,
    wrt: Any = Param,
) -> Any:
    """Runs a function over Modules and returns how gradients go back through it.

    Values that the function writes into Variables are carried back when it runs, here and now.

    Args:
        function: A function, method or callable Module that returns arrays, or (arrays, aux) with
            ``has_aux``. Left out: returns a decorator.
        *primals: Its arguments. Left out: returns a function that takes them, and keyword
            arguments, which are not differentiated.
        has_aux: Whether the function returns (arrays, aux); aux may hold Modules and Variables.
        wrt: Filter of the Variables to differentiate in Modules; or a ``DiffState``, or a tuple of
            them, for filters of single arguments.

    Returns:
        (result, gradients), with aux as a third if ``has_aux``. ``gradients(cotangent)`` takes a
        pytree like the result and returns a tuple with one gradient per argument: a ``State`` for a
        Module; an array for a Variable; for anything else as in ``jax.vjp`` (``float0`` for
        integers).

    Raises:
        DifferentiationError: If there is nothing to differentiate, or the result holds objects.
        ArgumentError: If an argument is neither arrays nor objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> y, gradients = sx.vjp(lambda layer, x: layer(x), layer, jnp.ones(2))
        >>> of_layer, of_x = gradients(jnp.ones(3))
        >>> of_layer["kernel"].tolist(), of_x.shape
        ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], (2,))
    """
    if function is None:
        return functools.partial(vjp, has_aux=has_aux, wrt=wrt)
    if primals:
        return _vjp(function, primals, {}, has_aux, wrt)

    @wraps(function)
    def vjp_function(*primals: Any, **kwargs: Any) -> Any:
        return _vjp(function, primals, kwargs, has_aux, wrt)

    return vjp_function


def _vjp(
    function: Callable[..., Any],
    primals: Sequence[Any],
    kwargs: Mapping[str, Any],
    has_aux: bool,
    wrt: Any,
) -> Any:
    once = Once("vjp", function, primals, kwargs)
    check_operands(once.call)
    targets = _targets(once, wrt, len(primals))
    values, plain = once.graph.values(), list(once.arguments.plain)
    indices = sorted({entry.leaf for target in targets for entry in target.entries})

    def pure(some_values: list[Any], all_plain: list[Any]) -> tuple[Any, Any]:
        all_values = replaced(values, indices, some_values)
        named = once.arguments.plain_named
        return once.run(all_values, all_plain, named, lambda r: _split(r, has_aux, "vjp"))

    out, pullback, leaving = jax.vjp(pure, [values[i] for i in indices], plain, has_aux=True)
    aux = once.finish(leaving)
    gradients = jax.tree_util.Partial(_Arrange(targets, indices), pullback)
    return (out, gradients, aux) if has_aux else (out, gradients)


def _targets(once: Once, wrt: Any, count: int) -> list[Target]:
    """Returns one target per argument."""
    chosen = {i: DiffState(i, wrt) for i in range(count)}
    items = wrt if isinstance(wrt, (tuple, list)) else (wrt,)
    if any(isinstance(item, DiffState) for item in items):
        if not all(isinstance(item, DiffState) for item in items):
            raise DifferentiationError(
                f"wrt={wrt!r} mixes filters and DiffStates. Give one filter for all arguments, or "
                f"only DiffStates."
            )
        chosen = {i: DiffState(i) for i in range(count)}
        for target in [Target(once.call, item) for item in items]:
            target.check_chosen()
            chosen[target.position] = DiffState(target.argnum, target.filter)
    targets = [Target(once.call, item) for item in chosen.values()]
    holding = [target for target in targets if target.choices]
    if holding and not any(target.entries or target.has_plain for target in targets):
        holding[0].check_chosen()
    return targets


class _Arrange:
    """Arranges the gradients that a pullback gives like the arguments."""

    def __init__(self, targets: Sequence[Target], indices: Sequence[int]) -> None:
        self.targets = targets
        self.indices = indices

    def __call__(self, pullback: Callable[[Any], Any], cotangent: Any) -> tuple[Any, ...]:
        with explained_reverse_mode():
            values, plain = pullback(cotangent)
        by_index = dict(zip(self.indices, values, strict=True))
        return tuple(target.gradient(by_index, plain[target.position]) for target in self.targets)


def _split(result: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    """Separates what is differentiated from the rest of what a function returned."""
    aux = None
    if has_aux:
        if not (isinstance(result, tuple) and len(result) == 2):
            raise DifferentiationError(
                f"With has_aux=True the function given to sx.{name} must return (result, aux), but "
                f"it returned a {type(result).__name__}."
            )
        result, aux = result
    refuse_objects(result, name)
    return result, aux


def refuse_objects(result: Any, name: str) -> None:
    """Raises if a result that is differentiated holds objects.

    Raises:
        DifferentiationError: Naming the place.
    """
    for keys, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=is_object):
        if isinstance(leaf, Object):
            place = ".".join(str(path_step(key)) for key in keys) or "the result itself"
            raise DifferentiationError(
                f"The function given to sx.{name} returned a {type(leaf).__name__} at {place}, but "
                f"only arrays are differentiated. Return its values (variable.value), or return "
                f"(arrays, objects) with has_aux=True; what is written into arguments is carried "
                f"back without being returned."
            )


def jvp(
    function: Callable[..., Any] | None = None,
    primals: Sequence[Any] | None = None,
    tangents: Sequence[Any] | None = None,
    has_aux: bool = False,
) -> Any:
    """Runs a function over Modules and returns how its result moves with its arguments.

    Values that the function writes into Variables are carried back; they have no tangent.

    Args:
        function: A function, method or callable Module that returns arrays, or (arrays, aux) with
            ``has_aux``. Left out: returns a decorator.
        primals: Its arguments. Left out: returns a function that takes ``primals``, ``tangents``
            and keyword arguments, which do not move.
        tangents: One per argument: for a Module a ``State`` or nested mapping by path, for a
            Variable an array, for anything else the same pytree. ``None``, and a path that is left
            out, does not move; integers and random keys never do.
        has_aux: Whether the function returns (arrays, aux); aux may hold Modules and Variables.

    Returns:
        (result, tangent of the result), with aux as a third if ``has_aux``.

    Raises:
        TangentError: If a tangent fits nothing, by path, shape or dtype.
        DifferentiationError: If the result holds objects.
        ArgumentError: If an argument is neither arrays nor objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> moves = {"bias": jnp.array([1.0, 2.0, 3.0])}
        >>> y, moved = sx.jvp(lambda layer, x: layer(x), (layer, jnp.ones(2)), (moves, None))
        >>> moved.tolist()
        [1.0, 2.0, 3.0]
    """
    if function is None:
        return functools.partial(jvp, has_aux=has_aux)
    if primals is not None:
        return _jvp(function, primals, tangents, has_aux, {})

    @wraps(function)
    def jvp_function(primals: Sequence[Any], tangents: Sequence[Any], **kwargs: Any) -> Any:
        return _jvp(function, primals, tangents, has_aux, kwargs)

    return jvp_function


def _jvp(
    function: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any] | None,
    has_aux: bool,
    kwargs: Mapping[str, Any],
) -> Any:
    _check_pairs(primals, tangents)
    once = Once("jvp", function, primals, kwargs)
    check_operands(once.call)
    values, plain = once.graph.values(), list(once.arguments.plain)
    leaves, treedef = jax.tree.flatten((values, plain))
    moves = _moves(once, values, tangents or ())
    moving = [place for place, tangent in enumerate(moves) if tangent is not None]

    def pure(some: list[Any]) -> tuple[Any, Any]:
        all_values, all_plain = treedef.unflatten(replaced(leaves, moving, some))
        named = once.arguments.plain_named
        return once.run(all_values, all_plain, named, lambda r: _split(r, has_aux, "jvp"))

    given, directions = [leaves[i] for i in moving], [moves[i] for i in moving]
    out, tangent, leaving = jax.jvp(pure, (given,), (directions,), has_aux=True)
    aux = once.finish(leaving)
    return (out, tangent, aux) if has_aux else (out, tangent)


def _check_pairs(primals: Any, tangents: Any) -> None:
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise TangentError(
                f"The {name} of sx.jvp are a tuple with one entry per argument, but were given as "
                f"{type(given).__name__}. Write sx.jvp(f, (x,), (direction,))."
            )
    if len(primals) != len(tangents):
        raise TangentError(
            f"sx.jvp was given {len(primals)} primals and {len(tangents)} tangents. Give one "
            f"tangent per argument, None for one that does not move."
        )


def _moves(once: Once, values: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Returns the tangent, or None, of every array of Variables, then of plain parts."""
    given = Tangents("tangent", values, strict=True)
    of_plain: list[Any] = []
    for position, tangent in enumerate(tangents):
        target = Target(once.call, DiffState(position, ...))
        of_plain += target.place(tangent, once.arguments.plain[position], given)
    moves: list[Any] = []
    for index, value in enumerate(values):
        treedef = jax.tree.structure(value)
        known = given.by_index.get(index)
        moves += [None] * treedef.num_leaves if known is None else treedef.flatten_up_to(known)
    return moves + of_plain
