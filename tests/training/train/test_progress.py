# SPDX-License-Identifier: Apache-2.0
"""Progress is a live bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from shardax.train import progress
from shardax.train.progress import TrainingProgress


class Terminal(io.StringIO):
    """Text that is taken for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows, to be set by a test."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def shown(text: str) -> list[str]:
    """What stood on the terminal's lines, one after another, without control sequences."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.strip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_lines_tell_step_loss_speed_and_time_left(clock: list[float]) -> None:
    file = io.StringIO()
    with TrainingProgress(100, 300, file) as display:
        display.step(101, None, None)
        clock[0] += 50
        display.step(150, 2.34567, "12,346 tokens/s")
        clock[0] += 50
        display.step(200, 2.0, None)
        display.note("step 200: held-out loss 2.1")
        clock[0] += 20_000
        display.step(210, 2.0, "1 tokens/s")
        display.step(300, 1.5, "2 tokens/s")
    assert file.getvalue().splitlines() == [
        # 50 of 200 steps took 50 seconds, so 150 are left.
        "step 150/300  loss 2.3457  12,346 tokens/s  ETA 2:30",
        "step 200/300  loss 2.0000  ETA 1:40",
        "step 200: held-out loss 2.1",
        "step 210/300  loss 2.0000  1 tokens/s  ETA 4:34:05",
        "step 300/300  loss 1.5000  2 tokens/s  ETA 0:00",
    ]


def test_bar_shows_steps_loss_speed_and_time_left(wide_terminal: Terminal) -> None:
    with TrainingProgress(0, 40, wide_terminal) as display:
        display.step(10, 3.25, None)
        display.step(20, 2.5, "12,346 tokens/s")
        display.step(21, None, None)
    last = shown(wide_terminal.getvalue())[-1]
    assert re.fullmatch(r"train [━╸╺ ]+ 21/40 loss 2\.5000  12,346 tokens/s ETA (\d|-):.*", last)


def test_bar_shows_starting_before_the_first_loss(wide_terminal: Terminal) -> None:
    with TrainingProgress(5, 40, wide_terminal):
        pass
    last = shown(wide_terminal.getvalue())[-1]
    assert re.match(r"train [━╸╺ ]+ 5/40 starting", last)


def test_notes_stay_above_the_bar_as_they_are(wide_terminal: Terminal) -> None:
    with TrainingProgress(0, 2, wide_terminal) as display:
        display.step(1, 1.0, "1 tokens/s")
        display.note("step 1: held-out loss 1.0 [not markup]")
        display.step(2, 1.0, "1 tokens/s")
    lines = shown(wide_terminal.getvalue())
    assert "step 1: held-out loss 1.0 [not markup]" in lines
    assert lines[-1].startswith("train") and " 2/2 " in lines[-1]


def test_bar_fits_a_terminal_of_80_columns(
    wide_terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with TrainingProgress(0, 20_000, wide_terminal) as display:
        display.step(12_345, 10.125, "1,234,567 tokens/s")
    last = shown(wide_terminal.getvalue())[-1]
    assert len(last) <= 80
    assert "12345/20000 loss 10.1250  1,234,567 tokens/s ETA" in last


@pytest.mark.parametrize(
    ("terminal", "kind", "is_bar"),
    [(False, "xterm", False), (True, "xterm", True), (True, "dumb", False)],
)
def test_output_decides_which(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, kind: str, is_bar: bool
) -> None:
    monkeypatch.setenv("TERM", kind)
    for given in (True, False):
        file: Any = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stdout", file)
        with TrainingProgress(0, 10, file if given else None) as display:
            display.step(1, 2.0, None)
        is_line = re.fullmatch(r"step 1/10  loss 2\.0000  ETA \d:\d\d\n", file.getvalue())
        assert bool(is_line) is not is_bar
        assert any(line.startswith("train ") for line in shown(file.getvalue())) is is_bar
