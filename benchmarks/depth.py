# SPDX-License-Identifier: Apache-2.0
"""How tracing and compiling grow with the number of layers.

The work: loss and gradient of a residual tower of like blocks, each a root-mean-square norm and an
MLP of two matrices, small enough that the compiler has little to do for one of them. Opponents:

- `shardax.nn.Stack`: layers stored stacked, run by `shardax.scan`; the baseline.
- `nnx.scan`: Flax NNX, layers made by `nnx.vmap`, run by `nnx.scan`.
- `penzai LayerStack`: `pz.nn.LayerStack` of penzai's own layers, which scans with `unroll=True`:
  traced once, compiled per layer.
- `shardax unrolled`: the same shardax layers in a list, called one by one.

All but penzai's call one function for the mathematics of a block, so that the libraries are
compared and not their norms. Timed is tracing, lowering and compiling a new function on a model
that exists, in processor time of all threads, since other processes on the machine do not add to
it.

Bounds on medians over repeats: shardax's Stack takes at the greatest depth at most 1.2 of the
least, and at no depth more than 1.05 of `nnx.scan`: compiling is most of the time, their compiled
programs are the same, and one and the same program varies by more from one compilation to the next.

    python benchmarks/depth.py --json depth.json
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from _harness import Opponent, Report, Samples, arguments, compare, measure, table

BATCH, WIDTH, HIDDEN = 4, 16, 32
NORMAL = jax.nn.initializers.normal(0.1)
BOUND_DEPTH = 1.2
BOUND_NNX = 1.05
BASELINE = "shardax.nn.Stack"

Compile = Callable[[], Any]
"""Traces, lowers and compiles a new function."""


def block(x: jax.Array, scale: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """One block."""
    norm = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(norm * scale[None] @ up) @ down


def loss_of(y: jax.Array) -> jax.Array:
    """The mean square."""
    return jnp.mean(jnp.square(y))


def shardax_tower(layers: int, *, scanned: bool) -> Compile:
    """A tower of shardax layers, stacked or in a list."""
    import shardax as sx

    class Block(sx.Module):
        def __init__(self, rngs: sx.Rngs) -> None:
            self.scale = sx.Param(sx.Init(jax.nn.initializers.ones, (WIDTH,)))
            self.up = sx.Param(sx.Init(NORMAL, (WIDTH, HIDDEN), rngs=rngs))
            self.down = sx.Param(sx.Init(NORMAL, (HIDDEN, WIDTH), rngs=rngs))

        def __call__(self, x: jax.Array) -> jax.Array:
            return block(x, self.scale.value, self.up.value, self.down.value)

    rngs = sx.Rngs(0)

    def make() -> Block:
        return Block(rngs)

    model: Any = (
        sx.nn.Stack(make, layers) if scanned else sx.nn.Sequential(*(make() for _ in range(layers)))
    )
    sx.state(model)  # makes the values
    x = jnp.ones((BATCH, WIDTH))

    def compile_new() -> Any:
        def step(model: Any, x: jax.Array) -> Any:
            return sx.value_and_grad(lambda model: loss_of(model(x)))(model)

        return sx.jit(step).lower(model, x).compile()

    return compile_new


def nnx_tower(layers: int) -> Compile:
    """A tower of NNX layers, made by `nnx.vmap` and run by `nnx.scan`."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.scale = nnx.Param(jnp.ones(WIDTH))
            self.up = nnx.Param(NORMAL(rngs.params(), (WIDTH, HIDDEN)))
            self.down = nnx.Param(NORMAL(rngs.params(), (HIDDEN, WIDTH)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return block(x, self.scale[...], self.up[...], self.down[...])

    @nnx.split_rngs(splits=layers)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    model = make(nnx.Rngs(0))
    x = jnp.ones((BATCH, WIDTH))

    def compile_new() -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Block, x: jax.Array) -> jax.Array:
            return layer(x)

        def step(model: Block, x: jax.Array) -> Any:
            return nnx.value_and_grad(lambda model: loss_of(run(model, x)))(model)

        return nnx.jit(step).lower(model, x).compile()

    return compile_new


def penzai_tower(layers: int) -> Compile:
    """A tower of penzai layers in a `LayerStack`; its parameters are unbound for `jax.grad`."""
    from penzai import pz

    def make(init_base_rng: Any) -> Any:
        linear = functools.partial(pz.nn.Linear.from_config, init_base_rng=init_base_rng)
        inner = [
            pz.nn.RMSLayerNorm.from_config("norm", init_base_rng, {"width": WIDTH}),
            linear("up", input_axes={"width": WIDTH}, output_axes={"hidden": HIDDEN}),
            pz.nn.Elementwise(jax.nn.gelu),
            linear("down", input_axes={"hidden": HIDDEN}, output_axes={"width": WIDTH}),
        ]
        return pz.nn.Residual(pz.nn.Sequential(inner))

    model = pz.nn.LayerStack.from_sublayer_builder(make, "layers", layers, jax.random.key(0), {})
    slots, parameters = pz.unbind_params(model, freeze=True)
    x = pz.nx.wrap(jnp.ones((BATCH, WIDTH)), "batch", "width")

    def compile_new() -> Any:
        def step(parameters: Any, x: Any) -> Any:
            def objective(parameters: Any) -> jax.Array:
                y = pz.bind_variables(slots, parameters)(x)
                return loss_of(y.unwrap("batch", "width"))

            return jax.value_and_grad(objective)(parameters)

        return jax.jit(step).lower(parameters, x).compile()

    return compile_new


TOWERS: dict[str, Callable[[int], Compile]] = {
    BASELINE: functools.partial(shardax_tower, scanned=True),
    "nnx.scan": nnx_tower,
    "penzai LayerStack": penzai_tower,
    "shardax unrolled": functools.partial(shardax_tower, scanned=False),
}
GROWING = ("penzai LayerStack", "shardax unrolled")
"""Those that compile every layer: timed fewer times, as they take long."""


def calls_of(compile_new: Compile) -> Callable[[int], None]:
    """Compiles as often as the harness asks; there is no result to wait for."""

    def run(calls: int) -> None:
        for _ in range(calls):
            compile_new()

    return run


def failures_of(records: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence per bound that does not hold."""
    failures = []
    ours = [one for one in records if one["name"] == BASELINE]
    deepest = max(ours, key=lambda one: one["layers"])
    if deepest["ratio_to_least"] > BOUND_DEPTH:
        least = min(one["layers"] for one in ours)
        failures.append(
            f"{deepest['layers']} layers take {deepest['ratio_to_least']:.2f} of {least}, "
            f"at most {BOUND_DEPTH}"
        )
    for one in records:
        ratio = 1 / one["ratio_median"]
        if one["name"] == "nnx.scan" and ratio > BOUND_NNX:
            failures.append(f"{one['layers']} layers: {ratio:.2f} of nnx.scan, at most {BOUND_NNX}")
    return failures


def in_both_directions(
    opponents: Sequence[Opponent], repeats: int, *, warm_up: bool
) -> dict[str, Samples]:
    """Times opponents in turn, half of the repeats in the opposite order; by name."""
    halves = [
        measure(order, repeats=repeats // 2, calls=1, warm_up=warm_up, clock=time.process_time)
        for order in (opponents, opponents[::-1])
    ]
    seconds = {one.name: one.seconds for one in halves[1]}
    return {
        one.name: Samples(one.name, one.seconds + seconds[one.name], calls=1) for one in halves[0]
    }


def records_at(
    depths: Sequence[int], names: Sequence[str], repeats: int, *, warm_up: bool = True
) -> list[dict[str, Any]]:
    """Times every tower at every depth: against the baseline there, and against the least depth.

    Towers that do not grow are timed in turn, all depths of them; the others once. Who compiles
    after another of like size is a little faster, so half of the repeats go the other way round.
    """
    steady = [name for name in names if name not in GROWING]
    opponents = [
        Opponent(f"{name}/{layers}", calls_of(TOWERS[name](layers)))
        for layers in depths
        for name in steady
    ]
    samples = in_both_directions(opponents, repeats, warm_up=warm_up)
    records = []
    for name in names:
        for layers in depths:
            if name in GROWING:
                opponent = Opponent(f"{name}/{layers}", calls_of(TOWERS[name](layers)))
                once = measure(
                    [opponent], repeats=1, calls=1, warm_up=False, clock=time.process_time
                )
                samples[opponent.name] = Samples(
                    opponent.name, once[0].seconds * (repeats // 2 * 2), calls=1
                )
            mine = samples[f"{name}/{layers}"]
            here = compare([mine, samples[f"{BASELINE}/{layers}"]], f"{BASELINE}/{layers}")
            least = compare([mine, samples[f"{name}/{depths[0]}"]], f"{name}/{depths[0]}")
            ratio = statistics.median(least[mine.name].ratios)
            record = here[mine.name].record()
            records.append(record | {"name": name, "layers": layers, "ratio_to_least": ratio})
    return records


def main() -> int:
    """Measure, print one table, and check the bounds."""
    parser = arguments(__doc__, repeats=16)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--opponents", nargs="*", default=list(TOWERS))
    options = parser.parse_args()
    depths = [2, 4] if options.quick else sorted(options.layers)
    repeats = 2 if options.quick else max(2, options.repeats)
    names = [BASELINE, *(name for name in options.opponents if name != BASELINE)]
    report = Report("depth", {"layers": depths, "repeats": repeats})
    report.records = records_at(depths, names, repeats, warm_up=not options.quick)
    report.failures = failures_of(report.records)
    found = {(one["name"], one["layers"]): one for one in report.records}
    rows = [
        [
            name,
            *(f"{found[name, layers]['median_us'] / 1e6:.2f} s" for layers in depths),
            f"{found[name, depths[-1]]['ratio_to_least']:.2f}x",
            f"{found[name, depths[-1]]['ratio_median']:.2f}x",
        ]
        for name in names
    ]
    last = f"{depths[-1]} / {depths[0]}"
    print("\n### Tracing and compiling by the number of layers (processor time)\n")
    print(table(["tower", *map(str, depths), last, f"of {BASELINE} at {depths[-1]}"], rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
