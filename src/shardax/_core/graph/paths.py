# SPDX-License-Identifier: Apache-2.0
"""Paths to places inside a model, and types of trees and leaves.

A *path* is a tuple of attribute names (``str``), list positions (``int``) and dict keys (any
hashable). Its text form is what a user would type after the model: ``("layers", 0, "kernel")`` is
``.layers[0].kernel``.

JAX has *key paths* instead: one entry a step, of a class that says how the step is taken
(``GetAttrKey``, ``SequenceKey``, ``DictKey``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from typing import Any, TypeAlias

from jax.tree_util import DictKey, GetAttrKey, SequenceKey

Path = tuple[Hashable, ...]
# An entry of a key path: one of JAX's key classes, or what a user's node gives. The name in
# ``jax.tree_util`` is a type variable.
KeyEntry: TypeAlias = Hashable
KeyPath = tuple[KeyEntry, ...]
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


def plain_path(key_path: KeyPath) -> Path:
    """Returns the path that a JAX key path stands for."""
    return tuple(plain_step(key) for key in key_path)


def plain_step(key: KeyEntry) -> Hashable:
    """Returns the step of a path that a key entry stands for."""
    # The classes of JAX, and those of users with one of their attributes.
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


class AttributeKey(GetAttrKey):
    """JAX's key of an attribute, with ``key`` as ``DictKey`` has it."""

    # JAX's errors about trees that differ read it (0.10.2), and so do masks written for dicts.

    @property
    def key(self) -> str:
        """The name."""
        return self.name


class ItemKey(SequenceKey):
    """JAX's key of an item, with ``key`` as ``DictKey`` has it."""

    @property
    def key(self) -> int:
        """The position."""
        return self.idx


class EntryKey(DictKey):
    """JAX's key of an entry by its position, with ``idx`` as ``SequenceKey`` has it."""

    @property
    def idx(self) -> int:
        """The position."""
        return self.key


attribute_key = functools.lru_cache(maxsize=4096)(AttributeKey)
item_key = functools.lru_cache(maxsize=4096)(ItemKey)


def with_key(entry: KeyEntry) -> KeyEntry:
    """Returns a key entry of JAX that has ``key``."""
    match entry:
        case GetAttrKey(name=name):
            return attribute_key(name)
        case SequenceKey(idx=position):
            return item_key(position)
    return entry


def line_of(value: object) -> str:
    """Returns the repr of a value in one line, without addresses."""
    return re.sub(r" at 0x[0-9a-f]+(?=>)", "", re.sub(r"\s*\n\s*", " ", repr(value)))
