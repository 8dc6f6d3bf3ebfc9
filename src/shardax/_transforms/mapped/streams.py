# SPDX-License-Identifier: Apache-2.0
"""Random streams in a mapped call.

A stream has a key and a counter of its draws. What a run sees of it:

- A mapped stream with one key is *split*. One draw is taken from it, and the key of each run is
  made of that draw and the number of the run. So runs draw different numbers, and the same ones
  whatever else is mapped. After the call the caller's stream has moved on by one draw, if any run
  drew from it.
- A mapped stream with one key per run already is sliced as any array.
- A shared stream is the same in all runs of ``vmap`` and ``shard_map``, so they draw the same
  numbers. In ``scan`` its counter is carried, so each iteration goes on where the last one ended.

A new object that keeps a split stream gets a copy of it, with a key per run. The given stream stays
the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardax._core.frames import owner_here
from shardax._core.graph.definitions import Definition, GraphDef, ModuleDef, Ref
from shardax._core.graph.flatten import ChildDecoder, GraphWalk, is_object
from shardax._core.graph.paths import Leaf
from shardax._core.init.rng import Rngs, RngStream
from shardax._core.object import Object
from shardax._core.state.split_merge import clone_sharing
from shardax._transforms.lift.alias_paths import objects_in
from shardax._transforms.lift.effects import LiftedOutputs, continue_walk, holds_as_built
from shardax._transforms.lift.engine import LiftedCall, RunContext
from shardax._transforms.mapped import errors


class StreamPositions(NamedTuple):
    """The positions of a stream's two Variables among those of a graph."""

    key: int
    counter: int


def streams_of(graphdef: GraphDef) -> list[StreamPositions]:
    """Returns the random streams in a structure."""
    position_of = {index: position for position, index in enumerate(graphdef.leaves)}
    streams = []
    for definition in graphdef.objects:
        if type(definition) is not ModuleDef or not issubclass(definition.type, RngStream):
            continue
        attributes = dict(definition.attributes)
        key, counter = attributes.get("key"), attributes.get("count")
        if isinstance(key, Ref) and isinstance(counter, Ref):
            streams.append(
                StreamPositions(position_of[key.position], position_of[counter.position])
            )
    return list(dict.fromkeys(streams))


class SplitStreams:
    """The streams that one mapped call splits."""

    def __init__(
        self, call: LiftedCall, values: list[Leaf], is_mapped: Callable[[int], bool]
    ) -> None:
        self.call = call
        mapped = [s for s in streams_of(call.graph.flat.graphdef) if is_mapped(s.key)]
        self.streams = [stream for stream in mapped if jnp.ndim(values[stream.key]) == 0]

        # Where several keys were written over one, the counter has one number per key, too.
        for key, counter in mapped:
            if jnp.shape(values[key]) and not jnp.shape(values[counter]):
                values[counter] = jnp.broadcast_to(values[counter], values[key].shape)

        self.keys = {stream.key for stream in self.streams}
        self.counts_before = {stream.counter: values[stream.counter] for stream in self.streams}
        # Known after the function ran: the counters of streams from which a run drew, or which a
        # new object keeps.
        self._counters_held: set[int] = set()
        self._counters_used: set[int] = set()

    def __contains__(self, position: int) -> bool:
        return position in self.keys or position in self.counts_before

    def draw(self, values: Sequence[Leaf]) -> dict[int, Leaf]:
        """Takes one draw from each stream; returns the drawn keys by position."""
        return {
            stream.key: jax.random.fold_in(values[stream.key], values[stream.counter])
            for stream in self.streams
        }

    def split_keys(
        self, values: Sequence[Leaf], size: int, sharding: NamedSharding | None = None
    ) -> list[Leaf]:
        """Returns the values with one key and one counter per run, on axis 0."""

        def laid_out(array: jax.Array) -> jax.Array:
            return array if sharding is None else jax.reshard(array, sharding)

        split = list(values)
        for position, key in self.draw(values).items():
            split[position] = laid_out(jax.random.split(key, size))
        for position in self.counts_before:
            split[position] = laid_out(jnp.zeros((size,), jnp.uint32))
        return split

    def without_counters(self, outputs: LiftedOutputs) -> LiftedOutputs:
        """Returns, inside a run, what leaves without the counters; refuses written keys."""
        written = outputs.effects.written
        for position in self.keys.intersection(written):
            path = self.call.graph.flat.leaf_paths[position]
            raise errors.stream_was_given_a_key(path, self.call.name)

        used = self.counts_before.keys() & {*written, *self._counters_held}
        self._counters_used = used
        return outputs.without_written(used)

    def advance(self, outputs: LiftedOutputs) -> LiftedOutputs:
        """Returns, outside, what left, with the caller's used streams moved on by one draw."""
        counts = {
            position: count + jnp.uint32(1)
            for position, count in self.counts_before.items()
            if position in self._counters_used
        }
        return outputs.with_written(counts)

    def separate_held_by_new_objects(self, context: RunContext) -> None:
        """Gives each new holder of a split stream a copy of it, inside a run."""
        self._counters_held = set()
        if not self.streams:
            return

        copies = _StreamCopies({id(context.variable(s.key)): s.counter for s in self.streams})
        given = context.copies
        given_streams = {index for index, item in enumerate(given) if copies.is_split(item)}
        walk = _walk_what_changed(context, given_streams)

        # A stream in an object that did not hold it before is replaced by a copy.
        for index, definition in enumerate(walk.definitions):
            if definition is None:
                continue
            held_before = set[int]()
            if index < len(given):
                held_before = _positions_in(context.graphdef.objects[index])
            newly_held = (given_streams & _positions_in(definition)) - held_before
            if newly_held:
                objects = list(walk.objects)
                for position in newly_held:
                    objects[position] = copies.copy_of(objects[position])
                walk.objects[index]._unflatten(definition, ChildDecoder(objects))
        self._counters_held = copies.copied_counters


class _StreamCopies:
    """Copies of split streams and of the ``Rngs`` that hold them, one for each."""

    def __init__(self, counter_of_key: Mapping[int, int]) -> None:
        self._counter_of_key = counter_of_key  # by ``id`` of the Variable with the key
        self._copies: dict[int, Object] = {}  # by ``id`` of the original
        self.copied_counters: set[int] = set()

    def is_split(self, item: object) -> bool:
        """Whether an object is a split stream, or an ``Rngs`` with one."""
        if isinstance(item, Rngs):
            return any(self.is_split(stream) for _, stream in item.streams())
        return isinstance(item, RngStream) and id(vars(item).get("key")) in self._counter_of_key

    def copy_of(self, item: Object) -> Object:
        """Returns the copy of a split stream or of an ``Rngs``."""
        copy = self._copies.get(id(item))
        if copy is not None:
            return copy

        if isinstance(item, RngStream):
            self.copied_counters.add(self._counter_of_key[id(item.key)])
            copy = self._copies[id(item)] = clone_sharing(item)
            return copy

        copy = self._copies[id(item)] = type(item)._allocate(owner_here(), None)
        for name, value in vars(item).items():
            setattr(copy, name, self.copy_of(value) if self.is_split(value) else value)
        return copy


def _walk_what_changed(context: RunContext, given_streams: set[int]) -> GraphWalk:
    """Returns a walk with the definitions of new objects, and of given ones that changed."""
    walk = continue_walk(context.frame, context.copies)
    for leaf in jax.tree.leaves(context.result, is_leaf=is_object):
        if isinstance(leaf, Object):
            walk.visit(leaf, ())

    before = context.graphdef.objects
    for index, (copy, definition) in enumerate(zip(context.copies, before, strict=True)):
        if index not in given_streams and not holds_as_built(copy, definition, context.copies):
            walk.definitions[index] = copy._flatten(lambda child, key: walk.encode(child, ()))
    return walk


def _positions_in(definition: Definition) -> set[int]:
    """Returns the positions of the objects that a definition holds."""
    return {position for position, _ in objects_in(definition, ())}
