# SPDX-License-Identifier: Apache-2.0
"""``check``: the diagnostics of a tree's layout, in one list.

They come from two places:

1. ``TreeLayout`` has those that any layout of the tree has, ``shard`` included: of arrays, of the
   rules that no array chose, of overrides.
2. The functions below compare the layout with what is there: meshes in boxes, optimizers' states
   and their parameters, Modules, and live arrays.

``shardax.partition.findings`` lists all codes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from shardax._core._jax import Tracer
from shardax._core.graph.paths import Path, PyTree
from shardax._core.object import Object
from shardax._core.state.filters import OfType
from shardax._core.state.split_merge import iter_modules
from shardax._core.variable_types import OptState
from shardax.partition import findings
from shardax.partition.assignment import mesh_axes_of
from shardax.partition.entries import parts_of
from shardax.partition.errors import Diagnostic
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import RulesLike
from shardax.partition.tree.diagnostics import LARGE_BYTES, LARGE_FRACTION
from shardax.partition.tree.inventory import ArrayInfo, TreeInventory
from shardax.partition.tree.layout import TreeLayout
from shardax.partition.tree.overrides import MemoryKinds, OverridesLike
from shardax.partition.tree.reduced_states import PathEnds


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
    if layout.mesh is None:
        return layout.diagnostics

    return [
        *layout.diagnostics,
        *_boxes_of_other_mesh(layout),
        *_states_larger_than_parameters(layout),
        *_warnings_of_modules(layout, layout.mesh),
        *_misplaced_arrays(layout, layout.mesh),
    ]


def _boxes_of_other_mesh(layout: TreeLayout) -> Iterator[Diagnostic]:
    """Yields warnings about boxes with a mesh of their own that is not the one given."""
    for leaf_specs in layout.leaves:
        own_mesh, mesh = leaf_specs.leaf.mesh, leaf_specs.mesh
        if own_mesh is None or mesh is None:
            continue
        if isinstance(own_mesh, Mesh) and isinstance(mesh, Mesh):
            is_same = own_mesh == mesh
        else:
            is_same = tuple(own_mesh.shape.items()) == tuple(mesh.shape.items())
        if not is_same:
            yield findings.other_mesh(leaf_specs.leaf.path, own_mesh, mesh)


def _states_larger_than_parameters(layout: TreeLayout) -> Iterator[Diagnostic]:
    """Yields warnings about optimizer states split less than their parameters.

    A state *belongs* to the parameter whose path its own path ends in and whose shape its shape
    ends in.
    """
    is_state = OfType(OptState)
    states: list[tuple[tuple[Path, ...], ArrayInfo, int]] = []
    parameters: list[tuple[tuple[Path, ...], tuple[ArrayInfo, int]]] = []
    subjects = layout.inventory.filter_subjects()
    leaves = layout.inventory.leaves
    for subject, leaf, shardings in zip(subjects, leaves, layout.shardings(), strict=True):
        if leaf.treedef is not None or not leaf.arrays or not leaf.arrays[0].shape:
            continue
        info = leaf.arrays[0]
        parts = parts_of(shardings[0].spec, shardings[0].mesh)
        if is_state((), subject.like):
            states.append((subject.paths, info, parts))
        else:
            parameters.append((subject.paths, (info, parts)))

    parameters_by_end = PathEnds(parameters)
    for paths, info, parts in states:
        owners = parameters_by_end.of_longest_end(paths, functools.partial(_may_own, info))
        if len(owners) != 1:
            continue  # it is unclear which parameter it belongs to
        owner, owner_parts = owners[0]
        if parts < owner_parts:
            yield findings.state_larger_than_parameter(
                info.path, info.shape, parts, owner.path, owner_parts
            )


def _may_own(state: ArrayInfo, parameter: tuple[ArrayInfo, int], common_end: Path) -> bool:
    """Whether a state may belong to a parameter, by the common end of their paths and shapes."""
    shape = parameter[0].shape
    return bool(common_end) and state.shape[-len(shape) :] == shape


def _warnings_of_modules(layout: TreeLayout, mesh: AnyMesh) -> Iterator[Diagnostic]:
    """Yields warnings that Modules give by a method ``_layout_warnings(mesh, rules)``."""
    for subtree in layout.inventory.subtrees:
        if not isinstance(subtree.value, Object):
            continue
        for path_below, module in iter_modules(subtree.value):
            warnings_of = getattr(type(module), "_layout_warnings", None)
            if warnings_of is None:
                continue
            path = (*subtree.path, *path_below)
            for code, text in warnings_of(module, mesh, layout.rules):
                yield findings.diagnostic_at(path, "warning", code, text)


def _misplaced_arrays(layout: TreeLayout, mesh: AnyMesh) -> Iterator[Diagnostic]:
    """Yields warnings about live arrays that lie otherwise than their names say."""
    wrong_paths = {each.path for each in layout.diagnostics if each.severity == "error"}
    live: list[tuple[ArrayInfo, jax.Array, NamedSharding]] = []
    for leaf, shardings in zip(layout.inventory.leaves, layout.shardings(), strict=True):
        arrays = leaf.arrays_in(leaf.value)
        for info, array, sharding in zip(leaf.arrays, arrays, shardings, strict=False):
            is_live = isinstance(array, jax.Array) and not isinstance(array, Tracer)
            if is_live and info.path not in wrong_paths:
                live.append((info, array, sharding))

    count_on_mesh = sum(_is_on(array.sharding, mesh) for _, array, _ in live)
    if not count_on_mesh:
        return  # not placed yet: there is nothing to differ
    for info, array, sharding in live:
        if _is_on(array.sharding, mesh):
            if not _is_equivalent(array.sharding, sharding, len(info.shape)):
                expected, actual = _sharding_text(sharding), _sharding_text(array.sharding)
                yield findings.misplaced(info.path, expected, actual)
        elif array.committed and isinstance(sharding.mesh, type(mesh)) and sharding.mesh == mesh:
            yield findings.elsewhere(info.path, _devices_text(array), count_on_mesh, mesh)


def _is_on(sharding: Sharding, mesh: AnyMesh) -> bool:
    """Whether an array is spread over the devices of a mesh."""
    if isinstance(mesh, Mesh):
        return sharding.device_set == set(mesh.devices.flat)
    return isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape)


def _is_equivalent(actual: Sharding, expected: NamedSharding, ndim: int) -> bool:
    """Whether an array on a mesh lies as expected."""
    if isinstance(expected.mesh, Mesh):
        return bool(actual.is_equivalent_to(expected, ndim))

    # An abstract mesh has no devices to compare.
    if not isinstance(actual, NamedSharding):
        return False
    if expected.memory_kind not in (None, actual.memory_kind):
        return False
    return _splitting_axes(actual, ndim) == _splitting_axes(expected, ndim)


def _splitting_axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension, without those of size 1."""
    sizes = sharding.mesh.shape
    splitting: list[tuple[str, ...]] = [()] * ndim
    for index, entry in enumerate(sharding.spec):
        splitting[index] = tuple(axis for axis in mesh_axes_of(entry) if sizes[axis] > 1)
    return splitting


def _devices_text(array: jax.Array) -> str:
    devices = sorted(str(device) for device in array.sharding.device_set)
    if len(devices) == 1:
        return devices[0]
    return f"{len(devices)} devices, {devices[0]} among them"


def _sharding_text(sharding: Sharding) -> str:
    layout = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if sharding.memory_kind in (None, "device"):
        return str(layout)
    return f"{layout} in {sharding.memory_kind}"
