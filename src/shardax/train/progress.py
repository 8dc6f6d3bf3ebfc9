# SPDX-License-Identifier: Apache-2.0
"""How a training run shows where it is: a live bar on a terminal, plain lines elsewhere.

A *display* is told about steps, evaluations and checkpoints and shows them. ``make_display``
chooses: a bar (by rich) when the output is a terminal, else one line every so often, so that log
files stay readable.

How fast training goes.

A *token* is a target of a batch; a batch without ``targets`` counts its rows. The first step of a
process compiles, so counting starts after it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self, TextIO

import jax

# --- Progress ---


class Display(Protocol):
    """What the trainer tells about its progress."""

    def step(self, step: int, loss: float | None, tokens_per_second: float | None) -> None:
        """A step is done; loss and speed are given when they are known anew."""
        ...

    def note(self, message: str) -> None:
        """Something worth a line happened."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Lines:
    """A display of plain lines: one per known loss, and one per note.

    Args:
        first: Step from which the run starts.
        total: Step at which it ends.
        file: Where to print.

    Example:
        >>> import sys
        >>> with Lines(0, 10, sys.stdout) as display:
        ...     display.step(5, 2.5, 1000.0)  # doctest: +ELLIPSIS
        step 5/10  loss 2.5000  1,000 tokens/s  ETA ...
    """

    def __init__(self, first: int, total: int, file: TextIO) -> None:
        self._first, self._total, self._file = first, total, file
        self._start = time.monotonic()

    def step(self, step: int, loss: float | None, tokens_per_second: float | None) -> None:
        """See ``Display``; steps without a loss print nothing."""
        if loss is None:
            return
        done = step - self._first
        eta = (time.monotonic() - self._start) / done * (self._total - step) if done else 0.0
        speed = f"  {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        self.note(f"step {step}/{self._total}  loss {loss:.4f}{speed}  ETA {_duration(eta)}")

    def note(self, message: str) -> None:
        """See ``Display``."""
        print(message, file=self._file, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class Bar:
    """A display with a live bar: steps, loss, tokens per second, time left.

    Args:
        first: Step from which the run starts.
        total: Step at which it ends.
        file: The terminal.
    """

    def __init__(self, first: int, total: int, file: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        self._progress = Progress(
            TextColumn("[bold]train"),
            # Only the bar gives way on a narrow terminal.
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(file=file),
            expand=True,
        )
        self._shown = {"loss": "", "speed": ""}
        self._task = self._progress.add_task(
            "train", total=total, completed=first, status="starting" if first < total else "done"
        )

    def step(self, step: int, loss: float | None, tokens_per_second: float | None) -> None:
        """See ``Display``."""
        if loss is not None:
            self._shown["loss"] = f"loss {loss:.4f}"
        if tokens_per_second:
            self._shown["speed"] = f"{tokens_per_second:,.0f} tokens/s"
        status = "  ".join(text for text in self._shown.values() if text)
        self._progress.update(self._task, completed=step, status=status)

    def note(self, message: str) -> None:
        """See ``Display``."""
        self._progress.console.print(message, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()


def make_display(first: int, total: int, file: TextIO | None = None) -> Display:
    """Chooses a display: a bar on a terminal that can redraw a line, else lines.

    Args:
        first: Step from which the run starts.
        total: Step at which it ends.
        file: Where to show it; by default standard output.

    Example:
        >>> import io
        >>> type(make_display(0, 10, io.StringIO())).__name__
        'Lines'
    """
    target = sys.stdout if file is None else file
    can_redraw = target.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return Bar(first, total, target) if can_redraw else Lines(first, total, target)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- Clock ---


class Clock:
    """Counts tokens per second since it was last asked.

    Example:
        >>> clock = Clock()
        >>> batch = {"targets": jax.numpy.zeros((2, 8))}
        >>> clock.count(batch, pending=None)
        >>> clock.speed() is None
        True
        >>> clock.count(batch, pending=None)
        >>> clock.speed() > 0
        True
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._since: float | None = None

    def count(self, batch: Any, pending: Any) -> None:
        """Counts the batch of a step whose loss is ``pending``."""
        if self._since is None:
            jax.block_until_ready(pending)
            self.restart()
        else:
            self._tokens += _tokens(batch)

    def restart(self) -> None:
        self._tokens, self._since = 0, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time of a ``with`` block, which does something else than train."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += time.perf_counter() - started

    def speed(self) -> float | None:
        """Returns tokens per second, or None if there were none since."""
        if self._since is None or self._tokens == 0:
            return None
        speed = self._tokens / max(time.perf_counter() - self._since, 1e-9)
        self.restart()
        return speed


def _tokens(batch: Any) -> int:
    targets = batch.get("targets") if isinstance(batch, Mapping) else None
    return jax.tree.leaves(batch)[0].shape[0] if targets is None else targets.size
