# SPDX-License-Identifier: Apache-2.0
"""Measurements of the suite itself: what tests cost, and which mutants they kill."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU time of this process and all below it, those that run included where /proc is."""
    # A process that serves many tests would else count for the one in which it is waited for.
    return sum(os.times()[:4]) + sum(map(_of_process, _below("self")))


def _below(pid: str) -> list[str]:
    """Returns the processes that a process has started, and those that they have."""
    children: list[str] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children += task.read_text().split()
    return [*children, *(each for child in children for each in _below(child))]


def _of_process(pid: str) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, and is waited for
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS  # own and of its children: user, system
