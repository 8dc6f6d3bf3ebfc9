# SPDX-License-Identifier: Apache-2.0
"""Holes, and putting the parts of a tree together again.

A *hole* stands in one part of a tree for what is in another part (``Selection.partition``). It is a
pytree without leaves, and configuration inside a Module, so a part goes through JAX's functions
like any tree: only its own data is there.
"""

from __future__ import annotations

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
from shardax.core.select_survey import Survey
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
    merge = _Merge(parts)
    whole = merge.merged(parts, ())
    missing = merge.missing
    if missing:
        shown = ", ".join(map(format_path, missing[:5]))
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CombineError(
            f"No part has anything at {shown}{more}: every part has a hole there. Pass all parts "
            f"that partition returned."
        )
    return whole


class _Merge:
    """One putting together.

    Holders that stand at one place in several parts are a *group*: they become one new holder. A
    holder that is in one part only, but leads to a group (through a cycle) or to a hole, is copied
    too; every other one stays.

    Attributes:
        missing: Paths at which all parts have a hole.
    """

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.missing: list[Path] = []
        self._groups: dict[int, tuple[Any, ...]] = {}
        self._made: dict[int, Any] = {}
        self._leading: set[int] = set()
        self._group(parts, ())
        for part in parts:
            holes = search(
                (root_place(part),), lambda place: is_hole(place.stored), every_path=False
            )
            survey = Survey(part, holes, every_path=False)
            survey.spread([n for n in survey.nodes if id(n.place.holder) in self._groups])
            self._leading |= {id(node.place.holder) for node in survey.nodes if node.leads}

    def _group(self, values: tuple[Any, ...], path: Path) -> None:
        """Finds the groups at and below a place where several parts have something."""
        present = _distinct(values)
        first = present[0]
        if len(present) < 2 or id(first) in self._groups:
            return
        if any(type(value) is not type(first) for value in present):
            raise _conflict(path, present)
        if isinstance(first, Variable) or is_mutable(first):
            self._groups.update((id(value), present) for value in present)
        for key, below in _aligned(present, path):
            self._group(below, _step(path, key))

    def merged(self, values: tuple[Any, ...], path: Path) -> Any:
        """Returns what stands at a place of the whole, given what the parts have there."""
        present = _distinct(values)
        if len(present) == 1:
            present = self._groups.get(id(present[0]), present)
        first = present[0]
        if is_hole(first):
            self.missing.append(path)
        is_holder = isinstance(first, Variable) or is_mutable(first)
        if len(present) == 1 and is_holder and id(first) not in self._leading:
            return first
        if not is_holder:
            return self._immutable(present, path)
        made = self._made.get(id(first))
        if made is not None:
            return made
        if isinstance(first, Variable):
            ((_, value),) = self._below(present, path)
            made = first._make(as_value(value, "array"), first._here()._metadata, owner_here())
            self._made.update((id(v), made) for v in present)
            return made
        made = empty_like(first)
        self._made.update((id(v), made) for v in present)
        fill(made, self._below(present, path))
        return made

    def _immutable(self, present: tuple[Any, ...], path: Path) -> Any:
        old = _aligned(present, path)
        pairs = [(key, self.merged(below, _step(path, key))) for key, below in old]
        same = all(new is below[0] for (_, new), (_, below) in zip(pairs, old, strict=True))
        if not pairs or (same and len(present) == 1):
            return present[0]
        return assembled(present[0], pairs)

    def _below(self, present: tuple[Any, ...], path: Path) -> Pairs:
        return [
            (key, self.merged(below, _step(path, key))) for key, below in _aligned(present, path)
        ]


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what is no hole, each thing once; where all are holes, one of them."""
    present = {id(value): value for value in values if not is_hole(value)}
    return tuple(present.values()) or values[:1]


def _aligned(present: tuple[Any, ...], path: Path) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns, for each key of some containers that have the same, what they store there."""
    contents = [dict(contents_of(value)) for value in present]
    first, *others = contents
    if any(other.keys() != first.keys() for other in others):
        raise _conflict(path, present)
    if others and not first and not all(_same(value, present[0]) for value in present):
        raise _conflict(path, present)
    return [(key, tuple(content[key] for content in contents)) for key in first]


def contents_of(value: Any) -> Pairs:
    """Returns (key, what is stored) for everything directly in a value; key None for no step."""
    if is_mutable(value):
        return stored_in(value)
    return [(steps[0] if steps else None, child) for steps, child in parts_of(value)]


def _step(path: Path, key: Any) -> Path:
    return path if key is None else (*path, key)


def _same(first: Any, second: Any) -> bool:
    try:
        return exact_key(first) == exact_key(second)
    except TypeError:
        return False


def _conflict(path: Path, present: tuple[Any, ...]) -> CombineError:
    shown = " and ".join(f"{value!r}"[:80] for value in present)
    return CombineError(
        f"The parts differ at {format_path(path)}: {shown}. Where one part has something, all "
        f"others must have a hole; combine what partition returned, with values changed at most."
    )
