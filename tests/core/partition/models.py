# SPDX-License-Identifier: Apache-2.0
"""A small lazy model with everything that a layout meets, for the tests of partitioning."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardax as sx

RULES = sx.Rules({"vocab": "model", "mlp": "model", "embed": "data"})


def kernel(rngs: sx.Rngs, shape: tuple[int, ...], axes: tuple[Any, ...]) -> sx.Param[Any]:
    """A lazy parameter drawn from a truncated normal distribution."""
    return sx.Param(sx.Init(jax.nn.initializers.lecun_normal(), shape, rngs=rngs), axes=axes)


class Layer(sx.Module):
    """One hidden layer of a multilayer perceptron."""

    def __init__(self, rngs: sx.Rngs, embed: int = 8, mlp: int = 16) -> None:
        self.up = kernel(rngs, (embed, mlp), ("embed", "mlp"))
        self.down = kernel(rngs, (mlp, embed), ("mlp", "embed"))

    def __call__(self, x: Any) -> Any:
        return x + jnp.tanh(x @ self.up.value) @ self.down.value


class Tower(sx.Module):
    """An embedding tied to its head, layers, a counter, statistics, an array and random state."""

    def __init__(self, depth: int = 2, seed: int = 0) -> None:
        rngs = sx.Rngs(seed)
        self.embed = kernel(rngs, (12, 8), ("vocab", "embed"))
        self.layers = [Layer(rngs) for _ in range(depth)]
        self.head = self.embed
        self.count = sx.Variable(0)
        self.stats = sx.BatchStat({"mean": jnp.zeros(8), "var": jnp.ones(8)})
        self.scale = np.full((1, 8), 0.5, np.float32)
        self.dropout = sx.Rngs(dropout=3)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed.value[tokens] * self.scale
        for layer in self.layers:
            x = layer(x)
        return x @ self.head.value.T


def values(tree: Any) -> list[np.ndarray]:
    """All values of a tree as NumPy arrays (random keys as their words), for exact comparison."""
    leaves = jax.tree.leaves(sx.state(tree))
    keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for leaf, is_key in zip(leaves, keys, strict=True)
    ]


def assert_same_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Asserts that two lists of arrays have the same dtypes, shapes and bits."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
