# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk, by orbax-checkpoint.

A checkpoint is one directory with two items: ``arrays`` (a flat mapping from path to array, sharded
arrays written by the processes that hold them) and ``description`` (JSON). It is written under a
temporary name and renamed when complete, so a directory with the final name is a whole checkpoint;
a process that dies on the way leaves only a temporary one, which nothing reads.

This is the only file that knows orbax.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax.core.errors import CheckpointExistsError, CheckpointNotFoundError
from shardax.train.checkpoint_format import Record

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
