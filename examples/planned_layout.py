# SPDX-License-Identifier: Apache-2.0
"""A layout from sx.plan: search, shard by its rules, run the step.

``plan.search`` compiles a train step for eight devices, once per candidate assignment of mesh axes
to axis names, and ranks what comes out. The best rules then lay out the model, the optimizer and
the batches. The run is compared with the plan (bytes of arguments on one device) and with the same
step on a single device (losses).

    python examples/planned_layout.py --batch-size 256
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
import optax

import shardax as sx
from shardax import plan

MESH = {"data": 4, "model": 2}
BATCH = {"x": ("batch", "features"), "label": ("batch",)}


class Net(sx.Module):
    """A classifier of vectors; its layers name the dimensions of their kernels."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.embed = sx.nn.Linear(64, 256, kernel_axes=("features", "embed"), rngs=rngs)
        self.mlp = sx.nn.MLP(256, 1024, rngs=rngs)  # ("embed", "mlp") and ("mlp", "embed")
        self.head = sx.nn.Linear(256, 10, kernel_axes=("embed", "classes"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, classes)."""
        x = self.embed(x)
        return self.head(x + self.mlp(x))


def make() -> tuple[Net, sx.train.Optimizer]:
    """Builds a lazy model and its optimizer: no array exists yet."""
    model = Net(sx.Rngs(0))
    return model, sx.train.Optimizer(model, optax.adamw(1e-3))


def train_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    """Trains on one batch, in place."""

    def loss_of(model: Any) -> jax.Array:
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = sx.value_and_grad(loss_of)(model)
    optimizer.update(grads)
    return loss


def batches(steps: int, batch_size: int) -> list[dict[str, Any]]:
    """Draws vectors, each labelled by the largest of its first ten features."""
    x = np.random.default_rng(0).normal(size=(steps, batch_size, 64)).astype(np.float32)
    return [{"x": each, "label": each[:, :10].argmax(-1).astype(np.int32)} for each in x]


def bytes_on(device: Any, tree: Any) -> int:
    """Returns how many bytes of a tree's arrays one device holds."""
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Plans, shards, runs and compares; returns the layout and its figures."""
    parser = argparse.ArgumentParser(description="A layout from sx.plan, used.")
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args(argv)

    data = batches(5, options.batch_size)
    shapes = {
        key: plan.NamedShape(data[0][key].shape, data[0][key].dtype.name, names)
        for key, names in BATCH.items()
    }
    found = plan.search(
        sx.jit(train_step),
        (*make(), shapes),
        "cpu:8",
        meshes=[MESH],  # without these three lines: all meshes and names, full compiles
        fix={"batch": "data", "features": None, "classes": None},
        effort="screen",
        processes=1,
        progress=False,
    )
    print(found.notes[0])
    for report in found:
        print(f"{report.layout.name:<24} {report.outcome}, peak {report.peak_bytes:,} bytes")
    best = found.best()
    rules, mesh = best.layout.as_rules, jax.make_mesh(tuple(MESH.values()), tuple(MESH))

    state = sx.shard(make(), mesh, rules)
    places = {key: sx.partition.batch_sharding(names, mesh, rules) for key, names in BATCH.items()}
    step = sx.jit(train_step, in_shardings=(*sx.shardings(state, mesh, rules), places))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        losses = [float(step(*state, jax.device_put(batch, places))) for batch in data]
    alone, step = make(), sx.jit(train_step)
    expected = [float(step(*alone, batch)) for batch in data]

    planned = sum(best.argument_bytes.values())
    held = bytes_on(jax.devices()[0], (sx.state(state), jax.device_put(data[0], places)))
    print(f"{best.layout.name}: {planned:,} bytes of arguments planned, {held:,} held")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; on one device {expected[-1]:.4f}")
    assert held == planned
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    return {"layout": best.layout.name, "planned": planned, "held": held, "losses": losses}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
