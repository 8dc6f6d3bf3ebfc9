# SPDX-License-Identifier: Apache-2.0
"""Judging one array: what there is to say about what the rules make of its names.

The findings and their codes are defined in ``shardax.partition.findings``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jax.sharding import AxisType

from shardax.core.paths import Path, format_path
from shardax.partition.assignment import (
    UNCONSTRAINED,
    Assignment,
    Names,
    Target,
    format_rule,
    mesh_axes_of,
)
from shardax.partition.findings import NEAR, Finding, Severity, did_you_mean, format_mesh
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules, explain_conflicts, explain_unmapped


class LaidOutArray(NamedTuple):
    """One array whose names are sound, with what the rules make of it; may hold errors still."""

    path: Path
    names: Names
    shape: tuple[int, ...]
    assignment: Assignment
    rules: Rules

    def finding(self, severity: Severity, code: str, text: str) -> Finding:
        return Finding(severity, self.path, code, f"{format_path(self.path)}: {text}")


def judge(array: LaidOutArray, mesh: AnyMesh | None) -> list[Finding]:
    """Returns all findings about one array.

    Args:
        array: The array, and what the rules make of it.
        mesh: The mesh, or None to judge the rules alone.
    """
    findings = [*_unmapped(array), *_conflicts(array), *_unconstrained(array)]
    if mesh is not None:
        sizes = dict(mesh.shape)
        findings += [
            *_unknown_mesh_axes(array, sizes),
            *_indivisible(array, sizes),
            *_axis_type_order(array, mesh),
        ]
    return findings


def _chosen_rules(array: LaidOutArray, dimension: int) -> str:
    """The rules behind one dimension, as text; of a box of mesh axes, whose names are the rules."""
    name = array.names[dimension]
    parts = name if isinstance(name, tuple) else (name,)
    chosen = array.assignment.chosen
    rules = [array.rules.pairs[chosen[part]] for part in parts if part in chosen]
    if all(rule[0] == rule[1] for rule in rules):
        return f"its own {'name' if len(rules) == 1 else 'names'}"
    return f"{'rule' if len(rules) == 1 else 'rules'} {', '.join(map(format_rule, rules))}"


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
                    f"axes {format_mesh(sizes)}.{did_you_mean(axis, sizes)} Correct that, or make "
                    f"the mesh with an axis {axis!r} (of size 1 to switch it off)."
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


def _axis_type_order(array: LaidOutArray, mesh: AnyMesh) -> Iterable[Finding]:
    for dimension, target in enumerate(array.assignment.entries):
        text = explain_order(target, mesh)
        if text:
            where = f"dimension {dimension} ({array.names[dimension]!r})"
            rules = _chosen_rules(array, dimension)
            yield array.finding("warning", "axis-type-order", f"{where}, {rules}, {text}")


def explain_order(target: Target, mesh: AnyMesh) -> str:
    """Says what is wrong with the order of the mesh axes of one dimension; nothing if it is fine.

    Args:
        target: The dimension's mesh axes.
        mesh: The mesh, whose axes have types.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [axis for axis in mesh_axes_of(target) if mesh.shape.get(axis, 1) > 1]
    better = sorted(axes, key=lambda axis: types[axis] is not AxisType.Explicit)
    if axes == better:
        return ""
    explicit = ", ".join(repr(axis) for axis in axes if types[axis] is AxisType.Explicit)
    return (
        f"is to be split over {tuple(axes)}, an Auto axis before an Explicit one. It can be placed "
        f"so, but in a program its type says {explicit} alone, and that comes first: a program "
        "that takes the array moves it at every call, and one that writes it may leave it whole "
        f"along the Auto axes. Split by {tuple(better)}, or make all axes of one type."
    )
