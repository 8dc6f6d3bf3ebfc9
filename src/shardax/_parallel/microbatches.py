# SPDX-License-Identifier: Apache-2.0
"""Batches cut into microbatches, and joined again.

Microbatch i of k takes the rows i, i + k, i + 2k, ...: a batch that is sharded over its rows is cut
on each device by itself that way, and no row moves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from shardax.extend import PyTree


def cut(batch: PyTree, count: int) -> PyTree:
    """Cuts arrays into (count, rows / count, ...)."""

    def parts(leaf) -> jax.Array:
        rows = jnp.asarray(leaf)
        return jnp.swapaxes(rows.reshape(rows.shape[0] // count, count, *rows.shape[1:]), 0, 1)

    return jax.tree.map(parts, batch)


def joined(microbatches: object) -> PyTree:
    """The inverse of ``cut``."""

    def whole(leaf: jax.Array) -> jax.Array:
        rows = jnp.swapaxes(leaf, 0, 1)
        return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])

    return jax.tree.map(whole, microbatches)


def indivisible(name: str, batch: object, count: int) -> list[str]:
    """Names and shapes of arrays that cannot be cut equally."""
    return [
        f"{name}{jax.tree_util.keystr(key)} of shape {np.shape(leaf)}"
        for key, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
        if not np.shape(leaf) or np.shape(leaf)[0] % count
    ]
