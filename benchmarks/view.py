# SPDX-License-Identifier: Apache-2.0
"""How long a page of a large model takes.

The work: an HTML page of a tower of linear layers. Opponents, all of them drawn by treescope:

- `plain dicts`: the same tree as dicts, with the text of each Variable in its place; the baseline.
- `shardax, lazy`: the layers as they are built; Variables without values.
- `shardax`: the layers with values, of which the first hundred are drawn.
- `nnx`: the same layers of Flax NNX, as NNX shows them.

Bounds on medians over repeats: shardax, which draws colours, buttons and pictures, takes no more
than plain dicts; and a Variable of the largest model takes at most 1.5 of one of the smallest.
Timed in processor time, since other processes on the machine do not add to it.

    python benchmarks/view.py --json view.json
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from _harness import Opponent, Report, Samples, arguments, compare, measure, table

BASELINE = "plain dicts"
BOUND_DICTS = 1.0
BOUND_GROWTH = 1.5
WIDTH_IN, WIDTH_OUT = 4, 8

Page = Callable[[], str]


def shardax_page(variables: int, *, lazy: bool) -> Page:
    """A page of shardax layers."""
    import shardax as sx

    layers = [sx.nn.Linear(WIDTH_IN, WIDTH_OUT, rngs=sx.Rngs(0)) for _ in range(variables // 2)]
    tower = sx.nn.Sequential(*layers)
    if not lazy:
        sx.state(tower)  # reads every value
    return lambda: sx.view.to_html(tower)


def dicts_page(variables: int) -> Page:
    """A page of dicts that say the same."""
    import treescope

    layer = {
        "kernel": f"Param(float32[{WIDTH_IN}, {WIDTH_OUT}], axes=('in', 'out'))",
        "bias": f"Param(float32[{WIDTH_OUT}], axes=('out',))",
        "in_features": WIDTH_IN,
        "out_features": WIDTH_OUT,
        "dtype": None,
    }
    tower = {"layers": [dict(layer) for _ in range(variables // 2)]}
    return lambda: treescope.render_to_html(tower)


def nnx_page(variables: int) -> Page:
    """A page of NNX layers."""
    import treescope
    from flax import nnx

    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(WIDTH_IN, WIDTH_OUT, rngs=rngs) for _ in range(variables // 2)]
    tower = nnx.Sequential(*layers)
    return lambda: treescope.render_to_html(tower)


MAKERS: dict[str, Callable[[int], Page]] = {
    BASELINE: dicts_page,
    "shardax, lazy": lambda variables: shardax_page(variables, lazy=True),
    "shardax": lambda variables: shardax_page(variables, lazy=False),
    "nnx": nnx_page,
}


def repeated(page: Page) -> Callable[[int], Any]:
    """Makes the page again and again; there is nothing to wait for."""

    def run(calls: int) -> Any:
        for _ in range(calls):
            page()
        return ()

    return run


def bound_failures(samples: dict[int, list[Samples]]) -> list[str]:
    """Which bounds the samples of each number of Variables break, as sentences."""
    failures = []
    least, most = min(samples), max(samples)
    ratios = compare(samples[most], BASELINE)
    for small, large in zip(samples[least], samples[most], strict=True):
        if not large.name.startswith("shardax"):
            continue
        ratio = statistics.median(ratios[large.name].ratios)
        if ratio > BOUND_DICTS:
            failures.append(f"{large.name}: {ratio:.2f} of {BASELINE}, at most {BOUND_DICTS}")
        growth = (large.median / most) / (small.median / least)
        if growth > BOUND_GROWTH:
            failures.append(
                f"{large.name}: a Variable among {most} takes {growth:.2f} of one among {least}, "
                f"at most {BOUND_GROWTH}"
            )
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Make pages of models of each size, and check the bounds."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1000, 10_000])
    parser.add_argument("--opponents", nargs="*", default=list(MAKERS))
    options = parser.parse_args(argv)
    sizes = [20] if options.quick else options.sizes
    repeats = 1 if options.quick else options.repeats
    names = list(dict.fromkeys([BASELINE, *options.opponents]))
    report = Report("view", {"repeats": repeats, "sizes": sizes, "opponents": names})
    samples, rows = {}, []
    for size in sizes:
        opponents = [Opponent(name, repeated(MAKERS[name](size))) for name in names]
        samples[size] = measure(
            opponents, repeats=repeats, calls=1, warm_up=False, clock=time.process_time
        )
        for comparison in compare(samples[size], BASELINE).values():
            record = {"variables": size} | comparison.record()
            report.records.append(record)
            seconds, ratio = record["median_us"] / 1e6, record["ratio_median"]
            rows.append([record["name"], size, f"{seconds:.2f} s", f"{ratio:.2f}x"])
    print("\n### A page of a model\n")
    print(table(["opponent", "variables", "median time", "median ratio"], rows))
    report.failures += [] if options.quick else bound_failures(samples)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
