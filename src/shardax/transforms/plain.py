# SPDX-License-Identifier: Apache-2.0
"""Plain arguments: telling by its type alone that an argument holds no objects.

It makes the steady call of a compiled function quick. JAX's type of concrete arrays is not public;
it is learned from the first array that comes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardax.core._jax import Tracer
from shardax.core.node import Object

ARRAY_TYPES: set[type] = {np.ndarray, bool, int, float, complex, type(None)}
"""Types of arguments that are surely plain; JAX's concrete array type joins when first met."""


def note_types(arg: Any) -> bool:
    """Learns JAX's concrete array type; returns whether the argument holds tracers."""
    if isinstance(arg, jax.Array) and not isinstance(arg, Tracer):
        ARRAY_TYPES.add(type(arg))
        return False
    leaves = jax.tree.leaves(arg)
    if ARRAY_TYPES.issuperset(map(type, leaves)):
        return False
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            ARRAY_TYPES.add(type(leaf))
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def all_dynamic(args: Sequence[Any], static: frozenset[type]) -> bool:
    """Whether surely nothing of the arguments is static but what is of the given types."""
    for arg in args:  # no generator: it would cost as much as a short call
        kind = type(arg)
        if (kind not in ARRAY_TYPES or kind in static) and not isinstance(arg, Object):
            return False
    return True
