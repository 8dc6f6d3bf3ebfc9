# SPDX-License-Identifier: Apache-2.0
"""Compiled programs on disk, for repeated searches in seconds.

The cache holds what a compiler made of a program, not what was read from it: other figures of
hardware and other rankings need no compiling. The key is made of the text before compiling, with
the source lines that reports name; of compiler, target and effort; and of versions and compiler
settings in the environment. So an entry is never out of date.

A location in the text is a stack of calls. The planner's own calls and those of its callers, who
may be anywhere the next time, are left out of the key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from shardax._files import write_whole
from shardax.extend import warn_user
from shardax.plan.compile.compilers import CompileResult, TargetCompiler
from shardax.plan.errors import PlanInputError

_PLANNER = str(Path(__file__).parents[1])
_DEFINED = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_REFERRED = re.compile(r"#loc\d*\b")
_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":\d')
_NAMED = re.compile(r'^("(?:[^"\\]|\\.)*")\((#loc\d*)\)$')
_CALL = re.compile(r"^callsite\((#loc\d*) at (#loc\d*)\)$")


def program_text(text: str, planner: str = _PLANNER) -> str:
    """Returns a program's text without locations in the planner's callers."""
    lines = [(line, _DEFINED.match(line)) for line in text.splitlines()]
    defined = {match[1]: match[2] for _, match in lines if match}
    locations: dict[str, str | None] = {}  # locations by name; None is one in the planner
    numbers: dict[str, int] = {}

    def location(name: str) -> str | None:
        if name not in locations:
            locations[name] = resolved(defined.get(name, name))
        return locations[name]

    def resolved(text: str) -> str | None:
        if match := _FILE.match(text):
            return None if match[1].startswith(planner) else text
        if match := _CALL.match(text):
            inner, outer = location(match[1]), location(match[2])
            return inner if inner is None or outer is None else f"{inner} at {outer}"
        if match := _NAMED.match(text):
            where = location(match[2])
            if where is None and _FILE.match(defined.get(match[2], "")):
                return None  # a call, by the name of its function
            return f"{match[1]}({where or ''})"
        return _REFERRED.sub(lambda match: location(match[0]) or "", text)

    def renumbered(match: re.Match[str]) -> str:
        return f"#{numbers.setdefault(location(match[0]) or 'planner', len(numbers))}"

    body = [_REFERRED.sub(renumbered, line) for line, is_defined in lines if not is_defined]
    return "\n".join([*body, *(f"#{number} = {where}" for where, number in numbers.items())])


_FORMAT = 3  # of the files; raised when what is in them changes
MOST_BYTES = 2 * 2**30  # of the folder: thousands of programs

_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # of compilers, in the environment


def cache_folder(cache: object = "default") -> Path:
    """Returns the folder for compiled programs."""
    if cache == "default":
        named = os.environ.get("SHARDAX_CACHE_DIR")
        return (Path(named).expanduser() if named else _users_folder() / "shardax") / "plan"
    if isinstance(cache, (str, os.PathLike)):
        return Path(cache).expanduser()
    raise PlanInputError(
        f"cache={cache!r} of type {type(cache).__name__}: give a folder, 'default', or None to "
        "keep nothing."
    )


def _users_folder() -> Path:
    """The platform's folder for caches of a user."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


class ProgramCache:
    """A folder of compiled programs."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._trimmed = False
        self.found = 0  # programs asked for and found, and not
        self.missed = 0

    def compile(
        self, compiler: TargetCompiler, sizes: Mapping[str, int], lowered: Any, effort: str
    ) -> CompileResult:
        """Compiles a lowered function, unless the result is cached."""
        key = program_key(compiler, sizes, lowered, effort)
        cached = self.get(key)
        if cached is not None:
            return dataclasses.replace(cached, seconds=0.0)
        compiled = compiler.compile(lowered, effort)
        self.put(key, compiled)
        return compiled

    def get(self, key: str) -> CompileResult | None:
        """Returns a program or None; warns if its file cannot be read."""
        path = self._path(key)
        program = None
        try:
            program = _read(path, key)
            with contextlib.suppress(OSError):  # a folder that others wrote
                os.utime(path)  # it was asked for
        except FileNotFoundError:
            pass
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            warn_user(
                f"The kept program {path} cannot be read ({error!r}) and is made anew.",
                RuntimeWarning,
            )

        self.found += program is not None
        self.missed += program is None
        return program

    def put(self, key: str, program: CompileResult) -> None:
        """Keeps a program, or warns."""
        path = self._path(key)
        data = {"format": _FORMAT, "key": key, "program": dataclasses.asdict(program)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, gzip.compress(json.dumps(data).encode(), 4, mtime=0))
            self._trim()
        except OSError as error:
            warn_user(
                f"The program was not kept: {path} cannot be written ({error}).", RuntimeWarning
            )

    def _trim(self) -> None:
        """Deletes the least recently used programs, once."""
        if self._trimmed:
            return
        self._trimmed = True
        files: list[tuple[int, int, Path]] = []
        for path in self.folder.glob("*/*.json.gz"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = 0
        for _, size, path in sorted(files, reverse=True):
            total += size
            if total > self._most_bytes:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json.gz"


def _read(path: Path, key: str) -> CompileResult:
    data = json.loads(gzip.decompress(path.read_bytes()))
    if data["format"] != _FORMAT or data["key"] != key:
        raise ValueError(f"it is of format {data['format']} and for {data['key']}")
    program = data["program"]
    changes = tuple((name, change) for name, change in program.pop("full_rematerializations"))
    return CompileResult(**program, full_rematerializations=changes)


def program_key(
    compiler: TargetCompiler, sizes: Mapping[str, int], lowered: Any, effort: str
) -> str:
    """Returns the key of a program to be compiled: 64 hexadecimal digits."""
    versions = metadata.version("shardax"), jax.__version__, metadata.version("jaxlib")
    settings = [os.environ.get(name, "") for name in _SETTINGS]
    parts = (
        _FORMAT,
        *versions,
        compiler.label,
        compiler.tier,
        repr(compiler.target),
        sorted(sizes.items()),
        list(sizes),
        effort,
        settings,
        program_text(lowered.as_text(debug_info=True)),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
