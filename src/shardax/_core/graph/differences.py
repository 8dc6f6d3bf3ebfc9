# SPDX-License-Identifier: Apache-2.0
"""Where two trees differ, and what each has there.

A ``Difference`` is one place, and the *part* that each of two trees has there.
``structure_differences`` finds those of two models. It describes both by path
(``parts_by_path``), and compares the parts of one path.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from shardax._core.graph.definitions import (
    Child,
    Definition,
    GraphDef,
    NodeDef,
    Ref,
    VariableDef,
    definition_children,
    definition_paths,
)
from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.static import Metadata, Static


class Composite(NamedTuple):
    """A part that has parts: an object or a container."""

    kind: str  # what messages call it
    metadata: Metadata | None  # of a Variable
    steps: tuple[Hashable, ...]  # to its children, in order

    def __str__(self) -> str:
        shown = repr(self.metadata) if self.metadata is not None else ""
        return f"{self.kind}({shown})" if shown else self.kind


class Text(str):
    """A part in words."""

    __slots__ = ()


Part: TypeAlias = Composite | Static | Text


class Difference(NamedTuple):
    """A place at which two trees differ, and what each has there; None for nothing."""

    path: Path
    first: Part | None
    second: Part | None

    @property
    def texts(self) -> tuple[str, str]:
        """What the two have there, in words."""
        return part_text(self.first), part_text(self.second)


def part_text(part: object) -> str:
    """Returns a part, or a static value, in words."""
    if part is None:
        return "absent"
    if isinstance(part, (Composite, Text)):
        return str(part)
    value = part.value if isinstance(part, Static) else part
    return f"{value!r} ({type(value).__name__})"


def structure_differences(
    first: GraphDef,
    second: GraphDef,
    first_names: Sequence[Path] = (),
    second_names: Sequence[Path] = (),
) -> Iterator[Difference]:
    """Yields the differences of two structures, in the order of the paths.

    Args:
        first: A structure.
        second: The other.
        first_names: The path of each root; by default the empty one.
        second_names: Likewise.
    """
    first_parts = parts_by_path(first, first_names)
    second_parts = parts_by_path(second, second_names)
    for path in {**first_parts, **second_parts}:
        difference = Difference(path, first_parts.get(path), second_parts.get(path))
        if difference.first == difference.second:
            continue

        # Where children are missing, they differ themselves.
        composites = [part for part in difference[1:] if isinstance(part, Composite)]
        if len(composites) == 2 and composites[0][:2] == composites[1][:2]:
            steps, other_steps = composites[0].steps, composites[1].steps
            if set(steps) == set(other_steps):
                yield Difference(path, _in_order(steps), _in_order(other_steps))
            continue
        yield difference


def _in_order(steps: Sequence[Hashable]) -> Text:
    return Text(f"the order ({', '.join(map(str, steps))})")


def parts_by_path(graphdef: GraphDef, names: Sequence[Path] = ()) -> dict[Path, Part]:
    """Returns what a structure has at each path.

    An object is at its first path; at another one stands where that is.

    Args:
        graphdef: The structure.
        names: The path of each root; by default the empty one.
    """
    paths = definition_paths(graphdef, names)
    parts: dict[Path, Part] = {}
    visited: set[int] = set()

    def add(part: Child, path: Path) -> None:
        if isinstance(part, Static):
            parts[path] = part
            return
        if isinstance(part, Ref):
            first_path = paths[part.position]
            if part.position in visited or first_path != path:
                parts.setdefault(path, Text(f"same as {format_path(first_path)}"))
                return
            visited.add(part.position)
            add_composite(graphdef.objects[part.position], path)
            return
        add_composite(part, path)

    def add_composite(part: Definition | NodeDef, path: Path) -> None:
        children = list(definition_children(part))
        metadata = part.metadata if isinstance(part, VariableDef) else None
        steps = tuple(step for step, _ in children)
        parts.setdefault(path, Composite(_kind_of(part), metadata, steps))
        for step, child in children:
            add(child, path if step is None else (*path, step))

    for position, root in enumerate(graphdef.roots):
        add(root, names[position] if names else ())
    return parts


def _kind_of(part: Definition | NodeDef) -> str:
    """Returns what messages call an object or container."""
    if isinstance(part, NodeDef):
        return getattr(part.config, "__name__", part.handler.name)
    return getattr(part.type, "_kind", part.type.__name__)
