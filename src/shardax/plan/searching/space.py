# SPDX-License-Identifier: Apache-2.0
"""The search space of a step: groups of names, fixed names, and meshes.

A *group* is names that get the same mesh axes; a *fixed* name is one whose axes are not searched.
Names of *activations*, on constraints and on the batch, are groups of their own. Whole stay names
of dimensions that a loop takes one element at a time; names summed over in a product of two
computed arrays, if every argument with them also has a batch dimension of that product (the size of
a head, beside the heads); and names on no product and on less than a hundredth of the arguments.
The others are tied as far as no two of them are on one argument: they are the inner dimensions of
blocks that follow each other (heads, hidden layer, vocabulary).

Mesh axes of three names are for a *form* of parallelism. ``"stage"`` splits the dimension that the
loop over layers takes apart, which makes it a pipeline; ``"context"`` splits ``"seq"``; and
``"expert"`` splits ``"expert"`` and the batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardax import Rules
from shardax.extend import axis_names_in, did_you_mean, mesh_axes_of
from shardax.plan.errors import PlanInputError
from shardax.plan.searching.dimensions import DimensionModel

_SMALL_SHARE = 0.01  # of all elements: smaller arguments do not decide whether a name is searched
SLICE_AXIS = "slice"  # the mesh axis whose positions are slices, where a search makes the meshes
FORMS = {"stage": None, "context": "seq", "expert": "expert"}  # and the names that they split

MeshSizes = tuple[tuple[str, int], ...]
Meshes = tuple[MeshSizes, ...]


@dataclass(frozen=True)
class SearchSpace:
    """Groups of names and meshes varied by a search."""

    groups: tuple[tuple[str, ...], ...]  # names that get the same mesh axes, in order of priority
    fixed: tuple[tuple[str, Any], ...]  # names whose axes are not searched, with these
    meshes: Meshes
    activations: tuple[str, ...]  # names on constraints and on the batch
    staged: tuple[str, ...]  # names of the dimensions that stages split
    notes: tuple[str, ...]  # why names are fixed or tied that nobody fixed or tied

    @property
    def searched(self) -> list[str]:
        """Names of all groups, in order of priority."""
        return [name for group in self.groups for name in group]

    @property
    def mesh_axes(self) -> dict[str, None]:
        """Mesh axes of all meshes, in order of first use."""
        return dict.fromkeys(axis for mesh in self.meshes for axis, _ in mesh)


def search_space(
    dimensions: DimensionModel,
    meshes: Meshes,
    *,
    activations: Iterable[str] = (),
    tie: Sequence[Sequence[str]] | None = None,
    fix: Mapping[str, object] | None = None,
) -> SearchSpace:
    """Returns the names of a step sorted into groups and fixed ones, over meshes."""
    fix = dict(fix or {})
    ties = [tuple(group) for group in tie or ()]
    _check_names(dimensions, ties, fix, meshes)
    forms = _names_of_forms(dimensions, meshes)
    on_constraints = (name for _, names in dimensions.constraints for name in axis_names_in(names))
    named = list(dict.fromkeys((*activations, *on_constraints)))

    # Fixed are names of forms, unless the user fixes them otherwise, and names that stay whole.
    fixed: dict[str, Any] = {name: axis for axis, names in forms.items() for name in names}
    fixed |= dict(Rules(fix).pairs)
    tied = [name for group in ties for name in group]
    notes = []
    for name, why in _kept_whole(dimensions, named):
        if name not in fixed and name not in tied:
            fixed[name] = None
            notes.append(f"{name} stays whole: {why}")

    # The others are groups: of activations each name alone, of parameters what can be tied.
    free = [name for name in dimensions.names if name not in fixed and name not in tied]
    alone = [name for name in free if name in named]
    inner = [name for name in free if name not in named]
    tied_groups = _tied(dimensions, inner) if tie is None else [(name,) for name in inner]
    notes += [f"tied: {', '.join(group)}" for group in tied_groups if len(group) > 1]

    groups = [*((name,) for name in alone), *ties, *tied_groups]
    names_in_order = list(dict.fromkeys((*named, *dimensions.names)))
    groups.sort(key=lambda group: (group[0] not in alone, min(map(names_in_order.index, group))))
    return SearchSpace(
        groups=tuple(groups),
        fixed=tuple(fixed.items()),
        meshes=meshes,
        activations=tuple(named),
        staged=tuple(forms.get("stage", ())),
        notes=tuple(notes),
    )


def _names_of_forms(dimensions: DimensionModel, meshes: Meshes) -> dict[str, list[str]]:
    """Returns the names split by the mesh axis of each form."""
    names_by_axis: dict[str, list[str]] = {}
    stored = {name for _, names in dimensions.arguments for name in axis_names_in(names)}
    for axis in dict.fromkeys(axis for mesh in meshes for axis, _ in mesh):
        if axis not in FORMS:
            continue

        required = FORMS[axis]
        names = [required] if required else sorted(dimensions.looped & stored)
        if not names or not set(names) <= set(dimensions.names):
            requirement = (
                f"a dimension called {required!r}"
                if required
                else "a loop over layers, whose parameters have a named first dimension (nn.Stack; "
                "a decoder with scan_layers=True)"
            )
            raise PlanInputError(
                f"The mesh axis {axis!r} needs {requirement}, and the step has none. Its names are "
                f"{', '.join(map(repr, dimensions.names))}. Give it, or leave the axis out of "
                "mesh_axes or meshes."
            )
        names_by_axis[axis] = names
    return names_by_axis


def _check_names(
    dimensions: DimensionModel,
    ties: Sequence[Sequence[str]],
    fix: Mapping[str, object],
    meshes: Meshes,
) -> None:
    step_names = dimensions.names
    tied = [name for group in ties for name in group]
    for name in [*tied, *fix]:
        if name not in step_names:
            raise PlanInputError(
                f"There is no axis name {name!r} in the step's arguments and constraints, which "
                f"have {', '.join(map(repr, step_names))}.{did_you_mean(name, step_names)}"
            )

    twice = sorted({name for name in tied if tied.count(name) > 1 or name in fix})
    if twice:
        raise PlanInputError(
            f"{', '.join(map(repr, twice))}: tied twice, or tied and fixed. Give each name once, "
            'as in tie=[("heads", "kv_heads", "mlp")], fix={"layers": None}.'
        )

    mesh_axes = {axis for mesh in meshes for axis, _ in mesh}
    for name, target in Rules(fix).pairs:
        for axis in mesh_axes_of(target):
            if axis not in mesh_axes:
                raise PlanInputError(
                    f"fix={{{name!r}: {target!r}}} names the mesh axis {axis!r}, but the meshes "
                    f"have {', '.join(map(repr, sorted(mesh_axes)))}."
                    f"{did_you_mean(axis, mesh_axes)}"
                )


def _kept_whole(
    dimensions: DimensionModel, activations: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yields names kept whole, with the reason."""
    names_beside = _batch_beside(dimensions)
    arguments = [(math.prod(shape), set(axis_names_in(n))) for shape, n in dimensions.arguments]
    total = sum(elements for elements, _ in arguments) or 1
    multiplied = {n for product in dimensions.products for dim in product.dims for n in dim.names}
    for name in dimensions.names:
        if name in dimensions.looped:
            yield name, "a loop takes it one element at a time"
            continue
        if name in activations:
            continue

        having = [(elements, names) for elements, names in arguments if name in names]
        beside = names_beside[name]
        if having and beside and all(names & beside for _, names in having):
            yield name, f"{' or '.join(sorted(beside))} beside it can be split without a sum"
            continue

        is_small = sum(elements for elements, _ in having) < _SMALL_SHARE * total
        if name not in multiplied and is_small:
            yield name, "it is on no matrix product, and on little else"


def _batch_beside(dimensions: DimensionModel) -> Mapping[str, set[str]]:
    """Returns by summed name the batch dimensions of products of computed arrays."""
    names_beside: defaultdict[str, set[str]] = defaultdict(set)
    for product in dimensions.products:
        if not product.computed:
            continue
        batch = {name for dim in product.dims if dim.role == "batch" for name in dim.names}
        for dim in product.dims:
            if dim.role == "sum":
                for name in dim.names:
                    names_beside[name] |= batch - dim.names
    return names_beside


def _tied(dimensions: DimensionModel, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns groups of names that are never together on one argument."""
    arrays = [set(axis_names_in(names)) for _, names in dimensions.arguments]
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
    """Returns all meshes of some axes, the first axis largest first."""
    names = tuple(axes)
    if isinstance(axes, str) or not names or len(set(names)) < len(names):
        raise PlanInputError(
            f"mesh_axes={axes!r} are not names of mesh axes; give each one once, as in "
            'mesh_axes=("data", "model").'
        )

    # Of several slices the first axis is that of slices, named "slice" unless ``axes`` begin so.
    if slices > 1:
        inner = names[1:] if names[0] == SLICE_AXIS else names
        inner_shapes = mesh_shapes(devices // slices, inner) if inner else ((),)
        return tuple(((SLICE_AXIS, slices), *mesh) for mesh in inner_shapes)

    if len(names) == 1:
        return (((names[0], devices),),)
    sizes = [size for size in range(devices, 0, -1) if devices % size == 0]
    return tuple(
        ((names[0], size), *mesh)
        for size in sizes
        for mesh in mesh_shapes(devices // size, names[1:])
    )
