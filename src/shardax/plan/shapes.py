# SPDX-License-Identifier: Apache-2.0
"""Which slices of a torus there are to rent, and which are near to one that is not.

A *shape* is the sizes of a slice's torus. Of two that differ in order only, both are taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from shardax.plan.hardware import Hardware


def shape_exists(chip: Hardware, shape: tuple[int, ...]) -> bool:
    """Whether there are slices of a shape.

    Args:
        chip: The hardware; any shape exists if it names none.
        shape: Sizes of the torus.
    """
    if not chip.shapes:
        return True
    if _text(tuple(sorted(shape))) in _sorted_small(chip):
        return True
    return chip.torus_dimensions == 3 and _is_of_cubes(chip, shape)


def nearest_shapes(chip: Hardware, shape: tuple[int, ...], count: int = 4) -> list[str]:
    """Returns shapes that exist and have about as many chips.

    Args:
        chip: The hardware.
        shape: Sizes that do not exist.
        count: How many.
    """
    wanted = math.log2(math.prod(shape))
    near = sorted(
        _all_shapes(chip),
        key=lambda each: (abs(math.log2(math.prod(each)) - wanted), _distance(each, shape)),
    )
    return [_text(each) for each in near[:count]]


def factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    """Returns all ways to write a number as an ordered product.

    Args:
        number: The product, from 1.
        parts: How many factors.

    Example:
        >>> factorizations(4, 2)
        [(1, 4), (2, 2), (4, 1)]
    """
    if parts == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in factorizations(number // first, parts - 1)
    ]


def _all_shapes(chip: Hardware) -> Iterator[tuple[int, ...]]:
    """Every shape there is, each in one order."""
    yield from (tuple(map(int, text.split("x"))) for text in chip.shapes)
    if chip.torus_dimensions == 3 and chip.pod and chip.wraparound:
        step = chip.wraparound
        sizes = (range(step, most + 1, step) for most in sorted(chip.pod))
        yield from (each for each in itertools.product(*sizes) if list(each) == sorted(each))


def _is_of_cubes(chip: Hardware, shape: tuple[int, ...]) -> bool:
    """Whether a shape is put together of whole cubes and not larger than the pod."""
    if not chip.wraparound or any(size % chip.wraparound for size in shape):
        return False
    return all(
        size <= most for size, most in zip(sorted(shape), sorted(chip.pod or shape), strict=True)
    )


def _sorted_small(chip: Hardware) -> set[str]:
    """The shapes that are named, each with its sizes in ascending order."""
    return {_text(tuple(sorted(map(int, text.split("x"))))) for text in chip.shapes}


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """How different two shapes of one size are."""
    return sum(abs(math.log2(a / b)) for a, b in zip(sorted(one), sorted(other), strict=True))


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
