# SPDX-License-Identifier: Apache-2.0
"""``shardax plan explain`` and ``shardax plan diff``: more about layouts of a plan in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shardax.plan import Plan
from shardax.plan.difference import diff
from shardax.plan.explanation import explain
from shardax.plan.records import LayoutReport


@dataclass(frozen=True)
class Explain:
    """Say what a layout sends over the wire, and which line of the model's code needs it.

    Attributes:
        plan: A file that shardax plan --json wrote.
        layout: Name of the layout; by default the best that fits.
        axis: Only what travels along this mesh axis.
        by: Grouped by line of code, by the parameter that travels, or by kind of collective.
    """

    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json")]
    layout: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="LAYOUT")] = None
    axis: str | None = None
    by: Literal["source", "parameter", "kind"] = "source"

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        found = Plan.from_json(self.plan)
        report = found.best() if self.layout is None else found[self.layout]
        print(explain(report, self.axis, self.by))
        return 0


@dataclass(frozen=True)
class Diff:
    """Say what differs between two layouts: rules, splits, memory, time, and which collectives.

    Attributes:
        a: A file that shardax plan --json wrote, a colon, and the name of a layout; without a name
            the best that fits.
        b: The same for the other; or the name of another layout of the first file.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A.json:LAYOUT")]
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B.json:LAYOUT")]

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        file, name = _parted(self.a)
        other, second = _parted(self.b)
        first = Plan.from_json(file or self.a)
        if other is None:  # the name of a layout alone
            print(diff(_report(first, name), first[self.b]))
        else:
            print(diff(_report(first, name), _report(Plan.from_json(other), second)))
        return 0


def _report(plan: Plan, name: str) -> LayoutReport:
    return plan[name] if name else plan.best()


def _parted(text: str) -> tuple[str | None, str]:
    """Returns the file that a text begins with, if it does, and the name after it.

    >>> _parted("out.json:fsdp 8x2"), _parted("out.json"), _parted("fsdp")
    (('out.json', 'fsdp 8x2'), ('out.json', ''), (None, 'fsdp'))
    """
    if Path(text).is_file():
        return text, ""
    start, json, rest = text.partition(".json")
    if json and (not rest or rest.startswith(":")):
        return start + json, rest[1:]
    return None, text
