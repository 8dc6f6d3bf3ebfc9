# SPDX-License-Identifier: Apache-2.0
"""HTML page of a plan: sortable table, bar charts, foldable details.

``page.html`` is the template of its body: the order of the parts, and a script that sorts the table
and opens what a link points at; ``page.css`` is its style. Everything else is static, so the page
is complete without scripts. Colours only repeat what legends, figures and the bars' descriptions
for screen readers say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax._tables import DisplayTable, TableCell, facts_html
from shardax.plan.inputs import auto_mesh
from shardax.plan.records import ArrayLayout, LayoutReport
from shardax.plan.report import table
from shardax.plan.report.explanation import UNKNOWN, CollectiveGroup, descriptions, groups, headline
from shardax.plan.report.table import BINARY, DECIMAL, TIMES, FigureColumn, quantity
from shardax.view.page import html_page
from shardax.view.shardings import sharding_svg

if TYPE_CHECKING:
    from shardax.plan.records import Plan

# The most of each that a page shows.
_DETAILED = 16
_CHARTED = 30
_PICTURES = 4
_CELLS = 1024  # parts of an array that a picture shows
_GROUPS = 25
_PATHS = 12

_FAR = 8  # how many times the longest bar the limit may be for both to share a scale
_KINDS = {
    "parameters": "#4e79a7",
    "optimizer": "#f28e2b",
    "batch": "#59a14f",
    "other": "#b07aa1",
    "temporaries": "#8d949e",
}
_AXES = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#edc948")


def page(plan: Plan) -> str:
    """Returns the page of a plan, without outside files."""
    compiled = [report for report in plan.reports if table.has_figures(report)]
    columns = table.columns_of(compiled) if compiled else ()
    numbers = {report.layout.name: place for place, report in enumerate(plan.reports, 1)}
    detailed, charted = compiled[:_DETAILED], compiled[:_CHARTED]
    template, style = (
        resources.files("shardax.plan.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css")
    )
    charts = [
        _section(
            "Memory of a device",
            "What it holds between steps is exact; temporaries are the rest of the peak.",
            _memory_chart(charted),
        ),
        _section(
            "Bytes on the wire",
            "What one device sends in a step, by the mesh axes along which it does.",
            _wire_chart(charted),
        ),
        _section(
            "Expected time of a step",
            "A model, not a measurement: seconds by what takes them, and the range that nine "
            "measured steps of ten lie in.",
            _expected_chart(charted),
        ),
        _section(
            "Bounds of the time of a step",
            "A model, not a measurement: from everything overlapping to nothing overlapping.",
            _time_chart(charted),
        ),
    ]
    layouts = "".join(
        _details(report, numbers[report.layout.name], place == 0)
        for place, report in enumerate(detailed)
    )
    body = Template(template).substitute(
        target=escape(plan.target),
        outcomes=escape(table.outcome_line(plan.target, plan.reports)),
        best=_best(plan.reports),
        table=_table(compiled, columns, {report.layout.name for report in detailed}, numbers),
        charts="".join(charts),
        layouts=f"<section><h2>Each layout</h2>{layouts}</section>" if layouts else "",
        notes=_notes(plan),
        labels=_labels(plan, columns),
    )
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


def _section(title: str, explanation: str, content: str) -> str:
    if not content:
        return ""
    return f'<section><h2>{title}</h2><p class="quiet">{explanation}</p>{content}</section>'


def _list(texts: Sequence[str]) -> str:
    """A list of HTML texts; "" for none."""
    items = "".join(f"<li>{text}</li>" for text in texts)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _table(
    reports: Sequence[LayoutReport],
    columns: Sequence[FigureColumn],
    linked: set[str],
    numbers: Mapping[str, int],
) -> str:
    """Returns the sortable table of the layouts, with links to the parts of ``linked`` ones."""
    if not reports:
        return ""

    rows: list[list[TableCell]] = []
    for report in reports:
        first, *more_cells = [column.cell(report) for column in columns]
        number = numbers[report.layout.name]
        if report.layout.name in linked:
            link = f'<a href="#layout-{number}">{escape(first.text)}</a>'
            first = first._replace(html=link)
        rows.append([first, *more_cells])

    drawn = DisplayTable.of(columns, rows).html(
        "sortable", label="Layouts, a table to sort", sortable=True
    )
    return f'{drawn}<p class="quiet">A title sorts the table; more columns are to the right.</p>'


Segment = tuple[str, str, float, float]  # name, colour, start, size


@dataclass(frozen=True)
class ChartRow:
    """One bar, in the unit of its chart."""

    name: str
    segments: tuple[Segment, ...]
    figure: str  # on the right
    description: str  # for screen readers
    limit: float | None = None  # where a line is drawn across it


def _stacked(sizes: Mapping[str, float], colors: Mapping[str, str]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    start = 0.0
    for name, size in sizes.items():
        if size:
            segments.append((name, colors.get(name, _KINDS["other"]), start, size))
            start += size
    return tuple(segments)


def _memory_chart(reports: Sequence[LayoutReport]) -> str:
    """Contents of a device's memory at the peak, and its limit."""
    rows: list[ChartRow] = []
    for report in reports:
        if report.peak_bytes is None:
            continue
        bytes_by_kind = dict(report.argument_bytes)
        bytes_by_kind["temporaries"] = max(report.peak_bytes - sum(bytes_by_kind.values()), 0)
        total, limit = quantity(report.peak_bytes, BINARY), report.limit_bytes
        total += f" of {quantity(limit, BINARY)}" if limit else ""
        parts = ", ".join(f"{kind} {quantity(n, BINARY)}" for kind, n in bytes_by_kind.items() if n)
        segments = _stacked(bytes_by_kind, _KINDS)
        rows.append(ChartRow(report.layout.name, segments, total, f"peak {total}: {parts}", limit))
    used = {name for row in rows for name, *_ in row.segments}
    colors = {name: color for name, color in _KINDS.items() if name in used}
    limit = max((row.limit or 0.0 for row in rows), default=0.0)
    if limit > _FAR * max((report.peak_bytes or 0 for report in reports), default=0):
        # To the limit's scale the bars would be too short to see.
        rows = [replace(row, limit=None) for row in rows]
        far = f"The memory of a device, {quantity(limit, BINARY)}, is far to the right."
        return f'{_chart(rows, colors)}<p class="quiet">{escape(far)}</p>'
    return _chart(rows, colors, "memory of a device" if limit else "")


def _wire_chart(reports: Sequence[LayoutReport]) -> str:
    """Bytes sent by a device in a step, by mesh axes."""
    timed = [report for report in reports if report.time is not None]
    axes = {axes_key: table.axes_text(axes_key) for axes_key in table.wire_axes(timed)}
    colors = {name: _AXES[i % len(_AXES)] for i, name in enumerate(axes.values())}
    rows: list[ChartRow] = []
    for report in timed:
        totals = report.wire_bytes()
        sizes = {name: totals.get(axes_key, 0.0) for axes_key, name in axes.items()}
        total = quantity(report.total_wire_bytes, DECIMAL)
        parts = ", ".join(f"{name} {quantity(n, DECIMAL)}" for name, n in sizes.items() if n)
        description = f"{total}: {parts or 'nothing'}"
        rows.append(ChartRow(report.layout.name, _stacked(sizes, colors), total, description))
    return _chart(rows, colors)


def _expected_chart(reports: Sequence[LayoutReport]) -> str:
    """Expected seconds by part."""
    pairs = [(report, report.expected) for report in reports if report.expected]
    unit, size = table.scale([expected.high for _, expected in pairs], TIMES)
    totals: Counter[str] = Counter()
    for _, expected in pairs:
        totals.update({name: share for name, share in vars(expected.parts).items() if share})
    names = [name for name, _ in totals.most_common(len(_AXES) - 1)]
    colors = dict(zip([*names, "the rest"], _AXES, strict=False))
    rows: list[ChartRow] = []
    for report, expected in pairs:
        parts = {name: getattr(expected.parts, name) for name in names}
        parts["the rest"] = max(0.0, expected.seconds - sum(parts.values()))
        ends = [table.figure(end / size) for end in (expected.seconds, expected.low, expected.high)]
        text = "{} ({} - {}) {}".format(*ends, unit)
        said = [f"{name} {quantity(part, TIMES)}" for name, part in parts.items() if part]
        description = f"{text}: {', '.join(said)}; waits for {expected.waits_for}"
        rows.append(ChartRow(report.layout.name, _stacked(parts, colors), text, description))
    return _chart(rows, colors)


def _time_chart(reports: Sequence[LayoutReport]) -> str:
    """The time bands: from all overlapping to nothing overlapping."""
    unit, size = table.scale([report.time.upper for report in reports if report.time], TIMES)
    rows: list[ChartRow] = []
    for report in reports:
        band = report.time
        if band is None:
            continue
        segment = ("band", _AXES[0], band.lower, max(band.upper - band.lower, 0.0))
        low, high = quantity(band.lower, TIMES), quantity(band.upper, TIMES)
        description = f"between {low} and {high}, bound by {band.binding}"
        text = f"{table.band_text(band, size)} {unit}"
        rows.append(ChartRow(report.layout.name, (segment,), text, description))
    return _chart(rows, {})


def _chart(rows: Sequence[ChartRow], colors: Mapping[str, str], line: str = "") -> str:
    """Bars to one scale with a legend; ``line`` names the limit."""
    if not rows:
        return ""
    ends = [start + size for row in rows for _, _, start, size in row.segments]
    # Somewhat more than the longest, so that a line at the very end is seen.
    whole = 1.02 * max([*ends, *(row.limit or 0.0 for row in rows)], default=0.0) or 1.0
    legend = "".join(
        f'<li><i style="background:{color}"></i>{escape(name)}</li>'
        for name, color in colors.items()
    )
    if line:
        legend += f'<li><i class="line"></i>{escape(line)}</li>'
    bars = ""
    for row in rows:
        drawn = "".join(
            f'<span style="left:{100 * start / whole:.2f}%;width:{100 * size / whole:.2f}%;'
            f'background:{color}" title="{escape(name)}"></span>'
            for name, color, start, size in row.segments
        )
        if row.limit is not None:
            drawn += f'<b style="left:{100 * row.limit / whole:.2f}%"></b>'
        label = escape(f"{row.name}: {row.description}")
        bars += (
            f'<dt>{escape(row.name)}</dt><dd class="figure">{escape(row.figure)}</dd>'
            f'<dd class="drawn"><div class="bar" role="img" aria-label="{label}">{drawn}</div></dd>'
        )
    listed = f'<ul class="legend">{legend}</ul>' if legend else ""
    return f'{listed}<dl class="bars">{bars}</dl>'


def _details(report: LayoutReport, number: int, opened: bool) -> str:
    """The part of one layout, opened by a link to ``#layout-NUMBER``."""
    content = [_facts(report), _rules(report), _warnings(report), _pictures(report), _sent(report)]
    name = report.layout.name
    outcome = headline(report).removeprefix(name).strip()
    return (
        f'<details class="layout" id="layout-{number}"{" open" if opened else ""}>'
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
        listed = escape(", ".join(report.replicated[:_PATHS]))
        more = len(report.replicated) - _PATHS
        rest_text = f" and {more} more" if more > 0 else ""
        texts.append(f"Held whole by every device: <code>{listed}</code>{rest_text}")
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
    names = [
        f"{'-' if name is None else name}: {size}" + (f" / {'+'.join(axes)}" if axes else "")
        for name, size, axes in zip(array.names, array.shape, array.spec, strict=False)
    ]
    sizes = report.layout.sizes
    cells = math.prod(sizes[axis] for axes in array.spec for axis in axes)
    drawn = ""
    if sizes and cells <= _CELLS:
        mesh = auto_mesh(sizes)
        place = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in array.spec)))
        drawn = sharding_svg(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place))
        label = escape(f"{array.path} in {cells} parts")
        drawn = drawn.replace("<svg ", f'<svg aria-label="{label}" ', 1)
    caption = f"<code>{escape(array.path)}</code><br>{escape(', '.join(names))}"
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
    notes_by_title = table.notes_of(plan.reports)
    published = "Published steps of models and hardware like these"
    for title, texts in (("Notes", plan.notes), (published, table.published_lines(plan))):
        notes_by_title.append((title, tuple(table.Note(text, ()) for text in texts)))
    sections = ""
    for title, notes in notes_by_title:
        texts = [
            escape(note.text)
            + (f' <span class="quiet">{escape(note.source())}</span>' if note.layouts else "")
            for note in notes
        ]
        sections += f"<section><h2>{title}</h2>{_list(texts)}</section>" if texts else ""
    return sections


def _labels(plan: Plan, columns: Sequence[FigureColumn]) -> str:
    used = {column.label for column in columns}
    labels = [(label, meaning) for label, meaning in table.LABELS.items() if label in used]
    if not labels:
        return ""
    meanings = [(column.head, column.meaning) for column in columns]
    worth, explained = (
        "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
        for pairs in (labels, meanings)
    )
    return (
        "<section><h2>What the figures are worth</h2>"
        f"{_list([escape(line) for line in table.provenance_lines(plan.reports)])}"
        f'<dl class="labels">{worth}</dl>'
        f'<h3>Columns</h3><dl class="labels">{explained}</dl></section>'
    )
