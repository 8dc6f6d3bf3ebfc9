# SPDX-License-Identifier: Apache-2.0
"""How long a search for the best layout takes, on hardware that is not there.

The work: `plan.search` at screen effort for the train step of a decoder of 1.7 billion parameters
(24 scanned layers, bfloat16 compute, rematerialised layers, AdamW), over all meshes of two axes of
three targets: 16 TPU v5e, 512 TPU v5p and 64 H100. Nothing is kept from earlier searches.

A target whose own compiler is not installed is searched with the CPU estimate, and the table says
so; the `plan-tpu` and `plan-gpu` extras bring the compilers.

Wall time needs idle cores. Processor seconds, of this process and of those that compile, are also
right on a busy machine: over the number of processes they are what the wall time would be at least.
The bound is on the less of the two, 10 minutes.

    python benchmarks/plan_search.py --targets tpu:v5e:4x4 --json search.json
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import resource
import statistics
import sys
import time
from typing import Any

import jax
import optax
from _harness import Report, arguments, load_average, table

import shardax as sx
from shardax import models, plan, train

TARGETS = {"tpu:v5e:4x4": 64, "gpu:h100:8x8": 256, "tpu:v5p:8x8x8": 1024}
"""Targets, with the global batch: four sequences of 2048 tokens a device, or two."""
BOUND_SECONDS = 600.0
LENGTH = 2048
HEADERS = (
    "target",
    "batch",
    "compiler",
    "candidates",
    "compiled",
    "fit",
    "wall",
    "processor",
    "a program",
    "best layout",
    "time",
    "peak",
    "sent",
)


@sx.jit(donate_argnums=(0, 1))
def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    """A step of training."""
    loss, gradients = sx.value_and_grad(models.next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def inputs(batch: int, *, quick: bool) -> tuple[Any, ...]:
    """The model, its optimizer and a batch, none of which holds an array."""
    sizes: dict[str, Any] = {
        "vocab_size": 32_000,
        "num_layers": 24,
        "embed_dim": 2048,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 128,
        "mlp_dim": 8192,
    }
    if quick:
        sizes = {name: max(2, size // 64) for name, size in sizes.items()}
        sizes |= {"num_heads": 16, "num_kv_heads": 16}
    config = models.DecoderConfig(**sizes, scan_layers=True, remat="full", dtype="bfloat16")
    model = models.Decoder(config, rngs=sx.Rngs(0))
    tokens = plan.NamedShape((batch, LENGTH), "int32", ("batch", "seq"))
    batches = {"inputs": tokens, "targets": tokens}
    return model, train.Optimizer(model, optax.adamw(1e-3)), batches


def processor_seconds() -> float:
    """Of this process, and of those that it waited for."""
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in each)


def measured(target: str, batch: int, processes: int, *, quick: bool) -> dict[str, Any]:
    """Searches, and says what it took and what it found."""
    options: dict[str, Any] = {"meshes": [{"data": 16, "model": 1}]} if quick else {}
    args = inputs(batch, quick=quick)
    started, used, before = time.perf_counter(), processor_seconds(), load_average()
    found = plan.search(
        step, args, target, effort="screen", top=None, processes=processes, cache=None, **options
    )
    wall, used = time.perf_counter() - started, processor_seconds() - used
    _, candidates = plan.explore(step, args, target, **options)
    compiled = [each for each in found if each.outcome != "rejected"]
    best = found.best()
    assert best.time is not None
    assert best.provenance is not None
    return {
        "target": target,
        "batch": batch,
        "compiler": best.provenance.compiler,
        "tier": best.provenance.tier,
        "candidates": len(candidates.layouts),
        "compiled": len(compiled),
        "outcomes": {o: [each.outcome for each in compiled].count(o) for o in ("fits", "failed")},
        "wall_seconds": wall,
        "processor_seconds": used,
        "load": (before, load_average()),
        "processes": processes,
        "compile_seconds": [each.compile_seconds for each in compiled],
        "best": best.layout.name,
        "lower": best.time.lower,
        "upper": best.time.upper,
        "binding": best.time.binding,
        "peak_bytes": best.peak_bytes,
        "wire_bytes": best.total_wire_bytes,
        "notes": found.notes,
        "table": str(found),
    }


def row(record: dict[str, Any]) -> list[str]:
    """A record as a row of the table."""
    return [
        record["target"],
        str(record["batch"]),
        record["compiler"],
        str(record["candidates"]),
        str(record["compiled"]),
        str(record["outcomes"]["fits"]),
        f"{record['wall_seconds']:.0f} s",
        f"{record['processor_seconds']:.0f} s",
        f"{statistics.median(record['compile_seconds']):.1f} s",
        record["best"],
        f"{record['lower']:.2f}-{record['upper']:.2f} s",
        f"{record['peak_bytes'] / 2**30:.1f} GiB",
        f"{record['wire_bytes'] / 1e9:.1f} GB",
    ]


def bound_failures(record: dict[str, Any]) -> list[str]:
    """What does not hold of a record: the time, or that no compiler failed."""
    failures = []
    least = min(record["wall_seconds"], record["processor_seconds"] / record["processes"])
    if least > BOUND_SECONDS:
        failures.append(f"{record['target']}: {least:.0f} s, at most {BOUND_SECONDS:.0f}")
    if record["outcomes"]["failed"]:
        failures.append(f"{record['target']}: {record['outcomes']['failed']} candidates failed")
    return failures


def main() -> int:
    """Search for every target."""
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="of " + str([*TARGETS]))
    parser.add_argument("--processes", type=int, default=2, help="that compile")
    options = parser.parse_args()
    report = Report("plan_search", vars(options))
    for target in ["tpu:v5e:4x4"] if options.quick else options.targets:
        batch = TARGETS.get(target, 64)
        record = measured(target, batch, options.processes, quick=options.quick)
        report.records.append(record)
        report.failures.extend(bound_failures(record))
        print(record["table"], flush=True)
    print(table(HEADERS, map(row, report.records)))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
