# SPDX-License-Identifier: Apache-2.0
"""A process that has imported everything and forks the processes of the tests.

Each line of its standard input is a request of ``tests.training.distributed.processes``: to fork a
process, or to say whether one has ended. A forked process runs one program and ends; or it takes
commands, one after another, until there are no more.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import shardax as sx
from tests.training.distributed import programs

# What programs import when they first need it.
LATE = [
    "grain",
    "jax.experimental.array_serialization.serialization",
    "jax.experimental.multihost_utils",
    "orbax.checkpoint",
    "shardax.host",
    "shardax.named",
    "shardax.view",
]


def forked() -> dict[str, Any] | None:
    """Serves requests; returns, in each process that is forked, what it is to do."""
    children: set[int] = set()
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "fork" in request:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                return request["fork"]
            children.add(pid)
            answer = pid
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            children.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def write_to(out: Path | str, err: Path | str) -> None:
    """Makes files the standard output and the standard error of this process."""
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, 1 if stream is sys.stdout else 2)
        os.close(file)


def begin(job: dict[str, Any]) -> None:
    """Makes a forked process one that was started by itself, with the devices of the job."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    write_to(job["out"], job["err"])
    os.chdir(job["folder"])
    # The tests may run where SIGINT is ignored, as a background job of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    jax.config.update("jax_num_cpu_devices", job["devices"])


def commands(path: str) -> Iterator[list[Any]]:
    """Yields the commands that are written into a pipe."""
    with open(path) as pipe:
        for line in pipe:
            yield json.loads(line)


def put(file: Path, result: Any) -> None:
    """Writes a result, which is there as a whole or not at all."""
    file.with_suffix(".new").write_text(json.dumps(result))
    file.with_suffix(".new").rename(file)


def work(job: dict[str, Any]) -> None:
    """Runs the program of a job, or the commands that come for it."""
    process = job["process"]
    begin(job)
    sx.distributed.initialize(job["coordinator"], job["processes"], process)
    if "program" in job:
        folder = Path(job["folder"])
        result = getattr(programs, job["program"])(job["arguments"], folder)
        put(folder / f"result{process}", {"result": result})
        return
    for program, arguments, at in commands(job["commands"]):
        folder = Path(at)
        write_to(folder / f"out{process}", folder / f"err{process}")
        try:
            found = {"result": getattr(programs, program)(arguments, folder)}
        except BaseException:  # noqa: BLE001 (told to the test, which ends the group)
            found = {"error": traceback.format_exc()}
        write_to(job["out"], job["err"])
        put(folder / f"result{process}", found)


def main() -> None:
    """Serves, and does in each forked process what it is to do."""
    for module in LATE:
        with contextlib.suppress(ImportError):  # grain is optional
            importlib.import_module(module)
    gc.freeze()
    job = forked()
    if job is not None:
        work(job)


if __name__ == "__main__":
    main()
