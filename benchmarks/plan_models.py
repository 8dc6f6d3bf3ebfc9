# SPDX-License-Identifier: Apache-2.0
"""Searches over every form of parallelism for published models, beside published layouts.

The work: `plan.search` at screen effort for the train step (AdamW, bfloat16 compute, rematerialised
layers) of Llama 3 8B and 70B and Mixtral 8x7B, on 256 TPU v5e, 512 TPU v5p and 64 H100. Meshes have
axes for data, tensors, stages of a pipeline and the sequence, or experts for Mixtral; microbatches,
schedules and the order of a ring are compared. Compiled are the candidates of the least expected
times, as traced. Nothing is kept from earlier searches.

Beside the best layouts found stands the layout that was published for the model on hardware of that
kind, compiled the same way.

Logits are computed block by block over tokens. Attention has no fused kernel, which compilers on a
machine without the hardware could not count: its scores are held for one layer.

The bound is 45 s for a search of the 8B model and 90 s for the others on two cores: the less of
wall time and processor time over processes.

    PYTHONPATH=.compilers python benchmarks/plan_models.py --models llama-8b --targets gpu:h100:8x8
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
import time
from dataclasses import replace
from typing import Any

import jax
import optax
from _harness import Report, arguments, table
from plan_search import processor_seconds

import shardax as sx
from shardax import models, plan, train

BOUND_SECONDS = {"llama-8b": 45.0, "llama-70b": 90.0, "mixtral-8x7b": 90.0}
# And global batches: of the larger models as many rows as one step holds without accumulation.
TARGETS = {"tpu:v5e:16x16": 512, "tpu:v5p:8x8x8": 2048, "gpu:h100:8x8": 512}
LARGER = {"tpu:v5e:16x16": 256, "tpu:v5p:8x8x8": 1024, "gpu:h100:8x8": 128}
QUICK = {"gpu:h100:1x8": 64}
LENGTH = 2048
HEADS = models.AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, rope=models.Rope(5e5))
EIGHT = models.TransformerConfig(
    vocab_size=128_256,
    num_layers=32,
    embed_dim=4096,
    attention=HEADS,
    mlp=models.MLPConfig(dim=14_336),
    scan_layers=True,
    remat="full",
    dtype="bfloat16",
)
SEVENTY = replace(
    EIGHT,
    num_layers=80,
    embed_dim=8192,
    attention=replace(HEADS, num_heads=64),
    mlp=models.MLPConfig(dim=28_672),
)
EXPERTS = models.ExpertsConfig(num_experts=8, dim=14_336, dispatch="dropless")
MODELS = {
    "llama-8b": EIGHT,
    "llama-70b": SEVENTY,
    "mixtral-8x7b": replace(EIGHT, vocab_size=32_000, experts=EXPERTS),
}
TENSOR = [(name, "model") for name in ("heads", "kv_heads", "mlp", "vocab")]
FSDP = [("batch", "data"), ("embed", "data")]
ZERO: dict[str, Any] = {"optimizer_rules": [("embed", "data")]}  # Megatron's distributed optimizer
# Published layouts: MaxText's are fully sharded over one axis (its configurations of the models);
# those of 64 GPUs are of NVIDIA NeMo's performance summary 25.02 (TP, PP, CP, EP).
PUBLISHED: dict[tuple[str, str], tuple[list[Any], dict[str, int], dict[str, Any]]] = {
    **{
        (model, target): (FSDP, {"data": devices}, {})
        for model in MODELS
        for target, devices in (("tpu:v5e:16x16", 256), ("tpu:v5p:8x8x8", 512))
    },
    ("llama-8b", "gpu:h100:8x8"): (
        [("batch", "data"), ("seq", "context")],
        {"data": 32, "context": 2},
        {"context": "all-gather"} | ZERO,
    ),
    ("llama-70b", "gpu:h100:8x8"): (
        [("batch", "data"), *TENSOR, ("layers", "stage"), ("seq", "context")],
        {"data": 4, "stage": 4, "context": 2, "model": 2},
        {"microbatches": 32, "schedule": "circular", "context": "all-gather"} | ZERO,
    ),
    ("mixtral-8x7b", "gpu:h100:8x8"): (
        [("batch", ("data", "expert")), ("expert", "expert")],
        {"data": 8, "expert": 8},
        dict(ZERO),
    ),
}
PUBLISHED |= {  # the first of them on one node, for a quick run
    ("llama-8b", name): (
        [("batch", "data"), ("seq", "context")],
        {"data": 4, "context": 2},
        {"context": "all-gather"} | ZERO,
    )
    for name in QUICK
}
HEADERS = (
    *("model", "target", "layout", "expected", "as traced", "band", "peak", "sent", "bubble"),
    "search",
)


@sx.jit(donate_argnums=(0, 1))
def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    """A step of training."""
    loss, gradients = sx.value_and_grad(blockwise_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def blockwise_loss(model: Any, batch: Any) -> jax.Array:
    """The mean loss of a token, without logits of all."""
    hidden = model.hidden_states(batch["inputs"])
    return models.blockwise_cross_entropy(hidden, model.head_kernel, batch["targets"])


def inputs(name: str, batch: int, *, quick: bool) -> tuple[Any, ...]:
    """The model, its optimizer and a batch, none of which holds an array."""
    config, length = MODELS[name], LENGTH
    if quick:
        length, experts = 128, config.experts
        config = replace(
            config,
            vocab_size=1024,
            num_layers=8,
            embed_dim=64,
            attention=replace(HEADS, num_heads=8, head_dim=8),
            mlp=models.MLPConfig(dim=128),
            experts=None if experts is None else replace(experts, dim=128),
            dtype="float32",  # in bfloat16 the compiler for CPU dies by pipelines
        )
    model = models.Transformer(config, rngs=sx.Rngs(0))
    tokens = plan.NamedShape((batch, length), "int32", ("batch", "seq"))
    batches = {"inputs": tokens, "targets": tokens}
    return model, train.Optimizer(model, optax.adamw(1e-3)), batches


def forms(name: str, *, quick: bool) -> dict[str, Any]:
    """The mesh axes and settings to search; quickly, two meshes of 8 devices."""
    last = "expert" if "mixtral" in name else "context"
    if quick:
        sizes = ({"data": 8, "stage": 1, last: 1}, {"data": 2, "stage": 4, last: 1})
        return {
            "meshes": list(sizes),
            "fix": {"embed": None, "batch": None},  # two layouts, by tensors and by stages
            "parallel": {"microbatches": [16], "schedule": ["gpipe"], "zero": [1]},
        }
    return {
        "mesh_axes": ("data", "model", "stage", last),
        "parallel": {
            "microbatches": [16, 32],
            "context": ["ring-zigzag", "all-gather"],
            "zero": [0, 1],
        },
    }


def row(name: str, target: str, what: str, report: Any, traced: Any, seconds: str) -> list[str]:
    """A report as a row of the table."""
    layout = report.layout
    settings = " ".join(layout.settings.values())
    start = [name, target, f"{what}: {layout.name} {settings if what == 'published' else ''}"]
    if report.time is None:
        return [*start, f"{report.outcome}: {report.reason[:60]}", *"-----", seconds]
    return [
        *start,
        f"{report.expected.seconds:.2f} s",
        "-" if traced is None else f"{traced.seconds / report.expected.seconds:.2f}",
        f"{report.time.lower:.2f}-{report.time.upper:.2f} s",
        f"{report.peak_bytes / 2**30:.1f} GiB",
        f"{report.total_wire_bytes / 1e9:.1f} GB",
        f"{report.bubble_share:.0%}",
        seconds,
    ]


def main() -> int:
    """Search for every model and target."""
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--processes", type=int, default=2, help="that compile")
    parser.add_argument("--top", type=int, default=1, help="layouts of a search's table")
    parser.add_argument("--within", type=float, default=1.3, help="of the least expected time")
    parser.add_argument("--compiler", default="auto", help="as plan.search takes it")
    options = parser.parse_args()
    report = Report("plan_models", vars(options))
    rows = []
    processes = options.processes
    if options.quick:  # in this process, if it has 8 devices
        options.models, options.targets, processes = ["llama-8b"], list(QUICK), None
    for name in options.models:
        for target in options.targets:
            batches = TARGETS | QUICK if name == "llama-8b" else LARGER
            args = inputs(name, batches[target], quick=options.quick)
            how: dict[str, Any] = {"cache": None, "processes": processes}
            how |= {"effort": "screen", "compiler": options.compiler}
            started, used = time.perf_counter(), processor_seconds()
            found = plan.search(
                step,
                args,
                target,
                within=options.within,
                top=options.top,
                **forms(name, quick=options.quick),
                **how,
            )
            wall, used = time.perf_counter() - started, processor_seconds() - used
            least = min(wall, used / options.processes)
            if least > BOUND_SECONDS[name]:
                failure = f"{name} {target}: {least:.0f} s, at most {BOUND_SECONDS[name]:.0f}"
                report.failures.append(failure)
            rules, mesh, settings = PUBLISHED[name, target]
            published = plan.compare(
                step, args, {"published": rules}, mesh, target, parallel=settings, **how
            )
            traced = plan.search(
                step, args, target, top=None, **forms(name, quick=options.quick), effort="trace"
            )
            expected = {each.layout.name: each.expected for each in traced.reports}
            text = f"{wall:.0f} s, processor {used:.0f} s"
            for each in found.reports:
                rows.append(row(name, target, "found", each, expected[each.layout.name], text))
            rows.append(row(name, target, "published", published.reports[0], None, ""))
            report.records.append(
                {
                    "model": name,
                    "target": target,
                    "wall_seconds": wall,
                    "processor_seconds": used,
                    "notes": found.notes,
                    "found": str(found),
                    "published": str(published),
                }
            )
            print(found, published, sep="\n\n", flush=True)
    print(table(HEADERS, rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
