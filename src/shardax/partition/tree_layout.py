# SPDX-License-Identifier: Apache-2.0
"""Layouts of whole trees.

A layout takes three steps: the inventory lists the leaves; overrides and memory kinds are matched;
names become specs, with diagnostics of all leaves at once and of the rules as a whole.

An *override* is a pair of a filter and a value for the Variables that match it: *more rules*, which
come before the layout's own (so that moments of an optimizer are split over a mesh axis that their
parameters are not), or an *explicit spec*, a ``PartitionSpec`` over the layout's mesh or a
``NamedSharding``. The first filter that matches decides; None, or no match, leaves a Variable to
the rules. A *memory kind*, such as ``"pinned_host"``, is given for all arrays or by filter. A
Variable reached by several paths is matched by each of them; two that disagree are an error.

Boxes, and Variables made of boxes, may have rules and a mesh *of their own*. Their own rules hold
instead of those of the call, which are about other names. Their own mesh holds instead of the one
in scope, but not instead of one given to the call, whose caller wants the tree there.

Without rules, given or in scope, names that are axes of the mesh stand for themselves. Any other
name is an error of a box, and a warning of a Variable, which is replicated: many programs lay out
some or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardax._core.errors import first_of, warn
from shardax._core.graph.paths import Leaf, Path, format_path
from shardax._core.state.filters import first_match, to_predicates
from shardax._core.state.state import State
from shardax._transforms.errors import NoMeshError, TransformError
from shardax._transforms.lift.prefix import FilterMapping, StateSharding
from shardax.partition import rules as logical
from shardax.partition.checker import explicit_spec, spec_for
from shardax.partition.context import resolve_rules, rules_over
from shardax.partition.errors import Diagnostic, PartitionError, nearest_name, raise_on_errors
from shardax.partition.inventory import (
    ArrayInfo,
    FilterSubject,
    LeafInfo,
    TreeInventory,
    reduced_states,
)
from shardax.partition.mesh import AnyMesh, mesh_text, resolve_mesh

OverridesLike = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""A mapping or pairs of filter and spec or rules; a ``StateSharding``; a ``State`` of specs."""

MemoryKinds = str | Mapping[Any, Any] | Iterable[tuple[Any, Any]]
"""A memory kind, or a mapping or pairs of filter and memory kind."""

LARGE_BYTES = 2**20
"""An array is large above this many bytes ..."""
LARGE_FRACTION = 0.01
"""... if it also is more than this fraction of all arrays together."""
_STATE_HINT = (
    " If this is a state of an optimizer, give the parameters in the same tree, such as "
    "(params, state): they tell which dimensions it has."
)


class Override(NamedTuple):
    """Rules, spec and memory of one leaf, before the layout's rules."""

    rules: logical.Rules | None = None  # before the layout's
    spec: PartitionSpec | NamedSharding | None = None
    memory_kind: str | None = None
    source: str = ""  # the override as text


def overrides_of(
    inventory: TreeInventory,
    mesh: AnyMesh | None,
    overrides: OverridesLike | None,
    memory_kind: MemoryKinds | None,
) -> tuple[Sequence[Override], list[Diagnostic]]:
    """The override of every leaf, and diagnostics of overrides."""
    values = _FilterTable("overrides", () if overrides is None else overrides, _checked_value)
    kinds = _FilterTable(
        "memory_kind",
        {...: memory_kind} if isinstance(memory_kind, str) or memory_kind is None else memory_kind,
        lambda kind, text: _checked_kind(kind, text, mesh),
    )
    by_leaf: list[Override] = []
    diagnostics: list[Diagnostic] = []
    for subject in inventory.filter_subjects():
        at = values.first(subject, diagnostics)
        kind_at = kinds.first(subject, diagnostics)
        kind = None if kind_at is None else kinds.values[kind_at]
        value = None if at is None else values.values[at]
        source = "" if at is None else f"the override {value!r} for {values.filters[at]}"
        rules, spec = (value, None) if isinstance(value, logical.Rules) else (None, value)
        by_leaf.append(Override(rules, spec, kind, source))
    return by_leaf, [*diagnostics, *values.unused(), *kinds.unused()]


class _FilterTable:
    """Pairs of filter and value; ``convert`` checks one value of ``option``."""

    def __init__(self, option: str, option_value, convert: Callable[[Any, str], Any]) -> None:
        self.option = option
        pairs = _pairs(option, option_value)
        self.predicates = to_predicates([item for item, _ in pairs])
        self.filters = [_filter_text(item) for item, _ in pairs]
        self.values = [
            convert(value, f"{option}={{{text}: {value!r}}}")
            for (_, value), text in zip(pairs, self.filters, strict=True)
        ]
        self.used: set[int] = set()

    def first(self, subject: FilterSubject, diagnostics: list[Diagnostic]) -> int | None:
        """The position of the deciding filter; disagreements add a diagnostic."""
        decided: dict[int, Leaf] = {}
        for path in subject.paths:
            position = first_match(self.predicates, path, subject.like)
            if position is not None:
                self.used.add(position)
                decided.setdefault(position, path)
        decided = {i: path for i, path in decided.items() if self.values[i] is not None}
        first = next(iter(decided), None)
        if first is None or all(self.values[i] == self.values[first] for i in decided):
            return first
        parts = [
            f"{format_path(path)} has {self.values[i]!r} (by {self.filters[i]})"
            for i, path in decided.items()
        ]
        text = (
            f"{format_path(decided[first])}: one Variable, reached by several paths, has more than "
            f"one place by {self.option}: {'; '.join(parts)}. Give it one, by a filter that "
            "matches all of its paths and stands first."
        )
        diagnostics.append(Diagnostic("error", decided[first], "override-conflict", text))
        return None

    def unused(self) -> Iterator[Diagnostic]:
        """Warnings about filters without effect."""
        for position, (text, value) in enumerate(zip(self.filters, self.values, strict=True)):
            if position not in self.used and value is not None:
                message = (
                    f"{self.option} for {text} was used for no Variable: none matches, or "
                    "an earlier filter takes all that do."
                )
                yield Diagnostic("warning", (), "unused-override", message)


_EXAMPLE = "overrides={sx.OptState: {'embed': 'data'}, sx.PathContains('bias'): PartitionSpec()}"


def _pairs(option: str, option_value) -> list[tuple[Any, Any]]:
    if isinstance(option_value, State):
        option_value = StateSharding(option_value)
    if isinstance(option_value, FilterMapping):
        return list(zip(option_value, option_value.values(), strict=True))
    if isinstance(option_value, Mapping):
        return list(option_value.items())
    iterable = isinstance(option_value, Iterable) and not isinstance(option_value, str)
    pairs: list[Any] = list(option_value) if iterable else [None]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise PartitionError(
            f"{option}={option_value!r} of type {type(option_value).__name__} is no mapping from "
            f"filters and no list of pairs. Write for instance {_EXAMPLE}."
        )
    return [(item, value) for item, value in pairs]


def _filter_text(item: object) -> str:
    if item is ...:
        return "..."
    return item.__name__ if isinstance(item, type) else repr(item)


def _checked_value(value: object, text: str):
    if value is None or isinstance(value, (PartitionSpec, NamedSharding, logical.Rules)):
        return value
    if isinstance(value, (Mapping, list)):
        try:
            return logical.Rules(value)
        except PartitionError as error:
            raise PartitionError(f"{text} has no rules in it: {error}") from error
    raise PartitionError(
        f"{text}: {value!r} of type {type(value).__name__} is no place. Give a PartitionSpec over "
        "the mesh, a NamedSharding, rules (a mapping, a list of pairs, or Rules) that come before "
        f"the layout's own, or None. For instance {_EXAMPLE}."
    )


def _checked_kind(value: object, text: str, mesh: AnyMesh | None) -> str | None:
    if value is not None and not isinstance(value, str):
        raise PartitionError(
            f"{text}: {value!r} of type {type(value).__name__} is no memory kind; give a string "
            "such as 'pinned_host' or 'device'."
        )
    if value is not None and mesh is not None:
        try:
            NamedSharding(mesh, PartitionSpec(), memory_kind=value)
        except ValueError as error:
            raise PartitionError(f"{text}: the mesh's devices have no such memory. {error}") from (
                error
            )
    return value


# The warnings of names that a block has given; None where each call gives its own.
_told: ContextVar[set[Hashable] | None] = ContextVar("shardax_told_names", default=None)


@contextlib.contextmanager
def telling_once(told: set[Hashable]) -> Generator[None]:
    """Leaves warnings of misspelt names out that stand in a set, and adds the others to it."""
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


class TreeLayout:
    """Specs of a tree's leaves, and their diagnostics."""

    # ``mesh`` and ``rules`` None stand for those in scope, or a leaf's own. ``function`` is who
    # needs a mesh, for the message, or None if rules alone will do. ``over_mesh=False`` applies the
    # rules alone, whatever mesh is in scope. ``placed`` is as for ``spec_for``. ``names_alone``
    # lets every name stand for itself. Logical names without rules, over a mesh, are an error of
    # boxes, or of everything under ``rules_for="all"``.

    def __init__(
        self,
        inventory: TreeInventory,
        mesh: AnyMesh | None,
        rules: logical.RulesLike | None,
        overrides: OverridesLike | None = None,
        memory_kind: MemoryKinds | None = None,
        *,
        function: str | None = None,
        over_mesh: bool = True,
        placed: bool = True,
        names_alone: bool = False,
        rules_for: Literal["boxes", "all"] = "boxes",
        large_bytes: int = LARGE_BYTES,
        large_fraction: float = LARGE_FRACTION,
    ) -> None:
        self.inventory = inventory
        self.mesh = resolve_mesh(mesh) if over_mesh else None  # of leaves without their own
        uses_own_meshes = over_mesh and mesh is None
        leaves = inventory.leaves
        self.meshes = [(leaf.mesh if uses_own_meshes else None) or self.mesh for leaf in leaves]
        if function is not None and (not leaves or None in self.meshes):
            self.mesh = require_mesh(mesh, function)
        self.rules = resolve_rules(rules)
        self._given_rules = rules
        self._placed = placed
        self._names_alone = names_alone
        self._unused: dict[str, logical.Rule] = {}  # rules by the message that they are unused
        self._large_bytes, self._large_fraction = large_bytes, large_fraction
        self._overrides: Sequence[Override] = [Override()] * len(leaves)
        of_overrides: list[Diagnostic] = []
        if overrides is not None or memory_kind is not None:
            self._overrides, of_overrides = overrides_of(
                inventory, self.mesh, overrides, memory_kind
            )
        self._overrides = [
            self._by_box(leaf, leaf_mesh, override)
            for leaf, leaf_mesh, override in zip(leaves, self.meshes, self._overrides, strict=True)
        ]

        # For each leaf a spec of each of its arrays; of a box without any, one.
        self.specs, diagnostics = self._lay_out(leaves)
        reduced, of_states = reduced_states(leaves, diagnostics)
        changed = {**self._of_other_ranks(leaves), **reduced}
        if changed:
            laid_out = [changed.get(i, leaf) for i, leaf in enumerate(leaves)]
            self.specs, diagnostics = self._lay_out(laid_out)
        no_rules = list(self._without_rules(rules_for))
        said = {diagnostic.path for diagnostic in no_rules}
        diagnostics = [d for d in diagnostics if d.code != "unmapped-name" or d.path not in said]
        self.diagnostics: list[Diagnostic] = [*diagnostics, *of_states, *no_rules, *of_overrides]

    def _by_box(self, leaf: LeafInfo, mesh: AnyMesh | None, override: Override) -> Override:
        """The override of a leaf, or the sharding that its own box makes for a mesh."""
        if mesh is None or override.spec is not None or override.rules is not None:
            return override
        sharding = leaf.sharding_of_box(mesh)
        if sharding is None:
            return override
        source = f"{type(leaf.box or leaf.kept).__name__}.get_sharding"
        return Override(None, sharding, override.memory_kind, source)

    def _lay_out(
        self, leaves: Sequence[LeafInfo]
    ) -> tuple[list[list[PartitionSpec]], list[Diagnostic]]:
        total = sum(info.nbytes for leaf in leaves for info in leaf.arrays)
        large = max(self._large_bytes, self._large_fraction * total)
        specs: list[list[PartitionSpec]] = []
        diagnostics: list[Diagnostic] = []
        # Of the layout, with those of overrides.
        by_rules: list[tuple[logical.Rules, logical.Names, Path]] = []
        for leaf, mesh, override in zip(leaves, self.meshes, self._overrides, strict=True):
            own_rules = leaf.rules
            if self._names_alone and leaf.axes is not None:
                own_rules = logical.identity_rules(tuple(leaf.axes))
            rules = self._rules_over(mesh) if own_rules is None else own_rules
            if own_rules is not None and leaf.added and not self._names_alone:
                rules = self._with_added(own_rules, leaf.added, mesh)
            if override.rules is not None:
                rules = rules.override(override.rules)
            if override.spec is None:
                diagnostics += _axes_of_many(leaf)
            specs.append([])
            for info in leaf.arrays or leaf.names_as_array(mesh is not None):
                path, names, shape = info.path, leaf.names_of(info), info.shape
                if override.spec is not None:
                    spec, findings = explicit_spec(
                        override.spec, shape, mesh, override.source, path
                    )
                else:
                    spec, findings = spec_for(names, shape, mesh, rules, path, placed=self._placed)
                    errors = {
                        diagnostic.code for diagnostic in findings if diagnostic.severity == "error"
                    }
                    if names is not None and errors.isdisjoint(("axis-names", "rank-mismatch")):
                        names = logical.check_names(names)
                        if own_rules is None or own_rules == self.rules:
                            by_rules.append((rules, names, path))
                    if mesh is not None and not errors and info.nbytes > large:
                        findings += _large_replicated(info, names or (), spec, mesh, rules, total)
                    if isinstance(leaf.axes, PartitionSpec):
                        # The specs of a box are one: they differ at most in trailing Nones.
                        spec = PartitionSpec(*tuple(spec)[: len(leaf.axes)])
                specs[-1].append(spec)
                hint = _STATE_HINT if leaf.box is not None and leaf.arrays else ""
                diagnostics += (
                    dataclasses.replace(d, message=d.message + hint)
                    if d.code == "rank-mismatch"
                    else d
                    for d in findings
                )
        diagnostics += self._unused_rules(by_rules)
        return specs, diagnostics

    def _of_other_ranks(self, leaves: Sequence[LeafInfo]) -> dict[int, LeafInfo]:
        """Boxes with more array dimensions than names, by position."""
        # Dimensions after the last name are not split, as in a PartitionSpec. The one spec of a box
        # around several arrays has the rank of the least, and alone may be of any.
        changed: dict[int, LeafInfo] = {}
        for i, leaf in enumerate(leaves):
            ranks = {len(info.shape) for info in leaf.arrays}
            if leaf.box is None or leaf.axes is None or ranks <= {len(leaf.axes)}:
                continue
            several = len(leaf.arrays) > 1
            if several and self._names_alone:
                changed[i] = leaf._replace(arrays=())
                continue
            try:
                names = logical.check_names(leaf.axes)
            except PartitionError:
                continue
            while several and len(names) > min(ranks) and names[-1] is None:
                names = names[:-1]
            if len(names) <= min(ranks):
                changed[i] = leaf._replace(axes=PartitionSpec(*names))
        return changed

    def _rules_over(self, mesh: AnyMesh | None) -> logical.Rules:
        """The rules of leaves without their own."""
        # Specs by rules alone (``over_mesh=False``) know the axes of the mesh in scope.
        return rules_over(resolve_mesh() if mesh is None else mesh, self._given_rules)

    def _with_added(
        self, own_rules: logical.Rules, added: frozenset[str], mesh: AnyMesh | None
    ) -> logical.Rules:
        """A leaf's own rules, and others for names added since."""
        added_rules = [rule for rule in self.rules.pairs if rule[0] in added]
        added_rules += [(name, name) for name in added if mesh is not None and name in mesh.shape]
        own_pairs = [rule for rule in own_rules.pairs if rule[0] not in added]
        return own_rules.replace(pairs=[*own_pairs, *added_rules])

    def _unused_rules(
        self, by_rules: Sequence[tuple[logical.Rules, logical.Names, Path]]
    ) -> Iterator[Diagnostic]:
        chosen: set[int] = set()
        elsewhere: set[Any] = set()  # rules chosen together with an override's
        lost: set[Any] = set()
        present: dict[str, list[Path]] = {}
        for rules, names, path in by_rules:
            assignment = rules.assign(names)
            if rules == self.rules:
                chosen.update(assignment.chosen.values())
            else:
                elsewhere.update(rules.pairs[i] for i in assignment.chosen.values())
            lost.update(loss.rule for loss in assignment.passed_over)
            for name in logical.strings(names):
                present.setdefault(name, []).append(path)
        shadowed = logical.shadowed_rules(self.rules)
        for position, rule in enumerate(self.rules.pairs):
            if position in chosen or rule in elsewhere:
                continue
            unknown = [] if self.mesh is None else list(logical.unknown_mesh_axes(rule, self.mesh))
            yield from unknown
            if position in shadowed:
                yield shadowed[position]
            if unknown or position in shadowed:
                continue
            unused = _unused_rule(rule, self.rules, present, rule in lost)
            self._unused[unused.message] = rule
            yield unused

    def _without_rules(self, rules_for: Literal["boxes", "all"]) -> Iterator[Diagnostic]:
        if self.rules or self._names_alone:
            return
        rows = zip(self.inventory.leaves, self.meshes, self._overrides, strict=True)
        for leaf, mesh, override in rows:
            if (
                mesh is not None
                and (leaf.box is not None or rules_for == "all")
                and leaf.rules is None
                and override.spec is None
                and override.rules is None
                and not _names_in(leaf.axes).issubset(self._rules_over(mesh).names)
            ):
                text = (
                    f"{format_path(leaf.path)}: has the logical names {leaf.axes}, and there are "
                    f"no rules to map them to mesh axes ({mesh_text(mesh.shape)}). Pass them, "
                    "rules=rules, or put them in scope: with sx.axis_rules(rules): ..."
                )
                yield Diagnostic("error", leaf.path, "no-rules", text)

    def checked(self, more: Sequence[Diagnostic] = ()) -> TreeLayout:
        """This layout if there is no error in it or in ``more``."""
        # Raises PartitionError for logical names without rules, else PartitionCheckError with all.
        for diagnostic in self.diagnostics:
            if diagnostic.code == "no-rules":
                raise PartitionError(str(diagnostic))
        if diagnostics := [*self.diagnostics, *more]:
            raise_on_errors(diagnostics)
        return self

    def warn_of_names(self) -> None:
        """Warns of misspelt names in rules and arrays."""
        if all(name == target for name, target in self.rules.pairs):
            return  # replicated on purpose, or by names of mesh axes alone
        paths: dict[str, list[Path]] = {}
        for diagnostic in self.diagnostics:
            is_of_names = diagnostic.code in ("unused-rule", "unmapped-name")
            if is_of_names and diagnostic.severity == "warning":
                text = diagnostic.message.removeprefix(f"{format_path(diagnostic.path)}: ")
                paths.setdefault(text, []).append(diagnostic.path)

        told = _told.get()
        if told is not None:
            # The text about a rule lists paths of the tree, which may be another tree's tomorrow.
            subjects = {text: self._unused.get(text, text) for text in paths}
            paths = {text: paths[text] for text, subject in subjects.items() if subject not in told}
            told.update(subjects.values())
        lines = [
            text if places == [()] else f"{paths_text(places)}: {text}"
            for text, places in paths.items()
        ]
        if lines:
            warn("Names of axes look misspelt. " + "\n  ".join(lines))

    def shardings(self) -> list[list[NamedSharding]]:
        """For each leaf, its arrays' shardings; all must have a mesh."""
        by_leaf: list[list[NamedSharding]] = []
        for specs, mesh, override in zip(self.specs, self.meshes, self._overrides, strict=True):
            kind = override.memory_kind
            if isinstance(override.spec, NamedSharding):
                mesh = override.spec.mesh
                kind = override.spec.memory_kind if kind is None else kind
            by_leaf.append([named_sharding(mesh, spec, kind) for spec in specs])
        return by_leaf

    def entries(self, by_leaf: Sequence[Sequence[Any]]) -> Any:
        """The tree with entries, such as specs, in place of leaves."""
        pairs = zip(self.inventory.leaves, by_leaf, strict=True)
        return self.inventory.filled([leaf.entry(of_arrays) for leaf, of_arrays in pairs])


def _names_in(axes) -> set[str]:
    """Names among possibly malformed entries."""
    parts = (part for name in axes or () for part in (name if isinstance(name, tuple) else (name,)))
    return {part for part in parts if isinstance(part, str)}


def check_devices(mesh: AnyMesh, function: str, abstract: str) -> Mesh:
    """Refuses a mesh without places for arrays; ``abstract`` needs none."""
    if not isinstance(mesh, Mesh):
        raise TransformError(
            f"{function} cannot place arrays over {mesh}, which has no devices. Pass the mesh "
            f"itself, such as jax.make_mesh((2, 4), ('data', 'model')). An AbstractMesh serves "
            f"{abstract} only."
        )
    if AxisType.Manual in mesh.axis_types:
        raise TransformError(
            f"{function} cannot place arrays over {mesh}: axes of type Manual are for the inside "
            "of jax.shard_map. Make the mesh with axes of type Auto or Explicit."
        )
    return mesh


def require_mesh(mesh: AnyMesh | None, function: str) -> AnyMesh:
    """The mesh given, else the one in scope; ``function`` needs it."""
    scope_mesh = resolve_mesh(mesh)
    if scope_mesh is None:
        raise NoMeshError(
            f"{function} needs a mesh: none was given and none is in scope. Pass one, "
            f"{function}(..., mesh=jax.make_mesh((2, 4), ('data', 'model'))), or put one in scope: "
            "with jax.set_mesh(mesh): ..."
        )
    return scope_mesh


@functools.lru_cache(maxsize=4096)
def named_sharding(mesh: Any, spec: PartitionSpec, memory_kind: str | None = None) -> NamedSharding:
    """The one sharding of a mesh and a spec."""
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def parts_of(spec: PartitionSpec, mesh: AnyMesh) -> int:
    """The number of different parts of an array."""
    return math.prod(mesh.shape[axis] for entry in spec for axis in logical.mesh_axes_of(entry))


def _axes_of_many(leaf: LeafInfo) -> Iterator[Diagnostic]:
    if leaf.axes is not None and len(leaf.arrays) > 1 and not leaf.axes_per_array:
        text = (
            f"{format_path(leaf.path)}: axis names {leaf.axes} for a value of {len(leaf.arrays)} "
            "arrays. Axis names say what the dimensions of one array are: give each array a "
            "Variable of its own, or give no axes, and the arrays are replicated."
        )
        yield Diagnostic("error", leaf.path, "axes-of-many", text)


def _large_replicated(
    info: ArrayInfo,
    names: logical.Names,
    spec: PartitionSpec,
    mesh: AnyMesh,
    rules: logical.Rules,
    total: int,
) -> Iterator[Diagnostic]:
    chosen = rules.assign(names).chosen
    on_purpose = bool(names) and all(
        isinstance(name, str) and name in chosen and rules.pairs[chosen[name]][1] is None
        for name in names
    )
    if mesh.size == 1 or parts_of(spec, mesh) > 1 or on_purpose:
        return
    listed = ", ".join(map(repr, logical.strings(names)))
    fix = (
        f"Map one of its axes ({listed}) to a mesh axis, or say that it is meant: rules to None"
        if listed
        else "Give its dimensions names, axes=(...), and one of them a rule"
    )
    text = (
        f"{format_path(info.path)}: {info.nbytes / 2**20:.1f} MiB "
        f"({100 * info.nbytes / total:.0f} % of all arrays), shape {info.shape}, are held whole by "
        f"each of {mesh.size} devices. {fix}."
    )
    yield Diagnostic("warning", info.path, "large-replicated", text)


def paths_text(paths: Sequence[Path]) -> str:
    """The first of some paths, and the number of others."""
    return first_of([format_path(path) for path in paths], most=4)


def _unused_rule(
    rule: tuple[str, object], rules: logical.Rules, present: Mapping[str, list[Path]], lost: bool
) -> Diagnostic:
    name = rule[0]
    start = f"The rule {logical.format_rule(rule)} was used for no array: "
    if name in present:
        why = (
            "its mesh axes were always taken" if lost else f"an earlier rule always served {name!r}"
        )
        return Diagnostic("info", (), "unused-rule", f"{start}{why}.")
    near = nearest_name(name, sorted(set(present).difference(rules.names)))
    if near is not None:
        text = (
            f"{start}none has an axis {name!r}. Did you mean {near!r}, which has no rule? It is an "
            f"axis of {paths_text(present[near])}."
        )
        return Diagnostic("warning", (), "unused-rule", text)
    text = f"{start}none has an axis {name!r}. It still serves constraints inside programs."
    return Diagnostic("info", (), "unused-rule", text)
