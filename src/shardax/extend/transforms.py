# SPDX-License-Identifier: Apache-2.0
"""Transforms and wrappers of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardax._core.frames import Frame
from shardax._core.functions import NamedFunction
from shardax._core.graph.paths import PyTree
from shardax._core.module import Module
from shardax._transforms import method_wrapping
from shardax._transforms.lift.engine import SingleRunCall, check_operands
from shardax._transforms.lift.signatures import check_callable
from shardax._transforms.lift.transformed import Transformed, wraps


def lift(
    transform: Callable[[Callable[..., PyTree]], Callable[..., PyTree]],
    name: str,
    *,
    make_frame: Callable[[str], Frame] = Frame,
) -> Callable[[Callable[..., PyTree]], Callable[..., PyTree]]:
    """Lifts a transform of JAX to functions that take Modules and write into them.

    The transform is one that calls its function once, with arguments of the same structure:
    ``jax.checkpoint``, ``jax.named_call``, a ``jax.custom_batching`` rule, one of your own. The
    lifted one takes functions of arrays, Modules, Variables and pytrees of these, and Modules. What
    the function writes is stored when the transform has returned; after an exception nothing has
    changed.

    Args:
        transform: Given a function of pytrees of arrays, returns another one.
        name: The name of the lifted transform, for errors.
        make_frame: Makes, of the name, the frame of a call; a subclass of ``Frame`` may have a rule
            of its own for Variables that the function uses without being given them.

    Returns:
        A function from a function, or a Module, to a function of the same arguments.

    Raises:
        TransformError: When used, if what is given cannot be called; when called, if an argument is
            neither arrays nor objects.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> keep_nothing = extend.lift(jax.checkpoint, "keep_nothing")
        >>> layer = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
        >>> loss = lambda layer, x: keep_nothing(layer)(x).sum()
        >>> sx.grad(loss)(layer, jnp.ones((3, 2)))["bias"].tolist()
        [3.0, 3.0]
    """

    def lifted(function: Any) -> Any:
        check_callable(function, name)

        @wraps(function)
        def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
            once = SingleRunCall(name, function, args, kwargs, make_frame)
            check_operands(once)

            run = transform(once.program(once.run_whole, "arguments"))
            values, plain = once.graph.values(), list(once.arguments.plain)
            return once.finish(run(values, plain, once.arguments.plain_named))

        return transformed(call, lifted, function)

    lifted.__name__ = lifted.__qualname__ = name
    return lifted


def transformed(
    call: Callable[..., PyTree], transform: NamedFunction[..., Any], function: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    """Returns the result of a transform, as a part of models where its function is one.

    A Module holds functions as configuration. The result of a transform of a Module, as an
    attribute of another one, has to show that Module to every walk over the model.

    Args:
        call: What the transform made, by ``functools.wraps(function)``.
        transform: The transform, which makes the same of another function.
        function: What the transform was given: a function, a Module, or a method of one.

    Returns:
        ``call`` itself for a function without Modules; else a callable that walks look into.

    Example:
        >>> import functools, shardax as sx
        >>> from shardax import extend
        >>> def twice(layer):
        ...     @functools.wraps(layer, updated=())
        ...     def call(x):
        ...         return layer(layer(x))
        ...     return extend.transformed(call, twice, layer)
        >>> class Model(sx.Module):
        ...     def __init__(self, rngs):
        ...         self.call = twice(sx.nn.Linear(2, 2, use_bias=False, rngs=rngs))
        >>> list(sx.state(Model(sx.Rngs(0))).flat())
        [('call', 'kernel')]
    """
    return Transformed.of(call, transform, function)


def wrap_methods(
    kind: type[Module], around: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> type[Module]:
    """Returns a subclass of the same name whose public methods are wrapped.

    Instances may change to it, and back, by their ``__class__``.

    Args:
        kind: The class of a Module.
        around: Given the name of a method and the method, returns the method of the subclass.

    Returns:
        The subclass.

    Example:
        >>> import functools, jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> calls = []
        >>> def recorded(name, method):
        ...     @functools.wraps(method)
        ...     def call(*args, **kwargs):
        ...         calls.append(name)
        ...         return method(*args, **kwargs)
        ...     return call
        >>> Linear = extend.wrap_methods(sx.nn.Linear, recorded)
        >>> _ = Linear(2, 2, rngs=sx.Rngs(0))(jnp.ones((1, 2)))
        >>> calls
        ['__call__']
    """
    return method_wrapping.subclass(kind, around)
