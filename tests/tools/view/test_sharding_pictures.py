# SPDX-License-Identifier: Apache-2.0
"""Drawings show every shard once, in its place, with the devices that hold it."""

from __future__ import annotations

import html
import re
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from tests.tools.view.drawings import text_of

BOTH = ("data", "model")
NO_SPLIT = PartitionSpec()

# Shape, spec, and the devices of each cell, row by row.
CASES: list[tuple[tuple[int, ...], PartitionSpec, list[list[str]]]] = [
    ((), NO_SPLIT, [["0-7"]]),
    ((8,), NO_SPLIT, [["0-7"]]),
    ((8,), PartitionSpec("model"), [["0,4", "1,5", "2,6", "3,7"]]),
    ((8,), PartitionSpec("data"), [["0-3", "4-7"]]),
    ((8,), PartitionSpec(BOTH), [list("01234567")]),
    ((8, 8), NO_SPLIT, [["0-7"]]),
    ((8, 8), PartitionSpec(*BOTH), [list("0123"), list("4567")]),
    ((8, 8), PartitionSpec("model"), [["0,4"], ["1,5"], ["2,6"], ["3,7"]]),
    ((8, 8), PartitionSpec(None, "data"), [["0-3", "4-7"]]),
    ((8, 8), PartitionSpec(BOTH), [[number] for number in "01234567"]),
    ((4, 8, 16), NO_SPLIT, [["0-7"]]),
    ((4, 8, 16), PartitionSpec(None, "model"), [["0,4", "1,5", "2,6", "3,7"]]),
    (
        (4, 8, 16),
        PartitionSpec(None, "model", "data"),
        [list("04"), list("15"), list("26"), list("37")],
    ),
    ((4, 8, 16), PartitionSpec("data", None, "model"), [list("0123"), list("4567")]),
]


def placed(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))


def shown_text(page: str) -> str:
    """What a browser shows of HTML."""
    return html.unescape(re.sub("<[^>]*>", "", page))


def labels_by_row(text: str) -> list[list[str]]:
    """The labels of a drawing's cells, row by row."""
    labels = [re.findall(r"CPU ([\d,-]+)", line) for line in text.splitlines()]
    return [row for row in labels if row]


@pytest.mark.parametrize(("shape", "spec", "devices"), CASES)
def test_html_is_the_text_in_colors(
    auto_mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, devices: list[list[str]]
) -> None:
    array = placed(auto_mesh, shape, spec)
    page = sx.view.sharding_html(array)
    assert shown_text(page).rstrip("\n") == text_of(array)
    colored = {
        label for _, label in re.findall(r"background-color: (#\w+)\">([^<]*CPU[^<]*)", page)
    }
    assert len(colored) == sum(map(len, devices))


@pytest.mark.parametrize(("shape", "spec", "devices"), CASES)
def test_text_has_labeled_box_per_distinct_shard(
    auto_mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, devices: list[list[str]]
) -> None:
    text = text_of(placed(auto_mesh, shape, spec))
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert labels_by_row(text) == devices
    edges = [line for line in lines if line[0] in "┌├└"]
    assert len(edges) == len(devices) + 1
    assert all(sum(mark in "┬┼┴" for mark in edge) == len(devices[0]) - 1 for edge in edges)


def luminance(color: str) -> float:
    """Relative luminance of ``#rrggbb``, as WCAG 2.2 defines it."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_labels_can_be_read_on_every_color(auto_mesh: Mesh) -> None:
    page = sx.view.sharding_html(placed(auto_mesh, (8,), PartitionSpec(BOTH)))
    pairs = re.findall(r'"color: (#\w+);[^"]*background-color: (#\w+)"', page)
    assert {color for color, _ in pairs} == {"#000000"}
    fills = {fill for _, fill in pairs}
    assert len(fills) == 8
    assert min((luminance(fill) + 0.05) / 0.05 for fill in fills) > 4.5  # level AA


def test_text_keeps_its_proportions_within_bounds(auto_mesh: Mesh) -> None:
    def size(shape: tuple[int, ...]) -> tuple[int, int]:
        lines = text_of(placed(auto_mesh, shape, NO_SPLIT)).splitlines()
        return len(lines) - 2, len(lines[0]) - 2

    assert size((4, 4)) == (9, 18)
    assert size((4, 8)) == (9, 36)
    assert size((1, 1_000_000)) == (1, 48)
    assert size((1_000_000, 1)) == (9, len(" CPU 0-7 "))


def test_third_sharded_dimension_is_behind_the_face() -> None:
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=kinds)
    array = placed(mesh, (4, 4, 4), PartitionSpec("x", "y", "z"))
    assert labels_by_row(text_of(array)) == [["0,1", "2,3"], ["4,5", "6,7"]]


def test_single_device_and_empty_arrays_are_drawn() -> None:
    assert labels_by_row(text_of(jax.device_put(np.zeros(3)))) == [["0"]]
    assert labels_by_row(text_of(jax.device_put(np.zeros((0, 3))))) == [["0"]]


def test_showing_prints_the_text_of_a_variable(auto_mesh: Mesh, capsys: Any) -> None:
    array = placed(auto_mesh, (8, 8), PartitionSpec("data"))
    sx.view.show_sharding(sx.Param(array))
    assert capsys.readouterr().out == text_of(array) + "\n"


def test_showing_on_a_terminal_is_in_color(
    auto_mesh: Mesh, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = placed(auto_mesh, (8, 8), PartitionSpec(*BOTH))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any file for a terminal then
    monkeypatch.setenv("COLORTERM", "truecolor")
    sx.view.show_sharding(array)
    printed = capsys.readouterr().out
    assert len(set(re.findall(r"\x1b\[38;2;0;0;0;(48;2;\d+;\d+;\d+)m", printed))) == 8
    assert re.sub(r"\x1b\[[\d;]*m", "", printed) == text_of(array) + "\n"


def test_drawing_without_rich_is_its_labels(
    auto_mesh: Mesh, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    array = placed(auto_mesh, (8, 8), PartitionSpec(*BOTH))
    sx.view.show_sharding(array)
    assert capsys.readouterr().out == ("CPU 0  CPU 1  CPU 2  CPU 3\nCPU 4  CPU 5  CPU 6  CPU 7\n")
    assert shown_text(sx.view.sharding_html(array)) == text_of(array)
