# SPDX-License-Identifier: Apache-2.0
"""Rules: the mapping of logical axis names to mesh axes.

A *rule* is a pair of the logical name of a dimension (``"embed"``) and a *target*: a mesh axis, a
tuple of mesh axes (the first varying slowest), None (replicate, on purpose), or
``PartitionSpec.UNCONSTRAINED`` (leave it to the compiler). One array uses a mesh axis only once.

*Assignment* walks the rules once, in order of priority. A rule is *chosen* if its name occurs in
the array, that name has no chosen rule yet, and every mesh axis of its target is free. A rule whose
name is waiting but whose target is (even partly) taken is *passed over*; a later rule for the same
name may then be chosen. These are the semantics of Flax linen's logical axes. Beyond linen, a
dimension may carry a tuple of names, ``(("batch", "length"), "embed")``: it was made by merging
named dimensions, and is laid out over the mesh axes of all of them, in that order.

A *conflict* is a name that lost a mesh axis to another, an *unmapped* name one without a rule.
Malformed rules are refused at construction; ``Rules.check`` diagnoses well-formed ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, cast

from jax.sharding import AxisType, PartitionSpec

from shardax._transforms.errors import NoMeshError
from shardax.partition import errors
from shardax.partition.mesh import AnyMesh, mesh_text, resolve_mesh

UNCONSTRAINED: Any = PartitionSpec.UNCONSTRAINED

SpecEntry = Any
"""``str``, ``tuple[str, ...]``, None or ``UNCONSTRAINED`` (whose type JAX does not publish)."""

Rule = tuple[str, SpecEntry]
Names = tuple[Any, ...]
"""One entry per dimension: a name, None, ``UNCONSTRAINED``, or a tuple of names."""


class PassedOver(NamedTuple):
    """A rule passed over for want of a mesh axis."""

    rule: Rule  # ``rule[0]`` is the name that went without
    mesh_axis: str  # the first of its mesh axes that was taken
    winner: Rule  # the chosen rule that holds that mesh axis


class AxisAssignment(NamedTuple):
    """The mesh axes of one array's names, by rules."""

    entries: tuple[SpecEntry, ...]  # one per dimension
    chosen: dict[str, int]  # for each name that got a rule, the rule's position
    passed_over: tuple[PassedOver, ...]
    unmapped: tuple[str, ...]  # names without a rule, in order of dimensions


def mesh_axes_of(entry: SpecEntry) -> tuple[str, ...]:
    """Mesh axes of a rule's target or ``PartitionSpec`` entry, major to minor."""
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def format_target(target: SpecEntry) -> str:
    """Text of a target, as in source code."""
    return "PartitionSpec.UNCONSTRAINED" if target is UNCONSTRAINED else repr(target)


def format_rule(rule: Rule) -> str:
    """Text of a rule, as in source code."""
    return f"({rule[0]!r}, {format_target(rule[1])})"


def strings(names: Names) -> Iterator[str]:
    """Logical names, those of merged dimensions one by one."""
    for entry in names:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, tuple):
            yield from entry


def check_names(names: Iterable[object]) -> Names:
    """Names of one array as a checked tuple; lists inside become tuples."""
    if isinstance(names, str):
        raise errors.PartitionError(
            f"Axis names {names!r} are one string; give one name per dimension: ({names!r},)."
        )
    if not isinstance(names, Iterable):
        raise errors.PartitionError(
            f"Axis names are {names!r} of type {type(names).__name__}; give one entry per "
            "dimension, for instance ('embed', 'mlp')."
        )
    entries = tuple(tuple(name) if isinstance(name, list) else name for name in names)
    for position, entry in enumerate(entries):
        if isinstance(entry, tuple):
            valid = all(isinstance(part, str) for part in entry)
        else:
            valid = isinstance(entry, str) or entry is None or entry is UNCONSTRAINED
        if not valid:
            raise errors.PartitionError(
                f"Axis names {entries}: entry {position} is {entry!r} of type "
                f"{type(entry).__name__}. An entry is a string, None (unnamed), "
                "PartitionSpec.UNCONSTRAINED, or a tuple of strings for a merged dimension."
            )
    flat = list(strings(entries))
    repeated = sorted({name for name in flat if flat.count(name) > 1})
    if repeated:
        raise errors.PartitionError(
            f"Axis names {entries} hold {', '.join(map(repr, repeated))} more than once, but one "
            "array can use a mesh axis only once. Name the dimensions apart, for instance "
            f"{repeated[0] + '_in'!r} and {repeated[0] + '_out'!r}, or None for one to replicate."
        )
    return entries


@functools.lru_cache(maxsize=4096)
def assign(names: Names, rules: tuple[Rule, ...]) -> AxisAssignment:
    """Mesh axes of checked names by rules, highest priority first."""
    waiting = dict.fromkeys(strings(names))
    unmapped = tuple(name for name in waiting if all(rule[0] != name for rule in rules))
    chosen: dict[str, int] = {}
    holder: dict[str, Rule] = {}  # the rule that has a mesh axis
    passed_over: list[PassedOver] = []
    for position, rule in enumerate(rules):
        name, target = rule
        if name not in waiting:
            continue
        axes = mesh_axes_of(target)
        used_axis = next((axis for axis in axes if axis in holder), None)
        if used_axis is not None:
            passed_over.append(PassedOver(rule, used_axis, holder[used_axis]))
            continue
        del waiting[name]
        chosen[name] = position
        holder.update(dict.fromkeys(axes, rule))
    targets = {name: rules[position][1] for name, position in chosen.items()}
    entries = tuple(_entry(name, targets) for name in names)
    return AxisAssignment(entries, chosen, tuple(passed_over), unmapped)


def _entry(name: object, targets: dict[str, SpecEntry]) -> SpecEntry:
    """Entry of one dimension, given targets by name."""
    if isinstance(name, str):
        return targets.get(name)
    if not isinstance(name, tuple):
        return name
    parts = [targets.get(part) for part in name]
    if any(part is UNCONSTRAINED for part in parts):
        return UNCONSTRAINED
    return tuple(axis for part in parts for axis in mesh_axes_of(part)) or None


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
        checked = _as_pairs(pairs) if base is None else base.pairs
        for name, value, policies in (
            ("on_conflict", on_conflict, ("first", "error")),
            ("on_unmapped", on_unmapped, ("replicate", "error")),
        ):
            if value is None:
                value = policies[0] if base is None else getattr(base, name)
            if value not in policies:  # by itself, as rules are made on the way of every layout
                expected = " or ".join(map(repr, policies))
                raise errors.PartitionError(f"{name}={value!r} must be {expected}.")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "pairs", checked)

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
        entries = check_names(names)
        assignment = assign(entries, self.pairs)
        if self.on_unmapped == "error" and assignment.unmapped:
            raise errors.PartitionError(
                f"Axis names {entries}: {explain_unmapped(assignment, self)}"
            )
        if self.on_conflict == "error" and assignment.passed_over:
            raise errors.PartitionError(f"Axis names {entries}: {explain_conflicts(assignment)}")
        return PartitionSpec(*assignment.entries)

    def check(self, mesh: AnyMesh | None = None) -> list[errors.Diagnostic]:
        """Returns diagnostics of the rules by themselves, without any array.

        ``shardax.check(model, mesh, rules)`` has more, because it knows the arrays.

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
        where = None if mesh is None else resolve_mesh(mesh)
        shadowed = shadowed_rules(self).values()
        if where is None:
            return list(shadowed)
        unknown = [d for rule in self.pairs for d in unknown_mesh_axes(rule, where)]
        return [*unknown, *shadowed, *_unused_mesh_axes(self, where)]

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
        where = resolve_mesh(mesh)
        if where is None:
            raise NoMeshError(
                "Rules are validated against a mesh: none was given and none is in scope. Pass "
                "one, rules.validate(mesh); rules.check() checks rules alone."
            )
        errors.raise_on_errors(self.check(where))
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
        return Rules(
            self.pairs if pairs is None else Rules(pairs).pairs,
            self.on_conflict if on_conflict is None else on_conflict,
            self.on_unmapped if on_unmapped is None else on_unmapped,
        )

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
        raise AttributeError(
            f"Rules are immutable: cannot change {name!r}. Make new ones with rules.replace(...), "
            f"rules.extend(...) or rules.override(...)."
        )

    __delattr__ = __setattr__


RulesLike = Rules | Mapping[str, SpecEntry] | Iterable[Any]
"""Rules, a mapping of name to target, or pairs."""


def _as_pairs(pairs: object) -> tuple[Rule, ...]:
    example = "Rules([('embed', None), ('mlp', 'model')])"
    if isinstance(pairs, Mapping):
        pairs = cast("Mapping[Any, Any]", pairs).items()
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise errors.PartitionError(
            f"Rules are made of pairs or a mapping, not of {pairs!r} ({type(pairs).__name__}). "
            f"Write for instance {example}; Rules([]) has no rules."
        )
    checked: list[Rule] = []
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise errors.PartitionError(
                f"Rule {position} is {pair!r}, not a pair of a logical name and a target. "
                f"Write for instance {example}."
            )
        name, target = pair
        if not isinstance(name, str):
            raise errors.PartitionError(
                f"Rule {position} is {tuple(pair)!r}: the logical name {name!r} is of type "
                f"{type(name).__name__}; names are strings."
            )
        checked.append((_plain(name), _as_target(position, name, target)))
    return tuple(checked)


def _as_target(position: int, name: str, target: object) -> SpecEntry:
    if target is None or target is UNCONSTRAINED:
        return target
    if isinstance(target, str):
        return _plain(target)
    where = f"Rule {position} for {name!r}"
    if not isinstance(target, (tuple, list)):
        raise errors.PartitionError(
            f"{where} has the target {target!r} of type {type(target).__name__}. A target is a "
            "mesh axis, a tuple of mesh axes, None (replicate) or PartitionSpec.UNCONSTRAINED."
        )
    axes = tuple(target)
    if not all(isinstance(axis, str) for axis in axes):
        raise errors.PartitionError(
            f"{where} has the target {axes!r}: a tuple holds names of mesh axes only. "
            f"To offer a second choice, write a second rule for {name!r} after this one."
        )
    if len(set(axes)) < len(axes):
        raise errors.PartitionError(
            f"{where} has the target {axes!r}, which holds a mesh axis twice; one array "
            f"can use a mesh axis only once. Write {tuple(dict.fromkeys(axes))!r}."
        )
    return tuple(map(_plain, axes)) or None


def _plain(name: str) -> str:
    """The name as a ``str`` proper, also of a string enumeration."""
    return str.__str__(name)


def explain_conflicts(assignment: AxisAssignment) -> str:
    """Text of every rule passed over and its winner."""
    parts = [
        f"mesh axis {loss.mesh_axis!r} is wanted by {loss.rule[0]!r} through the rule "
        f"{format_rule(loss.rule)}, but {loss.winner[0]!r} already has it through "
        f"{format_rule(loss.winner)}"
        for loss in assignment.passed_over
    ]
    return (
        f"{'; '.join(parts)}. One array can use a mesh axis only once. Give one of the names "
        "another mesh axis or None, or let the earlier rule win with on_conflict='first'."
    )


def explain_unmapped(assignment: AxisAssignment, rules: Rules) -> str:
    """Text of the names without a rule, and similar names."""
    names = ", ".join(map(repr, assignment.unmapped))
    near = [
        f"{match!r} for {name!r}"
        for name in assignment.unmapped
        for match in difflib.get_close_matches(name, rules.names, n=1)
    ]
    hint = f" Did you mean {' and '.join(near)}?" if near else ""
    listed = ", ".join(map(repr, rules.names))
    context = f"names with rules: {listed}" if rules else "there are no rules"
    return (
        f"no rule mentions {names} ({context}).{hint} Add the rule ({assignment.unmapped[0]!r}, "
        "None) to replicate on purpose, or use on_unmapped='replicate'."
    )


@functools.lru_cache(maxsize=1024)
def identity_rules(names: Names) -> Rules:
    """Rules from each mesh axis to itself."""
    axes = (axis for name in names for axis in mesh_axes_of(name))
    return Rules([(axis, axis) for axis in axes if isinstance(axis, str)])


def unknown_mesh_axes(rule: Rule, mesh: AnyMesh) -> Iterator[errors.Diagnostic]:
    """Yields an error for each mesh axis unknown to the mesh."""
    for axis in mesh_axes_of(rule[1]):
        if axis not in mesh.shape:
            text = (
                f"The rule {format_rule(rule)} names the mesh axis {axis!r}, but the mesh has the "
                f"axes ({mesh_text(mesh.shape)}).{errors.did_you_mean(axis, mesh.shape)} Correct "
                f"or remove it, or make the mesh with an axis {axis!r} (of size 1 to switch it "
                "off)."
            )
            yield errors.Diagnostic("error", (), "unknown-mesh-axis", text)


def shadowed_rules(rules: Rules) -> dict[int, errors.Diagnostic]:
    """Warnings about rules that an earlier one makes useless for any array, by position."""
    pairs = rules.pairs
    warnings: dict[int, errors.Diagnostic] = {}
    for position, rule in enumerate(pairs):
        for earlier, first in enumerate(pairs[:position]):
            why = _why_shadowed(pairs, earlier, position, rules.on_conflict)
            if why is not None:
                way = "" if first == rule else f", or move it above {format_rule(first)}"
                text = f"The rule {format_rule(rule)} is never used: {why}. Remove it{way}."
                warnings[position] = errors.Diagnostic("warning", (), "shadowed-rule", text)
                break
    return warnings


def _why_shadowed(pairs: Sequence[Rule], earlier: int, later: int, on_conflict: str) -> str | None:
    """Why one rule makes another useless for any array, or None."""
    name, target = pairs[earlier]
    if name != pairs[later][0]:
        return None
    first = format_rule(pairs[earlier])
    axes = set(mesh_axes_of(target))
    rivals = [rule for rule in pairs[:earlier] if rule[0] != name]
    if not any(axes.intersection(mesh_axes_of(rule[1])) for rule in rivals):
        return f"the earlier rule {first} always serves {name!r}"
    # Whatever takes an axis from the earlier rule takes it from the later one as well.
    if axes.issubset(mesh_axes_of(pairs[later][1])):
        return f"where the earlier rule {first} loses its mesh axis, this one does too"
    if on_conflict == "error":
        return f"under on_conflict='error' it is an error where the earlier rule {first} loses"
    return None


def _unused_mesh_axes(rules: Rules, mesh: AnyMesh) -> Iterator[errors.Diagnostic]:
    for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if axis not in rules.mesh_axes and mesh.shape[axis] > 1 and kind is not AxisType.Manual:
            text = (
                f"No rule names the mesh axis {axis!r} of size {mesh.shape[axis]}: every array is "
                "held whole along it."
            )
            yield errors.Diagnostic("info", (), "unused-mesh-axis", text)
