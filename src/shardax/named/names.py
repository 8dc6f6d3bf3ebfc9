# SPDX-License-Identifier: Apache-2.0
"""Names of axes, and the one order of them that does not depend on how an array is stored.

A *name* is any hashable object but None; names are compared as the keys of a dict are. The *dims*
of an array have one entry per dimension, a name or None. A dimension without a name is
*positional*: what counts of it is its place among the other positional ones. *Storage order* is the
order of the dims as the array has them.

The *canonical order* has the positional dimensions first, as they stand, then the names, sorted:
numbers, then strings, then all else by type and text. It is the same in every process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from shardax.core.errors import AxisNamesError, NamedAxesError

Name = Hashable
Dims = tuple[Any, ...]
Form = tuple[tuple[Name, ...], tuple[int, ...]]
"""Names in canonical order, and their sizes: what there is to know of dims but storage order."""


class Canonical(NamedTuple):
    """What brings one array into canonical order.

    Attributes:
        form: The names and sizes.
        permutation: The dimensions in canonical order; None if they stand so already.
    """

    form: Form
    permutation: tuple[int, ...] | None


def check_dims(dims: Iterable[Any]) -> Dims:
    """Returns dims as a tuple.

    Args:
        dims: One name, or None, per dimension.

    Raises:
        AxisNamesError: If a name is not hashable or occurs twice, or two cannot be sorted.

    Example:
        >>> check_dims(["batch", None, 3])
        ('batch', None, 3)
    """
    given = tuple(dims)
    try:
        return _checked(given)
    except TypeError:
        for name in given:
            _check_hashable(name)
        raise


@functools.lru_cache(maxsize=4096)
def _checked(dims: Dims) -> Dims:
    names = [name for name in dims if name is not None]
    if len(set(names)) < len(names):
        repeated = list(dict.fromkeys(name for name in names if names.count(name) > 1))
        raise AxisNamesError(
            f"The dims {dims} hold {', '.join(map(repr, repeated))} more than once. An axis is "
            f"found by its name, so give each its own, such as {str(repeated[0]) + '_2'!r}."
        )
    keys = sorted(map(_sort_key, names))
    if any(one == other for one, other in itertools.pairwise(keys)):
        raise AxisNamesError(
            f"Of the names {names} two are different and have one type and text, by which names "
            f"are sorted. Give their class a __repr__ that tells them apart."
        )
    return dims


def _check_hashable(name: Any) -> None:
    try:
        hash(name)
    except TypeError:
        raise AxisNamesError(
            f"An axis name is hashable, but {name!r} is of type {type(name).__name__}. Use a "
            f"string, a number, a tuple or a frozen dataclass; None leaves a dimension unnamed."
        ) from None


def _sort_key(name: Name) -> tuple[int, Any, str]:
    if isinstance(name, str):  # also a member of a string enumeration, which equals its value
        return 1, 0, str.__str__(name)
    if isinstance(name, (int, float)):
        return 0, name, ""
    kind = type(name)
    return 2, 0, f"{kind.__module__}.{kind.__qualname__}:{name!r}"


def sorted_names(names: Iterable[Name]) -> tuple[Name, ...]:
    """Returns names in canonical order.

    Example:
        >>> sorted_names(["mlp", 1, "embed"])
        (1, 'embed', 'mlp')
    """
    return tuple(sorted(names, key=_sort_key))


@functools.lru_cache(maxsize=4096)
def canonical(dims: Dims, shape: tuple[int, ...]) -> Canonical:
    """Returns the canonical form of an array, and how to get there.

    Example:
        >>> canonical(("b", None, "a"), (2, 3, 4))
        Canonical(form=(('a', 'b'), (4, 2)), permutation=(1, 2, 0))
    """
    positional = [place for place, name in enumerate(dims) if name is None]
    names = sorted_names(name for name in dims if name is not None)
    order = (*positional, *map(dims.index, names))
    form = (names, tuple(shape[place] for place in order[len(positional) :]))
    return Canonical(form, None if order == tuple(range(len(dims))) else order)


def check_sizes_by_name(axes: Any, least: int = 0) -> tuple[Dims, tuple[int, ...]]:
    """Returns the names and the sizes of axes that are given as a mapping.

    Args:
        axes: Sizes by name.
        least: The least size.

    Raises:
        NamedAxesError: If it is no mapping, or a size is no such number.
        AxisNamesError: If a name cannot be one.

    Example:
        >>> check_sizes_by_name({"batch": 2, "embed": 3})
        (('batch', 'embed'), (2, 3))
    """
    if not isinstance(axes, Mapping):
        raise NamedAxesError(
            f"Axes are a mapping from names to sizes, such as {{'batch': 8}}, not {axes!r}."
        )
    sizes = cast("Mapping[Any, Any]", axes)
    for name, size in sizes.items():
        whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if name is None or not whole or size < least:
            raise NamedAxesError(
                f"Axes give each name its size, a whole number of at least {least}, but "
                f"{dict(sizes)} has {name!r}: {size!r}."
            )
    return check_dims(sizes), tuple(int(size) for size in sizes.values())


def label(name: Name) -> Any:
    """Returns a name as rules and layouts have it: a string, or a tuple of strings for merged ones.

    Example:
        >>> label("batch"), label(("batch", "time")), label(3)
        ('batch', ('batch', 'time'), '3')
    """
    if isinstance(name, str):
        return str.__str__(name)
    merged = isinstance(name, tuple) and all(isinstance(part, str) for part in name)
    return name if merged else repr(name)


def positional_places(dims: Dims) -> tuple[int, ...]:
    """Returns the dimensions that have no name."""
    return tuple(place for place, name in enumerate(dims) if name is None)


def shown(dims: Dims, shape: Iterable[int]) -> str:
    """Formats names with sizes, a positional dimension as its size alone.

    Example:
        >>> shown((None, "batch"), (3, 8))
        "{3, 'batch': 8}"
    """
    parts = (
        str(size) if name is None else f"{name!r}: {size}"
        for name, size in zip(dims, shape, strict=True)
    )
    return f"{{{', '.join(parts)}}}"
