# SPDX-License-Identifier: Apache-2.0
"""Pipelines of one executable a stage, beside the same schedules written by hand.

Four stages of different widths, two parts of the batch a stage. By hand each stage has a compiled
forward and a compiled backward function (`jax.vjp` inside, residuals between them), and a loop over
the schedule's table calls them and copies activations with `jax.device_put`. The table is the
library's; all else is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.train import PipelineStep, Schedule

Case = tuple[str, Callable[[], Any], Callable[[], Any]]
STAGES, MICROBATCHES, ROWS, WIDTH = 4, 8, 1024, 256
HIDDEN = (512, 1024, 768, 512)
LAYERS = 2
QUICK = {"ROWS": 32, "WIDTH": 8, "STAGES": 3, "HIDDEN": (16, 32, 16), "LAYERS": 1}


class Block(sx.Module):
    """Residual perceptrons of one width."""

    def __init__(self, hidden: int, seed: int) -> None:
        rngs = sx.Rngs(seed)
        self.ups = [sx.nn.Linear(WIDTH, hidden, use_bias=False, rngs=rngs) for _ in range(LAYERS)]
        self.downs = [sx.nn.Linear(hidden, WIDTH, use_bias=False, rngs=rngs) for _ in range(LAYERS)]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the perceptrons' results."""
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(jnp.tanh(up(x)))
        return x


def block(weights: Any, x: jax.Array) -> jax.Array:
    """The same, of arrays."""
    for up, down in zip(*weights, strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return x


def mean_square(y: jax.Array, target: jax.Array) -> jax.Array:
    """The loss."""
    return jnp.mean((y - target) ** 2)


def cases(*, quick: bool = False) -> Iterator[Case]:
    """GPipe and 1F1B; quickly, 1F1B."""
    mesh = jax.make_mesh((2, STAGES), ("data", "stage"))
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    for name in ("gpipe", "1f1b")[quick:]:
        stages = [Block(hidden, seed) for seed, hidden in enumerate(HIDDEN)]
        step = PipelineStep(
            stages,
            mean_square,
            mesh=mesh,
            rules={"batch": "data"},
            microbatches=MICROBATCHES,
            schedule=name,
        )
        yield (
            f"stages, {name}",
            lambda step=step: jax.block_until_ready(step(x, x)),
            by_hand(stages, mesh, step.schedule, x),
        )


def by_hand(stages: list[Any], mesh: Mesh, schedule: Schedule, x: Any) -> Callable[[], Any]:
    """A step of compiled functions and copies, without the library."""
    meshes = [Mesh(mesh.devices[:, i], ("data",)) for i in range(STAGES)]
    rows = [NamedSharding(where, P("data")) for where in meshes]
    whole = [NamedSharding(where, P()) for where in meshes]
    weights = [
        jax.device_put(
            tuple([layer.kernel.value for layer in some] for some in (s.ups, s.downs)), w
        )
        for s, w in zip(stages, whole, strict=True)
    ]
    last = STAGES - 1
    scale = 1 / MICROBATCHES

    def forward(weights: Any, x: jax.Array) -> Any:
        return jax.vjp(block, weights, x)

    def backward(sums: Any, pull: Any, dy: jax.Array) -> Any:
        dw, dx = pull(dy)
        return jax.tree.map(jnp.add, sums, dw), dx

    def end(sums: Any, weights: Any, x: jax.Array, target: jax.Array) -> Any:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            return mean_square(block(weights, x), target) * scale

        value, (dw, dx) = jax.value_and_grad(loss, (0, 1))(weights, x)
        return value, jax.tree.map(jnp.add, sums, dw), dx

    def zeros(weights: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, weights)

    run_forward = [jax.jit(forward, out_shardings=None) for _ in range(STAGES)]
    run_backward = [jax.jit(backward, donate_argnums=0, out_shardings=(w, None)) for w in whole]
    run_end = jax.jit(end, donate_argnums=0, out_shardings=(None, whole[last], None))
    start = [jax.jit(zeros, out_shardings=w) for w in whole]
    order = [each.operation for each in schedule.simulate()]

    def step() -> Any:
        parts = [x[number::MICROBATCHES] for number in range(MICROBATCHES)]
        inputs = {(0, m): p for m, p in enumerate(jax.device_put(parts, rows[0]))}
        targets = jax.device_put(parts, rows[last])
        sums = [make(w) for make, w in zip(start, weights, strict=True)]
        pulls: dict[tuple[int, int], Any] = {}
        gradients: dict[tuple[int, int], Any] = {}
        values = []
        for kind, m, i in order:
            if kind == "forward" and i < last:
                y, pulls[i, m] = run_forward[i](weights[i], inputs.pop((i, m)))
                inputs[i + 1, m] = jax.device_put(y, rows[i + 1])
            elif kind == "backward":
                if i == last:
                    found = inputs.pop((i, m))
                    value, sums[i], dx = run_end(sums[i], weights[i], found, targets[m])
                    values.append(value)
                else:
                    sums[i], dx = run_backward[i](sums[i], pulls.pop((i, m)), gradients.pop((i, m)))
                if i:
                    gradients[i - 1, m] = jax.device_put(dx, rows[i - 1])
        return sum(values[1:], values[0]), sums

    return lambda: jax.block_until_ready(step())
