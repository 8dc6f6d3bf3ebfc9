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
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.graph.paths import PyTree
from shardax.partition.rules import SpecEntry, mesh_axes_of


def explicit_entries(array: jax.Array) -> tuple[SpecEntry, ...] | None:
    """Mesh axes of each dimension in the array's type, or None."""
    entries = tuple(jax.typeof(array).sharding.spec)
    return entries if any(entry is not None for entry in entries) else None


def explicit_sharding(array: jax.Array) -> NamedSharding | None:
    """Sharding of an array's type over Explicit axes, or None."""
    return None if explicit_entries(array) is None else jax.typeof(array).sharding


def joined_sharding(parts: Iterable[tuple[jax.Array, Sequence[int]]]) -> NamedSharding | None:
    """Sharding of a result with several operands' dimensions, for ``out_sharding=``."""
    # ``parts`` are pairs of an operand and those of its dimensions that the result has, in the
    # result's order. Where two want one mesh axis, the earlier has it. None if no operand is split.
    array_entries = [(array, explicit_entries(array), dimensions) for array, dimensions in parts]
    mesh = next(
        (
            jax.typeof(array).sharding.mesh
            for array, entries, _ in array_entries
            if entries is not None
        ),
        None,
    )
    if mesh is None:
        return None
    used_axes: set[str] = set()
    spec: list[SpecEntry] = []
    for _, entries, dimensions in array_entries:
        for dimension in dimensions:
            entry = None if entries is None else entries[dimension]
            spec.append(None if used_axes.intersection(mesh_axes_of(entry)) else entry)
            used_axes.update(mesh_axes_of(spec[-1]))
    return NamedSharding(mesh, PartitionSpec(*spec))


def align(parameter: jax.Array, x: jax.Array, dimensions: Sequence[int] | None = None) -> jax.Array:
    """Lays a parameter out like the dimensions it meets elementwise."""
    # ``dimensions`` are those of ``x``, the last ones by default.
    entries = explicit_entries(parameter)
    if entries is None:
        return parameter
    every = tuple(jax.typeof(x).sharding.spec)
    places = range(x.ndim - parameter.ndim, x.ndim) if dimensions is None else dimensions
    pairs = zip(places, parameter.shape, strict=True)
    aligned = tuple(every[i] if x.shape[i] == size else None for i, size in pairs)
    if aligned == entries:
        return parameter
    mesh = jax.typeof(parameter).sharding.mesh
    return jax.sharding.reshard(parameter, NamedSharding(mesh, PartitionSpec(*aligned)))


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """Returns an array whole along one dimension, over Explicit mesh axes."""
    entries = explicit_entries(x)
    if entries is None or entries[axis] is None:
        return x
    whole = list(entries)
    whole[axis] = None
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*whole)))


def with_layout(
    function: Callable[..., jax.Array], out_sharding: Any, *arrays: PyTree
) -> jax.Array:
    """Runs a function with Explicit mesh axes as Auto."""
    if out_sharding is None:
        return function(*arrays)
    result: PyTree = jax.sharding.auto_axes(function, out_sharding=out_sharding)
    return result(*arrays)
