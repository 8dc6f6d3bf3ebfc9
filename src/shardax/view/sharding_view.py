# SPDX-License-Identifier: Apache-2.0
"""Shardings you can see: a picture of one array, a table of a model, as text and as HTML.

A *view* says of every array which mesh axes split which dimension, what one device holds (its
*shard*), and how many devices hold the same (*copies*). It reads shapes and shardings only, so lazy
and abstract models can be viewed. Rows that differ in the number of a layer alone are shown as one.
The HTML needs no scripts, and notebooks show it by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardax._core.cross_process import format_mesh
from shardax._core.graph.paths import Path, format_path
from shardax._core.object import Object
from shardax._core.state.state import columns
from shardax._core.variable import Variable
from shardax.partition.inventory import (
    ArrayInfo,
    TreeInventory,
    is_array,
)
from shardax.partition.mesh import AnyMesh, resolve_mesh
from shardax.partition.rules import RulesLike, mesh_axes_of
from shardax.partition.specs import abstract
from shardax.view.pictures import ShardingViewError, shape_and_sharding, sharding_svg, sharding_text
from shardax.view.table import format_bytes

_HEADER = ("path", "shape", "dtype", "split", "shard", "copies", "bytes/device")


@dataclass(frozen=True)
class ShardingRow:
    """How one array is laid out.

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
        """Shape of the part that one device holds."""
        place, shape = self.array.sharding, self.array.shape
        return tuple(shape) if place is None else tuple(place.shard_shape(shape))

    @property
    def copies(self) -> int:
        """Number of devices that hold the same part."""
        place = self.array.sharding
        if not isinstance(place, NamedSharding):
            return 1 if place is None else len(place.device_set)
        used = {axis for entry in place.spec for axis in mesh_axes_of(entry)}
        return math.prod(size for axis, size in place.mesh.shape.items() if axis not in used)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the part that one device holds."""
        info = ArrayInfo((), self.shard_shape, self.array.dtype, False, None)
        return info.nbytes

    @property
    def split(self) -> str:
        """Which mesh axes split which dimension, by its name or, without one, its number."""
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
    """How arrays are laid out; ``str()`` is a picture or table, ``html()`` the same for a browser.

    Attributes:
        rows: One row for each array, each Variable once.
        single: Whether one array was given; then the view is a picture of it.

    Example:
        >>> import shardax as sx
        >>> mesh = jax.sharding.AbstractMesh((2,), ("model",))
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
        meshes = dict.fromkeys(format_mesh(p.mesh) for p in places if isinstance(p, NamedSharding))
        over = f"mesh {' and mesh '.join(meshes)}" if meshes else "no mesh"
        total = sum(_info(row.array).nbytes for row in self.rows)
        here = format_bytes(self.bytes_per_device)
        return f"{over}; {here} per device, {format_bytes(total)} in all"

    def html(self) -> str:
        """Returns an HTML element: a figure of one array, or a table with small pictures."""
        if self.single:
            picture = sharding_svg(self.rows[0].array)
            return f"<figure>{picture}<figcaption>{escape(self.caption())}</figcaption></figure>"
        head = "".join(f"<th>{escape(text)}</th>" for text in (*_HEADER, "devices"))
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escape(text)}</td>" for text in cells)
            + f"<td>{_small_picture(row)}</td></tr>"
            for cells, row in _lines(self.rows)
        )
        return f"<table><tr>{head}</tr>{body}</table><p>{escape(self.summary())}</p>"

    def _repr_html_(self) -> str:
        return self.html()

    def caption(self) -> str:
        """Returns what is below the picture of one array, or above its text."""
        row = self.rows[0]
        text = f"{row.array.dtype}{list(row.array.shape)}"
        text += f" as {list(row.shard_shape)} on each device, {row.copies} "
        text += "copy" if row.copies == 1 else "copies"
        place = row.array.sharding
        named = isinstance(place, NamedSharding)
        return f"{text}; {place.spec} over {format_mesh(place.mesh)}" if named else text

    def __str__(self) -> str:
        if self.single:
            return f"{self.caption()}\n{sharding_text(self.rows[0].array)}"
        cells = [_HEADER, *(cells for cells, _ in _lines(self.rows))]
        right = [_HEADER.index(name) for name in ("copies", "bytes/device")]
        return "\n".join([*columns(cells, right), self.summary()])


def sharding(
    tree: Any, mesh: AnyMesh | None = None, rules: RulesLike | None = None
) -> ShardingView:
    """Shows how an array or a model is laid out, or would be.

    Args:
        tree: An array, a Variable, a ``jax.ShapeDtypeStruct`` with a sharding; or a Module, a
            State, or a pytree of these.
        mesh: Show how the tree would be laid out over this mesh, also an ``AbstractMesh``. None:
            how it is; what is not laid out yet, as it would be over the mesh in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The view: print it, or let a notebook show it.

    Raises:
        ShardingViewError: If a single array's sharding is not known.
        PartitionCheckError: If an array cannot be laid out over the mesh; lists all.

    Example:
        >>> import shardax as sx
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
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
    if isinstance(tree, Variable) or (not isinstance(tree, Object) and is_array(tree)):
        return _picture(tree, mesh, rules)
    planned = abstract(tree, mesh, rules) if mesh is not None else tree
    here = TreeInventory(planned).leaves
    elsewhere = resolve_mesh() if mesh is None else None
    if elsewhere is not None and any(i.sharding is None for s in here for i in s.arrays):
        scoped = TreeInventory(abstract(tree, elsewhere, rules)).leaves
    else:
        scoped = here
    rows = [
        ShardingRow(now.path, leaf.names_of(now), _struct(now, later))
        for leaf, other in zip(here, scoped, strict=True)  # abstract copies keep the order
        for now, later in zip(leaf.arrays, other.arrays, strict=True)
    ]
    return ShardingView(tuple(rows))


def _picture(value: Any, mesh: AnyMesh | None, rules: RulesLike | None) -> ShardingView:
    axes = value.axes if isinstance(value, Variable) else None
    leaf = TreeInventory(value).leaves[0]
    if leaf.treedef is not None or leaf.box is not None:  # a Variable of several arrays or a box
        return sharding({"value": value}, mesh, rules)
    where = mesh
    if where is None and isinstance(value, Variable) and value.is_lazy:
        where = resolve_mesh()
    shown = value if where is None else _leaf(abstract(value, where, rules))
    shape, place = shape_and_sharding(shown)
    struct = jax.ShapeDtypeStruct(shape, value.dtype, sharding=place)
    return ShardingView((ShardingRow((), axes, struct),), single=True)


def _leaf(value: Any) -> Any:
    return value.value if isinstance(value, Variable) else value


def _struct(now: ArrayInfo, later: ArrayInfo) -> jax.ShapeDtypeStruct:
    place = later.sharding if now.sharding is None else now.sharding
    return jax.ShapeDtypeStruct(now.shape, now.dtype, sharding=place)


def _info(array: jax.ShapeDtypeStruct) -> ArrayInfo:
    return ArrayInfo((), tuple(array.shape), array.dtype, False, None)


def _small_picture(row: ShardingRow) -> str:
    try:
        return sharding_svg(row.array, 84, 48)
    except ShardingViewError:
        return ""


def _lines(rows: Sequence[ShardingRow]) -> list[tuple[tuple[str, ...], ShardingRow]]:
    """The texts of each line, with its first row; rows of alike layers are one line."""
    groups: dict[Any, list[ShardingRow]] = {}
    for row in rows:
        pattern = tuple("#" if isinstance(step, int) else step for step in row.path)
        array = row.array
        alike = (pattern, row.axes, tuple(array.shape), array.dtype, array.sharding)
        groups.setdefault(alike, []).append(row)
    return [(_cells(group), group[0]) for group in groups.values()]


def _cells(group: Sequence[ShardingRow]) -> tuple[str, ...]:
    row = group[0]
    each = format_bytes(row.bytes_per_device)
    return (
        _joint_path([row.path for row in group]),
        _sizes(row.array.shape),
        str(row.array.dtype),
        row.split,
        _sizes(row.shard_shape),
        str(row.copies),
        each if len(group) == 1 else f"{len(group)} x {each}",
    )


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _joint_path(paths: Sequence[Path]) -> str:
    """One path for several that differ in numbers, which become ``first-last``.

    >>> _joint_path([("layers", 0, "up"), ("layers", 1, "up")])
    '.layers[0-1].up'
    """
    if len(paths) == 1:
        return format_path(paths[0])
    text = ""
    for steps in zip(*paths, strict=True):
        numbers = sorted(set(steps)) if isinstance(steps[0], int) else []
        several = len(numbers) > 1
        text += f"[{numbers[0]}-{numbers[-1]}]" if several else format_path((steps[0],))
    return text
