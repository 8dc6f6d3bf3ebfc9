# SPDX-License-Identifier: Apache-2.0
"""The benchmark of searches holds them to ten minutes of two idle cores, and to no failure."""

import plan_search
import pytest


def record(**changes):
    base = {
        "target": "tpu:v5e:4x4",
        "batch": 64,
        "compiler": "libtpu 0.0.42.1",
        "candidates": 49,
        "compiled": 36,
        "outcomes": {"fits": 30, "failed": 0},
        "wall_seconds": 900.0,
        "processor_seconds": 520.0,
        "processes": 2,
        "compile_seconds": [1.0, 7.0, 8.0],
        "best": "batch=data (16x1)",
        "lower": 0.676,
        "upper": 1.409,
        "peak_bytes": 2**33,
        "wire_bytes": 1.25e10,
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "failures"),
    [
        ({}, []),  # the machine was busy: two idle cores would take 260 seconds
        ({"processor_seconds": 1202.0}, ["tpu:v5e:4x4: 601 s, at most 600"]),
        ({"processor_seconds": 1202.0, "wall_seconds": 599.0}, []),
        ({"outcomes": {"fits": 1, "failed": 2}}, ["tpu:v5e:4x4: 2 candidates failed"]),
    ],
)
def test_bound_holds_for_wall_or_processor_time(changes, failures):
    assert plan_search.bound_failures(record(**changes)) == failures


def test_row_has_a_cell_for_each_header():
    row = plan_search.row(record())
    assert dict(zip(plan_search.HEADERS, row, strict=True)) == {
        "target": "tpu:v5e:4x4",
        "batch": "64",
        "compiler": "libtpu 0.0.42.1",
        "candidates": "49",
        "compiled": "36",
        "fit": "30",
        "wall": "900 s",
        "processor": "520 s",
        "a program": "7.0 s",
        "best layout": "batch=data (16x1)",
        "time": "0.68-1.41 s",
        "peak": "8.0 GiB",
        "sent": "12.5 GB",
    }
