# SPDX-License-Identifier: Apache-2.0
"""Filter mappings: options of transforms that choose an entry for each Variable of a Module.

A filter mapping is an ordered mapping from filters to entries, of which the first filter that
matches a Variable decides: ``StateAxes`` for axes, ``StateSharding`` for shardings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from shardax._core.graph.paths import Path, PyTree
from shardax._core.object import Object
from shardax._core.state.filters import PathContains, first_match, no_match_error, to_predicates
from shardax._core.state.state import State
from shardax._transforms import errors


class FilterMapping(Mapping[Any, Any]):
    """An ordered mapping from filters to values; the first match wins."""

    __slots__ = ("_filters", "_predicates", "_values")

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | State) -> None:
        if isinstance(entries, State):
            pairs = [(ExactPath(path), value) for path, value in entries.flat().items()]
        elif isinstance(entries, Mapping):
            pairs = list(entries.items())
        else:
            pairs = list(entries)
        self._filters = tuple(filter_ for filter_, _ in pairs)
        self._values = tuple(value for _, value in pairs)
        self._predicates = to_predicates(self._filters)

    @property
    def filters(self) -> tuple[Any, ...]:
        """The filters, in order."""
        return self._filters

    def lookup(self, path: Path, variable: object) -> PyTree:
        """Returns the value for a Variable, or raises FilterError if no filter matches."""
        position = first_match(self._predicates, path, variable)
        if position is None:
            raise no_match_error(path, variable, self._filters)
        return self._values[position]

    def __getitem__(self, key: Any) -> Any:
        for filter_, value in zip(self._filters, self._values, strict=True):
            if filter_ is key or filter_ == key:
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
        pairs = zip(self._filters, self._values, strict=True)
        items = ", ".join(f"{errors.filter_name(filter_)}: {value!r}" for filter_, value in pairs)
        return f"{type(self).__name__}({{{items}}})"


class ExactPath(PathContains):
    """Matches the Variable at exactly one path."""

    def __call__(self, path: Path, variable: object) -> bool:
        return path == self.key


# --- shardings --------------------------------------------------------------------------------


class StateSharding(FilterMapping):
    """Shardings of a Module argument by filter, for ``in_shardings`` and ``out_shardings``.

    Example:
        >>> import shardax as sx
        >>> sx.StateSharding({sx.Param: "some sharding", ...: None})
        StateSharding({Param: 'some sharding', ...: None})
    """

    __slots__ = ()

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings, in the order of ``filters``."""
        return self._values


def check_shardings_only(prefix: PyTree, option: str) -> None:
    """Raises PrefixError if a prefix holds what is no sharding, before anything is called."""
    kinds = (jax.sharding.Sharding, jax.sharding.PartitionSpec, Object)
    for leaf in jax.tree.leaves(prefix, is_leaf=lambda entry: isinstance(entry, Object)):
        if isinstance(leaf, StateAxes):
            raise errors.PrefixError(
                f"{option} takes shardings, but was given a StateAxes; use StateSharding."
            )
        if isinstance(leaf, StateSharding):
            for value in leaf.values():
                check_shardings_only(value, option)
        elif not isinstance(leaf, kinds) and not hasattr(leaf, "sharding"):  # a Format has one
            raise errors.PrefixError(
                f"{option} gives {leaf!r}; an entry is a jax.sharding.Sharding, a PartitionSpec or "
                "None, for a Module also a State of these or sx.StateSharding."
            )


# --- axes -------------------------------------------------------------------------------------


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

    An entry is an axis (an int), ``None`` for one value that the whole batch shares, or, in
    ``scan``, ``Carry``.

    Raises:
        PrefixError: If an entry is something else.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> axes = sx.StateAxes({sx.PathContains("kernel"): None, ...: 0})
        >>> layer.bias.value = jnp.zeros((4, 3))
        >>> sx.vmap(lambda m, x: m(x), in_axes=(axes, 0))(layer, jnp.ones((4, 2))).shape
        (4, 3)
    """

    __slots__ = ()

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | State) -> None:
        super().__init__(entries)
        for filter_, value in zip(self._filters, self._values, strict=True):
            if value is not None and value is not Carry and not is_axis(value):
                raise errors.PrefixError(
                    f"StateAxes gives {value!r} for {errors.filter_name(filter_)}; an entry is an "
                    "axis (an int), None for what the whole batch shares, or sx.Carry in sx.scan."
                )

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axes, in the order of ``filters``."""
        return self._values


def is_axis(entry: object) -> bool:
    """Returns whether an entry is an axis: an integer that is no bool."""
    return isinstance(entry, int) and not isinstance(entry, bool)


def check_axes_only(prefix: PyTree, option: str, carry: bool = False) -> None:
    """Raises PrefixError if a prefix holds what is no axis, before anything is called."""
    for leaf in jax.tree.leaves(prefix):
        if isinstance(leaf, StateSharding):
            raise errors.PrefixError(
                f"{option} takes axes, but was given a StateSharding; use StateAxes."
            )
        entries = leaf.values() if isinstance(leaf, FilterMapping) else [leaf]
        for entry in entries:
            if is_axis(entry) or entry is None or (carry and entry is Carry):
                continue
            hint = " (sx.Carry is for sx.scan)" if entry is Carry else ""
            allowed = "an axis (an int), None or sx.Carry" if carry else "an axis (an int) or None"
            raise errors.PrefixError(f"{option} gives {entry!r}{hint}; an entry is {allowed}.")


def entries_in(prefix: PyTree) -> list[Any]:
    """Returns the distinct entries that a prefix can give."""
    distinct: list[Any] = []
    for leaf in jax.tree.leaves(prefix, is_leaf=lambda entry: entry is None):
        entries = leaf.values() if isinstance(leaf, FilterMapping) else [leaf]
        for entry in entries:
            if not any(entry == other for other in distinct):
                distinct.append(entry)
    return distinct
