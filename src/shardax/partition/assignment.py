# SPDX-License-Identifier: Apache-2.0
"""Assignment: the mesh axes that rules give to the names of one array.

A *rule* is a pair of the logical name of a dimension (``"embed"``) and a *target*: a mesh axis, a
tuple of mesh axes (the first varying slowest), None (replicate, on purpose), or
``PartitionSpec.UNCONSTRAINED`` (leave it to the compiler). One array uses a mesh axis only once.

``assign`` walks the rules once, in order of priority:

1. A rule whose name does not occur in the array is skipped. So is a rule whose name already has a
   chosen rule: it takes no mesh axis, and nothing is reported of this array.
2. If any mesh axis of its target belongs to an earlier chosen rule, the rule is *passed over*. Its
   name waits for a later rule.
3. Otherwise the rule is *chosen*: its name gets the target, and nobody else its mesh axes.

A name without any rule is *unmapped*. An unmapped name and a name that went without a mesh axis are
not split. These are the semantics of Flax linen's logical axes. Beyond linen, a dimension may carry
a tuple of names, ``(("batch", "length"), "embed")``: it was made by merging named dimensions, and
is laid out over the mesh axes of all of them, in that order.

Example:
    >>> rules = (("embed", "data"), ("embed", "model"), ("mlp", "model"))
    >>> assign(("mlp", "embed"), rules).entries
    ('model', 'data')
    >>> assign(("mlp", "embed"), (("embed", "model"), ("mlp", "model"))).entries
    (None, 'model')
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

# JAX does not publish the type of this object, which may stand for any entry below.
UNCONSTRAINED: Any = PartitionSpec.UNCONSTRAINED

SpecEntry = str | tuple[str, ...] | None
"""The mesh axes of one dimension: one, several, none, or ``UNCONSTRAINED``."""

DimensionName = str | tuple[str, ...] | None
"""A name, the names of a merged dimension, None or ``UNCONSTRAINED``."""

Rule = tuple[str, SpecEntry]
Names = tuple[DimensionName, ...]
"""One entry per dimension."""


class PassedOver(NamedTuple):
    """A rule passed over for want of a mesh axis."""

    rule: Rule  # ``rule[0]`` is the name that went without
    mesh_axis: str  # the first of its mesh axes that was taken
    winner: Rule  # the chosen rule that holds that mesh axis


class AxisAssignment(NamedTuple):
    """The mesh axes of one array's names, by rules."""

    entries: tuple[SpecEntry, ...]  # one per dimension
    chosen: dict[str, int]  # for each name that got a rule, the rule's position
    passed_over: tuple[PassedOver, ...]
    unmapped: tuple[str, ...]  # names without a rule, in order of dimensions


@functools.lru_cache(maxsize=4096)
def assign(names: Names, rules: tuple[Rule, ...]) -> AxisAssignment:
    """Returns the ``AxisAssignment`` of checked names, by rules of descending priority."""
    waiting = list(dict.fromkeys(strings(names)))
    names_with_rules = {name for name, _ in rules}
    unmapped = tuple(name for name in waiting if name not in names_with_rules)

    chosen: dict[str, int] = {}
    holders: dict[str, Rule] = {}  # the chosen rule that has a mesh axis
    passed_over: list[PassedOver] = []
    for position, rule in enumerate(rules):
        name, target = rule
        if name not in waiting:
            continue

        mesh_axes = mesh_axes_of(target)
        held_axes = [axis for axis in mesh_axes if axis in holders]
        if held_axes:
            axis = held_axes[0]
            passed_over.append(PassedOver(rule, axis, holders[axis]))
            continue

        waiting.remove(name)
        chosen[name] = position
        holders.update(dict.fromkeys(mesh_axes, rule))

    targets = {name: rules[position][1] for name, position in chosen.items()}
    entries = tuple(_entry_of_dimension(name, targets) for name in names)
    return AxisAssignment(entries, chosen, tuple(passed_over), unmapped)


def _entry_of_dimension(name: DimensionName, targets: Mapping[str, SpecEntry]) -> SpecEntry:
    """Returns the spec's entry of one dimension, by the targets of chosen rules."""
    if isinstance(name, str):
        return targets.get(name)
    if not isinstance(name, tuple):
        return name  # None or UNCONSTRAINED

    # A merged dimension has the mesh axes of all its names.
    targets_of_names = [targets.get(each) for each in name]
    if UNCONSTRAINED in targets_of_names:
        return UNCONSTRAINED
    return tuple(axis for target in targets_of_names for axis in mesh_axes_of(target)) or None


def mesh_axes_of(entry: SpecEntry) -> tuple[str, ...]:
    """Returns the mesh axes of a rule's target or ``PartitionSpec`` entry, major to minor."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def strings(names: Iterable[Hashable]) -> Iterator[str]:
    """Yields the logical names, those of merged dimensions one by one."""
    for entry in names:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, tuple):
            yield from strings(entry)


def format_target(target: SpecEntry) -> str:
    """Returns a target as in source code."""
    return "PartitionSpec.UNCONSTRAINED" if target is UNCONSTRAINED else repr(target)


def format_rule(rule: Rule) -> str:
    """Returns a rule as in source code."""
    return f"({rule[0]!r}, {format_target(rule[1])})"
