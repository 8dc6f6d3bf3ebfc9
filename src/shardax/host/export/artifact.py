# SPDX-License-Identifier: Apache-2.0
"""Artifacts on disk: folders with program, arrays and signature.

| file | what it is |
| --- | --- |
| `signature.json` | inputs, result and state by path, versions, checksums of the other files |
| `program.bin` | the program: StableHLO, as `jax.export` serializes it |
| `weights.safetensors` | the arrays that the function holds, by path |

The folder is written under a temporary name and renamed when it is whole, so a folder of that name
is a whole artifact. Each file's checksum is in the signature, whose own covers the rest of it. They
find damage, not malice: whoever can change the folder can change them too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardax.host import errors

FORMAT = "shardax artifact"
VERSION = 1
"""Version of the folder; a reader refuses those that it does not know."""

SIGNATURE = "signature.json"
PROGRAM = "program.bin"
WEIGHTS = "weights.safetensors"


def require_extras() -> None:
    """Raise if a library for artifacts is missing."""
    try:
        import flatbuffers  # noqa: F401 (jax.export serializes with it)
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Artifacts need {error.name}, which is not installed: pip install 'shardax[export]'"
        ) from error


# --- writing ---


def free_place(path: Any) -> pathlib.Path:
    """Return the absolute path of an artifact that is to be written."""
    place = pathlib.Path(os.path.abspath(path))
    if place.exists():
        raise errors.ArtifactExistsError(
            f"There already is something at {place}. An artifact never overwrites another; choose "
            "another path or remove that one first."
        )
    return place


@contextlib.contextmanager
def written_at(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Write a folder under a temporary name, and rename it when complete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
    draft.mkdir()
    try:
        yield draft
        for item in (*draft.iterdir(), draft):
            _to_disk(item)
        free_place(place)  # somebody may have been faster
        draft.rename(place)
        _to_disk(place.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _to_disk(path: pathlib.Path) -> None:
    """Flush a file or folder, so that no rename overtakes it."""
    with contextlib.suppress(OSError):  # some file systems cannot do it for folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_signature(folder: pathlib.Path, entries: Mapping[str, Any]) -> None:
    """Write the signature of a folder whose other files are complete."""
    names = sorted(item.name for item in folder.iterdir() if item.name != SIGNATURE)
    whole = {
        "format": FORMAT,
        "version": VERSION,
        **entries,
        "checksums": {name: checksum(folder / name) for name in names},
    }
    whole["checksum"] = _own_checksum(whole)
    (folder / SIGNATURE).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def write_weights(path: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name, as safetensors."""
    from safetensors import TensorSpec, serialize_file

    foreign = [
        name for name, array in arrays.items() if not getattr(array, "is_fully_addressable", True)
    ]
    if foreign:
        raise errors.ExportError(
            f"Other processes hold parts of {', '.join(foreign[:4])}. Export from one process that "
            "holds all: restore a checkpoint there."
        )
    held = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    plain = {name: _as_numbers(array) for name, array in held.items()}
    specs = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in plain.items()
    }
    serialize_file(specs, path)
    path.chmod(0o666 & path.parent.stat().st_mode)  # that of other new files; it is made private


def _as_numbers(array: np.ndarray) -> np.ndarray:
    """View dtypes that safetensors lacks as bytes."""
    if array.dtype.name in _TAKEN:
        return array
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.dtype.itemsize)


_TAKEN = frozenset(
    [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
    ]
)
"""Dtypes that are written as they are; of the rest, the bytes."""


# --- reading ---


def read_signature(path: Any, verify: bool) -> tuple[pathlib.Path, dict[str, Any]]:
    """Read the signature of an artifact and checks its files."""
    place = pathlib.Path(os.path.abspath(path))
    file = place / SIGNATURE
    if not file.is_file():
        there = "no artifact (a folder with signature.json)" if place.exists() else "nothing"
        raise errors.ArtifactNotFoundError(f"There is {there} at {place}.")
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        found = entries["format"], entries["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, f"cannot be read ({error!r})") from error
    if found != (FORMAT, VERSION):
        raise errors.ArtifactVersionError(
            f"{place} has the format {found[0]!r}, version {found[1]!r}; this shardax reads "
            f"{FORMAT!r}, version {VERSION}. Load it with the version that wrote it, or export "
            "the function anew."
        )
    if entries.get("checksum") != _own_checksum(entries):
        raise _damaged(file, "was changed after it was written")
    for name, wanted in entries["checksums"].items():
        if not (place / name).is_file():
            raise _damaged(place / name, "is missing")
        if verify and checksum(place / name) != wanted:
            raise _damaged(place / name, "is not what was written (its checksum differs)")
    return place, entries


def _damaged(file: pathlib.Path, what: str) -> errors.ArtifactDamagedError:
    return errors.ArtifactDamagedError(
        f"{file} {what}. Copy the artifact again from where it was written, or export the "
        "function anew; an artifact is not meant to be edited."
    )


def checksum(file: pathlib.Path) -> str:
    """Return the SHA-256 of a file, as text."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _own_checksum(entries: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in entries.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


class Weights:
    """The arrays of an artifact, read as they are asked for."""

    def __init__(self, file: pathlib.Path) -> None:
        self._data = np.memmap(file, np.uint8, mode="r")
        size = int(self._data[:8].view("<u8")[0])
        self._start = 8 + size
        self._header: dict[str, Any] = json.loads(self._data[8 : self._start].tobytes())

    def read(self, name: str, form: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        """Return an array; over a mesh, each device reads its part only."""
        begin, end = self._header[name]["data_offsets"]
        raw = self._data[self._start + begin : self._start + end]
        array = raw.view(form.dtype).reshape(form.shape)
        if sharding is None:
            return jax.numpy.array(array)

        def part(index: Any) -> np.ndarray:
            return np.array(array[index])

        return jax.make_array_from_callback(form.shape, sharding, part)
