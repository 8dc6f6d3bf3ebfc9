# SPDX-License-Identifier: Apache-2.0
"""Accessors of selections: functions that point at parts, ``lambda m: m.layers[0].attn``.

An accessor is given a *stand-in* for a place. Attributes, items and entries of a stand-in are
stand-ins for the places below, so nothing is read or materialized on the way, and configuration can
be pointed at like anything else. What is not stored, such as a property, a method or a Module's own
indexing, is asked of the real value; an object that it returns is looked up.
"""

from __future__ import annotations

import operator
from collections.abc import (
    Callable,
    Hashable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
    ValuesView,
)
from typing import Any

from shardax._core.containers import Dict, List
from shardax._core.graph.paths import PyTree, format_path
from shardax._core.object import Object
from shardax._core.stored import class_of
from shardax._select import errors
from shardax._select.places import Place, children, read, search
from shardax._select.variables import is_view

Accessor = Callable[[Any], PyTree]


def accessed(place: Place, accessor: Accessor) -> list[Place]:
    """Returns the places that an accessor points at, given what is at a place."""
    try:
        return list(_places_of(accessor(StandIn(place)), place))
    except Exception as error:
        error.add_note(f"(while an accessor was looking into {format_path(place.path)})")
        raise


def _places_of(result: PyTree, start: Place) -> Iterator[Place]:
    """Yields the places of what an accessor returned: a part, or several."""
    # By ``type``, for ``isinstance`` asks about what the stand-in stands for.
    if type(result) is StandIn:
        yield place_of(result)
    elif isinstance(result, Object):
        yield _place_of_object(result, start)
    elif isinstance(result, (list, tuple, Iterator, ValuesView)):
        for item in result:
            yield from _places_of(item, start)
    else:
        raise errors.accessor_returned_no_part(result)


def _place_of_object(item: Object, start: Place) -> Place:
    """Returns the place of an object at or below a place; raises if it is elsewhere."""
    matches = search(
        (start,), lambda place: place.stored is item, every_path=False, into_values=False
    )
    if matches:
        return matches[0]
    if is_view(item):
        raise errors.accessor_returned_view()
    raise errors.accessor_returned_other_object(item, start.stored, start.path)


def place_of(stand_in: StandIn) -> Place:
    """Returns the place of a stand-in."""
    return object.__getattribute__(stand_in, "_place")


def _value_of(item: PyTree) -> PyTree:
    """Returns the value that a stand-in stands for; anything else as it is."""
    return read(place_of(item)) if type(item) is StandIn else item


def _on_values(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Returns a comparison of the values that stand-ins stand for."""
    return lambda self, other: function(_value_of(self), _value_of(other))


_CONTAINERS = (list, List, dict, Dict)
_SEQUENCES = (list, List, tuple)

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
        if isinstance(content, _CONTAINERS) and name in _CHANGES:
            raise errors.accessor_changed(place.path, name)

        if isinstance(content, (dict, Dict)):
            if name in ("keys", "values", "items"):
                return getattr(_entries(place), name)
        else:
            below = _places_by_step(place).get((str, name))
            if below is not None:
                return StandIn(below)
        return getattr(_value_of(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        raise errors.accessor_assigned(name)

    def __getitem__(self, key: Any) -> Any:
        place = place_of(self)
        if isinstance(place.content, _SEQUENCES):
            return list(_entries(place).values())[key]

        if not isinstance(key, slice):
            below = _places_by_step(place).get((type(key), key))
            if below is not None:
                return StandIn(below)
        return _value_of(self)[key]

    def __iter__(self) -> Iterator[Any]:
        place = place_of(self)
        if isinstance(place.content, _SEQUENCES):
            return iter(_entries(place).values())
        return iter(_value_of(self))

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return _value_of(self)(*args, **kwargs)

    def __len__(self) -> int:
        return len(_value_of(self))

    def __contains__(self, item: PyTree) -> bool:
        return _value_of(item) in _value_of(self)

    def __bool__(self) -> bool:
        return bool(_value_of(self))

    def __index__(self) -> int:
        return _value_of(self).__index__()

    __eq__ = _on_values(operator.eq)
    __lt__ = _on_values(operator.lt)
    __le__ = _on_values(operator.le)
    __gt__ = _on_values(operator.gt)
    __ge__ = _on_values(operator.ge)

    def __hash__(self) -> int:
        return hash(_value_of(self))

    def __repr__(self) -> str:
        return f"<what stands at {format_path(place_of(self).path)}>"


def _places_by_step(place: Place) -> dict[tuple[type, Hashable], Place]:
    """Returns the places directly below one, by type and value of the step, so 1 is not True."""
    places: dict[tuple[type, Hashable], Place] = {}
    for child in children(place):
        steps = place.steps_to(child)
        if len(steps) == 1:
            (step,) = steps
            places[type(step), step] = child
    return places


def _entries(place: Place) -> dict[Hashable, StandIn]:
    """Returns stand-ins for the places directly below one, by step."""
    return {step: StandIn(below) for (_, step), below in _places_by_step(place).items()}
