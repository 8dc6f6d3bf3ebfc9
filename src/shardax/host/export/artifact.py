# SPDX-License-Identifier: Apache-2.0
"""Artifacts on disk: a folder that holds a function, and none of the Python that made it.

| file | what it is |
| --- | --- |
| `signature.json` | inputs, result and state by path, versions, checksums of the other files |
| `program.bin` | the program: StableHLO, as `jax.export` serializes it |
| `weights.safetensors` | the arrays that the function holds, by path |
| `snapshot.bin` | optional: the program compiled for one kind of machine (`host.snapshots`) |

The folder is written under a temporary name and renamed when it is whole, so a folder of that name
is a whole artifact. Each file's checksum is in the signature, whose own covers the rest of it. They
find damage, not malice: whoever can change the folder can change them too.

Snapshots: compiled programs inside artifacts, for machines like the one that made them.

A snapshot saves loading an artifact all of compilation. It is the machine code itself: it fits one
version of JAX, one kind of device and of host, and one number of devices, which its *fingerprint*
says. JAX stores it with pickle, so reading one can run any code. Hence ``export`` writes a snapshot
only on request, and ``load`` reads it only where the caller says that the folder is to be trusted
as a program is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardax.host.errors import (
    ArtifactDamagedError,
    ArtifactExistsError,
    ArtifactNotFoundError,
    ArtifactVersionError,
    ExportError,
)
from shardax.host.export.signature import Signature

# --- Artifact ---

FORMAT = "shardax artifact"
VERSION = 1
"""Version of the folder; a reader refuses those that it does not know."""

SIGNATURE = "signature.json"
PROGRAM = "program.bin"
WEIGHTS = "weights.safetensors"
SNAPSHOT = "snapshot.bin"


def require_extras() -> None:
    """Raises if a library is missing that artifacts are written and read with.

    Raises:
        ImportError: With the line that installs them.
    """
    try:
        import flatbuffers  # noqa: F401 (jax.export serializes with it)
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Artifacts need {error.name}, which is not installed: pip install 'shardax[export]'"
        ) from error


# --- writing --------------------------------------------------------------------------------------


def free_place(path: Any) -> pathlib.Path:
    """Returns the absolute path of an artifact that is to be written.

    Raises:
        ArtifactExistsError: If there is something already.
    """
    place = pathlib.Path(os.path.abspath(path))
    if place.exists():
        raise ArtifactExistsError(
            f"There already is something at {place}. An artifact never overwrites another; choose "
            "another path or remove that one first."
        )
    return place


@contextlib.contextmanager
def written_at(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a folder to write into, which becomes ``place`` at the end, or vanishes on an error."""
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
    """Waits until a file or folder is on the disk, so that a rename does not overtake it."""
    with contextlib.suppress(OSError):  # some file systems cannot do it for folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_signature(folder: pathlib.Path, entries: Mapping[str, Any]) -> None:
    """Writes the signature of a folder whose other files are complete.

    Args:
        folder: The folder.
        entries: What it says besides format, version and checksums.
    """
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
    """Writes arrays by name, as safetensors.

    Raises:
        ExportError: If another process holds parts of an array.
    """
    from safetensors import TensorSpec, serialize_file

    foreign = [
        name for name, array in arrays.items() if not getattr(array, "is_fully_addressable", True)
    ]
    if foreign:
        raise ExportError(
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
    """Returns an array that safetensors takes: dtypes that it lacks as the bytes they are."""
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


# --- reading --------------------------------------------------------------------------------------


def read_signature(path: Any, verify: bool) -> tuple[pathlib.Path, dict[str, Any]]:
    """Reads the signature of an artifact and checks its files.

    Args:
        path: The folder.
        verify: Whether to compare the files with their checksums.

    Returns:
        (the folder, the signature).

    Raises:
        ArtifactNotFoundError: If there is no artifact.
        ArtifactVersionError: If it has a format or version that this shardax does not read.
        ArtifactDamagedError: If a file is missing or is not what was written.
    """
    place = pathlib.Path(os.path.abspath(path))
    file = place / SIGNATURE
    if not file.is_file():
        there = "no artifact (a folder with signature.json)" if place.exists() else "nothing"
        raise ArtifactNotFoundError(f"There is {there} at {place}.")
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        found = entries["format"], entries["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, f"cannot be read ({error!r})") from error
    if found != (FORMAT, VERSION):
        raise ArtifactVersionError(
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


def _damaged(file: pathlib.Path, what: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"{file} {what}. Copy the artifact again from where it was written, or export the "
        "function anew; an artifact is not meant to be edited."
    )


def checksum(file: pathlib.Path) -> str:
    """Returns the SHA-256 of a file, as text."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _own_checksum(entries: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in entries.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


class Weights:
    """The arrays of an artifact, read as they are asked for.

    Args:
        file: The file.
    """

    def __init__(self, file: pathlib.Path) -> None:
        self._data = np.memmap(file, np.uint8, mode="r")
        size = int(self._data[:8].view("<u8")[0])
        self._start = 8 + size
        self._header: dict[str, Any] = json.loads(self._data[8 : self._start].tobytes())

    def read(self, name: str, form: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        """Returns an array; over a mesh, each device reads its part only.

        Args:
            name: Its name.
            form: Its shape and dtype.
            sharding: Where it goes; None for the default device, uncommitted.
        """
        begin, end = self._header[name]["data_offsets"]
        raw = self._data[self._start + begin : self._start + end]
        array = raw.view(form.dtype).reshape(form.shape)
        if sharding is None:
            return jax.numpy.array(array)

        def part(index: Any) -> np.ndarray:
            return np.array(array[index])

        return jax.make_array_from_callback(form.shape, sharding, part)


# --- Snapshots ---


def fingerprint(devices: Sequence[Any]) -> dict[str, Any]:
    """Returns what must agree between the machine that made a snapshot and the one that runs it.

    Args:
        devices: The devices that the program runs on.
    """
    client = devices[0].client
    return {
        "jax": jax.__version__,
        "platform": client.platform,
        "platform_version": client.platform_version,
        "device": devices[0].device_kind,
        "devices": [device.id for device in devices],
        "machine": platform.machine(),
        "processor": _processor(),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    """Returns a digest of what the processor can do: programs for the CPU use all of it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    said = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def check_fixed_sizes(signature: Signature) -> None:
    """Raises if a program is not for one size of its inputs.

    Raises:
        ExportError: Names the dynamic dimensions.
    """
    forms = [form for item in signature.inputs for form in item.forms]
    open_sizes = sorted({size for form in forms for size in form.shape if isinstance(size, str)})
    if open_sizes:
        raise ExportError(
            f"A snapshot is compiled for one size, and {', '.join(open_sizes)} are dynamic. Export "
            "without snapshot=True (the persistent cache keeps what is compiled for each size), or "
            "without dynamic=."
        )


def write_snapshot(folder: pathlib.Path, compiled: Any, devices: Sequence[Any]) -> dict[str, Any]:
    """Writes a compiled program into the folder of its artifact.

    Args:
        folder: The folder.
        compiled: The program, a ``jax.stages.Compiled``.
        devices: The devices that it is for.

    Returns:
        The fingerprint.

    Raises:
        ExportError: If JAX cannot store it.
    """
    from jax.experimental.serialize_executable import serialize

    try:
        data, _, _ = serialize(compiled)
    except (ValueError, NotImplementedError) as error:
        raise ExportError(f"JAX cannot store the compiled program: {error}") from error
    (folder / SNAPSHOT).write_bytes(data)
    return fingerprint(devices)


def read_snapshot(
    folder: pathlib.Path, made_on: Any, devices: Sequence[Any], trees: tuple[Any, Any]
) -> tuple[Callable[..., Any] | None, str]:
    """Reads a snapshot. This runs what is in the file.

    Args:
        folder: The artifact.
        made_on: The fingerprint in its signature, or None if it has no snapshot.
        devices: The devices to run on.
        trees: Structure of the program's (arguments, results).

    Returns:
        (the program, or None; why it is not used, or "").

    Raises:
        ArtifactDamagedError: If the file cannot be read.
    """
    from jax.experimental.serialize_executable import deserialize_and_load

    if made_on is None:
        return None, "the artifact has no snapshot"
    here = fingerprint(devices)
    other = [name for name in here if here[name] != made_on.get(name)]
    if other:
        listed = "; ".join(f"{name}: {made_on.get(name)!r} -> {here[name]!r}" for name in other)
        return None, f"it was made on another machine ({listed})"
    data = (folder / SNAPSHOT).read_bytes()
    in_tree, out_tree = trees
    try:
        return (
            deserialize_and_load(data, in_tree, out_tree, execution_devices=list(devices)),
            "",
        )
    except Exception as error:
        raise ArtifactDamagedError(
            f"The snapshot in {folder} cannot be loaded: {type(error).__name__}: {error}. Load the "
            "artifact without trust_snapshot=True, which compiles its program."
        ) from error
