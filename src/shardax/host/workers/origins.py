# SPDX-License-Identifier: Apache-2.0
"""Origins of workers: how a connection to one is opened, again after it was lost.

A worker's process belongs to the ``Worker`` that starts it and ends with it; or it has a *name*,
by which every program of the same user finds it, and lives on; or somebody else started it, and
gave its address and key.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardax.host.errors import WorkerConfigError, WorkerCrashedError
from shardax.host.workers.link import Link
from shardax.host.workers.process import WorkerProcess, settings_here

LOST_SECONDS = 2.0  # that a process may take to end after its connection has

Connect = Callable[["str | tuple[str, int]", bytes], Link]
Address = str | tuple[str, int]


@dataclass(frozen=True)
class ProcessOptions:
    """How to start a process.

    Attributes:
        options: What ``server.main`` is given, as far as the user decides on it.
        configure: Arguments of ``shardax.configure`` that differ from the settings here.
        env: Environment variables to set.
        seconds: How long the start may take.
        log: File for what it prints, unless it is detached, which has one of its own.
    """

    options: Mapping[str, Any]
    configure: Mapping[str, Any]
    env: Mapping[str, str]
    seconds: float
    log: str | None = None

    def start(self, key: bytes, log: str | None = None) -> WorkerProcess:
        """Starts a process; with a log of its own it is detached."""
        told = {
            **self.options,
            "key": key.hex(),
            "configure": {**settings_here(), **self.configure},
            "detached": log is not None,
        }
        return WorkerProcess(told, self.env, self.seconds, log or self.log)


class Origin(Protocol):
    """Where a worker comes from."""

    def open(self, connect: Connect) -> Link:
        """Opens a connection; starts a process if that is needed."""
        ...

    def ending(self) -> str:
        """Says how a worker ended whose connection is lost; makes sure that it has."""
        ...

    def close(self) -> None:
        """Ends the process if it belongs here."""
        ...


class OwnProcess:
    """A process of this program's own.

    Args:
        how: How to start it.
        key: Its key.
    """

    def __init__(self, how: ProcessOptions, key: bytes) -> None:
        self._how = how
        self._key = key
        self._process: WorkerProcess | None = None

    def open(self, connect: Connect) -> Link:
        """See ``Origin``."""
        self.close()
        self._process = self._how.start(self._key)
        try:
            return connect(self._process.address, self._key)
        except BaseException:
            self.close()
            raise

    def ending(self) -> str:
        """See ``Origin``."""
        if self._process is None:
            return "its process was ended"
        text = self._process.ending(LOST_SECONDS)
        self.close()
        return text

    def close(self) -> None:
        """See ``Origin``."""
        if self._process is not None:
            self._process.end(LOST_SECONDS)
            self._process = None


class GivenAddress:
    """A worker that somebody else started.

    Args:
        address: Where it listens.
        key: Its key.
    """

    def __init__(self, address: Address, key: bytes) -> None:
        self._address = address
        self._key = key

    def open(self, connect: Connect) -> Link:
        """See ``Origin``."""
        return connect(self._address, self._key)

    def ending(self) -> str:
        """See ``Origin``."""
        return f"the connection to {self._address!r} was lost"

    def close(self) -> None:
        """See ``Origin``."""


class NamedProcess:
    """A process with a name, of this user, which lives on.

    Its address and key stand in a file that only the user can read.

    Args:
        name: The name.
        how: How to start it if it does not run.
    """

    def __init__(self, name: str, how: ProcessOptions) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
            raise WorkerConfigError(
                f"A worker cannot be named {name!r}. Use up to 64 letters, digits, '.', '_', '-'."
            )
        self._name = name
        self._how = how
        self._folder = _private_folder()

    def open(self, connect: Connect) -> Link:
        """See ``Origin``."""
        with self._alone():
            found = self._read()
            if found is not None:
                with contextlib.suppress(WorkerCrashedError):
                    link = connect(_address(found["address"]), bytes.fromhex(found["key"]))
                    self._check_same(found, link)
                    return link
            key = secrets.token_bytes(32)
            process = self._how.start(key, log=str(self._folder / f"{self._name}.log"))
            link = connect(process.address, key)
            where = {"address": process.address, "key": key.hex(), "pid": process.pid}
            self._write({**where, "how": self._told()})
            process.let_go()
            return link

    def ending(self) -> str:
        """See ``Origin``."""
        return f"the connection to the worker named {self._name!r} was lost"

    def close(self) -> None:
        """See ``Origin``."""

    def _told(self) -> Any:
        how = self._how
        told = {"options": how.options, "configure": how.configure, "env": how.env}
        return json.loads(json.dumps(told))

    def _check_same(self, found: Mapping[str, Any], link: Link) -> None:
        if found["how"] != self._told():
            link.hang_up("it has other options")
            raise WorkerConfigError(
                f"The worker named {self._name!r} runs with other options than those asked for: "
                f"{found['how']}. Ask for the same, or end its process first: kill {found['pid']}"
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other programs from starting a process of that name meanwhile."""
        with open(self._folder / f"{self._name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, Any] | None:
        try:
            return json.loads((self._folder / f"{self._name}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def _write(self, content: Mapping[str, Any]) -> None:
        path = self._folder / f"{self._name}.json"
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
            json.dump(content, file)  # such files can be read by their owner only
        os.replace(file.name, path)


def _address(address: Any) -> Address:
    return address if isinstance(address, str) else (address[0], address[1])


def _private_folder() -> Path:
    """The folder with the keys of named workers, which must be this user's alone."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"shardax-workers-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not private or found.st_uid != os.getuid():
        raise WorkerConfigError(
            f"{folder}, where the keys of named workers are kept, must be a folder that belongs to "
            f"you and that only you can read. Remove it, or make it so: chmod 700 {folder}"
        )
    return folder
