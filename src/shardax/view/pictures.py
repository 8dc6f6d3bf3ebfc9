# SPDX-License-Identifier: Apache-2.0
"""Pictures of shardings: which device holds which part of an array.

An array is shown by its *face*: the first two of its dimensions that are sharded, filled up with
the first ones that are not. A *cell* is a rectangle of the face, labelled with the devices that
hold what lies behind it. A one-dimensional array is one row.

Nothing but a shape and a sharding is needed, so what is abstract can be shown, also over a mesh
without devices, whose places are then numbered in order.
"""

from __future__ import annotations

import math
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from shardax._core.errors import ShardaxError
from shardax._core.variable import Variable
from shardax.partition.rules import mesh_axes_of


class ShardingViewError(ShardaxError, ValueError):
    """There is no sharding to show: the value is not laid out, or only inside a program."""


class OperationsError(ShardaxError, ValueError):
    """The operations of a call cannot be counted: nothing to call, or no devices to compile for."""


_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
_COLUMNS, _LINES = 48, 9  # the most characters that a text picture takes on its own account
_MOST_WIDE, _MOST_ROWS = 98, 16  # characters and rows of cells; beyond them, cells are left out

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
    shape, sharding = shape_and_sharding(value)
    spans = spans_by_device(shape, sharding)
    whole = [(0, size) for size in shape]
    split = [d for d in range(len(shape)) if any(own[d] != whole[d] for own in spans.values())]
    dimensions = sorted([*split, *(d for d in range(len(shape)) if d not in split)][:2])
    sizes = [shape[d] for d in dimensions]
    cells: dict[tuple[Span, Span], list[int]] = {}
    for device in sorted(spans):
        columns, rows = [*(spans[device][d] for d in reversed(dimensions)), (0, 1), (0, 1)][:2]
        cells.setdefault((rows, columns), []).append(device)
    width, height = [*reversed(sizes), 1, 1][:2]
    return _Face((height, width), dict(sorted(cells.items())), platform_of(sharding))


def shape_and_sharding(value: Any) -> tuple[tuple[int, ...], Sharding]:
    """Returns what a picture is made of.

    Args:
        value: A Variable, an array, or a ``jax.ShapeDtypeStruct`` with a sharding.

    Raises:
        ShardingViewError: If it has no shape, or its sharding is not known.

    Example:
        >>> import jax.numpy as jnp
        >>> shape_and_sharding(jnp.zeros(3))[0]
        (3,)
    """
    # A lazy value is asked for its form only: showing it must not compute it.
    array = value.value if isinstance(value, Variable) and not value.is_lazy else value
    shape = getattr(array, "shape", None)
    sharding = None if isinstance(array, Variable) else getattr(array, "sharding", None)
    if shape is None or not isinstance(sharding, Sharding):
        raise ShardingViewError(
            f"There is no sharding to show of {value!r}: it is not laid out over devices, or is "
            "known inside a program only. Lay it out by sx.shard(model, mesh, rules), say where it "
            "would be by sx.view.sharding(model, mesh, rules), or, under jax.jit, look at the "
            "compiler's choice with jax.debug.inspect_array_sharding(x, callback=print)."
        )
    return tuple(shape), sharding


def spans_by_device(shape: tuple[int, ...], sharding: Sharding) -> dict[int, list[Span]]:
    """Returns, for each device's number, which part of every dimension it holds.

    Args:
        shape: The array's shape.
        sharding: Its sharding; over a mesh without devices, places are numbered in order.

    Example:
        >>> import jax
        >>> mesh = AbstractMesh((2,), ("x",))
        >>> spans_by_device((4,), NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
        {0: [(0, 2)], 1: [(2, 4)]}
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return _spans_of_places(shape, sharding)
    spans: dict[int, list[Span]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True)]
        spans[device.id] = [(start, stop) for start, stop in bounds]
    return spans


def _spans_of_places(shape: tuple[int, ...], sharding: NamedSharding) -> dict[int, list[Span]]:
    sizes = dict(sharding.mesh.shape)
    entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    spans: dict[int, list[Span]] = {}
    for number, place in enumerate(np.ndindex(*sizes.values())):
        at = dict(zip(sizes, place, strict=True))
        own: list[Span] = []
        for size, entry in zip(shape, entries, strict=True):
            axes = mesh_axes_of(entry)
            part = 0
            for axis in axes:  # the first varies slowest
                part = part * sizes[axis] + at[axis]
            step = size // math.prod(sizes[axis] for axis in axes)
            own.append((part * step, (part + 1) * step))
        spans[number] = own
    return spans


def platform_of(sharding: Sharding) -> str:
    """Returns what kind of devices these are, such as ``CPU``.

    Example:
        >>> import jax.numpy as jnp
        >>> platform_of(jnp.zeros(3).sharding)
        'CPU'
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return "device"
    return next(iter(sharding.device_set)).platform.upper()


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
        value: A Variable, an array, or a ``jax.ShapeDtypeStruct`` with a sharding.

    Returns:
        Some lines of text. Of many cells, those in the middle are left out.

    Raises:
        ShardingViewError: If the sharding is not known.

    Example:
        >>> import jax.numpy as jnp
        >>> print(sharding_text(jnp.zeros(8)))
        ┌────────────────────────────────────────────────┐
        │                     CPU 0                      │
        └────────────────────────────────────────────────┘
    """
    face = _face(value)
    labels = {cell: f"{face.platform} {_numbers(devices)}" for cell, devices in face.cells.items()}
    widest = max(len(label) for label in labels.values()) + 2
    rows = _kept(sorted({cell[0] for cell in face.cells}), _MOST_ROWS)
    columns = _kept(sorted({cell[1] for cell in face.cells}), max(_MOST_WIDE // (widest + 1), 3))
    height, width = (max(size, 1) for size in face.shape)
    # A character is about twice as high as wide.
    wide = min(_COLUMNS, 2 * _LINES * width / height)
    tall = min(_LINES, round(wide * height / width / 2)) if height > 1 else 1
    cell_width = max(int(wide) // len(columns), widest)
    cell_height = max(tall // len(rows) - 1, 0) // 2 * 2 + 1  # odd: the label is in the middle
    edge = "─" * cell_width
    blank = "│" + "│".join([" " * cell_width] * len(columns)) + "│"
    lines = []
    for number, row in enumerate(rows):
        left, middle, right = "├┼┤" if number else "┌┬┐"
        lines.append(left + middle.join([edge] * len(columns)) + right)
        body = [blank] * cell_height
        texts = ["…" if row is None or c is None else labels[row, c] for c in columns]
        body[cell_height // 2] = "".join(f"│{text.center(cell_width)}" for text in texts) + "│"
        lines += body
    return "\n".join([*lines, "└" + "┴".join([edge] * len(columns)) + "┘"])


def _kept(spans: list[Span], most: int) -> list[Span | None]:
    """The spans to show: all, or the first ones, None for those left out, and the last."""
    return list(spans) if len(spans) <= most else [*spans[: most - 2], None, spans[-1]]


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
        label = escape(_numbers(devices))
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
            f'fill="{_COLORS[devices[0] % len(_COLORS)]}" stroke="white">'
            f"<title>{label}</title></rect>"
        )
        if 7 * len(label) > wide or tall < 14:  # no room: the label shows under the pointer
            continue
        parts.append(
            f'<text x="{x + wide / 2:.1f}" y="{y + tall / 2 + 4:.1f}" text-anchor="middle" '
            f'font-size="12" fill="white">{label}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
