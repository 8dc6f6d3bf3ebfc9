# SPDX-License-Identifier: Apache-2.0
"""What a search varies: which names get mesh axes, which go together, and the shapes of the mesh.

A *group* is names that get the same mesh axes, a *fixed* name is one whose axes are not searched.
Names that nobody ties or fixes are sorted by these rules:

1. A name of a dimension that a loop takes one element at a time stays whole: all devices are at the
   same element.
2. Names of *activations*, which are those on constraints and on the batch, are groups of their own.
3. Another name stays whole that is summed over in a product of two computed arrays, if every
   argument with it also has a name that is a batch dimension of that product: splitting that one
   needs no sum over devices. (Of attention: the size of a head, beside the heads.)
4. Another name stays whole that is on no product and on less than a hundredth of the arguments.
5. The others are tied as far as no two of them are on one argument: they are the inner dimensions
   of blocks that follow each other (heads, hidden layer, vocabulary).

A tied name whose size the axes do not divide stays whole while the others are split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.partition.findings import did_you_mean
from shardax.partition.rules import Rules, mesh_axes_of, strings
from shardax.plan.errors import PlanInputError
from shardax.plan.search.dimensions import Dimensions

Meshes = tuple[tuple[tuple[str, int], ...], ...]

SMALL_SHARE = 0.01
"""Arguments below this share of all elements do not decide whether a name is searched."""


@dataclass(frozen=True)
class SearchSpace:
    """What a search varies."""

    groups: tuple[tuple[str, ...], ...]  # names that get the same mesh axes, in order of priority
    fixed: tuple[tuple[str, Any], ...]  # names whose axes are not searched, with these
    meshes: Meshes  # sizes of mesh axes
    activations: tuple[str, ...]  # names on constraints and on the batch
    notes: tuple[str, ...]  # why names are fixed or tied that nobody fixed or tied


def search_space(
    dimensions: Dimensions,
    meshes: Meshes,
    *,
    activations: Iterable[str] = (),
    tie: Sequence[Sequence[str]] | None = None,
    fix: Mapping[str, Any] | None = None,
) -> SearchSpace:
    """Sorts the names of a step into groups and fixed ones."""
    fix, ties = dict(fix or {}), [tuple(each) for each in tie or ()]
    _check_names(dimensions, ties, fix, meshes)
    fixed = dict(Rules(fix).pairs)
    notes = []
    tied = [name for group in ties for name in group]
    on_constraints = (name for _, names in dimensions.constraints for name in strings(names))
    named = list(dict.fromkeys((*activations, *on_constraints)))
    for name, why in _kept_whole(dimensions, named):
        if name not in fixed and name not in tied:
            fixed[name] = None
            notes.append(f"{name} stays whole: {why}")
    free = [name for name in dimensions.names if name not in fixed and name not in tied]
    alone = [name for name in free if name in named]
    inner = [name for name in free if name not in alone]
    made = _tied(dimensions, inner) if tie is None else [(name,) for name in inner]
    notes += [f"tied: {', '.join(group)}" for group in made if len(group) > 1]
    groups = [*((name,) for name in alone), *ties, *made]
    order = {name: at for at, name in enumerate(dict.fromkeys((*named, *dimensions.names)))}
    groups.sort(key=lambda group: (group[0] not in alone, min(order[name] for name in group)))
    return SearchSpace(tuple(groups), tuple(fixed.items()), meshes, tuple(named), tuple(notes))


def _check_names(
    dimensions: Dimensions, ties: Sequence[Sequence[str]], fix: Mapping[str, Any], meshes: Meshes
) -> None:
    known = dimensions.names
    for name in [*(name for group in ties for name in group), *fix]:
        if name not in known:
            raise PlanInputError(
                f"There is no axis name {name!r} in the step's arguments and constraints, which "
                f"have {', '.join(map(repr, known))}.{did_you_mean(name, known)}"
            )
    tied = [name for group in ties for name in group]
    twice = sorted({name for name in tied if tied.count(name) > 1 or name in fix})
    if twice:
        raise PlanInputError(
            f"{', '.join(map(repr, twice))}: tied twice, or tied and fixed. Give each name once, "
            'as in tie=[("heads", "kv_heads", "mlp")], fix={"layers": None}.'
        )
    axes = {axis for mesh in meshes for axis, _ in mesh}
    for name, target in Rules(fix).pairs:
        for axis in mesh_axes_of(target):
            if axis not in axes:
                raise PlanInputError(
                    f"fix={{{name!r}: {target!r}}} names the mesh axis {axis!r}, but the meshes "
                    f"have {', '.join(map(repr, sorted(axes)))}.{did_you_mean(axis, axes)}"
                )


def _kept_whole(dimensions: Dimensions, activations: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Names that the rules keep whole, with the reason."""
    beside = _batch_beside(dimensions)
    total = sum(math.prod(shape) for shape, _ in dimensions.arguments) or 1
    multiplied = {n for product in dimensions.products for dim in product.dims for n in dim.names}
    for name in dimensions.names:
        if name in dimensions.looped:
            yield name, "a loop takes it one element at a time"
            continue
        if name in activations:
            continue
        arrays = [(shape, set(strings(n))) for shape, n in dimensions.arguments]
        having = [(shape, names) for shape, names in arrays if name in names]
        others = beside.get(name, frozenset())
        if having and others and all(names & others for _, names in having):
            yield name, f"{' or '.join(sorted(others))} beside it can be split without a sum"
        elif (
            name not in multiplied
            and sum(math.prod(shape) for shape, _ in having) < SMALL_SHARE * total
        ):
            yield name, "it is on no matrix product, and on little else"


def _batch_beside(dimensions: Dimensions) -> dict[str, frozenset[str]]:
    """For names summed over in products of computed arrays, the batch dimensions of these."""
    found: dict[str, frozenset[str]] = {}
    for product in dimensions.products:
        batch = {n for dim in product.dims if dim.role == "batch" for n in dim.names}
        for dim in product.dims if product.computed and batch else ():
            if dim.role == "sum":
                for name in dim.names:
                    found[name] = found.get(name, frozenset()) | batch - dim.names
    return found


def _tied(dimensions: Dimensions, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Ties names as far as no two of them are on one argument."""
    arrays = [set(strings(names)) for _, names in dimensions.arguments]
    groups: list[list[str]] = []
    for name in names:
        for group in groups:
            if not any(name in array and array & set(group) for array in arrays):
                group.append(name)
                break
        else:
            groups.append([name])
    return [tuple(group) for group in groups]


def mesh_shapes(devices: int, axes: Sequence[str], slices: int = 1) -> Meshes:
    """Returns all ways to make a mesh of some axes of some devices, the first axis largest first."""
    names = tuple(axes)
    if isinstance(axes, str) or not names or len(set(names)) < len(names):
        raise PlanInputError(
            f"mesh_axes={axes!r} are not names of mesh axes; give each one once, as in "
            'mesh_axes=("data", "model").'
        )
    if slices > 1:
        inner = names[1:] if names[0] == SLICE_AXIS else names
        rest = mesh_shapes(devices // slices, inner) if inner else ((),)
        return tuple(((SLICE_AXIS, slices), *mesh) for mesh in rest)
    if len(names) == 1:
        return (((names[0], devices),),)
    sizes = [size for size in range(devices, 0, -1) if devices % size == 0]
    return tuple(
        ((names[0], size), *mesh)
        for size in sizes
        for mesh in mesh_shapes(devices // size, names[1:])
    )


SLICE_AXIS = "slice"
"""The mesh axis whose positions are slices, where a search makes the meshes."""
