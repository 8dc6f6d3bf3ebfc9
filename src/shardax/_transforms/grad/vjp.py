# SPDX-License-Identifier: Apache-2.0
"""``vjp`` and ``jvp``: pullbacks and directional derivatives of functions over Modules.

Both differentiate every argument. ``vjp`` arranges gradients like the arguments
(``DiffInputs.arrange``); ``jvp`` takes directions that are arranged so (its inverse,
``DiffInputs.split_tangents``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from shardax._core.graph.paths import PyTree
from shardax._core.state.filters import Filter
from shardax._core.variable_types import Param
from shardax._transforms.grad import errors
from shardax._transforms.grad.differentiated import (
    DiffArgument,
    DifferentiatedCall,
    DiffInputs,
    DiffPair,
    DiffState,
    separate_arrays,
)
from shardax._transforms.grad.forward_mode import explained_forward_mode
from shardax._transforms.lift.engine import LiftedCall, check_operands
from shardax._transforms.lift.transformed import decorator, wraps


@decorator
def vjp(
    function: Callable[..., PyTree] | None = None,
    *primals: PyTree,
    has_aux: bool = False,
    wrt: Filter | DiffState | Sequence[DiffState] = Param,
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
    assert function is not None  # ``decorator`` makes a decorator without it
    if primals:
        return _vjp(function, primals, {}, has_aux, wrt, as_module)

    @wraps(function)
    def vjp_function(*primals: PyTree, **kwargs: PyTree) -> PyTree:
        return _vjp(function, primals, kwargs, has_aux, wrt, as_module)

    return vjp_function


def _vjp(
    function: Callable[..., PyTree],
    primals: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    has_aux: bool,
    wrt: Filter | DiffState | Sequence[DiffState],
    as_module: bool,
) -> tuple[PyTree, ...]:
    def split(result: PyTree) -> tuple[PyTree, PyTree]:
        return separate_arrays(result, has_aux, "vjp")

    call = DifferentiatedCall("vjp", function, primals, kwargs, split)
    check_operands(call)
    call.inputs = _inputs_of_all(call, wrt, len(primals), as_module)
    result, pullback, leaving = jax.vjp(call.pure, *call.take(), has_aux=True)
    aux = call.finish(leaving)

    gradients = jax.tree_util.Partial(_Gradients(call.inputs), pullback)
    return (result, gradients, aux) if has_aux else (result, gradients)


def _inputs_of_all(
    call: LiftedCall, wrt: Filter | DiffState | Sequence[DiffState], count: int, as_module: bool
) -> DiffInputs:
    """Returns the differentiated inputs of a call of which every argument is differentiated."""
    chosen = {position: DiffState(position, wrt) for position in range(count)}

    # DiffStates are filters of single arguments, which must match something there.
    items = wrt if isinstance(wrt, (tuple, list)) else (wrt,)
    states = [item for item in items if isinstance(item, DiffState)]
    if states:
        if len(states) != len(items):
            raise errors.filters_and_diff_states(wrt)

        chosen = {position: DiffState(position) for position in range(count)}
        for item in states:
            argument = DiffArgument(call, item)
            argument.check_chosen()
            chosen[argument.position] = item

    # A filter of all arguments must match something in one of them.
    arguments = [DiffArgument(call, item, as_module) for item in chosen.values()]
    with_objects = [argument for argument in arguments if argument.objects]
    if with_objects and not any(argument.holds_anything for argument in arguments):
        with_objects[0].check_chosen()
    return DiffInputs(arguments)


class _Gradients:
    """Calls a pullback, and arranges what it returns like the arguments."""

    def __init__(self, inputs: DiffInputs) -> None:
        self.inputs = inputs

    def __call__(
        self, pullback: Callable[[PyTree], DiffPair], cotangent: PyTree
    ) -> tuple[PyTree, ...]:
        return self.inputs.arrange(pullback(cotangent))


@decorator
def jvp(
    function: Callable[..., PyTree] | None = None,
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
    assert function is not None  # ``decorator`` makes a decorator without it
    if primals is not None:
        return _jvp(function, primals, tangents, has_aux, {})

    @wraps(function)
    def jvp_function(
        primals: Sequence[PyTree], tangents: Sequence[PyTree], **kwargs: PyTree
    ) -> tuple[PyTree, ...]:
        return _jvp(function, primals, tangents, has_aux, kwargs)

    return jvp_function


def _jvp(
    function: Callable[..., PyTree],
    primals: Sequence[PyTree],
    tangents: Sequence[PyTree] | None,
    has_aux: bool,
    kwargs: Mapping[str, PyTree],
) -> tuple[PyTree, ...]:
    def split(result: PyTree) -> tuple[PyTree, PyTree]:
        return separate_arrays(result, has_aux, "jvp")

    tangents = _checked_tangents(primals, tangents)
    call = DifferentiatedCall("jvp", function, primals, kwargs, split)
    check_operands(call)
    inputs = [DiffArgument(call, DiffState(i, ...)) for i in range(len(primals))]
    call.inputs = DiffInputs(inputs)

    leaves, treedef = jax.tree.flatten(call.take())
    of_inputs = call.inputs.split_tangents(
        "tangent", tangents, call.values, call.arguments.plain, strict=True
    )
    directions = treedef.flatten_up_to(of_inputs)

    # What has no direction does not move: it is constant in what JAX differentiates.
    moving = [index for index, direction in enumerate(directions) if direction is not None]

    def pure_of_moving(points: Sequence[jax.Array]) -> tuple[PyTree, PyTree]:
        every = list(leaves)
        for index, point in zip(moving, points, strict=True):
            every[index] = point
        return call.pure(*treedef.unflatten(every))

    points = [leaves[index] for index in moving]
    moves = [directions[index] for index in moving]
    with explained_forward_mode("jvp"):
        result, tangent, leaving = jax.jvp(pure_of_moving, (points,), (moves,), has_aux=True)
    aux = call.finish(leaving)
    return (result, tangent, aux) if has_aux else (result, tangent)


def _checked_tangents(
    primals: Sequence[PyTree], tangents: Sequence[PyTree] | None
) -> Sequence[PyTree]:
    """Returns the tangents; raises unless there is one for each primal."""
    for name, values in (("primals", primals), ("tangents", tangents)):
        if not isinstance(values, (tuple, list)):
            raise errors.not_a_tuple_of_arguments(name, values)

    assert tangents is not None
    if len(primals) != len(tangents):
        raise errors.unequal_counts(primals, tangents)
    return tangents
