# SPDX-License-Identifier: Apache-2.0
"""Step times of pipelines by a rule, by stages of their own, and of SpectraX, side by side.

One model of residual perceptrons, one batch, loss and gradients on 8 virtual CPU devices (quickly,
on 2), one stage on each:

- *rule*: `nn.Stack` with the rule `("layers", "stage")`, one program of all devices, in which idle
  stages compute what is thrown away;
- *stages*: `train.PipelineStep`, one executable a stage, in the order of a table;
- *SpectraX*: `spectrax.sxcall`, one executable a stage too; left out where it is not installed
  (`pip install spectrax-lib==0.1.4`). No extra of ours has it, for its licence is the AGPL.

All have the same weights, and before anything is timed losses and norms of gradients are compared.
There is no bound: it is a table. Devices share the cores of the machine, so a bubble costs only
what idle stages of the rule compute, and the rest is work and the calls of executables.

    python benchmarks/pipelines.py --json pipelines.json
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import shardax as sx

sx.configure(devices=8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from _harness import Opponent, Report, arguments, compare, measure, table  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

STAGES, LAYERS, MICROBATCHES = 8, 16, 8
HEADERS = ("way", "schedule", "least, ms", "median, ms", "of the rule's GPipe, median")
BASE = "rule, gpipe"

Result = tuple[jax.Array, list[jax.Array]]
"""Loss, and gradients in some order."""
Way = tuple[str, Callable[[], Result]]


class Sizes:
    """The model's weights and batch."""

    def __init__(self, rows: int, width: int, hidden: int) -> None:
        draw = np.random.default_rng(0).normal
        self.up = (draw(size=(LAYERS, width, hidden)) / width**0.5).astype(np.float32)
        self.down = (draw(size=(LAYERS, hidden, width)) / hidden**0.5 / 4).astype(np.float32)
        self.x = draw(size=(rows, width)).astype(np.float32)
        self.target = draw(size=(rows, width)).astype(np.float32)


class Block(sx.Module):
    """A residual perceptron."""

    def __init__(self, up: Any, down: Any) -> None:
        self.up, self.down = sx.Param(up), sx.Param(down)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the perceptron's result."""
        return x + jnp.tanh(x @ self.up.value) @ self.down.value


def mean_square(y: jax.Array, target: jax.Array) -> jax.Array:
    """The loss."""
    return jnp.mean((y - target) ** 2)


def by_rule(sizes: Sizes) -> Iterator[Way]:
    """One program of all devices."""
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,))
    rules = {"layers": "stage"}
    x, target = jax.device_put((sizes.x, sizes.target), NamedSharding(mesh, P()))
    for schedule in ("gpipe", "circular"):
        stack = sx.nn.Stack(lambda: Block(sizes.up[0], sizes.down[0]), LAYERS)
        sx.update(stack.stacked, {"up": jnp.asarray(sizes.up), "down": jnp.asarray(sizes.down)})
        sx.shard(stack, mesh, rules)

        def loss(stack: Any, x: jax.Array, target: jax.Array) -> jax.Array:
            return mean_square(stack(x), target)

        compiled = sx.jit(sx.value_and_grad(loss))

        def step(stack: Any = stack, compiled: Any = compiled, schedule: str = schedule) -> Result:
            scope = sx.parallel(microbatches=MICROBATCHES, schedule=schedule)
            with jax.set_mesh(mesh), sx.axis_rules(rules), scope:
                value, gradients = compiled(stack, x, target)
            return value, jax.tree.leaves(gradients)

        yield f"rule, {schedule}", step


def by_stages(sizes: Sizes) -> Iterator[Way]:
    """One executable a stage."""
    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,))
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        blocks = [Block(*map(jnp.asarray, pair)) for pair in zip(sizes.up, sizes.down, strict=True)]
        stages = blocks if schedule == "interleaved" else grouped(blocks, sx.nn.Sequential)
        made = sx.train.PipelineStep(
            stages, mean_square, mesh=mesh, microbatches=MICROBATCHES, schedule=schedule
        )

        def step(made: Any = made) -> Result:
            value, gradients = made(sizes.x, sizes.target)
            return value, jax.tree.leaves(gradients)

        yield f"stages, {schedule}", step


def grouped(layers: list[Any], join: Callable[..., Any]) -> list[Any]:
    """Joins neighbours, so that each device has one stage."""
    count = len(layers) // STAGES
    return [join(*layers[i : i + count]) for i in range(0, len(layers), count)]


def numbers(result: Result) -> tuple[float, float]:
    """The loss, and the norm of all gradients."""
    value, gradients = result
    squares = sum(float(np.sum(np.square(np.asarray(g, np.float64)))) for g in gradients)
    return float(value), squares**0.5


def repeated(run: Callable[[], Result]) -> Callable[[int], Any]:
    """A function of the number of calls, each waited for."""

    def calls(count: int) -> Any:
        result = None
        for _ in range(count):
            result = jax.block_until_ready(run())
        return result

    return calls


def main() -> int:
    """Times every way."""
    parser = arguments(__doc__, repeats=9)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    if options.quick:
        globals().update({"STAGES": 2, "LAYERS": 4, "MICROBATCHES": 4})
    report = Report("pipelines", vars(options))
    sizes = Sizes(options.rows, options.width, options.hidden)
    ways = [*by_rule(sizes), *by_stages(sizes)]
    try:
        peer = importlib.import_module("_pipelines_spectrax")
        ways += peer.ways(sizes.up, sizes.down, sizes.x, sizes.target, STAGES, MICROBATCHES)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "spectrax":
            raise
        print("SpectraX is not installed (spectrax-lib), so it is left out.", file=sys.stderr)
    wanted = numbers(ways[0][1]())
    for name, run in ways:
        found = numbers(run())
        if not np.allclose(found, wanted, rtol=1e-4):
            report.failures.append(f"{name}: loss and norm {found}, of {BASE} {wanted}")
        report.records.append({"name": name, "loss": found[0], "gradient_norm": found[1]})
    opponents = [Opponent(name, repeated(run)) for name, run in ways]
    few: dict[str, Any] = {"repeats": 1, "calls": 1}
    often: dict[str, Any] = {"repeats": options.repeats, "block_seconds": 0.5}
    compared = compare(measure(opponents, **(few if options.quick else often)), BASE)
    rows = []
    for record in report.records:
        record |= compared[record["name"]].record()
        times = [f"{record[key] / 1e3:.1f}" for key in ("min_us", "median_us")]
        rows.append([*record["name"].split(", "), *times, f"{record['ratio_median']:.2f}"])
    print(table(HEADERS, rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
