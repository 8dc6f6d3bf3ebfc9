# SPDX-License-Identifier: Apache-2.0
"""What every benchmark here shares: how time is taken, compared and written down.

Words:

- *opponent*: one way of doing the work, as a function `run(calls)` that makes that many calls and
  returns arrays of the last call, for the harness to wait on.
- *block*: the calls timed by one pair of clock readings, the wait for the last result included. A
  single call to a compiled function may return before the device has done its work; a block that
  ends with a wait cannot hide work in the queue, and divides the cost of the clock and of the wait
  by its number of calls.
- *repeat*: one block of each opponent in turn (A B C, then B C A, ...). Whatever slows the machine
  for a while slows neighbours alike, so a ratio is formed inside each repeat and only then reduced
  over repeats.

Reported: the minimum and the median over repeats, of the time a call took and of its ratio to the
baseline. The minimum is the cost with the least disturbance; the median is what a bound is held
against. Python's cyclic garbage collector is off inside a block and run between blocks.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "equinox", "penzai", "shardax")


@dataclass(frozen=True)
class Opponent:
    """One way of doing the work.

    Attributes:
        name: What tables and JSON call it.
        run: Makes the given number of calls and returns what to wait for (any pytree of arrays).
    """

    name: str
    run: Callable[[int], Any]


@dataclass(frozen=True)
class Samples:
    """The time per call of one opponent, in seconds, one entry a repeat.

    Attributes:
        name: The opponent's name.
        seconds: Seconds per call, in the order of the repeats.
        calls: Calls in one block.
    """

    name: str
    seconds: tuple[float, ...]
    calls: int = 1

    @property
    def minimum(self) -> float:
        """The least time per call over the repeats, in seconds."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The median time per call over the repeats, in seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """One opponent against the baseline; ratios and differences are formed inside each repeat.

    Attributes:
        samples: The opponent's own times.
        ratios: Its time over the baseline's, one entry a repeat.
        extra_seconds: Its time less the baseline's, one entry a repeat.
    """

    samples: Samples
    ratios: tuple[float, ...]
    extra_seconds: tuple[float, ...]

    def record(self) -> dict[str, Any]:
        """The figures as a JSON-ready mapping; times in microseconds."""
        return {
            "name": self.samples.name,
            "calls_per_block": self.samples.calls,
            "repeats": len(self.samples.seconds),
            "min_us": self.samples.minimum * 1e6,
            "median_us": self.samples.median * 1e6,
            "ratio_min": min(self.ratios),
            "ratio_median": statistics.median(self.ratios),
            "extra_median_us": statistics.median(self.extra_seconds) * 1e6,
        }


@dataclass
class Report:
    """What a benchmark found: records, the bounds it holds them against, and the failures.

    Attributes:
        benchmark: The program's name.
        settings: The options it ran with.
        records: One mapping per measured thing.
        failures: One sentence per bound that does not hold.
    """

    benchmark: str
    settings: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    load_before: tuple[float, ...] = field(default_factory=lambda: load_average())

    def finish(self, options: argparse.Namespace) -> int:
        """Print the failures, write the JSON asked for by `--json`, and return the exit status.

        The status is 1 when `--check` was given and a bound does not hold.
        """
        for failure in self.failures:
            print(f"OUT OF BOUNDS: {failure}")
        if options.json is not None:
            payload = {
                "benchmark": self.benchmark,
                "settings": self.settings,
                "machine": machine(),
                "load_average": {"before": self.load_before, "after": load_average()},
                "records": self.records,
                "failures": self.failures,
            }
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(payload, indent=1, default=str) + "\n")
            print(f"wrote {options.json}")
        return 1 if options.check and self.failures else 0


def time_block(
    run: Callable[[int], Any], calls: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of `clock` for `calls` calls, the wait for the last one's results included."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        jax.block_until_ready(run(calls))
        return clock() - start
    finally:
        if was_enabled:
            gc.enable()


def calls_for(run: Callable[[int], Any], block_seconds: float, most: int = 100_000) -> int:
    """How many calls make a block of about `block_seconds`, found by doubling; at least one."""
    calls = 1
    while calls < most:
        elapsed = time_block(run, calls)
        if elapsed >= block_seconds / 2:
            return max(1, min(most, round(calls * block_seconds / elapsed)))
        calls *= 2
    return most


def measure(
    opponents: Sequence[Opponent],
    *,
    repeats: int,
    block_seconds: float = 0.03,
    calls: int | None = None,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Samples]:
    """Time the opponents in turn, each repeat starting with another one.

    Args:
        opponents: Who competes; the order only decides who begins.
        repeats: How many blocks of each to time.
        block_seconds: About how long a block lasts; sets the number of calls in it.
        calls: A fixed number of calls a block instead.
        warm_up: Whether to make two untimed calls first (compile, then the first steady call).
        clock: Seconds since some moment. `time.process_time` suits work of Python alone: it leaves
            out the time that other processes took the core for.

    Returns:
        One `Samples` per opponent, in the order given.
    """
    if warm_up:
        for opponent in opponents:
            jax.block_until_ready(opponent.run(1))
            jax.block_until_ready(opponent.run(1))
    counts = [calls or calls_for(opponent.run, block_seconds) for opponent in opponents]
    seconds: list[list[float]] = [[] for _ in opponents]
    for repeat in range(repeats):
        for turn in range(len(opponents)):
            index = (repeat + turn) % len(opponents)
            elapsed = time_block(opponents[index].run, counts[index], clock)
            seconds[index].append(elapsed / counts[index])
    return [
        Samples(opponent.name, tuple(times), count)
        for opponent, times, count in zip(opponents, seconds, counts, strict=True)
    ]


def compare(samples: Iterable[Samples], baseline: str) -> dict[str, Comparison]:
    """Each opponent against the one called `baseline`, repeat by repeat."""
    by_name = {one.name: one for one in samples}
    base = by_name[baseline].seconds
    return {
        name: Comparison(
            samples=one,
            ratios=tuple(mine / its for mine, its in zip(one.seconds, base, strict=True)),
            extra_seconds=tuple(mine - its for mine, its in zip(one.seconds, base, strict=True)),
        )
        for name, one in by_name.items()
    }


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are aligned right."""
    cells = [list(map(str, headers)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def machine() -> dict[str, Any]:
    """What the figures were taken on: processor, versions, devices, commit."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = jax.devices()
    affinity = hasattr(os, "sched_getaffinity")
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if affinity else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "commit": _commit(),
        "command": sys.argv,
    }


def load_average() -> tuple[float, ...]:
    """The system's load average: was the machine quiet? Empty where unknown."""
    return os.getloadavg() if hasattr(os, "getloadavg") else ()


def arguments(docstring: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes."""
    summary = (docstring or "").strip().splitlines()
    parser = argparse.ArgumentParser(description=summary[0] if summary else None)
    parser.add_argument("--json", type=Path, default=None, help="write figures and machine here")
    parser.add_argument("--repeats", type=int, default=repeats, help="blocks per opponent")
    parser.add_argument("--quick", action="store_true", help="small and few: does it run")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bound does not hold")
    return parser


def _processor_name() -> str:
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checked-out commit of this repository, with `+` when files differ from it."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")
