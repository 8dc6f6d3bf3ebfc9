# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a published model, all of it or by LoRA, and publish it again.

``--from`` names a folder in the layout of Hugging Face (config.json and safetensors), of any family
that ``sx.models.from_pretrained`` knows. Without it the program first makes such a folder: a tiny
model that has learnt to count upwards. Either is then trained to count downwards, over all devices,
and written in the same layout, which ``transformers`` and servers read.

    python examples/finetune.py --rank 4
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardax as sx


def batch(key: jax.Array, vocab: int, step: int) -> dict[str, jax.Array]:
    """Draws sequences that count by ``step``, from random starts."""
    start = jax.random.randint(key, (16, 1), 0, vocab)
    tokens = (start + step * jnp.arange(17)[None]) % vocab
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
    vocab = model.config.vocab_size
    return [float(step(model, optimizer, batch(key, vocab, count_by))) for key in keys]


def publish(folder: Path, steps: int) -> None:
    """Makes a tiny model that counts upwards, and writes it."""
    config = sx.models.DecoderConfig(vocab_size=32, embed_dim=32, mlp_dim=64, head_dim=8)
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    train(model, sx.Param, steps, count_by=1)
    sx.models.save_pretrained(model, folder)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Loads, fine-tunes, merges, writes and reads again; returns losses and sizes."""
    parser = argparse.ArgumentParser(description="Fine-tune a published model.")
    parser.add_argument("--from", dest="source", type=Path, help="folder of the model")
    parser.add_argument("--out", type=Path, help="folder of the result; made anew")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters; 0 trains everything")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp())
    source, out = options.source or scratch / "published", options.out or scratch / "tuned"
    if options.source is None:
        publish(source, options.steps)

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    with jax.set_mesh(mesh):  # here every device holds the model, and part of each batch
        model = sx.models.from_pretrained(source, rules={"batch": "data"})
        wrt: Any = sx.Param
        if options.rank:
            linears = sx.select(model).at_instances_of(sx.nn.Linear)
            chosen = linears.where(lambda path, layer: path[0] == "layers")
            model = sx.surgery.lora(chosen, options.rank, rngs=sx.Rngs(1))
            wrt = "lora"
        trained = sum(leaf.size for leaf in jax.tree.leaves(sx.state(model, wrt)))
        with sx.axis_rules({"batch": "data"}):
            losses = train(model, wrt, options.steps, count_by=-1)
    print(f"fine-tuning: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {trained:,} values trained")
    assert losses[-1] < losses[0]

    merged = sx.surgery.merge_lora(model) if options.rank else model
    sx.models.save_pretrained(merged, out)
    run = sx.jit(lambda model: model(np.arange(8)[None]))
    found, expected = (np.asarray(run(each)) for each in (sx.models.from_pretrained(out), merged))
    difference = float(np.abs(found - expected).max())
    print(f"written to {out}; read again, logits differ by {difference:.1e}")
    assert difference < 1e-4
    return {"before": losses[0], "after": losses[-1], "trained": trained}


if __name__ == "__main__":
    main()
