# SPDX-License-Identifier: Apache-2.0
"""Charts of losses and other numbers over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardax import _charts
from shardax._charts import LegendEntry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Size = tuple[int, int]

_NARROW, _WIDE = (335, 240), (900, 340)  # sizes in pixels
_COLORS = ("#8d949e", "#f28e2b", "#59a14f", "#b07aa1")  # of reference lines, in turn
_LINE_WIDTH = 1.8
_MOST_STEPS = 7  # intervals of the axis of steps
_VALUES_WIDTH, _DIGIT_WIDTH, _GAP = 85, 8, 12  # pixels: the axis of values, a digit, a gap
_LARGEST = 1e200  # matplotlib adds margins to what it draws, beyond the largest of floats


class Curve(NamedTuple):
    """A curve of a chart, with the source of its numbers."""

    name: str
    key: str  # in the records
    color: str
    has_dots: bool = False  # whether each point is marked


class DrawnCurve(NamedTuple):
    """A curve, and its points: steps with finite values."""

    curve: Curve
    points: list[tuple[int, float]]

    @property
    def last_text(self) -> str:
        """Its last value."""
        return _number_text(self.points[-1][1])


_OF_LOSS = (
    Curve("training", "loss", "#4e79a7"),
    Curve("held out", "eval_loss", "#e15759", has_dots=True),
)
_LEARNING_RATE = Curve("learning rate", "learning_rate", "#59a14f")
_GRADIENT_NORM = Curve("gradient norm", "grad_norm", "#b07aa1")
_SPEED_COLOR, _SPEED_ENDING = "#f28e2b", "_per_second"


def loss_chart(
    records: Sequence[Mapping[str, object]], references: Mapping[str, float], unit: str = ""
) -> str:
    """Draws training and held-out loss over steps, with reference lines."""
    chart = _step_chart("Loss", _OF_LOSS, records, references, unit, sizes=(_WIDE, _NARROW))
    return chart or "<p>No losses were recorded.</p>"


def other_charts(records: Sequence[Mapping[str, object]]) -> list[str]:
    """Draws what else records of training have: learning rate, norm of the gradients, speed.

    Args:
        records: Log records.

    Returns:
        A chart for each number that was recorded.
    """
    charts = [
        _step_chart("Learning rate", [_LEARNING_RATE], records, unit="learning rate"),
        _step_chart("Gradients", [_GRADIENT_NORM], records, unit="norm of all gradients"),
    ]

    speeds = [key for record in records for key in record if key.endswith(_SPEED_ENDING)]
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
    sizes: Sequence[Size] = (_NARROW,),
) -> str:
    """Draws curves over steps, with reference lines; returns "" without a point."""
    drawn = drawn_curves(curves, records)
    if not drawn:
        return ""

    legend = [
        LegendEntry("2px dashed", color, f"{name} {_number_text(value)}")
        for (name, value), color in zip(references.items(), cycle(_COLORS), strict=False)
    ]
    legend += [
        LegendEntry("2px solid", each.curve.color, f"{each.curve.name} {each.last_text}")
        for each in drawn
    ]

    count = len({step for each in drawn for step, _ in each.points})
    ends = [f"{each.curve.name} {each.last_text} at step {each.points[-1][0]:,}" for each in drawn]
    label = "; ".join([f"{title} over {count:,} steps", *ends])
    figures = [step_figure(drawn, references, size) for size in sizes]
    return _charts.chart_html(label, figures, legend, unit)


def drawn_curves(curves: Sequence[Curve], records: Sequence[Mapping[str, Any]]) -> list[DrawnCurve]:
    """Returns the curves that have points in the records."""
    drawn: list[DrawnCurve] = []
    for curve in curves:
        numbers = [
            (int(record["step"]), float(record[curve.key]))
            for record in records
            if curve.key in record and "step" in record
        ]
        points = [(step, value) for step, value in numbers if math.isfinite(value)]
        if points:
            drawn.append(DrawnCurve(curve, points))
    return drawn


@_charts.chart_style()
def step_figure(drawn: Sequence[DrawnCurve], references: Mapping[str, float], size: Size) -> Figure:
    """Returns the matplotlib figure of curves over steps, with reference lines.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib import ticker

    width, height = size
    figure = _charts.new_figure(width, height)
    axes = figure.subplots()
    axes.set_xlabel("step")

    for curve, points in drawn:
        marker = "o" if curve.has_dots or len(points) == 1 else None
        steps = [step for step, _ in points]
        values = [_bounded(value) for _, value in points]
        axes.plot(
            steps,
            values,
            color=curve.color,
            linewidth=_LINE_WIDTH,
            marker=marker,
            markersize=5,
            clip_on=False,  # dots at the ends of the axis are whole
        )
    for value, color in zip(references.values(), cycle(_COLORS), strict=False):
        axes.axhline(_bounded(value), color=color, linewidth=_LINE_WIDTH, linestyle=(0, (4, 2.5)))

    # Every number on the axis of values is whole: none is an offset from one that stands elsewhere.
    axes.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda value, _: _tick_text(value, [*axes.yaxis.get_majorticklocs()]))
    )

    # The axis of steps goes from the first to the last. Of them as many are named as there is room
    # for, beside the numbers along the axis of values.
    last = max(each.points[-1][0] for each in drawn)
    room = (width - _VALUES_WIDTH) // (_DIGIT_WIDTH * len(f"{last:,}") + _GAP)
    intervals = max(2, min(_MOST_STEPS, room))
    round_steps = ticker.MaxNLocator(intervals, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    axes.margins(x=0)
    axes.xaxis.set_major_locator(round_steps)
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.grid(visible=True, axis="y", color=_charts.TEXT_COLOR, alpha=0.18)
    axes.tick_params(length=0)
    return figure


def _tick_text(value: float, ticks: Sequence[float]) -> str:
    """Returns a number on the axis of values, with the decimals that tell it from the next one."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(value)
    if not 1e-9 < step < 1e15:
        return f"{value:.6g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}"


def _bounded(value: float) -> float:
    return min(max(value, -_LARGEST), _LARGEST)


def _number_text(value: float) -> str:
    """Formats a number of a legend."""
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3e}"
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"
