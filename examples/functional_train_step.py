# SPDX-License-Identifier: Apache-2.0
"""One train step in two styles: pure under jax.jit, in place under sx.jit.

The functional step takes values and returns new ones: ``sx.unbind(freeze=True)`` separates the
model into its structure and frozen values, which jax.grad, jax.jit and optax treat as pytrees. The
other step updates a model and an optimizer in place. Both run the same steps on the same batches,
and end in the same parameters and the same counter.

    python examples/functional_train_step.py --steps 100
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardax as sx


class Classifier(sx.Module):
    """An MLP over points of the plane, with a counter of batches."""

    def __init__(self, classes: int, rngs: sx.Rngs) -> None:
        self.embed = sx.nn.Linear(2, 32, rngs=rngs)
        self.mlp = sx.nn.MLP(32, 64, rngs=rngs)
        self.head = sx.nn.Linear(32, classes, rngs=rngs)
        self.batches = sx.Variable(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        self.batches += 1
        x = self.embed(x)
        return self.head(x + self.mlp(x))


def spiral(key: jax.Array, size: int, classes: int) -> tuple[jax.Array, jax.Array]:
    """Draws points on spiral arms, one arm per class."""
    keys = jax.random.split(key, 3)
    label = jax.random.randint(keys[0], (size,), 0, classes)
    radius = jax.random.uniform(keys[1], (size,), minval=0.1)
    angle = 3.0 * radius + 2.0 * jnp.pi * label / classes
    points = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)
    return points + 0.02 * jax.random.normal(keys[2], points.shape), label


def loss_of(model: Any, x: jax.Array, label: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), label).mean()


def train_functionally(model: Classifier, tx: Any, batches: Any) -> tuple[Classifier, list[float]]:
    """Trains by a pure step; returns a new model and the losses."""
    structure, params = sx.unbind(model, sx.Param, freeze=True)
    structure, counters = sx.unbind(structure, freeze=True)

    def loss(params: Any, counters: Any, x: jax.Array, label: jax.Array) -> tuple[jax.Array, Any]:
        # stateless_call returns the result and the new values of everything that was bound.
        logits, (_, counters) = structure.stateless_call((params, counters), x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), counters

    @jax.jit
    def step(params: Any, counters: Any, opt_state: Any, x: jax.Array, label: jax.Array) -> Any:
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, counters), grads = gradient(params, counters, x, label)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), counters, opt_state, value

    opt_state, losses = tx.init(params), []
    for x, label in batches:
        params, counters, opt_state, value = step(params, counters, opt_state, x, label)
        losses.append(float(value))
    return sx.thaw(sx.bind(structure, (params, counters))), losses


def train_in_place(model: Classifier, tx: Any, batches: Any) -> list[float]:
    """Trains by a step that writes into the model and the optimizer."""
    optimizer = sx.train.Optimizer(model, tx)

    @sx.jit
    def step(model: Any, optimizer: Any, x: jax.Array, label: jax.Array) -> jax.Array:
        value, grads = sx.value_and_grad(loss_of)(model, x, label)
        optimizer.update(grads)
        return value

    return [float(step(model, optimizer, x, label)) for x, label in batches]


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains both ways; returns losses and the largest difference of a value."""
    parser = argparse.ArgumentParser(description="A train step in two styles.")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)

    keys = jax.random.split(jax.random.key(1), options.steps)
    batches = [spiral(key, 256, 3) for key in keys]
    model = Classifier(3, sx.Rngs(0))
    tx = optax.adamw(3e-3)
    functional, losses = train_functionally(model, tx, batches)
    assert int(model.batches.value) == 0, "the functional step leaves its model unchanged"
    in_place = train_in_place(model, tx, batches)

    pairs = zip(jax.tree.leaves(functional), jax.tree.leaves(model), strict=True)
    difference = max(float(jnp.abs(a - b).max()) for a, b in pairs)
    print(f"jax.jit on frozen values: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"sx.jit on the objects:    loss {in_place[0]:.4f} -> {in_place[-1]:.4f}")
    print(f"largest difference of a value after {options.steps} steps: {difference:.1e}")
    np.testing.assert_allclose(in_place, losses, rtol=1e-4)
    assert difference < 1e-3
    assert int(functional.batches.value) == int(model.batches.value) == options.steps
    return {"first": losses[0], "last": losses[-1], "difference": difference}


if __name__ == "__main__":
    main()
