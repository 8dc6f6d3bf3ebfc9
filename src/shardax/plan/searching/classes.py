# SPDX-License-Identifier: Apache-2.0
"""Which dimensions of a program's arrays are the same, and the names that they have.

Two dimensions are *joined* where an operation keeps one as the other, such as the rows of both
operands of an addition; what is joined is one *class*, with all names given to its dimensions. A
reshape may make one dimension, the *whole*, of several, its *parts*: each is reached by the other's
names, though they stay classes of their own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

Dims = tuple[int, ...]  # the dimensions of an array, by number


class DimensionClasses:
    """Dimensions, numbered, and their classes."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._sizes: list[int] = []
        self._names: defaultdict[int, set[str]] = defaultdict(set)  # by representative
        self._wholes: list[tuple[int, Dims]] = []  # with their parts, major to minor
        self._looped: set[int] = set()

    def new(self, shape: Iterable[int]) -> Dims:
        """Makes one dimension of a class of its own for each size."""
        first = len(self._parents)
        self._sizes += shape
        self._parents += range(first, len(self._sizes))
        return tuple(range(first, len(self._sizes)))

    def size(self, dimension: int) -> int:
        """Returns the size of a dimension."""
        return self._sizes[dimension]

    def elements(self, dims: Iterable[int]) -> int:
        """Returns the product of the sizes of dimensions."""
        return math.prod(self._sizes[dim] for dim in dims)

    def find(self, dimension: int) -> int:
        """Returns the representative dimension of the class."""
        parents = self._parents
        while parents[dimension] != dimension:
            parents[dimension] = parents[parents[dimension]]
            dimension = parents[dimension]
        return dimension

    def join(self, first: int, second: int) -> None:
        """Joins the classes of two dimensions, unless one is of size 1."""
        if 1 in (self._sizes[first], self._sizes[second]):
            return

        first, second = sorted((self.find(first), self.find(second)))
        if first != second:
            self._parents[second] = first
            self._names[first] |= self._names.pop(second, set())

    def join_same_sizes(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Joins dimensions of two arrays pairwise, where their sizes are equal."""
        for left_dim, right_dim in zip(left, right, strict=False):
            if self._sizes[left_dim] == self._sizes[right_dim]:
                self.join(left_dim, right_dim)

    def make_whole(self, whole: int, parts: Sequence[int]) -> None:
        """Declares that a dimension is made of several, major to minor."""
        self._wholes.append((whole, tuple(parts)))

    def name(self, dimension: int, name: str) -> None:
        """Names a class; dimensions of size 1, never split, have no name."""
        if self._sizes[dimension] != 1:
            self._names[self.find(dimension)].add(name)

    def loop_over(self, dimension: int) -> None:
        """Declares that a loop takes a dimension element by element."""
        self._looped.add(dimension)

    def looped_names(self) -> frozenset[str]:
        """Returns the names of the dimensions of loops."""
        return frozenset(name for dim in self._looped for name in self.own_names(dim))

    def own_names(self, dimension: int) -> frozenset[str]:
        """Returns the names given to a dimension's class."""
        return frozenset(self._names.get(self.find(dimension), ()))

    def resolve(self) -> dict[int, frozenset[str]]:
        """Joins the remaining parts; returns by class the names that reach it."""
        while self._join_parts():
            pass

        reached: defaultdict[int, set[str]] = defaultdict(set)
        for dim in self._names:
            reached[dim] |= self._names[dim]
        for whole, parts in self._wholes:
            for part in parts:
                self._reach(reached, whole, self.own_names(part))
                self._reach(reached, part, self.own_names(whole))

        # A whole of wholes has the names of all their parts, as rows of tokens sent to experts.
        whole_classes = {self.find(whole) for whole, _ in self._wholes}
        nested = [
            (whole, self.find(part))
            for whole, parts in self._wholes
            for part in parts
            if self.find(part) in whole_classes
        ]
        has_grown = True
        while has_grown:
            has_grown = False
            for whole, part in nested:
                has_grown |= self._reach(reached, whole, reached[part])
        return {dim: frozenset(names) for dim, names in reached.items()}

    def _join_parts(self) -> bool:
        """Joins the parts of joined wholes; returns whether there were any."""
        # The same whole of the same sizes of parts, met again, has the same parts.
        first_parts: dict[tuple[int, Dims], Dims] = {}
        has_joined = False
        for whole, parts in self._wholes:
            key = self.find(whole), tuple(self._sizes[part] for part in parts)
            for first, second in zip(first_parts.setdefault(key, parts), parts, strict=True):
                if self._sizes[first] != 1 and self.find(first) != self.find(second):
                    self.join(first, second)
                    has_joined = True
        return has_joined

    def _reach(self, reached: dict[int, set[str]], dimension: int, names: Iterable[str]) -> bool:
        """Adds names to those that reach a dimension; returns whether there are more now."""
        if self._sizes[dimension] == 1:
            return False

        of_class = reached[self.find(dimension)]
        count = len(of_class)
        of_class.update(names)
        return len(of_class) > count


def matching_groups(
    left_sizes: Sequence[int], right_sizes: Sequence[int]
) -> list[tuple[Dims, Dims]]:
    """Returns the fewest consecutive dimensions of two shapes that have equal products."""
    left = [i for i, size in enumerate(left_sizes) if size != 1]
    right = [i for i, size in enumerate(right_sizes) if size != 1]
    groups: list[tuple[Dims, Dims]] = []
    while left and right:
        left_group, right_group = [left.pop(0)], [right.pop(0)]
        left_product, right_product = left_sizes[left_group[0]], right_sizes[right_group[0]]

        # The side with the smaller product takes its next dimension.
        while left_product != right_product:
            if not (left if left_product < right_product else right):
                return groups  # sizes of no element: nothing corresponds
            if left_product < right_product:
                left_product *= left_sizes[left[0]]
                left_group.append(left.pop(0))
            else:
                right_product *= right_sizes[right[0]]
                right_group.append(right.pop(0))
        groups.append((tuple(left_group), tuple(right_group)))
    return groups
