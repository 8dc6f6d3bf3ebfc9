# SPDX-License-Identifier: Apache-2.0
"""Leaves of arguments that are static: which they are, and what they are compared by.

A *leaf* is what is left of an argument when its containers are taken apart. Arrays are dynamic.
Python's numbers are dynamic unless they are asked to be static. Everything else is static, and
compared by its *argument key*: the exact key of ``core.static``, and for an instance that Python
compares by identity, the keys of its attributes as well. Such an instance is equal to itself
whatever is assigned to it, so by identity alone a program compiled for its old attributes would
answer for the new ones.
"""

from __future__ import annotations

import enum
import sys
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from shardax.core.errors import StaticArgumentError
from shardax.core.node import Object
from shardax.core.paths import Path, format_path
from shardax.core.static import Static, exact_key
from shardax.transforms.closures import is_plain_instance

AUTO = "auto"
NUMBERS = "numbers"
"""The values of the option ``static``; under the second Python's numbers are static, too."""

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.Ref)
NUMBER_TYPES = frozenset({int, float, complex})
_TAKEN_WHOLE = frozenset({"jax", "jaxlib", "numpy", *sys.stdlib_module_names} - {"builtins"})
"""Packages whose instances (meshes, policies, loggers) are compared by identity alone.

A class that was made by ``exec`` without a module name says that it is of ``builtins``.
"""


def is_dynamic(leaf: Any, static_numbers: bool = False) -> bool:
    """Whether a leaf is passed to the program rather than compiled into it.

    Args:
        leaf: A leaf that is no Module or Variable.
        static_numbers: Whether Python's numbers are static.
    """
    if type(leaf) in NUMBER_TYPES:
        return not static_numbers
    if isinstance(leaf, enum.Enum):
        return False
    return isinstance(leaf, _ARRAYS) or hasattr(type(leaf), "__jax_array__")


def static_leaf(leaf: Any, where: Callable[[], Path] = tuple) -> Static:
    """Returns a static leaf with its argument key.

    Args:
        leaf: The leaf.
        where: Returns the path of the leaf, beginning with the name of the argument; asked for
            messages only.

    Raises:
        StaticArgumentError: If it is not hashable, or has attributes that are not.
    """
    try:
        return Static(leaf, argument_key(leaf))
    except TypeError as error:
        path = where()
        place = f" at {format_path(path)}" if path else ""
        raise StaticArgumentError(
            f"What is no array, number or Module is static here (as under static='auto'), but the "
            f"{type(leaf).__name__}{place} cannot be: {_shortened(leaf)} is not hashable "
            f"({error}). Use a tuple or frozenset instead of a list or set, a frozen dataclass for "
            f"configuration, and an sx.Module for what holds arrays or changes."
        ) from error


def argument_key(value: Any) -> Hashable:
    """Returns what a static argument is compared by: type-exact, and true after an assignment.

    Args:
        value: The argument, or a leaf of it.

    Raises:
        TypeError: If it is not hashable, or an attribute of an instance that is compared by
            identity is not.
    """
    return _key(value, ())


def _key(value: Any, around: tuple[Any, ...]) -> Hashable:
    key = exact_key(value)
    holder = value.__self__ if isinstance(value, types.MethodType) else value
    if not _is_open(holder) or any(holder is item for item in around):
        return key
    return (key, *(_attribute(holder, name, (*around, holder)) for name in vars(holder)))


def _attribute(holder: Any, name: str, around: tuple[Any, ...]) -> Hashable:
    value = vars(holder)[name]
    if isinstance(value, Object):  # used without being passed, it is an input of the program
        return (name, _Same(value))
    try:
        return (name, _key(value, around))
    except TypeError as error:
        raise TypeError(
            f"it is compared by identity, so a change of its attribute {name!r}, of type "
            f"{type(value).__name__}, could not be noticed; {error}"
        ) from error


class _Same:
    """An object by its identity, for as long as it lives."""

    __slots__ = ("_hash", "held")

    def __init__(self, held: Object) -> None:
        self.held = weakref.ref(held)
        self._hash = id(held)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        held = self.held()
        return held is not None and isinstance(other, _Same) and other.held() is held


def _is_open(value: Any) -> bool:
    """Whether a value is an instance that compares by identity and can be assigned to."""
    kind = type(value)
    return (
        kind.__eq__ is object.__eq__
        and kind.__hash__ is object.__hash__
        and kind.__module__.partition(".")[0] not in _TAKEN_WHOLE
        and not isinstance(value, Object)
        and is_plain_instance(value)
    )


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
