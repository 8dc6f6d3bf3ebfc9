# SPDX-License-Identifier: Apache-2.0
"""Progress of a search: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import io
import re

import pytest

from shardax import plan
from shardax.plan.report.progress import outcome_text, progress_for

DP, TP = (plan.Layout(name, (), (("data", 8),)) for name in ("dp", "tp"))
BAND = plan.TimeBand(0.5, 0.75, 0.5, 0.2, 0.05, 0.0, "compute")
FITS = plan.LayoutReport(DP, "fits", time=BAND, compile_seconds=6.24)
FAILED = plan.LayoutReport(TP, "failed", reason="it crashed\nin line 3")


class Terminal(io.StringIO):
    """Text that is taken for a terminal."""

    def isatty(self) -> bool:
        return True


def test_disabled_progress_counts_without_printing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_for(False) as shown:
        shown.expect(2, "screening")
        shown.begin(DP)
        shown.end(FITS, False)
    assert (shown.done, shown.total) == (1, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_for(True) as shown:
        shown.expect(2, "screening")
        for report, kept in ((FITS, True), (FAILED, False)):
            shown.begin(report.layout)
            shown.end(report, kept)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "screening: 2",
        "[1/2] dp: fits, 500 ms to 750 ms a step (kept)",
        "[2/2] tp: failed, it crashed (0.0 s)",
    ]


def test_line_shows_time_or_reason_and_duration() -> None:
    assert outcome_text(FITS) == "dp: fits, 500 ms to 750 ms a step (6.2 s)"
    assert outcome_text(FITS, is_cached=True) == "dp: fits, 500 ms to 750 ms a step (kept)"
    assert outcome_text(FAILED) == "tp: failed, it crashed (0.0 s)"
    assert outcome_text(plan.LayoutReport(TP, "failed")) == "tp: failed (0.0 s)"


def test_terminal_bar_shows_current_and_best_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    screen = Terminal()
    with progress_for(True, screen) as shown:
        shown.expect(2, "screening")
        for layout in (DP, TP):
            shown.begin(layout)
        shown.end(FITS, False)
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"screening [━╸╺ ]+ 1/2 \d:\d\d:\d\d best 0\.625 s; tp +ETA", said)
    assert screen.getvalue().endswith("\x1b[2K")  # and nothing of it stays


def test_terminal_that_cannot_redraw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Terminal()
    with progress_for(True, screen) as shown:
        shown.expect(3, "screening")
    assert screen.getvalue() == "screening: 3\n"
