# SPDX-License-Identifier: Apache-2.0
"""Figures have about three digits that count, in the unit that suits the largest."""

from __future__ import annotations

import pytest

from shardax.plan import Layout, LayoutReport, TimeBand
from shardax.plan.report.table import (
    BINARY,
    TIMES,
    axes_text,
    band_text,
    columns_of,
    figure,
    quantity,
    scale,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234, "0.012"),
        (9.1, "9.10"),
        (-9.1, "-9.10"),
        (115.37, "115"),
        (12345.6, "12346"),
    ],
)
def test_figure_has_the_digits_that_count(value: float, text: str) -> None:
    assert figure(value) == text


def test_largest_known_value_chooses_the_unit() -> None:
    assert scale([None, 12.0, -3e9], BINARY) == ("GiB", 2.0**30)
    assert scale([None], BINARY) == ("B", 1.0)
    assert (quantity(1536, BINARY), quantity(0.0021, TIMES)) == ("1.50 KiB", "2.10 ms")


def test_axes_and_time_bands_are_named() -> None:
    assert [axes_text(axes) for axes in ((), ("data",), ("data", "model"))] == [
        "other",
        "data",
        "data+model",
    ]
    assert band_text(TimeBand(0.5, 0.9, 0.5, 0.2, 0.2, 0.0, "compute")) == "0.50 - 0.90"


def test_meshes_with_equal_axes_show_only_sizes() -> None:
    reports = [
        LayoutReport(Layout(name, (), mesh), "fits", peak_bytes=peak * 2**20)
        for name, mesh, peak in (("dp", (("data", 8),), 3), ("tp", (("data", 4),), 1))
    ]
    columns = columns_of(reports)
    assert [(c.head, c.unit, c.text(reports[0]), c.text(reports[1])) for c in columns[:4]] == [
        ("layout", "", "dp", "tp"),
        ("data", "", "8", "4"),
        ("fits", "", "yes", "yes"),
        ("peak", "MiB", "3.00", "1.00"),
    ]
    mixed = [reports[0], LayoutReport(Layout("both", (), (("data", 2), ("model", 4))), "fits")]
    assert [columns_of(mixed)[1].text(each) for each in mixed] == ["data=8", "data=2, model=4"]
