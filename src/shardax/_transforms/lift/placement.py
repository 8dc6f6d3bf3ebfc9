# SPDX-License-Identifier: Apache-2.0
"""Declared shardings: the mesh that specs mean, and moving Variables to where they are declared.

A ``PartitionSpec`` in ``in_shardings`` or ``out_shardings`` names axes of the mesh in scope when
the function is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardax._core.frames import is_eager, is_ref, kind_of
from shardax._core.graph.paths import Leaf, Path, PyTree, plain_path
from shardax._core.init.lazy import LazyValue, compute_all
from shardax._core.threads import write_lock
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.errors import DeclaredSpec
from shardax._transforms.lift.filter_mappings import StateSharding


def specs_in(prefix: PyTree, option: str, path: Path = ()) -> list[DeclaredSpec]:
    """Returns the specs of a prefix, whatever it describes."""
    specs: list[DeclaredSpec] = []
    for key_path, leaf in jax.tree.leaves_with_path(prefix):
        leaf_path = (*path, *plain_path(key_path)) if key_path else path
        if isinstance(leaf, StateSharding):
            for value in leaf.values():
                specs += specs_in(value, option, leaf_path)
        elif isinstance(leaf, PartitionSpec):
            specs.append(DeclaredSpec(option, leaf_path, leaf))
    return specs


def mesh_in_scope() -> Mesh | None:
    """Returns the mesh with devices in scope; None also in a trace."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX does not name the devices while it traces
        return None
    return None if mesh.empty else mesh


def require_mesh_in_scope(specs: Sequence[DeclaredSpec]) -> Mesh | None:
    """Returns the mesh that specs mean, None in a trace; or raises NoMeshError."""
    mesh = mesh_in_scope()
    if mesh is not None:
        return mesh

    if is_eager():
        raise errors.specs_without_mesh(specs)

    # Under ``use_abstract_mesh`` alone there are names but no devices; in a trace only JAX can
    # tell that from a mesh whose devices it hides. A function made anew has no trace yet.
    takes_spec = jax.jit(lambda x: x, in_shardings=PartitionSpec())
    try:
        takes_spec.trace(np.zeros((), np.float32))
    except RuntimeError as error:
        raise errors.specs_without_mesh(specs) from error
    return None


class _VariableMove(NamedTuple):
    """A Variable that is to be moved."""

    variable: Variable[Any]
    value: Any
    sharding: PyTree


def place_variables(
    variables: Sequence[Variable[Any]], entries: Sequence[PyTree], mesh: Mesh | None = None
) -> None:
    """Moves Variables to their entries: shardings, or specs over a mesh, by default that in scope.

    Nothing is moved in a trace. Every entry is checked before anything is moved.
    """
    if not is_eager():
        return

    moves: list[_VariableMove] = []
    for variable, entry in zip(variables, entries, strict=True):
        if entry is not None and variable._parent is None and not variable.is_abstract:
            moves += _moves_of(variable, entry, mesh)

    lazy = [move for move in moves if isinstance(move.value, LazyValue)]
    real = [move for move in moves if not isinstance(move.value, LazyValue)]
    computed = compute_all([move.value for move in lazy], [move.sharding for move in lazy])
    moved = jax.device_put([move.value for move in real], [move.sharding for move in real])

    for move, value in zip([*lazy, *real], [*computed, *moved], strict=True):
        with write_lock:
            if move.variable._value is move.value:  # else another thread has written it
                move.variable._value = value


def _moves_of(variable: Variable[Any], entry: PyTree, mesh: Mesh | None) -> list[_VariableMove]:
    """Returns the move of a Variable that is not where its entry says; none if it is."""
    # One sharding, or a tree of them of the form of the value.
    value = variable._value
    sharding = jax.tree.map(lambda leaf: _over_mesh(leaf, mesh), entry)
    shardings = jax.tree.broadcast(sharding, value, is_leaf=_is_none)

    is_moved = False
    targets = jax.tree.leaves(shardings, is_leaf=_is_none)
    for leaf, target in zip(jax.tree.leaves(value), targets, strict=True):
        if target is not None and not _is_at(leaf, target):
            is_moved = True
            # Raises for a shape that cannot be split so.
            getattr(target, "sharding", target).shard_shape(tuple(leaf.shape))

    if is_moved and is_ref(value):
        raise errors.ref_elsewhere(
            kind_of(variable), f"{variable.dtype}{list(variable.shape)}", entry
        )
    return [_VariableMove(variable, value, sharding)] if is_moved else []


def _is_none(entry: object) -> bool:
    return entry is None


def _over_mesh(entry: Any, mesh: Mesh | None) -> Any:
    """Returns the sharding that an entry means over a mesh, by default that in scope."""
    if not isinstance(entry, PartitionSpec):
        return entry

    # A sharding over a mesh without devices ends the process where it is compared (JAX 0.10).
    mesh = mesh or mesh_in_scope()
    if mesh is None:
        raise errors.specs_without_mesh([DeclaredSpec("in_shardings", (), entry)])
    return NamedSharding(mesh, entry)


def _is_at(leaf: Leaf, target: Any) -> bool:
    """Returns whether an array has a sharding or a ``Format``."""
    if not (isinstance(leaf, jax.Array) or is_ref(leaf)):
        return False
    if not isinstance(target, Sharding):
        return getattr(leaf, "format", None) == target

    # JAX takes the mesh of outputs from what enters, so one layout over another mesh is elsewhere.
    meshes = {getattr(sharding, "mesh", None) for sharding in (leaf.sharding, target)} - {None}
    return len(meshes) < 2 and leaf.sharding.is_equivalent_to(target, leaf.ndim)
