# SPDX-License-Identifier: Apache-2.0
"""Random streams in transforms that run a function several times at once.

A random stream (``core.rng``) with one key, under an entry that maps it (an axis, a spec that names
mesh axes), is *split*: one draw is taken from it, and every lane gets a stream of its own, whose
key is made of that draw and the lane's number. So lanes draw different numbers, and the same ones
whatever else is mapped. Under an entry that shares it (``None``), all lanes draw the same numbers.

A stream that already has one key per lane (``rngs.fork(split=n)``, a model made by ``vmap``) is
mapped like any array.

After the call a split stream has moved on by one draw, if any lane drew from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardax.core.errors import OutputError
from shardax.core.paths import format_path
from shardax.core.rng import RngStream
from shardax.core.structure import GraphDef, ModuleDef, Ref
from shardax.transforms.call import Call
from shardax.transforms.layout import add_written, drop_written
from shardax.transforms.lift import Carried


@dataclass(frozen=True)
class Stream:
    """Where a stream stands among the graph's Variables."""

    key: int
    count: int


def streams_of(graphdef: GraphDef) -> list[Stream]:
    """Returns the random streams in a structure."""
    leaf_of = {index: position for position, index in enumerate(graphdef.leaves)}
    found = []
    for definition in graphdef.objects:
        if type(definition) is not ModuleDef or not issubclass(definition.type, RngStream):
            continue
        attributes = dict(definition.attributes)
        key, count = attributes.get("key"), attributes.get("count")
        if isinstance(key, Ref) and isinstance(count, Ref):
            found.append(Stream(leaf_of[key.position], leaf_of[count.position]))
    return list(dict.fromkeys(found))


class SplitStreams:
    """The streams that one call splits.

    Args:
        call: The call.
        values: One value per Variable of the graph.
        is_mapped: Whether the entry of the Variable at a position maps it.
    """

    def __init__(self, call: Call, values: Sequence[Any], is_mapped: Callable[[int], bool]) -> None:
        self.call = call
        self.streams = [
            stream
            for stream in streams_of(call.graph.flat.graphdef)
            if is_mapped(stream.key) and jnp.ndim(values[stream.key]) == 0
        ]
        self.before = {stream.count: values[stream.count] for stream in self.streams}
        self.keys = {stream.key for stream in self.streams}

    def __contains__(self, position: int) -> bool:
        return position in self.keys or position in self.before

    def draw(self, values: Sequence[Any]) -> dict[int, Any]:
        """Takes one draw from each stream; returns a key of shape () by position."""
        return {
            stream.key: jax.random.fold_in(values[stream.key], values[stream.count])
            for stream in self.streams
        }

    def lanes(self, values: Sequence[Any], size: int, sharding: Any = None) -> list[Any]:
        """Returns the values with one key and count per lane on a leading axis.

        Args:
            values: One value per Variable of the graph.
            size: The number of lanes.
            sharding: How lanes are split over the Explicit axes of a mesh, if they are.
        """
        split = list(values)
        for position, key in self.draw(values).items():
            split[position] = _laid_out(jax.random.split(key, size), sharding)
        for position in self.before:
            split[position] = _laid_out(jnp.zeros((size,), jnp.uint32), sharding)
        return split

    def settle(self, carried: Carried) -> tuple[Carried, dict[int, Any]]:
        """Separates, inside the transform, what was written to split streams.

        Returns:
            (what else leaves, the counts before the call of the streams that were drawn from).

        Raises:
            OutputError: If a lane gave a split stream a new key.
        """
        written = carried.record.written
        for position in self.keys.intersection(written):
            raise OutputError(
                f"The random stream at "
                f"{format_path(self.call.graph.flat.leaf_paths[position])} was given another "
                f"key inside sx.{self.call.name}, which splits it: every lane has a key of its "
                f"own, so there is not one to keep. Reseed it outside, or make a stream of its "
                f"own inside (sx.Rngs)."
            )
        moved = {position: self.before[position] for position in written if position in self.before}
        return drop_written(carried, moved), moved

    def restore(self, carried: Carried, moved: Mapping[int, Any]) -> Carried:
        """Adds, outside the transform, the counts of the streams that moved on."""
        counts = {position: count + jnp.uint32(1) for position, count in moved.items()}
        return add_written(carried, counts)


def _laid_out(array: Any, sharding: Any) -> Any:
    return array if sharding is None else jax.reshard(array, sharding)
