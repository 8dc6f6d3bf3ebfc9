# SPDX-License-Identifier: Apache-2.0
"""Which assignments of mesh axes are the same, or as good as the same; see ``candidates``.

A *free* name is on no parameter, but on (nearly) every product, and never twice on one: the batch.
Splitting by it needs no exchange but sums of gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.partition.assignment import Names, Target, mesh_axes_of, strings
from shardax.partition.survey import Survey
from shardax.plan.dimensions import Dimensions
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout
from shardax.plan.search_space import SLICE_AXIS, SMALL_SHARE


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
