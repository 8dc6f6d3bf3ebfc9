# SPDX-License-Identifier: Apache-2.0
"""Plans: ranked reports on the layouts of one step.

A layout is better if it fits; then if the middle of its time band is lower (of one example, where
batch sizes differ); then if it moves fewer bytes. Layouts whose times cannot be told apart are
*ties* (``shardax.plan.hardware.cost``), and the plan says so rather than feign a difference.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardax.host.files import write_whole
from shardax.partition.errors import did_you_mean
from shardax.plan.errors import PlanFileError, PlanInputError
from shardax.plan.records import LayoutReport, from_data, to_data

_FORMAT = 1  # of the JSON files; raised when older ones can no longer be read

_OUTCOMES = ("fits", "does not fit", "rejected", "failed")


def rank(report: LayoutReport) -> tuple[Any, ...]:
    """The sort key of reports, the best first."""
    seconds = report.seconds_per_example
    return (
        _OUTCOMES.index(report.outcome),
        math.inf if seconds is None else seconds,
        report.total_wire_bytes,
        report.peak_bytes or 0,
        report.layout.name,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Reports of layouts; made by ``compare`` and ``search``.

    Printed, it is a table. ``plan["name"]`` is a report by the name of its layout.

    Attributes:
        target: The hardware, as it was asked for.
        reports: One per layout, best first.
        notes: What else there is to know, such as how many candidates there were.

    Example:
        >>> from shardax.plan import Layout, LayoutReport
        >>> found = LayoutReport(Layout("fsdp", (("embed", "data"),), (("data", 8),)), "fits")
        >>> plan = Plan("cpu:8", (found,))
        >>> plan.best().layout.name, plan["fsdp"] is found, len(plan)
        ('fsdp', True, 1)
    """

    target: str
    reports: tuple[LayoutReport, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reports", tuple(sorted(self.reports, key=rank)))
        object.__setattr__(self, "notes", tuple(self.notes))

    def __len__(self) -> int:
        return len(self.reports)

    def __iter__(self) -> Iterator[LayoutReport]:
        return iter(self.reports)

    def __getitem__(self, name: str) -> LayoutReport:
        for report in self.reports:
            if report.layout.name == name:
                return report
        names = [report.layout.name for report in self.reports]
        raise PlanInputError(
            f"The plan has no layout {name!r}; it has {', '.join(map(repr, names))}."
            f"{did_you_mean(name, names)}"
        )

    def best(self, fits: float = 1.0) -> LayoutReport:
        """Returns the best layout that fits.

        Args:
            fits: Share of a device's memory that it may need, to leave room for what the compiler
                does not see, such as fragmentation and buffers of communication.

        Raises:
            PlanInputError: If there is none; says what keeps the nearest from fitting.
        """
        for report in self.reports:
            peak, limit = report.peak_bytes or 0, report.limit_bytes
            if report.outcome == "fits" and (limit is None or peak <= fits * limit):
                return report
        start = f"None of {len(self)} layouts fits into {fits:g} of the memory of {self.target}. "
        measured = [r for r in self.reports if r.peak_bytes is not None and r.limit_bytes]
        if not measured:
            reasons = "; ".join(f"{r.layout.name!r}: {r.reason}" for r in self.reports[:3])
            raise PlanInputError(start + reasons)
        nearest = min(measured, key=lambda report: report.peak_bytes or 0)
        raise PlanInputError(
            f"{start}{nearest.layout.name!r} needs least: {nearest.peak_bytes:,} of "
            f"{nearest.limit_bytes:,} bytes. Use more devices, a smaller batch, or "
            "rematerialisation (remat)."
        )

    def __str__(self) -> str:
        from shardax.plan.report.table import render

        return render(self)

    __repr__ = __str__

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file for ``from_json``, in one step.

        Args:
            path: The file.
        """
        data = {
            "shardax plan": _FORMAT,
            "target": self.target,
            "notes": list(self.notes),
            "reports": [to_data(report) for report in self.reports],
        }
        write_whole(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a file.

        Args:
            path: The file.

        Raises:
            PlanFileError: If there is no such file, or it holds no plan.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise PlanFileError(f"{path}: there is no such file.") from error
        except (OSError, ValueError) as error:
            raise PlanFileError(f"{path}: cannot be read as JSON: {error}.") from error
        written = data.get("shardax plan") if isinstance(data, dict) else None
        if written != _FORMAT:
            what = "no plan of shardax" if written is None else f"a plan of format {written}"
            raise PlanFileError(
                f"{path} holds {what}; this version reads format {_FORMAT}. Make it anew: "
                "shardax plan ... --json FILE."
            )
        try:
            reports = tuple(from_data(each) for each in data["reports"])
            return cls(data["target"], reports, tuple(data["notes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanFileError(f"{path}: the plan in it is damaged: {error!r}.") from error

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained page with tables, pictures and explanations.

        Args:
            path: The file.
        """
        from shardax.plan.report.html import page

        write_whole(path, page(self))
