# SPDX-License-Identifier: Apache-2.0
"""Bar charts of a plan: memory, bytes on the wire, and the time of a step, a bar for each layout.

Colours only repeat what legends, figures and the charts' descriptions for screen readers say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardax import _charts
from shardax._charts import LegendEntry
from shardax.plan.records import LayoutReport
from shardax.plan.report import table
from shardax.plan.report.table import BINARY, DECIMAL, TIMES, Units, quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAR = 8  # how many times the longest bar the limit may be for both to share a scale
_KINDS = {
    "parameters": "#4e79a7",
    "optimizer": "#f28e2b",
    "batch": "#59a14f",
    "other": "#b07aa1",
    "temporaries": "#8d949e",
}
_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#edc948")
_LIMIT_COLOR = "#d6453d"
_REST, _BAND = "the rest", "between the bounds"  # names of parts

_WIDTH, _ROW, _CHARACTER = 335, 42, 8  # pixels: of a phone, of a row, of a character
_THICKNESS = 0.36  # of a bar, in rows


class Bar(NamedTuple):
    """A bar of a chart: sizes of its parts by name, in the unit of the chart."""

    layout: str
    sizes: Mapping[str, float]
    figure: str  # on the right
    description: str  # for screen readers
    start: float = 0.0
    limit: float | None = None  # where a line is drawn across it

    @property
    def end(self) -> float:
        """Where its last part ends."""
        return self.start + sum(self.sizes.values())


def memory_chart(reports: Sequence[LayoutReport]) -> str:
    """Draws the contents of a device's memory at the peak, and its limit."""
    bars: list[Bar] = []
    for report in reports:
        if report.peak_bytes is None:
            continue
        sizes = {kind: size for kind, size in report.argument_bytes.items() if size}
        temporaries = report.peak_bytes - sum(sizes.values())
        if temporaries > 0:
            sizes["temporaries"] = temporaries

        figure = table.peak_text(report)
        description = f"peak {figure}: {_parts_text(sizes, BINARY)}"
        limit = report.limit_bytes or None
        bars.append(Bar(report.layout.name, sizes, figure, description, limit=limit))

    used = dict.fromkeys(kind for bar in bars for kind in bar.sizes)
    colors = {kind: _KINDS.get(kind, _KINDS["other"]) for kind in used}
    limit = max((bar.limit or 0.0 for bar in bars), default=0.0)
    if limit <= _FAR * max((bar.end for bar in bars), default=0.0):
        return _chart(bars, colors)

    # To the limit's scale the bars would be too short to see.
    bars = [bar._replace(limit=None) for bar in bars]
    far = f"The memory of a device, {quantity(limit, BINARY)}, is far to the right."
    return f'{_chart(bars, colors)}<p class="quiet">{far}</p>'


def wire_chart(reports: Sequence[LayoutReport]) -> str:
    """Draws the bytes sent by a device in a step, by mesh axes."""
    timed = [report for report in reports if report.time is not None]
    names = {axes: table.axes_text(axes) for axes in table.wire_axes(timed)}
    bars: list[Bar] = []
    for report in timed:
        bytes_by_axes = report.wire_bytes()
        sizes = {name: bytes_by_axes.get(axes, 0.0) for axes, name in names.items()}
        figure = quantity(report.total_wire_bytes, DECIMAL)
        description = f"{figure}: {_parts_text(sizes, DECIMAL) or 'nothing'}"
        bars.append(Bar(report.layout.name, sizes, figure, description))
    return _chart(bars, {n: _COLORS[i % len(_COLORS)] for i, n in enumerate(names.values())})


def expected_chart(reports: Sequence[LayoutReport]) -> str:
    """Draws expected seconds by part."""
    pairs = [(report, report.expected) for report in reports if report.expected]
    unit, size = table.scale([expected.high for _, expected in pairs], TIMES)

    # The parts that take longest over all layouts have a colour each.
    totals: Counter[str] = Counter()
    for _, expected in pairs:
        totals.update({name: seconds for name, seconds in vars(expected.parts).items() if seconds})
    names = [name for name, _ in totals.most_common(len(_COLORS) - 1)]

    bars: list[Bar] = []
    for report, expected in pairs:
        sizes = {name: getattr(expected.parts, name) for name in names}
        sizes[_REST] = max(0.0, expected.seconds - sum(sizes.values()))
        ends = [table.figure(end / size) for end in (expected.seconds, expected.low, expected.high)]
        figure = "{} ({} - {}) {}".format(*ends, unit)
        said = f"{_parts_text(sizes, TIMES)}; waits for {expected.waits_for}"
        bars.append(Bar(report.layout.name, sizes, figure, f"{figure}: {said}"))
    return _chart(bars, dict(zip([*names, _REST], _COLORS, strict=False)))


def time_chart(reports: Sequence[LayoutReport]) -> str:
    """Draws the time bands: from all overlapping to nothing overlapping."""
    unit, size = table.scale([report.time.upper for report in reports if report.time], TIMES)
    bars: list[Bar] = []
    for report in reports:
        if band := report.time:
            ends = " and ".join(quantity(end, TIMES) for end in (band.lower, band.upper))
            description = f"between {ends}, bound by {band.binding}"
            sizes = {_BAND: max(band.upper - band.lower, 0.0)}
            figure = f"{table.band_text(band, size)} {unit}"
            bars.append(Bar(report.layout.name, sizes, figure, description, start=band.lower))
    return _chart(bars, {_BAND: _COLORS[0]})


def _parts_text(sizes: Mapping[str, float], units: Units) -> str:
    return ", ".join(f"{name} {quantity(size, units)}" for name, size in sizes.items() if size)


def _chart(bars: Sequence[Bar], colors: Mapping[str, str]) -> str:
    """Returns bars to one scale as HTML; "" without any."""
    if not bars:
        return ""
    legend = [LegendEntry("0.7rem solid", color, name) for name, color in colors.items()]
    if any(bar.limit for bar in bars):
        legend.append(LegendEntry("2px solid", _LIMIT_COLOR, "memory of a device"))
    label = "; ".join(f"{bar.layout}: {bar.description}" for bar in bars)
    return _charts.chart_html(label, [bar_figure(bars, colors)], legend)


@_charts.chart_style()
def bar_figure(bars: Sequence[Bar], colors: Mapping[str, str]) -> Figure:
    """Returns the matplotlib figure of bars to one scale, each below its texts."""
    # Somewhat more than the longest, so that a line at the very end is seen.
    whole = 1.02 * max(max(bar.end, bar.limit or 0.0) for bar in bars) or 1.0
    figure = _charts.new_figure(_WIDTH, _ROW * len(bars))
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, whole)
    axes.set_ylim(len(bars), 0)

    for row, bar in enumerate(bars, 1):
        middle = row - _THICKNESS
        axes.barh(middle, whole, _THICKNESS, color=_charts.TEXT_COLOR, alpha=0.08, clip_on=False)
        start = bar.start
        for name, size in bar.sizes.items():
            axes.barh(middle, size, _THICKNESS, left=start, color=colors[name], clip_on=False)
            start += size
        if bar.limit:
            ends = (middle - 0.6 * _THICKNESS, middle + 0.6 * _THICKNESS)
            axes.vlines(bar.limit, *ends, color=_LIMIT_COLOR, linewidth=2, clip_on=False)

        room = _WIDTH // _CHARACTER - len(bar.figure)
        name = bar.layout if len(bar.layout) < room else f"{bar.layout[: room - 2]}…"
        above = middle - 0.8 * _THICKNESS
        axes.text(0, above, name, parse_math=False)
        axes.text(whole, above, bar.figure, ha="right", parse_math=False)
    return figure
