# SPDX-License-Identifier: Apache-2.0
"""Constraints: layouts of arrays inside programs, by axis names.

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

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.array_ops import ArrayLike
from shardax._core.errors import ShardaxError
from shardax._core.frames import is_eager
from shardax._core.graph.paths import format_path
from shardax._transforms.errors import NoMeshError, TransformError
from shardax.partition import context
from shardax.partition.checker import diagnose
from shardax.partition.errors import PartitionError
from shardax.partition.mesh import AnyMesh, mesh_text, resolve_mesh, scope_has_devices
from shardax.partition.rules import (
    UNCONSTRAINED,
    Names,
    RulesLike,
    SpecEntry,
    check_names,
    mesh_axes_of,
    strings,
)

_TO_IGNORE = "To run without a mesh or rules too, say constrain(..., on_no_mesh='ignore')."


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
        raise PartitionError(
            f"{_intro(array, names)} there are {len(names)} axis names for {array.ndim} "
            "dimensions. Give one entry per dimension, None for a dimension without a name."
        )
    if context.is_marking():
        return context.mark_names(array, names)
    where = _mesh_for(array, mesh)
    if not _has_devices(where, array):
        if policy == "ignore":
            return array
        raise TransformError(
            f"{_intro(array, names)} {where} has no devices, and nothing says which the program is "
            "for, so JAX would drop the constraint. Call the compiled function under "
            "jax.set_mesh(mesh), not use_abstract_mesh; or pass mesh=mesh; or give it arrays that "
            f"are laid out over one, or jax.ShapeDtypeStruct(..., sharding=...). {_TO_IGNORE}"
        )
    chosen = context.rules_over(where, rules)
    if where is None:
        if policy == "ignore":
            return array
        raise NoMeshError(
            f"{_intro(array, names)} no mesh was given, none is in scope, and the array is not "
            "laid out over one. Put one in scope, with jax.set_mesh(mesh): ..., or pass mesh=mesh. "
            f"{_TO_IGNORE}"
        )
    unmapped = context.names_without_rules(names, where, rules)
    if unmapped:
        mapped = len(unmapped) < len(list(strings(names)))
        if policy == "ignore" and (mesh is None or not (mapped or _is_elsewhere(array, where))):
            return array
        if policy != "ignore":
            raise PartitionError(
                f"{_intro(array, names)} no rules were given, none are in scope, and "
                f"{unmapped[0]!r} is no axis of the mesh ({mesh_text(where.shape)}). Put rules in "
                f"scope, with sx.axis_rules(rules): ..., or pass rules=rules. {_TO_IGNORE}"
            )
        # Over the mesh that was given, but in these dimensions as it is.
        free = [
            isinstance(n, (str, tuple)) and any(p in unmapped for p in strings((n,))) for n in names
        ]
        names = tuple(UNCONSTRAINED if f else n for f, n in zip(free, names, strict=True))
    manual = frozenset(_axes_of_type(where, AxisType.Manual))
    entries = tuple(_without(target, manual) for target in chosen.assign(names).entries)
    diagnostics = diagnose(tuple(array.shape), names, entries, where, rules=chosen)
    # A message begins with the path of its array, and this one has none.
    root = format_path(()) + ": "
    errors = [str(d).removeprefix(root) for d in diagnostics if d.severity == "error"]
    if errors:
        raise PartitionError("\n  ".join([_intro(array, names), *errors]))
    if manual and len(manual) == len(where.axis_names):
        return array
    try:
        return _apply(array, entries, where)
    except ShardaxError:
        raise
    except Exception as error:  # of classes that JAX keeps to itself
        raise PartitionError(
            f"{_intro(array, names)} JAX refuses {PartitionSpec(*entries)} over {where} here: "
            f"{error}\nUnder vmap, a mesh axis that splits the mapped dimension (by an Explicit "
            "type or spmd_axis_name) is taken: give the names inside the mapped function other "
            "mesh axes, or None, by rules of their own."
        ) from error


def _as_array(x: object, names: Names) -> jax.Array:
    value = x.value if isinstance(x, ArrayLike) else x
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise PartitionError(
            f"Cannot constrain a value of type {type(value).__name__} by {names}: it is no array. "
            "The arrays of a tree are constrained one by one, each by names of its own; shapes "
            "without numbers get their shardings from sx.abstract(tree, mesh, rules)."
        ) from error


def _intro(array, names: Names) -> str:
    return f"Cannot constrain an array {array.dtype}{list(array.shape)} by {names}:"


def _mesh_for(array: jax.Array, named_mesh: AnyMesh | None) -> AnyMesh | None:
    """The mesh given, in scope, or of the array, as seen here."""
    inside = jax.sharding.get_abstract_mesh()
    array_mesh = _own_mesh(array)
    if named_mesh is None:
        return resolve_mesh() or array_mesh
    mesh = resolve_mesh(named_mesh)
    assert mesh is not None  # it was given
    if not inside.empty and _axes_of_type(inside, AxisType.Manual):
        if dict(mesh.shape) != dict(inside.shape):
            raise TransformError(
                f"mesh={mesh} differs from {inside}, the mesh of the shard_map around this code. "
                "Pass the same mesh, or none to take the one in scope."
            )
        return inside
    if _axes_of_type(mesh, AxisType.Manual):
        raise TransformError(
            f"{mesh} has axes of type Manual, which are for the inside of jax.shard_map, and this "
            "code is not inside. Make the mesh with axes of type Auto or Explicit."
        )
    seen = inside if not inside.empty else array_mesh
    return _as_seen(mesh, seen) if isinstance(array, Tracer) else mesh


def _has_devices(mesh: AnyMesh | None, array: jax.Array) -> bool:
    """Whether the devices of a program are known; else JAX drops constraints."""
    # Over axes that are not Auto, JAX says so itself, and outside of programs ``_move`` does.
    if not isinstance(mesh, AbstractMesh) or not isinstance(array, Tracer):
        return True
    inside, array_mesh = jax.sharding.get_abstract_mesh(), _own_mesh(array)
    if inside.empty:
        return array_mesh is not None and array_mesh.size == mesh.size
    typed = set(mesh.axis_types) != {AxisType.Auto}
    return inside.size == mesh.size and (typed or scope_has_devices())


def _is_elsewhere(array: jax.Array, mesh: AnyMesh) -> bool:
    """Whether a concrete array is on other devices than a mesh."""
    if isinstance(array, Tracer) or not isinstance(mesh, Mesh):
        return False
    return array.sharding.device_set != set(mesh.devices.flat)


def _own_mesh(array: jax.Array) -> AnyMesh | None:
    """The known mesh of an array."""
    if not isinstance(array, Tracer):
        return array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    mesh = jax.typeof(array).sharding.mesh
    return None if mesh.empty else mesh


def _as_seen(mesh: AnyMesh, seen: AnyMesh | None) -> AnyMesh:
    """The mesh with the axis types of ``seen``, if otherwise equal."""
    if seen is None or tuple(seen.shape.items()) != tuple(mesh.shape.items()):
        return mesh
    if seen.axis_types == mesh.axis_types:
        return mesh
    if isinstance(mesh, Mesh):  # its devices may be in another order
        return Mesh(mesh.devices, mesh.axis_names, axis_types=seen.axis_types)
    return seen


def _axes_of_type(mesh: AnyMesh, kind: AxisType) -> tuple[str, ...]:
    return tuple(a for a, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t is kind)


def _without(target: SpecEntry, axes: frozenset[str]) -> SpecEntry:
    """The target without some mesh axes."""
    remaining = tuple(axis for axis in mesh_axes_of(target) if axis not in axes)
    if len(remaining) == len(mesh_axes_of(target)):
        return target
    return remaining[0] if len(remaining) == 1 else remaining or None


def _apply(array: jax.Array, entries: tuple[SpecEntry, ...], mesh: AnyMesh) -> jax.Array:
    if isinstance(array, Tracer):
        return lay_out_traced(array, entries, mesh)
    if is_eager() or not isinstance(jnp.zeros(()), Tracer):
        return _move(array, entries, mesh)
    # An array from outside of the function that is being compiled: moving it says which devices
    # are meant, but over Auto axes it is a wish that the compiler may ignore.
    moved = array if isinstance(mesh, AbstractMesh) else _move(array, entries, mesh)
    return lay_out_traced(moved, entries, mesh)


def lay_out_traced(array: jax.Array, entries: Sequence[SpecEntry], mesh: AnyMesh) -> jax.Array:
    """Lays out a tracer over all mesh axes but Manual ones."""
    entries = _full(entries, array.ndim)
    explicit = frozenset(_axes_of_type(mesh, AxisType.Explicit))
    automatic = frozenset(_axes_of_type(mesh, AxisType.Auto))
    if explicit:
        present = tuple(
            tuple(axis for axis in mesh_axes_of(entry) if axis in explicit) or None
            for entry in _full(jax.typeof(array).sharding.spec, array.ndim)
        )
        typed = tuple(_without(entry, automatic) for entry in entries)
        spec = PartitionSpec(*_fill_unconstrained(typed, present))
        array = jax.sharding.reshard(array, NamedSharding(mesh, spec))
    if automatic:
        spec = PartitionSpec(*(_without(entry, explicit) for entry in entries))
        array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
    return array


def _move(array: jax.Array, entries: tuple[SpecEntry, ...], mesh: AnyMesh) -> jax.Array:
    """Moves an array outside of a program, whatever the axis types."""
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    now = array.sharding
    sharding = (
        now if isinstance(now, NamedSharding) and now.mesh.abstract_mesh == abstract else None
    )
    if isinstance(mesh, AbstractMesh) and sharding is None:
        raise TransformError(
            f"Outside of a compiled function an array cannot be laid out over {mesh}, which has no "
            "devices. Pass the mesh itself, or call constrain inside a jitted function."
        )
    present = (None,) * array.ndim if sharding is None else _full(sharding.spec, array.ndim)
    spec = PartitionSpec(*_fill_unconstrained(entries, present))
    devices = sharding.mesh if isinstance(mesh, AbstractMesh) and sharding is not None else mesh
    return jax.device_put(array, NamedSharding(devices, spec))


def _full(spec: Iterable[SpecEntry], ndim: int) -> tuple[SpecEntry, ...]:
    """A spec with one entry per dimension."""
    entries = tuple(spec)
    return entries + (None,) * (ndim - len(entries))


def _fill_unconstrained(
    entries: tuple[SpecEntry, ...], present: tuple[SpecEntry, ...]
) -> tuple[SpecEntry, ...]:
    """Keeps entries of unconstrained dimensions, but for mesh axes now taken."""
    used_axes = frozenset(axis for entry in entries for axis in mesh_axes_of(entry))
    return tuple(
        _without(now, used_axes) if entry is PartitionSpec.UNCONSTRAINED else entry
        for entry, now in zip(entries, present, strict=True)
    )
