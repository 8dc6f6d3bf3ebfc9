# SPDX-License-Identifier: Apache-2.0
"""Display of a run, and the signals to stop it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Self, TextIO

import jax

from shardax._terminal import ProgressBar, is_live

# Ignored where nobody handles it, so one that comes late does no harm.
_INTERRUPT = signal.SIGURG
_LOOK_SECONDS = 1.0  # between two looks at the time that is left


class OverdueError(BaseException):
    """There is no time left for code of others after a request to stop."""

    # No ``Exception``: it is to pass through the handlers of the code that it interrupts.

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class StopRequest:
    """Notes SIGINT and SIGTERM while its ``with`` block runs.

    Args:
        within: Seconds that code of others may take after a signal: see ``bounded``.

    Attributes:
        wake: What the handler of the first signal calls, or None; it may do only what is reentrant.
    """

    # With several processes JAX's preemption service notes SIGTERM, tells the others, and says at
    # which question of ``reached`` all stop; a handler here would hide the signal from it. A second
    # SIGINT interrupts at once, as usual. A signal that the process ignores (SIGINT in a background
    # job of a shell) stays ignored. Outside the main thread, where Python delivers no signals, it
    # does nothing.
    #
    # Python runs a handler between two of its instructions, and only an exception of a handler ends
    # the call that a signal has interrupted. So a thread waits until no time is left, and then
    # sends the main thread a signal whose handler raises, while that can do no harm. The time of
    # the run's own code does not count: saving a large model may take longer.

    def __init__(self, within: float = 10.0) -> None:
        self.signal: signal.Signals | None = None
        self.within = within
        self.wake: Callable[[], None] | None = None
        self._left = within  # seconds for code of others, when the one below began
        self._bounded = ""  # what is running that may be interrupted
        self._begun = 0.0  # when it began, or the signal came
        self._before: dict[signal.Signals, Any] = {}
        self._several = jax.process_count() > 1
        self._questions = 0
        self._passed_on = False
        # A handler may put into a queue of this kind. True: a signal came, False: the block ended.
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        return self.signal is not None

    def reached(self) -> bool:
        """Whether to stop now; processes ask equally often and stop together."""
        if self._several and self.signal is None:
            from jax.experimental import multihost_utils

            self._questions += 1
            if multihost_utils.reached_preemption_sync_point(self._questions):
                self.signal = signal.SIGTERM
        return self.signal is not None

    def grant(self) -> None:
        """Gives code of others a last second, to show a message."""
        self._left = _LOOK_SECONDS

    @contextlib.contextmanager
    def bounded(self, what: str) -> Generator[None]:
        """Runs code of others, which is interrupted when no time is left.

        Args:
            what: What runs, for the message.

        Raises:
            OverdueError: No time is left, or none was left meanwhile.
        """
        if self._bounded:
            yield
            return
        if not self._is_time_left():
            raise OverdueError(what)
        self._bounded, self._begun = what, time.monotonic()
        try:
            yield
        finally:
            if self.signal is not None:
                self._left -= time.monotonic() - self._begun
            self._bounded = ""

    def _is_time_left(self) -> bool:
        # Of several processes none may leave out what the others do.
        if self.signal is None or self._several:
            return True
        running = time.monotonic() - self._begun if self._bounded else 0.0
        return running < self._left

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if (self.signal is not None or self._passed_on) and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._several:
            self._passed_on = True
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.signal is None:
            self.signal = signal.Signals(number)
            self._begun = time.monotonic()
            self._news.put(True)
            if self.wake is not None:
                self.wake()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._bounded and not self._is_time_left():
            raise OverdueError(self._bounded)

    def _watch(self, main_thread: int) -> None:
        """Interrupts the main thread when no time is left."""
        is_asked = self._news.get()
        seconds = min(self.within, _LOOK_SECONDS)
        while is_asked:
            try:
                is_asked = self._news.get(timeout=seconds)
            except queue.Empty:
                if self._bounded and not self._is_time_left():
                    signal.pthread_kill(main_thread, _INTERRUPT)
                seconds = _LOOK_SECONDS

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, *(() if self._several else (signal.SIGTERM,))):
            handler = signal.getsignal(number)
            # None: set by other than Python code, which could not be put back.
            if handler not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._receive)
        if not self._several and signal.getsignal(_INTERRUPT) is not None:
            self._before[_INTERRUPT] = signal.signal(_INTERRUPT, self._interrupt)
            main_thread = threading.get_ident()
            threading.Thread(
                target=self._watch, args=[main_thread], name="shardax-stop", daemon=True
            ).start()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc_info: object) -> None:
        self._news.put(False)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if kind is KeyboardInterrupt and (self.signal is not None or self._passed_on):
            # Without the frames of the wait that it interrupted, which are nobody's concern.
            raise KeyboardInterrupt(
                "a second SIGINT ended the run at once. Go on from its last checkpoint with "
                "resume=True (on the command line --resume)."
            ) from None


class BoundedDisplay:
    """A display whose calls do not hold up a run that was asked to stop."""

    def __init__(self, display: Any, stop: StopRequest) -> None:
        self._display, self._stop = display, stop

    def step(self, step: int, loss: float | None, speed: str | None) -> None:
        """Shows a step."""
        with self._stop.bounded("the display"):
            self._display.step(step, loss, speed)

    def note(self, message: str) -> None:
        """Shows a line of its own."""
        with self._stop.bounded("the display"):
            self._display.note(message)


class TrainingProgress:
    """Bar of steps and losses on terminals, plain lines elsewhere."""

    def __init__(self, first: int, total: int, file: TextIO | None = None) -> None:
        self._first, self._total = first, total
        self._file = sys.stdout if file is None else file
        self._start = time.monotonic()
        self._loss = self._speed = ""
        self._bar = None
        if is_live(self._file):
            status = "starting" if first < total else "done"
            self._bar = ProgressBar(self._file, "train", total, first, status)

    def step(self, step: int, loss: float | None, speed: str | None) -> None:
        """Shows a step, with its loss and speed if they are new."""
        speed = speed or ""
        if self._bar is not None:
            self._loss = self._loss if loss is None else f"loss {loss:.4f}"
            self._speed = speed or self._speed
            status = "  ".join(text for text in (self._loss, self._speed) if text)
            self._bar.update(done=step, status=status)
        elif loss is not None:
            done = step - self._first
            passed = time.monotonic() - self._start
            left = _duration(passed / done * (self._total - step) if done else 0.0)
            speed = f"  {speed}" if speed else ""
            self.note(f"step {step}/{self._total}  loss {loss:.4f}{speed}  ETA {left}")

    def note(self, message: str) -> None:
        """Shows a line of its own."""
        if self._bar is not None:
            self._bar.note(message)
        else:
            print(message, file=self._file, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc_info)


class SilentProgress:
    """Display and log of all processes but the main one."""

    def step(self, step: int, loss: float | None, speed: str | None) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def write(self, **record: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def _duration(seconds: float) -> str:
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
