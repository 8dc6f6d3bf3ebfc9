# SPDX-License-Identifier: Apache-2.0
"""Assignment: which dimension of one array gets which mesh axes.

A *name* is the logical name of a dimension (``"embed"``); a *rule* is a pair of a name and a
*target*: one mesh axis, a tuple of mesh axes, ``None`` (replicate) or
``PartitionSpec.UNCONSTRAINED`` (leave it to the compiler). Rules stand in order of priority, and
one array can use a mesh axis only once. So the rules are walked once, in order, and a rule is
*chosen* when its name occurs in the array, that name has no chosen rule yet, and every mesh axis of
its target is still free. A rule whose name is waiting but whose target is (even partly) taken is
*passed over*; a later rule for the same name may then be chosen. These are the semantics of Flax
linen's logical axes.

Beyond linen, one dimension may carry a tuple of names, ``(("batch", "length"), "embed")``: it was
made by merging named dimensions, and is laid out over the mesh axes of all of them, in that order.

This file knows nothing of meshes and policies: it reports what happened and others judge it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from shardax.core.errors import AxisNamesError

UNCONSTRAINED: Any = PartitionSpec.UNCONSTRAINED

Target = Any
"""``str``, ``tuple[str, ...]``, None or ``UNCONSTRAINED`` (whose type JAX does not publish)."""

Rule = tuple[str, Target]
Names = tuple[Any, ...]
"""One entry per dimension: a name, None, ``UNCONSTRAINED``, or a tuple of names."""


class PassedOver(NamedTuple):
    """A rule that could not be chosen, because an earlier choice had taken one of its mesh axes.

    Attributes:
        rule: The rule that was passed over; ``rule[0]`` is the name that went without.
        mesh_axis: The first of its mesh axes that was taken.
        winner: The chosen rule that holds that mesh axis.
    """

    rule: Rule
    mesh_axis: str
    winner: Rule


class Assignment(NamedTuple):
    """What the rules make of one array's names.

    Attributes:
        entries: One ``PartitionSpec`` entry per dimension.
        chosen: For each name that got a rule, the position of that rule among the rules.
        passed_over: The rules that came too late for a mesh axis, in order.
        unmapped: The names that no rule mentions, in order of dimensions.
    """

    entries: tuple[Target, ...]
    chosen: dict[str, int]
    passed_over: tuple[PassedOver, ...]
    unmapped: tuple[str, ...]

    @property
    def spec(self) -> PartitionSpec:
        """The entries as a ``PartitionSpec``."""
        return PartitionSpec(*self.entries)


def mesh_axes_of(target: Target) -> tuple[str, ...]:
    """Lists the mesh axes of a rule's target or of one ``PartitionSpec`` entry.

    Args:
        target: A mesh axis, a tuple of them, None or ``UNCONSTRAINED``.

    Returns:
        The mesh axes, major to minor; ``()`` for None and ``UNCONSTRAINED``.

    Example:
        >>> mesh_axes_of(("data", "model")), mesh_axes_of("data"), mesh_axes_of(None)
        (('data', 'model'), ('data',), ())
    """
    if isinstance(target, str):
        return (target,)
    return target if isinstance(target, tuple) else ()


def format_target(target: Target) -> str:
    """Formats a target as a user would type it."""
    return "PartitionSpec.UNCONSTRAINED" if target is UNCONSTRAINED else repr(target)


def format_rule(rule: Rule) -> str:
    """Formats a rule as the pair a user would type."""
    return f"({rule[0]!r}, {format_target(rule[1])})"


def check_names(names: Iterable[Any]) -> Names:
    """Returns ``names`` as a tuple after checking each entry.

    Args:
        names: One entry per dimension: a string, None, ``UNCONSTRAINED``, or a tuple of strings.

    Returns:
        The names; lists inside become tuples.

    Raises:
        AxisNamesError: If ``names`` is no sequence of entries, an entry is of another type, or a
            name occurs twice.

    Example:
        >>> check_names(["embed", None])
        ('embed', None)
    """
    if isinstance(names, str):
        raise AxisNamesError(
            f"Axis names {names!r} are one string; give one name per dimension: ({names!r},)."
        )
    if not isinstance(names, Iterable):
        raise AxisNamesError(
            f"Axis names are {names!r} of type {type(names).__name__}; give one entry per "
            "dimension, for instance ('embed', 'mlp')."
        )
    entries = tuple(tuple(name) if isinstance(name, list) else name for name in names)
    for position, entry in enumerate(entries):
        parts = entry if isinstance(entry, tuple) else (entry,)
        merged = isinstance(entry, tuple)
        if not all(isinstance(part, str) or (not merged and _is_blank(part)) for part in parts):
            raise AxisNamesError(
                f"Axis names {entries}: entry {position} is {entry!r} of type "
                f"{type(entry).__name__}. An entry is a string, None (unnamed), "
                "PartitionSpec.UNCONSTRAINED, or a tuple of strings for a merged dimension."
            )
    flat = list(strings(entries))
    repeated = sorted({name for name in flat if flat.count(name) > 1})
    if repeated:
        raise AxisNamesError(
            f"Axis names {entries} hold {', '.join(map(repr, repeated))} more than once. Rules map "
            "a name to mesh axes, and one array can use a mesh axis only once. Name the "
            f"dimensions apart, for instance {repeated[0] + '_in'!r} and {repeated[0] + '_out'!r}, "
            "or use None for the dimension to replicate."
        )
    return entries


@lru_cache(maxsize=4096)
def assign(names: Names, rules: tuple[Rule, ...]) -> Assignment:
    """Walks the rules once and chooses mesh axes for every dimension.

    Semantics of ``flax.linen.logical_to_mesh_axes`` (see the module docstring).

    Args:
        names: Checked names, one entry per dimension (see ``check_names``).
        rules: Pairs of a name and a target, highest priority first.

    Returns:
        The assignment; callers must not change its ``chosen``.

    Example:
        >>> rules = (("batch", "x"), ("features", "x"), ("heads", "y"), ("batch", "z"))
        >>> assign(("batch", "length", "heads", "features"), rules).entries
        ('x', None, 'y', None)
    """
    waiting = dict.fromkeys(strings(names))
    unmapped = tuple(name for name in waiting if all(rule[0] != name for rule in rules))
    chosen: dict[str, int] = {}
    holder: dict[str, Rule] = {}
    passed_over: list[PassedOver] = []
    for position, rule in enumerate(rules):
        name, target = rule
        if name not in waiting:
            continue
        wanted = mesh_axes_of(target)
        taken = next((axis for axis in wanted if axis in holder), None)
        if taken is not None:
            passed_over.append(PassedOver(rule, taken, holder[taken]))
            continue
        del waiting[name]
        chosen[name] = position
        holder.update(dict.fromkeys(wanted, rule))
    targets = {name: rules[position][1] for name, position in chosen.items()}
    entries = tuple(_entry(name, targets) for name in names)
    return Assignment(entries, chosen, tuple(passed_over), unmapped)


def _entry(name: Any, targets: dict[str, Target]) -> Target:
    """The ``PartitionSpec`` entry of one dimension, given the target of every name that has one."""
    if isinstance(name, str):
        return targets.get(name)
    if not isinstance(name, tuple):
        return name
    parts = [targets.get(part) for part in name]
    if any(part is UNCONSTRAINED for part in parts):
        return UNCONSTRAINED
    axes = tuple(axis for part in parts for axis in mesh_axes_of(part))
    return axes or None


def _is_blank(entry: Any) -> bool:
    return entry is None or entry is UNCONSTRAINED


def strings(names: Names) -> Iterable[str]:
    """Iterates over the logical names, those of merged dimensions one by one."""
    for entry in names:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, tuple):
            yield from entry
