# SPDX-License-Identifier: Apache-2.0
"""Pictures of shardings: which device holds which part of an array.

Text pictures for terminals come from JAX (``jax.debug.visualize_sharding``); this module adds SVG
for pages. Arrays of more than two dimensions are shown by their *face*: the two dimensions that are
sharded, or the first two.
"""

from __future__ import annotations

from html import escape
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax.core.variables import Variable

_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


def _face(value: Any) -> tuple[tuple[int, ...], Any]:
    """Returns (shape, sharding) of at most two dimensions that show how an array is laid out."""
    array = value.value if isinstance(value, Variable) else value
    shape, sharding = tuple(array.shape), array.sharding
    if len(shape) <= 2 or not isinstance(sharding, NamedSharding):
        return shape[:2], sharding
    spec = [*sharding.spec, *(None for _ in shape[len(sharding.spec) :])]
    sharded = [dimension for dimension, entry in enumerate(spec) if entry is not None]
    others = [dimension for dimension in range(len(shape)) if dimension not in sharded]
    first, second = sorted([*sharded, *others][:2])
    face = NamedSharding(sharding.mesh, PartitionSpec(spec[first], spec[second]))
    return (shape[first], shape[second]), face


def show_sharding(value: Any) -> None:
    """Prints a picture of an array's sharding on the terminal.

    Args:
        value: A Variable or array; of more than two dimensions, its face is shown.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.view.show_sharding(sx.Param(jnp.zeros((8, 8))))  # doctest: +ELLIPSIS
        ┌...
    """
    shape, sharding = _face(value)
    if not shape:
        print("a scalar, whole on every device")  # noqa: T201 (printing is the purpose)
        return
    jax.debug.visualize_sharding(shape, sharding)


def sharding_svg(value: Any, width: int = 280, height: int = 160) -> str:
    """Draws an array's sharding as SVG: a rectangle per distinct shard, labelled with its devices.

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
    shape, sharding = _face(value)
    shards: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        spans = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        shards.setdefault(tuple((start, stop) for start, stop in spans), []).append(device.id)
    sizes = (*shape, 1, 1)[:2]
    cells = []
    for spans, devices in shards.items():
        (top, bottom), (left, right) = (*spans, (0, 1), (0, 1))[:2]
        x, wide = left / sizes[1] * width, (right - left) / sizes[1] * width
        y, tall = top / sizes[0] * height, (bottom - top) / sizes[0] * height
        label = escape(",".join(map(str, sorted(devices))))
        cells.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
            f'fill="{_COLORS[min(devices) % len(_COLORS)]}" stroke="white"/>'
            f'<text x="{x + wide / 2:.1f}" y="{y + tall / 2 + 4:.1f}" text-anchor="middle" '
            f'font-size="12" fill="white">{label}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(cells)}</svg>'
    )
