# SPDX-License-Identifier: Apache-2.0
"""Further paths of shared Variables.

A Variable that is reached twice has one *first* path, that of the flattening. A choice by path
holds for its further paths, too, so these are found here.

From every place where an object is reached again there is one further path to each Variable below
it. So there are not more than shared places times Variables, and every Variable that is reached
twice has one. No path leads back to an object that it came through.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

from shardax._core.graph.definitions import (
    Child,
    Definition,
    GraphDef,
    NodeDef,
    Ref,
    definition_children,
)
from shardax._core.graph.paths import Path

AliasPaths = tuple[tuple[int, Path], ...]

_alias_paths: weakref.WeakKeyDictionary[GraphDef, AliasPaths] = weakref.WeakKeyDictionary()


def alias_paths(graphdef: GraphDef) -> AliasPaths:
    """Returns (position among the Variables, path) of each further path of a Variable."""
    paths = _alias_paths.get(graphdef)
    if paths is None:
        paths = _alias_paths[graphdef] = _AliasSearch(graphdef).run()
    return paths


def objects_in(definition: Definition | Child, path: Path) -> Iterator[tuple[int, Path]]:
    """Yields (position, path) of each object that a definition holds."""
    for key, child in definition_children(definition):
        yield from _objects_of_child(child, path if key is None else (*path, key))


def _objects_of_child(child: Child, path: Path) -> Iterator[tuple[int, Path]]:
    if type(child) is Ref:
        yield child.position, path
    elif type(child) is NodeDef:
        yield from objects_in(child, path)


class _SharedPlace(NamedTuple):
    """A place where an object is reached that was reached before."""

    position: int
    path: Path
    came_through: tuple[int, ...]
    """Positions of the objects on the path."""


class _AliasSearch:
    """The search for the further paths of one structure."""

    def __init__(self, graphdef: GraphDef) -> None:
        self.graphdef = graphdef
        self.reached: set[int] = set()
        self.shared_places: list[_SharedPlace] = []

    def run(self) -> AliasPaths:
        """Returns the further paths."""
        for root in self.graphdef.roots:
            for position, path in _objects_of_child(root, ()):
                self._visit(position, path, ())

        variable_at = {position: i for i, position in enumerate(self.graphdef.leaves)}
        paths: list[tuple[int, Path]] = []
        for place in self.shared_places:
            below = self._below(place.position, place.path, set(place.came_through))
            paths += sorted((variable_at[i], path) for i, path in below if i in variable_at)
        return tuple(paths)

    def _visit(self, position: int, path: Path, came_through: tuple[int, ...]) -> None:
        if position not in self.reached:
            self.reached.add(position)
            for child, child_path in objects_in(self.graphdef.objects[position], path):
                self._visit(child, child_path, (*came_through, position))
        elif position not in came_through:
            self.shared_places.append(_SharedPlace(position, path, came_through))

    def _below(self, position: int, path: Path, visited: set[int]) -> Iterator[tuple[int, Path]]:
        """Yields an object and every object reachable from it, with one path each."""
        if position in visited:
            return
        visited.add(position)
        yield position, path
        for child, child_path in objects_in(self.graphdef.objects[position], path):
            yield from self._below(child, child_path, visited)
