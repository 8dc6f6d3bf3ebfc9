# SPDX-License-Identifier: Apache-2.0
"""How a selection is printed: the tree, with a mark at every selected place."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardax._core.graph.handlers import handler_of
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, line_of
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.stored import ARRAY_TYPES, title_of
from shardax._core.variable import Variable
from shardax._select.errors import count_of
from shardax._select.places import Place, children, root_place

_MAX_LINES = 100
_MAX_WIDTH = 80
_MARK, _NO_MARK, _INDENT = "> ", "  ", "  "


def selection_text(tree: PyTree, places: Collection[Place], every_path: bool) -> str:
    """Returns the text of ``repr(selection)``."""
    title = f"Selection of {count_of('place', len(places))} in a {type(tree).__name__}:"
    lines = list(_Printer(places, every_path).lines(root_place(tree), "", 0))
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], f"{_NO_MARK}... {len(lines) - _MAX_LINES} more lines"]
    return "\n".join([title, *lines])


class _Printer:
    """Prints a tree with marked places, unfolded as far as these."""

    def __init__(self, places: Collection[Place], every_path: bool) -> None:
        self._paths = {place.path for place in places}
        self._unfolded = {path[:end] for path in self._paths for end in range(len(path))}
        # Objects that are marked wherever they stand.
        self._objects: set[int] = set()
        if not every_path:
            self._objects = {id(place.holder) for place in places if place.is_holder}
        self._first_paths: dict[int, Path] = {}  # of objects that were printed, by ``id``

    def lines(self, place: Place, label: str, depth: int) -> Iterator[str]:
        """Yields the lines of one place and its parts."""
        is_marked = self._is_marked(place)
        margin = (_MARK if is_marked else _NO_MARK) + _INDENT * depth + label
        content = place.content
        title = title_of(content)

        if place.is_holder and isinstance(content, Object):
            first_path = self._first_paths.setdefault(id(content), place.path)
            if first_path != place.path:
                yield f"{margin}<same {title} as {format_path(first_path)}>"
                return

        if is_marked or place.path not in self._unfolded:
            yield f"{margin}{_folded(place)}"
            return

        is_variable = isinstance(content, Variable)
        yield margin + (repr(content) if is_variable else f"{title}(")
        for child in children(place):
            yield from self.lines(child, _label(content, place.steps_to(child)), depth + 1)
        if not is_variable:
            yield f"{_NO_MARK}{_INDENT * depth})"

    def _is_marked(self, place: Place) -> bool:
        if place.path in self._paths:
            return True
        return place.path != () and place.is_holder and id(place.holder) in self._objects


def _folded(place: Place) -> str:
    """Returns one line for a place and all below it."""
    content = place.content
    if isinstance(content, ARRAY_TYPES):
        lazy = ", lazy" if isinstance(content, LazyValue) else ""
        return f"{content.dtype}{list(content.shape)}{lazy}"

    if not isinstance(content, Variable):
        has_parts = bool(children(place))
        if has_parts or isinstance(content, Object):
            return f"{title_of(content)}({'...' if has_parts else ''})"

    text = line_of(content)
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 3]}..."


def _label(content: Leaf, steps: Path) -> str:
    """Returns the label before a part of a container."""
    if not steps:
        return ""
    label, *_ = handler_of(content).text(content, steps[0])
    return label
