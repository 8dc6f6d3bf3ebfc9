# SPDX-License-Identifier: Apache-2.0
"""Trees of boxes: unboxing, refilling, new axes.

A *boxed tree* is a pytree with boxes in it, also inside each other. Variables and entries of States
count as boxes here; a function is given a ``VariableBox`` of each. What it makes of a Variable is a
new Variable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax

from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.object import Object
from shardax._core.state.frozen import Origin
from shardax._core.state.state import State
from shardax._core.variable import Variable
from shardax.partition.boxes import errors, protocol
from shardax.partition.boxes.axis_metadata import AxisMetadata
from shardax.partition.boxes.variable_box import (
    VariableBox,
    box_of_entry,
    box_of_variable,
    is_subtree,
    map_entries,
    origin_of_box,
    variable_of_box,
)
from shardax.partition.errors import PartitionError
from shardax.partition.mesh import resolve_mesh
from shardax.partition.tree.inventory import walk


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
    return protocol.is_box(value) or isinstance(value, Variable)


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
    return protocol.is_box(value)


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

    def map_leaf(path: Path, leaf: PyTree) -> PyTree:
        if isinstance(leaf, State):
            return map_state(path, leaf)
        if not is_box(leaf):
            return leaf
        box = box_of_variable(leaf) if isinstance(leaf, Variable) else leaf
        with _naming_path(path):
            result = function(box)
        return variable_of_box(result) if isinstance(result, VariableBox) else result

    def map_state(path: Path, state: State) -> State:
        values: dict[Path, PyTree] = {}
        origins = state.origins()
        for path_below, value in state.flat().items():
            box = value
            if not protocol.is_box(value):
                box = box_of_entry(value, origins[path_below])

            with _naming_path((*path, *path_below)):
                result = function(box)
            values[path_below] = result
            if isinstance(result, VariableBox):
                values[path_below] = result.value
                origins[path_below] = origin_of_box(result)
        return State.from_flat(values, origins)

    return _map(map_leaf, tree)


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
    has_mesh_in_scope = apply_constraint and resolve_mesh() is not None

    def unbox_leaf(path: Path, leaf: PyTree) -> PyTree:
        if isinstance(leaf, Variable):
            leaf = box_of_variable(leaf).replace_boxed(leaf.value)
        if isinstance(leaf, State):
            return map_entries(
                lambda path_below, value: _map(unbox_leaf, value, (*path, *path_below)), leaf
            )
        if not protocol.is_box(leaf):
            return leaf

        with _naming_path(path):
            box = protocol.standard_box(leaf, protocol.unboxed(leaf, apply_constraint=False))
            has_mesh = has_mesh_in_scope or getattr(box, "mesh", None) is not None
            value = protocol.unboxed(box, apply_constraint and has_mesh)
        return _map(unbox_leaf, value, path)

    return _map(unbox_leaf, tree)


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
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_subtree)
    try:
        new_values = treedef.flatten_up_to(values)
    except ValueError as error:
        raise errors.other_structure(error) from error

    def replace_leaf(leaf: PyTree, value: PyTree) -> PyTree:
        if isinstance(leaf, State):
            if not any(is_box(entry) for entry in leaf.flat().values()):
                return value
            if not isinstance(value, State) or value.flat().keys() != leaf.flat().keys():
                raise errors.other_structure(f"{value!r} is no State of the same paths")
            return map_entries(lambda path, box: replace_boxed(box, value.flat()[path]), leaf)

        if isinstance(leaf, Variable):
            return variable_of_box(replace_leaf(box_of_variable(leaf), value))
        if not protocol.is_box(leaf):
            return value
        if _has_boxes(leaf):
            value = replace_boxed(protocol.unboxed(leaf, apply_constraint=False), value)
        return leaf.replace_boxed(value)

    return treedef.unflatten(map(replace_leaf, leaves, new_values))


def _has_boxes(box: object) -> bool:
    """Whether there are boxes in a box."""
    subtrees, _ = walk(protocol.stored_in(box))
    return any(is_box(leaf) for _, leaf in subtrees)


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


def _renamed(tree: PyTree, rename: Callable[[Any], Any]) -> PyTree:
    """Renames every box, also boxes in boxes, Variables and entries of States."""

    def rename_leaf(path: Path, leaf: PyTree) -> PyTree:
        if isinstance(leaf, State):
            return rename_state(path, leaf)
        if isinstance(leaf, Variable):
            with _naming_path(path):
                return variable_of_box(rename(box_of_variable(leaf)))
        if isinstance(leaf, Object):
            raise errors.module_among_boxes(path, type(leaf).__name__)
        if not protocol.is_box(leaf):
            return leaf

        with _naming_path(path):
            box = _renamed_box(leaf, rename)
        if not _has_boxes(box):
            return box
        return protocol.with_stored(box, _map(rename_leaf, protocol.stored_in(box), path))

    def rename_state(path: Path, state: State) -> State:
        values: dict[Path, Leaf] = {}
        origins: dict[Path, Origin] = {}
        for path_below, origin in state.origins().items():
            path_of_entry = (*path, *path_below)
            values[path_below] = _map(rename_leaf, state.flat()[path_below], path_of_entry)

            empty_box = box_of_entry(None, origin)
            with _naming_path(path_of_entry):
                origins[path_below] = origin_of_box(rename(empty_box))
        return State.from_flat(values, origins)

    return _map(rename_leaf, tree)


def _renamed_box(box: Any, rename: Callable[[Any], Any]) -> Any:
    """Returns a box with the names that the standard box of its names has after a change."""
    if isinstance(box, AxisMetadata) or not hasattr(box, "names"):
        return rename(box)

    # Flax counts negative positions from the end of the names without the new one.
    standard = protocol.standard_box(box, protocol.stored_in(box))
    return box.replace(names=rename(standard).names)


def _map(function: Callable[[Path, PyTree], PyTree], tree: PyTree, path: Path = ()) -> PyTree:
    """Maps over boxes, objects, States and other leaves, each with its path."""
    subtrees, treedef = walk(tree)
    return treedef.unflatten(
        [function((*path, *path_below), leaf) for path_below, leaf in subtrees]
    )


@contextlib.contextmanager
def _naming_path(path: Path) -> Generator[None]:
    """Adds the path of a box to errors of its methods."""
    try:
        yield
    except PartitionError as error:
        raise errors.at_path(path, error) from error
