# SPDX-License-Identifier: Apache-2.0
"""Runs of several real processes on CPU devices, with a time limit, none left behind.

``run`` gives programs to processes that are kept for all tests of this process; ``started`` starts
processes for one program, which may kill them. Both fork a server that has imported everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SECONDS = 400  # of a machine that does much else; a run takes a hundredth of it


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment() -> dict[str, str]:
    """The variables of this process, for others with their own number of devices."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    # Processes that are killed could leave half an entry in the cache of programs.
    return {name: value for name, value in found.items() if name != "JAX_COMPILATION_CACHE_DIR"}


class Server:
    """The process that forks the others; it ends them when it is closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.distributed.server"],
            env=environment() | {"OPENBLAS_NUM_THREADS": "1"},  # threads do not survive a fork
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, **request: Any) -> Any:
        """Returns the answer to a request."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, f"the server of processes ended with status {self._process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        """Ends it, and the processes that it forked."""
        self._process.communicate(timeout=SECONDS)


class Forked:
    """A process that the server forked."""

    def __init__(self, server: Server, job: dict[str, Any]) -> None:
        self._server = server
        self.pid = server.ask(fork=job)
        self.status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, if it has ended; less than 0 where a signal ended it."""
        if self.status is None:
            self.status = self._server.ask(poll=self.pid)
        return self.status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, limit: float) -> int:
        """Waits until it has ended, or to a time of the monotonic clock."""
        while (status := self.poll()) is None:
            assert time.monotonic() < limit, f"process {self.pid} has not ended"
            time.sleep(0.02)
        return status


def end(processes: Sequence[Forked]) -> None:
    """Kills the processes that are left."""
    for each in processes:
        each.send_signal(9)
    for each in processes:
        each.wait(time.monotonic() + SECONDS)


class Group:
    """Processes that JAX knows as one job, which run one program after another."""

    def __init__(self, server: Server, processes: int, devices: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardax-processes-"))
        self.pipes: list[int] = []
        self.processes: list[Forked] = []
        coordinator = f"localhost:{free_port()}"
        for index in range(processes):
            pipe = self.folder / f"commands{index}"
            os.mkfifo(pipe)
            self.pipes.append(os.open(pipe, os.O_RDWR))
            job = job_of(self.folder, coordinator, processes, index, devices)
            self.processes.append(Forked(server, job | {"commands": str(pipe)}))

    def run(self, program: str, arguments: Any, folder: Path) -> list[Any]:
        """Returns what each process returned; fails as soon as one of them has failed."""
        for pipe in self.pipes:
            os.write(pipe, (json.dumps([program, arguments, str(folder)]) + "\n").encode())
        limit = time.monotonic() + SECONDS
        while True:
            ended = [each.poll() for each in self.processes]
            found = [result_of(folder, index) for index in range(len(self.processes))]
            errors = [each["error"] for each in found if each is not None and "error" in each]
            if errors or ended != [None] * len(ended) or time.monotonic() > limit:
                break
            if None not in found:
                return [each["result"] for each in found if each is not None]
            time.sleep(0.02)
        written = [file.read_text() for file in sorted(folder.glob("err*"))]
        raise AssertionError(
            f"{program} failed; processes ended with {ended}\n" + "\n".join(errors + written)
        )

    def close(self, *, kill: bool = False) -> None:
        """Ends the processes: there are no more commands, or they are killed."""
        for pipe in self.pipes:
            os.close(pipe)
        limit = time.monotonic() + SECONDS
        try:
            if not kill:
                found = [each.wait(limit) for each in self.processes]
                assert found == [0] * len(found), (found, (self.folder / "err0").read_text())
        finally:
            end(self.processes)
            shutil.rmtree(self.folder, ignore_errors=True)


class Kept:
    """What tests share: the server and its groups, each started when it is first needed."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._groups: dict[tuple[int, int], Group] = {}

    def server(self) -> Server:
        """The server."""
        if self._server is None:
            self._server = Server()
        return self._server

    def run(self, program: str, arguments: Any, folder: Path, size: tuple[int, int]) -> list[Any]:
        """Runs a program in a group of so many processes and devices; a failure ends the group."""
        if size not in self._groups:
            self._groups[size] = Group(self.server(), *size)
        try:
            return self._groups[size].run(program, arguments, folder)
        except BaseException:
            self._groups.pop(size).close(kill=True)
            raise

    def close(self) -> None:
        """Ends all processes; those of groups have to end well."""
        with contextlib.ExitStack() as stack:
            if self._server is not None:
                stack.callback(self._server.close)
                self._server = None
            while self._groups:
                stack.callback(self._groups.popitem()[1].close)


KEPT = Kept()


def job_of(
    folder: Path, coordinator: str, processes: int, process: int, devices: int
) -> dict[str, Any]:
    """What a forked process has to know."""
    return {
        "folder": str(folder),
        "out": str(folder / f"out{process}"),
        "err": str(folder / f"err{process}"),
        "coordinator": coordinator,
        "processes": processes,
        "process": process,
        "devices": devices,
    }


def result_of(folder: Path, process: int) -> dict[str, Any] | None:
    """What a process has written, if it has."""
    file = folder / f"result{process}"
    return json.loads(file.read_text()) if file.exists() else None


@dataclass
class Ended:
    """How a process ended."""

    status: int
    out: str
    err: str
    result: Any  # what its program returned, of JSON


@contextlib.contextmanager
def started(
    program: str, arguments: Any, folder: Path, *, processes: int = 2, devices: int = 2
) -> Iterator[list[Forked]]:
    """Starts ``programs.<program>(arguments)`` in new processes, and kills what is left."""
    coordinator = f"localhost:{free_port()}"
    running: list[Forked] = []
    try:
        for index in range(processes):
            job = job_of(folder, coordinator, processes, index, devices)
            job |= {"program": program, "arguments": arguments}
            running.append(Forked(KEPT.server(), job))
        yield running
    finally:
        end(running)


def ends(running: Sequence[Forked], folder: Path) -> list[Ended]:
    """Waits until all processes have ended."""
    limit = time.monotonic() + SECONDS
    statuses = [each.wait(limit) for each in running]
    return [
        Ended(
            status,
            (folder / f"out{index}").read_text(),
            (folder / f"err{index}").read_text(),
            (result_of(folder, index) or {}).get("result"),
        )
        for index, status in enumerate(statuses)
    ]


def run(
    program: str,
    arguments: Any,
    folder: Path,
    *,
    processes: int = 2,
    devices: int = 2,
    new: bool = False,
) -> list[Any]:
    """Returns what a program returned in each process, of those that are kept or in new ones."""
    if not new:
        return KEPT.run(program, arguments, folder, (processes, devices))
    with started(program, arguments, folder, processes=processes, devices=devices) as running:
        found = ends(running, folder)
    assert [each.status for each in found] == [0] * len(found), "\n".join(e.err for e in found)
    return [each.result for each in found]
