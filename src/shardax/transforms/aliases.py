# SPDX-License-Identifier: Apache-2.0
"""Aliases: the further paths of Variables that one model reaches in several ways.

Flattening gives every Variable the path by which it was met first. Whoever chooses by path must
hear of the others, too: a choice by ``.head.kernel`` means the tied ``.embed.kernel`` as well.
"""

from __future__ import annotations

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
    """Returns (position among the Variables, path) of every further way to reach a Variable.

    A way goes through one shared place at most, so that there are not more than shared places times
    Variables; and never back to an object that it came through. (In a model with cycles a Variable
    may be reached again through two shared places only; that way is not among these.) Remembered
    on the structure.
    """
    if graphdef._aliases is None:
        graphdef._aliases = _find(graphdef)
    return graphdef._aliases


def _find(graphdef: GraphDef) -> tuple[tuple[int, Path], ...]:
    walk = _Walk(graphdef)
    found = []
    for target, path, parent in walk.edges:
        if target in walk.above(parent):
            continue
        skipped = len(walk.first[target])
        for position, index in enumerate(graphdef.leaves):
            if target in walk.above(index):
                found.append((position, (*path, *walk.first[index][skipped:])))
    return tuple(found)


class _Walk:
    """One walk over definitions, in the order in which objects were walked.

    Attributes:
        first: The first path of each object.
        edges: (object, path, its holder) of each way to an object that is not the first.
    """

    def __init__(self, graphdef: GraphDef) -> None:
        self.graphdef = graphdef
        self.first: dict[int, Path] = {}
        self.holder: dict[int, int | None] = {}
        self.edges: list[tuple[int, Path, int | None]] = []
        for root in graphdef.roots:
            self.visit(root, (), None)

    def visit(self, child: Any, path: Path, holder: int | None) -> None:
        """Visits a child of an object."""
        if type(child) is MethodDef:
            child = child.owner
        if type(child) is Ref:
            position = child.position
            if position in self.first:
                self.edges.append((position, path, holder))
                return
            self.first[position], self.holder[position] = path, holder
            child, holder = self.graphdef.objects[position], position
        elif type(child) not in (TupleDef, MappingDef, PartialDef, WrapperDef):
            return
        for key, below in definition_children(child):
            self.visit(below, path if key is None else (*path, key), holder)

    def above(self, position: int | None) -> list[int]:
        """Returns an object and those that its first path goes through."""
        found = []
        while position is not None:
            found.append(position)
            position = self.holder[position]
        return found
