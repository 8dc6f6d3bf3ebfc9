# SPDX-License-Identifier: Apache-2.0
"""Rules: how logical axis names map to mesh axes.

A *rule* is a pair of a logical name and a *target*: a mesh axis, a tuple of mesh axes (the
dimension is split over all of them, the first varying slowest), None (replicate, on purpose), or
``PartitionSpec.UNCONSTRAINED`` (leave it to the compiler). ``Rules`` are pairs in order of
priority: where two of an array's names want one mesh axis, the earlier rule has it, and the loser
may fall back on a later rule of its own. The walk itself is in ``shardax.partition.rules``.

Two *policies* say what to do when that is not enough. A *conflict* is a name that lost a mesh axis
to another: ``on_conflict="first"`` goes on, ``"error"`` raises. An *unmapped* name is one that no
rule mentions: ``on_unmapped="replicate"`` leaves its dimension whole, ``"error"`` raises.

Malformed rules are refused when they are made. What is wrong with well-formed ones over some mesh,
whatever the model, ``Rules.check`` says (see ``shardax.partition.rules``).

Assignment: which dimension of one array gets which mesh axes.

A *name* is the logical name of a dimension (``"embed"``); a *rule* is a pair of a name and a
*target*: one mesh axis, a tuple of mesh axes, ``None`` (replicate) or
``PartitionSpec.UNCONSTRAINED`` (leave it to the compiler). Rules stand in order of priority, and
one array can use a mesh axis only once. So the rules are walked once, in order, and a rule is
*chosen* when its name occurs in the array, that name has no chosen rule yet, and every mesh axis of
its target is still free. A rule whose name is waiting but whose target is (even partly) taken is
*passed over*; a later rule for the same name may then be chosen. These are the semantics of Flax
linen's logical axes.

Beyond linen, one dimension may carry a tuple of names, ``(("batch", "length"), "embed")``: it was
made by merging named dimensions, and is laid out over the mesh axes of all of them, in that order.

This file knows nothing of meshes and policies: it reports what happened and others judge it.

Findings about rules by themselves, without any array: what could not be right for any model.

A rule is *shadowed* when an earlier rule for the same name leaves it nothing to do, whatever the
names of the array. That is so when the earlier rule

* can never be passed over, because no rule before it wants one of its mesh axes for another name;
* wants no mesh axis but such as the later one wants too, so that whatever takes one from the
  earlier rule takes it from the later one as well; or
* must not be passed over, under ``on_conflict="error"``.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NoReturn, cast

from jax.sharding import AxisType, PartitionSpec

from shardax._transforms.errors import NoMeshError
from shardax.partition.errors import (
    AxisConflictError,
    AxisNamesError,
    PartitionCheckError,
    RulesError,
    UnmappedAxisError,
)
from shardax.partition.findings import Finding, did_you_mean, format_mesh
from shardax.partition.mesh import AnyMesh, resolve_mesh

# --- Assignment ---

UNCONSTRAINED: Any = PartitionSpec.UNCONSTRAINED

Target = Any
"""``str``, ``tuple[str, ...]``, None or ``UNCONSTRAINED`` (whose type JAX does not publish)."""

Rule = tuple[str, Target]
Names = tuple[Any, ...]
"""One entry per dimension: a name, None, ``UNCONSTRAINED``, or a tuple of names."""


class PassedOver(NamedTuple):
    """A rule that could not be chosen, because an earlier choice had taken one of its mesh axes.

    Attributes:
        rule: The rule that was passed over; ``rule[0]`` is the name that went without.
        mesh_axis: The first of its mesh axes that was taken.
        winner: The chosen rule that holds that mesh axis.
    """

    rule: Rule
    mesh_axis: str
    winner: Rule


class Assignment(NamedTuple):
    """What the rules make of one array's names.

    Attributes:
        entries: One ``PartitionSpec`` entry per dimension.
        chosen: For each name that got a rule, the position of that rule among the rules.
        passed_over: The rules that came too late for a mesh axis, in order.
        unmapped: The names that no rule mentions, in order of dimensions.
    """

    entries: tuple[Target, ...]
    chosen: dict[str, int]
    passed_over: tuple[PassedOver, ...]
    unmapped: tuple[str, ...]

    @property
    def spec(self) -> PartitionSpec:
        """The entries as a ``PartitionSpec``."""
        return PartitionSpec(*self.entries)


def mesh_axes_of(target: Target) -> tuple[str, ...]:
    """Lists the mesh axes of a rule's target or of one ``PartitionSpec`` entry.

    Args:
        target: A mesh axis, a tuple of them, None or ``UNCONSTRAINED``.

    Returns:
        The mesh axes, major to minor; ``()`` for None and ``UNCONSTRAINED``.

    Example:
        >>> mesh_axes_of(("data", "model")), mesh_axes_of("data"), mesh_axes_of(None)
        (('data', 'model'), ('data',), ())
    """
    if isinstance(target, str):
        return (target,)
    return target if isinstance(target, tuple) else ()


def format_target(target: Target) -> str:
    """Formats a target as a user would type it."""
    return "PartitionSpec.UNCONSTRAINED" if target is UNCONSTRAINED else repr(target)


def format_rule(rule: Rule) -> str:
    """Formats a rule as the pair a user would type."""
    return f"({rule[0]!r}, {format_target(rule[1])})"


def check_names(names: Iterable[Any]) -> Names:
    """Returns ``names`` as a tuple after checking each entry.

    Args:
        names: One entry per dimension: a string, None, ``UNCONSTRAINED``, or a tuple of strings.

    Returns:
        The names; lists inside become tuples.

    Raises:
        AxisNamesError: If ``names`` is no sequence of entries, an entry is of another type, or a
            name occurs twice.

    Example:
        >>> check_names(["embed", None])
        ('embed', None)
    """
    if isinstance(names, str):
        raise AxisNamesError(
            f"Axis names {names!r} are one string; give one name per dimension: ({names!r},)."
        )
    if not isinstance(names, Iterable):
        raise AxisNamesError(
            f"Axis names are {names!r} of type {type(names).__name__}; give one entry per "
            "dimension, for instance ('embed', 'mlp')."
        )
    entries = tuple(tuple(name) if isinstance(name, list) else name for name in names)
    for position, entry in enumerate(entries):
        parts = entry if isinstance(entry, tuple) else (entry,)
        merged = isinstance(entry, tuple)
        if not all(isinstance(part, str) or (not merged and _is_blank(part)) for part in parts):
            raise AxisNamesError(
                f"Axis names {entries}: entry {position} is {entry!r} of type "
                f"{type(entry).__name__}. An entry is a string, None (unnamed), "
                "PartitionSpec.UNCONSTRAINED, or a tuple of strings for a merged dimension."
            )
    flat = list(strings(entries))
    repeated = sorted({name for name in flat if flat.count(name) > 1})
    if repeated:
        raise AxisNamesError(
            f"Axis names {entries} hold {', '.join(map(repr, repeated))} more than once. Rules map "
            "a name to mesh axes, and one array can use a mesh axis only once. Name the "
            f"dimensions apart, for instance {repeated[0] + '_in'!r} and {repeated[0] + '_out'!r}, "
            "or use None for the dimension to replicate."
        )
    return entries


@lru_cache(maxsize=4096)
def assign(names: Names, rules: tuple[Rule, ...]) -> Assignment:
    """Walks the rules once and chooses mesh axes for every dimension.

    Semantics of ``flax.linen.logical_to_mesh_axes`` (see the module docstring).

    Args:
        names: Checked names, one entry per dimension (see ``check_names``).
        rules: Pairs of a name and a target, highest priority first.

    Returns:
        The assignment; callers must not change its ``chosen``.

    Example:
        >>> rules = (("batch", "x"), ("features", "x"), ("heads", "y"), ("batch", "z"))
        >>> assign(("batch", "length", "heads", "features"), rules).entries
        ('x', None, 'y', None)
    """
    waiting = dict.fromkeys(strings(names))
    unmapped = tuple(name for name in waiting if all(rule[0] != name for rule in rules))
    chosen: dict[str, int] = {}
    holder: dict[str, Rule] = {}
    passed_over: list[PassedOver] = []
    for position, rule in enumerate(rules):
        name, target = rule
        if name not in waiting:
            continue
        wanted = mesh_axes_of(target)
        taken = next((axis for axis in wanted if axis in holder), None)
        if taken is not None:
            passed_over.append(PassedOver(rule, taken, holder[taken]))
            continue
        del waiting[name]
        chosen[name] = position
        holder.update(dict.fromkeys(wanted, rule))
    targets = {name: rules[position][1] for name, position in chosen.items()}
    entries = tuple(_entry(name, targets) for name in names)
    return Assignment(entries, chosen, tuple(passed_over), unmapped)


def _entry(name: Any, targets: dict[str, Target]) -> Target:
    """The ``PartitionSpec`` entry of one dimension, given the target of every name that has one."""
    if isinstance(name, str):
        return targets.get(name)
    if not isinstance(name, tuple):
        return name
    parts = [targets.get(part) for part in name]
    if any(part is UNCONSTRAINED for part in parts):
        return UNCONSTRAINED
    axes = tuple(axis for part in parts for axis in mesh_axes_of(part))
    return axes or None


def _is_blank(entry: Any) -> bool:
    return entry is None or entry is UNCONSTRAINED


def strings(names: Names) -> Iterable[str]:
    """Iterates over the logical names, those of merged dimensions one by one."""
    for entry in names:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, tuple):
            yield from entry


# --- Rule findings ---


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


# --- Rules ---

OnConflict = Literal["first", "error"]
OnUnmapped = Literal["replicate", "error"]


class Rules:
    """Ordered pairs of a logical name and its target, with two policies; immutable and hashable.

    Args:
        pairs: Pairs, highest priority first; a mapping; or other Rules. A list of mesh axes (as
            read from JSON or YAML) counts as a tuple. A name may occur in several pairs.
        on_conflict: ``"first"``: the earlier rule has the mesh axis. ``"error"``: raise. None: as
            in ``pairs`` if these are Rules, else ``"first"``.
        on_unmapped: ``"replicate"``: a name without a rule is not split. ``"error"``: raise. None:
            as in ``pairs`` if these are Rules, else ``"replicate"``.

    Raises:
        RulesError: If a pair or a policy is malformed.

    Example:
        >>> rules = Rules([("batch", "data"), ("embed", None), ("mlp", ["model", "expert"])])
        >>> rules
        Rules([('batch', 'data'), ('embed', None), ('mlp', ('model', 'expert'))])
        >>> rules.spec(("embed", "mlp"))
        P(None, ('model', 'expert'))
    """

    __slots__ = ("_hash", "on_conflict", "on_unmapped", "pairs")

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
        conflict: Any = on_conflict
        if conflict is None:
            conflict = "first" if base is None else base.on_conflict
        unmapped: Any = on_unmapped
        if unmapped is None:
            unmapped = "replicate" if base is None else base.on_unmapped
        _check_policy("on_conflict", conflict, ("first", "error"))
        _check_policy("on_unmapped", unmapped, ("replicate", "error"))
        checked = base.pairs if base is not None else _check_pairs(pairs)
        put = functools.partial(object.__setattr__, self)
        put("pairs", checked)
        put("on_conflict", conflict)
        put("on_unmapped", unmapped)
        put("_hash", hash((checked, conflict, unmapped)))

    @property
    def names(self) -> tuple[str, ...]:
        """The logical names, each once, in order of their first rule."""
        return tuple(dict.fromkeys(name for name, _ in self.pairs))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that occur in targets, each once, in order."""
        return tuple(dict.fromkeys(axis for _, to in self.pairs for axis in mesh_axes_of(to)))

    def assign(self, names: Iterable[Any]) -> Assignment:
        """Assigns mesh axes to the dimensions of one array, whatever the policies say.

        Args:
            names: One entry per dimension (see ``logical_to_mesh_axes``).

        Returns:
            The assignment: entries, rules chosen, rules passed over, names unmapped.

        Raises:
            AxisNamesError: If ``names`` is malformed or holds a name twice.

        Example:
            >>> Rules({"embed": "model", "mlp": "model"}).assign(("embed", "mlp")).passed_over
            (PassedOver(rule=('mlp', 'model'), mesh_axis='model', winner=('embed', 'model')),)
        """
        return assign(check_names(names), self.pairs)

    def spec(self, names: Iterable[Any]) -> PartitionSpec:
        """Returns the ``PartitionSpec`` of one array, under the policies.

        Args:
            names: One entry per dimension (see ``logical_to_mesh_axes``).

        Raises:
            AxisNamesError: If ``names`` is malformed or holds a name twice.
            AxisConflictError: Under ``on_conflict="error"``.
            UnmappedAxisError: Under ``on_unmapped="error"``.

        Example:
            >>> Rules([("embed", "x"), ("mlp", "x"), ("mlp", "y")]).spec(("mlp", "embed"))
            P('y', 'x')
        """
        entries = check_names(names)
        assignment = assign(entries, self.pairs)
        if self.on_unmapped == "error" and assignment.unmapped:
            raise UnmappedAxisError(f"Axis names {entries}: {explain_unmapped(assignment, self)}")
        if self.on_conflict == "error" and assignment.passed_over:
            raise AxisConflictError(f"Axis names {entries}: {explain_conflicts(assignment)}")
        return assignment.spec

    def check(self, mesh: AnyMesh | None = None) -> list[Finding]:
        """Returns all there is to say about the rules by themselves, before there is any array.

        ``shardax.check(model, mesh, rules)`` says more, because it knows the arrays.

        Args:
            mesh: The mesh, also an ``AbstractMesh``; None to judge the rules alone.

        Returns:
            Findings with the path ``()``: an error for every mesh axis that the mesh does not have,
            a warning for a rule that is never used because of an earlier one for the same name, and
            a note for a mesh axis that no rule names.

        Raises:
            MeshError: If ``mesh`` is neither a mesh nor None.

        Example:
            >>> import jax
            >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
            >>> rules = Rules([("embed", None), ("mlp", "modle"), ("embed", "data")])
            >>> for finding in rules.check(mesh):
            ...     print(finding.severity, finding.code)
            error unknown-mesh-axis
            warning shadowed-rule
            info unused-mesh-axis
        """
        where = None if mesh is None else resolve_mesh(mesh)
        return judge_rules(self.pairs, self.on_conflict, where)

    def validate(self, mesh: AnyMesh | None = None) -> Rules:
        """Returns these rules if a mesh has all axes that they name, else raises.

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
                "one, rules.validate(mesh); rules.check() judges rules alone."
            )
        errors = [finding for finding in self.check(where) if finding.severity == "error"]
        if errors:
            raise PartitionCheckError(errors)
        return self

    def extend(self, more: RulesLike) -> Rules:
        """Returns these rules followed by ``more``, which have lower priority; policies stay.

        Example:
            >>> Rules({"mlp": "model"}).extend({"mlp": "data"})
            Rules([('mlp', 'model'), ('mlp', 'data')])
        """
        return self.replace(pairs=self.pairs + Rules(more).pairs)

    def override(self, more: RulesLike) -> Rules:
        """Returns ``more`` followed by these rules, which have lower priority; policies stay.

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
        """Returns Rules with the given parts changed and the others kept.

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

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Rules)
            and self.pairs == other.pairs
            and self.on_conflict == other.on_conflict
            and self.on_unmapped == other.on_unmapped
        )

    def __repr__(self) -> str:
        pairs = ", ".join(f"({name!r}, {format_target(target)})" for name, target in self.pairs)
        conflict = "" if self.on_conflict == "first" else f", on_conflict={self.on_conflict!r}"
        unmapped = "" if self.on_unmapped == "replicate" else f", on_unmapped={self.on_unmapped!r}"
        return f"Rules([{pairs}]{conflict}{unmapped})"

    def __reduce__(self) -> Any:
        return (Rules, (self.pairs, self.on_conflict, self.on_unmapped))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"Rules are immutable: cannot set {name!r}. Make new ones with rules.replace(...), "
            f"rules.extend(...) or rules.override(...)."
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Rules are immutable: cannot delete {name!r}.")


RulesLike = Rules | Mapping[str, Target] | Iterable[Any]
"""Rules, a mapping of name to target, or pairs."""


def _check_policy(policy: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RulesError(f"{policy}={value!r} is not a policy; use one of {known}.")


def _check_pairs(pairs: Any) -> tuple[Rule, ...]:
    example = "Rules([('embed', None), ('mlp', 'model')])"
    if isinstance(pairs, Mapping):
        pairs = cast("Mapping[Any, Any]", pairs).items()
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise RulesError(
            f"Rules are made of pairs or a mapping, not of {pairs!r} ({type(pairs).__name__}). "
            f"Write for instance {example}; Rules([]) has no rules."
        )
    checked: list[Rule] = []
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise RulesError(
                f"Rule {position} is {pair!r}, not a pair of a logical name and a target. "
                f"Write for instance {example}."
            )
        name, target = pair
        if not isinstance(name, str):
            raise RulesError(
                f"Rule {position} is {tuple(pair)!r}: the logical name {name!r} is of type "
                f"{type(name).__name__}; names are strings."
            )
        checked.append((_plain(name), _check_target(position, name, target)))
    return tuple(checked)


def _check_target(position: int, name: str, target: Any) -> Target:
    if target is None or target is UNCONSTRAINED:
        return target
    if isinstance(target, str):
        return _plain(target)
    where = f"Rule {position} for {name!r}"
    if not isinstance(target, (tuple, list)):
        raise RulesError(
            f"{where} has the target {target!r} of type {type(target).__name__}. A target is a "
            "mesh axis, a tuple of mesh axes, None (replicate) or PartitionSpec.UNCONSTRAINED."
        )
    axes = tuple(target)
    if not all(isinstance(axis, str) for axis in axes):
        raise RulesError(
            f"{where} has the target {axes!r}: a tuple holds names of mesh axes only. "
            f"To offer a second choice, write a second rule for {name!r} after this one."
        )
    if len(set(axes)) < len(axes):
        raise RulesError(
            f"{where} has the target {axes!r}, which holds a mesh axis twice; one array "
            f"can use a mesh axis only once. Write {tuple(dict.fromkeys(axes))!r}."
        )
    return tuple(map(_plain, axes)) or None


def _plain(name: str) -> str:
    """The name as a ``str`` proper: a member of a string enumeration becomes its value."""
    return str.__str__(name)


def explain_conflicts(assignment: Assignment) -> str:
    """Says, for every rule passed over, which mesh axis was taken and by which rule."""
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


def explain_unmapped(assignment: Assignment, rules: Rules) -> str:
    """Says which names no rule mentions, and which names of rules look like them."""
    names = ", ".join(map(repr, assignment.unmapped))
    near = [
        f"{match!r} for {name!r}"
        for name in assignment.unmapped
        for match in difflib.get_close_matches(name, rules.names, n=1)
    ]
    hint = f" Did you mean {' and '.join(near)}?" if near else ""
    known = (
        f"names with rules: {', '.join(map(repr, rules.names))}" if rules else "there are no rules"
    )
    return (
        f"no rule mentions {names} ({known}).{hint} Add the rule ({assignment.unmapped[0]!r}, "
        "None) to replicate on purpose, or use on_unmapped='replicate'."
    )
