# SPDX-License-Identifier: Apache-2.0
"""Surveys: the arrays of a tree, each once, with what a layout needs to know of them.

A *tree* is a Module, a Variable, a ``State``, or a pytree that holds such and arrays. Taking a
*survey* reads and computes nothing: lazy values stay lazy. A *slot* is one place of the tree that
holds a value: a Variable (once, however often it is reached), an entry of a State, or a plain
array. Most values are one array; a value that is a pytree has several. A slot never holds the
arrays of a Variable, so that a survey keeps none of them alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from shardax.core._jax import Tracer
from shardax.core.frames import local, resolve
from shardax.core.node import Object
from shardax.core.paths import Path, PathKey
from shardax.core.state import Origin, State
from shardax.core.structure import flatten
from shardax.core.variables import Variable


class ArrayInfo(NamedTuple):
    """What is known of one array without having it.

    Attributes:
        path: Where it is in the tree.
        shape: Its global shape.
        dtype: Its dtype.
        weak_type: Whether JAX may change the dtype when the array meets another.
        sharding: Its ``NamedSharding``, if it has one already.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: NamedSharding | None


class Slot(NamedTuple):
    """One place of a tree that holds a value.

    Attributes:
        path: Where it is.
        axes: One name per dimension, or None.
        arrays: The arrays of its value, in the order of leaves.
        treedef: The value's pytree, or None for the usual value, which is one array.
        variable: The Variable, as seen from the current frame; None for an entry of a State or a
            plain array.
    """

    path: Path
    axes: Any
    arrays: tuple[ArrayInfo, ...]
    treedef: Any
    variable: Variable[Any] | None


class Part(NamedTuple):
    """One leaf of the tree's pytree: a Module, a Variable, a State, an array, or something else.

    Attributes:
        value: What stands there in the tree.
        slots: Positions of its slots.
        origins: For Modules and States, path below the part to what the value came from, in the
            order of ``slots``; None for what has one value or none.
    """

    value: Any
    slots: tuple[int, ...]
    origins: dict[Path, Origin] | None


class Survey:
    """The arrays of a tree; see the module docstring.

    Args:
        tree: A Module, a Variable, a State, or a pytree that holds such and arrays.

    Attributes:
        slots: Every place that holds a value, each Variable once.
        parts: The leaves of the pytree.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self.treedef = jax.tree.flatten_with_path(tree, is_leaf=_is_part)
        self.slots: list[Slot] = []
        self._seen: dict[int, int] = {}
        self.parts = [self._visit(_plain_path(path), leaf) for path, leaf in leaves]

    def _visit(self, path: Path, leaf: Any) -> Part:
        if isinstance(leaf, Variable):
            return Part(leaf, (self._variable(path, leaf),), None)
        if isinstance(leaf, Object):
            flat = flatten(leaf)
            pairs = list(zip(flat.leaf_paths, flat.leaves, strict=True))
            positions = tuple(self._variable((*path, *below), v) for below, v in pairs)
            found = zip(flat.leaf_paths, (self.slots[i].variable for i in positions), strict=True)
            return Part(leaf, positions, {below: _origin_of(v) for below, v in found})
        if isinstance(leaf, State):
            origins = leaf.origins()
            entries = leaf.flat().items()
            positions = tuple(
                self._add((*path, *below), origins[below].axes, value, None)
                for below, value in entries
            )
            return Part(leaf, positions, origins)
        if is_array(leaf):
            return Part(leaf, (self._add(path, None, leaf, None),), None)
        return Part(leaf, (), None)

    def _variable(self, path: Path, variable: Variable[Any]) -> int:
        target = resolve(variable, local.frame)
        known = self._seen.get(id(target))
        if known is None:
            known = self._seen[id(target)] = self._add(
                path, target._metadata.axes, target._value, target
            )
        return known

    def _add(self, path: Path, axes: Any, value: Any, variable: Variable[Any] | None) -> int:
        if is_array(value):
            arrays, treedef = (_info(path, value),), None
        else:
            leaves, treedef = jax.tree.flatten_with_path(value)
            arrays = tuple(_info((*path, *_plain_path(below)), leaf) for below, leaf in leaves)
        self.slots.append(Slot(path, axes, arrays, treedef, variable))
        return len(self.slots) - 1

    def position(self, variable: Variable[Any]) -> int:
        """Returns which slot belongs to a Variable of the tree."""
        return self._seen[id(resolve(variable, local.frame))]

    def arrange(self, entries: Sequence[Any], replace: Callable[[Part], Any] | None = None) -> Any:
        """Puts one entry per slot where the slots are in the tree.

        Args:
            entries: One entry per slot.
            replace: Given a Module or Variable, what to put in its place. By default a Module gives
                a State of its entries, and a Variable its entry.

        Returns:
            The pytree, with None for what is no array.
        """
        return self.treedef.unflatten(
            [self._arrange_part(part, entries, replace) for part in self.parts]
        )

    def _arrange_part(
        self, part: Part, entries: Sequence[Any], replace: Callable[[Part], Any] | None
    ) -> Any:
        if replace is not None and isinstance(part.value, Object):
            return replace(part)
        if part.origins is not None:
            pairs = zip(part.origins, part.slots, strict=True)
            return State.from_flat({path: entries[i] for path, i in pairs}, part.origins)
        return entries[part.slots[0]] if part.slots else None


def is_array(value: Any) -> bool:
    """Whether a value has a shape and a dtype: an array, a lazy one, or a ShapeDtypeStruct."""
    # Classes such as jnp.float32 have these attributes too, for their instances.
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def in_slot(slot: Slot, leaves: Iterator[Any]) -> Any:
    """Takes as many entries as the slot has arrays and arranges them as its value is."""
    if slot.treedef is None:
        return next(leaves)
    return slot.treedef.unflatten([next(leaves) for _ in slot.arrays])


def _is_part(value: Any) -> bool:
    return isinstance(value, (Object, State))


def _origin_of(variable: Any) -> Origin:
    return Origin(type(variable), variable._metadata)


def _info(path: Path, value: Any) -> ArrayInfo:
    weak = bool(getattr(value, "weak_type", False))
    known = isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and not isinstance(value, Tracer)
    sharding = value.sharding if known else None
    named = sharding if isinstance(sharding, NamedSharding) else None
    return ArrayInfo(path, tuple(value.shape), value.dtype, weak, named)


def _plain_path(key_path: Sequence[Any]) -> Path:
    steps: list[Hashable] = []
    for key in key_path:
        if isinstance(key, PathKey):
            steps.extend(key.path)
            continue
        names = (getattr(key, attribute, None) for attribute in ("key", "idx", "name"))
        steps.append(next((name for name in names if name is not None), str(key)))
    return tuple(steps)


def nbytes(info: ArrayInfo) -> int:
    """The bytes of the global array."""
    return math.prod(info.shape) * info.dtype.itemsize
