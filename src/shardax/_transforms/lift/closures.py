# SPDX-License-Identifier: Apache-2.0
"""Objects that a function uses without being given them.

A *source* is a place outside a function from which it takes an object: a closure cell, or a name in
its globals. Compiled functions look through their sources at every call, so that a model which was
rebound to the name is noticed.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardax._core.object import Object

# How many calls deep to look for sources in helper functions.
_MAX_DEPTH = 4

# Largest holder that is looked into, unless one of its first so many items is an object.
_MAX_ITEMS = 64

# How many holders (containers, instances of user classes) deep to look for objects.
_MAX_HOLDERS = 3


class ClosureSource(NamedTuple):
    """A place that held an object when it was found."""

    name: str  # the variable's name, for messages and paths
    read: Callable[[], Any]  # returns what the place holds now (None if it is empty)


def find_sources(function: Any) -> list[ClosureSource]:
    """Finds where a function or its helpers take objects from."""
    found: dict[Any, ClosureSource] = {}
    _search(function, 0, set(), found)
    return list(found.values())


def _search(value: Any, depth: int, seen: set[int], found: dict[Any, ClosureSource]) -> None:
    if depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.MethodType):
        if not isinstance(value.__self__, Object):  # an Object owner is an argument, not a source
            _add_holder(value.__self__, found)
        _search(value.__func__, depth, seen, found)
    elif isinstance(value, functools.partial):
        _search(value.func, depth, seen, found)
    elif isinstance(value, types.FunctionType):
        for key, source in _places(value):
            held = source.read()
            if any(True for _ in objects_in(held)):
                found.setdefault(key, source)
            if callable(held):
                _search(held, depth + 1, seen, found)
    elif hasattr(value, "__wrapped__") and not isinstance(value, type):
        _search(value.__wrapped__, depth, seen, found)
    elif is_plain_instance(value) and callable(value):
        _add_holder(value, found)
        _search(type(value).__call__, depth, seen, found)


def _add_holder(holder: Any, found: dict[Any, ClosureSource]) -> None:
    if any(True for _ in objects_in(holder)):
        found.setdefault(id(holder), ClosureSource("self", lambda: holder))


def _places(function: types.FunctionType) -> Iterator[tuple[Any, ClosureSource]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield id(cell), ClosureSource(name, functools.partial(_read_cell, cell))
    scope = function.__globals__
    for name in _global_names(function.__code__):
        if name in scope:
            yield (id(scope), name), ClosureSource(name, functools.partial(scope.get, name))


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = [
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_global_names(constant))
    return tuple(dict.fromkeys(names))


def objects_in(value: Any, depth: int = _MAX_HOLDERS) -> Iterator[Object]:
    """Yields the objects that a source holds."""
    if isinstance(value, Object):
        yield value
        return
    if depth == 0:
        return
    if isinstance(value, types.MethodType):
        yield from objects_in(value.__self__, depth)
        return
    if isinstance(value, (tuple, list)):
        items: Any = value
    elif isinstance(value, dict):
        items = value.values()
    elif is_plain_instance(value):
        items = vars(value).values()
    else:
        return
    first = itertools.islice(items, _MAX_ITEMS)
    if len(items) <= _MAX_ITEMS or any(isinstance(item, Object) for item in first):
        for item in list(items):
            yield from objects_in(item, depth - 1)


def is_plain_instance(value: Any) -> bool:
    """Whether ``value`` is an instance of an ordinary user class."""
    return (
        not isinstance(value, (Object, type, types.ModuleType, types.FunctionType))
        and not hasattr(value, "__wrapped__")
        and isinstance(getattr(value, "__dict__", None), dict)
    )
