# SPDX-License-Identifier: Apache-2.0
"""The plain text of a selection: the tree with what is selected marked, the rest folded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from shardax.core.containers import _ARRAYS, Dict
from shardax.core.lazy import LazyValue
from shardax.core.node import Object
from shardax.core.paths import Path, format_path
from shardax.core.select_places import Place, children, root_place
from shardax.core.variables import Variable

_MAX_LINES = 100
_MAX_WIDTH = 80
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
    lines = list(_Text(places, every_path).lines(root_place(tree), "", 0))
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], f"{_NO_MARK}... {len(lines) - _MAX_LINES} more lines"]
    return "\n".join((f"Selection of {count} in a {type(tree).__name__}:", *lines))


class _Text:
    """The places to mark, what leads to them, and what was shown already."""

    def __init__(self, places: Collection[Place], every_path: bool) -> None:
        anywhere = [] if every_path else places
        self._objects = {id(place.holder) for place in anywhere if place.is_holder}
        self._paths = {place.path for place in places}
        self._leading = {path[:end] for path in self._paths for end in range(len(path))}
        self._shown: dict[int, Path] = {}

    def lines(self, place: Place, label: str, depth: int) -> Iterator[str]:
        """Yields the lines for one place and what is below it."""
        marked = place.path in self._paths or (
            place.path != () and place.is_holder and id(place.holder) in self._objects
        )
        margin = (_MARK if marked else _NO_MARK) + _INDENT * depth + label
        content = place.content
        name = type(content).__name__
        if place.is_holder and isinstance(content, Object):
            first = self._shown.setdefault(id(content), place.path)
            if first != place.path:
                yield f"{margin}<same {name} as {format_path(first)}>"
                return
        if marked or place.path not in self._leading:
            yield f"{margin}{_folded(place)}"
            return
        is_variable = isinstance(content, Variable)
        yield margin + (repr(content) if is_variable else f"{name}(")
        for child in children(place):
            yield from self.lines(child, _label(content, child.path[len(place.path) :]), depth + 1)
        if not is_variable:
            yield f"{_NO_MARK}{_INDENT * depth})"


def _folded(place: Place) -> str:
    """Returns what stands at a place in one line, without what is below it."""
    content = place.content
    if isinstance(content, _ARRAYS):
        lazy = ", lazy" if isinstance(content, LazyValue) else ""
        return f"{content.dtype}{list(content.shape)}{lazy}"
    if not isinstance(content, Variable):
        below = children(place)
        if below or isinstance(content, Object):
            return f"{type(content).__name__}({'...' if below else ''})"
    text = " ".join(repr(content).split())
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 3]}..."


def _label(content: Any, steps: Path) -> str:
    """Returns what is written before a part of a container."""
    if len(steps) != 1:  # what a method wraps has no step
        return f"{format_path(steps)}=" if steps else ""
    (step,) = steps
    if isinstance(content, (dict, Dict)):
        return f"{step!r}: "
    if isinstance(step, int):
        fields = getattr(content, "_fields", ())
        return f"{fields[step]}=" if step < len(fields) else ""
    return f"{step}="
