# SPDX-License-Identifier: Apache-2.0
"""Whether the planner puts layouts in the order of their measured step times.

The work: a train step of a small decoder with `optax.adamw` in float32, on 8 virtual CPU devices,
in each of `LAYOUTS` (rules and a mesh), in two settings: `compute`, of much arithmetic per
parameter, and `parameters`, where what moves is mostly parameters, gradients and the state of the
optimizer. Each really runs, compiled as `Trainer` does it: `sx.shard`, then `sx.jit` with the
layout as in_shardings.

Opponent of the clock: what `plan.compare` predicts for "cpu:8" with the figures of
`plan.calibrate_cpu`, which are a product of matrices, a stream, and collectives, each measured by
itself. No measured step has a part in a prediction. Beside it stand the orders by operations alone,
by wire bytes alone, and by arithmetic and memory without communication.

Virtual devices share the machine's cores, and other programs may, too. So time is the processor
time of all threads over the number of cores, of steps and of calibration: where nothing else runs
and the cores are busy throughout, that is the time of day. `--wall` takes the time of day. Layouts
take turns; of each the minimum over repeats counts, and the median is shown.

Words: two layouts *differ clearly* if the slower takes over 15 % longer; such a pair is *in order*
if the prediction puts the same one first. *Regret* is how much longer the layout of the least
prediction takes than the fastest. rho is Spearman's rank correlation.

Bounds, in each setting: 95 % of the pairs that differ clearly are in order, and regret is under
10 %.

    python benchmarks/plan_rank.py --json plan_rank.json
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _decoder_steps import eight_cpu_devices
from _harness import Opponent, Report, arguments, measure, table
from jax.sharding import AxisType, NamedSharding

import shardax as sx
from shardax import models, plan, train

DEVICES = 8
MESH_AXES: tuple[str, ...] = ("data", "model")
CLEAR = 0.15
BOUND_ORDER = 0.95
BOUND_REGRET = 0.10

_TENSOR = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}
RULES: dict[str, dict[str, Any]] = {
    "dp": {"batch": "data"},
    "fsdp": {"batch": "data", "embed": "data"},
    "tp": {"batch": "data", **_TENSOR},
    "fsdp+tp": {"batch": "data", **_TENSOR, "embed": "data"},
    "tp+sp": {"batch": "data", "seq": "model", **_TENSOR},
    "mlp": {"batch": "data", "mlp": "model"},
    "hybrid": {"batch": ("data", "model"), "embed": "model"},
}
"""Rules by name. The batch is asked first, so that activations stay split by it."""

LAYOUTS: dict[str, tuple[str, tuple[int, int]]] = {
    f"{rules} {data}x{model}": (rules, (data, model))
    for rules, meshes in {
        "dp": [(8, 1), (4, 2)],
        "fsdp": [(8, 1)],
        "tp": [(4, 2), (2, 4), (1, 8)],
        "fsdp+tp": [(4, 2), (2, 4)],
        "tp+sp": [(2, 4), (1, 8)],
        "mlp": [(4, 2)],
        "hybrid": [(4, 2)],
    }.items()
    for data, model in meshes
}
"""Rules and the sizes of the mesh axes `data` and `model`; no two compile to the same program."""

QUICK = ("dp 8x1", "tp 1x8")


@dataclass(frozen=True)
class Setting:
    """A decoder and a batch.

    Attributes:
        config: The decoder.
        batch: Sequences of a step.
        time: Tokens of a sequence.
    """

    config: models.DecoderConfig
    batch: int
    time: int


def settings(quick: bool) -> dict[str, Setting]:
    """The decoders and batches, by name."""

    def sized(batch: int, time: int, embed: int, layers: int = 2, vocab: int = 512) -> Setting:
        config = models.DecoderConfig(
            vocab_size=vocab,
            num_layers=layers,
            embed_dim=embed,
            num_heads=8,
            num_kv_heads=8,
            head_dim=max(8, embed // 8),
            mlp_dim=4 * embed,
            scan_layers=layers > 1,
        )
        return Setting(config, batch, time)

    if quick:
        return {"quick": sized(8, 8, 16, layers=1, vocab=64)}
    return {"compute": sized(32, 32, 256), "parameters": sized(8, 16, 384)}


def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
    """What `Trainer` compiles: loss, gradients, update."""
    loss, gradients = sx.value_and_grad(models.next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def step_of(setting: Setting) -> tuple[Any, Any]:
    """A model and its optimizer, both still lazy."""
    model = models.Decoder(setting.config, rngs=sx.Rngs(0))
    return model, train.Optimizer(model, optax.adamw(1e-3))


def batch_of(setting: Setting) -> dict[str, jax.Array]:
    """Random tokens and the tokens that follow them."""
    shape = (setting.batch, setting.time + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, setting.config.vocab_size, jnp.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def runner(setting: Setting, name: str, made: tuple[Any, Any]) -> Opponent:
    """A step that really runs in a layout, on a copy of what was made."""
    rules_name, sizes = LAYOUTS[name]
    rules = sx.Rules(list(RULES[rules_name].items()))
    mesh = jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 2)
    spec = rules.spec(("batch", "seq"))
    batch = jax.device_put(batch_of(setting), NamedSharding(mesh, spec))
    copied = sx.clone(made)
    sx.update(copied, jax.tree.map(jnp.copy, sx.state(copied)))
    trained = sx.shard(copied, mesh, rules)
    places = sx.shardings(trained, mesh, rules)
    step = sx.jit(train_step, donate_argnums=(0, 1), in_shardings=(*places, None))

    def run(calls: int) -> Any:
        loss = None
        with sx.axis_rules(rules), jax.set_mesh(mesh):
            for _ in range(calls):
                loss = step(*trained, batch)
        return loss

    return Opponent(name, run)


def timed(
    setting: Setting, names: Sequence[str], repeats: int, clock: Callable[[], float]
) -> dict[str, tuple[float, ...]]:
    """Seconds of a step in each layout, one entry a repeat."""
    made = sx.shard(step_of(setting), jax.make_mesh((1,), ("one",)), {})
    opponents = [runner(setting, name, made) for name in names]
    return {
        one.name: one.seconds for one in measure(opponents, repeats=repeats, calls=1, clock=clock)
    }


def predicted(
    setting: Setting, names: Sequence[str], target: plan.Target
) -> dict[str, plan.LayoutReport]:
    """What the planner says of each layout."""
    tokens = plan.NamedShape((setting.batch, setting.time), "int32", ("batch", "seq"))
    args = (*step_of(setting), {"inputs": tokens, "targets": tokens})
    found: dict[str, plan.LayoutReport] = {}
    for sizes in dict.fromkeys(LAYOUTS[name][1] for name in names):
        rules = {name: RULES[LAYOUTS[name][0]] for name in names if LAYOUTS[name][1] == sizes}
        mesh = dict(zip(MESH_AXES, sizes, strict=True))
        # The effort "screen" leaves out LLVM's optimizations, which change no operation and no
        # collective, and half of the time that compiling takes.
        made = plan.compare(train_step, args, rules, mesh, target, effort="screen", cache=None)
        found |= {report.layout.name: report for report in made}
    return found


def record_of(
    setting: str, name: str, seconds: Sequence[float], report: plan.LayoutReport
) -> dict[str, Any]:
    """What is written down of a layout; times in seconds."""
    band = report.time
    if band is None:
        raise RuntimeError(f"{setting}, {name}: {report.outcome}: {report.reason}")
    return {
        "setting": setting,
        "layout": name,
        "measured": min(seconds),
        "measured_median": statistics.median(seconds),
        "repeats": len(seconds),
        "predicted": (band.lower + band.upper) / 2,
        "compute": band.compute,
        "memory": band.memory,
        "communication": band.communication,
        "flops": report.flops,
        "hbm_bytes": report.hbm_bytes,
        "wire_bytes": report.total_wire_bytes,
        "collectives": len(report.collectives),
    }


def ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value, the least is 0; equal values share the mean of their ranks."""
    return [
        sum(other < mine for other in values) + (sum(other == mine for other in values) - 1) / 2
        for mine in values
    ]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where all values of one are equal."""
    try:
        return statistics.correlation(ranks(first), ranks(second))
    except statistics.StatisticsError:
        return 0.0


def in_order(measured: Sequence[float], guess: Sequence[float]) -> tuple[int, int]:
    """Pairs that differ clearly: how many are in order, and how many there are.

    A pair whose predictions are equal is not in order.
    """
    right = clear = 0
    for i, j in itertools.combinations(range(len(measured)), 2):
        fast, slow = (i, j) if measured[i] < measured[j] else (j, i)
        if measured[slow] > (1 + CLEAR) * measured[fast]:
            clear += 1
            right += guess[fast] < guess[slow]
    return right, clear


def regret(measured: Sequence[float], guess: Sequence[float]) -> float:
    """Share by which the layout of the least prediction is slower than the fastest.

    Of several with the least prediction it is the slowest.
    """
    least = min(guess)
    chosen = [mine for mine, its in zip(measured, guess, strict=True) if its == least]
    return max(chosen) / min(measured) - 1


GUESSES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "planner": lambda one: one["predicted"],
    "arithmetic and memory": lambda one: one["compute"] + one["memory"],
    "operations": lambda one: one["flops"],
    "wire bytes": lambda one: one["wire_bytes"],
}
"""Ways to order layouts; the first is the planner's, which the bounds are for."""


def score(records: Sequence[Mapping[str, Any]], guess: str) -> dict[str, Any]:
    """How well a way to order the layouts of a setting does."""
    measured = [one["measured"] for one in records]
    guessed = [GUESSES[guess](one) for one in records]
    right, clear = in_order(measured, guessed)
    return {
        "rho": spearman(measured, guessed),
        "in_order": right,
        "clear_pairs": clear,
        "regret": regret(measured, guessed),
    }


def failures_of(setting: str, found: Mapping[str, Any]) -> list[str]:
    """One sentence per bound that does not hold."""
    failures = []
    if found["in_order"] < BOUND_ORDER * found["clear_pairs"]:
        failures.append(
            f"{setting}: {found['in_order']} of {found['clear_pairs']} pairs that differ clearly "
            f"are in order, at least {BOUND_ORDER:.0%}"
        )
    if found["regret"] >= BOUND_REGRET:
        failures.append(f"{setting}: regret is {found['regret']:.1%}, under {BOUND_REGRET:.0%}")
    return failures


def show(setting: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Print the tables of a setting; returns the planner's score."""
    rows = [
        [
            one["layout"],
            f"{one['measured'] * 1e3:.1f}",
            f"{one['measured_median'] * 1e3:.1f}",
            f"{one['predicted'] * 1e3:.1f}",
            f"{one['predicted'] / one['measured']:.2f}",
            *(f"{one[part] * 1e3:.1f}" for part in ("compute", "memory", "communication")),
        ]
        for one in sorted(records, key=lambda one: one["measured"])
    ]
    print(f"\n### {setting}: milliseconds of a step, least first\n")
    parts = ("arithmetic", "memory", "collectives")
    heads = ("layout", "measured", "median", "predicted", "predicted / measured", *parts)
    print(table(heads, rows))
    scores = {guess: score(records, guess) for guess in GUESSES}
    rows = [
        [
            guess,
            f"{found['rho']:.2f}",
            f"{found['in_order']} of {found['clear_pairs']}",
            f"{found['regret']:.1%}",
        ]
        for guess, found in scores.items()
    ]
    print()
    print(table(("order by", "rho", "clear pairs in order", "regret"), rows))
    return scores["planner"]


def main() -> int:
    """Calibrate, predict, measure, compare, and check the bounds."""
    parser = arguments(__doc__, repeats=9)
    parser.add_argument("--wall", action="store_true", help="time of day, on a quiet machine")
    parser.add_argument("--settings", nargs="*", default=None, help="which settings; all")
    parser.add_argument(
        "--measured", type=Path, default=None, help="take step times from this JSON, only predict"
    )
    options = parser.parse_args()
    eight_cpu_devices()
    clock = time.perf_counter if options.wall else processor_clock
    repeats = 2 if options.quick else options.repeats
    names = list(QUICK if options.quick else LAYOUTS)
    chosen = settings(options.quick)
    sizes = {"matrix": 64, "megabytes": 0.1, "repeats": 2} if options.quick else {}
    report = Report("plan_rank", {"repeats": repeats, "wall": options.wall})
    hardware = plan.calibrate_cpu(DEVICES, clock=clock, **sizes)
    report.settings["calibration"] = {
        "matmul_flops_per_second": hardware.peak("f32"),
        "memory_bytes_per_second": hardware.memory_bandwidth,
        "collective_seconds_at_least": hardware.link_latency,
        "collective_bytes_per_second": dict(hardware.copy_bandwidth),
    }
    print(json.dumps(report.settings["calibration"], indent=1))
    target = plan.Target(hardware, (DEVICES,))
    for name in options.settings or chosen:
        reports = predicted(chosen[name], names, target)
        if options.measured is None:
            seconds = timed(chosen[name], names, repeats, clock)
        else:
            seconds = times_of(options.measured, name)
        records = [record_of(name, each, seconds[each], reports[each]) for each in names]
        for record in records:
            record["seconds"] = seconds[record["layout"]]
        report.records += records
        found = show(name, records)
        report.records.append({"setting": name, **found})
        report.failures += failures_of(name, found)
    return report.finish(options)


def processor_clock() -> float:
    """Processor time of all threads of this process over the number of cores, in seconds."""
    return time.process_time() / len(os.sched_getaffinity(0))


def times_of(path: Path, setting: str) -> dict[str, tuple[float, ...]]:
    """Step times in the JSON of an earlier run."""
    return {
        one["layout"]: tuple(one["seconds"])
        for one in json.loads(path.read_text())["records"]
        if one["setting"] == setting and "layout" in one
    }


if __name__ == "__main__":
    sys.exit(main())
