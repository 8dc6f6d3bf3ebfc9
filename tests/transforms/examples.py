# SPDX-License-Identifier: Apache-2.0
"""Small models that the tests of the transforms share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import shardax as sx


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


class Box(sx.Module):
    """A Module without attributes of its own."""


class Many(sx.Module):
    """Many Variables in a list, all of which ``step`` writes."""

    def __init__(self, count: int) -> None:
        self.cells = [sx.Variable(jnp.zeros(2)) for _ in range(count)]


def step(model: Many) -> None:
    """Writes every Variable of the model."""
    for cell in model.cells:
        cell[...] = cell + 1


def values(model: Any) -> dict[Any, Any]:
    """Returns the values of a model by path, as nested lists."""
    return {path: value.tolist() for path, value in sx.state(model).flat().items()}
