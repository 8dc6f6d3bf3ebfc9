# SPDX-License-Identifier: Apache-2.0
"""``check``: the diagnostics of a tree's layout, in one list.

Beside those of single arrays and rules (``shardax.partition.errors``) there are those of the tree
as a whole:

* ``state-larger-than-parameter``: warning; an optimizer's state is split into fewer parts than its
  parameter, so that it takes more of each device than the parameter does. A state *belongs* to the
  parameter whose path its own path ends in and whose shape its shape ends in.
* ``misplaced``: warning; a live array lies on the mesh's devices otherwise than its names say, so
  that programs compiled for the names move it at every call.
* ``elsewhere``: warning; a live array was put on other devices than the mesh's, while others of the
  tree are on the mesh: a program that takes both fails.
* ``no-rules``: error; a box has logical names, and there are no rules.
* ``reduced-state``: an optimizer's state is in the box of its parameter and has another shape (see
  ``shardax.partition.inventory``). Info if that is clear, warning if it is replicated for want.
* ``axes-of-many``: error; axis names for a Variable of several arrays.
* ``other-mesh``: warning; a box has a mesh of its own, which is not the one given.
* ``gathered-stack``: warning; rules split the layers of a stack that runs without microbatches,
  so it is no pipeline. A Module says such things by its method ``_layout_warnings(mesh, rules)``.
* ``unused-override`` and ``override-conflict``: see ``shardax.partition.tree_layout``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardax._core._jax import Tracer
from shardax._core.graph.paths import PyTree, format_path
from shardax._core.object import Object
from shardax._core.state.filters import OfType
from shardax._core.state.split_merge import iter_modules
from shardax._core.variable import OptState
from shardax.partition.errors import Diagnostic
from shardax.partition.inventory import ArrayInfo, PathEnds, TreeInventory
from shardax.partition.mesh import AnyMesh, mesh_text
from shardax.partition.rules import RulesLike, mesh_axes_of
from shardax.partition.tree_layout import (
    LARGE_BYTES,
    LARGE_FRACTION,
    MemoryKinds,
    OverridesLike,
    TreeLayout,
    parts_of,
)


def check(
    tree: PyTree,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
    large_bytes: int = LARGE_BYTES,
    large_fraction: float = LARGE_FRACTION,
) -> list[Diagnostic]:
    """Returns the diagnostics of a tree's layout, without raising.

    Nothing is computed or moved: lazy models stay lazy.

    Args:
        tree: A Module, a Variable, a State, a box, or a pytree that holds such and arrays.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope. Without any, the rules
            alone are checked.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: As for ``shard``.
        memory_kind: As for ``shard``.
        large_bytes: An array that every device holds whole is reported above this many bytes ...
        large_fraction: ... if it also is more than this fraction of all arrays together.

    Returns:
        Diagnostics, in order of arrays and then those of the whole. Those of severity ``"error"``
        make ``shard`` refuse. ``str(diagnostic)`` says what is wrong, where, why it matters and
        what to do; ``diagnostic.code`` names its kind.

    Raises:
        PartitionError: If overrides or memory kinds are malformed.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mesh = jax.sharding.AbstractMesh((4,), ("model",))
        >>> weight = sx.Param(jnp.ones((4, 6)), axes=("embed", "mlp"))
        >>> [diagnostic.code for diagnostic in check({"w": weight}, mesh, {"mlp": "model"})]
        ['indivisible']
    """
    layout = TreeLayout(
        TreeInventory(tree),
        mesh,
        rules,
        overrides,
        memory_kind,
        large_bytes=large_bytes,
        large_fraction=large_fraction,
    )
    diagnostics, mesh = layout.diagnostics, layout.mesh
    if mesh is None:
        return diagnostics
    return [
        *diagnostics,
        *_other_meshes(layout),
        *_states(layout),
        *_of_modules(layout, mesh),
        *_differences(layout, mesh),
    ]


def _of_modules(layout: TreeLayout, mesh: AnyMesh) -> Iterator[Diagnostic]:
    """Yields warnings of Modules about their runs under a layout."""
    for subtree in layout.inventory.subtrees:
        if not isinstance(subtree.value, Object):
            continue
        for below, module in iter_modules(subtree.value):
            warnings_of = getattr(type(module), "_layout_warnings", None)
            path = (*subtree.path, *below)
            for code, text in (
                () if warnings_of is None else warnings_of(module, mesh, layout.rules)
            ):
                yield Diagnostic("warning", path, code, f"{format_path(path)}: {text}")


def _other_meshes(layout: TreeLayout) -> Iterator[Diagnostic]:
    for leaf, mesh in zip(layout.inventory.leaves, layout.meshes, strict=True):
        if leaf.mesh is None or mesh is None:
            continue
        concrete = isinstance(leaf.mesh, Mesh) and isinstance(mesh, Mesh)
        own_shape, mesh_shape = leaf.mesh.shape, mesh.shape
        if leaf.mesh != mesh if concrete else tuple(own_shape.items()) != tuple(mesh_shape.items()):
            text = (
                f"{format_path(leaf.path)}: has a mesh of its own, ({mesh_text(own_shape)}), but "
                f"is laid out over the mesh given, ({mesh_text(mesh_shape)}). Unboxed it goes "
                "to its own again. Make the box without a mesh."
            )
            yield Diagnostic("warning", leaf.path, "other-mesh", text)


def _states(layout: TreeLayout) -> Iterator[Diagnostic]:
    """Yields warnings about optimizer states split less than their parameters."""
    is_state = OfType(OptState)
    states: list[tuple[PyTree, ArrayInfo, int]] = []
    parameter_places: list[tuple[Any, tuple[ArrayInfo, int]]] = []
    inventory = layout.inventory
    rows = zip(inventory.filter_subjects(), inventory.leaves, layout.shardings(), strict=True)
    for subject, leaf, shardings in rows:
        if leaf.treedef is None and leaf.arrays and leaf.arrays[0].shape:
            info, parts = leaf.arrays[0], parts_of(shardings[0].spec, shardings[0].mesh)
            if is_state((), subject.like):
                states.append((subject.paths, info, parts))
            else:
                parameter_places.append((subject.paths, (info, parts)))
    parameters = PathEnds(parameter_places)
    for paths, info, parts in states:
        # The parameter with the longest common end of paths; none if it is unclear.
        matches = parameters.of_longest_end(
            paths,
            lambda place, end, shape=info.shape: (
                bool(end) and shape[-len(place[0].shape) :] == place[0].shape
            ),
        )
        if len(matches) == 1 and parts < matches[0][1]:
            owner, owner_parts = matches[0]
            text = (
                f"{format_path(info.path)}: this state of an optimizer, shape {info.shape}, is cut "
                f"into {parts} part{'' if parts == 1 else 's'}, but its parameter "
                f"{format_path(owner.path)} into {owner_parts}, so each device holds "
                f"{owner_parts // parts} times as much of the one as of the other. Give the state "
                "the axes of the parameter, and no override that splits it less."
            )
            yield Diagnostic("warning", info.path, "state-larger-than-parameter", text)


def _differences(layout: TreeLayout, mesh: AnyMesh) -> Iterator[Diagnostic]:
    """Yields warnings about live arrays laid out otherwise."""
    wrong = {d.path for d in layout.diagnostics if d.severity == "error"}
    live = [
        (info, array, to)
        for leaf, shardings in zip(layout.inventory.leaves, layout.shardings(), strict=True)
        for info, array, to in zip(leaf.arrays, leaf.arrays_in(leaf.value), shardings, strict=False)
        if isinstance(array, jax.Array) and not isinstance(array, Tracer)
        if info.path not in wrong
    ]
    local_count = sum(_is_on(array, mesh) for _, array, _ in live)
    if not local_count:
        return  # not placed yet: there is nothing to differ
    for info, array, to in live:
        where = format_path(info.path)
        if not _is_on(array, mesh):
            if array.committed and isinstance(to.mesh, type(mesh)) and to.mesh == mesh:
                text = (
                    f"{where}: is on {_devices(array)}, but {local_count} other arrays are on the "
                    f"mesh {dict(mesh.shape)}; a program that takes both fails. Place all of it: "
                    "shard(model, mesh, rules)."
                )
                yield Diagnostic("warning", info.path, "elsewhere", text)
        elif not _agree(array.sharding, to, len(info.shape)):
            text = (
                f"{where}: its names say {_shown(to)}, but it lies as {_shown(array.sharding)}. "
                "Programs that expect it where its names say move it at every call. Place it, "
                "shard(model, mesh, rules), or correct its axes, v.set_metadata(axes=...)."
            )
            yield Diagnostic("warning", info.path, "misplaced", text)


def _is_on(array, mesh: AnyMesh) -> bool:
    """Whether an array is spread over the devices of a mesh."""
    if isinstance(mesh, Mesh):
        return array.sharding.device_set == set(mesh.devices.flat)
    sharding = array.sharding
    return isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape)


def _agree(real, target: NamedSharding, ndim: int) -> bool:
    if isinstance(target.mesh, Mesh):
        return bool(real.is_equivalent_to(target, ndim))
    same_memory = target.memory_kind is None or real.memory_kind == target.memory_kind
    return same_memory and _plain(real, ndim) == _plain(target, ndim)


def _plain(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension, without those of size 1."""
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    sizes = sharding.mesh.shape
    return [tuple(axis for axis in mesh_axes_of(entry) if sizes[axis] > 1) for entry in entries]


def _devices(array) -> str:
    devices = sorted(str(device) for device in array.sharding.device_set)
    return devices[0] if len(devices) == 1 else f"{len(devices)} devices, {devices[0]} among them"


def _shown(sharding) -> str:
    place = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    kind = sharding.memory_kind
    return str(place) if kind in (None, "device") else f"{place} in {kind}"
