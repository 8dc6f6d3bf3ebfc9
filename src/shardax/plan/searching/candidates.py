# SPDX-License-Identifier: Apache-2.0
"""Candidates: the layouts that a search times, of which it compiles few.

Of all assignments of mesh axes to groups of names (``space.py``), over all meshes, a candidate

- can be: sizes divide, and no array uses a mesh axis twice but by priority. A tied name whose size
  the axes do not divide stays whole while the others are split;
- is the first of its equivalents, which have the same specs up to names, order and merging of mesh
  axes: with the fewest axes, used in the order of priority of names (the batch outermost);
- is the first of those that only store arguments by another dimension. Where a mesh axis splits a
  *free* name (on no parameter, but on nearly every product, once: the batch), an argument that is
  split by it too is gathered before use, and of which dimension it was hardly matters;
- repeats little work: at most 1.05 times what devices do in the best candidate;
- has arguments that fit into the memory. Those that fail the last two are kept, with the reason.

Beside the loop over layers, ``"stage"`` splits only names that no array of that loop has (the
vocabulary), as they are used outside of it. A candidate then has variants by ``settings.py``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardax import Rules
from shardax.extend import axis_names_in, mesh_axes_of
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport
from shardax.plan.searching.dimensions import DimensionModel
from shardax.plan.searching.settings import Settings, with_settings
from shardax.plan.searching.space import FORMS, SLICE_AXIS, MeshSizes, SearchSpace

_SMALL_SHARE = 0.01  # of all elements: of smaller arguments the storage does not matter
_MOST_REPEATED = 1.05  # how much more work than in the best candidate devices may do

SpecEntry = str | tuple[str, ...] | None  # the mesh axes of a name, as rules have them


@dataclass(frozen=True)
class Candidates:
    """The layouts to time, and the rejected ones."""

    layouts: tuple[Layout, ...]  # in order of meshes and names
    repeating: tuple[LayoutReport, ...]  # rejected because they repeat work
    too_large: tuple[LayoutReport, ...]  # rejected because their arguments do not fit
    tried: int  # assignments
    distinct: int  # of them, those possible and not equivalent
    argument_bytes: tuple[Mapping[str, int], ...]  # of a device by kind, for each layout

    @property
    def rejected(self) -> tuple[LayoutReport, ...]:
        """Reports of the rejected layouts."""
        return (*self.repeating, *self.too_large)


def find_candidates(
    dimensions: DimensionModel,
    space: SearchSpace,
    inputs: Inputs,
    limit_bytes: int | None,
    settings: Settings | None = None,
    *,
    keeps_near: bool = False,
) -> Candidates:
    """Returns the candidates of a search space, and those not worth compiling.

    With ``keeps_near``, of two equivalents the one counts whose shards are on near devices, as
    between nodes it is faster.
    """
    # Of equivalents the first counts, and so of those that differ in storage alone.
    assignments = _LayoutAssignments(dimensions, space, inputs, keeps_near=keeps_near)
    by_equivalence: dict[Hashable, AssignedLayout] = {}
    tried = 0
    for assignment in assignments:
        tried += 1
        if assignment is not None:
            _keep_first(by_equivalence, _equivalence_key(assignment), assignment)

    by_storage: dict[Hashable, AssignedLayout] = {}
    for assignment in by_equivalence.values():
        _keep_first(by_storage, assignments.storage_key(assignment), assignment)
    distinct = sorted(
        by_storage.values(), key=lambda each: (space.meshes.index(each.layout.mesh), each.order)
    )

    # What repeats work or does not fit is kept for the plan's notes.
    layouts, repeating = _without_repeated_work([each.layout for each in distinct], dimensions)
    fitting: dict[Layout, Mapping[str, int]] = {}
    too_large: list[LayoutReport] = []
    for layout in layouts:
        variants = with_settings(layout, dimensions, space, inputs, settings or {})
        argument_bytes, rejected = _within_memory(layout, variants, inputs, limit_bytes)
        fitting |= argument_bytes
        too_large += rejected
    return Candidates(
        layouts=tuple(fitting),
        repeating=tuple(repeating),
        too_large=tuple(too_large),
        tried=tried,
        distinct=len(distinct),
        argument_bytes=tuple(fitting.values()),
    )


class AssignedLayout(NamedTuple):
    """Mesh axes of all names, as a layout, and of the dimensions of all arrays."""

    layout: Layout
    specs: tuple[tuple[SpecEntry, ...], ...]
    # Of equals the least is kept: with fewer axes, used in the order of priority of names.
    order: tuple[int, ...]


class _LayoutAssignments:
    """All assignments of mesh axes to the groups of a space; None stands for impossible ones."""

    def __init__(
        self, dimensions: DimensionModel, space: SearchSpace, inputs: Inputs, *, keeps_near: bool
    ) -> None:
        self._space = space
        self._keeps_near = keeps_near
        self._arrays = tuple(dict.fromkeys((*dimensions.constraints, *dimensions.arguments)))
        self._sizes_of = {name: dimensions.sizes_of(name) for name in dimensions.names}
        self._names = list(dict.fromkeys((*space.searched, *dimensions.names)))
        self._free = _free_names(dimensions, inputs)
        self._free_groups = [bool(set(group) & self._free) for group in space.groups]

        elements = [math.prod(shape) for shape, _ in dimensions.arguments]
        self._large = [count > _SMALL_SHARE * sum(elements) for count in elements]

        # A group is called by the name on most of the work.
        work: Counter[str] = Counter()
        for product in dimensions.products:
            for name in {name for dim in product.dims for name in dim.names}:
                work[name] += int(product.flops)
        self._leads = [
            max(group, key=lambda name: (work[name], -group.index(name))) for group in space.groups
        ]
        self._outside = _outside_of_stages(dimensions, space) if "stage" in space.mesh_axes else []

    def __iter__(self) -> Iterator[AssignedLayout | None]:
        for mesh in self._space.meshes:
            targets = [_targets(mesh, is_free=is_free) for is_free in self._free_groups]
            for chosen in itertools.product(*targets):
                yield self._assigned(mesh, chosen)

    def _assigned(self, mesh: MeshSizes, chosen: Sequence[SpecEntry]) -> AssignedLayout | None:
        """Returns the assignment of one target to each group, or None if it is impossible."""
        targets = self._targets_of_names(dict(mesh), chosen)
        if targets is None:
            return None

        pairs = tuple((name, targets[name]) for name in self._names)
        rules = Rules(pairs)
        specs = tuple(rules.assign(names).entries for _, names in self._arrays)
        sizes = dict(mesh)
        for (shape, _), spec in zip(self._arrays, specs, strict=True):
            for size, target in zip(shape, spec, strict=True):
                if target is not None and size % _ways(sizes, mesh_axes_of(target)):
                    return None

        axes_of_groups = [mesh_axes_of(target) for target in chosen]
        words = [
            f"{lead}={'+'.join(axes)}"
            for lead, axes in zip(self._leads, axes_of_groups, strict=True)
            if axes
        ]
        mesh_text = "x".join(str(size) for _, size in mesh)
        name = f"{' '.join(words) or 'replicated'} ({mesh_text})"
        return AssignedLayout(Layout(name, pairs, mesh), specs, self._order(mesh, axes_of_groups))

    def _targets_of_names(
        self, sizes: dict[str, int], chosen: Sequence[SpecEntry]
    ) -> dict[str, SpecEntry] | None:
        """Returns the target of each name; None if it splits no name of its group."""
        targets = dict(self._space.fixed)
        for group, target in zip(self._space.groups, chosen, strict=True):
            ways = _ways(sizes, mesh_axes_of(target))
            split = {name for name in group if _divides(ways, self._sizes_of[name])}
            if not split:
                return None
            targets |= {name: target if name in split else None for name in group}

        if sizes.get("stage", 1) > 1:
            for name in self._outside:
                targets[name] = self._with_axis(targets[name], "stage", sizes, name)
        if sizes.get("expert", 1) > 1:
            for name in self._free:
                targets[name] = self._with_axis(targets[name], "expert", sizes, name)
        return targets

    def _with_axis(
        self, target: SpecEntry, axis: str, sizes: dict[str, int], name: str
    ) -> SpecEntry:
        """Returns a target with one more axis, if that divides all sizes of the name."""
        axes = (*mesh_axes_of(target), axis)
        if not _divides(_ways(sizes, axes), self._sizes_of[name]):
            return target
        return axes if len(axes) > 1 else axis

    def _order(self, mesh: MeshSizes, axes_of_groups: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """Returns the key by which the first of equals is kept."""
        position = {axis: index for index, (axis, _) in enumerate(mesh)}
        first = [position[axes[0]] if axes else len(mesh) for axes in axes_of_groups]
        if self._keeps_near:
            # Parameters that a part of the batch's axes splits are gathered along that part and
            # their gradients summed along the others (HSDP), of which gathering is more: it is
            # better along the inner axes.
            groups = list(zip(axes_of_groups, self._free_groups, strict=True))
            of_batch = {axis for axes, is_free in groups if is_free for axis in axes}
            for index, (axes, is_free) in enumerate(groups):
                if axes and not is_free and set(axes) < of_batch:
                    first[index] = -position[axes[-1]]
        return (sum(map(len, axes_of_groups)), *first)

    def storage_key(self, assignment: AssignedLayout) -> Hashable:
        """Returns a key, equal for assignments with equal computation."""
        axes_of = assignment.layout.axes_of
        of_free = {axis for name in self._free for axis in axes_of.get(name, ())}
        others = tuple(
            (name, tuple(axis for axis in axes if axis not in of_free))
            for name, axes in axes_of.items()
        )
        free_axes = tuple((name, axes_of[name]) for name in sorted(self._free) if name in axes_of)

        specs_of_arguments = assignment.specs[len(self._arrays) - len(self._large) :]
        stored = tuple(
            frozenset(axis for target in spec for axis in mesh_axes_of(target)) & of_free
            for spec, is_large in zip(specs_of_arguments, self._large, strict=True)
            if is_large
        )
        return assignment.layout.mesh, others, free_axes, stored


def _ways(sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _divides(ways: int, sizes: Sequence[int]) -> bool:
    return all(size % ways == 0 for size in sizes)


def _targets(mesh: MeshSizes, *, is_free: bool) -> list[SpecEntry]:
    """Returns None, each mesh axis that can split a group, and all combinations in order."""
    axes = [
        axis
        for axis, size in mesh
        if size > 1 and axis not in FORMS and (is_free or axis != SLICE_AXIS)
    ]
    targets: list[SpecEntry] = [None, *axes]
    for count in range(2, len(axes) + 1):
        targets += itertools.combinations(axes, count)
    return targets


def _outside_of_stages(dimensions: DimensionModel, space: SearchSpace) -> list[str]:
    """Returns searched names of parameters outside of stages, such as the vocabulary."""
    arrays = [set(axis_names_in(names)) for _, names in dimensions.arguments]
    activations = set(space.activations)
    inside = {name for names in arrays if names & set(space.staged) for name in names}
    stored = {name for names in arrays if names - activations for name in names}
    return sorted((stored & set(space.searched)) - inside - activations)


def _free_names(dimensions: DimensionModel, inputs: Inputs) -> frozenset[str]:
    """Returns names on no parameter, but on (nearly) every product, once."""
    total = dimensions.flops
    if not total:
        return frozenset()

    free: set[str] = set()
    stored = inputs.names_on("parameters", "optimizer")
    for name in dimensions.names:
        counts = [sum(name in dim.names for dim in product.dims) for product in dimensions.products]
        covered = sum(
            product.flops
            for product, count in zip(dimensions.products, counts, strict=True)
            if count
        )
        if name not in stored and covered >= 0.99 * total and max(counts) == 1:
            free.add(name)
    return frozenset(free)


def _keep_first(
    first_by_key: dict[Hashable, AssignedLayout], key: Hashable, assignment: AssignedLayout
) -> None:
    first = first_by_key.setdefault(key, assignment)
    if assignment.order < first.order:
        first_by_key[key] = assignment


def _equivalence_key(assignment: AssignedLayout) -> Hashable:
    """Returns a key, equal for equivalent assignments."""
    sizes = {axis: size for axis, size in assignment.layout.mesh if size > 1}
    axes_of_dims = [mesh_axes_of(target) for spec in assignment.specs for target in spec]
    distinct = dict.fromkeys(axes_of_dims)  # far fewer than there are dimensions
    used = {axis for axes in distinct for axis in axes}
    idle_sizes = tuple(sorted(size for axis, size in sizes.items() if axis not in used))

    # Neighbors that are everywhere together count as one axis, called by the last of them.
    merged: dict[str, int] = {}
    for axis, size in sizes.items():
        if axis not in used:
            continue
        previous = next(reversed(merged), None)
        is_slice = SLICE_AXIS in (axis, previous)
        if previous and not is_slice and all((previous in a) == (axis in a) for a in distinct):
            size *= merged.pop(previous)
        merged[axis] = size

    # Under each order of the axes specs are numbers, of which the least stands for all.
    numbered_specs = []
    for order in itertools.permutations(merged):
        number = {axis: index for index, axis in enumerate(order)}
        numbers = {
            axes: tuple(sorted(number[axis] for axis in axes if axis in merged))
            for axes in distinct
        }
        axes_in_order = tuple((merged[axis], axis == SLICE_AXIS) for axis in order)
        numbered_specs.append((axes_in_order, tuple([numbers[axes] for axes in axes_of_dims])))
    return idle_sizes, min(numbered_specs)


def _without_repeated_work(
    layouts: Sequence[Layout], dimensions: DimensionModel
) -> tuple[list[Layout], list[LayoutReport]]:
    """Returns layouts that repeat little work, and reports of the others."""
    factors = [dimensions.replicated_compute(layout.as_rules, layout.sizes) for layout in layouts]
    best = min(factors, default=1.0)
    remaining: list[Layout] = []
    rejected: list[LayoutReport] = []
    for layout, factor in zip(layouts, factors, strict=True):
        if factor <= _MOST_REPEATED * best * (1 + 1e-9):
            remaining.append(layout)
            continue
        reason = (
            f"the devices would do each operation at least {factor:.2f} times, and "
            f"{best:.2f} times in the best candidates"
        )
        rejected.append(LayoutReport(layout, "rejected", reason))
    return remaining, rejected


def _within_memory(
    layout: Layout, variants: Sequence[Layout], inputs: Inputs, limit_bytes: int | None
) -> tuple[dict[Layout, dict[str, int]], list[LayoutReport]]:
    """Returns the argument bytes of fitting variants, or a report that there is none."""
    placed = inputs.place(layout, with_args=False)
    if placed.errors:
        return {}, [LayoutReport(layout, "rejected", "\n".join(placed.errors))]

    limit = math.inf if limit_bytes is None else limit_bytes
    bytes_of = {
        variant: _under_optimizer_rules(variant, placed.argument_bytes) for variant in variants
    }
    fitting = {
        variant: by_kind for variant, by_kind in bytes_of.items() if sum(by_kind.values()) <= limit
    }
    if fitting or not variants:
        return fitting, []

    least = min(sum(by_kind.values()) for by_kind in bytes_of.values())
    report = LayoutReport(
        layout,
        "rejected",
        f"the arguments alone need {least:,} bytes of a device, which has {limit_bytes:,}",
        argument_bytes=placed.argument_bytes,
        limit_bytes=limit_bytes,
        replicated=placed.replicated,
    )
    return {}, [report]


def _under_optimizer_rules(layout: Layout, argument_bytes: Mapping[str, int]) -> dict[str, int]:
    """Returns the argument bytes of a device, where the optimizer's state has rules of its own."""
    optimizer_bytes = argument_bytes.get("optimizer", 0)
    if not optimizer_bytes:
        return dict(argument_bytes)

    axes = {axis for _, target in layout.optimizer_rules for axis in mesh_axes_of(target)}
    on_device = 0 if layout.optimizer_memory else optimizer_bytes // layout.ways(axes)
    return {**argument_bytes, "optimizer": on_device}
