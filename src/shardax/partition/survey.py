# SPDX-License-Identifier: Apache-2.0
"""Surveys: the arrays of a tree, each once, with what a layout needs to know of them.

A *tree* is a Module, a Variable, a ``State``, a box, or a pytree that holds such and arrays. Taking
a *survey* reads and computes nothing: lazy values stay lazy. A *slot* is one place of the tree that
holds a value: a Variable (once, however often it is reached), an entry of a State, a box, or a
plain array. Most values are one array; a value that is a pytree has several. A slot never holds the
arrays of a Variable, so that a survey keeps none of them alive.

What functions say of a slot is its *entry*: for a value that is a pytree, a pytree of entries; for
a box one entry, whatever is in it, because its names hold for each of its arrays. Of boxes in a box
the outermost counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax.core._jax import Tracer
from shardax.core.arraylike import knows_axes
from shardax.core.frames import local, resolve
from shardax.core.metadata import EMPTY, Metadata
from shardax.core.node import Object
from shardax.core.paths import Path, PathKey, path_step
from shardax.core.state import Origin, State
from shardax.core.structure import flatten
from shardax.core.variables import Variable
from shardax.partition.boxes import BOX_ENTRY, AxisMetadata, layout_of_variable
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules
from shardax.transforms.aliases import alias_paths


class ArrayInfo(NamedTuple):
    """What is known of one array without having it.

    Attributes:
        path: Where it is in the tree.
        shape: Its global shape.
        dtype: Its dtype.
        weak_type: Whether JAX may change the dtype when the array meets another.
        sharding: Its ``NamedSharding``, if it has one already.
        axes: For an array that knows the names of its dimensions by itself, these; else None.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: NamedSharding | None
    axes: tuple[Any, ...] | None = None


class Slot(NamedTuple):
    """One place of a tree that holds a value.

    Attributes:
        path: Where it is.
        axes: One name per dimension, or None; for a box of the user's own, a ``PartitionSpec``;
            for an array that knows its names by itself, these.
        arrays: The arrays of its value, in the order of leaves.
        treedef: The value's pytree, or None for the usual value, which is one array.
        variable: The Variable, as seen from the current frame; None for an entry of a State, a box
            or a plain array.
        box: The box, empty; None for everything else.
        rules: Rules of its own, which hold instead of the layout's, or None.
        mesh: A mesh of its own, or None.
        for_each: Whether the axes are those of each array, if there are several.
        number: Whether it is a box of a Python number, which is no array but has no dimensions.
    """

    path: Path
    axes: Any
    arrays: tuple[ArrayInfo, ...]
    treedef: Any
    variable: Variable[Any] | None
    box: AxisMetadata[Any] | None = None
    rules: Rules | None = None
    mesh: AnyMesh | None = None
    for_each: bool = False
    number: bool = False

    def names_of(self, info: ArrayInfo) -> Any:
        """Returns one name per dimension of one of the arrays, or None."""
        if info.axes is not None:
            return info.axes
        if len(self.arrays) > 1 and not self.for_each:
            return None
        if isinstance(self.axes, PartitionSpec):
            return (*self.axes, *(None,) * (len(info.shape) - len(self.axes)))
        return self.axes


class Part(NamedTuple):
    """One leaf of the tree's pytree: a Module, Variable, State, box, array, or something else.

    Attributes:
        value: What stands there in the tree.
        slots: Positions of its slots.
        origins: For Modules and States, path below the part to what the value came from, in the
            order of ``slots``; None for what has one value or none.
        path: Where the part is in the tree.
    """

    value: Any
    slots: tuple[int, ...]
    origins: dict[Path, Origin] | None
    path: Path = ()


class Subject(NamedTuple):
    """What a filter is asked about a slot.

    Attributes:
        paths: Every path by which the slot is reached.
        like: The Variable; for an entry of a State what it came from, for a box its class and names
            (for a ``VariableBox`` what it was), for a plain array a Variable type without metadata.
    """

    paths: tuple[Path, ...]
    like: Any


class Survey:
    """The arrays of a tree; see the module docstring.

    Args:
        tree: A Module, a Variable, a State, a box, or a pytree that holds such and arrays.

    Attributes:
        slots: Every place that holds a value, each Variable once.
        parts: The leaves of the pytree.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self.treedef = jax.tree.flatten_with_path(tree, is_leaf=_is_part)
        self.slots: list[Slot] = []
        self._seen: dict[int, int] = {}
        self.parts = [self._visit(plain_path(path), leaf) for path, leaf in leaves]

    def _visit(self, path: Path, leaf: Any) -> Part:
        if isinstance(leaf, Variable):
            return Part(leaf, (self._variable(path, leaf),), None, path)
        if isinstance(leaf, Object):
            flat = flatten(leaf)
            pairs = list(zip(flat.leaf_paths, flat.leaves, strict=True))
            positions = tuple(self._variable((*path, *below), v) for below, v in pairs)
            found = zip(flat.leaf_paths, (self.slots[i].variable for i in positions), strict=True)
            return Part(leaf, positions, {below: _origin_of(v) for below, v in found}, path)
        if isinstance(leaf, State):
            origins = leaf.origins()
            entries = leaf.flat().items()
            positions = tuple(
                self._add((*path, *below), origins[below].all_metadata, value, None)
                for below, value in entries
            )
            return Part(leaf, positions, origins, path)
        if isinstance(leaf, AxisMetadata) or is_array(leaf):
            return Part(leaf, (self._add(path, EMPTY, leaf, None),), None, path)
        return Part(leaf, (), None, path)

    def _variable(self, path: Path, variable: Variable[Any]) -> int:
        target = resolve(variable, local.frame)
        known = self._seen.get(id(target))
        if known is None:
            known = self._seen[id(target)] = self._add(
                path, target._metadata, target._value, target
            )
        return known

    def _add(
        self, path: Path, metadata: Metadata, value: Any, variable: Variable[Any] | None
    ) -> int:
        if isinstance(value, AxisMetadata):
            self.slots.append(_slot_of_box(path, value, variable))
            return len(self.slots) - 1
        if is_array(value) and not knows_axes(value):
            arrays, treedef = (_info(path, value),), None
        else:
            leaves = jax.tree.leaves_with_path(value, is_leaf=knows_axes)
            arrays = tuple(_info((*path, *plain_path(below)), leaf) for below, leaf in leaves)
            treedef = jax.tree.structure(value)
        axes = value.partition_axes if knows_axes(value) else metadata.axes
        mesh, rules = layout_of_variable(axes, metadata.entries)
        for_each = BOX_ENTRY in metadata.entries
        slot = Slot(path, axes, arrays, treedef, variable, None, rules, mesh, for_each)
        self.slots.append(slot)
        return len(self.slots) - 1

    def position(self, variable: Variable[Any]) -> int:
        """Returns which slot belongs to a Variable of the tree."""
        return self._seen[id(resolve(variable, local.frame))]

    def subjects(self) -> list[Subject]:
        """Returns, for every slot, all its paths and what filters are asked about."""
        paths: list[list[Path]] = [[] for _ in self.slots]
        like: list[Any] = [slot.variable for slot in self.slots]
        for part in self.parts:
            for below, position in zip(part.origins or ((),), part.slots, strict=False):
                paths[position].append((*part.path, *below))
                if like[position] is None:
                    like[position] = (part.origins or {}).get(below) or _like(self.slots[position])
            if isinstance(part.value, Object) and not isinstance(part.value, Variable):
                for position, below in alias_paths(flatten(part.value).graphdef):
                    paths[part.slots[position]].append((*part.path, *below))
        return [Subject(tuple(dict.fromkeys(p)), v) for p, v in zip(paths, like, strict=True)]

    def values(self) -> Iterator[tuple[Slot, Any]]:
        """Yields every slot with its value."""
        for slot in self.slots:
            if slot.variable is not None:
                yield slot, slot.variable._value
        for part in self.parts:
            if isinstance(part.value, State):
                found = part.value.flat().values()
                yield from zip((self.slots[i] for i in part.slots), found, strict=True)
            elif not isinstance(part.value, Object) and part.slots:
                yield self.slots[part.slots[0]], part.value

    def arrays(self) -> Iterator[tuple[Slot, list[Any]]]:
        """Yields every slot with the arrays of its value."""
        return ((slot, arrays_in(slot, value)) for slot, value in self.values())

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


def arrays_in(slot: Slot, value: Any) -> list[Any]:
    """Returns the arrays of a slot's value, in the order of ``slot.arrays``."""
    if slot.box is not None:
        return [leaf for leaf in jax.tree.leaves(value.value) if is_array(leaf)]
    return [value] if slot.treedef is None else slot.treedef.flatten_up_to(value)


def with_arrays(slot: Slot, value: Any, arrays: Sequence[Any]) -> Any:
    """Returns a slot's value with other arrays in it: the inverse of ``arrays_in``."""
    if slot.box is None:
        return arrays[0] if slot.treedef is None else slot.treedef.unflatten(arrays)
    remaining = iter(arrays)
    return value.replace_boxed(
        jax.tree.map(lambda leaf: next(remaining) if is_array(leaf) else leaf, value.value)
    )


def entry_of(slot: Slot, each: Sequence[Any]) -> Any:
    """Returns the entry of a slot, given those of its arrays; a box without any has one, too."""
    if slot.box is not None or slot.treedef is None:
        return each[0]
    return slot.treedef.unflatten(each)


def _is_part(value: Any) -> bool:
    return isinstance(value, (Object, State, AxisMetadata)) or knows_axes(value)


def _slot_of_box(path: Path, box: AxisMetadata[Any], variable: Variable[Any] | None) -> Slot:
    leaves = jax.tree.leaves_with_path(box.value)
    arrays = [_info((*path, *plain_path(below)), leaf) for below, leaf in leaves if is_array(leaf)]
    names, rules = box.layout()
    mesh, empty = getattr(box, "mesh", None), box.replace_boxed(None)
    number = isinstance(box.value, (bool, int, float, complex))
    return Slot(path, names, tuple(arrays), None, variable, empty, rules, mesh, True, number)


def _like(slot: Slot) -> Any:
    """What a filter is asked about a slot that is neither a Variable nor of a State."""
    if slot.box is None:
        return Origin(Variable, EMPTY)
    kind: Any = getattr(slot.box, "variable_type", type(slot.box))
    entries = getattr(slot.box, "entries", EMPTY)
    names = None if slot.axes is None else tuple(slot.axes)
    return Origin(kind, Metadata(names, entries.entries if isinstance(entries, Metadata) else {}))


def _origin_of(variable: Any) -> Origin:
    return Origin(type(variable), variable._metadata)


def _info(path: Path, value: Any) -> ArrayInfo:
    axes = None
    if knows_axes(value):
        axes = value.partition_axes
        (value,) = jax.tree.leaves(value)
    weak = bool(getattr(value, "weak_type", False))
    known = isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and not isinstance(value, Tracer)
    sharding = value.sharding if known else None
    named = sharding if isinstance(sharding, NamedSharding) else None
    return ArrayInfo(path, tuple(value.shape), value.dtype, weak, named, axes)


def plain_path(key_path: Sequence[Any]) -> Path:
    """Returns a path for a JAX key path."""
    steps: list[Hashable] = []
    for key in key_path:
        steps += key.path if isinstance(key, PathKey) else (path_step(key),)
    return tuple(steps)


def nbytes(info: ArrayInfo) -> int:
    """The bytes of the global array."""
    return math.prod(info.shape) * info.dtype.itemsize
