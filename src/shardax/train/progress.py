# SPDX-License-Identifier: Apache-2.0
"""Display of a run, and the signals to stop it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Self, TextIO

import jax

from shardax._terminal import ProgressBar, is_live


class StopRequest:
    """Notes SIGINT and SIGTERM while its ``with`` block runs."""

    # With several processes JAX's preemption service notes SIGTERM, tells the others, and says at
    # which question of ``reached`` all stop; a handler here would hide the signal from it. A second
    # SIGINT interrupts at once, as usual. A signal that the process ignores (SIGINT in a background
    # job of a shell) stays ignored. Outside the main thread, where Python delivers no signals, it
    # does nothing.

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._several = jax.process_count() > 1
        self._questions = 0
        self._passed_on = False

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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if (self.signal is not None or self._passed_on) and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._several:
            self._passed_on = True
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signal = signal.Signals(number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *(() if self._several else (signal.SIGTERM,))):
                handler = signal.getsignal(number)
                # None: set by other than Python code, which could not be put back.
                if handler not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if kind is KeyboardInterrupt and (self.signal is not None or self._passed_on):
            # Without the frames of the wait that it interrupted, which are nobody's concern.
            raise KeyboardInterrupt(
                "a second SIGINT ended the run at once. Go on from its last checkpoint with "
                "resume=True (on the command line --resume)."
            ) from None


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
