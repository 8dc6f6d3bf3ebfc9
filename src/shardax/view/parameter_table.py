# SPDX-License-Identifier: Apache-2.0
"""The layout table of a model: shapes, axes, specs and memory.

*Bytes per device* are those of an array's largest shard; a replicated array costs its whole size on
every device. *FLOPs per device* are the operations that one device runs for a Module, and all that
it calls, in the compiled program of one call (``view.operations``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardax import Rules, Variable, abstract, iter_modules, iter_variables
from shardax._tables import Column, DisplayTable
from shardax.extend import Path, ResolvedRules, byte_count, format_path
from shardax.named import NamedArray
from shardax.partition import resolve_mesh


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
class ModuleRow:
    """One Module.

    Attributes:
        path: Where it stands, as text.
        type: Its class's name.
        size: Number of elements of the Variables in it that the table shows; of a shared one, where
            it is met first.
        bytes_per_device: Their bytes per device.
        flops: Operations that one device runs for it and what it calls.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> sx.view.table(layer, inputs=[jnp.ones((1, 2))]).modules[0]
        ModuleRow(path='(root)', type='Linear', size=9, bytes_per_device=36, flops=15)
    """

    path: str
    type: str
    size: int
    bytes_per_device: int
    flops: int


@dataclass(frozen=True)
class ParameterTable:
    """A model's Variables, one row each; ``str()`` is the table as text.

    Attributes:
        rows: The rows, in the model's order; a shared Variable once.
        devices: Number of devices of the mesh, or 1.
        modules: One row for each Module, if operations were asked for.

    Example:
        >>> import shardax as sx
        >>> print(sx.view.table(sx.nn.Linear(2, 3, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))))
        ... # doctest: +NORMALIZE_WHITESPACE
        path      type   shape  dtype    axes        spec  elements  bytes/device
        .kernel   Param  2x3    float32  embed, mlp               6          24 B
        .bias     Param  3      float32  mlp                      3          12 B
        9 elements, 36 B; 36 B per device on 1 device
    """

    rows: tuple[ParameterRow, ...]
    devices: int
    modules: tuple[ModuleRow, ...] = ()

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
        return self._parameter_table().texts()

    def html(self) -> str:
        """Returns the tables as HTML, with the summary between."""
        parts = [self._parameter_table().html("parameters"), f"<p>{escape(self.totals())}</p>"]
        if self.modules:
            parts.append(self._module_table().html("modules"))
        return "".join(parts)

    def _parameter_table(self) -> DisplayTable:
        rows = [
            (
                row.path,
                row.type,
                format_shape(row.shape),
                row.dtype,
                row.axes,
                row.spec,
                f"{row.size:,}",
                format_bytes(row.bytes_per_device),
            )
            for row in self.rows
        ]
        return DisplayTable.of(_PARAMETER_COLUMNS, rows)

    def _module_table(self) -> DisplayTable:
        # The first Module holds all others, so its operations are all.
        total = max((row.flops for row in self.modules), default=0) or 1
        rows = [
            (
                row.path,
                row.type,
                f"{row.size:,}",
                format_bytes(row.bytes_per_device),
                format_count(row.flops),
                f"{row.flops / total:.1%}",
            )
            for row in self.modules
        ]
        return DisplayTable.of(_MODULE_COLUMNS, rows)

    def _repr_html_(self) -> str:
        return self.html()

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        lines = [*self._parameter_table().lines(), self.totals()]
        if self.modules:
            lines += ["", *self._module_table().lines()]
        return "\n".join(lines)


_PARAMETER_COLUMNS = (
    *(Column(head=head) for head in ("path", "type", "shape", "dtype", "axes", "spec")),
    *(Column(head=head, right=True) for head in ("elements", "bytes/device")),
)
_MODULE_COLUMNS = (
    *(Column(head=head) for head in ("module", "type")),
    *(Column(head=head, right=True) for head in ("elements", "bytes/device")),
    *(Column(head=head, right=True) for head in ("FLOPs/device", "share")),
)


def table(
    tree: Any,
    *filters: Any,
    mesh: Any = None,
    rules: Any = None,
    inputs: Sequence[Any] | None = None,
    call: Callable[..., Any] | None = None,
) -> ParameterTable:
    """Makes the layout table of a model, allocating nothing for lazy Variables.

    Args:
        tree: A Module or pytree of Modules.
        *filters: Which Variables to show (any of the filters); none: all.
        mesh: The mesh; by default the one in scope, if any.
        rules: Rules from axis names to mesh axes; by default those in scope.
        inputs: Arguments of a call, as arrays or ``jax.ShapeDtypeStruct``: the call is compiled,
            and the table says for each Module how many operations it takes. None: no operations.
        call: What is called, as ``call(tree, *inputs)``, such as a training step; by default the
            model itself.

    Returns:
        The table. Without a mesh, arrays that are laid out over one already show how they are.

    Raises:
        PartitionCheckError: If an array cannot be laid out by the rules over the mesh; lists all.
        ViewError: If operations cannot be counted.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> sx.view.table(mlp).totals()
        '24 elements, 96 B; 96 B per device on 1 device'
        >>> print(sx.view.table(mlp, sx.PathContains("up"), inputs=[jnp.ones((8, 2))]))
        path        type   shape  dtype    axes        spec  elements  bytes/device
        .up.kernel  Param  2x4    float32  embed, mlp               8          32 B
        8 elements, 32 B; 32 B per device on 1 device
        <BLANKLINE>
        module  type    elements  bytes/device  FLOPs/device   share
        (root)  MLP            8          32 B           576  100.0%
        .gate   Linear         0           0 B           128   22.2%
        .up     Linear         8          32 B           128   22.2%
        .down   Linear         0           0 B           128   22.2%
    """
    mesh = resolve_mesh(mesh)
    known_rules = ResolvedRules(mesh, rules).rules
    laid_out = abstract(tree, mesh, known_rules)

    rows: list[tuple[Path, ParameterRow]] = []
    meshes = [] if mesh is None else [mesh]
    for path, variable in iter_variables(laid_out, *filters):
        for key_path, struct in jax.tree_util.tree_leaves_with_path(variable.value):
            inside = jax.tree_util.keystr(key_path)
            rows.append((path, _row(path, inside, variable, struct, known_rules)))
            meshes += [] if struct.sharding is None else [struct.sharding.mesh]

    modules: list[ModuleRow] = []
    if inputs is not None:
        from shardax.view.operations import module_operations

        flops = module_operations(tree, inputs, call, mesh, known_rules)
        sizes: Counter[Path] = Counter()
        nbytes: Counter[Path] = Counter()
        for path, row in rows:
            for depth in range(len(path) + 1):
                sizes[path[:depth]] += row.size
                nbytes[path[:depth]] += row.bytes_per_device
        for path, module in {(): laid_out, **dict(iter_modules(laid_out))}.items():
            kind = type(module).__name__
            row = ModuleRow(format_path(path), kind, sizes[path], nbytes[path], flops[path])
            modules.append(row)

    devices = max((mesh.size for mesh in meshes), default=1)
    return ParameterTable(tuple(row for _, row in rows), devices, tuple(modules))


def _row(
    path: Path, inside: str, variable: Variable, struct: jax.ShapeDtypeStruct, rules: Rules
) -> ParameterRow:
    value, shape, sharding = variable.value, struct.shape, struct.sharding
    own_names = value.partition_axes if isinstance(value, NamedArray) else None
    names = variable.axes if own_names is None else own_names

    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
    else:
        spec_names = names if own_names is not None or not inside else None
        spec, _ = ResolvedRules(None, rules).spec(spec_names, shape)
    entries = [
        "-" if entry is None else "+".join(entry) if isinstance(entry, tuple) else str(entry)
        for entry in spec or ()
    ]

    return ParameterRow(
        path=format_path(path) + inside,
        type=type(variable).__name__,
        shape=shape,
        dtype=str(struct.dtype),
        axes=", ".join("-" if name is None else str(name) for name in names or ()),
        spec="" if set(entries) <= {"-"} else ", ".join(entries),
        size=math.prod(shape),
        nbytes=byte_count(shape, struct.dtype),
        bytes_per_device=byte_count(
            sharding.shard_shape(shape) if sharding else shape, struct.dtype
        ),
    )


def format_shape(shape: Sequence[int]) -> str:
    """Formats the sizes of dimensions, such as ``2x3``."""
    return "x".join(map(str, shape)) or "scalar"


def format_count(count: float) -> str:
    """Formats a number in steps of a thousand."""
    if count < 10_000:
        return f"{count:,.0f}"
    power = min(int(math.log10(count)) // 3, 6)
    return f"{count / 1000**power:.3g} {' kMGTPE'[power]}"


def format_bytes(count: float) -> str:
    """Formats a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
