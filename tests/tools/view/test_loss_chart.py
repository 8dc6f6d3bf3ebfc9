# SPDX-License-Identifier: Apache-2.0
"""The chart of losses: curves where the losses are, round numbers along both axes, a legend."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardax.view.loss_chart import loss_chart, round_axis

RECORDS: list[dict[str, Any]] = [
    {"step": 10, "loss": 3.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "eval_loss": 2.5},
]
LOSSES = st.floats(-1e300, 1e300)


def curves(chart: str) -> list[list[tuple[float, float]]]:
    """Points of the curves, in percent of the plot; y counts downwards."""
    lines = re.findall(r'<polyline points="([^"]*)"', chart)
    pairs = [[pair.split(",") for pair in line.split()] for line in lines]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


def labels(chart: str, axis: str) -> list[str]:
    return re.findall(
        r"<span[^>]*>([^<]*)", re.findall(f'<div class="{axis}">(.*?)</div>', chart)[0]
    )


def legend(chart: str) -> list[str]:
    return re.findall(r"<li><i[^>]*></i>([^<]*)", chart)


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.0} for step in numbers]


def test_curves_lie_where_the_losses_are() -> None:
    training, held_out = curves(loss_chart(RECORDS, {}))
    assert training == [(0.0, 0.0), (100.0, 100.0)] and held_out == [(100.0, 50.0)]


def test_reference_lines_stand_at_their_loss() -> None:
    chart = loss_chart(RECORDS, {"low": 2.25, "high": 3.0})
    assert re.findall(r'class="reference"[^>]*y1="([\d.]+)" y2="([\d.]+)"', chart) == [
        ("75.00", "75.00"),
        ("0.00", "0.00"),
    ]


def test_legend_names_each_line_with_its_last_value() -> None:
    assert legend(loss_chart(RECORDS, {"bigram": 2.3738})) == [
        "bigram 2.374",
        "training 2.000",
        "held out 2.500",
    ]


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
    assert labels(loss_chart(steps(first, last), {}), "x") == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.92, 3.24], ["1.5", "2.0", "2.5", "3.0", "3.5"]),
        ([2.0, 3.0], ["2.0", "2.2", "2.4", "2.6", "2.8", "3.0"]),
        ([5, 400], ["0", "100", "200", "300", "400"]),
        ([0.00021, 0.00029], ["0.00020", "0.00022", "0.00024", "0.00026", "0.00028", "0.00030"]),
        ([0.0, 2e7], ["0.0e+00", "5.0e+06", "1.0e+07", "1.5e+07", "2.0e+07"]),
    ],
)
def test_losses_are_marked_at_round_numbers(losses: list[float], expected: list[str]) -> None:
    assert round_axis(losses).labels == expected


@given(st.lists(LOSSES, min_size=1, max_size=5))
@example([0.0, 5e-324])  # a fifth of it is zero
def test_round_axis_has_several_numbers_around_the_values(losses: list[float]) -> None:
    axis = round_axis(losses)
    rounding = 1e-9 * (axis.high - axis.low)
    assert 2 <= len(axis.ticks) <= 8
    assert axis.low <= min(losses) + rounding and max(losses) <= axis.high + rounding
    assert all(0 <= axis.percent(loss) <= 100 for loss in losses)


@given(st.integers(0, 10**7), st.integers(2, 10**7))
def test_loss_chart_axis_of_steps_fits_a_phone(first: int, count: int) -> None:
    texts = labels(loss_chart(steps(first, first + count), {}), "x")
    assert texts == sorted(set(texts), key=lambda text: int(text.replace(",", "")))
    assert len(texts) >= 1 and sum(8 * len(text) + 12 for text in texts) <= 260


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}],
        [{"step": 1, "loss": math.inf}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": math.nan}],
        [{"step": 1, "eval_loss": 2.0}],
        [{"note": "no step"}, {"step": 4, "loss": 2.0}],
        [{"step": 1, "loss": -1.7e308}, {"step": 2, "loss": 1.7e308}],
    ],
)
def test_loss_chart_of_every_log_has_finite_points(records: Sequence[Mapping[str, Any]]) -> None:
    (curve,) = curves(loss_chart(records, {}))
    assert all(0 <= x <= 100 and 0 <= y <= 100 for x, y in curve)


def test_single_point_is_marked() -> None:
    assert 'class="dots" d="M50.00,50.00h0"' in loss_chart(steps(3), {})
