# SPDX-License-Identifier: Apache-2.0
"""``check``: all that there is to say about a tree's layout, in one list.

Beside what concerns single arrays and rules (``shardax.partition.findings``) it sees what only
shows in the tree as a whole:

* ``state-larger-than-parameter``: warning; an optimizer's state is split into fewer parts than the
  parameter it belongs to, so that it takes more of each device than the parameter does. A state
  *belongs* to the parameter whose path its own path ends in and whose shape its shape ends in.
* ``misplaced``: warning; a live array lies on the mesh's devices otherwise than its names say, so
  that programs compiled for the names move it at every call.
* ``elsewhere``: warning; a live array was put on other devices than the mesh's, while others of the
  tree are on the mesh: a program that takes both fails.
* ``no-rules``: error; a box has logical names, and there are no rules.
* ``reduced-state``: an optimizer's state is in the box of its parameter and has another shape (see
  ``shardax.partition.inventory``). Info if that is clear, warning if it is replicated for want.
* ``other-mesh``: warning; a box has a mesh of its own, which is not the one given.
* ``unused-override`` and ``override-conflict``: see ``shardax.partition.overrides``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardax._core._jax import Tracer
from shardax._core.graph.paths import Path, format_path
from shardax._core.state.filters import OfType
from shardax._core.variable import OptState
from shardax.partition.checker import LARGE_BYTES, LARGE_FRACTION
from shardax.partition.findings import Finding, format_mesh
from shardax.partition.inventory import ArrayInfo, Slot, Survey
from shardax.partition.mesh import AnyMesh
from shardax.partition.overrides import MemoryKinds, OverridesLike
from shardax.partition.rules import RulesLike, mesh_axes_of
from shardax.partition.tree_layout import TreeLayout


def check(
    tree: Any,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
    large_bytes: int = LARGE_BYTES,
    large_fraction: float = LARGE_FRACTION,
) -> list[Finding]:
    """Returns all there is to say about how a tree would be, or is, laid out, without raising.

    Nothing is computed or moved: lazy models stay lazy.

    Args:
        tree: A Module, a Variable, a State, a box, or a pytree that holds such and arrays.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope. Without any, the rules
            alone are judged.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: As for ``shard``.
        memory_kind: As for ``shard``.
        large_bytes: An array that every device holds whole is reported above this many bytes ...
        large_fraction: ... if it also is more than this fraction of all arrays together.

    Returns:
        Findings, in order of arrays and then those about the whole. Those of severity ``"error"``
        make ``shard`` refuse. ``str(finding)`` says what was found, where, why it matters and what
        to do; ``finding.code`` names its kind.

    Raises:
        OverrideError: If overrides or memory kinds are malformed.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mesh = jax.sharding.AbstractMesh((4,), ("model",))
        >>> weight = sx.Param(jnp.ones((4, 6)), axes=("embed", "mlp"))
        >>> [finding.code for finding in check({"w": weight}, mesh, {"mlp": "model"})]
        ['indivisible']
    """
    survey = Survey(tree)
    layout = TreeLayout(
        survey,
        mesh,
        rules,
        overrides,
        memory_kind,
        large_bytes=large_bytes,
        large_fraction=large_fraction,
    )
    findings = list(layout.findings)
    where = layout.mesh
    if where is not None:
        bad = {finding.path for finding in findings if finding.severity == "error"}
        laid_out = layout.shardings()
        placed = [item for item in _present(survey, laid_out) if item[0].path not in bad]
        findings += [
            *_other_meshes(survey.slots, layout.meshes),
            *_states(survey, laid_out),
            *_differences(placed, where),
        ]
    return findings


# --- meshes of boxes ------------------------------------------------------------------------------


def _other_meshes(slots: Sequence[Slot], meshes: Sequence[AnyMesh | None]) -> Iterator[Finding]:
    for slot, mesh in zip(slots, meshes, strict=True):
        if slot.mesh is not None and mesh is not None and _differ(slot.mesh, mesh):
            text = (
                f"{format_path(slot.path)}: has a mesh of its own, {format_mesh(slot.mesh.shape)}, "
                f"but is laid out over the mesh given, {format_mesh(mesh.shape)}. Where it is "
                "unboxed it goes to its own again. Make the box without a mesh."
            )
            yield Finding("warning", slot.path, "other-mesh", text)


def _differ(mesh: AnyMesh, other: AnyMesh) -> bool:
    if isinstance(mesh, Mesh) and isinstance(other, Mesh):
        return mesh != other
    return (mesh.axis_names, mesh.axis_sizes) != (other.axis_names, other.axis_sizes)


# --- states of optimizers -------------------------------------------------------------------------


def _states(survey: Survey, laid_out: Sequence[Any]) -> Iterator[Finding]:
    is_state = OfType(OptState)
    states: list[tuple[tuple[Path, ...], ArrayInfo, int]] = []
    others: list[tuple[tuple[Path, ...], ArrayInfo, int]] = []
    for subject, slot, to in zip(survey.subjects(), survey.slots, laid_out, strict=True):
        if slot.treedef is None and slot.arrays and slot.arrays[0].shape:
            entry = (subject.paths, slot.arrays[0], _parts(to[0]))
            (states if is_state((), subject.like) else others).append(entry)
    by_suffix: dict[Path, list[int]] = {}
    for position, (paths, _, _) in enumerate(others):
        for suffix in {path[start:] for path in paths for start in range(len(path))}:
            by_suffix.setdefault(suffix, []).append(position)
    for paths, info, parts in states:
        found = _owner(paths, info, others, by_suffix)
        if found is None:
            continue
        owner, owner_parts = found
        if parts < owner_parts:
            text = (
                f"{format_path(info.path)}: this state of an optimizer, shape {info.shape}, is cut "
                f"into {parts} part{'' if parts == 1 else 's'}, but its parameter "
                f"{format_path(owner.path)} into {owner_parts}, so each device holds "
                f"{owner_parts // parts} times as much of the one as of the other. Give the state "
                "the axes of the parameter, and no override that splits it less."
            )
            yield Finding("warning", info.path, "state-larger-than-parameter", text)


def _owner(
    paths: Sequence[Path],
    info: ArrayInfo,
    others: Sequence[tuple[tuple[Path, ...], ArrayInfo, int]],
    by_suffix: dict[Path, list[int]],
) -> tuple[ArrayInfo, int] | None:
    """The parameter whose path the longest end of the state's path is; None if it is unclear."""
    ends = sorted({p[start:] for p in paths for start in range(len(p))}, key=len, reverse=True)
    for end in ends:
        fitting = [
            others[position][1:]
            for position in by_suffix.get(end, ())
            if info.shape[-len(others[position][1].shape) :] == others[position][1].shape
        ]
        if fitting:
            return fitting[0] if len(fitting) == 1 else None
    return None


def _parts(sharding: NamedSharding) -> int:
    """Into how many different parts an array is cut."""
    sizes = sharding.mesh.shape
    return math.prod(sizes[axis] for entry in sharding.spec for axis in mesh_axes_of(entry))


# --- live arrays ----------------------------------------------------------------------------------


def _present(
    survey: Survey, laid_out: Sequence[Any]
) -> Iterator[tuple[ArrayInfo, Any, NamedSharding]]:
    """Yields the arrays that exist, and where their names want them."""
    wanted = {id(slot): to for slot, to in zip(survey.slots, laid_out, strict=True)}
    for slot, arrays in survey.arrays():
        for info, array, to in zip(slot.arrays, arrays, wanted[id(slot)], strict=False):
            if isinstance(array, jax.Array) and not isinstance(array, Tracer):
                yield info, array, to


def _differences(
    placed: Sequence[tuple[ArrayInfo, Any, NamedSharding]], mesh: AnyMesh
) -> Iterator[Finding]:
    here = [item for item in placed if _is_on(item[1], mesh)]
    if not here:
        return  # not placed yet: there is nothing to differ
    for info, array, to in placed:
        where = format_path(info.path)
        if not _is_on(array, mesh):
            if array.committed and isinstance(to.mesh, type(mesh)) and to.mesh == mesh:
                text = (
                    f"{where}: is on {_devices(array)}, but {len(here)} other arrays are on the "
                    f"mesh {dict(mesh.shape)}; a program that takes both fails. Place all of it: "
                    "shard(model, mesh, rules)."
                )
                yield Finding("warning", info.path, "elsewhere", text)
        elif not _agree(array.sharding, to, len(info.shape)):
            text = (
                f"{where}: its names say {_shown(to)}, but it lies as {_shown(array.sharding)}. "
                "Programs that expect it where its names say move it at every call. Place it, "
                "shard(model, mesh, rules), or correct its axes, v.set_metadata(axes=...)."
            )
            yield Finding("warning", info.path, "misplaced", text)


def _is_on(array: Any, mesh: AnyMesh) -> bool:
    """Whether an array is spread over the devices of a mesh."""
    if isinstance(mesh, Mesh):
        return array.sharding.device_set == set(mesh.devices.flat)
    sharding = array.sharding
    return isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape)


def _agree(real: Any, wanted: NamedSharding, ndim: int) -> bool:
    if isinstance(wanted.mesh, Mesh):
        return bool(real.is_equivalent_to(wanted, ndim))
    same_memory = wanted.memory_kind is None or real.memory_kind == wanted.memory_kind
    return same_memory and _plain(real, ndim) == _plain(wanted, ndim)


def _plain(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension, without those of size 1."""
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    sizes = sharding.mesh.shape
    return [tuple(axis for axis in mesh_axes_of(entry) if sizes[axis] > 1) for entry in entries]


def _devices(array: Any) -> str:
    devices = sorted(str(device) for device in array.sharding.device_set)
    return devices[0] if len(devices) == 1 else f"{len(devices)} devices, {devices[0]} among them"


def _shown(sharding: Any) -> str:
    place = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    kind = sharding.memory_kind
    return str(place) if kind in (None, "device") else f"{place} in {kind}"
