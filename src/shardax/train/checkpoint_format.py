# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds: arrays by path, positions, and a description of both.

A *slot* is one array of a model as a checkpoint sees it: the text of its path, and the Variable
that holds it. A Variable reached twice is one slot, so tied weights are stored once. A *position*
is a part of the tree that is not made of arrays: a plain dict of JSON values, or an object with
``state()`` and ``restore(state)``, such as an iterator over data. A *record* is what the
description says of one stored array. Comparing records with slots, before any array is read, finds
everything that does not fit.

Checkpoints on disk, by orbax-checkpoint.

A checkpoint is one directory with two items: ``arrays`` (a flat mapping from path to array, sharded
arrays written by the processes that hold them) and ``description`` (JSON). It is written under a
temporary name and renamed when complete, so a directory with the final name is a whole checkpoint;
a process that dies on the way leaves only a temporary one, which nothing reads.

This is the only file that knows orbax.
"""

from __future__ import annotations

import difflib
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.errors import AbstractValueError
from shardax._core.frames import local, resolve
from shardax._core.frozen import FrozenVariable
from shardax._core.graph.paths import Path, format_path
from shardax._core.object import Object
from shardax._core.state.split_merge import iter_variables
from shardax._core.variable import Variable
from shardax.train.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointValueError,
)

# --- Checkpoint format ---

FORMAT_VERSION = 1
"""Version of the description; a reader refuses versions that it does not know."""


class Slot(NamedTuple):
    """One array of a model.

    Attributes:
        path: Text of its path, which names it in the checkpoint.
        place: Path of the Variable.
        variable: The Variable that holds it.
        value: The array, or its stand-in while it is lazy or abstract.
    """

    path: str
    place: Path
    variable: Variable[Any]
    value: Any

    @property
    def dtype(self) -> str:
        """Name of the dtype; for random keys such as ``key<fry>``."""
        return str(self.value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.value.shape)

    @property
    def is_key(self) -> bool:
        """Whether it holds random keys, which are stored as their integers."""
        return jnp.issubdtype(self.value.dtype, jax.dtypes.prng_key)


class Contents(NamedTuple):
    """A tree taken apart: its arrays, and its positions by the text of their paths.

    Attributes:
        objects: The tree with None in place of positions.
        slots: Its arrays.
        positions: Its positions.
    """

    objects: Any
    slots: list[Slot]
    positions: dict[str, Any]


class Record(NamedTuple):
    """What the description says of one stored array.

    Attributes:
        path: Text of its path.
        shape: Its shape (of random keys, without the integers inside).
        dtype: Name of its dtype.
        axes: Axis names of its Variable, or None.
        key: Implementation of the random keys that it holds, or None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[Any, ...] | None = None
    key: str | None = None

    @property
    def is_stored(self) -> bool:
        """Whether there are numbers to store; an array of no elements is its description."""
        return math.prod(self.shape) > 0


# --- taking a tree apart --------------------------------------------------------------------------


def contents_of(tree: Any) -> Contents:
    """Takes a tree apart.

    Args:
        tree: A Module, Variable or tracked container; a position; or a tuple, list or dict of
            these.

    Raises:
        CheckpointValueError: If a part of the tree is none of these.
    """
    slots: list[Slot] = []
    positions: dict[str, Any] = {}
    objects = _without_positions(tree, (), positions)
    for path, variable in iter_variables(objects):
        value = resolve(variable, local.frame)._value
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            text = format_path(path) + jax.tree_util.keystr(keys)
            slots.append(Slot(text, path, variable, leaf))
    return Contents(objects, slots, positions)


def _without_positions(tree: Any, path: Path, positions: dict[str, Any]) -> Any:
    """Returns the tree with None in place of positions, which are put into ``positions``."""
    if isinstance(tree, Object):
        return tree
    if _is_stateful(tree) or (isinstance(tree, dict) and not any(_parts(tree))):
        positions[format_path(path)] = tree
        return None
    if isinstance(tree, (tuple, list)):
        return tuple(_without_positions(item, (*path, i), positions) for i, item in enumerate(tree))
    if isinstance(tree, dict):
        items = tree.items()
        return {key: _without_positions(item, (*path, key), positions) for key, item in items}
    raise CheckpointValueError(
        f"Cannot save or restore {tree!r} at {format_path(path)}, of type {type(tree).__name__}. A "
        "checkpoint's tree is made of Modules and Variables, positions (dicts of JSON values, or "
        "objects with state() and restore()), and tuples, lists or dicts of these. Put an array "
        "into a Variable, and a number or text into extra=."
    )


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state", None)) and callable(getattr(value, "restore", None))


def _parts(value: Any) -> Iterator[Any]:
    """Yields the objects, arrays and stateful things in plain containers."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, (Object, jax.Array, np.ndarray)) or _is_stateful(value):
        yield value


# --- describing -----------------------------------------------------------------------------------


def record_of(slot: Slot) -> Record:
    """Describes an array that is about to be stored."""
    key = str(jax.random.key_impl(slot.value)) if slot.is_key else None
    return Record(slot.path, slot.shape, slot.dtype, slot.variable.axes, key)


def describe(slots: Sequence[Slot], positions: Mapping[str, Any], extra: Any) -> dict[str, Any]:
    """Makes the description that is stored beside the arrays, of JSON values only.

    Args:
        slots: The arrays.
        positions: Positions by path.
        extra: What the caller wants kept.

    Raises:
        CheckpointValueError: If a position or ``extra`` would not come back from JSON as it is.
    """
    saved = {
        path: position.state() if _is_stateful(position) else position
        for path, position in positions.items()
    }
    for path, position in saved.items():
        check_json(position, f"The position at {path}")
    check_json(extra, "extra")
    return {
        "format": "shardax",
        "version": FORMAT_VERSION,
        "arrays": [_as_json(record_of(slot)) for slot in slots],
        "positions": saved,
        "extra": extra,
    }


def _as_json(record: Record) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "path": record.path,
        "shape": list(record.shape),
        "dtype": record.dtype,
    }
    if record.axes is not None:
        entry["axes"] = [
            name if name is None or isinstance(name, str) else repr(name) for name in record.axes
        ]
    if record.key is not None:
        entry["key"] = record.key
    return entry


def records_in(description: Mapping[str, Any], where: str) -> list[Record]:
    """Reads the records of a description.

    Raises:
        CheckpointValueError: If the description has another format or a newer version.
    """
    if description.get("format") != "shardax" or description.get("version") != FORMAT_VERSION:
        raise CheckpointValueError(
            f"The checkpoint {where} has the format {description.get('format')!r}, version "
            f"{description.get('version')!r}; this shardax reads 'shardax', version "
            f"{FORMAT_VERSION}. Read it with the version that wrote it."
        )
    return [
        Record(
            entry["path"],
            tuple(entry["shape"]),
            entry["dtype"],
            tuple(entry["axes"]) if "axes" in entry else None,
            entry.get("key"),
        )
        for entry in description["arrays"]
    ]


def check_json(value: Any, what: str) -> None:
    """Raises if a value would not come back from JSON as it is.

    Args:
        value: What is to be saved.
        what: Its name for the message.

    Raises:
        CheckpointValueError: If something in it is neither None, bool, int, float, str, nor a list
            or str-keyed dict of such.
    """
    if type(value) in (bool, int, float, str, type(None)):
        return
    if type(value) is list:
        for position, item in enumerate(value):
            check_json(item, f"{what}[{position}]")
    elif type(value) is dict and all(type(key) is str for key in value):
        for key, item in value.items():
            check_json(item, f"{what}[{key!r}]")
    else:
        raise CheckpointValueError(
            f"{what} is {value!r} of type {type(value).__name__}, which would not come back from "
            "JSON as it is. Use None, bool, int, float, str, lists, and dicts with str keys: "
            "int(x) for a NumPy integer, list(x) for a tuple."
        )


def check_saveable(slots: Sequence[Slot]) -> None:
    """Raises if an array has no numbers to save.

    Raises:
        AbstractValueError: If Variables are abstract; all are listed.
    """
    absent = [slot.path for slot in slots if isinstance(slot.value, jax.ShapeDtypeStruct)]
    if absent:
        raise AbstractValueError(
            f"Cannot save {len(absent)} arrays that are only shapes: {', '.join(absent[:8])}. "
            f"Materialise the model first (sx.shard, or restore a checkpoint into it)."
        )


# --- comparing ------------------------------------------------------------------------------------


def check_fit(
    records: Sequence[Record],
    contents: Contents,
    positions: Mapping[str, Any],
    where: str,
    *,
    partial: bool,
    cast: bool,
) -> None:
    """Raises if a checkpoint does not fit a tree.

    Args:
        records: What the checkpoint holds.
        contents: The tree.
        positions: The checkpoint's positions.
        where: The checkpoint, for the message.
        partial: Whether the checkpoint may hold more than the tree.
        cast: Whether floating dtypes may differ.

    Raises:
        CheckpointMismatchError: Lists everything missing, unexpected, of another shape or dtype,
            and frozen.
    """
    stored = {record.path: record for record in records}
    wanted = {slot.path: slot for slot in contents.slots}
    missing = [path for path in wanted if path not in stored]
    unexpected = [] if partial else [path for path in stored if path not in wanted]
    shapes, dtypes = [], []
    for path in wanted.keys() & stored.keys():
        slot, record = wanted[path], stored[path]
        if slot.shape != record.shape:
            shapes.append(f"{path}: {slot.shape}, stored {record.shape}")
        if slot.dtype != record.dtype and not (cast and _both_floating(slot, record)):
            dtypes.append(f"{path}: {slot.dtype}, stored {record.dtype}")
    frozen = [slot.path for slot in contents.slots if isinstance(slot.variable, FrozenVariable)]
    lost = [path for path in contents.positions if path not in positions]
    sections = [
        ("not in the checkpoint", [path + _near(path, unexpected or stored) for path in missing]),
        ("in the checkpoint only", [path + _near(path, missing) for path in unexpected]),
        ("of another shape", sorted(shapes)),
        ("of another dtype", sorted(dtypes)),
        ("frozen, so nothing can be read into it (restore into sx.thaw(tree))", frozen),
        ("positions not in the checkpoint", lost),
        (
            "positions in the checkpoint only",
            [] if partial else [path for path in positions if path not in contents.positions],
        ),
    ]
    if any(lines for _, lines in sections):
        raise CheckpointMismatchError(_mismatch(sections, where, len(stored), len(wanted)))


def _mismatch(
    sections: Sequence[tuple[str, Sequence[str]]], where: str, stored: int, wanted: int
) -> str:
    lines = [
        (
            f"The checkpoint {where} ({stored} arrays) does not fit what it is to be restored into "
            f"({wanted} arrays); nothing was changed."
        )
    ]
    for title, entries in sections:
        if entries:
            lines += [f"{len(entries)} {title}:", *(f"  {entry}" for entry in entries)]
    lines.append(
        "Restore into a model of the same configuration. To leave out what only the checkpoint "
        "has: partial=True. To convert floating dtypes: cast=True."
    )
    return "\n".join(lines)


def _near(path: str, others: Any) -> str:
    found = difflib.get_close_matches(path, list(others), n=1, cutoff=0.8)
    return f" (near: {found[0]})" if found else ""


def _both_floating(slot: Slot, record: Record) -> bool:
    if slot.is_key or record.key is not None:
        return False
    return all(jnp.issubdtype(jnp.dtype(name), jnp.floating) for name in (slot.dtype, record.dtype))


# --- Checkpoint storage ---

TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the name of a checkpoint that is being written."""


def as_path(path: Any) -> Any:
    """Returns an absolute path: ``pathlib.Path``, or for ``gs://`` and the like what orbax uses."""
    if "://" in str(path):
        from etils import epath  # comes with orbax

        return epath.Path(path)
    return pathlib.Path(os.path.abspath(path))


def make_writer() -> Any:
    """Returns an orbax checkpointer that writes in the background, one checkpoint at a time."""
    import orbax.checkpoint as ocp

    return ocp.AsyncCheckpointer(_handler(ocp))


def _handler(ocp: Any) -> Any:
    return ocp.CompositeCheckpointHandler(
        arrays=ocp.PyTreeCheckpointHandler(), description=ocp.JsonCheckpointHandler()
    )


def write(path: Any, arrays: Mapping[str, Any], description: Any, writer: Any = None) -> None:
    """Writes a checkpoint.

    Args:
        path: Its directory, which must not exist.
        arrays: Arrays by path. The caller may donate or delete them once this returns.
        description: JSON values.
        writer: From ``make_writer``: returns when the arrays are copied, and writes on in the
            background. None: returns when the checkpoint is complete.

    Raises:
        CheckpointExistsError: If there is something at ``path``.
    """
    import orbax.checkpoint as ocp

    if path.exists():
        raise CheckpointExistsError(
            f"There already is something at {path}. A checkpoint never overwrites another; choose "
            "another path or remove that one first."
        )
    items: dict[str, Any] = {"description": ocp.args.JsonSave(description)}
    if arrays:
        items["arrays"] = ocp.args.PyTreeSave(dict(arrays))
    if writer is not None:
        writer.save(path, args=ocp.args.Composite(**items))
        return
    with ocp.Checkpointer(_handler(ocp)) as checkpointer:
        checkpointer.save(path, args=ocp.args.Composite(**items))


def read_description(path: Any) -> dict[str, Any]:
    """Reads the description of a checkpoint.

    Raises:
        CheckpointNotFoundError: If there is no complete checkpoint of shardax at ``path``.
    """
    import orbax.checkpoint as ocp

    if not is_complete(path):
        what = (
            "There is nothing" if not path.exists() else "There is no complete shardax checkpoint"
        )
        raise CheckpointNotFoundError(f"{what} at {path}.{_near_checkpoints(path)}")
    with ocp.Checkpointer(_handler(ocp)) as checkpointer:
        found = checkpointer.restore(
            path, args=ocp.args.Composite(description=ocp.args.JsonRestore())
        )
    return found.description


def is_complete(path: Any) -> bool:
    """Whether a directory is a checkpoint of shardax whose writing was finished."""
    import orbax.checkpoint as ocp

    if TEMPORARY in path.name or not (path / "description").exists():
        return False
    return bool(ocp.utils.is_checkpoint_finalized(path))


def _near_checkpoints(path: Any) -> str:
    """Says where checkpoints are, if ``path`` is a folder of them or next to some."""
    for folder in (path, path.parent):
        if folder.is_dir():
            found = [
                str(item) for item in sorted(folder.iterdir()) if (item / "description").exists()
            ]
            if found:
                return f" Checkpoints nearby: {', '.join(found[-5:])}."
    return ""


def read_arrays(
    path: Any, records: Sequence[Record], dtypes: Sequence[Any], shardings: Sequence[Any]
) -> list[jax.Array]:
    """Reads arrays of a checkpoint, each process only what its devices hold.

    Args:
        path: The checkpoint.
        records: Which arrays.
        dtypes: The dtype to read each as (ignored for random keys).
        shardings: Where each goes; None for the default device, uncommitted.
    """
    import orbax.checkpoint as ocp

    stored = [i for i, record in enumerate(records) if record.is_stored]
    wanted: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for i in stored:
        record, sharding = records[i], _for_data(records[i], shardings[i])
        dtype = np.dtype(np.uint32) if record.key is not None else dtypes[i]
        wanted[record.path] = 0
        options[record.path] = (
            ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
            if sharding is None
            else ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype)
        )
    found: Mapping[str, Any] = {}
    if stored:
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=options, partial_restore=True)
        with ocp.Checkpointer(_handler(ocp)) as checkpointer:
            found = checkpointer.restore(path, args=ocp.args.Composite(arrays=arguments)).arrays
    return [
        _finish(record, found[record.path], sharding)
        if record.is_stored
        else _empty(record, dtype, sharding)
        for record, dtype, sharding in zip(records, dtypes, shardings, strict=True)
    ]


def _for_data(record: Record, sharding: Any) -> Any:
    """Returns the sharding for what is stored: random keys are stored with one dimension more."""
    if record.key is None or not isinstance(sharding, NamedSharding):
        return sharding
    entries = (*sharding.spec, *(None,) * (len(record.shape) - len(sharding.spec)))
    spec = PartitionSpec(*entries, None)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _finish(record: Record, data: Any, sharding: Any) -> jax.Array:
    array = jnp.asarray(data)
    if record.key is None:
        return array
    keys = jax.random.wrap_key_data(array, impl=record.key)
    return keys if sharding is None else jax.device_put(keys, sharding)


def _empty(record: Record, dtype: Any, sharding: Any) -> jax.Array:
    if record.key is not None:
        words = jax.random.key_data(jax.random.key(0, impl=record.key)).shape
        return jax.random.wrap_key_data(
            jnp.zeros((*record.shape, *words), jnp.uint32), impl=record.key
        )
    return jax.device_put(jnp.zeros(record.shape, dtype), sharding)


def remove(path: Any) -> None:
    """Removes a checkpoint, renamed first: a process killed on the way leaves no half of it."""
    doomed = path.with_name(path.name + DELETED)
    path.rename(doomed)
    remove_tree(doomed)


DELETED = ".deleted"
"""End of the name of a checkpoint that is being removed."""


def remove_tree(path: Any) -> None:
    """Removes a directory and everything in it."""
    if isinstance(path, pathlib.Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.rmtree(missing_ok=True)
