# SPDX-License-Identifier: Apache-2.0
"""Connections to workers: starting or finding the process, authenticating, calling.

Options go to the process through its standard input, and its credentials come back through a pipe:
arguments and the environment can be seen by others. The standard input stays open, so the process
notices when its owner has ended, however it did.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from shardax import configure
from shardax.extend import Options
from shardax.host import errors
from shardax.host.calls import decode

CONNECT_SECONDS = 10.0
LOST_SECONDS = 2.0  # that a process may take to end after its connection has
LOST = "it ended the connection"
MISSED_BEATS = 4  # heartbeats without an answer after which a worker counts as lost

_BOOT = (
    "import json, sys; options = json.loads(sys.stdin.readline()); sys.path[:] = options['path']; "
    "from shardax.host.worker_process import main; main(options)"
)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all connections of this process, in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="worker-client", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_event_loop.cache_clear)  # its thread does not come along


# --- calls ---


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker."""

    def __str__(self) -> str:
        return f"\n\nIn the worker:\n{self.args[0]}"


class WorkerFuture(concurrent.futures.Future[Any]):
    """The result of a call to a worker, when it is there.

    ``cancel`` is that of all executors: it succeeds as long as the call has not been sent.

    Example:
        >>> import shardax as sx
        >>> with sx.host.Worker() as worker:
        ...     future = worker.submit(sum, [1, 2])
        ...     print(type(future).__name__, future.result())
        WorkerFuture 3
    """

    def __init__(
        self, request: dict[str, Any], receive: Callable[[dict[str, Any]], Any], retries: int
    ) -> None:
        super().__init__()
        self._request = request  # arguments of the procedure that runs the call
        self._receive = receive  # makes the result of a reply
        self.retries_left = retries  # how often it may still be run again if the worker is lost
        self._is_idempotent = retries > 0
        self._interrupter: Callable[[], None] | None = None  # of the connection that has the call
        self._interrupted = False
        self._process_id = os.getpid()

    def result(self, timeout: float | None = None) -> Any:
        """Returns the result of the call, or raises its exception."""
        self._require_process()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the exception of the call, or None."""
        self._require_process()
        return super().exception(timeout)

    def _require_process(self) -> None:
        if not self.done():
            errors.require_process(self._process_id)

    def interrupt(self) -> None:
        """Cancels the call, also if it runs.

        Then an exception stops it in the worker, at the next step of Python. A compilation or a
        program that JAX runs ends before. ``result()`` raises ``CallCancelledError``.
        """
        if not self.cancel() and not self.done():
            self._interrupted = True
            if (interrupter := self._interrupter) is not None:
                interrupter()

    def _begin(self) -> bool:
        """Mark the call as sent; False if it was cancelled before."""
        return self.running() or self.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Ends the call with an exception, unless it was cancelled; for its worker."""
        if self._begin():
            self.set_exception(error)

    def lose(self, reason: str) -> None:
        """Ends the call with the loss of its worker; for that worker."""
        advice = (
            "It has been run again as often as it may."
            if self._is_idempotent
            else "It was not run again, since it is not marked idempotent. A function that may be "
            "run again from its beginning is marked so: worker.request(f, args, idempotent=True)."
        )

        when = "while it ran or waited there" if self.running() else "before it began"
        name = self._request["name"]
        self.fail(
            errors.WorkerCrashedError(f"The worker of {name} was lost {when}: {reason}. {advice}")
        )

    def _settle(self, reply: dict[str, object]) -> None:
        """End the call with the result or the error of a reply."""
        try:
            if reply["error"] is not None:
                self.set_exception(self._error(reply))
            else:
                self.set_result(self._receive(reply))
        except BaseException as error:  # noqa: BLE001 (the result cannot be read here)
            self.set_exception(error)

    def _error(self, reply: dict[str, Any]) -> Exception:
        text: str = reply["text"]
        name = self._request["name"]
        if reply["error"] == "cancelled":
            return errors.CallCancelledError(f"{name} was interrupted in its worker: {text}")

        error = None
        if reply["error"] == "timeout":
            error = errors.WorkerTimeoutError(
                f"{name} ran in a worker for longer than its timeout of "
                f"{self._request['timeout']:g} seconds and was interrupted."
            )
        elif reply["parts"]:
            # The class of the exception need not unpickle here.
            with contextlib.suppress(Exception):
                error = decode(reply["parts"])

        # The caller's process is not to end because something in the worker wanted to.
        if not isinstance(error, Exception):
            error = errors.WorkerError(
                f"{name} raised in its worker what cannot be sent as an object; "
                f"it ended with: {text.rstrip().splitlines()[-1]}"
            )

        error.__cause__ = WorkerTraceback(text)
        return error


class Connection:
    """A connection to a worker, with calls in order."""

    def __init__(
        self,
        address: str,
        credentials: bytes,
        heartbeat: float,
        on_lost: Callable[[], Callable[[Connection, list[WorkerFuture], str], None] | None],
    ) -> None:
        # `on_lost` is a weak reference. Its function is called once, in a thread of its own, when
        # the connection has ended, with the calls that have no result, and the reason.
        self.address = address
        self.lost = False
        self._client = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._calls: dict[int, WorkerFuture] = {}
        self._on_lost = on_lost
        self._heartbeat = heartbeat
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

        self._loop = _event_loop()
        self._run(self._open(credentials))
        self._spawn(self._attend())
        self._spawn(self._beat())

    async def _open(self, credentials: bytes) -> None:
        from distributed.comm.core import FatalCommClosedError, connect
        from distributed.core import rpc

        from shardax.host.worker_process import python_version, security_of

        advice = "Pass those of the worker: sx.host.Worker.connect(worker.address, worker.authkey)."
        try:
            arguments = security_of(credentials).get_connection_args("client")
        except ValueError as error:
            raise errors.WorkerError(
                f"These are not the credentials of a worker ({error}). {advice}"
            ) from None

        try:
            host, _, port = self.address.removeprefix("tls://").rpartition(":")
            # `connect` would try again and again.
            await asyncio.to_thread(
                lambda: socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            )
            self._turn = asyncio.Lock()
            self._comm = await connect(self.address, timeout=CONNECT_SECONDS, **arguments)
            self._rpc = rpc(self.address, timeout=CONNECT_SECONDS, connection_args=arguments)
            await self._comm.write({"op": "attach", "client": self._client})
            hello = await asyncio.wait_for(self._comm.read(), CONNECT_SECONDS)
        except FatalCommClosedError as error:
            raise errors.WorkerAuthenticationError(
                f"The worker at {self.address!r} and its client could not show each other that "
                f"they have the same credentials ({error}). {advice}"
            ) from None
        except (TimeoutError, OSError, ValueError) as error:
            raise errors.WorkerCrashedError(
                f"No worker listens at {self.address!r} ({error!r}). It has ended, or was never "
                f"there."
            ) from error

        if hello["python"] != python_version():
            self._comm.abort()
            raise errors.WorkerError(
                f"The worker at {self.address!r} runs Python {hello['python']}, and this process "
                f"Python {python_version()}: functions and values cannot be sent between them."
            )
        self.max_message: int = hello["max_message"]

    def _run(self, coroutine: Coroutine[Any, Any, Any]):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine from any thread, in the order of its thread."""

        def start() -> None:
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)  # an event loop itself keeps no reference
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)

    def submit(self, call: WorkerFuture) -> bool:
        """Queue a call; False if the connection is lost."""
        with self._lock:
            if self.lost:
                return False
            number = next(self._numbers)
            self._calls[number] = call
        call._interrupter = lambda: self._spawn(self._interrupt(number, call))
        self._spawn(self._perform(number, call))
        return True

    async def _perform(self, number: int, call: WorkerFuture) -> None:
        async with self._turn:
            if self.lost:  # whoever lost it has the call
                return

            name = call._request["name"]
            if not call._begin():
                self._take(number)
            elif call._interrupted:  # between the loss of a worker and its being run again
                text = f"{name} was interrupted; it was not rerun."
                self._take(number).fail(errors.CallCancelledError(text))
            else:
                try:
                    reply = await self._rpc.run(client=self._client, number=number, **call._request)
                except OSError:
                    reply = None
                if reply is None:
                    self._lose(LOST)
                else:
                    self._take(number)._settle(reply)

    def _take(self, number: int) -> WorkerFuture:
        # From here on, it is not lost with the connection.
        with self._lock:
            call = self._calls.pop(number)
        call._interrupter = None  # which refers to the call: its result is freed with the future
        return call

    async def _interrupt(self, number: int, call: WorkerFuture) -> None:
        with contextlib.suppress(OSError):
            while not call.done() and not await self._rpc.interrupt(
                client=self._client, number=number
            ):
                await asyncio.sleep(0.01)  # the call itself is still on its way

    def drop(self, key: int | str) -> None:
        """Free a value, before the next call at the latest."""
        if not self.lost:
            self._spawn(self._drop(key))

    async def _drop(self, key: int | str) -> None:
        with contextlib.suppress(OSError):
            async with self._turn:
                await self._rpc.drop(key=key)

    def ask(self, procedure: str, seconds: float) -> Any:
        """Run a procedure of the worker."""
        try:
            if self.lost:
                raise OSError("the connection is lost")
            return self._run(asyncio.wait_for(getattr(self._rpc, procedure)(), seconds))
        except (TimeoutError, OSError) as error:
            raise errors.WorkerCrashedError(
                f"The worker did not answer within {seconds:g} seconds ({error!r})."
            ) from error

    def pending(self) -> list[WorkerFuture]:
        """Calls without a result."""
        with self._lock:
            return list(self._calls.values())

    def close(self) -> None:
        """End the connection."""
        self._loop.call_soon_threadsafe(self._lose, "it was shut down")
        self._over.wait()

    def wait_for_end(self) -> None:
        """Wait until the connection has ended."""
        self._over.wait()

    async def _attend(self) -> None:
        with contextlib.suppress(OSError):
            await self._comm.read()  # the worker sends nothing more, so this ends when it does
        self._lose(LOST)

    async def _beat(self) -> None:
        patience = MISSED_BEATS * self._heartbeat
        while not self.lost:
            await asyncio.sleep(self._heartbeat)
            try:
                await asyncio.wait_for(self._rpc.echo(data=0), patience)
            except TimeoutError:
                self._lose(f"it did not answer for {patience:g} seconds")
            except OSError:
                self._lose(LOST)

    def _lose(self, why: str) -> None:
        """End the connection, in the thread of the event loop."""
        with self._lock:
            if self.lost:
                return
            self.lost = True
            calls, self._calls = list(self._calls.values()), {}

        current = asyncio.current_task(self._loop)
        for task in self._tasks - {current}:
            task.cancel()
        for comm in (self._comm, *self._rpc.comms):
            comm.abort()

        self._closing = self._loop.create_task(self._rpc.close_rpc())
        self._over.set()
        if (on_lost := self._on_lost()) is not None:
            threading.Thread(target=on_lost, args=[self, calls, why], daemon=True).start()


# --- processes ---


class WorkerProcess:
    """Process of a worker, started by this process."""

    def __init__(self, options: Mapping[str, Any], log: str | None = None) -> None:
        # `options` are those of `Worker`; with a log of its own it outlives this process.
        settings = {key: value for key, value in configure().settings.items() if value is not None}
        message = {
            **options,
            "configure": {**settings, **options["configure"]},
            "detached": log is not None,
            "path": sys.path,
        }

        log = log or options["log"]

        reading, writing = os.pipe()
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(log, "a+b")) if log else None
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writing],
                env={**os.environ, **options["env"]},
                start_new_session=True,  # Ctrl-C in a terminal is for the owner alone
            )

        os.close(writing)
        assert self._popen.stdin is not None
        try:
            with os.fdopen(reading) as ready:
                message["ready"] = writing
                self._popen.stdin.write(json.dumps(message).encode() + b"\n")
                self._popen.stdin.flush()
                answer = _first_answer(ready, options["start_timeout"], log)
        except BaseException as error:
            self.end(0)
            if isinstance(error, BrokenPipeError):
                raise errors.WorkerError("The process of the worker ended at once.") from error
            raise

        self.address: str = answer["address"]
        self.credentials: bytes = answer["key"].encode()
        self.pid: int = answer["pid"]

    def ending(self, seconds: float) -> str:
        """Wait for the end of the process, and describe it."""
        from shardax.host.worker_process import STUCK

        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)

        code = self._popen.poll()
        if code is None:
            return f"its process ({self.pid}) did not answer and was killed"
        if code == STUCK:
            return f"its process ({self.pid}) ended because a call could not be interrupted"
        if code < 0:
            return f"its process ({self.pid}) was killed by {signal.Signals(-code).name}"
        return f"its process ({self.pid}) ended with status {code}"

    def end(self, seconds: float) -> None:
        """End the process, killing it if it takes too long."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def detach(self) -> None:
        """Leave the process to itself."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.returncode = 0  # not ours to wait for: silences Popen's warning


def _first_answer(ready, seconds: float, log: str | None) -> dict[str, Any]:
    readable, _, _ = select.select([ready], [], [], seconds)
    if not readable:
        raise errors.WorkerError(
            f"The worker did not start within {seconds:g} seconds. Give it more: "
            f"sx.host.Worker(start_timeout={2 * seconds:g})."
        )

    line = ready.readline()
    if not line:
        raise errors.WorkerError(
            "The process of the worker ended while it started; what it said is in "
            f"{log or 'the output of this process'}."
        )

    answer = json.loads(line)
    if "error" in answer:
        raise errors.WorkerError(f"The worker could not start:\n\n{answer['error']}")
    return answer


# --- where a worker comes from ---

Connect = Callable[[str, bytes], Connection]


class GivenAddress:
    """A worker started by another process."""

    def __init__(self, address: str, credentials: bytes) -> None:
        self._where = repr(address)
        self._address, self._credentials = address, credentials

    def open(self, connect: Connect) -> Connection:
        """Connect to the worker, starting its process if need be."""
        return connect(self._address, self._credentials)

    def ending(self) -> str:
        """Describe the loss of the connection."""
        return f"the connection to {self._where} was lost"

    def close(self) -> None:
        """End the process, if it belongs to this program."""


class OwnProcess(GivenAddress):
    """A process of this program's own."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._process: WorkerProcess | None = None

    def open(self, connect: Connect) -> Connection:
        self.close()
        self._process = WorkerProcess(self._options)
        return connect(self._process.address, self._process.credentials)

    def ending(self) -> str:
        assert self._process is not None
        text = self._process.ending(LOST_SECONDS)
        self.close()
        return text

    def close(self) -> None:
        # One that has ended stays here: two threads may end it, of restart() and of its loss.
        if self._process is not None:
            self._process.end(LOST_SECONDS)


class NamedProcess(GivenAddress):
    """A named process, found by a file of its user."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        is_name = bool(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name))
        expected = "up to 64 letters, digits, '.', '_', '-'"
        Options(errors.WorkerError).check("name", name, is_name, expected)

        self._where = f"the worker named {name!r}"
        self._options = options
        # The options as they are read from the file; how long starting may take differs freely.
        self._recorded = json.loads(json.dumps({**options, "start_timeout": None}))

        folder = _private_folder()
        self._file, self._log = folder / f"{name}.json", folder / f"{name}.log"
        self._lock = folder / f"{name}.lock"

    def open(self, connect: Connect) -> Connection:
        with open(self._lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # no other program is to start one meanwhile
            with contextlib.suppress(
                FileNotFoundError,
                json.JSONDecodeError,
                errors.WorkerCrashedError,
                errors.WorkerAuthenticationError,
            ):
                return self._found(json.loads(self._file.read_text()), connect)
            return self._started(connect)

    def _found(self, entry: Mapping[str, Any], connect: Connect) -> Connection:
        connection = connect(entry["address"], entry["key"].encode())
        if entry["options"] != self._recorded:
            connection.close()
            raise errors.WorkerError(
                f"T{self._where[1:]} runs with other options than those asked for: "
                f"{entry['options']}. Ask for the same, or end its process first: "
                f"kill {entry['pid']}"
            )
        return connection

    def _started(self, connect: Connect) -> Connection:
        process = WorkerProcess(self._options, log=str(self._log))
        try:
            connection = connect(process.address, process.credentials)
        except BaseException:
            process.end(0)
            raise

        entry = {
            "address": process.address,
            "key": process.credentials.decode(),
            "pid": process.pid,
            "options": self._recorded,
        }

        with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as file:
            json.dump(entry, file)  # such files can be read by their owner only
        os.replace(file.name, self._file)
        process.detach()
        return connection


def _private_folder() -> Path:
    """The folder with the credentials of named workers."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"shardax-workers-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)

    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.getuid():
        raise errors.WorkerError(
            f"{folder}, with the keys of named workers, must be a folder that belongs to you and "
            f"that only you can read. Remove it, or make it so: chmod 700 {folder}"
        )
    return folder
