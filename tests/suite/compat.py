# SPDX-License-Identifier: Apache-2.0
"""Choice of the tests that CI repeats on the newest Python and JAX: ``make compat``.

One test a behaviour: the cheapest tests that together run every line that any test of the packages
below runs, found greedily by lines for each CPU-second. ``compat.txt`` has the result; the root
``conftest.py`` gives these tests the marker ``compat``.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.house.sources import ROOT

FILE = Path(__file__).with_name("compat.txt")
# What depends on JAX's behaviour.
PACKAGES = ("_core", "_transforms", "_select", "partition", "nn", "train", "models", "random")
FOLDERS = (
    "tests/core/objects/",
    "tests/core/transforms/",
    "tests/core/selection/",
    "tests/core/partition/",
    "tests/training/train/",
)
ALWAYS = (
    "tests/core/objects/test_versions.py",
    "tests/training/distributed/test_start.py",
    "README.md",
)
LEAST_SECONDS = 0.05  # of a test, with what pytest takes for it


def read() -> frozenset[str]:
    """Returns the chosen tests and files."""
    return frozenset(FILE.read_text(encoding="utf-8").split("\n")) - {""}


def choose(lines: Mapping[str, set[int]], seconds: Mapping[str, float]) -> list[str]:
    """Returns tests that together run all lines, the best value for a second first."""
    missing = set().union(*lines.values())
    chosen: list[str] = []

    def value(test: str) -> float:
        return -len(lines[test] & missing) / max(seconds[test], LEAST_SECONDS)

    waiting = [(value(test), test) for test in lines]
    heapq.heapify(waiting)
    while missing:
        _, test = heapq.heappop(waiting)
        now = value(test)  # what it adds sinks as others are chosen
        if waiting and now > waiting[0][0]:
            heapq.heappush(waiting, (now, test))
            continue
        chosen.append(test)
        missing -= lines[test]
    return sorted(chosen)


def main() -> None:
    """Chooses by the last ``make coverage`` and writes the file."""
    from coverage import CoverageData

    data = CoverageData(str(ROOT / ".coverage"))
    data.read()
    spent = json.loads((ROOT / "times.json").read_text(encoding="utf-8"))["tests"]
    seconds = {test: times["cpu"] for test, times in spent.items()}
    lines: dict[str, set[int]] = defaultdict(set)
    number = 0
    for file in sorted(data.measured_files()):
        if file.rpartition("/shardax/")[2].split("/")[0] not in PACKAGES:
            continue
        for contexts in data.contexts_by_lineno(file).values():
            number += 1
            for context in contexts:
                test = context.rpartition("|")[0]
                if test in seconds and test.startswith(FOLDERS):
                    lines[test].add(number)
    chosen = {test for test in choose(lines, seconds) if not test.startswith(ALWAYS)}
    FILE.write_text("\n".join(sorted(chosen | set(ALWAYS))) + "\n", encoding="utf-8")
    total = sum(seconds[test] for test in chosen if test in seconds)
    print(f"{len(chosen)} tests of {len(seconds)}, {total:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
