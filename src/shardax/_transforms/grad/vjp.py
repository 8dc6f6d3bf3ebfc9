# SPDX-License-Identifier: Apache-2.0
"""Pullbacks and directional derivatives of functions over Modules.

``safe_where`` differentiates a choice per element. ``jnp.where(x > 0, jnp.log(x), 0.0)`` computes
the logarithm of every element, and zero times its infinite derivative at zero is NaN. The cure is
to choose before the function as well as after it, by a *stand-in* at which it is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Leaf, PyTree, plain_path
from shardax._core.object import Object
from shardax._core.variable import Param
from shardax._transforms import errors
from shardax._transforms.grad import grad as diff
from shardax._transforms.lift.engine import (
    SingleRunCall,
    check_operands,
    decorator,
    takes_options,
    wraps,
)


@decorator
def vjp(
    function: Any = None,
    *primals: PyTree,
    has_aux: bool = False,
    wrt: Any = Param,
    as_module: bool = False,
) -> PyTree:
    """Runs a function over Modules and returns its pullback.

    Values that the function writes into Variables are carried back when it runs, here and now.

    Args:
        function: A function, method or callable Module that returns arrays, or (arrays, aux) with
            ``has_aux``. Left out: returns a decorator.
        *primals: Its arguments. Left out: returns a function that takes them, and keyword
            arguments, which are not differentiated.
        has_aux: Whether the function returns (arrays, aux); aux may hold Modules and Variables.
        wrt: Filter of the Variables to differentiate in Modules; or a ``DiffState``, or a tuple of
            them, for filters of single arguments.
        as_module: Whether gradients of Modules are Modules, as for ``value_and_grad``.

    Returns:
        (result, gradients), with aux as a third if ``has_aux``. ``gradients(cotangent)`` takes a
        pytree like the result and returns a tuple with one gradient per argument: a ``State`` for a
        Module; an array for a Variable; for anything else as in ``jax.vjp`` (``float0`` for
        integers). Of a shared Variable as in ``value_and_grad``.

    Raises:
        TransformError: If there is nothing to differentiate, or the result holds objects; if an
            argument is neither arrays nor objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> y, gradients = sx.vjp(lambda layer, x: layer(x), layer, jnp.ones(2))
        >>> of_layer, of_x = gradients(jnp.ones(3))
        >>> of_layer["kernel"].tolist(), of_x.shape
        ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], (2,))
    """
    if primals:
        return _vjp(function, primals, {}, has_aux, wrt, as_module)

    @wraps(function)
    def vjp_function(*primals, **kwargs):
        return _vjp(function, primals, kwargs, has_aux, wrt, as_module)

    return vjp_function


def _vjp(
    function: Callable[..., PyTree],
    primals: Sequence[object],
    kwargs: Mapping[str, object],
    has_aux: bool,
    wrt: object,
    as_module: bool,
):
    once = SingleRunCall("vjp", function, primals, kwargs)
    check_operands(once)
    targets = _targets(once, wrt, len(primals), as_module)
    values, plain = once.graph.values(), list(once.arguments.plain)
    indices = sorted({entry.leaf for target in targets for entry in target.entries})

    def pure(some_values: list[object], all_plain: list[object]) -> tuple[PyTree, PyTree]:
        all_values = diff.replaced(values, indices, some_values)
        named = once.arguments.plain_named
        return once.run_once(all_values, all_plain, named, lambda r: _split(r, has_aux, "vjp"))

    out, pullback, leaving = jax.vjp(pure, [values[i] for i in indices], plain, has_aux=True)
    aux = once.finish(leaving)
    gradients = jax.tree_util.Partial(_Arrange(targets, indices), pullback)
    return (out, gradients, aux) if has_aux else (out, gradients)


def _targets(once: SingleRunCall, wrt, count: int, as_module: bool) -> list[diff.DiffArgument]:
    """Returns one target per argument."""
    chosen = {i: diff.DiffState(i, wrt) for i in range(count)}
    items = wrt if isinstance(wrt, (tuple, list)) else (wrt,)
    if any(isinstance(item, diff.DiffState) for item in items):
        if not all(isinstance(item, diff.DiffState) for item in items):
            raise errors.TransformError(
                f"wrt={wrt!r} mixes filters and DiffStates. Give one filter for all arguments, or "
                f"only DiffStates."
            )
        chosen = {i: diff.DiffState(i) for i in range(count)}
        for target in [diff.DiffArgument(once, item) for item in items]:
            target.check_chosen()
            chosen[target.position] = diff.DiffState(target.argnum, target.filter)
    targets = [diff.DiffArgument(once, item, as_module) for item in chosen.values()]
    holding = [target for target in targets if target.objects]
    if holding and not any(target.entries or target.holds_plain for target in targets):
        holding[0].check_chosen()
    return targets


class _Arrange:
    """Arranges the gradients that a pullback gives like the arguments."""

    def __init__(self, targets: Sequence[diff.DiffArgument], indices: Sequence[int]) -> None:
        self.targets = targets
        self.indices = indices

    def __call__(self, pullback: Callable[[PyTree], PyTree], cotangent) -> tuple[PyTree, ...]:
        with diff.explained_reverse_mode():
            values, plain = pullback(cotangent)
        of_plain = dict(enumerate(plain))
        return diff.arrange_gradients(self.targets, self.indices, values, of_plain)


def _split(result: object, has_aux: bool, name: str) -> tuple[PyTree, PyTree]:
    result, aux = diff.separate_aux(result, has_aux, name)
    refuse_objects(result, name)
    return result, aux


def refuse_objects(result: object, name: str) -> None:
    """Raises if a result that is differentiated holds objects."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=is_object):
        if isinstance(leaf, Object):
            place = ".".join(map(str, plain_path(keys))) or "the result itself"
            raise errors.TransformError(
                f"The function given to sx.{name} returned a {type(leaf).__name__} at {place}, but "
                f"only arrays are differentiated. Return its values (variable.value), or return "
                f"(arrays, objects) with has_aux=True; what is written into arguments is carried "
                f"back without being returned."
            )


@decorator
def jvp(
    function: Any = None,
    primals: Sequence[PyTree] | None = None,
    tangents: Sequence[PyTree] | None = None,
    has_aux: bool = False,
) -> PyTree:
    """Runs a function over Modules and returns result and tangent.

    Values that the function writes into Variables are carried back; they have no tangent.

    Args:
        function: A function, method or callable Module that returns arrays, or (arrays, aux) with
            ``has_aux``. Left out: returns a decorator.
        primals: Its arguments. Left out: returns a function that takes ``primals``, ``tangents``
            and keyword arguments, which do not move.
        tangents: One per argument: for a Module a ``State`` or nested mapping by path, or a
            Module of its structure, such as a gradient; for a Variable an array, for anything else
            the same pytree. ``None``, and a path that is left out, does not move; integers and
            random keys never do.
        has_aux: Whether the function returns (arrays, aux); aux may hold Modules and Variables.

    Returns:
        (result, tangent of the result), with aux as a third if ``has_aux``.

    Raises:
        TransformError: If a tangent fits nothing, by path, shape or dtype; if the result holds
            objects; if an argument is neither arrays nor objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> moves = {"bias": jnp.array([1.0, 2.0, 3.0])}
        >>> y, moved = sx.jvp(lambda layer, x: layer(x), (layer, jnp.ones(2)), (moves, None))
        >>> moved.tolist()
        [1.0, 2.0, 3.0]
    """
    if primals is not None:
        return _jvp(function, primals, tangents, has_aux, {})

    @wraps(function)
    def jvp_function(primals: Sequence[PyTree], tangents: Sequence[PyTree], **kwargs):
        return _jvp(function, primals, tangents, has_aux, kwargs)

    return jvp_function


def _jvp(
    function: Callable[..., PyTree],
    primals: Sequence[object],
    tangents: Sequence[object] | None,
    has_aux: bool,
    kwargs: Mapping[str, object],
):
    _check_pairs(primals, tangents)
    once = SingleRunCall("jvp", function, primals, kwargs)
    check_operands(once)
    values, plain = once.graph.values(), list(once.arguments.plain)
    leaves, treedef = jax.tree.flatten((values, plain))
    moves = _moves(once, values, tangents or ())
    moving = [place for place, tangent in enumerate(moves) if tangent is not None]

    def pure(moved: list[object]) -> tuple[PyTree, PyTree]:
        all_values, all_plain = treedef.unflatten(diff.replaced(leaves, moving, moved))
        named = once.arguments.plain_named
        return once.run_once(all_values, all_plain, named, lambda r: _split(r, has_aux, "jvp"))

    points, directions = [leaves[i] for i in moving], [moves[i] for i in moving]
    with diff.explained_forward_mode("jvp"):
        out, tangent, leaving = jax.jvp(pure, (points,), (directions,), has_aux=True)
    aux = once.finish(leaving)
    return (out, tangent, aux) if has_aux else (out, tangent)


def _check_pairs(primals, tangents) -> None:
    for name, values in (("primals", primals), ("tangents", tangents)):
        if not isinstance(values, (tuple, list)):
            raise errors.TransformError(
                f"The {name} of sx.jvp are a tuple with one entry per argument, but were given as "
                f"{type(values).__name__}. Write sx.jvp(f, (x,), (direction,))."
            )
    if len(primals) != len(tangents):
        raise errors.TransformError(
            f"sx.jvp was given {len(primals)} primals and {len(tangents)} tangents. Give one "
            f"tangent per argument, None for one that does not move."
        )


def _moves(once: SingleRunCall, values: Sequence[object], tangents: Sequence[object]) -> list[Any]:
    """Returns the tangent of every array, or None."""
    all_tangents = diff.Tangents("tangent", values, strict=True)
    of_plain: list[Leaf] = []
    for position, tangent in enumerate(tangents):
        target = diff.DiffArgument(once, diff.DiffState(position, ...))
        of_plain += target.place(tangent, once.arguments.plain[position], all_tangents)
    moves: list[Any] = []
    for index, value in enumerate(values):
        treedef = jax.tree.structure(value)
        moves_of_value = all_tangents.by_index.get(index)
        moves += (
            [None] * treedef.num_leaves
            if moves_of_value is None
            else treedef.flatten_up_to(moves_of_value)
        )
    return moves + of_plain


@takes_options
def safe_where(
    condition: Any,
    function: Callable[..., PyTree],
    *operands: PyTree,
    otherwise: Any,
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
    chosen = jnp.asarray(condition)
    if chosen.dtype != jnp.bool_:
        raise errors.TransformError(
            f"The condition of sx.safe_where must be boolean, but has dtype {chosen.dtype}. "
            f"Compare it: x != 0."
        )
    if not operands:
        raise errors.TransformError(
            "sx.safe_where was given no operands. What the function finds in a closure cannot be "
            "kept from it; pass it: sx.safe_where(x > 0, jnp.log, x, otherwise=0, stand_in=1)."
        )
    arrays = [jnp.asarray(operand) for operand in operands]
    for position, array in enumerate(arrays):
        if jnp.result_type(array, stand_in) != array.dtype:
            raise errors.TransformError(
                f"Operand {position} of sx.safe_where has dtype {array.dtype} and cannot hold the "
                f"stand-in {stand_in!r}. Give another stand-in, or convert the operand."
            )
    value = function(*(jnp.where(chosen, array, stand_in) for array in arrays))
    if callable(otherwise):
        otherwise = otherwise(*(jnp.where(chosen, stand_in, array) for array in arrays))
    return jnp.where(chosen, value, otherwise)
