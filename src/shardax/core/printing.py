# SPDX-License-Identifier: Apache-2.0
"""Plain-text pictures of models: one line per Variable and submodule, with sharing shown."""

from __future__ import annotations

import functools
import math
import types
from typing import Any

from shardax.core.containers import _Container
from shardax.core.modules import Module
from shardax.core.node import Object, Wrapper
from shardax.core.structure import has_parts
from shardax.core.variables import ArrayAttribute, Param, Variable

_INDENT = "  "
_MAX_LINES = 200


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
    drawing = _Drawing()
    drawing.draw(module, "", 0)
    lines = drawing.lines
    if drawing.parameters:
        lines[0] += f"  # {drawing.parameters:,} parameters"
    if len(lines) > _MAX_LINES:
        lines = [
            *lines[:_MAX_LINES],
            f"... {len(lines) - _MAX_LINES} more lines (sx.view.table shows all)",
        ]
    return "\n".join(lines)


class _Drawing:
    """A picture in the making.

    Attributes:
        lines: What was drawn so far.
        parameters: Number of elements of all ``Param`` drawn so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parameters = 0
        self._seen: set[int] = set()

    def draw(self, value: Any, label: str, depth: int) -> None:
        """Draws one value and everything below it."""
        if isinstance(value, Object):
            if id(value) in self._seen:
                self._line(f"{label}<same {type(value).__name__} as above>", depth)
                return
            self._seen.add(id(value))
        if isinstance(value, Param) and hasattr(value._value, "shape"):
            self.parameters += math.prod(value._value.shape)
        if isinstance(value, Module) or (not isinstance(value, Variable) and _has_objects(value)):
            self._draw_parts(value, label, depth)
        else:
            shown = repr(value)
            if isinstance(value, ArrayAttribute):  # hidden: users see the array
                shown = shown.removeprefix(f"{type(value).__name__}(").removesuffix(")")
            self._line(label + shown.replace("\n", " "), depth)

    def _draw_parts(self, value: Any, label: str, depth: int) -> None:
        name, parts = _parts(value)
        if not parts:
            self._line(f"{label}{name}()", depth)
            return
        self.lines.append(f"{_INDENT * depth}{label}{name}(")
        for part_label, part in parts:
            self.draw(part, part_label, depth + 1)
        self._line(")", depth)

    def _line(self, text: str, depth: int) -> None:
        self.lines.append(f"{_INDENT * depth}{text}{',' if depth else ''}")


def _has_objects(value: Any) -> bool:
    items = value._items if isinstance(value, _Container) else value
    if isinstance(items, list):
        return any(map(has_parts, items))
    if isinstance(items, dict):
        return any(map(has_parts, items.values()))
    return has_parts(items)


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Returns the name under which a value is drawn and its labelled parts."""
    name = type(value).__name__
    if isinstance(value, Module):
        attributes = (*vars(value).items(), *value._boxed.items())
        return name, [(f"{attribute}=", part) for attribute, part in attributes]
    if isinstance(value, _Container):
        items = value._items
        if isinstance(items, dict):
            return name, [(f"{key!r}: ", part) for key, part in items.items()]
        return name, [("", part) for part in items]
    if isinstance(value, types.MethodType):
        return f"method {value.__name__}", [("", value.__self__)]
    if isinstance(value, Wrapper):
        return name, [("", value.__wrapped__)]
    if isinstance(value, functools.partial):
        named = [(f"{keyword}=", part) for keyword, part in value.keywords.items()]
        return name, [("", value.func), *(("", part) for part in value.args), *named]
    fields = getattr(value, "_fields", None)
    return name, [
        (f"{f}=" if f else "", p) for f, p in zip(fields or ("",) * len(value), value, strict=True)
    ]
