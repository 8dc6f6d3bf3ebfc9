# SPDX-License-Identifier: Apache-2.0
"""Mapped axes: what ``vmap`` and ``scan`` ask of the arrays that they take apart.

All arrays that are mapped together have one size along their axes, and the dimension that this
makes, the *mapped dimension*, is the same for all of them. Inside the function it is gone, from the
values and from the names in ``Variable.axes``; on what leaves it is back, at the axis of each. Its
name is the one that the Variable came with, or, for a new Variable, that of the caller's
``metadata``, or none.

Over a mesh with Explicit axes the mapped dimension may be split; then it is split alike in all
arrays, those that a transform makes itself included.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardax.core._jax import Tracer
from shardax.core.errors import AxisSizeError, MappedShardingError, MetadataError, PrefixError
from shardax.core.metadata import PARTITION_NAME
from shardax.core.paths import Path, format_path
from shardax.core.structure import GraphDef, VariableDef
from shardax.transforms.layout import Layout, map_metadata
from shardax.transforms.lift import Record
from shardax.transforms.prefix import is_axis
from shardax.transforms.streams import SplitStreams

Row = tuple[Path, Any, Any]
"""(path, array, axis or None) of an array that enters."""


def entering(
    layout: Layout, streams: SplitStreams, values: Sequence[Any], plain: Sequence[Any]
) -> list[Row]:
    """Returns the arrays that enter, except those of split streams, which the transform makes.

    Args:
        layout: The call's layout; an entry that is no axis (``Carry``) stands as None.
        streams: The streams that are split.
        values: One value per Variable of the graph.
        plain: The plain leaves of the arguments.
    """
    variables = zip(layout.leaf_paths, values, layout.leaves, strict=True)
    rows = [
        (path, leaf, entry)
        for position, (path, value, entry) in enumerate(variables)
        if position not in streams
        for leaf in jax.tree.leaves(value)
    ]
    rows += zip(layout.plain_paths, plain, layout.plain, strict=True)
    return [(path, leaf, entry if is_axis(entry) else None) for path, leaf, entry in rows]


# --- sizes ----------------------------------------------------------------------------------------


def common_size(rows: Iterable[Row], given: int | None, name: str) -> int:
    """Returns the size that all mapped arrays have along their axes.

    Args:
        rows: The arrays that enter.
        given: What the caller says it is, or None.
        name: The transform's name, for messages.

    Raises:
        AxisSizeError: If an array has no such axis, sizes differ, or nothing has an axis.
    """
    option = "length" if name == "scan" else "axis_size"
    found: dict[int, Path | None] = {} if given is None else {int(given): None}
    for path, leaf, axis in rows:
        if axis is None:
            continue
        if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
            raise AxisSizeError(
                f"sx.{name} maps axis {axis} of what stands at {format_path(path)}, but "
                f"{leaf!r} is a {type(leaf).__name__}, not an array. Give it None in in_axes, or "
                f"bind it with functools.partial."
            )
        shape = jnp.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise AxisSizeError(
                f"sx.{name} maps axis {axis} of the array at {format_path(path)}, which has shape "
                f"{shape}. Give it None in in_axes if it is the same for all, or another axis."
            )
        found.setdefault(shape[axis], path)
    if len(found) > 1:
        shown = "\n".join(
            f"  {option if path is None else format_path(path)}: {size}"
            for size, path in found.items()
        )
        raise AxisSizeError(f"sx.{name} maps arrays of different sizes:\n{shown}")
    if not found:
        raise AxisSizeError(
            f"sx.{name} does not know how many times to run: no argument has an axis to map. Give "
            f"{option}=..., or an axis in in_axes."
        )
    return next(iter(found))


def check_new_axis(value: Any, axis: Any, path: Path, name: str) -> None:
    """Raises if what leaves one lane has no place for a mapped dimension at an axis.

    Args:
        value: A pytree of arrays, as one lane sees it.
        axis: An axis of the whole, or an entry of another kind, which has a place anyway.
        path: Where the value stands.
        name: The transform's name, for messages.

    Raises:
        AxisSizeError: If there is none.
    """
    for leaf in jax.tree.leaves(value) if is_axis(axis) else []:
        rank = jnp.ndim(leaf) + 1
        if not -rank <= axis < rank:
            raise AxisSizeError(
                f"sx.{name} puts {format_path(path)} together along axis {axis}, but each part has "
                f"shape {jnp.shape(leaf)}, so the whole has no axis {axis}. Give it one from "
                f"{-rank} to {rank - 1}: in out_axes for a result, in in_axes for what belongs to "
                f"an argument."
            )


# --- meshes ---------------------------------------------------------------------------------------


def lane_sharding(rows: Iterable[Row], name: str) -> NamedSharding | None:
    """Returns how the mapped dimension is split over the Explicit axes of a mesh.

    Args:
        rows: The arrays that enter.
        name: The transform's name, for messages.

    Returns:
        The sharding of an array with nothing but that dimension; None if it is not split.

    Raises:
        MappedShardingError: If it is split differently in two arrays, or an array that all lanes
            share is split over the same mesh axes.
    """
    rows = [row for row in rows if isinstance(row[1], jax.Array)]
    mapped = [(path, leaf, _specs(leaf)[axis]) for path, leaf, axis in rows if axis is not None]
    if not any(over is not None for _, _, over in mapped):
        return None
    first, other = mapped[0], next((row for row in mapped if row[2] != mapped[0][2]), None)
    if other is not None:
        raise MappedShardingError(
            f"sx.{name} maps arrays whose mapped dimensions are split differently over the mesh:\n"
            f"  {format_path(first[0])}: {first[2]}\n  {format_path(other[0])}: {other[2]}\n"
            f"Over Explicit mesh axes nothing is moved without being asked. Use jax.reshard, or "
            f"sx.shard for a model, to split them alike."
        )
    over = first[2] if isinstance(first[2], tuple) else (first[2],)
    for path, leaf, axis in rows:
        used = {part for spec in _specs(leaf) for part in _as_tuple(spec)}
        if axis is None and used & set(over):
            raise MappedShardingError(
                f"sx.{name} maps a dimension that is split over the mesh axes {over}, but the "
                f"array at {format_path(path)}, which all lanes share, is split over them too: "
                f"{jax.typeof(leaf)}. Use jax.reshard to take it off them, or map it as well."
            )
    leaf = first[1]
    mesh = jax.typeof(leaf).sharding.mesh if isinstance(leaf, Tracer) else leaf.sharding.mesh
    return NamedSharding(mesh, PartitionSpec(first[2]))


def refuse_split(rows: Iterable[Row], name: str) -> None:
    """Raises if a dimension to be gone through in turn is split over Explicit mesh axes.

    Args:
        rows: The arrays that enter.
        name: The transform's name, for messages.

    Raises:
        MappedShardingError: Naming the first such array.
    """
    for path, leaf, axis in rows:
        if not is_axis(axis) or not isinstance(leaf, jax.Array):
            continue
        over = _specs(leaf)[axis]
        if over is not None:
            raise MappedShardingError(
                f"sx.{name} takes slices along axis {axis} of the array at {format_path(path)}, "
                f"which is split over the mesh axis {over!r} there: {jax.typeof(leaf)}. One slice "
                f"after another cannot be split so over Explicit mesh axes. Keep the dimension "
                f"whole (a rule such as ('layers', None), or jax.reshard), or give the mesh Auto "
                f"axes."
            )


def _specs(leaf: Any) -> Sequence[Any]:
    return tuple(jax.typeof(leaf).sharding.spec)


def _as_tuple(spec: Any) -> tuple[Any, ...]:
    return () if spec is None else spec if isinstance(spec, tuple) else (spec,)


# --- names ----------------------------------------------------------------------------------------


def mapped_name(metadata: Mapping[str, Any] | None, name: str) -> Hashable:
    """Returns the name of the mapped dimension that a caller gave, or None.

    Args:
        metadata: The option.
        name: The transform's name, for messages.

    Raises:
        PrefixError: If the option has other entries.
    """
    others = [key for key in metadata or {} if key != PARTITION_NAME]
    if others:
        raise PrefixError(
            f"metadata of sx.{name} has {others}; its one entry is the name of the mapped "
            f"dimension: metadata={{sx.partition.PARTITION_NAME: 'layers'}}."
        )
    return (metadata or {}).get(PARTITION_NAME)


def lane_structure(layout: Layout, streams: SplitStreams, partition_name: Any) -> GraphDef:
    """Returns the structure of one lane: mapped Variables without the name of their axis.

    Args:
        layout: The call's layout.
        streams: The streams that are split; their Variables have no mapped dimension.
        partition_name: The name that it should have, or None for any.

    Raises:
        MetadataError: If it has another name; the message names the Variable.
    """

    def change(position: int, definition: VariableDef) -> VariableDef:
        axis = layout.leaves[position]
        if not is_axis(axis) or position in streams:
            return definition
        try:
            metadata = definition.metadata.without_axis(axis, partition_name)
        except MetadataError as error:
            path = format_path(layout.leaf_paths[position])
            raise MetadataError(
                f"The {definition.type.__name__} at {path} cannot be mapped: {error}"
            ) from error
        return definition._replace(metadata=metadata)

    return map_metadata(layout.call.graph.flat.graphdef, change)


def name_new_dimensions(
    layout: Layout,
    streams: SplitStreams,
    record: Record,
    axes_of_new: Iterable[Any],
    partition_name: Any,
) -> None:
    """Adds the mapped dimension's name to the metadata of everything that leaves.

    Args:
        layout: The call's layout.
        streams: The streams that are split.
        record: What the function did; changed.
        axes_of_new: The entry of each new Variable.
        partition_name: Its name, or None.
    """
    remaining = iter(axes_of_new)
    fresh = []
    for definition in record.fresh:
        if type(definition) is VariableDef and is_axis(axis := next(remaining)):
            metadata = definition.metadata.with_axis(axis, partition_name)
            definition = definition._replace(metadata=metadata)
        fresh.append(definition)
    record.fresh = tuple(fresh)
    graphdef = layout.call.graph.flat.graphdef
    leaf_of = {index: position for position, index in enumerate(graphdef.leaves)}
    for index, definition in record.updates.items():
        if type(definition) is not VariableDef or leaf_of[index] in streams:
            continue
        axis, outer = layout.leaves[leaf_of[index]], graphdef.objects[index].metadata
        if is_axis(axis):
            name = outer.axes[axis] if outer.axes is not None else partition_name
            metadata = definition.metadata.with_axis(axis, name)
            record.updates[index] = definition._replace(metadata=metadata)
