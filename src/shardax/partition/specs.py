# SPDX-License-Identifier: Apache-2.0
"""Specs of trees: where each array of a model goes, said before anything is there.

For a tree (see ``shardax.partition.survey``) and a layout, which is rules plus a mesh, the
functions here give one entry per array: its ``PartitionSpec``, its ``NamedSharding``, or an
abstract array that carries it. A Module becomes a ``State``, path to entry, which can stand
wherever JAX or shardax take one entry per array (``in_shardings``, ``jax.tree.map``). An array
without axis names is replicated; what is no array becomes None. Nothing is computed or moved, and
lazy values stay lazy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax.core.errors import NoMeshError
from shardax.core.frames import owner_here
from shardax.core.node import Object
from shardax.core.paths import format_path
from shardax.core.structure import build, flatten_roots
from shardax.partition.check import (
    LARGE_BYTES,
    LARGE_FRACTION,
    ArrayRecord,
    raise_on_errors,
    spec_for,
    specs_for,
)
from shardax.partition.findings import Finding
from shardax.partition.mesh import AnyMesh, resolve_mesh
from shardax.partition.overrides import FREE, Choice, MemoryKinds, OverridesLike, choices
from shardax.partition.rules import Rules, RulesLike
from shardax.partition.scope import resolve_rules
from shardax.partition.survey import Slot, Survey, in_slot, nbytes


def partition_specs(
    tree: Any, rules: RulesLike | None = None, *, overrides: OverridesLike | None = None
) -> Any:
    """Returns the ``PartitionSpec`` of every array of a tree, by its axis names.

    Args:
        tree: A Module, a Variable, a State, or a pytree that holds such and arrays.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: Filter to place or rules, which hold for the Variables that match instead of the
            rules alone (see ``shardax.partition.overrides``).

    Returns:
        A State of specs for a Module; a pytree like ``tree`` otherwise. Arrays without names have
        ``P()``, and what is no array has None.

    Raises:
        PartitionCheckError: If names are malformed, or break a policy of the rules; lists all.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> class Scale(sx.Module):
        ...     def __init__(self):
        ...         self.weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
        ...         self.count = sx.Variable(0)
        >>> partition_specs(Scale(), {"mlp": "model"}).flat()
        {('weight',): P(None, 'model'), ('count',): P()}
        >>> partition_specs([Scale().weight, jnp.ones(3), "no array"], {"mlp": "model"})
        [P(None, 'model'), P(), None]
    """
    survey = Survey(tree)
    chosen, said = choices(survey, None, overrides, None)
    specs, findings = lay_out(survey.slots, None, resolve_rules(rules), chosen)
    raise_on_errors([*findings, *said])
    return survey.arrange(specs)


def shardings(
    tree: Any,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
) -> Any:
    """Returns the ``NamedSharding`` of every array of a tree, by its axis names.

    Args:
        tree: A Module, a Variable, a State, or a pytree that holds such and arrays.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: Filter to place or rules, which hold for the Variables that match instead of the
            rules alone (see ``shardax.partition.overrides``).
        memory_kind: Memory of the devices for all arrays, or a mapping from filters to such; None
            for the default.

    Returns:
        As ``partition_specs``, with shardings.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        PartitionCheckError: If an array cannot be laid out so; lists all.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
        >>> shardings({"weight": weight}, mesh, {"mlp": "model"})["weight"].spec
        P(None, 'model')
    """
    where = require_mesh(mesh, "shardings")
    survey = Survey(tree)
    chosen, said = choices(survey, where, overrides, memory_kind)
    specs, findings = lay_out(survey.slots, where, resolve_rules(rules), chosen)
    raise_on_errors([*findings, *said])
    return survey.arrange(to_shardings(specs, where, chosen))


def abstract(
    tree: Any,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
) -> Any:
    """Returns a copy of a tree that holds shapes, dtypes and shardings in place of arrays.

    It can be given to ``sx.jit(f).lower(...)``, ``jax.eval_shape`` or a checkpoint's restore.

    Args:
        tree: A Module, a Variable, a State, or a pytree that holds such and arrays.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope. Without any, arrays
            that already have a ``NamedSharding`` keep it and the others have none.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: Filter to place or rules, which hold for the Variables that match instead of the
            rules alone (see ``shardax.partition.overrides``).
        memory_kind: Memory of the devices for all arrays, or a mapping from filters to such; None
            for the default.

    Returns:
        The tree with new Modules and Variables, whose values are ``jax.ShapeDtypeStruct``. What
        was shared is shared.

    Raises:
        NoMeshError: If overrides or a memory kind are given and there is no mesh.
        PartitionCheckError: If an array cannot be laid out so; lists all.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (4, 8)), axes=("embed", "mlp"))
        >>> copy = abstract(weight, jax.make_mesh((1,), ("model",)), {"mlp": "model"})
        >>> copy.shape, copy.sharding.spec, copy.is_abstract, weight.is_lazy
        ((4, 8), P(None, 'model'), True, True)
    """
    said_more = overrides is not None or memory_kind is not None
    where = require_mesh(mesh, "abstract") if said_more else resolve_mesh(mesh)
    survey = Survey(tree)
    if where is None:
        places: Sequence[Any] = [
            in_slot(slot, (info.sharding for info in slot.arrays)) for slot in survey.slots
        ]
    else:
        chosen, said = choices(survey, where, overrides, memory_kind)
        specs, findings = lay_out(survey.slots, where, resolve_rules(rules), chosen)
        raise_on_errors([*findings, *said])
        places = to_shardings(specs, where, chosen)
    values = [_structs(slot, place) for slot, place in zip(survey.slots, places, strict=True)]
    flat = flatten_roots([part.value for part in survey.parts if isinstance(part.value, Object)])
    given = [values[survey.position(leaf)] for leaf in flat.leaves]
    copies = iter(build(flat.graphdef, given, owner_here())[0])
    return survey.arrange(values, lambda part: next(copies))


def batch_sharding(
    axes: Iterable[Any], mesh: AnyMesh | None = None, rules: RulesLike | None = None
) -> NamedSharding:
    """Returns the ``NamedSharding`` of one array by its axis names, such as a batch to be put.

    Args:
        axes: One name per dimension (see ``logical_to_mesh_axes``).
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The sharding.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        PartitionCheckError: If the names cannot be mapped to the mesh.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batch_sharding(("batch", "seq"), mesh, {"batch": "data"}).spec
        P('data', None)
    """
    where, names = require_mesh(mesh, "batch_sharding"), tuple(axes)
    # The size is not known yet, and 0 is divisible by everything: only the names are judged.
    spec, findings = spec_for(names, (0,) * len(names), where, resolve_rules(rules))
    raise_on_errors(findings)
    return named_sharding(where, spec)


def require_mesh(mesh: AnyMesh | None, function: str) -> AnyMesh:
    """Returns the mesh given, else the one in scope.

    Args:
        mesh: The mesh or None.
        function: Who needs it, for the message.

    Raises:
        NoMeshError: If there is neither.
    """
    found = resolve_mesh(mesh)
    if found is None:
        raise NoMeshError(
            f"{function} needs a mesh: none was given and none is in scope. Pass one, "
            f"{function}(..., mesh=jax.make_mesh((2, 4), ('data', 'model'))), or put one in scope: "
            "with jax.set_mesh(mesh): ..."
        )
    return found


def lay_out(
    slots: Sequence[Slot],
    mesh: AnyMesh | None,
    rules: Rules,
    chosen: Sequence[Choice] | None = None,
    *,
    large_bytes: int = LARGE_BYTES,
    large_fraction: float = LARGE_FRACTION,
) -> tuple[list[Any], list[Finding]]:
    """Lays out the arrays of slots.

    Args:
        slots: The slots of a survey.
        mesh: The mesh, or None to apply the rules alone.
        rules: The rules.
        chosen: One choice per slot, of what holds apart from the rules; None for nothing.
        large_bytes: See ``specs_for``.
        large_fraction: See ``specs_for``.

    Returns:
        One spec per slot (for a value that is a pytree, a pytree of specs), and the findings.
    """
    chosen = [FREE] * len(slots) if chosen is None else chosen
    misfits = [
        _many_arrays(slot)
        for slot, choice in zip(slots, chosen, strict=True)
        if slot.axes is not None and len(slot.arrays) > 1 and choice.place is None
    ]
    records = [
        ArrayRecord(
            info.path,
            slot.axes if len(slot.arrays) == 1 else None,
            info.shape,
            nbytes(info),
            choice,
        )
        for slot, choice in zip(slots, chosen, strict=True)
        for info in slot.arrays
    ]
    specs, findings = specs_for(
        records, mesh, rules, large_bytes=large_bytes, large_fraction=large_fraction
    )
    remaining = iter(specs)
    return [in_slot(slot, remaining) for slot in slots], [*misfits, *findings]


def _many_arrays(slot: Slot) -> Finding:
    text = (
        f"{format_path(slot.path)}: axis names {slot.axes} for a value of {len(slot.arrays)} "
        "arrays. Axis names say what the dimensions of one array are: give each array a Variable "
        "of its own, or give no axes, and the arrays are replicated."
    )
    return Finding("error", slot.path, "axes-of-many", text)


@functools.lru_cache(maxsize=4096)
def named_sharding(mesh: Any, spec: PartitionSpec, memory_kind: str | None = None) -> NamedSharding:
    """Returns the sharding of a mesh and a spec, the same object each time."""
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def to_shardings(
    specs: Sequence[Any], mesh: AnyMesh, chosen: Sequence[Choice] | None = None
) -> list[Any]:
    """Returns the shardings of specs, also of those inside pytrees.

    Args:
        specs: One spec, or pytree of specs, per slot.
        mesh: The mesh.
        chosen: One choice per slot: another mesh, a memory kind; None for nothing.
    """
    chosen = [FREE] * len(specs) if chosen is None else chosen
    return [_shardings(spec, mesh, choice) for spec, choice in zip(specs, chosen, strict=True)]


def _shardings(spec: Any, mesh: AnyMesh, choice: Choice) -> Any:
    kind = choice.memory_kind
    if isinstance(choice.place, NamedSharding):
        mesh = choice.place.mesh
        kind = choice.place.memory_kind if kind is None else kind
    if isinstance(spec, PartitionSpec):
        return named_sharding(mesh, spec, kind)
    return jax.tree.map(lambda each: named_sharding(mesh, each, kind), spec)


def _structs(slot: Slot, places: Any) -> Any:
    places = [places] if slot.treedef is None else slot.treedef.flatten_up_to(places)
    structs = (
        jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place, weak_type=info.weak_type)
        for info, place in zip(slot.arrays, places, strict=True)
    )
    return in_slot(slot, iter(structs))
