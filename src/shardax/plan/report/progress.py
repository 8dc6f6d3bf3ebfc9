# SPDX-License-Identifier: Apache-2.0
"""Progress of a search on stderr, as a bar or lines."""

from __future__ import annotations

import math
import sys
from typing import Self, TextIO

from shardax._terminal import ProgressBar, is_live
from shardax.plan.records import Layout, LayoutReport
from shardax.plan.report.table import TIMES, quantity


class SearchProgress:
    """Counts compiled layouts, shown by lines, a bar, or not."""

    def __init__(self, lines: TextIO | None = None, bar: ProgressBar | None = None) -> None:
        self.done = 0
        self.total = 0  # as far as is known
        self._lines, self._bar = lines, bar
        self._trying: dict[str, None] = {}
        self._best = math.inf  # seconds of a step

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc_info)

    def expect(self, count: int, title: str) -> None:
        """Announces more layouts, with a title."""
        self.total += count
        if self._lines is not None:
            print(f"{title}: {count}", file=self._lines, flush=True)
        self._redraw(title)

    def begin(self, layout: Layout) -> None:
        """Records the start of a layout's compilation."""
        self._trying[layout.name] = None
        self._redraw()

    def end(self, report: LayoutReport, is_cached: bool) -> None:
        """Records a layout's outcome, and whether its program was cached."""
        self.done += 1
        self._trying.pop(report.layout.name, None)
        if report.outcome == "fits" and report.time is not None:
            self._best = min(report.time.middle, self._best)
        if self._lines is not None:
            text = f"[{self.done}/{self.total}] {outcome_text(report, is_cached)}"
            print(text, file=self._lines, flush=True)
        self._redraw()

    def _redraw(self, title: str | None = None) -> None:
        if self._bar is not None:
            best = "" if math.isinf(self._best) else f"best {self._best:.3g} s; "
            status = best + ", ".join(self._trying)
            self._bar.update(done=self.done, status=status, title=title, total=self.total)


def outcome_text(report: LayoutReport, is_cached: bool = False) -> str:
    """Returns one line about a report."""
    text = f"{report.layout.name}: {report.outcome}"
    if report.time is not None:
        ends = (report.time.lower, report.time.upper)
        low, high = (quantity(seconds, TIMES) for seconds in ends)
        text += f", {low} to {high} a step"
    elif report.reason:
        text += f", {report.reason.splitlines()[0][:100]}"
    return text + (" (kept)" if is_cached else f" ({report.compile_seconds:.1f} s)")


def progress_for(is_on: bool, file: TextIO | None = None) -> SearchProgress:
    """Returns the display of progress on a file, by default stderr."""
    to = sys.stderr if file is None else file
    if not is_on:
        return SearchProgress()
    if is_live(to):
        return SearchProgress(bar=ProgressBar(to, "planning", 0, transient=True, elapsed=True))
    return SearchProgress(lines=to)
