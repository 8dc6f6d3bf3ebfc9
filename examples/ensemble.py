# SPDX-License-Identifier: Apache-2.0
"""A deep ensemble, built and trained at once by sx.vmap.

Every member has its own initial weights and its own dropout masks, and all see the same batches.
One program trains them together; training each member alone gives the same members. On inputs far
from the training data the members disagree, which a single network cannot show.

    python examples/ensemble.py --members 8
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardax as sx


class Regressor(sx.Module):
    """A scalar network with dropout and a counter of batches."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.embed = sx.nn.Linear(1, 64, rngs=rngs)
        self.mlp = sx.nn.MLP(64, 128, rngs=rngs)
        self.dropout = sx.nn.Dropout(0.1, rngs=rngs)
        self.head = sx.nn.Linear(64, 1, rngs=rngs)
        self.batches = sx.Variable(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps shape (batch, 1) to (batch, 1)."""
        self.batches += 1
        x = self.embed(x)
        return self.head(self.dropout(x + self.mlp(x)))


def make(key: jax.Array) -> tuple[Regressor, sx.train.Optimizer]:
    """Builds one member, with random streams of its own, and its optimizer."""
    model = Regressor(sx.Rngs(key))
    return model, sx.train.Optimizer(model, optax.adam(3e-3))


def train_step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Trains one member on one batch, in place."""
    loss, grads = sx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(grads)
    return loss


def batches(steps: int) -> list[tuple[jax.Array, jax.Array]]:
    """Draws batches of a noisy sine on [-1, 1]."""
    xs = jax.random.uniform(jax.random.key(1), (steps, 64, 1), minval=-1.0)
    ys = jnp.sin(4.0 * xs) + 0.05 * jax.random.normal(jax.random.key(2), xs.shape)
    return list(zip(xs, ys, strict=True))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains together and one by one; returns losses, differences and spreads."""
    parser = argparse.ArgumentParser(description="A deep ensemble by sx.vmap.")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)
    data = batches(options.steps)

    keys = jax.random.split(jax.random.key(0), options.members)

    ensemble, optimizers = sx.vmap(make)(keys)
    step_all = sx.jit(sx.vmap(train_step, in_axes=(0, 0, None, None)))
    began = time.perf_counter()
    losses = [step_all(ensemble, optimizers, x, y) for x, y in data]
    jax.block_until_ready(losses)
    print(f"{options.members} members at once: {time.perf_counter() - began:.2f} s")

    members = [make(key) for key in keys]
    step_one = sx.jit(train_step)
    began = time.perf_counter()
    for model, optimizer in members:
        jax.block_until_ready([step_one(model, optimizer, x, y) for x, y in data])
    print(f"{options.members} members in turn: {time.perf_counter() - began:.2f} s")

    together, difference = sx.state(ensemble, sx.Param).flat(), 0.0
    for index, (model, _) in enumerate(members):
        for path, value in sx.state(model, sx.Param).flat().items():
            np.testing.assert_allclose(together[path][index], value, atol=1e-3)
            difference = max(difference, float(jnp.abs(together[path][index] - value).max()))
    print(f"largest difference of a parameter: {difference:.1e}")

    ensemble.eval()
    predict = sx.vmap(lambda model, x: model(x), in_axes=(0, None))
    near, far = (float(predict(ensemble, jnp.full((1, 1), at)).std()) for at in (0.5, 3.0))
    print(f"spread of the predictions at 0.5: {near:.3f}; at 3.0, outside of the data: {far:.3f}")
    assert far > near
    return {"losses": losses[-1].tolist(), "difference": difference, "near": near, "far": far}


if __name__ == "__main__":
    main()
