# SPDX-License-Identifier: Apache-2.0
"""Layouts as text: the table that a State of shardings or of specs prints itself as.

The values of such a State say where arrays go, not what they hold. They are short, and alike from
row to row, so a column for each thing that differs reads better than one text after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardax._core.graph.paths import Path, PathKey, format_path


def layout_text(rows: Iterable[tuple[Path, Any, Any]]) -> str | None:
    """Returns the table of shardings or specs, or None if the values are something else.

    Args:
        rows: For each value its path, its axis names or None, and the value: a sharding, a spec, or
            a pytree of them.

    Returns:
        A line that says over which mesh, then one line per array.

    Example:
        >>> print(layout_text([(("up", "kernel"), ("embed", "mlp"), PartitionSpec(None, "model"))]))
        State of specs
          path        axes        spec
          .up.kernel  embed, mlp  P(None, 'model')
    """
    leaves = [
        (_leaf_path(path, below), axes, leaf)
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
    """Returns lines of text in which the cells of a column stand below each other.

    Args:
        cells: The texts, line by line, as many in each.
        right: The columns to align on the right.

    Example:
        >>> columns([["path", "bytes"], [".up", "1"]], right=[1])
        ['path  bytes', '.up       1']
    """
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            text.rjust(widths[i]) if i in right else text.ljust(widths[i])
            for i, text in enumerate(line)
        ).rstrip()
        for line in cells
    ]


def format_axes(axes: Any) -> str:
    """Formats axis names, an unnamed dimension as ``-``; nothing for an array without names.

    Example:
        >>> format_axes(("embed", None))
        'embed, -'
    """
    return ", ".join("-" if name is None else str(name) for name in axes or ())


def format_mesh(mesh: Any) -> str:
    """Formats a mesh: sizes by axis, and the types of its axes if these are not Auto.

    Example:
        >>> format_mesh(jax.sharding.AbstractMesh((2, 4), ("data", "model")))
        'data=2, model=4'
    """
    texts = []
    for (axis, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True):
        other = "" if kind is jax.sharding.AxisType.Auto else f" ({kind.name})"
        texts.append(f"{axis}={size}{other}")
    return ", ".join(texts)


def _spec(value: Any) -> str:
    if isinstance(value, PartitionSpec):
        return str(value)
    if not isinstance(value, NamedSharding):
        return str(value)
    elsewhere = value.memory_kind not in (None, "device")
    return f"{value.spec}, in {value.memory_kind}" if elsewhere else str(value.spec)


def _leaf_path(path: Path, below: Sequence[Any]) -> Path:
    steps: list[Any] = []
    for key in below:
        if isinstance(key, PathKey):
            steps.extend(key.path)
            continue
        names = (getattr(key, attribute, None) for attribute in ("key", "idx", "name"))
        steps.append(next((name for name in names if name is not None), str(key)))
    return (*path, *steps)
