# SPDX-License-Identifier: Apache-2.0
"""States in boxes: arrays that an optimizer keeps in the box of a parameter, in another shape.

An optimizer makes its state by mapping over boxed parameters, so each of its arrays is in a box
with the parameter's names. Most have the parameter's shape as well, and the names hold. Some have
not: row and column statistics (Adafactor) lack a dimension, a history has one more, and where there
is nothing to keep stands an array of one number. A *reduced state* is a box whose names fail to fit
its array, while those of its *owner* fit: another box of the tree that is alike in everything but
the value, and whose path is shorter and ends in the same steps (``params.layers.up`` and
``opt[0].v_row.layers.up``; for a parameter at the top, the sizes must be among its own).

Its dimensions are those of the owner that its sizes tell apart; if they do not, it is replicated.
Either is said in a finding, ``reduced-state``. Without an owner in the tree the names are an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardax.core.paths import Path, format_path
from shardax.partition.findings import Finding
from shardax.partition.survey import Slot


class ReducedState(NamedTuple):
    """A reduced state: its slot with the names that fit, or None, and what there is to say."""

    slot: Slot
    finding: Finding


def dimensions_of_state(
    shape: tuple[int, ...], parameter: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """Says which dimension of a parameter each dimension of an optimizer's state is.

    Three forms occur: the parameter's shape; leading dimensions before it (a history); and one
    dimension less (row and column statistics), where the missing one must be clear from the sizes.

    Args:
        shape: The state's shape.
        parameter: The parameter's.

    Returns:
        For each dimension that of the parameter, or None if it is new; None if it is unclear.

    Example:
        >>> dimensions_of_state((8,), (8, 16)), dimensions_of_state((5, 8, 16), (8, 16))
        ((0,), (None, 0, 1))
        >>> dimensions_of_state((8,), (8, 8)) is None
        True
    """
    extra = len(shape) - len(parameter)
    if extra >= 0 and shape[extra:] == parameter:
        return (*((None,) * extra), *range(len(parameter)))
    if extra != -1:
        return None
    positions = range(len(parameter))
    fits = [p for p in positions if (*parameter[:p], *parameter[p + 1 :]) == shape]
    return tuple(p for p in positions if p != fits[0]) if len(fits) == 1 else None


def states_of_boxes(slots: Sequence[Slot], findings: Sequence[Finding]) -> dict[int, ReducedState]:
    """Finds the reduced states among the slots of a tree.

    Args:
        slots: The slots.
        findings: What was found when all boxes were laid out by their names.

    Returns:
        By position of the slot.
    """
    wrong = {finding.path for finding in findings if finding.severity == "error"}
    misfits = {f.path for f in findings if f.code in ("rank-mismatch", "indivisible")}
    if not misfits:
        return {}
    owners = _Owners(
        slot
        for slot in slots
        if slot.box is not None and len(slot.arrays) == 1 and not _paths(slot) & wrong
    )
    found = {}
    for position, slot in enumerate(slots):
        if slot.box is None or not _paths(slot) & misfits:
            continue
        owner = owners.of(slot)
        if owner is not None and all(
            len(info.shape) != len(owner.arrays[0].shape) or math.prod(info.shape) == 1
            for info in slot.arrays
            if info.path in misfits
        ):
            found[position] = _reduced(slot, owner)
    return found


def with_hints(findings: Sequence[Finding], slots: Sequence[Slot]) -> list[Finding]:
    """Returns findings, those about the rank of what is in a box with a word on states."""
    boxed = {path for slot in slots if slot.box is not None for path in _paths(slot)}
    hint = (
        " If this is a state of an optimizer, give the parameters in the same tree, such as "
        "(params, state): they tell which dimensions it has."
    )
    return [
        dataclasses.replace(finding, message=finding.message + hint)
        if finding.code == "rank-mismatch" and finding.path in boxed
        else finding
        for finding in findings
    ]


def _paths(slot: Slot) -> set[Path]:
    return {info.path for info in slot.arrays}


class _Owners:
    """The boxes that may own others, by the ends of their paths."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._by_end: dict[Path, list[Slot]] = {}
        for slot in slots:
            for start in range(len(slot.path) + 1):
                self._by_end.setdefault(slot.path[start:], []).append(slot)

    def of(self, slot: Slot) -> Slot | None:
        """Returns the owner, if one is nearest by its path, or several that are of one shape."""
        for start in range(len(slot.path) + 1):
            end = slot.path[start:]
            near = [other for other in self._by_end.get(end, ()) if _may_own(other, slot, end)]
            if near:
                alike = {other.arrays[0].shape for other in near}
                return near[0] if len(alike) == 1 else None
        return None


def _may_own(owner: Slot, slot: Slot, end: Path) -> bool:
    if len(owner.path) >= len(slot.path) or owner.box != slot.box:
        return False
    return bool(end) or (len(owner.path) <= 1 and _is_made_of(slot, owner))


def _is_made_of(slot: Slot, owner: Slot) -> bool:
    """Whether all sizes are sizes of the owner, where no step of the paths says that it is one."""
    sizes = set(owner.arrays[0].shape)
    return all(sizes.issuperset(info.shape) or math.prod(info.shape) == 1 for info in slot.arrays)


def _reduced(slot: Slot, owner: Slot) -> ReducedState:
    parameter = owner.arrays[0].shape
    shapes = {info.shape for info in slot.arrays}
    shape = next(iter(shapes))
    dims = dimensions_of_state(shape, parameter) if len(shapes) == 1 else None
    names: Any = None
    if dims is not None:
        given = owner.names_of(owner.arrays[0])
        names = tuple(None if dim is None else given[dim] for dim in dims)
    how = "it is replicated" if names is None else f"it is laid out by the names {names}"
    text = (
        f"{format_path(slot.path)}: its box has the names {tuple(slot.axes)} of the parameter "
        f"{format_path(owner.path)}, shape {parameter}, but shape {shape}; {how}. If that is no "
        "state of an optimizer, give one name per dimension of its own."
    )
    severity = "info" if names is not None or math.prod(shape) == 1 else "warning"
    return ReducedState(
        slot._replace(axes=names), Finding(severity, slot.path, "reduced-state", text)
    )
