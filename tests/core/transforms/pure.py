# SPDX-License-Identifier: Apache-2.0
"""The pure function behind a function over Modules, for laws: lifted = plain on the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import shardax as sx


def pure_of(
    function: Callable[..., Any], model: Any
) -> tuple[Callable[..., Any], list[Any], list[Any]]:
    """Returns (function of the values, these values, their paths), made by split and merge."""
    graphdef, state = sx.split(model)
    origins, paths = state.origins(), list(state.flat())

    def pure(values: list[Any], *args: Any) -> Any:
        given = sx.State.from_flat(dict(zip(paths, values, strict=True)), origins)
        return function(sx.merge(graphdef, given), *args)

    return pure, list(state.flat().values()), paths


def floating(tree: Any) -> bool:
    """Whether all numbers in a value are floating."""
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(tree))


def touch(model: Any) -> Any:
    """Reads every floating Variable of a model, and writes it; returns arrays."""
    total, seen = jnp.zeros(()), []
    for position, (_, variable) in enumerate(sx.iter_variables(model)):
        if not floating(variable.value):
            continue
        for leaf in jax.tree.leaves(variable.value):
            read = (position + 1) * jnp.sin(leaf.astype(jnp.float32))
            total += read.sum()
            seen.append(read)
        variable.value = jax.tree.map(lambda leaf: leaf * 2, variable.value)
    return {"total": total, "seen": seen}
