# SPDX-License-Identifier: Apache-2.0
"""Kinds: shape, dtype and layout type of what a function would return, inside transforms.

Over *mixed* meshes, with both Auto and Explicit axes, an array's type says how it is laid out over
the Explicit ones. ``jax.eval_shape`` then says nothing about layouts, since it could not say all.
Loops and branches compare types, and need what is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType


def result_kinds(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what ``jax.eval_shape`` does, with layouts over Explicit axes also of mixed meshes.

    Args:
        function: A pure function; if it is a ``jax.jit`` of one, the trace is kept by JAX.
        *args: Its arguments, or their shapes.

    Returns:
        A pytree of ``jax.ShapeDtypeStruct``.

    Example:
        >>> import jax.numpy as jnp
        >>> result_kinds(jnp.sin, jnp.ones(3))
        ShapeDtypeStruct(shape=(3,), dtype=float32)
    """
    traceable: Any = function if hasattr(function, "trace") else jax.jit(function)
    traced = traceable.trace(*args)
    shapes, treedef = jax.tree.flatten(traced.out_info)
    kinds = [_typed(*pair) for pair in zip(shapes, traced.jaxpr.out_avals, strict=True)]
    return treedef.unflatten(kinds)


def _typed(shape: jax.ShapeDtypeStruct, kind: Any) -> jax.ShapeDtypeStruct:
    layout = getattr(kind, "sharding", None)
    if shape.sharding is not None or layout is None or layout.mesh.empty:
        return shape
    explicit = AxisType.Explicit in layout.mesh.axis_types
    return shape.update(sharding=layout) if explicit else shape
