# SPDX-License-Identifier: Apache-2.0
"""The options of ``jit``: which arguments are static, which are donated, where arrays belong.

``in_shardings`` says where the Variables in the arguments belong: they are moved there before a
call, and stay. Those that the function writes are returned there, and a new Variable that takes the
place of another one has the entry of that place. ``out_shardings`` does the same for objects in the
result, and its entries go before.

A Variable without an entry may still belong somewhere: where a ``shard_map`` inside of the function
splits it. That is known once the function was traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardax._core.errors import DonationError
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.graph.static import exact_key
from shardax._core.object import Object
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.errors import DeclaredSpec, StaticArgumentError
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import prefixes
from shardax._transforms.lift.effects import LiftedOutputs
from shardax._transforms.lift.entries import is_one_entry, per_argument
from shardax._transforms.lift.filter_mappings import check_shardings_only
from shardax._transforms.lift.input_graph import InputGraph
from shardax._transforms.lift.placement import place_variables, require_mesh_in_scope, specs_in
from shardax._transforms.lift.signatures import as_tuple, resolve_arguments

if TYPE_CHECKING:
    from shardax._core.graph.definitions import GraphDef


@dataclasses.dataclass(frozen=True)
class JitOptions:
    """Options of ``jit``, named as those of ``jax.jit``."""

    in_shardings: PyTree = None
    out_shardings: PyTree = None
    static_argnums: int | Sequence[int] | None = None
    static_argnames: str | Sequence[str] | None = None
    static: str | None = None
    donate_argnums: int | Sequence[int] | None = None
    donate_argnames: str | Sequence[str] | None = None
    keep_unused: bool = False
    inline: bool = False
    compiler_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        inputs.check_static_option(self.static)
        check_compiler_options(self.compiler_options)

        if self.in_shardings is not None:
            check_shardings_only(self.in_shardings, "in_shardings")
        if self.out_shardings is not None:
            check_shardings_only(self.out_shardings, "out_shardings")

    @property
    def auto_static(self) -> bool:
        """Whether leaves that are neither arrays nor objects are static."""
        return self.static is not None

    @property
    def static_numbers(self) -> bool:
        """Whether Python's numbers are static, too."""
        return self.static == inputs.NUMBERS

    @property
    def static_types(self) -> frozenset[type]:
        """Types that are static although JAX takes them."""
        if not self.auto_static:
            return frozenset()
        return frozenset({bool, *inputs.NUMBER_TYPES}) if self.static_numbers else frozenset({bool})

    @property
    def declares_shardings(self) -> bool:
        """Whether shardings of arguments or of the result are declared."""
        return self.in_shardings is not None or self.out_shardings is not None

    def key(self) -> Hashable:
        """Returns what the options compare by: their values if hashable, else themselves."""
        try:
            return exact_key(self)
        except TypeError:
            return object()

    def split_arguments(
        self,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        label: Callable[[int | str], Path],
    ) -> inputs.SplitArguments:
        """Returns the arguments of a call, without static ones, as ``SplitArguments``."""
        return inputs.SplitArguments(
            args, kwargs, self.auto_static, static_numbers=self.static_numbers, label=label
        )

    def donates(self, position: int | None, name: str) -> bool:
        """Whether an argument is donated, by its position, if it has one, or its name."""
        is_named = name in as_tuple(self.donate_argnames)
        return is_named or position in as_tuple(self.donate_argnums)


def check_compiler_options(options: object) -> None:
    """Raises unless compiler options are a mapping."""
    if options is not None and not isinstance(options, Mapping):
        raise errors.compiler_options_not_named(options)


def with_resolved_arguments(options: JitOptions, function: Callable[..., PyTree]) -> JitOptions:
    """Returns the options with static and donated arguments both by position and by name."""
    donated, donated_names = resolve_arguments(
        function, options.donate_argnums, options.donate_argnames, "donate", DonationError
    )
    static, static_names = resolve_arguments(
        function, options.static_argnums, options.static_argnames, "static", StaticArgumentError
    )

    both_names = {*donated_names} & {*static_names}
    both_positions = {*donated} & {*static}
    if both_names or both_positions:
        raise errors.static_and_donated(sorted(both_names) or sorted(both_positions))

    return dataclasses.replace(
        options,
        static_argnums=static,
        static_argnames=static_names,
        donate_argnums=donated,
        donate_argnames=donated_names,
    )


# --- where arrays belong ----------------------------------------------------------------------


class _DeclaredArgument(NamedTuple):
    """A positional argument and its entry of ``in_shardings``."""

    label: str
    prefix: PyTree
    template: inputs.Template


class Layouts:
    """Where the arrays of one specialization belong.

    Attributes:
        of_variables: The declared sharding of each Variable, or None.
        of_arrays: The same of each array of the arguments.
        of_shard_map: Where Variables that are only read belong by a ``shard_map``, by position.
        specs: The declared ``PartitionSpec``s, which mean the mesh in scope.
    """

    def __init__(
        self,
        options: JitOptions,
        graph: InputGraph,
        arguments: inputs.SplitArguments,
        positions: inputs.ArgumentPositions,
    ) -> None:
        self.options = options
        self.of_variables: list[Any] = [None] * len(graph.flat.leaves)
        self.of_arrays: list[Any] = []
        self.of_shard_map: dict[int, jax.sharding.Sharding] = {}
        self._declared: list[_DeclaredArgument] = []

        if options.in_shardings is not None:
            self._spread(graph, arguments, positions)
        self.specs = self._find_specs()

        # Refuses specs before anything is traced or moved.
        self.mesh_of_specs()

    # --- before a call ----------------------------------------------------------------------------

    @property
    def place_variables(self) -> bool:
        """Whether Variables may have to be moved before a call."""
        return self.options.in_shardings is not None or bool(self.of_shard_map or self.specs)

    def has_place(self, position: int) -> bool:
        """Whether the Variable at a position belongs somewhere."""
        return self.of_variables[position] is not None or position in self.of_shard_map

    def mesh_of_specs(self) -> Mesh | None:
        """Returns the mesh in scope that declared specs mean; None without specs."""
        return require_mesh_in_scope(self.specs) if self.specs else None

    def place(self, variables: Mapping[int, Variable], mesh: Mesh | None = None) -> None:
        """Moves Variables, by position, to where they belong; they stay there.

        Args:
            variables: The Variables.
            mesh: What specs mean; by default the mesh in scope.
        """
        if not (self.of_shard_map or self.options.in_shardings is not None):
            return

        entries = []
        for position, variable in variables.items():
            entry = self.of_variables[position]
            if entry is None and self.is_off(position, variable):
                entry = self.of_shard_map.get(position)
            entries.append(entry)
        place_variables([*variables.values()], entries, mesh)

    def is_off(self, position: int, variable: Variable) -> bool:
        """Whether a Variable is not on the mesh whose ``shard_map`` splits it."""
        sharding = self.of_shard_map.get(position)
        mesh = getattr(sharding, "mesh", None)

        for leaf in jax.tree.leaves(variable._value):
            if getattr(getattr(leaf, "sharding", None), "mesh", None) != mesh:
                return True
        return False

    def _spread(
        self,
        graph: InputGraph,
        arguments: inputs.SplitArguments,
        positions: inputs.ArgumentPositions,
    ) -> None:
        """Finds the entries of ``in_shardings`` for all Variables and arrays of the arguments."""
        declared, labels = self.options.in_shardings, positions.labels

        # Entries for static arguments may be among them.
        static = [place for place, _ in positions.static if isinstance(place, int)]
        if not is_one_entry(declared) and len(declared) == len(labels) + len(static):
            declared = [entry for place, entry in enumerate(declared) if place not in static]
        argument_prefixes = per_argument(declared, labels, "in_shardings")

        entries: list[Any] = []
        for label, prefix, template, plain in zip(
            labels, argument_prefixes, arguments.templates, arguments.plain, strict=True
        ):
            self._declared.append(_DeclaredArgument(label, prefix, template))
            argument = inputs.join_argument(template, plain, arguments.roots, with_static=False)
            if isinstance(template, inputs.PlainTemplate):
                prefixes.refuse_filters(prefix, "in_shardings", (label,))
            entries.extend(prefixes.expand(prefix, argument, "in_shardings", (label,)))

        # Arguments by name have no entry.
        of_arrays = [entry for _, leaf, entry in entries if not isinstance(leaf, Variable)]
        count = len(arguments.plain_leaves()[0])
        self.of_arrays = of_arrays + [None] * (count - len(of_arrays))

        by_id = prefixes.consistent(entries, "in_shardings")
        for position, leaf in enumerate(graph.flat.leaves):
            if id(leaf) in by_id:
                _, self.of_variables[position] = by_id[id(leaf)]

    def _find_specs(self) -> list[DeclaredSpec]:
        """Returns the specs among the declared shardings."""
        if not self.options.declares_shardings:
            return []

        specs: list[DeclaredSpec] = []
        for argument in self._declared:
            specs += specs_in(argument.prefix, "in_shardings", (argument.label,))
        specs += specs_in(self.options.out_shardings, "out_shardings")
        return specs

    # --- after a trace ----------------------------------------------------------------------------

    def take_wanted(
        self,
        wanted: Sequence[jax.sharding.Sharding | None],
        variables: Sequence[Variable],
        written: Sequence[int],
    ) -> bool:
        """Takes where a ``shard_map`` wants Variables; returns whether one is somewhere else.

        Only those count that are read alone and have no declared sharding.

        Args:
            wanted: Where each Variable is wanted, or None.
            variables: The Variables.
            written: Positions of those that are written.
        """
        for position, sharding in enumerate(wanted):
            is_free = position not in written and self.of_variables[position] is None
            if sharding is not None and is_free:
                self.of_shard_map[position] = sharding
        return any(self.is_off(position, variables[position]) for position in self.of_shard_map)

    def of_outputs(
        self,
        outputs: LiftedOutputs,
        graphdef: GraphDef,
        copies: Sequence[Object],
        result: PyTree,
        plain: Sequence[Leaf],
        roots: Sequence[Object],
    ) -> tuple[PyTree, list[Any], list[Any]]:
        """Returns the shardings of what leaves a trace: of the result, written and new Variables.

        Args:
            outputs: What leaves.
            graphdef: The structure that was bound.
            copies: The private copies of its objects.
            result: What the user's function returned.
            plain: The plain positional arguments.
            roots: The copies of the objects in the arguments.
        """
        declared, effects = self.options.out_shardings, outputs.effects
        by_id = self._of_replaced(graphdef, copies, plain, roots)

        of_result: PyTree = declared
        if effects.result is None:
            prefixes.check_plain(declared, result, "out_shardings")
        else:
            entries = list(prefixes.expand(declared, result, "out_shardings"))
            of_result = [entry for _, leaf, entry in entries if not isinstance(leaf, Variable)]
            consistent = prefixes.consistent(entries, "out_shardings")
            by_id |= {key: entry for key, (_, entry) in consistent.items() if entry is not None}

        of_written = []
        for position in effects.written:
            entry = by_id.get(id(copies[graphdef.leaves[position]]))
            of_written.append(self.of_variables[position] if entry is None else entry)

        of_fresh = [by_id.get(key) for key in effects.fresh_ids]
        return of_result, of_written, of_fresh

    def _of_replaced(
        self,
        graphdef: GraphDef,
        copies: Sequence[Object],
        plain: Sequence[Leaf],
        roots: Sequence[Object],
    ) -> dict[int, Any]:
        """Returns the entries of Variables that took the place of others, by ``id``."""
        known = {id(copies[index]): None for index in graphdef.leaves}
        by_id: dict[int, Any] = {}

        for declared, part in zip(self._declared, plain, strict=False):
            if isinstance(declared.template, inputs.PlainTemplate):
                continue
            argument = inputs.join_argument(declared.template, part, roots, with_static=False)
            entries = prefixes.expand(
                declared.prefix, argument, "in_shardings", (declared.label,), known, lenient=True
            )
            for _, leaf, entry in entries:
                if id(leaf) not in known:
                    by_id[id(leaf)] = entry
        return by_id


def spread_prefix(prefix: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree with the sharding of each array, by a prefix of it."""
    entries, treedef = jax.tree.flatten(prefix, is_leaf=lambda entry: entry is None)
    shardings: list[Any] = []
    for entry, subtree in zip(entries, treedef.flatten_up_to(tree), strict=True):
        shardings += [entry] * len(jax.tree.leaves(subtree))
    return jax.tree.structure(tree).unflatten(shardings)
