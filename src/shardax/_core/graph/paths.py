# SPDX-License-Identifier: Apache-2.0
"""Paths to places inside a model, and types of trees and leaves.

A *path* is a tuple of attribute names (``str``), list positions (``int``) and dict keys (any
hashable). Its text form is what a user would type after the model: ``("layers", 0, "kernel")`` is
``.layers[0].kernel``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, TypeAlias

Path = tuple[Hashable, ...]
# What JAX flattens: containers, Modules and other registered types, and leaves. Any object is one.
PyTree: TypeAlias = Any
# What a tree has no more parts of: an array, a tracer, a number, a key, or a static value.
Leaf: TypeAlias = Any


def format_path(path: Path) -> str:
    """Formats a path as the code that reaches the place."""
    if not path:
        return "(root)"
    return "".join(_format_key(key) for key in path)


def _format_key(key: Hashable) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"


def plain_path(key_path: Iterable[Any]) -> Path:
    """Returns the path that a JAX key path stands for."""
    steps: list[Hashable] = []
    for key in key_path:
        if type(key) is PathKey:
            steps += key.path
        else:
            found = (getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))
            steps.append(next(found, str(key)))
    return tuple(steps)


class PathKey(NamedTuple):
    """JAX key path entry for a whole path below one node."""

    path: Path

    @property
    def key(self) -> Any:
        """The step, or the path of several steps."""
        return self.path[0] if len(self.path) == 1 else self.path

    def __str__(self) -> str:
        return format_path(self.path)

    __repr__ = __str__


def line_of(value: object) -> str:
    """Returns the repr of a value in one line, without addresses."""
    return re.sub(r" at 0x[0-9a-f]+(?=>)", "", re.sub(r"\s*\n\s*", " ", repr(value)))
