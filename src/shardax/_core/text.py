# SPDX-License-Identifier: Apache-2.0
"""Tables and layouts as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardax._core.cross_process import format_mesh
from shardax._core.graph.paths import Path, PyTree, format_path, plain_path


def layout_text(rows: Iterable[tuple[Path, Iterable[object] | None, PyTree]]) -> str | None:
    """Formats shardings or specs as a table; None for other values."""
    leaves: list[tuple[Path, Iterable[object] | None, object]] = []
    for path, axes, value in rows:
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(value):
            leaves.append(((*path, *plain_path(key_path)), axes, leaf))

    layouts = [leaf for _, _, leaf in leaves]
    if not layouts or not all(isinstance(each, (Sharding, PartitionSpec)) for each in layouts):
        return None

    # They are short, and alike from row to row: a column for each thing that differs reads best. A
    # mesh that all have stands in the first line.
    meshes = {format_mesh(each.mesh) for each in layouts if isinstance(each, NamedSharding)}
    cells = [["path", "axes", "spec", "mesh"]]
    for path, axes, layout in leaves:
        mesh = format_mesh(layout.mesh) if isinstance(layout, NamedSharding) else ""
        cells.append([format_path(path), format_axes(axes), _format_spec(layout), mesh])
    if len(meshes) <= 1:
        cells = [line[:-1] for line in cells]

    kind = "specs" if all(isinstance(each, PartitionSpec) for each in layouts) else "shardings"
    title = f"State of {kind}"
    if len(meshes) == 1:
        title += f" over the mesh {meshes.pop()}"
    return "\n".join([title, *(f"  {line}" for line in columns(cells))])


def columns(cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Aligns cells in columns, and returns the lines."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def aligned(line: Sequence[str]) -> str:
        texts = [
            text.rjust(width) if index in right else text.ljust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(texts).rstrip()

    return [aligned(line) for line in cells]


def format_axes(axes: Iterable[object] | None) -> str:
    """Formats axis names, an unnamed dimension as ``-``."""
    return ", ".join("-" if name is None else str(name) for name in axes or ())


def _format_spec(layout: object) -> str:
    """Formats a spec, or a sharding without its mesh."""
    if not isinstance(layout, NamedSharding):
        return str(layout)
    if layout.memory_kind in (None, "device"):
        return str(layout.spec)
    return f"{layout.spec}, in {layout.memory_kind}"
