# SPDX-License-Identifier: Apache-2.0
"""The checker of specs.

``diagnose`` takes an array's shape, names, spec and mesh. Specs made by rules and specs or
shardings given outright get the same codes (``shardax.partition.errors``), with the array's path,
before any array is moved. Nothing here touches devices or models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardax._core.graph.paths import Path, format_path
from shardax.partition import rules as logical
from shardax.partition.errors import (
    Diagnostic,
    PartitionError,
    Severity,
    did_you_mean,
    nearest_name,
)
from shardax.partition.mesh import AnyMesh, mesh_text


def spec_for(
    axes: Iterable[object] | None,
    shape: Sequence[int],
    mesh: AnyMesh | None,
    rules: logical.Rules,
    path: Path = (),
    *,
    placed: bool = True,
) -> tuple[PartitionSpec, list[Diagnostic]]:
    """Spec of one array by its axis names, and its diagnostics."""
    # An array without names (None) is replicated. The spec leaves out mesh axes that the mesh
    # lacks, each of which is an error among the diagnostics, so that a ``NamedSharding`` can be
    # made of it. ``placed=False`` is for constraints inside programs, where ``UNCONSTRAINED`` is
    # meaningful.
    if axes is None:
        return PartitionSpec(), []
    try:
        names = logical.check_names(axes)
    except PartitionError as error:
        return PartitionSpec(), [_diagnostic(path, "error", "axis-names", str(error))]
    if len(names) != len(shape):
        text = (
            f"{len(names)} axis names {names} for an array of {len(shape)} dimensions, shape "
            f"{tuple(shape)}. Give one entry per dimension, None for a dimension without a name."
        )
        return PartitionSpec(), [_diagnostic(path, "error", "rank-mismatch", text)]
    entries = rules.assign(names).entries
    diagnostics = list(diagnose(shape, names, entries, mesh, rules=rules, path=path))
    entries = _usable(entries, mesh)
    if not placed:
        diagnostics = [d for d in diagnostics if d.code != "unconstrained"]
        if mesh is None or AxisType.Auto in mesh.axis_types:
            return PartitionSpec(*entries), diagnostics
        if logical.UNCONSTRAINED in entries:
            text = (
                f"a dimension of the names {names} is UNCONSTRAINED, left to the compiler, but "
                "over Explicit axes the compiler chooses nothing. Name a mesh axis or None, or "
                "give the mesh Auto axes."
            )
            diagnostics.append(_diagnostic(path, "error", "unconstrained", text))
    return _placed_spec(entries), diagnostics


def explicit_spec(
    placement: PartitionSpec | NamedSharding,
    shape: Sequence[int],
    mesh: AnyMesh | None,
    source: str,
    path: Path = (),
) -> tuple[PartitionSpec, list[Diagnostic]]:
    """Usable part of a spec or sharding given outright, and its diagnostics."""
    spec, where = (
        (placement, mesh)
        if isinstance(placement, PartitionSpec)
        else (placement.spec, placement.mesh)
    )
    if len(spec) > len(shape):
        text = (
            f"{source}: {spec} has {len(spec)} entries for an array of {len(shape)} dimensions, "
            f"shape {tuple(shape)}. Give at most one entry per dimension."
        )
        return PartitionSpec(), [_diagnostic(path, "error", "rank-mismatch", text)]
    diagnostics = list(diagnose(shape, None, tuple(spec), where, source=source, path=path))
    return _placed_spec(_usable(tuple(spec), where)), diagnostics


def _placed_spec(entries: Sequence[logical.SpecEntry]) -> PartitionSpec:
    return PartitionSpec(*(None if to is logical.UNCONSTRAINED else to for to in entries))


def diagnose(
    shape: Sequence[int],
    names: logical.Names | None,
    spec: Sequence[logical.SpecEntry],
    mesh: AnyMesh | None,
    *,
    rules: logical.Rules | None = None,
    source: str = "",
    path: Path = (),
) -> Iterator[Diagnostic]:
    """Yields the diagnostics of one array's spec."""
    # With rules, ``spec`` is what they make of ``names``, one entry per dimension. Without a mesh,
    # the spec is checked alone.
    if names is not None and rules is not None:
        assignment = rules.assign(names)
        yield from _unmapped(path, names, assignment, rules, mesh)
        yield from _conflicts(path, assignment, rules)

    def dimension(position: int) -> str:
        return f"dimension {position}" + ("" if names is None else f" ({names[position]!r})")

    def reason(position: int) -> str:
        if names is None or rules is None:
            return source
        return _rules_of(names[position], rules.assign(names), rules)

    def error(code: str, text: str) -> Diagnostic:
        return _diagnostic(path, "error", code, text)

    yield from _without_axes(path, names, spec, source)
    sizes = {} if mesh is None else dict(mesh.shape)
    used_axes: set[str] = set()
    for i, entry in enumerate(spec):
        for axis in logical.mesh_axes_of(entry) if _well_formed(entry) else ():
            if mesh is not None and axis not in sizes:
                text = (
                    f"{dimension(i)} is to be split over mesh axis {axis!r} by {reason(i)}; there "
                    f"is no mesh axis {axis!r}, the mesh has the axes ({mesh_text(sizes)})."
                    f"{did_you_mean(axis, sizes)} Correct that, or make the mesh with such an axis "
                    "(of size 1 to switch it off)."
                )
                yield error("unknown-mesh-axis", text)
            elif axis in used_axes:
                text = (
                    f"{dimension(i)}, {reason(i)}: mesh axis {axis!r} stands twice, but one array "
                    "can use it only once. Give one of the dimensions another mesh axis or None."
                )
                yield error("mesh-axis-conflict", text)
            used_axes.add(axis)
    if mesh is None:
        return
    for i, entry in enumerate(_usable(spec, mesh)):
        axes, size = logical.mesh_axes_of(entry), shape[i]
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts:
            product = " * ".join(f"{axis} = {sizes[axis]}" for axis in axes)
            low, high = size // parts * parts, -(-size // parts) * parts
            better = f"{low} or {high}" if low else f"{high}"
            text = (
                f"{dimension(i)} has size {size}, which is not divisible by {parts}, the number of "
                f"parts it is to be cut into (mesh axes {product}, {reason(i)}). All devices must "
                f"hold equal parts. Make the size {better}, or split by fewer mesh axes, or not at "
                f"all, by {'a spec of' if names is None else 'rules to'} None."
            )
            yield error("indivisible", text)
    for i, entry in enumerate(_usable(spec, mesh)):
        order = _wrong_order(entry, mesh)
        if order:
            text = f"{dimension(i)}, {reason(i)}, {order}"
            yield _diagnostic(path, "warning", "axis-type-order", text)


def _without_axes(
    path: Path, names: logical.Names | None, spec: Sequence[logical.SpecEntry], source: str
) -> Iterator[Diagnostic]:
    """Yields diagnostics of entries without mesh axes: unconstrained or malformed."""
    for i, entry in enumerate(spec):
        if entry is logical.UNCONSTRAINED:
            whose = f", {source}" if names is None else f" (names {names})"
            text = (
                f"dimension {i} is UNCONSTRAINED{whose}. The compiler chooses layouts inside "
                "programs only, so where it is placed it is not split. Name a mesh axis or None."
            )
            severity = "error" if names is None else "warning"
            yield _diagnostic(path, severity, "unconstrained", text)
        elif not _well_formed(entry):
            text = (
                f"{source}: {PartitionSpec(*spec)} has the entry {entry!r}. An entry is a mesh "
                "axis, a tuple of mesh axes or None."
            )
            yield _diagnostic(path, "error", "axis-names", text)


def _diagnostic(path: Path, severity: Severity, code: str, text: str) -> Diagnostic:
    return Diagnostic(severity, path, code, f"{format_path(path)}: {text}")


def _well_formed(entry: logical.SpecEntry) -> bool:
    if isinstance(entry, tuple):
        return all(isinstance(axis, str) for axis in entry)
    return entry is None or entry is logical.UNCONSTRAINED or isinstance(entry, str)


def _usable(
    spec: Sequence[logical.SpecEntry], mesh: AnyMesh | None
) -> tuple[logical.SpecEntry, ...]:
    """Entries without unknown mesh axes and those of earlier dimensions."""
    used_axes: set[str] = set()
    usable: list[logical.SpecEntry] = []
    for entry in spec:
        axes: list[str] = []
        for axis in logical.mesh_axes_of(entry) if _well_formed(entry) else ():
            if axis not in used_axes and (mesh is None or axis in mesh.shape):
                axes.append(axis)
                used_axes.add(axis)
        whole = _well_formed(entry) and len(axes) == len(logical.mesh_axes_of(entry))
        usable.append(entry if whole else tuple(axes) or None)
    return tuple(usable)


def _rules_of(name, assignment: logical.AxisAssignment, rules: logical.Rules) -> str:
    """Text of the rules behind one dimension."""
    parts = name if isinstance(name, tuple) else (name,)
    chosen = assignment.chosen
    behind = [rules.pairs[chosen[part]] for part in parts if part in chosen]
    if all(rule[0] == rule[1] for rule in behind):
        return f"its own {'name' if len(behind) == 1 else 'names'}"
    listed = ", ".join(map(logical.format_rule, behind))
    return f"{'rule' if len(behind) == 1 else 'rules'} {listed}"


def _unmapped(
    path: Path,
    names: logical.Names,
    assignment: logical.AxisAssignment,
    rules: logical.Rules,
    mesh: AnyMesh | None,
) -> Iterator[Diagnostic]:
    if assignment.unmapped and rules.on_unmapped == "error":
        text = logical.explain_unmapped(assignment, rules)
        yield _diagnostic(path, "error", "unmapped-name", text)
        return
    axes = () if mesh is None else tuple(mesh.axis_names)
    if mesh is not None and assignment.unmapped and rules == logical.identity_rules(axes):
        text = (
            f"nothing maps the axis names {', '.join(map(repr, assignment.unmapped))}: there are "
            f"no rules, and the mesh has the axes ({mesh_text(mesh.shape)}). Their dimensions are "
            "not split. Pass rules, rules=..., or put them in scope: with sx.axis_rules(rules): ..."
        )
        yield _diagnostic(path, "warning", "unmapped-name", text)
        return
    for name in assignment.unmapped:
        if name in axes:
            text = (
                f"the axis name {name!r} is an axis of the mesh, but no rule mentions it, so its "
                f"dimension is not split. Add the rule ({name!r}, {name!r}), or ({name!r}, None)."
            )
            yield _diagnostic(path, "warning", "unmapped-name", text)
            continue
        near = nearest_name(name, sorted(rules.names))
        if near is not None and near not in names:
            text = (
                f"no rule mentions the axis name {name!r}, so its dimension is not split, but "
                f"there are rules for {near!r}. If one of the two is misspelt, correct it; if "
                f"not, say so with the rule ({name!r}, None)."
            )
            yield _diagnostic(path, "warning", "unmapped-name", text)


def _conflicts(
    path: Path, assignment: logical.AxisAssignment, rules: logical.Rules
) -> Iterator[Diagnostic]:
    if assignment.passed_over and rules.on_conflict == "error":
        text = logical.explain_conflicts(assignment)
        yield _diagnostic(path, "error", "mesh-axis-conflict", text)
        return
    for loss in assignment.passed_over:
        name = loss.rule[0]
        text = (
            f"the rule {logical.format_rule(loss.rule)} was passed over, because mesh axis "
            f"{loss.mesh_axis!r} already splits {loss.winner[0]!r} of the same array by "
            f"{logical.format_rule(loss.winner)}; "
        )
        if name in assignment.chosen:
            rescue = logical.format_rule(rules.pairs[assignment.chosen[name]])
            text += f"the later rule {rescue} was used for {name!r}."
            yield _diagnostic(path, "info", "mesh-axis-conflict", text)
        else:
            text += (
                f"{name!r} is not split at all. If that is not meant, add a later rule for "
                f"{name!r} with another mesh axis; if it is, add ({name!r}, None)."
            )
            yield _diagnostic(path, "warning", "mesh-axis-conflict", text)


def _wrong_order(entry: logical.SpecEntry, mesh: AnyMesh) -> str:
    """Text on an Auto mesh axis before an Explicit one, or nothing."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [axis for axis in logical.mesh_axes_of(entry) if mesh.shape[axis] > 1]
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
