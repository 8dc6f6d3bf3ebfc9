# SPDX-License-Identifier: Apache-2.0
"""Rules: ordered pairs of the logical name of a dimension and the mesh axes that split it.

The spec of an array comes about in this order. Each step names the function to read.

1. ``check_names`` (this file) wants one entry per dimension. Names that are malformed or stand
   twice in one array are an error, as is another number of names than dimensions. The spec is then
   ``P()``.
2. ``assign`` (``assignment.py``) walks the rules once, from the first to the last. A rule is
   *chosen* if its name waits for one and its mesh axes are free in this array; each name has one
   chosen rule at most, and each mesh axis one holder. A rule whose name waits while a mesh axis is
   taken is *passed over*. A rule whose name has its rule already is not looked at.
3. ``ResolvedRules.spec`` (``resolved.py``) makes the spec of the chosen rules. A mesh axis that the
   mesh does not have is left out. Sizes change nothing: a dimension that cannot be cut into equal
   parts is an error, and its entry stays. Nor do the types of mesh axes, Auto or Explicit.

An override of one leaf comes before all of these (``tree/overrides.py``): rules are put before the
others in step 2, and a spec or sharding takes the place of all steps (``explicit_spec`` in
``entries.py``). Which rules and mesh a leaf of a tree has, among them those of its own box, is said
in ``tree/layout.py``.

Who says what, each as a list of ``Diagnostic``:

* ``ResolvedRules.spec``, of one array: malformed names, rules passed over, mesh axes that do not
  exist, sizes that cannot be divided. It says nothing of a rule that is not looked at, and of a
  name without a rule only where it looks misspelt.
* ``Rules.check`` (this file), of the rules alone: a mesh axis that the mesh does not have (error),
  a rule that is *shadowed* (warning), and a mesh axis that no rule names (info). A rule is shadowed
  by an earlier one for the same name if no array could ever choose it: above all where no rule for
  another name, before the earlier one, can take a mesh axis of that one (``_why_shadowed``).
* ``shardax.check``, of a tree: all of the first; and of the second the errors and warnings, where
  no array of the tree has chosen the rule. A rule that is not chosen and neither shadowed nor wrong
  is an ``unused-rule`` (info, or warning if it looks misspelt). See
  ``unused_rules_of`` in ``partition/tree/diagnostics.py``. Of arrays that are on devices already it
  also says where they lie otherwise (``misplaced``, ``elsewhere``, in ``partition/tree/check.py``).

``findings.py`` lists every code and severity. Two *policies* of the rules change step 2:
``on_conflict="error"`` makes a rule that is passed over an error, ``on_unmapped="error"`` a name
without a rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NoReturn, cast

from jax.sharding import AxisType, PartitionSpec

from shardax.partition import errors, findings
from shardax.partition.assignment import (
    UNCONSTRAINED,
    AxisAssignment,
    Names,
    Rule,
    SpecEntry,
    assign,
    format_rule,
    format_target,
    mesh_axes_of,
    strings,
)
from shardax.partition.mesh import AnyMesh, resolve_mesh

OnConflict = Literal["first", "error"]
OnUnmapped = Literal["replicate", "error"]


@dataclasses.dataclass(init=False, repr=False, unsafe_hash=True)
class Rules:
    """Ordered pairs of a logical name and its target, with two policies.

    Rules are immutable and hashable.

    Args:
        pairs: Pairs, highest priority first; a mapping; or other Rules. A list of mesh axes (as
            read from JSON or YAML) counts as a tuple. A name may occur in several pairs.
        on_conflict: ``"first"``: the earlier rule has the mesh axis. ``"error"``: raise. None: as
            in ``pairs`` if these are Rules, else ``"first"``.
        on_unmapped: ``"replicate"``: a name without a rule is not split. ``"error"``: raise. None:
            as in ``pairs`` if these are Rules, else ``"replicate"``.

    Raises:
        PartitionError: If a pair or a policy is malformed.

    Example:
        >>> rules = Rules([("batch", "data"), ("embed", None), ("mlp", ["model", "expert"])])
        >>> rules
        Rules([('batch', 'data'), ('embed', None), ('mlp', ('model', 'expert'))])
        >>> rules.spec(("embed", "mlp"))
        P(None, ('model', 'expert'))
    """

    pairs: tuple[Rule, ...]
    on_conflict: OnConflict
    on_unmapped: OnUnmapped

    def __init__(
        self,
        pairs: RulesLike = (),
        on_conflict: OnConflict | None = None,
        on_unmapped: OnUnmapped | None = None,
    ) -> None:
        base = pairs if isinstance(pairs, Rules) else None
        checked_pairs = _checked_pairs(pairs) if base is None else base.pairs

        if on_conflict is None:
            on_conflict = "first" if base is None else base.on_conflict
        if on_unmapped is None:
            on_unmapped = "replicate" if base is None else base.on_unmapped
        _check_policy("on_conflict", on_conflict, ("first", "error"))
        _check_policy("on_unmapped", on_unmapped, ("replicate", "error"))

        object.__setattr__(self, "pairs", checked_pairs)
        object.__setattr__(self, "on_conflict", on_conflict)
        object.__setattr__(self, "on_unmapped", on_unmapped)

    @property
    def names(self) -> tuple[str, ...]:
        """The logical names, each once, in order of their first rule."""
        return tuple(dict.fromkeys(name for name, _ in self.pairs))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes in targets, each once, in order."""
        return tuple(dict.fromkeys(axis for _, to in self.pairs for axis in mesh_axes_of(to)))

    def assign(self, names: Iterable[object]) -> AxisAssignment:
        """Assigns mesh axes to the dimensions of one array, regardless of policies.

        Args:
            names: One entry per dimension (see ``logical_to_mesh_axes``).

        Returns:
            Spec entries, chosen rules, rules passed over, and unmapped names.

        Raises:
            PartitionError: If ``names`` is malformed or holds a name twice.

        Example:
            >>> Rules({"embed": "model", "mlp": "model"}).assign(("embed", "mlp")).passed_over
            (PassedOver(rule=('mlp', 'model'), mesh_axis='model', winner=('embed', 'model')),)
        """
        return assign(check_names(names), self.pairs)

    def spec(self, names: Iterable[object]) -> PartitionSpec:
        """Returns the ``PartitionSpec`` of one array, under the policies.

        Args:
            names: One entry per dimension (see ``logical_to_mesh_axes``).

        Raises:
            PartitionError: If ``names`` is malformed or holds a name twice, or under
                ``on_conflict="error"``, or under ``on_unmapped="error"``.

        Example:
            >>> Rules([("embed", "x"), ("mlp", "x"), ("mlp", "y")]).spec(("mlp", "embed"))
            P('y', 'x')
        """
        checked_names = check_names(names)
        assignment = assign(checked_names, self.pairs)
        if self.on_unmapped == "error" and assignment.unmapped:
            raise errors.unmapped_names(checked_names, assignment, self.names)
        if self.on_conflict == "error" and assignment.passed_over:
            raise errors.mesh_axis_conflict(checked_names, assignment)
        return PartitionSpec(*assignment.entries)

    def check(self, mesh: AnyMesh | None = None) -> list[errors.Diagnostic]:
        """Returns diagnostics of the rules by themselves, without any array.

        ``shardax.check(model, mesh, rules)`` is about the arrays of a model. Of rules that no array
        has chosen it says these errors and warnings, and which are unused for no other reason.

        Args:
            mesh: The mesh, also an ``AbstractMesh``; None to check the rules alone.

        Returns:
            Diagnostics with the path ``()``: an error for every mesh axis that the mesh lacks, a
            warning for a rule that is never used because of an earlier one for the same name, and
            information on a mesh axis that no rule names.

        Raises:
            TransformError: If ``mesh`` is neither a mesh nor None.

        Example:
            >>> import jax
            >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
            >>> rules = Rules([("embed", None), ("mlp", "modle"), ("embed", "data")])
            >>> for diagnostic in rules.check(mesh):
            ...     print(diagnostic.severity, diagnostic.code)
            error unknown-mesh-axis
            warning shadowed-rule
            info unused-mesh-axis
        """
        shadowed = list(shadowed_rules(self).values())
        if mesh is None:
            return shadowed

        mesh = resolve_mesh(mesh)
        assert mesh is not None
        unknown = [
            diagnostic for rule in self.pairs for diagnostic in unknown_mesh_axes(rule, mesh)
        ]
        return [*unknown, *shadowed, *_unused_mesh_axes(self, mesh)]

    def validate(self, mesh: AnyMesh | None = None) -> Rules:
        """Returns these rules if a mesh has all their axes, else raises.

        Args:
            mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.

        Returns:
            The rules themselves, so that they can be checked where they are used:
            ``with axis_rules(rules.validate(mesh)): ...``

        Raises:
            PartitionCheckError: If ``check`` finds errors; lists all of them.
            NoMeshError: If no mesh is given and none is in scope.

        Example:
            >>> import jax
            >>> rules = Rules({"embed": None, "mlp": "model"})
            >>> rules.validate(jax.sharding.AbstractMesh((2, 4), ("data", "model"))) is rules
            True
        """
        mesh = resolve_mesh(mesh)
        if mesh is None:
            raise errors.validation_without_mesh()
        errors.raise_on_errors(self.check(mesh))
        return self

    def extend(self, more: RulesLike) -> Rules:
        """Returns these rules followed by ``more``, of lower priority; policies stay.

        Example:
            >>> Rules({"mlp": "model"}).extend({"mlp": "data"})
            Rules([('mlp', 'model'), ('mlp', 'data')])
        """
        return self.replace(pairs=self.pairs + Rules(more).pairs)

    def override(self, more: RulesLike) -> Rules:
        """Returns ``more`` followed by these rules, of lower priority; policies stay.

        Example:
            >>> Rules({"mlp": "model"}).override({"mlp": "data"})
            Rules([('mlp', 'data'), ('mlp', 'model')])
        """
        return self.replace(pairs=Rules(more).pairs + self.pairs)

    def replace(
        self,
        *,
        pairs: RulesLike | None = None,
        on_conflict: OnConflict | None = None,
        on_unmapped: OnUnmapped | None = None,
    ) -> Rules:
        """Returns Rules with some parts changed.

        Example:
            >>> Rules({"mlp": "model"}).replace(on_conflict="error")
            Rules([('mlp', 'model')], on_conflict='error')
        """
        if pairs is None:
            return Rules(self, on_conflict, on_unmapped)
        new_pairs = Rules(pairs).pairs
        return Rules(new_pairs, on_conflict or self.on_conflict, on_unmapped or self.on_unmapped)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        pairs = ", ".join(f"({name!r}, {format_target(target)})" for name, target in self.pairs)
        conflict = "" if self.on_conflict == "first" else f", on_conflict={self.on_conflict!r}"
        unmapped = "" if self.on_unmapped == "replicate" else f", on_unmapped={self.on_unmapped!r}"
        return f"Rules([{pairs}]{conflict}{unmapped})"

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise errors.immutable_rules(name)

    __delattr__ = __setattr__


RulesLike = Rules | Mapping[str, SpecEntry] | Iterable[Any]
"""Rules, a mapping of name to target, or pairs."""


def _check_policy(option: str, value: str, policies: tuple[str, str]) -> None:
    # Not by ``Options`` of ``_core.checks``: rules are made on the way of every layout.
    if value not in policies:
        raise errors.unknown_policy(option, value, policies)


def _checked_pairs(pairs: RulesLike) -> tuple[Rule, ...]:
    """Returns the pairs, each a string and a target."""
    if isinstance(pairs, Mapping):
        pairs = cast("Mapping[str, SpecEntry]", pairs).items()
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise errors.no_pairs(pairs)

    checked: list[Rule] = []
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise errors.no_pair(position, pair)
        name, target = pair
        if not isinstance(name, str):
            raise errors.malformed_rule_name(position, pair)
        checked.append((_as_plain_string(name), _checked_target(position, name, target)))
    return tuple(checked)


def _checked_target(position: int, name: str, target: SpecEntry) -> SpecEntry:
    """Returns the target of a rule; a list of mesh axes becomes a tuple, an empty one None."""
    if target is None or target is UNCONSTRAINED:
        return target
    if isinstance(target, str):
        return _as_plain_string(target)
    if not isinstance(target, (tuple, list)):
        raise errors.malformed_target(position, name, target)

    mesh_axes = tuple(target)
    if not all(isinstance(axis, str) for axis in mesh_axes):
        raise errors.malformed_target_axis(position, name, mesh_axes)
    if len(set(mesh_axes)) < len(mesh_axes):
        raise errors.repeated_target_axis(position, name, mesh_axes)
    return tuple(_as_plain_string(axis) for axis in mesh_axes) or None


def _as_plain_string(name: str) -> str:
    """Returns the name as a ``str`` proper, also of a string enumeration."""
    return str.__str__(name)


def check_names(names: Iterable[Any]) -> Names:
    """Returns the names of one array as a checked tuple; lists inside become tuples."""
    if isinstance(names, str):
        raise errors.names_in_one_string(names)
    if not isinstance(names, Iterable):
        raise errors.names_not_iterable(names)

    checked = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in names)
    for position, entry in enumerate(checked):
        if not _is_name_of_dimension(entry):
            raise errors.malformed_name(checked, position)

    every_name = list(strings(checked))
    if len(set(every_name)) < len(every_name):
        repeated = sorted({name for name in every_name if every_name.count(name) > 1})
        raise errors.repeated_names(checked, repeated)
    return checked


def _is_name_of_dimension(entry: object) -> bool:
    if isinstance(entry, tuple):
        return all(isinstance(name, str) for name in entry)
    return isinstance(entry, str) or entry is None or entry is UNCONSTRAINED


@functools.lru_cache(maxsize=1024)
def identity_rules(names: Names) -> Rules:
    """Returns rules from each mesh axis to itself."""
    return Rules([(axis, axis) for axis in strings(names)])


def map_to_themselves(rules: Rules) -> bool:
    """Whether rules map each name to the mesh axis of that name; true of no rules."""
    return all(name == target for name, target in rules.pairs)


# --- rules by themselves --------------------------------------------------------------------------


def unknown_mesh_axes(rule: Rule, mesh: AnyMesh) -> list[errors.Diagnostic]:
    """Returns an error for each mesh axis of a rule that the mesh does not have."""
    return [
        findings.rule_of_unknown_mesh_axis(rule, axis, mesh)
        for axis in mesh_axes_of(rule[1])
        if axis not in mesh.shape
    ]


def shadowed_rules(rules: Rules) -> dict[int, errors.Diagnostic]:
    """Returns a warning for each rule that no array can choose, by the position of the rule."""
    warnings: dict[int, errors.Diagnostic] = {}
    for position, rule in enumerate(rules.pairs):
        for earlier_position, earlier_rule in enumerate(rules.pairs[:position]):
            why = _why_shadowed(rules, earlier_position, position)
            if why is not None:
                warnings[position] = findings.shadowed_rule(rule, earlier_rule, why)
                break
    return warnings


def _why_shadowed(rules: Rules, earlier_position: int, position: int) -> str | None:
    """Returns why no array can choose a rule beside an earlier one; None if one can."""
    earlier_rule, rule = rules.pairs[earlier_position], rules.pairs[position]
    name, earlier_target = earlier_rule
    if rule[0] != name:
        return None

    # Every array with this name chooses the earlier rule, unless a rule before that one, for
    # another name, can take one of its mesh axes.
    earlier_axes = set(mesh_axes_of(earlier_target))
    rival_axes: set[str] = set()
    for rival_name, rival_target in rules.pairs[:earlier_position]:
        if rival_name != name:
            rival_axes.update(mesh_axes_of(rival_target))

    if earlier_axes.isdisjoint(rival_axes):
        return f"the earlier rule {format_rule(earlier_rule)} always serves {name!r}"

    # Whatever takes a mesh axis from the earlier rule takes it from this one as well.
    if earlier_axes.issubset(mesh_axes_of(rule[1])):
        return (
            f"where the earlier rule {format_rule(earlier_rule)} loses its mesh axis, this one "
            "does too"
        )

    if rules.on_conflict == "error":
        return (
            "under on_conflict='error' it is an error where the earlier rule "
            f"{format_rule(earlier_rule)} loses"
        )
    return None


def _unused_mesh_axes(rules: Rules, mesh: AnyMesh) -> list[errors.Diagnostic]:
    """Returns information on each mesh axis that no rule names."""
    diagnostics: list[errors.Diagnostic] = []
    for axis, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True):
        size = mesh.shape[axis]
        # An axis of size 1 splits nothing. Inside of shard_map no rule can name a Manual axis.
        is_usable = size > 1 and axis_type is not AxisType.Manual
        if is_usable and axis not in rules.mesh_axes:
            diagnostics.append(findings.unused_mesh_axis(axis, size))
    return diagnostics
