# SPDX-License-Identifier: Apache-2.0
"""Entries of a spec over a mesh: the mesh axes of each dimension, whoever gave them.

Rules give entries (``shardax.partition.resolved``), or the caller does, by a spec or sharding in
place of rules (``explicit_spec``). Either way ``diagnostics_of_entries`` says what is wrong with
them, by the same codes, and ``usable_entries`` leaves out the mesh axes that cannot be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardax._core.graph.paths import Path
from shardax.partition import findings
from shardax.partition.assignment import UNCONSTRAINED, SpecEntry, mesh_axes_of
from shardax.partition.errors import Diagnostic
from shardax.partition.mesh import AnyMesh


def explicit_spec(
    placement: PartitionSpec | NamedSharding,
    shape: Sequence[int],
    mesh: AnyMesh | None,
    source: str,
    path: Path = (),
) -> tuple[PartitionSpec, list[Diagnostic]]:
    """Returns the usable ``PartitionSpec`` of a spec or sharding given outright, and diagnostics.

    Args:
        placement: The spec, over ``mesh``; or a sharding, over its own mesh.
        shape: The global shape of the array.
        mesh: The mesh, or None.
        source: Who gave it, as text for the diagnostics.
        path: Where the array is in its tree.
    """
    if isinstance(placement, NamedSharding):
        spec, mesh = placement.spec, placement.mesh
    else:
        spec = placement
    if len(spec) > len(shape):
        return PartitionSpec(), [findings.rank_mismatch_of_spec(path, source, spec, shape)]

    entries: tuple[SpecEntry, ...] = tuple(spec)
    diagnostics: list[Diagnostic] = []
    for index, entry in enumerate(entries):
        if entry is UNCONSTRAINED:
            diagnostics.append(findings.unconstrained(path, index, f", {source}", "error"))
        elif not _is_well_formed(entry):
            diagnostics.append(findings.malformed_entry(path, source, entries, entry))
    diagnostics += diagnostics_of_entries(
        path,
        shape,
        entries,
        mesh,
        dimension_text=lambda index: f"dimension {index}",
        reason_text=lambda index: source,
        way_out="a spec of",
    )
    return placed_spec(usable_entries(entries, mesh)), diagnostics


def diagnostics_of_entries(
    path: Path,
    shape: Sequence[int],
    entries: Sequence[SpecEntry],
    mesh: AnyMesh | None,
    dimension_text: Callable[[int], str],
    reason_text: Callable[[int], str],
    way_out: str,
) -> Iterator[Diagnostic]:
    """Yields diagnostics of the mesh axes of every dimension; texts are made where one is wrong."""
    # Axes that do not exist, or stand twice.
    used_axes: set[str] = set()
    for index, entry in enumerate(entries):
        for axis in _mesh_axes_of_well_formed(entry):
            if mesh is not None and axis not in mesh.shape:
                yield findings.unknown_mesh_axis(
                    path, dimension_text(index), reason_text(index), axis, mesh
                )
            elif axis in used_axes:
                yield findings.repeated_mesh_axis(
                    path, dimension_text(index), reason_text(index), axis
                )
            used_axes.add(axis)
    if mesh is None:
        return

    # Sizes, by the mesh axes that remain.
    usable = [mesh_axes_of(entry) for entry in usable_entries(entries, mesh)]
    for index, mesh_axes in enumerate(usable):
        size = shape[index]
        parts = math.prod(mesh.shape[axis] for axis in mesh_axes)
        if size % parts:
            yield findings.indivisible(
                path,
                dimension_text(index),
                reason_text(index),
                size,
                mesh_axes,
                mesh,
                parts,
                way_out,
            )

    # Orders that the type of an array in a program cannot express.
    axis_types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for index, mesh_axes in enumerate(usable):
        splitting = [axis for axis in mesh_axes if mesh.shape[axis] > 1]
        explicit = [axis for axis in splitting if axis_types[axis] is AxisType.Explicit]
        others = [axis for axis in splitting if axis not in explicit]
        if splitting != [*explicit, *others]:
            yield findings.axis_type_order(
                path,
                dimension_text(index),
                reason_text(index),
                splitting,
                [*explicit, *others],
                explicit,
            )


def usable_entries(entries: Sequence[SpecEntry], mesh: AnyMesh | None) -> tuple[SpecEntry, ...]:
    """Returns the entries without unknown mesh axes and those of earlier dimensions."""
    used_axes: set[str] = set()
    usable: list[SpecEntry] = []
    for entry in entries:
        mesh_axes = _mesh_axes_of_well_formed(entry)
        usable_axes: list[str] = []
        for axis in mesh_axes:
            if axis not in used_axes and (mesh is None or axis in mesh.shape):
                usable_axes.append(axis)
                used_axes.add(axis)

        if _is_well_formed(entry) and len(usable_axes) == len(mesh_axes):
            usable.append(entry)
        else:
            usable.append(tuple(usable_axes) or None)
    return tuple(usable)


def placed_spec(entries: Sequence[SpecEntry]) -> PartitionSpec:
    """Returns the spec of an array that is placed, where no dimension is left to the compiler."""
    placed = list(entries)
    for index, entry in enumerate(entries):
        if entry is UNCONSTRAINED:
            placed[index] = None
    return PartitionSpec(*placed)


def _mesh_axes_of_well_formed(entry: SpecEntry) -> tuple[str, ...]:
    return mesh_axes_of(entry) if _is_well_formed(entry) else ()


def _is_well_formed(entry: SpecEntry) -> bool:
    if isinstance(entry, tuple):
        return all(isinstance(axis, str) for axis in entry)
    return entry is None or entry is UNCONSTRAINED or isinstance(entry, str)


def parts_of(spec: PartitionSpec, mesh: AnyMesh) -> int:
    """Returns the number of different parts of an array."""
    return math.prod(mesh.shape[axis] for entry in spec for axis in mesh_axes_of(entry))
