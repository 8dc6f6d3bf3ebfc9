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

from shardax._core.array_ops import as_value
from shardax._core.frames import local, owner_here, resolve
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.graph.static import EMPTY, Metadata
from shardax._core.object import Object
from shardax._core.state.state import Origin, State
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
        super().__init__(value, names, *boxes.layout_of_variable(names, entries.entries)[:2])

    def replace(self, **changes: object) -> Self:
        """Returns a copy with value, names, type or entries changed."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in ("value", "names", "variable_type", "entries")
        }
        fields.update(changes)
        return type(self)(**fields)


def _box_of(variable: Variable) -> VariableBox[Any]:
    """A Variable as a box; lazy values stay lazy."""
    target = resolve(variable, local.frame)
    metadata = target._metadata
    entries = Metadata(None, metadata.entries) if metadata.entries else EMPTY
    return VariableBox(target._value, metadata.axes, type(variable), entries)


def _variable_of(box: VariableBox[Any]) -> Variable:
    return _new_variable(box.variable_type, box.value, Metadata(box.names, box.entries.entries))


def to_boxes(tree: object) -> PyTree:
    """Replaces the Variables of a pytree by boxes; the inverse of ``to_variables``.

    Args:
        tree: A Variable, or a pytree of Variables, arrays and whatever else.

    Returns:
        The pytree with a ``VariableBox`` for each Variable. A ``Param`` that ``to_variables`` made
        of a box becomes that box again, with the value and axes that it has now.

    Raises:
        PartitionError: If there is a Module or tracked container in the tree.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> to_boxes({"w": sx.Param(jnp.ones((2, 3)), axes=("embed", "mlp"))})["w"].names
        ('embed', 'mlp')
    """

    def to_box(leaf: object):
        if isinstance(leaf, Variable):
            box = _box_of(leaf)
            original = leaf.metadata.get(boxes.BOX_ENTRY)
            alone = box.variable_type is Param and len(leaf.metadata) == 1
            if alone and isinstance(original, boxes.Partitioned):
                own_names = original.names or ()
                same = box.names == boxes.fitted(own_names, len(box.names or ()))
                return original.replace(
                    value=box.value, names=original.names if same else box.names
                )
            return box
        if isinstance(leaf, Object):
            raise PartitionError(
                f"A {type(leaf).__name__} has Variables, and its boxes would be lost in it: take "
                "them out first, to_boxes(dict(sx.iter_variables(model)))."
            )
        return leaf

    return jax.tree.map(to_box, tree, is_leaf=_is_node)


def to_variables(tree: object, variable_type: type[Variable] = Param) -> PyTree:
    """Replaces the boxes of a pytree by Variables; the inverse of ``to_boxes``.

    Args:
        tree: A box, or a pytree of boxes, arrays and whatever else.
        variable_type: The class of the Variables made of boxes that were none before.

    Returns:
        The pytree with a new Variable for each box. Its axes are the names of the box, and it is
        laid out as the box is, by ``shard`` and all others.

    Raises:
        VariableValueError: If a box holds something that is no array.
        PartitionError: If the box is of a kind without names, or holds another box.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> box = sx.Partitioned(jnp.ones((2, 3)), (None, "model"))
        >>> variable = to_variables(box)
        >>> variable.axes, to_boxes(variable) == box
        ((None, 'model'), True)
    """

    def to_variable(leaf: object):
        if not boxes.is_box(leaf):
            return leaf
        leaf = boxes.standard_box(leaf)
        inner = jax.tree.leaves(leaf.value, is_leaf=is_axis_metadata)
        if not isinstance(leaf, boxes.Partitioned) or any(map(is_axis_metadata, inner)):
            raise PartitionError(
                f"{leaf!r}: has no names, or holds another box, so it is no Variable. Make one of "
                "its value: sx.Param(unbox(box), axes=...)."
            )
        if isinstance(leaf, VariableBox):
            return _variable_of(leaf)
        names = leaf.names
        if names is not None and hasattr(leaf.value, "ndim"):
            names = boxes.fitted(names, leaf.value.ndim)
        metadata = Metadata(names, {boxes.BOX_ENTRY: leaf.replace_boxed(None)})
        return _new_variable(variable_type, leaf.value, metadata)

    return jax.tree.map(to_variable, tree, is_leaf=_is_node)


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
        function: Takes a box; a Variable is given as a ``VariableBox``. Of boxes in a box it gets
            the outermost.
        tree: A boxed tree. Modules and States stay as they are.

    Returns:
        The tree with the results in place of the boxes; a ``VariableBox`` becomes a new Variable.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> tree = {"w": sx.Partitioned(jnp.ones(2), ("model",)), "step": 3}
        >>> map_axis_meta(lambda box: box.replace(names=(None,)), tree)
        {'step': 3, 'w': Partitioned(float32[2], names=(None,))}
    """

    def mapped(path: Path, leaf):
        if not is_box(leaf):
            return leaf
        box = _box_of(leaf) if isinstance(leaf, Variable) else leaf
        result = _located(path, lambda: function(box))
        return _variable_of(result) if isinstance(result, VariableBox) else result

    return _map(mapped, tree)


def unbox(tree: PyTree, apply_constraint: bool = True) -> PyTree:
    """Takes the values out of all boxes of a tree.

    Where a mesh is known, by ``jax.set_mesh``, ``with mesh:`` or the box itself, a value is laid
    out by its box; so a gradient or update made of it is, too.

    Args:
        tree: A boxed tree.
        apply_constraint: False to take the values as they are.

    Returns:
        The tree with values in place of boxes. Modules and States stay as they are.

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
        if not boxes.is_box(leaf):
            return leaf
        leaf = _located(path, lambda: boxes.standard_box(leaf))
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
    leaves, treedef = jax.tree.flatten(
        tree, is_leaf=lambda leaf: _is_node(leaf) or isinstance(leaf, State)
    )
    try:
        new_values = treedef.flatten_up_to(values)
    except ValueError as error:
        raise PartitionError(
            f"The values do not fit the boxed tree: {error}. Give them in the form that "
            "unbox(tree) has."
        ) from error

    def replaced(leaf: Leaf, value: Any):
        if isinstance(leaf, Variable):
            return _variable_of(replaced(_box_of(leaf), value))
        if not boxes.is_box(leaf):
            return value
        return leaf.replace_boxed(
            replace_boxed(boxes.value_in(leaf), value) if _has_boxes(leaf) else value
        )

    return treedef.unflatten(map(replaced, leaves, new_values))


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


def _has_boxes(box: object) -> bool:
    """Whether there are boxes in a box."""
    return any(is_box(leaf) for _, leaf in walk(boxes.value_in(box))[0])


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
            origins: dict[Path, Origin] = {}
            for below, origin in leaf.origins().items():
                kind, metadata = origin.variable_type, origin.all_metadata
                box = VariableBox(None, origin.axes, kind, metadata)
                names = _located((*path, *below), lambda box=box: rename(box)).names
                origins[below] = Origin(kind, metadata.replace(axes=names))
            return State.from_flat(leaf.flat(), origins)
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
        return box.replace_boxed(_map(renamed, boxes.value_in(box), path))

    return _map(renamed, tree)


def _renamed_box(box, rename: Callable[[Any], Any]) -> Any:
    """A box with another's names after a change."""
    if isinstance(box, boxes.AxisMetadata) or not hasattr(box, "names"):
        return rename(box)
    # Flax counts negative positions from the end of the names without the new one.
    return box.replace(names=rename(boxes.standard_box(box)).names)
