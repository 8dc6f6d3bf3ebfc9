# SPDX-License-Identifier: Apache-2.0
"""Pictures of models: what stands where, with sharing shown, and its plain text.

A *drawing* is a tree that mirrors a value: Modules, containers and what leads through to objects
have parts; everything else is a *leaf*. An object met again is a leaf that says where it was met
first. The text has a line for each leaf; ``shardax.view`` draws the same tree in other ways.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardax.core.containers import _Container
from shardax.core.forms import FrozenVariable
from shardax.core.modules import Module
from shardax.core.node import Object, Placeholder, Wrapper
from shardax.core.paths import Path, format_path
from shardax.core.structure import has_parts
from shardax.core.variables import ArrayAttribute, Param, Variable

_INDENT = "  "
_MAX_LINES = 200


class Drawing:
    """One place of a drawing.

    Attributes:
        label: What is written before it, such as ``kernel=``.
        code: What to write after the thing above to get here, such as ``.kernel`` or ``[0]``.
        path: Where it stands.
        value: What stands there.
        name: What it is called: its type's name, as a rule.
        parts: What is below; None for a leaf.
        first: For an object met again, the place where it was met first.
        again: For an object met first, the paths at which it was met again.
        marked: Whether to point it out.
    """

    __slots__ = ("again", "code", "first", "label", "marked", "name", "parts", "path", "value")

    def __init__(self, label: str, code: str, path: Path, value: Any) -> None:
        self.label, self.code, self.path, self.value = label, code, path, value
        self.name = type(value).__name__
        self.parts: list[Drawing] | None = None
        self.first: Drawing | None = None
        self.again: list[Path] = []
        self.marked = False

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
        """Yields the lines of the text.

        Args:
            describe: Returns the text of a leaf that was not met before.
            note: Returns what to write behind the first line of a place.
            depth: How far to indent.
        """
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


def draw(value: Any) -> Drawing:
    """Draws a value and everything below it, reading no value of a Variable.

    Args:
        value: Anything; a Module, as a rule.

    Example:
        >>> import shardax as sx
        >>> drawing = draw(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
        >>> [part.label for part in drawing.parts][:2], drawing.parts[0].code
        (['kernel=', 'bias='], '.kernel')
    """
    return _draw(Drawing("", "", (), value), {})


def _draw(drawing: Drawing, seen: dict[int, Drawing]) -> Drawing:
    value = drawing.value
    if isinstance(value, Object):
        first = drawing.first = seen.get(id(value))
        if first is not None:
            first.again.append(drawing.path)
            return drawing
        seen[id(value)] = drawing
    is_leaf = isinstance(value, (Variable, Placeholder))
    if isinstance(value, Module) or (not is_leaf and _has_objects(value)):
        drawing.name, parts = _parts(value)
        drawing.parts = [
            _draw(Drawing(part.label, part.code, (*drawing.path, *part.steps), part.value), seen)
            for part in parts
        ]
    return drawing


def module_repr(module: Module) -> str:
    """Returns the text of ``repr(module)``.

    Args:
        module: The Module to draw.

    Returns:
        Class names, attributes in order, Variables with dtype, shape and axes; an object met again
        is named only.

    Example:
        >>> import shardax as sx
        >>> sx.nn.Linear(2, 3, use_bias=False, rngs=sx.Rngs(0))  # doctest: +ELLIPSIS
        Linear(  # 6 parameters
          kernel=Param(float32[2, 3], lazy, axes=...),
          ...
        )
    """
    drawing = draw(module)
    first, *others = drawing.lines(leaf_text)
    lines = [first + parameter_count(drawing), *others]
    if len(lines) > _MAX_LINES:
        lines = [
            *lines[:_MAX_LINES],
            f"... {len(lines) - _MAX_LINES} more lines (sx.view.to_text shows all)",
        ]
    return "\n".join(lines)


def leaf_text(leaf: Drawing) -> str:
    """Returns the text of a leaf: its repr, in one line."""
    shown = repr(leaf.value)
    if isinstance(leaf.value, ArrayAttribute):  # hidden: users see the array
        shown = shown.removeprefix(f"{leaf.name}(").removesuffix(")")
    return shown.replace("\n", " ")


def parameter_count(drawing: Drawing) -> str:
    """Returns a comment with the number of elements of every ``Param``, frozen ones too."""
    count = sum(
        math.prod(leaf.value._value.shape)
        for leaf in drawing.leaves()
        if leaf.first is None and _is_parameter(leaf.value) and hasattr(leaf.value._value, "shape")
    )
    return f"  # {count:,} parameters" if count else ""


def _is_parameter(value: Any) -> bool:
    kind = value.variable_type if isinstance(value, FrozenVariable) else type(value)
    return issubclass(kind, Param)


def _has_objects(value: Any) -> bool:
    items = value._items if isinstance(value, _Container) else value
    if isinstance(items, list):
        return any(map(has_parts, items))
    if isinstance(items, dict):
        return any(map(has_parts, items.values()))
    return has_parts(items)


class _Part(NamedTuple):
    """See ``Drawing``; ``steps`` are those that the part adds to the path."""

    label: str
    code: str
    steps: Path
    value: Any


def _parts(value: Any) -> tuple[str, list[_Part]]:
    """Returns the name under which a value is drawn and its parts."""
    name = type(value).__name__
    if isinstance(value, Module):
        attributes = (*vars(value).items(), *value._boxed.items())
        return name, [_named(attribute, part) for attribute, part in attributes]
    if isinstance(value, (_Container, dict)):
        items = value._items if isinstance(value, _Container) else value
        if isinstance(items, dict):
            return name, [_Part(f"{k!r}: ", f"[{k!r}]", (k,), part) for k, part in items.items()]
        return name, _numbered(items)
    if isinstance(value, types.MethodType):
        owner = _Part("", ".__self__", (), value.__self__)
        return f"method {value.__name__}", [owner]
    if isinstance(value, Wrapper):
        return name, [_Part("", ".__wrapped__", (), value.__wrapped__)]
    if isinstance(value, functools.partial):
        keywords = [
            _Part(f"{k}=", f".keywords[{k!r}]", (k,), part) for k, part in value.keywords.items()
        ]
        function = _Part("", ".func", (), value.func)
        return name, [function, *_numbered(value.args, ".args"), *keywords]
    fields = getattr(value, "_fields", None)
    if fields is None:
        return name, _numbered(value)
    return name, [_Part(f"{field}=", f".{field}", (i,), value[i]) for i, field in enumerate(fields)]


def _named(attribute: str, value: Any) -> _Part:
    return _Part(f"{attribute}=", f".{attribute}", (attribute,), value)


def _numbered(items: Any, within: str = "") -> list[_Part]:
    return [_Part("", f"{within}[{i}]", (i,), item) for i, item in enumerate(items)]
