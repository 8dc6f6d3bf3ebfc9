# SPDX-License-Identifier: Apache-2.0
"""Every form of parallelism beside the same schedule written by hand in JAX.

Each case is a step on 8 virtual CPU devices, with shardax and with raw `jax.jit`, `jax.shard_map`
and collectives: pipelines (GPipe, circular), ring attention, experts by all-to-all, ZeRO 2 and
hierarchical sums of gradients, and pipelines of one executable a stage. Virtual devices share the
cores of the machine, so times say what the form costs beside the work, not how it scales.

Bound: 1.05 of hand-written JAX, by the minimum or the median of the ratios (neighbours on the
machine make single steps of 8 threads on few cores unsteady).

    python benchmarks/parallel.py --json parallel.json
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import shardax as sx

sx.configure(devices=8)

from _harness import Opponent, Report, arguments, compare, measure, table  # noqa: E402

BOUND = 1.05
MODULES = ("_parallel_layers", "_parallel_experts", "_parallel_zero", "_parallel_stages")
HEADERS = ("case", "shardax, ms", "by hand, ms", "ratio, least", "ratio, median")


def cases(
    chosen: list[str], *, quick: bool
) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Name, by rule, by hand; quickly, every form at a small size and on one mesh."""
    for name in chosen:
        module = importlib.import_module(name)
        if quick:
            vars(module).update(module.QUICK)
        yield from module.cases(quick=quick)


def repeated(run: Callable[[], Any]) -> Callable[[int], Any]:
    """A function of the number of calls."""

    def calls(count: int) -> Any:
        result = None
        for _ in range(count):
            result = run()
        return result

    return calls


def main() -> int:
    """Times every case."""
    parser = arguments(__doc__, repeats=9)
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=list(MODULES))
    options = parser.parse_args()
    report = Report("parallel", vars(options))
    rows = []
    often: dict[str, Any] = {"repeats": options.repeats, "block_seconds": 0.5}
    how: dict[str, Any] = {"repeats": 1, "calls": 1} if options.quick else often
    for name, ours, by_hand in cases(options.modules, quick=options.quick):
        opponents = [Opponent("by hand", repeated(by_hand)), Opponent("shardax", repeated(ours))]
        found = compare(measure(opponents, **how), "by hand")
        record = found["shardax"].record() | {"name": name}
        hand = found["by hand"].record()
        report.records.append(record | {"by_hand_median_us": hand["median_us"]})
        least, middle = record["ratio_min"], record["ratio_median"]
        if min(least, middle) > BOUND and not options.quick:
            report.failures.append(f"{name}: {middle:.2f} of hand-written JAX, at most {BOUND}")
        times = [f"{each['median_us'] / 1e3:.1f}" for each in (record, hand)]
        rows.append([name, *times, f"{least:.2f}", f"{middle:.2f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(HEADERS, rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
