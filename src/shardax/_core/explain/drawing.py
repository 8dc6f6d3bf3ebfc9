# SPDX-License-Identifier: Apache-2.0
"""Drawings of models, which ``repr`` and ``shardax.view`` show.

A *drawing* is a tree that mirrors a value: Modules, containers and what leads to objects have
parts; everything else is a *leaf*. An object met again is a leaf that refers to the first
occurrence. ``repr`` has a line for each leaf; ``shardax.view`` draws the same tree in other ways.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

from shardax._core.frozen import FrozenVariable
from shardax._core.graph.handlers import handler_of, has_parts
from shardax._core.graph.paths import Path, format_path, line_of
from shardax._core.module import Module
from shardax._core.object import Object
from shardax._core.stored import title_of
from shardax._core.variable import ArrayAttribute, Param

_INDENT = "  "
_MAX_LINES = 200


class Drawing:
    """One place of a drawing."""

    __slots__ = ("again", "code", "first", "label", "marked", "name", "parts", "path", "value")

    def __init__(self, label: str, code: str, path: Path, value: Any) -> None:
        self.label = label  # what is written before it: "kernel="
        self.code = code  # what leads here from the place above: ".kernel", "[0]"
        self.path = path
        self.value = value
        self.name = title_of(value)
        self.parts: list[Drawing] | None = None  # None for a leaf
        self.first: Drawing | None = None  # of an object met again, where it was met first
        self.again: list[Path] = []  # of an object met first, where it was met again
        self.marked = False  # whether to point it out

    def places(self) -> Iterator[Drawing]:
        """Yields this place and every one below, in order."""
        yield self
        for part in self.parts or ():
            yield from part.places()

    def leaves(self) -> Iterator[Drawing]:
        """Yields every leaf, in order."""
        return (place for place in self.places() if place.parts is None)

    def lines(
        self,
        describe: Callable[[Drawing], str],
        note: Callable[[Drawing], str] = lambda drawing: "",
        depth: int = 0,
    ) -> Iterator[str]:
        """Yields the lines of the text."""
        start, end = f"{_INDENT * depth}{self.label}", "," if depth else ""
        if self.first is not None:
            yield f"{start}<same {self.name} as {format_path(self.first.path)}>{end}"
        elif self.parts is None:
            yield f"{start}{describe(self)}{end}{note(self)}"
        elif not self.parts:
            yield f"{start}{self.name}(){end}{note(self)}"
        else:
            yield f"{start}{self.name}({note(self)}"
            for part in self.parts:
                yield from part.lines(describe, note, depth + 1)
            yield f"{_INDENT * depth}){end}"


def draw(value: object) -> Drawing:
    """Draws a value and everything below it."""
    return _draw(Drawing("", "", (), value), {})


def _draw(drawing: Drawing, first_drawings: dict[int, Drawing]) -> Drawing:
    """Draws what is below a place; ``first_drawings`` has the objects met before, by ``id``."""
    value = drawing.value
    if isinstance(value, Object):
        first = drawing.first = first_drawings.get(id(value))
        if first is not None:
            first.again.append(drawing.path)
            return drawing
        first_drawings[id(value)] = drawing

    handler = handler_of(value)
    children = handler.children(value) if handler.in_models else ()
    if not isinstance(value, Module) and not any(has_parts(child) for _, child in children):
        return drawing  # a leaf

    if isinstance(value, types.MethodType):
        drawing.name = f"method {value.__name__}"
    drawing.parts = []
    for key, child in children:
        path = drawing.path if key is None else (*drawing.path, key)
        label, code = handler.text(value, key)
        part = Drawing(label, code, path, child)
        drawing.parts.append(_draw(part, first_drawings))
    return drawing


def module_repr(module: Module) -> str:
    """Returns the text of ``repr(module)``."""
    drawing = draw(module)
    first, *others = drawing.lines(leaf_text)
    lines = [first + parameter_count(drawing), *others]

    left_out = len(lines) - _MAX_LINES
    if left_out > 0:
        lines = lines[:_MAX_LINES]
        lines.append(f"... {left_out} more lines (sx.view.to_text shows all)")
    return "\n".join(lines)


def leaf_text(leaf: Drawing) -> str:
    """Returns the text of a leaf."""
    shown = line_of(leaf.value)
    if isinstance(leaf.value, ArrayAttribute):  # hidden: users see the array
        shown = shown.removeprefix(f"{leaf.name}(").removesuffix(")")
    return shown


def parameter_count(drawing: Drawing) -> str:
    """Returns a comment with the number of parameters."""
    count = 0
    for leaf in drawing.leaves():
        if leaf.first is None and _is_parameter(leaf.value):
            shape = getattr(leaf.value._value, "shape", None)
            count += 0 if shape is None else math.prod(shape)
    return f"  # {count:,} parameters" if count else ""


def _is_parameter(value: object) -> bool:
    variable_type = value.variable_type if isinstance(value, FrozenVariable) else type(value)
    return issubclass(variable_type, Param)
