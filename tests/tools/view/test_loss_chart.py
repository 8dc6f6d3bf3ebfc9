# SPDX-License-Identifier: Apache-2.0
"""The chart of losses: curves where the losses are, round numbers along both axes, a legend."""

from __future__ import annotations

import math
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardax._charts import chart_style
from shardax.view.loss_chart import Curve, drawn_curves, loss_chart, step_figure

RECORDS: list[dict[str, Any]] = [
    {"step": 10, "loss": 3.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "eval_loss": 2.5},
]
LOSS = Curve("training", "loss", "#4e79a7")
HELD_OUT = Curve("held out", "eval_loss", "#e15759", has_dots=True)
PHONE = (335, 240)


def axes_of(
    records: Sequence[Mapping[str, Any]], references: Mapping[str, float] | None = None
) -> Any:
    """The axes of a figure that is as wide as a phone."""
    figure = step_figure(drawn_curves([LOSS, HELD_OUT], records), references or {}, PHONE)
    return figure.axes[0]


def curves(axes: Any) -> list[list[list[float]]]:
    return [line.get_xydata().tolist() for line in axes.lines]


def numbers(axis: Any) -> list[str]:
    """The numbers along an axis that lie on it."""
    low, high = axis.get_view_interval()
    ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label.get_text() for tick, label in ticks if low <= tick <= high]


def legend(chart: str) -> list[str]:
    return re.findall(r"<li><i[^>]*></i>([^<]*)", chart)


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.0} for step in numbers]


def test_curves_lie_where_the_losses_are() -> None:
    training, held_out = curves(axes_of(RECORDS))
    assert training == [[10.0, 3.0], [20.0, 2.0]] and held_out == [[20.0, 2.5]]


def test_reference_lines_stand_at_their_loss() -> None:
    *_, low, high = curves(axes_of(RECORDS, {"low": 2.25, "high": 3.0}))
    assert [y for _, y in low] == [2.25, 2.25] and [y for _, y in high] == [3.0, 3.0]


def test_legend_names_each_line_with_its_last_value() -> None:
    assert legend(loss_chart(RECORDS, {"bigram": 2.3738})) == [
        "bigram 2.374",
        "training 2.000",
        "held out 2.500",
    ]


def test_chart_is_of_the_page_in_colour_and_font() -> None:
    chart = loss_chart(RECORDS, {"bigram": 2.3738})
    assert "fill: currentColor" in chart and "DejaVu" not in chart
    assert "<style" not in chart and "<?xml" not in chart
    assert chart.count("<svg") == 2  # for a wide page and a narrow one
    assert loss_chart(RECORDS, {"bigram": 2.3738}) == chart


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (10, 120, ["20", "40", "60", "80", "100", "120"]),
        (1, 4, ["1", "2", "3", "4"]),
        (7, 7, ["7"]),
        (10, 400, ["100", "200", "300", "400"]),
        (100, 1_000_000, ["500,000", "1,000,000"]),
    ],
)
def test_steps_are_marked_at_round_numbers(first: int, last: int, expected: list[str]) -> None:
    assert numbers(axes_of(steps(first, last)).xaxis) == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.92, 3.24], ["2.0", "2.5", "3.0"]),
        ([2.0, 3.0], ["2.0", "2.2", "2.4", "2.6", "2.8", "3.0"]),
        ([5, 400], ["0", "100", "200", "300", "400"]),
        ([0.00021, 0.00029], ["0.00022", "0.00024", "0.00026", "0.00028"]),
        ([0.0, 2e-5], ["0.000000", "0.000005", "0.000010", "0.000015", "0.000020"]),
        ([2e6, 2e6 + 400], ["2,000,000", "2,000,100", "2,000,200", "2,000,300", "2,000,400"]),
    ],
)
def test_losses_are_marked_at_round_numbers(losses: list[float], expected: list[str]) -> None:
    records = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    assert numbers(axes_of(records).yaxis) == expected


@settings(max_examples=20)
@given(st.integers(0, 10**7), st.integers(2, 10**7))
def test_loss_chart_axis_of_steps_fits_a_phone(first: int, count: int) -> None:
    texts = numbers(axes_of(steps(first, first + count)).xaxis)
    assert texts == sorted(set(texts), key=lambda text: int(text.replace(",", "")))
    assert len(texts) >= 1 and sum(8 * len(text) + 12 for text in texts) <= PHONE[0]


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}],
        [{"step": 1, "loss": math.inf}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": math.nan}],
        [{"step": 1, "eval_loss": 2.0}],
        [{"note": "no step"}, {"step": 4, "loss": 2.0}],
        [{"step": 1, "loss": -1.7e308}, {"step": 2, "loss": 1.7e308}],
        [{"step": 1, "loss": 0.0}, {"step": 2, "loss": 5e-324}],
    ],
)
def test_loss_chart_of_every_log_has_finite_points(records: Sequence[Mapping[str, Any]]) -> None:
    (curve,) = curves(axes_of(records))
    assert all(math.isfinite(x) and math.isfinite(y) for x, y in curve)
    assert not {"nan", "inf"} & {*re.findall(r"nan|inf\b", loss_chart(records, {}))}


def test_single_point_is_marked() -> None:
    (line,) = axes_of(steps(3)).lines
    assert line.get_marker() == "o"


def test_chart_follows_no_settings_of_the_user() -> None:
    charts = [loss_chart(RECORDS, {"bigram": 2.3738})]
    settings: dict[str, Any] = {
        "lines.linestyle": ":",
        "axes.facecolor": "red",
        "xtick.minor.visible": True,
        "font.size": 30,
        "svg.fonttype": "path",
    }
    with matplotlib.rc_context(settings):
        charts.append(loss_chart(RECORDS, {"bigram": 2.3738}))
        assert all(matplotlib.rcParams[name] == value for name, value in settings.items())
    assert charts[0] == charts[1]


def test_charts_of_two_threads_leave_the_settings_of_matplotlib() -> None:
    before, entered = dict(matplotlib.rcParams), threading.Event()

    def draw() -> None:
        entered.set()
        with chart_style():
            ended.wait(30)

    ended = threading.Event()
    with chart_style():
        thread = threading.Thread(target=draw)
        thread.start()
        entered.wait(30)
        thread.join(0.2)  # the thread is within its own style now, or waits for this one
    ended.set()
    thread.join()
    assert dict(matplotlib.rcParams) == before


def test_chart_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'shardax\[view\]'"):
        loss_chart(RECORDS, {})
