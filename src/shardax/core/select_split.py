# SPDX-License-Identifier: Apache-2.0
"""Splitting a tree: the places that belong to what is selected, and those that make up the rest.

Besides a selected place itself, what is *held* by it belongs to it: an object within it, also where
the object is reached by another path. The exception are objects that lead to a selected place, such
as a parent that a layer refers to: these are what lies between, and belong to neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from shardax.core.select_places import Place, children, root_place, search
from shardax.core.select_survey import Survey


def split_places(
    tree: Any, places: Sequence[Place], every_path: bool
) -> tuple[list[Place], list[Place]]:
    """Returns the outermost places of what is selected, and of the rest.

    Args:
        tree: The tree.
        places: What is selected.
        every_path: Whether what is reached by two paths is two places.
    """
    root = (root_place(tree),)
    keys = _held(places, Survey(tree, places, every_path))
    held = search(root, lambda place: place.key(every_path) in keys, every_path=every_path)
    survey = Survey(tree, held, every_path)
    leading = _leading(survey)

    def leads(place: Place) -> bool:
        """Whether something held is at or below a place."""
        if place.key(every_path) in survey.chosen:
            return True
        if place.is_holder:
            return _holder_key(place, every_path) in leading
        return any(map(leads, children(place)))

    rest = search(root, lambda place: not leads(place), every_path=every_path, barred=survey.chosen)
    return held, rest


def _held(places: Sequence[Place], survey: Survey) -> set[Hashable]:
    """Returns the keys of what is selected and of the objects that are held by it."""
    held = set(survey.chosen)
    if survey.every_path:  # by path, nothing is reached from elsewhere
        return held
    leading = _leading(survey)
    waiting = list(places)
    for place in waiting:
        for child in children(place, into_values=False):
            if child.is_holder:
                key = child.key(survey.every_path)
                if key in held or _holder_key(child, survey.every_path) in leading:
                    continue
                held.add(key)
            waiting.append(child)
    return held


def _leading(survey: Survey) -> set[Hashable]:
    return {_holder_key(n.place, survey.every_path) for n in survey.nodes if n.leads}


def _holder_key(place: Place, every_path: bool) -> Hashable:
    return place.path if every_path else id(place.holder)
