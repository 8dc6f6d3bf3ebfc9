# SPDX-License-Identifier: Apache-2.0
"""Lines and branches that the tests run, by package: ``make coverage`` prints it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.house.sources import ROOT

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def by_package(report: dict[str, Any]) -> dict[str, Counter[str]]:
    """Adds up the counts of a JSON report of coverage.py by package of shardax."""
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for file, counts in report["files"].items():
        parts = Path(file).as_posix().rpartition("src/shardax/")[2].split("/")
        for package in (parts[0] if len(parts) > 1 else "(top)", "all"):
            packages[package].update({name: counts["summary"][name] for name in COUNTS})
    return dict(sorted(packages.items()))


def table_of(packages: dict[str, Counter[str]]) -> Iterator[str]:
    """Yields the lines of the table, in percent and in numbers of what no test runs."""
    yield "| package | lines, % | branches, % | lines not run | branches not run |"
    yield "| --- | --: | --: | --: | --: |"
    for package, counts in packages.items():
        lines, run_lines, branches, run_branches = (counts[name] for name in COUNTS)
        yield (
            f"| {package} | {100 * run_lines / lines:.1f} "
            f"| {100 * run_branches / max(1, branches):.1f} "
            f"| {lines - run_lines} | {branches - run_branches} |"
        )


def main(data_file: str = ".coverage") -> None:
    """Prints the table of a coverage file."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "coverage.json"
        command = [sys.executable, "-m", "coverage", "json", "-q", "--data-file", data_file]
        subprocess.run([*command, "-o", out], cwd=ROOT, check=True)
        report = json.loads(out.read_text(encoding="utf-8"))
    print("\n".join(table_of(by_package(report))))


if __name__ == "__main__":
    main(*sys.argv[1:])
