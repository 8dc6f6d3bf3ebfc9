# SPDX-License-Identifier: Apache-2.0
"""The layout table: every Variable of a model with its shape, axes, spec and memory.

*Bytes per device* is what the largest shard of an array takes; a replicated array costs its whole
size on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardax.core.functional import iter_variables
from shardax.core.layout_text import columns, format_axes
from shardax.core.paths import format_path
from shardax.core.variables import Variable
from shardax.partition.check import spec_for
from shardax.partition.mesh import resolve_mesh
from shardax.partition.rules import Rules
from shardax.partition.scope import resolve_rules
from shardax.partition.specs import abstract


@dataclass(frozen=True)
class ParameterRow:
    """One Variable.

    Attributes:
        path: Where it stands, as text.
        type: Its Variable type's name.
        shape: Shape of its array.
        dtype: Dtype of its array.
        axes: Logical axis names, as text.
        spec: Mesh axis per dimension, as text; empty without rules.
        size: Number of elements.
        nbytes: Bytes of the whole array.
        bytes_per_device: Bytes of its largest shard.

    Example:
        >>> import shardax as sx
        >>> row = sx.view.table(sx.nn.Linear(2, 3, rngs=sx.Rngs(0))).rows[0]
        >>> row.path, row.shape, row.nbytes
        ('.kernel', (2, 3), 24)
    """

    path: str
    type: str
    shape: tuple[int, ...]
    dtype: str
    axes: str
    spec: str
    size: int
    nbytes: int
    bytes_per_device: int


@dataclass(frozen=True)
class ParameterTable:
    """A model's Variables, one row each; ``str()`` is the table as text.

    Attributes:
        rows: The rows, in the model's order; a shared Variable once.
        devices: Number of devices of the mesh, or 1.

    Example:
        >>> import shardax as sx
        >>> print(sx.view.table(sx.nn.Linear(2, 3, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))))
        ... # doctest: +NORMALIZE_WHITESPACE
        path      type   shape  dtype    axes        spec  bytes/device
        .kernel   Param  2x3    float32  embed, mlp                24 B
        .bias     Param  3      float32  mlp                       12 B
        9 elements, 36 B; 36 B per device on 1 device
    """

    rows: tuple[ParameterRow, ...]
    devices: int

    @property
    def size(self) -> int:
        """Number of elements of all arrays."""
        return sum(row.size for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, each once."""
        return sum(row.nbytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes on the fullest device."""
        return sum(row.bytes_per_device for row in self.rows)

    def totals(self) -> str:
        """Returns the summary line."""
        devices = f"{self.devices} device" + ("s" if self.devices != 1 else "")
        return (
            f"{self.size:,} elements, {format_bytes(self.nbytes)}; "
            f"{format_bytes(self.bytes_per_device)} per device on {devices}"
        )

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the header and one tuple of texts per row."""
        header = ("path", "type", "shape", "dtype", "axes", "spec", "bytes/device")
        return [header, *(_cells(row) for row in self.rows)]

    def html(self) -> str:
        """Returns the table as an HTML element, with the summary below."""
        header, *rows = (map(escape, line) for line in self.cells())
        head = "".join(f"<th>{cell}</th>" for cell in header)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        summary = escape(self.totals())
        return f'<table class="parameters"><tr>{head}</tr>{body}</table><p>{summary}</p>'

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        cells = self.cells()
        return "\n".join([*columns(cells, right=[len(cells[0]) - 1]), self.totals()])


def _cells(row: ParameterRow) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    return (
        row.path,
        row.type,
        shape,
        row.dtype,
        row.axes,
        row.spec,
        format_bytes(row.bytes_per_device),
    )


def table(tree: Any, *filters: Any, mesh: Any = None, rules: Any = None) -> ParameterTable:
    """Makes the layout table of a model, allocating nothing for lazy Variables.

    Args:
        tree: A Module or pytree of Modules.
        *filters: Which Variables to show (any of the filters); none: all.
        mesh: The mesh; by default the one in scope, if any.
        rules: Rules from axis names to mesh axes; by default those in scope.

    Returns:
        The table. Without a mesh, arrays that are laid out over one already show how they are.

    Raises:
        PartitionCheckError: If an array cannot be laid out by the rules over the mesh; lists all.

    Example:
        >>> import shardax as sx
        >>> sx.view.table(sx.nn.Linear(2, 3, rngs=sx.Rngs(0))).totals()
        '9 elements, 36 B; 36 B per device on 1 device'
    """
    found, known_rules = resolve_mesh(mesh), resolve_rules(rules)
    laid_out = abstract(tree, found, known_rules)
    rows, meshes = [], [] if found is None else [found]
    for path, variable in iter_variables(laid_out, *filters):
        for key_path, struct in jax.tree_util.tree_leaves_with_path(variable.value):
            rows.append(_row(path, jax.tree_util.keystr(key_path), variable, struct, known_rules))
            meshes += [] if struct.sharding is None else [struct.sharding.mesh]
    return ParameterTable(tuple(rows), max((mesh.size for mesh in meshes), default=1))


def _row(
    path: Any, inside: str, variable: Variable[Any], struct: jax.ShapeDtypeStruct, rules: Rules
) -> ParameterRow:
    shape, sharding, names = struct.shape, struct.sharding, variable.axes
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
    else:
        spec = spec_for(None if inside else names, shape, None, rules)[0]
    item = _item_bytes(struct.dtype)
    return ParameterRow(
        path=format_path(path) + inside,
        type=type(variable).__name__,
        shape=shape,
        dtype=str(struct.dtype),
        axes=format_axes(names),
        spec=_spec_text(spec),
        size=math.prod(shape),
        nbytes=math.prod(shape) * item,
        bytes_per_device=math.prod(sharding.shard_shape(shape) if sharding else shape) * item,
    )


def _item_bytes(dtype: Any) -> int:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):  # pyright: ignore[reportPrivateImportUsage] (documented)
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return words.size * words.dtype.itemsize
    return np.dtype(dtype).itemsize


def _spec_text(spec: Any) -> str:
    if spec is None or all(entry is None for entry in spec):
        return ""
    return ", ".join(
        "-" if entry is None else "+".join(entry) if isinstance(entry, tuple) else str(entry)
        for entry in spec
    )


def format_bytes(count: float) -> str:
    """Formats a number of bytes in binary units.

    Example:
        >>> format_bytes(1536), format_bytes(12)
        ('1.5 KiB', '12 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
