# SPDX-License-Identifier: Apache-2.0
"""Layouts of results over Explicit mesh axes, from those of the operands.

Over *Explicit* mesh axes an array's sharding is part of its type, and JAX refuses an operation
whose result could be laid out in several ways. A layer has one sensible answer, found here from the
operands alone, so that a model needs no rules in scope and no shardings by hand:

- A contraction keeps the layout of the dimensions that remain; a mesh axis that both operands want
  goes to the input, so the batch stays where it is and the parameter is gathered. The sum over a
  split contracted dimension is left to the compiler, as over Auto axes.
- A lookup has the layout of the indices, then that of the row.
- A parameter that is combined elementwise takes the layout of the dimensions it meets.
- Where a split dimension is cut into unlike parts, it is gathered first, or the computation is left
  to the compiler and only its result laid out.

Over Auto axes, on one device and for Manual axes (inside ``shard_map``) types have no sharding, and
nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardax._core.graph.paths import PyTree
from shardax.partition.assignment import SpecEntry, mesh_axes_of


def explicit_entries(array: jax.Array) -> tuple[SpecEntry, ...] | None:
    """Returns the mesh axes of each dimension in the array's type, or None if there are none."""
    # An array on one device, which this tells sooner than its type would. NumPy's have no sharding.
    is_tracer = isinstance(array, Tracer)
    if not is_tracer and type(getattr(array, "sharding", None)) is SingleDeviceSharding:
        return None

    spec = jax.typeof(array).sharding.spec
    for entry in spec:
        if entry is not None:
            return tuple(spec)
    return None


def explicit_sharding(array: jax.Array) -> NamedSharding | None:
    """Returns the sharding in an array's type, or None if no dimension is split over it."""
    return None if explicit_entries(array) is None else jax.typeof(array).sharding


def joined_sharding(operands: Iterable[tuple[jax.Array, Sequence[int]]]) -> NamedSharding | None:
    """Returns the sharding of a result with dimensions of several operands, for ``out_sharding=``.

    Args:
        operands: Pairs of an operand and those of its dimensions that the result has, in the
            result's order. Where two want one mesh axis, the earlier has it.

    Returns:
        The sharding, or None if no operand is split.
    """
    mesh = None
    used_axes: set[str] = set()
    spec: list[SpecEntry] = []
    for array, dimensions in operands:
        entries = explicit_entries(array)
        if entries is None:
            spec += [None] * len(dimensions)
            continue

        if mesh is None:
            mesh = jax.typeof(array).sharding.mesh
        for dimension in dimensions:
            mesh_axes = mesh_axes_of(entries[dimension])
            if used_axes.isdisjoint(mesh_axes):
                spec.append(entries[dimension])
                used_axes.update(mesh_axes)
            else:
                spec.append(None)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec))


def align(parameter: jax.Array, x: jax.Array, dimensions: Sequence[int] | None = None) -> jax.Array:
    """Lays a parameter out like the dimensions it meets elementwise.

    Args:
        parameter: The parameter.
        x: The array that it is combined with.
        dimensions: The dimensions of ``x`` that it meets; by default the last ones.
    """
    entries = explicit_entries(parameter)
    if entries is None:
        return parameter

    if dimensions is None:
        dimensions = range(x.ndim - parameter.ndim, x.ndim)
    entries_of_x = tuple(jax.typeof(x).sharding.spec)
    aligned: list[SpecEntry] = []
    for dimension, size in zip(dimensions, parameter.shape, strict=True):
        is_broadcast = x.shape[dimension] != size
        aligned.append(None if is_broadcast else entries_of_x[dimension])

    if tuple(aligned) == entries:
        return parameter
    mesh = jax.typeof(parameter).sharding.mesh
    return jax.sharding.reshard(parameter, NamedSharding(mesh, PartitionSpec(*aligned)))


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """Returns an array whole along one dimension, over Explicit mesh axes."""
    entries = explicit_entries(x)
    if entries is None or entries[axis] is None:
        return x
    gathered_entries = list(entries)
    gathered_entries[axis] = None
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*gathered_entries)))


def with_layout(
    function: Callable[..., jax.Array], out_sharding: Any, *arrays: PyTree
) -> jax.Array:
    """Returns the result of a function for which Explicit mesh axes are Auto."""
    if out_sharding is None:
        return function(*arrays)
    result: PyTree = jax.sharding.auto_axes(function, out_sharding=out_sharding)
    return result(*arrays)
