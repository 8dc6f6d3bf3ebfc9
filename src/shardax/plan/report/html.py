# SPDX-License-Identifier: Apache-2.0
"""HTML page of a plan: sortable table, bar charts, foldable details.

``page.html`` is the template of its body: the order of the parts, and a script that sorts the table
and opens what a link points at; ``page.css`` is its style. Everything else is static, so the page
is complete without scripts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax._charts import NO_CHARTS, has_matplotlib
from shardax._tables import DisplayTable, TableCell, facts_html
from shardax.extend import join_first
from shardax.plan.inputs import auto_mesh
from shardax.plan.records import ArrayLayout, LayoutReport
from shardax.plan.report import charts, table
from shardax.plan.report.explanation import UNKNOWN, CollectiveGroup, descriptions, groups, headline
from shardax.plan.report.table import BINARY, DECIMAL, FigureColumn, quantity
from shardax.view.page import html_page
from shardax.view.shardings import sharding_html

if TYPE_CHECKING:
    from shardax.plan.records import Plan

# The most of each that a page shows.
_DETAILED = 16
_CHARTED = 30
_PICTURES = 4
_GROUPS = 25
_PATHS = 12


_CHARTS = (
    (
        "Memory of a device",
        "What it holds between steps is exact; temporaries are the rest of the peak.",
        charts.memory_chart,
    ),
    (
        "Bytes on the wire",
        "What one device sends in a step, by the mesh axes along which it does.",
        charts.wire_chart,
    ),
    (
        "Expected time of a step",
        (
            "A model, not a measurement: seconds by what takes them, and the range that nine "
            "measured steps of ten lie in."
        ),
        charts.expected_chart,
    ),
    (
        "Bounds of the time of a step",
        "A model, not a measurement: from everything overlapping to nothing overlapping.",
        charts.time_chart,
    ),
)


def page(plan: Plan) -> str:
    """Returns the page of a plan, without outside files."""
    compiled = [report for report in plan.reports if table.has_figures(report)]
    columns = table.columns_of(compiled) if compiled else ()
    numbers = {report.layout.name: n for n, report in enumerate(compiled[:_DETAILED], 1)}
    details = "".join(
        _details(report, number) for report, number in zip(compiled, numbers.values(), strict=False)
    )

    drawn = NO_CHARTS
    if has_matplotlib():
        drawn = "".join(
            _section(title, draw(compiled[:_CHARTED]), explanation)
            for title, explanation, draw in _CHARTS
        )

    files = resources.files("shardax.plan.report")
    body = Template(files.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        target=escape(plan.target),
        outcomes=escape(table.outcome_line(plan.target, plan.reports)),
        best=_best(plan.reports),
        table=_table(compiled, columns, numbers),
        charts=f'<div class="charts">{drawn}</div>',
        layouts=_section("Each layout", details),
        notes=_notes(plan),
        labels=_labels(plan, columns),
    )
    style = files.joinpath("page.css").read_text(encoding="utf-8")
    return html_page(f"Layouts for {plan.target}", body, style)


def _best(reports: Sequence[LayoutReport]) -> str:
    fitting = [report for report in reports if report.outcome == "fits"]
    if not fitting:
        return "<p><strong>None of them fits.</strong></p>"
    name = f"<strong>{escape(fitting[0].layout.name)}</strong>"
    tied = ", ".join(map(escape, table.tied_with_best(reports)[1:]))
    if not tied:
        return f"<p>Best: {name}.</p>"
    return (
        f"<p>Best: {name}; the model of time cannot tell it from {tied}: choose by memory, or "
        "measure.</p>"
    )


def _section(title: str, content: str, explanation: str = "") -> str:
    """A part of the page with its title; "" without content."""
    if not content:
        return ""
    quiet = f'<p class="quiet">{explanation}</p>' if explanation else ""
    return f"<section><h2>{title}</h2>{quiet}{content}</section>"


def _list(texts: Sequence[str]) -> str:
    """A list of HTML texts; "" for none."""
    items = "".join(f"<li>{text}</li>" for text in texts)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _table(
    reports: Sequence[LayoutReport], columns: Sequence[FigureColumn], numbers: Mapping[str, int]
) -> str:
    """Returns the sortable table of the layouts, with links to those that have numbers."""
    if not reports:
        return ""

    rows: list[list[TableCell]] = []
    for report in reports:
        first, *more_cells = [column.cell(report) for column in columns]
        number = numbers.get(report.layout.name)
        if number is not None:
            link = f'<a href="#layout-{number}">{escape(first.text)}</a>'
            first = first._replace(html=link)
        rows.append([first, *more_cells])

    drawn = DisplayTable.of(columns, rows).html(
        "sortable", label="Layouts, a table to sort", sortable=True
    )
    return f'{drawn}<p class="quiet">A title sorts the table; more columns are to the right.</p>'


def _details(report: LayoutReport, number: int) -> str:
    """The part of one layout, opened by a link to ``#layout-NUMBER``, the first from the start."""
    content = [_facts(report), _rules(report), _warnings(report), _pictures(report), _sent(report)]
    name = report.layout.name
    outcome = headline(report).removeprefix(name).strip()
    return (
        f'<details class="layout" id="layout-{number}"{" open" if number == 1 else ""}>'
        f'<summary><strong>{escape(name)}</strong> <span class="quiet">{escape(outcome)}</span>'
        f"</summary><div>{''.join(content)}</div></details>"
    )


def _facts(report: LayoutReport) -> str:
    facts = [
        (column.head, f"{column.text(report)} {column.unit}", column.label, column.meaning)
        for column in table.columns_of([report])
        if column.right and column.value(report) is not None
    ]

    facts += [
        (kind, quantity(size, BINARY), "exact", f"What of it is {kind}.")
        for kind, size in report.argument_bytes.items()
        if size
    ]
    cells = "".join(
        f'<div title="{escape(meaning)}"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)} <small>{escape(label)}</small></dd></div>"
        for name, value, label, meaning in facts
    )
    return f'<dl class="facts">{cells}</dl>' if cells else ""


def _rules(report: LayoutReport) -> str:
    pairs: list[tuple[str, str]] = []
    for name, axes in report.layout.rules:
        target = axes if isinstance(axes, str) else " + ".join(axes or ())
        pairs.append((name, target or "not split"))
    pairs += [(f"({name})", str(value)) for name, value in report.layout.settings.items()]

    over = f'<p class="quiet">over {escape(report.layout.mesh_text)}</p>'
    rules = facts_html(pairs, "pairs") if pairs else "<p>There are none.</p>"
    return f"<h3>Rules</h3>{over}{rules}"


def _warnings(report: LayoutReport) -> str:
    texts = [escape(text) for text in (report.reason, *report.warnings) if text]
    if report.replicated:
        listed = escape(join_first(report.replicated, most=_PATHS))
        texts.append(f"Held whole by every device: <code>{listed}</code>")
    return f"<h3>To know</h3>{_list(texts)}" if texts else ""


def _pictures(report: LayoutReport) -> str:
    """The largest parameters of distinct forms, as the devices hold them."""
    parameters = [array for array in report.arrays if array.kind == "parameters"]
    chosen: dict[object, ArrayLayout] = {}
    for array in sorted(parameters, key=lambda array: -math.prod(array.shape)):
        chosen.setdefault((array.shape, array.spec), array)
    figures = "".join(_picture(report, array) for array in list(chosen.values())[:_PICTURES])
    if not figures:
        return ""
    return (
        "<h3>The largest parameters</h3>"
        '<p class="quiet">A rectangle is the part that a device holds, with the numbers of those '
        "that do; of more than two dimensions, those that are split are drawn.</p>"
        f'<div class="pictures">{figures}</div>'
    )


def _picture(report: LayoutReport, array: ArrayLayout) -> str:
    texts: list[str] = []
    for name, size, axes in zip(array.names, array.shape, array.spec, strict=False):
        text = f"{'-' if name is None else name}: {size}"
        texts.append(f"{text} / {'+'.join(axes)}" if axes else text)
    caption = f"<code>{escape(array.path)}</code><br>{escape(', '.join(texts))}"

    drawn = ""
    sizes = report.layout.sizes
    if sizes:
        spec = PartitionSpec(*(axes or None for axes in array.spec))
        sharding = NamedSharding(auto_mesh(sizes), spec)
        drawing = sharding_html(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))
        parts = math.prod(sizes[axis] for axes in array.spec for axis in axes)
        label = escape(f"{array.path} in {parts} parts")
        drawn = f'<div role="img" aria-label="{label}">{drawing}</div>'
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def _sent(report: LayoutReport) -> str:
    if report.time is None:
        return ""
    wire_groups, total = groups(report), report.total_wire_bytes
    if not wire_groups:
        return "<h3>What it sends</h3><p>Nothing: no device needs what another has.</p>"

    items = "".join(_group(group, total) for group in wire_groups[:_GROUPS])
    small_groups = wire_groups[_GROUPS:]
    if small_groups:
        size = quantity(sum(group.wire_bytes for group in small_groups), DECIMAL)
        items += f"<li>{len(small_groups)} more lines of code, {size} together</li>"
    return (
        f"<h3>What it sends, and which line of code needs it</h3>"
        f'<p class="quiet">{quantity(total, DECIMAL)} from each device in a step, by the line of '
        f"the model whose operation needs it.</p><ol class='sent'>{items}</ol>"
    )


def _group(group: CollectiveGroup, total: float) -> str:
    share = 100 * group.wire_bytes / total if total else 0.0
    key = f"<code>{escape(group.key)}</code>" if group.key else f"<em>{UNKNOWN['source']}</em>"
    items = ""
    for sentence, details in descriptions(group.collectives, "source"):
        below = "".join(f'<br><span class="quiet">{escape(text)}</span>' for text in details)
        items += f"<li><strong>{escape(sentence)}</strong>{below}</li>"
    return (
        f'<li><div class="head"><span>{quantity(group.wire_bytes, DECIMAL)}</span>'
        f"<span>{share:.0f} %</span>{key}</div>"
        f'<div class="share"><span style="width:{share:.1f}%"></span></div><ul>{items}</ul></li>'
    )


def _notes(plan: Plan) -> str:
    sections = ""
    for title, notes in table.notes_of(plan):
        texts = [
            f'{escape(note.text)} <span class="quiet">{escape(note.source())}</span>'
            for note in notes
        ]
        sections += _section(title, _list(texts))
    return sections


def _labels(plan: Plan, columns: Sequence[FigureColumn]) -> str:
    used = {column.label for column in columns}
    labels = [(label, meaning) for label, meaning in table.LABELS.items() if label in used]
    if not labels:
        return ""

    sources = _list([escape(line) for line in table.provenance_lines(plan.reports)])
    meanings = _definitions([(column.head, column.meaning) for column in columns])
    content = f"{sources}{_definitions(labels)}<h3>Columns</h3>{meanings}"
    return _section("What the figures are worth", content)


def _definitions(pairs: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f'<dl class="labels">{items}</dl>'
