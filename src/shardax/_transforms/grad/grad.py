# SPDX-License-Identifier: Apache-2.0
"""``value_and_grad`` and ``grad``: the gradient of one number by chosen arguments.

Both read as their counterparts in JAX: find what is differentiated (``DiffInputs``), make a pure
function of it (``DifferentiatedCall.pure``), let ``jax.value_and_grad`` differentiate that, carry
back what the user's function wrote (``finish``), and arrange the gradients like the arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.graph.handlers import axes_of
from shardax._core.graph.paths import PyTree
from shardax._core.state.filters import Filter
from shardax._core.variable import Variable
from shardax._core.variable_types import Param
from shardax._transforms.grad import errors
from shardax._transforms.grad.differentiated import (
    Argnums,
    DifferentiatedCall,
    diff_inputs,
    diff_states,
    separate_aux,
)
from shardax._transforms.lift.signatures import by_position
from shardax._transforms.lift.transformed import decorator, wraps


@decorator
def value_and_grad(
    function: Callable[..., PyTree] | None = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    wrt: Filter = Param,
    holomorphic: bool = False,
    allow_int: bool = False,
    as_module: bool = False,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Makes a function that returns value and gradient of a function.

    Values that the function writes into Variables are carried back, as by every lifted transform.

    Args:
        function: Returns a real scalar, or (scalar, aux) with ``has_aux``. Left out: returns a
            decorator.
        argnums: Position of the argument to differentiate, a ``DiffState``, or a sequence of these.
        has_aux: Whether the function returns (value, aux); aux may hold Modules and Variables.
        wrt: Filter of the Variables to differentiate in Modules and containers that are given by
            position alone. A Variable that is itself the argument is differentiated.
        holomorphic: As in ``jax.value_and_grad``.
        allow_int: As in ``jax.value_and_grad``.
        as_module: Whether the gradient of a Module is a Module of the same structure, whose
            Variables hold gradients (None where there is none), and that of a Variable a Variable.

    Returns:
        A function of the same arguments that returns (value, gradient), or ((value, aux),
        gradient). The gradient of a Module is a ``State``; of a Variable, an array like its value;
        of anything else, as in JAX. A sequence of argnums gives a tuple. A Variable that stands in
        several places has its gradient at the first path; a State leaves the others out, and None
        stands for a Variable by itself.

    Raises:
        TransformError: When called, if nothing matches the filter or a matching Variable is
            not of a differentiable dtype.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 1, rngs=sx.Rngs(0))
        >>> layer.kernel[...] = jnp.ones((2, 1))
        >>> loss = lambda layer, x: layer(x).sum()
        >>> value, grads = sx.value_and_grad(loss)(layer, jnp.array([1.0, 2.0]))
        >>> float(value), grads["kernel"].ravel().tolist()
        (3.0, [1.0, 2.0])
    """
    assert function is not None  # ``decorator`` makes a decorator without it
    return _value_and_grad(
        "value_and_grad", function, argnums, has_aux, wrt, holomorphic, allow_int, as_module
    )


@decorator
def grad(
    function: Callable[..., PyTree] | None = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    wrt: Filter = Param,
    holomorphic: bool = False,
    allow_int: bool = False,
    as_module: bool = False,
) -> Callable[..., PyTree]:
    """Makes a function that returns the gradient of a scalar function.

    Args:
        function: As for ``value_and_grad``.
        argnums: As for ``value_and_grad``.
        has_aux: As for ``value_and_grad``; the result is then (gradient, aux).
        wrt: As for ``value_and_grad``.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.
        as_module: As for ``value_and_grad``.

    Returns:
        A function of the same arguments that returns the gradient, or (gradient, aux).

    Raises:
        TransformError: As for ``value_and_grad``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> w = sx.Param(jnp.float32(3))
        >>> float(sx.grad(lambda w: w**2)(w))
        6.0
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> grads = sx.grad(lambda layer: layer(jnp.ones(2)).sum(), as_module=True)(layer)
        >>> type(grads).__name__, grads.bias.value.tolist()
        ('Linear', [1.0, 1.0, 1.0])
    """
    assert function is not None  # ``decorator`` makes a decorator without it
    value_and_gradient = _value_and_grad(
        "grad", function, argnums, has_aux, wrt, holomorphic, allow_int, as_module
    )

    @wraps(function)
    def grad_function(*args: PyTree, **kwargs: PyTree) -> PyTree:
        value, gradient = value_and_gradient(*args, **kwargs)
        if not has_aux:
            return gradient
        _, aux = value
        return gradient, aux

    return grad_function


def _value_and_grad(
    name: str,
    function: Callable[..., PyTree],
    argnums: Argnums,
    has_aux: bool,
    wrt: Filter,
    holomorphic: bool,
    allow_int: bool,
    as_module: bool,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns the lifted function of the transform that messages call ``name``."""
    chosen, many = diff_states(argnums, wrt)

    def split(result: PyTree) -> tuple[PyTree, PyTree]:
        value, aux = separate_aux(result, has_aux, name)
        return _scalar(value, holomorphic), aux

    @wraps(function)
    def value_and_grad_function(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        args, kwargs = by_position(function, args, kwargs, fill="gaps")
        call = DifferentiatedCall(name, function, args, kwargs, split)
        call.inputs = diff_inputs(call, chosen, as_module)
        for argument in call.inputs.arguments:
            argument.check_differentiable(call, allow_int, holomorphic)

        transformed = jax.value_and_grad(
            call.pure, argnums=(0, 1), has_aux=True, holomorphic=holomorphic, allow_int=allow_int
        )
        (value, leaving), gradients = transformed(*call.take())

        # ``finish`` applies the effects. Nothing before writes into the caller's objects, so an
        # exception of the function leaves them unchanged.
        aux = call.finish(leaving)

        arranged = call.inputs.arrange(gradients)
        gradient = arranged if many else arranged[0]
        if has_aux:
            return (value, aux), gradient
        return value, gradient

    return value_and_grad_function


def _scalar(
    value: PyTree, holomorphic: bool
) -> jax.Array | np.ndarray | np.generic | float | complex:
    """Returns the number that is differentiated, of a result or of a Variable or named array."""
    number = value.value if isinstance(value, Variable) else value
    if axes_of(number) is not None:
        (number,) = jax.tree.leaves(number)

    needed = jnp.complexfloating if holomorphic else jnp.floating
    is_array = isinstance(number, (jax.Array, np.ndarray, np.generic, float, complex))
    if is_array and jnp.ndim(number) == 0 and jnp.issubdtype(jnp.result_type(number), needed):
        return number

    kind = "complex" if holomorphic else "real"
    raise errors.not_a_scalar(value, number, is_array, kind)
