# SPDX-License-Identifier: Apache-2.0
"""A plan as one page that needs no other: a table to sort, bars, and each layout to unfold.

Bars on a plan's page: memory, wire bytes and time of each layout, beside one another.

A *bar* is a row: the layout's name, parts drawn to the scale of the whole chart, and the figure.
Colours only repeat what the legend, the figure and the bar's description for screen readers say.

One layout on a plan's page: its rules, figures, pictures of parameters, and what it sends.

How a plan's page looks and what its script does: both stand in the page itself.

The page can be read without the script, which sorts the table and opens what a link points at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardax.plan.records import ArrayLayout, LayoutReport
from shardax.plan.report.columns import (
    BINARY,
    DECIMAL,
    OPERATIONS,
    TIMES,
    Column,
    Value,
    axes_text,
    band_text,
    columns_of,
    figure,
    measured_label,
    quantity,
    scale,
    wire_axes,
)
from shardax.plan.report.explanation import (
    UNKNOWN,
    Alike,
    Group,
    alike,
    groups,
    headline,
)
from shardax.plan.report.table import (
    LABELS,
    Remark,
    outcome_line,
    provenance_lines,
    reasons,
    tied_with_best,
    warnings_of,
)
from shardax.view.page import html_page
from shardax.view.pictures import sharding_svg

if TYPE_CHECKING:
    from shardax.plan.result import Plan


# --- Html charts ---

_KINDS = {
    "parameters": "#4e79a7",
    "optimizer": "#f28e2b",
    "batch": "#59a14f",
    "other": "#b07aa1",
    "temporaries": "#8d949e",
}
_FAR = 8
_AXES = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#edc948")


@dataclass(frozen=True)
class Part:
    """A part of a bar, in the unit of its chart.

    Attributes:
        start: Where it begins.
        size: How long it is.
        color: Its colour.
        name: What it is.
    """

    start: float
    size: float
    color: str
    name: str


@dataclass(frozen=True)
class Bar:
    """One row of a chart.

    Attributes:
        name: The layout's.
        parts: Drawn from left to right.
        figure: What stands on the right.
        said: The same in words, for those who do not see it.
        mark: Where a line is drawn across it; None for none.
    """

    name: str
    parts: tuple[Part, ...]
    figure: str
    said: str
    mark: float | None = None


def memory_chart(reports: Sequence[LayoutReport]) -> str:
    """Draws what a device's memory holds at the peak, with a line where it ends.

    Args:
        reports: Those with a peak are drawn.

    Returns:
        HTML; "" if there is nothing to draw.

    Example:
        >>> memory_chart([])
        ''
    """
    bars = [_memory_bar(report) for report in reports if report.peak_bytes is not None]
    used = {part.name: part.color for bar in bars for part in bar.parts}
    colors = {name: color for name, color in _KINDS.items() if name in used}
    marks = [bar.mark for bar in bars if bar.mark is not None]
    longest = max((report.peak_bytes or 0 for report in reports), default=0)
    if not marks:
        return _chart(bars, colors)
    if max(marks) > _FAR * longest:  # to its scale the bars would be too short to see
        bars = [replace(bar, mark=None) for bar in bars]
        far = f"memory of a device, {quantity(max(marks), BINARY)}, is far to the right"
        return f'{_chart(bars, colors)}<p class="quiet">The {escape(far)}.</p>'
    return _chart(bars, colors, "memory of a device")


def _memory_bar(report: LayoutReport) -> Bar:
    held = dict(report.argument_bytes)
    peak = report.peak_bytes or 0
    held["temporaries"] = max(peak - sum(held.values()), 0)
    parts: list[Part] = []
    start = 0.0
    for kind, size in held.items():
        if size:
            parts.append(Part(start, size, _KINDS.get(kind, _KINDS["other"]), kind))
            start += size
    said = ", ".join(f"{part.name} {quantity(part.size, BINARY)}" for part in parts)
    limit = report.limit_bytes
    total = quantity(peak, BINARY)
    of = f" of {quantity(limit, BINARY)}" if limit else ""
    return Bar(report.layout.name, tuple(parts), total + of, f"peak {total}{of}: {said}", limit)


def wire_chart(reports: Sequence[LayoutReport]) -> str:
    """Draws what a device sends in a step, by the mesh axes along which it does.

    Args:
        reports: Those that were compiled are drawn.

    Returns:
        HTML; "" if there is nothing to draw.
    """
    timed = [report for report in reports if report.time is not None]
    colors = {axes: _AXES[i % len(_AXES)] for i, axes in enumerate(wire_axes(timed))}
    bars: list[Bar] = []
    for report in timed:
        totals = report.wire_bytes()
        parts: list[Part] = []
        start = 0.0
        for axes, color in colors.items():
            if size := totals.get(axes, 0.0):
                parts.append(Part(start, size, color, axes_text(axes)))
                start += size
        total = quantity(report.total_wire_bytes, DECIMAL)
        said = ", ".join(f"{part.name} {quantity(part.size, DECIMAL)}" for part in parts)
        bars.append(Bar(report.layout.name, tuple(parts), total, f"{total}: {said or 'nothing'}"))
    return _chart(bars, {axes_text(axes): color for axes, color in colors.items()})


def time_chart(reports: Sequence[LayoutReport]) -> str:
    """Draws the time bands: from all overlapping to nothing overlapping.

    Args:
        reports: Those that were compiled are drawn.

    Returns:
        HTML; "" if there is nothing to draw.
    """
    unit, size = scale([report.time.upper for report in reports if report.time], TIMES)
    bars: list[Bar] = []
    for report in reports:
        if report.time is None:
            continue
        band = report.time
        text = f"{band_text(band, size)} {unit}"
        part = Part(band.lower, max(band.upper - band.lower, 0.0), _AXES[0], "band")
        said = f"between {quantity(band.lower, TIMES)} and {quantity(band.upper, TIMES)}"
        bars.append(Bar(report.layout.name, (part,), text, f"{said}, bound by {band.binding}"))
    return _chart(bars, {})


def _chart(bars: Sequence[Bar], colors: Mapping[str, str], line: str = "") -> str:
    if not bars:
        return ""
    ends = [part.start + part.size for bar in bars for part in bar.parts]
    # Somewhat more than the longest, so that a line at the very end is seen.
    whole = 1.02 * max([*ends, *(bar.mark or 0.0 for bar in bars)], default=0.0) or 1.0
    legend = [
        f'<li><i style="background:{color}"></i>{escape(name)}</li>'
        for name, color in colors.items()
    ]
    if line:
        legend.append(f'<li><i class="line"></i>{escape(line)}</li>')
    rows = "".join(_html_charts_row(bar, whole) for bar in bars)
    listed = f'<ul class="legend">{"".join(legend)}</ul>' if legend else ""
    return f'{listed}<dl class="bars">{rows}</dl>'


def _html_charts_row(bar: Bar, whole: float) -> str:
    parts = "".join(
        f'<span style="left:{100 * part.start / whole:.2f}%;width:{100 * part.size / whole:.2f}%;'
        f'background:{part.color}" title="{escape(part.name)}"></span>'
        for part in bar.parts
    )
    mark = "" if bar.mark is None else f'<b style="left:{100 * bar.mark / whole:.2f}%"></b>'
    said = escape(f"{bar.name}: {bar.said}")
    return (
        f"<dt>{escape(bar.name)}</dt>"
        f'<dd class="figure">{escape(bar.figure)}</dd>'
        f'<dd class="drawn"><div class="bar" role="img" aria-label="{said}">{parts}{mark}</div>'
        "</dd>"
    )


# --- Html details ---

_PICTURES = 4
_GROUPS = 25
_LISTED = 12
_CELLS = 1024


def details(report: LayoutReport, number: int, opened: bool) -> str:
    """Returns a layout's part of the page, which can be folded.

    Args:
        report: What was found of it.
        number: Its place in the plan, from 1; a link to ``#layout-1`` opens it.
        opened: Whether it is unfolded at first.
    """
    parts = [
        _facts(report),
        _rules(report),
        _warnings(report),
        _pictures(report),
        _sent(report),
    ]
    summary = f"<strong>{escape(report.layout.name)}</strong> "
    told = headline(report).removeprefix(report.layout.name).strip()
    return (
        f'<details class="layout" id="layout-{number}"{" open" if opened else ""}>'
        f'<summary>{summary}<span class="quiet">{escape(told)}</span></summary>'
        f"<div>{''.join(parts)}</div></details>"
    )


def _facts(report: LayoutReport) -> str:
    label = measured_label([report])
    found: list[tuple[str, str, str]] = []
    if report.peak_bytes is not None:
        found.append(("peak of memory", quantity(report.peak_bytes, BINARY), label))
    if report.headroom_bytes is not None:
        found.append(("memory that stays free", quantity(report.headroom_bytes, BINARY), label))
    found += [
        (kind, quantity(size, BINARY), "exact")
        for kind, size in report.argument_bytes.items()
        if size
    ]
    if report.time is not None:
        factor = f"{figure(report.replicated_compute)} x"
        found += [
            ("work of a device", quantity(report.flops, OPERATIONS), "counted"),
            ("each operation is done", factor, "counted"),
            ("memory traffic", quantity(report.hbm_bytes, DECIMAL), "estimate"),
            ("on the wire", quantity(report.total_wire_bytes, DECIMAL), "counted"),
            ("while other work goes on", f"{100 * report.asynchronous_share:.0f} %", "counted"),
            ("time of arithmetic", quantity(report.time.compute, TIMES), "estimate"),
            ("time of memory traffic", quantity(report.time.memory, TIMES), "estimate"),
            ("time of communication", quantity(report.time.communication, TIMES), "estimate"),
        ]
        if report.compile_seconds:  # 0 if the program was kept from before
            found.append(("compiled in", quantity(report.compile_seconds, TIMES), ""))
        if report.cross_slice_bytes:
            found.append(("between slices", quantity(report.cross_slice_bytes, DECIMAL), "counted"))
    if not found:
        return ""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)} <small>{escape(kind)}</small></dd></div>"
        for name, value, kind in found
    )
    return f'<dl class="facts">{cells}</dl>'


def _rules(report: LayoutReport) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_target(axes))}</td></tr>"
        for name, axes in report.layout.rules
    )
    mesh = escape(report.layout.mesh_text)
    table = f'<table class="pairs">{rows}</table>' if rows else "<p>There are none.</p>"
    return f'<h3>Rules</h3><p class="quiet">over {mesh}</p>{table}'


def _target(axes: Any) -> str:
    return axes if isinstance(axes, str) else " + ".join(axes or ()) or "not split"


def _warnings(report: LayoutReport) -> str:
    said = [*([report.reason] if report.reason else []), *report.warnings]
    items = "".join(f"<li>{escape(text)}</li>" for text in said)
    if report.replicated:
        shown = ", ".join(report.replicated[:_LISTED])
        more = len(report.replicated) - _LISTED
        rest = f" and {more} more" if more > 0 else ""
        items += f"<li>Held whole by every device: <code>{escape(shown)}</code>{rest}</li>"
    return f'<h3>To know</h3><ul class="remarks">{items}</ul>' if items else ""


def _pictures(report: LayoutReport) -> str:
    """The largest parameters of distinct forms, as the devices hold them."""
    largest = sorted(
        (each for each in report.arrays if each.kind == "parameters"),
        key=lambda each: -math.prod(each.shape),
    )
    chosen: dict[object, ArrayLayout] = {}
    for each in largest:
        chosen.setdefault((each.shape, each.spec), each)
    figures = "".join(_picture(report, each) for each in list(chosen.values())[:_PICTURES])
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
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        place = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in array.spec)))
        drawn = sharding_svg(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place))
        said = escape(f"{array.path} in {cells} parts")
        drawn = drawn.replace("<svg ", f'<svg aria-label="{said}" ', 1)
    caption = f"<code>{escape(array.path)}</code><br>{escape(', '.join(names))}"
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def _sent(report: LayoutReport) -> str:
    if report.time is None:
        return ""
    found = groups(report)
    total = report.total_wire_bytes
    if not found:
        return "<h3>What it sends</h3><p>Nothing: no device needs what another has.</p>"
    items = "".join(_group(group, total) for group in found[:_GROUPS])
    rest = found[_GROUPS:]
    if rest:
        size = quantity(sum(group.wire_bytes for group in rest), DECIMAL)
        items += f"<li>{len(rest)} more lines of code, {size} together</li>"
    return (
        f"<h3>What it sends, and which line of code needs it</h3>"
        f'<p class="quiet">{quantity(total, DECIMAL)} from each device in a step, by the line of '
        f"the model whose operation needs it.</p><ol class='sent'>{items}</ol>"
    )


def _group(group: Group, total: float) -> str:
    share = 100 * group.wire_bytes / total if total else 0.0
    key = f"<code>{escape(group.key)}</code>" if group.key else f"<em>{UNKNOWN['source']}</em>"
    items = "".join(f"<li>{_said(same)}</li>" for same in alike(group.collectives, "source"))
    return (
        f'<li><div class="head"><span>{quantity(group.wire_bytes, DECIMAL)}</span>'
        f"<span>{share:.0f} %</span>{key}</div>"
        f'<div class="share"><span style="width:{share:.1f}%"></span></div><ul>{items}</ul></li>'
    )


def _said(same: Alike) -> str:
    details = "".join(f'<br><span class="quiet">{escape(text)}</span>' for text in same.details)
    return f"<strong>{escape(same.sentence)}</strong>{details}"


# --- Html style ---

STYLE = """
:root { --line: #d5d9de; --soft: #f4f6f8; --text: #222; --quiet: #5a6270; --link: #0b57a4;
  --good: #1a7f37; --bad: #b42318; --limit: #b42318; }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.4rem; }
p { max-width: 46rem; margin: 0.4rem 0; }
a { color: var(--link); }
.quiet { color: var(--quiet); font-size: 13px; }
.scroll { margin-top: 1rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
.scroll table { border-collapse: separate; border-spacing: 0; width: 100%; }
.scroll th, .scroll td { padding: 5px 10px; white-space: nowrap; border-bottom-color: var(--line);
  border-right: 0; }
.scroll tbody tr:last-child > * { border-bottom: 0; }
.scroll thead th { background: var(--soft); vertical-align: bottom; }
.scroll th[scope=row] { position: sticky; left: 0; background: Canvas; font-weight: 600;
  max-width: 20rem; min-width: min(14rem, 34vw); overflow-wrap: anywhere; white-space: normal; }
.scroll td.right, .scroll th.right { text-align: right; font-variant-numeric: tabular-nums; }
.scroll thead button { all: unset; cursor: pointer; font: inherit; font-weight: 600; }
.scroll thead button:focus-visible, summary:focus-visible, .scroll:focus-visible, a:focus-visible {
  outline: 2px solid var(--link); outline-offset: 2px; }
.scroll thead button::after { content: " ⇅"; color: var(--quiet); }
.scroll th[aria-sort=ascending] button::after { content: " ▲"; color: inherit; }
.scroll th[aria-sort=descending] button::after { content: " ▼"; color: inherit; }
.scroll thead small { display: block; color: var(--quiet); font-weight: 400; }
.yes { color: var(--good); font-weight: 600; } .no, .failed { color: var(--bad); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; list-style: none; padding: 0;
  margin: 0.5rem 0; font-size: 13px; }
.legend i, .swatch { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px;
  margin-right: 0.4rem; vertical-align: -1px; }
.legend i.line { width: 2px; background: var(--limit); margin: 0 0.6rem 0 0.4rem; }
.bars { display: grid; grid-template-columns: minmax(6rem, 15rem) 1fr minmax(7rem, max-content);
  grid-auto-flow: dense; gap: 0.35rem 0.9rem; align-items: center; font-size: 13px; margin: 0; }
.bars dt { overflow-wrap: anywhere; } .bars dd { margin: 0; }
.bars dt { grid-column: 1; } .bars .drawn { grid-column: 2; }
.bars .figure { grid-column: 3; font-variant-numeric: tabular-nums; text-align: right; }
.bar { position: relative; height: 1.05rem; background: var(--soft); border-radius: 3px; }
.bar span { position: absolute; top: 0; bottom: 0; box-sizing: border-box;
  border-right: 1px solid Canvas; }
.bar b { position: absolute; top: -3px; bottom: -3px; width: 2px; background: var(--limit); }
details.layout { border: 1px solid var(--line); border-radius: 6px; margin: 0.5rem 0; }
details.layout > summary { cursor: pointer; padding: 0.55rem 0.8rem; overflow-wrap: anywhere; }
details.layout[open] > summary { border-bottom: 1px solid var(--line); background: var(--soft); }
details.layout > div { padding: 0.2rem 0.9rem 1rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr));
  gap: 0.5rem 1rem; margin: 0.8rem 0; }
.facts div { border-left: 3px solid var(--line); padding-left: 0.6rem; }
.facts dt { color: var(--quiet); font-size: 12px; } .facts dd { margin: 0; font-weight: 600; }
.facts dd small { font-weight: 400; color: var(--quiet); }
.pairs { width: auto; } .pairs td { overflow-wrap: anywhere; border-color: var(--line); }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; }
.pictures figure { margin: 0; max-width: 280px; } .pictures svg { max-width: 100%; height: auto; }
.pictures figcaption { overflow-wrap: anywhere; }
ol.sent { list-style: none; padding: 0; margin: 0; }
ol.sent > li { margin: 0.9rem 0; }
ol.sent .head { display: flex; flex-wrap: wrap; gap: 0 0.8rem; font-weight: 600; }
ol.sent .head code { overflow-wrap: anywhere; }
ol.sent .share { height: 4px; background: var(--soft); margin: 0.25rem 0 0.35rem; }
ol.sent .share span { display: block; height: 100%; background: #4e79a7; }
ol.sent ul { margin: 0; padding-left: 1.1rem; font-size: 14px; }
ol.sent ul li { margin: 0.35rem 0; overflow-wrap: anywhere; }
code { font-family: ui-monospace, monospace; font-size: 0.92em; overflow-wrap: anywhere; }
ul.remarks { padding-left: 1.1rem; } ul.remarks li { overflow-wrap: anywhere; margin: 0.3rem 0; }
dl.labels { display: grid; grid-template-columns: max-content 1fr; gap: 0.3rem 1rem; }
dl.labels dd { margin: 0; } dl.labels dt { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a3f46; --soft: #24282d; --text: #ddd; --quiet: #a3abb8; --link: #7ab8ff;
    --good: #57c278; --bad: #ff8a80; --limit: #ff8a80; }
  .scroll th[scope=row] { background: #181818; }
  .bar span { border-right-color: #181818; }
}
@media (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 0.75rem; }
  .bars { grid-template-columns: 1fr max-content; grid-auto-flow: row; }
  .bars .figure { grid-column: 2; }
  .bars .drawn { grid-column: 1 / -1; margin-bottom: 0.5rem; }
  .facts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  dl.labels { grid-template-columns: 1fr; }
}
@media print { details.layout > div { display: block; } .scroll { overflow: visible; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    for (const other of heads) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const numeric = head.dataset.kind === 'number';
    const value = row => row.cells[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === '' || y === '') return (x === '') - (y === '');
      const order = numeric ? Number(x) - Number(y)
        : x.localeCompare(y, 'en', {numeric: true});
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  }));
}
const reveal = () => {
  const name = decodeURIComponent(location.hash.slice(1));
  const target = name && document.getElementById(name);
  if (target && target.matches('details')) { target.open = true; target.scrollIntoView(); }
};
addEventListener('hashchange', reveal);
reveal();
"""


# --- Html ---

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
