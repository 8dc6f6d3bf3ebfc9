# SPDX-License-Identifier: Apache-2.0
"""Trees of boxes: unboxing, refilling, new axes, conversion of Variables.

A *boxed tree* is a pytree with boxes in it, also inside each other. Variables count as boxes here,
and what a function makes of one is a new Variable.

Conversions lose nothing: a box that became a Variable carries its static attributes as the metadata
entry ``"box"`` and is laid out as the box was; a Variable that became a box, a ``VariableBox``,
carries its type and metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import jax

from shardax._core.frames import local, owner_here, resolve
from shardax._core.frozen import Origin
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.graph.static import BOX_ENTRY, EMPTY, PARTITION_NAME, Metadata
from shardax._core.object import Object
from shardax._core.state.state import State
from shardax._core.values import as_value
from shardax._core.variable import Param, Variable
from shardax.partition import errors
from shardax.partition.boxes import boxes
from shardax.partition.errors import PartitionError
from shardax.partition.inventory import walk
from shardax.partition.mesh import resolve_mesh

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class VariableBox(boxes.LogicallyPartitioned[T]):
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
        kept = boxes.layout_of_variable(names, entries.entries, value)
        mesh, rules = (None, None) if kept is None else (kept.mesh, kept.rules)
        super().__init__(value, names, mesh, rules)

    def replace(self, **changes: object) -> Self:
        """Returns a copy with value, names, type or entries changed."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in ("value", "names", "variable_type", "entries")
        }
        fields.update(changes)
        return type(self)(**fields)

    def add_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box with a new dimension's name; a box that is kept is told of it, too."""
        renamed = super().add_axis(index, params)
        kept = self.entries.box_with_axis(index, params[PARTITION_NAME], params)
        return renamed.replace(entries=kept)

    def remove_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box without a dimension's name; the inverse."""
        renamed = super().remove_axis(index, params)
        kept = self.entries.box_without_axis(index, params[PARTITION_NAME], params)
        return renamed.replace(entries=kept)


def _box_of(variable: Variable) -> VariableBox[Any]:
    """A Variable as a box; lazy values stay lazy."""
    target = resolve(variable, local.frame)
    return _variable_box(target._value, type(variable), target._metadata)


def _variable_box(
    value: Leaf, variable_type: type[Variable], metadata: Metadata
) -> VariableBox[Any]:
    entries = Metadata(None, metadata.entries) if metadata.entries else EMPTY
    return VariableBox(value, metadata.axes, variable_type, entries)


def _original_or_same(box: VariableBox[Any]) -> boxes.AxisMetadata[Any]:
    """The box that a Param was made of, if that tells all of it."""
    entries = box.entries.entries
    if box.variable_type is not Param or entries.keys() != {BOX_ENTRY}:
        return box
    original = boxes.box_around(entries[BOX_ENTRY], box.names, box.value)
    return box if original is None else original


def _variable_of(box: VariableBox[Any]) -> Variable:
    return _new_variable(box.variable_type, box.value, Metadata(box.names, box.entries.entries))


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
            return _original_or_same(_box_of(leaf))
        if isinstance(leaf, State):
            origins = leaf.origins()
            return _map_entries(lambda path, value: _boxed_entry(value, origins[path]), leaf)
        if isinstance(leaf, Object):
            raise PartitionError(
                f"A {type(leaf).__name__} has Variables, and its boxes would be lost in it: take "
                "them out first, to_boxes(dict(sx.iter_variables(model)))."
            )
        return leaf

    return jax.tree.map(to_box, tree, is_leaf=_is_subtree)


def _boxed_entry(value: Leaf, origin: Origin) -> PyTree:
    if boxes.is_box(value):  # as in the state of an optimizer
        return value
    return _original_or_same(_variable_box(value, origin.variable_type, origin.all_metadata))


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
        if not boxes.is_box(leaf):
            return leaf
        return _new_variable(*_parts_of(leaf, variable_type))

    return jax.tree.map(to_variable, tree, is_leaf=_is_subtree)


def _unboxed_state(state: State, variable_type: type[Variable]) -> State:
    values: dict[Path, Leaf] = {}
    origins = state.origins()
    for path, value in state.flat().items():
        values[path] = value
        if boxes.is_box(value):
            kind, values[path], metadata = _parts_of(value, variable_type)
            origins[path] = Origin(kind, metadata)
    return State.from_flat(values, origins)


def _parts_of(box: Any, variable_type: type[Variable]) -> tuple[type[Variable], PyTree, Metadata]:
    """Type, value and metadata of the Variable of a box."""
    value, metadata = boxes.contents(box)
    if isinstance(box, VariableBox):
        return box.variable_type, value, Metadata(box.names, box.entries.entries)
    return variable_type, value, metadata


def _is_subtree(value: object) -> bool:
    return boxes.is_box(value) or isinstance(value, (Object, State))


def _is_node(value: object) -> bool:
    return boxes.is_box(value) or isinstance(value, Object)


def _new_variable(kind: type[Variable], value: object, metadata: Metadata) -> Variable:
    """A new Variable; the axes may not fit the value."""
    return kind._make(as_value(value, kind.__name__), metadata, owner_here())


_LOCATED = (
    errors.PartitionError,
    PartitionError,
    errors.PartitionError,
    errors.PartitionError,
    errors.PartitionCheckError,
    PartitionError,
)
"""Errors of one box, to which its path in the tree is added."""


def is_box(value: object) -> bool:
    """Whether a value is a box or a Variable.

    Args:
        value: Anything.

    Returns:
        True for an ``AxisMetadata``, a box of another library such as Flax, or a Variable.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> is_box(sx.Param(jnp.ones(2))), is_box(jnp.ones(2))
        (True, False)
    """
    return boxes.is_box(value) or isinstance(value, Variable)


def is_axis_metadata(value: object) -> bool:
    """Whether a value is a box.

    Args:
        value: Anything.

    Returns:
        True for an ``AxisMetadata`` or a box of another library, such as Flax, that has ``unbox``,
        ``replace_boxed`` and names; a Variable is none (``is_box`` counts both).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> is_axis_metadata(sx.Partitioned(1.0, ())), is_axis_metadata(sx.Param(jnp.ones(2)))
        (True, False)
    """
    return boxes.is_box(value)


def map_axis_meta(function: Callable[[PyTree], object], tree: object) -> PyTree:
    """Calls a function on every box of a tree.

    Args:
        function: Takes a box; a Variable, and an entry of a State, is given as a ``VariableBox``.
            Of boxes in a box it gets the outermost.
        tree: A boxed tree. Modules stay as they are.

    Returns:
        The tree with the results in place of the boxes; a ``VariableBox`` becomes a new Variable,
        or an entry of the State again.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> tree = {"w": sx.Partitioned(jnp.ones(2), ("model",)), "step": 3}
        >>> map_axis_meta(lambda box: box.replace(names=(None,)), tree)
        {'step': 3, 'w': Partitioned(float32[2], names=(None,))}
    """

    def mapped(path: Path, leaf):
        if isinstance(leaf, State):
            return _map_boxed_entries(lambda below, box: called((*path, *below), box), leaf)
        if not is_box(leaf):
            return leaf
        result = called(path, _box_of(leaf) if isinstance(leaf, Variable) else leaf)
        return _variable_of(result) if isinstance(result, VariableBox) else result

    def called(path: Path, box: Any) -> PyTree:
        return _located(path, lambda: function(box))

    return _map(mapped, tree)


def unbox(tree: PyTree, apply_constraint: bool = True) -> PyTree:
    """Takes the values out of all boxes of a tree.

    Where a mesh is known, by ``jax.set_mesh``, ``with mesh:`` or the box itself, a value is laid
    out by its box; so a gradient or update made of it is, too.

    Args:
        tree: A boxed tree.
        apply_constraint: False to take the values as they are.

    Returns:
        The tree with values in place of boxes, also of those in a State. Modules and arrays of
        States stay as they are.

    Raises:
        PartitionError: If a box has logical names, a mesh is known, and there are no rules, or if a
            value cannot be laid out as its box says; names its path.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> tree = {"w": sx.Partitioned(jnp.ones(2), ("model",)), "step": 3}
        >>> unbox(tree)["w"].shape, unbox(tree)["step"]
        ((2,), 3)
    """
    in_scope = apply_constraint and resolve_mesh() is not None

    def unboxed(path: Path, leaf: object):
        if isinstance(leaf, Variable):
            leaf = _box_of(leaf).replace_boxed(leaf.value)
        if isinstance(leaf, State):
            return _map_entries(lambda below, value: _map(unboxed, value, (*path, *below)), leaf)
        if not boxes.is_box(leaf):
            return leaf
        leaf = _located(path, lambda: boxes.standard_box(leaf, boxes.unboxed(leaf, False)))
        has_mesh = in_scope or getattr(leaf, "mesh", None) is not None
        value = _located(path, lambda: boxes.unboxed(leaf, apply_constraint and has_mesh))
        return _map(unboxed, value, path)

    return _map(unboxed, tree)


def replace_boxed(tree: PyTree, values: Leaf) -> Any:
    """Puts other values into the boxes of a tree.

    Args:
        tree: A boxed tree.
        values: The same tree without boxes, such as ``unbox`` returns it.

    Returns:
        The boxed tree with the new values; what is no box is taken from ``values``.

    Raises:
        PartitionError: If ``values`` has another structure.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> tree = {"w": sx.Partitioned(jnp.ones(2), ("model",)), "step": 3}
        >>> replace_boxed(tree, {"w": jnp.zeros(3), "step": 4})
        {'step': 4, 'w': Partitioned(float32[3], names=('model',))}
    """
    # Arrays with names of their own are nodes here, so that values have to have the same names.
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_subtree)
    try:
        new_values = treedef.flatten_up_to(values)
    except ValueError as error:
        raise _misfit(error) from error

    def replaced(leaf: Leaf, value: Any):
        if isinstance(leaf, State):
            if not any(map(is_box, leaf.flat().values())):
                return value
            if not isinstance(value, State) or value.flat().keys() != leaf.flat().keys():
                raise _misfit(f"{value!r} is no State of the same paths")
            return _map_entries(lambda path, box: replace_boxed(box, value.flat()[path]), leaf)
        if isinstance(leaf, Variable):
            return _variable_of(replaced(_box_of(leaf), value))
        if not boxes.is_box(leaf):
            return value
        return leaf.replace_boxed(
            replace_boxed(boxes.unboxed(leaf, False), value) if _has_boxes(leaf) else value
        )

    return treedef.unflatten(map(replaced, leaves, new_values))


def _misfit(reason: object) -> PartitionError:
    return PartitionError(
        f"The values do not fit the boxed tree: {reason}. Give them in the form that unbox(tree) "
        "has."
    )


def add_axis(tree: object, index: int, params: Mapping[Any, object]) -> Any:
    """Adds a new dimension's name to every box of a tree.

    Args:
        tree: A boxed tree, such as ``jax.vmap(init)(keys)`` returns it.
        index: Where the new dimension is (``out_axes`` of the transform); negative counts from the
            end of the new dimensions.
        params: ``{PARTITION_NAME: "layers"}``, with the name of the new dimension or None.

    Returns:
        The tree with new boxes around the same values. A Variable becomes a new Variable.

    Raises:
        PartitionError: If ``params`` has no name; names the path of the box; if a box has no such
            place, or there is a Module in the tree; names the path.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> init = sx.partition.with_partitioning(jax.nn.initializers.ones, (None, "model"))
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> stacked = jax.vmap(lambda key: init(key, (4, 8)))(keys)
        >>> add_axis(stacked, 0, {sx.partition.PARTITION_NAME: "layers"})
        Partitioned(float32[3, 4, 8], names=('layers', None, 'model'))
    """
    return _renamed(tree, lambda box: box.add_axis(index, params))


def remove_axis(tree: object, index: int, params: Mapping[Any, object]) -> PyTree:
    """Removes the name of a dimension from every box of a tree.

    The inverse of ``add_axis``, for every index.

    Args:
        tree: A boxed tree, such as the body of a scan is given it.
        index: Which dimension went; negative counts from the end.
        params: ``{PARTITION_NAME: "layers"}``, with the name that stands there.

    Returns:
        The tree with new boxes around the same values. A Variable becomes a new Variable.

    Raises:
        PartitionError: If ``params`` has no name; names the path of the box; if a box has no such
            dimension, or it has another name, or there is a Module in the tree; names the path.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.Partitioned(jnp.ones((4, 8)), ("layers", None, "model"))
        >>> remove_axis(layer, 0, {sx.partition.PARTITION_NAME: "layers"}).names
        (None, 'model')
    """
    return _renamed(tree, lambda box: box.remove_axis(index, params))


def _map(function: Callable[[Path, PyTree], object], tree: object, path: Path = ()) -> PyTree:
    """Maps over boxes, objects, States and other leaves, each with its path."""
    subtrees, treedef = walk(tree)
    return treedef.unflatten([function((*path, *below), leaf) for below, leaf in subtrees])


def _map_entries(function: Callable[[Path, Any], Leaf], state: State) -> State:
    """Returns a State of other values, of the same origins."""
    values = {path: function(path, value) for path, value in state.flat().items()}
    return State.from_flat(values, state.origins())


def _map_boxed_entries(function: Callable[[Path, Any], PyTree], state: State) -> State:
    """Returns a State of what a function makes of its entries as boxes."""
    values: dict[Path, Leaf] = {}
    origins = state.origins()
    for path, value in state.flat().items():
        box = value
        if not boxes.is_box(value):
            box = _variable_box(value, origins[path].variable_type, origins[path].all_metadata)
        made = values[path] = function(path, box)
        if isinstance(made, VariableBox):
            metadata = Metadata(made.names, made.entries.entries)
            values[path], origins[path] = made.value, Origin(made.variable_type, metadata)
    return State.from_flat(values, origins)


def _has_boxes(box: object) -> bool:
    """Whether there are boxes in a box."""
    return any(is_box(leaf) for _, leaf in walk(boxes.stored_in(box))[0])


def _located(path: Path, function: Callable[[], object]) -> PyTree:
    """Calls a method of a box; errors get its path."""
    try:
        return function()
    except errors.PartitionCheckError as error:
        lines = "".join(f"\n  {finding}" for finding in error.findings)
        raise errors.PartitionError(
            f"{format_path(path)}: cannot be laid out as its box says:{lines}"
        ) from error
    except _LOCATED as error:
        kind: Any = type(error)
        raise kind(f"{format_path(path)}: {error}") from error


def _renamed(tree: object, rename: Callable[[Any], object]):
    """Renames every box, also boxes in boxes, Variables and entries of States."""

    def renamed(path: Path, leaf: object) -> PyTree:
        if isinstance(leaf, State):
            return renamed_state(path, leaf)
        if isinstance(leaf, Variable):
            return _variable_of(_located(path, lambda: rename(_box_of(leaf))))
        if isinstance(leaf, Object):
            raise PartitionError(
                f"{format_path(path)}: a {type(leaf).__name__} is no box, and its Variables have "
                "their own axes, which sx.vmap and sx.scan keep true: "
                "sx.vmap(make, metadata={PARTITION_NAME: 'layers'})."
            )
        if not boxes.is_box(leaf):
            return leaf
        box = _located(path, lambda: _renamed_box(leaf, rename))
        if not _has_boxes(box):
            return box
        return boxes.with_stored(box, _map(renamed, boxes.stored_in(box), path))

    def renamed_state(path: Path, state: State) -> State:
        values: dict[Path, Leaf] = {}
        origins: dict[Path, Origin] = {}
        for below, origin in state.origins().items():
            place = (*path, *below)
            values[below] = _map(renamed, state.flat()[below], place)
            empty = _variable_box(None, origin.variable_type, origin.all_metadata)
            box = _located(place, lambda empty=empty: rename(empty))
            metadata = Metadata(box.names, box.entries.entries)
            origins[below] = Origin(origin.variable_type, metadata)
        return State.from_flat(values, origins)

    return _map(renamed, tree)


def _renamed_box(box, rename: Callable[[Any], Any]) -> Any:
    """A box with another's names after a change."""
    if isinstance(box, boxes.AxisMetadata) or not hasattr(box, "names"):
        return rename(box)
    # Flax counts negative positions from the end of the names without the new one.
    return box.replace(names=rename(boxes.standard_box(box, boxes.stored_in(box))).names)
