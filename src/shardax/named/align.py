# SPDX-License-Identifier: Apache-2.0
"""Alignment: bringing arrays of different dims to the same dims, for elementwise operations.

Named dimensions meet by name, wherever they are stored; positional ones meet as in NumPy, from the
last. A name that one operand lacks is repeated along; a name that both have has one size, also
where that is 1, since a name says that two dimensions are the same.

To *expand* an array to a *target*, which are dims that include its own, is to transpose it and to
add dimensions of size 1. Where storage agrees with the target nothing is done.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from shardax.core.errors import NamedAxesError
from shardax.named.base import transposed
from shardax.named.names import Dims, positional_places, shown


class Operand(NamedTuple):
    """An array with dims, while an operation works on it.

    Attributes:
        data: The array.
        dims: Its dims.
    """

    data: Any
    dims: Dims


@functools.lru_cache(maxsize=4096)
def joined(first: Dims, second: Dims) -> Dims:
    """Returns the dims of the result of an elementwise operation.

    They are those of the operand with more positional dimensions, the first if both have as many,
    and names that only the other has stand in front.

    Example:
        >>> joined(("a", "b"), ("b", "c")), joined(("a",), (None, "b"))
        (('c', 'a', 'b'), ('a', None, 'b'))
    """
    base, other = first, second
    if len(positional_places(second)) > len(positional_places(first)):
        base, other = second, first
    return (*(name for name in other if name is not None and name not in base), *base)


class _Moves(NamedTuple):
    permutation: tuple[int, ...] | None
    added: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _moves(dims: Dims, target: Dims) -> _Moves:
    places = dict(_sources(dims, target))
    order = tuple(places[place] for place in sorted(places))
    added = tuple(place for place in range(len(target)) if place not in places)
    return _Moves(None if order == tuple(range(len(dims))) else order, added)


def _sources(dims: Dims, target: Dims) -> list[tuple[int, int]]:
    """Pairs of a dimension of the target and the dimension of the array that it comes from."""
    mine, its = positional_places(dims), positional_places(target)
    return [
        *((target.index(name), place) for place, name in enumerate(dims) if name is not None),
        *zip(its[len(its) - len(mine) :], mine, strict=True),
    ]


def expand(operand: Operand, target: Dims) -> Any:
    """Returns an array with one dimension per entry of the target, of size 1 where it had none.

    Args:
        operand: The array and its dims.
        target: Dims that have the operand's names and at least as many positional dimensions.

    Example:
        >>> import jax.numpy as jnp
        >>> expand(Operand(jnp.ones((2, 3)), ("b", "a")), ("a", "c", "b")).shape
        (3, 1, 2)
    """
    data, dims = operand
    if dims == target:
        return data
    permutation, added = _moves(dims, target)
    data = transposed(data, permutation)
    return jax.lax.expand_dims(data, added) if added else data


def align(operands: Sequence[Operand]) -> tuple[list[Any], Dims]:
    """Expands arrays to the dims of an elementwise operation on all of them.

    Args:
        operands: Arrays and their dims, at least one.

    Returns:
        The arrays, and their common dims.

    Raises:
        NamedAxesError: If a name has two sizes, or positional dimensions do not broadcast.
    """
    dims = functools.reduce(joined, (operand.dims for operand in operands))
    check_sizes(operands)
    return [expand(operand, dims) for operand in operands], dims


def check_sizes(operands: Sequence[Operand]) -> None:
    """Checks that every name has one size, and that positional dimensions broadcast.

    Raises:
        NamedAxesError: If not; lists the axes of every operand.
    """
    named_sizes(operands)
    shapes = [
        tuple(data.shape[place] for place in positional_places(dims)) for data, dims in operands
    ]
    if len(set(shapes)) > 1 and not _broadcast(shapes):
        raise NamedAxesError(
            f"The positional dimensions do not broadcast: {listing(operands)}. They meet from the "
            f"last, as in NumPy. Name them, x.tag(...), to say which belong together."
        )


def named_sizes(operands: Sequence[Operand]) -> dict[Any, int]:
    """Returns the sizes of all names of the operands.

    Raises:
        NamedAxesError: If a name has two; lists the axes of every operand.
    """
    sizes: dict[Any, int] = {}
    clashing: dict[Any, None] = {}
    for data, dims in operands:
        for name, size in zip(dims, data.shape, strict=True):
            if name is not None and sizes.setdefault(name, size) != size:
                clashing[name] = None
    if clashing:
        first = next(iter(clashing))
        raise NamedAxesError(
            f"The sizes of the axis {', '.join(map(repr, clashing))} differ: {listing(operands)}. "
            f"A name says that two dimensions are the same; rename one of them, "
            f"x.rename({{{first!r}: ...}}), or take the part that you mean, "
            f"x[{{{first!r}: slice(...)}}]."
        )
    return sizes


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> bool:
    for place in range(1, 1 + max(map(len, shapes))):
        found = {shape[-place] for shape in shapes if place <= len(shape)}
        if len(found - {1}) > 1:
            return False
    return True


def listing(operands: Sequence[Operand]) -> str:
    """Formats the axes of all operands, by position."""
    return "; ".join(
        f"argument {place} has {shown(dims, data.shape)}"
        for place, (data, dims) in enumerate(operands)
    )
