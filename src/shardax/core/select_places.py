# SPDX-License-Identifier: Apache-2.0
"""Places: where something stands in a tree, for selections (``core.selection``).

A *tree* is a Module, a Variable, or any pytree with or without these. A *place* is somewhere in it:
an attribute, an item, a dict entry, or part of a Variable's value, such as ``.layers[0].w.value``.
What has identity is one place, by however many paths it is reached: an object, a plain list or
dict. Such a thing is a *holder*; every other place is known by the nearest holder above it and the
*local* path from there. So a selection made before values were written is still right afterwards.

What stands at the place of an array attribute is the array; the hidden Variable around it is only
its holder. Looking for places reads no lazy value: it is seen as the recipe that it is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax.core.containers import _HIDDEN, unbox
from shardax.core.functional import _parts
from shardax.core.node import Object, Wrapper
from shardax.core.paths import Path, PathKey, format_path, path_step
from shardax.core.state import State
from shardax.core.structure import has_parts, rebuild_tuple
from shardax.core.variables import Variable

_WITH_PARTS = (Object, list, dict, tuple, functools.partial, types.MethodType, Wrapper)
_LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None), types.FunctionType})
"""Types of configuration that has no parts, for speed."""

ABSENT: Any = object()
"""What ``descend`` finds where there is nothing."""


class Place(NamedTuple):
    """Somewhere in a tree.

    Attributes:
        path: The way here from the root.
        stored: What the holder stores here.
        holder: The nearest thing with identity, here or above.
        local: The way here from the holder; empty for the holder itself.
        inside: Whether this is in a Variable's value, where lists and dicts have no identity.
        wrapped: How many wrappers have the same path and holder: what a bound method or a partial
            is around has no step of its own.
        above: ``id`` of every holder above.
    """

    path: Path
    stored: Any
    holder: Any
    local: Path
    inside: bool = False
    wrapped: int = 0
    above: tuple[int, ...] = ()

    @property
    def is_holder(self) -> bool:
        """Whether what stands here has identity (the root counts as if it had)."""
        return not self.local and not self.wrapped

    @property
    def named(self) -> bool:
        """Whether the path leads just here, so that this can be selected."""
        return not self.wrapped

    @property
    def content(self) -> Any:
        """What stands here, without materialising it: the array of an array attribute."""
        return content_of(self.stored) if isinstance(self.stored, _HIDDEN) else self.stored

    def key(self, every_path: bool) -> Hashable:
        """What two places that are the same have in common.

        The root is a place of its own, apart from attributes that lead back to it.

        Args:
            every_path: Whether what is reached by two paths is two places.
        """
        known = (id(self.holder), self.local, self.wrapped, not self.path)
        return (self.path, *known) if every_path else known


def root_place(tree: Any) -> Place:
    """Returns the place of the whole tree."""
    return Place((), tree, tree, ())


def content_of(variable: Variable[Any]) -> Any:
    """Returns a Variable's value as seen from here; a lazy one as its recipe."""
    value = variable._here()._value
    return variable.value if isinstance(value, np.ndarray) else value


def children(place: Place, into_values: bool = True) -> list[Place]:
    """Returns the places directly below one.

    Args:
        place: A place.
        into_values: Whether a Variable's value, and an array attribute, are looked for and into.
    """
    stored = place.stored
    if type(stored) in _LEAVES or (isinstance(stored, Variable) and not into_values):
        return []
    inside = place.inside or isinstance(stored, Variable)
    above = (*place.above, id(place.holder)) if place.is_holder else place.above
    found: list[Place] = []
    for steps, child in parts(place.content):
        if not into_values and isinstance(child, _HIDDEN):
            continue
        path = (*place.path, *steps)
        if not inside and isinstance(child, (Object, list, dict)):
            found.append(Place(path, child, child, (), False, 0, above))
        else:
            local = (*place.local, *steps)
            wrapped = 0 if steps else place.wrapped + 1
            found.append(Place(path, child, place.holder, local, inside, wrapped, above))
    return found


def parts(value: Any) -> list[tuple[Path, Any]]:
    """Returns (steps, what is stored) for everything directly in a value."""
    if isinstance(value, Variable):
        return [(("value",), content_of(value))]
    if isinstance(value, State):
        return [((key,), value[key]) for key in value]
    if isinstance(value, _WITH_PARTS):
        return [(() if key is None else (key,), child) for key, child in _parts(value)]
    if value is None or jax.tree_util.all_leaves((value,)):
        return []
    below, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda item: item is not value)
    return [(_steps(keys), child) for keys, child in below]


def _steps(keys: Iterable[Any]) -> Path:
    steps: list[Hashable] = []
    for entry in keys:
        steps.extend(entry.path if isinstance(entry, PathKey) else [path_step(entry)])
    return tuple(steps)


def shown(value: Any) -> Any:
    """Returns what is stored as the user sees it, with nothing materialised."""
    if isinstance(value, _HIDDEN):
        return content_of(value)
    if isinstance(value, tuple) and has_parts(value):
        items = [shown(item) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return rebuild_tuple(type(value), items)
    return value


def read(place: Place) -> Any:
    """Returns what stands at a place now, materialised; ``ABSENT`` if the place is gone."""
    if isinstance(place.holder, Variable):
        is_hidden = isinstance(place.holder, _HIDDEN)
        if is_hidden or place.local:
            _ = place.holder.value  # what is lazy becomes real
        if is_hidden:
            return descend(place.holder.value, place.local)
    return unbox(descend(place.holder, place.local))


def descend(value: Any, path: Path | str) -> Any:
    """Returns what is stored below a value at a path, or ``ABSENT``."""
    if not path:
        return value
    for steps, child in parts(value):
        rest = rest_of(path, steps)
        if rest is not None:
            found = descend(child, rest)
            if found is not ABSENT:
                return found
    return ABSENT


def locate(place: Place, path: Path | str) -> Place | None:
    """Returns the place at a path, or its text, below another place, or None."""
    if not path and place.named:
        return place
    for child in children(place):
        rest = rest_of(path, child.path[len(place.path) :])
        if rest is not None:
            found = locate(child, rest)
            if found is not None:
                return found
    return None


def rest_of(path: Path | str, steps: Path) -> Path | str | None:
    """Returns what of a path, or of its text, is left after some steps; None if it has others.

    Steps keep ``1`` and ``True`` apart.
    """
    if isinstance(path, str):
        text = format_path(steps) if steps else ""
        return path[len(text) :] if path.startswith(text) else None
    first = path[: len(steps)]
    same = first == steps and all(type(a) is type(b) for a, b in zip(first, steps, strict=True))
    return path[len(steps) :] if same else None


def search(
    starts: Iterable[Place],
    test: Callable[[Place], bool],
    *,
    every_path: bool,
    innermost: bool = False,
    into_values: bool = True,
    barred: Collection[Hashable] = (),
) -> list[Place]:
    """Returns the places at and below some others that pass a test, in order, each once.

    Args:
        starts: Where to look.
        test: Says whether a place is wanted.
        every_path: Whether what is reached by two paths is two places.
        innermost: Whether, of wanted places within one another, the inner ones are returned.
        into_values: Whether to look into the values of Variables.
        barred: Keys of places that are not to be looked at, nor below.
    """
    found: list[Place] = []
    known: dict[Hashable, bool] = {}

    def visit(place: Place) -> bool:
        """Returns whether something wanted is here or below."""
        key = place.key(every_path)
        if key in known:
            return known[key]
        if key in barred or (place.is_holder and id(place.holder) in place.above):
            return False
        known[key] = False  # until it is known better: what leads back here is no second place
        wanted = not innermost and place.named and test(place)
        if not wanted:
            below = [visit(child) for child in children(place, into_values)]
            known[key] = any(below)
            wanted = innermost and not known[key] and place.named and test(place)
        if wanted:
            known[key] = True
            found.append(place)
        return known[key]

    for start in starts:
        visit(start)
    return found
