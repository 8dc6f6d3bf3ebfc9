# SPDX-License-Identifier: Apache-2.0
"""Shardings in types: what layers do on meshes whose axes are Explicit.

Over *Explicit* mesh axes an array's sharding is part of its type, and JAX refuses an operation
whose result could be laid out in several ways. A layer has one sensible answer, and here it is
found from the operands alone, so that a model needs no rules in scope and no shardings by hand:

- A contraction keeps the layout of the dimensions that remain; a mesh axis that both operands want
  goes to the input, so the batch stays where it is and the parameter is gathered. The sum over a
  split contracted dimension is left to the compiler, as over Auto axes.
- A lookup likewise: the layout of the indices, then that of the row.
- A parameter that is combined elementwise takes the layout of the dimensions it meets.

Over Auto axes, on one device and for Manual axes (inside ``shard_map``) the types say nothing, and
nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

Entry = str | tuple[str, ...] | None
"""Mesh axes of one dimension, as in a ``PartitionSpec``."""


def explicit_entries(array: jax.Array) -> tuple[Entry, ...] | None:
    """Returns the mesh axes of each dimension as the array's type has them, or None if it has none.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> explicit_entries(jnp.ones((2, 3))) is None
        True
        >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        ...     explicit_entries(jax.device_put(jnp.ones((2, 3)), P("data")))
        ('data', None)
    """
    entries = tuple(jax.typeof(array).sharding.spec)
    return entries if any(entry is not None for entry in entries) else None


def explicit_sharding(array: jax.Array) -> NamedSharding | None:
    """Returns the sharding that an array's type has over Explicit axes, or None if it has none."""
    return None if explicit_entries(array) is None else jax.typeof(array).sharding


def joined_sharding(
    parts: Iterable[tuple[jax.Array, Sequence[int]]],
) -> NamedSharding | None:
    """Returns the sharding of a result whose dimensions come from several operands.

    Args:
        parts: Pairs of an operand and the dimensions of it that the result has, in the result's
            order. Where two want one mesh axis, the earlier has it.

    Returns:
        The sharding for ``out_sharding=``; None if no operand is split over Explicit axes.
    """
    found = [(array, explicit_entries(array), dimensions) for array, dimensions in parts]
    mesh = next(
        (jax.typeof(array).sharding.mesh for array, entries, _ in found if entries is not None),
        None,
    )
    if mesh is None:
        return None
    taken: set[str] = set()
    spec: list[Entry] = []
    for _, entries, dimensions in found:
        for dimension in dimensions:
            spec.append(_free(entries[dimension] if entries is not None else None, taken))
    return NamedSharding(mesh, PartitionSpec(*spec))


def _free(entry: Entry, taken: set[str]) -> Entry:
    """Returns ``entry`` and marks its mesh axes as taken, or None if one of them already was."""
    axes = (entry,) if isinstance(entry, str) else entry or ()
    if taken.intersection(axes):
        return None
    taken.update(axes)
    return entry


def align(parameter: jax.Array, x: jax.Array, dimensions: Sequence[int] | None = None) -> jax.Array:
    """Lays a parameter out like the dimensions of the array that it is combined with.

    Args:
        parameter: The parameter.
        x: The other operand of an elementwise operation.
        dimensions: The dimensions of ``x`` that those of the parameter meet; None for the last.

    Returns:
        The parameter, moved where its layout differs over Explicit axes.
    """
    entries = explicit_entries(parameter)
    if entries is None:
        return parameter
    every = tuple(jax.typeof(x).sharding.spec)
    last = range(x.ndim - parameter.ndim, x.ndim)
    wanted = tuple(every[i] for i in (last if dimensions is None else dimensions))
    if wanted == entries:
        return parameter
    mesh = jax.typeof(parameter).sharding.mesh
    return jax.sharding.reshard(parameter, NamedSharding(mesh, PartitionSpec(*wanted)))
