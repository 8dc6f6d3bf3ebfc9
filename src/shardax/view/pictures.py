# SPDX-License-Identifier: Apache-2.0
"""Pictures of shardings: which device holds which part of an array.

An array is shown by its *face*: the first two of its dimensions that are sharded, filled up with
the first ones that are not. A *cell* is a rectangle of the face, labelled with the devices that
hold what lies behind it. A one-dimensional array is one row.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any, NamedTuple

from shardax.core.variables import Variable

_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
_COLUMNS, _LINES = 48, 9  # the most characters that a text picture takes on its own account

Span = tuple[int, int]


class _Face(NamedTuple):
    """Two dimensions of a sharded array.

    Attributes:
        shape: Their sizes, (rows, columns).
        cells: The devices of each cell, by its spans of rows and columns.
        platform: What kind of devices these are.
    """

    shape: tuple[int, int]
    cells: dict[tuple[Span, Span], list[int]]
    platform: str


def _face(value: Any) -> _Face:
    array = value.value if isinstance(value, Variable) else value
    shape = tuple(array.shape)
    spans: dict[int, list[Span]] = {}
    for device, index in array.sharding.devices_indices_map(shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        spans[device.id] = [(start, stop) for start, stop in bounds]
    whole = [(0, size) for size in shape]
    split = [d for d in range(len(shape)) if any(own[d] != whole[d] for own in spans.values())]
    dimensions = sorted([*split, *(d for d in range(len(shape)) if d not in split)][:2])
    sizes = [shape[d] for d in dimensions]
    cells: dict[tuple[Span, Span], list[int]] = {}
    for device in sorted(spans):
        columns, rows = [*(spans[device][d] for d in reversed(dimensions)), (0, 1), (0, 1)][:2]
        cells.setdefault((rows, columns), []).append(device)
    platform = next(iter(array.sharding.device_set)).platform
    width, height = [*reversed(sizes), 1, 1][:2]
    return _Face((height, width), dict(sorted(cells.items())), platform)


def _numbers(devices: list[int]) -> str:
    """Writes device numbers, runs of three or more as ``first-last``.

    >>> _numbers([0, 4]), _numbers([0, 1, 2, 3, 6, 7])
    ('0,4', '0-3,6,7')
    """
    texts = []
    for _, run in groupby(enumerate(devices), lambda item: item[1] - item[0]):
        numbers = [str(number) for _, number in run]
        texts += [f"{numbers[0]}-{numbers[-1]}"] if len(numbers) > 2 else numbers
    return ",".join(texts)


def sharding_text(value: Any) -> str:
    """Draws an array's sharding with characters.

    Args:
        value: A Variable or array.

    Returns:
        Some lines of text.

    Example:
        >>> import jax.numpy as jnp
        >>> print(sharding_text(jnp.zeros(8)))
        ┌────────────────────────────────────────────────┐
        │                     CPU 0                      │
        └────────────────────────────────────────────────┘
    """
    face = _face(value)
    rows, columns = (sorted({cell[axis] for cell in face.cells}) for axis in (0, 1))
    labels = {
        cell: f"{face.platform.upper()} {_numbers(devices)}" for cell, devices in face.cells.items()
    }
    height, width = (max(size, 1) for size in face.shape)
    # A character is about twice as high as wide.
    wide = min(_COLUMNS, 2 * _LINES * width / height)
    tall = min(_LINES, round(wide * height / width / 2)) if height > 1 else 1
    cell_width = max(int(wide) // len(columns), max(len(label) for label in labels.values()) + 2)
    cell_height = max(tall // len(rows) - 1, 0) // 2 * 2 + 1  # odd: the label is in the middle
    edge = "─" * cell_width
    blank = "│" + "│".join([" " * cell_width] * len(columns)) + "│"
    lines = []
    for number, row in enumerate(rows):
        left, middle, right = "├┼┤" if number else "┌┬┐"
        lines.append(left + middle.join([edge] * len(columns)) + right)
        body = [blank] * cell_height
        body[cell_height // 2] = "".join(
            f"│{labels[row, column].center(cell_width)}" for column in columns
        )
        body[cell_height // 2] += "│"
        lines += body
    return "\n".join([*lines, "└" + "┴".join([edge] * len(columns)) + "┘"])


def show_sharding(value: Any) -> None:
    """Prints a picture of an array's sharding on the terminal.

    Args:
        value: A Variable or array; of more than two dimensions, its face is shown.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.view.show_sharding(sx.Param(jnp.zeros((8, 8))))  # doctest: +ELLIPSIS
        ┌...
    """
    print(sharding_text(value))  # noqa: T201 (printing is the purpose)


def sharding_svg(value: Any, width: int = 280, height: int = 160) -> str:
    """Draws an array's sharding as SVG: a rectangle per cell, labelled with its devices.

    Args:
        value: A Variable or array; of more than two dimensions, its face is shown.
        width: Width in pixels.
        height: Height in pixels.

    Returns:
        The text of an ``<svg>`` element.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.view.sharding_svg(jnp.zeros((4, 4))).count("<rect")
        1
    """
    face = _face(value)
    down, across = (
        pixels / max(size, 1) for pixels, size in zip((height, width), face.shape, strict=True)
    )
    parts = []
    for ((top, bottom), (left, right)), devices in face.cells.items():
        x, wide = left * across, (right - left) * across
        y, tall = top * down, (bottom - top) * down
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
            f'fill="{_COLORS[devices[0] % len(_COLORS)]}" stroke="white"/>'
            f'<text x="{x + wide / 2:.1f}" y="{y + tall / 2 + 4:.1f}" text-anchor="middle" '
            f'font-size="12" fill="white">{escape(_numbers(devices))}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
