# SPDX-License-Identifier: Apache-2.0
"""A plan as one page that needs no other: a table to sort, bars, and each layout to unfold."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from shardax.plan.columns import Column, Value, columns_of
from shardax.plan.html_charts import memory_chart, time_chart, wire_chart
from shardax.plan.html_details import details
from shardax.plan.html_style import SCRIPT, STYLE
from shardax.plan.records import LayoutReport
from shardax.plan.remarks import (
    LABELS,
    Remark,
    outcome_line,
    provenance_lines,
    reasons,
    tied_with_best,
    warnings_of,
)
from shardax.view.page import html_page

if TYPE_CHECKING:
    from shardax.plan.result import Plan

_DETAILED = 16
_BARS = 30


def page(plan: Plan) -> str:
    """Returns the page of a plan.

    Args:
        plan: The plan.

    Returns:
        A whole HTML document, which loads nothing.

    Example:
        >>> from shardax.plan import Layout, LayoutReport
        >>> from shardax.plan.result import Plan
        >>> report = LayoutReport(Layout("dp", (), (("data", 8),)), "rejected", "too large")
        >>> text = page(Plan("cpu:8", (report,)))
        >>> text.startswith("<!doctype html>"), "too large" in text
        (True, True)
    """
    compiled = [report for report in plan.reports if report.compiled]
    columns = columns_of(compiled) if compiled else ()
    numbers = {report.layout.name: place for place, report in enumerate(plan.reports, 1)}
    shown, drawn = compiled[:_DETAILED], compiled[:_BARS]
    parts = [
        f"<h1>Layouts for {escape(plan.target)}</h1>",
        f"<p>{escape(outcome_line(plan.target, plan.reports))}.</p>",
        _best(plan.reports),
        _table(compiled, columns, numbers, {report.layout.name for report in shown}),
        _section(
            "Memory of a device",
            "What it holds between steps is exact; temporaries are the rest of the peak.",
            memory_chart(drawn),
        ),
        _section(
            "Bytes on the wire",
            "What one device sends in a step, by the mesh axes along which it does.",
            wire_chart(drawn),
        ),
        _section(
            "Time of a step",
            "A model, not a measurement: from everything overlapping to nothing overlapping.",
            time_chart(drawn),
        ),
        _layouts(shown, numbers),
        _others(plan),
        _labels(plan, columns),
        f"<script>{SCRIPT}</script>",
    ]
    return html_page(f"Layouts for {plan.target}", "".join(parts), STYLE)


def _best(reports: Sequence[LayoutReport]) -> str:
    fitting = [report for report in reports if report.outcome == "fits"]
    if not fitting:
        return "<p><strong>None of them fits.</strong></p>"
    tied = tied_with_best(reports)
    name = f"<strong>{escape(fitting[0].layout.name)}</strong>"
    if not tied:
        return f"<p>Best: {name}.</p>"
    others = ", ".join(escape(each) for each in tied[1:])
    return (
        f"<p>Best: {name}; the model of time cannot tell it from {others}: choose by memory, or "
        "measure.</p>"
    )


def _section(title: str, said: str, content: str) -> str:
    if not content:
        return ""
    return f'<section><h2>{title}</h2><p class="quiet">{said}</p>{content}</section>'


def _table(
    reports: Sequence[LayoutReport],
    columns: Sequence[Column],
    numbers: dict[str, int],
    linked: set[str],
) -> str:
    if not reports:
        return ""
    heads = "".join(_head(column) for column in columns)
    rows = "".join(_row(report, columns, numbers, linked) for report in reports)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Layouts, a table to sort">'
        f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        '</div><p class="quiet">A title sorts the table; more columns are to the right.</p>'
    )


def _head(column: Column) -> str:
    kind = "number" if column.right else "text"
    side = ' class="right"' if column.right else ""
    below = ", ".join(filter(None, (column.unit, column.label)))
    return (
        f'<th scope="col" data-kind="{kind}"{side} title="{escape(column.meaning)}">'
        f'<button type="button">{escape(column.head)}</button>'
        f"<small>{escape(below) or '&nbsp;'}</small></th>"
    )


def _row(
    report: LayoutReport, columns: Sequence[Column], numbers: dict[str, int], linked: set[str]
) -> str:
    first, *others = columns
    name = escape(first.text(report))
    if report.layout.name in linked:
        name = f'<a href="#layout-{numbers[report.layout.name]}">{name}</a>'
    cells = [f'<th scope="row" data-value="{escape(report.layout.name)}">{name}</th>']
    for column in others:
        text = column.text(report)
        kind = text if column.key == "fits" else "right" if column.right else ""
        said = f' class="{kind}"' if kind else ""
        cells.append(f'<td{said} data-value="{_data(column.value(report))}">{escape(text)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _data(value: Value) -> str:
    return "" if value is None else escape(value if isinstance(value, str) else f"{value:.10g}")


def _layouts(reports: Sequence[LayoutReport], numbers: dict[str, int]) -> str:
    if not reports:
        return ""
    parts = [
        details(report, numbers[report.layout.name], place == 0)
        for place, report in enumerate(reports)
    ]
    return f"<section><h2>Each layout</h2>{''.join(parts)}</section>"


def _others(plan: Plan) -> str:
    found = [
        ("Too large", reasons(plan.reports, "does not fit")),
        ("Rejected before compiling", reasons(plan.reports, "rejected")),
        ("Failed to compile", reasons(plan.reports, "failed")),
        ("Warnings", warnings_of(plan.reports)),
        ("Notes", tuple(Remark(note, ()) for note in plan.notes)),
    ]
    return "".join(
        f'<section><h2>{title}</h2><ul class="remarks">{"".join(map(_remark, remarks))}</ul>'
        "</section>"
        for title, remarks in found
        if remarks
    )


def _remark(remark: Remark) -> str:
    count = f"{len(remark.layouts)}: " if len(remark.layouts) > 1 else ""
    about = f' <span class="quiet">({count}{escape(remark.about())})</span>'
    return f"<li>{escape(remark.text)}{about if remark.layouts else ''}</li>"


def _labels(plan: Plan, columns: Sequence[Column]) -> str:
    used = {column.label for column in columns if column.label}
    rows = "".join(
        f"<dt>{label}</dt><dd>{escape(meaning)}</dd>"
        for label, meaning in LABELS.items()
        if label in used
    )
    columns_said = "".join(
        f"<dt>{escape(column.head)}</dt><dd>{escape(column.meaning)}</dd>" for column in columns
    )
    lines = "".join(f"<li>{escape(line)}</li>" for line in provenance_lines(plan.reports))
    listed = f'<ul class="remarks">{lines}</ul>' if lines else ""
    if not rows:
        return ""
    return (
        f"<section><h2>What the figures are worth</h2>{listed}"
        f'<dl class="labels">{rows}</dl>'
        f'<h3>Columns</h3><dl class="labels">{columns_said}</dl></section>'
    )
