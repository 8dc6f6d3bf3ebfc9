# SPDX-License-Identifier: Apache-2.0
"""CPU-seconds of each test, and its share of tracing, lowering and compiling.

A pytest plugin: ``make test-times`` runs the suite with ``-p tests.suite.times --times=FILE`` and
prints the CPU-seconds by room beside their budgets, the dearest tests, what JAX took of the wall
time, and the largest memory of a worker. CPU-seconds count all threads and the child processes that
a test waited for.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.suite import cpu_seconds
from tests.suite.rooms import budget_of, room_of

DEAREST = 30
STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}


class StageIntervals:
    """Intervals in which JAX traced, lowered or compiled, from its monitoring events."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float, str]] = []

    def record(self, event: str, duration: float, **_: Any) -> None:
        """Receives an event of ``jax.monitoring`` at its end."""
        if event in STAGES:
            now = time.monotonic()
            self.intervals.append((now - duration, now, STAGES[event]))

    def take(self) -> dict[str, float]:
        """Returns seconds by stage since the last call; nested stages count for the inner one."""
        seconds = dict.fromkeys(STAGES.values(), 0.0)
        covered: list[tuple[float, float]] = []
        # Events end innermost first, so what an interval adds is what no earlier one covers.
        for start, end, stage in self.intervals:
            inside = sum(min(end, e) - max(start, s) for s, e in covered if e > start and s < end)
            seconds[stage] += max(0.0, end - start - inside)
            covered = [(s, e) for s, e in covered if e <= start or s >= end]
            covered.append((start, end))
        self.intervals = []
        return seconds


class Times:
    """The plugin: measures where tests run, prints where they are reported."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.tests: dict[str, dict[str, float]] = {}
        self.outside_tests = 0.0
        self.peak_bytes = 0
        self.stages = StageIntervals()
        self.before: dict[str, float] = {}
        self.in_tests = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Notes the clocks before a test and its fixtures."""
        self.stages.take()
        self.before = {"cpu": cpu_seconds(), "wall": time.monotonic()}
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        """Puts the seconds of a test on its last report, which xdist carries over."""
        report = yield
        if call.when == "teardown":
            spent = {
                "cpu": cpu_seconds() - self.before["cpu"],
                "wall": time.monotonic() - self.before["wall"],
            }
            self.in_tests += spent["cpu"]
            report.spent = spent | self.stages.take()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collects the seconds, also those of other workers."""
        spent = getattr(report, "spent", None)
        if spent is not None:
            self.tests[report.nodeid] = spent

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Adds what a worker took outside of tests."""
        output = getattr(node, "workeroutput", {})
        self.outside_tests += output.get("outside_tests", 0.0)
        self.peak_bytes = max(self.peak_bytes, output.get("peak_bytes", 0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Sends a worker's seconds outside of tests: imports, collection, hooks."""
        outside = cpu_seconds() - self.in_tests
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["outside_tests"] = outside
            session.config.workeroutput["peak_bytes"] = peak_bytes()
        elif not session.config.getoption("numprocesses", None):
            self.outside_tests = outside
            self.peak_bytes = peak_bytes()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the tables and writes the file."""
        if not self.tests:
            return
        Path(self.file).write_text(
            json.dumps({"outside_tests": self.outside_tests, "tests": self.tests}, indent=0)
        )
        terminalreporter.write_line(table_of(self.tests, self.outside_tests))
        terminalreporter.write_line(f"Peak memory of a worker: {self.peak_bytes / 2**30:.1f} GiB.")


def peak_bytes() -> int:
    """Largest resident memory of this process; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table_of(tests: Mapping[str, Mapping[str, float]], outside_tests: float) -> str:
    """Returns the tables as text: by room, by stage, the dearest tests."""
    by_room: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for nodeid, spent in tests.items():
        by_room[room_of(nodeid)].append(spent)

    lines = [
        "",
        "| room | tests | CPU-seconds | budget | s of JAX's stages |",
        "| --- | --: | --: | --: | --: |",
    ]
    seconds = {
        room: sum(spent["cpu"] for spent in all_spent) for room, all_spent in by_room.items()
    }
    for room in sorted(by_room, key=lambda room: -seconds[room]):
        stages = sum(spent[stage] for spent in by_room[room] for stage in STAGES.values())
        budget = budget_of(room) or ""
        count = len(by_room[room])
        lines.append(f"| {room} | {count:,} | {seconds[room]:,.0f} | {budget} | {stages:,.0f} |")
    lines.append(f"| imports, collection, reports | | {outside_tests:,.0f} | | |")
    total = sum(seconds.values()) + outside_tests
    lines.append(f"| all | {len(tests):,} | {total:,.0f} | | |")

    wall = sum(spent["wall"] for spent in tests.values())
    shares = ", ".join(
        f"{stage} {100 * sum(spent[stage] for spent in tests.values()) / wall:.0f} %"
        for stage in STAGES.values()
    )
    lines += ["", f"Of {wall:,.0f} s of wall time in tests: {shares}.", ""]
    lines += ["| dearest tests | CPU-seconds |", "| --- | --: |"]
    for nodeid, spent in sorted(tests.items(), key=lambda item: -item[1]["cpu"])[:DEAREST]:
        lines.append(f"| {nodeid} | {spent['cpu']:.1f} |")
    return "\n".join(lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that names the file."""
    parser.addoption("--times", metavar="FILE", help="measure each test; write FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin where it was asked for, in workers too."""
    file = config.getoption("--times")
    if file:
        import jax  # after conftest.py has set the flags

        plugin = Times(file)
        config.pluginmanager.register(plugin, "suite-times")
        jax.monitoring.register_event_duration_secs_listener(plugin.stages.record)
