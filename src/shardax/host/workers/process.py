# SPDX-License-Identifier: Apache-2.0
"""Starting a worker's process, from the side of its owner.

The options, the key among them, go to the process through its standard input: what is in arguments
or in the environment can be seen by others. The pipe stays open, so the process notices when its
owner has ended, however it did.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from shardax.config.configure import configure
from shardax.host.errors import WorkerStartError
from shardax.host.workers.calls import STUCK

_BOOT = (
    "import json, sys; options = json.loads(sys.stdin.readline()); sys.path[:] = options['path']; "
    "from shardax.host.workers.server import main; main(options)"
)


class WorkerProcess:
    """A running worker.

    Args:
        options: What ``server.main`` is given, as JSON values, but for what is known here only.
        env: Environment variables to set in the process, besides those of this one.
        seconds: How long it may take to start.
        log: Where a detached process writes what is printed in it.

    Attributes:
        address: Where it listens.
        pid: Its number.

    Raises:
        WorkerStartError: If it does not start.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        env: Mapping[str, str] | None,
        seconds: float,
        log: str | None = None,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="shardax-worker-")
        reading, writing = os.pipe()
        told = {**options, "folder": self._folder, "ready": writing, "path": sys.path}
        with contextlib.ExitStack() as stack:
            printed = stack.enter_context(open(log, "a+b")) if log else None
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=printed,
                pass_fds=[writing],
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C in a terminal is for the owner alone
            )
        os.close(writing)
        assert self.popen.stdin is not None
        try:
            with os.fdopen(reading) as ready:
                self.popen.stdin.write(json.dumps(told).encode() + b"\n")
                self.popen.stdin.flush()
                answer = _first_line(ready, seconds, log)
            if "error" in answer:
                raise WorkerStartError(f"The worker could not start:\n\n{answer['error']}")
        except BaseException as error:
            self.end(0)
            if isinstance(error, BrokenPipeError):
                raise WorkerStartError("The process of the worker ended at once.") from error
            raise
        address = answer["address"]
        self.address: str | tuple[str, int] = (
            address if isinstance(address, str) else (address[0], address[1])
        )
        self.pid: int = answer["pid"]

    def ending(self, seconds: float) -> str:
        """Waits for the process to have ended, and says how it did; ends it if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(seconds)
        code = self.popen.poll()
        if code is None:
            return f"its process ({self.pid}) did not answer and was killed"
        if code == STUCK:
            return f"its process ({self.pid}) ended because a call could not be interrupted"
        if code < 0:
            return f"its process ({self.pid}) was killed by {signal.Signals(-code).name}"
        return f"its process ({self.pid}) ended with status {code}"

    def end(self, seconds: float) -> None:
        """Ends the process: it is asked to, and killed if it has not ended after some seconds."""
        if self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.close()
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def let_go(self) -> None:
        """Leaves a detached process to itself."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.returncode = 0  # not ours to wait for: silences Popen's warning


def _first_line(ready: Any, seconds: float, log: str | None) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    readable, _, _ = select.select([ready], [], [], max(0.0, deadline - time.monotonic()))
    if not readable:
        raise WorkerStartError(
            f"The worker did not start within {seconds:g} seconds. Give it more: "
            f"sx.host.Worker(start_timeout={2 * seconds:g})."
        )
    line = ready.readline()
    if not line:
        raise WorkerStartError(
            "The process of the worker ended while it started; what it said is in "
            f"{log or 'the output of this process'}."
        )
    return json.loads(line)


def settings_here() -> dict[str, Any]:
    """Returns the settings of this process that a worker takes over, as for ``configure``."""
    settings = configure().settings
    return {name: value for name, value in settings.items() if value is not None}
