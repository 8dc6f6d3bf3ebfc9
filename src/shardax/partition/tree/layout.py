# SPDX-License-Identifier: Apache-2.0
"""Layouts of whole trees: the spec of every array, and what is wrong with any.

``TreeLayout`` runs these steps over the inventory of a tree, which lists its leaves once:

1. Each leaf gets a *mesh*: the one given to the call, else the leaf's own, else the one in scope.
2. ``overrides_of`` (``tree/overrides.py``) finds what the caller said of some leaves by filter.
3. ``_specs_of_leaf`` (this file) makes the specs of each leaf, from the first of these that there
   is: a spec or sharding of its override; the sharding that its box computes itself; rules. The
   rules are those of its override, and after them the leaf's own or, if it has none, the layout's
   (``_rules_of_leaf``); ``ResolvedRules.spec`` applies them to each array.
4. ``diagnostics_of`` (``tree/diagnostics.py``) collects the diagnostics of all leaves and adds what
   shows only in the whole.
5. ``unused_rules_of`` (``tree/diagnostics.py``) adds the rules that no array has chosen, and
   ``overrides_of`` has noted the filters that decided about no leaf.

Leaves with rules or a mesh *of their own* are boxes and Variables made of boxes. A box of another
library is read as one of ours with the same names (``_leaf_of_box`` in ``tree/inventory.py``). If
it has an attribute ``rules``, it is a ``LogicallyPartitioned``: laid out by these, or if they are
None by the layout's. Any other is a ``Partitioned``: its names are mesh axes, which stand for
themselves. Own rules hold instead of those of the call, which are about other names. An own mesh
does not hold against one given to the call, whose caller wants the tree there.

Stacked layers are one array, laid out like any other: its names are the stack's and then the
layer's.

Without rules, given or in scope, names that are axes of the mesh stand for themselves. Any other
name is an error of a box, and a warning of a Variable, which is replicated: many programs lay out
some or none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.graph.paths import PyTree
from shardax.partition import findings
from shardax.partition.assignment import Names
from shardax.partition.context import resolve_rules
from shardax.partition.entries import explicit_spec
from shardax.partition.errors import Diagnostic, PartitionError, raise_on_errors
from shardax.partition.mesh import AnyMesh, require_mesh, resolve_mesh
from shardax.partition.resolved import ResolvedRules
from shardax.partition.rules import Rules, RulesLike, check_names
from shardax.partition.tree.diagnostics import (
    LARGE_BYTES,
    LARGE_FRACTION,
    diagnostics_of,
    unused_rules_of,
)
from shardax.partition.tree.inventory import ArrayInfo, LeafInfo, TreeInventory
from shardax.partition.tree.overrides import MemoryKinds, Override, OverridesLike, overrides_of
from shardax.partition.tree.reduced_states import reduced_states

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

    def all_diagnostics(self) -> list[Diagnostic]:
        """Returns the diagnostics of the leaf and of its arrays, each by itself."""
        of_arrays = [each for array in self.arrays for each in array.diagnostics]
        return [*self.diagnostics, *of_arrays]


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
        rules_required: As for ``diagnostics_of``.
        large_bytes: As for ``diagnostics_of``.
        large_fraction: As for ``diagnostics_of``.

    Attributes:
        inventory: The inventory.
        mesh: The mesh of leaves without their own, or None.
        rules: The ``Rules`` of leaves without their own.
        leaves: The ``LeafSpecs`` of every leaf.
        unused_rules: The rules that no array chose, each with its diagnostic.
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
        rules_required: bool = False,
        large_bytes: int = LARGE_BYTES,
        large_fraction: float = LARGE_FRACTION,
    ) -> None:
        self.inventory = inventory
        self.rules = resolve_rules(rules)
        self._given_rules = None if rules is None else self.rules
        self._in_program = in_program

        self.mesh = resolve_mesh(mesh) if over_mesh else None
        meshes = [self.mesh] * len(inventory.leaves)
        if over_mesh and mesh is None:
            meshes = [leaf.mesh or self.mesh for leaf in inventory.leaves]
        if function is not None and (not meshes or None in meshes):
            require_mesh(mesh, function)

        leaf_overrides, of_overrides = [Override()] * len(meshes), []
        if overrides is not None or memory_kind is not None:
            leaf_overrides, of_overrides = overrides_of(
                inventory, self.mesh, overrides, memory_kind
            )

        self.leaves = self._specs_of_leaves(meshes, leaf_overrides)

        of_leaves = diagnostics_of(
            self.leaves,
            self.rules,
            rules_required=rules_required,
            large_bytes=large_bytes,
            large_fraction=large_fraction,
        )
        self.unused_rules = unused_rules_of(self.leaves, self.rules, self.mesh)
        of_rules = [diagnostic for _, diagnostic in self.unused_rules]
        self.diagnostics: list[Diagnostic] = [*of_leaves, *of_rules, *of_overrides]

    # --- the specs of leaves ----------------------------------------------------------------------

    def _specs_of_leaves(
        self, meshes: Sequence[AnyMesh | None], overrides: Sequence[Override]
    ) -> list[LeafSpecs]:
        """Returns the ``LeafSpecs`` of every leaf, given the mesh and the override of each."""
        leaves = self.inventory.leaves
        specs = [
            self._specs_of_leaf(leaf, mesh, override)
            for leaf, mesh, override in zip(leaves, meshes, overrides, strict=True)
        ]

        # The state of an optimizer in the box of a parameter whose names do not fit it is laid out
        # once more, by names that do. Whether one is such a state shows in the diagnostics of all.
        diagnostics = [each for leaf_specs in specs for each in leaf_specs.all_diagnostics()]
        for index, (leaf, diagnostic) in reduced_states(leaves, diagnostics).items():
            specs[index] = self._specs_of_leaf(leaf, meshes[index], overrides[index])
            specs[index].diagnostics.append(diagnostic)
        return specs

    def _specs_of_leaf(self, leaf: LeafInfo, mesh: AnyMesh | None, override: Override) -> LeafSpecs:
        """Returns the specs of a leaf, by its override, its box, or rules."""
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

        rules = self._rules_of_leaf(leaf, mesh, override)
        arrays = [self._spec_by_rules(leaf, info, rules) for info in infos]
        diagnostics = []
        if leaf.axes is not None and len(leaf.arrays) > 1 and not leaf.axes_per_array:
            diagnostics.append(findings.axes_of_many(leaf.path, leaf.axes, len(leaf.arrays)))
        return LeafSpecs(leaf, mesh, override, rules.rules, arrays, diagnostics)

    def _spec_by_rules(self, leaf: LeafInfo, info: ArrayInfo, rules: ResolvedRules) -> ArraySpec:
        """Returns the spec of one array of a leaf."""
        axes = leaf.names_of(info)
        spec, diagnostics = rules.spec(axes, info.shape, info.path, in_program=self._in_program)

        names = None
        codes = {each.code for each in diagnostics}
        if axes is not None and codes.isdisjoint(("axis-names", "rank-mismatch")):
            names = check_names(axes)
        return ArraySpec(info, leaf.spec_of_box(spec), _with_hint(leaf, diagnostics), names)

    def _rules_of_leaf(
        self, leaf: LeafInfo, mesh: AnyMesh | None, override: Override
    ) -> ResolvedRules:
        """Returns the rules of an override, and after them the leaf's own or the layout's."""
        if leaf.rules is None:
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

    # --- results ----------------------------------------------------------------------------------

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
            assert mesh is not None
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


def _with_hint(leaf: LeafInfo, diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Returns the diagnostics of a box, with a hint where it may be an optimizer's state."""
    if leaf.box is None or not leaf.arrays:
        return list(diagnostics)

    with_hint: list[Diagnostic] = []
    for diagnostic in diagnostics:
        if diagnostic.code == "rank-mismatch":
            diagnostic = dataclasses.replace(diagnostic, message=diagnostic.message + _STATE_HINT)
        with_hint.append(diagnostic)
    return with_hint


@functools.lru_cache(maxsize=4096)
def named_sharding(
    mesh: AnyMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> NamedSharding:
    """Returns the one ``NamedSharding`` of a mesh and a spec."""
    return NamedSharding(mesh, spec, memory_kind=memory_kind)
