# SPDX-License-Identifier: Apache-2.0
"""What finding static arguments in every call costs beyond a call of `jax.jit`.

The work: `mix(problem)`, a dict of three arrays, a Python number and a string that decides which
program it is; on vectors of four, so that the call is all there is to time. Every program computes
the same.

Opponents of `sx.jit(mix, static="auto")`:

- `jax.jit`: the string given apart, as `static_argnames`; the baseline.
- `jax.jit, flat`: the arrays given one by one as well.
- `equinox.filter_jit`: the other one that finds statics by itself. It takes numbers as static too,
  so it is compared with `static="numbers"`.

Also timed: the same with the number static (`numbers`), with a function in place of the string
(`function`), and in keyword arguments (`keywords`).

Bound, on the median ratio: `auto`, `numbers`, `function` and `keywords` take at most 3 of `jax.jit`
for the same work.

    python benchmarks/static_auto.py --json static_auto.json
"""

import sys
from collections.abc import Callable
from typing import Any

import equinox
import jax
import jax.numpy as jnp
from _harness import Comparison, Opponent, Report, arguments, compare, measure, table

import shardax as sx

SIZE = 4
BOUND = 3.0
BASELINE = "jax.jit"


def mix(problem: Any) -> Any:
    """The work: a layer whose activation is chosen by a string or given."""
    y = (problem["weight"] @ problem["x"] + problem["bias"]) * problem["scale"]
    how = problem["activation"]
    if how == "tanh":
        return jnp.tanh(y)
    return how(y) if callable(how) else y


def mix_apart(arrays: Any, activation: Any) -> Any:
    """The same with the static part given apart."""
    return mix({**arrays, "activation": activation})


def mix_keywords(x: Any, *, layer: Any, scale: Any, activation: Any) -> Any:
    """The same in keyword arguments."""
    return mix({"x": x, **layer, "scale": scale, "activation": activation})


def mix_flat(weight: Any, x: Any, bias: Any, scale: Any) -> Any:
    """The same as the simplest call that `jax.jit` can get."""
    given = {"weight": weight, "x": x, "bias": bias, "scale": scale}
    return mix_apart(given, "tanh")


def calls() -> dict[str, Callable[[], Any]]:
    """One call of each opponent, by name."""
    x, bias = jnp.ones(SIZE), jnp.zeros(SIZE)
    layer = {"weight": jnp.eye(SIZE), "bias": bias}
    arrays = {**layer, "x": x, "scale": 2.0}
    problem = {**arrays, "activation": "tanh"}
    with_function = {**arrays, "activation": jnp.tanh}
    plain = jax.jit(mix_apart, static_argnames="activation")
    flat = jax.jit(mix_flat)
    auto, numbers = sx.jit(mix, static="auto"), sx.jit(mix, static="numbers")
    keywords = sx.jit(mix_keywords, static="auto")
    filtered = equinox.filter_jit(mix)
    return {
        BASELINE: lambda: plain(arrays, activation="tanh"),
        "jax.jit, flat": lambda: flat(layer["weight"], x, bias, 2.0),
        "auto": lambda: auto(problem),
        "numbers": lambda: numbers(problem),
        "function": lambda: auto(with_function),
        "keywords": lambda: keywords(x, layer=layer, scale=2.0, activation="tanh"),
        "equinox.filter_jit": lambda: filtered(problem),
    }


OURS = ("auto", "numbers", "function", "keywords")


def opponent(name: str, call: Callable[[], Any]) -> Opponent:
    """An opponent that makes a call as often as asked."""

    def run(count: int) -> Any:
        result = None
        for _ in range(count):
            result = call()
        return result

    return Opponent(name, run)


def bound_failures(comparison: Comparison) -> list[str]:
    """A sentence if shardax is slower than it may be."""
    record = comparison.record()
    if record["name"] not in OURS or record["ratio_median"] <= BOUND:
        return []
    return [f"{record['name']}: {record['ratio_median']:.2f} of {BASELINE}, at most {BOUND}"]


def main() -> int:
    """Time every opponent, print the table, and check the bound."""
    known = calls()
    parser = arguments(__doc__, repeats=40)
    parser.add_argument("--opponents", nargs="*", default=[*known], choices=[*known])
    options = parser.parse_args()
    report = Report("static_auto", {"size": SIZE})
    chosen = [name for name in known if name in (BASELINE, *options.opponents)]
    samples = measure(
        [opponent(name, known[name]) for name in chosen],
        repeats=2 if options.quick else options.repeats,
        block_seconds=0.003 if options.quick else 0.02,
    )
    rows = []
    for comparison in compare(samples, BASELINE).values():
        record = comparison.record()
        report.records.append(record)
        report.failures += [] if options.quick else bound_failures(comparison)
        times = f"{record['min_us']:.1f} us", f"{record['median_us']:.1f} us"
        rows.append([record["name"], *times, f"{record['ratio_median']:.2f}x"])
    print(table(["call", "least", "median", f"/ {BASELINE}"], rows), flush=True)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
