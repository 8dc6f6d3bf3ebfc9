# SPDX-License-Identifier: Apache-2.0
"""Marks: the names of an array's dimensions, written into a program."""

from __future__ import annotations

import json
from collections.abc import Iterable

import jax
from jax.ad_checkpoint import checkpoint_name

from shardax.partition.assignment import Names

_MARK = "shardax-names:"


def mark_axis_names(array: jax.Array, names: Iterable[object]) -> jax.Array:
    """Returns an array that its program shows with the names of its dimensions.

    Args:
        array: The array.
        names: One entry for each dimension.

    Returns:
        The array, after an equation of the primitive ``name``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax import extend
        >>> mark = lambda x: extend.mark_axis_names(x, ("batch", None))
        >>> [equation] = jax.make_jaxpr(mark)(jnp.ones((2, 3))).eqns
        >>> extend.axis_names_of_mark(equation.params["name"])
        ('batch', None)
    """
    # JSON writes a tuple of names as a list. What is no name, such as UNCONSTRAINED, says nothing.
    entries = [name if isinstance(name, (str, tuple)) else None for name in names]
    return checkpoint_name(array, _MARK + json.dumps(entries))


def axis_names_of_mark(name: str) -> Names | None:
    """Returns the names of dimensions in a mark, or None.

    Args:
        name: The parameter ``name`` of an equation of the primitive ``name``.

    Returns:
        The names that ``mark_axis_names`` was given; None for a name that is no such mark.

    Example:
        >>> from shardax import extend
        >>> extend.axis_names_of_mark("attention") is None
        True
    """
    if not name.startswith(_MARK):
        return None
    entries = json.loads(name.removeprefix(_MARK))
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)
