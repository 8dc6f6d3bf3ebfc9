# SPDX-License-Identifier: Apache-2.0
"""What a search says while it runs: a bar on a terminal, else a line per layout, on stderr."""

from __future__ import annotations

import math
import sys
from typing import Any, Self

from shardax.plan.records import Layout, LayoutReport
from shardax.plan.report.columns import TIMES, quantity


class Progress:
    """A context in which layouts are compiled; it says nothing.

    Attributes:
        done: Layouts that are done.
        total: Layouts that are to be done, as far as is known.
    """

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self._trying: dict[str, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends it."""

    def expect(self, count: int, what: str) -> None:
        """Says that more layouts are to be done.

        Args:
            count: How many.
            what: What is done with them.
        """
        self.total += count

    def begin(self, layout: Layout) -> None:
        """Says that a layout is being compiled."""
        self._trying[layout.name] = None

    def end(self, report: LayoutReport, kept: bool) -> None:
        """Says what became of it."""
        self.done += 1
        self._trying.pop(report.layout.name, None)


class Lines(Progress):
    """A line per layout."""

    def expect(self, count: int, what: str) -> None:
        """See ``Progress``."""
        super().expect(count, what)
        self._say(f"{what}: {count}")

    def end(self, report: LayoutReport, kept: bool) -> None:
        """See ``Progress``."""
        super().end(report, kept)
        self._say(f"[{self.done}/{self.total}] {told(report, kept)}")

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class Bar(Progress):
    """A bar with what is being compiled, and the best so far."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[trying]}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: Any = None
        self._best = math.inf

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Takes the bar away."""
        self._bar.stop()

    def expect(self, count: int, what: str) -> None:
        """See ``Progress``."""
        super().expect(count, what)
        if self._task is None:
            self._task = self._bar.add_task(what, total=self.total, trying="")
        self._bar.update(self._task, description=what, total=self.total)

    def begin(self, layout: Layout) -> None:
        """See ``Progress``."""
        super().begin(layout)
        self._show()

    def end(self, report: LayoutReport, kept: bool) -> None:
        """See ``Progress``."""
        super().end(report, kept)
        if report.outcome == "fits" and report.time is not None:
            self._best = min(report.time.middle, self._best)
        self._show()

    def _show(self) -> None:
        best = "" if math.isinf(self._best) else f"best {self._best:.3g} s; "
        trying = ", ".join(self._trying)
        self._bar.update(self._task, completed=self.done, trying=f"{best}{trying}")


def told(report: LayoutReport, kept: bool = False) -> str:
    """Returns one line about a report.

    Args:
        report: The report.
        kept: Whether its program was kept from before.

    Example:
        >>> from shardax.plan import Layout, LayoutReport, TimeBand
        >>> band = TimeBand(0.5, 0.75, 0.5, 0.2, 0.05, 0.0, "compute")
        >>> layout = Layout("fsdp", (), (("data", 8),))
        >>> print(told(LayoutReport(layout, "fits", time=band, compile_seconds=6.24)))
        fsdp: fits, 500 ms to 750 ms a step (6.2 s)
    """
    text = f"{report.layout.name}: {report.outcome}"
    if report.time is not None:
        low, high = (quantity(each, TIMES) for each in (report.time.lower, report.time.upper))
        text += f", {low} to {high} a step"
    elif report.reason:
        text += f", {report.reason.splitlines()[0][:100]}"
    return text + (" (kept)" if kept else f" ({report.compile_seconds:.1f} s)")


def progress_for(wanted: bool) -> Progress:
    """Returns how progress is shown: not at all, by a bar on a terminal, or by lines.

    Args:
        wanted: Whether it is shown.
    """
    if not wanted:
        return Progress()
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines()
