# SPDX-License-Identifier: Apache-2.0
"""Placement: laying a model out over the devices of a mesh.

``shard`` gives every array of a tree the sharding that its axis names, the rules and the mesh say.
A lazy value is written straight into its shards, so that no device ever holds more of it than it
will keep; an array that exists is moved, and the old one let go, before the next is touched.
Everything that can be wrong is found before anything is moved.

Moves: bringing arrays to other devices one after another, so that no two models are held.

JAX copies in the background. Someone who only asks for the next copy when the last was *asked for*
can fill the devices with old and new arrays at once, however early the old ones are let go. So an
array counts as moved when its copy is *there*: then its holder gets the copy, the old one is let
go, and only then does the next copy begin. Small arrays go in *batches*, because waiting for each
would take longer than copying it.

Letting go is all that is done to an old array. It is not deleted, since something else may hold it:
a State taken before, a clone that has not been trained yet. And since a holder keeps its array
until the copy is there, a device that has no room leaves every holder with a valid array: the
batches before are at their new place, the others at their old one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from shardax._core import _jax
from shardax._core._jax import Tracer
from shardax._core.frames import check_trace, check_unlocked
from shardax._core.graph.paths import Path, format_path
from shardax._core.init.lazy import LazyValue, Recipe, compute_all
from shardax._core.object import Object
from shardax._core.state.state import State
from shardax._core.variable import Variable
from shardax._transforms.errors import MeshError
from shardax.partition.checker import raise_on_errors
from shardax.partition.constrain import lay_out_traced
from shardax.partition.errors import PlacementError
from shardax.partition.findings import Finding
from shardax.partition.inventory import (
    Part,
    Slot,
    Survey,
    arrays_in,
    with_arrays,
)
from shardax.partition.mesh import AnyMesh, resolve_mesh
from shardax.partition.overrides import MemoryKinds, OverridesLike
from shardax.partition.rules import RulesLike
from shardax.partition.tree_layout import TreeLayout

# --- Moves ---

BATCH_BYTES = 2**18
"""A batch is waited for when it holds this many bytes."""


class Moves:
    """Copies in the making, and where to put them when they are there.

    Args:
        total: How many moves are to come, for messages.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._batch: list[tuple[Path, Any, Callable[[Any], None]]] = []
        self._bytes = 0

    def add(self, path: Path, make: Callable[[], Any], store: Callable[[Any], None]) -> None:
        """Begins one move.

        Args:
            path: Where the value is, for messages.
            make: Makes the value at its new place; an array or a pytree.
            store: Called with the value when it is there.

        Raises:
            PlacementError: If a device refuses; what was stored stays, nothing else changed.
        """
        try:
            value = make()
        except jax.errors.JaxRuntimeError as error:
            raise self._refused([path], error) from error
        self._batch.append((path, value, store))
        self._bytes += sum(array.nbytes for array in _arrays(value))
        if self._bytes >= BATCH_BYTES:
            self.finish()

    def finish(self) -> None:
        """Waits for the copies in the making and stores them.

        Raises:
            PlacementError: If a device refuses; the batch is not stored.
        """
        batch, self._batch, self._bytes = self._batch, [], 0
        try:
            jax.block_until_ready([_arrays(value) for _, value, _ in batch])
        except jax.errors.JaxRuntimeError as error:
            raise self._refused([path for path, _, _ in batch], error) from error
        for _, value, store in batch:
            store(value)
        self.done += len(batch)

    def _refused(self, paths: list[Path], error: Exception) -> PlacementError:
        shown = ", ".join(map(format_path, paths[:8])) + (" ..." if len(paths) > 8 else "")
        return PlacementError(
            f"{shown}: could not be placed, because a device refused: {error}\n{self.done} of "
            f"{self.total} values are at their new place and the others where they were; all are "
            "valid. Make room (a State or another model may hold the old arrays), split by more "
            "mesh axes, or use another memory_kind, and call again: what is in place is not moved "
            "a second time."
        )


def _arrays(value: Any) -> list[Any]:
    """The arrays of a value; what is being traced is on no device yet."""
    return [leaf for leaf in jax.tree.leaves(value) if not isinstance(leaf, Tracer)]


# --- Placement ---

T = TypeVar("T")

Places = Sequence[Any]
"""Where each array of a slot goes: a sharding, or None for one that stays."""


def shard(
    model: T,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
) -> T:
    """Lays a model out over a mesh, in place.

    Lazy values are computed, one small compiled program per distinct (initializer, shape, dtype,
    sharding), each writing straight into its shards; other arrays are moved, from wherever they
    are, one after the other (see ``shardax.partition.placement``). The values are the same to the last
    bit whatever the mesh and the rules. A Variable that is reached by several paths is placed once.
    An array without axis names, and a dimension whose name no rule mentions, is not split.

    Args:
        model: A Module, a Variable, a State, a box, or a pytree that holds such and arrays, such as
            ``(model, optimizer)``.
        mesh: The mesh, its axes Auto or Explicit; None for the one in scope, or of a box its own.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: Filter to place or rules, which hold for the Variables that match instead of the
            rules alone (see ``shardax.partition.overrides``). ``{sx.OptState: {"embed": "data"}}``
            splits an optimizer's state further than its parameters.
        memory_kind: Memory of the devices for all arrays, such as ``"pinned_host"``, or a mapping
            from filters to such; None for the default.

    Returns:
        ``model`` itself; a pytree with plain arrays, boxes or a State in it is rebuilt, because
        these cannot be changed in place. Boxes keep their names.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        NoRulesError: If a box has logical names, and there are no rules.
        MeshError: If the mesh has no devices, or axes of type Manual.
        OverrideError: If overrides or memory kinds are malformed.
        PartitionCheckError: If an array cannot be placed so (an axis that the mesh does not have, a
            dimension that cannot be divided, a policy of the rules, an abstract or deleted array);
            lists all of them by path, and nothing was changed.
        PlacementError: If a device refuses an array, for want of memory. What was placed before
            stays there, the rest is where it was, and the call can be repeated.

    Example:
        >>> import jax, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (4, 8)), axes=("embed", "mlp"))
        >>> shard(weight, mesh, {"mlp": "model"}) is weight, weight.sharding.spec
        (True, P(None, 'model'))
    """
    where = resolve_mesh(mesh)
    if where is not None:
        _with_devices(where)
    survey = Survey(model)
    layout = TreeLayout(survey, mesh, rules, overrides, memory_kind, function="shard")
    places = layout.shardings()
    for meshes in {place.mesh for some in places for place in some}:
        _with_devices(meshes)
    layout.checked(list(_not_placeable(survey)))
    _check_writable(survey)
    return _place(survey, model, places)


def unshard(model: T, device: Any = None) -> T:
    """Gathers a model on one device, in place: the inverse of ``shard``.

    Lazy values stay lazy, as they are on no device. Arrays are gathered one after the other, so
    that besides what the model is made of there is one array more at a time (the device must have
    room for the whole model).

    Args:
        model: A Module, a Variable, a State, a box, or a pytree that holds such and arrays.
        device: A ``jax.Device``; None for JAX's default device.

    Returns:
        ``model`` itself; a pytree with plain arrays, boxes or a State in it is rebuilt, because
        these cannot be changed in place. Boxes keep their names.

    Raises:
        MeshError: If ``device`` is no device.
        PartitionCheckError: If an array is abstract, deleted, inside a trace, or partly on devices
            of another process; lists all of them by path, and nothing was changed.
        PlacementError: If the device refuses an array; as for ``shard``.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
        >>> placed = sx.shard(weight, jax.make_mesh((1,), ("model",)), {"mlp": "model"})
        >>> unshard(weight) is weight, weight.sharding == SingleDeviceSharding(jax.devices()[0])
        (True, True)
    """
    place = SingleDeviceSharding(_one_device(device))
    survey = Survey(model)
    raise_on_errors([*_not_placeable(survey), *_not_gatherable(survey)])
    _check_writable(survey)
    places = {
        id(slot): [None if isinstance(array, LazyValue) else place for array in arrays]
        for slot, arrays in survey.arrays()
    }
    return _place(survey, model, [places[id(slot)] for slot in survey.slots])


def _one_device(device: Any) -> Any:
    if device is None:
        default = getattr(jax.config, "jax_default_device", None)  # a device or a platform's name
        if isinstance(default, jax.Device):
            return default
        return jax.local_devices(backend=default)[0]
    if isinstance(device, jax.Device):
        return device
    raise MeshError(
        f"unshard gathers on one device, but device={device!r} is of type {type(device).__name__}. "
        "Give a device, such as jax.devices()[0], or None for the default one. To lay the model "
        "out over another mesh use shard(model, mesh, rules)."
    )


def _with_devices(mesh: AnyMesh) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"shard cannot place arrays over {mesh}, which has no devices. Pass the mesh itself, "
            "shard(model, mesh): an AbstractMesh serves partition_specs, shardings, abstract and "
            "check only."
        )
    if AxisType.Manual in mesh.axis_types:
        raise MeshError(
            f"shard cannot place arrays over {mesh}, which has axes of type Manual: these are for "
            "the inside of jax.shard_map. Make the mesh with axes of type Auto or Explicit."
        )
    return mesh


def _check_writable(survey: Survey) -> None:
    for slot in survey.slots:
        if slot.variable is not None:
            what = f"to the {type(slot.variable).__name__} at {format_path(slot.path)}"
            check_unlocked(slot.variable, what)
            check_trace(slot.variable, what)


# --- what cannot be placed -----------------------------------------------------------------------


def _not_placeable(survey: Survey) -> Iterator[Finding]:
    """Errors about parts of a stack, and values that are not there: abstract or donated ones."""
    yield from _layer_views(survey)
    for slot, arrays in survey.arrays():
        for info, leaf in zip(slot.arrays, arrays, strict=True):
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


def _layer_views(survey: Survey) -> Iterator[Finding]:
    """Errors about views of one layer of a stack (``_core.graph.views``), which lie as the stack does."""
    for slot in survey.slots:
        if slot.variable is not None and (parent := slot.variable._parent) is not None:
            text = (
                f"{format_path(slot.path)}: is a view of one layer of a stacked "
                f"{type(parent).__name__}: all layers are one array, which lies as a whole. "
                "Give the stack itself, shard(stack, mesh, rules), or a copy of the layer, "
                "sx.clone(stack[i])."
            )
            yield Finding("error", slot.path, "layer-view", text)


def _not_gatherable(survey: Survey) -> Iterator[Finding]:
    """Errors about arrays that one device cannot be given."""
    for slot, arrays in survey.arrays():
        for info, leaf in zip(slot.arrays, arrays, strict=True):
            where = format_path(info.path)
            if isinstance(leaf, Tracer):
                text = (
                    f"{where}: is being traced, and inside a program the compiler says where "
                    "arrays are. Call unshard outside, or constrain the array: "
                    "sx.constrain(x, (None,) * x.ndim)."
                )
                yield Finding("error", info.path, "traced", text)
            elif isinstance(leaf, jax.Array) and not (
                leaf.is_fully_addressable or leaf.is_fully_replicated
            ):
                text = (
                    f"{where}: parts of it are on devices of other processes. Replicate it on "
                    "every device first, shard(model, mesh, {}), in all processes."
                )
                yield Finding("error", info.path, "not-addressable", text)


# --- placing -------------------------------------------------------------------------------------


def _place(survey: Survey, model: T, places: Sequence[Places]) -> T:
    """Places every array; one whose place is None stays."""
    moves = Moves(sum(any(to is not None for to in some) for some in places))
    _place_variables(survey.slots, places, moves)
    if all(isinstance(part.value, Object) or not part.slots for part in survey.parts):
        moves.finish()
        return model
    placed: list[Any] = [_place_part(part, survey.slots, places, moves) for part in survey.parts]
    moves.finish()
    return survey.treedef.unflatten([result() for result in placed])


def _place_variables(slots: Sequence[Slot], places: Sequence[Places], moves: Moves) -> None:
    """Places the values of Variables; values that are computed from other Variables come last."""
    all_of_them = [
        _VariablePlace(slot, slot.variable, to)
        for slot, to in zip(slots, places, strict=True)
        if slot.variable is not None
    ]
    recipes = [place for place in all_of_them if place.is_recipe()]
    if recipes and _jax.is_eager():
        arrays = compute_all([p.variable._value for p in recipes], [p.to[0] for p in recipes])
        for place in recipes:
            moves.add(place.slot.path, lambda: [next(arrays)], place.store)
        moves.finish()
    dependent = [p for p in all_of_them if isinstance(p.variable._value, LazyValue)]
    late = {id(place.variable) for place in dependent}
    present = [p for p in all_of_them if id(p.variable) not in late]
    for some in (present, dependent):
        for place in some:
            if not _is_placed(place.slot, place.variable._value, place.to):
                moves.add(place.slot.path, place.moved, place.store)
        moves.finish()


class _VariablePlace(NamedTuple):
    """A Variable and where its value belongs."""

    slot: Slot
    variable: Variable[Any]
    to: Places

    def is_recipe(self) -> bool:
        return isinstance(self.variable._value, Recipe) and self.to[0] is not None

    def moved(self) -> list[Any]:
        return _placed(self.slot, self.variable._value, self.to)

    def store(self, arrays: Sequence[Any]) -> None:
        self.variable._value = with_arrays(self.slot, self.variable._value, arrays)


def _place_part(
    part: Part, slots: Sequence[Slot], places: Sequence[Places], moves: Moves
) -> Callable[[], Any]:
    """Begins to place what is no Variable; returns what gives the result when all is there."""
    value = part.value
    if isinstance(value, Object) or not part.slots:
        return lambda: value
    before = value.flat() if isinstance(value, State) else {(): value}
    after = dict(before)
    for (path, item), position in zip(before.items(), part.slots, strict=True):
        slot, to = slots[position], places[position]
        if not _is_placed(slot, item, to):
            make = functools.partial(_placed, slot, item, to)
            moves.add(slot.path, make, functools.partial(_store, after, path, slot))
    if isinstance(value, State):
        return lambda: State.from_flat(after, part.origins)
    return lambda: after[()]


def _store(values: dict[Path, Any], path: Path, slot: Slot, arrays: Sequence[Any]) -> None:
    values[path] = with_arrays(slot, values[path], arrays)


def _is_placed(slot: Slot, value: Any, places: Places) -> bool:
    return all(to is None or _is_at(array, to) for array, to in _pairs(slot, value, places))


def _placed(slot: Slot, value: Any, places: Places) -> list[Any]:
    """Returns the arrays of a value where they belong."""
    return [
        array if to is None or _is_at(array, to) else _moved(array, to)
        for array, to in _pairs(slot, value, places)
    ]


def _pairs(slot: Slot, value: Any, places: Places) -> Iterator[tuple[Any, Any]]:
    # A box without arrays has a place nevertheless: its entry.
    return zip(arrays_in(slot, value), places, strict=False)


def _is_at(array: Any, to: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.sharding == to


def _moved(array: Any, to: Any) -> Any:
    if isinstance(array, LazyValue):
        array = array.compute(to)
    if isinstance(array, Tracer):  # device_put would be a wish that the compiler may ignore
        return lay_out_traced(array, to.spec, to.mesh)
    if _is_at(array, to):
        return array
    if isinstance(array, jax.Array) and array.sharding.memory_kind != to.memory_kind:
        # To another memory first, and then to other devices: JAX 0.10 fails at both in one step
        # where a device keeps its part ("Memory kind mismatch with buffers").
        array = jax.device_put(array, array.sharding.with_memory_kind(to.memory_kind))
    return jax.device_put(array, to)
