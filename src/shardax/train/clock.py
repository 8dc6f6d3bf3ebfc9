# SPDX-License-Identifier: Apache-2.0
"""How fast training goes.

A *token* is a target of a batch; a batch without ``targets`` counts its rows. The first step of a
process compiles, so counting starts after it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax


class Clock:
    """Counts tokens per second since it was last asked.

    Example:
        >>> clock = Clock()
        >>> batch = {"targets": jax.numpy.zeros((2, 8))}
        >>> clock.count(batch, pending=None)
        >>> clock.speed() is None
        True
        >>> clock.count(batch, pending=None)
        >>> clock.speed() > 0
        True
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._since: float | None = None

    def count(self, batch: Any, pending: Any) -> None:
        """Counts the batch of a step whose loss is ``pending``."""
        if self._since is None:
            jax.block_until_ready(pending)
            self.restart()
        else:
            self._tokens += _tokens(batch)

    def restart(self) -> None:
        self._tokens, self._since = 0, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time of a ``with`` block, which does something else than train."""
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
        self.restart()
        return speed


def _tokens(batch: Any) -> int:
    targets = batch.get("targets") if isinstance(batch, Mapping) else None
    return jax.tree.leaves(batch)[0].shape[0] if targets is None else targets.size
