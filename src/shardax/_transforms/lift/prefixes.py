# SPDX-License-Identifier: Apache-2.0
"""Prefixes: options of transforms with an entry for every Variable and array.

Options such as ``in_shardings`` and ``in_axes`` are given per argument (``lift.entries``). For
containers an option has the same containers, or one *entry* for all that is in them. For a Module
it is one entry for all its Variables, a ``State`` or nested mapping with one entry per path, or a
filter mapping (``lift.filter_mappings``).

``expand`` spreads a prefix over what it describes. A Variable that is reached twice is one
Variable, so it must get one entry; two different ones are an error with both paths
(``consistent``). A choice by path holds for all paths of a Variable (``lift.alias_paths``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax

from shardax._core.errors import FilterError
from shardax._core.frames import owner_here
from shardax._core.graph import flatten as graphs
from shardax._core.graph.paths import Path, PyTree, plain_path
from shardax._core.object import Object
from shardax._core.state.state import State, flatten_mapping
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.errors import PrefixError
from shardax._transforms.lift.alias_paths import alias_paths
from shardax._transforms.lift.filter_mappings import FilterMapping

LeafEntry = tuple[Path, Any, Any]
"""(path, Variable or array, entry)."""

EntryFunction = Callable[[Path, Any], Any]
"""Returns the entry of a Variable, or array, by its path."""


def prefix(
    tree: PyTree,
    entries: Mapping[Any, Any] | Callable[[Path, Any], Any],
    *,
    as_module: bool = False,
) -> Any:
    """Makes a prefix of axes or shardings by path.

    Args:
        tree: A Module, Variable, State, or pytree of these and arrays: one argument of the function
            that is transformed.
        entries: A mapping from filters to entries, of which the first that matches decides; or a
            function of path and Variable (or array), which returns the entry.
        as_module: Whether the prefix of a Module is a Module of the same structure, whose Variables
            hold entries: for transforms of JAX itself, such as ``jax.vmap``, which take no other.

    Returns:
        What ``in_axes``, ``in_shardings`` and the like take for the argument: of a Module a
        ``State`` of entries, which ``StateAxes`` and ``StateSharding`` take too; of a container,
        the container with these in it.

    Raises:
        PrefixError: If no filter matches.
        TransformError: If a Variable has different entries by two paths.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> layer.bias.value = jnp.zeros((4, 3))
        >>> axes = sx.prefix(layer, lambda path, variable: 0 if "bias" in path else None)
        >>> axes.flat()
        {('kernel',): None, ('bias',): 0}
        >>> sx.vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, jnp.ones((4, 2))).shape
        (4, 3)
        >>> axes = sx.prefix(layer, {sx.PathContains("bias"): 0, ...: None}, as_module=True)
        >>> jax.vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, jnp.ones((4, 2))).shape
        (4, 3)
    """
    graphs.check_tree(tree, "prefix")
    if callable(entries):
        entry_of: EntryFunction = entries
    elif isinstance(entries, Mapping):
        entry_of = _ByFilter(entries).lookup
    else:
        raise errors.wrong_entries(entries)

    leaf_entries: list[LeafEntry] = []

    def entry_at(path: Path, leaf: object) -> Any:
        try:
            entry = entry_of(path, leaf)
        except FilterError as error:
            raise PrefixError(f"sx.prefix: {error}") from error
        leaf_entries.append((path, leaf, entry))
        return entry

    def prefix_of_state(path: Path, state: State) -> State:
        # A filter asks what the values came from.
        subjects = state.flat() if callable(entries) else state.origins()
        by_path = {below: entry_at((*path, *below), item) for below, item in subjects.items()}
        return State.from_flat(by_path, state.origins())

    def prefix_of_module(path: Path, module: Object) -> Any:
        flat = graphs.flatten(module)
        by_path = {}
        for below, variable in zip(flat.leaf_paths, flat.leaves, strict=True):
            by_path[below] = entry_at((*path, *below), variable)
        for position, below in alias_paths(flat.graphdef):
            entry_at((*path, *below), flat.leaves[position])

        if not as_module:
            return State.from_flat(by_path)
        (prefix_module,), _ = graphs.build(flat.graphdef, list(by_path.values()), owner_here())
        return prefix_module

    def prefix_of(keys, part: Any) -> Any:
        path = plain_path(keys)
        if isinstance(part, State):
            return prefix_of_state(path, part)
        if isinstance(part, Object) and not isinstance(part, Variable):
            return prefix_of_module(path, part)
        return entry_at(path, part)

    result = jax.tree_util.tree_map_with_path(
        prefix_of, tree, is_leaf=lambda part: isinstance(part, (Object, State))
    )
    consistent(leaf_entries, "entries of sx.prefix")
    return result


class _ByFilter(FilterMapping):
    """A filter mapping of entries of any kind."""


# --- spreading a prefix -----------------------------------------------------------------------


def expand(
    prefix: PyTree,
    tree: PyTree,
    option: str,
    path: Path = (),
    known: Mapping[int, Any] = MappingProxyType({}),
    lenient: bool = False,
) -> Iterator[LeafEntry]:
    """Yields (path, leaf, entry) of each Variable and array that a prefix describes.

    A Variable whose entry is chosen by path comes again with each of its further paths.

    Args:
        prefix: The prefix.
        tree: What it describes: an argument, or a result.
        option: The option's name, for messages; it begins with "out_" for a result.
        path: The path of ``tree``, for messages and results.
        known: Entries of Variables that are known already, by ``id``.
        lenient: Whether a Variable without an entry gets None; else it is an error.

    Raises:
        PrefixError: If the prefix does not fit.
    """
    if isinstance(tree, Object):
        yield from _expand_object(prefix, tree, option, path, known, lenient)
        return

    if _is_entry(prefix):
        leaves = jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda leaf: isinstance(leaf, Object)
        )
        for keys, leaf in leaves:
            leaf_path = (*path, *plain_path(keys)) if keys else path
            if isinstance(leaf, Object):
                yield from _expand_object(prefix, leaf, option, leaf_path, known, lenient)
            else:
                refuse_filters(prefix, option, leaf_path)
                yield leaf_path, leaf, prefix
        return

    children, parts = one_level(tree), one_level(prefix)
    keys_agree = [key for key, _ in children] == [key for key, _ in parts]
    if type(prefix) is not type(tree) or not keys_agree:
        raise errors.unfitting_prefix(option, path, prefix, tree)
    for (key, child), (_, part) in zip(children, parts, strict=True):
        yield from expand(part, child, option, (*path, *key), known, lenient)


def _is_entry(prefix: PyTree) -> bool:
    return prefix is None or jax.tree_util.all_leaves((prefix,))


def one_level(tree: PyTree) -> list[tuple[Path, PyTree]]:
    """Returns (path, child) of each child of a pytree node; of a State, a path may come again."""
    if type(tree) in (tuple, list):
        return [((position,), child) for position, child in enumerate(tree)]
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda part: part is not tree)
    return [(plain_path(keys), child) for keys, child in pairs if keys]


def _expand_object(
    prefix: PyTree, root: Object, option: str, path: Path, known: Mapping[int, Any], lenient: bool
) -> Iterator[LeafEntry]:
    flat = graphs.flatten(root)
    entry_of = _entry_function(prefix, root, option, path)

    for below, variable in zip(flat.leaf_paths, flat.leaves, strict=True):
        try:
            entry = known[id(variable)] if id(variable) in known else entry_of(below, variable)
        except PrefixError:
            if not lenient:
                raise
            entry = None
        yield (*path, *below), variable, entry

    if isinstance(prefix, Mapping):
        for position, below in alias_paths(flat.graphdef):
            variable = flat.leaves[position]
            if id(variable) not in known:
                with contextlib.suppress(PrefixError):  # a further path need not be chosen
                    yield (*path, *below), variable, entry_of(below, variable)


def _entry_function(prefix: PyTree, root: Object, option: str, path: Path) -> EntryFunction:
    """Returns what gives the entries of an object's Variables, by path from the object on."""

    def by_filter(below: Path, variable: object) -> Any:
        try:
            return prefix.lookup(below, variable)
        except FilterError as error:
            raise errors.no_filter_matches(option, path, error) from error

    if isinstance(prefix, FilterMapping):
        return by_filter

    # One entry, or one of the form of the Variable's value, such as that of a named array.
    if _is_entry(prefix) and not isinstance(prefix, (Mapping, Object)):
        return lambda below, variable: prefix
    if isinstance(root, Variable) and not _is_entry(prefix) and _fits_value(prefix, root):
        return lambda below, variable: prefix

    if not isinstance(prefix, Mapping):
        raise errors.wrong_prefix_of_object(option, path, prefix, root)
    by_path = flatten_mapping(prefix)

    def at_path(below: Path, variable: object) -> Any:
        if below not in by_path:
            raise errors.no_entry_at(option, (*path, *below), variable)
        return by_path[below]

    return at_path


def _fits_value(prefix: PyTree, variable: Variable) -> bool:
    """Returns whether a prefix has the form of a Variable's value."""
    if isinstance(prefix, (Object, State)):
        return False
    structure = jax.tree.structure(prefix, is_leaf=lambda entry: entry is None)
    try:
        structure.flatten_up_to(variable._here()._value)
    except ValueError:
        return False
    return True


# --- checks -----------------------------------------------------------------------------------


def consistent(entries: Iterable[LeafEntry], option: str) -> dict[int, tuple[Path, Any]]:
    """Returns (path, entry) of each Variable by its ``id``; raises if one has two entries."""
    entries_by_id: dict[int, tuple[Path, Any]] = {}
    for path, leaf, entry in entries:
        if not isinstance(leaf, Variable):
            continue
        first_path, first_entry = entries_by_id.setdefault(id(leaf), (path, entry))
        if not _are_equal(first_entry, entry):
            kind = type(leaf).__name__
            raise errors.two_entries(option, kind, (first_path, first_entry), (path, entry))
    return entries_by_id


def _are_equal(first: PyTree, second: PyTree) -> bool:
    return first is second or jax.tree.flatten(first) == jax.tree.flatten(second)


def check_plain(prefix: PyTree, tree: PyTree, option: str, path: Path = ()) -> None:
    """Raises PrefixError if a prefix does not fit something that holds no objects."""
    refuse_filters(prefix, option, path)
    for _ in expand(prefix, tree, option, path):
        pass


def refuse_filters(prefix: PyTree, option: str, path: Path) -> None:
    """Raises PrefixError if a prefix of something that holds no objects has filters."""
    for leaf in jax.tree.leaves(prefix):
        if isinstance(leaf, FilterMapping):
            raise errors.filters_for_arrays(option, path, type(leaf).__name__)
