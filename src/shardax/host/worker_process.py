# SPDX-License-Identifier: Apache-2.0
"""Process of a worker: a ``distributed`` server running calls.

The server runs in a thread. Calls run in the main thread, one after the other, because only there
Python lets a signal interrupt what runs: it raises ``CallInterrupted`` at the next step of Python.
Each client holds one connection, of ``attach``. When that ends the client's values without a name
are dropped, and its calls are interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import platform
import queue
import re
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dask.config
from distributed import Security
from distributed.comm.core import Comm
from distributed.core import Server, Status
from distributed.protocol.serialize import to_serialize

from shardax import configure
from shardax.extend import PyTree
from shardax.host.calls import FunctionTable, check_size, encode
from shardax.host.errors import WorkerError

STUCK = 75  # the exit status of a worker whose call could not be interrupted (EX_TEMPFAIL)
END_SECONDS = 5.0  # for the call that runs, when the worker ends
MOST_TEXT = 100_000  # characters of a traceback, from its end


class CallInterrupted(BaseException):  # so code that handles exceptions lets it pass
    """Raised inside of a call to stop it."""


# --- what both sides use ---


def credentials_of(security: Security) -> bytes:
    """The certificate and private key of a worker, as PEM."""
    return f"{security.tls_scheduler_cert}{security.tls_scheduler_key}".encode()


def security_of(credentials: bytes) -> Security:
    """TLS with proof of the private key by both sides."""
    blocks = re.findall(r"-----BEGIN [^-]+-----[^-]+-----END [^-]+-----\n", credentials.decode())
    if len(blocks) != 2:
        raise ValueError("no certificate and private key in PEM")
    certificate, key = blocks
    return Security(
        require_encryption=True,
        tls_ca_file=certificate,  # so the peer's certificate can be no other
        tls_client_cert=certificate,
        tls_client_key=key,
        tls_scheduler_cert=certificate,
        tls_scheduler_key=key,
    )


def python_version() -> str:
    """Version of Python for pickles of code."""
    return ".".join(platform.python_version_tuple()[:2])


# --- the server ---


@dataclass(eq=False)
class _Call:
    client: str
    name: str
    reason: str | None = None  # why it is to stop: "cancelled" or "timeout"
    raised: bool = False  # whether CallInterrupted was
    waiting: asyncio.Task[Any] | None = None  # for its turn


class CallServer(Server):
    """Remote procedures of a worker, and its values."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        procedures = ("attach", "run", "interrupt", "drop", "info", "stop_process")
        super().__init__({name: getattr(self, name) for name in procedures}, needs_workdir=False)

        self._limit: int = options["max_message"]
        self._kill_after: float | None = options["kill_after"]
        self._functions = FunctionTable(options["functions"])
        self._clients: set[str] = set()

        # Values by name or number, with the client if unnamed. Numbers do not begin at 1: that of a
        # worker that has ended must mean nothing to the next one.
        self._values: dict[int | str, tuple[Any, str | None]] = {}
        self._numbers = itertools.count(secrets.randbits(48))

        # Calls run one after another, as jobs of the main thread.
        self._calls: dict[tuple[str, int], _Call] = {}  # that run or wait, by client and number
        self._turn = asyncio.Lock()
        self._current: _Call | None = None
        self._interruptible: _Call | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()

        # The first client may take as long to connect as the process may take to start.
        self._last_used = time.monotonic() + (options["start_timeout"] or 0.0)
        if options["idle_timeout"] is not None:
            self._watching = asyncio.create_task(self._end_when_idle(options["idle_timeout"]))

    # --- procedures: in the thread of the event loop ---

    async def attach(self, comm: Comm, client: str) -> Status:
        """Register a client until its connection ends."""
        self._clients.add(client)
        try:
            await comm.write({"python": python_version(), "max_message": self._limit})
            await comm.read()  # clients send nothing more, so this returns when they are gone
        except OSError:
            pass

        finally:
            self._clients.discard(client)
            self._last_used = time.monotonic()
            for key in [key for key, (_, owner) in self._values.items() if owner == client]:
                del self._values[key]
            for call in self._calls.values():
                if call.client == client:
                    self._interrupt(call, "cancelled")
            comm.abort()
        return Status.dont_reply

    async def run(
        self, client: str, number: int, name: str, timeout: float | None, **request: object
    ) -> dict[str, PyTree] | None:
        """Runs a call in its turn; None if its client is gone."""
        if client not in self._clients:
            return None

        call = self._calls[client, number] = _Call(client, name)
        call.waiting = asyncio.create_task(self._turn.acquire())
        try:
            await call.waiting
        except asyncio.CancelledError:
            del self._calls[client, number]
            return {"error": "cancelled", "text": "before it began", "parts": []}

        done = self._loop.create_future()

        def answer() -> None:
            reply = self._answer(call, **request)
            self._loop.call_soon_threadsafe(done.set_result, reply)

        self._current = call
        self._jobs.put(answer)
        timer = None
        if timeout:
            timer = self._loop.call_later(timeout, self._interrupt, call, "timeout")

        try:
            return await done
        finally:
            self._current = None
            del self._calls[client, number]
            if timer:
                timer.cancel()
            self._turn.release()
            self._last_used = time.monotonic()

    async def interrupt(self, client: str, number: int) -> bool:
        """Interrupt a call; False if it has not arrived, or is over."""
        call = self._calls.get((client, number))
        if call is not None:
            self._interrupt(call, "cancelled")
        return call is not None

    async def drop(self, key: int | str) -> None:
        """Forget a value."""
        self._values.pop(key, None)

    async def info(self) -> dict[str, Any]:
        """Facts about the worker."""
        return {
            "pid": os.getpid(),
            "clients": len(self._clients),
            "running": None if self._current is None else self._current.name,
            "functions": self._functions.summary(),
            "values": sorted(key for key in self._values if isinstance(key, str)),
        }

    async def stop_process(self) -> None:
        """End the process: politely, then at once."""
        timer = threading.Timer(END_SECONDS, os._exit, [0])
        timer.daemon = True
        timer.start()
        self._jobs.put(None)
        if self._current is not None:
            self._interrupt(self._current, "cancelled")

    def _interrupt(self, call: _Call, reason: str) -> None:
        if call.reason is not None:
            return
        call.reason = reason
        if self._current is not call:
            assert call.waiting is not None
            call.waiting.cancel()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            if self._kill_after is not None:
                self._loop.call_later(self._kill_after, self._kill, call)

    def _kill(self, call: _Call) -> None:
        if self._current is call:
            os._exit(STUCK)

    async def _end_when_idle(self, seconds: float) -> None:
        while self._clients or self._turn.locked() or time.monotonic() - self._last_used <= seconds:
            await asyncio.sleep(min(1.0, seconds / 4))
        await self.stop_process()

    # --- calls: in the main thread ---

    def serve(self) -> None:
        """Run calls until the worker ends."""
        signal.signal(signal.SIGUSR1, self._on_signal)
        while (job := self._jobs.get()) is not None:
            job()

    def _on_signal(self, *_: object) -> None:
        call = self._interruptible
        if call is not None and call.reason is not None and not call.raised:
            call.raised = True
            raise CallInterrupted(call.reason)

    def _answer(self, call: _Call, **request) -> dict[str, Any]:
        try:
            try:
                self._interruptible = call
                if call.reason is not None:  # the signal came before
                    self._on_signal()
                return self._result(call, **request)
            finally:
                self._interruptible = None
        except BaseException as error:  # noqa: BLE001 (it is the client's)
            interrupted = isinstance(error, CallInterrupted)
            text = traceback.format_exc()[-MOST_TEXT:].encode(errors="replace").decode()

            parts = []
            # Pickling the user's exception may raise anything.
            with contextlib.suppress(Exception):
                parts = [] if interrupted else self._encoded(error)
            return {
                "error": call.reason if interrupted else "raised",
                "text": text,
                "parts": to_serialize(parts),
            }

    def _encoded(self, value: object) -> list[Any]:
        parts = encode(value)
        check_size(parts, self._limit)
        return parts

    def _result(
        self, call: _Call, head: bytes, parts: Sequence[Any], keep: bool | str
    ) -> dict[str, Any]:
        result = self._functions.run(head, parts, self._value)
        if keep is False:
            return {"error": None, "parts": to_serialize(self._encoded(result))}

        named = isinstance(keep, str)
        key = keep if named else next(self._numbers)
        if named or call.client in self._clients:
            self._values[key] = (result, None if named else call.client)

        text = repr(result)
        if len(text) > 200:
            text = f"{text[:200]}..."
        return {"error": None, "kept": key, "text": text}

    def _value(self, key: int | str):
        try:
            return self._values[key][0]
        except KeyError:
            names = ", ".join(repr(key) for key in self._values if isinstance(key, str))
            raise WorkerError(
                f"The worker keeps no value {key!r}. It was deleted, or the worker was started "
                f"anew since. Kept by name: {names or 'none'}."
            ) from None


def main(options: Mapping[str, Any]) -> None:
    """Run a worker in this process."""
    for name in ("distributed.core", "distributed.comm"):
        # Messages of the server about peers that break off are no output of the calls.
        logging.getLogger(name).setLevel(logging.CRITICAL)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="worker-server", daemon=True).start()

    async def start() -> tuple[CallServer, bytes]:
        with dask.config.set({"distributed.worker.profile.enabled": False}):
            server = CallServer(options)
        security = Security.temporary()
        await server.listen("tls://127.0.0.1:0", **security.get_listen_args("scheduler"))
        return server, credentials_of(security)

    def end() -> None:
        asyncio.run_coroutine_threadsafe(server.stop_process(), loop)

    def answer(**facts) -> None:
        # Who starts it may have ended meanwhile.
        with contextlib.suppress(BrokenPipeError), os.fdopen(options["ready"], "w") as ready:
            json.dump(facts, ready)

    try:
        configure(**options["configure"])
        server, credentials = asyncio.run_coroutine_threadsafe(start(), loop).result()
    except Exception:  # noqa: BLE001 (whoever starts the worker raises it)
        answer(error=traceback.format_exc())
        sys.exit(1)

    signal.signal(signal.SIGTERM, lambda *_: end())
    answer(address=server.address, key=credentials.decode(), pid=os.getpid())

    if not options["detached"]:
        threading.Thread(target=_end_with_parent, args=[end], daemon=True).start()

    server.serve()
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(END_SECONDS)


def _end_with_parent(end: Callable[[], None]) -> None:
    while os.read(0, 1):  # the pipe ends with the process that has the other end
        pass
    end()
