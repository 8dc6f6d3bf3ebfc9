# SPDX-License-Identifier: Apache-2.0
"""Terminals get bars and coloured tables, everything else is left to plain lines."""

from __future__ import annotations

import importlib.util
import io
import re
from typing import Any

import pytest

from shardax._terminal import ProgressBar, is_live


class Terminal(io.StringIO):
    """Text that is taken for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def plain(file: io.StringIO) -> str:
    """What was written, without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def lines(file: io.StringIO) -> list[str]:
    """What stood on the terminal's lines, one after another."""
    return [line.strip() for line in re.split(r"[\r\n]+", plain(file)) if line.strip()]


def test_is_live_is_true_of_a_redrawing_terminal_only(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_live(terminal)
    assert not is_live(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(terminal)


def test_is_live_without_rich_is_false(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "rich" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert not is_live(terminal)


def test_bar_shows_title_count_status_and_time(terminal: Terminal) -> None:
    with ProgressBar(terminal, "train", 40, done=5, status="starting") as bar:
        bar.update(done=21, status="loss 2.5 [not markup]")
        bar.note("step 21: [not markup] either")
    found = lines(terminal)
    assert re.match(r"train [━╸╺ ]+ 5/40 starting ETA (\d|-)", found[0])
    assert "step 21: [not markup] either" in found
    assert re.fullmatch(r"train [━╸╺ ]+ 21/40 loss 2\.5 \[not markup\] ETA (\d|-):.*", found[-1])
    assert len(found[-1]) <= 80


def test_transient_bar_changes_title_and_clears_itself(terminal: Terminal) -> None:
    with ProgressBar(terminal, "planning", 0, transient=True, elapsed=True) as bar:
        bar.update(done=1, status="tp", title="screening", total=8)
        bar.update(done=2, status="dp")
    assert re.search(r"screening [━╸╺ ]+ 2/8 \d:\d\d:\d\d dp +ETA", "\n".join(lines(terminal)))
    assert terminal.getvalue().endswith("\x1b[2K")
