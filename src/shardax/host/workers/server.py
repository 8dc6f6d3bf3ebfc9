# SPDX-License-Identifier: Apache-2.0
"""The worker's process: it listens, holds a *session* with each client, and runs their calls.

A session is one connection. Its thread answers at once what needs no JAX (pings, cancellations),
and queues calls for the main thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Listener
from typing import Any

from shardax.config.configure import configure
from shardax.host.errors import (
    WorkerAuthenticationError,
    WorkerConfigError,
    WorkerMessageError,
    WorkerProtocolError,
)
from shardax.host.workers.calls import Call, Runner, Values
from shardax.host.workers.channel import AnyConnection, Channel, authenticate
from shardax.host.workers.functions import FunctionTable
from shardax.host.workers.messages import Message

LEAST_KEY_BYTES = 16
END_SECONDS = 5.0  # for the call that runs, and for replies, when the worker ends


def greeting() -> dict[str, Any]:
    """Returns what both sides tell each other first."""
    return {"python": ".".join(platform.python_version_tuple()[:2])}


class Session:
    """A connection to a client.

    Args:
        server: The worker.
        connection: The connection, not authenticated yet.
    """

    def __init__(self, server: Server, connection: AnyConnection) -> None:
        self.server = server
        self.connection = connection

    def run(self) -> None:
        """Serves the client until the connection ends."""
        try:
            authenticate(self.connection, self.server.key, first=True)
        except (WorkerAuthenticationError, EOFError):
            self.connection.close()
            return
        channel = Channel(self.connection, self.server.limit)
        try:
            channel.send(Message("hello", about=greeting()))
            self.server.sessions.add(self)
            if self._accept(channel):
                while True:
                    self._handle(channel.receive(), channel)
        except WorkerProtocolError as error:
            _refuse(channel, str(error))
        except EOFError:
            pass
        finally:
            self.server.forget(self)
            channel.close()

    def _accept(self, channel: Channel) -> bool:
        hello = channel.receive()
        if hello.kind != "hello":
            raise WorkerProtocolError(f"the first message is a {hello.kind}")
        ours, theirs = greeting()["python"], hello.about.get("python")
        if ours != theirs:
            _refuse(channel, f"the worker runs Python {ours}, and the client Python {theirs}")
        return ours == theirs

    def _handle(self, message: Message, channel: Channel) -> None:
        runner = self.server.runner
        match message.kind:
            case "call":
                runner.put(Call(message, self, channel.send))
            case "cancel":
                runner.cancel(self, message.id)
            case "drop":
                key = message.about.get("value")
                if isinstance(key, (int, str)):
                    self.server.values.drop(key)
            case "info":
                channel.send(Message("info", message.id, self.server.told()))
            case "ping":
                channel.send(Message("pong", message.id))
            case "exit":
                self.server.end()
            case kind:
                raise WorkerProtocolError(f"a {kind}, which clients do not send")


def _refuse(channel: Channel, text: str) -> None:
    with contextlib.suppress(WorkerMessageError):
        channel.send(Message("refused", about={"text": text[:1000]}))
    channel.flush(END_SECONDS)


class Server:
    """The worker.

    Args:
        options: What the process that starts it says, as JSON values; see ``process``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.key = bytes.fromhex(options["key"])
        if len(self.key) < LEAST_KEY_BYTES:
            raise WorkerConfigError(
                f"A worker does not listen with a key of {len(self.key)} bytes: whoever guesses it "
                f"can run any code. Leave authkey= out, which makes one of 32 random bytes."
            )
        self.limit = int(options["max_message"])
        self.folder = options["folder"]
        self.functions = FunctionTable(options["functions"])
        self.values = Values()
        self.runner = Runner(self.functions, self.values, options["kill_after"])
        self.sessions: set[Session] = set()
        self.idle_timeout = options["idle_timeout"]
        if options["family"] == "AF_UNIX":
            before = os.umask(0o177)  # the socket is never there with wider permissions
            try:
                self.listener = Listener(os.path.join(self.folder, "socket"), "AF_UNIX")
            finally:
                os.umask(before)
        else:
            self.listener = Listener((options["host"], options["port"]), "AF_INET", backlog=16)
        self.functions.sources.record()

    def serve(self) -> None:
        """Serves clients until the worker is ended; the main thread runs calls meanwhile."""
        _in_background(self._accept_all)
        if self.idle_timeout is not None:
            _in_background(self._watch_idleness)
        try:
            self.runner.run()
        finally:
            self.clean_up()

    def _accept_all(self) -> None:
        while True:
            try:
                connection = self.listener.accept()
            except OSError:  # a client was gone already, or there are too many open files
                time.sleep(0.05)
                continue
            _in_background(Session(self, connection).run)

    def _watch_idleness(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(min(1.0, self.idle_timeout / 4))
            if self.sessions or not self.runner.is_idle:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > self.idle_timeout:
                self.end()
                return

    def forget(self, session: Session) -> None:
        """Drops what belongs to a session that is over, and interrupts its call."""
        self.sessions.discard(session)
        self.runner.cancel(session)
        self.values.drop_all_of(session)

    def told(self) -> dict[str, Any]:
        """Returns what the worker says of itself, as JSON values."""
        running = self.runner.running
        return {
            "pid": os.getpid(),
            "clients": len(self.sessions),
            "running": None if running is None else str(running.message.about.get("name")),
            "functions": self.functions.told(),
            "values": self.values.names(),
        }

    def end(self) -> None:
        """Ends the process: politely, then at once."""
        timer = threading.Timer(END_SECONDS, self._end_at_once)
        timer.daemon = True
        timer.start()
        self.runner.stop()

    def _end_at_once(self) -> None:
        self.clean_up()
        os._exit(0)

    def clean_up(self) -> None:
        """Stops listening, and removes the folder of the socket."""
        with contextlib.suppress(OSError):
            self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _in_background(action: Any, *args: Any) -> None:
    threading.Thread(target=action, args=args, daemon=True).start()


def main(options: Mapping[str, Any]) -> None:
    """Runs a worker in this process.

    Args:
        options: As for ``Server``, and ``configure``: the arguments of ``shardax.configure``;
            ``ready``: the file descriptor on which to tell the address; ``detached``: whether to
            live on when the process that started it has ended.
    """
    with os.fdopen(options["ready"], "w") as ready:
        try:
            configure(**options["configure"])
            server = Server(options)
        except Exception:  # noqa: BLE001 (whoever starts the worker raises it)
            ready.write(json.dumps({"error": traceback.format_exc()}))
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: server.end())
        ready.write(json.dumps({"address": server.listener.address, "pid": os.getpid()}))
    if not options["detached"]:
        _in_background(_end_with_parent, server)
    server.serve()


def _end_with_parent(server: Server) -> None:
    while sys.stdin.buffer.read(1):
        pass
    server.end()
