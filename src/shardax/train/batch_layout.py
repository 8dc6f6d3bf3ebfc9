# SPDX-License-Identifier: Apache-2.0
"""How a batch is divided over a mesh, and whether it can be.

The arrays of a batch have the axes ``("batch", "seq")``, as many of them as they have dimensions,
and rules map these names to mesh axes. A *part* is one of the microbatches that gradient
accumulation cuts a batch into: each is divided over the mesh by itself.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardax.core.errors import TrainerError
from shardax.partition.assignment import mesh_axes_of
from shardax.partition.check import spec_for
from shardax.partition.rules import RulesLike
from shardax.partition.scope import resolve_rules

BATCH_AXES = ("batch", "seq")


def batch_shardings(
    batch: Any, mesh: Mesh | None, rules: RulesLike | None, *, parts: int, of: str
) -> Any:
    """Returns the sharding of every array of a batch.

    Args:
        batch: One process's rows of a global batch: a pytree of arrays with rows in their first
            dimension.
        mesh: The mesh; None for one device.
        rules: Rules from axis names to mesh axes; None for those in scope.
        parts: Number of microbatches.
        of: What the batch is, for messages.

    Returns:
        A tree like the batch, of ``NamedSharding``; without a mesh, None.

    Raises:
        TrainerError: If the sizes of the batch cannot be divided so; lists every array.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batch = {"inputs": np.zeros((4, 8)), "labels": np.zeros(4)}
        >>> places = batch_shardings(batch, mesh, {"batch": "data"}, parts=1, of="training batch")
        >>> places["inputs"].spec, places["labels"].spec
        (P('data', None), P('data',))
    """
    problems: list[str] = []
    entries, treedef = jax.tree_util.tree_flatten_with_path(batch)
    shardings = []
    for key_path, array in entries:
        name, shape = jax.tree_util.keystr(key_path), _global_shape(array)
        if parts > 1 and (not shape or shape[0] % parts):
            problems.append(
                f"{name} of shape {shape} cannot be cut into grad_accumulation={parts} parts"
            )
        elif mesh is not None:
            sharding = _sharding(shape, mesh, rules)
            problems += [
                f"{name} of shape {shape}{', in ' + str(parts) + ' parts' if parts > 1 else ''}: "
                f"{problem}"
                for problem in _indivisible(shape, sharding, parts)
            ]
            shardings.append(sharding)
    if problems:
        step = _rows_step(mesh, rules, parts)
        rows = next((shape[0] for _, a in entries if (shape := _global_shape(a))), 0)
        raise TrainerError(
            f"The {of} cannot be laid out:\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + f"Use a batch size that is a multiple of {step}, such as {-(-rows // step) * step}"
            + (", another mesh, or other rules." if mesh is not None else ".")
        )
    return treedef.unflatten(shardings) if mesh is not None else None


def _global_shape(array: Any) -> tuple[int, ...]:
    shape = np.shape(array)
    return (shape[0] * jax.process_count(), *shape[1:]) if shape else ()


def _sharding(shape: tuple[int, ...], mesh: Mesh, rules: RulesLike | None) -> NamedSharding:
    names = BATCH_AXES[: len(shape)]
    # What the rules leave to the compiler is not split: these arrays come from the host.
    spec, _ = spec_for(names, shape[: len(names)], mesh, resolve_rules(rules))
    return NamedSharding(mesh, spec)


def _indivisible(shape: tuple[int, ...], sharding: NamedSharding, parts: int) -> list[str]:
    found = []
    for position, entry in enumerate(sharding.spec):
        axes = mesh_axes_of(entry)
        count = math.prod(sharding.mesh.shape[axis] for axis in axes)
        size = shape[position] // parts if position == 0 else shape[position]
        if size % count:
            where = " x ".join(f"{axis!r} of size {sharding.mesh.shape[axis]}" for axis in axes)
            found.append(
                f"{size} along {BATCH_AXES[position]!r} cannot be divided over the mesh axis "
                f"{where}"
            )
    return found


def _rows_step(mesh: Mesh | None, rules: RulesLike | None, parts: int) -> int:
    """Returns the number whose multiples are the batch sizes that fit."""
    if mesh is None:
        return parts
    entry = _sharding((0,), mesh, rules).spec[0]
    return parts * math.prod(mesh.shape[axis] for axis in mesh_axes_of(entry))
