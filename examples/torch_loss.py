# SPDX-License-Identifier: Apache-2.0
"""A PyTorch loss on the host, inside a jitted training step.

``sx.host.from_torch`` makes a function of tensors one of JAX arrays, with gradients by
``torch.autograd``. The model, its gradients and its update are JAX; the loss is PyTorch's
``multi_margin_loss``, which JAX does not have. The task: two interleaved spirals.

    pip install torch
    python examples/torch_loss.py --steps 300
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

import shardax as sx


@sx.host.from_torch
def margin_loss(scores: Any, labels: Any) -> Any:
    """The hinge loss of PyTorch, imported when the program runs."""
    import torch

    return torch.nn.functional.multi_margin_loss(scores, labels)


def spirals(count: int) -> tuple[Any, Any]:
    """Points on two spirals, and which of them each is on."""
    labels = jnp.arange(count) % 2
    turn = jnp.linspace(0.5, 7.0, count)
    angle = turn + jnp.pi * labels
    noise = 0.05 * jax.random.normal(jax.random.key(0), (count, 2))
    return turn[:, None] / 7 * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1) + noise, labels


def main(argv: list[str] | None = None) -> tuple[float, float] | None:
    """Trains a classifier; returns the first and the last loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=400)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.5)
    options = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        print("This example needs PyTorch: pip install torch")
        return None
    rngs = sx.Rngs(0)
    model = sx.nn.Sequential(
        sx.nn.Linear(2, 64, rngs=rngs),
        jnp.tanh,
        sx.nn.Linear(64, 64, rngs=rngs),
        jnp.tanh,
        sx.nn.Linear(64, 2, rngs=rngs),
    )
    x, labels = spirals(options.points)

    @sx.jit
    def step(model: Any) -> tuple[Any, Any]:
        def loss(model: Any) -> tuple[Any, Any]:
            scores = model(x)
            return margin_loss(scores, labels), (scores.argmax(-1) == labels).mean()

        (value, accuracy), gradients = sx.value_and_grad(loss, has_aux=True)(model)
        state = sx.state(model, sx.Param)
        sx.update(model, jax.tree.map(lambda p, g: p - options.rate * g, state, gradients))
        return value, accuracy

    first = last = accuracy = 0.0
    for index in range(options.steps):
        last, accuracy = map(float, step(model))
        first = first if index else last
    print(f"loss {first:.3f} -> {last:.3f}, accuracy {accuracy:.0%}")
    return first, last


if __name__ == "__main__":
    main()
