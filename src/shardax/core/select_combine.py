# SPDX-License-Identifier: Apache-2.0
"""Holes, and putting the parts of a tree together again.

A *hole* stands in one part of a tree for what is in another part (``Selection.partition``). It is a
pytree without leaves, and configuration inside a Module, so a part goes through JAX's functions
like any tree: only its own data is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax

from shardax.core.arraylike import as_value
from shardax.core.containers import is_boxed
from shardax.core.errors import CombineError
from shardax.core.frames import owner_here
from shardax.core.metadata import EMPTY
from shardax.core.paths import Path, format_path
from shardax.core.select_assemble import (
    Pairs,
    assembled,
    empty_like,
    fill,
    is_mutable,
    stored_in,
)
from shardax.core.select_places import parts as parts_of
from shardax.core.select_places import root_place, search
from shardax.core.static import exact_key
from shardax.core.variables import ArrayAttribute, Variable


class Hole:
    """What stands in one part of a tree for something that is in another part.

    Example:
        >>> import shardax as sx
        >>> first, rest = sx.select({"a": 1, "b": 2}).at_keypaths("['a']").partition()
        >>> first, sx.combine(first, rest)
        ({'a': 1, 'b': Hole()}, {'a': 1, 'b': 2})
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hole)

    def __hash__(self) -> int:
        return hash(Hole)

    def __repr__(self) -> str:
        return "Hole()"


jax.tree_util.register_pytree_node(Hole, lambda hole: ((), None), lambda _, children: HOLE)
HOLE: Final = Hole()


def is_hole(stored: Any) -> bool:
    """Whether a hole is stored somewhere, by itself or where an array attribute was."""
    if isinstance(stored, ArrayAttribute):
        stored = stored._here()._value
    return isinstance(stored, Hole)


def hole_for(stored: Any) -> Any:
    """Returns the hole for what is stored somewhere; it keeps its place among array attributes."""
    return ArrayAttribute._make(HOLE, EMPTY, owner_here()) if is_boxed(stored) else HOLE


def combine(*parts: Any) -> Any:
    """Puts the parts of a tree together: the inverse of ``Selection.partition``.

    What stands in one part only is taken as it is, so the objects are those of the parts. Holders
    that stand in several parts, such as the Modules around what was selected, are made anew.

    Args:
        *parts: Trees of the same form; what is a hole in one must stand in another.

    Returns:
        The tree.

    Raises:
        CombineError: If something is missing from all parts, or two parts differ in what both have.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> kernels, rest = sx.select(model).at_instances_of(sx.Param).partition()
        >>> sx.combine(kernels, rest).up.kernel is model.up.kernel
        True
    """
    if not parts:
        raise CombineError("combine() was given nothing: pass all parts, combine(selected, rest).")
    whole = _Merge().merge(parts, ())
    holes = search((root_place(whole),), lambda place: is_hole(place.stored), every_path=False)
    if holes:
        shown = ", ".join(format_path(place.path) for place in holes[:5])
        more = f" and {len(holes) - 5} more" if len(holes) > 5 else ""
        raise CombineError(
            f"No part has anything at {shown}{more}: every part has a hole there. Pass all parts "
            f"that partition returned."
        )
    return whole


class _Merge:
    """One putting together; what is shared within the parts stays shared."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Any] = {}

    def merge(self, values: tuple[Any, ...], path: Path) -> Any:
        """Returns what stands at a place of the whole, given what the parts have there."""
        present = [value for value in values if not is_hole(value)] or list(values)
        first = present[0]
        if all(value is first for value in present):
            return first
        known = tuple(map(id, present))
        if known in self._made:
            return self._made[known]
        if any(type(value) is not type(first) for value in present):
            raise _conflict(path, present)
        if isinstance(first, Variable):
            merged = self.merge(tuple(value._here()._value for value in present), path)
            made = first._make(as_value(merged, "array"), first._here()._metadata, owner_here())
            self._made[known] = made
        elif is_mutable(first):
            made = self._made[known] = empty_like(first)
            fill(made, self._pairs([stored_in(value) for value in present], present, path))
        else:
            below = [[(s[0] if s else None, v) for s, v in parts_of(value)] for value in present]
            if not below[0] and all(_same(value, first) for value in present):
                return first
            made = assembled(first, self._pairs(below, present, path))
        return made

    def _pairs(self, contents: Sequence[Pairs], present: list[Any], path: Path) -> Pairs:
        """Puts together what containers store; the order is that of the first."""
        keys = [key for key, _ in contents[0]]
        others = [dict(content) for content in contents]
        if not keys or any(set(other) != set(keys) for other in others):
            raise _conflict(path, present)
        return [
            (key, self.merge(tuple(o[key] for o in others), path if key is None else (*path, key)))
            for key in keys
        ]


def _same(first: Any, second: Any) -> bool:
    try:
        return exact_key(first) == exact_key(second)
    except TypeError:
        return False


def _conflict(path: Path, present: list[Any]) -> CombineError:
    shown = " and ".join(f"{value!r}"[:80] for value in present)
    return CombineError(
        f"The parts differ at {format_path(path)}: {shown}. Where one part has something, all "
        f"others must have a hole; combine what partition returned, with values changed at most."
    )
