# SPDX-License-Identifier: Apache-2.0
"""Moves: bringing arrays to other devices one after another, so that no two models are held.

JAX copies in the background. Someone who only asks for the next copy when the last was *asked for*
can fill the devices with old and new arrays at once, however early the old ones are let go. So an
array counts as moved when its copy is *there*: then its holder gets the copy, the old one is let
go, and only then does the next copy begin. Small arrays go in *batches*, because waiting for each
would take longer than copying it.

Letting go is all that is done to an old array. It is not deleted, since something else may hold it:
a State taken before, a clone that has not been trained yet. And since a holder keeps its array
until the copy is there, a device that has no room leaves every holder with a valid array: the
batches before are at their new place, the others at their old one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardax.core._jax import Tracer
from shardax.core.errors import PlacementError
from shardax.core.paths import Path, format_path

BATCH_BYTES = 2**18
"""A batch is waited for when it holds this many bytes."""


class Moves:
    """Copies in the making, and where to put them when they are there.

    Args:
        total: How many moves are to come, for messages.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._batch: list[tuple[Path, Any, Callable[[Any], None]]] = []
        self._bytes = 0

    def add(self, path: Path, make: Callable[[], Any], store: Callable[[Any], None]) -> None:
        """Begins one move.

        Args:
            path: Where the value is, for messages.
            make: Makes the value at its new place; an array or a pytree.
            store: Called with the value when it is there.

        Raises:
            PlacementError: If a device refuses; what was stored stays, nothing else changed.
        """
        try:
            value = make()
        except jax.errors.JaxRuntimeError as error:
            raise self._refused([path], error) from error
        self._batch.append((path, value, store))
        self._bytes += sum(array.nbytes for array in _arrays(value))
        if self._bytes >= BATCH_BYTES:
            self.finish()

    def finish(self) -> None:
        """Waits for the copies in the making and stores them.

        Raises:
            PlacementError: If a device refuses; the batch is not stored.
        """
        batch, self._batch, self._bytes = self._batch, [], 0
        try:
            jax.block_until_ready([_arrays(value) for _, value, _ in batch])
        except jax.errors.JaxRuntimeError as error:
            raise self._refused([path for path, _, _ in batch], error) from error
        for _, value, store in batch:
            store(value)
        self.done += len(batch)

    def _refused(self, paths: list[Path], error: Exception) -> PlacementError:
        shown = ", ".join(map(format_path, paths[:8])) + (" ..." if len(paths) > 8 else "")
        return PlacementError(
            f"{shown}: could not be placed, because a device refused: {error}\n{self.done} of "
            f"{self.total} values are at their new place and the others where they were; all are "
            "valid. Make room (a State or another model may hold the old arrays), split by more "
            "mesh axes, or use another memory_kind, and call again: what is in place is not moved "
            "a second time."
        )


def _arrays(value: Any) -> list[Any]:
    """The arrays of a value; what is being traced is on no device yet."""
    return [leaf for leaf in jax.tree.leaves(value) if not isinstance(leaf, Tracer)]
