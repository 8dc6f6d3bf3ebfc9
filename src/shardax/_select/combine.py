# SPDX-License-Identifier: Apache-2.0
"""Holes, and ``combine``, which puts the parts of a partitioned tree together.

A *hole* stands in one part of a partitioned tree for what is in another part. It is a pytree
without leaves, and configuration inside a Module, so a part goes through JAX's functions like any
tree: only its own data is there.

Holders that stand at one place in several parts are a *group*: they become one new holder. A holder
that is in one part only, but leads to a group (through a cycle) or to a hole, is copied too; every
other one stays.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import jax

from shardax._core.graph.handlers import Pairs, handler_of
from shardax._core.graph.paths import Path, PyTree
from shardax._core.graph.static import exact_key
from shardax._core.stored import holds_arrays
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute
from shardax._select import errors
from shardax._select.holders import HolderGraph
from shardax._select.places import parts, root_place, search
from shardax._select.variables import array_attribute, stored_value, unchecked_like


class Hole:
    """Placeholder for something in another part of a tree.

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


def is_hole(stored: PyTree) -> bool:
    """Whether a stored value is a hole, or the hidden Variable of an array that holds one."""
    if isinstance(stored, ArrayAttribute):
        stored = stored_value(stored)
    return isinstance(stored, Hole)


def hole_for(stored: PyTree) -> Hole | ArrayAttribute:
    """Returns the hole for a stored value, as a Module stores it."""
    return array_attribute(HOLE) if holds_arrays(stored) else HOLE


def combine(*parts: PyTree) -> PyTree:
    """Puts the parts of a partitioned tree together.

    What stands in one part only is taken as it is, so the objects are those of the parts. Holders
    that stand in several parts, such as the Modules around what was selected, are made anew.

    Args:
        *parts: Trees of the same form; what is a hole in one must stand in another.

    Returns:
        The tree.

    Raises:
        SelectionError: If something is missing from all parts, or two parts differ in what both
            have.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> kernels, rest = sx.select(model).at_instances_of(sx.Param).partition()
        >>> sx.combine(kernels, rest).up.kernel is model.up.kernel
        True
    """
    if not parts:
        raise errors.nothing_to_combine()

    merge = _Merge(parts)
    tree = merge.merged(parts, ())
    if merge.missing:
        raise errors.missing_from_all_parts(merge.missing)
    return tree


class _Merge:
    """Merges the values that the parts of a tree have at one place, from the root down."""

    def __init__(self, parts: tuple[PyTree, ...]) -> None:
        self.missing: list[Path] = []  # where all parts have a hole
        self._groups: dict[int, tuple[PyTree, ...]] = {}  # by ``id`` of each member
        self._made: dict[int, PyTree] = {}  # the new holder of each holder, by its ``id``
        self._find_groups(parts, ())
        self._leading: set[int] = set()  # ``id`` of holders that lead to a group or a hole
        for part in parts:
            self._leading |= self._leading_in(part)

    def _find_groups(self, values: tuple[PyTree, ...], path: Path) -> None:
        """Finds the groups at and below a place."""
        present = _present(values)
        first = present[0]
        if len(present) < 2 or id(first) in self._groups:
            return
        if any(type(value) is not type(first) for value in present):
            raise errors.parts_differ(path, present)

        if _is_holder(first):
            self._groups.update((id(value), present) for value in present)
        for key, below in _aligned(present, path):
            self._find_groups(below, _with_step(path, key))

    def _leading_in(self, part: PyTree) -> set[int]:
        """Returns the ``id`` of the holders of a part that lead to a group or a hole."""
        holes = search((root_place(part),), lambda place: is_hole(place.stored), every_path=False)
        graph = HolderGraph(part, holes, every_path=False)
        graph.spread([node for node in graph.nodes if id(node.place.holder) in self._groups])
        return {id(node.place.holder) for node in graph.nodes if node.leads}

    def merged(self, values: tuple[PyTree, ...], path: Path) -> PyTree:
        """Returns the merged value of a place."""
        present = _present(values)
        if len(present) == 1:
            present = self._groups.get(id(present[0]), present)
        first = present[0]
        if is_hole(first):
            self.missing.append(path)

        if not _is_holder(first):
            return self._merged_immutable(present, path)
        if len(present) == 1 and id(first) not in self._leading:
            return first
        if id(first) in self._made:
            return self._made[id(first)]
        return self._merged_holder(present, path)

    def _merged_holder(self, present: tuple[PyTree, ...], path: Path) -> PyTree:
        """Returns a new holder in place of several."""
        first = present[0]
        if isinstance(first, Variable):
            ((_, value),) = self._merged_children(present, path)
            holder = unchecked_like(first, value)
            self._made.update((id(value), holder) for value in present)
            return holder

        # The empty holder is known before its children are merged, which may lead back to it.
        handler = handler_of(first)
        holder = handler.empty(first)
        self._made.update((id(value), holder) for value in present)
        handler.fill(holder, self._merged_children(present, path))
        return holder

    def _merged_immutable(self, present: tuple[PyTree, ...], path: Path) -> PyTree:
        """Returns the merged value of something immutable, itself where nothing changes."""
        old = _aligned(present, path)
        new = self._merged_children(present, path)
        is_same = all(item is below[0] for (_, item), (_, below) in zip(new, old, strict=True))
        if not new or (is_same and len(present) == 1):
            return present[0]
        return handler_of(present[0]).remake(present[0], new)

    def _merged_children(self, present: tuple[PyTree, ...], path: Path) -> Pairs:
        return [
            (key, self.merged(below, _with_step(path, key)))
            for key, below in _aligned(present, path)
        ]


def _is_holder(value: PyTree) -> bool:
    """Whether a value can be changed, and so stands for itself."""
    return isinstance(value, Variable) or handler_of(value).mutable


def _present(values: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Returns the distinct values except holes; one hole if there is nothing else."""
    by_id = {id(value): value for value in values if not is_hole(value)}
    return tuple(by_id.values()) or values[:1]


def _aligned(present: tuple[PyTree, ...], path: Path) -> list[tuple[Hashable, tuple[PyTree, ...]]]:
    """Returns, by key, the children that like containers have there; raises if keys differ."""
    contents = [dict(parts(value)) for value in present]
    first, *others = contents
    if any(other.keys() != first.keys() for other in others):
        raise errors.parts_differ(path, present)

    # What has no children, such as configuration, must be equal.
    if others and not first and not all(_is_equal(value, present[0]) for value in present):
        raise errors.parts_differ(path, present)
    return [(key, tuple(content[key] for content in contents)) for key in first]


def _with_step(path: Path, key: Hashable) -> Path:
    return path if key is None else (*path, key)


def _is_equal(first: PyTree, second: PyTree) -> bool:
    try:
        return exact_key(first) == exact_key(second)
    except TypeError:  # of what cannot be compared
        return False
