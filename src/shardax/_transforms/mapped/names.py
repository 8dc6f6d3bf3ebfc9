# SPDX-License-Identifier: Apache-2.0
"""Names of the mapped dimension of ``vmap`` and ``scan``: in Variables, States and boxes.

Inside a run the mapped dimension is gone, and so is its name. On what leaves it is back, at the
axis of each value. Its name is the one that the Variable came with. For a new Variable it is that
of the caller's ``metadata``, or none.

A *box* is a pytree node that describes the dimensions of what is in it, known by its methods and
not by its class: ``add_axis(index, params)`` and ``remove_axis(index, params)``, where ``params``
is ``{PARTITION_NAME: name}``. A run sees boxes without the mapped dimension, and boxes in its
result have it again. So it is with the names that a ``State`` keeps of its Variables, and with the
box that a Variable was made of.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core.errors import MetadataError, ShardaxError
from shardax._core.graph.definitions import GraphDef, VariableDef
from shardax._core.graph.handlers import knows_names
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.graph.static import PARTITION_NAME, AxisName, Metadata
from shardax._core.object import Object
from shardax._core.state.frozen import Origin
from shardax._core.state.state import State
from shardax._transforms.lift.effects import LiftedOutputs
from shardax._transforms.lift.entries import EntryAssignment, OutputEntries
from shardax._transforms.lift.filter_mappings import is_axis
from shardax._transforms.mapped import errors
from shardax._transforms.mapped.streams import SplitStreams

# What a caller says of the mapped dimension: its name, under PARTITION_NAME, and what else boxes
# are given.
Params = Mapping[str, Any]


def check_metadata(metadata: Params | None, name: str) -> None:
    """Raises if ``metadata`` does not describe the mapped dimension."""
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise errors.not_params(metadata, name)
    has_typo = difflib.get_close_matches(PARTITION_NAME, map(str, metadata))
    if PARTITION_NAME not in metadata and has_typo:
        raise errors.not_params(metadata, name)


class _NameChange(NamedTuple):
    """What happens to the names of the mapped dimension at one end of a call."""

    entry_of: Mapping[Path, PyTree]  # the entry of each array
    change_box: Callable[[Any, int], Any]  # returns a box with, or without, the dimension
    change_metadata: Callable[[Metadata, int], Metadata]  # the same for a Variable of a State


class DimensionNames:
    """The names of the mapped dimension in one call."""

    def __init__(self, assignment: EntryAssignment, streams: SplitStreams, params: Params) -> None:
        self.assignment = assignment
        self.graphdef = assignment.call.graph.flat.graphdef
        self.streams = streams
        self.params = params
        self.partition_name: AxisName = params.get(PARTITION_NAME)  # None: that of each Variable
        # The name of the mapped dimension that the first box of a type, or State, had.
        self._name_in: dict[type, AxisName] = {}

    # --- Variables --------------------------------------------------------------------------------

    def slice_graphdef(self) -> GraphDef:
        """Returns the structure that one run sees: without the name of the mapped dimension."""
        objects = list(self.graphdef.objects)
        for position, index in enumerate(self.graphdef.leaves):
            axis = self._axis_of(position)
            if axis is None:
                continue
            definition = objects[index]
            with _says_which_variable(definition.type, self.assignment.leaf_paths[position]):
                metadata = definition.metadata.without_axis(axis, self.partition_name, self.params)
            objects[index] = definition._replace(metadata=metadata)
        return GraphDef(tuple(objects), self.graphdef.roots)

    def name_new_variables(self, outputs: LiftedOutputs, axes_of_new: Iterable[PyTree]) -> None:
        """Adds the mapped dimension to the metadata of new Variables, in ``outputs.effects``."""
        new_variables = zip(axes_of_new, outputs.fresh, strict=True)
        fresh = []
        for definition in outputs.effects.fresh:
            if type(definition) is VariableDef:
                axis, value = next(new_variables)
                if is_axis(axis):
                    metadata = definition.metadata.with_axis(
                        axis, self.partition_name, self.params, knows_names=knows_names(value)
                    )
                    definition = definition._replace(metadata=metadata)
            fresh.append(definition)
        outputs.effects.fresh = tuple(fresh)

    def name_changed_variables(self, outputs: LiftedOutputs) -> None:
        """Adds the mapped dimension to metadata that the function changed: by its old name."""
        position_of = {index: position for position, index in enumerate(self.graphdef.leaves)}
        updates = outputs.effects.updates
        for index, definition in updates.items():
            if type(definition) is not VariableDef:
                continue
            axis = self._axis_of(position_of[index])
            if axis is None:
                continue
            names = self.graphdef.objects[index].metadata.mapped_names
            name = names[axis] if axis < len(names) else self.partition_name
            metadata = definition.metadata.with_axis(
                axis, name, self.params, knows_names=bool(names)
            )
            updates[index] = definition._replace(metadata=metadata)

    def _axis_of(self, position: int) -> int | None:
        """Returns the axis of a given Variable whose metadata change, or None."""
        axis = self.assignment.leaves[position]
        return axis if is_axis(axis) and position not in self.streams else None

    # --- boxes and States -------------------------------------------------------------------------

    def enter(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[list[PyTree], dict[str, PyTree]]:
        """Returns the arguments; their boxes do not have the mapped dimension."""
        entry_of = dict(zip(self.assignment.plain_paths, self.assignment.plain, strict=True))
        change = _NameChange(entry_of, self._box_without, self._metadata_without)
        labels = self.assignment.call.labels
        positional = [
            self._convert(arg, (label,), change) for label, arg in zip(labels, args, strict=True)
        ]
        return positional, {
            name: self._convert(arg, (name,), change) for name, arg in kwargs.items()
        }

    def leave(self, result: PyTree, output_entries: OutputEntries) -> PyTree:
        """Returns the result; its boxes have the mapped dimension again."""
        entry_of = dict(output_entries.of_plain)
        change = _NameChange(entry_of, self._box_with, self._metadata_with)
        return self._convert(result, ("result",), change)

    def _box_without(self, box: Any, axis: int) -> PyTree:
        names = getattr(box, "names", None)
        name = self.partition_name
        if isinstance(names, tuple):
            rank = getattr(getattr(box, "value", None), "ndim", -1) + 1
            if len(names) <= rank:  # the last dimensions have no names
                axis %= rank
                if axis >= len(names):
                    return box
            if -len(names) <= axis < len(names):
                if name is None or names[axis] is None:
                    name = names[axis]
                self._name_in.setdefault(type(box), name)
        return box.remove_axis(axis, {**self.params, PARTITION_NAME: name})

    def _box_with(self, box: Any, axis: int) -> PyTree:
        names = getattr(box, "names", None)
        rank = getattr(getattr(box, "value", None), "ndim", 0)
        if isinstance(names, tuple) and len(names) <= rank:
            axis %= rank + 1  # boxes of Flax count negative positions in another way
        name = self._outer_name(type(box))
        return box.add_axis(axis, {**self.params, PARTITION_NAME: name})

    def _metadata_without(self, metadata: Metadata, axis: int) -> Metadata:
        names = metadata.mapped_names
        if -len(names) <= axis < len(names):
            self._name_in.setdefault(State, names[axis])
        return metadata.without_axis(axis, self.partition_name, self.params)

    def _metadata_with(self, metadata: Metadata, axis: int) -> Metadata:
        return metadata.with_axis(axis, self._outer_name(State), self.params)

    def _outer_name(self, kind: type) -> AxisName:
        """Returns the name of the mapped dimension outside, for a type of box or a State."""
        return self._name_in.get(kind) if self.partition_name is None else self.partition_name

    def _convert(self, tree: PyTree, path: Path, change: _NameChange) -> PyTree:
        """Returns a tree with the changed names in its boxes and States."""

        def convert_leaf(keys: tuple[Any, ...], leaf: Any) -> PyTree:
            leaf_path = (*path, *plain_path(keys))
            if isinstance(leaf, State):
                return self._convert_state(leaf, leaf_path, change)
            if not has_axis_methods(leaf):
                return leaf
            axis = self._entry_of_box(leaf, leaf_path, change)
            if not is_axis(axis):
                return leaf
            return _convert_box(leaf_path, leaf, lambda box: change.change_box(box, axis))

        def has_names(value: object) -> bool:
            return has_axis_methods(value) or isinstance(value, (Object, State))

        return jax.tree_util.tree_map_with_path(convert_leaf, tree, is_leaf=has_names)

    def _convert_state(self, state: State, state_path: Path, change: _NameChange) -> State:
        values: dict[Path, Leaf] = {}
        origins: dict[Path, Origin] = {}
        origin_of = state.origins()
        for path, value in state.flat().items():
            # The value of a bare Variable has the step that it has in the Variable.
            value_path = (*state_path, *(path or ("value",)))
            values[path] = self._convert(value, value_path, change)

            origin = origin_of[path]
            axis = self._entry_of_box(value, value_path, change)
            if is_axis(axis):
                with _says_which_variable(origin.variable_type, value_path):
                    metadata = change.change_metadata(origin.all_metadata, axis)
                origin = Origin(origin.variable_type, metadata)
            origins[path] = origin
        return State.from_flat(values, origins)

    def _entry_of_box(self, value: PyTree, path: Path, change: _NameChange) -> PyTree:
        """Returns the entry of all arrays of a box, or of a value of a State."""
        below = [plain_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(value)]
        entries = {change.entry_of.get((*path, *steps)) for steps in below}
        if len(entries) > 1:
            raise errors.several_axes_in_a_box(path, entries, self.assignment.call.name)
        return next(iter(entries), None)


@contextlib.contextmanager
def _says_which_variable(kind: type, path: Path) -> Generator[None]:
    """Adds the Variable to an error of names that do not fit the mapped dimension."""
    try:
        yield
    except MetadataError as error:
        raise MetadataError(
            f"The {kind.__name__} at {format_path(path)} cannot be mapped: {error}"
        ) from error


def has_axis_methods(value: object) -> bool:
    """Whether a value has methods that add and remove a dimension."""
    kind = type(value)
    return (
        hasattr(kind, "add_axis")
        and hasattr(kind, "remove_axis")
        and not isinstance(value, (Object, type))
    )


def _convert_box(path: Path, box: PyTree, convert: Callable[[PyTree], PyTree]) -> PyTree:
    """Returns a changed box; boxes in it are changed too."""
    try:
        changed = convert(box)
    except ShardaxError as error:
        raise type(error)(f"{format_path(path)}: {error}") from error
    return jax.tree.map(
        lambda leaf: _convert_box(path, leaf, convert) if has_axis_methods(leaf) else leaf,
        changed,
        is_leaf=lambda item: item is not changed and has_axis_methods(item),
    )
