# SPDX-License-Identifier: Apache-2.0
"""The inventory of a tree: its leaves, as layouts see them.

A *tree* is a Module, a Variable, a ``State``, a box, or a pytree that holds such and arrays. It is
walked once (``walk``), into *subtrees*: Modules, Variables, States, boxes, arrays, and whatever
else. Lazy values stay lazy. A *leaf* is one place that holds a value: a Variable (once, however
often it is reached), an entry of a State, a box, or a plain array. The inventory holds no array of
a Variable, so that old arrays can be freed while others are moved. Functions of trees return one
*entry* per leaf; for a value that is a pytree, a pytree of entries; for a box one entry, because
its names hold for each of its arrays. Of boxes in a box the outermost counts.

A Variable that was made of a box keeps the box, without its value, among its metadata, and is laid
out as the box would be: by the rules and mesh of the box, if it has such of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.frames import local, resolve
from shardax._core.graph.flatten import flatten
from shardax._core.graph.handlers import axes_of, is_box, is_whole
from shardax._core.graph.paths import Leaf, Path, PyTree, plain_path
from shardax._core.graph.static import BOX_ENTRY, EMPTY, MAPPED_AXES, Metadata, check_axes
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.state.state import Origin, State
from shardax._core.variable import Variable
from shardax._transforms.lift.alias_paths import alias_paths
from shardax.partition.assignment import Names, strings
from shardax.partition.boxes.axis_metadata import AxisMetadata, fitted
from shardax.partition.boxes.protocol import has_own_sharding, standard_box, stored_in, with_stored
from shardax.partition.boxes.variable_layout import layout_of_variable
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules, identity_rules, map_to_themselves


def walk(tree: object) -> tuple[list[tuple[Path, Any]], Any]:
    """Returns the subtrees of a mixed tree by path, and their treedef."""
    leaves, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_whole)
    return [(plain_path(path), leaf) for path, leaf in leaves], treedef


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype."""
    # Classes such as jnp.float32 have these attributes too, for their instances.
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


class ArrayInfo(NamedTuple):
    """Path, type and sharding of one array, without the array."""

    path: Path
    shape: tuple[int, ...]  # global
    dtype: Any
    weak_type: bool
    sharding: NamedSharding | None  # that it has now
    axes: Names | None = None  # the names of an array that knows its own

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return byte_count(self.shape, self.dtype)


class LeafInfo(NamedTuple):
    """One value of a tree, as layouts see it."""

    path: Path
    axes: Names | None  # one per dimension, unchecked; of a box there may be fewer or more
    arrays: tuple[ArrayInfo, ...]  # of its value, in the order of leaves
    treedef: Any  # of the value; None for the usual value of one array, and for a box
    variable: Variable | None  # as seen from the current frame
    plain_value: Leaf  # the value of what is no Variable
    box: AxisMetadata[Any] | None = None  # the box that is the value, empty
    rules: Rules | None = None  # of its own, instead of the layout's
    mesh: AnyMesh | None = None  # of its own
    added_names: frozenset[str] = frozenset()  # that its own rules do not know, as of a stack
    axes_per_array: bool = False  # whether the axes are those of each of several arrays
    is_number: bool = False  # a box of a Python number, which has no dimensions
    variable_box: AxisMetadata[Any] | None = None  # the box that a Variable was made of, empty

    @property
    def value(self) -> Leaf:
        """The value, unread: lazy values stay lazy."""
        return self.plain_value if self.variable is None else self.variable._value

    @property
    def has_names_of_mesh_axes(self) -> bool:
        """Whether its names are axes of a mesh, by rules of its own."""
        return self.rules is not None and map_to_themselves(self.rules)

    def names_of(self, info: ArrayInfo) -> Names | None:
        """Returns one name per dimension of one of the arrays, or None."""
        if info.axes is not None:
            return info.axes
        has_several = len(self.arrays) > 1
        if self.axes is None or (has_several and not self.axes_per_array):
            return None
        if self.box is None:
            return self.axes

        # In a box, dimensions after the last name are not split, as in a PartitionSpec. The names
        # of several arrays may be more than the dimensions of some, if these have None.
        rank = len(info.shape)
        if not has_several:
            rank = max(rank, len(self.axes))
        return fitted(self.axes, rank)

    def spec_of_box(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of one of the arrays without entries that not all of them have."""
        if self.box is None or self.axes is None:
            return spec
        least_rank = min((len(info.shape) for info in self.arrays), default=len(self.axes))
        return PartitionSpec(*spec[: min(len(self.axes), least_rank)])

    def arrays_or_empty_array(self, over_mesh: bool) -> tuple[ArrayInfo, ...]:
        """Returns the arrays; of a box without any, an empty one by which its names are checked."""
        if self.arrays or self.box is None:
            return self.arrays

        # 0 is divisible by everything. A number may stand for an array while there is no mesh, as
        # in Flax; over a mesh it has no dimensions.
        shape = () if self.is_number and over_mesh else (0,) * len(self.axes or ())
        return (ArrayInfo(self.path, shape, np.dtype("V0"), False, None, self.axes),)

    def arrays_in(self, value: Leaf) -> list[Any]:
        """Returns the arrays of a value like this leaf's."""
        if self.box is not None:
            return [leaf for leaf in jax.tree.leaves(stored_in(value)) if is_array(leaf)]
        return [value] if self.treedef is None else self.treedef.flatten_up_to(value)

    def with_arrays(self, value: Leaf, arrays: Sequence[Leaf]) -> PyTree:
        """Returns the value with other arrays in it: the inverse of ``arrays_in``."""
        if self.box is None:
            return arrays[0] if self.treedef is None else self.treedef.unflatten(arrays)

        remaining = iter(arrays)
        stored = jax.tree.map(
            lambda leaf: next(remaining) if is_array(leaf) else leaf, stored_in(value)
        )
        return with_stored(value, stored)

    def sharding_of_box(self, mesh: AnyMesh) -> NamedSharding | None:
        """Returns what a box with a ``get_sharding`` of its own says of the leaf, or None."""
        box = self.variable_box if self.box is None else self.box
        if box is None or not has_own_sharding(box):
            return None

        # It is asked about abstract arrays, so that lazy values stay lazy.
        value = self.value
        stored = stored_in(value) if is_box(value) else value
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf,
            stored,
        )
        return with_stored(box, abstract).get_sharding(mesh)

    def entry(self, entries_of_arrays: Sequence[Leaf]) -> PyTree:
        """Returns the leaf's entry, given those of its arrays."""
        if self.box is not None or self.treedef is None:
            return entries_of_arrays[0]
        return self.treedef.unflatten(entries_of_arrays)


class Subtree(NamedTuple):
    """A leaf of the tree's pytree, such as a Module or box."""

    value: object
    path: Path
    leaves: tuple[int, ...]  # indices in ``TreeInventory.leaves``
    origins: dict[Path, Origin] | None  # of a Module or State, by path below, in order of leaves

    def filled(self, entries: Sequence[object]) -> PyTree:
        """Returns entries in place of leaves; a State for a Module or State."""
        if self.origins is not None:
            pairs = zip(self.origins, self.leaves, strict=True)
            return State.from_flat({path: entries[index] for path, index in pairs}, self.origins)
        return entries[self.leaves[0]] if self.leaves else None


class FilterSubject(NamedTuple):
    """A leaf as filters see it."""

    paths: tuple[Path, ...]  # every path by which it is reached
    like: Variable | Origin  # the Variable, or the Origin of what is none


class TreeInventory:
    """The leaves of a tree of Modules, States, boxes and arrays, as layouts see them.

    Args:
        tree: The tree. It is walked once; no value is computed.

    Attributes:
        leaves: One entry for each value: its ``path``, ``variable``, and ``arrays`` with shapes,
            dtypes and names.

    Example:
        >>> import shardax as sx
        >>> from shardax import extend
        >>> inventory = extend.TreeInventory(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
        >>> [(leaf.path, leaf.axes, leaf.arrays[0].nbytes) for leaf in inventory.leaves]
        [(('kernel',), ('in', 'out'), 24), (('bias',), ('out',), 12)]
    """

    def __init__(self, tree: PyTree) -> None:
        subtrees, self.treedef = walk(tree)
        self.leaves: list[LeafInfo] = []
        self._indices: dict[int, int] = {}  # of Variables, by identity
        self.subtrees = [self._add_subtree(path, value) for path, value in subtrees]

    def _add_subtree(self, path: Path, value: object) -> Subtree:
        """Adds the leaves of a subtree, by the kind of value that it is."""
        if isinstance(value, Variable):
            return Subtree(value, path, (self._add_variable(path, value),), None)

        if isinstance(value, Object):
            flat = flatten(value)
            indices: list[int] = []
            origins: dict[Path, Origin] = {}
            for path_below, variable in zip(flat.leaf_paths, flat.leaves, strict=True):
                target = resolve(variable, local.frame)
                indices.append(self._add_variable((*path, *path_below), variable))
                origins[path_below] = Origin(type(target), target._metadata)
            return Subtree(value, path, tuple(indices), origins)

        if isinstance(value, State):
            origins = value.origins()
            indices = []
            for path_below, entry in value.flat().items():
                metadata = origins[path_below].all_metadata
                indices.append(self._add_leaf(_leaf_of((*path, *path_below), metadata, entry)))
            return Subtree(value, path, tuple(indices), origins)

        if is_box(value) or is_array(value):
            return Subtree(value, path, (self._add_leaf(_leaf_of(path, EMPTY, value)),), None)
        return Subtree(value, path, (), None)

    def _add_variable(self, path: Path, variable: Variable) -> int:
        """Returns the index of a Variable's leaf, which is added if it is new."""
        target = resolve(variable, local.frame)
        index = self._indices.get(id(target))
        if index is None:
            index = self._add_leaf(_leaf_of(path, target._metadata, target._value, target))
            self._indices[id(target)] = index
        return index

    def _add_leaf(self, leaf: LeafInfo) -> int:
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def position(self, variable: Variable) -> int:
        """Returns the index of a Variable's leaf."""
        return self._indices[id(resolve(variable, local.frame))]

    def filter_subjects(self) -> list[FilterSubject]:
        """Returns the leaves as filters see them, each with all its paths."""
        paths: list[list[Path]] = [[] for _ in self.leaves]
        origins: list[Origin | None] = [None for _ in self.leaves]
        for subtree in self.subtrees:
            origins_below = subtree.origins or {}
            paths_below = tuple(origins_below) or ((),)
            for path_below, index in zip(paths_below, subtree.leaves, strict=False):
                paths[index].append((*subtree.path, *path_below))
                origins[index] = origins[index] or origins_below.get(path_below)

            # A Variable of a Module that is reached by more paths than one.
            if isinstance(subtree.value, Object) and not isinstance(subtree.value, Variable):
                for position, path_below in alias_paths(flatten(subtree.value).graphdef):
                    paths[subtree.leaves[position]].append((*subtree.path, *path_below))

        subjects: list[FilterSubject] = []
        for leaf, leaf_paths, origin in zip(self.leaves, paths, origins, strict=True):
            like = leaf.variable
            if like is None:
                like = origin or _origin_of(leaf)
            subjects.append(FilterSubject(tuple(dict.fromkeys(leaf_paths)), like))
        return subjects

    def arrays(self) -> Iterator[tuple[LeafInfo, ArrayInfo, Any]]:
        """Yields every array with its leaf and type."""
        for leaf in self.leaves:
            for info, array in zip(leaf.arrays, leaf.arrays_in(leaf.value), strict=True):
                yield leaf, info, array

    def identity_rules(self) -> Rules:
        """Returns rules from each name of a leaf or array to the mesh axis of that name."""
        names: dict[str, None] = {}
        for leaf in self.leaves:
            for axes in (leaf.axes, *(info.axes for info in leaf.arrays)):
                names.update(dict.fromkeys(strings(axes or ())))
        return identity_rules(tuple(names))

    def unflatten(self, fill: Callable[[Subtree], PyTree]) -> PyTree:
        """Returns the tree with other values in place of its subtrees."""
        return self.treedef.unflatten([fill(subtree) for subtree in self.subtrees])

    def filled(self, entries: Sequence[PyTree]) -> PyTree:
        """Returns the tree with entries in place of leaves, None for other values."""
        return self.unflatten(lambda subtree: subtree.filled(entries))


def _leaf_of(
    path: Path, metadata: Metadata, value: Leaf, variable: Variable | None = None
) -> LeafInfo:
    """Returns the leaf of a Variable, or of a value with metadata."""
    if is_box(value):
        return _leaf_of_box(path, value, variable)

    arrays, treedef, own_axes = _arrays_of(path, value)
    axes = cast("Names | None", metadata.axes if own_axes is None else own_axes)

    # Names of dimensions that transforms added, before those that an array knows itself.
    mapped_axes = metadata.entries.get(MAPPED_AXES)
    if mapped_axes is not None:
        arrays_with_axes: list[ArrayInfo] = []
        for info in arrays:
            own_names = info.axes or (None,) * len(info.shape)
            names = with_mapped_axes(mapped_axes, own_names)
            arrays_with_axes.append(info._replace(axes=names))
        arrays = tuple(arrays_with_axes)
        if len(arrays) == 1:
            axes = arrays[0].axes

    plain_value = value if variable is None else None
    leaf = LeafInfo(path, axes, arrays, treedef, variable, plain_value)
    if BOX_ENTRY not in metadata.entries:
        return leaf

    # A Variable that was made of a box.
    leaf = leaf._replace(axes_per_array=True)
    layout = layout_of_variable(axes, metadata.entries, value)
    if layout is None:
        return leaf
    return leaf._replace(
        rules=layout.rules,
        mesh=layout.mesh,
        added_names=layout.added_names,
        variable_box=layout.box,
    )


def _arrays_of(path: Path, value: Leaf) -> tuple[tuple[ArrayInfo, ...], Any, Any]:
    """Returns the arrays of a value that is no box, its treedef, and the axes it knows itself."""
    if isinstance(value, (jax.Array, LazyValue)):
        return (_array_info(path, value),), None, None

    own_axes = axes_of(value)
    if is_array(value) and own_axes is None:
        return (_array_info(path, value),), None, None

    leaves = jax.tree.leaves_with_path(value, is_leaf=lambda node: axes_of(node) is not None)
    arrays = tuple(_array_info((*path, *plain_path(key_path)), array) for key_path, array in leaves)
    return arrays, jax.tree.structure(value), own_axes


def _leaf_of_box(path: Path, value: Any, variable: Variable | None) -> LeafInfo:
    """Returns the leaf of a box, or of a Variable that holds one."""
    stored = stored_in(value)
    box = standard_box(value, stored)
    names, rules = box.layout()
    plain_value = value if variable is None else None

    arrays = tuple(
        _array_info((*path, *plain_path(key_path)), leaf)
        for key_path, leaf in jax.tree.leaves_with_path(stored)
        if is_array(leaf)
    )

    return LeafInfo(
        path,
        cast("Names | None", check_axes(names)),
        arrays,
        treedef=None,
        variable=variable,
        plain_value=plain_value,
        box=with_stored(box, None),
        rules=rules,
        mesh=getattr(box, "mesh", None),
        axes_per_array=True,
        is_number=isinstance(stored, (bool, int, float, complex)),
    )


def _origin_of(leaf: LeafInfo) -> Origin:
    """Returns the type and metadata of a plain array or box."""
    if leaf.box is None:
        return Origin(Variable, EMPTY)

    kind, entries = leaf.box._filtered_as()
    return Origin(cast("Any", kind), Metadata(leaf.axes, entries))


def _array_info(path: Path, value: Any) -> ArrayInfo:
    """Returns the type of an array, of one that knows its names, or of a lazy value."""
    axes = axes_of(value)
    if axes is not None:
        (value,) = jax.tree.leaves(value)

    sharding = None
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and not isinstance(value, Tracer):
        sharding = value.sharding
    if not isinstance(sharding, NamedSharding):
        sharding = None

    is_weak = bool(getattr(value, "weak_type", False))
    return ArrayInfo(path, tuple(value.shape), value.dtype, is_weak, sharding, axes)


def with_mapped_axes(mapped: Sequence[Any], own_names: Names) -> Names:
    """Returns names with those of mapped dimensions in front."""
    names = list(own_names)
    for index, mapped_name in enumerate(mapped[: len(names)]):
        if names[index] is None:
            names[index] = mapped_name
    return tuple(names)


_BITS = {"int2": 2, "int4": 4, "uint2": 2, "uint4": 4, "float4_e2m1fn": 4}
"""Bits of dtypes of which several numbers are in a byte, where NumPy counts one each."""


def byte_count(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array on a device."""
    bits: int = _BITS.get(str(dtype)) or 8 * dtype.itemsize
    return -(-math.prod(shape) * bits // 8)
