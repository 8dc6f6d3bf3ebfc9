# SPDX-License-Identifier: Apache-2.0
"""Jacobians and Hessians of functions over Modules.

A Jacobian is arranged like the result, with a gradient for each of its arrays. A Hessian is
arranged so twice: each array of a gradient is replaced by the gradient of itself. What a function
writes into Variables is carried back once, and is not differentiated.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import jax

from shardax._core.graph.paths import PyTree
from shardax._core.state.filters import Filter
from shardax._core.state.split_merge import iter_variables
from shardax._core.variable_types import Param
from shardax._transforms.grad.differentiated import (
    Argnums,
    DifferentiatedCall,
    DiffInputs,
    DiffPair,
    diff_inputs,
    diff_states,
    separate_arrays,
)
from shardax._transforms.grad.forward_mode import explained_forward_mode
from shardax._transforms.lift.effects import check_result
from shardax._transforms.lift.signatures import by_position
from shardax._transforms.lift.transformed import decorator, wraps


@decorator
def jacrev(
    function: Callable[..., PyTree] | None = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    wrt: Filter = Param,
    holomorphic: bool = False,
    allow_int: bool = False,
    as_module: bool = False,
) -> Callable[..., PyTree]:
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
    assert function is not None  # ``decorator`` makes a decorator without it
    transform = functools.partial(jax.jacrev, allow_int=allow_int)
    return _lift(
        "jacrev", transform, function, argnums, has_aux, wrt, as_module, holomorphic, allow_int
    )


@decorator
def jacfwd(
    function: Callable[..., PyTree] | None = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    wrt: Filter = Param,
    holomorphic: bool = False,
    as_module: bool = False,
) -> Callable[..., PyTree]:
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
    assert function is not None  # ``decorator`` makes a decorator without it
    return _lift("jacfwd", jax.jacfwd, function, argnums, has_aux, wrt, as_module, holomorphic)


@decorator
def hessian(
    function: Callable[..., PyTree] | None = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    wrt: Filter = Param,
    holomorphic: bool = False,
    as_module: bool = False,
) -> Callable[..., PyTree]:
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
    assert function is not None  # ``decorator`` makes a decorator without it
    return _lift("hessian", jax.hessian, function, argnums, has_aux, wrt, as_module, holomorphic)


def _lift(
    name: str,
    transform: Callable[..., Callable[..., PyTree]],
    function: Callable[..., PyTree],
    argnums: Argnums,
    has_aux: bool,
    wrt: Filter,
    as_module: bool,
    holomorphic: bool,
    allow_int: bool = False,
) -> Callable[..., PyTree]:
    """Lifts one of JAX's transforms from a function to its derivatives."""
    chosen, many = diff_states(argnums, wrt)
    is_hessian = name == "hessian"

    @wraps(function)
    def derivative(*args: PyTree, **kwargs: PyTree) -> PyTree:
        args, kwargs = by_position(function, args, kwargs, fill="gaps")
        result_treedef = jax.tree.structure(None)

        def split(result: PyTree) -> tuple[PyTree, PyTree]:
            nonlocal result_treedef
            arrays, aux = separate_arrays(result, has_aux, name)
            check_result(aux, name)
            result_treedef = jax.tree.structure(arrays)
            return arrays, aux

        call = DifferentiatedCall(name, function, args, kwargs, split)
        inputs = call.inputs = diff_inputs(call, chosen, as_module)
        outer_inputs = diff_inputs(call, chosen) if is_hessian else inputs
        for argument in inputs.arguments:
            argument.check_differentiable(call, allow_int, holomorphic)

        transformed = transform(call.pure, argnums=(0, 1), has_aux=True, holomorphic=holomorphic)
        pair = call.take()
        is_forward = name != "jacrev"
        explained = explained_forward_mode(name) if is_forward else contextlib.nullcontext()
        with explained:
            derivatives, leaving = transformed(*pair)
        aux = call.finish(leaving)

        def arrange(gradients: DiffPair) -> PyTree:
            arranged = _arrange(inputs, gradients, as_module)
            return arranged if many else arranged[0]

        def arrange_twice(second_derivatives: PyTree) -> PyTree:
            # For each array of the pair: the pair of its derivatives.
            treedef = jax.tree.structure(pair)
            of_arrays = map(arrange, treedef.flatten_up_to(second_derivatives))
            arranged = outer_inputs.arrange(treedef.unflatten(of_arrays))
            return arranged if many else arranged[0]

        # For each array of the result: its derivatives by the pair.
        of_results = result_treedef.flatten_up_to(derivatives)
        arranged = map(arrange_twice if is_hessian else arrange, of_results)
        tree = result_treedef.unflatten(arranged)
        return (tree, aux) if has_aux else tree

    return derivative


def _arrange(inputs: DiffInputs, gradients: DiffPair, as_module: bool) -> tuple[PyTree, ...]:
    """Returns gradients by argument; in Modules the dimensions of the result have no name."""
    arranged = inputs.arrange(gradients)
    if not as_module:
        return arranged

    for _, variable in iter_variables(arranged):
        axes, value = variable.axes, variable.value
        if axes is not None and isinstance(value, jax.Array):
            of_result = (None,) * (value.ndim - len(axes))
            variable.set_metadata(axes=(*of_result, *axes))
    return arranged
