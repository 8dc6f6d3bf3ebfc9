# SPDX-License-Identifier: Apache-2.0
"""What operations by name cost, one by one and compiled.

Opponents: plain arrays aligned by hand (baseline), `shardax.named`, `penzai.pz.nx`, and `coordax`
where it is installed. The arrays are small, so that the time is that of Python, which arrays of any
size pay. Compiled, the programs are compared as text: names are gone before XLA sees anything.

Bounds on the median over repeats: an addition by name takes at most 15 of the plain one; a compiled
call of a function of named arrays at most 3; the compiled program is the plain one.

    python benchmarks/named.py --json named.json
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _harness import Opponent, Report, arguments, compare, measure, table

import shardax as sx

BOUND_ADD = 15.0
BOUND_CALL = 3.0
BASELINE = "plain arrays"
SHAPE = {"batch": 8, "embed": 16}


class Arrays(NamedTuple):
    """What an opponent works with.

    Attributes:
        x: Axes batch and embed.
        other: The same axes, stored the other way round.
        bias: Axis embed.
        works: What it does, by name; each takes no arguments.
    """

    x: Any
    other: Any
    bias: Any
    works: dict[str, Callable[[], Any]]


def numbers() -> tuple[jax.Array, jax.Array, jax.Array]:
    """The arrays without names."""
    x = jnp.arange(128.0).reshape(8, 16)
    return x, jnp.asarray(x.T), jnp.arange(16.0)


def with_names(wrap: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """The arrays with the names that an opponent's function gives them."""
    x, other, bias = numbers()
    return wrap(x, "batch", "embed"), wrap(other, "embed", "batch"), wrap(bias, "embed")


def sums(x: Any, other: Any, bias: Any) -> dict[str, Callable[[], Any]]:
    """The additions, where nothing is needed to get at the result."""
    return {
        "add": lambda: x + x,
        "add, stored otherwise": lambda: x + other,
        "add a bias": lambda: x + bias,
    }


def affine(x: Any, bias: Any) -> Any:
    """The function that is compiled."""
    return x * x + bias


def plain() -> Arrays:
    """Arrays aligned by hand."""
    x, other, bias = numbers()
    compiled = jax.jit(lambda x, bias: affine(x, bias[None]))
    return Arrays(
        x,
        other,
        bias,
        {
            "add": lambda: jnp.add(x, x),
            "add, stored otherwise": lambda: jnp.add(x, other.T),
            "add a bias": lambda: jnp.add(x, bias[None]),
            "sum": lambda: jnp.sum(x, axis=1),
            "one position": lambda: x[3],
            "a function of vectors": lambda: jax.vmap(jnp.cumsum)(x),
            "compiled call": lambda: compiled(x, bias),
        },
    )


def shardax() -> Arrays:
    """`shardax.named`."""
    named = sx.named
    x, other, bias = with_names(named.wrap)
    compiled = jax.jit(affine)
    return Arrays(
        x,
        other,
        bias,
        {
            **sums(x, other, bias),
            "sum": lambda: x.sum("embed"),
            "one position": lambda: x[{"batch": 3}],
            "a function of vectors": lambda: named.nmap(jnp.cumsum)(x.untag("embed")).tag("embed"),
            "compiled call": lambda: compiled(x, bias),
        },
    )


def penzai() -> Arrays:
    """`penzai.pz.nx`."""
    from penzai import pz

    x, other, bias = with_names(pz.nx.wrap)
    compiled = jax.jit(affine)
    return Arrays(
        x,
        other,
        bias,
        {
            "add": lambda: (x + x).unwrap("batch", "embed"),
            "add, stored otherwise": lambda: (x + other).unwrap("batch", "embed"),
            "add a bias": lambda: (x + bias).unwrap("batch", "embed"),
            "sum": lambda: x.untag("embed").sum().unwrap("batch"),
            "one position": lambda: x[{"batch": 3}].unwrap("embed"),
            "a function of vectors": lambda: pz.nx.nmap(jnp.cumsum)(x.untag("embed")).tag("embed"),
            "compiled call": lambda: compiled(x, bias),
        },
    )


def coordax() -> Arrays:
    """`coordax`, which names dimensions of fields."""
    import coordax as cx

    x, other, bias = with_names(cx.field)
    compiled = jax.jit(affine)
    return Arrays(
        x,
        other,
        bias,
        {
            **sums(x, other, bias),
            "sum": lambda: cx.cmap(jnp.sum)(x.untag("embed")),
            "a function of vectors": lambda: cx.cmap(jnp.cumsum)(x.untag("embed")).tag("embed"),
            "compiled call": lambda: compiled(x, bias),
        },
    )


MAKERS = {BASELINE: plain, "shardax.named": shardax, "penzai": penzai, "coordax": coordax}


def repeated(work: Callable[[], Any]) -> Callable[[int], Any]:
    """Makes the same call again and again; returns what the last one gave."""

    def run(calls: int) -> Any:
        for _ in range(calls - 1):
            work()
        return jax.tree.leaves(work())

    return run


def program(function: Callable[..., Any], *args: Any) -> str:
    """The compiled program as text, without where in the sources it came from."""
    text = jax.jit(function).lower(*args).compile().as_text() or ""
    body = re.sub(r", metadata=\{[^}]*\}|HloModule [^\n]*", "", text)
    return re.split(r"\n(?:FileNames|StackFrames)", body)[0].strip()


def bound_failures(record: dict[str, Any]) -> list[str]:
    """Which bounds one record breaks, as sentences."""
    bounds = {"add": BOUND_ADD, "compiled call": BOUND_CALL}
    bound = bounds.get(record["work"])
    if record["name"] != "shardax.named" or bound is None or record["ratio_median"] <= bound:
        return []
    return [f"{record['work']}: {record['ratio_median']:.1f} of plain arrays, at most {bound}"]


def main() -> int:
    """Measure each operation, compare the programs, and check the bounds."""
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--opponents", nargs="*", default=list(MAKERS))
    options = parser.parse_args()
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    block = 0.002 if options.quick else 0.03
    chosen = dict.fromkeys([BASELINE, *options.opponents])
    if importlib.util.find_spec("coordax") is None:
        chosen.pop("coordax", None)
    arrays = {name: MAKERS[name]() for name in chosen}
    report = Report("named", {"repeats": repeats, "shape": SHAPE})
    rows = []
    for work in arrays[BASELINE].works:
        opponents = [
            Opponent(name, repeated(each.works[work]))
            for name, each in arrays.items()
            if work in each.works
        ]
        samples = measure(opponents, repeats=repeats, block_seconds=block)
        for comparison in compare(samples, BASELINE).values():
            record = {"work": work} | comparison.record()
            report.records.append(record)
            report.failures += [] if options.quick else bound_failures(record)
            times = f"{record['min_us']:.1f} us", f"{record['median_us']:.1f} us"
            rows.append([work, record["name"], *times, f"{record['ratio_median']:.1f}x"])
    print("\n### Operations by name\n")
    print(table(["work", "opponent", "least time", "median time", "median ratio"], rows))
    same = program(affine, arrays["shardax.named"].x, arrays["shardax.named"].bias) == program(
        lambda x, bias: affine(x, jax.lax.expand_dims(bias, (0,))),
        arrays[BASELINE].x,
        arrays[BASELINE].bias,
    )
    print(f"\nThe compiled program is {'' if same else 'not '}that of plain arrays.")
    report.records.append({"work": "program", "name": "shardax.named", "same": same})
    if not same:
        report.failures.append("the compiled program is not that of plain arrays")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
