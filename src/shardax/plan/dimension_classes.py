# SPDX-License-Identifier: Apache-2.0
"""Classes of dimensions: which dimensions of a program's arrays are one and the same thing.

A *dimension* is one dimension of one array in a program. Two are *joined* where an operation keeps
one as the other, such as the rows of both operands of an addition; what is joined is one *class*.
A class has the names that were given to any of its dimensions. A reshape may make one dimension of
several: then that one is their *whole*, and they are its *parts*. A split of the whole is one of
its parts and the other way round, so each is reached by the other's names, though they stay classes
of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class DimensionClasses:
    """Dimensions, numbered, and their classes."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._sizes: list[int] = []
        self._names: dict[int, set[str]] = {}
        self._wholes: list[tuple[int, tuple[int, ...]]] = []
        self._by_size: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self._looped: set[int] = set()

    def new(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Makes one dimension of a class of its own for each size."""
        first = len(self._parents)
        self._sizes += shape
        self._parents += range(first, len(self._sizes))
        return tuple(range(first, len(self._sizes)))

    def size(self, dimension: int) -> int:
        """Returns the size of a dimension."""
        return self._sizes[dimension]

    def find(self, dimension: int) -> int:
        """Returns the dimension that stands for the class."""
        parents = self._parents
        while parents[dimension] != dimension:
            parents[dimension] = parents[parents[dimension]]
            dimension = parents[dimension]
        return dimension

    def join(self, one: int, other: int) -> None:
        """Makes the classes of two dimensions one; a dimension of size 1 stays by itself."""
        if 1 in (self._sizes[one], self._sizes[other]):
            return
        one, other = sorted((self.find(one), self.find(other)))
        if one != other:
            self._parents[other] = one
            self._names.setdefault(one, set()).update(self._names.pop(other, ()))

    def join_same_sizes(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Joins the dimensions of two arrays, one by one, that have equal sizes."""
        for a, b in zip(one, other, strict=False):
            if self._sizes[a] == self._sizes[b]:
                self.join(a, b)

    def make_whole(self, whole: int, parts: Sequence[int]) -> None:
        """Says that a dimension is made of several, major to minor.

        The same whole of the same sizes of parts, met again, has the same parts.
        """
        self._wholes.append((whole, tuple(parts)))
        key = (self.find(whole), tuple(self._sizes[part] for part in parts))
        known = self._by_size.setdefault(key, tuple(parts))
        for one, other in zip(known, parts, strict=True):
            self.join(one, other)

    def name(self, dimension: int, name: str) -> None:
        """Gives a class a name; a dimension of size 1 has none, as it is never split."""
        if self._sizes[dimension] != 1:
            self._names.setdefault(self.find(dimension), set()).add(name)

    def loop_over(self, dimension: int) -> None:
        """Says that a loop takes a dimension one element at a time."""
        self._looped.add(dimension)

    def looped_names(self) -> frozenset[str]:
        """Returns the names of classes that a loop takes one element at a time."""
        return frozenset(name for each in self._looped for name in self.own_names(each))

    def own_names(self, dimension: int) -> frozenset[str]:
        """Returns the names given to a dimension's class."""
        return frozenset(self._names.get(self.find(dimension), ()))

    def resolve(self) -> dict[int, frozenset[str]]:
        """Joins what is still to be joined; returns names by class, also of wholes and parts."""
        while self._join_parts():
            pass
        reached = {self.find(each): set(self.own_names(each)) for each in self._names}
        for whole, parts in self._wholes:
            for part in parts:
                for one, other in ((whole, part), (part, whole)):
                    found = self.own_names(other)
                    if found and self._sizes[one] != 1:
                        reached.setdefault(self.find(one), set()).update(found)
        return {each: frozenset(names) for each, names in reached.items()}

    def _join_parts(self) -> bool:
        """Joins the parts of wholes that have become one class; says whether there were any."""
        known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        changed = False
        for whole, parts in self._wholes:
            key = (self.find(whole), tuple(self._sizes[part] for part in parts))
            for one, other in zip(known.setdefault(key, parts), parts, strict=True):
                if self._sizes[one] != 1 and self.find(one) != self.find(other):
                    self.join(one, other)
                    changed = True
        return changed


def matching_groups(
    one: Sequence[int], other: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs the fewest consecutive dimensions of two shapes of as many elements, of equal product.

    Args:
        one: Sizes.
        other: Sizes of the same product.

    Returns:
        Pairs of positions in each; sizes of 1 are left out.

    Example:
        >>> matching_groups((32, 24, 16, 8), (32, 24, 128))
        [((0,), (0,)), ((1,), (1,)), ((2, 3), (2,))]
    """
    left = [i for i, size in enumerate(one) if size != 1]
    right = [i for i, size in enumerate(other) if size != 1]
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while left and right:
        taken, given = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(one[i] for i in taken)) != (b := math.prod(other[i] for i in given)):
            source, target = (left, taken) if a < b else (right, given)
            if not source:  # sizes of no element: nothing corresponds
                return groups
            target.append(source.pop(0))
        groups.append((tuple(taken), tuple(given)))
    return groups
