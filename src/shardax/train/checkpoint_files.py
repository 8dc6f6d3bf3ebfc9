# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint, and their checksums.

A checkpoint is a directory with the folder ``arrays``, which orbax-checkpoint writes (every process
the shards that it holds), and ``description.json``, which is written last. The description lists
size and SHA-256 of every file in ``arrays`` and ends in the SHA-256 of its own bytes, so a change
in any of them is noticed. The directory has a temporary name until it is complete, so a process
that dies on the way leaves nothing under the final name. (Object stores cannot rename: there a
checkpoint is complete once it has its description.)

This is the only file that knows orbax.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import logging
import math
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._files import PathNotFoundError, require_free
from shardax.extend import Options, PyTree
from shardax.train import errors
from shardax.train.checkpoint_format import FORMAT_VERSION, StoredArray

DESCRIPTION = "description.json"
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a checkpoint that is being written
DELETED = ".deleted"  # at the end of the name of one that is being removed
DAMAGED = ".damaged"  # at the end of the name of one that was set aside
_DIGEST = ',"sha256":"{}"}}\n'  # the end of a description
_DIGEST_LENGTH = len(_DIGEST.format("0" * 64))
# Of the part of an array that a device writes of its copy. Smaller arrays are written by one
# device: each cut would be a program to compile, for every shape and device.
_LEAST_PART_BYTES = 1 << 20
OPTIONS = Options(errors.CheckpointError)


def as_path(path: Any) -> Any:
    """Returns an absolute path, also of ``gs://`` and the like."""
    example = "a path: save(tree, path), restore(tree, path), Checkpoints(directory)"
    OPTIONS.instance("path", path, (str, os.PathLike), example)
    if "://" in str(path):
        from etils import epath  # comes with orbax

        return epath.Path(path)
    return pathlib.Path(os.path.abspath(path))


def is_complete(path: Any) -> bool:
    """Whether a directory is a finished checkpoint of shardax."""
    if TEMPORARY in path.name or path.name.endswith((DELETED, DAMAGED)):
        return False
    return (path / DESCRIPTION).exists()


# --- Writing ---


class Writer:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self) -> None:
        self._orbax: Any = None
        self._thread = ThreadPoolExecutor(1, "shardax-checkpoint")
        self._pending: Future[None] | None = None
        _silence_orbax()

    def start(self, path: Any, arrays: Mapping[str, Any], description: Mapping[str, Any]) -> None:
        """Starts writing a checkpoint; returns when its arrays are copied."""
        import orbax.checkpoint as ocp

        self.wait()
        require_free(path, "A checkpoint")
        is_local = isinstance(path, pathlib.Path)

        # Object stores cannot rename; a checkpoint is complete there once it has its description.
        draft = path.with_name(path.name + TEMPORARY) if is_local else path
        _drafts.add(str(draft))

        identity = None
        if jax.process_index() == 0:
            remove_tree(draft)
            draft.mkdir(parents=True)
            identity = draft.stat() if is_local else None
        _meet("checkpoint begins")

        if self._orbax is None:
            handlers = ocp.type_handlers
            array_handler = handlers.ArrayHandler(
                min_slice_bytes_for_replica_parallel=_LEAST_PART_BYTES
            )
            registry = handlers.create_type_handler_registry((jax.Array, array_handler))
            self._orbax = ocp.AsyncCheckpointer(
                ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
            )

        try:
            if arrays:
                self._orbax.save(draft / "arrays", args=ocp.args.PyTreeSave(dict(arrays)))
        except BaseException:
            _join_threads_of_orbax()
            self._forget_orbax()
            remove_tree(draft)
            raise
        self._pending = self._thread.submit(self._complete, draft, identity, path, description)

    def _complete(self, draft, identity, path, description: Mapping[str, Any]) -> None:
        problem = ""
        try:
            self._orbax.wait_until_finished()
            # orbax makes a directory again that was moved away while it wrote.
            if identity is not None and not os.path.samestat(identity, draft.stat()):
                raise FileNotFoundError(f"{path.parent} was removed or moved")
            if jax.process_index() == 0:
                (draft / DESCRIPTION).write_bytes(_sealed(description, _files_below(draft)))
                if draft != path:
                    draft.rename(path)
        except Exception as error:  # noqa: BLE001 (raised again, by ``wait``)
            problem = one_line(error)

        if problem:
            remove_tree(draft)  # what is half written would only fill the disk
            self._forget_orbax()
            raise errors.CheckpointWriteError(problem)

        _drafts.discard(str(draft))

    def _forget_orbax(self) -> None:
        """Frees orbax's remains of a failed write."""
        failed, self._orbax = self._orbax, None
        with contextlib.suppress(Exception):
            failed.close()
        del failed
        gc.collect()

    def wait(self) -> None:
        """Waits for a running write, or raises CheckpointWriteError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            _meet("checkpoint ends")

    def abandon(self) -> None:
        """Leaves a running write, a matter of all processes, as it is."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Frees the threads."""
        self._thread.shutdown()
        if self._orbax is not None:
            self._orbax.close()


def _join_threads_of_orbax() -> None:
    """Waits for directories made by threads during a refused save."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax"):
            threading.Thread.join(thread, timeout=5)  # orbax's own raises what the thread did


def one_line(error: BaseException) -> str:
    """Returns the kind and the text of an error."""
    line = str(error).partition("\n")[0].partition(" [source locations=")[0]
    return f"{type(error).__name__}: {line[:600]}"


_drafts: set[str] = set()  # being written, or failed


@functools.cache
def _silence_orbax() -> None:
    """Keeps the errors of ``Writer.wait`` out of logs and stderr."""
    # orbax and asyncio log a failed write, too, with tracebacks; what was still being written finds
    # its event loop closed, in threads where no one can catch it.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    old_hook = sys.unraisablehook

    def hook(unraisable) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_ours = "orbax" in getattr(code, "co_filename", "")
        if not (_drafts and (is_ours or str(unraisable.exc_value) == "Event loop is closed")):
            old_hook(unraisable)

    sys.unraisablehook = hook


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record is about anything but a failed write."""
    if record.levelno < logging.ERROR:
        return True
    text = record.getMessage() + (str(record.exc_info[1]) if record.exc_info else "")
    return not any(draft in text for draft in _drafts)


def _meet(name: str) -> None:
    """Waits for the other processes."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def _files_below(path) -> dict[str, dict[str, Any]]:
    """Returns size and digest of all files below a directory."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(_digest_of, files))
    return {
        file.relative_to(path).as_posix(): {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, digests, strict=True)
    }


def _digest_of(file) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def _sealed(description: Mapping[str, Any], files: Mapping[str, Any]) -> bytes:
    """Returns a description as text, with its own digest at the end."""
    text = json.dumps({**description, "files": files}, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (text[:-1] + _DIGEST.format(digest)).encode()


# --- Reading ---


def read_description(path: Any) -> dict[str, Any]:
    """Reads and checks the description of a checkpoint, not its arrays."""
    if not is_complete(path):
        if path.is_dir() and (path / "arrays").is_dir():
            raise _damaged(path, [f"{DESCRIPTION} is missing"])
        absence = "There is no complete shardax checkpoint" if path.exists() else "There is nothing"
        raise PathNotFoundError(f"{absence} at {path}.{_near_checkpoints(path)}")

    description = _parsed((path / DESCRIPTION).read_bytes())
    if description is None:
        raise _damaged(path, [f"{DESCRIPTION} has not the bytes that were written"])

    version = description.get("version")
    if description.get("format") != "shardax" or version != FORMAT_VERSION:
        raise errors.CheckpointError(
            f"The checkpoint {path} is {description.get('format')!r} version {version!r}, but this "
            f"shardax reads 'shardax' version {FORMAT_VERSION}. Read it with the version that "
            "wrote it."
        )

    step = description.get("step")
    if step is not None and path.name.isdecimal() and int(path.name) != step:
        text = f"{DESCRIPTION} is of step {step}, so the folder was copied or renamed"
        raise _damaged(path, [text])
    return description


def _parsed(content: bytes) -> dict[str, Any] | None:
    """Returns a description, or None if its bytes are not right."""
    text = content[:-_DIGEST_LENGTH] + b"}"
    if content != text[:-1] + _DIGEST.format(hashlib.sha256(text).hexdigest()).encode():
        return None
    try:
        description = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return description if isinstance(description, dict) else None


def verify(path: object, *, sizes_only: bool = False) -> dict[str, Any]:
    """Reads the description and checks all files, or raises CheckpointDamagedError."""
    description = read_description(path)
    recorded: Mapping[str, Any] = description["files"]
    with ThreadPoolExecutor() as threads:
        check = threads.map(
            lambda record: _problem_of(path, *record, sizes_only=sizes_only), recorded.items()
        )
        if problems := [problem for problem in check if problem]:
            raise _damaged(path, problems)
    return description


def _problem_of(path, name: str, recorded: Mapping[str, Any], sizes_only: bool) -> str:
    try:
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size is None:
            return f"{name} is missing"
        if size != recorded["bytes"]:
            return f"{name} has {size:,} bytes, of {recorded['bytes']:,} that were written"
        if not sizes_only and _digest_of(path / name) != recorded["sha256"]:
            return f"{name} has not the bytes that were written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return ""


def _damaged(path: object, problems: Sequence[str]) -> errors.CheckpointDamagedError:
    omitted = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
    listed = "; ".join(problems[:4]) + omitted
    return errors.CheckpointDamagedError(
        f"The checkpoint {path} is damaged: {listed}. Nothing was changed. Restore another "
        f"one.{_near_checkpoints(path)}",
        listed,
    )


def _near_checkpoints(path) -> str:
    """Names checkpoints in a folder or next to it."""
    for folder in (path, path.parent):
        if folder.is_dir():
            items = sorted(folder.iterdir())
            names = [str(child) for child in items if child != path and is_complete(child)]
            if names:
                return f" Checkpoints nearby: {', '.join(names[-5:])}."
    return ""


def read_arrays(
    path: Any, stored: Sequence[StoredArray], dtypes: Sequence[Any], shardings: Sequence[Any]
) -> list[jax.Array]:
    """Reads arrays, in each process only the parts on its devices."""
    # A sharding of None is the default device, uncommitted. Dtypes of random keys are ignored.
    import orbax.checkpoint as ocp

    targets: dict[str, PyTree] = {}
    options: dict[str, Any] = {}
    for array, dtype, sharding in zip(stored, dtypes, shardings, strict=True):
        if math.prod(array.shape) == 0:
            continue  # an array of no elements is its description
        targets[array.path] = 0
        numbers = np.dtype(np.uint32) if array.key is not None else dtype
        options[array.path] = (
            ocp.RestoreArgs(restore_type=np.ndarray, dtype=numbers)
            if sharding is None
            else ocp.ArrayRestoreArgs(sharding=_sharding_of_data(array, sharding), dtype=numbers)
        )
    restored: Mapping[str, Any] = {}
    if targets:
        arguments = ocp.args.PyTreeRestore(item=targets, restore_args=options, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(path / "arrays", args=arguments)
    return [
        _as_array(array, restored.get(array.path), dtype, sharding)
        for array, dtype, sharding in zip(stored, dtypes, shardings, strict=True)
    ]


def _sharding_of_data(array: StoredArray, sharding):
    """Returns the sharding of stored numbers."""
    # Random keys are stored with one dimension more.
    if array.key is None or not isinstance(sharding, NamedSharding):
        return sharding
    entries = (*sharding.spec, *(None,) * (len(array.shape) - len(sharding.spec)))
    spec = PartitionSpec(*entries, None)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _as_array(
    stored: StoredArray, numbers: object, dtype: jax.typing.DTypeLike, sharding
) -> jax.Array:
    """Returns the array of read numbers; None has no elements."""
    if numbers is None and stored.key is None:
        return jax.device_put(jnp.zeros(stored.shape, dtype), sharding)
    if stored.key is None:
        return jnp.asarray(numbers)
    if numbers is None:
        words = jax.random.key_data(jax.random.key(0, impl=stored.key)).shape
        numbers = jnp.zeros((*stored.shape, *words), jnp.uint32)
    keys = jax.random.wrap_key_data(jnp.asarray(numbers), impl=stored.key)
    return keys if sharding is None else jax.device_put(keys, sharding)


# --- Removing ---


def remove(path: object) -> None:
    """Removes a checkpoint."""
    # Renamed first: a process killed on the way leaves no half of it.
    remove_tree(_renamed(path, DELETED))


def set_aside(path: object) -> Any:
    """Renames a damaged checkpoint; returns its new place."""
    return _renamed(path, DAMAGED)


def _renamed(path, ending: str):
    place = path.with_name(path.name + ending)
    count = 1
    while place.exists():
        count += 1
        place = path.with_name(f"{path.name}.{count}{ending}")
    path.rename(place)
    return place


def remove_leftovers(directory: Any) -> None:
    """Removes half-written and half-removed files of killed processes."""
    if not directory.is_dir():
        return
    for child in directory.iterdir():
        if TEMPORARY in child.name or child.name.endswith(DELETED):
            remove_tree(child)


def remove_tree(path: Any) -> None:
    """Removes a directory and everything in it, if it is there."""
    if isinstance(path, pathlib.Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.rmtree(missing_ok=True)
