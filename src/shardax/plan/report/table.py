# SPDX-License-Identifier: Apache-2.0
"""Plans as text: tables as wide as the screen, with notes below.

Columns that do not fit beside the others go into another table below, whose rows begin with the
same number and name. ``render`` is the text of ``str(plan)``; ``show`` prints it, in colour on a
terminal.

A *note* is a text about some layouts. Texts that differ in numbers alone are one note, in the words
of the first: twelve layouts that fail to divide a dimension are one line.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardax._core.state.state import columns as aligned
from shardax.plan.hardware.cost import ties
from shardax.plan.records import LayoutReport
from shardax.plan.report.columns import Column, columns_of, measured_label

if TYPE_CHECKING:
    from shardax.plan.result import Plan

LABELS = {
    "exact": "from shapes and shardings alone",
    "compiler": "measured by the target's own compiler",
    "counted": "counted in the program that the compiler made",
    "estimate": "a model, or the CPU's program standing in for the target's; no measurement",
}
"""What each label of a column means."""

_WIDTH = 110  # characters of a line, where no terminal says another number
_TOP = 20  # rows of a table, where no one says another number
_NARROWEST = 40
_SHORTEST_NAME = 16
_GAP = 2
_NAMED = 3
_STYLES = {"yes": "green", "no": "red", "rejected": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Note:
    """A text about some layouts, by their names in the plan's order."""

    text: str
    layouts: tuple[str, ...]

    def about(self) -> str:
        """Names the layouts, as many as are readable."""
        more = len(self.layouts) - _NAMED
        shown = ", ".join(self.layouts[:_NAMED])
        return f"{shown} and {more} more" if more > 0 else shown

    def source(self) -> str:
        """Counts and names the layouts, in parentheses; "" for none."""
        count = f"{len(self.layouts)}: " if len(self.layouts) > 1 else ""
        return f"({count}{self.about()})" if self.layouts else ""


def outcome_line(target: str, reports: Sequence[LayoutReport]) -> str:
    """Counts the layouts of a plan by outcome."""
    outcomes = [report.outcome for report in reports]
    fits = outcomes.count("fits")
    words = {
        "does not fit": "too large",
        "rejected": "rejected before compiling",
        "failed": "failed to compile",
    }
    others = [f"{outcomes.count(each)} {word}" for each, word in words.items() if each in outcomes]
    start = f"{target}: {fits} of {len(reports)} layouts {'fits' if fits == 1 else 'fit'}"
    return "; ".join([start, ", ".join(others)]) if others else start


def tied_with_best(reports: Iterable[LayoutReport]) -> tuple[str, ...]:
    """Names the layouts whose time cannot be told from the best."""
    fitting = [report for report in reports if report.outcome == "fits" and report.time]
    for group in ties(fitting):
        if group[0] is fitting[0]:
            return tuple(report.layout.name for report in group)
    return ()


def reasons(reports: Iterable[LayoutReport], outcome: str) -> tuple[Note, ...]:
    """Returns why layouts have an outcome, the commonest reason first."""
    return _notes(
        (report.reason.strip(), report.layout.name)
        for report in reports
        if report.outcome == outcome and report.reason.strip()
    )


def warnings_of(reports: Iterable[LayoutReport]) -> tuple[Note, ...]:
    """Returns the warnings, the commonest first."""
    return _notes((text, report.layout.name) for report in reports for text in report.warnings)


def _notes(texts: Iterable[tuple[str, str]]) -> tuple[Note, ...]:
    """Joins pairs of text and layout that differ in numbers alone."""
    first: dict[str, str] = {}
    names: dict[str, dict[str, None]] = {}
    for text, name in texts:
        alike = re.sub(r"\d[\d,.]*", "#", text)
        first.setdefault(alike, text)
        names.setdefault(alike, {})[name] = None
    found = [Note(first[alike], tuple(names[alike])) for alike in first]
    return tuple(sorted(found, key=lambda note: -len(note.layouts)))


def provenance_lines(reports: Iterable[LayoutReport]) -> tuple[str, ...]:
    """Names the compilers that the figures come from, one line each."""
    found: dict[str, list[str]] = {}
    for report in reports:
        where = report.provenance
        if where is None:
            continue
        line = f"{where.compiler} for {where.target}, {where.effort} effort, JAX {where.jax}"
        if where.tier != "target compiler":
            line += f" ({where.tier}: the CPU's program in place of the target's)"
        if where.effort == "screen":
            line += "; fast compiles show up to a fifth less memory than full ones"
        found.setdefault(line, []).append(report.layout.name)
    if len(found) < 2:
        return tuple(found)
    return tuple(f"{line}: {Note('', tuple(names)).about()}" for line, names in found.items())


def _label_lines(reports: Sequence[LayoutReport]) -> list[str]:
    """Lists the columns by what their figures are worth."""
    heads: dict[str, dict[str, None]] = {}
    for column in columns_of(reports) if reports else ():
        heads.setdefault(column.label, {})[column.head] = None
    order = ["exact", "counted", "estimate"]
    order.insert(1 if measured_label(reports) == "compiler" else 3, "compiler")
    return [f"{each} ({LABELS[each]}): {', '.join(heads[each])}" for each in order if each in heads]


def render(plan: Plan, width: int = _WIDTH, top: int = _TOP) -> str:
    """Returns a plan as text, with the best ``top`` layouts in tables."""
    width = max(width, _NARROWEST)
    blocks = [textwrap.fill(outcome_line(plan.target, plan.reports), width)]
    for columns, cells in _grids(plan, width, top):
        right = [0, *(number for number, column in enumerate(columns, 1) if column.right)]
        blocks.append("\n".join(aligned(cells, right)))
    blocks += ["\n".join([title, *_wrapped(lines, width)]) for title, lines in _sections(plan, top)]
    return "\n\n".join(blocks)


def show(plan: Plan, console: Any = None, top: int = _TOP) -> None:
    """Prints a plan on a rich console, by default standard output."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        sys.stdout.write(render(plan, top=top) + "\n")
        return
    to = Console() if console is None else console
    if not to.is_terminal:
        to.file.write(render(plan, top=top) + "\n")
        return
    text = Text(render(plan, to.width, top))
    text.highlight_regex(r"(?:^|\n\n)(?P<bold>.+)", style_prefix="")  # first lines of blocks
    for word, style in _STYLES.items():
        text.highlight_regex(rf"(?m)(?<=  ){word}(?=  |$)", style)  # a cell of a table
    to.print(text, soft_wrap=True)


Grid = tuple[tuple[Column, ...], list[list[str]]]  # columns after the number; titles, units, rows


def _grids(plan: Plan, width: int, top: int) -> list[Grid]:
    """Returns the tables of the compiled layouts, cut to the width."""
    tied = tied_with_best(plan.reports)
    ranked = [
        (f"{number}{'=' if report.layout.name in tied else ''}", report)
        for number, report in enumerate(plan.reports, 1)
        if report.compiled
    ][:top]
    if not ranked:
        return []
    reports = [report for _, report in ranked]
    first, *others = columns_of(reports)
    name, again = (_shortened(first, share * width // 5) for share in (2, 1))
    rank_width = max(len(rank) for rank, _ in ranked)
    groups: list[list[Column]] = []
    used = width + 1
    for column in others:
        wide = _GAP + _width(column, reports)
        if used + wide > width:
            groups.append([again if groups else name])
            used = rank_width + _GAP + _width(groups[-1][0], reports)
        groups[-1].append(column)
        used += wide
    return [
        (
            tuple(columns),
            [
                ["", *(column.head for column in columns)],
                ["", *(column.unit for column in columns)],
                *([rank, *(column.text(report) for column in columns)] for rank, report in ranked),
            ],
        )
        for columns in groups
    ]


def _shortened(column: Column, most: int) -> Column:
    """Cuts the names of layouts so that figures have room."""
    most = max(most, _SHORTEST_NAME)

    def text(report: LayoutReport) -> str:
        whole = column.text(report)
        return whole if len(whole) <= most else f"{whole[: most - 1]}…"

    return replace(column, text=text, value=text)


def _width(column: Column, reports: Sequence[LayoutReport]) -> int:
    return max(len(column.head), len(column.unit), *(len(column.text(r)) for r in reports))


def _sections(plan: Plan, top: int) -> list[tuple[str, list[str]]]:
    """Returns the sections below the tables: titles with lines."""
    reports = plan.reports
    compiled = [report for report in reports if report.compiled]
    more = len(compiled) - top
    left_out = [f"{more} more were compiled and are not shown"] if more > 0 else []
    tied = tied_with_best(reports)
    tie = [f"{', '.join(tied)}: their times cannot be told apart by this model"] if tied else []
    found = [
        ("Ties (=)", tie),
        ("Does not fit", _lines(reasons(reports, "does not fit"))),
        ("Rejected before compiling", _lines(reasons(reports, "rejected"))),
        ("Failed to compile", _lines(reasons(reports, "failed"))),
        ("Warnings", _lines(warnings_of(reports))),
        ("Notes", [*left_out, *plan.notes]),
        ("Where the figures come from", [*provenance_lines(reports), *_label_lines(compiled)]),
    ]
    return [(title, lines) for title, lines in found if lines]


def _lines(notes: Sequence[Note]) -> list[str]:
    return [f"{' '.join(note.text.split())} {note.source()}" for note in notes]


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    wrapper = textwrap.TextWrapper(
        width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
    return [part for line in lines for part in wrapper.wrap(line)]
