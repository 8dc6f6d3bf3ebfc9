# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its lock and its settings.

One trainer at a time may write into a run's folder. The lock is one of the operating system, on a
file in the folder, so it ends with the process that holds it, however that ends.

The *settings* of a run are all static values of its model and optimizer, by path and in text:
sizes, dtypes, the base of the rotary embedding, the learning rate inside of an optax
transformation. Functions count by their names, the values they close over, and, if they are the
user's own, the numbers in them. A resumed run with other settings would silently be another run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import os
import socket
import types
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardax import Dict, List, iter_modules
from shardax.extend import Object, format_path, has_objects
from shardax.train.errors import TrainError
from shardax.train.optimizer_state import Transformation

LOCK = ".lock"
_CONTAINERS = (list, tuple, Mapping)
_LONGEST = 200  # characters of a value; longer ones are cut and get a digest
_DEEPEST = 40
# Libraries, whose functions may change their constants without notice.
_LIBRARIES = frozenset({"jax", "numpy", "optax", "shardax", "functools"})


class RunFolder:
    """A run's folder, held by one trainer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Keeps other trainers out for a block; the holder may re-enter."""
        if self._lock is not None or jax.process_index() > 0:
            yield
            return
        with self._open_lock() as lock:
            self._take(lock)
            self._lock = lock
            try:
                yield
            finally:
                self._lock = None

    def _open_lock(self):
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return open(self.path / LOCK, "a+", encoding="utf-8")
        except OSError as error:
            raise TrainError(
                f"Cannot write into the run's folder {self.path}: {error.strerror}. Make it a "
                "folder that you may write into, or choose another directory (on the command line "
                "--out)."
            ) from error

    def _take(self, lock) -> None:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # a system without these locks
            return
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(200).strip() or "another process"
            raise TrainError(
                f"{self.path} is being trained in by {holder}. Wait until it ends, stop it, or "
                "choose another directory (on the command line --out)."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            return  # a file system without these locks
        with contextlib.suppress(OSError):  # a full disk
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()

    def check(self) -> None:
        """Raises if the held folder was removed, moved or replaced."""
        if self._lock is None:
            return
        try:
            is_same = os.path.samestat(os.stat(self.path / LOCK), os.fstat(self._lock.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        if not is_same:
            raise TrainError(
                f"The run's folder {self.path} was removed, moved or replaced while it was being "
                "trained in, so nothing more can be saved there. If it was moved, go on with it "
                "where it is now: resume=True (on the command line --resume --out FOLDER)."
            )


# --- Settings ---


def settings_of(model: object, optimizer: object, ema: Any = None) -> dict[str, str]:
    """Returns static values of model, optimizer and EMA, by path."""
    settings = {} if ema is None else dict(_texts(ema.average.tx, ".ema", ()))
    for path, module in iter_modules({"model": model, "optimizer": optimizer}):
        for name, value in vars(module).items():
            if isinstance(value, Transformation):
                name, value = "tx", value.value
            for place, static in _static_values(value, format_path((*path, name))):
                settings.update(_texts(static, place, ()))
    return settings


def _static_values(value, path: str) -> Iterator[tuple[str, Any]]:
    """Yields an attribute's values other than objects and arrays."""
    if isinstance(value, (List, Dict)) or (has_objects(value) and not isinstance(value, Object)):
        items = value.items() if isinstance(value, (Dict, Mapping)) else enumerate(value)
        for step, child in items if isinstance(value, (List, Dict, *_CONTAINERS)) else ():
            yield from _static_values(child, f"{path}[{step!r}]")
    elif not isinstance(value, (Object, jax.Array, np.ndarray)):
        yield path, value


def differences(saved: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Returns the changed settings, a phrase each."""
    # An option that a version did not have yet was off in it.
    return [
        f"{path}: {saved.get(path, 'nothing')} when saved, {present.get(path, 'nothing')} now"
        for path in sorted({*saved, *present})
        if saved.get(path) != present.get(path)
        and {saved.get(path), present.get(path)} - {None, "None", "False"}
    ]


def _texts(value: object, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yields paths and texts of the parts of a static value."""
    if id(value) in above or len(above) > _DEEPEST:
        return
    name, parts = _parts(value)
    if name is not None:
        if len(name) > _LONGEST:
            name = f"{name[:_LONGEST]}... {hashlib.sha256(name.encode()).hexdigest()[:16]}"
        yield path, name
    for step, part in parts:
        yield from _texts(part, f"{path}{step}", (*above, id(value)))


def _parts(value) -> tuple[str | None, Iterable[tuple[str, Any]]]:
    """Returns the text of a value itself, and its parts."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return repr(value), ()
    if isinstance(value, (type, np.dtype)):
        return _name_of(value) if isinstance(value, type) else str(value), ()
    if isinstance(value, (jax.Array, np.ndarray)):
        digest = hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)} {digest}", ()

    if isinstance(value, types.FunctionType):
        return _name_of(value), _parts_of_function(value)
    if isinstance(value, types.MethodType):
        return None, [("", value.__func__), (".self", value.__self__)]
    if isinstance(value, functools.partial):
        named = [(f".{key}", child) for key, child in sorted(value.keywords.items())]
        return None, [("", value.func), *_numbered(value.args), *named]

    if isinstance(value, Mapping):
        return type(value).__name__, [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a NamedTuple
        fields = getattr(value, "_fields", ())
        return type(value).__name__, [(f".{key}", getattr(value, key)) for key in fields]
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}", _numbered(value)
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} of {sorted(map(repr, value))}", ()
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value).__name__, [(f".{f.name}", getattr(value, f.name)) for f in fields]

    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None:  # such as what jax.jit and sx.jit return
        return type(value).__name__, [(".wrapped", wrapped)]
    if hasattr(value, "__qualname__"):
        return _name_of(value), ()

    # Not what is private: it may be hashes and caches, which no other process has.
    attributes = {k: v for k, v in getattr(value, "__dict__", {}).items() if k[:1] != "_"}
    return _name_of(type(value)), [(f".{key}", attributes[key]) for key in sorted(attributes)]


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields a function's closure, its defaults, and a user's numbers."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield f".{name}", cell.cell_contents

    for position, value in enumerate(function.__defaults__ or ()):
        yield f".default[{position}]", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f".{name}", value

    # Of libraries the name and the closure say all: their numbers change with versions.
    if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
        return

    kinds = (int, float, complex)
    yield ".numbers", sorted(repr(number) for number in code.co_consts if type(number) in kinds)
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (*kinds, str, types.FunctionType)):
            yield f".{name}", value


def _numbered(values: Iterable[object]) -> list[tuple[str, Any]]:
    return [(f"[{position}]", value) for position, value in enumerate(values)]


def _name_of(value) -> str:
    return f"{value.__module__}.{value.__qualname__}"
