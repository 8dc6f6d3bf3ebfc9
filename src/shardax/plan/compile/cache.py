# SPDX-License-Identifier: Apache-2.0
"""Compiled programs on disk, so that asking again takes seconds.

What is kept is what a compiler made of a program, not what was read from it: a better reader, other
figures of hardware and other rankings need no compiling. A program is known by its text before
compiling, with the lines of code that it comes from (``shardax.plan.compile.cache``); by compiler,
target and effort; by versions and by the settings of compilers in the environment. So nothing that
is found is ever out of date, and the folder may be deleted at any time. It does not grow without
end: beyond ``MOST_BYTES`` those programs go first that were not asked for longest.

The text by which a lowered program is known: what it does, and the lines that it comes from.

Lines belong to it, because the report of a program names them. But a location in the text is a
stack of calls, and the outer ones of it are those of the planner and of whoever called it, who may
be anywhere the next time. They are left out here, from the innermost call of the planner on.
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
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from shardax.host.files import write_whole
from shardax.plan.compile.compilers import AxisTypes, CompiledProgram, Compiler
from shardax.plan.errors import PlanInputError

# --- Cache text ---

_PLANNER = str(Path(__file__).parents[1])
_DEFINED = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_REFERRED = re.compile(r"#loc\d*\b")
_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":\d')
_NAMED = re.compile(r'^("(?:[^"\\]|\\.)*")\((#loc\d*)\)$')
_CALL = re.compile(r"^callsite\((#loc\d*) at (#loc\d*)\)$")


def program_text(text: str, planner: str = _PLANNER) -> str:
    """Returns a program's text with the same locations wherever the planner is called from.

    Args:
        text: The program in StableHLO, with locations.
        planner: The folder of the planner's files.

    Example:
        >>> print(program_text('''%0 = add loc(#loc4)
        ... #loc1 = loc("step.py":3:4 to :9)
        ... #loc2 = loc("/plan/lower.py":7:0 to :5)
        ... #loc3 = loc(callsite(#loc1 at #loc2))
        ... #loc4 = loc("jit(f)/add"(#loc3))''', "/plan"))
        %0 = add loc(#0)
        #0 = "jit(f)/add"("step.py":3:4 to :9)
    """
    lines = text.splitlines()
    found = [(line, _DEFINED.match(line)) for line in lines]
    locations = _Locations({m[1]: m[2] for _, m in found if m}, planner)
    numbers: dict[str, int] = {}

    def renumbered(match: re.Match[str]) -> str:
        return f"#{numbers.setdefault(locations.of(match[0]) or 'planner', len(numbers))}"

    body = [_REFERRED.sub(renumbered, line) for line, defined in found if not defined]
    return "\n".join([*body, *(f"#{number} = {where}" for where, number in numbers.items())])


class _Locations:
    """Locations by their names in a text, with the planner's calls and those outside left out."""

    def __init__(self, defined: dict[str, str], planner: str) -> None:
        self._defined = defined
        self._planner = planner
        self._known: dict[str, str | None] = {}

    def of(self, name: str) -> str | None:
        """What a location is, or None if it is one of the planner."""
        if name not in self._known:
            self._known[name] = self._resolved(self._defined.get(name, name))
        return self._known[name]

    def _resolved(self, text: str) -> str | None:
        if match := _FILE.match(text):
            return None if match[1].startswith(self._planner) else text
        if match := _CALL.match(text):
            inner, outer = self.of(match[1]), self.of(match[2])
            return inner if inner is None or outer is None else f"{inner} at {outer}"
        if match := _NAMED.match(text):
            where = self.of(match[2])
            if where is None and _FILE.match(self._defined.get(match[2], "")):
                return None  # a call, by the name of its function
            return f"{match[1]}({where or ''})"
        return _REFERRED.sub(lambda match: self.of(match[0]) or "", text)


# --- Cache ---

FORMAT = 2
"""Of the files; raised when what is in them changes."""

MOST_BYTES = 2 * 2**30
"""What the folder may hold: thousands of programs."""

_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def cache_folder(cache: Any = "default") -> Path | None:
    """Returns the folder for compiled programs.

    Args:
        cache: A folder; ``"default"`` for ``plan`` in the folder that ``SHARDAX_CACHE_DIR`` names,
            or else in that of this user for ``shardax``; None for none.

    Raises:
        PlanInputError: If it is none of these.

    Example:
        >>> cache_folder("/tmp/programs").name, cache_folder(None)
        ('programs', None)
    """
    if cache is None:
        return None
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
    """Where this platform keeps what programs of a user can make again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


class ProgramCache:
    """A folder of compiled programs.

    Args:
        folder: The folder; it is made when something is kept.
        most_bytes: What it may hold; looked at when this cache first keeps a program.

    Attributes:
        found: How many programs were found since.
        missed: How many were not.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._trimmed = False
        self.found = 0
        self.missed = 0

    def get(self, key: str) -> CompiledProgram | None:
        """Returns a program that was kept, or None; warns if its file cannot be read."""
        path = self._path(key)
        program = None
        try:
            program = _read(path, key)
            with contextlib.suppress(OSError):  # a folder that others wrote
                os.utime(path)  # it was asked for
        except FileNotFoundError:
            pass
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"The kept program {path} cannot be read ({error!r}) and is made anew.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.found += program is not None
        self.missed += program is None
        return program

    def put(self, key: str, program: CompiledProgram) -> None:
        """Keeps a program; warns if that cannot be done. Its file is there whole or not at all."""
        path = self._path(key)
        data = {"format": FORMAT, "key": key, "program": dataclasses.asdict(program)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, gzip.compress(json.dumps(data).encode(), 4, mtime=0))
            self._trim()
        except OSError as error:
            warnings.warn(
                f"The program was not kept: {path} cannot be written ({error}).",
                RuntimeWarning,
                stacklevel=2,
            )

    def _trim(self) -> None:
        """Deletes what is too much, once; other processes may do so at the same time."""
        if self._trimmed:
            return
        self._trimmed = True
        held: list[tuple[int, int, Path]] = []
        for path in self.folder.glob("*/*.json.gz"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                held.append((found.st_mtime_ns, found.st_size, path))
        total = 0
        for _, size, path in sorted(held, reverse=True):
            total += size
            if total > self._most_bytes:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json.gz"


def _read(path: Path, key: str) -> CompiledProgram:
    data = json.loads(gzip.decompress(path.read_bytes()))
    if data["format"] != FORMAT or data["key"] != key:
        raise ValueError(f"it is of format {data['format']} and for {data['key']}")
    program = data["program"]
    whole = tuple((name, change) for name, change in program.pop("made_whole"))
    return CompiledProgram(**program, made_whole=whole)


class CachedCompiler(Compiler):
    """A compiler that asks a cache first.

    Args:
        compiler: The compiler.
        cache: The cache.
    """

    def __init__(self, compiler: Compiler, cache: ProgramCache) -> None:
        super().__init__(compiler.target)
        self._compiler = compiler
        self._cache = cache
        self._sizes: dict[str, int] = {}
        self.label = compiler.label
        self.tier = compiler.tier

    def mesh(self, sizes: Mapping[str, int], axis_types: AxisTypes = None) -> Mesh:
        """See ``Compiler``."""
        self._sizes = dict(sizes)
        return self._compiler.mesh(sizes, axis_types)

    def environment(self) -> dict[str, str]:
        """See ``Compiler``."""
        return self._compiler.environment()

    @property
    def devices_needed(self) -> int:
        """See ``Compiler``."""
        return self._compiler.devices_needed

    def _devices(self, sizes: Mapping[str, int]) -> Any:
        return self._compiler.mesh(sizes).devices

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompiledProgram:
        key = program_key(self._compiler, self._sizes, lowered, effort)
        known = self._cache.get(key)
        if known is not None:
            return dataclasses.replace(known, seconds=0.0)
        made = self._compiler.compile(lowered, effort)
        self._cache.put(key, made)
        return made


def program_key(compiler: Compiler, sizes: Mapping[str, int], lowered: Any, effort: str) -> str:
    """Returns what a program to be compiled is known by: 64 hexadecimal digits."""
    text = program_text(lowered.as_text(debug_info=True))
    parts = (
        FORMAT,
        metadata.version("shardax"),
        jax.__version__,
        metadata.version("jaxlib"),
        compiler.label,
        compiler.tier,
        repr(compiler.target),
        sorted(sizes.items()),
        list(sizes),
        effort,
        [os.environ.get(name, "") for name in _SETTINGS],
        text,
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
