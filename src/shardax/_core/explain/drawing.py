# SPDX-License-Identifier: Apache-2.0
"""Drawings of models, which ``repr`` and ``shardax.view`` show.

A *drawing* is a tree that mirrors a value: Modules, containers and what leads to objects have
parts; everything else is a *leaf*. An object met again is a leaf that refers to the first
occurrence. ``repr`` has a line for each leaf; ``shardax.view`` draws the same tree in other ways.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from shardax._core.frames import owner_here
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.flatten import build
from shardax._core.graph.handlers import handler_of, has_parts
from shardax._core.graph.paths import Path, format_path, line_of
from shardax._core.module import Module
from shardax._core.object import Object, Shown
from shardax._core.state.frozen import FrozenVariable
from shardax._core.state.state import State
from shardax._core.stored import title_of
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute, Param

_INDENT = "  "
_MAX_LINES = 200


class Drawing:
    """One place of a drawing: the root, or a part of another place.

    Attributes:
        value: The value.
        path: Its path from the root.
        label: What is written before it, such as ``"kernel="``.
        code: What leads here from the place above: ``".kernel"``, ``"[0]"``.
        name: The title of the value, such as the name of its class.
        parts: The drawings of what is below; None for a leaf.
        first: Of an object met again, the place where it was met first.
        again: Of an object met first, the paths by which it was met again.
        marked: Whether to point it out.

    Example:
        >>> import shardax as sx
        >>> from shardax import extend
        >>> drawing = extend.Drawing.of([sx.nn.Linear(2, 3, rngs=sx.Rngs(0))])
        >>> for leaf in list(drawing.leaves())[:2]:
        ...     print(extend.format_path(leaf.path), leaf.text)
        [0].kernel Param(float32[2, 3], lazy, axes=('in', 'out'))
        [0].bias Param(float32[3], lazy, axes=('out',))
        >>> drawing.parameter_count
        9
    """

    __slots__ = ("again", "code", "first", "label", "marked", "name", "parts", "path", "value")

    def __init__(self, label: str, code: str, path: Path, value: Any) -> None:
        self.label = label
        self.code = code
        self.path = path
        self.value = value
        self.name = title_of(value)
        self.parts: list[Drawing] | None = None
        self.first: Drawing | None = None
        self.again: list[Path] = []
        self.marked = False

    @classmethod
    def of(cls, value: object) -> Drawing:
        """Returns the drawing of a value and everything below it; lazy values stay lazy.

        A State is drawn as the Variables that its values came from, a ``GraphDef`` as the model
        that it describes, whose Variables have no values.

        Args:
            value: Any value.
        """
        if isinstance(value, State):
            return _draw_state(value)
        if isinstance(value, GraphDef):
            return _draw_graphdef(value)
        return _draw(cls("", "", (), value), {})

    @classmethod
    def by_path(cls, tree: object, values: Mapping[Path, object]) -> Drawing:
        """Returns the drawing of values by their paths; what is between is named like the tree.

        Args:
            tree: What holds the values.
            values: The values by path, in order.
        """
        root = cls("", "", (), tree)
        root.parts = []
        parts_by_path: dict[Path, list[Drawing]] = {(): root.parts}
        for path, value in values.items():
            for depth in range(1, len(path) + 1):
                prefix = path[:depth]
                if prefix in parts_by_path:
                    continue

                drawing = cls(f"{prefix[-1]!r}: ", f"[{prefix[-1]!r}]", prefix, tree)
                parts_by_path[prefix[:-1]].append(drawing)
                if depth == len(path):
                    drawing.value, drawing.name = value, title_of(value)
                else:
                    drawing.parts = parts_by_path[prefix] = []
        return root

    @property
    def text(self) -> str:
        """The text of a leaf."""
        shown = line_of(self.value)
        if self.is_array_attribute:
            shown = shown.removeprefix(f"{self.name}(").removesuffix(")")
        return shown

    @property
    def is_array_attribute(self) -> bool:
        """Whether this is an array that is an attribute: users do not see its Variable."""
        return isinstance(self.value, ArrayAttribute)

    @property
    def is_without_value(self) -> bool:
        """Whether this is a Variable of which only the structure is known (a ``GraphDef``)."""
        return isinstance(self.value, Variable) and self.value._here()._value is NO_VALUE

    @property
    def is_shown_by_us(self) -> bool:
        """Whether notebooks and treescope ask this library to show the value."""
        return isinstance(self.value, Shown)

    @property
    def paths(self) -> set[Path]:
        """All paths by which the value is met, here or elsewhere."""
        first = self.first or self
        return {self.path, first.path, *first.again}

    @property
    def parameter_count(self) -> int:
        """The number of parameters here and below, those of shared ones once."""
        count = 0
        for leaf in self.leaves():
            if leaf.first is None and _is_parameter(leaf.value):
                shape = getattr(leaf.value._value, "shape", None)
                count += 0 if shape is None else math.prod(shape)
        return count

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


class _NoValue:
    """The value of a Variable that is known by the structure alone."""

    def __repr__(self) -> str:
        return "no value"


NO_VALUE = _NoValue()


def _draw_graphdef(graphdef: GraphDef) -> Drawing:
    """Draws the model that a structure describes."""
    roots, _ = build(graphdef, [NO_VALUE] * len(graphdef.leaves), owner_here())
    drawing = Drawing.of(roots[0] if len(roots) == 1 else tuple(roots))
    drawing.name = f"GraphDef: {drawing.name}"
    return drawing


def _draw_state(state: State) -> Drawing:
    """Draws the Variables that the values of a State came from, where they are arrays."""
    values, origins = state.flat(), state.origins()
    if all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(list(values.values()))):
        owner = owner_here()
        values = {
            path: origins[path].variable_type._make(value, origins[path].all_metadata, owner)
            for path, value in values.items()
        }
    return Drawing.of(values[()]) if () in values else Drawing.by_path(state, values)


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
    drawing = Drawing.of(module)
    first, *others = drawing.lines(operator.attrgetter("text"))
    lines = [first + count_comment(drawing), *others]

    left_out = len(lines) - _MAX_LINES
    if left_out > 0:
        lines = lines[:_MAX_LINES]
        lines.append(f"... {left_out} more lines (sx.view.to_text shows all)")
    return "\n".join(lines)


def count_comment(drawing: Drawing) -> str:
    """Returns a comment with the number of parameters, or nothing."""
    count = drawing.parameter_count
    return f"  # {count:,} parameters" if count else ""


def _is_parameter(value: object) -> bool:
    variable_type = value.variable_type if isinstance(value, FrozenVariable) else type(value)
    return issubclass(variable_type, Param)
