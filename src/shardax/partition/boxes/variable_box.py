# SPDX-License-Identifier: Apache-2.0
"""Variables as boxes, and boxes as Variables.

Conversions lose nothing. A box that became a Variable stands among its metadata, without the value,
and the Variable is laid out as the box was. A Variable that became a box is a ``VariableBox``,
which has its type and metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import jax

from shardax._core.frames import local, owner_here, resolve
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.graph.static import BOX_ENTRY, EMPTY, PARTITION_NAME, Metadata
from shardax._core.object import Object
from shardax._core.state.state import Origin, State
from shardax._core.values import as_value
from shardax._core.variable import Variable
from shardax._core.variable_types import Param
from shardax.partition.boxes import errors, protocol
from shardax.partition.boxes.axis_metadata import AxisMetadata
from shardax.partition.boxes.partitioned import LogicallyPartitioned
from shardax.partition.boxes.variable_layout import box_around, layout_of_variable

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class VariableBox(LogicallyPartitioned[T]):
    """A Variable as a box, with its type and metadata.

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

    variable_type: type[Variable] = Param
    entries: Metadata = EMPTY

    def __init__(
        self, value: T, names: Any, variable_type: type[Variable], entries: Metadata
    ) -> None:
        object.__setattr__(self, "variable_type", variable_type)
        object.__setattr__(self, "entries", entries)
        layout = layout_of_variable(names, entries.entries, value)
        mesh = None if layout is None else layout.mesh
        rules = None if layout is None else layout.rules
        super().__init__(value, names, mesh, rules)

    def replace(self, **changes: object) -> Self:
        """Returns a copy with value, names, type or entries changed."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in ("value", "names", "variable_type", "entries")
        }
        fields.update(changes)
        return type(self)(**fields)

    def _filtered_as(self) -> tuple[type, Mapping[str, PyTree]]:
        """Returns the type and the metadata of the Variable that it was made of."""
        return self.variable_type, self.entries.entries

    def add_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box with a new dimension's name, as has the box among its entries."""
        renamed = super().add_axis(index, params)
        entries = self.entries.box_with_axis(index, params[PARTITION_NAME], params)
        return renamed.replace(entries=entries)

    def remove_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box without a dimension's name; the inverse."""
        renamed = super().remove_axis(index, params)
        entries = self.entries.box_without_axis(index, params[PARTITION_NAME], params)
        return renamed.replace(entries=entries)


def box_of_variable(variable: Variable) -> VariableBox[Any]:
    """Returns a Variable as a box; lazy values stay lazy."""
    target = resolve(variable, local.frame)
    return box_of_entry(target._value, Origin(type(variable), target._metadata))


def box_of_entry(value: Leaf, origin: Origin) -> VariableBox[Any]:
    """Returns an entry of a State, a Variable's value with its type and metadata, as a box."""
    metadata = origin.all_metadata
    entries = Metadata(None, metadata.entries) if metadata.entries else EMPTY
    return VariableBox(value, metadata.axes, origin.variable_type, entries)


def variable_of_box(box: VariableBox[Any]) -> Variable:
    """Returns a new Variable of the value, type and metadata in a box."""
    return _new_variable(box.value, origin_of_box(box))


def origin_of_box(box: VariableBox[Any]) -> Origin:
    """Returns the type and metadata of the Variable of a box."""
    return Origin(box.variable_type, Metadata(box.names, box.entries.entries))


def to_boxes(tree: object) -> PyTree:
    """Replaces the Variables of a pytree by boxes; the inverse of ``to_variables``.

    Args:
        tree: A Variable, a State, or a pytree of such, arrays and whatever else.

    Returns:
        The pytree with a ``VariableBox`` for each Variable, and in a State for each entry. A
        ``Param`` that was made of a box becomes that box again, with the value and axes that it has
        now, if the box would unbox this value and has these names.

    Raises:
        PartitionError: If there is a Module or tracked container in the tree.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> to_boxes({"w": sx.Param(jnp.ones((2, 3)), axes=("embed", "mlp"))})["w"].names
        ('embed', 'mlp')
    """

    def to_box(leaf: object):
        if isinstance(leaf, Variable):
            return _original_or_same(box_of_variable(leaf))
        if isinstance(leaf, State):
            origins = leaf.origins()
            return map_entries(lambda path, value: _boxed_entry(value, origins[path]), leaf)
        if isinstance(leaf, Object):
            raise errors.variables_in_module(type(leaf).__name__)
        return leaf

    return jax.tree.map(to_box, tree, is_leaf=is_subtree)


def _boxed_entry(value: Leaf, origin: Origin) -> PyTree:
    """Returns an entry of a State as a box."""
    if protocol.is_box(value):  # as in the state of an optimizer
        return value
    return _original_or_same(box_of_entry(value, origin))


def _original_or_same(box: VariableBox[Any]) -> AxisMetadata[Any]:
    """Returns the box that a Param was made of, if that tells all of it."""
    entries = box.entries.entries
    if box.variable_type is not Param or entries.keys() != {BOX_ENTRY}:
        return box
    original = box_around(entries[BOX_ENTRY], box.names, box.value)
    return box if original is None else original


def to_variables(tree: object, variable_type: type[Variable] = Param) -> PyTree:
    """Replaces the boxes of a pytree by Variables; the inverse of ``to_boxes``.

    Args:
        tree: A box, or a pytree of boxes, arrays and whatever else.
        variable_type: The class of the Variables made of boxes that were none before.

    Returns:
        The pytree with a new Variable for each box. Its value is what the box unboxes, its axes are
        the names of the box, and it is laid out as the box is, by ``shard`` and all others. A State
        of boxes becomes a State of their values, which keeps types and names.

    Raises:
        VariableValueError: If a box holds something that is no array.
        PartitionError: If a box holds another box.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> box = sx.Partitioned(jnp.ones((2, 3)), (None, "model"))
        >>> variable = to_variables(box)
        >>> variable.axes, to_boxes(variable) == box
        ((None, 'model'), True)
    """

    def to_variable(leaf: object):
        if isinstance(leaf, State):
            return _unboxed_state(leaf, variable_type)
        if not protocol.is_box(leaf):
            return leaf
        return _new_variable(*_unboxed_entry(leaf, variable_type))

    return jax.tree.map(to_variable, tree, is_leaf=is_subtree)


def _unboxed_state(state: State, variable_type: type[Variable]) -> State:
    """Returns a State of the values in boxes, of the types and names that these have."""
    values: dict[Path, Leaf] = {}
    origins = state.origins()
    for path, value in state.flat().items():
        values[path] = value
        if protocol.is_box(value):
            values[path], origins[path] = _unboxed_entry(value, variable_type)
    return State.from_flat(values, origins)


def _unboxed_entry(box: Any, variable_type: type[Variable]) -> tuple[PyTree, Origin]:
    """Returns the value of a box, and the type and metadata of its Variable."""
    value, metadata = protocol.contents(box)
    if isinstance(box, VariableBox):
        return value, origin_of_box(box)
    return value, Origin(variable_type, metadata)


def _new_variable(value: PyTree, origin: Origin) -> Variable:
    """Returns a new Variable, whose axes may not fit the value."""
    variable_type = origin.variable_type
    checked_value = as_value(value, variable_type.__name__)
    return variable_type._make(checked_value, origin.all_metadata, owner_here())


def is_subtree(value: object) -> bool:
    """Whether a value is a box, a State, or an object such as a Variable or Module."""
    return protocol.is_box(value) or isinstance(value, (Object, State))


def map_entries(function: Callable[[Path, Any], Leaf], state: State) -> State:
    """Returns a State of other values, of the same origins."""
    values = {path: function(path, value) for path, value in state.flat().items()}
    return State.from_flat(values, state.origins())
