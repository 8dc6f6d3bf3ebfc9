# SPDX-License-Identifier: Apache-2.0
"""Findings: what there is to say about the layout of one array.

A *finding* is one thing worth knowing about a layout: an ``"error"`` (the layout cannot be), a
``"warning"`` (it can, but hardly as meant) or ``"info"``. Its ``code`` names the kind:

* ``axis-names``: error; names malformed, or a name twice in one array.
* ``rank-mismatch``: error; not one name per dimension.
* ``unknown-mesh-axis``: error; a rule names a mesh axis that the mesh does not have.
* ``indivisible``: error; a dimension cannot be cut into equal parts.
* ``mesh-axis-conflict``: a rule came too late for a mesh axis. Error under ``on_conflict="error"``;
  else warning if its name ends without a rule, info if a later rule served it.
* ``unmapped-name``: no rule mentions a name. Error under ``on_unmapped="error"``; else a warning,
  and only for a name that looks like one that has a rule.
* ``unconstrained``: warning; ``UNCONSTRAINED`` where an array is placed.
* ``unused-rule``: info; a rule was chosen for no array. Warning if its name looks misspelt.
* ``large-replicated``: warning; a large array is held whole by every device.

The last two concern many arrays together and are made in ``shardax.partition.check``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardax.core.paths import Path, format_path
from shardax.partition.assignment import UNCONSTRAINED, Assignment, Names, mesh_axes_of
from shardax.partition.rules import (
    Rules,
    explain_conflicts,
    explain_unmapped,
    format_rule,
)

Severity = Literal["error", "warning", "info"]

NEAR = 0.85  # difflib ratio: "embd" is near "embed" (0.89), "kv_heads" is not near "heads" (0.77)


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about a layout; ``str()`` gives the message.

    Attributes:
        severity: ``"error"``, ``"warning"`` or ``"info"``.
        path: Where the array is; ``()`` for a finding about the rules as a whole.
        code: The kind of finding (see the module docstring).
        message: What was found, where, why it matters and what to do.

    Example:
        >>> finding = Finding("error", ("up", "kernel"), "indivisible", ".up.kernel: size 30 ...")
        >>> print(finding)
        .up.kernel: size 30 ...
    """

    severity: Severity
    path: Path
    code: str
    message: str

    def __str__(self) -> str:
        return self.message


class LaidOutArray(NamedTuple):
    """One array whose names are sound, with what the rules make of it; may hold errors still."""

    path: Path
    names: Names
    shape: tuple[int, ...]
    assignment: Assignment
    rules: Rules

    def finding(self, severity: Severity, code: str, text: str) -> Finding:
        return Finding(severity, self.path, code, f"{format_path(self.path)}: {text}")


def judge(array: LaidOutArray, mesh_sizes: Mapping[str, int] | None) -> list[Finding]:
    """Returns all findings about one array.

    Args:
        array: The array, and what the rules make of it.
        mesh_sizes: Mesh axis to size, or None to judge the rules alone.
    """
    findings = [*_unmapped(array), *_conflicts(array), *_unconstrained(array)]
    if mesh_sizes is not None:
        findings += [
            *_unknown_mesh_axes(array, mesh_sizes),
            *_indivisible(array, mesh_sizes),
        ]
    return findings


def _chosen_rules(array: LaidOutArray, dimension: int) -> str:
    """The rules behind one dimension, as text."""
    name = array.names[dimension]
    parts = name if isinstance(name, tuple) else (name,)
    chosen = array.assignment.chosen
    rules = [format_rule(array.rules.pairs[chosen[part]]) for part in parts if part in chosen]
    return f"{'rule' if len(rules) == 1 else 'rules'} {', '.join(rules)}"


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Formats mesh axes with their sizes, as ``(data=2, model=4)``."""
    return "(" + ", ".join(f"{axis}={size}" for axis, size in sizes.items()) + ")"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the most similar of the known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _unmapped(array: LaidOutArray) -> Iterable[Finding]:
    unmapped = array.assignment.unmapped
    if not unmapped:
        return
    if array.rules.on_unmapped == "error":
        text = explain_unmapped(array.assignment, array.rules)
        yield array.finding("error", "unmapped-name", text)
        return
    for name in unmapped:
        near = difflib.get_close_matches(name, array.rules.names, n=1, cutoff=NEAR)
        if near and near[0] not in array.names:
            text = (
                f"no rule mentions the axis name {name!r}, so its dimension is not split, but "
                f"there are rules for {near[0]!r}. If one of the two is misspelt, correct it; if "
                f"not, say so with the rule ({name!r}, None)."
            )
            yield array.finding("warning", "unmapped-name", text)


def _conflicts(array: LaidOutArray) -> Iterable[Finding]:
    assignment = array.assignment
    if not assignment.passed_over:
        return
    if array.rules.on_conflict == "error":
        yield array.finding("error", "mesh-axis-conflict", explain_conflicts(assignment))
        return
    for loss in assignment.passed_over:
        name = loss.rule[0]
        text = (
            f"the rule {format_rule(loss.rule)} was passed over, because mesh axis "
            f"{loss.mesh_axis!r} already splits {loss.winner[0]!r} of the same array by "
            f"{format_rule(loss.winner)}; "
        )
        if name in assignment.chosen:
            rescue = format_rule(array.rules.pairs[assignment.chosen[name]])
            text += f"the later rule {rescue} was used for {name!r}."
            yield array.finding("info", "mesh-axis-conflict", text)
        else:
            text += (
                f"{name!r} is not split at all. If that is not meant, add a later rule for "
                f"{name!r} with another mesh axis; if it is, add ({name!r}, None)."
            )
            yield array.finding("warning", "mesh-axis-conflict", text)


def _unconstrained(array: LaidOutArray) -> Iterable[Finding]:
    for dimension, target in enumerate(array.assignment.entries):
        if target is UNCONSTRAINED:
            text = (
                f"dimension {dimension} is UNCONSTRAINED (names {array.names}). The "
                "compiler can choose a layout inside a program only, not where an array is "
                "placed, so the dimension is not split. Name a mesh axis or None."
            )
            yield array.finding("warning", "unconstrained", text)


def _unknown_mesh_axes(array: LaidOutArray, sizes: Mapping[str, int]) -> Iterable[Finding]:
    for dimension, target in enumerate(array.assignment.entries):
        for axis in mesh_axes_of(target):
            if axis not in sizes:
                text = (
                    f"dimension {dimension} ({array.names[dimension]!r}) is to be split over mesh "
                    f"axis {axis!r} by {_chosen_rules(array, dimension)}, but the mesh has the "
                    f"axes {format_mesh(sizes)}.{did_you_mean(axis, sizes)} Correct the rule, or "
                    f"make the mesh with an axis {axis!r} (of size 1 to switch it off)."
                )
                yield array.finding("error", "unknown-mesh-axis", text)


def _indivisible(array: LaidOutArray, sizes: Mapping[str, int]) -> Iterable[Finding]:
    for dimension, target in enumerate(array.assignment.entries):
        axes = [axis for axis in mesh_axes_of(target) if axis in sizes]
        parts = math.prod(sizes[axis] for axis in axes)
        size = array.shape[dimension]
        if size % parts:
            product = " * ".join(f"{axis} = {sizes[axis]}" for axis in axes)
            low, high = size // parts * parts, -(-size // parts) * parts
            better = f"{low} or {high}" if low else f"{high}"
            text = (
                f"dimension {dimension} ({array.names[dimension]!r}) has size {size}, which is not "
                f"divisible by {parts}, the number of parts it is to be cut into (mesh axes "
                f"{product}, {_chosen_rules(array, dimension)}). All devices must hold equal "
                f"parts. Make the size {better}, or split by fewer mesh axes, or not at all, by "
                "rules to None."
            )
            yield array.finding("error", "indivisible", text)
