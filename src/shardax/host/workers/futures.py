# SPDX-License-Identifier: Apache-2.0
"""Futures of calls to a worker, and the calls as the client knows them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.host.errors import CallCancelledError, WorkerCallError, WorkerTimeoutError
from shardax.host.workers.encoding import decode
from shardax.host.workers.messages import Message


class WorkerTraceback(Exception):
    """The traceback of an exception, as it was in the worker; the cause of what is raised here."""

    def __str__(self) -> str:
        return f"\n\nIn the worker:\n{self.args[0]}"


class WorkerFuture(concurrent.futures.Future[Any]):
    """The result of a call to a worker, when it is there.

    ``cancel`` is that of all executors: it succeeds as long as the call has not begun.

    Example:
        >>> import shardax as sx
        >>> with sx.host.Worker() as worker:
        ...     future = worker.submit(sum, [1, 2])
        ...     print(type(future).__name__, future.result())
        WorkerFuture 3
    """

    def __init__(self) -> None:
        super().__init__()
        self._tell: Callable[[], None] = lambda: None
        self._turn = threading.RLock()  # between who cancels and who has a result

    def cancel(self) -> bool:
        """Cancels the call if it has not begun.

        Returns:
            Whether it is cancelled.
        """
        with self._turn:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()
        self._tell()
        return True

    def interrupt(self) -> None:
        """Cancels the call, also if it runs: then an exception stops it in the worker.

        That happens at the next step of Python. A compilation or a program that JAX runs ends
        before. ``result()`` raises ``CallCancelledError``.
        """
        if not self.cancel():
            self._tell()

    def on_cancel(self, tell: Callable[[], None]) -> None:
        """Sets how the worker is told that nobody waits for the call any more."""
        self._tell = tell

    def begin(self) -> None:
        """Notes that the call has begun, unless it is cancelled."""
        with self._turn:
            if not (self.cancelled() or self.running()):
                self.set_running_or_notify_cancel()

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """Ends the call with a result or an error, unless it is cancelled."""
        with self._turn:
            if self.cancelled():
                return
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)


@dataclass(eq=False)
class PendingCall:
    """A call without a result.

    Attributes:
        name: Name of its function.
        message: What asks for it; the number is that of the connection that it goes over.
        future: What its caller has.
        timeout: Seconds that it may run, or None.
        retries: How often it may still be run again if the worker is lost.
        receive: Makes the result of a message.
        keeper: What must live until there is a result.
        started: Whether it has begun.
    """

    name: str
    message: Message
    future: WorkerFuture
    timeout: float | None
    retries: int
    receive: Callable[[Message], Any]
    keeper: object
    started: bool = False

    def start(self) -> None:
        """Notes that it has begun."""
        self.started = True
        self.future.begin()

    def settle(self, message: Message) -> None:
        """Ends it with the result or the error that came."""
        if message.kind == "error":
            self.future.end(error=self._error(message))
            return
        try:
            result = self.receive(message)
        except Exception as error:  # noqa: BLE001 (a result that this process cannot read)
            self.future.end(error=error)
        else:
            self.future.end(result)

    def _error(self, message: Message) -> BaseException:
        code, (told, *pickled) = message.about.get("code"), message.parts
        text = bytes(told).decode(errors="replace")
        if code == "timeout":
            error: BaseException = WorkerTimeoutError(
                f"{self.name} ran in a worker for longer than its timeout of {self.timeout:g} "
                f"seconds and was interrupted."
            )
        elif code == "cancelled":
            return CallCancelledError(f"{self.name} was interrupted in its worker: {text}")
        else:
            error = _raised(pickled) or WorkerCallError(
                f"{self.name} raised in its worker what cannot be sent as an object; "
                f"it ended with: {text.rstrip().splitlines()[-1]}"
            )
        error.__cause__ = WorkerTraceback(text)
        return error


def _raised(pickled: Sequence[Any]) -> BaseException | None:
    """The exception itself; None if it cannot be made here, as its class need not unpickle."""
    try:
        error = decode(pickled)
    except Exception:  # noqa: BLE001 (whatever the exception's constructor raises)
        return None
    # The caller's process is not to end because something in the worker wanted to.
    return error if isinstance(error, Exception) else None
