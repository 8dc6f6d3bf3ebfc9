# SPDX-License-Identifier: Apache-2.0
"""Abstract evaluation: ``eval_shape`` and ``make_jaxpr``.

Both trace a function without running it; the given Modules keep their values and structure.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from shardax._core.frames import CapturedVariable, Frame, is_eager, owner_here
from shardax._core.graph.flatten import build
from shardax._core.graph.paths import PyTree
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.threads import local
from shardax._transforms.errors import StaticArgumentError
from shardax._transforms.jit.cache import kept_by
from shardax._transforms.jit.options import JitOptions
from shardax._transforms.lift import engine
from shardax._transforms.lift.arguments import check_static
from shardax._transforms.lift.input_graph import InputGraph, abstract
from shardax._transforms.lift.signatures import resolve_arguments
from shardax._transforms.lift.transformed import decorator, wraps

if TYPE_CHECKING:
    from shardax._transforms.jit.jit import Jit


class AbstractFrame(Frame):
    """A frame that fills abstract Variables that were not passed in."""

    # Lazy values are computed and abstract ones filled as part of the trace, which allocates
    # nothing.

    __slots__ = ()

    def capture(self, outer: Any) -> PyTree:
        """See ``Frame.capture``."""
        value = outer._value
        if isinstance(value, LazyValue):
            value = value.compute()
        elif any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value)):
            value = jax.tree.map(_filled, value)
        else:
            return super().capture(outer)
        stand_in = type(outer)._make(value, outer._metadata, self)
        self.captured.append(CapturedVariable(outer, stand_in, stand_in._value))
        return stand_in


def _filled(leaf: object):
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def eval_shape(function: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Returns the shapes and dtypes of what a function would return.

    A function that was met before is not traced again for like arguments, as in ``jax.eval_shape``.
    Objects that it closes over are looked up at every call.

    Args:
        function: A function over Modules; it may write Variables, but the given Modules are not
            changed.
        *args: Its arguments: Modules (lazy ones stay lazy), arrays, or ``jax.ShapeDtypeStruct``.
        **kwargs: Its keyword arguments.

    Returns:
        The result with ``jax.ShapeDtypeStruct`` in place of arrays. A Module in it is an abstract
        copy: it knows shapes, dtypes and axes, and counts as the model for ``partition_specs``,
        ``shardings``, ``checkpoint.restore`` and the like.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> batch = jax.ShapeDtypeStruct((8, 2), jnp.float32)
        >>> sx.eval_shape(lambda layer, x: layer(x), layer, batch).shape, layer.kernel.is_lazy
        ((8, 3), True)
    """
    if local.frame is None and is_eager():
        remembered, inputs = _remembered_of(function, args)
        if remembered is not None and remembered.is_due():
            with contextlib.suppress(Exception):  # said below, in the words of this function
                return remembered.shapes(inputs, kwargs)
            remembered.is_refused = True

    once = engine.SingleRunCall("eval_shape", function, args, kwargs, AbstractFrame)

    def pure(values, plain, plain_named):
        return once.run_once(values, plain, plain_named, lambda result: (None, result))[1]

    leaving = jax.eval_shape(once.program(pure, "arguments"), *abstract_inputs(once))
    return once.finish_on(abstract_copy(once), leaving)


class _RememberedShapes:
    """What ``eval_shape`` keeps of a function that it meets again, as ``jax.eval_shape`` does.

    From the second call on, the function is traced by a ``Jit`` of its own, which is never run: so
    it is traced once for each structure, shape and dtype of what it is given and closes over.
    """

    __slots__ = ("_jit", "function", "is_refused")

    def __init__(self, function: Callable[..., PyTree]) -> None:
        self.function = weakref.ref(function)  # which keeps this
        self.is_refused = False
        self._jit: Jit | None = None

    def is_due(self) -> bool:
        """Whether the function was met before; notes that it is met now."""
        if self._jit is not None:
            return not self.is_refused

        from shardax._transforms.jit.jit import Jit  # stands above, and has this function

        function = self.function()
        assert function is not None
        self._jit = Jit(function, JitOptions())
        return False

    def shapes(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """Returns the result of the function, with shapes in place of arrays."""
        from shardax._transforms.jit.stages import shapes_of_call  # stands above ``Jit``

        assert self._jit is not None
        result, is_certain = shapes_of_call(self._jit, args, kwargs)
        self.is_refused = not is_certain
        return result


def _remembered_of(
    function: Callable[..., PyTree], args: tuple[PyTree, ...]
) -> tuple[_RememberedShapes | None, tuple[PyTree, ...]]:
    """Returns what is kept of a function, if it can keep something, and its arguments."""
    if isinstance(function, Object):
        # A Module that is called is the first argument of a function of its class.
        function, args = type(function).__call__, (function, *args)
    if type(function) is not types.FunctionType:
        return None, args
    kept = kept_by(function, "eval_shape", functools.partial(_RememberedShapes, function))
    return kept, args


def abstract_inputs(once: engine.SingleRunCall) -> tuple[PyTree, ...]:
    """Returns what a call's pure function takes, lazy values as ``jax.ShapeDtypeStruct``."""
    plain, named = list(once.arguments.plain), once.arguments.plain_named
    return abstract(once.graph.leaves), plain, named


def abstract_copy(once: engine.SingleRunCall) -> InputGraph:
    """Returns a copy of a call's objects without arrays."""
    return abstract_graph(once.graph)


def abstract_graph(graph: InputGraph) -> InputGraph:
    """Returns a copy of objects without arrays."""
    shapes = jax.eval_shape(_identity, abstract(graph.leaves))
    return InputGraph(build(graph.flat.graphdef, shapes, owner_here())[0])


@jax.jit
def _identity(values: PyTree) -> PyTree:
    return values


@decorator
def make_jaxpr(
    function: Any = None, *, static_argnums: int | Sequence[int] = (), return_shape: bool = False
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
        TransformError: When called, if the result holds something else than arrays and objects.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> jaxpr = sx.make_jaxpr(lambda layer, x: layer(x))(layer, jnp.ones(2))
        >>> [v.aval.str_short() for v in jaxpr.jaxpr.invars], layer.kernel.is_lazy
        (['float32[2,3]', 'float32[3]', 'float32[2]'], True)
    """
    positions, names = resolve_arguments(
        function, static_argnums, (), "static", StaticArgumentError
    )
    static = {*positions, *names}

    @wraps(function)
    def jaxpr_of(*args, **kwargs):
        check_static(function, static, args, kwargs)
        once = engine.SingleRunCall(
            "make_jaxpr", function, args, kwargs, AbstractFrame, static=static
        )

        jaxpr, shapes = jax.make_jaxpr(
            once.program(once.run_whole, "arguments"), return_shape=True
        )(*abstract_inputs(once))
        return (jaxpr, once.finish_on(abstract_copy(once), shapes)) if return_shape else jaxpr

    return jaxpr_of
