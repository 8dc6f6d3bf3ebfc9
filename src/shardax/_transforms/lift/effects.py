# SPDX-License-Identifier: Apache-2.0
"""Effects: what a function did to the objects that it was given, recorded inside, applied outside.

Inside the transform, when the user's function has run, ``record_effects`` compares the private copy
with what was bound. Arrays leave the transform (``LiftedOutputs``): those of the result, of the
Variables that were written, of new Variables. The ``Effects`` beside them say what belongs where.

Outside, when the transform has returned, ``apply_effects`` does the same to the caller's objects.
No other function of the lifted transforms writes to them, with one exception for speed: a steady
call of ``jit`` stores the values that are its only effect by itself, when its program has returned.

``apply_effects`` raises before it writes, or not at all. So after an exception, of the user's
function, of JAX or of a check here, the caller's objects hold what they held before the call.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core import _jax, frames, threads
from shardax._core._jax import Tracer
from shardax._core.frames import CapturedVariable, a_kind_of, is_ref, kind_of
from shardax._core.graph import flatten as graphs
from shardax._core.graph.definitions import (
    DictDef,
    GraphDef,
    ListDef,
    ModuleDef,
    Ref,
    VariableDef,
    settings_in,
)
from shardax._core.graph.paths import Leaf, PyTree, format_path
from shardax._core.graph.settings import SettingsKey
from shardax._core.graph.static import Static
from shardax._core.object import Object, epoch
from shardax._core.values import has_deleted, same_value
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute
from shardax._transforms import errors
from shardax._transforms.lift.arguments import TreeTemplate, join_argument, split_tree
from shardax._transforms.lift.input_graph import InputGraph

TEXTS = (str, bytes, enum.Enum)
"""What a compiled function may return besides arrays and objects, as it was when traced."""


class MissingInputs(NamedTuple):
    """Objects that a trace used and was not given, held weakly: JAX keeps what a trace returned."""

    objects: list[weakref.ref[Object]]

    read: list[weakref.ref[Object]]
    """Those of them whose values were read or written."""


@dataclasses.dataclass(eq=False, slots=True)
class Effects:
    """What a function did besides returning arrays; a pytree without leaves.

    Objects are named by their positions in the order of ``GraphDef.objects``, Variables by their
    positions among its Variables. New objects have the positions behind those of the given ones.
    """

    written: tuple[int, ...]
    """Positions of the Variables whose values changed."""

    updates: dict[int, Leaf]
    """The new definition of each given object whose structure changed."""

    fresh: tuple[Leaf, ...]
    """The definitions of the new objects."""

    result: TreeTemplate | None
    """Where objects and texts stand in the result; None if it holds arrays alone."""

    foreign: dict[int, Object]
    """Objects of others, by position, that were put into the result or a given object."""

    fresh_ids: tuple[int, ...]
    """``id`` of each new Variable inside, while the trace lasts."""

    shardings: tuple[Any, Any, Any] = (None, None, None)
    """Declared shardings of (result, written, fresh), set by ``jit``."""

    missing: MissingInputs | None = None
    """What the trace used and was not given, set by ``jit``."""

    # JAX keeps the trees of traces that are gone, with these effects in them. So that such a tree
    # is found again, effects are equal by value, if they are more than those of one trace.

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Effects) or self._value is None:
            return False
        return self._value == other._value

    def __hash__(self) -> int:
        return id(self) if self._value is None else hash(self._value)

    @property
    def _value(self) -> Hashable:
        """What effects are compared by; None if they belong to one trace alone."""
        if self.updates or self.fresh or self.foreign or self.shardings != (None, None, None):
            return None
        if self.missing is not None:
            return None
        return self.written, self.result

    @property
    def tree_key(self) -> Hashable:
        """What determines the tree of arrays that leaves."""
        return self.written, len(self.fresh_ids), self.result

    @property
    def simple(self) -> bool:
        """Whether to apply them is to store values, and nothing else."""
        return self.result is None and not self.updates


jax.tree_util.register_pytree_node(
    Effects, lambda effects: ((), effects), lambda effects, _: effects
)


class LiftedOutputs(NamedTuple):
    """What leaves the pure function."""

    result: PyTree
    """The result; if it holds objects or texts, the list of its arrays."""

    written: list[Leaf]
    """The value of each Variable of ``Effects.written``."""

    fresh: list[Leaf]
    """The value of each new Variable."""

    effects: Effects

    def without_written(self, positions: Container[int]) -> LiftedOutputs:
        """Returns, inside the transform, what leaves without some of the written Variables."""
        pairs = zip(self.effects.written, self.written, strict=True)
        remaining = [(position, value) for position, value in pairs if position not in positions]
        self.effects.written = tuple(position for position, _ in remaining)
        return self._replace(written=[value for _, value in remaining])

    def with_written(self, more: Mapping[int, Leaf]) -> LiftedOutputs:
        """Returns, outside the transform, what left with more written Variables, by position."""
        self.effects.written = (*self.effects.written, *more)
        return self._replace(written=[*self.written, *more.values()])


# --- inside the transform ---------------------------------------------------------------------


def record_effects(
    frame: frames.Frame,
    graphdef: GraphDef,
    copies: Sequence[Any],
    bound: Sequence[Leaf],
    result: PyTree,
    emit: frozenset[int] = frozenset(),
) -> LiftedOutputs:
    """Returns what leaves, by comparing the copies with what was bound.

    Args:
        frame: The frame of the run.
        graphdef: The structure that was bound.
        copies: The private copies, in the order of ``graphdef.objects``.
        bound: The value that was bound to each Variable.
        result: What the user's function returned.
        emit: Positions of Variables whose values leave even if they were not written.
    """
    # The structure of the given objects. The caller has the very same settings objects, so what the
    # function changed in them is done.
    walk = continue_walk(frame, copies)
    walk.unchanged = settings_in(graphdef)
    updates = {}
    for position, (copy, definition) in enumerate(zip(copies, graphdef.objects, strict=True)):
        walk.definitions[position] = definition
        if not holds_as_built(copy, definition, copies):
            new_definition = copy._flatten(lambda child, key: walk.encode(child, ()))
            walk.definitions[position] = new_definition
            if new_definition != definition:
                updates[position] = new_definition

    # The result, in which objects stand as positions.
    template, arrays = split_tree(
        result,
        position_of=lambda item: walk.visit(item, ()),
        static_of=lambda leaf, position, treedef: Static(leaf) if isinstance(leaf, TEXTS) else None,
    )
    is_plain = not template.roots and not template.static

    # New objects, which the two steps above have met.
    count = len(copies)
    foreign: dict[int, Object] = {}
    new_variables: list[Variable] = []
    for position, item in enumerate(walk.objects[count:], count):
        if isinstance(item, Variable) and item._parent is not None:
            raise errors.view_leaves(frame.name, item)
        if not _was_made_in(frame, item):
            foreign[position] = item
        elif isinstance(item, Variable):
            new_variables.append(item)

    # The values of Variables.
    fresh = [variable.value for variable in new_variables]
    written: list[int] = []
    values: list[Leaf] = []
    for position, (index, bound_value) in enumerate(zip(graphdef.leaves, bound, strict=True)):
        copy = copies[index]
        if position in emit or not holds_same_arrays(bound_value, copy._value):
            written.append(position)
            values.append(copy.value)

    effects = Effects(
        written=tuple(written),
        updates=updates,
        fresh=tuple(walk.definitions[count:]),
        result=None if is_plain else template,
        foreign=foreign,
        fresh_ids=tuple(map(id, new_variables)),
    )
    return LiftedOutputs(result if is_plain else arrays, values, fresh, effects)


def continue_walk(frame: frames.Frame, copies: Sequence[Object]) -> graphs.GraphWalk:
    """Returns a walk over new objects that knows the copies by their positions."""
    walk = graphs.GraphWalk()
    walk.objects = list(copies)
    walk.definitions = [None] * len(copies)
    walk.paths = [()] * len(copies)
    walk.index = {id(copy): position for position, copy in enumerate(copies)}

    # An original, put into the result by a closure, stands for its copy.
    for original_id, (_, copy) in frame.copies.items():
        if id(copy) in walk.index:
            walk.index[original_id] = walk.index[id(copy)]
    return walk


def holds_as_built(item: Any, definition: Any, objects: Sequence[Any]) -> bool:
    """Returns whether an object holds the very children that it was built with."""
    # Compared by identity, which is quick, so that only what changed is described anew.
    kind = type(definition)
    if kind is VariableDef:
        return item._metadata is definition.metadata
    if kind is ModuleDef:
        arrays = item._array_attributes.items()
        return _holds_children(
            item.__dict__.items(), definition.attributes, objects
        ) and _holds_children(arrays, definition.array_attributes, objects)
    if kind is ListDef:
        children = list(enumerate(definition.items))
        return _holds_children(list(enumerate(item._items)), children, objects)
    if kind is DictDef:
        children = [(key.value, child) for key, child in definition.items]
        return _holds_children(item._items.items(), children, objects)
    return False


_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _holds_children(
    items: Collection[tuple[Any, Any]],
    children: Sequence[tuple[Any, Any]],
    objects: Sequence[Object],
) -> bool:
    """Returns whether items, (name, value) pairs, are the children of a definition."""
    if len(items) != len(children):
        return False

    for (name, value), (key, child) in zip(items, children, strict=True):
        if name != key:
            return False

        kind = type(child)
        if kind is Ref:
            if value is not objects[child.position]:
                return False
        elif kind is Static:
            if value is not child.value:
                return False
            # The same object may have been changed in place; settings objects are compared apart.
            can_change = type(value) not in _IMMUTABLE and type(child.key) is not SettingsKey
            if can_change and Static(value) != child:
                return False
        else:
            return False  # a container was rebuilt, so it is described anew
    return True


def _was_made_in(frame: frames.Frame, item: Object) -> bool:
    """Returns whether an object was made in a run, or in plain JAX inside of it."""
    owner = item._owner
    return owner is frame or (owner is not None and owner.parent is frame)


def holds_same_arrays(bound: PyTree, current: PyTree) -> bool:
    """Returns whether a value has the very arrays that were bound."""
    if bound is current:
        return True
    old_leaves, old_tree = jax.tree.flatten(bound)
    new_leaves, new_tree = jax.tree.flatten(current)
    if old_tree != new_tree:
        return False
    return all(old is new for old, new in zip(old_leaves, new_leaves, strict=True))


# --- outside the transform --------------------------------------------------------------------


def apply_effects(
    graph: InputGraph,
    outputs: LiftedOutputs,
    captured: Sequence[tuple[CapturedVariable, Leaf]] = (),
) -> PyTree:
    """Returns the result of a call, after doing to the caller's objects what the function did.

    Args:
        graph: The caller's objects.
        outputs: What left the transform.
        captured: The captured Variables that were written, with their new values.

    Raises:
        ConcurrentWriteError: If another thread wrote what would be overwritten.
        ForeignMutationError: If the structure of an object must not change here.
    """
    effects = outputs.effects
    with threads.in_one_step():
        # Everything that is refused is refused before the first write.
        objects = [] if effects.simple else graph.objects()
        check_unchanged(graph, effects)
        _check_captured(captured)
        _check_structural_writes(objects, effects)

        # New objects, which change nothing of the caller's.
        _append_new_objects(objects, effects, outputs.fresh)

        # Values.
        notes_writes = threads.several and graph.read is not None and frames.local.frame is None
        for position, value in zip(effects.written, outputs.written, strict=True):
            variable = graph.leaves[position]
            if is_ref(variable._value):
                variable._write_in_place(value)
            else:
                variable._value = value
            if notes_writes:
                threads.note_write(variable)
        for item, value in captured:
            _write_captured(item, value)

        # Structure.
        decode = graphs.ChildDecoder(objects)
        for position, definition in effects.updates.items():
            if type(definition) is VariableDef:
                variable = frames.resolve(objects[position], frames.local.frame)
                variable._metadata = definition.metadata
            else:
                objects[position]._unflatten(definition, decode)
        if effects.updates:
            epoch.advance(*(objects[position] for position in effects.updates))

    if effects.result is None:
        return outputs.result

    # Given objects that come back are the caller's own objects.
    returned: dict[int, Any] = {}
    for _, position in effects.result.roots:
        item = objects[position]
        returned[position] = item.value if isinstance(item, ArrayAttribute) else item
    return join_argument(effects.result, outputs.result, returned)


def check_no_leak(graph: InputGraph, outputs: LiftedOutputs) -> None:
    """Raises if a write is refused, would be lost, or would leak a tracer."""
    trace = _jax.trace_state()
    for position, value in zip(outputs.effects.written, outputs.written, strict=True):
        variable = graph.leaves[position]
        path = format_path(graph.flat.leaf_paths[position])

        frames.check_unlocked(variable, f"to the {kind_of(variable)} at {path}")
        if variable._parent is not None:
            variable._check_part(value)

        home = _jax.eager() if variable._owner is None else variable._owner.trace
        if trace != home and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            raise errors.leaking_write(type(variable).__name__, path)


def check_unchanged(graph: InputGraph, effects: Effects) -> None:
    """Raises ConcurrentWriteError if another thread changed what would be overwritten."""
    if graph.read is None or not threads.several or frames.local.frame is not None:
        return

    paths = [
        graph.flat.leaf_paths[position]
        for position in effects.written
        if _was_written(graph.leaves[position], graph.read[position])
    ]
    if effects.updates and graph.flat.epoch != epoch.current:
        objects_now = InputGraph(graph.roots).flat.graphdef.objects
        pairs = zip(graph.flat.graphdef.objects, objects_now, strict=False)
        paths += [graph.flat.paths[i] for i, (old, new) in enumerate(pairs) if old != new]
    if paths:
        raise errors.changed_by_thread(paths)


def _was_written(variable: Variable, read: Leaf) -> bool:
    """Returns whether a Variable holds another value than the one that was read."""
    if variable._parent is None:
        return variable._value is not read
    # A view cuts its part out of the stack at every read, so only what it holds can be compared.
    # One that was donated was cut out for this call alone.
    return not (has_deleted(read) or same_value(variable._value, read))


def _check_captured(captured: Sequence[tuple[CapturedVariable, Leaf]]) -> None:
    """Raises if a captured Variable must not be written, or was written by another thread."""
    for item, _ in captured:
        outer = item.outer
        if is_ref(outer._value):
            continue  # the array in it is written, and the Variable stays as it is
        if outer._owner is None and outer._value is not item.value:
            raise errors.captured_changed_by_thread(item.stand_in._owner.name, outer)
        frames.check_unlocked(outer)
        frames.check_trace(outer)


def _write_captured(item: CapturedVariable, value: Leaf) -> None:
    item.outer._write(value)
    if item.outer._metadata != item.stand_in._metadata:
        item.outer._metadata = item.stand_in._metadata
        epoch.advance(item.outer)


def _check_structural_writes(objects: Sequence[Object], effects: Effects) -> None:
    """Raises ForeignMutationError if an object that changed must not be changed here."""
    for position in effects.updates:
        item = objects[position]
        if isinstance(item, Variable):
            variable = frames.resolve(item, frames.local.frame)
            variable._check_metadata_write(f"metadata of a {type(item).__name__}")
        else:
            frames.check_structural_write(item, a_kind_of(item))


def _append_new_objects(objects: list[Any], effects: Effects, values: Sequence[Leaf]) -> None:
    """Appends the new objects to the given ones, owned by the calling frame."""
    owner = frames.local.frame
    remaining_values = iter(values)

    # All of them first, since they may hold each other.
    new_objects = list(enumerate(effects.fresh, len(objects)))
    for position, definition in new_objects:
        if position in effects.foreign:
            objects.append(effects.foreign[position])
        elif type(definition) is VariableDef:
            value = next(remaining_values)
            variable_type: Any = definition.type
            objects.append(variable_type._make(value, definition.metadata, owner))
        else:
            objects.append(definition.type._allocate(owner, None))

    decode = graphs.ChildDecoder(objects)
    for position, definition in new_objects:
        if position not in effects.foreign and type(definition) is not VariableDef:
            objects[position]._unflatten(definition, decode)


# --- results ----------------------------------------------------------------------------------


def returned_pair(result: PyTree, source: str, form: str) -> tuple[Any, Any]:
    """Returns the result of a function as a pair, or raises TransformError."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise errors.not_a_pair(result, source, form)


def check_result(result: PyTree, name: str, others: tuple[type, ...] = ()) -> None:
    """Raises TransformError if a result holds what is neither an array nor an object."""
    allowed = (Object, bool, int, float, complex, *others)
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=graphs.is_object):
        if not isinstance(leaf, allowed) and not hasattr(leaf, "dtype"):
            raise errors.unreturnable(name, leaf, jax.tree_util.keystr(key_path))
