# SPDX-License-Identifier: Apache-2.0
"""The process of a worker: a ``distributed`` server that runs calls.

Its remote procedures are those of a ``distributed.core.Server``, which runs in a thread. Calls run
in the main thread, one after the other, because only there Python lets a signal interrupt what
runs: it raises ``CallInterrupted`` at the next step of Python. A program or a compilation of JAX
ends before that.

A call takes two procedures. ``begin`` returns when it is the caller's turn; the caller then knows,
and nobody else has, that the call has begun, and sends it by ``run``, or declines by ``skip``. So a
cancelled call is never run, and of a call that a crash ended it is known whether it had begun.

Each client holds one connection, of ``attach``, for as long as it is there. When that ends the
client's values without a name are dropped, and its call is interrupted.
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

from shardax.config.configure import configure
from shardax.host.calls import FunctionTable, check_size, encode
from shardax.host.errors import RemoteValueError

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
    """TLS in which both sides prove to have the private key."""
    found = re.findall(r"-----BEGIN [^-]+-----[^-]+-----END [^-]+-----\n", credentials.decode())
    if len(found) != 2:
        raise ValueError("no certificate and private key in PEM")
    certificate, key = found
    return Security(
        require_encryption=True,
        tls_ca_file=certificate,  # so the peer's certificate can be no other
        tls_client_cert=certificate,
        tls_client_key=key,
        tls_scheduler_cert=certificate,
        tls_scheduler_key=key,
    )


def python_version() -> str:
    """The version of Python that pickles of code are tied to."""
    return ".".join(platform.python_version_tuple()[:2])


# --- the server ---


@dataclass(eq=False)
class _RunningCall:
    client: str
    number: int
    name: str
    is_running: bool = False
    reason: str | None = None  # why it is to stop: "cancelled" or "timeout"
    raised: bool = False  # whether CallInterrupted was


class CallServer(Server):
    """The remote procedures of a worker, and what it keeps."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(
            {
                "attach": self.attach,
                "begin": self.begin,
                "skip": self.skip,
                "run": self.run,
                "interrupt": self.interrupt,
                "drop": self.drop,
                "info": self.info,
                "stop": self.stop_process,
            },
            needs_workdir=False,
        )
        self._limit = int(options["max_message"])
        self._kill_after: float | None = options["kill_after"]
        self._idle_timeout: float | None = options["idle_timeout"]
        self._functions = FunctionTable(options["functions"])
        self._values: dict[int | str, tuple[Any, str | None]] = {}  # with the client, if unnamed
        # Not from 1: a number of a worker that has ended must mean nothing to the next one.
        self._numbers = itertools.count(secrets.randbits(48))
        self._clients: set[str] = set()
        self._turn = asyncio.Lock()
        self._current: _RunningCall | None = None
        self._interruptible: _RunningCall | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        if self._idle_timeout is not None:
            self._watching = asyncio.create_task(self._end_when_idle(self._idle_timeout))

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
            self._forget(client)
            comm.abort()
        return Status.dont_reply

    def _forget(self, client: str) -> None:
        self._clients.discard(client)
        for key in [key for key, (_, owner) in self._values.items() if owner == client]:
            del self._values[key]
        call = self._current
        if call is not None and call.client == client:
            if call.is_running:
                self._interrupt(call, "cancelled")
            else:
                self._end_turn()

    async def begin(self, client: str, number: int, name: str, drop: Sequence[int | str]) -> bool:
        """Wait for a call's turn, after forgetting dropped values."""
        await self.drop(drop)
        await self._turn.acquire()
        if client not in self._clients:  # it is gone, and so are its calls
            self._turn.release()
            return False
        self._current = _RunningCall(client, number, name)
        return True

    async def skip(self, client: str, number: int) -> None:
        """Give the turn of a call to the next one."""
        if self._is_current(client, number):
            self._end_turn()

    async def run(self, client: str, number: int, **request: Any) -> dict[str, Any] | None:
        """Run the call whose turn it is."""
        call = self._current
        if call is None or not self._is_current(client, number):
            return None
        call.is_running = True
        done = self._loop.create_future()

        def answer() -> None:
            reply = self._answer(call, **request)
            self._loop.call_soon_threadsafe(done.set_result, reply)

        self._jobs.put(answer)
        timeout = request["timeout"]
        timer = timeout and self._loop.call_later(timeout, self._interrupt, call, "timeout")
        try:
            return await done
        finally:
            if timer:
                timer.cancel()
            self._end_turn()

    async def interrupt(self, client: str, number: int) -> None:
        """Interrupt a call that runs, or is about to."""
        if self._current is not None and self._is_current(client, number):
            self._interrupt(self._current, "cancelled")

    async def drop(self, keys: Sequence[int | str]) -> None:
        """Forget values."""
        for key in keys:
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
        if self._current is not None and self._current.is_running:
            self._interrupt(self._current, "cancelled")

    def _is_current(self, client: str, number: int) -> bool:
        call = self._current
        return call is not None and (call.client, call.number) == (client, number)

    def _end_turn(self) -> None:
        self._current = None
        self._turn.release()

    def _interrupt(self, call: _RunningCall, reason: str) -> None:
        if self._current is not call or call.reason is not None:
            return
        call.reason = reason
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        if self._kill_after is not None:
            self._loop.call_later(self._kill_after, self._kill, call)

    def _kill(self, call: _RunningCall) -> None:
        if self._current is call:
            os._exit(STUCK)

    async def _end_when_idle(self, seconds: float) -> None:
        idle_since = time.monotonic()
        while time.monotonic() - idle_since <= seconds:
            await asyncio.sleep(min(1.0, seconds / 4))
            if self._clients or self._turn.locked():
                idle_since = time.monotonic()
        await self.stop_process()

    # --- calls: in the main thread ---

    def serve(self) -> None:
        """Run calls until the worker ends."""
        signal.signal(signal.SIGUSR1, self._on_signal)
        while (job := self._jobs.get()) is not None:
            job()

    def _on_signal(self, *_: Any) -> None:
        call = self._interruptible
        if call is not None and call.reason is not None and not call.raised:
            call.raised = True
            raise CallInterrupted(call.reason)

    def _answer(self, call: _RunningCall, **request: Any) -> dict[str, Any]:
        try:
            try:
                self._interruptible = call
                if call.reason is not None:  # the signal came before
                    self._on_signal()
                reply = self._result(call, **request)
            finally:
                self._interruptible = None
        except BaseException as error:  # noqa: BLE001 (it is the client's)
            parts = []
            if not isinstance(error, CallInterrupted):
                # Pickling the user's exception may raise anything.
                with contextlib.suppress(Exception):
                    encoded = encode(error)
                    check_size(encoded, self._limit)
                    parts = encoded
            text = traceback.format_exc()[-MOST_TEXT:].encode(errors="replace").decode()
            why = call.reason if isinstance(error, CallInterrupted) else "raised"
            return {"error": why, "text": text, "parts": to_serialize(parts)}
        return reply

    def _result(
        self,
        call: _RunningCall,
        head: bytes,
        parts: Sequence[Any],
        keep: bool | str,
        timeout: float | None,
    ) -> dict[str, Any]:
        result = self._functions.run(head, parts, self._value)
        if keep is False:
            encoded = encode(result)
            check_size(encoded, self._limit)
            return {"error": None, "parts": to_serialize(encoded)}
        key = keep if isinstance(keep, str) else next(self._numbers)
        if isinstance(keep, str) or call.client in self._clients:
            self._values[key] = (result, None if isinstance(keep, str) else call.client)
        text = repr(result)
        return {
            "error": None,
            "parts": [],
            "kept": key,
            "text": text if len(text) <= 200 else f"{text[:200]}...",
        }

    def _value(self, key: int | str) -> Any:
        try:
            return self._values[key][0]
        except KeyError:
            names = ", ".join(repr(key) for key in self._values if isinstance(key, str))
            raise RemoteValueError(
                f"The worker keeps no value {key!r}. It was deleted, or the worker was started "
                f"anew since. Kept by name: {names or 'none'}."
            ) from None


def main(options: Mapping[str, Any]) -> None:
    """Run a worker in this process."""
    for name in ("distributed.core", "distributed.comm"):
        # What the server would say of peers that break off is no output of the calls.
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

    def answer(**facts: Any) -> None:
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
    while sys.stdin.buffer.read(1):  # the pipe ends with the process that has the other end
        pass
    end()
