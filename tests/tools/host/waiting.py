# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 600) -> None:
    """Returns when a condition holds; fails if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also if nobody has asked how."""
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
