# SPDX-License-Identifier: Apache-2.0
"""How far expected times of a traced step are from those of the compiled program.

The work: the train step of `plan_search.py` on 16 TPU v5e, 64 TPU v5p and 64 H100. Of the
candidates of a search those within four times of the fastest are taken evenly, as many for each
target, and compiled at screen effort until 30 have both times; a target that has fewer leaves them
to the next. *Ratio* is the traced time over the compiled one; a *pair* is two layouts of one target
whose compiled times differ by over 5 %, in order if the traced ones are.

A target whose own compiler is not installed is compiled with the CPU estimate.

    python benchmarks/plan_depths.py --json depths.json
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import itertools
import statistics
import sys
from typing import Any

import plan_search
from _harness import Report, arguments, table

from shardax import plan

TARGETS = {"gpu:h100:8x8": 256, "tpu:v5e:4x4": 64, "tpu:v5p:4x4x4": 256}
QUICK = {"gpu:h100:1x8": 32}
SLOWEST = 4.0
CLEAR = 0.05
HEADERS = ("target", "layout", "traced, s", "compiled, s", "ratio")


def candidates(args: Any, target: str, count: int) -> list[plan.LayoutReport]:
    """Layouts within four times of the fastest as traced: ``count`` evenly, then the others."""
    axes = ("data", "model")
    traced = plan.search(plan_search.step, args, target, mesh_axes=axes, effort="trace", top=None)
    timed = [report for report in traced if report.outcome == "fits" and report.expected]
    least = timed[0].expected.seconds if timed and timed[0].expected else 0.0
    near = [r for r in timed if r.expected and r.expected.seconds <= SLOWEST * least]
    chosen = near[:: max(1, len(near) // count)][:count]
    return [*chosen, *(report for report in near if report not in chosen)]


def compare(report: plan.LayoutReport, args: Any, target: str) -> plan.LayoutReport:
    """The same layout, compiled."""
    layout = report.layout
    rules = {layout.name: layout.as_rules}
    compiled = plan.compare(
        plan_search.step, args, rules, layout.sizes, target, effort="screen", cache=None
    )
    return compiled.reports[0]


def pairs_in_order(times: list[tuple[float, float]]) -> tuple[int, int]:
    """Pairs of traced and compiled times in order, and all that differ clearly."""
    right = total = 0
    for (traced, compiled), (traced_2, compiled_2) in itertools.combinations(times, 2):
        if max(compiled, compiled_2) > (1 + CLEAR) * min(compiled, compiled_2):
            total += 1
            right += (traced - traced_2) * (compiled - compiled_2) > 0
    return right, total


def main() -> int:
    """Compile a sample of layouts for every target."""
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--count", type=int, default=30, help="layouts of all targets")
    options = parser.parse_args()
    report = Report("plan_depths", vars(options))
    if options.quick:
        options.targets, options.count = list(QUICK), 2
    if options.count < len(options.targets):
        parser.error(f"--count {options.count}: give at least one layout a target")
    rows: list[list[str]] = []
    right = total = 0
    ratios: list[float] = []
    for index, target in enumerate(options.targets):
        args = plan_search.inputs((TARGETS | QUICK)[target], quick=options.quick)
        count = (options.count - len(ratios)) // (len(options.targets) - index)
        times: list[tuple[float, float]] = []
        for traced in candidates(args, target, count):
            if len(times) == count:
                break
            compiled = compare(traced, args, target)
            if traced.expected is None or compiled.expected is None:
                rows.append([target, traced.layout.name, "-", compiled.outcome, "-"])
                continue
            pair = traced.expected.seconds, compiled.expected.seconds
            times.append(pair)
            ratios.append(pair[0] / pair[1])
            rows.append([target, traced.layout.name, *(f"{s:.3f}" for s in (*pair, ratios[-1]))])
            print(*rows[-1], flush=True)
            report.records.append(dict(zip(HEADERS, rows[-1], strict=True)))
        in_order, clear = pairs_in_order(times)
        right, total = right + in_order, total + clear
    print(table(HEADERS, rows))
    print(
        f"{len(ratios)} layouts: median ratio {statistics.median(ratios):.3f}, "
        f"{min(ratios):.2f} to {max(ratios):.2f}; {right} of {total} pairs in order"
    )
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
