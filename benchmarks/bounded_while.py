# SPDX-License-Identifier: Apache-2.0
"""What a limit on the steps of a while loop costs: time with and without history, and memory.

The work: `x <- tanh(W x + b)` until a counter says stop, 20 steps of at most 10,000.

Opponents of `sx.bounded_while_loop` (*bounded*):

- `lax.while_loop`, which counts its steps and says whether it would go on, so that it returns as
  many arrays; *with buffer*, it also writes each step into an array of 10,000 rows, by hand.
- `scan + cond`: what one writes to differentiate: a scan over 10,000 steps that skips those after
  the end.
- `equinox`: `equinox.internal.while_loop`, kinds `bounded` and `checkpointed`.

Measured: *forward* without and with history; *lanes*, 8 of them, which end at different times, with
history; the *gradient*, also when all steps of the limit are taken; and the temporary memory of the
compiled gradient as XLA counts it, at limits of 256, 4096 and 65,536 steps.

Bounds, on the median ratio: bounded takes at most 1.3 of `lax.while_loop`, without history and
with, in one lane and in 8. Memory of the gradient under `"recompute"` grows with the square root of
the limit: from 4096 to 65,536 at most 4.5 times as much more as from 256 to 4096.

    python benchmarks/bounded_while.py --json bounded_while.json
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from _harness import Comparison, Opponent, Report, arguments, compare, measure, table

import shardax as sx

SIZE = 64
STEPS = 20
LIMIT = 10_000
LANES = 8
LIMITS = (256, 4096, 65_536)
BOUND = 1.3
BOUND_OF_GROWTH = 4.5
Function = Callable[..., Any]


def advance(weight: Any, carry: Any) -> Any:
    """One step of the work; the carry is (vector, steps so far, steps to take)."""
    x, taken, steps = carry
    return jnp.tanh(weight @ x + 0.1), taken + 1, steps


def goes_on(carry: Any) -> Any:
    """Whether there are steps left."""
    return carry[1] < carry[2]


def bounded(limit: int, **options: Any) -> Function:
    """The loop through shardax; returns (last vector, history, length, whether it converged)."""

    def run(weight: Any, x: Any, steps: Any) -> Any:
        body = lambda carry: advance(weight, carry)  # noqa: E731
        result = sx.bounded_while_loop(goes_on, body, (x, 0, steps), max_steps=limit, **options)
        return result.final[0], result.history, result.length, result.converged

    return run


def bounded_module(limit: int) -> Function:
    """The same with the state in Variables of a Module."""

    class State(sx.Module):
        def __init__(self, x: Any) -> None:
            self.x = sx.Variable(x)
            self.taken = sx.Variable(jnp.int32(0))

    def run(weight: Any, x: Any, steps: Any) -> Any:
        def body(state: State) -> State:
            state.x[...], state.taken[...], _ = advance(weight, (state.x, state.taken, steps))
            return state

        result = sx.bounded_while_loop(
            lambda state: state.taken < steps, body, State(x), max_steps=limit
        )
        return result.final.x.value, None, result.length, result.converged

    return run


def raw_while(limit: int) -> Function:
    """`lax.while_loop` without a limit; it counts anyway."""

    def run(weight: Any, x: Any, steps: Any) -> Any:
        body = lambda carry: advance(weight, carry)  # noqa: E731
        last = jax.lax.while_loop(goes_on, body, (x, 0, steps))
        return last[0], None, last[1], ~goes_on(last)

    return run


def raw_with_buffer(limit: int) -> Function:
    """`lax.while_loop` that writes a row per step."""

    def run(weight: Any, x: Any, steps: Any) -> Any:
        def body(state: Any) -> Any:
            carry, rows = state
            new = advance(weight, carry)
            return new, rows.at[carry[1]].set(new[0])

        rows = jnp.zeros((limit, *x.shape))
        last, rows = jax.lax.while_loop(
            lambda state: goes_on(state[0]), body, ((x, 0, steps), rows)
        )
        return last[0], rows, last[1], ~goes_on(last)

    return run


def scan_and_cond(limit: int, *, keep: bool = False) -> Function:
    """A scan over the limit that skips the steps after the end."""

    def run(weight: Any, x: Any, steps: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            new = jax.lax.cond(
                goes_on(carry), lambda carry: advance(weight, carry), lambda carry: carry, carry
            )
            return new, new[0] if keep else None

        last, rows = jax.lax.scan(step, (x, 0, steps), length=limit)
        return last[0], rows, last[1], ~goes_on(last)

    return run


def equinox_loop(limit: int, kind: Literal["bounded", "checkpointed"]) -> Function:
    """The while loop that equinox keeps for its own libraries."""
    from equinox.internal import while_loop

    def run(weight: Any, x: Any, steps: Any) -> Any:
        body = lambda carry: advance(weight, carry)  # noqa: E731
        last = while_loop(goes_on, body, (x, 0, steps), max_steps=limit, kind=kind)
        return last[0], None, last[1], ~goes_on(last)

    return run


def forward(limit: int) -> dict[str, Function]:
    """The loops without history."""
    return {
        "lax.while_loop": raw_while(limit),
        "bounded": bounded(limit),
        "bounded, Module": bounded_module(limit),
        'bounded, "store"': bounded(limit, differentiable="store"),
        'bounded, "recompute"': bounded(limit, differentiable="recompute"),
        "scan + cond": scan_and_cond(limit),
    }


def forward_with_history(limit: int) -> dict[str, Function]:
    """The loops with history."""
    keep = lambda carry: carry[0]  # noqa: E731
    return {
        "lax.while_loop": raw_with_buffer(limit),
        "bounded": bounded(limit, history=keep),
        'bounded, "recompute"': bounded(limit, history=keep, differentiable="recompute"),
        "scan + cond": scan_and_cond(limit, keep=True),
    }


def in_lanes(functions: dict[str, Function]) -> dict[str, Function]:
    """The same on many lanes."""
    mapped = {name: jax.vmap(run, in_axes=(None, 0, 0)) for name, run in functions.items()}
    return {name: mapped[name] for name in ("lax.while_loop", "bounded")}


def gradients(limit: int) -> dict[str, Function]:
    """The gradients in weight and start of the sum of the last vector."""
    loops = {
        "scan + cond": scan_and_cond(limit),
        'bounded, "store"': bounded(limit, differentiable="store"),
        'bounded, "recompute"': bounded(limit, differentiable="recompute"),
        "equinox, bounded": equinox_loop(limit, "bounded"),
        "equinox, checkpointed": equinox_loop(limit, "checkpointed"),
    }
    return {
        name: jax.grad(lambda weight, x, steps, run=run: run(weight, x, steps)[0].sum(), (0, 1))
        for name, run in loops.items()
    }


def inputs(steps: int) -> tuple[Any, Any, Any]:
    """Weight, start and the number of steps to take."""
    weight = jax.random.normal(jax.random.key(0), (SIZE, SIZE)) / SIZE**0.5
    return weight, jnp.ones(SIZE), jnp.int32(steps)


def lanes_of(given: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """A start and a number of steps per lane; the longest takes as many as one lane alone."""
    weight, x, steps = given
    return weight, jnp.tile(x, (LANES, 1)), steps >> jnp.arange(LANES)


def opponents_of(functions: dict[str, Function], given: Sequence[Any]) -> list[Opponent]:
    """The functions compiled, as opponents that call them."""

    def caller(run: Function) -> Callable[[int], Any]:
        compiled = jax.jit(run)

        def call(calls: int) -> Any:
            result = None
            for _ in range(calls):
                result = compiled(*given)
            return result

        return call

    return [Opponent(name, caller(run)) for name, run in functions.items()]


def bytes_of_gradient(run: Function) -> int:
    """The temporary memory of the compiled gradient, in bytes."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(STEPS)]
    analysis = jax.jit(run).lower(*shapes).compile().memory_analysis()
    return analysis.temp_size_in_bytes if analysis is not None else 0


def bound_failures(work: str, comparison: Comparison) -> list[str]:
    """A sentence if shardax is slower than it may be."""
    ratio = comparison.record()["ratio_median"]
    if comparison.samples.name != "bounded" or ratio <= BOUND:
        return []
    return [f"{work}: {ratio:.2f} of lax.while_loop, at most {BOUND}"]


def growth_failures(found: dict[int, int]) -> list[str]:
    """A sentence if memory grows faster than the square root of the limit."""
    limits = sorted(found)
    if len(limits) < 3:
        return []
    less, more = (found[b] - found[a] for a, b in zip(limits[-3:], limits[-2:], strict=False))
    if more <= BOUND_OF_GROWTH * less:
        return []
    return [f"recompute: memory grows by {less} and then {more} bytes, at most {BOUND_OF_GROWTH}x"]


def measure_times(report: Report, repeats: int, chosen: Sequence[str], quick: bool) -> None:
    """Time every kind of work and print a table of each."""
    limit = 100 if quick else LIMIT
    given = inputs(STEPS)
    works = {
        "forward": (forward(limit), given),
        "forward with history": (forward_with_history(limit), given),
        "lanes with history": (in_lanes(forward_with_history(limit)), lanes_of(given)),
        "gradient": (gradients(limit), given),
        "gradient of all steps": (gradients(limit), inputs(limit)),
    }
    for work, (loops, arrays) in works.items():
        functions = {name: run for name, run in loops.items() if name in chosen}
        block_seconds = 0.003 if quick else 0.03
        opponents = opponents_of(functions, arrays)
        samples = measure(opponents, repeats=repeats, block_seconds=block_seconds)
        baseline = next(iter(functions))
        rows = []
        for comparison in compare(samples, baseline).values():
            record = comparison.record() | {"work": work, "baseline": baseline, "limit": limit}
            report.records.append(record)
            report.failures += [] if quick else bound_failures(work, comparison)
            times = f"{record['min_us']:.1f} us", f"{record['median_us']:.1f} us"
            rows.append([record["name"], *times, f"{record['ratio_median']:.2f}"])
        print(f"\n### {work}: {arrays[2].max()} steps of at most {limit}\n")
        print(table(["loop", "least", "median", f"/ {baseline}"], rows), flush=True)


def measure_memory(report: Report, limits: Sequence[int], chosen: Sequence[str]) -> None:
    """Compile the gradients at each limit and print their memory."""
    by_limit = {
        limit: {
            name: bytes_of_gradient(run) for name, run in gradients(limit).items() if name in chosen
        }
        for limit in limits
    }
    names = list(by_limit[limits[0]])
    for limit, found in by_limit.items():
        report.records += [
            {"work": "memory", "name": name, "limit": limit, "temp_bytes": size}
            for name, size in found.items()
        ]
    ours = 'bounded, "recompute"'
    report.failures += growth_failures(
        {limit: found[ours] for limit, found in by_limit.items() if ours in found}
    )
    rows = [[name, *(f"{by_limit[limit][name]:,}" for limit in limits)] for name in names]
    print("\n### temporary memory of the gradient, bytes\n")
    print(table(["loop", *(f"limit {limit:,}" for limit in limits)], rows), flush=True)


def main() -> int:
    """Measure times, then memory, and check the bounds."""
    known = [*forward(1), *gradients(1)]
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--opponents", nargs="*", default=known, choices=known)
    options = parser.parse_args()
    repeats = 2 if options.quick else options.repeats
    limits = (16, 64) if options.quick else LIMITS
    report = Report("bounded_while", {"size": SIZE, "steps": STEPS, "limits": limits})
    measure_times(report, repeats, options.opponents, options.quick)
    measure_memory(report, limits, options.opponents)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
