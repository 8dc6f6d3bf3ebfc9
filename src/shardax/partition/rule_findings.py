# SPDX-License-Identifier: Apache-2.0
"""Findings about rules by themselves, without any array: what could not be right for any model.

A rule is *shadowed* when an earlier rule for the same name leaves it nothing to do, whatever the
names of the array. That is so when the earlier rule

* can never be passed over, because no rule before it wants one of its mesh axes for another name;
* wants no mesh axis but such as the later one wants too, so that whatever takes one from the
  earlier rule takes it from the later one as well; or
* must not be passed over, under ``on_conflict="error"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jax.sharding import AxisType

from shardax.partition.assignment import Rule, format_rule, mesh_axes_of
from shardax.partition.findings import Finding, did_you_mean, format_mesh
from shardax.partition.mesh import AnyMesh


def judge_rules(
    pairs: Sequence[Rule], on_conflict: str, mesh: AnyMesh | None = None
) -> list[Finding]:
    """Returns all findings about rules; their path is ``()``.

    Args:
        pairs: The rules, highest priority first.
        on_conflict: Their policy for a mesh axis that two names of an array want.
        mesh: The mesh, or None to judge the rules alone.
    """
    findings = [] if mesh is None else [f for rule in pairs for f in unknown_mesh_axes(rule, mesh)]
    findings += _shadowed(pairs, on_conflict)
    return findings if mesh is None else [*findings, *_unused_mesh_axes(pairs, mesh)]


def unknown_mesh_axes(rule: Rule, mesh: AnyMesh) -> list[Finding]:
    """Returns an error for each mesh axis of a rule that the mesh does not have.

    Args:
        rule: The rule.
        mesh: The mesh.
    """
    sizes = dict(mesh.shape)
    return [
        Finding(
            "error",
            (),
            "unknown-mesh-axis",
            f"The rule {format_rule(rule)} names the mesh axis {axis!r}, but the mesh has the axes "
            f"{format_mesh(sizes)}.{did_you_mean(axis, sizes)} Correct or remove it, or make the "
            f"mesh with an axis {axis!r} (of size 1 to switch it off).",
        )
        for axis in mesh_axes_of(rule[1])
        if axis not in sizes
    ]


def _shadowed(pairs: Sequence[Rule], on_conflict: str) -> Iterable[Finding]:
    for position, rule in enumerate(pairs):
        for earlier in range(position):
            why = _why_shadowed(pairs, earlier, position, on_conflict)
            if why is not None:
                first = pairs[earlier]
                way = "" if first == rule else f", or move it above {format_rule(first)}"
                text = f"The rule {format_rule(rule)} is never used: {why}. Remove it{way}."
                yield Finding("warning", (), "shadowed-rule", text)
                break


def _why_shadowed(pairs: Sequence[Rule], earlier: int, later: int, on_conflict: str) -> str | None:
    """Why one rule leaves another nothing to do; None if it does not."""
    name, target = pairs[earlier]
    if name != pairs[later][0]:
        return None
    first = format_rule(pairs[earlier])
    axes = set(mesh_axes_of(target))
    rivals = [rule for rule in pairs[:earlier] if rule[0] != name]
    if not any(axes.intersection(mesh_axes_of(rule[1])) for rule in rivals):
        return f"the earlier rule {first} always serves {name!r}"
    if axes.issubset(mesh_axes_of(pairs[later][1])):
        return f"where the earlier rule {first} loses its mesh axis, this one does too"
    if on_conflict == "error":
        return f"under on_conflict='error' it is an error where the earlier rule {first} loses"
    return None


def _unused_mesh_axes(pairs: Sequence[Rule], mesh: AnyMesh) -> Iterable[Finding]:
    used = {axis for _, target in pairs for axis in mesh_axes_of(target)}
    for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if axis not in used and mesh.shape[axis] > 1 and kind is not AxisType.Manual:
            text = (
                f"No rule names the mesh axis {axis!r} of size {mesh.shape[axis]}: every array is "
                "held whole along it."
            )
            yield Finding("info", (), "unused-mesh-axis", text)
