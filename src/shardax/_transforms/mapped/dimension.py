# SPDX-License-Identifier: Apache-2.0
"""The mapped dimension of ``vmap`` and ``scan``: its size, and its layout over a mesh.

All arrays that are mapped together have one size along their axes. Over Explicit mesh axes
``vmap`` needs the dimension split alike in all of them, and ``scan`` needs it whole.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._transforms.lift.entries import EntryAssignment
from shardax._transforms.lift.filter_mappings import is_axis
from shardax._transforms.mapped import errors
from shardax._transforms.mapped.streams import SplitStreams


class EnteringArray(NamedTuple):
    """An array that enters a call; the axis is None if it is not mapped."""

    path: Path
    array: Leaf
    axis: int | None


def entering_arrays(
    assignment: EntryAssignment,
    streams: SplitStreams,
    values: Sequence[PyTree],
    plain: Sequence[Leaf],
) -> list[EnteringArray]:
    """Returns the arrays that enter, except those of split streams."""

    def entering(path: Path, array: Leaf, entry: PyTree) -> EnteringArray:
        return EnteringArray(path, array, entry if is_axis(entry) else None)

    arrays = []
    variables = zip(assignment.leaf_paths, values, assignment.leaves, strict=True)
    for position, (path, value, entry) in enumerate(variables):
        if position not in streams:
            arrays += [entering(path, leaf, entry) for leaf in jax.tree.leaves(value)]
    arrays += map(entering, assignment.plain_paths, plain, assignment.plain)
    return arrays


def common_size(arrays: Iterable[EnteringArray], declared: int | None, name: str) -> int:
    """Returns the size that all mapped arrays have along their axes."""
    size_option = "length" if name == "scan" else "axis_size"
    path_of_size: dict[int, Path | None] = {} if declared is None else {declared: None}
    for path, array, axis in arrays:
        if axis is None:
            continue
        if not hasattr(array, "shape") and not isinstance(array, (bool, int, float, complex)):
            raise errors.not_an_array(path, array, axis, name)
        shape = jnp.shape(array)
        if not -len(shape) <= axis < len(shape):
            raise errors.no_such_axis(path, shape, axis, name)
        path_of_size.setdefault(shape[axis], path)

    if len(path_of_size) > 1:
        raise errors.different_sizes(path_of_size, size_option, name)
    if not path_of_size:
        raise errors.unknown_size(size_option, name)
    return next(iter(path_of_size))


def as_count(value: Any, option: str) -> int | None:
    """Returns the number of runs that a caller gave, or None; raises if it is no number."""
    if value is None:
        return None
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:  # also of a traced number
        count = -1
    if count < 0:
        raise errors.not_a_count(value, option)
    return count


def check_new_axis(value: PyTree, axis: PyTree, path: Path, name: str) -> None:
    """Raises if the slices of a value cannot be stacked along an axis."""
    if not is_axis(axis):
        return
    for leaf in jax.tree.leaves(value):
        rank = jnp.ndim(leaf) + 1
        if not -rank <= axis < rank:
            raise errors.no_room_for_axis(path, jnp.shape(leaf), axis, name)


def mapped_sharding(arrays: Iterable[EnteringArray], name: str) -> NamedSharding | None:
    """Returns the sharding of the mapped dimension over Explicit axes; None if it is whole."""
    arrays = [item for item in arrays if isinstance(item.array, jax.Array)]
    mesh_axes_of = [(path, _spec(array)[axis]) for path, array, axis in arrays if axis is not None]
    if all(mesh_axes is None for _, mesh_axes in mesh_axes_of):
        return None

    first, *others = mesh_axes_of
    for other in others:
        if other[1] != first[1]:
            raise errors.layouts_differ(first, other, name)

    _, split_over = first
    names = tuple(jax.tree.leaves(split_over))
    for path, array, axis in arrays:
        if axis is None and not set(names).isdisjoint(jax.tree.leaves(_spec(array))):
            raise errors.shared_array_is_split(path, array, names, name)

    array = next(item.array for item in arrays if item.axis is not None)
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else array.sharding
    return NamedSharding(sharding.mesh, PartitionSpec(split_over))


def refuse_split(arrays: Iterable[EnteringArray]) -> None:
    """Raises if a scanned dimension is split over Explicit mesh axes."""
    for path, array, axis in arrays:
        if axis is None or not isinstance(array, jax.Array):
            continue
        mesh_axes = _spec(array)[axis]
        if mesh_axes is not None:
            raise errors.scanned_dimension_is_split(path, array, axis, mesh_axes)


def _spec(array: jax.Array) -> tuple[str | tuple[str, ...] | None, ...]:
    """Returns the Explicit mesh axes of each dimension."""
    return tuple(jax.typeof(array).sharding.spec)
