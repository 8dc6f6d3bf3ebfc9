# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring models, optimizers and data positions on any mesh.

``save`` and ``restore`` take a tree: a model, or a tuple such as ``(model, optimizer, batches)``,
or a dict of such. Besides Modules, Variables and arrays it may hold positions: plain dicts of JSON
values, and objects with ``state()`` and ``restore(state)``. ``restore`` writes into the
tree it is given: nothing is built, so a lazy model is never initialised, and each array is read
straight into the shards that it is to have.

``Checkpoints`` is a folder of them, one per step: it saves in the background, keeps the last few,
and knows the latest that is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardax import abstract
from shardax._files import PathExistsError, PathNotFoundError
from shardax.errors import DonationError, ModuleError, ShardaxError
from shardax.extend import PyTree, raise_if_any, stored_value, warn_user
from shardax.partition import resolve_mesh
from shardax.train import checkpoint_files as storage
from shardax.train import errors
from shardax.train.checkpoint_format import (
    Contents,
    ModelArray,
    arrays_of,
    check_fit,
    contents_of,
    describe,
    positions_in_modules,
    stored_arrays,
)
from shardax.train.optimizer_state import StateValue, named_sharding

# A placement by filter, and a kind of memory for all or by filter, as ``sx.shardings`` takes them.
OverridesLike = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
MemoryKinds = str | Mapping[Any, Any] | Iterable[tuple[Any, Any]]


def save(tree: object, path: object, *, extra: object = None) -> None:
    """Saves a checkpoint and returns when it is complete.

    Args:
        tree: What to save; lazy values are materialised.
        path: The checkpoint's directory, which must not exist yet.
        extra: JSON values to keep beside it; ``restore`` returns them.

    Raises:
        PathExistsError: If there is something at ``path``.
        CheckpointError: If the tree holds something that cannot be saved.
        CheckpointWriteError: If it cannot be written.
        ModuleError: If the tree holds values that are only shapes.
        DonationError: If the tree holds arrays that were donated or deleted.

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
    place = storage.as_path(path)

    contents = contents_of(tree)
    arrays, description = _to_store(contents, extra)
    _warn_of_positions(contents)
    writer = storage.Writer()
    try:
        writer.start(place, arrays, description)
        writer.wait()
    except Exception as error:
        raise _write_error(f"Writing the checkpoint {place}", error) from error
    finally:
        writer.close()


def restore(
    tree: PyTree,
    path: Any,
    mesh: Any = None,
    rules: Any = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
    partial: bool = False,
    cast: bool = False,
) -> PyTree:
    """Reads a checkpoint into a tree, in place.

    Args:
        tree: What was saved, or a tree of the same form: lazy, abstract or with values.
        path: The checkpoint's directory.
        mesh: Mesh to lay the arrays out on, by their axes and ``rules``. None: arrays that the tree
            already has keep their sharding, an optimizer's state that was not read yet goes where
            its parameters are, others follow the mesh in scope; without one they go to the default
            device.
        rules: Rules from axis names to mesh axes; None for those in scope.
        overrides: As for ``shardax.shard``; over the mesh given or in scope.
        memory_kind: As for ``shardax.shard``; over the mesh given or in scope.
        partial: Whether to leave out what only the checkpoint has, as when only the model is
            wanted: ``restore((model,), path, partial=True)``.
        cast: Whether floating arrays are converted to the tree's dtypes.

    Returns:
        The ``extra`` that was saved.

    Raises:
        PathNotFoundError: If there is no complete checkpoint at ``path``.
        CheckpointDamagedError: If its files are not those that were written; nothing is changed.
        CheckpointError: If it does not fit the tree; everything that does not is listed, and
            nothing is changed.
        PartitionCheckError: If an array cannot be laid out by the rules; nothing is changed.
        NoMeshError: If overrides or a memory kind are given and there is no mesh.
        PartitionError: If overrides or memory kinds are malformed.
    """
    place = storage.as_path(path)
    description = storage.verify(place)
    where = {"overrides": overrides, "memory_kind": memory_kind}
    return restore_verified(tree, place, description, mesh, rules, where, partial, cast)


def restore_verified(
    tree: PyTree,
    place: Any,
    description: Mapping[str, Any],
    mesh: Any,
    rules: Any,
    where: Mapping[str, Any],  # overrides and memory kind
    partial: bool = False,
    cast: bool = False,
) -> PyTree:
    """Reads a checkpoint with checked files; returns its ``extra``."""
    contents, positions = contents_of(tree, restoring=True), description["positions"]
    stored = stored_arrays(description)
    check_fit(stored, contents, positions, str(place), partial=partial, cast=cast)

    # Where the arrays go is decided before one is read, so that a refusal changes nothing.
    shardings = None
    if mesh is None and not any(value is not None for value in where.values()):
        shardings = _present_layout(contents)
    if shardings is None:  # as ``shard`` would place it
        copy = abstract(contents.objects, mesh, rules, **where)
        copies = arrays_of(_in_order_of(contents.objects, copy))
        shardings = [array.value.sharding for array in copies]

    arrays = storage.read_arrays(
        place,
        [stored[array.path] for array in contents.arrays],
        [array.value.dtype for array in contents.arrays],
        shardings,
    )

    # Positions first: they may be refused, and are put back then; arrays always fit.
    _restore_positions(contents, positions)

    leaves: dict[int, list[Any]] = {}
    for target, array in zip(contents.arrays, arrays, strict=True):
        leaves.setdefault(id(target.variable), []).append(array)
    for variable in {id(target.variable): target.variable for target in contents.arrays}.values():
        treedef = jax.tree.structure(stored_value(variable))
        variable.value = treedef.unflatten(leaves[id(variable)])

    for slot in contents.slots:
        slot.write()

    return description["extra"]


def _write_error(action: str, error: Exception) -> Exception:
    """Returns the error of a failed write, in one line."""
    if isinstance(error, errors.CheckpointWriteError):
        return errors.CheckpointWriteError(f"{action} failed: {error}")
    if isinstance(error, ShardaxError):
        return error
    return errors.CheckpointWriteError(f"{action} failed: {storage.one_line(error)}")


def _warn_of_positions(contents: Contents) -> None:
    """Warns of positions in Modules, once for each line of code."""
    if paths := positions_in_modules(contents.objects):
        warn_user(
            f"Not saved, as a Module holds what has a state() and a restore(): {', '.join(paths)}. "
            f"Positions are saved beside a model: save((model, batches), path), and restored from "
            f"there: restore((model, batches), path)."
        )


def _to_store(
    contents: Contents, extra: object, step: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays to store by path, and the description."""
    absent = [a.path for a in contents.arrays if isinstance(a.value, jax.ShapeDtypeStruct)]
    raise_if_any(
        ModuleError,
        absent,
        f"Cannot save {len(absent)} arrays that are only shapes: ",
        ". Give them numbers first, sx.update(model, state), or restore a checkpoint into it.",
    )

    deleted = [array.path for array in contents.arrays if array.is_deleted]
    raise_if_any(
        DonationError,
        deleted,
        f"{len(deleted)} Variables hold arrays that were donated or deleted: ",
        ". A donated array may be used only once; if two models share arrays, copy one of them "
        "first: sx.clone(model).",
    )

    leaves: dict[int, list[Any]] = {}
    arrays: list[ModelArray] = []
    for array in contents.arrays:
        if id(array.variable) not in leaves:
            leaves[id(array.variable)] = jax.tree.leaves(array.variable.value)
        arrays.append(array._replace(value=leaves[id(array.variable)].pop(0)))

    traced = [array.path for array in arrays if isinstance(array.value, Tracer)]
    raise_if_any(
        errors.CheckpointError,
        traced,
        "Cannot save inside a compiled function: ",
        " have no numbers while it is traced. Save outside.",
        most=4,
    )

    numbers = {
        array.path: jax.random.key_data(array.value) if array.is_key else jnp.asarray(array.value)
        for array in arrays
        if array.value.size > 0
    }
    return numbers, describe(arrays, contents.positions, extra, step)


def _present_layout(contents: Contents) -> list[Any] | None:
    """Returns the shardings of arrays, or None to follow the rules."""
    present = [_present_sharding(array.value) for array in contents.arrays]
    first = next((sharding for sharding in present if sharding is not None), None)
    if first is None:
        return present if resolve_mesh() is None else None
    # One tree is on one mesh: what has no place yet goes where the rest is.
    replicated = NamedSharding(first.mesh, PartitionSpec())
    return [replicated if sharding is None else sharding for sharding in present]


def _present_sharding(value: Any) -> NamedSharding | None:
    """Returns the sharding of an array, or of an optimizer's lazy state."""
    # Which goes where its parameters are, restored or not.
    return value.own_sharding() if isinstance(value, StateValue) else named_sharding(value)


def _in_order_of(tree, copy):
    """Returns a copy with dicts in the order of the original."""
    # JAX sorts them where it rebuilds a dict.
    if isinstance(tree, dict):
        return {key: _in_order_of(value, copy[key]) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_in_order_of(*pair) for pair in zip(tree, copy, strict=True))
    return copy


def _restore_positions(contents: Contents, saved) -> None:
    """Restores all positions, or none."""
    holders = [(holder, saved[path]) for path, holder in contents.positions.items()]

    moved: list[tuple[Any, Any]] = []
    try:
        # A position that refuses puts back those that moved before it.
        for holder, state in holders:
            if not isinstance(holder, dict):
                old_state = deepcopy(holder.state())
                holder.restore(state)
                moved.append((holder, old_state))
    except Exception:
        for holder, old_state in moved:
            holder.restore(old_state)
        raise

    for holder, state in holders:
        if isinstance(holder, dict):
            holder.clear()
            holder.update(state)


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

    def __init__(
        self, directory: object, *, keep: int | None = 3, every: int | None = None
    ) -> None:
        numbers = {"keep": keep, "every": every}
        storage.OPTIONS.integers(**{n: v for n, v in numbers.items() if v is not None})
        self.directory = storage.as_path(directory)
        self.keep = keep
        self.every = every
        self.pinned: set[int] = set()  # steps that stay however many there are
        self._writer: storage.Writer | None = None

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order."""
        return [step for step in self.all_steps() if storage.is_complete(self.path(step))]

    def all_steps(self) -> list[int]:
        """Returns the steps of all checkpoints, also of damaged ones."""
        if not self.directory.is_dir():
            return []
        return sorted(
            int(folder.name)
            for folder in self.directory.iterdir()
            if folder.name.isdecimal() and folder.name.isascii() and folder.is_dir()
        )

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Any:
        """Returns the directory of a step's checkpoint, whether or not it exists."""
        path = self.directory / f"{step:08d}"
        if path.exists() or not self.directory.is_dir():
            return path
        named = (folder for folder in self.directory.iterdir() if folder.name.isdecimal())
        return next((folder for folder in named if int(folder.name) == step), path)

    def due(self, step: int) -> bool:
        """Whether ``every`` divides the step."""
        return self.every is not None and step % self.every == 0

    def save(self, step: int, tree: object, *, extra: object = None) -> None:
        """Saves a checkpoint in the background.

        Args:
            step: Its step, past all steps saved so far.
            tree: As for the function ``save``.
            extra: As for the function ``save``.

        Raises:
            PathExistsError: If there is a checkpoint of this step or a later one.
            CheckpointError: If the step is no number or the tree holds something that cannot be
                saved.
            CheckpointWriteError: If writing failed, this checkpoint or the one before.
            DonationError: If the tree holds arrays that were donated or deleted.
        """
        is_step = type(step) is int and step >= 0
        storage.OPTIONS.check("step", step, is_step, "an integer of at least 0: int(step)")

        self.wait()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise PathExistsError(
                f"Cannot save step {step} in {self.directory}, as step {latest} would stay the "
                f"latest. To give up the later ones: checkpoints.rewind({step - 1})."
            )

        contents = contents_of(tree)
        arrays, description = _to_store(contents, extra, step)
        _warn_of_positions(contents)
        try:
            self._open_writer().start(self.path(step), arrays, description)
        except Exception as error:
            raise self._failed(error) from error

    def _open_writer(self) -> storage.Writer:
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.remove_leftovers()
            self._writer = storage.Writer()
        elif not self.directory.is_dir():
            raise FileNotFoundError(f"{self.directory} was removed or moved")
        return self._writer

    def remove_leftovers(self) -> None:
        """Removes half-written and half-removed files of killed processes."""
        if jax.process_index() == 0:
            storage.remove_leftovers(self.directory)

    def _failed(self, error: Exception) -> Exception:
        steps = self.steps()
        last_complete = f"The last complete one is {steps[-1]}." if steps else "None is complete."
        failure = _write_error(f"Writing a checkpoint in {self.directory}", error)
        if isinstance(failure, errors.CheckpointWriteError):
            hint = "Save again once the cause is gone (a full disk, a lost folder)."
            return errors.CheckpointWriteError(f"{failure}. {last_complete} {hint}")
        return failure

    def wait(self) -> None:
        """Waits for running saves, and removes checkpoints past ``keep``.

        Raises:
            CheckpointWriteError: If writing it failed.
        """
        if self._writer is None:
            return
        try:
            self._writer.wait()
            if self.keep is not None:
                self._remove([s for s in self.steps()[: -self.keep] if s not in self.pinned])
        except Exception as error:
            raise self._failed(error) from error

    def rewind(self, step: int) -> None:
        """Removes the checkpoints past a step, to go on from there."""
        self.wait()
        self._remove([later for later in self.all_steps() if later > step])

    def _remove(self, steps: Sequence[int]) -> None:
        if jax.process_index() == 0:
            for step in steps:
                storage.remove(self.path(step))

    def restore(
        self,
        tree: PyTree,
        step: int | None = None,
        mesh: Any = None,
        rules: Any = None,
        **options: Any,
    ) -> PyTree:
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
            PathNotFoundError: If there is no complete checkpoint of that step, or none at all.
            CheckpointDamagedError: If its files are not those that were written; nothing is
                changed.
        """
        self.wait()
        chosen = max(self.all_steps(), default=None) if step is None else step
        if chosen is None:
            message = f"There is no complete checkpoint in {self.directory}."
            raise PathNotFoundError(message)
        return restore(tree, self.path(chosen), mesh, rules, **options)

    def close(self) -> None:
        """Waits for running saves and frees the background threads."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        if kind is not None and self._writer is not None and jax.process_count() > 1:
            # The others are elsewhere: to wait for them would hide what happened.
            self._writer.abandon()
            self._writer = None
        self.close()
