# SPDX-License-Identifier: Apache-2.0
"""Plain-text pictures of models: one line per Variable and submodule, with sharing shown."""

from __future__ import annotations

import math
from typing import Any

from shardax.core.containers import Dict, List, _Container, unbox
from shardax.core.modules import Module
from shardax.core.variables import Param, Variable

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
    lines: list[str] = []
    _draw(module, "", "", lines, {})
    if len(lines) > _MAX_LINES:
        lines = [
            *lines[:_MAX_LINES],
            f"... {len(lines) - _MAX_LINES} more lines (sx.view.table shows all)",
        ]
    return "\n".join(lines)


def _draw(value: Any, prefix: str, indent: str, lines: list[str], seen: dict[int, str]) -> None:
    end = "," if indent else ""
    if isinstance(value, (Module, _Container, Variable)):
        if id(value) in seen:
            lines.append(f"{indent}{prefix}<same {type(value).__name__} as above>{end}")
            return
        seen[id(value)] = prefix
    if isinstance(value, Module):
        children = [
            (f"{name}=", child) for name, child in (*vars(value).items(), *value._boxed.items())
        ]
        _draw_children(value, children, prefix, indent, lines, seen)
    elif isinstance(value, List) and _has_structure(value._items):
        _draw_children(value, [("", item) for item in value._items], prefix, indent, lines, seen)
    elif isinstance(value, Dict) and _has_structure(value._items.values()):
        _draw_children(
            value,
            [(f"{k!r}: ", v) for k, v in value._items.items()],
            prefix,
            indent,
            lines,
            seen,
        )
    else:
        shown = repr(value) if isinstance(value, Variable) else repr(unbox(value))
        lines.append(f"{indent}{prefix}{shown.replace(chr(10), ' ')}{end}")


def _has_structure(items: Any) -> bool:
    return any(isinstance(item, (Module, Variable, _Container)) for item in items)


def _draw_children(
    value: Any,
    children: list[tuple[str, Any]],
    prefix: str,
    indent: str,
    lines: list[str],
    seen: dict[int, str],
) -> None:
    name = type(value).__name__
    end = "," if indent else ""
    if not children:
        lines.append(f"{indent}{prefix}{name}(){end}")
        return
    count = _count_parameters(value) if isinstance(value, Module) and not indent else None
    comment = f"  # {count:,} parameters" if count else ""
    lines.append(f"{indent}{prefix}{name}({comment}")
    for label, child in children:
        _draw(child, label, indent + _INDENT, lines, seen)
    lines.append(f"{indent}){end}")


def _count_parameters(module: Module) -> int:
    from shardax.core.functional import (
        iter_variables,
    )  # the functional interface stands above printing's users

    total = 0
    for _, variable in iter_variables(module):
        if isinstance(variable, Param) and hasattr(variable._value, "shape"):
            total += math.prod(variable.shape)
    return total
