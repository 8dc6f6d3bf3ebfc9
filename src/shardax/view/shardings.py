# SPDX-License-Identifier: Apache-2.0
"""Shardings as pictures and tables, in text and HTML.

A picture shows which device holds which part of an array, by its *face*: the first two of its
dimensions that are sharded, filled up with the first ones that are not. A *cell* is a rectangle of
the face, labelled with the devices that hold what lies behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from shardax import Variable, abstract
from shardax._tables import Column, DisplayTable, TableCell
from shardax.extend import (
    AnyMesh,
    Object,
    Path,
    RulesLike,
    TreeInventory,
    byte_count,
    format_path,
    mesh_axes_of,
    mesh_text,
)
from shardax.partition import resolve_mesh
from shardax.view.errors import ViewError
from shardax.view.parameter_table import format_bytes, format_shape

_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
_WIDEST, _TALLEST = 48, 9  # the most characters that a text picture takes on its own account
_MOST_WIDE, _MOST_ROWS = 98, 16  # characters and rows of cells; beyond them, cells are left out
_COLUMNS = (
    *(Column(head=head) for head in ("path", "shape", "dtype", "split", "shard")),
    *(Column(head=head, right=True) for head in ("copies", "bytes/device")),
)

Span = tuple[int, int]


def shape_and_sharding(value: object) -> tuple[tuple[int, ...], Sharding]:
    """Returns shape and sharding of a Variable, an array, or a ``jax.ShapeDtypeStruct``."""
    # A lazy value is asked for its form only: showing it must not compute it.
    array = value.value if isinstance(value, Variable) and not value.is_lazy else value
    shape = getattr(array, "shape", None)
    sharding = None if isinstance(array, Variable) else getattr(array, "sharding", None)
    if shape is None or not isinstance(sharding, Sharding):
        raise ViewError(
            f"There is no sharding to show of {value!r}: it is not laid out over devices, or is "
            "known inside a program only. Lay it out by sx.shard(model, mesh, rules), say where it "
            "would be by sx.view.sharding(model, mesh, rules), or, under jax.jit, look at the "
            "compiler's choice with jax.debug.inspect_array_sharding(x, callback=print)."
        )
    return tuple(shape), sharding


def is_abstract(sharding: Sharding) -> bool:
    """Whether a sharding is over a mesh without devices."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


def platform_of(sharding: Sharding) -> str:
    """Returns the kind of devices, such as ``CPU``."""
    if is_abstract(sharding):
        return "device"
    return next(iter(sharding.device_set)).platform.upper()


def spans_by_device(shape: tuple[int, ...], sharding: Any) -> dict[int, list[Span]]:
    """Returns the spans of dimensions held by each device."""
    spans: dict[int, list[Span]] = {}
    if not is_abstract(sharding):
        for device, index in sharding.devices_indices_map(shape).items():
            parts = zip(index or (), shape, strict=True)
            spans[device.id] = [part.indices(size)[:2] for part, size in parts]
        return spans
    sizes = dict(sharding.mesh.shape)
    entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    for number, place in enumerate(np.ndindex(*sizes.values())):
        at = dict(zip(sizes, place, strict=True))
        spans[number] = []
        for size, entry in zip(shape, entries, strict=True):
            axes = mesh_axes_of(entry)
            part = 0
            for axis in axes:  # the first varies slowest
                part = part * sizes[axis] + at[axis]
            step = size // math.prod(sizes[axis] for axis in axes)
            spans[number].append((part * step, (part + 1) * step))
    return spans


class _Face(NamedTuple):
    """Two dimensions of a sharded array."""

    shape: tuple[int, int]  # rows, columns
    cells: dict[tuple[Span, Span], list[int]]  # devices by spans of rows and columns
    platform: str
    owners: dict[int, int]  # processes by device, if there are several

    def label(self, devices: list[int]) -> str:
        """Returns the numbers of devices, with their processes if several."""
        by_process = groupby(devices, lambda device: self.owners.get(device, -1))
        return "; ".join(
            _device_numbers(list(numbers)) + (f" (process {process})" if process >= 0 else "")
            for process, numbers in by_process
        )


def _face(value: object) -> _Face:
    shape, sharding = shape_and_sharding(value)
    spans = spans_by_device(shape, sharding)
    split = [d for d, n in enumerate(shape) if any(part[d] != (0, n) for part in spans.values())]
    dimensions = sorted([*split, *(d for d in range(len(shape)) if d not in split)][:2])
    cells: dict[tuple[Span, Span], list[int]] = {}
    for device in sorted(spans):
        columns, rows = [*(spans[device][d] for d in reversed(dimensions)), (0, 1), (0, 1)][:2]
        cells.setdefault((rows, columns), []).append(device)
    width, height = [*(shape[d] for d in reversed(dimensions)), 1, 1][:2]
    owners: dict[int, int] = {}
    if not is_abstract(sharding):
        owners = {device.id: device.process_index for device in sharding.device_set}
    owners = owners if len(set(owners.values())) > 1 else {}
    return _Face((height, width), dict(sorted(cells.items())), platform_of(sharding), owners)


def _device_numbers(devices: list[int]) -> str:
    """Device numbers, three or more in a row as ``first-last``."""
    texts = []
    for _, run in groupby(enumerate(devices), lambda pair: pair[1] - pair[0]):
        numbers = [str(number) for _, number in run]
        texts += [f"{numbers[0]}-{numbers[-1]}"] if len(numbers) > 2 else numbers
    return ",".join(texts)


def sharding_text(value: object) -> str:
    """Draws an array's sharding with characters, without the middle of many cells."""
    face = _face(value)
    labels = {
        cell: f"{face.platform} {face.label(devices)}" for cell, devices in face.cells.items()
    }
    widest = max(len(label) for label in labels.values()) + 2
    rows = _kept(sorted({cell[0] for cell in face.cells}), _MOST_ROWS)
    columns = _kept(sorted({cell[1] for cell in face.cells}), max(_MOST_WIDE // (widest + 1), 3))
    height, width = (max(size, 1) for size in face.shape)
    # A character is about twice as high as wide.
    wide = min(_WIDEST, 2 * _TALLEST * width / height)
    tall = min(_TALLEST, round(wide * height / width / 2)) if height > 1 else 1
    cell_width = max(int(wide) // len(columns), widest)
    cell_height = max(tall // len(rows) - 1, 0) // 2 * 2 + 1  # odd: the label is in the middle
    edges = ["─" * cell_width] * len(columns)
    blank = "│" + "│".join([" " * cell_width] * len(columns)) + "│"
    lines = []
    for number, row in enumerate(rows):
        left, middle, right = "├┼┤" if number else "┌┬┐"
        body: list[str] = [blank] * cell_height
        texts = ["…" if row is None or c is None else labels[row, c] for c in columns]
        body[cell_height // 2] = "".join(f"│{text.center(cell_width)}" for text in texts) + "│"
        lines += [left + middle.join(edges) + right, *body]
    return "\n".join([*lines, "└" + "┴".join(edges) + "┘"])


def _kept(spans: list[Span], most: int) -> list[Span | None]:
    """All spans, or None in place of those left out."""
    return list(spans) if len(spans) <= most else [*spans[: most - 2], None, spans[-1]]


def show_sharding(value: object) -> None:
    """Prints a picture of an array's sharding on the terminal.

    Args:
        value: A Variable or array; of more than two dimensions, its face is shown.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.view.show_sharding(sx.Param(jnp.zeros(8)))
        ┌────────────────────────────────────────────────┐
        │                     CPU 0                      │
        └────────────────────────────────────────────────┘
    """
    print(sharding_text(value))  # noqa: T201 (printing is the purpose)


def sharding_svg(value: object, width: int = 280, height: int = 160) -> str:
    """Draws an array's sharding as SVG: a labelled rectangle per cell.

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
        label = escape(face.label(devices))
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
            f'fill="{_COLORS[devices[0] % len(_COLORS)]}" stroke="white">'
            f"<title>{label}</title></rect>"
        )
        if 7 * len(label) > wide or tall < 14:  # no room: the label shows under the pointer
            continue
        parts.append(
            f'<text x="{x + wide / 2:.1f}" y="{y + tall / 2 + 4:.1f}" text-anchor="middle" '
            f'font-size="12" fill="black">{label}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True)
class ShardingRow:
    """Layout of one array.

    Attributes:
        path: Where it is in the tree.
        axes: Its axis names, or None.
        array: Its shape, dtype and sharding; without a sharding, one device holds it.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> row = sx.view.sharding({"w": jnp.zeros((4, 8))}).rows[0]
        >>> row.shard_shape, row.copies, row.bytes_per_device
        ((4, 8), 1, 128)
    """

    path: Path
    axes: tuple[Any, ...] | None
    array: jax.ShapeDtypeStruct

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of one device's part."""
        place, shape = self.array.sharding, self.array.shape
        return tuple(shape) if place is None else tuple(place.shard_shape(shape))

    @property
    def copies(self) -> int:
        """Number of devices with the same part."""
        place = self.array.sharding
        if not isinstance(place, NamedSharding):
            return 1 if place is None else len(place.device_set)
        used = {axis for entry in place.spec for axis in mesh_axes_of(entry)}
        return math.prod(size for axis, size in place.mesh.shape.items() if axis not in used)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one device's part."""
        return self._bytes(self.shard_shape)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return byte_count(shape, self.array.dtype)

    @property
    def split(self) -> str:
        """Mesh axes of each split dimension, by its name or number."""
        place = self.array.sharding
        if not isinstance(place, NamedSharding):
            return ""
        names = self.axes or (None,) * len(self.array.shape)
        return ", ".join(
            f"{i if names[i] is None else names[i]}: {'+'.join(mesh_axes_of(entry))}"
            for i, entry in enumerate(place.spec)
            if mesh_axes_of(entry)
        )


@dataclass(frozen=True)
class ShardingView:
    """Layouts of arrays, as a picture or table.

    ``str()`` is text, ``html()`` the same for a browser; notebooks show it by themselves.

    Attributes:
        rows: One row for each array, each Variable once.
        single: Whether one array was given; then the view is a picture of it.

    Example:
        >>> import shardax as sx
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(auto,))
        >>> layer = sx.nn.Linear(4, 8, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))
        >>> print(sx.view.sharding(layer, mesh, {"mlp": "model"}))
        path     shape  dtype    split       shard  copies  bytes/device
        .kernel  4x8    float32  mlp: model  4x4         1          64 B
        .bias    8      float32  mlp: model  4           1          16 B
        mesh model=2; 80 B per device, 160 B in all
    """

    rows: tuple[ShardingRow, ...]
    single: bool = False

    @property
    def bytes_per_device(self) -> int:
        """Bytes on the fullest device."""
        return sum(row.bytes_per_device for row in self.rows)

    def summary(self) -> str:
        """Returns the last line: the meshes and the bytes."""
        places = [row.array.sharding for row in self.rows]
        meshes = dict.fromkeys(mesh_text(p.mesh) for p in places if isinstance(p, NamedSharding))
        over = f"mesh {' and mesh '.join(meshes)}" if meshes else "no mesh"
        total = sum(row._bytes(tuple(row.array.shape)) for row in self.rows)
        per_device = format_bytes(self.bytes_per_device)
        return f"{over}; {per_device} per device, {format_bytes(total)} in all"

    def caption(self) -> str:
        """Returns the caption of one array's picture."""
        row = self.rows[0]
        copies = f"{row.copies} {'copy' if row.copies == 1 else 'copies'}"
        text = f"{row.array.dtype}{list(row.array.shape)} as {list(row.shard_shape)} on each device"
        text = f"{text}, {copies}"
        place = row.array.sharding
        named = isinstance(place, NamedSharding)
        return f"{text}; {place.spec} over {mesh_text(place.mesh)}" if named else text

    def html(self) -> str:
        """Returns a figure of one array, or a table, as HTML."""
        if self.single:
            picture = sharding_svg(self.rows[0].array)
            return f"<figure>{picture}<figcaption>{escape(self.caption())}</figcaption></figure>"
        rows: list[list[str | TableCell]] = []
        for cells, array in _joined(self.rows):
            picture = "" if array.sharding is None else sharding_svg(array, 84, 48)
            rows.append([*cells, TableCell("", html=picture)])
        table = DisplayTable.of([*_COLUMNS, Column(head="devices")], rows)
        return f"{table.html()}<p>{escape(self.summary())}</p>"

    def _repr_html_(self) -> str:
        return self.html()

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        if self.single:
            return f"{self.caption()}\n{sharding_text(self.rows[0].array)}"
        table = DisplayTable.of(_COLUMNS, [cells for cells, _ in _joined(self.rows)])
        return "\n".join([*table.lines(), self.summary()])


def _is_array(value: object) -> bool:
    """Returns whether a value is an array, or stands for one by shape and dtype."""
    is_class = isinstance(value, type)  # such as jnp.float32
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return is_array and not is_class and not isinstance(value, Object)


def sharding(
    tree: Any, mesh: AnyMesh | None = None, rules: RulesLike | None = None
) -> ShardingView:
    """Shows the layout of an array or a model.

    Args:
        tree: An array, a Variable, a ``jax.ShapeDtypeStruct`` with a sharding; or a Module, a
            State, or a pytree of these.
        mesh: Show how the tree would be laid out over this mesh, also an ``AbstractMesh``. None:
            how it is; what is not laid out yet, as it would be over the mesh in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The view: print it, or let a notebook show it.

    Raises:
        ViewError: If a single array's sharding is not known.
        PartitionCheckError: If an array cannot be laid out over the mesh; lists all.

    Example:
        >>> import shardax as sx
        >>> auto = jax.sharding.AxisType.Auto
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=(auto, auto))
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (4, 8)), axes=("embed", "mlp"))
        >>> print(sharding(weight, mesh, {"mlp": "model"}))
        float32[4, 8] as [4, 4] on each device, 2 copies; P(None, 'model') over data=2, model=2
        ┌──────────────────┬──────────────────┐
        │                  │                  │
        │                  │                  │
        │                  │                  │
        │                  │                  │
        │    device 0,2    │    device 1,3    │
        │                  │                  │
        │                  │                  │
        │                  │                  │
        │                  │                  │
        └──────────────────┴──────────────────┘
    """
    if isinstance(tree, Variable) or _is_array(tree):
        leaf = TreeInventory(tree).leaves[0]
        if leaf.treedef is None and leaf.box is None:
            return _single(tree, mesh, rules)
        tree = {"value": tree}  # a Variable of several arrays or a box
    leaves = planned = TreeInventory(tree if mesh is None else abstract(tree, mesh, rules)).leaves
    scope = resolve_mesh() if mesh is None else None
    if scope is not None and any(info.sharding is None for leaf in leaves for info in leaf.arrays):
        planned = TreeInventory(abstract(tree, scope, rules)).leaves
    rows: list[ShardingRow] = []
    for leaf, copy in zip(leaves, planned, strict=True):  # abstract copies keep the order
        for info, planned_info in zip(leaf.arrays, copy.arrays, strict=True):
            place = planned_info.sharding if info.sharding is None else info.sharding
            array = jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=place)
            rows.append(ShardingRow(info.path, leaf.names_of(info), array))
    return ShardingView(tuple(rows))


def _single(value, mesh: AnyMesh | None, rules: RulesLike | None) -> ShardingView:
    is_variable = isinstance(value, Variable)
    if mesh is None and is_variable and value.is_lazy:
        mesh = resolve_mesh()
    shape, place = shape_and_sharding(value if mesh is None else abstract(value, mesh, rules))
    array = jax.ShapeDtypeStruct(shape, value.dtype, sharding=place)
    row = ShardingRow((), value.axes if is_variable else None, array)
    return ShardingView((row,), single=True)


def _joined(rows: Sequence[ShardingRow]) -> list[tuple[list[str], jax.ShapeDtypeStruct]]:
    """Texts and array of each line, alike layers in one."""
    groups: dict[Any, list[ShardingRow]] = {}
    for row in rows:
        pattern = tuple("#" if isinstance(step, int) else step for step in row.path)
        array = row.array
        alike = (pattern, row.axes, tuple(array.shape), array.dtype, array.sharding)
        groups.setdefault(alike, []).append(row)
    lines: list[tuple[list[str], jax.ShapeDtypeStruct]] = []
    for group in groups.values():
        row, path = group[0], _joint_path([row.path for row in group])
        size = f"{len(group)} x " * (len(group) > 1) + format_bytes(row.bytes_per_device)
        array_cells = [path, format_shape(row.array.shape), str(row.array.dtype)]
        part_cells = [row.split, format_shape(row.shard_shape), str(row.copies), size]
        lines.append((array_cells + part_cells, row.array))
    return lines


def _joint_path(paths: Sequence[Path]) -> str:
    """One path for several with different numbers, such as ``.layers[0-1].up``."""
    if len(paths) == 1:
        return format_path(paths[0])
    text = ""
    for steps in zip(*paths, strict=True):
        numbers = sorted(set(steps)) if isinstance(steps[0], int) else []
        several = len(numbers) > 1
        text += f"[{numbers[0]}-{numbers[-1]}]" if several else format_path((steps[0],))
    return text
