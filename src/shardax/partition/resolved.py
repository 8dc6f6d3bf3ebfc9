# SPDX-License-Identifier: Apache-2.0
"""The spec that rules give to one array over one mesh, and what is wrong with it.

``ResolvedRules(mesh, rules)`` chooses the rules once: those given, else those in scope, else the
mesh's own axes, each of which stands for itself. Its method ``spec(axes, shape)`` runs the steps
that ``shardax.partition.rules`` lists: names, assignment, spec. Nothing here touches devices,
models or values.

What it says of an array, by code (``shardax.partition.findings`` has the texts):

* ``axis-names``, ``rank-mismatch``: errors of the names; the spec is ``P()``.
* ``unmapped-name``: no rule mentions a name, and it looks misspelt, or is an axis of the mesh, or
  there are no rules at all (warnings); or the rules forbid it (error). Otherwise nothing is said.
* ``mesh-axis-conflict``: a rule was passed over. Warning if its name goes without, info if a later
  rule was chosen for it, error if the rules forbid it. Each rule passed over counts, also where a
  name has several.
* ``unknown-mesh-axis``, ``indivisible`` (errors) and ``axis-type-order`` (warning), of the mesh
  axes of each dimension (``diagnostics_of_entries`` in ``shardax.partition.entries``).
* ``unconstrained``: a dimension is left to the compiler where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardax._core.graph.paths import Path
from shardax.partition import findings
from shardax.partition.assignment import (
    UNCONSTRAINED,
    AxisAssignment,
    DimensionName,
    Names,
    SpecEntry,
    assign,
    format_rule,
)
from shardax.partition.context import current_rules
from shardax.partition.entries import (
    diagnostics_of_entries,
    explicit_spec,
    placed_spec,
    usable_entries,
)
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
        entries = usable_entries(entries, self.mesh)
        if UNCONSTRAINED not in entries:
            return PartitionSpec(*entries), diagnostics

        # In a program over Auto axes the compiler chooses what is left to it, and nowhere else.
        has_auto_axes = self.mesh is None or AxisType.Auto in self.mesh.axis_types
        if in_program and has_auto_axes:
            return PartitionSpec(*entries), diagnostics
        if in_program:
            diagnostics.append(findings.unconstrained_over_explicit_axes(path, names))
        else:
            diagnostics += [
                findings.unconstrained(path, index, f" (names {names})", "warning")
                for index, entry in enumerate(entries)
                if entry is UNCONSTRAINED
            ]
        return placed_spec(entries), diagnostics

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
        """Returns what is wrong with checked names and the mesh axes that these rules give them.

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

        return [
            *self._unmapped_names(path, names, assignment),
            *self._conflicts(path, assignment),
            *diagnostics_of_entries(
                path, shape, entries, self.mesh, dimension_text, reason_text, "rules to"
            ),
        ]

    def _unmapped_names(
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


def _rules_text(name: DimensionName, assignment: AxisAssignment, rules: Rules) -> str:
    """Returns the chosen rules of one dimension as text."""
    names = name if isinstance(name, tuple) else (name,)
    chosen = [rules.pairs[assignment.chosen[each]] for each in names if each in assignment.chosen]
    plural = "" if len(chosen) == 1 else "s"
    if all(logical_name == target for logical_name, target in chosen):
        return f"its own name{plural}"
    return f"rule{plural} {', '.join(map(format_rule, chosen))}"
