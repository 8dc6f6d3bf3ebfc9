# SPDX-License-Identifier: Apache-2.0
"""Variables as boxes, and boxes as Variables.

A Variable and a box say the same of a value: what its dimensions are called. Where a box is
expected a Variable may stand, and what comes of it is a new Variable. The conversions here lose
nothing: a box that became a Variable carries its static attributes as the metadata entry ``"box"``,
and a Variable that became a box, a ``VariableBox``, carries its type and metadata. A Variable that
was made of a box is laid out like it: its axes are axes of a mesh if they were so in the box, and
rules and a mesh that were baked into the box are its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

import jax

from shardax.core.arraylike import as_value
from shardax.core.errors import BoxError
from shardax.core.frames import local, owner_here, resolve
from shardax.core.metadata import EMPTY, Metadata
from shardax.core.node import Object
from shardax.core.variables import Param, Variable
from shardax.partition.boxes import BOX_ENTRY, AxisMetadata, layout_of_variable
from shardax.partition.partitioned import LogicallyPartitioned, Partitioned

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class VariableBox(LogicallyPartitioned[T]):
    """A Variable as a box: its value and axes, and what is needed to make it a Variable again.

    Attributes:
        value: The Variable's value.
        names: Its axes, or None.
        mesh: That of the box that the Variable was made of, or None.
        rules: The rules of that box; for a ``Partitioned``, by which names stand for themselves.
        variable_type: Its class.
        entries: Its metadata other than the axes.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> box = to_boxes(sx.BatchStat(jnp.ones(3), axes=("embed",), tag="slow"))
        >>> box.names, box.variable_type.__name__, box.entries
        (('embed',), 'BatchStat', tag='slow')
    """

    variable_type: type[Variable[Any]] = Param
    entries: Metadata = EMPTY

    def __init__(
        self, value: T, names: Any, variable_type: type[Variable[Any]], entries: Metadata
    ) -> None:
        object.__setattr__(self, "variable_type", variable_type)
        object.__setattr__(self, "entries", entries)
        super().__init__(value, names, *layout_of_variable(names, entries.entries))

    def _named(self, names: tuple[Any, ...]) -> Self:
        return type(self)(self.value, names, self.variable_type, self.entries)


def box_of(variable: Variable[Any]) -> VariableBox[Any]:
    """Returns a Variable as a box, with its value unread: a lazy one stays lazy."""
    target = resolve(variable, local.frame)
    metadata = target._metadata
    entries = Metadata(None, metadata.entries) if metadata.entries else EMPTY
    return VariableBox(target._value, metadata.axes, type(variable), entries)


def variable_of(box: VariableBox[Any]) -> Variable[Any]:
    """Returns the Variable that a box stands for, as a new one."""
    return _variable(box.variable_type, box.value, Metadata(box.names, box.entries.entries))


def to_boxes(tree: Any) -> Any:
    """Replaces the Variables of a pytree by boxes; the inverse of ``to_variables``.

    Args:
        tree: A Variable, or a pytree of Variables, arrays and whatever else.

    Returns:
        The pytree with a ``VariableBox`` for each Variable. A ``Param`` that ``to_variables`` made
        of a box becomes that box again, with the value and axes that it has now.

    Raises:
        BoxError: If there is a Module or tracked container in the tree.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> to_boxes({"w": sx.Param(jnp.ones((2, 3)), axes=("embed", "mlp"))})["w"].names
        ('embed', 'mlp')
    """
    return jax.tree.map(_to_box, tree, is_leaf=_is_leaf)


def to_variables(tree: Any, variable_type: type[Variable[Any]] = Param) -> Any:
    """Replaces the boxes of a pytree by Variables; the inverse of ``to_boxes``.

    Args:
        tree: A box, or a pytree of boxes, arrays and whatever else.
        variable_type: The class of the Variables made of boxes that were none before.

    Returns:
        The pytree with a new Variable for each box. Its axes are the names of the box, and it is
        laid out as the box is, by ``shard`` and all others.

    Raises:
        VariableValueError: If a box holds something that is no array.
        BoxError: If the box is of a kind without names, or holds another box.

    Example:
        >>> import jax.numpy as jnp
        >>> box = Partitioned(jnp.ones((2, 3)), (None, "model"))
        >>> variable = to_variables(box)
        >>> variable.axes, to_boxes(variable) == box
        ((None, 'model'), True)
    """
    return jax.tree.map(lambda leaf: _to_variable(leaf, variable_type), tree, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (AxisMetadata, Object))


def _to_box(leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        box = box_of(leaf)
        original = leaf.metadata.get(BOX_ENTRY)
        alone = box.variable_type is Param and len(leaf.metadata) == 1
        if alone and isinstance(original, Partitioned):
            return dataclasses.replace(original, value=box.value, names=box.names)
        return box
    if isinstance(leaf, Object):
        raise BoxError(
            f"A {type(leaf).__name__} has Variables, and its boxes would be lost in it: take them "
            "out first, to_boxes(dict(sx.iter_variables(model)))."
        )
    return leaf


def _to_variable(leaf: Any, variable_type: type[Variable[Any]]) -> Any:
    if not isinstance(leaf, AxisMetadata):
        return leaf
    inner = jax.tree.leaves(leaf.value, is_leaf=lambda item: isinstance(item, AxisMetadata))
    if not isinstance(leaf, Partitioned) or any(isinstance(item, AxisMetadata) for item in inner):
        raise BoxError(
            f"{leaf!r}: a Variable has axes and an array; this box has no names, or holds another "
            "box. Make a Variable of what is in it: sx.Param(unbox(box), axes=...)."
        )
    if isinstance(leaf, VariableBox):
        return variable_of(leaf)
    empty = leaf.replace_boxed(None)
    return _variable(variable_type, leaf.value, Metadata(leaf.names, {BOX_ENTRY: empty}))


def _variable(kind: type[Variable[Any]], value: Any, metadata: Metadata) -> Variable[Any]:
    """Makes a Variable; its axes may be ahead of its value, as those of a box may."""
    return kind._make(as_value(value, kind.__name__), metadata, owner_here())
