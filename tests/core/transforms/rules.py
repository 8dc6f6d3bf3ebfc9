# SPDX-License-Identifier: Apache-2.0
"""A model and a rule that the tests of custom_vjp share.

The rule gives ten times the true gradient, so that one sees that it was used.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import shardax as sx

X = jnp.array([1.0, 2.0])


def lists(tree: Any) -> Any:
    """Returns a pytree with nested lists for arrays."""
    return jax.tree.map(lambda x: x.tolist(), tree)


def flat(state: sx.State) -> dict[Any, Any]:
    """Returns the values of a State by path, as nested lists."""
    return lists(state.flat())


class Sine(sx.Module):
    """``sin(factor * x)``, counting its calls and keeping a running mean."""

    def __init__(self) -> None:
        self.factor = sx.Param(jnp.array([1.0, 2.0]))
        self.mean = sx.BatchStat(jnp.zeros(2))
        self.calls = sx.Variable(0)

    def __call__(self, x: Any) -> Any:
        self.mean[...] = 0.5 * self.mean + 0.5 * self.factor * x
        self.calls += 1
        return jnp.sin(self.factor * x)


@sx.custom_vjp
def tenfold(model: Sine, x: Any) -> Any:
    """Calls the model."""
    return model(x)


def _fwd(model: Sine, x: Any) -> Any:
    return tenfold(model, x), (model, x)


def _bwd(residuals: Any, ct: Any) -> Any:
    model, x = residuals
    slope = 10 * ct * jnp.cos(model.factor * x)
    return {"factor": slope * x}, slope * model.factor


tenfold.defvjp(_fwd, _bwd)
