# SPDX-License-Identifier: Apache-2.0
"""Files of programs that ``shardax migrate`` reads and writes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardax.cli.inputs import CommandError

STDIN = "-"
_CACHES = frozenset({"__pycache__", "__pypackages__", "node_modules", "site-packages"})
_BUILDS = frozenset({"build", "dist"})
_ENVIRONMENT = "pyvenv.cfg"


@dataclass(frozen=True)
class ProgramFile:
    """The text of one file, with what is needed to write it again."""

    label: str
    text: str
    encoding: str

    def write(self, text: str) -> None:
        """Writes another text into the file, and keeps a copy of this one where git has none.

        The file is written in place, so that its mode, its owner and other names of it stay. What
        interrupts this puts the old text back.
        """
        path = Path(self.label)
        old, new = self.text.encode(self.encoding), text.encode(self.encoding)
        if not _is_clean_in_git(path):
            _keep_copy(path, old)

        with path.open("r+b", buffering=0) as file:
            try:
                _fill(file, new)
            except BaseException:
                _fill(file, old)
                raise


def read(label: str) -> ProgramFile:
    """Returns the text of a file, decoded as Python decodes it.

    Raises:
        UnicodeDecodeError: If it is not in the encoding that it names.
        SyntaxError: If it names none that there is.
    """
    data = sys.stdin.buffer.read() if label == STDIN else Path(label).read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return ProgramFile(label, data.decode(encoding), encoding)


def find(names: tuple[str, ...]) -> Iterator[str]:
    """Yields the labels of all files to read, each file once, also where it has several names."""
    seen: set[tuple[int, int]] = set()
    for name in names:
        path = Path(name)
        if name == STDIN:
            yield name
        elif not path.is_dir() and not path.is_file():
            raise CommandError(f"There is no file {name!r} to translate.")
        for file in (_programs_in(path) if path.is_dir() else [path]) if name != STDIN else ():
            status = file.stat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                yield str(file)


def _programs_in(folder: Path) -> Iterator[Path]:
    """Yields the programs in a folder that its owner wrote."""
    for parent, folders, files in os.walk(folder):
        if _ENVIRONMENT in files:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if _is_own(Path(parent, name)))
        for name in sorted(files):
            path = Path(parent, name)
            if name.endswith(".py") and not name.startswith(".") and path.is_file():
                yield path


def _is_own(folder: Path) -> bool:
    """Whether a folder is no hidden one, cache or output of a build."""
    name = folder.name
    is_output = name in _BUILDS or name.endswith(".egg-info")
    return not name.startswith(".") and name not in _CACHES and not is_output


def _is_clean_in_git(path: Path) -> bool:
    """Whether git has a file as it is, so that it can be had back."""
    command = ["git", "status", "--porcelain", "--ignored", "--", path.name]
    try:
        done = subprocess.run(command, cwd=path.parent, capture_output=True, check=False)
    except OSError:  # there is no git
        return False
    return done.returncode == 0 and not done.stdout


def _keep_copy(path: Path, data: bytes) -> None:
    """Writes a copy beside a file; the copy of an earlier run stays."""
    copy = path.with_name(f"{path.name}.orig")
    try:
        with copy.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return


def _fill(file: io.FileIO, data: bytes) -> None:
    """Makes data the content of an open file."""
    file.seek(0)
    written = 0
    while written < len(data):
        written += file.write(data[written:])
    file.truncate()
