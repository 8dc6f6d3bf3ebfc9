# SPDX-License-Identifier: Apache-2.0
"""Key paths of a model, one entry a step, as JAX's tools expect them.

JAX makes a key path of one entry for each node that it goes through. A model is flattened as a
whole (``_core.graph.flatten``), because Variables may be shared, and so its leaves are put into
nodes again: a ``Branch`` for each step that is not the last. Which entry a step has says the
container that it leads into: ``GetAttrKey`` for an attribute, ``SequenceKey`` for an item of a list
or tuple, ``DictKey`` for an entry of a dict, and what JAX itself has for another pytree node.

The leaves keep their order, and what has no leaves below it has no node. So a list may lack items,
such as activations between layers; then each of its items is a ``DictKey``, as orbax takes
positions for those of a whole list.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.tree_util import FlattenedIndexKey, SequenceKey

from shardax._core import errors
from shardax._core.graph.paths import (
    EntryKey,
    KeyEntry,
    KeyPath,
    Leaf,
    format_path,
    plain_path,
    plain_step,
)

Child: TypeAlias = Any  # of a node: a leaf or a Branch


class Branch:
    """What stands below one step of a model's key paths, as a pytree node."""

    __slots__ = ("children", "keys")

    def __init__(self, keys: tuple[KeyEntry, ...], children: Iterable[Child]) -> None:
        self.keys = keys
        self.children = children

    def __repr__(self) -> str:
        entries = zip(self.keys, self.children, strict=True)
        return f"Branch({', '.join(f'{key}: {child!r}' for key, child in entries)})"


# Without a function of Python, because a large model has hundreds of them.
jax.tree_util.register_pytree_with_keys(
    Branch,
    lambda branch: (tuple(zip(branch.keys, branch.children, strict=True)), branch.keys),
    Branch,
    operator.attrgetter("children", "keys"),
)


def _whole_lists_only(keys: Sequence[KeyEntry]) -> tuple[KeyEntry, ...]:
    """Returns the keys of a node, without positions where some are missing."""
    positions = [plain_step(key) for key in keys if isinstance(key, _POSITIONS)]
    if positions == list(range(len(positions))):
        return tuple(keys)
    return tuple(EntryKey(plain_step(key)) if isinstance(key, _POSITIONS) else key for key in keys)


_POSITIONS = (SequenceKey, FlattenedIndexKey)


class KeyLevel:
    """The keys of one node of a model, and what each leads to."""

    __slots__ = ("below", "is_last", "keys", "start", "stop")

    def __init__(
        self, keys: Sequence[KeyEntry], below: Sequence[KeyLevel | None], start: int, stop: int
    ) -> None:
        self.keys = _whole_lists_only(keys)
        self.below = tuple(below)  # for each key its level, None for a leaf
        self.start = start  # position of the first leaf
        self.stop = stop  # of the last, plus one
        self.is_last = all(level is None for level in below)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyLevel) and self.keys == other.keys and self.below == other.below

    __hash__ = None  # pyright: ignore[reportAssignmentType] (as Python does for a mutable class)

    def children(self, leaves: Sequence[Leaf]) -> Sequence[Child]:
        """Returns the children of this level's node: leaves, and a Branch for each level below."""
        if self.is_last:
            return leaves[self.start : self.stop]

        children: list[Child] = []
        position = self.start
        for level in self.below:
            if level is None:
                children.append(leaves[position])
                position += 1
            else:
                children.append(Branch(level.keys, level.children(leaves)))
                position = level.stop
        return children

    def leaves(self, children: Iterable[Child]) -> list[Leaf]:
        """Returns the leaves of this level's node: the inverse of ``children``.

        Raises:
            ModuleError: If something else is in the place of a Branch.
        """
        leaves: list[Leaf] = []
        self._collect(children, (), leaves)
        return leaves

    def _collect(self, children: Iterable[Child], key_path: KeyPath, leaves: list[Leaf]) -> None:
        if self.is_last:
            leaves.extend(children)
            return
        for key, level, child in zip(self.keys, self.below, children, strict=True):
            if level is None:
                leaves.append(child)
            elif type(child) is Branch and child.keys == level.keys:
                level._collect(child.children, (*key_path, key), leaves)
            else:
                where = format_path(plain_path((*key_path, key)))
                raise errors.replaced_branch(where, type(child).__name__)
