# SPDX-License-Identifier: Apache-2.0
"""A model trained with what ``pip install shardax`` brings, every other package being out of reach.

A program: ``.ci/wheel`` runs it in an environment that holds nothing else, ``test_project.py``
among all the packages of the tests.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from importlib.abc import MetaPathFinder
from typing import Any


def _name(requirement: str) -> str:
    return re.sub("[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def required() -> set[str]:
    """Returns the packages that shardax without extras needs, with theirs."""
    found: set[str] = set()
    todo = ["shardax"]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        todo += [_name(line) for line in metadata.requires(name) or () if "extra ==" not in line]
    return found


class OutOfReach(MetaPathFinder):
    """Refuses what other packages hold, as if they were not installed."""

    def __init__(self) -> None:
        kept = required()
        self.modules = {
            module
            for module, packages in metadata.packages_distributions().items()
            if kept.isdisjoint(map(_name, packages))
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def train() -> None:
    """Trains an MLP through ``sx.jit``: by hand, then with an optimizer of its own rule."""
    import jax
    import jax.numpy as jnp

    import shardax as sx

    class Momentum:
        """An optimizer's rule, as optax's are: a function that makes the state, one that steps."""

        def init(self, params: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, params)

        def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            state = jax.tree.map(lambda each, grad: 0.9 * each + grad, state, grads)
            return jax.tree.map(lambda each: -0.05 * each, state), state

    points = jax.random.normal(jax.random.key(0), (64, 2))

    def loss_of(model: sx.nn.MLP) -> jax.Array:
        return jnp.mean((model(points) - points[:, ::-1]) ** 2)

    @sx.jit
    def step_by_hand(model: sx.nn.MLP) -> jax.Array:
        loss, grads = sx.value_and_grad(loss_of)(model)
        sx.update(model, jax.tree.map(lambda x, grad: x - 0.1 * grad, sx.state(model), grads))
        return loss

    @sx.jit
    def step(model: sx.nn.MLP, optimizer: sx.train.Optimizer) -> jax.Array:
        loss, grads = sx.value_and_grad(loss_of)(model)
        optimizer.update(grads)
        return loss

    model = sx.nn.MLP(2, 16, rngs=sx.Rngs(0))
    first, *_, half = [float(step_by_hand(model)) for _ in range(10)]
    optimizer = sx.train.Optimizer(model, Momentum())
    *_, last = [float(step(model, optimizer)) for _ in range(100)]
    print(f"loss {first:.2f}, {half:.2f}, {last:.2f} on {jax.__name__} {jax.__version__}")
    assert last < half / 2 < first / 4


if __name__ == "__main__":
    sys.meta_path.insert(0, OutOfReach())
    train()
