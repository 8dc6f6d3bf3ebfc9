# SPDX-License-Identifier: Apache-2.0
"""Boxes in mapped calls: names beside a value lose and gain the mapped dimension, as Variables' do.

A *box* is a pytree node that says something of the dimensions of what is in it. Here it is known by
what it can do, not by its class: ``add_axis(index, params)`` and ``remove_axis(index, params)``
return the box of values put together along a new dimension, and of one slice, where ``params`` is
``{PARTITION_NAME: name}``. Those of ``shardax.partition`` can, and so can those of other libraries
that follow the same protocol.

The function sees boxes without the mapped dimension, and boxes in its result have it again. Its
name is that of the caller's ``metadata``; else the one with which boxes of the same class came;
else None. A box whose kind must have a name refuses None, and the message says where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardax.core.errors import BoxError, PartitioningUnspecifiedError, PrefixError
from shardax.core.metadata import PARTITION_NAME
from shardax.core.node import Object
from shardax.core.paths import Path, format_path, path_step
from shardax.transforms.layout import Layout, Leaving
from shardax.transforms.prefix import is_axis


class MappedBoxes:
    """The boxes of one mapped call.

    Args:
        layout: The call's layout.
        partition_name: The name of the mapped dimension that the caller gave, or None.
    """

    def __init__(self, layout: Layout, partition_name: Any) -> None:
        self.layout = layout
        self.partition_name = partition_name
        self._names: dict[type, Any] = {}

    def enter(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments as the function sees them: boxes without the mapped dimension.

        Raises:
            BoxError: If a box has no such dimension, or it has another name; names its path.
            PrefixError: If arrays in one box have different axes.
        """
        layout = self.layout
        axes = dict(zip(layout.plain_paths, layout.plain, strict=True))
        labelled = zip(layout.call.labels, args, strict=True)
        return (
            [self._map(arg, (label,), axes, self._without) for label, arg in labelled],
            {name: self._map(arg, (name,), axes, self._without) for name, arg in kwargs.items()},
        )

    def leave(self, result: Any, leaving: Leaving) -> Any:
        """Returns the result with the mapped dimension in its boxes.

        Args:
            result: What the function returned.
            leaving: The entries of what leaves.

        Raises:
            PartitioningUnspecifiedError: If a box must have a name for it; names its path.
            BoxError: If a box has no place for it; names its path.
            PrefixError: If arrays in one box have different axes.
        """
        return self._map(result, ("result",), dict(leaving.labels), self._with)

    def _without(self, box: Any, axis: int) -> Any:
        name = self.partition_name
        names = getattr(box, "names", None)
        if isinstance(names, tuple) and -len(names) <= axis < len(names):
            if name is None or names[axis] is None:
                name = names[axis]
            self._names.setdefault(type(box), name)
        return box.remove_axis(axis, {PARTITION_NAME: name})

    def _with(self, box: Any, axis: int) -> Any:
        name = self.partition_name
        if name is None:
            name = self._names.get(type(box))
        return box.add_axis(axis, {PARTITION_NAME: name})

    def _map(
        self,
        tree: Any,
        where: Path,
        axes: Mapping[Path, Any],
        change: Callable[[Any, int], Any],
    ) -> Any:
        def visit(key_path: Any, leaf: Any) -> Any:
            if not is_box(leaf):
                return leaf
            path = (*where, *map(path_step, key_path))
            below = [map(path_step, keys) for keys, _ in jax.tree_util.tree_leaves_with_path(leaf)]
            found = {axes.get((*path, *steps)) for steps in below}
            if len(found) > 1:
                raise PrefixError(
                    f"The arrays in the box at {format_path(path)} have the axes {found} in "
                    f"sx.{self.layout.call.name}, but its names hold for all of them. Give the box "
                    "one axis."
                )
            axis: Any = next(iter(found), None)
            return _changed(path, leaf, lambda box: change(box, axis)) if is_axis(axis) else leaf

        return jax.tree_util.tree_map_with_path(
            visit, tree, is_leaf=lambda item: is_box(item) or isinstance(item, Object)
        )


def is_box(value: Any) -> bool:
    """Whether a value can be told of dimensions that come and go.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> is_box(sx.Partitioned(jnp.ones(2), ("model",))), is_box(sx.Param(jnp.ones(2)))
        (True, False)
    """
    kind = type(value)
    return (
        hasattr(kind, "add_axis")
        and hasattr(kind, "remove_axis")
        and not isinstance(value, (Object, type))
    )


def _changed(path: Path, box: Any, change: Callable[[Any], Any]) -> Any:
    """Changes a box and the boxes in it."""
    try:
        changed = change(box)
    except (BoxError, PartitioningUnspecifiedError) as error:
        raise type(error)(f"{format_path(path)}: {error}") from error
    return jax.tree.map(
        lambda leaf: _changed(path, leaf, change) if is_box(leaf) else leaf,
        changed,
        is_leaf=lambda item: item is not changed and is_box(item),
    )
