# SPDX-License-Identifier: Apache-2.0
"""LoRA: fine-tune a decoder by low-rank adapters, then merge them.

A small ``sx.models.Decoder`` learns to count upwards, which stands for pretraining. ``sx.surgery``
then wraps the query, value and MLP layers in adapters, which alone are trained to count downwards.
At the end each adapter is added to its kernel, which gives a model of the original structure with
the logits of the adapted one. With ``--scan`` the layers are stored stacked.

    python examples/lora.py --rank 4
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardax as sx

CONFIG = sx.models.DecoderConfig(vocab_size=32, embed_dim=32, mlp_dim=64, head_dim=8)
ADAPTED = ("q", "v", "gate", "up", "down")


def adapt(model: sx.models.Decoder, rank: int, rngs: sx.Rngs) -> Any:
    """Returns a model with adapters around chosen layers; weights are shared."""
    linears = sx.select(model).at_instances_of(sx.nn.Linear)
    chosen = linears.where(lambda path, layer: path[-1] in ADAPTED)
    return sx.surgery.lora(chosen, rank, rngs=rngs)


def batch(key: jax.Array, step: int) -> dict[str, jax.Array]:
    """Draws sequences that count by ``step``, from random starts."""
    start = jax.random.randint(key, (16, 1), 0, CONFIG.vocab_size)
    tokens = (start + step * jnp.arange(17)[None]) % CONFIG.vocab_size
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(model: Any, wrt: Any, steps: int, count_by: int) -> list[float]:
    """Trains what ``wrt`` selects, in place; returns the losses."""
    optimizer = sx.train.Optimizer(model, optax.adam(1e-2), wrt=wrt)

    @sx.jit
    def step(model: Any, optimizer: Any, data: Any) -> jax.Array:
        loss, grads = sx.value_and_grad(sx.models.next_token_loss, wrt=wrt)(model, data)
        optimizer.update(grads)
        return loss

    keys = jax.random.split(jax.random.key(0), steps)
    return [float(step(model, optimizer, batch(key, count_by))) for key in keys]


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Pretrains, adapts and merges; returns losses, sizes and the largest difference."""
    parser = argparse.ArgumentParser(description="LoRA on a small decoder.")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of pretraining and of fine-tuning")
    parser.add_argument("--scan", action="store_true", help="layers that are stacked and scanned")
    options = parser.parse_args(argv)

    config = dataclasses.replace(CONFIG, scan_layers=options.scan)
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    pretrained = train(model, sx.Param, options.steps, count_by=1)
    before = sx.state(model).flat()
    adapted = adapt(model, options.rank, sx.Rngs(1))
    tuned = train(adapted, "lora", options.steps, count_by=-1)

    small = sum(leaf.size for leaf in jax.tree.leaves(sx.state(adapted, "lora")))
    large = sum(leaf.size for leaf in before.values())
    print(
        f"pretraining: loss {pretrained[0]:.3f} -> {pretrained[-1]:.3f}, {large:,} values trained"
    )
    print(f"fine-tuning: loss {tuned[0]:.3f} -> {tuned[-1]:.3f}, {small:,} values trained")
    for path, value in sx.state(model).flat().items():
        np.testing.assert_array_equal(value, before[path])

    merged, tokens = sx.surgery.merge_lora(adapted), batch(jax.random.key(9), -1)["inputs"]
    assert sx.graphdef(merged) == sx.graphdef(model), "merging restores the structure"
    difference = float(jnp.abs(merged(tokens) - adapted(tokens)).max())
    print(f"largest difference of a logit after merging: {difference:.1e}")
    assert difference < 1e-3
    return {"before": tuned[0], "after": tuned[-1], "difference": difference, "adapters": small}


if __name__ == "__main__":
    main()
