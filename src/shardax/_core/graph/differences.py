# SPDX-License-Identifier: Apache-2.0
"""Where two trees differ, and how, in words for errors.

A ``Difference`` is one place and what each of two trees has there. ``object_differences`` finds
those of two models, by the definitions of their objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from shardax._core.graph.definitions import (
    Child,
    Definition,
    ModuleDef,
    NodeDef,
    Ref,
    VariableDef,
    definition_children,
)
from shardax._core.graph.flatten import GraphWalk
from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.static import Static


class Difference(NamedTuple):
    """A place at which two trees differ, and what each has there, in words."""

    path: Path
    first: str  # "" for nothing
    second: str

    def __str__(self) -> str:
        if not (self.first and self.second):
            return "only one of them has it"
        return f"{self.first} against {self.second}"


def object_differences(first: GraphWalk, second: GraphWalk) -> Iterator[Difference]:
    """Yields the differences in structure of two walks, object by object, in walking order.

    Only the first is certain: what follows an object that one of them lacks is compared with its
    neighbour.
    """
    walks = (first, second)
    for path, mine, theirs in zip(first.paths, first.definitions, second.definitions, strict=False):
        yield from _differences(path, mine, theirs, walks)


def _differences(
    path: Path,
    first: Definition | NodeDef,
    second: Definition | NodeDef,
    walks: tuple[GraphWalk, GraphWalk],
) -> Iterator[Difference]:
    """Yields the differences of two definitions, or of two containers that are alike outside."""
    kinds = [getattr(part, "type", type(part)) for part in (first, second)]
    if kinds[0] is not kinds[1]:
        yield Difference(path, f"a {kinds[0].__name__}", f"a {kinds[1].__name__}")
    elif isinstance(first, VariableDef) and isinstance(second, VariableDef):
        if first != second:
            yield Difference(path, f"metadata ({first.metadata!r})", f"({second.metadata!r})")
    else:
        yield from _differences_of_children(path, first, second, walks)


def _differences_of_children(
    path: Path,
    first: Definition | NodeDef,
    second: Definition | NodeDef,
    walks: tuple[GraphWalk, GraphWalk],
) -> Iterator[Difference]:
    mine, theirs = _children_by_step(first), _children_by_step(second)

    for step in {**mine, **theirs}:
        child, other = mine.get(step), theirs.get(step)
        below = path if step[1] is None else (*path, step[1])

        if (
            isinstance(child, NodeDef)
            and isinstance(other, NodeDef)
            and child.is_alike_outside(other)
        ):
            yield from _differences(below, child, other, walks)
            continue

        # That two objects stand at different positions says nothing about them: they are compared
        # where they are defined.
        texts = (_text_of(child, below, walks[0]), _text_of(other, below, walks[1]))
        if child != other and texts != (_OBJECT, _OBJECT):
            yield Difference(below, *texts)

    yield from _differences_of_kind(path, first, second)
    if list(mine) != list(theirs):
        orders = [", ".join(str(key) for _, key in children) for children in (mine, theirs)]
        yield Difference(path, f"the order ({orders[0]})", f"({orders[1]})")


def _children_by_step(part: Definition | NodeDef) -> dict[tuple[type, Hashable], Child]:
    # By type as well, so that 1 and True are two.
    return {(type(step), step): child for step, child in definition_children(part)}


def _differences_of_kind(
    path: Path, first: Definition | NodeDef, second: Definition | NodeDef
) -> Iterator[Difference]:
    """Yields the attributes that are an array in one Module and a Variable in the other."""
    if not (isinstance(first, ModuleDef) and isinstance(second, ModuleDef)):
        return
    mine, theirs = dict(first.array_attributes), dict(second.array_attributes)
    for name in {**mine, **theirs}:  # in order, the same in every process
        if (name in mine) != (name in theirs):
            texts = ("an array", _OBJECT) if name in mine else (_OBJECT, "an array")
            yield Difference((*path, name), *texts)


_OBJECT = "an object"


def _text_of(child: Child | None, path: Path, walk: GraphWalk) -> str:
    """Returns what a child at a path is, in words; "" for None."""
    if child is None:
        return ""
    if isinstance(child, Static):
        return repr(child.value)
    if isinstance(child, Ref):
        first_path = walk.paths[child.position]
        return _OBJECT if first_path == path else f"the object at {where(first_path)}"
    return f"a {getattr(child.config, '__name__', child.handler.name)}"


def where(path: Path) -> str:
    """Returns a path for messages about one object, ``the top`` for the object itself."""
    return format_path(path) if path else "the top"
