# SPDX-License-Identifier: Apache-2.0
"""Channels: messages over a connection of ``multiprocessing.connection``.

Both sides prove first that they know the same key, by HMAC; nothing else is read before. Parts
travel in *frames* of at most one mebibyte, into memory that was taken for them. A thread of its own
writes, so whoever sends never waits for a peer that does not read.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from shardax.host.errors import WorkerAuthenticationError, WorkerProtocolError
from shardax.host.workers.messages import (
    MOST_HEADER_BYTES,
    Message,
    check_size,
    read_header,
)

FRAME_BYTES = 1 << 20
HANDSHAKE_SECONDS = 10.0
AnyConnection = Any  # of multiprocessing.connection, where its class depends on the platform


def authenticate(connection: AnyConnection, key: bytes, *, first: bool) -> None:
    """Proves to a peer that we know the key, and has it proved to us.

    Args:
        connection: A new connection.
        key: The key.
        first: Whether we ask first; one side does.

    Raises:
        WorkerAuthenticationError: If the peer has another key, or none.
        EOFError: If the connection has ended, or the peer is silent.
    """
    steps = [deliver_challenge, answer_challenge]
    with _ended_after(connection, HANDSHAKE_SECONDS):
        try:
            for step in steps if first else reversed(steps):
                step(connection, key)
        except (EOFError, OSError) as error:
            connection.close()
            raise EOFError from error
        except (AuthenticationError, AssertionError, ValueError) as error:
            connection.close()
            raise WorkerAuthenticationError(
                f"The two ends of a connection to a worker could not show each other that they "
                f"have the same key ({type(error).__name__}: {error}). Pass the key of that "
                f"worker: sx.host.Worker.connect(worker.address, worker.authkey)."
            ) from None


@contextlib.contextmanager
def _ended_after(connection: AnyConnection, seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, _hang_up, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hang_up(connection: AnyConnection) -> None:
    """Ends a connection such that a thread that reads from it returns."""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.socket(fileno=os.dup(connection.fileno())) as ours,
    ):
        ours.shutdown(socket.SHUT_RDWR)


class Outgoing(NamedTuple):
    """A message that waits to be written.

    Attributes:
        header: Its header.
        parts: Its parts.
        written: Set when it is.
    """

    header: bytes
    parts: Sequence[Any]
    written: threading.Event


class Channel:
    """Messages over an authenticated connection. One thread reads; any may send.

    Args:
        connection: The connection; the channel closes it.
        limit: The most bytes that the parts of a message may have.

    Attributes:
        heard: When something came last, by ``time.monotonic``.
    """

    def __init__(self, connection: AnyConnection, limit: int) -> None:
        self.limit = limit
        self.heard = time.monotonic()
        self._connection = connection
        self._outgoing: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="worker-writer", daemon=True)
        self._writer.start()

    def send(self, message: Message, wait: float = 0.0) -> None:
        """Queues a message. If the connection has ended it is lost, which the reader notices.

        Args:
            message: The message.
            wait: Seconds to wait for it to be written. What is written arrives even if this process
                dies.

        Raises:
            WorkerMessageError: If it is too large.
        """
        header = message.header()
        check_size(header, message.parts, self.limit)
        item = Outgoing(header, message.parts, threading.Event())
        self._outgoing.put(item)
        if wait:
            item.written.wait(wait)

    def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            EOFError: If the connection has ended.
            WorkerProtocolError: If what came is not a message. The channel is of no use then.
        """
        try:
            header = self._connection.recv_bytes(MOST_HEADER_BYTES)
            self.heard = time.monotonic()
            message, sizes = read_header(header, self.limit)
            parts = [self._receive_part(size) for size in sizes]
        except (EOFError, WorkerProtocolError):
            raise
        except OSError as error:
            if "bad message length" in str(error):
                raise WorkerProtocolError("a header that is too long") from None
            raise EOFError from error
        return Message(message.kind, message.id, message.about, parts)

    def _receive_part(self, size: int) -> bytearray:
        part = bytearray(size)
        view = memoryview(part)
        start = 0
        while start < size:
            frame = self._connection.recv_bytes(min(FRAME_BYTES, size - start))
            if not frame:
                raise WorkerProtocolError("an empty frame")
            view[start : start + len(frame)] = frame
            start += len(frame)
            self.heard = time.monotonic()
        return part

    def _write(self) -> None:
        while (item := self._outgoing.get()) is not None:
            try:
                self._connection.send_bytes(item.header)
                for part in item.parts:
                    view = memoryview(part).cast("B")
                    for start in range(0, len(view), FRAME_BYTES):
                        self._connection.send_bytes(view[start : start + FRAME_BYTES])
                item.written.set()
            except (OSError, ValueError):
                _hang_up(self._connection)
                return

    def flush(self, seconds: float) -> None:
        """Waits until all that was sent is written; nothing can be sent afterwards."""
        self._outgoing.put(None)
        self._writer.join(seconds)

    def hang_up(self) -> None:
        """Ends the connection, from any thread; the reader gets an ``EOFError``."""
        self._outgoing.put(None)
        _hang_up(self._connection)

    def close(self) -> None:
        """Frees the connection; for the thread that reads, when it is done."""
        self.hang_up()
        self._writer.join()
        self._connection.close()
