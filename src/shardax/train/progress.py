# SPDX-License-Identifier: Apache-2.0
"""Progress display and throughput of a training run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self, TextIO

import jax

from shardax._terminal import ProgressBar, is_live


class TrainingProgress:
    """Bar of steps and losses on terminals, plain lines elsewhere."""

    def __init__(self, first: int, total: int, file: TextIO | None = None) -> None:
        self._first, self._total = first, total
        self._file = sys.stdout if file is None else file
        self._start = time.monotonic()
        self._loss = self._speed = ""
        self._bar: ProgressBar | None = None
        if is_live(self._file):
            status = "starting" if first < total else "done"
            self._bar = ProgressBar(self._file, "train", total, first, status)

    def step(self, step: int, loss: float | None, tokens_per_second: float | None) -> None:
        """Shows a step, with the loss and speed that are new."""
        speed = f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        if self._bar is not None:
            self._loss = self._loss if loss is None else f"loss {loss:.4f}"
            self._speed = speed or self._speed
            status = "  ".join(text for text in (self._loss, self._speed) if text)
            self._bar.update(done=step, status=status)
        elif loss is not None:
            done = step - self._first
            passed = time.monotonic() - self._start
            left = _duration(passed / done * (self._total - step) if done else 0.0)
            speed = f"  {speed}" if speed else ""
            self.note(f"step {step}/{self._total}  loss {loss:.4f}{speed}  ETA {left}")

    def note(self, message: str) -> None:
        """Shows a line of its own."""
        if self._bar is not None:
            self._bar.note(message)
        else:
            print(message, file=self._file, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc_info)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Throughput:
    """Tokens per second since it was last asked."""

    # A token is a target of a batch; a batch without targets counts its rows. The first step
    # compiles, so counting starts after it.

    def __init__(self) -> None:
        self._tokens = 0
        self._since: float | None = None

    def count(self, batch: Any, pending: Any) -> None:
        """Counts the batch of a step whose loss is ``pending``."""
        if self._since is None:
            jax.block_until_ready(pending)
            self._since = time.perf_counter()
            return
        targets = batch.get("targets") if isinstance(batch, Mapping) else None
        rows = jax.tree.leaves(batch)[0].shape[0] if targets is None else targets.size
        self._tokens += rows

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time of a ``with`` block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += time.perf_counter() - started

    def speed(self) -> float | None:
        """Returns tokens per second, or None if there were none since."""
        if self._since is None or self._tokens == 0:
            return None
        speed = self._tokens / max(time.perf_counter() - self._since, 1e-9)
        self._tokens, self._since = 0, time.perf_counter()
        return speed
