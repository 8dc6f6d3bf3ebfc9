# SPDX-License-Identifier: Apache-2.0
"""The inventory of a tree's leaves.

A *tree* is a Module, a Variable, a ``State``, a box, or a pytree that holds such and arrays. It is
walked once (``walk``), into *subtrees*: Modules, Variables, States, boxes, arrays, and whatever
else. Lazy values stay lazy. A *leaf* is one place that holds a value: a Variable (once, however
often it is reached), an entry of a State, a box, or a plain array. The inventory holds no array of
a Variable, so that old arrays can be freed while others are moved. Functions of trees return one
*entry* per leaf; for a value that is a pytree, a pytree of entries; for a box one entry, because
its names hold for each of its arrays. Of boxes in a box the outermost counts.

*Reduced states*: an optimizer maps over boxed parameters, so each array of its state is in a box
with the parameter's names, which some do not fit: row and column statistics (Adafactor) lack a
dimension, a history has one more, and where there is nothing to keep stands one number. Such a box
is laid out by the dimensions of its *owner* that its sizes tell apart, or else replicated, with the
diagnostic ``reduced-state``. The owner is another box of the tree that is alike in everything but
the value, with a shorter path that ends in the same steps (``params.layers.up`` and
``opt[0].v_row.layers.up``; for a parameter at the top, all sizes must be among its own). Without an
owner the names are an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.frames import local, resolve
from shardax._core.graph.flatten import flatten
from shardax._core.graph.handlers import axes_of, is_box, is_whole
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.graph.static import BOX_ENTRY, EMPTY, MAPPED_AXES, Metadata
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.state.state import Origin, State
from shardax._core.variable import Variable
from shardax._transforms.lift.prefix import alias_paths
from shardax.partition.boxes.boxes import (
    AxisMetadata,
    layout_of_variable,
    sharding_of_own,
    standard_box,
    stored_in,
    with_stored,
)
from shardax.partition.errors import Diagnostic
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules

T = TypeVar("T")


def walk(tree: object) -> tuple[list[tuple[Path, Any]], Any]:
    """The subtrees of a mixed tree by path, and their treedef."""
    leaves, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_whole)
    return [(plain_path(path) if path else (), leaf) for path, leaf in leaves], treedef


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype."""
    # Classes such as jnp.float32 have these attributes too, for their instances.
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


class ArrayInfo(NamedTuple):
    """Type and place of one array, without the array."""

    path: Path
    shape: tuple[int, ...]  # global
    dtype: Any
    weak_type: bool
    sharding: NamedSharding | None  # where it is, if it has one
    axes: tuple[Any, ...] | None = None  # of an array that knows its axis names, these

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return byte_count(self.shape, self.dtype)


class LeafInfo(NamedTuple):
    """One value of a tree, as layouts see it."""

    path: Path
    axes: Any  # one name per dimension, or None; of a user's own box, a PartitionSpec
    arrays: tuple[ArrayInfo, ...]  # of its value, in the order of leaves
    treedef: Any  # of the value; None for the usual value of one array
    variable: Variable | None  # as seen from the current frame
    held: object  # the value of what is no Variable
    box: AxisMetadata[Any] | None = None  # empty
    rules: Rules | None = None  # of its own, instead of the layout's
    mesh: AnyMesh | None = None  # of its own
    added: frozenset[str] = frozenset()  # names that its own rules do not know, as of a stack
    axes_per_array: bool = False  # whether the axes are those of each of several arrays
    is_number: bool = False  # a box of a Python number, which has no dimensions
    kept: AxisMetadata[Any] | None = None  # the empty box that a Variable was made of

    @property
    def value(self) -> Leaf:
        """The value, unread: lazy values stay lazy."""
        return self.held if self.variable is None else self.variable._value

    def names_of(self, info: ArrayInfo) -> Any:
        """One name per dimension of one of the arrays, or None."""
        if info.axes is not None:
            return info.axes
        if len(self.arrays) > 1 and not self.axes_per_array:
            return None
        if isinstance(self.axes, PartitionSpec):
            return (*self.axes, *(None,) * (len(info.shape) - len(self.axes)))
        return self.axes

    def names_as_array(self, over_mesh: bool) -> tuple[ArrayInfo, ...]:
        """An empty array to check the names of a box without arrays."""
        if self.box is None:
            return ()
        # 0 is divisible by everything. A number may stand for an array while there is no mesh, as
        # in Flax; over a mesh it has no dimensions.
        names = None if self.axes is None else tuple(self.axes)
        shape = () if self.is_number and over_mesh else (0,) * len(names or ())
        return (ArrayInfo(self.path, shape, np.dtype("V0"), False, None, names),)

    def arrays_in(self, value: Any) -> list[Any]:
        """The arrays of a value like this leaf's."""
        if self.box is not None:
            return [leaf for leaf in jax.tree.leaves(stored_in(value)) if is_array(leaf)]
        return [value] if self.treedef is None else self.treedef.flatten_up_to(value)

    def with_arrays(self, value: Any, arrays: Sequence[Leaf]) -> PyTree:
        """The value with other arrays in it: the inverse of ``arrays_in``."""
        if self.box is None:
            return arrays[0] if self.treedef is None else self.treedef.unflatten(arrays)
        remaining = iter(arrays)
        stored = jax.tree.map(
            lambda leaf: next(remaining) if is_array(leaf) else leaf, stored_in(value)
        )
        return with_stored(value, stored)

    def sharding_of_box(self, mesh: AnyMesh) -> NamedSharding | None:
        """What a box with a ``get_sharding`` of its own says of the leaf; None of others."""
        box = self.kept if self.box is None else self.box
        if box is None:
            return None
        value = self.value
        stored = stored_in(value) if is_box(value) else value
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf,
            stored,
        )
        return sharding_of_own(with_stored(box, abstract), mesh)

    def entry(self, arrays: Sequence[Leaf]) -> Any:
        """The leaf's entry, given those of its arrays."""
        if self.box is not None or self.treedef is None:
            return arrays[0]
        return self.treedef.unflatten(arrays)


class Subtree(NamedTuple):
    """A leaf of the tree's pytree, such as a Module or box."""

    value: object
    path: Path
    leaves: tuple[int, ...]  # positions in the inventory
    origins: dict[Path, Origin] | None  # of Modules and States, by path below, as ``leaves``

    def filled(self, entries: Sequence[object]) -> Any:
        """Entries in place of leaves; a State for a Module or State."""
        if self.origins is not None:
            pairs = zip(self.origins, self.leaves, strict=True)
            return State.from_flat({path: entries[i] for path, i in pairs}, self.origins)
        return entries[self.leaves[0]] if self.leaves else None


class FilterSubject(NamedTuple):
    """A leaf as filters see it."""

    paths: tuple[Path, ...]  # every path by which it is reached
    like: object  # the Variable, or the Origin of what is none


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
        self._positions: dict[int, int] = {}  # of Variables, by identity
        self.subtrees = [self._add_subtree(path, value) for path, value in subtrees]

    def _add_subtree(self, path: Path, value: object) -> Subtree:
        if isinstance(value, Variable):
            return Subtree(value, path, (self._add_variable(path, value),), None)
        if isinstance(value, Object):
            flat = flatten(value)
            positions = tuple(
                self._add_variable((*path, *below), variable)
                for below, variable in zip(flat.leaf_paths, flat.leaves, strict=True)
            )
            origins: dict[Path, Origin] = {}
            for below, position in zip(flat.leaf_paths, positions, strict=True):
                variable: Any = self.leaves[position].variable
                origins[below] = Origin(type(variable), variable._metadata)
            return Subtree(value, path, positions, origins)
        if isinstance(value, State):
            origins = value.origins()
            positions = tuple(
                self._add((*path, *below), origins[below].all_metadata, entry)
                for below, entry in value.flat().items()
            )
            return Subtree(value, path, positions, origins)
        if is_box(value) or is_array(value):
            return Subtree(value, path, (self._add(path, EMPTY, value),), None)
        return Subtree(value, path, (), None)

    def _add_variable(self, path: Path, variable: Variable) -> int:
        target = resolve(variable, local.frame)
        position = self._positions.get(id(target))
        if position is None:
            position = self._add(path, target._metadata, target._value, target)
            self._positions[id(target)] = position
        return position

    def _add(
        self, path: Path, metadata: Metadata, value: object, variable: Variable | None = None
    ) -> int:
        plain_value = value if variable is None else None
        if is_box(value):
            leaf = _box_leaf(path, value, variable, plain_value)
        else:
            axes = metadata.axes
            usual = isinstance(value, (jax.Array, LazyValue))
            own_axes = None if usual else axes_of(value)
            if usual or (is_array(value) and own_axes is None):
                arrays, treedef = (_array_info(path, value),), None
            else:
                leaves = jax.tree.leaves_with_path(
                    value, is_leaf=lambda part: axes_of(part) is not None
                )
                arrays = tuple(_array_info((*path, *plain_path(k)), array) for k, array in leaves)
                treedef = jax.tree.structure(value)
                axes = metadata.axes if own_axes is None else own_axes
            lead = metadata.entries.get(MAPPED_AXES)
            if lead is not None:
                own_names = [info.axes or (None,) * len(info.shape) for info in arrays]
                pairs = zip(arrays, own_names, strict=True)
                arrays = tuple(i._replace(axes=with_mapped_axes(lead, o)) for i, o in pairs)
                axes = arrays[0].axes if len(arrays) == 1 else axes
            leaf = LeafInfo(path, axes, arrays, treedef, variable, plain_value)
            if BOX_ENTRY in metadata.entries:
                kept = layout_of_variable(axes, metadata.entries, value)
                leaf = leaf._replace(
                    axes_per_array=True, **({} if kept is None else kept._asdict())
                )
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def position(self, variable: Variable) -> int:
        """The position of a Variable's leaf."""
        return self._positions[id(resolve(variable, local.frame))]

    def filter_subjects(self) -> list[FilterSubject]:
        """The leaves as filters see them, each with all its paths."""
        paths: list[list[Path]] = [[] for _ in self.leaves]
        like: list[Any] = [leaf.variable for leaf in self.leaves]
        for subtree in self.subtrees:
            for below, i in zip(subtree.origins or ((),), subtree.leaves, strict=False):
                paths[i].append((*subtree.path, *below))
                if like[i] is None:
                    like[i] = (subtree.origins or {}).get(below) or _origin_of(self.leaves[i])
            if isinstance(subtree.value, Object) and not isinstance(subtree.value, Variable):
                for i, below in alias_paths(flatten(subtree.value).graphdef):
                    paths[subtree.leaves[i]].append((*subtree.path, *below))
        return [FilterSubject(tuple(dict.fromkeys(p)), v) for p, v in zip(paths, like, strict=True)]

    def arrays(self) -> Iterator[tuple[LeafInfo, ArrayInfo, Any]]:
        """Yields every array with its leaf and type."""
        for leaf in self.leaves:
            for info, array in zip(leaf.arrays, leaf.arrays_in(leaf.value), strict=True):
                yield leaf, info, array

    def unflatten(self, fill: Callable[[Subtree], Any]) -> PyTree:
        """The tree with other values in place of its subtrees."""
        return self.treedef.unflatten(map(fill, self.subtrees))

    def filled(self, entries: Sequence[object]) -> Any:
        """The tree with entries in place of leaves, None for other values."""
        return self.unflatten(lambda subtree: subtree.filled(entries))


def _box_leaf(
    path: Path, value: object, variable: Variable | None, plain_value: object
) -> LeafInfo:
    stored = stored_in(value)
    box = standard_box(value, stored)
    names, rules = box.layout()
    return LeafInfo(
        path,
        names,
        tuple(
            _array_info((*path, *plain_path(key_path)), leaf)
            for key_path, leaf in jax.tree.leaves_with_path(stored)
            if is_array(leaf)
        ),
        None,
        variable,
        plain_value,
        with_stored(box, None),
        rules,
        getattr(box, "mesh", None),
        axes_per_array=True,
        is_number=isinstance(stored, (bool, int, float, complex)),
    )


def _origin_of(leaf: LeafInfo) -> Origin:
    """Type and metadata of a plain array or box."""
    if leaf.box is None:
        return Origin(Variable, EMPTY)
    kind: Any = getattr(leaf.box, "variable_type", type(leaf.box))
    entries = getattr(leaf.box, "entries", EMPTY)
    names = None if leaf.axes is None else tuple(leaf.axes)
    return Origin(kind, Metadata(names, entries.entries if isinstance(entries, Metadata) else {}))


def _array_info(path: Path, value) -> ArrayInfo:
    axes = axes_of(value)
    if axes is not None:
        (value,) = jax.tree.leaves(value)
    has_sharding = isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and not isinstance(
        value, Tracer
    )
    sharding = value.sharding if has_sharding else None
    named = sharding if isinstance(sharding, NamedSharding) else None
    weak = bool(getattr(value, "weak_type", False))
    return ArrayInfo(path, tuple(value.shape), value.dtype, weak, named, axes)


def with_mapped_axes(mapped: Sequence[object], own_names: Sequence[object]) -> tuple[PyTree, ...]:
    """Returns names with those of mapped dimensions in front."""
    named = [new if old is None else old for new, old in zip(mapped, own_names, strict=False)]
    return (*named, *own_names[len(named) :])


class PathEnds(Generic[T]):
    """An index of items by the ends of their paths."""

    def __init__(self, items: Iterable[tuple[Iterable[Path], T]]) -> None:
        self._by_end: dict[Path, list[T]] = {}
        for paths, item in items:
            for end in {path[start:] for path in paths for start in range(len(path) + 1)}:
                self._by_end.setdefault(end, []).append(item)

    def of_longest_end(self, paths: Iterable[Path], fits: Callable[[T, Path], bool]) -> list[T]:
        """The fitting items of the longest common path end."""
        ends = {path[start:] for path in paths for start in range(len(path) + 1)}
        for end in sorted(ends, key=len, reverse=True):
            matches = [item for item in self._by_end.get(end, ()) if fits(item, end)]
            if matches:
                return matches
        return []


def dimensions_of_state(
    shape: tuple[int, ...], parameter: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """The parameter's dimension of each dimension of an optimizer's state."""
    # None for a new dimension; None in place of all if that is unclear. Three forms occur: the
    # parameter's shape, leading dimensions before it (a history), and one dimension less (row and
    # column statistics), where the missing one must be clear from the sizes.
    extra = len(shape) - len(parameter)
    if extra >= 0 and shape[extra:] == parameter:
        return (*((None,) * extra), *range(len(parameter)))
    if extra != -1:
        return None
    positions = range(len(parameter))
    fits = [p for p in positions if (*parameter[:p], *parameter[p + 1 :]) == shape]
    return tuple(p for p in positions if p != fits[0]) if len(fits) == 1 else None


def reduced_states(
    leaves: Sequence[LeafInfo], diagnostics: Sequence[Diagnostic]
) -> tuple[dict[int, LeafInfo], list[Diagnostic]]:
    """Reduced states by position, renamed, and their diagnostics."""
    # ``diagnostics`` are those of a layout of all boxes by their names.
    misfits = {d.path for d in diagnostics if d.code in ("rank-mismatch", "indivisible")}
    if not misfits:
        return {}, []
    wrong = {d.path for d in diagnostics if d.severity == "error"}
    owners = PathEnds(
        ((leaf.path,), leaf)
        for leaf in leaves
        if leaf.box is not None and len(leaf.arrays) == 1 and leaf.arrays[0].path not in wrong
    )
    reduced: dict[int, LeafInfo] = {}
    renamed: list[Diagnostic] = []
    for position, leaf in enumerate(leaves):
        unfit = [info for info in leaf.arrays if info.path in misfits]
        if leaf.box is None or not unfit:
            continue
        candidates = owners.of_longest_end(
            [leaf.path], lambda owner, end, leaf=leaf: _may_own(owner, leaf, end)
        )
        if len({owner.arrays[0].shape for owner in candidates}) != 1:
            continue
        parameter = candidates[0].arrays[0].shape
        if all(len(info.shape) != len(parameter) or math.prod(info.shape) == 1 for info in unfit):
            reduced[position], diagnostic = _reduced(leaf, candidates[0])
            renamed.append(diagnostic)
    return reduced, renamed


def _may_own(owner: LeafInfo, leaf: LeafInfo, end: Path) -> bool:
    if len(owner.path) >= len(leaf.path) or owner.box != leaf.box:
        return False
    # Where no step of the paths is common, all sizes must be sizes of the owner.
    sizes = set(owner.arrays[0].shape)
    return bool(end) or (
        len(owner.path) <= 1
        and all(sizes.issuperset(i.shape) or math.prod(i.shape) == 1 for i in leaf.arrays)
    )


def _reduced(leaf: LeafInfo, owner: LeafInfo) -> tuple[LeafInfo, Diagnostic]:
    parameter = owner.arrays[0].shape
    shapes = {info.shape for info in leaf.arrays}
    shape = next(iter(shapes))
    dims = dimensions_of_state(shape, parameter) if len(shapes) == 1 else None
    names: Any = None
    if dims is not None:
        owner_names = owner.names_of(owner.arrays[0])
        names = tuple(None if dim is None else owner_names[dim] for dim in dims)
    how = "it is replicated" if names is None else f"it is laid out by the names {names}"
    text = (
        f"{format_path(leaf.path)}: its box has the names {tuple(leaf.axes)} of the parameter "
        f"{format_path(owner.path)}, shape {parameter}, but shape {shape}; {how}. If that is no "
        "state of an optimizer, give one name per dimension of its own."
    )
    severity = "info" if names is not None or math.prod(shape) == 1 else "warning"
    return leaf._replace(axes=names), Diagnostic(severity, leaf.path, "reduced-state", text)


_BITS = {"int2": 2, "int4": 4, "uint2": 2, "uint4": 4, "float4_e2m1fn": 4}
"""Bits of dtypes of which several numbers are in a byte, where NumPy counts one each."""


def byte_count(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array on a device."""
    bits: int = _BITS.get(str(dtype)) or 8 * dtype.itemsize
    return -(-math.prod(shape) * bits // 8)
