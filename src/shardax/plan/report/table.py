# SPDX-License-Identifier: Apache-2.0
"""A plan in the terminal: tables as wide as the screen, with what is to be said below them.

Columns that do not fit beside the others go into another table below, whose rows begin with the
same number and name. Text is what ``str(plan)`` gives; ``show`` prints it, on a terminal by rich
with colours.

What is said below a table of layouts: reasons, warnings, ties, where figures come from.

A *remark* is a text about some layouts. Texts that differ in their figures alone are one remark,
in the words of the first: twelve layouts that fail to divide a dimension are one line.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardax._core.state.state import columns as aligned
from shardax.plan.hardware.cost import ties
from shardax.plan.records import LayoutReport
from shardax.plan.report.columns import Column, columns_of, measured_label

if TYPE_CHECKING:
    from shardax.plan.result import Plan


# --- Remarks ---

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


# --- Table ---

WIDTH = 110
"""Characters of a line, where no terminal says another number."""

TOP = 20
"""Rows of a table, where no one says another number."""

_NARROWEST = 40
_LEAST_LAYOUT = 16
_GAP = 2
_STYLES = {"yes": "green", "no": "red", "rejected": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Grid:
    """One table: two lines of titles, then a row for each layout.

    Attributes:
        columns: Its columns, without the number.
        reports: Its rows.
        ranks: Their numbers, as they are shown.
    """

    columns: tuple[Column, ...]
    reports: tuple[LayoutReport, ...]
    ranks: tuple[str, ...]

    def cells(self) -> list[list[str]]:
        """Returns titles, units, and the rows, each with its number first."""
        titles = ["", *(column.head for column in self.columns)]
        units = ["", *(column.unit for column in self.columns)]
        rows = [
            [rank, *(column.text(report) for column in self.columns)]
            for rank, report in zip(self.ranks, self.reports, strict=True)
        ]
        return [titles, units, *rows]


def render(plan: Plan, width: int = WIDTH, top: int = TOP) -> str:
    """Returns a plan as text.

    Args:
        plan: The plan.
        width: Characters of a line, at least 40.
        top: How many layouts the tables show, the best ones.

    Example:
        >>> from shardax.plan import Layout, LayoutReport
        >>> from shardax.plan.result import Plan
        >>> report = LayoutReport(Layout("dp", (), (("data", 8),)), "rejected", "too large")
        >>> print(render(Plan("cpu:8", (report,))))
        cpu:8: 0 of 1 layouts fit; 1 rejected before compiling
        <BLANKLINE>
        Rejected before compiling
          too large (dp)
    """
    width = max(width, _NARROWEST)
    blocks = ["\n".join(textwrap.wrap(outcome_line(plan.target, plan.reports), width))]
    blocks += ["\n".join(_lines(grid.cells(), grid.columns)) for grid in grids(plan, width, top)]
    blocks += ["\n".join([title, *_wrapped(lines, width)]) for title, lines in sections(plan, top)]
    return "\n\n".join(blocks)


def show(plan: Plan, console: Any = None, top: int = TOP) -> None:
    """Prints a plan: on a terminal with colours, else as plain text.

    Args:
        plan: The plan.
        console: A ``rich.console.Console``; None for one of standard output.
        top: How many layouts the tables show, the best ones.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    to = Console() if console is None else console
    if not to.is_terminal:
        to.file.write(render(plan, top=top) + "\n")
        return
    width = max(to.width, _NARROWEST)
    to.print(Text(outcome_line(plan.target, plan.reports), style="bold"))
    for grid in grids(plan, width, top):
        titles, units, *rows = grid.cells()
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_header=True)
        for number, (title, unit) in enumerate(zip(titles, units, strict=True)):
            right = number == 0 or grid.columns[number - 1].right
            head = Text(f"{title}\n{unit}", style="bold", justify="right" if right else "left")
            table.add_column(head, justify="right" if right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in row))
        to.print()
        to.print(table)
    for title, lines in sections(plan, top):
        to.print()
        to.print(Text(title, style="bold"))
        for line in _wrapped(lines, width):
            to.print(Text(line))


def grids(plan: Plan, width: int = WIDTH, top: int = TOP) -> list[Grid]:
    """Returns the tables of the layouts that were compiled, none wider than the screen if possible.

    Args:
        plan: The plan.
        width: Characters of a line.
        top: How many layouts they show, the best ones.
    """
    shown = _compiled(plan.reports)[:top]
    if not shown:
        return []
    ranks = tuple(rank_texts(plan)[report.layout.name] for report in shown)
    first, *others = columns_of(shown)
    name, again = _shortened(first, 2 * width // 5), _shortened(first, width // 5)
    rank_width = max(map(len, ranks))
    found: list[list[Column]] = []
    used = width + 1
    for column in others:
        wide = _GAP + _width(column, shown)
        if used + wide > width:
            found.append([again if found else name])
            used = rank_width + _GAP + _width(found[-1][0], shown)
        found[-1].append(column)
        used += wide
    return [Grid(tuple(columns), shown, ranks) for columns in found]


def rank_texts(plan: Plan) -> dict[str, str]:
    """Returns the number of each layout, with ``=`` after those that tie with the best.

    Args:
        plan: The plan.
    """
    tied = set(tied_with_best(plan.reports))
    return {
        report.layout.name: f"{number}{'=' if report.layout.name in tied else ''}"
        for number, report in enumerate(plan.reports, 1)
    }


def sections(plan: Plan, top: int = TOP) -> list[tuple[str, list[str]]]:
    """Returns what stands below the tables: titles with their lines, without empty ones.

    Args:
        plan: The plan.
        top: How many layouts the tables show.
    """
    reports = plan.reports
    compiled = _compiled(reports)
    more = len(compiled) - top
    left_out = [f"{more} more were compiled and are not shown"] if more > 0 else []
    tied = tied_with_best(reports)
    tie = [f"{', '.join(tied)}: their times cannot be told apart by this model"] if tied else []
    heads = [(column.head, column.label) for column in columns_of(compiled)] if compiled else []
    found = [
        ("Ties (=)", tie),
        ("Does not fit", _remarks(reasons(reports, "does not fit"))),
        ("Rejected before compiling", _remarks(reasons(reports, "rejected"))),
        ("Failed to compile", _remarks(reasons(reports, "failed"))),
        ("Warnings", _remarks(warnings_of(reports))),
        ("Notes", [*left_out, *plan.notes]),
        (
            "Where the figures come from",
            [*provenance_lines(reports), *label_lines(compiled, heads)],
        ),
    ]
    return [(title, lines) for title, lines in found if lines]


def _compiled(reports: Sequence[LayoutReport]) -> tuple[LayoutReport, ...]:
    return tuple(report for report in reports if report.compiled)


def _remarks(remarks: Sequence[Remark]) -> list[str]:
    return [
        f"{' '.join(remark.text.split())} ({_count(remark)}{remark.about()})" for remark in remarks
    ]


def _count(remark: Remark) -> str:
    return f"{len(remark.layouts)}: " if len(remark.layouts) > 1 else ""


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    ]


def _shortened(column: Column, most: int) -> Column:
    """The column of names, cut so that they leave room for figures."""
    most = max(most, _LEAST_LAYOUT)

    def text(report: LayoutReport) -> str:
        whole = column.text(report)
        return whole if len(whole) <= most else f"{whole[: most - 1]}…"

    return Column(
        column.key, column.head, column.unit, column.label, column.meaning, text, text, right=False
    )


def _width(column: Column, reports: Sequence[LayoutReport]) -> int:
    return max(len(column.head), len(column.unit), *(len(column.text(r)) for r in reports))


def _lines(cells: list[list[str]], columns: Sequence[Column]) -> list[str]:
    right = [0, *(number for number, column in enumerate(columns, 1) if column.right)]
    return aligned(cells, right)
