# SPDX-License-Identifier: Apache-2.0
"""Shardings as drawings and tables, in text and HTML.

A drawing shows which device holds which part of an array, by its *face*: the first two of its
dimensions that are sharded, filled up with the first ones that are not. A *cell* is a rectangle of
the face, labelled with the devices that hold what lies behind it. rich draws the cells; without
rich, a drawing is its labels alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from shardax import Variable, abstract
from shardax._tables import Column, DisplayTable, TableCell
from shardax._terminal import has_rich
from shardax.extend import (
    AnyMesh,
    Object,
    Path,
    RulesLike,
    TreeInventory,
    align_columns,
    byte_count,
    format_path,
    mesh_axes_of,
    mesh_text,
)
from shardax.partition import resolve_mesh
from shardax.view.errors import ViewError
from shardax.view.parameter_table import format_bytes, format_shape

if TYPE_CHECKING:
    from rich.table import Table

_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
_WIDEST, _TALLEST = 48, 9  # the most characters that cells of few parts are stretched to
_MOST_WIDE, _MOST_ROWS = 98, 16  # characters and rows of cells; beyond them, cells are left out
_SMALL_WIDE, _SMALL_ROWS = 40, 4  # the same of a drawing within a table
_COLUMNS = (
    *(Column(head=head) for head in ("path", "shape", "dtype", "split", "shard")),
    *(Column(head=head, right=True) for head in ("copies", "bytes/device")),
)

# A drawing has the size of its page's or table's texts, and scrolls where it is wider.
_HTML = (
    '<pre style="margin:0;padding:0;background:none;white-space:pre;overflow-x:auto;'
    "font:0.8em/normal Menlo,'DejaVu Sans Mono',Consolas,monospace\">{code}</pre>"
)

_NUMBERS = re.compile(r"\[(\d+(?:-\d+)?)\]")

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

    # JAX computes indices for devices alone; here the places of a mesh are numbered in order.
    sizes = dict(sharding.mesh.shape)
    entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    for number, coordinates in enumerate(np.ndindex(*sizes.values())):
        by_axis = dict(zip(sizes, coordinates, strict=True))
        spans[number] = []
        for size, entry in zip(shape, entries, strict=True):
            part, parts = 0, 1
            for axis in mesh_axes_of(entry):  # the first varies slowest
                part = part * sizes[axis] + by_axis[axis]
                parts *= sizes[axis]
            length = size // parts
            spans[number].append((part * length, (part + 1) * length))
    return spans


@dataclass(frozen=True)
class ShardingDrawing:
    """An array's sharding as cells of equal size, without the middle of many.

    Attributes:
        rows: Label and rich style of each cell, row by row.
        cell_width: Characters of a cell.
        cell_height: Lines of a cell.
    """

    rows: tuple[tuple[tuple[str, str], ...], ...]
    cell_width: int
    cell_height: int

    @classmethod
    def of(cls, value: object, *, small: bool = False) -> ShardingDrawing:
        """Returns the drawing of a Variable or array, a small one for a table's cell."""
        shape, sharding = shape_and_sharding(value)
        spans = spans_by_device(shape, sharding)

        # The dimensions of the face: columns first, so that a vector is a row.
        dimensions = range(len(shape))
        split = [d for d in dimensions if any(part[d] != (0, shape[d]) for part in spans.values())]
        whole = [d for d in dimensions if d not in split]
        face = sorted([*split, *whole][:2], reverse=True)
        width, height = [*(max(shape[d], 1) for d in face), 1, 1][:2]
        devices_by_cell: dict[tuple[Span, Span], list[int]] = {}
        for device in sorted(spans):
            across, down = [*(spans[device][d] for d in face), (0, 1), (0, 1)][:2]
            devices_by_cell.setdefault((down, across), []).append(device)

        platform = "" if small else f"{platform_of(sharding)} "
        processes = {} if is_abstract(sharding) else _processes(sharding)
        cells: dict[tuple[Span | None, Span | None], tuple[str, str]] = {}
        for cell, devices in devices_by_cell.items():
            style = f"#000000 on {_COLORS[devices[0] % len(_COLORS)]}"
            cells[cell] = (platform + _devices_text(devices, processes), style)

        cell_width = 2 + max(len(label) for label, _ in cells.values())
        most_wide, most_rows = (_SMALL_WIDE, _SMALL_ROWS) if small else (_MOST_WIDE, _MOST_ROWS)
        most_columns = max(most_wide // (cell_width + 1), 3)
        row_spans = _without_middle({row for row, _ in devices_by_cell}, most_rows)
        column_spans = _without_middle({column for _, column in devices_by_cell}, most_columns)
        left_out = ("…", "")
        rows = tuple(
            tuple(cells.get((row, column), left_out) for column in column_spans)
            for row in row_spans
        )
        if small:
            return cls(rows, cell_width, cell_height=1)

        # Few cells are stretched to the proportions of the array: a character is about twice as
        # high as wide. The height of a cell is odd, so that the label is in the middle.
        wide = min(_WIDEST, 2 * _TALLEST * width / height)
        tall = min(_TALLEST, round(wide * height / width / 2)) if height > 1 else 1
        cell_height = max(tall // len(rows) - 1, 0) // 2 * 2 + 1
        return cls(rows, max(int(wide) // len(column_spans), cell_width), cell_height)

    @property
    def width(self) -> int:
        """Characters of a line, with those between cells."""
        return len(self.rows[0]) * (self.cell_width + 1) + 1

    def text(self) -> str:
        """Returns the drawing as lines of characters."""
        if not has_rich():
            return "\n".join(align_columns([[label for label, _ in row] for row in self.rows]))
        return self._recorded().export_text().rstrip("\n")

    def html(self) -> str:
        """Returns the drawing as an element of HTML, with colours."""
        if not has_rich():
            return _HTML.format(code=escape(self.text()))
        return self._recorded().export_html(inline_styles=True, code_format=_HTML)

    def table(self) -> Table:
        """Returns the drawing as a table of rich."""
        from rich import box
        from rich.align import Align
        from rich.table import Table

        table = Table(box=box.SQUARE, show_header=False, show_lines=True, padding=0)
        for _ in self.rows[0]:
            table.add_column(width=self.cell_width)
        for row in self.rows:
            cells = [
                Align.center(label, style, vertical="middle", height=self.cell_height)
                for label, style in row
            ]
            table.add_row(*cells)
        return table

    def _recorded(self) -> Any:
        from rich.console import Console

        # What is recorded has no need of a terminal, nor of the variables that describe one.
        console = Console(
            file=io.StringIO(),
            width=self.width,
            height=len(self.rows) * (self.cell_height + 1) + 1,
            record=True,
            color_system=None,
            force_jupyter=False,
        )
        console.print(self.table())
        return console


def _processes(sharding: Sharding) -> dict[int, int]:
    """Processes by device, if there are several."""
    processes = {device.id: device.process_index for device in sharding.device_set}
    return processes if len(set(processes.values())) > 1 else {}


def _devices_text(devices: list[int], processes: Mapping[int, int]) -> str:
    """Numbers of devices, three or more in a row as ``first-last``, with their processes."""
    texts: list[str] = []
    for process, own in groupby(devices, processes.get):
        runs: list[str] = []
        for _, run in groupby(enumerate(own), lambda pair: pair[1] - pair[0]):
            numbers = [str(number) for _, number in run]
            runs += [f"{numbers[0]}-{numbers[-1]}"] if len(numbers) > 2 else numbers
        texts.append(",".join(runs) + ("" if process is None else f" (process {process})"))
    return "; ".join(texts)


def _without_middle(spans: Collection[Span], most: int) -> list[Span | None]:
    """Spans in order, or None in place of those left out."""
    in_order = sorted(spans)
    return [*in_order] if len(in_order) <= most else [*in_order[: most - 2], None, in_order[-1]]


def show_sharding(value: object) -> None:
    """Prints a drawing of an array's sharding, in colour on a terminal.

    Args:
        value: A Variable or array; of more than two dimensions, its face is shown.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.view.show_sharding(sx.Param(jnp.zeros(8)))
        ┌────────────────────────────────────────────────┐
        │                     CPU 0                      │
        └────────────────────────────────────────────────┘
    """
    drawing = ShardingDrawing.of(value)
    if not has_rich():
        print(drawing.text())  # noqa: T201 (printing is the purpose)
        return
    from rich.console import Console

    Console(width=drawing.width).print(drawing.table())


def sharding_html(value: object) -> str:
    """Draws an array's sharding as HTML: a coloured, labelled rectangle per cell.

    Args:
        value: A Variable or array; of more than two dimensions, its face is shown.

    Returns:
        The text of an element, whose colours are drawn by rich; without rich, of the labels alone.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.view.sharding_html(jnp.zeros((4, 4))).count("CPU 0")
        1
    """
    return ShardingDrawing.of(value).html()


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
        return byte_count(self.shard_shape, self.array.dtype)

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
        total = sum(byte_count(row.array.shape, row.array.dtype) for row in self.rows)
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
            drawn = sharding_html(self.rows[0].array)
            return f"<figure>{drawn}<figcaption>{escape(self.caption())}</figcaption></figure>"

        rows: list[list[str | TableCell]] = []
        for cells, array in _joined(self.rows):
            drawn = ""
            if array.sharding is not None:
                drawn = ShardingDrawing.of(array, small=True).html()
            rows.append([*cells, TableCell("", html=drawn)])
        table = DisplayTable.of([*_COLUMNS, Column(head="devices")], rows)
        return f"{table.html()}<p>{escape(self.summary())}</p>"

    def _repr_html_(self) -> str:
        return self.html()

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        if self.single:
            return f"{self.caption()}\n{ShardingDrawing.of(self.rows[0].array).text()}"
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

    # Without a mesh, what is not laid out yet is shown as it would be over the mesh in scope.
    leaves = planned = TreeInventory(tree if mesh is None else abstract(tree, mesh, rules)).leaves
    scope = resolve_mesh() if mesh is None else None
    if scope is not None and any(info.sharding is None for leaf in leaves for info in leaf.arrays):
        planned = TreeInventory(abstract(tree, scope, rules)).leaves

    rows: list[ShardingRow] = []
    for leaf, copy in zip(leaves, planned, strict=True):  # abstract copies keep the order
        for info, planned_info in zip(leaf.arrays, copy.arrays, strict=True):
            sharding = planned_info.sharding if info.sharding is None else info.sharding
            array = jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
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
        array = row.array
        pattern = without_layers(format_path(row.path))
        alike = (pattern, row.axes, tuple(array.shape), array.dtype, array.sharding)
        groups.setdefault(alike, []).append(row)

    lines: list[tuple[list[str], jax.ShapeDtypeStruct]] = []
    for group in groups.values():
        row = group[0]
        path = join_layers([format_path(row.path) for row in group])
        size = format_bytes(row.bytes_per_device)
        if len(group) > 1:
            size = f"{len(group)} x {size}"
        array_cells = [path, format_shape(row.array.shape), str(row.array.dtype)]
        part_cells = [row.split, format_shape(row.shard_shape), str(row.copies), size]
        lines.append((array_cells + part_cells, row.array))
    return lines


def without_layers(text: str) -> str:
    """Replaces the numbers of layers: ``layers[3].up`` becomes ``layers[#].up``."""
    return _NUMBERS.sub("[#]", text)


def join_layers(texts: Sequence[str]) -> str:
    """Joins texts equal but for numbers of layers: ``layers[0-2].up``."""
    text = ""
    for index, pieces in enumerate(zip(*map(_NUMBERS.split, texts), strict=True)):
        if index % 2 == 0:
            text += pieces[0]
        else:
            numbers = [int(number) for span in pieces for number in span.split("-")]
            first, last = min(numbers), max(numbers)
            text += f"[{first}]" if first == last else f"[{first}-{last}]"
    return text
