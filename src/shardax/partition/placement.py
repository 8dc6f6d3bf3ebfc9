# SPDX-License-Identifier: Apache-2.0
"""Placement of models over the devices of a mesh.

Everything that can be wrong is found before anything is moved. A lazy value is computed straight
into its shards. An array that exists is moved, and the old one freed, before the next is touched,
so that no device holds two models. JAX copies in the background, so an array counts as moved when
its copy is *ready*: then its holder gets the copy, the old array is released (not deleted, since a
State or a clone may hold it too), and only then does the next copy begin. Small arrays go in
batches, because waiting for each would take longer than copying it. A device without room leaves
every holder with a valid array: earlier batches are at their new place, the others at their old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import SingleDeviceSharding

from shardax._core._jax import Tracer
from shardax._core.frames import check_trace, check_unlocked, is_eager, is_ref, is_writable
from shardax._core.graph.paths import PyTree, format_path
from shardax._core.init.lazy import LazyValue, Recipe, compute_all
from shardax._core.object import Object
from shardax._transforms.errors import TransformError
from shardax.partition.constraints import lay_out_traced
from shardax.partition.errors import Diagnostic, PartitionError, raise_on_errors
from shardax.partition.inventory import LeafInfo, Subtree, TreeInventory
from shardax.partition.mesh import AnyMesh, resolve_mesh
from shardax.partition.rules import RulesLike
from shardax.partition.tree_layout import MemoryKinds, OverridesLike, TreeLayout, check_devices

T = TypeVar("T")
ABSTRACT = "partition_specs, shardings, abstract and check"  # which need no devices

Destinations = Sequence[Any]
"""For each array of a leaf a sharding, or None for one that stays."""

BATCH_BYTES = 2**18
"""A batch of copies is waited for when it holds this many bytes."""


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
    are, one after the other. The values are the same to the last bit whatever the mesh and the
    rules. A Variable that is reached by several paths is placed once.
    An array without axis names, and a dimension whose name no rule mentions, is not split; a
    warning says so where rules and arrays have names that look like misspellings of each other.

    Args:
        model: A Module, a Variable, a State, a box, or a pytree that holds such and arrays, such as
            ``(model, optimizer)``.
        mesh: The mesh, its axes Auto or Explicit; None for the one in scope, or of a box its own.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: Filter to spec or rules, for the Variables that match it, before the rules (see
            ``shardax.partition.tree_layout``). ``{sx.OptState: {"embed": "data"}}`` splits an
            optimizer's state further than its parameters.
        memory_kind: Memory of the devices for all arrays, such as ``"pinned_host"``, or a mapping
            from filters to such; None for the default.

    Returns:
        ``model`` itself; a pytree with plain arrays, boxes or a State in it is rebuilt, because
        these cannot be changed in place. Boxes keep their names.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        PartitionError: If a box has logical names, and there are no rules, or if overrides or
            memory kinds are malformed; if a device refuses an array, for want of memory. What was
            placed before stays there, the rest is where it was, and the call can be repeated.
        TransformError: If the mesh has no devices, or axes of type Manual.
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
    where = resolve_mesh(mesh)
    if where is not None:
        check_devices(where, "shard", ABSTRACT)
    inventory = TreeInventory(model)
    layout = TreeLayout(inventory, mesh, rules, overrides, memory_kind, function="shard")
    shardings = layout.shardings()
    for used_mesh in {sharding.mesh for row in shardings for sharding in row}:
        check_devices(used_mesh, "shard", ABSTRACT)
    layout.checked(list(_not_placeable(inventory)))
    _check_writable(inventory)
    layout.warn_of_names()
    return _place(inventory, model, shardings)


def unshard(model: T, device: object = None) -> T:
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
        TransformError: If ``device`` is no device.
        PartitionCheckError: If an array is abstract, deleted, inside a trace, or partly on devices
            of another process; lists all of them by path, and nothing was changed.
        PartitionError: If the device refuses an array; as for ``shard``.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
        >>> placed = sx.shard(weight, jax.make_mesh((1,), ("model",)), {"mlp": "model"})
        >>> unshard(weight) is weight, weight.sharding == SingleDeviceSharding(jax.devices()[0])
        (True, True)
    """
    to = SingleDeviceSharding(_one_device(device))
    inventory = TreeInventory(model)
    raise_on_errors([*_not_placeable(inventory), *_not_gatherable(inventory)])
    _check_writable(inventory)
    destinations = [
        [None if isinstance(array, LazyValue) else to for array in leaf.arrays_in(leaf.value)]
        for leaf in inventory.leaves
    ]
    return _place(inventory, model, destinations)


def _one_device(device: object):
    if device is None:
        default = getattr(jax.config, "jax_default_device", None)  # a device or a platform's name
        if isinstance(default, jax.Device):
            return default
        return jax.local_devices(backend=default)[0]
    if isinstance(device, jax.Device):
        return device
    raise TransformError(
        f"unshard gathers on one device, but device={device!r} is of type {type(device).__name__}. "
        "Give a device, such as jax.devices()[0], or None for the default one. To lay the model "
        "out over another mesh use shard(model, mesh, rules)."
    )


def _check_writable(inventory: TreeInventory) -> None:
    for leaf in inventory.leaves:
        if leaf.variable is not None and not is_writable(leaf.variable):
            target = f"to the {type(leaf.variable).__name__} at {format_path(leaf.path)}"
            check_unlocked(leaf.variable, target)
            check_trace(leaf.variable, target)


def _not_placeable(inventory: TreeInventory) -> Iterator[Diagnostic]:
    """Yields errors about layers of a stack, and abstract or donated values."""
    for leaf in inventory.leaves:
        parent = None if leaf.variable is None else leaf.variable._parent
        if parent is not None:
            text = (
                f"{format_path(leaf.path)}: is a view of one layer of a stacked "
                f"{type(parent).__name__}, and all layers are one array. Give the stack itself, "
                "shard(stack, mesh, rules), or a copy of the layer, sx.clone(stack[i])."
            )
            yield Diagnostic("error", leaf.path, "layer-view", text)
    for _, info, array in inventory.arrays():
        if isinstance(array, jax.ShapeDtypeStruct):
            text = (
                f"{format_path(info.path)}: is abstract, {array.dtype}{list(array.shape)}, without "
                "numbers. Shard the model that this one was made from, or restore a checkpoint "
                "into it."
            )
            yield Diagnostic("error", info.path, "abstract", text)
        elif is_ref(array):
            text = (
                f"{format_path(info.path)}: holds a jax.Ref, which stays where it is. Lay the "
                "model out first: sx.with_vars(sx.shard(model, mesh), ref=True)."
            )
            yield Diagnostic("error", info.path, "ref", text)
        elif isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted():
            text = (
                f"{format_path(info.path)}: its array was deleted, usually by donation through "
                "another Variable. Copy before sharing: "
                "sx.update(copy, jax.tree.map(jnp.copy, sx.state(copy)))."
            )
            yield Diagnostic("error", info.path, "deleted", text)


def _not_gatherable(inventory: TreeInventory) -> Iterator[Diagnostic]:
    """Yields errors about arrays in programs and other processes."""
    for _, info, array in inventory.arrays():
        where = format_path(info.path)
        if isinstance(array, Tracer):
            text = (
                f"{where}: is being traced, and inside a program the compiler places arrays. Call "
                "unshard outside, or constrain the array: sx.constrain(x, (None,) * x.ndim)."
            )
            yield Diagnostic("error", info.path, "traced", text)
        elif isinstance(array, jax.Array) and not (
            array.is_fully_addressable or array.is_fully_replicated
        ):
            text = (
                f"{where}: parts of it are on devices of other processes. Replicate it on "
                "every device first, shard(model, mesh, {}), in all processes; or take NumPy "
                "arrays of it, sx.distributed.gather(model)."
            )
            yield Diagnostic("error", info.path, "not-addressable", text)


def _place(inventory: TreeInventory, model: T, destinations: Sequence[Destinations]) -> T:
    """Places arrays: Variables in place, the rest in a new tree."""
    leaves = inventory.leaves
    copies = _Copies(leaves, destinations)
    recipes = [
        i
        for i, (leaf, to) in enumerate(zip(leaves, destinations, strict=True))
        if leaf.variable is not None and isinstance(leaf.value, Recipe) and to[0] is not None
    ]
    if recipes and is_eager():
        to = [destinations[i][0] for i in recipes]
        arrays = compute_all([leaves[i].value for i in recipes], to)
        for i in recipes:
            copies.start(i, lambda: [next(arrays)])
        copies.finish()
    present: list[int] = []
    dependent: list[int] = []  # lazy values that are computed from other Variables
    plain_values: list[int] = []
    for i, leaf in enumerate(leaves):
        lazy = isinstance(leaf.value, LazyValue)
        (plain_values if leaf.variable is None else dependent if lazy else present).append(i)
    for positions in (present, dependent, plain_values):
        for i in positions:
            # A box without arrays has a destination nevertheless.
            pairs = zip(leaves[i].arrays_in(leaves[i].value), destinations[i], strict=False)
            moves = list(pairs)
            if any(to is not None and not _is_at(array, to) for array, to in moves):
                copies.start(i, lambda moves=moves: [_moved(*move) for move in moves])
            del pairs, moves  # the next copy begins when the old arrays are released
        copies.finish()

    def is_kept(subtree: Subtree) -> bool:
        return isinstance(subtree.value, Object) or not subtree.leaves

    if all(map(is_kept, inventory.subtrees)):
        return model
    return inventory.unflatten(
        lambda subtree: subtree.value if is_kept(subtree) else subtree.filled(copies.values)
    )


class _Copies:
    """Copies under way, in batches."""

    def __init__(self, leaves: Sequence[LeafInfo], destinations: Sequence[Destinations]) -> None:
        self.leaves = leaves
        self.destinations = destinations
        self.values = [leaf.held for leaf in leaves]  # of what is no Variable
        self._batch: list[tuple[int, list[Any]]] = []
        self._bytes = 0

    def start(self, position: int, make: Callable[[], list[PyTree]]) -> None:
        """Makes the arrays of a leaf at their new place."""
        try:
            arrays = make()
        except jax.errors.JaxRuntimeError as error:
            raise self._refused([position], error) from error
        self._batch.append((position, arrays))
        self._bytes += sum(array.nbytes for array in _on_devices(arrays))
        if self._bytes >= BATCH_BYTES:
            self.finish()

    def finish(self) -> None:
        """Waits for the batch and stores it, unless a device refuses."""
        batch, self._batch, self._bytes = self._batch, [], 0
        try:
            jax.block_until_ready([_on_devices(arrays) for _, arrays in batch])
        except jax.errors.JaxRuntimeError as error:
            raise self._refused([position for position, _ in batch], error) from error
        for position, arrays in batch:
            leaf = self.leaves[position]
            if leaf.variable is None:
                self.values[position] = leaf.with_arrays(leaf.held, arrays)
            else:
                leaf.variable._value = leaf.with_arrays(leaf.value, arrays)

    def _refused(self, positions: list[int], error: Exception) -> PartitionError:
        paths = [self.leaves[position].path for position in positions]
        listed = ", ".join(map(format_path, paths[:8])) + (" ..." if len(paths) > 8 else "")
        done, total = self._count()
        return PartitionError(
            f"{listed}: a device refused: {error}\n{done} of {total} values are at their "
            "new place and the others where they were; all are valid. Make room (a State or "
            "another model may hold the old arrays), split by more mesh axes, or use another "
            "memory_kind, and call again: what is in place is not moved a second time."
        )

    def _count(self) -> tuple[int, int]:
        """How many values are at their new place now, and how many have one."""
        # Looked up, not counted: some were there before, and what is no Variable is returned or
        # not at all.
        done = total = 0
        for leaf, row in zip(self.leaves, self.destinations, strict=True):
            pairs = zip(leaf.arrays_in(leaf.value), row, strict=False)
            moves = [(array, to) for array, to in pairs if to is not None]
            if moves:
                total += 1
                done += all(_is_at(array, to) for array, to in moves)
        return done, total


def _on_devices(arrays: Sequence[object]) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(arrays) if not isinstance(leaf, Tracer)]


def _is_at(array: object, to: object) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.sharding == to


def _moved(array, to):
    if to is None or _is_at(array, to):
        return array
    if isinstance(array, LazyValue):
        array = array.compute(to)
    if isinstance(array, Tracer):  # device_put would be a wish that the compiler may ignore
        return lay_out_traced(array, to.spec, to.mesh)
    if _is_at(array, to):
        return array
    if isinstance(array, jax.Array) and array.sharding.memory_kind != to.memory_kind:
        # To another memory first, and then to other devices: JAX fails at both in one step
        # where a device keeps its part ("Memory kind mismatch with buffers").
        array = jax.device_put(array, array.sharding.with_memory_kind(to.memory_kind))
    return jax.device_put(array, to)
