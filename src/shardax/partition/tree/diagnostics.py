# SPDX-License-Identifier: Apache-2.0
"""The diagnostics of a tree, from the specs of all its leaves.

``diagnostics_of`` is about leaves: what ``ResolvedRules.spec`` said of each array, and what shows
only in the whole, arrays that every device holds and logical names where there are no rules.

``unused_rules_of`` is about rules: each rule of the layout that no array has chosen is said once,
as the first of these that is true of it:

1. It names a mesh axis that the mesh does not have: an ``unknown-mesh-axis`` error. If it is also
   shadowed, both are said.
2. No array could choose it, whatever its names (``shadowed_rules``): a ``shadowed-rule`` warning.
3. An array has its name, and has chosen an earlier rule or lost the mesh axis: ``unused-rule``,
   info.
4. Its name is like one that arrays have and no rule mentions: ``unused-rule``, warning.
5. No array has its name: ``unused-rule``, info, as constraints in programs may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardax._core.graph.paths import Path
from shardax.partition import findings
from shardax.partition.assignment import Rule, strings
from shardax.partition.entries import parts_of
from shardax.partition.errors import Diagnostic, nearest_name
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules, shadowed_rules, unknown_mesh_axes

if TYPE_CHECKING:
    from shardax.partition.tree.layout import ArraySpec, LeafSpecs

LARGE_BYTES = 2**20
"""An array is large above this many bytes ..."""
LARGE_FRACTION = 0.01
"""... if it also is more than this fraction of all arrays together."""


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
        of_arrays = leaf_specs.all_diagnostics()
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


def _lacks_rules(leaf_specs: LeafSpecs, rules_required: bool) -> bool:
    """Whether a leaf has logical names, and nothing says what they are."""
    leaf = leaf_specs.leaf
    is_concerned = rules_required or leaf.box is not None
    if not is_concerned or leaf.rules is not None or leaf_specs.override.rules is not None:
        return False
    if leaf_specs.rules is None:
        return False
    names = set(strings(leaf.axes or ()))
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
    # Of leaves that are laid out by rules of their own or by a spec, none of these rules is tried.
    # An override's rules stand before them, so there a rule is known by its pair, not its position.
    chosen_positions: set[int] = set()
    chosen_with_override: set[Rule] = set()
    paths_by_name: dict[str, list[Path]] = {}
    for leaf_specs in specs:
        leaf_rules = leaf_specs.rules
        if leaf_rules is None or leaf_specs.leaf.rules not in (None, rules):
            continue
        for array in leaf_specs.arrays:
            if array.names is None:
                continue
            chosen = leaf_rules.assign(array.names).chosen.values()
            if leaf_rules == rules:
                chosen_positions.update(chosen)
            else:
                chosen_with_override.update(leaf_rules.pairs[position] for position in chosen)
            for name in strings(array.names):
                paths_by_name.setdefault(name, []).append(array.info.path)

    unused: list[tuple[Rule, Diagnostic]] = []
    shadowed = shadowed_rules(rules)
    for position, rule in enumerate(rules.pairs):
        if position in chosen_positions or rule in chosen_with_override:
            continue

        diagnostics = [] if mesh is None else unknown_mesh_axes(rule, mesh)
        if position in shadowed:
            diagnostics.append(shadowed[position])
        if not diagnostics:
            diagnostics.append(_unused_rule(rule, rules, paths_by_name))
        unused += [(rule, diagnostic) for diagnostic in diagnostics]
    return unused


def _unused_rule(rule: Rule, rules: Rules, paths_by_name: Mapping[str, list[Path]]) -> Diagnostic:
    """Returns the ``unused-rule`` diagnostic of a rule that some array could choose."""
    name = rule[0]
    if name in paths_by_name:
        return findings.unused_rule(rule, paths_by_name[name])

    unmapped = sorted(set(paths_by_name).difference(rules.names))
    similar = nearest_name(name, unmapped)
    if similar is not None:
        return findings.misspelt_rule(rule, similar, paths_by_name[similar])
    return findings.unused_name(rule)
