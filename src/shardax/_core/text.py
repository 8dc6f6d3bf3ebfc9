# SPDX-License-Identifier: Apache-2.0
"""Tables and layouts as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardax._core.cross_process import format_mesh
from shardax._core.graph.paths import Path, format_path, plain_path


def layout_text(rows: Iterable[tuple[Path, object, object]]) -> str | None:
    """Formats shardings or specs as a table; None for other values."""
    # They are short, and alike from row to row: a column for each thing that differs reads best.
    leaves = [
        ((*path, *plain_path(below)), axes, leaf)
        for path, axes, value in rows
        for below, leaf in jax.tree_util.tree_leaves_with_path(value)
    ]
    values = [leaf for _, _, leaf in leaves]
    if not values or not all(isinstance(value, (Sharding, PartitionSpec)) for value in values):
        return None
    kind = "specs" if all(isinstance(value, PartitionSpec) for value in values) else "shardings"
    meshes = dict.fromkeys(format_mesh(v.mesh) for v in values if isinstance(v, NamedSharding))
    header = ["path", "axes", "spec"] + (["mesh"] if len(meshes) > 1 else [])
    cells = [header]
    for path, axes, value in leaves:
        mesh = format_mesh(value.mesh) if isinstance(value, NamedSharding) else ""
        cells.append([format_path(path), format_axes(axes), _spec(value), mesh][: len(header)])
    over = f" over the mesh {next(iter(meshes))}" if len(meshes) == 1 else ""
    return "\n".join([f"State of {kind}{over}", *(f"  {line}" for line in columns(cells))])


def columns(cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Aligns cells in columns, and returns the lines."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            text.rjust(widths[i]) if i in right else text.ljust(widths[i])
            for i, text in enumerate(line)
        ).rstrip()
        for line in cells
    ]


def format_axes(axes: Any) -> str:
    """Formats axis names, an unnamed dimension as ``-``."""
    return ", ".join("-" if name is None else str(name) for name in axes or ())


def _spec(value: object) -> str:
    if isinstance(value, PartitionSpec):
        return str(value)
    if not isinstance(value, NamedSharding):
        return str(value)
    elsewhere = value.memory_kind not in (None, "device")
    return f"{value.spec}, in {value.memory_kind}" if elsewhere else str(value.spec)
