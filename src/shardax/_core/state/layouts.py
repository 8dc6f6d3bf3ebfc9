# SPDX-License-Identifier: Apache-2.0
"""Shardings and specs that lay out arrays in the same way, whatever their rank."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardax._core.graph.paths import PyTree


def is_layout(value: PyTree) -> bool:
    """Whether a value is a sharding or a spec, or a pytree of them."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, (Sharding, PartitionSpec)) for leaf in leaves)


def lay_out_alike(first: PyTree, second: PyTree) -> bool:
    """Whether two layouts, or pytrees of layouts, put every array in the same places."""
    ours, treedef = jax.tree.flatten(first)
    theirs, other_treedef = jax.tree.flatten(second)
    return treedef == other_treedef and all(map(_are_alike, ours, theirs))


def _are_alike(first: Sharding | PartitionSpec, second: Sharding | PartitionSpec) -> bool:
    if isinstance(first, PartitionSpec) and isinstance(second, PartitionSpec):
        return _normal(first) == _normal(second)
    if not (isinstance(first, NamedSharding) and isinstance(second, NamedSharding)):
        return type(first) is type(second) and first == second
    if first.memory_kind != second.memory_kind:
        return False
    if first.mesh == second.mesh and _normal(first.spec) == _normal(second.spec):
        return True

    # JAX compares over devices, and ends the process where a mesh has none (0.10). Dimensions
    # beyond the specs are not split, so one rank decides for all.
    if not (_is_definite(first) and _is_definite(second)):
        return False
    return first.is_equivalent_to(second, max(len(first.spec), len(second.spec)))


def _normal(spec: PartitionSpec) -> tuple[object, ...]:
    """Returns what a spec says, in one form."""
    entries = [_normal_entry(entry) for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return (*entries, spec.unreduced, spec.reduced)


def _normal_entry(entry: object) -> object:
    if not isinstance(entry, tuple):
        return entry
    return (entry or (None,))[0] if len(entry) < 2 else entry


def _is_definite(sharding: NamedSharding) -> bool:
    """Whether a sharding says for each device what it holds."""
    spec = sharding.spec
    has_devices = isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 0
    return has_devices and not (
        spec.unreduced or spec.reduced or PartitionSpec.UNCONSTRAINED in tuple(spec)
    )
