# SPDX-License-Identifier: Apache-2.0
"""Pictures show every shard once, in its place, with the devices that hold it."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.view.shardings import sharding_text

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


def svg_rows(text: str) -> list[list[str]]:
    """The labels of a picture's rectangles, by rows, once their positions are checked."""
    picture = ElementTree.fromstring(text)
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    rectangles = [element for element in picture if element.tag.endswith("rect")]
    labels = [element.text or "" for element in picture if element.tag.endswith("text")]
    rows: dict[float, list[tuple[float, str]]] = {}
    area = 0.0
    for rectangle, label in zip(rectangles, labels, strict=True):
        x, y, wide, tall = (float(rectangle.attrib[k]) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width and 0 <= y <= y + tall <= height
        area += wide * tall
        rows.setdefault(y, []).append((x, label))
    assert area == pytest.approx(width * height)  # they cover the picture and do not overlap
    return [[label for _, label in sorted(rows[y])] for y in sorted(rows)]


@pytest.mark.parametrize(("shape", "spec", "devices"), CASES)
def test_svg_has_labeled_rectangle_per_distinct_shard(
    auto_mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, devices: list[list[str]]
) -> None:
    assert svg_rows(sx.view.sharding_svg(placed(auto_mesh, shape, spec))) == devices


@pytest.mark.parametrize(("shape", "spec", "devices"), CASES)
def test_text_has_labeled_box_per_distinct_shard(
    auto_mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, devices: list[list[str]]
) -> None:
    lines = sharding_text(placed(auto_mesh, shape, spec)).splitlines()
    assert len({len(line) for line in lines}) == 1
    found = [re.findall(r"CPU ([\d,-]+)", line) for line in lines]
    assert [labels for labels in found if labels] == devices
    edges = [line for line in lines if line[0] in "┌├└"]
    assert len(edges) == len(devices) + 1
    assert all(sum(mark in "┬┼┴" for mark in edge) == len(devices[0]) - 1 for edge in edges)


def luminance(color: str) -> float:
    """Relative luminance of ``#rrggbb``, as WCAG 2.2 defines it."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_labels_can_be_read_on_every_color(auto_mesh: Mesh) -> None:
    text = sx.view.sharding_svg(placed(auto_mesh, (8,), PartitionSpec(BOTH)))
    fills = set(re.findall(r'<rect[^>]*fill="(#[0-9a-f]{6})"', text))
    assert len(fills) == 8 and set(re.findall(r'<text[^>]*fill="(\w+)"', text)) == {"black"}
    assert min((luminance(fill) + 0.05) / 0.05 for fill in fills) > 4.5  # level AA


def test_text_keeps_its_proportions_within_bounds(auto_mesh: Mesh) -> None:
    def size(shape: tuple[int, ...]) -> tuple[int, int]:
        lines = sharding_text(placed(auto_mesh, shape, NO_SPLIT)).splitlines()
        return len(lines) - 2, len(lines[0]) - 2

    assert size((4, 4)) == (9, 18)
    assert size((4, 8)) == (9, 36)
    assert size((1, 1_000_000)) == (1, 48)
    assert size((1_000_000, 1)) == (9, len(" CPU 0-7 "))


def test_third_sharded_dimension_is_behind_the_face() -> None:
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=kinds)
    array = placed(mesh, (4, 4, 4), PartitionSpec("x", "y", "z"))
    assert svg_rows(sx.view.sharding_svg(array)) == [["0,1", "2,3"], ["4,5", "6,7"]]


def test_single_device_and_empty_arrays_are_drawn() -> None:
    assert svg_rows(sx.view.sharding_svg(jax.device_put(np.zeros(3)))) == [["0"]]
    assert "CPU 0" in sharding_text(jax.device_put(np.zeros((0, 3))))


def test_showing_prints_the_text_of_a_variable(auto_mesh: Mesh, capsys: Any) -> None:
    array = placed(auto_mesh, (8, 8), PartitionSpec("data"))
    sx.view.show_sharding(sx.Param(array))
    assert capsys.readouterr().out == sharding_text(array) + "\n"
