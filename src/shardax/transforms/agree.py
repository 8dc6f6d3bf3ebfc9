# SPDX-License-Identifier: Apache-2.0
"""Agreement of branches: one program comes out of a choice, whichever branch is taken.

The *outcome* of a branch is all that it leaves behind: its result, what it wrote, how it changed
the structure of the objects it was given, what it made. The outcomes of all branches must agree in
everything but numbers. What a branch does not write keeps the value it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from shardax.core.errors import BranchError
from shardax.core.node import Object
from shardax.core.paths import Path, format_path, path_step
from shardax.core.pytree import is_object
from shardax.core.static import Static
from shardax.core.structure import (
    GraphDef,
    ModuleDef,
    Ref,
    VariableDef,
    definition_children,
    definition_paths,
)
from shardax.transforms.call import Call
from shardax.transforms.lift import Record
from shardax.transforms.repeat import describe_change, form


class Place(NamedTuple):
    """Stands for a leaf of a result: an array, or the object at a position of the graph."""

    position: int | None = None


class Outcome(NamedTuple):
    """What one branch leaves.

    Attributes:
        label: How the caller knows the branch.
        record: What it did.
        outline: Its result with a ``Place`` for every leaf.
        arrays: Shapes of the arrays in the result.
        written: Shapes of the values of written Variables, by position.
        fresh: Shapes of the values of new Variables.
    """

    label: str
    record: Record
    outline: Any
    arrays: Sequence[Any]
    written: dict[int, Any]
    fresh: Sequence[Any]


def outline_of(result: Any, record: Record) -> Any:
    """Returns a result with a ``Place`` for every leaf."""
    leaves, treedef = jax.tree.flatten(result, is_leaf=is_object)
    roots = () if record.result is None else record.result.roots
    positions = dict(roots)
    assert all(place in positions for place, x in enumerate(leaves) if isinstance(x, Object))
    return treedef.unflatten([Place(positions.get(place)) for place in range(len(leaves))])


def check_agreement(call: Call, outcomes: Sequence[Outcome], before: Sequence[Any]) -> None:
    """Raises if branches leave different things behind.

    Args:
        call: The call.
        outcomes: One per branch.
        before: The values of the Variables before the choice.

    Raises:
        BranchError: Naming the place and what each of two branches leaves there.
    """
    first = outcomes[0]
    for other in outcomes[1:]:
        _check_structure(call, first, other)
        _check_result(call, first, other)
        _check_new(call, first, other)
        _check_written(call, first, other, before)


def _check_structure(call: Call, first: Outcome, other: Outcome) -> None:
    graphdef, paths = call.graph.flat.graphdef, call.graph.flat.paths
    for position, old in enumerate(graphdef.objects):
        mine = first.record.updates.get(position, old)
        theirs = other.record.updates.get(position, old)
        if mine == theirs:
            continue
        changes = [
            describe_change(old, new) if new != old else "nothing changes" for new in (mine, theirs)
        ]
        if changes[0] == changes[1]:
            changes = [
                _describe_attributes(call, outcome, new, against)
                for outcome, new, against in ((first, mine, theirs), (other, theirs, mine))
            ]
        told = [
            f"in {outcome.label} {change}"
            for outcome, change in zip((first, other), changes, strict=True)
        ]
        raise BranchError(
            f"The branches of sx.{call.name} change the {old.type.__name__} at "
            f"{format_path(paths[position])} differently: {told[0]}; {told[1]}. One program comes "
            f"out of both, so they must leave one structure. Make the same change in every branch "
            f"(sow the same names, set the same attributes in the same order), or change it before "
            f"the choice and only write values inside."
        )


def _describe_attributes(call: Call, outcome: Outcome, new: Any, against: Any) -> str:
    """Returns what the attributes are in which the definition of a Module differs from another."""
    mine, theirs = (
        {key: child for key, child in definition_children(item) if isinstance(key, str)}
        if isinstance(item, ModuleDef)
        else {}
        for item in (new, against)
    )
    shown = [
        f".{name} is {_describe_child(call, outcome, child)}"
        for name, child in mine.items()
        if child != theirs.get(name)
    ]
    if shown:
        return ", ".join(shown)
    return f"the order is {', '.join(mine)}" if mine else "it is another"


def _describe_child(call: Call, outcome: Outcome, child: Any) -> str:
    if isinstance(child, Ref):
        return _describe(call, outcome, Place(child.position))
    return repr(child.value)[:40] if isinstance(child, Static) else "another container"


def _check_new(call: Call, first: Outcome, other: Outcome) -> None:
    """Compares the objects that were made, whose positions follow those of the given ones."""
    paths = [_paths_after(call, outcome) for outcome in (first, other)]
    count = len(call.graph.flat.graphdef.objects)
    values = [iter(first.fresh), iter(other.fresh)]
    for position in range(count, count + max(len(first.record.fresh), len(other.record.fresh))):
        told = []
        for outcome, fresh in zip((first, other), values, strict=True):
            made = outcome.record.fresh[position - count : position - count + 1]
            kind = f"a {made[0].type.__name__}" if made else "nothing"
            if position in outcome.record.foreign:
                kind += " from outside"
            elif made and type(made[0]) is VariableDef:
                kind += f" {form(next(fresh))}"
            told.append((made, kind))
        same = [o.record.foreign.get(position) for o in (first, other)]
        if told[0] == told[1] and same[0] is same[1]:
            continue
        where = format_path(paths[0].get(position) or paths[1].get(position) or ())
        raise BranchError(
            f"The branches of sx.{call.name} leave different objects at {where}: {first.label} "
            f"{told[0][1]}, {other.label} {told[1][1]}"
            f"{'' if told[0][1] != told[1][1] else ', but another one'}. Make the same in every "
            f"branch, with the same shapes, dtypes and metadata, or make it before the choice."
        )


def _paths_after(call: Call, outcome: Outcome) -> dict[int, Path]:
    """Returns the path of every object as it is after a branch; new ones may be in the result."""
    graphdef, record = call.graph.flat.graphdef, outcome.record
    objects = [record.updates.get(i, old) for i, old in enumerate(graphdef.objects)]
    returned = [
        (path, place.position)
        for path, place in _places(outcome.outline)
        if place.position is not None
    ]
    whole = GraphDef(
        (*objects, *record.fresh),
        (*graphdef.roots, *(Ref(position) for _, position in returned)),
    )
    return definition_paths(whole, [*call.names, *(("result", *path) for path, _ in returned)])


def _places(outline: Any) -> list[tuple[Path, Place]]:
    pairs = jax.tree_util.tree_leaves_with_path(outline, is_leaf=_is_place)
    return [(tuple(path_step(key) for key in keys), place) for keys, place in pairs]


def _is_place(item: Any) -> bool:
    return isinstance(item, Place)


def _check_result(call: Call, first: Outcome, other: Outcome) -> None:
    found = _difference(first.outline, other.outline, ())
    if found is not None:
        path, mine, theirs = found
        raise BranchError(
            f"The branches of sx.{call.name} return different structures{_at(path)}: {first.label} "
            f"{mine}, {other.label} {theirs}. Return the same containers with the same keys from "
            f"every branch."
        )
    arrays = iter(zip(first.arrays, other.arrays, strict=True))
    for (path, mine), (_, theirs) in zip(
        _places(first.outline), _places(other.outline), strict=True
    ):
        if mine != theirs:
            raise BranchError(
                f"The branches of sx.{call.name} return different objects{_at(path)}: "
                f"{first.label} {_describe(call, first, mine)}, {other.label} "
                f"{_describe(call, other, theirs)}. An object is chosen while tracing, before it "
                f"is known which branch is taken. Return the same object from every branch and "
                f"write values into it, or return arrays."
            )
        if mine.position is not None:
            continue
        one, two = (form(item) for item in next(arrays))
        if one != two:
            raise BranchError(
                f"The branches of sx.{call.name} return different types{_at(path)}: {first.label} "
                f"{one}, {other.label} {two}. Convert in one of them: x.astype(dtype), x.reshape("
                f"shape)."
            )


def _describe(call: Call, outcome: Outcome, place: Place) -> str:
    if place.position is None:
        return "an array"
    paths = call.graph.flat.paths
    if place.position < len(paths):
        kind = call.graph.flat.graphdef.objects[place.position].type.__name__
        return f"the {kind} at {format_path(paths[place.position])}"
    made = outcome.record.fresh[place.position - len(paths)]
    return f"a new {made.type.__name__}"


def _check_written(call: Call, first: Outcome, other: Outcome, before: Sequence[Any]) -> None:
    for position in sorted({*first.written, *other.written}):
        forms, told = [], []
        for outcome in (first, other):
            is_written = position in outcome.written
            shown = form(outcome.written[position] if is_written else before[position])
            forms.append(shown)
            told.append(f"{outcome.label} {'writes' if is_written else 'leaves it as'} {shown}")
        if forms[0] != forms[1]:
            kind = type(call.graph.leaves[position]).__name__
            raise BranchError(
                f"The {kind} at {format_path(call.graph.flat.leaf_paths[position])} leaves the "
                f"branches of sx.{call.name} in different forms: {told[0]}, {told[1]}. Keep one "
                f"structure, shape and dtype: v[...] = new.astype(v.dtype)."
            )


def _at(path: Path) -> str:
    return f" at {format_path(path)} of the result" if path else ""


def _difference(first: Any, other: Any, path: Path) -> tuple[Path, str, str] | None:
    """Returns the outermost place where two outlines have another structure."""
    trees = [jax.tree.structure(item, is_leaf=_is_place) for item in (first, other)]
    if trees[0] == trees[1]:
        return None
    children = [dict(_one_level(item)) for item in (first, other)]
    if type(first) is type(other) and list(children[0]) == list(children[1]):
        for key, child in children[0].items():
            found = _difference(child, children[1][key], (*path, key))
            if found is not None:
                return found
    told = [_container(item, below) for item, below in zip((first, other), children, strict=True)]
    if told[0] == told[1]:
        told[1] += " with other static fields"
    return path, told[0], told[1]


def _one_level(tree: Any) -> list[tuple[Any, Any]]:
    if _is_place(tree):
        return []
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda item: item is not tree)
    return [(path_step(keys[0]), child) for keys, child in pairs]


def _container(item: Any, children: dict[Any, Any]) -> str:
    if _is_place(item):
        return "an array" if item.position is None else "an object"
    if item is None:
        return "None"
    if isinstance(item, dict):
        return f"a {type(item).__name__} with keys {', '.join(map(repr, children)) or '(none)'}"
    return f"a {type(item).__name__} of {len(children)}"
