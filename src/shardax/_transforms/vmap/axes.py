# SPDX-License-Identifier: Apache-2.0
"""Mapped dimensions: sizes, layouts, names, boxes and random streams.

All arrays that are mapped together have one size along their axes, and the dimension that this
makes, the *mapped dimension*, is the same for all of them. Inside the function it is gone, from the
values and from the names in ``Variable.axes``; on what leaves it is back, at the axis of each. Its
name is the one that the Variable came with, or, for a new Variable, that of the caller's
``metadata``, or none. Over Explicit mesh axes it is split alike in all arrays.

A *box* is a pytree node that describes the dimensions of what is in it, known by its methods and
not by its class: ``add_axis(index, params)`` and ``remove_axis(index, params)``, where ``params``
is ``{PARTITION_NAME: name}``. The function sees boxes without the mapped dimension, and boxes in
its result have it again. So it is with the names that a ``State`` keeps of its Variables, and with
the box that a Variable was made of.

A random stream with one key, under an entry that maps it, is *split*: one draw is taken from it,
and every batch element gets a stream whose key is made of that draw and its number. So elements
draw different numbers, and the same ones whatever else is mapped. After the call the stream has
moved on by one draw, if any element drew from it. Under an entry that shares it (``None``), all
elements draw the same numbers. A stream that has one key per element already is mapped as any
array. New objects that keep a split stream have one of their own, with a key per element: the
given one stays the caller's.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.errors import MetadataError, ShardaxError
from shardax._core.frames import owner_here
from shardax._core.frozen import Origin
from shardax._core.graph.definitions import GraphDef, ModuleDef, Ref, VariableDef
from shardax._core.graph.flatten import ChildDecoder, is_object
from shardax._core.graph.handlers import knows_names
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.graph.static import PARTITION_NAME, Metadata
from shardax._core.init.rng import Rngs, RngStream
from shardax._core.object import Object
from shardax._core.state.split_merge import clone_sharing
from shardax._core.state.state import State
from shardax._transforms import errors
from shardax._transforms.lift import prefix
from shardax._transforms.lift.binding import (
    LiftedOutputs,
    check_result,
    continue_walk,
    holds_as_built,
)
from shardax._transforms.lift.engine import LiftedCall, RunContext


class StreamPositions(NamedTuple):
    """Where a stream stands among the graph's Variables."""

    key: int
    counter: int


def streams_of(graphdef: GraphDef) -> list[StreamPositions]:
    """Returns the random streams in a structure."""
    leaf_of = {index: position for position, index in enumerate(graphdef.leaves)}
    streams = []
    for definition in graphdef.objects:
        if type(definition) is not ModuleDef or not issubclass(definition.type, RngStream):
            continue
        attributes = dict(definition.attributes)
        key, count = attributes.get("key"), attributes.get("count")
        if isinstance(key, Ref) and isinstance(count, Ref):
            streams.append(StreamPositions(leaf_of[key.position], leaf_of[count.position]))
    return list(dict.fromkeys(streams))


class SplitStreams:
    """The streams that one call splits."""

    def __init__(
        self, call: LiftedCall, values: list[Leaf], is_mapped: Callable[[int], bool]
    ) -> None:
        self.call = call
        streams = [s for s in streams_of(call.graph.flat.graphdef) if is_mapped(s.key)]
        self.streams = [s for s in streams if jnp.ndim(values[s.key]) == 0]
        for key, counter in streams:
            if jnp.shape(values[key]) and not jnp.shape(values[counter]):  # keys written over one
                values[counter] = jnp.broadcast_to(values[counter], values[key].shape)
        self.before = {stream.counter: values[stream.counter] for stream in self.streams}
        self.keys = {stream.key for stream in self.streams}
        self.kept: set[int] = set()  # counters of the streams that new objects keep

    def __contains__(self, position: int) -> bool:
        return position in self.keys or position in self.before

    def draw(self, values: Sequence[Leaf]) -> dict[int, Leaf]:
        """Takes one draw from each stream; returns keys by position."""
        return {
            stream.key: jax.random.fold_in(values[stream.key], values[stream.counter])
            for stream in self.streams
        }

    def split_keys(self, values: Sequence[object], size: int, sharding: object = None) -> list[Any]:
        """Returns the values with a key and count per batch element."""
        split = list(values)
        for position, key in self.draw(values).items():
            split[position] = _laid_out(jax.random.split(key, size), sharding)
        for position in self.before:
            split[position] = _laid_out(jnp.zeros((size,), jnp.uint32), sharding)
        return split

    def separate_kept(self, context: RunContext) -> None:
        """Gives new objects streams of their own for split ones they keep."""
        self.kept = set()
        if not self.streams:
            return
        counters = {id(context.variable(s.key)): s.counter for s in self.streams}
        clones: dict[int, Leaf] = {}

        def is_split(item: object) -> bool:
            if isinstance(item, Rngs):
                return any(is_split(stream) for _, stream in item.streams())
            return isinstance(item, RngStream) and id(vars(item).get("key")) in counters

        def clone_of(item):
            if id(item) not in clones and isinstance(item, RngStream):
                self.kept.add(counters[id(item.key)])
                clones[id(item)] = clone_sharing(item)
            elif id(item) not in clones:
                clones[id(item)] = copy = type(item)._allocate(owner_here(), None)
                for name, value in vars(item).items():
                    setattr(copy, name, clone_of(value) if is_split(value) else value)
            return clones[id(item)]

        walk = continue_walk(context.frame, context.copies)
        split_positions = {i for i, item in enumerate(context.copies) if is_split(item)}
        definitions = context.graphdef.objects
        for leaf in jax.tree.leaves(context.result, is_leaf=is_object):
            if isinstance(leaf, Object):
                walk.visit(leaf, ())
        for i, (copy, before) in enumerate(zip(context.copies, definitions, strict=True)):
            if i not in split_positions and not holds_as_built(copy, before, context.copies):
                walk.definitions[i] = copy._flatten(lambda child, key: walk.encode(child, ()))
        for i, definition in enumerate(walk.definitions):
            pair = (definition, definitions[i] if i < len(definitions) else None)
            holding, before = (
                {position for position, _ in prefix.objects_in(each, ())} if each else set[int]()
                for each in pair
            )
            shared_by = (split_positions & holding) - before
            if shared_by:
                objects = [clone_of(x) if j in shared_by else x for j, x in enumerate(walk.objects)]
                walk.objects[i]._unflatten(definition, ChildDecoder(objects))

    def separate_counts(self, outputs: LiftedOutputs) -> tuple[LiftedOutputs, dict[int, Any]]:
        """Separates, inside the transform, what was written to split streams."""
        written = outputs.effects.written
        for position in self.keys.intersection(written):
            raise errors.TransformError(
                f"The random stream at {format_path(self.call.graph.flat.leaf_paths[position])} "
                f"was given another key inside sx.{self.call.name}, which splits it: every batch "
                f"element has a key of its own, so there is not one to keep. Reseed it outside, or "
                f"make a stream of its own inside (sx.Rngs)."
            )
        moved = {
            p: old_value for p, old_value in self.before.items() if p in written or p in self.kept
        }
        return prefix.drop_written(outputs, moved), moved

    def restore(self, outputs: LiftedOutputs, moved: Mapping[int, object]) -> LiftedOutputs:
        """Adds, outside the transform, the counts of the streams that moved on."""
        counts = {position: count + jnp.uint32(1) for position, count in moved.items()}
        return prefix.add_written(outputs, counts)


def _laid_out(array: object, sharding: object):
    return array if sharding is None else jax.reshard(array, sharding)


class LeavingValue(NamedTuple):
    """A value that leaves a part of a mapped call."""

    kind: str  # ``"result"``, ``"written"`` into what was given, or ``"attached"`` to it
    path: Path
    entry: Any
    value: object
    new: str = ""  # the type of a new Variable


class MappedCall:
    """One call that runs its function on parts of its arguments."""

    def __init__(
        self,
        assignment: prefix.EntryAssignment,
        out: tuple[PyTree, str, PyTree],
        entries: Iterable[Hashable],
        is_mapped: Callable[[int], bool],
    ) -> None:
        self.assignment = assignment
        self.call = assignment.call
        # Prefix of the result, its name, and the entry of what has no place in the call.
        self.out_prefix, self.out_name, self.outside = out
        self.entries = list(dict.fromkeys(entries))  # those that can occur
        self.values = self.call.graph.values()
        self.streams = SplitStreams(self.call, self.values, is_mapped)
        self.boxes: MappedBoxes | None = None
        # Known after the function ran:
        self.moved: dict[int, Leaf] = {}
        self.tree: PyTree = None
        self.order: list[int] = []

    def record(
        self, context: RunContext, is_shared: Callable[[int], bool] = lambda _: False
    ) -> tuple[LiftedOutputs, list[LeavingValue], dict[int, PyTree]]:
        """Records what a part did; returns what leaves and is sown."""
        name, paths = self.call.name, self.assignment.leaf_paths
        check_result(context.result, name)
        self.streams.separate_kept(context)
        entries = self.assignment.output_entries(context, self.out_prefix, self.out_name)
        result = context.result if self.boxes is None else self.boxes.leave(context.result, entries)
        outputs, self.moved = self.streams.separate_counts(context.record_effects(result))
        effects = outputs.effects
        prefix.refuse_foreign(effects, name)
        sown = prefix.appended(context, effects, is_shared)
        outputs = prefix.drop_written(outputs, sown)
        leaving = [
            LeavingValue("result", path, entry, value)
            for (path, entry), value in zip(
                entries.labels, jax.tree.leaves(outputs.result), strict=True
            )
        ]
        for position, value in zip(effects.written, outputs.written, strict=True):
            entry = self.assignment.leaves[position]
            leaving.append(LeavingValue("written", paths[position], entry, value))
        types = [item.type.__name__ for item in effects.fresh if type(item) is VariableDef]
        for key, new, value in zip(effects.fresh_ids, types, outputs.fresh, strict=True):
            path, entry = entries.by_id.get(key, ((), self.outside))
            in_result = key in entries.by_id and key not in entries.attached
            kind = "result" if in_result else "attached"
            leaving.append(LeavingValue(kind, path, entry, value, new))
        leaving += [LeavingValue("attached", paths[p], None, value) for p, value in sown.items()]
        return outputs, leaving, sown

    def group(
        self, outputs: LiftedOutputs, sown: Mapping[int, object], entries: Iterable[Hashable]
    ) -> tuple[list[Leaf], ...]:
        """Groups, inside, the arrays that leave, one list per entry."""
        # JAX is given the entry of each list, because what leaves is known only after the run.
        leaves, self.tree = jax.tree.flatten((outputs, sown))
        self.order = [self.entries.index(entry) for entry in entries]
        lists: tuple[list[Any], ...] = tuple([] for _ in self.entries)
        for place, leaf in zip(self.order, leaves, strict=True):
            lists[place].append(leaf)
        return lists

    def apply(self, lists: Sequence[Sequence[Any]]) -> PyTree:
        """Applies, outside, what the parts did; returns the result."""
        remaining = [iter(values) for values in lists]
        outputs, sown = self.tree.unflatten([next(remaining[place]) for place in self.order])
        return self.apply_outputs(outputs, sown)

    def apply_outputs(self, outputs: LiftedOutputs, sown: Mapping[int, Sequence[Leaf]]) -> PyTree:
        """Applies, outside, what left, and what was sown into shared Variables."""
        more = {p: (*self.values[p], *rows) for p, rows in sown.items()}
        return self.call.apply(self.streams.restore(prefix.add_written(outputs, more), self.moved))


# (path, array, axis or None) of an array that enters.
EnteringArray = tuple[Path, Any, Any]


def entering_arrays(
    assignment: prefix.EntryAssignment,
    streams: SplitStreams,
    values: Sequence[Leaf],
    plain: Sequence[Leaf],
) -> list[EnteringArray]:
    """Returns the arrays that enter, except those of split streams."""
    variables = zip(assignment.leaf_paths, values, assignment.leaves, strict=True)
    rows = [
        (path, leaf, entry)
        for position, (path, value, entry) in enumerate(variables)
        if position not in streams
        for leaf in jax.tree.leaves(value)
    ]
    rows += zip(assignment.plain_paths, plain, assignment.plain, strict=True)
    return [(path, leaf, entry if prefix.is_axis(entry) else None) for path, leaf, entry in rows]


def common_size(rows: Iterable[EnteringArray], declared: int | None, name: str) -> int:
    """Returns the size that all mapped arrays have along their axes."""
    option = "length" if name == "scan" else "axis_size"
    sizes: dict[int, Path | None] = {} if declared is None else {declared: None}
    for path, leaf, axis in rows:
        if axis is None:
            continue
        if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
            raise errors.TransformError(
                f"sx.{name} maps axis {axis} of what stands at {format_path(path)}, but "
                f"{leaf!r} is a {type(leaf).__name__}, not an array. Give it None in in_axes, or "
                f"bind it with functools.partial."
            )
        shape = jnp.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise errors.TransformError(
                f"sx.{name} maps axis {axis} of the array at {format_path(path)}, which has shape "
                f"{shape}. Give it None in in_axes if it is the same for all, or another axis."
            )
        sizes.setdefault(shape[axis], path)
    if len(sizes) > 1:
        listed = "\n".join(
            f"  {option if path is None else format_path(path)}: {size}"
            for size, path in sizes.items()
        )
        raise errors.TransformError(f"sx.{name} maps arrays of different sizes:\n{listed}")
    if not sizes:
        raise errors.TransformError(
            f"sx.{name} does not know how many times to run: no argument has an axis to map. Give "
            f"{option}=..., or an axis in in_axes."
        )
    return next(iter(sizes))


def as_count(count_option: Any, option: str) -> int | None:
    """Returns a number of runs that a caller gave, or raises."""
    if count_option is None:
        return None
    try:
        count = -1 if isinstance(count_option, bool) else operator.index(count_option)
    except TypeError:  # also of a traced number
        count = -1
    if count < 0:
        raise errors.TransformError(
            f"{option} is {count_option!r}, but the number of runs is part of the program: an "
            f"integer of at least 0, known before it runs, such as {option}=8. It may be left out "
            f"where an argument is mapped."
        )
    return count


def check_new_axis(value: Any, axis: Any, path: Path, name: str) -> None:
    """Raises if a value has no place for a mapped dimension."""
    for leaf in jax.tree.leaves(value) if prefix.is_axis(axis) else []:
        rank = jnp.ndim(leaf) + 1
        if not -rank <= axis < rank:
            raise errors.TransformError(
                f"sx.{name} puts {format_path(path)} together along axis {axis}, but each part has "
                f"shape {jnp.shape(leaf)}, so the whole has no axis {axis}. Give it one from "
                f"{-rank} to {rank - 1}: in out_axes for a result, in in_axes for what belongs to "
                f"an argument."
            )


def mapped_sharding(rows: Iterable[EnteringArray], name: str) -> NamedSharding | None:
    """Returns the sharding of the mapped dimension over Explicit axes."""
    rows = [row for row in rows if isinstance(row[1], jax.Array)]
    mapped = [(path, leaf, _specs(leaf)[axis]) for path, leaf, axis in rows if axis is not None]
    if not any(over is not None for _, _, over in mapped):
        return None
    first, conflicting = mapped[0], next((row for row in mapped if row[2] != mapped[0][2]), None)
    if conflicting is not None:
        raise errors.TransformError(
            f"sx.{name} maps arrays whose mapped dimensions are split differently over the mesh:\n"
            f"  {format_path(first[0])}: {first[2]}\n"
            f"  {format_path(conflicting[0])}: {conflicting[2]}\n"
            f"Over Explicit mesh axes nothing is moved without being asked. Use jax.reshard, or "
            f"sx.shard for a model, to split them alike."
        )
    over = first[2] if isinstance(first[2], tuple) else (first[2],)
    for path, leaf, axis in rows:
        used = {part for spec in _specs(leaf) for part in jax.tree.leaves(spec)}
        if axis is None and used & set(over):
            raise errors.TransformError(
                f"sx.{name} maps a dimension that is split over the mesh axes {over}, but the "
                f"array at {format_path(path)}, which the whole batch shares, is split over them "
                f"too: {jax.typeof(leaf)}. Use jax.reshard to take it off them, or map it as well."
            )
    leaf = first[1]
    mesh = jax.typeof(leaf).sharding.mesh if isinstance(leaf, Tracer) else leaf.sharding.mesh
    return NamedSharding(mesh, PartitionSpec(first[2]))


def refuse_split(rows: Iterable[EnteringArray], name: str) -> None:
    """Raises if a scanned dimension is split over Explicit mesh axes."""
    for path, leaf, axis in rows:
        if not prefix.is_axis(axis) or not isinstance(leaf, jax.Array):
            continue
        over = _specs(leaf)[axis]
        if over is not None:
            raise errors.TransformError(
                f"sx.{name} takes slices along axis {axis} of the array at {format_path(path)}, "
                f"which is split over the mesh axis {over!r} there: {jax.typeof(leaf)}. One slice "
                f"after another cannot be split so over Explicit mesh axes. Keep the dimension "
                f"whole (a rule such as ('layers', None), or jax.reshard), or give the mesh Auto "
                f"axes."
            )


def _specs(leaf: object) -> Sequence[Any]:
    return tuple(jax.typeof(leaf).sharding.spec)


def mapped_params(metadata: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """Returns the properties of the mapped dimension, which boxes are given, or raises."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or (
        PARTITION_NAME not in metadata
        and difflib.get_close_matches(PARTITION_NAME, map(str, metadata))
    ):
        raise errors.PrefixError(
            f"metadata of sx.{name} is {metadata!r}; it is a mapping that has the name of the "
            f"mapped dimension, metadata={{sx.partition.PARTITION_NAME: 'layers'}}, and may have "
            f"further entries, which add_axis and remove_axis of boxes are given."
        )
    return metadata


def element_graphdef(
    assignment: prefix.EntryAssignment, streams: SplitStreams, params: Mapping[str, Any]
) -> GraphDef:
    """Returns the structure of one batch element: mapped axes have no name."""
    partition_name = params.get(PARTITION_NAME)
    graphdef = assignment.call.graph.flat.graphdef
    objects = list(graphdef.objects)
    for position, index in enumerate(graphdef.leaves):
        axis, definition = assignment.leaves[position], objects[index]
        if not prefix.is_axis(axis) or position in streams:
            continue
        path = assignment.leaf_paths[position]
        with _naming(definition.type, path):
            metadata = definition.metadata.without_axis(axis, partition_name, params)
        objects[index] = definition._replace(metadata=metadata)
    return GraphDef(tuple(objects), graphdef.roots)


@contextlib.contextmanager
def _naming(kind: type, path: Path) -> Generator[None]:
    """Says of which Variable names do not fit the mapped dimension."""
    try:
        yield
    except MetadataError as error:
        raise MetadataError(
            f"The {kind.__name__} at {format_path(path)} cannot be mapped: {error}"
        ) from error


def name_new_dimensions(
    assignment: prefix.EntryAssignment,
    streams: SplitStreams,
    outputs: LiftedOutputs,
    axes_of_new: Iterable[Any],
    params: Mapping[str, Any],
) -> None:
    """Adds the mapped dimension's name to the metadata of everything that leaves."""
    partition_name = params.get(PARTITION_NAME)
    remaining = zip(axes_of_new, outputs.fresh, strict=True)
    fresh, effects = [], outputs.effects
    for definition in effects.fresh:
        if type(definition) is VariableDef:
            axis, value = next(remaining)
            if prefix.is_axis(axis):
                metadata = definition.metadata.with_axis(
                    axis, partition_name, params, knows_names=knows_names(value)
                )
                definition = definition._replace(metadata=metadata)
        fresh.append(definition)
    effects.fresh = tuple(fresh)
    graphdef = assignment.call.graph.flat.graphdef
    leaf_of = {index: position for position, index in enumerate(graphdef.leaves)}
    for index, definition in effects.updates.items():
        if type(definition) is not VariableDef or leaf_of[index] in streams:
            continue
        axis, outer = assignment.leaves[leaf_of[index]], graphdef.objects[index].metadata
        if prefix.is_axis(axis):
            names = outer.mapped_names
            name = names[axis] if axis < len(names) else partition_name
            metadata = definition.metadata.with_axis(axis, name, params, knows_names=bool(names))
            effects.updates[index] = definition._replace(metadata=metadata)


class MappedBoxes:
    """The boxes and States of one mapped call."""

    def __init__(self, assignment: prefix.EntryAssignment, params: Mapping[str, Any]) -> None:
        self.assignment = assignment
        self.params = params
        self.partition_name = params.get(PARTITION_NAME)
        self._names: dict[type, Any] = {}  # of the mapped dimension, as boxes of a type had it

    def enter(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[list[PyTree], dict[str, PyTree]]:
        """Returns the arguments with boxes without the mapped dimension."""
        assignment = self.assignment
        axes = dict(zip(assignment.plain_paths, assignment.plain, strict=True))
        change = _Change(axes, self._without, self._without_name)
        labelled = zip(assignment.call.labels, args, strict=True)
        return (
            [self._map(arg, (label,), change) for label, arg in labelled],
            {name: self._map(arg, (name,), change) for name, arg in kwargs.items()},
        )

    def leave(self, result: object, output_entries: prefix.OutputEntries) -> PyTree:
        """Returns the result with the mapped dimension in its boxes."""
        axes = dict(output_entries.labels)
        return self._map(result, ("result",), _Change(axes, self._with, self._with_name))

    def _without(self, box, axis: int):
        name = self.partition_name
        names = getattr(box, "names", None)
        rank = getattr(getattr(box, "value", None), "ndim", -1) + 1
        if isinstance(names, tuple) and len(names) <= rank:  # the last dimensions have no names
            axis %= rank
            if axis >= len(names):
                return box
        if isinstance(names, tuple) and -len(names) <= axis < len(names):
            if name is None or names[axis] is None:
                name = names[axis]
            self._names.setdefault(type(box), name)
        return box.remove_axis(axis, {**self.params, PARTITION_NAME: name})

    def _with(self, box, axis: int):
        name = self.partition_name
        if name is None:
            name = self._names.get(type(box))
        rank = getattr(getattr(box, "value", None), "ndim", 0)
        if isinstance(names := getattr(box, "names", None), tuple) and len(names) <= rank:
            axis %= rank + 1  # boxes of Flax count negative positions in another way
        return box.add_axis(axis, {**self.params, PARTITION_NAME: name})

    def _without_name(self, metadata: Metadata, axis: int) -> Metadata:
        names = metadata.mapped_names
        if -len(names) <= axis < len(names):
            self._names.setdefault(State, names[axis])
        return metadata.without_axis(axis, self.partition_name, self.params)

    def _with_name(self, metadata: Metadata, axis: int) -> Metadata:
        name = self.partition_name
        if name is None:
            name = self._names.get(State)
        return metadata.with_axis(axis, name, self.params)

    def _map(self, tree: object, where: Path, change: _Change) -> PyTree:
        def visit(key_path, leaf: object):
            path = (*where, *plain_path(key_path))
            if isinstance(leaf, State):
                return self._map_state(leaf, path, change)
            if not is_box(leaf):
                return leaf
            axis = self._axis_of(leaf, path, change)
            if not prefix.is_axis(axis):
                return leaf
            return _changed(path, leaf, lambda box: change.box(box, axis))

        return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=_has_names)

    def _map_state(self, state: State, where: Path, change: _Change) -> State:
        """Returns a State whose entries have the names of the changed dimensions."""
        values: dict[Path, Leaf] = {}
        origins: dict[Path, Origin] = {}
        all_origins = state.origins()
        for path, value in state.flat().items():
            origin = all_origins[path]
            # The value of a bare Variable has the step that it has in the Variable.
            place = (*where, *(path or ("value",)))
            values[path] = self._map(value, place, change)
            origins[path] = origin
            axis = self._axis_of(value, place, change)
            if prefix.is_axis(axis):
                with _naming(origin.variable_type, place):
                    metadata = change.names(origin.all_metadata, axis)
                origins[path] = Origin(origin.variable_type, metadata)
        return State.from_flat(values, origins)

    def _axis_of(self, value: object, path: Path, change: _Change) -> Any:
        """Returns the entry of all arrays of a box, or of a value of a State."""
        below = [plain_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(value)]
        entries = {change.axes.get((*path, *steps)) for steps in below}
        if len(entries) > 1:
            raise errors.PrefixError(
                f"The arrays in the box at {format_path(path)} have the axes {entries} in "
                f"sx.{self.assignment.call.name}, but its names hold for all of them. Give the "
                f"box one axis."
            )
        return next(iter(entries), None)


class _Change(NamedTuple):
    """What happens to the names of a mapped dimension at one end of a call."""

    axes: Mapping[Path, Any]  # the entry of each array, by path
    box: Callable[[PyTree, int], object]  # a box with or without the dimension at an axis
    names: Callable[[Metadata, int], Metadata]  # the same for what a State knows of a Variable


def _has_names(value: object) -> bool:
    return is_box(value) or isinstance(value, (Object, State))


def is_box(value: object) -> bool:
    """Whether a value has methods that add and remove a dimension."""
    kind = type(value)
    return (
        hasattr(kind, "add_axis")
        and hasattr(kind, "remove_axis")
        and not isinstance(value, (Object, type))
    )


def _changed(path: Path, box: object, change: Callable[[PyTree], object]):
    """Changes a box and the boxes in it."""
    try:
        changed = change(box)
    except ShardaxError as error:
        raise type(error)(f"{format_path(path)}: {error}") from error
    return jax.tree.map(
        lambda leaf: _changed(path, leaf, change) if is_box(leaf) else leaf,
        changed,
        is_leaf=lambda item: item is not changed and is_box(item),
    )
