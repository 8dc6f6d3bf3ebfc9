# SPDX-License-Identifier: Apache-2.0
"""A client's connection to a worker: numbers calls, matches replies, and notices silence."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Client
from typing import Any

from shardax.host.errors import (
    WorkerAuthenticationError,
    WorkerCrashedError,
    WorkerMessageError,
    WorkerProtocolError,
)
from shardax.host.workers.channel import Channel, authenticate
from shardax.host.workers.futures import PendingCall
from shardax.host.workers.messages import Message
from shardax.host.workers.server import greeting

MISSED_BEATS = 4  # heartbeats without an answer after which a worker counts as lost


class Link:
    """One connection.

    Args:
        address: Where the worker listens.
        key: Its key.
        limit: The most bytes that the parts of a message may have.
        heartbeat: Seconds between pings.
        on_lost: Called once, in a thread of the link, when the connection has ended, with the calls
            that have no result, and what happened.

    Raises:
        WorkerAuthenticationError: If the worker has another key.
        WorkerProtocolError: If it is another version, of Python or of this protocol.
        WorkerCrashedError: If nothing listens there.
    """

    def __init__(
        self,
        address: str | tuple[str, int],
        key: bytes,
        limit: int,
        heartbeat: float,
        on_lost: Callable[[Link, list[PendingCall], str], None],
    ) -> None:
        try:
            connection = Client(address)
            authenticate(connection, key, first=False)
        except (OSError, EOFError) as error:
            if isinstance(error, WorkerAuthenticationError):
                raise
            raise WorkerCrashedError(
                f"No worker listens at {address!r} ({error!r}). It has ended, or was never there."
            ) from error
        self._channel = Channel(connection, limit)
        self._calls: dict[int, PendingCall] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._on_lost = on_lost
        self._heartbeat = heartbeat
        self._why = "it ended the connection"
        self._over = threading.Event()
        self._infos: dict[int, Any] = {}
        self.lost = False
        self._greet()
        for action in (self._read, self._beat):
            threading.Thread(target=action, name="worker-client", daemon=True).start()

    def _greet(self) -> None:
        try:
            self._channel.send(Message("hello", about=greeting()))
            hello = self._channel.receive()
            if hello.kind != "hello":
                raise WorkerProtocolError(f"the worker's first message is a {hello.kind}")
        except BaseException as error:
            self._channel.close()
            if isinstance(error, EOFError):
                raise WorkerCrashedError("The worker ended the connection at once.") from error
            raise

    def submit(self, call: PendingCall) -> bool:
        """Sends a call.

        Returns:
            Whether it was sent; otherwise the connection is lost.

        Raises:
            WorkerMessageError: If it is too large.
        """
        with self._lock:
            if self.lost:
                return False
            number = next(self._numbers)
            self._calls[number] = call
            call.future.on_cancel(lambda: self.tell(Message("cancel", number)))
            try:
                self._channel.send(replace(call.message, id=number))
            except WorkerMessageError:
                del self._calls[number]
                raise
        return True

    def tell(self, message: Message) -> None:
        """Sends a message that nothing waits for."""
        if not self.lost:
            self._channel.send(message)

    def ask(self, seconds: float) -> dict[str, Any]:
        """Returns what the worker says of itself.

        Raises:
            WorkerCrashedError: If it does not, within some seconds.
        """
        number, answered = next(self._numbers), threading.Event()
        self._infos[number] = answered
        self.tell(Message("info", number))
        answered.wait(seconds)
        told = self._infos.pop(number)
        if told is answered:
            raise WorkerCrashedError(f"The worker did not answer within {seconds:g} seconds.")
        return told

    def pending(self) -> list[PendingCall]:
        """Calls that have no result."""
        with self._lock:
            return list(self._calls.values())

    def hang_up(self, why: str) -> None:
        """Ends the connection."""
        self._why = why
        self._channel.hang_up()

    def wait_for_end(self) -> None:
        """Waits until the connection has ended; the caller has seen to it that it will."""
        self._over.wait()

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._channel.receive())
        except EOFError:
            pass
        except WorkerProtocolError as error:
            self._why = f"it sent {error}"
        with self._lock:
            self.lost = True
            calls, self._calls = list(self._calls.values()), {}
        self._over.set()
        self._channel.close()
        self._on_lost(self, calls, self._why)

    def _handle(self, message: Message) -> None:
        if message.kind == "refused":
            self._why = f"it refused: {message.about.get('text')}"
        elif message.kind == "info" and message.id in self._infos:
            answered, self._infos[message.id] = self._infos[message.id], dict(message.about)
            answered.set()
        elif message.kind == "started":
            call = self._calls.get(message.id)
            if call is not None:
                call.start()
        elif message.kind in ("result", "error"):
            with self._lock:
                call = self._calls.pop(message.id, None)
            if call is not None:
                call.settle(message)

    def _beat(self) -> None:
        while not self._over.wait(self._heartbeat):
            silence = time.monotonic() - self._channel.heard
            if silence > MISSED_BEATS * self._heartbeat:
                self.hang_up(f"it did not answer for {silence:.1f} seconds")
                return
            self._channel.send(Message("ping"))
