# SPDX-License-Identifier: Apache-2.0
"""What rules make of one array over one mesh: its ``PartitionSpec``, and diagnostics.

``ResolvedRules(mesh, rules)`` chooses the rules once: those given, else those in scope, else the
mesh's own axes, each of which stands for itself. ``ResolvedRules.spec(axes, shape)`` then has four
steps:

1. The axis names must be well-formed, one per dimension. Otherwise the spec is empty.
2. The rules assign mesh axes to the names (``shardax.partition.assignment``).
3. Everything that is wrong with these is a diagnostic (``shardax.partition.findings``): names
   without a rule, rules passed over, mesh axes that the mesh does not have, dimensions that cannot
   be cut into equal parts.
4. Mesh axes that the mesh does not have are left out of the spec, so that a ``NamedSharding`` can
   always be made of it. A dimension that cannot be cut into equal parts stays as it is.

``explicit_spec`` does the same for a spec or sharding that was given outright, in place of rules,
with the same codes. Nothing here touches devices, models or values.

Rules that no array of a tree chooses are not a matter of one array. ``shardax.check`` adds one
diagnostic for each, from ``unused_rules_of`` in ``shardax.partition.tree_layout``: the warning
``shadowed-rule`` if an earlier rule makes it useless for any array, else the information
``unused-rule``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardax._core.graph.paths import Path
from shardax.partition import findings
from shardax.partition.assignment import (
    UNCONSTRAINED,
    AxisAssignment,
    Names,
    SpecEntry,
    assign,
    format_rule,
    mesh_axes_of,
)
from shardax.partition.context import current_rules
from shardax.partition.errors import Diagnostic, PartitionError, nearest_name
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules, RulesLike, check_names, identity_rules


class ResolvedRules:
    """The rules that hold over one mesh.

    Args:
        mesh: The mesh, also an ``AbstractMesh``; None to apply the rules alone.
        rules: Rules, pairs or a mapping; None for the current rules. Without any, the axes of the
            mesh stand for themselves.

    Attributes:
        mesh: The mesh.
        rules: The chosen ``Rules``.
        rules_are_missing: Whether no rules were given and none are in scope, so that ``rules`` are
            those of the mesh's own axes.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> from shardax import extend
        >>> mesh = AbstractMesh((2, 4), ("data", "model"))
        >>> resolved = extend.ResolvedRules(mesh, [("embed", "data"), ("mlp", "model")])
        >>> resolved.spec(("mlp", "embed"), (8, 6))
        (P('model', 'data'), [])
        >>> spec, diagnostics = resolved.spec(("mlp", "embed"), (8, 7))
        >>> spec, [diagnostic.code for diagnostic in diagnostics]
        (P('model', 'data'), ['indivisible'])
    """

    __slots__ = ("mesh", "rules", "rules_are_missing")

    def __init__(self, mesh: AnyMesh | None, rules: RulesLike | None = None) -> None:
        self.mesh = mesh
        self.rules_are_missing = rules is None and not current_rules()
        if rules is not None:
            self.rules = rules if isinstance(rules, Rules) else Rules(rules)
        elif self.rules_are_missing and mesh is not None:
            self.rules = identity_rules(tuple(mesh.axis_names))
        else:
            self.rules = current_rules()

    def override(self, more: RulesLike) -> ResolvedRules:
        """Returns ResolvedRules in which ``more`` come before these."""
        return ResolvedRules(self.mesh, self.rules.override(more))

    def names_without_rules(self, names: Iterable[Any]) -> tuple[str, ...]:
        """Returns the names that are no axes of the mesh, where rules are missing."""
        if not self.rules_are_missing:
            return ()
        return self.rules.assign(names).unmapped

    def spec(
        self,
        axes: Iterable[Any] | None,
        shape: Sequence[int],
        path: Path = (),
        *,
        in_program: bool = False,
    ) -> tuple[PartitionSpec, list[Diagnostic]]:
        """Returns the ``PartitionSpec`` of one array, and its diagnostics.

        Args:
            axes: One entry per dimension: a name, None, ``UNCONSTRAINED``, or a tuple of names.
                None in place of all names: the array is replicated.
            shape: Its global shape.
            path: Where it is in its tree.
            in_program: Whether the spec is for a constraint inside of a program, where
                ``UNCONSTRAINED`` leaves a dimension to the compiler. An array that is placed is
                not split there.
        """
        if axes is None:
            return PartitionSpec(), []
        try:
            names = check_names(axes)
        except PartitionError as error:
            return PartitionSpec(), [findings.malformed_names(path, error)]
        if len(names) != len(shape):
            return PartitionSpec(), [findings.rank_mismatch(path, names, shape)]

        entries = assign(names, self.rules.pairs).entries
        diagnostics = self.diagnostics(names, shape, entries, path)
        entries = _usable_entries(entries, self.mesh)
        if not in_program:
            return _placed_spec(entries), diagnostics

        diagnostics = [each for each in diagnostics if each.code != "unconstrained"]
        if self.mesh is None or AxisType.Auto in self.mesh.axis_types:
            return PartitionSpec(*entries), diagnostics
        if UNCONSTRAINED in entries:
            diagnostics.append(findings.unconstrained_over_explicit_axes(path, names))
        return _placed_spec(entries), diagnostics

    def given_spec(
        self,
        placement: PartitionSpec | NamedSharding,
        shape: Sequence[int],
        source: str,
        path: Path = (),
    ) -> tuple[PartitionSpec, list[Diagnostic]]:
        """Returns the usable ``PartitionSpec`` of a spec or sharding given outright.

        Args:
            placement: The spec, over the mesh of these rules; or a sharding, over its own mesh.
            shape: The global shape of the array.
            source: Who gave it, as text for the diagnostics.
            path: Where the array is in its tree.
        """
        return explicit_spec(placement, shape, self.mesh, source, path)

    def diagnostics(
        self, names: Names, shape: Sequence[int], entries: Sequence[SpecEntry], path: Path = ()
    ) -> list[Diagnostic]:
        """Returns the diagnostics of the spec that these rules make of checked names.

        Args:
            names: The names, one per dimension.
            shape: The shape.
            entries: The mesh axes of each dimension, by these rules.
            path: Where the array is in its tree.
        """
        assignment = assign(names, self.rules.pairs)

        def dimension_text(index: int) -> str:
            return f"dimension {index} ({names[index]!r})"

        def reason_text(index: int) -> str:
            return _rules_text(names[index], assignment, self.rules)

        diagnostics = [*self._unmapped(path, names, assignment), *self._conflicts(path, assignment)]
        for index, entry in enumerate(entries):
            if entry is UNCONSTRAINED:
                source = f" (names {names})"
                diagnostics.append(findings.unconstrained(path, index, source, "warning"))
        diagnostics += _diagnostics_of_entries(
            path, shape, entries, self.mesh, dimension_text, reason_text, "rules to"
        )
        return diagnostics

    def _unmapped(
        self, path: Path, names: Names, assignment: AxisAssignment
    ) -> Iterator[Diagnostic]:
        """Yields diagnostics of names without a rule."""
        if not assignment.unmapped:
            return
        if self.rules.on_unmapped == "error":
            yield findings.unmapped_names_error(path, assignment, self.rules.names)
            return

        # Rules from each axis of the mesh to itself stand for no rules at all.
        mesh_axes = () if self.mesh is None else tuple(self.mesh.axis_names)
        if self.mesh is not None and self.rules == identity_rules(mesh_axes):
            yield findings.names_without_any_rules(path, assignment.unmapped, self.mesh)
            return

        # A name without a rule is usual. It is worth a warning where it looks like a mistake.
        for name in assignment.unmapped:
            if name in mesh_axes:
                yield findings.unmapped_name_of_mesh_axis(path, name)
                continue
            similar = nearest_name(name, sorted(self.rules.names))
            if similar is not None and similar not in names:
                yield findings.misspelt_name(path, name, similar)

    def _conflicts(self, path: Path, assignment: AxisAssignment) -> Iterator[Diagnostic]:
        """Yields diagnostics of rules that were passed over."""
        if assignment.passed_over and self.rules.on_conflict == "error":
            yield findings.mesh_axis_conflict_error(path, assignment)
            return
        for loss in assignment.passed_over:
            position = assignment.chosen.get(loss.rule[0])
            later_rule = None if position is None else self.rules.pairs[position]
            yield findings.passed_over(path, loss, later_rule)


def explicit_spec(
    placement: PartitionSpec | NamedSharding,
    shape: Sequence[int],
    mesh: AnyMesh | None,
    source: str,
    path: Path = (),
) -> tuple[PartitionSpec, list[Diagnostic]]:
    """Returns the usable ``PartitionSpec`` of a spec or sharding given outright, and diagnostics.

    Args:
        placement: The spec, over ``mesh``; or a sharding, over its own mesh.
        shape: The global shape of the array.
        mesh: The mesh, or None.
        source: Who gave it, as text for the diagnostics.
        path: Where the array is in its tree.
    """
    if isinstance(placement, NamedSharding):
        spec, mesh = placement.spec, placement.mesh
    else:
        spec = placement
    if len(spec) > len(shape):
        return PartitionSpec(), [findings.rank_mismatch_of_spec(path, source, spec, shape)]

    entries: tuple[SpecEntry, ...] = tuple(spec)
    diagnostics: list[Diagnostic] = []
    for index, entry in enumerate(entries):
        if entry is UNCONSTRAINED:
            diagnostics.append(findings.unconstrained(path, index, f", {source}", "error"))
        elif not _is_well_formed(entry):
            diagnostics.append(findings.malformed_entry(path, source, entries, entry))
    diagnostics += _diagnostics_of_entries(
        path,
        shape,
        entries,
        mesh,
        dimension_text=lambda index: f"dimension {index}",
        reason_text=lambda index: source,
        way_out="a spec of",
    )
    return _placed_spec(_usable_entries(entries, mesh)), diagnostics


def _diagnostics_of_entries(
    path: Path,
    shape: Sequence[int],
    entries: Sequence[SpecEntry],
    mesh: AnyMesh | None,
    dimension_text: Callable[[int], str],
    reason_text: Callable[[int], str],
    way_out: str,
) -> Iterator[Diagnostic]:
    """Yields diagnostics of the mesh axes of every dimension; texts are made where one is wrong."""
    # Axes that do not exist, or stand twice.
    used_axes: set[str] = set()
    for index, entry in enumerate(entries):
        for axis in _mesh_axes_of_well_formed(entry):
            if mesh is not None and axis not in mesh.shape:
                yield findings.unknown_mesh_axis(
                    path, dimension_text(index), reason_text(index), axis, mesh
                )
            elif axis in used_axes:
                yield findings.repeated_mesh_axis(
                    path, dimension_text(index), reason_text(index), axis
                )
            used_axes.add(axis)
    if mesh is None:
        return

    # Sizes, by the mesh axes that remain.
    usable = [mesh_axes_of(entry) for entry in _usable_entries(entries, mesh)]
    for index, mesh_axes in enumerate(usable):
        size = shape[index]
        parts = math.prod(mesh.shape[axis] for axis in mesh_axes)
        if size % parts:
            yield findings.indivisible(
                path,
                dimension_text(index),
                reason_text(index),
                size,
                mesh_axes,
                mesh,
                parts,
                way_out,
            )

    # Orders that the type of an array in a program cannot express.
    axis_types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for index, mesh_axes in enumerate(usable):
        splitting = [axis for axis in mesh_axes if mesh.shape[axis] > 1]
        explicit = [axis for axis in splitting if axis_types[axis] is AxisType.Explicit]
        others = [axis for axis in splitting if axis not in explicit]
        if splitting != [*explicit, *others]:
            yield findings.axis_type_order(
                path,
                dimension_text(index),
                reason_text(index),
                splitting,
                [*explicit, *others],
                explicit,
            )


def _usable_entries(entries: Sequence[SpecEntry], mesh: AnyMesh | None) -> tuple[SpecEntry, ...]:
    """Returns the entries without unknown mesh axes and those of earlier dimensions."""
    used_axes: set[str] = set()
    usable: list[SpecEntry] = []
    for entry in entries:
        mesh_axes = _mesh_axes_of_well_formed(entry)
        usable_axes: list[str] = []
        for axis in mesh_axes:
            if axis not in used_axes and (mesh is None or axis in mesh.shape):
                usable_axes.append(axis)
                used_axes.add(axis)

        is_unchanged = _is_well_formed(entry) and len(usable_axes) == len(mesh_axes)
        usable.append(entry if is_unchanged else tuple(usable_axes) or None)
    return tuple(usable)


def _placed_spec(entries: Sequence[SpecEntry]) -> PartitionSpec:
    """Returns the spec of an array that is placed, where no dimension is left to the compiler."""
    return PartitionSpec(*(None if entry is UNCONSTRAINED else entry for entry in entries))


def _mesh_axes_of_well_formed(entry: SpecEntry) -> tuple[str, ...]:
    return mesh_axes_of(entry) if _is_well_formed(entry) else ()


def _is_well_formed(entry: SpecEntry) -> bool:
    if isinstance(entry, tuple):
        return all(isinstance(axis, str) for axis in entry)
    return entry is None or entry is UNCONSTRAINED or isinstance(entry, str)


def _rules_text(name: Any, assignment: AxisAssignment, rules: Rules) -> str:
    """Returns the chosen rules of one dimension as text."""
    names = name if isinstance(name, tuple) else (name,)
    chosen = [rules.pairs[assignment.chosen[each]] for each in names if each in assignment.chosen]
    plural = "" if len(chosen) == 1 else "s"
    if all(logical_name == target for logical_name, target in chosen):
        return f"its own name{plural}"
    return f"rule{plural} {', '.join(map(format_rule, chosen))}"
