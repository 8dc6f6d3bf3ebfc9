# SPDX-License-Identifier: Apache-2.0
"""In which order a search compiles its candidates: those that promise most first.

The order is by a rough estimate from the dimension model, so that a search that is interrupted has
seen the good ones; and of many candidates those are left out whose estimate is several times the
least, unless too few others fit. It is no verdict among the good ones: these are compiled. A
product is cut along the mesh axes of its dimensions, each axis once; what is summed over cut
dimensions is sent around (twice its bytes), and an operand that is cut by an axis which another
dimension has is gathered (its bytes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardax.partition.assignment import mesh_axes_of
from shardax.plan.dimensions import Dimensions, Product
from shardax.plan.records import Layout

_BYTES = 2  # of an element, as computed with
_OPERANDS = {"batch": (0, 1, 2), "left": (0, 2), "right": (1, 2), "sum": (0, 1)}
"""Which of left operand, right operand and result have a dimension, by its role."""


def promising_first(
    layouts: Sequence[Layout], dimensions: Dimensions, flops_per_byte: float
) -> list[Layout]:
    """Sorts layouts by a rough estimate of their time; equals stay as they are.

    Args:
        layouts: The layouts.
        dimensions: The step's dimension model.
        flops_per_byte: How many operations a device does while it sends a byte.
    """
    return sorted(layouts, key=lambda layout: rough_cost(layout, dimensions, flops_per_byte))


def rough_cost(layout: Layout, dimensions: Dimensions, flops_per_byte: float) -> float:
    """Returns operations of one device, and bytes that it sends as operations it could do instead.

    Args:
        layout: The layout.
        dimensions: The step's dimension model.
        flops_per_byte: How many operations a device does while it sends a byte.
    """
    axes_of = {name: mesh_axes_of(target) for name, target in layout.rules}
    return sum(
        _cost(product, axes_of, layout.sizes, flops_per_byte) for product in dimensions.products
    )


def _cost(
    product: Product,
    axes_of: dict[str, tuple[str, ...]],
    sizes: dict[str, int],
    flops_per_byte: float,
) -> float:
    place = {name: position for position, name in enumerate(axes_of)}
    order = sorted(product.dims, key=lambda d: min((place.get(n, 99) for n in d.names), default=99))
    taken: set[str] = set()
    parts = [1, 1, 1]
    gathered = [1, 1, 1]
    whole = [1, 1, 1]
    summed = 1
    for dim in order:
        wanted = {axis for name in dim.names for axis in axes_of.get(name, ())}
        ways = math.prod(sizes[axis] for axis in wanted - taken)
        lost = math.prod(sizes[axis] for axis in wanted & taken)
        taken |= wanted
        for array in _OPERANDS[dim.role]:
            whole[array] *= dim.size
            parts[array] *= ways
            gathered[array] *= lost
        if dim.role == "sum":
            summed *= ways
    flops = product.flops / math.prod(sizes[axis] for axis in taken)
    sent = sum(
        whole[array] / parts[array] * (1 - 1 / gathered[array]) for array in range(3)
    ) + 2 * whole[2] / parts[2] * (1 - 1 / summed)
    return flops + product.runs * _BYTES * sent * flops_per_byte
