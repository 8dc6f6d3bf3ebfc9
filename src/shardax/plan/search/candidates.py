# SPDX-License-Identifier: Apache-2.0
"""Candidates: the layouts that a search compiles, and why the others are not worth it.

Of all assignments of mesh axes to groups of names over all meshes, one is a candidate if

- every array can be cut so: sizes divide, and no array uses a mesh axis twice but by priority;
- no other is the same: has the same specs, up to the names and the order of mesh axes, mesh axes of
  size 1, and two axes that always go together. Of equals that one is kept whose rules name the
  fewest mesh axes, and use them in the order of priority of names: the batch has the outermost;
- no other only stores arguments by another dimension. Where a mesh axis splits a *free* name, one
  that is on no parameter, but on every product, and never twice on one (the batch), an argument
  that is split by this axis too is gathered before use, and of which dimension it was hardly
  matters: the one of the earlier name is kept;
- the devices repeat little work: at most 1.05 times what they do in the best candidate;
- its arguments fit into the memory.

The last two are *rejections*, which are kept with their reasons.

Which assignments of mesh axes are the same, or as good as the same; see ``candidates``.

A *free* name is on no parameter, but on (nearly) every product, and never twice on one: the batch.
Splitting by it needs no exchange but sums of gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.partition.inventory import Survey
from shardax.partition.rules import (
    Names,
    Target,
    assign,
    mesh_axes_of,
    strings,
)
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport
from shardax.plan.search.dimensions import Dimensions
from shardax.plan.search.space import SLICE_AXIS, SMALL_SHARE, SearchSpace

# --- Candidates same ---


@dataclass(frozen=True)
class Assigned:
    """An assignment: its layout, the mesh axes of all arrays, and which of equals is kept.

    The one with fewer axes, whose axes are used in the order of priority of names.
    """

    layout: Layout
    entries: tuple[tuple[Target, ...], ...]
    order: tuple[int, ...]


def identity(assigned: Assigned) -> Any:
    """Equal for assignments with the same specs up to names, order and merging of mesh axes."""
    sizes = {axis: size for axis, size in assigned.layout.mesh if size > 1}
    entries = [[mesh_axes_of(target) for target in each] for each in assigned.entries]
    used = {axis for each in entries for axes in each for axis in axes}
    tokens: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in sizes if axis in used}
    idle = tuple(sorted(size for axis, size in sizes.items() if axis not in used))
    for one, other in itertools.pairwise([axis for axis in sizes if axis in used]):
        if SLICE_AXIS not in (one, other) and _always_together(entries, one, other):
            tokens[other] = (*tokens.pop(one), other)
    merged = {axes[-1]: math.prod(sizes[a] for a in axes) for axes in tokens.values()}
    kept = [[tuple(a for a in axes if a in merged) for axes in each] for each in entries]
    forms = []
    for order in itertools.permutations(merged):
        number = {axis: position for position, axis in enumerate(order)}
        numbered = tuple(
            tuple(tuple(sorted(number[a] for a in axes)) for axes in each) for each in kept
        )
        forms.append((tuple((merged[a], a == SLICE_AXIS) for a in order), numbered))
    return idle, min(forms)


def _always_together(entries: list[list[tuple[str, ...]]], one: str, other: str) -> bool:
    for each in entries:
        for axes in each:
            if (one in axes) != (other in axes):
                return False
    return True


def free_names(dimensions: Dimensions, inputs: Inputs) -> frozenset[str]:
    """Names on no parameter, on (nearly) every product, and never twice on one."""
    total = dimensions.flops
    found: set[str] = set()
    stored = set(_names_of(inputs, ("parameters", "optimizer")))
    for name in (name for name in dimensions.names if name not in stored):
        on = [[d for d in p.dims if name in d.names] for p in dimensions.products]
        covered = sum(p.flops for p, d in zip(dimensions.products, on, strict=True) if d)
        if total and covered >= 0.99 * total and all(len(d) <= 1 for d in on):
            found.add(name)
    return frozenset(found)


def large_arguments(dimensions: Dimensions) -> list[bool]:
    """Which arguments have more than a hundredth of all elements."""
    elements = [math.prod(shape) for shape, _ in dimensions.arguments]
    return [count > SMALL_SHARE * sum(elements) for count in elements]


def stored_alike(
    assigned: Assigned,
    arrays: Sequence[tuple[tuple[int, ...], Names]],
    large: Sequence[bool],
    free: frozenset[str],
) -> Any:
    """Equal for assignments that differ at most in the dimensions that arguments are stored by."""
    axes_of = {name: mesh_axes_of(target) for name, target in assigned.layout.rules}
    of_free = {axis for name in free for axis in axes_of.get(name, ())}
    names = tuple((n, tuple(a for a in axes if a not in of_free)) for n, axes in axes_of.items())
    held = tuple((name, axes_of[name]) for name in sorted(free) if name in axes_of)
    arguments = assigned.entries[len(arrays) - len(large) :]
    stored = tuple(
        frozenset(axis for target in each for axis in mesh_axes_of(target) if axis in of_free)
        for each, counts in zip(arguments, large, strict=True)
        if counts
    )
    return assigned.layout.mesh, names, held, stored


def names_of_batch(inputs: Inputs) -> Iterable[str]:
    """Names on arguments of the kind ``"batch"``."""
    return _names_of(inputs, ("batch",))


def _names_of(inputs: Inputs, kinds: Sequence[str]) -> Iterable[str]:
    for slot, kind in zip(Survey(inputs.tree).slots, inputs.kinds, strict=True):
        if kind in kinds:
            for info in slot.arrays:
                yield from strings(slot.names_of(info) or ())


# --- Candidates ---

MOST_REPEATED = 1.05
"""How much more work than in the best candidate devices may do."""


@dataclass(frozen=True)
class Candidates:
    """What is to be compiled."""

    layouts: tuple[Layout, ...]  # the candidates, in order of meshes and names
    repeating: tuple[LayoutReport, ...]  # reports of those rejected because they repeat work
    # reports of those rejected because their arguments do not fit
    too_large: tuple[LayoutReport, ...]
    tried: int  # how many assignments there were
    distinct: int  # how many of them were possible and different from each other

    @property
    def rejected(self) -> tuple[LayoutReport, ...]:
        """Reports of all that were rejected."""
        return (*self.repeating, *self.too_large)


def find_candidates(
    dimensions: Dimensions,
    space: SearchSpace,
    inputs: Inputs,
    limit_bytes: int | None,
    *,
    most_repeated: float = MOST_REPEATED,
) -> Candidates:
    """Enumerates a search space and takes out what need not be compiled."""
    arrays = tuple(dict.fromkeys((*dimensions.constraints, *dimensions.arguments)))
    large = large_arguments(dimensions)
    free = free_names(dimensions, inputs)
    kept: dict[Any, Assigned] = {}
    tried = 0
    for assigned in _assignments(dimensions, space, arrays, free):
        tried += 1
        if assigned is None:
            continue
        key = identity(assigned)
        if key not in kept or assigned.order < kept[key].order:
            kept[key] = assigned
    by_storage: dict[Any, Assigned] = {}
    for assigned in kept.values():
        key = stored_alike(assigned, arrays, large, free)
        if key not in by_storage or assigned.order < by_storage[key].order:
            by_storage[key] = assigned
    found = sorted(by_storage.values(), key=lambda a: (space.meshes.index(a.layout.mesh), a.order))
    layouts, repeating = _filtered([a.layout for a in found], dimensions, most_repeated)
    layouts, too_large = _by_memory(layouts, inputs, limit_bytes)
    return Candidates(tuple(layouts), tuple(repeating), tuple(too_large), tried, len(found))


# --- what can be ----------------------------------------------------------------------------------


def _assignments(
    dimensions: Dimensions,
    space: SearchSpace,
    arrays: Sequence[tuple[tuple[int, ...], Names]],
    free: frozenset[str],
) -> Iterator[Assigned | None]:
    """Yields every assignment, or None for one that cannot be."""
    sizes_of = {name: dimensions.sizes_of(name) for name in dimensions.names}
    for mesh in space.meshes:
        sizes = dict(mesh)
        choices = [_targets(mesh, inner_only=not set(group) & free) for group in space.groups]
        for chosen in itertools.product(*choices):
            rules = dict(space.fixed)
            whole = False
            for group, target in zip(space.groups, chosen, strict=True):
                ways = math.prod(sizes[axis] for axis in mesh_axes_of(target))
                split = [n for n in group if all(size % ways == 0 for size in sizes_of[n])]
                whole |= not split
                rules.update({name: target if name in split else None for name in group})
            yield None if whole else _assigned(dimensions, space, mesh, rules, chosen, arrays)


def _targets(mesh: tuple[tuple[str, int], ...], inner_only: bool) -> list[Target]:
    """None, each mesh axis, and all of several in the order of the mesh."""
    axes = [axis for axis, size in mesh if size > 1 and not (inner_only and axis == SLICE_AXIS)]
    found: list[Target] = [None]
    for count in range(1, len(axes) + 1):
        for several in itertools.combinations(axes, count):
            found.append(several[0] if count == 1 else several)
    return found


def _assigned(
    dimensions: Dimensions,
    space: SearchSpace,
    mesh: tuple[tuple[str, int], ...],
    rules: dict[str, Target],
    chosen: Sequence[Target],
    arrays: Sequence[tuple[tuple[int, ...], Names]],
) -> Assigned | None:
    sizes = dict(mesh)
    searched = [name for group in space.groups for name in group]
    last = [name for name in dimensions.names if name not in searched]
    pairs = tuple((name, rules[name]) for name in [*searched, *last])
    entries = []
    for shape, names in arrays:
        found = assign(names, pairs).entries
        for size, target in zip(shape, found, strict=True):
            if size % math.prod(sizes.get(axis, 1) for axis in mesh_axes_of(target)):
                return None
        entries.append(found)
    places = {axis: position for position, axis in enumerate(sizes)}
    axes = [[places[axis] for axis in mesh_axes_of(target)] for target in chosen]
    first = [each[0] if each else len(places) for each in axes]
    name = _name(dimensions, space, mesh, chosen)
    return Assigned(Layout(name, pairs, mesh), tuple(entries), (sum(map(len, axes)), *first))


def _name(
    dimensions: Dimensions,
    space: SearchSpace,
    mesh: tuple[tuple[str, int], ...],
    chosen: Sequence[Target],
) -> str:
    """Such as ``batch=data mlp=model (8x2)``; a group is called by the name with most work."""
    work: dict[str, float] = {}
    for product in dimensions.products:
        for name in {name for dim in product.dims for name in dim.names}:
            work[name] = work.get(name, 0.0) + product.flops
    parts = []
    for group, target in zip(space.groups, chosen, strict=True):
        if target is not None:
            lead = max(group, key=lambda name: (work.get(name, 0.0), -group.index(name)))
            parts.append(f"{lead}={'+'.join(mesh_axes_of(target))}")
    sizes = "x".join(str(size) for _, size in mesh)
    return f"{' '.join(parts) or 'replicated'} ({sizes})"


# --- what is not worth it -------------------------------------------------------------------------


def _filtered(
    layouts: Sequence[Layout], dimensions: Dimensions, most_repeated: float
) -> tuple[list[Layout], list[LayoutReport]]:
    factors = [dimensions.replicated_compute(each.as_rules, each.sizes) for each in layouts]
    best = min(factors, default=1.0)
    kept: list[Layout] = []
    rejected: list[LayoutReport] = []
    for layout, factor in zip(layouts, factors, strict=True):
        if factor <= most_repeated * best * (1 + 1e-9):
            kept.append(layout)
            continue
        reason = (
            f"the devices would do each operation at least {factor:.2f} times, and "
            f"{best:.2f} times in the best candidates"
        )
        rejected.append(LayoutReport(layout, "rejected", reason))
    return kept, rejected


def _by_memory(
    layouts: Sequence[Layout], inputs: Inputs, limit_bytes: int | None
) -> tuple[list[Layout], list[LayoutReport]]:
    kept: list[Layout] = []
    rejected: list[LayoutReport] = []
    for layout in layouts:
        placed = inputs.place(layout)
        total = sum(placed.argument_bytes.values())
        if placed.errors:
            rejected.append(LayoutReport(layout, "rejected", "\n".join(placed.errors)))
        elif limit_bytes is not None and total > limit_bytes:
            reason = (
                f"the arguments alone need {total:,} bytes of a device, which has {limit_bytes:,}"
            )
            rejected.append(
                LayoutReport(
                    layout,
                    "rejected",
                    reason,
                    argument_bytes=placed.argument_bytes,
                    limit_bytes=limit_bytes,
                    replicated=placed.replicated,
                )
            )
        else:
            kept.append(layout)
    return kept, rejected
