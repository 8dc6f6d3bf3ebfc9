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

States in boxes: arrays that an optimizer keeps in the box of a parameter, in another shape.

An optimizer makes its state by mapping over boxed parameters, so each of its arrays is in a box
with the parameter's names. Most have the parameter's shape as well, and the names hold. Some have
not: row and column statistics (Adafactor) lack a dimension, a history has one more, and where there
is nothing to keep stands an array of one number. A *reduced state* is a box whose names fail to fit
its array, while those of its *owner* fit: another box of the tree that is alike in everything but
the value, and whose path is shorter and ends in the same steps (``params.layers.up`` and
``opt[0].v_row.layers.up``; for a parameter at the top, the sizes must be among its own).

Its dimensions are those of the owner that its sizes tell apart; if they do not, it is replicated.
Either is said in a finding, ``reduced-state``. Without an owner in the tree the names are an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.array_ops import knows_axes
from shardax._core.frames import local, resolve
from shardax._core.graph.flatten import flatten
from shardax._core.graph.paths import Path, PathKey, format_path, path_step
from shardax._core.graph.static import EMPTY, Metadata
from shardax._core.object import Object
from shardax._core.state.state import Origin, State
from shardax._core.variable import Variable
from shardax._transforms.lift.prefix import alias_paths
from shardax.partition.boxes.boxes import BOX_ENTRY, AxisMetadata, layout_of_variable
from shardax.partition.findings import Finding
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules

# --- Survey ---


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


# --- State boxes ---


class ReducedState(NamedTuple):
    """A reduced state: its slot with the names that fit, or None, and what there is to say."""

    slot: Slot
    finding: Finding


def dimensions_of_state(
    shape: tuple[int, ...], parameter: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """Says which dimension of a parameter each dimension of an optimizer's state is.

    Three forms occur: the parameter's shape; leading dimensions before it (a history); and one
    dimension less (row and column statistics), where the missing one must be clear from the sizes.

    Args:
        shape: The state's shape.
        parameter: The parameter's.

    Returns:
        For each dimension that of the parameter, or None if it is new; None if it is unclear.

    Example:
        >>> dimensions_of_state((8,), (8, 16)), dimensions_of_state((5, 8, 16), (8, 16))
        ((0,), (None, 0, 1))
        >>> dimensions_of_state((8,), (8, 8)) is None
        True
    """
    extra = len(shape) - len(parameter)
    if extra >= 0 and shape[extra:] == parameter:
        return (*((None,) * extra), *range(len(parameter)))
    if extra != -1:
        return None
    positions = range(len(parameter))
    fits = [p for p in positions if (*parameter[:p], *parameter[p + 1 :]) == shape]
    return tuple(p for p in positions if p != fits[0]) if len(fits) == 1 else None


def states_of_boxes(slots: Sequence[Slot], findings: Sequence[Finding]) -> dict[int, ReducedState]:
    """Finds the reduced states among the slots of a tree.

    Args:
        slots: The slots.
        findings: What was found when all boxes were laid out by their names.

    Returns:
        By position of the slot.
    """
    wrong = {finding.path for finding in findings if finding.severity == "error"}
    misfits = {f.path for f in findings if f.code in ("rank-mismatch", "indivisible")}
    if not misfits:
        return {}
    owners = _Owners(
        slot
        for slot in slots
        if slot.box is not None and len(slot.arrays) == 1 and not _paths(slot) & wrong
    )
    found = {}
    for position, slot in enumerate(slots):
        if slot.box is None or not _paths(slot) & misfits:
            continue
        owner = owners.of(slot)
        if owner is not None and all(
            len(info.shape) != len(owner.arrays[0].shape) or math.prod(info.shape) == 1
            for info in slot.arrays
            if info.path in misfits
        ):
            found[position] = _reduced(slot, owner)
    return found


def with_hints(findings: Sequence[Finding], slots: Sequence[Slot]) -> list[Finding]:
    """Returns findings, those about the rank of what is in a box with a word on states."""
    boxed = {path for slot in slots if slot.box is not None for path in _paths(slot)}
    hint = (
        " If this is a state of an optimizer, give the parameters in the same tree, such as "
        "(params, state): they tell which dimensions it has."
    )
    return [
        dataclasses.replace(finding, message=finding.message + hint)
        if finding.code == "rank-mismatch" and finding.path in boxed
        else finding
        for finding in findings
    ]


def _paths(slot: Slot) -> set[Path]:
    return {info.path for info in slot.arrays}


class _Owners:
    """The boxes that may own others, by the ends of their paths."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._by_end: dict[Path, list[Slot]] = {}
        for slot in slots:
            for start in range(len(slot.path) + 1):
                self._by_end.setdefault(slot.path[start:], []).append(slot)

    def of(self, slot: Slot) -> Slot | None:
        """Returns the owner, if one is nearest by its path, or several that are of one shape."""
        for start in range(len(slot.path) + 1):
            end = slot.path[start:]
            near = [other for other in self._by_end.get(end, ()) if _may_own(other, slot, end)]
            if near:
                alike = {other.arrays[0].shape for other in near}
                return near[0] if len(alike) == 1 else None
        return None


def _may_own(owner: Slot, slot: Slot, end: Path) -> bool:
    if len(owner.path) >= len(slot.path) or owner.box != slot.box:
        return False
    return bool(end) or (len(owner.path) <= 1 and _is_made_of(slot, owner))


def _is_made_of(slot: Slot, owner: Slot) -> bool:
    """Whether all sizes are sizes of the owner, where no step of the paths says that it is one."""
    sizes = set(owner.arrays[0].shape)
    return all(sizes.issuperset(info.shape) or math.prod(info.shape) == 1 for info in slot.arrays)


def _reduced(slot: Slot, owner: Slot) -> ReducedState:
    parameter = owner.arrays[0].shape
    shapes = {info.shape for info in slot.arrays}
    shape = next(iter(shapes))
    dims = dimensions_of_state(shape, parameter) if len(shapes) == 1 else None
    names: Any = None
    if dims is not None:
        given = owner.names_of(owner.arrays[0])
        names = tuple(None if dim is None else given[dim] for dim in dims)
    how = "it is replicated" if names is None else f"it is laid out by the names {names}"
    text = (
        f"{format_path(slot.path)}: its box has the names {tuple(slot.axes)} of the parameter "
        f"{format_path(owner.path)}, shape {parameter}, but shape {shape}; {how}. If that is no "
        "state of an optimizer, give one name per dimension of its own."
    )
    severity = "info" if names is not None or math.prod(shape) == 1 else "warning"
    return ReducedState(
        slot._replace(axes=names), Finding(severity, slot.path, "reduced-state", text)
    )
