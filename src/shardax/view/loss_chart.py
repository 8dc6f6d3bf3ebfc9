# SPDX-License-Identifier: Apache-2.0
"""Charts of losses and other numbers over steps, as HTML without scripts.

Curves are SVG that stretches with the page. Texts are HTML beside it, so that they keep their size
on a phone: numbers along the axes, and below them a legend, where labels cannot lie over curves or
over each other. Its style is part of ``page.html``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any, NamedTuple

_INTERVALS = 5  # of the axis of values, about
_MOST_STEPS = 7  # numbers along the axis of steps, where a phone has room for them
_PHONE_WIDTH, _DIGIT_WIDTH, _GAP = 250, 8, 12  # pixels: the axis of steps, a digit, what is between
_COLORS = ("#8d949e", "#f28e2b", "#59a14f", "#b07aa1")  # of reference lines, in turn


class Curve(NamedTuple):
    """A curve of a chart, with the source of its numbers."""

    name: str
    key: str  # in the records
    color: str
    has_dots: bool = False  # whether each point is marked


_OF_LOSS = (
    Curve("training", "loss", "#4e79a7"),
    Curve("held out", "eval_loss", "#e15759", has_dots=True),
)
_LEARNING_RATE = Curve("learning rate", "learning_rate", "#59a14f")
_GRADIENT_NORM = Curve("gradient norm", "grad_norm", "#b07aa1")
_SPEED_COLOR, _SPEED_ENDING = "#f28e2b", "_per_second"


class ChartAxis(NamedTuple):
    """The range of an axis, and the round numbers in it."""

    low: float
    high: float
    ticks: list[float]
    labels: list[str]

    def percent(self, value: float) -> float:
        """Returns a value's position along the axis."""
        # Divided first: a difference of two large floats may not be one.
        span = self.high / 2 - self.low / 2
        return min(max(50 * ((value - self.low) / span), 0.0), 100.0) if span else 50.0


def loss_chart(
    records: Sequence[Mapping[str, object]], references: Mapping[str, float], unit: str = ""
) -> str:
    """Draws training and held-out loss over steps, with reference lines."""
    chart = _step_chart("Loss", _OF_LOSS, records, references, unit)
    return chart or "<p>No losses were recorded.</p>"


def other_charts(records: Sequence[Mapping[str, object]]) -> list[str]:
    """Draws what else records of training have: learning rate, norm of the gradients, speed.

    Args:
        records: Log records.

    Returns:
        A chart for each number that was recorded.
    """
    speeds = [key for record in records for key in record if key.endswith(_SPEED_ENDING)]
    charts = [
        _step_chart("Learning rate", [_LEARNING_RATE], records, unit="learning rate"),
        _step_chart("Gradients", [_GRADIENT_NORM], records, unit="norm of all gradients"),
    ]
    for key in dict.fromkeys(speeds):
        unit = key.replace("_", " ")
        charts.append(_step_chart("Speed", [Curve(unit, key, _SPEED_COLOR)], records, unit=unit))
    return [chart for chart in charts if chart]


def _step_chart(
    title: str,
    curves: Sequence[Curve],
    records: Sequence[Mapping[str, object]],
    references: Mapping[str, float] = MappingProxyType({}),
    unit: str = "",
) -> str:
    """Draws curves over steps, with reference lines; returns "" without a point."""
    drawn = [(curve, _points(records, curve.key)) for curve in curves]
    drawn = [(curve, points) for curve, points in drawn if points]
    if not drawn:
        return ""

    steps = [step for _, points in drawn for step, _ in points]
    values = [value for _, points in drawn for _, value in points]
    x_axis = _step_axis(min(steps), max(steps))
    y_axis = round_axis([*values, *references.values()])

    lines: list[str] = []
    legend: list[str] = []
    for tick in y_axis.ticks:
        lines.append(_horizontal(100 - y_axis.percent(tick), "currentColor", "grid"))
    for number, (name, value) in enumerate(references.items()):
        color = _COLORS[number % len(_COLORS)]
        lines.append(_horizontal(100 - y_axis.percent(value), color, "reference"))
        legend.append(_legend_entry("dashed", color, f"{name} {_number_text(value)}"))

    summary: list[str] = []
    for curve, points in drawn:
        last = _number_text(points[-1][1])
        places = [(x_axis.percent(step), 100 - y_axis.percent(value)) for step, value in points]
        text = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
        lines.append(f'<polyline points="{text}" stroke="{curve.color}"/>')
        if curve.has_dots or len(points) == 1:
            # A line of no length with round ends is a disk, which does not stretch.
            dots = "".join(f"M{x:.2f},{y:.2f}h0" for x, y in places)
            lines.append(f'<path class="dots" d="{dots}" stroke="{curve.color}"/>')
        legend.append(_legend_entry("solid", curve.color, f"{curve.name} {last}"))
        summary.append(f"{curve.name} {last} at step {points[-1][0]:,}")

    label = escape("; ".join([f"{title} over {len(set(steps)):,} steps", *summary]))
    y_labels = _tick_labels(y_axis, "bottom")
    x_labels = _tick_labels(x_axis, "left")
    widest = max(map(len, y_axis.labels))
    of_unit = f'<p class="unit">{escape(unit)}</p>' if unit else ""
    return (
        f'<figure class="chart" style="--gutter:{widest + 1}ch">{of_unit}'
        f'<div class="plot" role="img" aria-label="{label}"><div class="y">{y_labels}</div>'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(lines)}</svg>'
        f'<div class="x">{x_labels}</div></div><p class="axis">step</p>'
        f'<ul class="legend">{"".join(legend)}</ul></figure>'
    )


def _number_text(value: float) -> str:
    """Formats a number of a legend."""
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3e}"
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"


def round_axis(values: Sequence[float], intervals: int = _INTERVALS) -> ChartAxis:
    """Makes an axis of numbers, from a round one to another."""
    largest = sys.float_info.max
    low, high = min(values), max(values)
    if low == high:
        half = (abs(low) or 1.0) / 2
        low, high = max(low - half, -largest), min(high + half, largest)
    size = _round_step(high / intervals - low / intervals)
    first, last = math.floor(low / size), math.ceil(high / size)
    ticks = [max(-largest, min(count * size, largest)) for count in range(first, last + 1)]
    return ChartAxis(ticks[0], ticks[-1], ticks, _format_ticks(ticks, size))


def _step_axis(first: int, last: int) -> ChartAxis:
    """Makes an axis of steps, with numbers for which phones have room."""
    room = _PHONE_WIDTH // (_DIGIT_WIDTH * len(f"{last:,}") + _GAP)
    room = max(2, min(_MOST_STEPS, room))
    size = 1
    while last // size - -(-first // size) + 1 > room:
        size = round(_round_step(1.5 * size))
    ticks = [float(step) for step in range(-(-first // size) * size, last + 1, size)]
    return ChartAxis(first, last, ticks, [f"{tick:,.0f}" for tick in ticks])


def _round_step(size: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    if size <= 0:
        return 1.0
    power = 10.0 ** max(math.floor(math.log10(size)), -300)
    return next((f * power for f in (1, 2, 5) if f * power >= size * (1 - 1e-9)), 10 * power)


def _format_ticks(ticks: Sequence[float], size: float) -> list[str]:
    """Formats numbers alike, with as many digits as tell them apart."""
    largest = max(map(abs, ticks))
    finest, leading = math.floor(math.log10(size) + 1e-9), math.floor(math.log10(largest))
    if leading >= 6 or finest < -6:
        return [f"{tick:.{max(0, leading - finest)}e}" for tick in ticks]
    return [f"{tick:,.{max(0, -finest)}f}" for tick in ticks]


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Returns steps and finite numbers of records."""
    points = [
        (int(record["step"]), float(record[key]))
        for record in records
        if key in record and "step" in record
    ]
    return [(step, value) for step, value in points if math.isfinite(value)]


def _horizontal(y: float, color: str, kind: str) -> str:
    return f'<line class="{kind}" x1="0" x2="100" y1="{y:.2f}" y2="{y:.2f}" stroke="{color}"/>'


def _tick_labels(axis: ChartAxis, side: str) -> str:
    return "".join(
        f'<span style="{side}:{axis.percent(tick):.2f}%">{escape(label)}</span>'
        for tick, label in zip(axis.ticks, axis.labels, strict=True)
    )


def _legend_entry(line: str, color: str, text: str) -> str:
    return f'<li><i style="border-top:2px {line} {color}"></i>{escape(text)}</li>'
