# SPDX-License-Identifier: Apache-2.0
"""What each form of a choice and of a loop costs: the table of the guide to control flow.

Three kinds of work.

- *One choice*: `heavy(x)`, 8 products of 128 by 128 matrices, or `x` itself, by one flag. Timed
  with the light side chosen and with the heavy one; *Python's if* decides before the call of a
  compiled `heavy`. *In lanes* is a `vmap` over 8, in one of which the heavy side is chosen.
- *A choice for each element*: the square root where a number is positive, 0 elsewhere, of 100,000
  numbers. Timed with the value and the gradient, and counted: the NaNs in the gradient.
- *A loop*: 200 steps of `x <- tanh(W x + b)` on 64 numbers. Timed: tracing and compiling, a call,
  and a call of the gradient; *not* where reverse mode is refused.

There are no opponents but the forms themselves, and no bounds. Times are
medians of processor time, which other work on the machine disturbs less.

    python benchmarks/control_flow.py --json control_flow.json
"""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Opponent, Report, arguments, measure, table

import shardax as sx

WIDTH, DEPTH, LANES = 128, 8, 8
ELEMENTS = 100_000
STEPS, SIZE = 200, 64
NONE = "not"
Function = Callable[..., Any]

# --- one choice -----------------------------------------------------------------------------------


def heavy(x: Any) -> Any:
    """The side that costs something."""
    for _ in range(DEPTH):
        x = jnp.tanh(x @ x / WIDTH)
    return x


def light(x: Any) -> Any:
    """The side that costs nothing to speak of."""
    return x + 1


def choices() -> dict[str, Function]:
    """Functions of (flag, x)."""
    compiled = {True: jax.jit(heavy), False: jax.jit(light)}
    cond = sx.jit(lambda flag, x: sx.cond(flag, heavy, light, x))
    switch = sx.jit(lambda flag, x: sx.switch(jnp.int32(flag), [light, heavy], x))
    where = sx.jit(lambda flag, x: jnp.where(flag, heavy(x), light(x)))
    lanes = sx.jit(sx.vmap(lambda flag, x: sx.cond(flag, heavy, light, x), in_axes=(0, None)))
    first = jnp.arange(LANES) == 0
    return {
        "Python's if": lambda flag, x: compiled[bool(flag)](x),
        "sx.cond": cond,
        "sx.switch": switch,
        "jnp.where": where,
        f"sx.cond in {LANES} lanes": lambda flag, x: lanes(first & flag, x),
    }


# --- a choice for each element --------------------------------------------------------------------


def element_choices() -> dict[str, Function]:
    """Functions of a vector; those of JAX may be differentiated."""

    def one(x: Any) -> Any:
        return jax.lax.cond(x > 0, jnp.sqrt, jnp.zeros_like, x)

    return {
        "Python's if": lambda x: [math.sqrt(v) if v > 0 else 0.0 for v in x.tolist()],
        "jnp.where": lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
        "sx.safe_where": lambda x: sx.safe_where(x > 0, jnp.sqrt, x, otherwise=0.0, stand_in=1.0),
        "vmap of cond": jax.vmap(one),
    }


# --- loops ----------------------------------------------------------------------------------------


def advance(weight: Any, x: Any) -> Any:
    """One step."""
    return jnp.tanh(weight @ x + 0.1)


def in_python(weight: Any, x: Any) -> Any:
    """The original: a loop in Python."""
    for _ in range(STEPS):
        x = advance(weight, x)
    return x


def loops() -> dict[str, Function]:
    """Functions of (weight, x)."""

    def fori(weight: Any, x: Any) -> Any:
        return sx.fori_loop(0, STEPS, lambda _, x: advance(weight, x), x)

    def scan(weight: Any, x: Any) -> Any:
        step = lambda x, _: (advance(weight, x), None)  # noqa: E731
        return sx.scan(step, length=STEPS)(x, None)[0]

    def while_(weight: Any, x: Any) -> Any:
        step = lambda carry: (advance(weight, carry[0]), carry[1] + 1)  # noqa: E731
        return sx.while_loop(lambda carry: carry[1] < STEPS, step, (x, 0))[0]

    def bounded(weight: Any, x: Any, **options: Any) -> Any:
        step = lambda carry: (advance(weight, carry[0]), carry[1] + 1)  # noqa: E731
        goes_on = lambda carry: carry[1] < STEPS  # noqa: E731
        return sx.bounded_while_loop(goes_on, step, (x, 0), max_steps=2 * STEPS, **options)

    return {
        "Python's for, compiled": in_python,
        "sx.fori_loop": fori,
        "sx.scan": scan,
        "sx.while_loop": while_,
        "sx.bounded_while_loop": lambda w, x: bounded(w, x).final[0],
        "the same with history": lambda w, x: bounded(w, x, history=lambda c: c[0]).history,
        'the same, "store"': lambda w, x: bounded(w, x, differentiable="store").final[0],
        'the same, "recompute"': lambda w, x: bounded(w, x, differentiable="recompute").final[0],
    }


REVERSIBLE = frozenset({*list(loops())[:3], *list(loops())[-2:]})
"""Loops with a reverse-mode derivative."""

# --- measuring ------------------------------------------------------------------------------------


def opponent(name: str, function: Function, *given: Any) -> Opponent:
    """An opponent that calls a function with the same arguments again and again."""

    def run(calls: int) -> Any:
        result = None
        for _ in range(calls):
            result = function(*given)
        return result

    return Opponent(name, run)


def medians(functions: dict[str, Function], given: tuple[Any, ...], repeats: int) -> dict[str, Any]:
    """The median processor time of a call of each, in microseconds."""
    samples = measure(
        [opponent(name, function, *given) for name, function in functions.items()],
        repeats=repeats,
        block_seconds=0.01 if repeats > 2 else 0.002,
        clock=time.process_time,
    )
    return {one.name: one.median * 1e6 for one in samples}


def compile_seconds(function: Function, given: tuple[Any, ...], repeats: int) -> float:
    """The least processor time to trace and compile a function anew, in seconds."""
    found = []
    for _ in range(repeats):
        fresh = jax.jit(lambda *args: function(*args))
        start = time.process_time()
        fresh.lower(*given).compile()
        found.append(time.process_time() - start)
    return min(found)


def us(value: float | None) -> str:
    """A time in a table."""
    return NONE if value is None else f"{value:,.0f} us"


def measure_choices(report: Report, repeats: int) -> None:
    """One choice, with either side chosen."""
    x = jnp.eye(WIDTH)
    found = [medians(choices(), (jnp.bool_(flag), x), repeats) for flag in (False, True)]
    rows = [[name, us(found[0][name]), us(found[1][name])] for name in found[0]]
    report.records += [
        {"work": "one choice", "name": name, "light_us": found[0][name], "heavy_us": found[1][name]}
        for name in found[0]
    ]
    print("\n### one choice\n")
    print(table(["form", "light side chosen", "heavy side chosen"], rows), flush=True)


def measure_elements(report: Report, repeats: int) -> None:
    """A choice for each element."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=ELEMENTS).clip(0), jnp.float32)
    forms = element_choices()
    original = "Python's if"
    compiled = {name: jax.jit(f) for name, f in forms.items() if name != original}
    values = medians({original: forms[original], **compiled}, (x,), repeats)
    slopes = {name: jax.jit(jax.grad(lambda x, f=f: f(x).sum())) for name, f in compiled.items()}
    times = medians(slopes, (x,), repeats)
    rows = []
    for name, value in values.items():
        nans = int(jnp.isnan(slopes[name](x)).sum()) if name in slopes else None
        record = {"name": name, "value_us": value, "gradient_us": times.get(name), "nans": nans}
        report.records.append({"work": "each element", **record})
        shown = NONE if nans is None else f"{nans:,}"
        rows.append([name, us(value), us(times.get(name)), shown])
    print("\n### a choice for each element\n")
    print(table(["form", "value", "gradient", "NaNs in it"], rows), flush=True)


def measure_loops(report: Report, repeats: int) -> None:
    """A loop, compiled in each form."""
    weight = jax.random.normal(jax.random.key(0), (SIZE, SIZE)) / SIZE**0.5
    given = weight, jnp.ones(SIZE)
    forms = loops()
    compiled = {name: jax.jit(f) for name, f in forms.items()}
    calls = medians({"Python's for": in_python, **compiled}, given, repeats)
    slopes = {
        name: jax.jit(jax.grad(lambda w, x, f=f: f(w, x).sum()))
        for name, f in forms.items()
        if name in REVERSIBLE
    }
    times = medians(slopes, given, repeats)
    rows, anew = [], min(repeats - 1, 2)
    for name, call in calls.items():
        seconds = compile_seconds(forms[name], given, anew) if name in forms else None
        record = {"compile_s": seconds, "call_us": call, "gradient_us": times.get(name)}
        report.records.append({"work": "loop", "name": name, **record})
        compiling = NONE if seconds is None else f"{seconds * 1e3:,.0f} ms"
        rows.append([name, compiling, us(call), us(times.get(name))])
    print(f"\n### a loop of {STEPS} steps\n")
    print(table(["form", "compiling", "call", "gradient"], rows), flush=True)


def main() -> int:
    """Measure and print the three tables."""
    options = arguments(__doc__, repeats=15).parse_args()
    repeats = 2 if options.quick else options.repeats
    report = Report("control_flow", {"width": WIDTH, "elements": ELEMENTS, "steps": STEPS})
    measure_choices(report, repeats)
    measure_elements(report, repeats)
    measure_loops(report, repeats)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
