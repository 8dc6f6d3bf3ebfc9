# SPDX-License-Identifier: Apache-2.0
"""What is said below a table of layouts: reasons, warnings, ties, where figures come from.

A *remark* is a text about some layouts. Texts that differ in their figures alone are one remark,
in the words of the first: twelve layouts that fail to divide a dimension are one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardax.plan.columns import measured_label
from shardax.plan.cost import ties
from shardax.plan.records import LayoutReport

LABELS = {
    "exact": "from shapes and shardings alone",
    "compiler": "measured by the target's own compiler",
    "counted": "counted in the program that the compiler made",
    "estimate": "a model, or the CPU's program standing in for the target's; no measurement",
}
"""What each label of a column means."""

_NAMED = 3
_AFTERWARDS = {"does not fit": "does not fit", "rejected": "rejected", "failed": "failed"}


@dataclass(frozen=True)
class Remark:
    """A text about some layouts.

    Attributes:
        text: The text; of texts alike, the first.
        layouts: Names of the layouts, in the plan's order.
    """

    text: str
    layouts: tuple[str, ...]

    def about(self) -> str:
        """Names the layouts, as many as can be read.

        Example:
            >>> Remark("no", ("a", "b", "c", "d", "e")).about()
            'a, b, c and 2 more'
        """
        more = len(self.layouts) - _NAMED
        shown = ", ".join(self.layouts[:_NAMED])
        return f"{shown} and {more} more" if more > 0 else shown


def outcome_line(target: str, reports: Sequence[LayoutReport]) -> str:
    """Says in a line how many layouts there were and what became of them.

    Args:
        target: The plan's target.
        reports: All its reports.

    Example:
        >>> outcome_line("cpu:8", [])
        'cpu:8: 0 of 0 layouts fit'
    """
    counts = dict.fromkeys(("fits", *_AFTERWARDS), 0)
    for report in reports:
        counts[report.outcome] += 1
    words = {
        "does not fit": "too large",
        "rejected": "rejected before compiling",
        "failed": "failed to compile",
    }
    others = [f"{counts[outcome]} {word}" for outcome, word in words.items() if counts[outcome]]
    fits = counts["fits"]
    start = f"{target}: {fits} of {len(reports)} layouts {'fits' if fits == 1 else 'fit'}"
    return "; ".join([start, ", ".join(others)]) if others else start


def tied_with_best(reports: Iterable[LayoutReport]) -> tuple[str, ...]:
    """Returns the names of the layouts that the model of time cannot tell from the best.

    Args:
        reports: Reports, the best first.

    Returns:
        The best among them; nothing if it stands alone.
    """
    fitting = [report for report in reports if report.outcome == "fits" and report.time]
    for group in ties(fitting):
        if group[0] is fitting[0]:
            return tuple(report.layout.name for report in group)
    return ()


def reasons(reports: Iterable[LayoutReport], outcome: str) -> tuple[Remark, ...]:
    """Returns why layouts have an outcome, the commonest reason first.

    Args:
        reports: Reports; those of other outcomes, and those without a reason, are left out.
        outcome: ``"does not fit"``, ``"rejected"`` or ``"failed"``.
    """
    return _grouped(
        (report.reason.strip(), report.layout.name)
        for report in reports
        if report.outcome == outcome and report.reason.strip()
    )


def warnings_of(reports: Iterable[LayoutReport]) -> tuple[Remark, ...]:
    """Returns the warnings, each with the layouts that it is about; the commonest first."""
    return _grouped(
        (warning, report.layout.name) for report in reports for warning in report.warnings
    )


def _grouped(said: Iterable[tuple[str, str]]) -> tuple[Remark, ...]:
    texts: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for text, name in said:
        alike = re.sub(r"\d[\d,.]*", "#", text)
        texts.setdefault(alike, text)
        names.setdefault(alike, []).append(name)
    found = [Remark(texts[alike], tuple(dict.fromkeys(names[alike]))) for alike in texts]
    return tuple(sorted(found, key=lambda remark: -len(remark.layouts)))


def provenance_lines(reports: Iterable[LayoutReport]) -> tuple[str, ...]:
    """Says which compilers the figures come from, one line each."""
    found: dict[str, list[str]] = {}
    for report in reports:
        if report.provenance is None:
            continue
        where = report.provenance
        line = f"{where.compiler} for {where.target}, {where.effort} effort, JAX {where.jax}"
        if where.tier != "target compiler":
            line += f" ({where.tier}: the CPU's program in place of the target's)"
        if where.effort == "screen":
            line += "; fast compiles show up to a fifth less memory than full ones"
        found.setdefault(line, []).append(report.layout.name)
    if len(found) < 2:
        return tuple(found)
    return tuple(f"{line}: {Remark('', tuple(names)).about()}" for line, names in found.items())


def label_lines(reports: Sequence[LayoutReport], heads: Iterable[tuple[str, str]]) -> list[str]:
    """Says which columns are worth what.

    Args:
        reports: The reports.
        heads: Title and label of each column.
    """
    by_label: dict[str, list[str]] = {}
    for head, label in heads:
        if label:
            by_label.setdefault(label, []).append(head)
    if measured_label(reports) == "compiler":
        order = ("exact", "compiler", "counted", "estimate")
    else:
        order = ("exact", "counted", "estimate", "compiler")
    return [
        f"{label} ({LABELS[label]}): {', '.join(dict.fromkeys(by_label[label]))}"
        for label in order
        if label in by_label
    ]
