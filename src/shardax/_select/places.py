# SPDX-License-Identifier: Apache-2.0
"""Places of a tree: what they are, what is in them, and how they are found.

A *tree* is a Module, a Variable, or any pytree with or without these. A *place* is somewhere in it:
an attribute, an item, a dict entry, or part of a Variable's value, such as ``.layers[0].w.value``.

What has identity (an object, a plain list or dict) is one place, by however many paths it is
reached. It is a *holder*; every other place is known by the nearest holder above it and the *local*
path from there. So a selection made before values were written is still right afterwards. The place
of an array attribute holds the array; the hidden Variable around it is only its holder.

A place has a *stored* value, as the holder stores it, and a *content*, which is the array where the
stored value is the hidden Variable of an array attribute. ``children`` lists the places below,
``search`` finds those that pass a test, ``locate`` the one at a path. None of them materializes a
lazy value; ``read`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, NamedTuple

import jax

from shardax._core.graph.handlers import Pairs, handler_of, has_parts, map_children
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.object import Object
from shardax._core.stored import ARRAY_HOLDERS, ARRAY_TYPES, ChangeableNode, from_stored
from shardax._core.variable import Variable
from shardax._select.variables import stored_value

ABSENT: Any = object()  # what ``descend`` returns where there is nothing


class Place(NamedTuple):
    """Somewhere in a tree."""

    path: Path
    stored: PyTree  # what the holder stores here
    holder: PyTree  # the nearest value with identity, here or above
    local: Path  # from the holder; empty for the holder itself
    inside: bool = False  # in a Variable's value, where lists and dicts have no identity
    # How many wrappers have the same path and holder: what a bound method or a partial wraps has no
    # step of its own.
    wrapped: int = 0
    above: tuple[int, ...] = ()  # ``id`` of every holder above

    @property
    def is_holder(self) -> bool:
        """Whether this is a value with identity, or the root."""
        return not self.local and not self.wrapped

    @property
    def named(self) -> bool:
        """Whether the path leads just here, for selecting."""
        return not self.wrapped

    @property
    def content(self) -> Leaf:
        """The content, not materialized: the array of an array attribute."""
        return stored_value(self.stored) if isinstance(self.stored, ARRAY_HOLDERS) else self.stored

    def key(self, every_path: bool) -> Hashable:
        """Returns the key of a place, equal for equal places."""
        # The root is a place of its own, apart from attributes that lead back to it.
        identity = (id(self.holder), self.local, self.wrapped, not self.path)
        return (self.path, *identity) if every_path else identity

    def steps_to(self, child: Place) -> Path:
        """Returns the path from here to a place directly below: one step, or none."""
        return child.path[len(self.path) :]


def root_place(tree: PyTree) -> Place:
    """Returns the place of the whole tree."""
    return Place((), tree, tree, ())


def parts(value: PyTree) -> Pairs:
    """Returns the (key, stored value) pairs of a value; the key is None for what is wrapped."""
    if isinstance(value, Variable):
        return [("value", stored_value(value))]
    return handler_of(value).children(value)


def children(place: Place, into_values: bool = True) -> list[Place]:
    """Returns the places directly below one, also those in the values of Variables if asked for."""
    is_variable = isinstance(place.stored, Variable)
    if is_variable and not into_values:
        return []

    inside = place.inside or is_variable
    above = place.above
    if place.is_holder:
        above = (*above, id(place.holder))

    below: list[Place] = []
    for key, child in parts(place.content):
        if not into_values and isinstance(child, ARRAY_HOLDERS):
            continue

        steps = () if key is None else (key,)
        path = (*place.path, *steps)
        if not inside and handler_of(child).has_identity:
            below.append(Place(path, child, child, (), False, 0, above))
        else:
            local = (*place.local, *steps)
            wrapped = 0 if steps else place.wrapped + 1
            below.append(Place(path, child, place.holder, local, inside, wrapped, above))
    return below


def is_leaf(place: Place) -> bool:
    """Whether a place is a leaf to JAX."""
    content = place.content
    if isinstance(content, ARRAY_TYPES):
        return True

    # What else a Module holds is configuration; None and objects are no leaves.
    in_module = isinstance(place.holder, Object) and not isinstance(place.holder, Variable)
    if in_module or content is None or isinstance(content, Object):
        return False
    return jax.tree_util.all_leaves((content,))


def shown(value: PyTree) -> PyTree:
    """Returns a stored value as users see it, nothing materialized."""
    if isinstance(value, ARRAY_HOLDERS):
        return stored_value(value)
    if handler_of(value).stores_items and has_parts(value):
        tree = map_children(shown, value)
        return tree.read() if isinstance(tree, ChangeableNode) else tree
    return value


def read(place: Place) -> PyTree:
    """Returns the value at a place as users see it, materialized; ``ABSENT`` if it is gone."""
    holder = place.holder
    if isinstance(holder, ARRAY_HOLDERS):
        return descend(holder.value, place.local)
    if isinstance(holder, Variable) and place.local:
        _ = holder.value  # what is lazy becomes real
    return from_stored(descend(holder, place.local))


def descend(value: PyTree, path: Path | str) -> PyTree:
    """Returns the stored value below another at a path, or ``ABSENT``."""
    if not path:
        return value

    for key, child in parts(value):
        steps = () if key is None else (key,)
        remaining = rest_of(path, steps)
        if remaining is not None:
            value_below = descend(child, remaining)
            if value_below is not ABSENT:
                return value_below
    return ABSENT


def locate(place: Place, path: Path | str) -> Place | None:
    """Returns the place at a path below another, or None."""
    if not path and place.named:
        return place

    for child in children(place):
        remaining = rest_of(path, place.steps_to(child))
        if remaining is not None:
            place_below = locate(child, remaining)
            if place_below is not None:
                return place_below
    return None


def rest_of(path: Path | str, steps: Path) -> Path | str | None:
    """Returns the rest of a path or text behind some steps; None if it begins with others."""
    if isinstance(path, str):
        text = format_path(steps) if steps else ""
        return path[len(text) :] if path.startswith(text) else None

    # Steps keep 1 and True apart.
    first = path[: len(steps)]
    if first != steps:
        return None
    if any(type(one) is not type(other) for one, other in zip(first, steps, strict=True)):
        return None
    return path[len(steps) :]


def search(
    starts: Iterable[Place],
    test: Callable[[Place], bool],
    *,
    every_path: bool,
    innermost: bool = False,
    into_values: bool = True,
    barred: Collection[Hashable] = (),
) -> list[Place]:
    """Returns the outermost places that pass a test, each once.

    Args:
        starts: Where to begin; what is found is there or below.
        test: Whether a place is wanted.
        every_path: Whether what is reached by several paths is a place at each of them.
        innermost: Whether to return, of places within one another, the inner ones instead.
        into_values: Whether to look into the values of Variables.
        barred: Keys of places that are not looked into.
    """
    chosen: list[Place] = []
    holds_chosen: dict[Hashable, bool] = {}  # whether a chosen place is there or below, by key

    def visit(place: Place) -> bool:
        """Visits a place; returns whether a chosen place is there or below."""
        key = place.key(every_path)
        if key in holds_chosen:
            return holds_chosen[key]
        leads_back = place.is_holder and id(place.holder) in place.above
        if key in barred or leads_back:
            return False

        # Until it is known better, so that what leads back here finds no second place.
        holds_chosen[key] = False
        is_chosen = not innermost and place.named and test(place)
        if not is_chosen:
            below = [visit(child) for child in children(place, into_values)]
            holds_chosen[key] = any(below)
            is_chosen = innermost and not any(below) and place.named and test(place)

        if is_chosen:
            holds_chosen[key] = True
            chosen.append(place)
        return holds_chosen[key]

    for start in starts:
        visit(start)
    return chosen
