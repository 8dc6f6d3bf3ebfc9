# SPDX-License-Identifier: Apache-2.0
"""Aliases: the further paths of Variables that one model reaches in several ways.

Flattening gives every Variable the path by which it was met first. Whoever chooses by path must
hear of the others, too: a choice by ``.head.kernel`` means the tied ``.embed.kernel`` as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardax.core.paths import Path
from shardax.core.structure import (
    GraphDef,
    MappingDef,
    MethodDef,
    PartialDef,
    Ref,
    TupleDef,
    WrapperDef,
    definition_children,
)


def alias_paths(graphdef: GraphDef) -> tuple[tuple[int, Path], ...]:
    """Returns (position among the Variables, path) of further ways to reach Variables.

    From every shared place there is one way to each Variable that can be reached from there, so
    that there are not more than shared places times Variables, and every Variable with a further
    way has one here. No way leads back to an object that it came through. Remembered on the
    structure.
    """
    if graphdef._aliases is None:
        graphdef._aliases = _find(graphdef)
    return graphdef._aliases


def _find(graphdef: GraphDef) -> tuple[tuple[int, Path], ...]:
    walk = _Walk(graphdef)
    positions = {index: position for position, index in enumerate(graphdef.leaves)}
    found: list[tuple[int, Path]] = []
    for target, path, came_through in walk.edges:
        reached = dict(walk.ways(target, path, set(came_through)))
        found += sorted((positions[i], way) for i, way in reached.items() if i in positions)
    return tuple(found)


class _Walk:
    """One walk over definitions, in the order in which objects were walked.

    Attributes:
        edges: (object, path, objects on the way) of each way to an object that is not the first,
            but for ways back to an object that they came through.
    """

    def __init__(self, graphdef: GraphDef) -> None:
        self.graphdef = graphdef
        self.met: set[int] = set()
        self.edges: list[tuple[int, Path, tuple[int, ...]]] = []
        for root in graphdef.roots:
            for position, path in _objects(root, ()):
                self.visit(position, path, ())

    def visit(self, position: int, path: Path, above: tuple[int, ...]) -> None:
        """Visits an object, reached through those above."""
        if position in self.met:
            if position not in above:
                self.edges.append((position, path, above))
            return
        self.met.add(position)
        for below, way in _objects_in(self.graphdef, position, path):
            self.visit(below, way, (*above, position))

    def ways(self, position: int, path: Path, met: set[int]) -> Iterator[tuple[int, Path]]:
        """Yields each object that can be reached from one, itself first, with a way there.

        Args:
            position: The object.
            path: The way to it.
            met: Objects to go around; those that were reached are added.
        """
        if position in met:
            return
        met.add(position)
        yield position, path
        for below, way in _objects_in(self.graphdef, position, path):
            yield from self.ways(below, way, met)


def _objects_in(graphdef: GraphDef, position: int, path: Path) -> Iterator[tuple[int, Path]]:
    """Yields the objects that an object holds, also in immutable containers, and their paths."""
    for key, child in definition_children(graphdef.objects[position]):
        yield from _objects(child, path if key is None else (*path, key))


def _objects(child: Any, path: Path) -> Iterator[tuple[int, Path]]:
    """Yields the object that a child is, or those in it."""
    if type(child) is MethodDef:
        child = child.owner
    if type(child) is Ref:
        yield child.position, path
    elif type(child) in (TupleDef, MappingDef, PartialDef, WrapperDef):
        for key, below in definition_children(child):
            yield from _objects(below, path if key is None else (*path, key))
