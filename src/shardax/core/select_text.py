# SPDX-License-Identifier: Apache-2.0
"""The plain text of a selection: the tree with what is selected marked, the rest folded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from shardax.core.node import Object
from shardax.core.paths import Path, format_path
from shardax.core.printing import Drawing, draw, leaf_text
from shardax.core.select_places import Place

_MAX_LINES = 100
_MARK, _NO_MARK, _INDENT = "> ", "  ", "  "


def selection_text(tree: Any, places: Collection[Place], every_path: bool) -> str:
    """Returns the text of ``repr(selection)``.

    Args:
        tree: The tree.
        places: What is selected.
        every_path: Whether an object is selected at the given paths only.

    Returns:
        A line that counts, and below it the tree: what is selected is marked with ``>``, and what
        holds nothing selected is shown in one line.
    """
    count = f"{len(places)} place{'' if len(places) == 1 else 's'}"
    text = _Text(places, every_path)
    lines = list(text.lines(draw(tree), 0))
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], f"{_NO_MARK}... {len(lines) - _MAX_LINES} more lines"]
    return "\n".join((f"Selection of {count} in a {type(tree).__name__}:", *lines))


class _Text:
    """The places to mark, and what leads to them."""

    def __init__(self, places: Collection[Place], every_path: bool) -> None:
        anywhere = [] if every_path else places
        self._objects = {id(place.holder) for place in anywhere if place.is_holder}
        self._paths = {place.path for place in places}
        self._leading = {path[:end] for path in self._paths for end in range(len(path))}

    def lines(self, drawing: Drawing, depth: int) -> Iterator[str]:
        """Yields the lines for one part of the tree."""
        value, path = drawing.value, drawing.path
        marked = path in self._paths or (isinstance(value, Object) and id(value) in self._objects)
        margin = (_MARK if marked else _NO_MARK) + _INDENT * depth + drawing.label
        if drawing.first is not None:
            yield f"{margin}<same {drawing.name} as {format_path(drawing.first.path)}>"
        elif drawing.parts is None:
            yield f"{margin}{leaf_text(drawing)}"
            yield from self._inside(path, depth)
        elif marked or path not in self._leading:
            yield f"{margin}{drawing.name}({'...' if drawing.parts else ''})"
        else:
            yield f"{margin}{drawing.name}("
            for part in drawing.parts:
                yield from self.lines(part, depth + 1)
            yield f"{_NO_MARK}{_INDENT * depth})"

    def _inside(self, path: Path, depth: int) -> Iterator[str]:
        """Yields a line for each place within a leaf, such as a Variable's value."""
        if path in self._leading:
            for below in self._paths:
                if len(below) > len(path) and below[: len(path)] == path:
                    yield f"{_MARK}{_INDENT * (depth + 1)}{format_path(below[len(path) :])}"
