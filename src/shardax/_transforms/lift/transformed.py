# SPDX-License-Identifier: Apache-2.0
"""Functions that transforms make of layers.

A transform makes a function. What it makes of a Module, of a method of one, or of a partial with
one, is a ``Transformed``: a layer that a model may hold, since walks find the Module in it and a
copy of the model has another around its own Module.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardax._core.graph.handlers import has_parts
from shardax._core.graph.paths import PyTree
from shardax._core.graph.settings import settings_key
from shardax._core.graph.static import identity_of
from shardax._core.object import Wrapper


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
        transform: Any,
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
        transform: Any,
        function: Callable[..., PyTree],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Returns what a transform made of a function, as a layer if that holds Modules."""
        is_function = type(made) is types.FunctionType
        if is_function and made.__dict__.get("__wrapped__") is function and has_parts(function):
            return cls(made, transform, function, args, options)
        return made

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._run(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _wrapping(self):
        keys = [(name, _key_of(option)) for name, option in sorted(self._options.items())]
        return (self._transform, tuple(map(_key_of, self._args)), tuple(keys))

    def _maker(self) -> Callable[[Any], Any]:
        return functools.partial(_transformed, self._transform, self._args, self._options)

    def _options_held(self) -> Mapping[str, Any]:
        return {**{str(index): option for index, option in enumerate(self._args)}, **self._options}

    @property
    def _title(self) -> str:
        library, _, path = self._transform.__module__.partition(".")
        name = self._transform.__name__
        if library != "shardax" or path.startswith("extend"):  # a transform of the user's
            return name

        package = path.partition(".")[0]
        return f"sx.{name}" if package.startswith("_") else f"sx.{package}.{name}"

    def __reduce__(self) -> Any:
        return self._maker(), (self.function,)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        inner = repr(self.function) if isinstance(self.function, Wrapper) else name
        return f"<{self._title} of {inner}>"


def _transformed(
    transform: Any, args: tuple[Any, ...], options: dict[str, Any], function: Any
) -> Any:
    """Returns what a transform makes of a callable, or of a hole."""
    if not callable(function):
        return Transformed(function, transform, function, args, options)
    return transform(function, *args, **options)


def _key_of(option: Any) -> Hashable:
    """Returns what an option compares by."""
    # As axes and specs are written: lists and dicts, with what is hashable inside.
    if type(option) is list:
        return (list, *map(_key_of, option))
    if type(option) is dict:
        return (dict, *((_key_of(key), _key_of(entry)) for key, entry in option.items()))
    try:
        return settings_key(option)
    except TypeError:
        return identity_of(option)
