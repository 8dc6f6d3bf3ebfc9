# SPDX-License-Identifier: Apache-2.0
"""The decoder's train step on one GPU: beside raw JAX, the GPU's peak, and the planner's count.

The step (AdamW, float32 parameters, bfloat16 compute, state donated) of `shardax.models.Decoder`
beside that of `raw_decoder`, with the same kernels: attention by XLA, or by cuDNN where it is asked
for (`--attention cudnn`: `jax.nn.dot_product_attention` of both). Reported are the speed against
raw JAX, the share of the GPU's measured peak (`plan.calibrate_gpu`) that the operations of the
step reach, and the memory: what JAX's allocator held at the most, beside the planner's peak for
that GPU, from shapes alone.

Bounds: at least 0.98 of the speed of raw JAX (the larger of best and median); the planner's peak
within 5 % of what was held.

It needs a GPU. Elsewhere it says so, with status 2; `--quick --cpu` shows that it runs.

    python benchmarks/gpu_step.py --check --json gpu_step.json
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import _decoder_steps
import jax
import optax
from _decoder_steps import Step
from _harness import Comparison, Opponent, Report, Samples, arguments, compare, measure, table
from raw_decoder import Config

import shardax as sx
from shardax import plan

KERNELS = ("xla", "cudnn", "tokamax", "auto")
SPEED_BOUND, MEMORY_BOUND = 0.98, 0.05
# 0.7 B parameters, of which the state takes 8 GiB.
SIZES: dict[str, Any] = {"vocab": 32_768, "embed": 2048, "layers": 12, "heads": 16}
SIZES |= {"kv_heads": 16, "head_dim": 128, "mlp": 5632}
QUICK: dict[str, Any] = {"vocab": 256, "embed": 64, "layers": 2, "mlp": 128}
BASELINE, OURS = "raw jax", "shardax"
HEADERS = ("attention", "raw jax, ms", "shardax, ms", "speed, best", "speed, median")
MORE = ("share of peak", "held, GiB", "planned, GiB", "planned / held")


@contextlib.contextmanager
def attention_by(implementation: str) -> Iterator[None]:
    """Makes attention of both opponents take a kernel."""
    if implementation not in ("xla", "cudnn"):  # plain JAX has no other: it keeps XLA's
        with sx.kernels(attention=implementation):
            yield
        return
    attention = jax.nn.dot_product_attention

    def chosen(*arrays: Any, **options: Any) -> jax.Array:
        return attention(*arrays, **options | {"implementation": implementation})

    with mock.patch.object(jax.nn, "dot_product_attention", chosen):
        yield


def made(name: str, config: Config, rows: int, length: int) -> Step:
    """The train step of an opponent, on one batch."""
    maker = {BASELINE: _decoder_steps.raw, OURS: _decoder_steps.shardax}[name]
    with (
        mock.patch.object(_decoder_steps, "BATCH", rows),
        mock.patch.object(_decoder_steps, "TIME", length),
    ):
        return maker(config, optax.adamw(1e-3), donate=True)


def repeated(step: Step) -> Callable[[int], Any]:
    """Trains for a number of calls; state goes on from call to call."""
    call = step.jit()
    state = list(step.args)

    def run(calls: int) -> Any:
        loss = None
        for _ in range(calls):
            found = call(*state)
            if isinstance(found, tuple):  # raw JAX returns new state, shardax writes it
                loss, *state[:-1] = found
            else:
                loss = found
        return loss

    return run


def held_bytes(step: Step) -> int:
    """Bytes that the compiled step holds at the most, as its compiler counts them."""
    compiled = step.jit().lower(*step.args).compile()
    found = compiled.memory_analysis()
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return kept + found.temp_size_in_bytes


def planned(step: Step, target: plan.Target) -> plan.LayoutReport:
    """The planner's report of the step on one device."""
    model, optimizer, batch = step.args
    shapes = {
        name: plan.NamedShape(array.shape, str(array.dtype), ("batch", "seq"))
        for name, array in batch.items()
    }
    mesh = {"data": 1}
    found = plan.compare(
        step.jit(), (model, optimizer, shapes), {"one": []}, mesh, target, cache=None
    )
    return found.reports[0]


def measured_peak() -> int | None:
    """What the allocator held at the most so far."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def row(name: str, compared: dict[str, Comparison], record: dict[str, Any]) -> list[str]:
    """A record as a row of the table."""
    times = [f"{compared[each].samples.median * 1e3:.2f}" for each in (BASELINE, OURS)]
    gib = [f"{record[each] / 2**30:.2f}" for each in ("held_bytes", "planned_bytes")]
    shares = [f"{record[each]:.3f}" for each in ("speed_best", "speed_median")]
    return [
        name,
        *times,
        *shares,
        f"{record['peak_share']:.1%}",
        *gib,
        f"{record['planned_bytes'] / record['held_bytes']:.3f}",
    ]


def main() -> int:
    """Times both, and counts."""
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--attention", nargs="+", default=["xla"], choices=KERNELS)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--length", type=int, default=1024, help="of a row, in tokens")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, with --quick")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.cpu:
        print(f"gpu_step.py needs a GPU; JAX has {jax.devices()[0].device_kind}.", file=sys.stderr)
        return 2
    report = Report("gpu_step", vars(options) | {"device": jax.devices()[0].device_kind})
    small: dict[str, Any] = {"matrix": 64, "megabytes": 0.1, "repeats": 1} if options.quick else {}
    hardware = plan.calibrate_gpu(1, **small) if on_gpu else plan.calibrate_cpu(1, **small)
    target = plan.Target(hardware, (1, 1) if on_gpu else (1,))
    report.settings["measured_peak"] = hardware.peak("bf16")
    config = Config(**(QUICK if options.quick else SIZES), dtype="bfloat16")
    rows, length = (2, 16) if options.quick else (options.rows, options.length)
    lines = []
    for name in options.attention:
        with attention_by(name):
            record, compared = measured(config, rows, length, target, options)
        record["attention"] = name
        report.records.append(record)
        if max(record["speed_best"], record["speed_median"]) < SPEED_BOUND:
            report.failures.append(
                f"{name}: {record['speed_median']:.3f} of raw JAX's speed, at least {SPEED_BOUND}"
            )
        if on_gpu and abs(record["planned_bytes"] / record["held_bytes"] - 1) > MEMORY_BOUND:
            report.failures.append(f"{name}: the planner's peak is over {MEMORY_BOUND:.0%} away")
        lines.append(row(name, compared, record))
    print(table(HEADERS + MORE, lines))
    return report.finish(options)


def measured(
    config: Config, rows: int, length: int, target: plan.Target, options: Any
) -> tuple[dict[str, Any], dict[str, Comparison]]:
    """Figures of both opponents with one kernel."""
    # The allocator's peak is of the whole process, so raw JAX's state comes after it.
    ours = made(OURS, config, rows, length)
    found = planned(ours, target)
    counted = held_bytes(ours)
    run = repeated(ours)
    jax.block_until_ready(run(2))
    held = measured_peak() or counted
    raw = repeated(made(BASELINE, config, rows, length))
    opponents = [Opponent(BASELINE, raw), Opponent(OURS, run)]
    few: dict[str, Any] = {"repeats": 1, "calls": 1}
    often: dict[str, Any] = {"repeats": options.repeats, "block_seconds": 0.5}
    samples: list[Samples] = measure(opponents, **(few if options.quick else often))
    compared = compare(samples, BASELINE)
    times = compared[OURS]
    record = times.record()
    record |= {
        "raw_median_us": compared[BASELINE].samples.median * 1e6,
        "speed_best": 1 / record["ratio_min"],
        "speed_median": 1 / record["ratio_median"],
        "flops": found.flops,
        "peak_share": found.flops / times.samples.median / target.hardware.peak("bf16"),
        "held_bytes": held,
        "counted_bytes": counted,
        "planned_bytes": found.peak_bytes,
    }
    return record, compared


if __name__ == "__main__":
    sys.exit(main())
