# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saving a model's values and bringing them back, on whatever mesh.

``save`` and ``restore`` take a *tree*: a model, or a tuple such as ``(model, optimizer, batches)``,
or a dict of such. Besides Modules and Variables it may hold positions (see ``checkpoint_format``).
``restore`` writes into the tree it is given: nothing is built, so a lazy model is never
initialised, and each array is read straight into the shards that it is to have.

``Checkpoints`` is a folder of them, one per step: it saves in the background, keeps the last few,
and knows the latest that is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.init.lazy import LazyValue
from shardax.partition.mesh import resolve_mesh
from shardax.partition.overrides import MemoryKinds, OverridesLike
from shardax.partition.specs import abstract
from shardax.train import checkpoint_format as storage
from shardax.train.checkpoint_format import (
    Contents,
    Slot,
    check_fit,
    check_saveable,
    contents_of,
    describe,
    records_in,
)
from shardax.train.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointValueError,
    CheckpointWriteError,
)


def save(tree: Any, path: Any, *, extra: Any = None) -> None:
    """Saves a checkpoint and returns when it is complete.

    Args:
        tree: What to save; lazy values are materialised.
        path: The checkpoint's directory, which must not exist yet.
        extra: JSON values to keep beside it; ``restore`` returns them.

    Raises:
        CheckpointExistsError: If there is something at ``path``.
        CheckpointValueError: If the tree holds something that cannot be saved.
        AbstractValueError: If the tree holds values that are only shapes.

    Example:
        >>> import tempfile, jax.numpy as jnp, shardax as sx
        >>> class Line(sx.Module):
        ...     def __init__(self, slope):
        ...         self.slope = sx.Param(jnp.float32(slope))
        >>> folder = tempfile.TemporaryDirectory()
        >>> save(Line(2.0), folder.name + "/line", extra={"note": "steep"})
        >>> line = Line(0.0)
        >>> restore(line, folder.name + "/line"), float(line.slope)
        ({'note': 'steep'}, 2.0)
        >>> folder.cleanup()
    """
    contents = contents_of(tree)
    arrays, description = _to_store(contents, extra)
    storage.write(storage.as_path(path), arrays, description)


def restore(
    tree: Any,
    path: Any,
    mesh: Any = None,
    rules: Any = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
    partial: bool = False,
    cast: bool = False,
) -> Any:
    """Reads a checkpoint into a tree, in place.

    Args:
        tree: What was saved, or a tree of the same form: lazy, abstract or with values.
        path: The checkpoint's directory.
        mesh: Mesh to lay the arrays out on, by their axes and ``rules``. None: arrays that the tree
            already has keep their sharding, others follow the mesh in scope; without one they go to
            the default device.
        rules: Rules from axis names to mesh axes; None for those in scope.
        overrides: As for ``shardax.shard``; over the mesh given or in scope.
        memory_kind: As for ``shardax.shard``; over the mesh given or in scope.
        partial: Whether to leave out what only the checkpoint has, as when only the model is
            wanted: ``restore((model,), path, partial=True)``.
        cast: Whether floating arrays are converted to the tree's dtypes.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointNotFoundError: If there is no complete checkpoint at ``path``.
        CheckpointMismatchError: If it does not fit the tree; everything that does not is listed,
            and nothing is changed.
        PartitionCheckError: If an array cannot be laid out by the rules; nothing is changed.
        NoMeshError: If overrides or a memory kind are given and there is no mesh.
        OverrideError: If overrides or memory kinds are malformed.
    """
    place = storage.as_path(path)
    contents = contents_of(tree)
    description = storage.read_description(place)
    records = records_in(description, str(place))
    positions = description["positions"]
    check_fit(records, contents, positions, str(place), partial=partial, cast=cast)
    by_rules = mesh is not None or overrides is not None or memory_kind is not None
    places = None if by_rules else _found_layout(contents)
    if places is None:
        places = _wanted_layout(contents, mesh, rules, overrides, memory_kind)
    by_path = {record.path: record for record in records}
    arrays = storage.read_arrays(
        place,
        [by_path[slot.path] for slot in contents.slots],
        [slot.value.dtype for slot in contents.slots],
        places,
    )
    _go_to_positions(contents, positions)
    _put(contents.slots, arrays)
    return description["extra"]


def _to_store(contents: Contents, extra: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays to store by path, and the description."""
    check_saveable(contents.slots)
    values: dict[int, list[Any]] = {}
    slots = []
    for slot in contents.slots:
        if id(slot.variable) not in values:
            values[id(slot.variable)] = jax.tree.leaves(slot.variable.value)
        slots.append(slot._replace(value=values[id(slot.variable)].pop(0)))
    traced = [slot.path for slot in slots if isinstance(slot.value, Tracer)]
    if traced:
        raise CheckpointValueError(
            f"Cannot save inside a compiled function: {', '.join(traced[:4])} have no numbers "
            "while it is traced. Save outside."
        )
    arrays = {slot.path: _data(slot) for slot in slots if slot.value.size > 0}
    return arrays, describe(slots, contents.positions, extra)


def _data(slot: Slot) -> Any:
    return jax.random.key_data(slot.value) if slot.is_key else jnp.asarray(slot.value)


def _found_layout(contents: Contents) -> list[Any] | None:
    """Says where each array goes by where it is, None for the default device; None to ask rules."""
    present = [_present_sharding(slot) for slot in contents.slots]
    known = next((item for item in present if item is not None), None)
    if known is None:
        return present if resolve_mesh() is None else None
    # One tree lives on one mesh: what has no place yet goes where the rest is.
    replicated = NamedSharding(known.mesh, PartitionSpec())
    return [replicated if item is None else item for item in present]


def _wanted_layout(contents: Contents, mesh: Any, rules: Any, overrides: Any, kinds: Any) -> Any:
    """Says where each array goes by its axes, as ``shard`` would place it."""
    copy = abstract(contents.objects, mesh, rules, overrides=overrides, memory_kind=kinds)
    return [slot.value.sharding for slot in contents_of(copy).slots]


def _present_sharding(slot: Slot) -> NamedSharding | None:
    value = slot.value
    if isinstance(value, (LazyValue, Tracer)):
        return None
    sharding = getattr(value, "sharding", None)
    known = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if known else None


def _go_to_positions(contents: Contents, saved: Any) -> None:
    """Puts positions back, first those that may refuse: then nothing has changed."""
    holders = [(holder, saved[path]) for path, holder in contents.positions.items()]
    for holder, state in holders:
        if not isinstance(holder, dict):
            holder.restore(state)
    for holder, state in holders:
        if isinstance(holder, dict):
            holder.clear()
            holder.update(state)


def _put(slots: Sequence[Slot], arrays: Sequence[jax.Array]) -> None:
    """Writes arrays into the Variables that they were read for."""
    leaves: dict[int, list[Any]] = {}
    for slot, array in zip(slots, arrays, strict=True):
        leaves.setdefault(id(slot.variable), []).append(array)
    for slot in slots:
        found = leaves.pop(id(slot.variable), None)
        if found is not None:
            treedef = jax.tree.structure(slot.variable._here()._value)
            slot.variable.value = treedef.unflatten(found)


class Checkpoints:
    """A folder of checkpoints by step.

    ``save`` returns as soon as the values are copied and writes in the background; a further save
    waits for the one before, so none is skipped. An error in the background is raised by the next
    ``save``, ``wait`` or ``close``.

    Args:
        directory: The folder; made when first saved into.
        keep: How many checkpoints to keep; None for all.
        every: Steps between checkpoints, for ``due``; None for never.

    Example:
        >>> import tempfile, jax.numpy as jnp, shardax as sx
        >>> folder = tempfile.TemporaryDirectory()
        >>> weight = sx.Param(jnp.zeros(2))
        >>> with Checkpoints(folder.name, keep=2, every=10) as checkpoints:
        ...     for step in range(1, 41):
        ...         weight += 1
        ...         if checkpoints.due(step):
        ...             checkpoints.save(step, weight)
        >>> checkpoints.steps()
        [30, 40]
        >>> _ = checkpoints.restore(weight, step=30)
        >>> weight.value.tolist()
        [30.0, 30.0]
        >>> folder.cleanup()
    """

    def __init__(self, directory: Any, *, keep: int | None = 3, every: int | None = None) -> None:
        for name, number in (("keep", keep), ("every", every)):
            if number is not None and (type(number) is not int or number < 1):
                raise CheckpointValueError(
                    f"{name}={number!r} must be an integer of at least 1, or None."
                )
        self.directory = storage.as_path(directory)
        self.keep = keep
        self.every = every
        self._writer: Any = None

    # --- what is there ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order."""
        if not self.directory.exists():
            return []
        numbered = [item for item in self.directory.iterdir() if item.name.isdecimal()]
        return sorted(int(item.name) for item in numbered if storage.is_complete(item))

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Any:
        """Returns the directory of a step's checkpoint, whether or not it exists."""
        return self.directory / f"{step:08d}"

    def due(self, step: int) -> bool:
        """Whether ``every`` divides the step."""
        return self.every is not None and step % self.every == 0

    # --- saving ----------------------------------------------------------------------------------

    def save(self, step: int, tree: Any, *, extra: Any = None) -> None:
        """Saves a checkpoint in the background.

        Args:
            step: Its step, past all steps saved so far.
            tree: As for the function ``save``.
            extra: As for the function ``save``.

        Raises:
            CheckpointExistsError: If there is a checkpoint of this step or a later one.
            CheckpointValueError: If the step is no number or the tree holds something that cannot
                be saved.
        """
        if type(step) is not int or step < 0:
            raise CheckpointValueError(
                f"step={step!r} must be an integer of at least 0: int(step)."
            )
        self.wait()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise CheckpointExistsError(
                f"Cannot save step {step} in {self.directory}: step {latest} is there already, and "
                "it would stay the latest. To go on from an earlier step, give up the later ones: "
                f"checkpoints.rewind({step - 1})."
            )
        arrays, description = _to_store(contents_of(tree), extra)
        storage.write(self.path(step), arrays, description, self._open_writer())

    def _open_writer(self) -> Any:
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._writer = storage.make_writer()
        return self._writer

    def _remove_leftovers(self) -> None:
        """Removes what a killed process left half written or half removed."""
        if jax.process_index() == 0:
            for item in self.directory.iterdir():
                if storage.TEMPORARY in item.name or item.name.endswith(storage.DELETED):
                    storage.remove_tree(item)

    def wait(self) -> None:
        """Waits until what was saved is complete, and removes checkpoints past ``keep``.

        Raises:
            CheckpointWriteError: If writing it failed.
        """
        if self._writer is None:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            latest = self.latest()
            kept = "None is complete." if latest is None else f"The last complete one is {latest}."
            raise CheckpointWriteError(
                f"Writing a checkpoint in {self.directory} failed: {type(error).__name__}: "
                f"{error}. {kept} Once the cause is gone (a full disk, a folder that was removed), "
                "save again."
            ) from error
        if self.keep is not None:
            self._remove(self.steps()[: -self.keep])

    def rewind(self, step: int) -> None:
        """Removes the checkpoints past a step, to go on from there."""
        self.wait()
        self._remove([later for later in self.steps() if later > step])

    def _remove(self, steps: Sequence[int]) -> None:
        if jax.process_index() == 0:
            for step in steps:
                storage.remove(self.path(step))

    # --- restoring -------------------------------------------------------------------------------

    def restore(
        self,
        tree: Any,
        step: int | None = None,
        mesh: Any = None,
        rules: Any = None,
        **options: Any,
    ) -> Any:
        """Reads a checkpoint into a tree, in place; see the function ``restore``.

        Args:
            tree: As there.
            step: Which; None for the latest.
            mesh: As there.
            rules: As there.
            **options: ``overrides``, ``memory_kind``, ``partial`` and ``cast``, as there.

        Returns:
            The ``extra`` that was saved.

        Raises:
            CheckpointNotFoundError: If there is no complete checkpoint of that step, or none at
                all.
        """
        self.wait()
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise CheckpointNotFoundError(f"There is no complete checkpoint in {self.directory}.")
        return restore(tree, self.path(chosen), mesh, rules, **options)

    def close(self) -> None:
        """Waits for what is being written and frees the background threads."""
        self.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
