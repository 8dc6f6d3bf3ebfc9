# SPDX-License-Identifier: Apache-2.0
"""In the worker: the queue of calls, and the main thread that runs them one after the other.

The main thread, because only there Python lets a signal interrupt what runs: it raises
``CallInterrupted`` at the next step of Python. A program or a compilation of JAX ends before that.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import secrets
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardax.host.errors import RemoteValueError, WorkerCallError
from shardax.host.workers.encoding import decode, encode
from shardax.host.workers.functions import FunctionForm, FunctionTable
from shardax.host.workers.messages import Message

STUCK = 75  # the exit status of a worker whose call could not be interrupted (EX_TEMPFAIL)
BEGIN_SECONDS = 1.0  # to tell the client that its call begins, before it may take the process down
MOST_TEXT = 100_000  # characters of a traceback, from its end


class CallInterrupted(BaseException):
    """Raised inside of a call that is to stop. Not an ``Exception``: users' code lets it pass."""


class Call:
    """One call.

    Attributes:
        message: The message that asks for it.
        owner: The session that it came from.
        reply: Sends a message to the client, as ``Channel.send`` does.
        reason: Why it is to stop, if it is: ``"cancelled"`` or ``"timeout"``.
    """

    def __init__(self, message: Message, owner: object, reply: Callable[..., None]) -> None:
        self.message = message
        self.owner = owner
        self.reply = reply
        self.reason: str | None = None
        self.raised = False

    def answer(self, kind: str, about: dict[str, Any], parts: Any = ()) -> None:
        """Replies to the call."""
        self.reply(Message(kind, self.message.id, about, parts))

    def fail(self, code: str, text: str, error: BaseException | None = None) -> None:
        """Replies that there is no result, and why; the exception itself goes along if it can."""
        told = text[-MOST_TEXT:].encode(errors="replace")
        try:
            self.answer("error", {"code": code}, [told, *([] if error is None else encode(error))])
        except Exception:  # noqa: BLE001 (whatever pickling the user's exception raises)
            self.answer("error", {"code": code}, [told])


class Values:
    """Values that stay in the worker, by number, or by the name they were given."""

    def __init__(self) -> None:
        self._kept: dict[int | str, tuple[Any, object]] = {}
        # Not from 1: a number of a worker that has ended must mean nothing to the next one.
        self._numbers = itertools.count(secrets.randbits(48))
        self._lock = threading.Lock()

    def keep(self, value: Any, owner: object, name: str | None) -> int | str:
        """Keeps a value until it is dropped, or, without a name, until its owner goes."""
        with self._lock:
            key = next(self._numbers) if name is None else name
            self._kept[key] = (value, owner if name is None else None)
            return key

    def get(self, key: int | str) -> Any:
        """Returns a value.

        Raises:
            RemoteValueError: If it is not kept.
        """
        try:
            return self._kept[key][0]
        except KeyError:
            raise RemoteValueError(
                f"The worker keeps no value {key!r}. It was deleted, or the worker was started "
                f"anew since. Kept by name: {', '.join(map(repr, self.names())) or 'none'}."
            ) from None

    def drop(self, key: int | str) -> None:
        """Forgets a value."""
        with self._lock:
            self._kept.pop(key, None)

    def drop_all_of(self, owner: object) -> None:
        """Forgets what a session kept without a name."""
        with self._lock:
            self._kept = {k: kept for k, kept in self._kept.items() if kept[1] is not owner}

    def names(self) -> list[str]:
        """The names of values."""
        return sorted(key for key in list(self._kept) if isinstance(key, str))


class Runner:
    """Runs calls, in the thread that makes it, which must be the main one.

    Args:
        functions: Where functions are kept.
        values: Where values are kept.
        kill_after: Seconds after which a call that does not stop takes the process down; None:
            never.
    """

    def __init__(self, functions: FunctionTable, values: Values, kill_after: float | None) -> None:
        self.functions = functions
        self.values = values
        self.kill_after = kill_after
        self.running: Call | None = None
        self._queue: collections.deque[Call] = collections.deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._interruptible: Call | None = None
        self._thread = threading.get_ident()
        signal.signal(signal.SIGUSR1, self._on_signal)

    # --- from any thread -------------------------------------------------------------------------

    def put(self, call: Call) -> None:
        """Queues a call."""
        with self._changed:
            self._queue.append(call)
            self._changed.notify()

    def cancel(self, owner: object, number: int | None = None) -> None:
        """Takes calls of a session out of the queue, and interrupts one that runs.

        Args:
            owner: The session.
            number: Which call; None for all.
        """

        def is_meant(call: Call) -> bool:
            return call.owner is owner and number in (None, call.message.id)

        with self._changed:
            dropped = [call for call in self._queue if is_meant(call)]
            self._queue = collections.deque(call for call in self._queue if not is_meant(call))
            if self.running is not None and is_meant(self.running):
                self._interrupt(self.running, "cancelled")
        for call in dropped:
            call.fail("cancelled", "before it began")

    def stop(self) -> None:
        """Ends ``run`` after the call that runs, which is interrupted."""
        with self._changed:
            self._stopped = True
            if self.running is not None:
                self._interrupt(self.running, "cancelled")
            self._changed.notify()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self.running is None and not self._queue

    def _interrupt(self, call: Call, reason: str) -> None:
        if self.running is not call or call.reason is not None:
            return
        call.reason = reason
        signal.pthread_kill(self._thread, signal.SIGUSR1)
        if self.kill_after is not None:
            _later(self.kill_after, self._kill, call)

    def _kill(self, call: Call) -> None:
        if self.running is call:
            os._exit(STUCK)

    def _time_out(self, call: Call) -> None:
        with self._changed:
            self._interrupt(call, "timeout")

    # --- in the main thread ----------------------------------------------------------------------

    def run(self) -> None:
        """Runs calls until ``stop``."""
        while True:
            with self._changed:
                while not (self._queue or self._stopped):
                    self._changed.wait()
                if self._stopped:
                    return
                self.running = call = self._queue.popleft()
            try:
                self._answer(call)
            finally:
                with self._changed:
                    self.running = None

    def _on_signal(self, *_: Any) -> None:
        call = self._interruptible
        if call is not None and call.reason is not None and not call.raised:
            call.raised = True
            raise CallInterrupted(call.reason)

    @contextlib.contextmanager
    def _interruptible_by_signal(self, call: Call) -> Iterator[None]:
        try:
            self._interruptible = call
            if call.reason is not None:  # the signal came before
                self._on_signal()
            yield
        finally:
            self._interruptible = None

    def _answer(self, call: Call) -> None:
        call.reply(Message("started", call.message.id), BEGIN_SECONDS)
        timer: threading.Timer | None = None
        try:
            with self._interruptible_by_signal(call):
                request = read_request(call.message)
                if request.timeout is not None:
                    timer = _later(request.timeout, self._time_out, call)
                about, parts = self._result(request, call.owner)
            call.answer("result", about, parts)
        except CallInterrupted:
            call.fail(call.reason or "cancelled", traceback.format_exc())
        except BaseException as error:  # noqa: BLE001 (it is the client's)
            call.fail("raised", traceback.format_exc(), error)
        finally:
            self._interruptible = None
            if timer is not None:
                timer.cancel()

    def _result(self, request: Request, owner: object) -> tuple[dict[str, Any], list[Any]]:
        result = self.functions.run(
            request.function, lambda: decode(request.arguments, self.values.get)
        )
        if not request.keep:
            return {}, encode(result)
        key = self.values.keep(result, owner, request.name)
        return {"value": key, "text": _summary(result)}, []


class Request(NamedTuple):
    """What a client asks for.

    Attributes:
        function: The function.
        arguments: Its arguments, encoded.
        timeout: Seconds that it may run, or None.
        keep: Whether the result stays.
        name: Under which name, or None.
    """

    function: FunctionForm
    arguments: list[Any]
    timeout: float | None
    keep: bool
    name: str | None


def read_request(message: Message) -> Request:
    """Takes a message for a call apart.

    Raises:
        WorkerCallError: If it lacks something.
    """
    about, parts = message.about, list(message.parts)
    try:
        count, seconds, name = int(about["function_parts"]), about["timeout"], about["as"]
        if not 0 < count < len(parts):
            raise ValueError(f"{count} of {len(parts)} parts are the function's")
        form = FunctionForm(
            str(about["name"]), str(about["key"]), dict(about["modules"]), parts[:count]
        )
        timeout = None if seconds is None else float(seconds)
        if timeout is not None and not timeout > 0:
            raise ValueError(f"a timeout of {timeout} seconds")
        name = None if name is None else str(name)
        return Request(form, parts[count:], timeout, bool(about["keep"]), name)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WorkerCallError(f"A call that lacks something: {error!r}") from None


def _summary(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _later(seconds: float, action: Callable[..., None], *args: Any) -> threading.Timer:
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), action, args)
    timer.daemon = True
    timer.start()
    return timer
