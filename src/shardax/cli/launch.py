# SPDX-License-Identifier: Apache-2.0
"""``shardax launch``: the processes of one program, on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar, TextIO

import tyro

from shardax.cli.inputs import CommandError, check_values
from shardax.cli.runs import RUN_FILE
from shardax.cli.train import PLACES, Train

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5  # of the others, to say what they have to say when one has ended badly


@dataclass(frozen=True)
class Launch:
    """Run a command in several processes on this machine."""

    details: ClassVar[str] = (
        "What follows -- is the command, which is train: shardax launch -n 4 -- train --mesh "
        "data=4. Output lines begin with the number of their process. When one process ends badly, "
        "all are ended, and the last line says which one it was and why. SIGINT and SIGTERM stop "
        "all of them at one step, with a checkpoint."
    )

    # How many processes.
    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])]
    # Virtual CPU devices of each process. By default each process has a GPU.
    devices: int | None = None
    # How often to go on from the newest good checkpoint after a process has ended badly.
    restarts: int = 0
    words: tyro.conf.Suppress[tuple[str, ...]] = ()
    launched: tyro.conf.Suppress[Train | None] = None

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        check_values(vars(self))
        train = self.launched
        if train is None:
            first_word = f"{self.words[0]!r}" if self.words else "nothing"
            raise CommandError(
                "shardax launch runs train in several processes, but -- is followed by "
                f"{first_word}: shardax launch -n 2 --devices 4 -- train --mesh data=8."
            )

        if place_options := [name for name in PLACES[:3] if getattr(train, name) is not None]:
            raise CommandError(f"--{place_options[0]} is what shardax launch gives; leave it out.")

        words, left = list(self.words), self.restarts
        while True:
            cause = _run_once(words, self.processes, self.devices)
            if cause is None:
                return 0

            print(f"shardax: {cause}", file=sys.stderr, flush=True)
            if left == 0 or cause.is_final:
                return 1

            left -= 1
            if (train.out / RUN_FILE).is_file() and "--resume" not in words:
                words.append("--resume")
            print(f"shardax: starting again, {left} restarts left", file=sys.stderr, flush=True)


class Cause(str):
    """The failed process, and the reason, in one line."""

    is_final = False  # whether another try would end the same way


def _run_once(words: Sequence[str], count: int, devices: int | None) -> Cause | None:
    """Runs the processes to the end; returns None if all end well."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    running: list[_Child] = []
    with _forwarding(running) as requests:
        try:
            for index in range(count):
                place = ["--coordinator", f"localhost:{port}", "--processes", str(count)]
                command = [sys.executable, "-m", "shardax", *words, *place, "--process", str(index)]
                running.append(_Child(index, command, _environment(index, devices)))

            first: _Child | None = None
            limit = float("inf")
            while any(child.status is None for child in running) and time.monotonic() < limit:
                if first is None:
                    first = next((child for child in running if child.status), None)
                    limit = time.monotonic() + _GRACE_SECONDS if first else limit
                if len(requests) > 1:  # asked twice: at once
                    limit = 0.0
                time.sleep(_POLL_SECONDS)
            first = first or next((child for child in running if child.status), None)
        finally:
            for child in running:
                child.end()
    if first is None and len(requests) < 2:
        return None

    cause = Cause("interrupted" if first is None else first.cause())
    cause.is_final = bool(requests) or (first is not None and first.status == 2)
    return cause


@contextmanager
def _forwarding(running: Sequence[_Child]) -> Generator[list[int]]:
    """Passes requests to stop on to the processes; yields those received."""
    requests: list[int] = []

    def forward(number: int, frame: object) -> None:
        requests.append(number)
        # One is enough: it tells the others. But it may be the one that has just ended.
        for child in running:
            child.popen.send_signal(signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    old_handlers = {number: signal.signal(number, forward) for number in numbers} if in_main else {}
    try:
        yield requests
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _environment(index: int, devices: int | None) -> dict[str, str]:
    if devices is not None:
        return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if visible and index >= len(visible):
        raise CommandError(
            f"CUDA_VISIBLE_DEVICES names {len(visible)} GPUs, but process {index} needs one too. "
            "Use fewer processes, or virtual CPU devices: --devices 2."
        )
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible[index] if visible else str(index)}


class _Child:
    """One of the processes, with its output passed on."""

    def __init__(self, index: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.index = index

        # In a session of its own: Ctrl-C in a terminal reaches it once, through ``forward``.
        self.popen = subprocess.Popen(
            command,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        self._said: list[str] = []  # the last of stderr
        streams = ((self.popen.stdout, sys.stdout), (self.popen.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=self._pass_on, args=pair, daemon=True) for pair in streams
        ]
        for thread in self._threads:
            thread.start()

    @property
    def status(self) -> int | None:
        return self.popen.poll()

    def _pass_on(self, source: TextIO, target: TextIO) -> None:
        for line in source:
            if line.startswith("[Gloo] "):  # written by JAX's collectives, one a connection
                continue
            if target is sys.stderr and line.strip():
                self._said = [*self._said[-200:], line.rstrip()]
            target.write(
                f"[{self.index}] {line}" if line.endswith("\n") else f"[{self.index}] {line}\n"
            )
            target.flush()

    def end(self) -> None:
        """Kills it if it still runs; waits for its output."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for thread in self._threads:
            thread.join(2)

    def cause(self) -> str:
        """Returns the end of the process in one line."""
        status = self.popen.returncode
        if status is not None and status < 0:
            return f"process {self.index} was ended by {signal.Signals(-status).name}"
        log = [line for line in self._said if line.startswith("shardax: ")]
        text = log[-1].removeprefix("shardax: ") if log else (self._said or ["it said nothing"])[-1]
        return f"process {self.index} ended with status {status}: {text}"
