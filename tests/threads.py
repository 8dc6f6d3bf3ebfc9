# SPDX-License-Identifier: Apache-2.0
"""Work in several threads at once, with the interpreter switching between them often."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    """Switches threads after ten microseconds; tests that import it have it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(
    work: Callable[[int], Any], threads: int, *, times: int = 1
) -> tuple[list[Any], list[BaseException]]:
    """Runs ``work(thread + i)`` so many times in each thread; returns last results and errors."""
    results: list[Any] = [None] * threads
    raised: list[BaseException] = []
    start = threading.Barrier(threads)

    def run(thread: int) -> None:
        start.wait()
        for i in range(times):
            try:
                results[thread] = work(thread + i)
            except BaseException as error:  # noqa: BLE001 (returned)
                raised.append(error)

    running = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return results, raised
