# SPDX-License-Identifier: Apache-2.0
"""The outcomes of branches, and the errors of those that differ.

The *outcome* of a branch is all that it leaves behind: its result, the Variables that it wrote, how
it changed the structure of the objects it was given, and the objects that it made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import jax

from shardax._core.frames import kind_of
from shardax._core.graph import flatten
from shardax._core.graph.definitions import (
    DictDef,
    GraphDef,
    ListDef,
    ModuleDef,
    Ref,
    VariableDef,
    definition_children,
    definition_paths,
)
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.graph.static import Static
from shardax._transforms.control import errors
from shardax._transforms.control.forms import ARRAY, form_text, structure_difference
from shardax._transforms.lift import engine
from shardax._transforms.lift.effects import Effects


class BranchOutputs(NamedTuple):
    """The arrays that leave a branch, or their types."""

    result: list[Leaf]
    written: dict[int, PyTree]  # values of the Variables that it wrote, by position
    fresh: list[PyTree]  # values of new Variables


class BranchOutcome(NamedTuple):
    """What one branch leaves."""

    label: str  # how the caller knows the branch
    effects: Effects
    outline: PyTree  # its result, with an integer for every leaf (``forms.ARRAY``)
    types: BranchOutputs


def result_outline(result: PyTree, effects: Effects) -> PyTree:
    """Returns the outline of a result: the position of each object, and ``ARRAY`` for the rest."""
    leaves, treedef = jax.tree.flatten(result, is_leaf=flatten.is_object)
    position_of = {} if effects.result is None else dict(effects.result.roots)
    return treedef.unflatten([position_of.get(index, ARRAY) for index in range(len(leaves))])


class OutcomeComparison:
    """The outcomes of two branches, which must agree in all but numbers."""

    def __init__(
        self, call: engine.LiftedCall, first: BranchOutcome, second: BranchOutcome
    ) -> None:
        self.call = call
        self.first = first
        self.second = second
        self.graphdef, self.paths = call.graph.flat.graphdef, call.graph.flat.paths

    def check(self, values: Sequence[PyTree]) -> None:
        """Raises if they differ, given the values before the choice."""
        self._check_structure()
        self._check_result()
        self._check_new_objects()
        self._check_written(values)

    def _refuse(self, problem: str, first: str, second: str, advice: str) -> NoReturn:
        raise errors.branches_differ(
            self.call.name,
            problem,
            f"{self.first.label} {first}",
            f"{self.second.label} {second}",
            advice,
        )

    # --- the structure of given objects -----------------------------------------------------------

    def _check_structure(self) -> None:
        for position, old in enumerate(self.graphdef.objects):
            first = self.first.effects.updates.get(position, old)
            second = self.second.effects.updates.get(position, old)
            if first == second:
                continue

            first_text, second_text = _change_text(old, first), _change_text(old, second)
            if first_text == second_text:
                first_text = self._attributes_text(self.first, first, second)
                second_text = self._attributes_text(self.second, second, first)

            path = format_path(self.paths[position])
            self._refuse(
                f"change the {old.type.__name__} at {path} differently",
                first_text,
                second_text,
                "One program comes out of both, so they must leave one structure. Make the same "
                "change in every branch (sow the same names, set the same attributes in the same "
                "order), or change it before the choice and only write values inside.",
            )

    def _attributes_text(
        self, outcome: BranchOutcome, definition: ModuleDef, other: ModuleDef
    ) -> str:
        """Returns the attributes in which the definition of a Module differs from another."""
        attributes, other_attributes = _attributes(definition), _attributes(other)
        changes = []
        for name, child in attributes.items():
            if child == other_attributes.get(name):
                continue
            if isinstance(child, Ref):
                description = self._object_text(outcome, child.position)
            elif isinstance(child, Static):
                description = repr(child.value)[:40]
            else:
                description = "another container"
            changes.append(f".{name} is {description}")

        if changes:
            return ", ".join(changes)
        return f"the order is {', '.join(attributes)}" if attributes else "it is another"

    # --- the result -------------------------------------------------------------------------------

    def _check_result(self) -> None:
        difference = structure_difference(self.first.outline, self.second.outline, ())
        if difference is not None:
            path, first_text, second_text = difference
            self._refuse(
                f"return different structures{_in_result(path)}",
                first_text,
                second_text,
                "Return the same containers with the same keys from every branch.",
            )

        array_types = iter(zip(self.first.types.result, self.second.types.result, strict=True))
        first_leaves = _outline_leaves(self.first.outline)
        second_leaves = _outline_leaves(self.second.outline)
        for (path, first), (_, second) in zip(first_leaves, second_leaves, strict=True):
            if first != second:
                self._refuse(
                    f"return different objects{_in_result(path)}",
                    self._object_text(self.first, first),
                    self._object_text(self.second, second),
                    "An object is chosen while tracing, before it is known which branch is taken. "
                    "Return the same object from every branch and write values into it, or return "
                    "arrays.",
                )
            if first != ARRAY:
                continue
            first_text, second_text = map(form_text, next(array_types))
            if first_text != second_text:
                self._refuse(
                    f"return different types{_in_result(path)}",
                    first_text,
                    second_text,
                    "Convert in one of them: x.astype(dtype), x.reshape(shape).",
                )

    def _object_text(self, outcome: BranchOutcome, position: int) -> str:
        """Returns, for messages, what stands at a leaf of an outline."""
        if position == ARRAY:
            return "an array"
        count = len(self.paths)
        if position < count:
            kind = self.graphdef.objects[position].type.__name__
            return f"the {kind} at {format_path(self.paths[position])}"
        return f"a new {outcome.effects.fresh[position - count].type.__name__}"

    # --- new objects ------------------------------------------------------------------------------

    def _check_new_objects(self) -> None:
        """Compares the objects that the branches made; their positions follow the given ones."""
        given = len(self.graphdef.objects)
        first_objects, second_objects = (
            self._new_objects(self.first),
            self._new_objects(self.second),
        )
        nothing = _NewObject(None, None, "nothing")
        for offset in range(max(len(first_objects), len(second_objects))):
            first = first_objects[offset] if offset < len(first_objects) else nothing
            second = second_objects[offset] if offset < len(second_objects) else nothing
            if first == second:
                continue

            position = given + offset
            first_path = self._paths_after(self.first).get(position)
            second_path = self._paths_after(self.second).get(position)
            second_text = second.description
            if second_text == first.description:
                second_text += ", but another one"
            self._refuse(
                f"leave different objects at {format_path(first_path or second_path or ())}",
                first.description,
                second_text,
                "Make the same in every branch, with the same shapes, dtypes and metadata, or make "
                "it before the choice.",
            )

    def _new_objects(self, outcome: BranchOutcome) -> list[_NewObject]:
        """Returns the objects that a branch made, in order."""
        given = len(self.graphdef.objects)
        value_types = iter(outcome.types.fresh)
        new_objects = []
        for position, definition in enumerate(outcome.effects.fresh, start=given):
            outside = outcome.effects.foreign.get(position)
            description = f"a {definition.type.__name__}"
            if outside is not None:
                description += " from outside"
            elif type(definition) is VariableDef:
                description += f" {form_text(next(value_types))}"
            new_objects.append(_NewObject(definition, id(outside), description))
        return new_objects

    def _paths_after(self, outcome: BranchOutcome) -> dict[int, Path]:
        """Returns the path of every object after a branch, by its position."""
        updates = outcome.effects.updates
        objects = [updates.get(position, old) for position, old in enumerate(self.graphdef.objects)]
        returned = [
            (path, Ref(position))
            for path, position in _outline_leaves(outcome.outline)
            if position != ARRAY
        ]
        roots = (*self.graphdef.roots, *(reference for _, reference in returned))
        names = [*self.call.names, *(("result", *path) for path, _ in returned)]
        graphdef = GraphDef((*objects, *outcome.effects.fresh), roots)
        return definition_paths(graphdef, names)

    # --- written Variables ------------------------------------------------------------------------

    def _check_written(self, values: Sequence[PyTree]) -> None:
        for position in sorted({*self.first.types.written, *self.second.types.written}):
            old = values[position]
            first_form = form_text(self.first.types.written.get(position, old))
            second_form = form_text(self.second.types.written.get(position, old))
            if first_form == second_form:
                continue
            kind = kind_of(self.call.graph.leaves[position])
            path = format_path(self.call.graph.flat.leaf_paths[position])
            self._refuse(
                f"leave the {kind} at {path} in different forms",
                f"{_verb(self.first, position)} {first_form}",
                f"{_verb(self.second, position)} {second_form}",
                "Keep one structure, shape and dtype: v[...] = new.astype(v.dtype).",
            )


class _NewObject(NamedTuple):
    """An object that a branch made, or put in from outside."""

    definition: ModuleDef | VariableDef | ListDef | DictDef | None
    outside_id: int | None  # ``id`` of the object from outside, or of None
    description: str


def _change_text(old: ModuleDef, new: ModuleDef) -> str:
    return errors.describe_change(old, new) if new != old else "nothing changes"


def _attributes(definition: object) -> dict[str, object]:
    """Returns the children of a Module by the names of its attributes."""
    if not isinstance(definition, ModuleDef):
        return {}
    children = definition_children(definition)
    return {key: child for key, child in children if isinstance(key, str)}


def _outline_leaves(outline: PyTree) -> list[tuple[Path, int]]:
    pairs = jax.tree_util.tree_leaves_with_path(outline)
    return [(plain_path(keys), leaf) for keys, leaf in pairs]


def _in_result(path: Path) -> str:
    return f" at {format_path(path)} of the result" if path else ""


def _verb(outcome: BranchOutcome, position: int) -> str:
    return "writes" if position in outcome.types.written else "leaves it as"
