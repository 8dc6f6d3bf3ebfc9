# SPDX-License-Identifier: Apache-2.0
"""Measurements of the suite itself: what tests cost, and which mutants they kill."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU time of this process and all below it, those that run included where /proc is."""
    # A process that serves many tests would else count for the one in which it is waited for.
    return sum(os.times()[:4]) + sum(map(_of_process, _below("self")))


def _below(pid: str) -> list[str]:
    """Returns the processes that a process has started, and those that they have."""
    # By plain reads: a worker and its servers have hundreds of threads, and each test asks.
    children: list[str] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return children
    for thread in threads:
        children += _read(f"/proc/{pid}/task/{thread}/children").split()
    return [*children, *(each for child in children for each in _below(child))]


def _of_process(pid: str) -> float:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS  # own and of its children: user, system


def _read(path: str) -> str:
    """Returns the text of a file of /proc, "" if its process or thread has ended."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, 1 << 16).decode()
    except OSError:
        return ""
    finally:
        os.close(file)
