# SPDX-License-Identifier: Apache-2.0
"""Placement of models over the devices of a mesh.

Everything that can be wrong is found before anything is moved. A lazy value is computed straight
into its shards. An array that has its new sharding already is left as it is, so that a second
``shard`` by the same rules moves nothing. Any other array is moved, and the old one freed, before
the next is touched, so that no device holds two models. JAX copies in the background, so an array
counts as moved when its copy is *ready*: then its holder gets the copy, the old array is released
(not deleted, since a State or a clone may hold it too), and only then does the next copy begin.
Small arrays go in batches, because waiting for each would take longer than copying it. A device
without room leaves every holder with a valid array: earlier batches are at their new place, the
others at their old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from shardax._core._jax import Tracer
from shardax._core.frames import check_trace, check_unlocked, is_eager, is_ref, is_writable
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.init.lazy import LazyValue, Recipe, compute_all
from shardax._core.object import Object
from shardax._core.threads import Stamp, in_one_step
from shardax._core.values import is_deleted
from shardax.partition import errors, findings
from shardax.partition.constraints import lay_out_traced
from shardax.partition.errors import Diagnostic, PartitionError, raise_on_errors
from shardax.partition.mesh import ABSTRACT, AnyMesh, check_devices, resolve_mesh
from shardax.partition.rules import RulesLike
from shardax.partition.tree.inventory import LeafInfo, Subtree, TreeInventory
from shardax.partition.tree.layout import TreeLayout
from shardax.partition.tree.misspelt_names import warn_of_names
from shardax.partition.tree.overrides import MemoryKinds, OverridesLike

T = TypeVar("T")

Destinations = Sequence[Sharding | None]
"""For each array of a leaf its new sharding, or None for one that stays."""

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
            ``shardax.partition.tree.overrides``). ``{sx.OptState: {"embed": "data"}}`` splits an
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
        ConcurrentWriteError: If another thread wrote a Variable meanwhile, which keeps what was
            written; the others are placed.

    Example:
        >>> import jax, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (4, 8)), axes=("embed", "mlp"))
        >>> shard(weight, mesh, {"mlp": "model"}) is weight, weight.sharding.spec
        (True, P(None, 'model'))
    """
    resolve_mesh(mesh, for_arrays_of="shard")

    inventory = TreeInventory(model)
    layout = TreeLayout(inventory, mesh, rules, overrides, memory_kind, function="shard")
    shardings = layout.shardings()
    for used_mesh in {sharding.mesh for of_leaf in shardings for sharding in of_leaf}:
        check_devices(used_mesh, "shard", ABSTRACT)

    layout.checked(list(_not_placeable(inventory)))
    _check_writable(inventory)
    warn_of_names(layout)
    return _move_leaves(inventory, model, shardings)


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
    sharding = SingleDeviceSharding(_one_device(device))
    inventory = TreeInventory(model)
    raise_on_errors([*_not_placeable(inventory), *_not_gatherable(inventory)])
    _check_writable(inventory)

    destinations: list[Destinations] = []
    for leaf in inventory.leaves:
        arrays = leaf.arrays_in(leaf.value)
        destinations.append([None if isinstance(x, LazyValue) else sharding for x in arrays])
    return _move_leaves(inventory, model, destinations)


def _one_device(device: object) -> jax.Device:
    """Returns the device given, or JAX's default one for None."""
    if isinstance(device, jax.Device):
        return device
    if device is None:
        default = getattr(jax.config, "jax_default_device", None)  # a device or a platform's name
        if isinstance(default, jax.Device):
            return default
        return jax.local_devices(backend=default)[0]
    raise errors.not_a_device(device)


def _check_writable(inventory: TreeInventory) -> None:
    """Raises if a Variable cannot be written here."""
    for leaf in inventory.leaves:
        if leaf.variable is not None and not is_writable(leaf.variable):
            description = f"to the {type(leaf.variable).__name__} at {format_path(leaf.path)}"
            check_unlocked(leaf.variable, description)
            check_trace(leaf.variable, description)


def _not_placeable(inventory: TreeInventory) -> Iterator[Diagnostic]:
    """Yields errors about layers of a stack, and abstract or donated values."""
    for leaf in inventory.leaves:
        stack = None if leaf.variable is None else leaf.variable._parent
        if stack is not None:
            yield findings.layer_view(leaf.path, type(stack).__name__)

    for _, info, array in inventory.arrays():
        if isinstance(array, jax.ShapeDtypeStruct):
            yield findings.abstract_array(info.path, array)
        elif is_ref(array):
            yield findings.array_in_ref(info.path)
        elif is_deleted(array):
            yield findings.deleted_array(info.path)


def _not_gatherable(inventory: TreeInventory) -> Iterator[Diagnostic]:
    """Yields errors about arrays in programs and other processes."""
    for _, info, array in inventory.arrays():
        if isinstance(array, Tracer):
            yield findings.traced_array(info.path)
        elif isinstance(array, jax.Array) and not (
            array.is_fully_addressable or array.is_fully_replicated
        ):
            yield findings.not_addressable(info.path)


def _move_leaves(inventory: TreeInventory, model: T, destinations: Sequence[Destinations]) -> T:
    """Moves the arrays of all leaves: of Variables in place, of others into a new tree.

    Args:
        inventory: The inventory of ``model``.
        model: The tree.
        destinations: The new shardings of each leaf.
    """
    recipes: list[int] = []
    present: list[int] = []
    lazy: list[int] = []
    plain: list[int] = []
    for index, leaf in enumerate(inventory.leaves):
        if leaf.variable is None:
            plain.append(index)
        elif isinstance(leaf.value, Recipe) and destinations[index][0] is not None:
            recipes.append(index)
        elif isinstance(leaf.value, LazyValue):
            lazy.append(index)
        else:
            present.append(index)

    # Initializers, several in one program. Lazy values that are computed from other Variables come
    # after these, and last what is no Variable.
    copies = _Copies(inventory.leaves, destinations)
    if is_eager():
        copies.compute(recipes)
    for indices in (present, recipes, lazy, plain):
        for index in indices:
            copies.start_if_needed(index)
        copies.finish()
    if copies.written_elsewhere:
        raise errors.written_while_placed(copies.written_elsewhere)

    # Objects hold their new values; anything else is in a new tree, if there is any.
    if all(_stays_in_tree(subtree) for subtree in inventory.subtrees):
        return model

    def with_moved_values(subtree: Subtree) -> PyTree:
        if _stays_in_tree(subtree):
            return subtree.value
        return subtree.filled(copies.plain_values)

    return inventory.unflatten(with_moved_values)


def _stays_in_tree(subtree: Subtree) -> bool:
    return isinstance(subtree.value, Object) or not subtree.leaves


class _Copies:
    """Copies under way, in batches.

    Attributes:
        plain_values: The value of each leaf that is no Variable, at its new place.
        written_elsewhere: Paths of Variables that another thread wrote after their value was read.
            They keep what it wrote.
    """

    def __init__(self, leaves: Sequence[LeafInfo], destinations: Sequence[Destinations]) -> None:
        self.leaves = leaves
        self.destinations = destinations
        self.plain_values = [leaf.plain_value for leaf in leaves]
        self.written_elsewhere: list[Path] = []
        # The last write of each Variable, when its value was read.
        self._stamps: dict[int, Stamp | None] = {}
        self._batch: list[tuple[int, list[jax.Array]]] = []
        self._batch_bytes = 0

    def compute(self, recipes: Sequence[int]) -> None:
        """Computes the values of leaves with initializers at their new place."""
        for index in recipes:
            self.note_read(index)
        values = [self.leaves[index].value for index in recipes]
        arrays = compute_all(values, [self.destinations[index][0] for index in recipes])
        for index in recipes:
            self.start(index, lambda: [next(arrays)])
        self.finish()

    def start_if_needed(self, index: int) -> None:
        """Starts to copy the arrays of a leaf that are not where they should be."""
        self.note_read(index)
        moves = self._moves(index)
        if any(not _is_at(array, sharding) for array, sharding in moves if sharding is not None):
            self.start(index, lambda: [_moved(array, sharding) for array, sharding in moves])

    def note_read(self, index: int) -> None:
        """Notes that the value of a leaf is about to be read, so that a later write is noticed."""
        variable = self.leaves[index].variable
        if variable is not None:
            self._stamps[index] = variable._stamp

    def start(self, index: int, make_arrays: Callable[[], list[Any]]) -> None:
        """Makes the arrays of a leaf at their new place."""
        try:
            arrays = make_arrays()
        except jax.errors.JaxRuntimeError as error:
            raise self._refused([index], error) from error

        self._batch.append((index, arrays))
        self._batch_bytes += sum(array.nbytes for array in _concrete_arrays(arrays))
        if self._batch_bytes >= BATCH_BYTES:
            self.finish()

    def finish(self) -> None:
        """Waits for the batch and stores it, unless a device refuses."""
        batch = self._batch
        self._batch, self._batch_bytes = [], 0
        try:
            jax.block_until_ready([_concrete_arrays(arrays) for _, arrays in batch])
        except jax.errors.JaxRuntimeError as error:
            raise self._refused([index for index, _ in batch], error) from error

        for index, arrays in batch:
            leaf = self.leaves[index]
            if leaf.variable is None:
                self.plain_values[index] = leaf.with_arrays(leaf.plain_value, arrays)
                continue

            with in_one_step():
                if leaf.variable._stamp is self._stamps[index]:
                    leaf.variable._value = leaf.with_arrays(leaf.value, arrays)
                else:
                    self.written_elsewhere.append(leaf.path)

    def _moves(self, index: int) -> list[tuple[Any, Sharding | None]]:
        """Returns the present arrays of a leaf, each with its new sharding."""
        leaf = self.leaves[index]
        # A box without arrays has a destination nevertheless.
        return list(zip(leaf.arrays_in(leaf.value), self.destinations[index], strict=False))

    def _refused(self, indices: Sequence[int], error: Exception) -> PartitionError:
        """Returns the error of a device without room."""
        # Looked up, not counted: some were there before, and what is no Variable is returned or
        # not at all.
        done = total = 0
        for index in range(len(self.leaves)):
            moves = [move for move in self._moves(index) if move[1] is not None]
            if moves:
                total += 1
                done += all(_is_at(array, sharding) for array, sharding in moves)

        return errors.device_refused(
            [self.leaves[index].path for index in indices], done, total, error
        )


def _concrete_arrays(arrays: Sequence[PyTree]) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(arrays) if not isinstance(leaf, Tracer)]


def _is_at(array: Leaf, sharding: Sharding | None) -> bool:
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return False
    return array.sharding == sharding


def _moved(array: Leaf, sharding: Sharding | None) -> Leaf:
    """Returns an array, or a lazy value's, at its new place."""
    if sharding is None or _is_at(array, sharding):
        return array

    if isinstance(array, LazyValue):
        array = array.compute(sharding)
    if isinstance(array, Tracer):  # device_put would be a wish that the compiler may ignore
        assert isinstance(sharding, NamedSharding)
        return lay_out_traced(array, sharding.spec, sharding.mesh)
    if _is_at(array, sharding):
        return array

    if isinstance(array, jax.Array) and array.sharding.memory_kind != sharding.memory_kind:
        # To another memory first, and then to other devices: JAX fails at both in one step
        # where a device keeps its part ("Memory kind mismatch with buffers").
        memory_kind: Any = sharding.memory_kind
        array = jax.device_put(array, array.sharding.with_memory_kind(memory_kind))
    return jax.device_put(array, sharding)
