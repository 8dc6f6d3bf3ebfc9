# SPDX-License-Identifier: Apache-2.0
"""Functions of NumPy arrays inside JAX programs, with derivatives.

JAX cannot look into a host function, so its author says how the result moves with the arguments (a
*jvp rule*) or how gradients come back to them (a *vjp rule*). Rules are part of the program; one
that needs the host is a host function itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.core import Tracer

from shardax import CustomVjp, State, Variable, iter_variables
from shardax.errors import TransformError
from shardax.extend import (
    FlatCall,
    Frame,
    Object,
    Options,
    Path,
    PickledByName,
    PyTree,
    format_path,
    is_eager,
    stored_value,
)
from shardax.host import callback
from shardax.host.callback import is_differentiable
from shardax.host.calls import name_of
from shardax.host.errors import HostFunctionError

_PROGRAMS = 64  # how many forms of its arguments a host function remembers
_FLOAT0 = jax.dtypes.float0


def host_function(
    function: Callable[..., object] | None = None,
    *,
    out: object = None,
    vmap: str = "sequential",
    vjp: Callable[..., object] | None = None,
    jvp: Callable[..., object] | None = None,
    nondiff: bool = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Makes a function of NumPy arrays callable in JAX programs.

    The function gets NumPy arrays of its own for arrays, Variables and numbers, words
    (``jax.random.key_data``) for random keys, and read-only copies of Modules whose Variables hold
    NumPy arrays. Everything else is static. What it returns is checked against ``out``, and
    converted to its dtypes: floats may round, integers must fit.

    The function must depend on its arguments only. It may run any number of times, in any order and
    on any thread; not at all where its result is not used, once per device where arrays are
    sharded. It must not use JAX. A program with a host function cannot be exported; JAX's
    compilation cache on disk keeps it from JAX 0.12 on.

    Args:
        function: A function, method, partial or callable Module. Left out: returns a decorator.
        out: What the function returns: a pytree of ``jax.ShapeDtypeStruct`` (or anything with a
            shape and a dtype), or a shape rule, which is called with the arguments, a
            ``jax.ShapeDtypeStruct`` for every array. 64-bit dtypes count as 32-bit ones while JAX
            has only these. May be left out for a function that is given as ``vjp`` or ``jvp``.
        vmap: Under ``vmap``, ``"sequential"`` calls the function once per batch element;
            ``"vectorized"`` once for all, with the batch as leading dimensions of each array and
            each result.
        vjp: The derivative backward: ``vjp(args, result, cotangent)`` returns a tuple with one
            gradient for each positional argument that is not static; None is zero. A Module's is a
            mapping by path. It works on JAX arrays; to run it on the host, make it a host function.
        jvp: The derivative forward: ``jvp(args, result, tangents)`` returns the tangent of the
            result. Written in JAX it also gives gradients, backward. Both kinds of rules get what
            was passed by name and has no position also by name.
        nondiff: Whether the derivative is zero.
        static_argnums: Positions of arguments that are passed as they are, such as sizes on which
            ``out`` depends. They must be hashable.
        static_argnames: Their names.

    Returns:
        A function of the same arguments, for ``jit``, ``vmap``, ``grad``, ``scan``, ``shard_map``.
        Integers among arguments and results have no derivative; without ``vjp``, ``jvp`` or
        ``nondiff`` it is an error to differentiate anything else.

    Raises:
        HostFunctionError: If options are not valid; when called, if ``out`` promises no arrays;
            when it runs, if the function returns something else than ``out`` says. If it raises
            in a program, wrapped in JAX's own error; ``host_exception`` finds the exception
            itself. Outside of programs it is raised as is.
        StaticArgumentError: When called, if a static argument is not hashable.
        TransformError: When called, if an array is not of numbers; when differentiated without a
            derivative; names the arguments.
        ClosureError: When it runs, if it uses a Variable that is not among its arguments.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, shardax as sx
        >>> def slope(args, result, cotangent):
        ...     return (2 * args[0] * cotangent,)
        >>> square = sx.host.host_function(np.square, out=lambda x: x, vjp=slope)
        >>> x = jnp.array([1.0, 3.0])
        >>> jax.jit(square)(x).tolist()
        [1.0, 9.0]
        >>> jax.grad(lambda x: square(x).sum())(x).tolist()
        [2.0, 6.0]
    """
    derivatives = {"vjp": vjp, "jvp": jvp, "nondiff": nondiff}
    options = {**derivatives, "out": out, "vmap": vmap}
    options |= {"static_argnums": static_argnums, "static_argnames": static_argnames}

    Options(HostFunctionError, "host_function").choice("vmap", vmap, tuple(callback.VMAP_METHODS))
    chosen = [name for name, value in derivatives.items() if value]
    if len(chosen) > 1:
        raise HostFunctionError(
            f"host_function got {' and '.join(chosen)}, but there is one derivative. Give a jvp "
            f"written in JAX for both modes, or a vjp for gradients."
        )

    if function is None:
        return functools.partial(host_function, **options)

    static = FlatCall.static_keys(function, static_argnums, static_argnames)
    backward_out = functools.partial(gradients_like, static)
    derivative = Derivative(_rule(vjp, backward_out), _rule(jvp, tangent_like), nondiff)
    return HostFunction(function, out, vmap, derivative, static)


@dataclasses.dataclass(frozen=True)
class Derivative:
    """Derivative of a host function, by at most one of these."""

    vjp: Callable[..., PyTree] | None
    jvp: Callable[..., PyTree] | None
    nondiff: bool  # whether the derivative is zero


class HostFunction(PickledByName):
    """A function made by ``host_function``.

    Args:
        function: The user's function.
        out: What it promises, or a shape rule.
        vmap: ``"sequential"`` or ``"vectorized"``.
        derivative: How it is differentiated.
        static: Positions and names of static arguments.
        fills: Whether None in the result stands for zeros.

    Example:
        >>> import jax, numpy as np, shardax as sx
        >>> number = jax.ShapeDtypeStruct((), "int32")
        >>> count = sx.host.host_function(np.count_nonzero, out=number)
        >>> count, int(jax.jit(count)(np.array([3, 0, 5])))
        (<host function count_nonzero>, 2)
    """

    # Apart from what is only shown, which ``functools.wraps`` may overwrite.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_ruled",
        "_staged",
        "derivative",
        "fills",
        "function",
        "out",
        "static",
        "vmap",
    )

    def __init__(
        self,
        function: Callable[..., PyTree],
        out: PyTree,
        vmap: str,
        derivative: Derivative,
        static: frozenset[int | str] = frozenset(),
        fills: bool = False,
    ) -> None:
        functools.wraps(function, updated=())(self)
        self.function = function
        self.out = out
        self.vmap = vmap
        self.derivative = derivative
        self.static = static
        self.fills = fills

        self._staged = functools.lru_cache(maxsize=_PROGRAMS)(callback.staged)
        self._ruled: CustomVjp | None = None
        if derivative.vjp is not None:
            positions = tuple(key for key in static if isinstance(key, int))
            self._ruled = _HostVjp(self._call, positions, ...)
            self._ruled.defvjp(self._forward, functools.partial(self._backward, len(positions)))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<host function {self.name}>"

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return name_of(self.function)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if callback.is_on_host():  # already
            return self.function(*args, **kwargs)

        if self.out is None:
            raise HostFunctionError(
                f"The host function {self.name} does not say what it returns, which a program has "
                f"to know before it runs. Give out=jax.ShapeDtypeStruct(shape, dtype), or a "
                f"function of the arguments: out=lambda x: x for a result like x."
            )

        args, kwargs = _with_arrays(self._by_position(args, kwargs))
        # Nothing is differentiated outside of transforms, and an exception comes as it is.
        call = self._call if self._ruled is None or is_eager() else self._ruled
        return call(*args, **kwargs)

    def with_out(self, out: PyTree) -> Self:
        """Returns a host function with another promise, and None for zeros."""
        return type(self)(self.function, out, self.vmap, self.derivative, self.static, fills=True)

    def _by_position(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bind arguments by position if possible, as for rules."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return tuple(args), dict(kwargs)

        bound = signature.bind(*args, **kwargs)
        if self.static:  # one that is left out has its position, too
            bound.apply_defaults()
        return bound.args, bound.kwargs

    def _call(self, /, *args: object, **kwargs: object):
        args, kwargs = _with_arrays((args, kwargs))
        call = FlatCall("host_function", self.function, args, kwargs, static=self.static)
        program = callback.program_of(self.name, call, self.vmap, self.fills)
        program = self._with_promise(program)
        run = functools.partial(callback.call_on_host, program, self._staged(program))
        results = self._derived(call, program, run)
        return program.out_tree.unflatten(results)

    def _with_promise(self, program: callback.HostProgram) -> callback.HostProgram:
        with Frame("host_function") as frame:
            _, args, kwargs = program.call.restore(program.forms, frame)
            forms, treedef = callback.promise(self.name, self.out, args, kwargs)
        return dataclasses.replace(program, out_forms=forms, out_tree=treedef)

    def _derived(
        self, call: FlatCall, program: callback.HostProgram, run: Callable[..., PyTree]
    ) -> list[Any]:
        derivative, leaves = self.derivative, call.leaves
        has_derivative = any(map(is_differentiable, program.out_forms))
        if derivative.nondiff or not has_derivative:
            return run([stopped(leaf) for leaf in leaves])
        if derivative.jvp is not None:
            return forward(derivative.jvp, call, program, run)
        if derivative.vjp is not None:
            return run(leaves)
        return run(undifferentiable(self.name, leaves, call.paths))

    def _forward(self, /, *args: object, **kwargs: object):
        result = self(*args, **kwargs)
        return result, (args, kwargs, result)

    def _backward(self, static: int, /, *values) -> tuple[PyTree, ...]:
        assert self.derivative.vjp is not None
        (args, kwargs, result), cotangent = values[static:]
        gradients = self.derivative.vjp(args, result, jax.tree.map(_some, cotangent), **kwargs)
        if isinstance(gradients, (tuple, list)):
            return tuple(gradients)
        raise TransformError(
            f"vjp of the host function {self.name} must return a tuple with one gradient for each "
            f"argument (None: zero), but it returned a {type(gradients).__name__}."
        )


class _HostVjp(CustomVjp):
    """The derivative backward of a host function, which messages call by that function."""

    __slots__ = ()

    def __repr__(self) -> str:
        assert isinstance(self.function, types.MethodType)  # of the host function
        return repr(self.function.__self__)


def _rule(rule: object, out: Callable[..., object]) -> Any:
    """Let a rule, if a host function, promise the results of rules."""
    return rule.with_out(out) if isinstance(rule, HostFunction) and rule.out is None else rule


def _with_arrays(args: object):
    """Replace Variables outside of Modules, and JAX's literals, by arrays."""

    def array(leaf) -> Any:
        if isinstance(leaf, Variable):
            return leaf.value
        dtype = getattr(leaf, "dtype", None) if isinstance(leaf, (int, float, complex)) else None
        return leaf if dtype is None else np.asarray(leaf, dtype)

    return jax.tree.map(array, args, is_leaf=lambda leaf: isinstance(leaf, Object))


# --- derivatives ---


def stopped(leaf: object) -> Any:
    """Return a leaf without a derivative."""
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, Tracer) else leaf


def undifferentiable(name: str, leaves: Sequence[Any], paths: Sequence[Path]) -> list[Any]:
    """Return leaves with an error on differentiation."""

    @jax.custom_jvp
    def same(*leaves) -> PyTree:
        return leaves

    def refuse(primals: object, tangents):
        zero = jax.custom_derivatives.SymbolicZero
        moving = [p for p, t in zip(paths, tangents, strict=True) if not isinstance(t, zero)]
        names = ", ".join(format_path(path) for path in dict.fromkeys(moving))
        raise TransformError(
            f"The host function {name} is differentiated by {names}, but JAX cannot look into it, "
            f"and no derivative was given. Give one, host_function(..., vjp=rule) or jvp=rule; or "
            f"say that it has none, nondiff=True; or stop gradients before the call, "
            f"jax.lax.stop_gradient(x)."
        )

    same.defjvp(refuse, symbolic_zeros=True)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return list(leaves)
    return [
        guarded if is_differentiable(leaf) else stopped(leaf)
        for leaf, guarded in zip(leaves, same(*leaves), strict=True)
    ]


def forward(
    rule: Callable[..., PyTree],
    call: FlatCall,
    program: callback.HostProgram,
    run: Callable[[Sequence[PyTree]], list[PyTree]],
) -> list[PyTree]:
    """Run a function with a jvp rule as its derivative."""
    derivative = call.derivative(rule)

    @jax.custom_jvp
    def apply(*leaves) -> list[PyTree]:
        return run(leaves)

    @apply.defjvp
    def moved(primals, tangents):
        results = apply(*primals)
        result = program.out_tree.unflatten(results)
        return results, derivative.tangents(primals, list(map(_some, tangents)), result)

    return apply(*(leaf if is_differentiable(leaf) else stopped(leaf) for leaf in call.leaves))


def _some(tangent):
    return None if getattr(tangent, "dtype", None) == _FLOAT0 else tangent


# --- what rules that are host functions promise ---


def tangent_like(
    args: tuple[object, ...], result: object, tangents: object, **kwargs: object
) -> Any:
    """Shape rule of jvp rules: the tangent is like the result."""
    return if_differentiable(result)


def gradients_like(
    static: Container[int | str],
    args: tuple[object, ...],
    result: object,
    cotangent: object,
    **kwargs: object,
) -> Any:
    """Shape rule of vjp rules: gradients are like arguments, dicts for Modules."""
    moving = tuple(arg for position, arg in enumerate(args) if position not in static)
    return if_differentiable(
        jax.tree.map(_by_path, moving, is_leaf=lambda leaf: isinstance(leaf, Object))
    )


def _by_path(leaf):
    if not isinstance(leaf, Object):
        return leaf
    values = {path: stored_value(variable) for path, variable in iter_variables(leaf)}
    return State.from_flat(values).to_pure_dict()


def if_differentiable(tree: object) -> Any:
    """Replace shapes and dtypes without a derivative by None."""
    return jax.tree.map(
        lambda leaf: leaf if hasattr(leaf, "dtype") and is_differentiable(leaf) else None, tree
    )
