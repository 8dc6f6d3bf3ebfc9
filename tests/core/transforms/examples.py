# SPDX-License-Identifier: Apache-2.0
"""Small models that the tests of the transforms share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import shardax as sx

XS = jnp.arange(6.0).reshape(3, 2)
"""Three rows for three lanes."""

SHARED = sx.StateAxes({...: None})


class Scale(sx.Module):
    """``rate * factor * x``, counting its calls."""

    def __init__(self, size: int = 2, rate: float = 0.5) -> None:
        self.factor = sx.Param(jnp.ones(size))
        self.calls = sx.Variable(jnp.zeros((), jnp.int32))
        self.rate = rate

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return self.rate * self.factor * x

    def grow(self, by: Any) -> None:
        """Adds to the factor."""
        self.factor += by


class Tied(sx.Module):
    """One Param by two names."""

    def __init__(self, value: float = 3.0) -> None:
        self.embed = sx.Param(jnp.float32(value))
        self.head = self.embed


class Sower(sx.Module):
    """Sows what it is given times its weight."""

    def __init__(self, weight: Any) -> None:
        self.weight = sx.Param(weight)

    def __call__(self, x: Any) -> Any:
        self.sow("seen", x * self.weight)
        return x


class Box(sx.Module):
    """A Module without attributes of its own."""


class Mask(sx.Module):
    """Sets elements to zero by the bits of a random key: a dropout whose program is small."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.stream = rngs.dropout
        self.deterministic = False

    def __call__(self, x: Any) -> Any:
        if self.deterministic:
            return x
        bits = jax.random.key_data(self.stream())[-1]
        columns = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
        return x * ((bits >> columns) & 1)


class Many(sx.Module):
    """Many Variables in a list, all of which ``step`` writes."""

    def __init__(self, count: int) -> None:
        self.cells = [sx.Variable(jnp.zeros(2)) for _ in range(count)]


def step(model: Many) -> None:
    """Writes every Variable of the model."""
    for cell in model.cells:
        cell[...] = cell + 1


def lanes(count: int = 3) -> Scale:
    """Returns a Scale with a factor and a count per lane; the factors are 1, 2, 3, ..."""
    model = Scale()
    model.factor.value = jnp.arange(1.0, count + 1)[:, None] * jnp.ones((count, 2))
    model.calls.value = jnp.zeros(count, jnp.int32)
    return model


def shapes(model: Any) -> dict[Any, Any]:
    """Returns the shapes of a model's values by path."""
    return {path: jax.tree.map(jnp.shape, value) for path, value in sx.state(model).flat().items()}


def values(model: Any) -> dict[Any, Any]:
    """Returns the values of a model by path, as nested lists."""
    return {path: value.tolist() for path, value in sx.state(model).flat().items()}
