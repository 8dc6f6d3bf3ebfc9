# SPDX-License-Identifier: Apache-2.0
"""Stacks of like objects.

Stacking objects of one structure gives one object whose Variables hold the stacked values
(``_core.graph.stacked_values``), with the name of the new dimension before their axes. An object
that is one and the same in all of them, such as a random stream that they draw from together, is
*shared*: it stays as it is. ``unstack_objects`` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from shardax._core import errors
from shardax._core.frames import local, owner_here, resolve
from shardax._core.graph.definitions import GraphDef, Ref, VariableDef
from shardax._core.graph.differences import structure_differences
from shardax._core.graph.flatten import GraphWalk, assemble
from shardax._core.graph.handlers import knows_names
from shardax._core.graph.paths import Path, PyTree
from shardax._core.graph.stacked_values import form_of, form_text, part_of, stack_values
from shardax._core.graph.static import AxisName, Metadata
from shardax._core.object import Object
from shardax._core.variable import Variable


class Stacked(NamedTuple):
    """What stacking made."""

    root: Any  # the object that holds all layers, of their type
    shared: tuple[Path, ...]  # paths, below it, of objects that are not stacked


def stack_objects(
    roots: Sequence[Object], axis_name: AxisName, older: Collection[int] = ()
) -> Stacked:
    """Stacks objects of one structure.

    Args:
        roots: The layers.
        axis_name: Name of the new dimension.
        older: The ``id`` of objects that a single layer shares with what is outside of the stack.

    Raises:
        ModuleError: If the layers differ in structure or in the form of a value.
    """
    walks = [_walk(root) for root in roots]
    first = walks[0]
    for number, walk in enumerate(walks):
        _check_alike(first, walk, number)
    shared = _shared_positions(walks, older)

    def stacked(position: int, definition: VariableDef) -> tuple[PyTree, Metadata]:
        values = _values_of_layers(walks, position)
        knows = definition.metadata.axes is None and knows_names(values[0])
        metadata = definition.metadata.with_axis(0, axis_name, knows_names=knows)
        return stack_values(values), metadata

    root = _rebuilt(first, shared, stacked)
    return Stacked(root, tuple(first.paths[position] for position in sorted(shared)))


def unstack_objects(root: Object, shared: Collection[Path], count: int) -> list[Any]:
    """Returns the layers of a stacked object: the inverse of ``stack_objects``."""
    walk = _walk(root)
    shared_positions = {position for position, path in enumerate(walk.paths) if path in shared}

    def layer(index: int) -> Any:
        def part(position: int, definition: VariableDef) -> tuple[PyTree, Metadata]:
            stacked = _value_here(walk.objects[position])
            return part_of(stacked, index), definition.metadata.without_axis(0)

        return _rebuilt(walk, shared_positions, part)

    return [layer(index) for index in range(count)]


def _walk(root: Object) -> GraphWalk:
    walk = GraphWalk()
    walk.visit(root, ())
    return walk


def _value_here(variable: Variable) -> PyTree:
    """Returns the value of a Variable in the current frame; lazy ones stay lazy."""
    return resolve(variable, local.frame)._value


def _rebuilt(
    walk: GraphWalk,
    shared: Collection[int],
    contents: Callable[[int, VariableDef], tuple[PyTree, Metadata]],
) -> Any:
    """Returns the root of a walk, built anew.

    Args:
        walk: The walk.
        shared: Positions of objects that stay what they are.
        contents: Returns value and metadata of each other Variable.
    """
    owner = owner_here()
    objects_by_position = {position: walk.objects[position] for position in shared}
    for position, definition in enumerate(walk.definitions):
        if isinstance(definition, VariableDef) and position not in shared:
            value, metadata = contents(position, definition)
            variable_type: Any = definition.type
            variable = variable_type._make(value, metadata, owner)
            objects_by_position[position] = variable

    return assemble(walk.definitions, objects_by_position, owner).objects[0]


def _shared_positions(walks: Sequence[GraphWalk], older: Collection[int]) -> set[int]:
    """Returns the positions of objects that all walks share."""
    shared: set[int] = set()
    for position, item in enumerate(walks[0].objects):
        ids = [id(walk.objects[position]) for walk in walks]
        is_one = len(set(ids)) == 1
        if is_one and (len(walks) > 1 or ids[0] in older):
            shared.add(position)
        elif len(set(ids)) < len(ids):
            layers = [number for number, each in enumerate(ids) if ids.count(each) > 1]
            raise errors.shared_by_some_layers(
                type(item).__name__, walks[0].paths[position], layers
            )
    return shared


# --- layers must be alike -------------------------------------------------------------------------


def _check_alike(first: GraphWalk, other: GraphWalk, number: int) -> None:
    """Raises if a layer differs from the first in structure; says where."""
    if first.definitions == other.definitions:
        return

    structure, other_structure = (
        GraphDef(tuple(walk.definitions), (Ref(0),)) for walk in (first, other)
    )
    difference = next(structure_differences(structure, other_structure), None)
    if difference is None:
        raise errors.unlike_layers(number, (), "objects are shared in another way")
    raise errors.unlike_layers(number, difference.path, " against ".join(difference.texts))


def _values_of_layers(walks: Sequence[GraphWalk], position: int) -> list[PyTree]:
    """Returns the values of a Variable in every layer, or raises if their forms differ."""
    values = [_value_here(walk.objects[position]) for walk in walks]
    first = values[0]
    for number, value in enumerate(values):
        if form_of(value) != form_of(first):
            kind = walks[0].definitions[position].type.__name__
            path = walks[0].paths[position]
            forms = (form_text(first), number, form_text(value))
            raise errors.unlike_layer_values(kind, path, *forms)
    return values
