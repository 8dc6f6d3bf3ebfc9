# SPDX-License-Identifier: Apache-2.0
"""Stopping on request: SIGINT and SIGTERM end a run after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Notes SIGINT and SIGTERM while its ``with`` block runs.

    A second SIGINT interrupts at once, as usual. A signal that the process ignores (SIGINT in a
    background job of a shell) stays ignored. Outside the main thread, where Python delivers no
    signals, it does nothing.

    Attributes:
        signal: The signal that was received, or None.

    Example:
        >>> import os, signal
        >>> with StopRequest() as stop:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     stop.signal
        <Signals.SIGTERM: 15>
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                # None: set by other than Python code, which could not be put back.
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
