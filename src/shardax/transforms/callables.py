# SPDX-License-Identifier: Apache-2.0
"""Callables as roots of a lifted call.

The function of a call is a root of its graph, because it may be a Module, a method of one, or a
``functools.partial`` with Modules among its arguments. Whatever else it holds is configuration of
the program, and configuration must be hashable to be compared. A partial with an array, and an
instance of a class without a hash, are not; such a callable is *held*: compared by identity, its
objects still in sight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardax.core.node import Object, Wrapper
from shardax.core.pytree import is_object
from shardax.core.static import Static
from shardax.core.structure import has_parts


def as_root(root: Any) -> Any:
    """Returns a root of a graph that can be compared; everything but a few callables as it is."""
    if isinstance(root, (Object, Wrapper)) or not callable(root):
        return root
    if not isinstance(root, functools.partial):
        return root if _is_hashable(root) else _Held(root)
    function = as_root(root.func)
    parts = (*root.args, *root.keywords.values())
    if function is root.func and all(_is_comparable(part) for part in parts):
        return root
    leaves, treedef = jax.tree.flatten((root.args, root.keywords), is_leaf=is_object)
    objects = [leaf for leaf in leaves if is_object(leaf)]
    others = [None if is_object(leaf) else leaf for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if is_object(leaf)]
    return functools.partial(_HeldPartial(root, treedef, others, places), function, tuple(objects))


def _is_comparable(part: Any) -> bool:
    """Whether part of a partial can stand in a structure: objects, and what is hashable."""
    if not has_parts(part):
        return _is_hashable(part)
    if isinstance(part, (tuple, list)):
        return all(_is_comparable(item) for item in part)
    return not isinstance(part, dict) or all(_is_comparable(item) for item in part.values())


def _is_hashable(value: Any) -> bool:
    try:
        Static(value)
    except TypeError:
        return False
    return True


class _Held:
    """A callable that is compared by identity."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return hash((type(self), id(self.held)))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.held is self.held

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.held(*args, **kwargs)


class _HeldPartial(_Held):
    """A partial without its function and its objects, which it is called with."""

    def __init__(
        self,
        held: Any,
        treedef: Any,
        others: Sequence[Any],
        places: Sequence[int],
    ) -> None:
        super().__init__(held)
        self.treedef = treedef
        self.others = others
        self.places = places

    def __call__(
        self, function: Callable[..., Any], objects: Sequence[Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        leaves = list(self.others)
        for place, item in zip(self.places, objects, strict=True):
            leaves[place] = item
        given, named = self.treedef.unflatten(leaves)
        return function(*given, *args, **{**named, **kwargs})
