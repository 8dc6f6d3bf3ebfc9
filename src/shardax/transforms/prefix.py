# SPDX-License-Identifier: Apache-2.0
"""Prefixes: one entry of a caller's option, spread over every Variable it covers.

Options such as ``in_shardings`` and ``in_axes`` are given per argument. For an argument that is a
Module, an *entry* may be one value for all its Variables, a ``State`` or nested mapping with one
value per path, or a *filter mapping* (``StateSharding``, ``StateAxes``): an ordered mapping from
filters to values, of which the first that matches a Variable gives its value.

A Variable that is reached twice is one Variable, so it must get one value; if two entries disagree,
that is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from shardax.core.errors import FilterError, InconsistentAliasingError, PrefixError
from shardax.core.filters import (
    PathContains,
    first_match,
    no_match_error,
    to_predicates,
)
from shardax.core.node import Object
from shardax.core.paths import Path, format_path, path_step
from shardax.core.state import State, flatten_mapping
from shardax.core.structure import flatten
from shardax.core.variables import Variable
from shardax.transforms.aliases import alias_paths


class FilterMapping(Mapping[Any, Any]):
    """An ordered mapping from filters to values; the first match gives a Variable's value.

    Args:
        entries: A mapping or iterable of (filter, value) pairs; ``...`` last covers what remains. A
            ``State`` of values is taken path by path.

    Raises:
        FilterError: If ``...`` is not last or something is not a filter.
    """

    __slots__ = ("_filters", "_predicates", "_values")

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | State) -> None:
        if isinstance(entries, State):
            pairs: list[tuple[Any, Any]] = [
                (ExactPath(path), value) for path, value in entries.flat().items()
            ]
        else:
            pairs = list(entries.items() if isinstance(entries, Mapping) else entries)
        self._filters = tuple(item for item, _ in pairs)
        self._values = tuple(value for _, value in pairs)
        self._predicates = to_predicates(self._filters)

    def lookup(self, path: Path, variable: Any) -> Any:
        """Returns the value for a Variable.

        Args:
            path: Its path below the argument.
            variable: The Variable.

        Raises:
            FilterError: If no filter matches it; the message names the path.
        """
        position = first_match(self._predicates, path, variable)
        if position is None:
            raise no_match_error(path, variable, self._filters)
        return self._values[position]

    def __getitem__(self, key: Any) -> Any:
        for item, value in zip(self._filters, self._values, strict=True):
            if item is key or item == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._filters)

    def __len__(self) -> int:
        return len(self._filters)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, FilterMapping)
        return self._predicates == other._predicates and self._values == other._values

    def __hash__(self) -> int:
        return hash((type(self), tuple(self._predicates), self._values))

    def __repr__(self) -> str:
        pairs = ", ".join(
            f"{_name(k)}: {v!r}" for k, v in zip(self._filters, self._values, strict=True)
        )
        return f"{type(self).__name__}({{{pairs}}})"


def _name(item: Any) -> str:
    return item.__name__ if isinstance(item, type) else "..." if item is ... else repr(item)


class ExactPath(PathContains):
    """Matches the Variable at exactly one path."""

    def __call__(self, path: Path, variable: Any) -> bool:
        return path == self.key


class StateSharding(FilterMapping):
    """Shardings of a Module argument by filter, for ``in_shardings`` and ``out_shardings``.

    Example:
        >>> import shardax as sx
        >>> sx.StateSharding({sx.Param: "some sharding", ...: None})
        StateSharding({Param: 'some sharding', ...: None})
    """


class _CarryType:
    """The type of ``Carry``, an entry of its own kind."""

    def __repr__(self) -> str:
        return "Carry"

    def __reduce__(self) -> str:
        return "Carry"


Carry = _CarryType()
"""Entry of what goes from one iteration of a loop to the next (``scan``)."""


class StateAxes(FilterMapping):
    """Axes of a Module argument by filter, for ``vmap`` and ``scan``.

    An entry is an axis (an int), ``None`` for one value that all lanes share, or, in ``scan``,
    ``Carry``.

    Raises:
        PrefixError: If an entry is something else.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> axes = sx.StateAxes({sx.PathContains("kernel"): None, ...: 0})
        >>> layer.bias[...] = jnp.zeros((4, 3))
        >>> sx.vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, jnp.ones((4, 2))).shape
        (4, 3)
    """

    __slots__ = ()

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | State) -> None:
        super().__init__(entries)
        for item, value in zip(self._filters, self._values, strict=True):
            if value is not None and value is not Carry and not is_axis(value):
                raise PrefixError(
                    f"StateAxes gives {value!r} for {_name(item)}; an entry is an axis (an int), "
                    f"None for what all lanes share, or sx.Carry in sx.scan."
                )


def is_axis(entry: Any) -> bool:
    """Whether an entry is an axis: an integer that is no bool."""
    return isinstance(entry, int) and not isinstance(entry, bool)


def check_axes_only(prefix: Any, name: str, carry: bool = False) -> None:
    """Checks a prefix of axes before anything is called.

    Args:
        prefix: What the caller gave.
        name: The option's name, for messages.
        carry: Whether ``Carry`` is an entry.

    Raises:
        PrefixError: If an entry is neither an axis nor None nor such.
    """
    for leaf in jax.tree.leaves(prefix):
        if isinstance(leaf, StateSharding):
            raise PrefixError(f"{name} takes axes, but was given a StateSharding; use StateAxes.")
        values = leaf.values() if isinstance(leaf, FilterMapping) else [leaf]
        for value in values:
            if not (is_axis(value) or value is None or (carry and value is Carry)):
                allowed = (
                    "an axis (an int), None or sx.Carry" if carry else "an axis (an int) or None"
                )
                hint = " (sx.Carry is for sx.scan)" if value is Carry else ""
                raise PrefixError(f"{name} gives {value!r}{hint}; an entry is {allowed}.")


def check_shardings_only(prefix: Any, name: str) -> None:
    """Checks a prefix of shardings before anything is called.

    Args:
        prefix: What the caller gave.
        name: The option's name, for messages.

    Raises:
        PrefixError: If an entry is neither a sharding nor a spec nor None.
    """
    kinds = (jax.sharding.Sharding, jax.sharding.PartitionSpec, Object, StateSharding)
    for leaf in jax.tree.leaves(prefix, is_leaf=lambda item: isinstance(item, Object)):
        if isinstance(leaf, StateAxes):
            raise PrefixError(
                f"{name} takes shardings, but was given a StateAxes; use StateSharding."
            )
        if isinstance(leaf, StateSharding):
            for value in leaf.values():
                check_shardings_only(value, name)
        elif not isinstance(leaf, kinds) and not hasattr(leaf, "sharding"):  # a Format has one
            raise PrefixError(
                f"{name} gives {leaf!r}; an entry is a jax.sharding.Sharding, a PartitionSpec or "
                f"None, for a Module also a State of these or sx.StateSharding."
            )


def check_plain(prefix: Any, tree: Any, name: str, where: Path = ()) -> None:
    """Checks that a prefix fits something that holds no objects.

    Raises:
        PrefixError: If it does not, or has filters in it, which choose among Variables.
    """
    refuse_filters(prefix, name, where)
    for _ in expand(prefix, tree, name, where):
        pass


def per_argument(prefix: Any, labels: Sequence[str], name: str) -> list[Any]:
    """Returns one prefix per positional argument.

    Args:
        prefix: One entry for all arguments, or a tuple or list of one entry each.
        labels: The arguments' names.
        name: The option's name, for messages.

    Raises:
        PrefixError: If a tuple of another length was given.
    """
    if (
        not isinstance(prefix, (tuple, list))
        or hasattr(prefix, "_fields")  # a NamedTuple describes an argument of its own type
        or isinstance(prefix, jax.sharding.PartitionSpec)
    ):
        return [prefix] * len(labels)
    if len(prefix) == len(labels):
        return list(prefix)
    raise PrefixError(
        f"{name} has {_count(prefix, 'entry', 'entries')}, but the call has "
        f"{_count(labels, 'positional argument', 'positional arguments')} ({', '.join(labels)}). "
        f"Give one entry per argument, or one for all."
    )


def _count(items: Sequence[Any], one: str, many: str) -> str:
    return f"{len(items)} {one if len(items) == 1 else many}"


def expand(
    prefix: Any,
    tree: Any,
    name: str,
    where: Path = (),
    known: Mapping[int, Any] = MappingProxyType({}),
) -> Iterator[tuple[Path, Any, Any]]:
    """Spreads a prefix over a tree.

    Args:
        prefix: A prefix of ``tree``; at an object, an entry as defined at the top of this module.
        tree: A pytree that may hold objects.
        name: The option's name, for messages.
        where: Path of ``tree``.
        known: Entries of some Variables by ``id``, whatever the prefix says of them.

    Yields:
        (path, Variable or plain leaf, entry) for every Variable of every object and every plain
        leaf. A Variable that an object reaches by several paths is yielded for each of them if
        entries are chosen by path.

    Raises:
        PrefixError: If the prefix does not fit.
    """
    if isinstance(tree, Object):
        yield from _expand_object(prefix, tree, name, where, known)
        return
    if _is_entry(prefix):
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Object))
        for key_path, leaf in leaves:
            below = (*where, *(path_step(key) for key in key_path))
            if isinstance(leaf, Object):
                yield from expand(prefix, leaf, name, below, known)
            else:
                refuse_filters(prefix, name, below)
                yield below, leaf, prefix
        return
    children = _one_level(tree)
    parts = dict(_one_level(prefix))
    if type(prefix) is not type(tree) or [key for key, _ in children] != list(parts):
        kind, at = _place(name, where)
        raise PrefixError(
            f"{name} does not fit the {kind}{at}: it has {_shape(prefix)} where the {kind} has "
            f"{_shape(tree)}. Give one entry for the whole {kind}, or the same containers with one "
            f"entry each."
        )
    for key, child in children:
        yield from expand(parts[key], child, name, (*where, key), known)


def _place(name: str, where: Path) -> tuple[str, str]:
    """Returns what an option is about, by its name, and where in it, for messages."""
    kind = "result" if name.startswith("out_") else "argument"
    return kind, f" at {format_path(where)}" if where else ""


def _is_entry(prefix: Any) -> bool:
    return prefix is None or jax.tree_util.all_leaves((prefix,))


def refuse_filters(prefix: Any, name: str, where: Path) -> None:
    """Checks that the prefix of something that holds no objects has no filter mapping in it.

    Raises:
        PrefixError: If it has; filters choose among Variables.
    """
    for leaf in jax.tree.leaves(prefix):
        if isinstance(leaf, FilterMapping):
            kind, at = _place(name, where)
            raise PrefixError(
                f"{name} gives a {type(leaf).__name__} for the {kind}{at}, which holds no "
                f"Variables to choose among. Give plain arrays one entry, and only Modules a "
                f"{type(leaf).__name__}."
            )


def _one_level(tree: Any) -> list[tuple[Hashable, Any]]:
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    return [(path_step(path[0]), child) for path, child in pairs if path]


def _shape(tree: Any) -> str:
    kind = type(tree).__name__
    if isinstance(tree, Mapping):
        return f"a {kind} of {', '.join(map(repr, tree)) or 'nothing'}"
    if isinstance(tree, (tuple, list)):
        return f"a {kind} of {len(tree)}"
    return f"an array {tree.dtype}{list(tree.shape)}" if hasattr(tree, "dtype") else f"a {kind}"


def _expand_object(
    prefix: Any, root: Object, name: str, where: Path, known: Mapping[int, Any]
) -> Iterator[tuple[Path, Any, Any]]:
    flat = flatten(root)
    entry_of = _chooser(prefix, root, name, where)
    for path, variable in zip(flat.leaf_paths, flat.leaves, strict=True):
        if id(variable) in known:
            yield (*where, *path), variable, known[id(variable)]
        else:
            yield (*where, *path), variable, entry_of(path, variable)
    for position, path in alias_paths(flat.graphdef) if isinstance(prefix, Mapping) else ():
        variable = flat.leaves[position]
        if id(variable) not in known:
            with contextlib.suppress(PrefixError):  # a further path need not be chosen
                yield (*where, *path), variable, entry_of(path, variable)


def _chooser(prefix: Any, root: Object, name: str, where: Path) -> Callable[[Path, Any], Any]:
    """Returns the function that gives a Variable below an object, with its path, its entry."""
    kind, at = _place(name, where)
    if isinstance(prefix, FilterMapping):

        def by_filter(path: Path, variable: Any) -> Any:
            try:
                return prefix.lookup(path, variable)
            except FilterError as error:
                raise PrefixError(f"{name} for the {kind}{at}: {error}") from error

        return by_filter
    if isinstance(prefix, Mapping):
        by_path = flatten_mapping(prefix)

        def at_path(path: Path, variable: Any) -> Any:
            if path in by_path:
                return by_path[path]
            raise PrefixError(
                f"{name} has no entry for the {type(variable).__name__} at "
                f"{format_path((*where, *path))}."
            )

        return at_path
    if isinstance(prefix, (Variable, Object)) or not _is_entry(prefix):
        raise PrefixError(
            f"{name} for the {kind}{at}, a {type(root).__name__}, is a {type(prefix).__name__}. "
            f"Give one entry, a State of entries, or a filter mapping."
        )
    return lambda path, variable: prefix


def consistent(entries: Iterable[tuple[Path, Any, Any]], name: str) -> dict[int, tuple[Path, Any]]:
    """Checks that every Variable got one entry, and returns (path, entry) by ``id`` of Variable.

    Raises:
        InconsistentAliasingError: If a Variable reached by two paths got two different entries.
    """
    found: dict[int, tuple[Path, Any]] = {}
    for path, leaf, entry in entries:
        if not isinstance(leaf, Variable):
            continue
        first = found.setdefault(id(leaf), (path, entry))
        if first[1] is not entry and first[1] != entry:
            raise InconsistentAliasingError(
                f"One {type(leaf).__name__} is reached by two paths with different {name}:\n  "
                f"{format_path(first[0])}: {first[1]}\n"
                f"  {format_path(path)}: {entry}\nA shared Variable is one Variable and needs one "
                f"entry. Give both paths the same, "
                f"or untie them with sx.clone."
            )
    return found
