# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of files and folders."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardax.errors import ShardaxError


class PathExistsError(ShardaxError, FileExistsError):
    """Something that is written would overwrite something else."""


class PathNotFoundError(ShardaxError, FileNotFoundError):
    """Nothing to read at a path."""


def require_free(path: Any, writer: str) -> None:
    """Refuse to overwrite; ``writer`` is what would, such as "A checkpoint"."""
    if path.exists():
        raise PathExistsError(
            f"There already is something at {path}. {writer} never overwrites another; choose "
            "another path or remove that one first."
        )


def require_file(path: Path, contents: str, remedy: str = "") -> None:
    """Refuse a path without a file."""
    if not path.is_file():
        raise PathNotFoundError(
            f"There is no file {str(path)!r} to read {contents} from. Check the path{remedy}."
        )


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file under a temporary name, then rename it."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(target)
    except OSError as error:
        if error.errno is not None:  # else its text would be gone
            error.filename = str(target)
        raise
    finally:
        draft.unlink(missing_ok=True)
    return target


@contextlib.contextmanager
def draft_folder(place: Path) -> Generator[Path]:
    """Make a temporary folder beside a place, removed at the end."""
    if place.is_dir():  # the folder above may be of another disk, or not ours
        draft = place / f".draft.{secrets.token_hex(4)}.tmp"
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def move_files(draft: Path, place: Path, last: str) -> None:
    """Move a draft to its place, or its files into that folder."""
    flush_folder(draft)
    if not place.is_dir():
        draft.rename(place)
        flush(place.parent)
        return
    for file in sorted(draft.iterdir(), key=lambda file: file.name == last):
        file.replace(place / file.name)
    flush(place)


def flush_folder(folder: Path) -> None:
    """Flush a folder and its files, against renames that overtake them."""
    for item in (*folder.iterdir(), folder):
        flush(item)


def flush(path: Path) -> None:
    """Flush a file or folder to the disk."""
    with contextlib.suppress(OSError):  # some file systems cannot do it for folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_tensors(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Write arrays by name as safetensors, or raise an ``OSError``."""
    from safetensors import SafetensorError, TensorSpec, serialize_file

    specs = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    try:
        serialize_file(specs, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # its class has no number
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    path.chmod(0o666 & path.parent.stat().st_mode)  # that of other new files; it is made private
