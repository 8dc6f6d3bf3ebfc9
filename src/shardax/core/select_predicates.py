# SPDX-License-Identifier: Apache-2.0
"""Tests of places: filters and functions, as selections take them.

A *test* says whether a place is wanted. One is given as a filter (``core.filters``: a type, a
metadata tag, ``...``, ``sx.PathContains``, ``sx.Not``), or as a function: of one argument, the
value, or of two, the path and the value, as filters are.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from shardax.core.errors import SelectionError
from shardax.core.filters import to_predicate
from shardax.core.lazy import LazyValue
from shardax.core.node import Object
from shardax.core.paths import Path, format_path
from shardax.core.select_places import Place, shown
from shardax.core.static import exact_key

Test = Callable[[Place], bool]


def to_test(item: Any) -> Test:
    """Turns a filter or function into a test of places.

    Args:
        item: A filter, a class, a union of classes, or a function of a value or of path and value.

    Raises:
        FilterError: If it is neither.
    """
    classes = classes_in(item)
    if classes is not None:
        return lambda place: is_instance(place, classes)
    wanted = with_path(item) if _is_function(item) else to_predicate(item)

    def test(place: Place) -> bool:
        try:
            return bool(wanted(place.path, shown(place.stored)))
        except Exception as error:
            error.add_note(f"(while a selection was looking at {format_path(place.path)})")
            raise

    return test


def _is_function(item: Any) -> bool:
    return callable(item) and not isinstance(item, type)


def with_path(function: Callable[..., Any]) -> Callable[[Path, Any], Any]:
    """Returns a function of path and value from one of the value, or of both.

    Raises:
        SelectionError: If it takes neither one argument nor two.
    """
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


def classes_in(item: Any) -> tuple[type, ...] | None:
    """Returns the classes of a class, a union, or a tuple of these; None for anything else."""
    if isinstance(item, type) and not isinstance(item, types.GenericAlias):
        return (item,)
    if isinstance(item, types.UnionType) or typing.get_origin(item) is typing.Union:
        found = [classes_in(part) for part in typing.get_args(item)]
    elif isinstance(item, tuple) and item:
        found = [classes_in(part) for part in item]
    else:
        return None
    return None if None in found else tuple(_flat(found))


def _flat(groups: list[Any]) -> Iterator[type]:
    for group in groups:
        yield from group


def is_instance(place: Place, classes: tuple[type, ...]) -> bool:
    """Whether an instance of some classes stands at a place; a lazy value is an array."""
    value = shown(place.stored)
    return isinstance(value, classes) or (isinstance(value, LazyValue) and jax.Array in classes)


def may_be_values(classes: tuple[type, ...]) -> bool:
    """Whether instances of some classes could be found in the values of Variables."""
    return not all(issubclass(item, Object) for item in classes)


def equals(wanted: Any) -> Test:
    """Returns a test for what equals a value exactly: in type at every depth, in dtype and shape.

    Args:
        wanted: Configuration, an array with values, or an object, which equals only itself.
    """
    if isinstance(wanted, Object):
        return lambda place: place.stored is wanted
    if isinstance(wanted, (jax.Array, np.ndarray, np.generic)):
        return lambda place: _same_array(shown(place.stored), wanted)
    try:
        key = exact_key(wanted)
    except TypeError as error:
        raise SelectionError(
            f"Nothing in a model can be compared with {wanted!r} of type {type(wanted).__name__} "
            f"({error}). Use at_subtrees_where(lambda value: ...)."
        ) from error

    def test(place: Place) -> bool:
        try:
            return exact_key(place.stored) == key
        except TypeError:
            return False

    return test


def _same_array(value: Any, wanted: Any) -> bool:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return False
    same_form = value.dtype == wanted.dtype and value.shape == wanted.shape
    return same_form and (value is wanted or bool((value == wanted).all()))
