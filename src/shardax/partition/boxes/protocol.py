# SPDX-License-Identifier: Apache-2.0
"""Boxes of any class, of ours and of other libraries, known by their methods.

An object with ``unbox``, ``replace_boxed`` and names is a box (``is_box``), so trees of Flax stay
Flax's. For layouts it is read as the ``Partitioned`` or ``LogicallyPartitioned`` of the same names
(``standard_box``).

What a box *stores* are the leaves that JAX knows. What it *unboxes* may be computed from these,
such as an unpacked value. Layouts move what is stored (``stored_in``, ``with_stored``). A Variable
made of a box has what is unboxed (``contents``).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardax._core.graph import handlers
from shardax._core.graph.handlers import is_box
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import BOX_ENTRY, Metadata
from shardax.partition.boxes import errors
from shardax.partition.boxes.axis_metadata import AxisMetadata, fitted, with_value
from shardax.partition.boxes.partitioned import LogicallyPartitioned, Partitioned


def standard_box(box: Any, value: object) -> AxisMetadata[Any]:
    """Returns the box itself, or the standard one of a foreign box's names around a value."""
    if isinstance(box, AxisMetadata):
        return box

    # A ``get_partition_spec`` has priority, but for names of None, which say that nothing is known.
    names = getattr(box, "names", None)
    is_unknown = names is None and hasattr(box, "names")
    if callable(getattr(box, "get_partition_spec", None)) and not is_unknown:
        names = tuple(box.get_partition_spec())

    mesh = getattr(box, "mesh", None)
    if hasattr(box, "rules"):
        return LogicallyPartitioned(value, names, mesh, box.rules)
    return Partitioned(value, names, mesh)


def has_own_sharding(box: AxisMetadata[Any]) -> bool:
    """Whether the class of a box has a ``get_sharding`` of its own."""
    standard = (AxisMetadata.get_sharding, Partitioned.get_sharding)
    return type(box).get_sharding not in standard


def stored_in(box: Any) -> Any:
    """Returns what a box holds, of which its ``unbox`` may compute another value."""
    if isinstance(box, AxisMetadata):
        return box.value
    if not handlers.is_node(box):
        return unboxed(box, apply_constraint=False)

    children, _ = _children_of(box)
    index = _index_of_value(box, children)
    return children if index is None else children[index]


def with_stored(box: Any, stored: Any) -> Any:
    """Returns the box around something else in place of ``stored_in``, else the same."""
    # Not by ``replace_boxed``, which is about what ``unbox`` returns, and may convert it.
    if isinstance(box, AxisMetadata):
        return with_value(box, stored)
    if not handlers.is_node(box):
        return box.replace_boxed(stored)

    children, treedef = _children_of(box)
    index = _index_of_value(box, children)
    if index is None:
        return treedef.unflatten(stored)
    return treedef.unflatten([*children[:index], stored, *children[index + 1 :]])


def _children_of(box: object) -> tuple[list[Any], Any]:
    """Returns the children of a pytree node, and the treedef of it alone."""
    return jax.tree.flatten(box, is_leaf=lambda item: item is not box)


def _index_of_value(box: object, children: Sequence[object]) -> int | None:
    """Returns which child of a foreign box its names are about; None for all of several."""
    if len(children) == 1:
        return 0
    try:
        value = unboxed(box, apply_constraint=False)
    except Exception:  # noqa: BLE001 - a value that is computed, here of what has no numbers
        return None
    for index, child in enumerate(children):
        if child is value:
            return index
    return None


def unboxed(box: Any, apply_constraint: bool) -> PyTree:
    """Returns the value of a box, whose ``unbox`` may take no argument."""
    if _takes_an_argument(type(box).unbox):
        return box.unbox(apply_constraint)
    return box.unbox()


@functools.lru_cache(maxsize=256)
def _takes_an_argument(method: Callable[..., PyTree]) -> bool:
    """Whether a method can be called with one argument besides ``self``."""
    try:
        inspect.signature(method).bind(None, True)
    except TypeError:
        return False
    return True


def contents(box: object) -> tuple[Any, Metadata]:
    """Returns the value of a box, and the metadata of the Variable that is made of it."""
    value = unboxed(box, apply_constraint=False)
    if any(map(is_box, jax.tree.leaves(value, is_leaf=is_box))):
        raise errors.box_in_box(box)

    standard = standard_box(box, value)
    names, _ = standard.layout()
    names = None if names is None else tuple(names)
    if names is not None and hasattr(value, "ndim"):
        names = fitted(names, value.ndim)
    return value, Metadata(names, {BOX_ENTRY: with_stored(standard, None)})


# Children and structure are JAX's: a class may be registered with it in a way of its own.
_BOX = dataclasses.replace(handlers.NODE, name="box", whole=True, contents=contents)
handlers.register(
    object,
    dataclasses.replace(handlers.LEAF, name="unregistered box", whole=True, contents=contents),
    where=handlers.has_box_methods,
)
handlers.register(
    object,
    dataclasses.replace(_BOX, name="box of another library"),
    where=handlers.is_node_with_box_methods,
)
handlers.register(AxisMetadata, _BOX)
