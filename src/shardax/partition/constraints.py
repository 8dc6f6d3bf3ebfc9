# SPDX-License-Identifier: Apache-2.0
"""``constrain``: the layout of an array inside a program, by axis names.

The effect depends on the *axis types* of the mesh, as seen where the program is traced. Over an
Auto axis the compiler is told (``jax.lax.with_sharding_constraint``); over an Explicit axis the
array is resharded (``jax.sharding.reshard``); over a Manual axis, as inside ``jax.shard_map``, the
array is the device's own part already, and the axis is left out. A dimension over axes of both
kinds has the Explicit ones outermost, because JAX lays out the type's axes first.

A constraint is never dropped silently: without a mesh it is an error unless the caller asked for it
to be ignored, and so it is under ``use_abstract_mesh`` alone over Auto axes, where JAX would drop
it. (JAX keeps one trace for a mesh with devices and without.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.array_ops import ArrayLike
from shardax._core.errors import ShardaxError
from shardax._core.frames import is_eager
from shardax.partition import context, errors
from shardax.partition.assignment import UNCONSTRAINED, Names, SpecEntry, mesh_axes_of, strings
from shardax.partition.marks import AxisNameMarks
from shardax.partition.mesh import AnyMesh, resolve_mesh, scope_has_devices
from shardax.partition.resolved import ResolvedRules
from shardax.partition.rules import RulesLike, check_names


def constrain(
    x: Any,
    axes: Iterable[Any],
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    on_no_mesh: context.OnNoMesh | None = None,
) -> jax.Array:
    """Lays an array out by axis names, inside a program or outside.

    Works in any transform of shardax or JAX, and can be differentiated.

    Args:
        x: An array (or a Variable, whose value is taken).
        axes: One entry per dimension: a name, None (not split), ``PartitionSpec.UNCONSTRAINED``
            (left as it is), or a tuple of names for a merged dimension.
        mesh: The mesh; None for the one in scope, else the one that ``x`` is laid out over. Over
            Explicit axes, JAX wants the mesh of a compiled function in scope or under its inputs.
        rules: Rules, pairs or a mapping; None for the current rules. Without any, names that are
            axes of the mesh stand for themselves.
        on_no_mesh: What to do without a mesh, or without rules: ``"error"``, or ``"ignore"`` to
            return ``x`` as it is; one on other devices than a ``mesh`` given here is placed on it,
            whole along the dimensions that nothing maps. None: as the ``axis_rules`` in scope say,
            else ``"error"``. A mesh without devices counts as none where nothing else says which
            devices are meant.

    Returns:
        The array, with the same values. Inside ``jax.shard_map`` only the mesh axes that are not
        Manual there take part, and ``x`` is the device's own part.

    Raises:
        NoMeshError: If there is no mesh, under ``on_no_mesh="error"``.
        PartitionError: If there are no rules, under ``on_no_mesh="error"``, or if the array cannot
            be laid out so, or ``x`` is no array, or if ``axes`` is malformed.
        TransformError: If the mesh has no devices and nothing says which to use, or is another
            than that of the ``jax.shard_map`` around.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        >>> @jax.jit
        ... def double(x):
        ...     return constrain(2 * x, ("batch", "embed"), mesh, {"batch": "data"})
        >>> with jax.set_mesh(mesh):
        ...     jax.typeof(double(jnp.ones((2, 3)))).str_short()
        'float32[2@data,3]'
    """
    policy = context.resolve_on_no_mesh(on_no_mesh)
    names = check_names(axes)
    array = _as_array(x, names)
    if len(names) != array.ndim:
        raise errors.constraint_of_other_rank(array, names)
    if context.ScopeSettings.current().marking:
        return AxisNameMarks.put(array, names)

    # The mesh, and whether JAX would follow a constraint over it.
    used_mesh = _mesh_for(array, mesh)
    if used_mesh is None:
        if policy == "ignore":
            return array
        raise errors.constraint_without_mesh(array, names)
    if not _has_devices(used_mesh, array):
        if policy == "ignore":
            return array
        raise errors.constraint_without_devices(array, names, used_mesh)

    # The rules, or names that are axes of the mesh.
    resolved = ResolvedRules(used_mesh, rules)
    unmapped = resolved.names_without_rules(names)
    if unmapped:
        if policy != "ignore":
            raise errors.constraint_without_rules(array, names, unmapped[0], used_mesh)
        is_unmapped = set(unmapped) == set(strings(names))
        if mesh is None or (is_unmapped and not _is_elsewhere(array, used_mesh)):
            return array
        # Over the mesh that was given, but in the unmapped dimensions as it is.
        names = tuple(
            name if set(unmapped).isdisjoint(strings((name,))) else UNCONSTRAINED for name in names
        )

    # The mesh axes of each dimension. Manual ones are left out: the array is a part along them.
    manual_axes = frozenset(_axes_of_type(used_mesh, AxisType.Manual))
    assignment = resolved.rules.assign(names)
    entries = tuple(_without(entry, manual_axes) for entry in assignment.entries)

    diagnostics = resolved.diagnostics(names, array.shape, entries)
    if any(each.severity == "error" for each in diagnostics):
        raise errors.impossible_constraint(array, names, diagnostics)

    if manual_axes and len(manual_axes) == len(used_mesh.axis_names):
        return array
    try:
        return _lay_out(array, entries, used_mesh)
    except ShardaxError:
        raise
    except Exception as error:  # of classes that JAX keeps to itself
        spec = PartitionSpec(*entries)
        raise errors.refused_constraint(array, names, spec, used_mesh, error) from error


def _as_array(x: object, names: Names) -> jax.Array:
    """Returns an array, or the value of a Variable."""
    value = x.value if isinstance(x, ArrayLike) else x
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise errors.constraint_of_no_array(value, names) from error


def _mesh_for(array: jax.Array, given_mesh: AnyMesh | None) -> AnyMesh | None:
    """Returns the mesh given, in scope, or of the array, as seen here; or None."""
    scope_mesh = jax.sharding.get_abstract_mesh()
    array_mesh = _mesh_of_array(array)
    if given_mesh is None:
        return resolve_mesh() or array_mesh

    mesh = resolve_mesh(given_mesh)
    assert mesh is not None  # it was given

    # Inside of shard_map only its own mesh says which axes are Manual.
    if not scope_mesh.empty and _axes_of_type(scope_mesh, AxisType.Manual):
        if dict(mesh.shape) != dict(scope_mesh.shape):
            raise errors.constraint_of_other_mesh(mesh, scope_mesh)
        return scope_mesh
    if _axes_of_type(mesh, AxisType.Manual):
        raise errors.constraint_over_manual_axes(mesh)

    if not isinstance(array, Tracer):
        return mesh
    mesh_of_types = array_mesh if scope_mesh.empty else scope_mesh
    return _with_types_of(mesh, mesh_of_types)


def _has_devices(mesh: AnyMesh, array: jax.Array) -> bool:
    """Whether the devices of a program are known; else JAX drops constraints."""
    # Outside of programs ``_move`` says so.
    if not isinstance(mesh, AbstractMesh) or not isinstance(array, Tracer):
        return True

    scope_mesh = jax.sharding.get_abstract_mesh()
    if scope_mesh.empty:
        array_mesh = _mesh_of_array(array)
        return array_mesh is not None and array_mesh.size == mesh.size

    # Over axes that are not Auto, JAX itself refuses a mesh without devices.
    is_automatic = set(mesh.axis_types) == {AxisType.Auto}
    return scope_mesh.size == mesh.size and (not is_automatic or scope_has_devices())


def _is_elsewhere(array: jax.Array, mesh: AnyMesh) -> bool:
    """Whether a concrete array is on other devices than a mesh."""
    if isinstance(array, Tracer) or not isinstance(mesh, Mesh):
        return False
    return array.sharding.device_set != set(mesh.devices.flat)


def _mesh_of_array(array: jax.Array) -> AnyMesh | None:
    """Returns the mesh that an array is laid out over, as far as its type says."""
    if isinstance(array, Tracer):
        mesh = jax.typeof(array).sharding.mesh
        return None if mesh.empty else mesh
    return array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None


def _with_types_of(mesh: AnyMesh, other: AnyMesh | None) -> AnyMesh:
    """Returns the mesh with the axis types of the other one, if they are otherwise equal."""
    if other is None or tuple(other.shape.items()) != tuple(mesh.shape.items()):
        return mesh
    if other.axis_types == mesh.axis_types:
        return mesh
    if isinstance(mesh, Mesh):  # its devices may be in another order
        return Mesh(mesh.devices, mesh.axis_names, axis_types=other.axis_types)
    return other


def _axes_of_type(mesh: AnyMesh, axis_type: AxisType) -> tuple[str, ...]:
    """Returns the axes of a mesh that are Auto, Explicit or Manual."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, its_type in pairs if its_type is axis_type)


def _without(entry: SpecEntry, mesh_axes: frozenset[str]) -> SpecEntry:
    """Returns the entry of a spec without some mesh axes."""
    remaining = tuple(axis for axis in mesh_axes_of(entry) if axis not in mesh_axes)
    if len(remaining) == len(mesh_axes_of(entry)):
        return entry
    if len(remaining) == 1:
        return remaining[0]
    return remaining or None


def _lay_out(array: jax.Array, entries: tuple[SpecEntry, ...], mesh: AnyMesh) -> jax.Array:
    """Lays out a tracer or a concrete array, inside a program or outside."""
    if isinstance(array, Tracer):
        return lay_out_traced(array, entries, mesh)
    if is_eager() or not isinstance(jnp.zeros(()), Tracer):
        return _move(array, entries, mesh)

    # An array from outside of the function that is being compiled: moving it says which devices
    # are meant, but over Auto axes it is a wish that the compiler may ignore.
    moved = array if isinstance(mesh, AbstractMesh) else _move(array, entries, mesh)
    return lay_out_traced(moved, entries, mesh)


def lay_out_traced(array: jax.Array, entries: Iterable[SpecEntry], mesh: AnyMesh) -> jax.Array:
    """Lays out a tracer over all mesh axes but Manual ones."""
    entries = _one_per_dimension(entries, array.ndim)
    explicit_axes = frozenset(_axes_of_type(mesh, AxisType.Explicit))
    auto_axes = frozenset(_axes_of_type(mesh, AxisType.Auto))

    if explicit_axes:
        type_entries = _one_per_dimension(jax.typeof(array).sharding.spec, array.ndim)
        present = tuple(_only(entry, explicit_axes) for entry in type_entries)
        wanted = tuple(_without(entry, auto_axes) for entry in entries)
        spec = PartitionSpec(*_fill_unconstrained(wanted, present))
        array = jax.sharding.reshard(array, NamedSharding(mesh, spec))

    if auto_axes:
        spec = PartitionSpec(*(_without(entry, explicit_axes) for entry in entries))
        array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
    return array


def _only(entry: SpecEntry, mesh_axes: frozenset[str]) -> tuple[str, ...] | None:
    """Returns those mesh axes of an entry that are among some."""
    return tuple(axis for axis in mesh_axes_of(entry) if axis in mesh_axes) or None


def _move(array: jax.Array, entries: tuple[SpecEntry, ...], mesh: AnyMesh) -> jax.Array:
    """Moves a concrete array, whatever the axis types."""
    abstract_mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    present = (None,) * array.ndim
    sharding: Any = array.sharding
    is_over_mesh = (
        isinstance(sharding, NamedSharding) and sharding.mesh.abstract_mesh == abstract_mesh
    )
    if is_over_mesh:
        present = _one_per_dimension(sharding.spec, array.ndim)

    if isinstance(mesh, AbstractMesh):
        if not is_over_mesh:
            raise errors.constraint_outside_of_program(mesh)
        mesh = sharding.mesh

    spec = PartitionSpec(*_fill_unconstrained(entries, present))
    return jax.device_put(array, NamedSharding(mesh, spec))


def _one_per_dimension(spec: Iterable[SpecEntry], ndim: int) -> tuple[SpecEntry, ...]:
    """Returns the entries of a spec, with None for the dimensions that it leaves out."""
    entries = tuple(spec)
    return entries + (None,) * (ndim - len(entries))


def _fill_unconstrained(
    entries: tuple[SpecEntry, ...], present: tuple[SpecEntry, ...]
) -> tuple[SpecEntry, ...]:
    """Returns entries with the present one of each unconstrained dimension."""
    # Mesh axes that the other dimensions take now are not kept.
    used_axes = frozenset(axis for entry in entries for axis in mesh_axes_of(entry))

    filled: list[SpecEntry] = []
    for entry, present_entry in zip(entries, present, strict=True):
        if entry is UNCONSTRAINED:
            filled.append(_without(present_entry, used_axes))
        else:
            filled.append(entry)
    return tuple(filled)
