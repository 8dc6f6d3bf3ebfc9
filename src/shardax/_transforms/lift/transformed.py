# SPDX-License-Identifier: Apache-2.0
"""How transforms are called, and the layers that they make of layers.

``decorator`` is what all transforms have in common: without a function they return a decorator, and
an option that they do not take is an error that lists those that they take.

What a transform makes of a Module, of a method of one, or of a partial with one, is a
``Transformed``: a layer that a model may hold. Walks find the Module in it, and a copy of the model
has another ``Transformed`` around its own Module.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from shardax._core.functions import NamedFunction
from shardax._core.graph.handlers import has_parts
from shardax._core.graph.paths import PyTree
from shardax._core.graph.settings import settings_key
from shardax._core.graph.static import identity_of
from shardax._core.object import Wrapper
from shardax._transforms import errors
from shardax._transforms.lift.signatures import check_callable

P = ParamSpec("P")
R = TypeVar("R")


# --- options ----------------------------------------------------------------------------------


def decorator(transform: NamedFunction[P, PyTree]) -> Callable[P, Any]:
    """Returns a transform that checks its options and returns a decorator without a function."""
    accepted = _accepted_options(transform)
    untyped: NamedFunction[..., PyTree] = transform

    @functools.wraps(transform)
    def public_transform(function: Any = None, *args: Any, **options: Any):
        accepted.check(args, options)
        if function is None and not args:
            return functools.partial(public_transform, **options)

        check_callable(function, transform.__name__)
        made = untyped(function, *args, **options)
        transformed: Any = function
        return Transformed.of(made, public_transform, transformed, args, options)

    return public_transform


def takes_options(transform: NamedFunction[P, R]) -> Callable[P, R]:
    """Returns a transform, or an ``__init__``, that refuses unknown options."""
    accepted = _accepted_options(transform)

    @functools.wraps(transform)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        accepted.check(args[1:], options)
        return transform(*args, **options)

    return checked


def wraps(function: Callable[..., PyTree]) -> Callable[[Any], Any]:
    """Returns ``functools.wraps`` for a function that may be a Module: no attributes are copied."""
    return functools.wraps(function, updated=())


class _AcceptedOptions(NamedTuple):
    """The options that a transform takes."""

    name: str
    """The transform's name, as users write it behind ``sx.``."""

    options: tuple[str, ...]
    """What may be given by name."""

    makes_function: bool
    """Whether all arguments but the function must be given by name."""

    def check(self, args: Sequence[object], options: Mapping[str, object]) -> None:
        """Raises TransformError for unknown options, or arguments behind the function."""
        unknown = [name for name in options if name not in self.options]
        if unknown or (args and self.makes_function):
            raise errors.unknown_options(self.name, unknown, self.options, self.makes_function)


def _accepted_options(transform: NamedFunction[..., object]) -> _AcceptedOptions:
    first, *others = inspect.signature(transform).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    options = tuple(
        parameter.name
        for parameter in (first, *others)
        if parameter.kind in by_name and parameter.name != "self"
    )

    takes_only_options = all(other.kind is inspect.Parameter.KEYWORD_ONLY for other in others)
    makes_function = first.name == "function" and takes_only_options
    name = transform.__qualname__.removesuffix(".__init__")
    return _AcceptedOptions(_public_name(transform.__module__, name), options, makes_function)


def _public_name(module: str, name: str) -> str:
    """Returns the name behind ``sx.``: those of private packages are names of ``sx`` itself."""
    package = module.split(".")[1]
    return name if package.startswith("_") else f"{package}.{name}"


# --- layers -----------------------------------------------------------------------------------


class Transformed(Wrapper):
    """What a transform made of a callable with Modules inside.

    Attributes:
        function: What was transformed.
    """

    # What a call needs is in slots, which ``functools.wraps`` cannot overwrite.
    __slots__ = ("__dict__", "__weakref__", "_args", "_options", "_run", "_transform", "function")

    def __init__(
        self,
        run: Callable[..., PyTree],
        transform: NamedFunction[..., Any],
        function: Callable[..., PyTree],
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self._run = run
        self._transform = transform
        self._args = tuple(args)
        self._options = dict(options)

    @classmethod
    def of(
        cls,
        made: Any,
        transform: NamedFunction[..., Any],
        function: Callable[..., PyTree],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Returns a ``Transformed`` if the function holds Modules, else what the transform made."""
        # Some transforms make objects of a class of their own, which are layers by themselves.
        is_plain_function = type(made) is types.FunctionType
        if not is_plain_function or made.__dict__.get("__wrapped__") is not function:
            return made
        if not has_parts(function):
            return made
        return cls(made, transform, function, args, options)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._run(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _wrapping(self) -> Hashable:
        keys = [(name, _key_of(option)) for name, option in sorted(self._options.items())]
        return (self._transform, tuple(map(_key_of, self._args)), tuple(keys))

    def _maker(self) -> Callable[[Any], Any]:
        return functools.partial(_transformed, self._transform, self._args, self._options)

    def _options_held(self) -> Mapping[str, Any]:
        return {**{str(index): option for index, option in enumerate(self._args)}, **self._options}

    @property
    def _title(self) -> str:
        module, name = self._transform.__module__, self._transform.__name__
        if module.partition(".")[0] != "shardax" or module.startswith("shardax.extend"):
            return name  # a transform of the user's
        return f"sx.{_public_name(module, name)}"

    def __reduce__(self) -> Any:
        return self._maker(), (self.function,)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        inner = repr(self.function) if isinstance(self.function, Wrapper) else name
        return f"<{self._title} of {inner}>"


def _transformed(
    transform: NamedFunction[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    function: Any,
) -> Any:
    """Returns what a transform makes of a callable, or of a hole."""
    if not callable(function):
        return Transformed(function, transform, function, args, options)
    return transform(function, *args, **options)


def _key_of(option: Any) -> Hashable:
    """Returns what an option compares by."""
    # Axes and specs are written as lists and dicts, with what is hashable inside.
    if type(option) is list:
        return (list, *map(_key_of, option))
    if type(option) is dict:
        return (dict, *((_key_of(key), _key_of(entry)) for key, entry in option.items()))
    try:
        return settings_key(option)
    except TypeError:
        return identity_of(option)
