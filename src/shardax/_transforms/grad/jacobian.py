# SPDX-License-Identifier: Apache-2.0
"""Jacobians and Hessians of functions over Modules.

What a function writes into Variables is carried back once, and is not differentiated. A Jacobian is
arranged like the result, with a gradient for each of its arrays; a Hessian has a gradient for each
number of the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from shardax._core.graph.paths import PyTree
from shardax._core.state.split_merge import iter_variables
from shardax._core.variable import Param
from shardax._transforms.grad import grad as diff
from shardax._transforms.grad.vjp import refuse_objects
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.binding import check_result
from shardax._transforms.lift.engine import SingleRunCall, decorator, wraps


def _jacobian(
    name: str,
    transform: Callable[..., PyTree],
    function: Callable[..., PyTree],
    argnums,
    has_aux: bool,
    wrt: Any,
    as_module: bool,
    options: dict[str, Any],
):
    """Lifts one of JAX's transforms from a function to its derivatives."""
    chosen, many = diff.diff_states(argnums, wrt)

    @wraps(function)
    def derivative(*args, **kwargs) -> PyTree:
        args, kwargs = inputs.by_position(function, args, kwargs, fill="gaps")
        once = SingleRunCall(name, function, args, kwargs)
        targets = diff.diff_arguments(once, chosen, as_module)
        is_hessian = transform is _hessian
        outer_targets = diff.diff_arguments(once, chosen) if is_hessian else targets
        for target in targets:
            diff.check_differentiable(once, target, **options)
        values, plain = once.graph.values(), list(once.arguments.plain)
        indices = sorted({entry.leaf for target in targets for entry in target.entries})
        positions = [target.position for target in targets if target.has_plain]
        points = ([values[i] for i in indices], [plain[p] for p in positions])
        of_result: list[Any] = []  # the structure of what is differentiated

        def split(result) -> tuple[PyTree, PyTree]:
            result, aux = diff.separate_aux(result, has_aux, name)
            refuse_objects(result, name)
            check_result(aux, name)
            of_result[:] = [jax.tree.structure(result)]
            return result, aux

        def pure(some_values: list[object], some_plain: list[object]) -> tuple[PyTree, PyTree]:
            all_values = diff.replaced(values, indices, some_values)
            all_plain = diff.replaced(plain, positions, some_plain)
            return once.run_once(all_values, all_plain, once.arguments.plain_named, split)

        is_forward = transform is not jax.jacrev
        explained = diff.explained_forward_mode(name) if is_forward else contextlib.nullcontext()
        with diff.explained_reverse_mode(), explained:
            derivatives, leaving = transform(pure, argnums=(0, 1), has_aux=True, **options)(*points)
        aux = once.finish(leaving)

        def arranged(part: PyTree, targets: PyTree = targets) -> PyTree:
            of_values, of_plain = part
            by_position = dict(zip(positions, of_plain, strict=True))
            gradients = diff.arrange_gradients(targets, indices, of_values, by_position)
            if as_module and not (is_hessian and targets is outer_targets):
                _name_leading_dimensions(gradients)
            return gradients if many else gradients[0]

        (treedef,) = of_result
        parts = treedef.flatten_up_to(derivatives)
        if is_hessian:  # each array of the gradient is differentiated again
            structure = jax.tree.structure(points)
            parts = [
                structure.unflatten(map(arranged, structure.flatten_up_to(part))) for part in parts
            ]
        arrays = treedef.unflatten([arranged(part, outer_targets) for part in parts])
        return (arrays, aux) if has_aux else arrays

    return derivative


def _name_leading_dimensions(gradients: PyTree) -> None:
    """Puts None into the axes of Variables for dimensions of the result."""
    for _, variable in iter_variables(gradients):
        axes, value = variable.axes, variable.value
        if axes is not None and isinstance(value, jax.Array):
            variable.set_metadata(axes=(None,) * (value.ndim - len(axes)) + tuple(axes))


@decorator
def jacrev(
    function: Any = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    wrt: Any = Param,
    holomorphic: bool = False,
    allow_int: bool = False,
    as_module: bool = False,
) -> Any:
    """Makes a function that returns the Jacobian, in reverse mode.

    Values that the function writes into Variables are carried back, and are not differentiated.

    Args:
        function: Returns arrays, or (arrays, aux) with ``has_aux``. Left out: returns a decorator.
        argnums: As for ``value_and_grad``.
        has_aux: As for ``value_and_grad``; the result is then (Jacobian, aux).
        wrt: As for ``value_and_grad``.
        holomorphic: As in ``jax.jacrev``.
        allow_int: As in ``jax.jacrev``.
        as_module: As for ``value_and_grad``; the Module stands for each array of the result.

    Returns:
        A function of the same arguments that returns a pytree like the result, with a gradient,
        arranged as by ``grad``, for each array; its arrays have the dimensions of the result first.

    Raises:
        TransformError: As for ``value_and_grad``, or if the result holds objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> jacobian = sx.jacrev(lambda layer, x: layer(x))(layer, jnp.ones(2))
        >>> jacobian["bias"].tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
        >>> modules = sx.jacrev(lambda layer, x: layer(x), as_module=True)(layer, jnp.ones(2))
        >>> type(modules).__name__, modules.bias.shape
        ('Linear', (3, 3))
    """
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _jacobian("jacrev", jax.jacrev, function, argnums, has_aux, wrt, as_module, options)


@decorator
def jacfwd(
    function: Any = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    wrt: Any = Param,
    holomorphic: bool = False,
    as_module: bool = False,
) -> Any:
    """Makes a function that returns the Jacobian, in forward mode.

    Args:
        function: As for ``jacrev``.
        argnums: As for ``jacrev``.
        has_aux: As for ``jacrev``.
        wrt: As for ``jacrev``.
        holomorphic: As in ``jax.jacfwd``.
        as_module: As for ``jacrev``.

    Returns:
        As for ``jacrev``.

    Raises:
        TransformError: As for ``jacrev``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> sx.jacfwd(lambda layer, x: layer(x), argnums=1)(layer, jnp.ones(2)).shape
        (3, 2)
    """
    check = {"holomorphic": holomorphic, "allow_int": False}
    return _jacobian("jacfwd", _jacfwd, function, argnums, has_aux, wrt, as_module, check)


def _jacfwd(function, *, allow_int: bool, **options):
    return jax.jacfwd(function, **options)


@decorator
def hessian(
    function: Any = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    wrt: Any = Param,
    holomorphic: bool = False,
    as_module: bool = False,
) -> Any:
    """Makes a function that returns the matrix of second derivatives.

    Args:
        function: As for ``jacrev``, usually with one number as its result.
        argnums: As for ``jacrev``.
        has_aux: As for ``jacrev``.
        wrt: As for ``jacrev``.
        holomorphic: As in ``jax.hessian``.
        as_module: Whether the gradients in a gradient are Modules: ``hessian["kernel"].bias``. The
            outer one is a State, since a Variable holds no Module.

    Returns:
        A function of the same arguments. For each array of the result it returns a gradient, in
        which each array is replaced by the gradient of itself: for a Module ``hessian["kernel"]``
        is a ``State``, and ``hessian["kernel"]["bias"]`` the array of derivatives by both.

    Raises:
        TransformError: As for ``jacrev``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 1, rngs=sx.Rngs(0))
        >>> square = lambda layer, x: (layer(x) ** 2).sum()
        >>> second = sx.hessian(square)(layer, jnp.array([1.0, 3.0]))
        >>> second["kernel"]["bias"].ravel().tolist(), float(second["bias"]["bias"][0, 0])
        ([2.0, 6.0], 2.0)
    """
    check = {"holomorphic": holomorphic, "allow_int": False}
    return _jacobian("hessian", _hessian, function, argnums, has_aux, wrt, as_module, check)


def _hessian(function, *, allow_int: bool, **options):
    return jax.hessian(function, **options)
