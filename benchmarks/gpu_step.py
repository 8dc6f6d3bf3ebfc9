# SPDX-License-Identifier: Apache-2.0
"""The decoder on one GPU, trained and decoding: beside raw JAX, and beside the GPU's limits.

The step (AdamW, float32 parameters, bfloat16 compute, state donated) of `shardax.models.Decoder`
beside that of `raw_decoder`, with each kernel and precision: attention by XLA, or by cuDNN, for
both (`jax.nn.dot_product_attention`); other kernels (`sx.kernels`) and products in fp8 beside raw
JAX in bfloat16 with attention by XLA. Reported are the speed against raw JAX, the share of the
GPU's measured peak in bfloat16 (`plan.calibrate_gpu`) that the operations of the step reach, and
the memory: what JAX's allocator held at the most, beside the planner's peak for that GPU, from
shapes alone. A kernel that does not run here has a row that says why.

Decoding is `sx.models.generate` with kernels in bfloat16, int8, int4 and fp8, and with a cache in
bfloat16 and int8, beside a loop by hand in raw JAX in bfloat16. Reported are tokens a second, and
their share of the memory's limit: what its measured bandwidth allows where each step reads the
kernels and the cache once.

Bounds on a GPU: 0.98 of the speed of raw JAX with the same kernel (the larger of best and median);
fp8 at 1.28 of ours in bfloat16; decoding at 0.7 of the memory's limit; the planner's peak within
5 % of what was held.

It needs a GPU. Elsewhere it says so, with status 2; `--quick --cpu` shows that it runs. No figure
of a GPU is published: none was at hand.

    python benchmarks/gpu_step.py --check --json gpu_step.json
"""

import contextlib
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import _decoder_steps
import jax
import numpy as np
import optax
from _decoder_steps import Step
from _decoding_loops import by_hand
from _harness import Comparison, Opponent, Report, Samples, arguments, compare, measure, table
from raw_decoder import Config

import shardax as sx
from shardax import plan

ATTENTION = ("xla", "cudnn", "splash", "tokamax", "auto")
OTHERS = ("gated=tokamax", "norms=tokamax", "loss=tokamax")
PRECISIONS = ("fp8", "fp8-delayed")
DECODING = ("bf16", "int8", "int4", "fp8")
BITS = {"int4": 4}  # of dtypes that arrays hold in more
SPEED_BOUND, MEMORY_BOUND, FP8_BOUND, DECODE_BOUND = 0.98, 0.05, 1.28, 0.7
# 0.7 B parameters, of which the state takes 8 GiB.
SIZES: dict[str, Any] = {"vocab": 32_768, "embed": 2048, "layers": 12, "heads": 16}
SIZES |= {"kv_heads": 16, "head_dim": 128, "mlp": 5632}
QUICK: dict[str, Any] = {"vocab": 256, "embed": 64, "layers": 1, "mlp": 128}
BASELINE, OURS = "raw jax", "shardax"
HEADERS = ("kernel, precision", "raw jax, ms", "shardax, ms", "speed, best", "speed, median")
DECODING_HEADERS = ("decoding", "tokens a second", "memory's limit", "share")
MORE = ("share of peak", "held, GiB", "planned, GiB", "planned / held")


@dataclass(frozen=True)
class Case:
    """A kernel and a precision of the step."""

    name: str
    attention: str = "xla"
    others: tuple[tuple[str, str], ...] = ()
    precision: str | None = None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Makes both opponents take its kernels, and ours its precision."""
        make = _decoder_steps.shardax_decoder

        def decoder(config: Config) -> Any:
            layers = {sx.PathContains("layers"): self.precision, ...: None}
            return sx.surgery.with_precision(make(config), layers)

        with contextlib.ExitStack() as stack:
            if self.precision is not None:
                patch = mock.patch.object(_decoder_steps, "shardax_decoder", decoder)
                stack.enter_context(patch)
            if "loss" in dict(self.others):
                patch = mock.patch.object(_decoder_steps, "shardax_loss", blockwise_loss)
                stack.enter_context(patch)
            kernels: dict[str, Any] = dict(self.others)
            stack.enter_context(sx.kernels(**kernels))
            stack.enter_context(attention_by(self.attention))
            yield


def blockwise_loss(model: Any, batch: Any) -> jax.Array:
    """The same loss, by `blockwise_cross_entropy`."""
    hidden = model.hidden_states(batch["inputs"])
    return sx.models.blockwise_cross_entropy(hidden, model.head_kernel, batch["targets"])


def cases(options: Any) -> list[Case]:
    """What is timed, or said not to run here."""
    chosen = [Case(f"attention={name}", name) for name in options.attention]
    for text in options.others:
        kind, _, name = text.partition("=")
        chosen.append(Case(text, others=((kind, name),)))
    return chosen + [Case(name, precision=name) for name in options.precision]


@contextlib.contextmanager
def attention_by(implementation: str) -> Iterator[None]:
    """Makes attention of both opponents take a kernel."""
    patched = ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",)
    if implementation not in patched:  # plain JAX has no other: it keeps XLA's
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


def decoded(config: Config, rows: int, bandwidth: float, options: Any) -> list[dict[str, Any]]:
    """Records of decoding, with kernels and caches in several formats."""
    prompt, new = (8, 4) if options.quick else (128, 128)
    config = replace(config, param_dtype="bfloat16")
    model = _decoder_steps.shardax_decoder(config)
    model.eval()
    prompts = np.random.default_rng(0).integers(0, config.vocab, (rows, prompt), np.int32)
    opponents = [Opponent(BASELINE, repeated_loop(by_hand(model, new), prompts))]
    read_bytes = {BASELINE: step_bytes(model, config, rows * (prompt + new), 16)}
    for number_format in options.decoding:
        small = model
        if number_format != "bf16":
            formats = {sx.PathContains("embed"): None, ...: number_format}
            small = sx.quantize(model, formats)
        for cache in (None, "int8") if number_format in ("bf16", "int8") else (None,):
            name = f"{number_format}, cache {cache or 'bf16'}"
            bits = 16 if cache is None else 8 + 32 / config.head_dim  # with a scale of each head
            read_bytes[name] = step_bytes(small, config, rows * (prompt + new), bits)
            generate = sx.models.generate
            loop = functools.partial(generates, generate, small, new, cache)
            opponents.append(Opponent(name, repeated_loop(loop, prompts)))
    often: dict[str, Any] = {"repeats": 1 if options.quick else options.repeats, "calls": 1}
    records = []
    for name, comparison in compare(measure(opponents, **often), BASELINE).items():
        speed, limit = rows * new / comparison.samples.median, rows * bandwidth / read_bytes[name]
        record = {**comparison.record(), "decoding": name, "tokens_per_second": speed}
        records.append(record | {"limit": limit, "share_of_limit": speed / limit})
    return records


def generates(generate: Any, model: Any, new: int, cache: str | None, prompts: np.ndarray) -> Any:
    """Continues prompts by `sx.models.generate`."""
    options = {} if cache is None else {"cache_dtype": cache}
    return generate(model, list(prompts), max_new_tokens=new, temperature=0, **options)


def repeated_loop(generate: Callable[[np.ndarray], Any], prompts: np.ndarray) -> Any:
    """Generates again and again from the same prompts."""

    def run(calls: int) -> Any:
        for _ in range(calls - 1):
            generate(prompts)
        return generate(prompts)

    return run


def step_bytes(model: Any, config: Config, slots: int, cache_bits: float) -> float:
    """Bytes that a step of decoding has to read: all but the embedding, and the cache."""
    kernels = sum(
        math.prod(variable.shape)
        * BITS.get(str(variable.dtype), 8 * np.dtype(variable.dtype).itemsize)
        / 8
        for path, variable in sx.iter_variables(model, sx.Param, sx.Quantized)
        if path[0] != "embed"
    )
    heads = 2 * config.layers * config.kv_heads * config.head_dim
    return kernels + slots * heads * cache_bits / 8


def main() -> int:
    """Times both, and counts."""
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--attention", nargs="*", default=list(ATTENTION), choices=ATTENTION)
    parser.add_argument("--others", nargs="*", default=list(OTHERS), help="KIND=NAME of sx.kernels")
    parser.add_argument("--precision", nargs="*", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--decoding", nargs="*", default=list(DECODING), choices=DECODING)
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
    for case in cases(options):
        try:
            with case.scope():
                record, compared = measured(config, rows, length, target, options)
        except sx.errors.LayerInputError as error:
            reason = re.split(r"[;.] ", str(error).rpartition(" does not run ")[2])[0]
            report.records.append({"case": case.name, "refused": reason})
            missing = [""] * (len(HEADERS + MORE) - 2)
            lines.append([case.name, f"does not run {reason}", *missing])
            continue
        record["case"] = case.name
        report.records.append(record)
        lines.append(row(case.name, compared, record))
    print(table(HEADERS + MORE, lines))
    decoding = decoded(config, rows, hardware.memory_bandwidth, options) if options.decoding else []
    report.records += decoding
    print(table(DECODING_HEADERS, map(decoding_row, decoding)))
    if on_gpu and not options.quick:
        report.failures += failures(report.records)
    return report.finish(options)


def decoding_row(record: dict[str, Any]) -> list[str]:
    """A record of decoding as a row of the table."""
    speeds = [f"{record[name]:,.0f}" for name in ("tokens_per_second", "limit")]
    return [record["decoding"], *speeds, f"{record['share_of_limit']:.1%}"]


def failures(records: list[dict[str, Any]]) -> list[str]:
    """Which bounds the records of a GPU break, as sentences."""
    found, times = [], {}
    for record in records:
        if "refused" in record:
            continue
        name = record.get("case") or f"decoding, {record['decoding']}"
        if "decoding" in record:
            if record["decoding"] != BASELINE and record["share_of_limit"] < DECODE_BOUND:
                share = record["share_of_limit"]
                found.append(f"{name}: {share:.2f} of the memory's limit, at least {DECODE_BOUND}")
            continue
        times[name] = record["speed_median"]
        same_kernel = name in ("attention=xla", "attention=cudnn")
        if same_kernel and max(record["speed_best"], record["speed_median"]) < SPEED_BOUND:
            found.append(f"{name}: {times[name]:.3f} of raw JAX's speed, at least {SPEED_BOUND}")
        if abs(record["planned_bytes"] / record["held_bytes"] - 1) > MEMORY_BOUND:
            found.append(f"{name}: the planner's peak is over {MEMORY_BOUND:.0%} away")
    base = times.get("attention=xla")
    for name in PRECISIONS:
        if base and name in times and times[name] < FP8_BOUND * base:
            found.append(f"{name}: {times[name] / base:.2f} of bfloat16, at least {FP8_BOUND}")
    return found


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
