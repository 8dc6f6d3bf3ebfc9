# SPDX-License-Identifier: Apache-2.0
"""Which entry each argument, Variable and array of one call has.

First the prefix of each argument is found, by position or by name (``assign``). A *mapped* call
(``vmap`` on batch elements, ``scan`` on iterations, ``shard_map`` on shards) then spreads them, at
two times:

- Before the run, ``EntryAssignment`` spreads the prefixes over the arguments.
- In the run, ``EntryAssignment.output_entries`` spreads the same prefixes, and that of the result,
  over what the function left behind. So a new Variable, too, has the entry of its place in the
  result, or of the argument that it was attached to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from shardax._core.graph.paths import Path, PyTree
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.lift.engine import LiftedCall, RunContext
from shardax._transforms.lift.prefixes import LeafEntry, consistent, expand
from shardax._transforms.lift.signatures import (
    by_position,
    parameter_name,
    parameters_of,
    positional_names,
)

# --- the prefix of each argument --------------------------------------------------------------


class AssignedPrefixes(NamedTuple):
    """The arguments of a call, each with its prefix."""

    args: tuple[PyTree, ...]
    """The positional arguments, with those given by name that have their entry by position."""

    kwargs: dict[str, PyTree]
    """The others."""

    prefixes: list[PyTree]
    """The prefix of each positional argument."""

    named: dict[str, PyTree]
    """The prefix of each other argument, by name."""


def assign(
    function: Callable[..., PyTree],
    prefix: PyTree,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    option: str,
    other: Any,
) -> AssignedPrefixes:
    """Finds the prefix of every argument, by position or name.

    Args:
        function: The user's function.
        prefix: One entry for all arguments, one per positional argument, or a dict by name.
        args: The positional arguments.
        kwargs: The arguments by name.
        option: The option's name, for messages.
        other: The prefix of an argument by name that the prefix does not mention.
    """
    by_name = assign_by_name(function, prefix, args, kwargs, option)
    if by_name is not None:
        return by_name

    if is_one_entry(prefix):
        args, kwargs = by_position(function, args, kwargs)
        return AssignedPrefixes(args, kwargs, [prefix] * len(args), dict.fromkeys(kwargs, other))

    # An argument that is given by name behind one that is left out has its entry by position.
    args, kwargs = by_position(function, args, kwargs, most=len(prefix))
    parameter_names = positional_names(function)
    named = dict.fromkeys(kwargs, other)
    behind_gap = [name for name in kwargs if name in parameter_names[: len(prefix)]]
    for name in behind_gap:
        named[name] = prefix[parameter_names.index(name)]
    if behind_gap:
        return AssignedPrefixes(args, kwargs, list(prefix[: len(args)]), named)

    labels = [parameter_name(function, position) for position in range(len(args))]
    return AssignedPrefixes(args, kwargs, per_argument(prefix, labels, option), named)


def assign_by_name(
    function: Callable[..., PyTree],
    prefix: PyTree,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    option: str,
) -> AssignedPrefixes | None:
    """Finds the prefix of every argument in a dict by parameter; None if it is no such dict."""
    if entries_by_name(function, prefix) is prefix:
        return None

    args, kwargs = by_position(function, args, kwargs)
    labels = [parameter_name(function, position) for position in range(len(args))]
    missing = [label for label in (*labels, *kwargs) if label not in prefix]
    if missing:
        raise errors.arguments_without_entry(option, list(prefix), missing)
    prefixes = [prefix[label] for label in labels]
    return AssignedPrefixes(args, kwargs, prefixes, {name: prefix[name] for name in kwargs})


def entries_by_name(function: Callable[..., PyTree], prefix: PyTree) -> PyTree:
    """Returns the entries of a dict by parameter as a list; any other prefix unchanged."""
    names = {parameter.name for parameter in parameters_of(function) or ()}
    is_by_name = type(prefix) is dict and prefix and names.issuperset(prefix)
    return list(prefix.values()) if is_by_name else prefix


def is_one_entry(prefix: PyTree) -> bool:
    """Returns whether a prefix is one entry for all arguments."""
    if not isinstance(prefix, (tuple, list)) or isinstance(prefix, PartitionSpec):
        return True
    return hasattr(prefix, "_fields")  # a NamedTuple describes an argument of its own type


def per_argument(prefix: PyTree, labels: Sequence[str], option: str) -> list[PyTree]:
    """Returns one prefix per positional argument; the arguments have the given labels."""
    if is_one_entry(prefix):
        return [prefix] * len(labels)
    if len(prefix) != len(labels):
        raise errors.wrong_entry_count(option, len(prefix), labels)
    return list(prefix)


# --- the entry of each Variable and array -----------------------------------------------------


class EntryAssignment:
    """The entries of one mapped call.

    Args:
        call: The call.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        prefixes: The prefix of each positional argument.
        named: The prefix of each argument by name; or one for all.
        outside: The entry of Variables that are in no argument: what the function is bound to.
        option: The option's name, for messages.

    Attributes:
        by_id: (path, entry) of each Variable in the arguments, by ``id``.
        leaves: The entry of each Variable of the graph.
        plain: The entry of each plain leaf, positional arguments first, then by name.
        plain_paths: The path of each plain leaf.
    """

    def __init__(
        self,
        call: LiftedCall,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        prefixes: Sequence[PyTree],
        named: PyTree,
        outside: Any,
        option: str,
    ) -> None:
        self.call = call
        self.prefixes = prefixes
        self.named = named
        self.option = option

        entries = self._expand(args, kwargs, {})
        self.by_id = consistent(entries, option)
        default = ((), outside)
        self.leaves = [self.by_id.get(id(leaf), default)[1] for leaf in call.graph.flat.leaves]

        plain = _plain_entries(entries)
        self.plain = [entry for _, entry in plain]
        self.plain_paths = [path for path, _ in plain]

    @property
    def leaf_paths(self) -> list[Path]:
        """The path of each Variable of the graph."""
        return self.call.graph.flat.leaf_paths

    def output_entries(
        self, context: RunContext, out_prefix: PyTree, out_option: str
    ) -> OutputEntries:
        """Returns the entries of everything that leaves a run."""
        # Given Variables keep the entries that they came with, wherever the function put them.
        known: dict[int, Any] = {}
        for position, leaf in enumerate(self.call.graph.flat.leaves):
            if id(leaf) in self.by_id:
                _, entry = self.by_id[id(leaf)]
                known[id(context.variable(position))] = entry

        of_arguments = self._expand(context.args, context.kwargs, known)
        of_result = [
            (("result", *path), leaf, entry)
            for path, leaf, entry in expand(out_prefix, context.result, out_option)
        ]
        by_id = consistent([*of_arguments, *of_result], f"{self.option} and {out_option}")
        attached = frozenset(id(leaf) for _, leaf, _ in of_arguments)
        return OutputEntries(by_id, _plain_entries(of_result), attached)

    def _expand(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], known: Mapping[int, Any]
    ) -> list[LeafEntry]:
        """Returns the entries of arguments; ``known`` as for ``expand``."""
        entries: list[LeafEntry] = []
        for label, prefix, arg in zip(self.call.labels, self.prefixes, args, strict=True):
            entries += expand(prefix, arg, self.option, (label,), known)
        for name in sorted(kwargs):
            prefix = self.named[name] if isinstance(self.named, dict) else self.named
            entries += expand(prefix, kwargs[name], self.option, (name,), known)
        return entries


def _plain_entries(entries: Iterable[LeafEntry]) -> list[tuple[Path, Any]]:
    return [(path, entry) for path, leaf, entry in entries if not isinstance(leaf, Variable)]


class OutputEntries(NamedTuple):
    """Entries of what leaves a run."""

    by_id: dict[int, tuple[Path, Any]]
    """(path, entry) of each Variable inside, by ``id``."""

    of_plain: list[tuple[Path, Any]]
    """(path, entry) of each plain leaf of the result; the path begins with "result"."""

    attached: frozenset[int]
    """``id`` of everything in the arguments."""
