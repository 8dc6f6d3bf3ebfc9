# SPDX-License-Identifier: Apache-2.0
"""Runs of several real processes on CPU devices, with a time limit, none left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAMS = "tests.distributed.programs"
SECONDS = 120  # of a machine that does much else; a run takes a tenth of it


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(devices: int | None = None) -> dict[str, str]:
    """The variables of this process, for others with their own number of devices."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    return found | ({} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices)})


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
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts ``programs.<program>(arguments)`` in several processes, and kills what is left."""
    port = free_port()
    running: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for index in range(processes):
            out, err = (
                stack.enter_context(open(folder / f"{name}{index}", "w")) for name in ("out", "err")
            )
            command = [sys.executable, "-m", PROGRAMS, program, json.dumps(arguments)]
            command += [f"localhost:{port}", str(processes), str(index), str(folder)]
            running.append(
                subprocess.Popen(
                    command, cwd=folder, env=environment(devices), stdout=out, stderr=err, text=True
                )
            )
        try:
            yield running
        finally:
            for each in running:
                if each.poll() is None:
                    each.send_signal(signal.SIGKILL)
                each.wait()


def ends(running: Sequence[subprocess.Popen[str]], folder: Path) -> list[Ended]:
    """Waits until all processes have ended."""
    limit = time.monotonic() + SECONDS
    for each in running:
        each.wait(max(0.1, limit - time.monotonic()))
    return [
        Ended(
            each.returncode,
            (folder / f"out{index}").read_text(),
            (folder / f"err{index}").read_text(),
            json.loads(file.read_text()) if (file := folder / f"result{index}").exists() else None,
        )
        for index, each in enumerate(running)
    ]


def run(program: str, arguments: Any, folder: Path, **options: Any) -> list[Any]:
    """Returns what a program returned in each process; all must end well."""
    with started(program, arguments, folder, **options) as running:
        found = ends(running, folder)
    assert [each.status for each in found] == [0] * len(found), "\n".join(e.err for e in found)
    return [each.result for each in found]
