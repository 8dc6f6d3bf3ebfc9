# SPDX-License-Identifier: Apache-2.0
"""Initializers that return boxes, and constraints by names, under Flax's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import PartitionSpec

from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import BOX_ENTRY, Metadata
from shardax._core.init.boxed import announce
from shardax._transforms.lift.transformed import wraps
from shardax.partition.boxes import errors
from shardax.partition.boxes.partitioned import LogicallyPartitioned, Partitioned
from shardax.partition.constraints import constrain
from shardax.partition.context import OnNoMesh, axis_rules
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import RulesLike

P = ParamSpec("P")
B = TypeVar("B", bound=Partitioned[Any])


def with_partitioning(
    init_fn: Callable[P, PyTree], names: Any, mesh: AnyMesh | None = None
) -> Callable[P, Partitioned[Any]]:
    """Makes an initializer return its value in a ``Partitioned`` box.

    Args:
        init_fn: A function that returns an array or a pytree; its arguments stay as they are.
        names: One per dimension: a mesh axis, a tuple of them, or None (not split).
        mesh: The mesh to lay the value out over; None for the one in scope.

    Returns:
        The function that returns the box.

    Raises:
        MetadataError: If ``names`` is one string.
        TransformError: If ``mesh`` is no mesh.

    Example:
        >>> import jax
        >>> init = with_partitioning(jax.nn.initializers.lecun_normal(), (None, "model"))
        >>> init(jax.random.key(0), (4, 8), dtype="bfloat16")
        Partitioned(bfloat16[4, 8], names=(None, 'model'))
    """
    return _boxed(init_fn, Partitioned(None, names, mesh))


def with_logical_partitioning(
    init_fn: Callable[P, object],
    names: object,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
) -> Callable[P, LogicallyPartitioned[Any]]:
    """Makes an initializer return its value in a ``LogicallyPartitioned`` box.

    Args:
        init_fn: A function that returns an array or a pytree; its arguments stay as they are.
        names: One per dimension: a logical name, None (not split), or a tuple of names for a
            merged dimension.
        mesh: The mesh to lay the value out over; None for the one in scope.
        rules: Rules, pairs or a mapping, baked into the box; None for the current rules.

    Returns:
        The function that returns the box.

    Raises:
        MetadataError: If ``names`` is one string.
        TransformError: If ``mesh`` is no mesh.
        PartitionError: If ``rules`` are malformed.

    Example:
        >>> import jax
        >>> init = with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
        >>> init(jax.random.key(0), (4, 8))
        LogicallyPartitioned(float32[4, 8], names=('embed', 'mlp'))
    """
    return _boxed(init_fn, LogicallyPartitioned(None, names, mesh, rules))


def _boxed(init_fn: Callable[P, object], empty: B) -> Callable[P, B]:
    """Returns the initializer with its value in a box like ``empty``."""

    @wraps(init_fn)
    def boxed(*args: P.args, **kwargs: P.kwargs) -> B:
        return empty.replace_boxed(init_fn(*args, **kwargs))

    if empty.names is not None:
        announce(boxed, init_fn, Metadata(empty.names, {BOX_ENTRY: empty}))
    return boxed


def with_logical_constraint(
    x: object,
    names: object,
    rules: RulesLike | None = None,
    mesh: AnyMesh | None = None,
    *,
    on_no_mesh: OnNoMesh | None = None,
) -> Any:
    """Lays out a pytree of arrays by logical names.

    Args:
        x: An array, or a pytree of arrays.
        names: The names of an array, one per dimension; for a pytree, names for each array in a
            pytree that is a prefix of ``x``. None says nothing and leaves the array as it is.
        rules: Rules, pairs or a mapping; None for the current rules.
        mesh: The mesh; None for the one in scope, else the one that ``x`` is laid out over.
        on_no_mesh: What to do without a mesh, or without rules: ``"error"``, or ``"ignore"`` to
            return ``x`` as it is. None: as for the rules in scope, else ``"error"``.

    Returns:
        ``x`` with the same values, laid out.

    Raises:
        NoMeshError: If there is no mesh, under ``on_no_mesh="error"``.
        PartitionError: If there are no rules, under ``on_no_mesh="error"``, or if an array cannot
            be laid out so, or ``names`` do not fit the pytree, or if names are malformed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> x = {"tokens": jnp.ones((2, 3)), "mask": jnp.ones(2)}
        >>> names = {"tokens": ("batch", None), "mask": ("batch",)}
        >>> y = with_logical_constraint(x, names, {"batch": "data"}, mesh)
        >>> y["tokens"].sharding.spec, y["mask"].sharding.spec
        (P('data', None), P('data',))
    """

    def lay_out(names_of_arrays: Any, subtree: PyTree) -> PyTree:
        if names_of_arrays is None:
            return subtree
        return jax.tree.map(
            lambda leaf: constrain(leaf, names_of_arrays, mesh, rules, on_no_mesh=on_no_mesh),
            subtree,
        )

    if hasattr(x, "shape"):  # an array's names may hold tuples, for merged dimensions
        return lay_out(names, x)

    try:
        subtrees = jax.tree.structure(names, is_leaf=_is_names).flatten_up_to(x)
    except (TypeError, ValueError) as error:
        raise errors.names_of_other_structure(names, jax.tree.structure(x), error) from error
    leaves, treedef = jax.tree.flatten(names, is_leaf=_is_names)
    return treedef.unflatten(map(lay_out, leaves, subtrees))


def _is_names(value: object) -> bool:
    if value is None or isinstance(value, PartitionSpec):
        return True
    return isinstance(value, tuple) and all(
        isinstance(name, str) or name is None or name is PartitionSpec.UNCONSTRAINED
        for name in value
    )


logical_axis_rules = axis_rules
"""``axis_rules`` under Flax's name."""
