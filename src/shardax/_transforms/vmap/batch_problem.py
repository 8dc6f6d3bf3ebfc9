# SPDX-License-Identifier: Apache-2.0
"""A nested problem, split into the parts that are batched or shared as a whole.

A *part* is a Variable (once, with all paths that reach it), an entry of a State, a box or a named
array with what is in it, or any other leaf. A part knows shapes and names but no values, so lazy
Variables stay lazy, and ``jax.ShapeDtypeStruct`` does as well as an array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardax._core.frames import local, resolve
from shardax._core.graph.flatten import flatten
from shardax._core.graph.handlers import axes_of, is_whole
from shardax._core.graph.paths import Path, PyTree, plain_path
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.state.state import State
from shardax._core.variable_types import ArrayAttribute
from shardax._transforms.lift.alias_paths import alias_paths
from shardax._transforms.lift.filter_mappings import ExactPath, StateAxes
from shardax._transforms.mapped.names import has_axis_methods
from shardax._transforms.mapped.streams import streams_of


class BatchPart(NamedTuple):
    """One part of a problem."""

    paths: tuple[Path, ...]  # all paths that reach it, the first one first
    item: object  # the Variable, box, named array or leaf; of a State, what the entry came from
    kind: type  # its type, or that of the Variable it came from
    # Its arrays, as shapes and dtypes; none if it is no array.
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[Any, ...] | None  # logical names of its dimensions, or None
    is_state: bool  # whether it belongs to a model, and is not an array of data
    is_stream: bool = False  # whether it is the key or the counter of a random stream

    @property
    def what(self) -> str:
        """Type, dtype and shape, for people."""
        if not self.arrays:
            return self.kind.__name__
        arrays = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.arrays)
        is_plain_array = not self.is_state and not self.is_named
        if is_plain_array or self.kind is ArrayAttribute:
            return arrays
        return f"{self.kind.__name__} {arrays}"

    @property
    def is_named(self) -> bool:
        """Whether it is an array with named dimensions."""
        return axes_of(self.item) is not None

    @property
    def named_dimensions(self) -> list[int]:
        """The dimensions of a named array that ``vmap`` cannot map."""
        if not self.is_named or self.names is None:
            return []
        return [axis for axis, name in enumerate(self.names) if name is not None]

    @property
    def leading(self) -> int:
        """The first mappable axis."""
        return next(axis for axis in itertools.count() if axis not in self.named_dimensions)

    def axes_of_size(self, size: int) -> list[int]:
        """Returns the mappable axes on which every array has a size."""
        if not self.arrays:
            return []
        axes = set(range(len(self.arrays[0].shape))).difference(self.named_dimensions)
        for array in self.arrays:
            axes &= {axis for axis, length in enumerate(array.shape) if length == size}
        return sorted(axes)


class _StateParts(NamedTuple):
    """A State in a problem."""

    state: State
    parts: range  # the indices of its entries


# The indices of the parts of a leaf: its own; for an object those of its Variables by path.
PartIndices = int | dict[Path, int] | _StateParts


class BatchProblem:
    """Trees split together, so that a shared Variable is one part."""

    def __init__(self, trees: Iterable[tuple[Path, PyTree]]) -> None:
        self.parts: list[BatchPart] = []
        self._index_of: dict[int, int] = {}  # of a Variable's part, by ``id``
        self._trees = [self._split(path, tree) for path, tree in trees]

    def prefixes(self, axes: Sequence[int | None]) -> list[PyTree]:
        """Returns a prefix of each tree, given the axis of each part."""
        return [
            treedef.unflatten(_entry(indices, axes) for indices in leaves)
            for treedef, leaves in self._trees
        ]

    def _split(
        self, tree_path: Path, tree: PyTree
    ) -> tuple[jax.tree_util.PyTreeDef, list[PartIndices]]:
        """Adds the parts of a tree; returns its treedef and the parts of each leaf."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda item: is_whole(item) or has_axis_methods(item)
        )
        leaves: list[PartIndices] = []
        for keys, leaf in pairs:
            path = (*tree_path, *plain_path(keys))
            if isinstance(leaf, Object):
                leaves.append(self._add_object(leaf, path))
            elif isinstance(leaf, State):
                leaves.append(self._add_state(leaf, path))
            else:
                leaves.append(self._add_leaf(leaf, path))
        return treedef, leaves

    def _add_leaf(self, leaf: object, path: Path) -> int:
        is_in_box = has_axis_methods(leaf)
        names = getattr(leaf, "names", None) if is_in_box else axes_of(leaf)
        self.parts.append(
            BatchPart((path,), leaf, type(leaf), _array_types(leaf), names, is_state=is_in_box)
        )
        return len(self.parts) - 1

    def _add_object(self, root: Object, root_path: Path) -> dict[Path, int]:
        flat = flatten(root)
        paths_of: list[list[Path]] = [[(*root_path, *path)] for path in flat.leaf_paths]
        for position, path in alias_paths(flat.graphdef):
            paths_of[position].append((*root_path, *path))
        stream_positions = {position for stream in streams_of(flat.graphdef) for position in stream}

        indices: dict[Path, int] = {}
        for position, variable in enumerate(flat.leaves):
            index = self._index_of.get(id(variable))
            if index is None:
                index = self._index_of[id(variable)] = len(self.parts)
                stand_in = resolve(variable, local.frame)
                part = BatchPart(
                    tuple(paths_of[position]),
                    variable,
                    type(variable),
                    _array_types(stand_in._value),
                    stand_in.axes,
                    is_state=True,
                    is_stream=position in stream_positions,
                )
                self.parts.append(part)
            else:  # another object holds the Variable, too
                part = self.parts[index]
                self.parts[index] = part._replace(paths=(*part.paths, *paths_of[position]))
            indices[flat.leaf_paths[position]] = index
        return indices

    def _add_state(self, state: State, state_path: Path) -> _StateParts:
        first = len(self.parts)
        origins = state.origins()
        for path, value in state.flat().items():
            origin = origins[path]
            part = BatchPart(
                ((*state_path, *path),),
                origin,
                origin.variable_type,
                _array_types(value),
                origin.axes,
                is_state=True,
            )
            self.parts.append(part)
        return _StateParts(state, range(first, len(self.parts)))


def _entry(indices: PartIndices, axes: Sequence[int | None]) -> PyTree:
    """Returns the entry of a leaf, given the axis of each part."""
    if isinstance(indices, int):
        return axes[indices]
    if isinstance(indices, _StateParts):
        state, parts = indices
        axis_at = {path: axes[index] for path, index in zip(state.flat(), parts, strict=True)}
        return State.from_flat(axis_at, state.origins())

    axis_at = {path: axes[index] for path, index in indices.items()}
    if len(set(axis_at.values())) <= 1:
        return next(iter(axis_at.values()), None)
    return StateAxes([(ExactPath(path), axis) for path, axis in axis_at.items()])


def _array_types(value: PyTree) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the arrays in a value, and behind them those of its numbers."""
    leaves = [value] if isinstance(value, LazyValue) else jax.tree.leaves(value)
    arrays = [
        jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
        for leaf in leaves
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    ]
    numbers = [
        jax.ShapeDtypeStruct((), jnp.result_type(leaf))
        for leaf in leaves
        if isinstance(leaf, (bool, int, float, complex))
    ]
    return (*arrays, *numbers)
