# SPDX-License-Identifier: Apache-2.0
"""Transforms that are called outside of a compiled function.

Loops and branches are traced and compiled as a unit; ``remat``, ``custom_vjp`` and ``shard_map``
are traced. An eager call of one runs as a function of ``sx.jit``, with the same specializations,
effects, captures and shared programs. What is remembered is what ``jax.jit`` would remember:

- the same function objects, with equal options, are traced once for each signature;
- a function that is made anew is traced anew, and its program is found by the jaxpr.

A function that cannot be traced this way (it looks at a number, ``if float(variable) > 0``) is
called as it is.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from shardax._core import frames
from shardax._core.cross_process import PickledByName
from shardax._core.errors import ConcurrentWriteError, DonationError
from shardax._core.functions import NamedFunction
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import (
    NEUTRAL_ATTRIBUTES,
    exact_key,
    function_identities,
    identity_of,
)
from shardax._core.object import Object
from shardax._transforms.errors import ClosureError
from shardax._transforms.jit.cache import kept_by
from shardax._transforms.jit.jit import Jit
from shardax._transforms.jit.options import JitOptions
from shardax._transforms.lift.captures import Functions
from shardax._transforms.lift.transformed import Transformed

# A transform that takes its arguments apart: functions, options, positional and named arguments.
Lifted = NamedFunction[[Sequence[Any], Any, Sequence[Any], Mapping[str, Any]], Any]


class _EagerTransform(Functions):
    """A transform with its functions and options, as a function of the arguments."""

    __slots__ = ("__weakref__", "_functions", "lifted", "options")

    def __init__(
        self, lifted: Lifted, functions: tuple[Callable[..., PyTree], ...], options: object
    ) -> None:
        # Modules weakly: the program is kept by a function that may outlive them.
        self._functions = tuple(map(_reference, functions))
        self.lifted = lifted
        self.options = options

    @property
    def __name__(self) -> str:
        return self.lifted.__name__.strip("_")

    @property
    def functions(self) -> tuple[Callable[..., PyTree], ...]:
        """See ``Functions.functions``."""
        return tuple(function() for function in self._functions)

    def with_functions(self, functions: tuple[Callable[..., PyTree], ...]) -> _EagerTransform:
        """See ``Functions.with_functions``."""
        return _EagerTransform(self.lifted, functions, self.options)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.lifted(self.functions, self.options, args, kwargs)


def _reference(function: Callable[..., PyTree]) -> Callable[[], Any]:
    return weakref.ref(function) if isinstance(function, Object) else lambda: function


class _EagerProgram:
    """The compiled form of a transform of particular functions."""

    __slots__ = ("can_be_traced", "jit")

    def __init__(self, transformed: _EagerTransform) -> None:
        self.jit = Jit(transformed, _NO_OPTIONS)
        self.can_be_traced = True


_NO_OPTIONS = JitOptions()


def run(
    lifted: Lifted,
    functions: Sequence[Callable[..., PyTree]],
    options: Any,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    """Calls a transform, by a compiled program where that is right."""
    config: Any = jax.config
    if frames.local.frame is not None or not frames.is_eager() or config.jax_disable_jit:
        return lifted(functions, options, args, kwargs)
    program = _program_of(_EagerTransform(lifted, tuple(functions), options))
    if not program.can_be_traced:
        return lifted(functions, options, args, kwargs)

    try:
        return program.jit(*args, **kwargs)
    except (jax.errors.JaxRuntimeError, ConcurrentWriteError):
        # What fails when it runs fails as it is, too.
        raise
    except DonationError:
        # As it is, the call says it of the names that the user knows.
        pass
    except Exception as error:
        if isinstance(error, ClosureError) and error.has_moved_on:
            raise
        # As it is, the call may be right, or says in its own words what is wrong.
        program.can_be_traced = False
    return lifted(functions, options, args, kwargs)


def _program_of(transformed: _EagerTransform) -> _EagerProgram:
    """Returns the program of a transform, the one of an earlier call for the same functions."""
    kept_with = _keeper(transformed.functions)
    with contextlib.suppress(TypeError):  # options that cannot be compared
        if kept_with is not None:
            key = (
                transformed.lifted,
                tuple(map(_identity, transformed.functions)),
                exact_key(transformed.options),
                function_identities([transformed.options]),
            )
            return kept_by(kept_with, key, lambda: _EagerProgram(transformed))
    return _EagerProgram(transformed)


def _keeper(functions: tuple[Any, ...]) -> Any:
    """Returns the function that keeps the program of all; None if that would keep others alive."""
    # The program refers to all of them. One that closes over nothing may live longer than it would.
    by_id = {id(function): function for function in functions}
    holding = [function for function in by_id.values() if not _holds_nothing(function)]
    if len(holding) > 1 or not functions:
        return None
    keeper = next(iter(holding or (f for f in functions if not isinstance(f, Object))), None)
    can_keep = isinstance(keeper, (types.FunctionType, PickledByName, Transformed))
    return keeper if can_keep else None


def _holds_nothing(function: Any) -> bool:
    """Returns whether a function refers to its code and its globals alone, or is a Module."""
    if isinstance(function, Object):  # which the program refers to weakly
        return True
    return (
        type(function) is types.FunctionType
        and function.__closure__ is None
        and function.__defaults__ is None
        and function.__kwdefaults__ is None
        and not function.__dict__.keys() - NEUTRAL_ATTRIBUTES
    )


def _identity(function: Any) -> Hashable:
    """Returns the key of a function by its identity; that of a method lives as its owner does."""
    if isinstance(function, types.MethodType):
        return identity_of(function.__self__), _identity(function.__func__)
    return identity_of(function)
