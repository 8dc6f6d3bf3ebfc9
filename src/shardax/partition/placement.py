# SPDX-License-Identifier: Apache-2.0
"""Placement: laying a model out over the devices of a mesh.

``shard`` gives every array of a tree the sharding that its axis names, the rules and the mesh say.
A lazy value is written straight into its shards, so that no device ever holds more of it than it
will keep; an array that exists is moved, and the old one let go, before the next is touched.
Everything that can be wrong is found before anything is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from shardax.core import _jax
from shardax.core._jax import Tracer
from shardax.core.errors import MeshError
from shardax.core.frames import check_trace, check_unlocked
from shardax.core.lazy import LazyValue, Recipe, compute_all
from shardax.core.node import Object
from shardax.core.paths import format_path
from shardax.core.state import State
from shardax.partition.check import raise_on_errors
from shardax.partition.constraints import lay_out_traced
from shardax.partition.findings import Finding
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import RulesLike
from shardax.partition.scope import resolve_rules
from shardax.partition.specs import lay_out, require_mesh, to_shardings
from shardax.partition.survey import Part, Slot, Survey, is_array

T = TypeVar("T")


def shard(model: T, mesh: AnyMesh | None = None, rules: RulesLike | None = None) -> T:
    """Lays a model out over a mesh, in place.

    Lazy values are computed, one small compiled program per distinct (initializer, shape, dtype,
    sharding), each writing straight into its shards; other arrays are moved. The values are the
    same to the last bit whatever the mesh and the rules. A Variable that is reached by several
    paths is placed once. An array without axis names, and a dimension whose name no rule mentions,
    is not split.

    Args:
        model: A Module, a Variable, a State, or a pytree that holds such and arrays, such as
            ``(model, optimizer)``.
        mesh: The mesh, its axes Auto or Explicit; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        ``model`` itself; a pytree with plain arrays or a State in it is rebuilt, because these
        cannot be changed in place.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        MeshError: If the mesh has no devices.
        PartitionCheckError: If an array cannot be placed so (an axis that the mesh does not have, a
            dimension that cannot be divided, a policy of the rules, an abstract or deleted array);
            lists all of them by path, and nothing was changed.

    Example:
        >>> import jax, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (4, 8)), axes=("embed", "mlp"))
        >>> shard(weight, mesh, {"mlp": "model"}) is weight, weight.sharding.spec
        (True, P(None, 'model'))
    """
    where = _with_devices(require_mesh(mesh, "shard"))
    survey = Survey(model)
    slots = survey.slots
    specs, findings = lay_out(slots, where, resolve_rules(rules))
    raise_on_errors([*findings, *_not_placeable(survey)])
    for slot in slots:
        if slot.variable is not None:
            what = f"to the {type(slot.variable).__name__} at {format_path(slot.path)}"
            check_unlocked(slot.variable, what)
            check_trace(slot.variable, what)
    shardings = to_shardings(specs, where)
    _place_variables(slots, shardings)
    if all(isinstance(part.value, Object) or not part.slots for part in survey.parts):
        return model
    return survey.treedef.unflatten([_placed_part(part, shardings) for part in survey.parts])


def _with_devices(mesh: AnyMesh) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    raise MeshError(
        f"shard cannot place arrays over {mesh}, which has no devices. Pass the mesh itself, "
        "shard(model, mesh): an AbstractMesh serves partition_specs, shardings, abstract and "
        "check only."
    )


# --- what cannot be placed -----------------------------------------------------------------------


def _not_placeable(survey: Survey) -> Iterator[Finding]:
    """Errors about values that are not there: abstract ones, and arrays that were donated."""
    for slot, value in _values(survey):
        for info, leaf in zip(slot.arrays, _leaves(slot, value), strict=True):
            where = format_path(info.path)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                text = (
                    f"{where}: is abstract, {leaf.dtype}{list(leaf.shape)}: there are no numbers "
                    "to place. Shard the model that this one was made from, or restore a "
                    "checkpoint into it."
                )
                yield Finding("error", info.path, "abstract", text)
            elif isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
                text = (
                    f"{where}: its array was deleted, usually by being donated to a compiled "
                    "function through another Variable. Copy arrays before sharing them: "
                    "sx.update(copy, jax.tree.map(jnp.copy, sx.state(copy)))."
                )
                yield Finding("error", info.path, "deleted", text)


def _values(survey: Survey) -> Iterator[tuple[Slot, Any]]:
    """Yields every slot with its value."""
    for slot in survey.slots:
        if slot.variable is not None:
            yield slot, slot.variable._value
    for part in survey.parts:
        if isinstance(part.value, State):
            yield from zip(
                (survey.slots[i] for i in part.slots), part.value.flat().values(), strict=True
            )
        elif not isinstance(part.value, Object) and part.slots:
            yield survey.slots[part.slots[0]], part.value


def _leaves(slot: Slot, value: Any) -> list[Any]:
    return [value] if slot.treedef is None else slot.treedef.flatten_up_to(value)


# --- placing -------------------------------------------------------------------------------------


def _place_variables(slots: Sequence[Slot], shardings: Sequence[Any]) -> None:
    """Places the values of Variables; values that are computed from other Variables come last."""
    pairs = [
        (slot.variable, to)
        for slot, to in zip(slots, shardings, strict=True)
        if slot.variable is not None
    ]
    recipes = [pair for pair in pairs if isinstance(pair[0]._value, Recipe)]
    if recipes and _jax.is_eager():
        arrays = compute_all([v._value for v, _ in recipes], [to for _, to in recipes])
        for (variable, _), array in zip(recipes, arrays, strict=True):
            variable._value = array
    dependent = []
    for variable, to in pairs:
        if isinstance(variable._value, LazyValue):
            dependent.append((variable, to))
        else:
            variable._value = _placed(variable._value, to)
    for variable, to in dependent:
        variable._value = _placed(variable._value, to)


def _placed(value: Any, sharding: Any) -> Any:
    """Returns a value, or a pytree of them, where it belongs."""
    if isinstance(value, LazyValue):
        value = value.compute(sharding)
    if not is_array(value):
        return jax.tree.map(_placed, value, sharding)
    if isinstance(value, Tracer):  # device_put would be a wish that the compiler may ignore
        return lay_out_traced(value, sharding.spec, sharding.mesh)
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    return jax.device_put(value, sharding)


def _placed_part(part: Part, shardings: Sequence[Any]) -> Any:
    if isinstance(part.value, Object) or not part.slots:
        return part.value
    if isinstance(part.value, State):
        values = part.value.flat()
        pairs = zip(values.items(), part.slots, strict=True)
        return State.from_flat(
            {path: _placed(value, shardings[i]) for (path, value), i in pairs}, part.origins
        )
    return _placed(part.value, shardings[part.slots[0]])
