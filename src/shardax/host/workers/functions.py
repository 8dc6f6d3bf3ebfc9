# SPDX-License-Identifier: Apache-2.0
"""Functions of calls: how they are known, and the table of those that a process keeps.

A function travels by its import path, or by value if it has none. Its *key* is a digest of what
travels, closures and defaults included, and of the source files of the modules it refers to. Equal
keys mean equal functions. The reverse does not hold: a set of strings is pickled in an order that
depends on the process, so an equal function of another process may have another key, which costs a
compilation and never a wrong result.

*Own modules* are those that are being worked on: with a source file, outside of the standard
library and of installed packages. A worker that has imported one cannot notice that its file has
changed, so calls say which sources they mean.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardax.host.errors import StaleModuleError
from shardax.host.workers.encoding import decode, encode


class FunctionForm(NamedTuple):
    """A function on its way to another process.

    Attributes:
        name: Its name, for messages.
        key: What it is known by.
        modules: Digest of the source of each own module that it refers to.
        parts: The function itself, encoded.
    """

    name: str
    key: str
    modules: dict[str, str]
    parts: list[Any]


def describe(function: Callable[..., Any]) -> FunctionForm:
    """Returns the form in which a function travels.

    Raises:
        WorkerPickleError: If it cannot be pickled.
    """
    found: set[str] = set()
    parts = encode(function, watch=lambda obj: _note_module(obj, found))
    modules: dict[str, str] = {}
    for name in sorted(found):
        file = _own_file(sys.modules.get(name))
        if file is not None:
            modules[name] = _digest_of_file(file)
    digest = hashlib.sha256(repr(modules).encode())
    for part in parts:
        digest.update(part)
    return FunctionForm(name_of(function), digest.hexdigest(), modules, parts)


def name_of(function: Any) -> str:
    """Returns what to call a function in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _note_module(obj: Any, found: set[str]) -> None:
    if isinstance(obj, types.ModuleType):
        found.add(obj.__name__)
    elif isinstance(name := getattr(obj, "__module__", None), str):
        found.add(name)


def _own_file(module: Any) -> str | None:
    """The source file of an own module, else None. A script is none: it travels by value."""
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or module.__name__ in ("__main__", "__mp_main__"):
        return None
    return None if file.startswith(_installed()) else file


@functools.cache
def _installed() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(sysconfig.get_path(kind) + os.sep for kind in kinds)


def _digest_of_file(file: str) -> str:
    try:
        return _digest_at(file, os.stat(file).st_mtime_ns)
    except OSError:
        return "missing"


@functools.lru_cache(4096)
def _digest_at(file: str, changed: int) -> str:
    with open(file, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()


class Sources:
    """What the own modules of this process were when it imported them."""

    def __init__(self) -> None:
        self._own: dict[str, tuple[str, str]] = {}
        self._seen: set[str] = set()

    def record(self) -> None:
        """Notes modules imported since the last time."""
        for name in sys.modules.keys() - self._seen:
            file = _own_file(sys.modules[name])
            if file is not None:
                self._own[name] = (file, _digest_of_file(file))
            self._seen.add(name)

    def check(self, wanted: Mapping[str, str]) -> None:
        """Checks that what was imported is what a call means, and is what is there now.

        Args:
            wanted: Digests of the sources of modules by name.

        Raises:
            StaleModuleError: If it is not.
        """
        now = {name: _digest_of_file(file) for name, (file, _) in self._own.items()}
        for name, digest in (*now.items(), *wanted.items()):
            file, imported = self._own.get(name, (None, digest))
            if imported != digest:
                raise StaleModuleError(
                    f"The module {name} that the worker has imported ({file}) is not that of the "
                    f"call: its source was changed since, or it is another file. The call would "
                    f"run the old code. Start the worker's process anew, which forgets its "
                    f"functions and values: worker.restart()."
                )


class KeptFunction:
    """A function in a table, with what a worker tells about it.

    Attributes:
        name: Its name.
        call: The function; what JAX compiled for it lives as long.
        calls: How often it was called.
    """

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name = name
        self.call = call
        self.calls = 0


class FunctionTable:
    """The functions that a process keeps; when it is full the least recently used one goes.

    Args:
        size: How many to keep.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sources = Sources()
        self._kept: collections.OrderedDict[str, KeptFunction] = collections.OrderedDict()
        self._lock = threading.RLock()

    def find(self, form: FunctionForm) -> KeptFunction:
        """Returns the function of a form, made of it unless it is kept already.

        Raises:
            StaleModuleError: If it would use modules that have changed.
        """
        with self._lock:
            kept = self._kept.get(form.key)
            if kept is None:
                kept = KeptFunction(form.name, decode(form.parts))
                self.sources.record()
            self.sources.check(form.modules)
            self._kept[form.key] = kept
            self._kept.move_to_end(form.key)
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)
            kept.calls += 1
            return kept

    def run(
        self, form: FunctionForm, arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> Any:
        """Calls the function of a form.

        Args:
            form: The form.
            arguments: Makes the arguments, which may import modules as the function may.

        Returns:
            Its result.
        """
        function = self.find(form).call
        try:
            args, kwargs = arguments()
            return function(*args, **kwargs)
        finally:
            self.sources.record()

    def told(self) -> list[dict[str, Any]]:
        """Returns name and calls of each function, the latest last, as JSON values."""
        with self._lock:
            return [{"name": kept.name, "calls": kept.calls} for kept in self._kept.values()]
