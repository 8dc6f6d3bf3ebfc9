# SPDX-License-Identifier: Apache-2.0
"""Measurements of the suite itself: what tests cost, and which mutants they kill."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU time of this process and of its children, those that run included where /proc is."""
    # A process that serves many tests would else count for the one in which it is waited for.
    return sum(os.times()[:4]) + sum(map(_of_child, _children()))


def _children() -> list[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    pids: list[str] = []
    for task in tasks:
        with contextlib.suppress(OSError):  # the thread has ended
            pids += task.read_text().split()
    return pids


def _of_child(pid: str) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, and is waited for
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS  # own and of its children: user, system
