# SPDX-License-Identifier: Apache-2.0
"""Objects that one thread at a time may use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping

from shardax._core.errors import ConcurrentWriteError
from shardax._core.graph.paths import Path, format_path


class OneThread:
    """Owners of objects during blocks, by ``id``."""

    def __init__(self, doing: str, consequence: str) -> None:
        self.doing = doing  # what another thread does: "captures from the Module"
        self.consequence = consequence
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self, paths: Mapping[int, Path]) -> Generator[None]:
        """Refuses objects, given by ``id``, that another thread holds."""
        thread = threading.get_ident()
        with self._lock:
            for item, path in paths.items():
                if self._threads.get(item, thread) != thread:
                    raise ConcurrentWriteError(
                        f"Another thread {self.doing} at {format_path(path) or 'the root'} now, "
                        f"{self.consequence}. Let threads take turns by a lock, or give each a "
                        f"model of its own, `sx.clone(model)`."
                    )
            added = paths.keys() - self._threads.keys()
            self._threads.update(dict.fromkeys(added, thread))
        try:
            yield
        finally:
            with self._lock:
                for item in added:
                    del self._threads[item]
