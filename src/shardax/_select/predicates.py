# SPDX-License-Identifier: Apache-2.0
"""Tests of selections: whether a place is wanted.

A *test* is a function of a place. Users give it as a filter (``_core.state.filters``: a type, a
metadata tag, ``...``, ``sx.PathContains``, ``sx.Not``), or as a function: of one argument, the
value, or of two, the path and the value, as filters are.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable

import jax
import numpy as np

from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.graph.static import exact_key
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.state.filters import Filter, to_predicate
from shardax._core.values import same_value
from shardax._select import errors
from shardax._select.places import Place, shown

Test = Callable[[Place], bool]
# What users give: a filter, a function of the value, or one of path and value.
Condition = Filter | Callable[..., bool]

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def to_test(condition: Condition) -> Test:
    """Returns the test of a filter or function."""
    classes = classes_in(condition)
    if classes is not None:
        return lambda place: is_instance(place, classes)

    is_function = callable(condition) and not isinstance(condition, type)
    predicate = with_path(condition) if is_function else to_predicate(condition)

    def test(place: Place) -> bool:
        try:
            return bool(predicate(place.path, shown(place.stored)))
        except Exception as error:
            error.add_note(f"(while a selection was looking at {format_path(place.path)})")
            raise

    return test


def with_path(function: Callable[..., PyTree]) -> Callable[[Path, PyTree], PyTree]:
    """Returns a function of path and value that calls one of the value, or of both."""

    def of_value(path: Path, value: PyTree) -> PyTree:
        return function(value)

    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return of_value

    for count in (1, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return function if count == 2 else of_value
    raise errors.wrong_signature(function, signature)


def classes_in(item: object) -> tuple[type, ...] | None:
    """Returns the classes of a class, a union or a tuple of these; None for anything else."""
    if isinstance(item, type) and not isinstance(item, types.GenericAlias):
        return (item,)

    members: tuple[object, ...] = ()
    if isinstance(item, types.UnionType) or typing.get_origin(item) is typing.Union:
        members = typing.get_args(item)
    elif isinstance(item, tuple):
        members = item

    classes: list[type] = []
    for member in members:
        classes_of_member = classes_in(member)
        if classes_of_member is None:
            return None
        classes.extend(classes_of_member)
    return tuple(classes) or None


def is_instance(place: Place, classes: tuple[type, ...]) -> bool:
    """Whether a place holds an instance of some classes; a lazy value counts as an array."""
    value = shown(place.stored)
    return isinstance(value, classes) or (isinstance(value, LazyValue) and jax.Array in classes)


def may_be_values(classes: tuple[type, ...]) -> bool:
    """Whether values of Variables could be instances of some classes."""
    return not all(issubclass(item, Object) for item in classes)


def equals(target: PyTree) -> Test:
    """Returns a test for exact equality with a value."""
    if isinstance(target, Object):
        return lambda place: place.stored is target
    if isinstance(target, _ARRAYS):
        return lambda place: _is_same_array(shown(place.stored), target)

    try:
        key = exact_key(target)
    except TypeError as error:
        raise errors.not_comparable(target, error) from error

    def test(place: Place) -> bool:
        try:
            return exact_key(place.stored) == key
        except TypeError:  # of something that cannot be compared
            return False

    return test


def _is_same_array(value: PyTree, target: jax.Array | np.ndarray | np.generic) -> bool:
    """Whether a value is an array of the same dtype, shape and numbers, to the last bit."""
    # Not of a lazy one, which would be computed.
    return isinstance(value, _ARRAYS) and same_value(value, target)
