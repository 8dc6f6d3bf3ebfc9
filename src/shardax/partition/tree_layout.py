# SPDX-License-Identifier: Apache-2.0
"""Layouts of whole trees, in three steps.

1. ``overrides_of`` (``shardax.partition.overrides``) matches what the caller said of some leaves.
2. ``specs_of`` makes the specs of every leaf, with the diagnostics of each array: from the override
   or the sharding of the leaf's own box if there is one, else from rules, by ``ResolvedRules``.
3. ``diagnostics_of`` collects the diagnostics of all leaves, and adds what shows only in the whole:
   large arrays that every device holds, names without rules. ``unused_rules_of`` adds the rules
   that no array chose.

``TreeLayout`` runs them over an inventory and holds the result.

Which rules and which mesh a leaf has: boxes, and Variables made of boxes, may have such *of their
own*. Their own rules hold instead of those of the call, which are about other names. Their own mesh
holds instead of the one in scope, but not instead of one given to the call, whose caller wants the
tree there.

Without rules, given or in scope, names that are axes of the mesh stand for themselves. Any other
name is an error of a box, and a warning of a Variable, which is replicated: many programs lay out
some or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.errors import warn
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax.partition import findings
from shardax.partition.assignment import Names, Rule, mesh_axes_of, strings
from shardax.partition.context import resolve_rules
from shardax.partition.errors import Diagnostic, PartitionError, nearest_name, raise_on_errors
from shardax.partition.inventory import ArrayInfo, LeafInfo, TreeInventory
from shardax.partition.mesh import AnyMesh, require_mesh, resolve_mesh
from shardax.partition.overrides import MemoryKinds, Override, OverridesLike, overrides_of
from shardax.partition.reduced_states import reduced_states
from shardax.partition.resolved import ResolvedRules, explicit_spec
from shardax.partition.rules import (
    Rules,
    RulesLike,
    check_names,
    identity_rules,
    shadowed_rules,
    unknown_mesh_axes,
)

LARGE_BYTES = 2**20
"""An array is large above this many bytes ..."""
LARGE_FRACTION = 0.01
"""... if it also is more than this fraction of all arrays together."""

_STATE_HINT = (
    " If this is a state of an optimizer, give the parameters in the same tree, such as "
    "(params, state): they tell which dimensions it has."
)


class ArraySpec(NamedTuple):
    """The spec of one array."""

    info: ArrayInfo
    spec: PartitionSpec
    diagnostics: list[Diagnostic]
    names: Names | None  # well-formed names that rules were applied to, if any


class LeafSpecs(NamedTuple):
    """The specs of one leaf."""

    leaf: LeafInfo  # with the names that it was laid out by
    mesh: AnyMesh | None
    override: Override
    rules: Rules | None  # None for a leaf with an explicit spec
    arrays: list[ArraySpec]  # of a box without arrays, one
    diagnostics: list[Diagnostic]  # of the leaf as a whole


class LeafRules:
    """The choice of rules for each leaf.

    A leaf has its own rules, or else those of the layout; rules of an override come before both.

    Args:
        rules: Rules, pairs or a mapping; None for the current rules.
        names_alone: Whether every name stands for itself, whatever the rules.
        in_program: As for ``ResolvedRules.spec``.
    """

    def __init__(self, rules: RulesLike | None, *, names_alone: bool, in_program: bool) -> None:
        self.rules = resolve_rules(rules)
        self._given_rules = None if rules is None else self.rules
        self.names_alone = names_alone
        self.in_program = in_program

    def of(self, leaf: LeafInfo, mesh: AnyMesh | None, override: Override) -> ResolvedRules:
        """Returns the rules of a leaf over its mesh."""
        if self.names_alone and leaf.axes is not None:
            rules = identity_rules(tuple(leaf.axes))
        elif leaf.rules is None:
            # Specs by rules alone, without a mesh, know the axes of the mesh in scope.
            mesh_of_names = self._mesh_in_scope if mesh is None else mesh
            rules = ResolvedRules(mesh_of_names, self._given_rules).rules
        else:
            rules = self._with_added_names(leaf.rules, leaf.added_names, mesh)

        if override.rules is not None:
            rules = rules.override(override.rules)
        return ResolvedRules(mesh, rules)

    @functools.cached_property
    def _mesh_in_scope(self) -> AnyMesh | None:
        return resolve_mesh()

    def _with_added_names(
        self, own_rules: Rules, added_names: frozenset[str], mesh: AnyMesh | None
    ) -> Rules:
        """Returns a leaf's own rules, and the layout's for names that were added since."""
        if not added_names:
            return own_rules
        own_pairs = [rule for rule in own_rules.pairs if rule[0] not in added_names]
        layout_pairs = [rule for rule in self.rules.pairs if rule[0] in added_names]
        if mesh is not None:
            layout_pairs += [(name, name) for name in added_names if name in mesh.shape]
        return own_rules.replace(pairs=[*own_pairs, *layout_pairs])


def specs_of(
    leaves: Sequence[LeafInfo],
    meshes: Sequence[AnyMesh | None],
    overrides: Sequence[Override],
    leaf_rules: LeafRules,
) -> list[LeafSpecs]:
    """Returns the ``LeafSpecs`` of every leaf.

    Args:
        leaves: The leaves of a tree.
        meshes: The mesh of each leaf.
        overrides: The override of each leaf.
        leaf_rules: The choice of rules.
    """
    specs = [
        _specs_of_leaf(leaf, mesh, override, leaf_rules)
        for leaf, mesh, override in zip(leaves, meshes, overrides, strict=True)
    ]

    # Boxes that their names do not fit are laid out once more, by names that fit. Whether one is
    # the state of an optimizer shows in the diagnostics of all.
    renamed = _boxes_of_other_rank(leaves, leaf_rules.names_alone)
    diagnostics = [each for leaf_specs in specs for each in _diagnostics_of_arrays(leaf_specs)]
    reduced = reduced_states(leaves, diagnostics)
    renamed.update({index: leaf for index, (leaf, _) in reduced.items()})
    for index, leaf in renamed.items():
        specs[index] = _specs_of_leaf(leaf, meshes[index], overrides[index], leaf_rules)
    for index, (_, diagnostic) in reduced.items():
        specs[index].diagnostics.append(diagnostic)
    return specs


def _specs_of_leaf(
    leaf: LeafInfo, mesh: AnyMesh | None, override: Override, leaf_rules: LeafRules
) -> LeafSpecs:
    # A box with a ``get_sharding`` of its own says where it is, unless the caller does.
    if mesh is not None and override.spec is None and override.rules is None:
        sharding = leaf.sharding_of_box(mesh)
        if sharding is not None:
            source = f"{type(leaf.box or leaf.variable_box).__name__}.get_sharding"
            override = override._replace(spec=sharding, source=source)

    infos = leaf.arrays_or_empty_array(mesh is not None)
    if override.spec is not None:
        arrays: list[ArraySpec] = []
        for info in infos:
            spec, diagnostics = explicit_spec(
                override.spec, info.shape, mesh, override.source, info.path
            )
            arrays.append(ArraySpec(info, spec, _with_hint(leaf, diagnostics), None))
        return LeafSpecs(leaf, mesh, override, None, arrays, [])

    rules = leaf_rules.of(leaf, mesh, override)
    arrays = [_spec_by_rules(leaf, info, rules, leaf_rules.in_program) for info in infos]
    diagnostics = []
    if leaf.axes is not None and len(leaf.arrays) > 1 and not leaf.axes_per_array:
        diagnostics.append(findings.axes_of_many(leaf.path, leaf.axes, len(leaf.arrays)))
    return LeafSpecs(leaf, mesh, override, rules.rules, arrays, diagnostics)


def _spec_by_rules(
    leaf: LeafInfo, info: ArrayInfo, rules: ResolvedRules, in_program: bool
) -> ArraySpec:
    axes = leaf.names_of(info)
    spec, diagnostics = rules.spec(axes, info.shape, info.path, in_program=in_program)
    if isinstance(leaf.axes, PartitionSpec):
        # The specs of a box are one: they differ at most in trailing Nones.
        spec = PartitionSpec(*tuple(spec)[: len(leaf.axes)])

    codes = {each.code for each in diagnostics}
    names = None
    if axes is not None and codes.isdisjoint(("axis-names", "rank-mismatch")):
        names = check_names(axes)
    return ArraySpec(info, spec, _with_hint(leaf, diagnostics), names)


def _with_hint(leaf: LeafInfo, diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Returns the diagnostics of a box, with a hint where it may be an optimizer's state."""
    if leaf.box is None or not leaf.arrays:
        return list(diagnostics)
    return [
        dataclasses.replace(each, message=each.message + _STATE_HINT)
        if each.code == "rank-mismatch"
        else each
        for each in diagnostics
    ]


def _boxes_of_other_rank(leaves: Sequence[LeafInfo], names_alone: bool) -> dict[int, LeafInfo]:
    """Returns boxes with more array dimensions than names, by index, with names that fit."""
    # Dimensions after the last name are not split, as in a PartitionSpec. The one spec of a box
    # around several arrays has the rank of the least, and alone may be of any.
    renamed: dict[int, LeafInfo] = {}
    for index, leaf in enumerate(leaves):
        ranks = {len(info.shape) for info in leaf.arrays}
        if leaf.box is None or leaf.axes is None or ranks <= {len(leaf.axes)}:
            continue

        has_several = len(leaf.arrays) > 1
        if has_several and names_alone:
            renamed[index] = leaf._replace(arrays=())
            continue

        try:
            names = check_names(leaf.axes)
        except PartitionError:
            continue
        while has_several and len(names) > min(ranks) and names[-1] is None:
            names = names[:-1]
        if len(names) <= min(ranks):
            renamed[index] = leaf._replace(axes=PartitionSpec(*names))
    return renamed


def diagnostics_of(
    specs: Sequence[LeafSpecs],
    rules: Rules,
    *,
    rules_required: bool = False,
    large_bytes: int = LARGE_BYTES,
    large_fraction: float = LARGE_FRACTION,
) -> list[Diagnostic]:
    """Returns the diagnostics of all leaves, in their order.

    Args:
        specs: The specs of every leaf.
        rules: The rules of the layout; those of a leaf may be others.
        rules_required: Whether logical names without rules are an error of all leaves, and not of
            boxes alone.
        large_bytes: An array that every device holds whole is reported above this many bytes ...
        large_fraction: ... if it also is more than this fraction of all arrays together.
    """
    total = sum(info.nbytes for leaf_specs in specs for info in leaf_specs.leaf.arrays)
    least_bytes = max(large_bytes, large_fraction * total)

    diagnostics: list[Diagnostic] = []
    for leaf_specs in specs:
        leaf, mesh = leaf_specs.leaf, leaf_specs.mesh
        of_arrays = _diagnostics_of_arrays(leaf_specs)
        if mesh is not None and not rules and _lacks_rules(leaf_specs, rules_required):
            # This error stands for the warnings about single names.
            is_said = ("unmapped-name", leaf.path)
            of_arrays = [each for each in of_arrays if (each.code, each.path) != is_said]
            of_arrays.append(findings.no_rules(leaf.path, leaf.axes, mesh))
        diagnostics += of_arrays

        for array in leaf_specs.arrays:
            if array.info.nbytes > least_bytes and _is_replicated_by_rules(leaf_specs, array):
                assert mesh is not None
                info = array.info
                diagnostics.append(
                    findings.large_replicated(
                        info.path, array.names or (), info.shape, info.nbytes, total, mesh.size
                    )
                )
    return diagnostics


def _diagnostics_of_arrays(leaf_specs: LeafSpecs) -> list[Diagnostic]:
    """Returns the diagnostics of a leaf and its arrays, each by itself."""
    of_arrays = [each for array in leaf_specs.arrays for each in array.diagnostics]
    return [*leaf_specs.diagnostics, *of_arrays]


def _lacks_rules(leaf_specs: LeafSpecs, rules_required: bool) -> bool:
    """Whether a leaf has logical names, and nothing says what they are."""
    leaf = leaf_specs.leaf
    is_concerned = rules_required or leaf.box is not None
    if not is_concerned or leaf.rules is not None or leaf_specs.override.rules is not None:
        return False
    if leaf_specs.rules is None:
        return False
    names = {name for name in strings(tuple(leaf.axes or ())) if isinstance(name, str)}
    return not names.issubset(leaf_specs.rules.names)


def _is_replicated_by_rules(leaf_specs: LeafSpecs, array: ArraySpec) -> bool:
    """Whether rules leave an array whole on several devices, and do not say that it is meant."""
    mesh, rules = leaf_specs.mesh, leaf_specs.rules
    if mesh is None or mesh.size == 1 or rules is None:
        return False
    if any(each.severity == "error" for each in array.diagnostics):
        return False
    if parts_of(array.spec, mesh) > 1:
        return False

    # Rules to None for all of its names say that it is meant.
    chosen = rules.assign(array.names or ()).chosen
    is_meant = bool(array.names) and all(
        isinstance(name, str) and name in chosen and rules.pairs[chosen[name]][1] is None
        for name in array.names
    )
    return not is_meant


def unused_rules_of(
    specs: Sequence[LeafSpecs], rules: Rules, mesh: AnyMesh | None
) -> list[tuple[Rule, Diagnostic]]:
    """Returns the rules that no array chose, each with a diagnostic.

    Of such a rule ``Rules.check`` may have an error or warning, which is returned as it is. Else it
    is an ``unused-rule``.
    """
    # What the arrays chose that are laid out by the rules of the layout, and by those together with
    # an override's.
    chosen_positions: set[int] = set()
    chosen_with_override: set[Rule] = set()
    passed_over: set[Rule] = set()
    paths_by_name: dict[str, list[Path]] = {}
    for leaf_specs in specs:
        leaf_rules = leaf_specs.rules
        if leaf_rules is None or leaf_specs.leaf.rules not in (None, rules):
            continue
        for array in leaf_specs.arrays:
            if array.names is None:
                continue
            assignment = leaf_rules.assign(array.names)
            if leaf_rules == rules:
                chosen_positions.update(assignment.chosen.values())
            else:
                chosen = [leaf_rules.pairs[index] for index in assignment.chosen.values()]
                chosen_with_override.update(chosen)
            passed_over.update(loss.rule for loss in assignment.passed_over)
            for name in strings(array.names):
                paths_by_name.setdefault(name, []).append(array.info.path)

    unused: list[tuple[Rule, Diagnostic]] = []
    shadowed = shadowed_rules(rules)
    for position, rule in enumerate(rules.pairs):
        if position in chosen_positions or rule in chosen_with_override:
            continue
        of_rule = [] if mesh is None else list(unknown_mesh_axes(rule, mesh))
        if position in shadowed:
            of_rule.append(shadowed[position])
        if not of_rule:
            of_rule.append(_unused_rule(rule, rules, paths_by_name, rule in passed_over))
        unused += [(rule, diagnostic) for diagnostic in of_rule]
    return unused


def _unused_rule(
    rule: Rule, rules: Rules, paths_by_name: Mapping[str, list[Path]], is_passed_over: bool
) -> Diagnostic:
    name = rule[0]
    if name in paths_by_name:
        why = f"an earlier rule always served {name!r}"
        if is_passed_over:
            why = "its mesh axes were always taken"
        return findings.unused_rule(rule, why)

    unmapped = sorted(set(paths_by_name).difference(rules.names))
    similar = nearest_name(name, unmapped)
    if similar is not None:
        return findings.misspelt_rule(rule, similar, paths_by_name[similar])
    why = f"none has an axis {name!r}. It still serves constraints inside programs"
    return findings.unused_rule(rule, why)


# The warnings of names that a block has given; None where each call gives its own.
_given_warnings: ContextVar[set[Hashable] | None] = ContextVar("given_warnings", default=None)


@contextlib.contextmanager
def telling_once(told: set[Hashable]) -> Generator[None]:
    """Leaves warnings of misspelt names out that stand in a set, and adds the others to it."""
    token = _given_warnings.set(told)
    try:
        yield
    finally:
        _given_warnings.reset(token)


class TreeLayout:
    """The specs of a tree, and its diagnostics.

    Args:
        inventory: The inventory of the tree.
        mesh: The mesh; None for the one in scope, or a leaf's own.
        rules: Rules, pairs or a mapping; None for the current rules, or a leaf's own.
        overrides: Filter to spec or rules, before the rules.
        memory_kind: Memory of the devices, or a mapping from filters to such.
        function: Who needs a mesh, for the message; None if rules alone will do.
        over_mesh: False to apply the rules alone, whatever mesh is in scope.
        in_program: As for ``ResolvedRules.spec``.
        names_alone: Whether every name stands for itself, whatever the rules.
        rules_required: As for ``diagnostics_of``.
        large_bytes: As for ``diagnostics_of``.
        large_fraction: As for ``diagnostics_of``.

    Attributes:
        inventory: The inventory.
        mesh: The mesh of leaves without their own, or None.
        rules: The ``Rules`` of leaves without their own.
        leaves: The ``LeafSpecs`` of every leaf.
        diagnostics: Those of arrays, then of rules, then of overrides.

    Example:
        >>> import jax, shardax as sx
        >>> from shardax import extend
        >>> layer = sx.nn.Linear(4, 8, use_bias=False, rngs=sx.Rngs(0))
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
        >>> layout = extend.TreeLayout(extend.TreeInventory(layer), mesh, {"out": "model"})
        >>> [[sharding.spec for sharding in of_leaf] for of_leaf in layout.shardings()]
        [[P(None, 'model')]]
        >>> [diagnostic.code for diagnostic in layout.diagnostics]
        []
    """

    def __init__(
        self,
        inventory: TreeInventory,
        mesh: AnyMesh | None,
        rules: RulesLike | None,
        overrides: OverridesLike | None = None,
        memory_kind: MemoryKinds | None = None,
        *,
        function: str | None = None,
        over_mesh: bool = True,
        in_program: bool = False,
        names_alone: bool = False,
        rules_required: bool = False,
        large_bytes: int = LARGE_BYTES,
        large_fraction: float = LARGE_FRACTION,
    ) -> None:
        self.inventory = inventory
        self.mesh = resolve_mesh(mesh) if over_mesh else None
        uses_own_meshes = over_mesh and mesh is None
        meshes = [
            leaf.mesh if uses_own_meshes and leaf.mesh is not None else self.mesh
            for leaf in inventory.leaves
        ]
        if function is not None and (not meshes or None in meshes):
            require_mesh(mesh, function)

        leaf_overrides, of_overrides = [Override()] * len(meshes), []
        if overrides is not None or memory_kind is not None:
            leaf_overrides, of_overrides = overrides_of(
                inventory, self.mesh, overrides, memory_kind
            )

        leaf_rules = LeafRules(rules, names_alone=names_alone, in_program=in_program)
        self.rules = leaf_rules.rules
        self.leaves = specs_of(inventory.leaves, meshes, leaf_overrides, leaf_rules)

        of_leaves = diagnostics_of(
            self.leaves,
            self.rules,
            rules_required=rules_required,
            large_bytes=large_bytes,
            large_fraction=large_fraction,
        )
        self._unused_rules = unused_rules_of(self.leaves, self.rules, self.mesh)
        of_rules = [diagnostic for _, diagnostic in self._unused_rules]
        self.diagnostics: list[Diagnostic] = [*of_leaves, *of_rules, *of_overrides]

    def checked(self, more: Sequence[Diagnostic] = ()) -> TreeLayout:
        """Returns this layout if there is no error in it or in ``more``.

        Raises:
            PartitionError: If there are logical names without rules; names the first.
            PartitionCheckError: If there are other errors; has all of them.
        """
        for diagnostic in self.diagnostics:
            if diagnostic.code == "no-rules":
                raise PartitionError(str(diagnostic))
        raise_on_errors([*self.diagnostics, *more])
        return self

    def warn_of_names(self) -> None:
        """Warns of misspelt names in rules and arrays."""
        if all(name == target for name, target in self.rules.pairs):
            return  # replicated on purpose, or by names of mesh axes alone

        # The text about a name of arrays is one for all of them. The text about a rule lists paths
        # of the tree, which may be another tree's the next time, so the rule is its key.
        texts: dict[Hashable, str] = {}
        paths: dict[Hashable, list[Path]] = {}
        for diagnostic in self.diagnostics:
            if diagnostic.code == "unmapped-name" and diagnostic.severity == "warning":
                text = diagnostic.message.removeprefix(f"{format_path(diagnostic.path)}: ")
                texts[text] = text
                paths.setdefault(text, []).append(diagnostic.path)
        for rule, diagnostic in self._unused_rules:
            if diagnostic.code == "unused-rule" and diagnostic.severity == "warning":
                texts[rule] = diagnostic.message

        given_warnings = _given_warnings.get()
        if given_warnings is not None:
            texts = {key: text for key, text in texts.items() if key not in given_warnings}
            given_warnings.update(texts)

        lines: list[str] = []
        for key, text in texts.items():
            paths_of_text = paths.get(key, [()])
            is_of_root = paths_of_text == [()]  # a rule, or the only array
            lines.append(text if is_of_root else f"{findings.paths_text(paths_of_text)}: {text}")
        if lines:
            warn("Names of axes look misspelt. " + "\n  ".join(lines))

    @property
    def specs(self) -> list[list[PartitionSpec]]:
        """For each leaf, the specs of its arrays; of a box without any, one."""
        return [[array.spec for array in leaf_specs.arrays] for leaf_specs in self.leaves]

    def shardings(self) -> list[list[NamedSharding]]:
        """Returns for each leaf the shardings of its arrays; all must have a mesh."""
        shardings: list[list[NamedSharding]] = []
        for leaf_specs in self.leaves:
            mesh, override = leaf_specs.mesh, leaf_specs.override
            memory_kind = override.memory_kind
            if isinstance(override.spec, NamedSharding):
                mesh = override.spec.mesh
                memory_kind = memory_kind or override.spec.memory_kind
            shardings.append(
                [named_sharding(mesh, array.spec, memory_kind) for array in leaf_specs.arrays]
            )
        return shardings

    def entries(self, entries_of_arrays: Sequence[Sequence[PyTree]]) -> PyTree:
        """Returns the tree with entries, such as specs, in place of leaves.

        Args:
            entries_of_arrays: For each leaf those of its arrays.
        """
        pairs = zip(self.inventory.leaves, entries_of_arrays, strict=True)
        return self.inventory.filled([leaf.entry(entries) for leaf, entries in pairs])


@functools.lru_cache(maxsize=4096)
def named_sharding(mesh: Any, spec: PartitionSpec, memory_kind: str | None = None) -> NamedSharding:
    """Returns the one ``NamedSharding`` of a mesh and a spec."""
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def parts_of(spec: PartitionSpec, mesh: AnyMesh) -> int:
    """Returns the number of different parts of an array."""
    return math.prod(mesh.shape[axis] for entry in spec for axis in mesh_axes_of(entry))
