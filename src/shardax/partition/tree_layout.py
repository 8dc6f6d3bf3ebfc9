# SPDX-License-Identifier: Apache-2.0
"""Tree layouts: where the arrays of a whole tree go. All functions that lay out trees begin here.

A layout goes in three steps. The tree is surveyed; overrides and memory kinds choose what holds
apart from the rules; names become specs, and what is wrong is found, for all slots at once.

Variables made of boxes, and boxes, may have rules and a mesh *of their own*. Their own rules hold
instead of those of the call, whose names are not theirs. Their own mesh holds instead of the one in
scope, but not instead of one that is given to the call: who gives a mesh wants the tree there.

A box with logical names where there are no rules is an error, and not replicated: nobody said where
it goes. (A Module without rules is replicated; it is for many programs to lay out, or none.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.graph.paths import format_path
from shardax._transforms.errors import NoMeshError
from shardax.partition.boxes.boxes import identity_rules
from shardax.partition.checker import (
    LARGE_BYTES,
    LARGE_FRACTION,
    ArrayRecord,
    raise_on_errors,
    specs_for,
)
from shardax.partition.context import resolve_rules
from shardax.partition.errors import NoRulesError
from shardax.partition.findings import Finding
from shardax.partition.inventory import (
    Slot,
    Survey,
    entry_of,
    nbytes,
    states_of_boxes,
    with_hints,
)
from shardax.partition.mesh import AnyMesh, resolve_mesh
from shardax.partition.overrides import (
    Choice,
    MemoryKinds,
    OverridesLike,
    choices,
)
from shardax.partition.rules import RulesLike

RulesFor = Literal["boxes", "all"]
"""Of what logical names are an error without rules."""


class TreeLayout:
    """Where the arrays of a tree go.

    Args:
        survey: The survey of the tree.
        mesh: The mesh, also an ``AbstractMesh``; None for those of the slots' own, and the one in
            scope for the others.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: See ``shardax.partition.overrides``.
        memory_kind: See ``shardax.partition.overrides``.
        function: Who needs a mesh, for the message; None if rules alone will do.
        over_mesh: False for the rules alone, whatever mesh is in scope.
        placed: See ``specs_for``.
        names_alone: Whether every name stands for itself, whatever the rules are.
        rules_for: Of what logical names are an error without rules, where there is a mesh.
        large_bytes: See ``specs_for``.
        large_fraction: See ``specs_for``.

    Attributes:
        survey: The survey.
        mesh: The mesh of slots without one of their own, or None.
        specs: For each slot, a spec for each of its arrays; for a box without any, one.
        findings: What there is to say, errors among them.

    Raises:
        NoMeshError: If there is a slot without a mesh, and ``function`` needs one.
        OverrideError: If overrides or memory kinds are malformed.
    """

    def __init__(
        self,
        survey: Survey,
        mesh: AnyMesh | None,
        rules: RulesLike | None,
        overrides: OverridesLike | None = None,
        memory_kind: MemoryKinds | None = None,
        *,
        function: str | None = None,
        over_mesh: bool = True,
        placed: bool = True,
        names_alone: bool = False,
        rules_for: RulesFor = "boxes",
        large_bytes: int = LARGE_BYTES,
        large_fraction: float = LARGE_FRACTION,
    ) -> None:
        self.survey = survey
        self.mesh = resolve_mesh(mesh) if over_mesh else None
        own = over_mesh and mesh is None
        self.meshes = [(slot.mesh if own else None) or self.mesh for slot in survey.slots]
        if function is not None and (not survey.slots or None in self.meshes):
            self.mesh = require_mesh(mesh, function)
        self.rules = resolve_rules(rules)
        self.names_alone = names_alone
        self._judge = functools.partial(
            specs_for, placed=placed, large_bytes=large_bytes, large_fraction=large_fraction
        )
        self._choices, said = choices(survey, self.mesh, overrides, memory_kind)
        slots = survey.slots
        self.specs, findings = self._lay_out(slots)
        states = states_of_boxes(slots, findings)
        if states:
            changed = [states[i].slot if i in states else slot for i, slot in enumerate(slots)]
            self.specs, findings = self._lay_out(changed)
            findings += [state.finding for state in states.values()]
        findings = with_hints(findings, slots)
        self.findings = [*findings, *self._without_rules(rules_for), *said]

    def _lay_out(
        self, slots: Sequence[Slot]
    ) -> tuple[list[Sequence[PartitionSpec]], list[Finding]]:
        rows = list(zip(slots, self.meshes, self._choices, strict=True))
        misfits = [
            _many_arrays(slot)
            for slot, _, choice in rows
            if slot.axes is not None
            and len(slot.arrays) > 1
            and not slot.for_each
            and choice.place is None
        ]
        records = [self._records(*row) for row in rows]
        flat = [record for some in records for record in some]
        found, findings = self._judge(flat, self.mesh, self.rules)
        remaining = iter(found)
        each = [[next(remaining) for _ in some] for some in records]
        rows_of_specs = zip(slots, self._choices, each, strict=True)
        specs: list[Sequence[PartitionSpec]] = [_as_given(*row) for row in rows_of_specs]
        return specs, [*misfits, *findings]

    def _records(self, slot: Slot, mesh: AnyMesh | None, choice: Choice) -> list[ArrayRecord]:
        rules = slot.rules
        if self.names_alone and slot.axes is not None:
            rules = identity_rules(tuple(slot.axes))
        if slot.box is not None and not slot.arrays:
            axes = None if slot.axes is None else tuple(slot.axes)
            # There are only names to be judged, and 0 is divisible by everything. A number may
            # stand for an array while no mesh is asked about, as in Flax; on a mesh it is one.
            shape = () if slot.number and mesh is not None else (0,) * len(axes or ())
            return [ArrayRecord(slot.path, axes, shape, 0, choice, rules, mesh)]
        return [
            ArrayRecord(
                info.path,
                slot.names_of(info),
                info.shape,
                nbytes(info),
                choice,
                rules,
                mesh,
            )
            for info in slot.arrays
        ]

    def _without_rules(self, rules_for: RulesFor) -> list[Finding]:
        if self.rules or self.names_alone:
            return []
        return [
            _no_rules(slot)
            for slot, mesh, choice in zip(
                self.survey.slots, self.meshes, self._choices, strict=True
            )
            if mesh is not None
            and (slot.box is not None or rules_for == "all")
            and slot.rules is None
            and choice.place is None
            and choice.more_rules is None
            and any(isinstance(name, (str, tuple)) for name in slot.axes or ())
        ]

    def checked(self, more: Sequence[Finding] = ()) -> TreeLayout:
        """Returns this layout if there is no error in it.

        Args:
            more: Findings to list with those of the layout.

        Raises:
            NoRulesError: If logical names have no rules; names the first.
            PartitionCheckError: If there are other errors; lists all.
        """
        for finding in self.findings:
            if finding.code == "no-rules":
                raise NoRulesError(str(finding))
        raise_on_errors([*self.findings, *more])
        return self

    def spec_entries(self) -> Any:
        """Returns the tree with specs in place of what is in the slots."""
        pairs = zip(self.survey.slots, self.specs, strict=True)
        return self.survey.arrange([entry_of(slot, each) for slot, each in pairs])

    def shardings(self) -> list[Sequence[NamedSharding]]:
        """Returns, for each slot, a sharding for each of its arrays; all slots must have a mesh."""
        rows = zip(self.specs, self.meshes, self._choices, strict=True)
        return [[_sharding(spec, mesh, choice) for spec in each] for each, mesh, choice in rows]

    def sharding_entries(self) -> Any:
        """Returns the tree with shardings in place of what is in the slots."""
        pairs = zip(self.survey.slots, self.shardings(), strict=True)
        return self.survey.arrange([entry_of(slot, each) for slot, each in pairs])


def require_mesh(mesh: AnyMesh | None, function: str) -> AnyMesh:
    """Returns the mesh given, else the one in scope.

    Args:
        mesh: The mesh or None.
        function: Who needs it, for the message.

    Raises:
        NoMeshError: If there is neither.
    """
    found = resolve_mesh(mesh)
    if found is None:
        raise NoMeshError(
            f"{function} needs a mesh: none was given and none is in scope. Pass one, "
            f"{function}(..., mesh=jax.make_mesh((2, 4), ('data', 'model'))), or put one in scope: "
            "with jax.set_mesh(mesh): ..."
        )
    return found


@functools.lru_cache(maxsize=4096)
def named_sharding(mesh: Any, spec: PartitionSpec, memory_kind: str | None = None) -> NamedSharding:
    """Returns the sharding of a mesh and a spec, the same object each time."""
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _sharding(spec: PartitionSpec, mesh: AnyMesh | None, choice: Choice) -> NamedSharding:
    kind = choice.memory_kind
    if isinstance(choice.place, NamedSharding):
        mesh = choice.place.mesh
        kind = choice.place.memory_kind if kind is None else kind
    return named_sharding(mesh, spec, kind)


def _as_given(slot: Slot, choice: Choice, specs: list[PartitionSpec]) -> list[PartitionSpec]:
    """The specs of a box are one: they differ at most in how many dimensions follow its entries."""
    if not isinstance(slot.axes, PartitionSpec) or choice.place is not None:
        return specs
    return [PartitionSpec(*tuple(spec)[: len(slot.axes)]) for spec in specs]


def _many_arrays(slot: Slot) -> Finding:
    text = (
        f"{format_path(slot.path)}: axis names {slot.axes} for a value of {len(slot.arrays)} "
        "arrays. Axis names say what the dimensions of one array are: give each array a Variable "
        "of its own, or give no axes, and the arrays are replicated."
    )
    return Finding("error", slot.path, "axes-of-many", text)


def _no_rules(slot: Slot) -> Finding:
    text = (
        f"{format_path(slot.path)}: has the logical names {slot.axes}, and there are no rules to "
        "map them to mesh axes. Pass them, rules=rules, or put them in scope: "
        "with sx.axis_rules(rules): ..."
    )
    return Finding("error", slot.path, "no-rules", text)
