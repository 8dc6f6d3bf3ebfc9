# SPDX-License-Identifier: Apache-2.0
"""The loss that training in fp8 ends with, beside training in bfloat16.

The decoder of `shardax train --preset demo` (3 layers of 128 features, tied head) is trained on the
source of Python's standard library for 200 steps of 16 windows of 128 bytes, from the same
parameters, on the same data, with AdamW: with products in bfloat16 (the baseline), with those of
its layers in fp8 scaled by current magnitudes, and in fp8 scaled by those of earlier steps. Each
repeat has another seed of parameters: what a run ends with differs by some hundredths of a nat.
Parameters are bfloat16, with masters in float32. On CPU, fp8 is emulated: times say nothing of
devices that have it.

Bound: a held-out loss at most 0.03 nats above that in bfloat16, in the mean over seeds.

    python benchmarks/precision.py --json precision.json
"""

import sys
import time
from typing import Any

import numpy as np
import optax
from _harness import Report, arguments, table

import shardax as sx
from shardax import models, train

BOUND = 0.03
BASELINE = "bfloat16"
PRECISIONS = {BASELINE: None, "fp8": "fp8", "fp8-delayed": "fp8-delayed"}
SIZES = {
    "layers": 3,
    "embed": 128,
    "heads": 8,
    "steps": 200,
    "rows": 16,
    "time": 128,
    "held_out": 32,
}
QUICK = {"layers": 1, "embed": 32, "heads": 2, "steps": 3, "rows": 2, "time": 16, "held_out": 1}
LEARNING_RATE = 6e-3


def make_model(sizes: dict[str, int], precision: str | None, seed: int) -> Any:
    """The decoder, with a precision of its layers' products."""
    config = models.DecoderConfig(
        vocab_size=256,
        num_layers=sizes["layers"],
        embed_dim=sizes["embed"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["heads"] // 2,
        head_dim=sizes["embed"] // sizes["heads"],
        mlp_dim=4 * sizes["embed"],
        tied_head=True,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )
    model = models.Decoder(config, rngs=sx.Rngs(params=seed))
    if precision is None:
        return model
    return sx.surgery.with_precision(model, {sx.PathContains("layers"): precision})


def optimizer_of(model: Any, steps: int) -> train.Optimizer:
    """AdamW with a warmup, a cosine, and masters."""
    warmup = max(1, steps // 15)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, warmup, max(steps, warmup + 1), LEARNING_RATE / 20
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    return train.Optimizer(model, tx, master_dtype=np.float32)


@sx.jit
def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
    """One step; returns its loss."""
    loss, gradients = sx.value_and_grad(models.next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


@sx.jit
def held_out_loss(model: Any, batch: Any) -> Any:
    """The loss of one batch."""
    return models.next_token_loss(model, batch)


def losses_of(sizes: dict[str, int], precision: str | None, seed: int) -> dict[str, float]:
    """Trains; returns the last and the held-out loss, and the seconds of a step."""
    training, held_out = train.open_text(None).split()
    shape = {"batch_size": sizes["rows"], "seq_len": sizes["time"]}
    batches = iter(train.TrainBatches(training, **shape, seed=0))
    model = make_model(sizes, precision, seed)
    optimizer = optimizer_of(model, sizes["steps"])
    loss, seconds = np.nan, []
    for _ in range(sizes["steps"]):
        start = time.perf_counter()
        loss = float(train_step(model, optimizer, next(batches)))
        seconds.append(time.perf_counter() - start)
    model.eval()
    evaluation = train.EvalBatches(held_out, **shape, max_batches=sizes["held_out"])
    mean = np.mean([float(held_out_loss(model, batch)) for batch in evaluation])
    return {"loss": loss, "held_out": float(mean), "seconds": float(np.median(seconds))}


def means_of(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over seeds, and how far the held-out loss is above the baseline's."""
    means = {
        name: {
            key: float(np.mean([r[key] for r in records if r["name"] == name]))
            for key in ("loss", "held_out")
        }
        for name in dict.fromkeys(record["name"] for record in records)
    }
    for mean in means.values():
        mean["above"] = mean["held_out"] - means[BASELINE]["held_out"]
    return means


def bound_failures(means: dict[str, dict[str, float]]) -> list[str]:
    """Says which held-out losses are too far above the baseline's."""
    return [
        f"{name}: {mean['above']:.3f} nats above {BASELINE}, at most {BOUND}"
        for name, mean in means.items()
        if not mean["above"] <= BOUND
    ]


def main() -> int:
    """Trains, prints a table and returns the exit status."""
    options = arguments(__doc__, repeats=3).parse_args()
    sizes = QUICK if options.quick else SIZES
    seeds = range(1 if options.quick else options.repeats)
    report = Report("precision", {**sizes, "seeds": len(seeds)})
    for seed in seeds:
        for name, precision in PRECISIONS.items():
            record = {"name": name, "seed": seed, **losses_of(sizes, precision, seed)}
            report.records.append(record)
            print(f"{name}, seed {seed}: {record['held_out']:.4f} held out", flush=True)
    means = means_of(report.records)
    report.failures += [] if options.quick else bound_failures(means)
    print(f"\n### Training in fp8: losses after {sizes['steps']} steps, in nats a byte\n")
    rows = [
        [name, f"{mean['loss']:.4f}", f"{mean['held_out']:.4f}", f"{mean['above']:+.4f}"]
        for name, mean in means.items()
    ]
    print(table(["products", "last batch", "held out", f"above {BASELINE}"], rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
