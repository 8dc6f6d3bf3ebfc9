# SPDX-License-Identifier: Apache-2.0
"""Bars on a plan's page: memory, wire bytes and time of each layout, beside one another.

A *bar* is a row: the layout's name, parts drawn to the scale of the whole chart, and the figure.
Colours only repeat what the legend, the figure and the bar's description for screen readers say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from shardax.plan.columns import (
    BINARY,
    DECIMAL,
    TIMES,
    axes_text,
    band_text,
    quantity,
    scale,
    wire_axes,
)
from shardax.plan.records import LayoutReport

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
    rows = "".join(_row(bar, whole) for bar in bars)
    listed = f'<ul class="legend">{"".join(legend)}</ul>' if legend else ""
    return f'{listed}<dl class="bars">{rows}</dl>'


def _row(bar: Bar, whole: float) -> str:
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
