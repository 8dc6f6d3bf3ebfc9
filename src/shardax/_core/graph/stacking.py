# SPDX-License-Identifier: Apache-2.0
"""Stacking: several objects of one structure as one, and back.

Each Variable of the result holds the values of the originals', stacked on a new first dimension
(``_core.graph.views``), whose name is put before its axes. An object that is one and the same in all the
originals, such as a random stream that they draw from together, is *shared*: it stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core.errors import StackError
from shardax._core.frames import local, owner_here, resolve
from shardax._core.graph.flatten import (
    GraphWalk,
    Ref,
    VariableDef,
    definition_children,
    rebuild,
)
from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.static import Metadata, Static
from shardax._core.graph.views import part_of, stack_values
from shardax._core.object import Object
from shardax._core.variable import Variable


class Stacked(NamedTuple):
    """What stacking made.

    Attributes:
        root: The object that holds all parts.
        shared: Paths, below it, of the objects that are shared.
    """

    root: Any
    shared: tuple[Path, ...]


def stack_objects(roots: Sequence[Object], axis_name: Any, older: Collection[int] = ()) -> Stacked:
    """Stacks objects of one structure.

    Args:
        roots: At least one. They keep their Variables; the result has new ones.
        axis_name: Name of the new dimension.
        older: ``id`` of objects that a single root shares with its surroundings. Of several roots
            that is seen.

    Raises:
        StackError: If two of them differ in structure, or in the shape or dtype of a value; names
            the path.

    Example:
        >>> import shardax as sx
        >>> layers = [sx.nn.Linear(2, 3, rngs=sx.Rngs(seed)) for seed in range(4)]
        >>> stack_objects(layers, "layers").root.kernel
        Param(float32[4, 2, 3], lazy, axes=('layers', 'in', 'out'))
    """
    walks = [_walk(root) for root in roots]
    for number, walk in enumerate(walks):
        _check_alike(walks[0], walk, number)
    first = walks[0]
    shared = _shared(walks, older)

    def stacked(position: int, definition: VariableDef) -> tuple[Any, Metadata]:
        values = _values([walk.objects[position] for walk in walks], first, position)
        return stack_values(values), definition.metadata.with_axis(0, axis_name)

    root = _rebuilt(first, shared, stacked)
    return Stacked(root, tuple(first.paths[position] for position in sorted(shared)))


def unstack_objects(root: Object, shared: Collection[Path], count: int) -> list[Any]:
    """Takes stacked objects apart: the inverse of ``stack_objects``.

    Args:
        root: What holds all parts.
        shared: Paths of what is shared.
        count: The number of parts.

    Returns:
        New objects, which share what is shared with the stack and with one another.
    """
    walk = _walk(root)
    kept = {position for position, path in enumerate(walk.paths) if path in shared}

    def part(index: int, position: int, definition: VariableDef) -> tuple[Any, Metadata]:
        whole = resolve(walk.objects[position], local.frame)._value
        return part_of(whole, index), definition.metadata.without_axis(0)

    return [_rebuilt(walk, kept, functools.partial(part, index)) for index in range(count)]


def _walk(root: Object) -> GraphWalk:
    walk = GraphWalk()
    walk.visit(root, ())
    return walk


def _rebuilt(
    walk: GraphWalk,
    kept: Collection[int],
    variable: Callable[[int, VariableDef], tuple[Any, Metadata]],
) -> Any:
    """Builds the objects of a walk anew.

    Args:
        walk: What was walked.
        kept: Positions of objects to use as they are.
        variable: Gives value and metadata of the new Variable at a position.

    Returns:
        The new root.
    """
    owner = owner_here()
    given = {position: walk.objects[position] for position in kept}
    for position, definition in enumerate(walk.definitions):
        if position not in given and type(definition) is VariableDef:
            given[position] = definition.type._make(*variable(position, definition), owner)
    return rebuild(walk, given, owner).objects[0]


def _shared(walks: Sequence[GraphWalk], older: Collection[int]) -> set[int]:
    """Returns the positions of objects that all walks have met as one and the same.

    Raises:
        StackError: If some but not all of them share one.
    """
    shared = set()
    for position, item in enumerate(walks[0].objects):
        ids = [id(walk.objects[position]) for walk in walks]
        if len(walks) == 1:
            if ids[0] in older:
                shared.add(position)
        elif len(set(ids)) == 1:
            shared.add(position)
        elif len(set(ids)) < len(ids):
            twins = [i for i, one in enumerate(ids) if ids.count(one) > 1]
            raise StackError(
                f"The layers of a stack must be alike, but the {type(item).__name__} at "
                f"{_shown(walks[0].paths[position])} is one object in the layers {twins[:4]} and "
                f"another in the rest. Share it between all layers, or between none."
            )
    return shared


# --- what must be alike ---------------------------------------------------------------------------


def _check_alike(first: GraphWalk, other: GraphWalk, number: int) -> None:
    """Raises if two objects differ in structure; says where."""
    if first.definitions == other.definitions:
        return
    pairs = zip(first.definitions, other.definitions, strict=False)
    position, (one, two) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    path, difference = _difference(first.paths[position], one, two)
    raise StackError(
        f"The layers of a stack must be alike, but layers 0 and {number} differ at {_shown(path)}: "
        f"{difference}. Build every layer in the same way, with what differs in a Variable; or "
        f"keep the layers in a list."
    )


def _difference(path: Path, one: Any, two: Any) -> tuple[Path, str]:
    """Returns the path at which two definitions differ, and how."""
    if type(one) is not type(two) or getattr(one, "type", None) is not getattr(two, "type", None):
        return path, f"{_kind(one)} against {_kind(two)}"
    if isinstance(one, VariableDef):
        return path, f"metadata ({one.metadata!r}) against ({two.metadata!r})"
    before, after = _children(one), _children(two)
    for key in {**before, **after}:
        if key not in before or key not in after:
            return (*path, key), "only one of them has it"
        if before[key] != after[key]:
            return (*path, key), f"{_child(before[key])} against {_child(after[key])}"
    return path, "the order of attributes"


def _children(definition: Any) -> dict[Any, Any]:
    return dict(definition_children(definition))


def _kind(definition: Any) -> str:
    found = getattr(definition, "type", type(definition))
    return f"a {found.__name__}"


def _child(child: Any) -> str:
    if isinstance(child, Static):
        return repr(child.value)
    return "an object" if isinstance(child, Ref) else _kind(child)


def _shown(path: Path) -> str:
    return format_path(path) if path else "the top"


def _values(variables: Sequence[Variable[Any]], walk: GraphWalk, position: int) -> list[Any]:
    """Returns the values of like Variables.

    Raises:
        StackError: If two differ in structure, shape or dtype.
    """
    values = [resolve(variable, local.frame)._value for variable in variables]
    forms = [_form(value) for value in values]
    for number, form in enumerate(forms):
        if form != forms[0]:
            kind, path = walk.definitions[position].type.__name__, walk.paths[position]
            raise StackError(
                f"The layers of a stack must be alike, but the {kind} at {_shown(path)} is "
                f"{forms[0][1]} in layer 0 and {form[1]} in layer {number}."
            )
    return values


def _form(value: Any) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(value)
    shown = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    return treedef, shown
