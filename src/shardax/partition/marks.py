# SPDX-License-Identifier: Apache-2.0
"""Marks: the names of an array's dimensions, written into a program."""

from __future__ import annotations

import json
from collections.abc import Iterable

import jax
from jax.ad_checkpoint import checkpoint_name

from shardax.partition.assignment import Names

_MARK = "shardax-names:"


class AxisNameMarks:
    """Marks that show the names of an array's dimensions in its program.

    A mark is an equation of the primitive ``name``, which JAX drops when it compiles.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax import extend
        >>> mark = lambda x: extend.AxisNameMarks.put(x, ("batch", None))
        >>> [equation] = jax.make_jaxpr(mark)(jnp.ones((2, 3))).eqns
        >>> extend.AxisNameMarks.read(equation.params["name"])
        ('batch', None)
        >>> extend.AxisNameMarks.read("attention") is None
        True
    """

    @staticmethod
    def put(array: jax.Array, names: Iterable[object]) -> jax.Array:
        """Returns an array with a mark.

        Args:
            array: The array.
            names: One entry for each dimension.
        """
        # JSON writes a tuple of names as a list. What is no name, such as UNCONSTRAINED, says
        # nothing.
        entries = [name if isinstance(name, (str, tuple)) else None for name in names]
        return checkpoint_name(array, _MARK + json.dumps(entries))

    @staticmethod
    def read(name: str) -> Names | None:
        """Returns the names in a mark; None for another name.

        Args:
            name: The parameter ``name`` of an equation of the primitive ``name``.
        """
        if not name.startswith(_MARK):
            return None
        entries = json.loads(name.removeprefix(_MARK))
        return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)
