# SPDX-License-Identifier: Apache-2.0
"""Predicates and accessors of selections.

A *test* decides whether a place is wanted. It is given as a filter (``_core.state.filters``: a
type, a metadata tag, ``...``, ``sx.PathContains``, ``sx.Not``), or as a function: of one argument,
the value, or of two, the path and the value, as filters are.

An *accessor* is a function that returns parts of its argument, ``lambda m: m.layers[0].attn``. It
is given a *stand-in* for a place. Attributes, items and entries of a stand-in are stand-ins for the
places below, so nothing is read or materialised on the way, and configuration can be pointed at
like anything else. What is not stored, such as a property, a method or a Module's own indexing, is
asked of the real value; an object that it returns is looked up.
"""

from __future__ import annotations

import inspect
import operator
import types
import typing
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
    ValuesView,
)
from typing import Any

import jax
import numpy as np

from shardax._core.containers import Dict, List
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.graph.static import exact_key
from shardax._core.graph.views import VIEW_LOCK
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.state.filters import to_predicate
from shardax._core.stored import class_of
from shardax._select.places import Place, SelectionError, children, read, search, shown

Test = Callable[[Place], bool]


def to_test(item: Any) -> Test:
    """Turns a filter or function into a test of places."""
    classes = classes_in(item)
    if classes is not None:
        return lambda place: is_instance(place, classes)
    predicate = with_path(item) if _is_function(item) else to_predicate(item)

    def test(place: Place) -> bool:
        try:
            return bool(predicate(place.path, shown(place.stored)))
        except Exception as error:
            error.add_note(f"(while a selection was looking at {format_path(place.path)})")
            raise

    return test


def _is_function(item: object) -> bool:
    return callable(item) and not isinstance(item, type)


def with_path(function: Callable[..., PyTree]) -> Callable[[Path, Any], Any]:
    """Turns a function of the value into one of path and value."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return lambda path, value: function(value)
    for count in (1, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return function if count == 2 else (lambda path, value: function(value))
    raise SelectionError(
        f"{function!r} takes the arguments {signature}, but a selection calls it with the value, "
        f"or with (path, value). Write it as lambda value: ... or lambda path, value: ..."
    )


def classes_in(item: object) -> tuple[type, ...] | None:
    """Returns the classes of a class, union or tuple, else None."""
    if isinstance(item, type) and not isinstance(item, types.GenericAlias):
        return (item,)
    if isinstance(item, types.UnionType) or typing.get_origin(item) is typing.Union:
        classes_of_parts = [classes_in(part) for part in typing.get_args(item)]
    elif isinstance(item, tuple) and item:
        classes_of_parts = [classes_in(part) for part in item]
    else:
        return None
    return (
        None
        if None in classes_of_parts
        else tuple(cls for classes in classes_of_parts for cls in classes or ())
    )


def is_instance(place: Place, classes: tuple[type, ...]) -> bool:
    """Whether a place holds an instance of some classes."""
    value = shown(place.stored)
    return isinstance(value, classes) or (isinstance(value, LazyValue) and jax.Array in classes)


def may_be_values(classes: tuple[type, ...]) -> bool:
    """Whether values of Variables could be instances of some classes."""
    return not all(issubclass(item, Object) for item in classes)


def equals(target: object) -> Test:
    """Returns a test for exact equality with a value."""
    if isinstance(target, Object):
        return lambda place: place.stored is target
    if isinstance(target, (jax.Array, np.ndarray, np.generic)):
        return lambda place: _same_array(shown(place.stored), target)
    try:
        key = exact_key(target)
    except TypeError as error:
        raise SelectionError(
            f"Nothing in a model can be compared with {target!r} of type {type(target).__name__} "
            f"({error}). Use at_subtrees_where(lambda value: ...)."
        ) from error

    def test(place: Place) -> bool:
        try:
            return exact_key(place.stored) == key
        except TypeError:
            return False

    return test


def _same_array(value, target) -> bool:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return False
    same_form = value.dtype == target.dtype and value.shape == target.shape
    return same_form and (value is target or bool((value == target).all()))


# --- accessors ------------------------------------------------------------------------------------


def accessed(place: Place, accessor: Callable[[Any], object]) -> list[Place]:
    """Returns the places returned by an accessor."""
    try:
        return list(_places(place, accessor(StandIn(place))))
    except Exception as error:
        error.add_note(f"(while an accessor was looking into {format_path(place.path)})")
        raise


def _places(start: Place, result: object) -> Iterator[Place]:
    if type(result) is StandIn:
        yield place_of(result)
    elif isinstance(result, Object):
        yield _found(start, result)
    elif isinstance(result, (list, tuple, Iterator, ValuesView)):
        for item in result:
            yield from _places(start, item)
    else:
        raise SelectionError(
            f"The accessor returned {result!r} of type {type(result).__name__}, which is not a "
            f"part of what it was given. Return a part, as in lambda m: m.layers[0].kernel, or "
            f"several, lambda m: (m.a, m.b)."
        )


def _found(start: Place, item: Object) -> Place:
    matches = search(
        (start,), lambda place: place.stored is item, every_path=False, into_values=False
    )
    if matches:
        return matches[0]
    if item._lock is VIEW_LOCK or getattr(item, "_parent", None) is not None:
        raise SelectionError(
            "The accessor returned a view of one layer of a stack, which is no part of the model: "
            "the stack holds all its layers as one. Select in that, lambda m: m.stack.stacked, "
            "which means every layer; or take the layers apart, sx.nn.unstack_layers(stack), and "
            "select among them; or select in the view, sx.select(stack[i])."
        )
    raise SelectionError(
        f"The accessor returned a {type(item).__name__} that is not in the "
        f"{type(start.stored).__name__} at {format_path(start.path)}. Return a part of what the "
        f"accessor is given."
    )


def place_of(stand_in: object) -> Place:
    """Returns the place of a stand-in."""
    return object.__getattribute__(stand_in, "_place")


def _value(item):
    return read(place_of(item)) if type(item) is StandIn else item


def _compared(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: function(_value(self), _value(other))


# Methods that change a list or dict.
_CHANGES = {"sort", "move_to_end", "__imul__", "__ior__"}.union(
    set(dir(MutableSequence)).difference(dir(Sequence)),
    set(dir(MutableMapping)).difference(dir(Mapping)),
)


class StandIn:
    """Argument of an accessor, standing for a place."""

    __slots__ = ("_place",)

    def __init__(self, place: Place) -> None:
        object.__setattr__(self, "_place", place)

    @property  # so that isinstance asks about what is there
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (never set)
        return class_of(place_of(self).content)

    def __getattr__(self, name: str) -> Any:
        place = place_of(self)
        content = place.content
        fields = getattr(content, "_fields", ())
        if isinstance(content, tuple) and name in fields:
            return self[fields.index(name)]
        if name in _CHANGES and isinstance(content, (list, List, dict, Dict)):
            raise SelectionError(
                f"The accessor called {name} of {format_path(place.path)}; it only says which part "
                "is meant. Change a copy: model = sx.clone(model), and call it on that."
            )
        if isinstance(content, (dict, Dict)):
            if name in ("keys", "values", "items"):
                return getattr(_entries(place), name)
        else:
            below = _below(place).get((str, name))
            if below is not None:
                return StandIn(below)
        return getattr(_value(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        raise SelectionError(
            f"The accessor set .{name}; it only says which part is meant. Edit what is selected: "
            f"sx.select(model).at(lambda m: m.{name}).set(value)."
        )

    def __getitem__(self, key: Any) -> Any:
        place = place_of(self)
        content = place.content
        if isinstance(content, (list, List, tuple)):
            return list(_entries(place).values())[key]
        below = _below(place).get((type(key), key)) if not isinstance(key, slice) else None
        return StandIn(below) if below is not None else _value(self)[key]

    def __iter__(self) -> Iterator[Any]:
        place = place_of(self)
        if isinstance(place.content, (list, List, tuple)):
            return iter(_entries(place).values())
        return iter(_value(self))

    def __call__(self, *args: object, **kwargs: object) -> PyTree:
        return _value(self)(*args, **kwargs)

    def __len__(self) -> int:
        return len(_value(self))

    def __contains__(self, item: object) -> bool:
        return _value(item) in _value(self)

    def __bool__(self) -> bool:
        return bool(_value(self))

    def __index__(self) -> int:
        return _value(self).__index__()

    __eq__, __lt__, __le__, __gt__, __ge__ = map(
        _compared, (operator.eq, operator.lt, operator.le, operator.gt, operator.ge)
    )

    def __hash__(self) -> int:
        return hash(_value(self))

    def __repr__(self) -> str:
        return f"<what stands at {format_path(place_of(self).path)}>"


def _below(place: Place) -> dict[tuple[type, Any], Place]:
    """Returns the places directly below one, by exact step."""
    children_by_key = {}
    for child in children(place):
        steps = child.path[len(place.path) :]
        if len(steps) == 1:
            children_by_key[type(steps[0]), steps[0]] = child
    return children_by_key


def _entries(place: Place) -> dict[Any, StandIn]:
    return {key: StandIn(below) for (_, key), below in _below(place).items()}
