# SPDX-License-Identifier: Apache-2.0
"""Names where a functional program makes and uses arrays: boxed initializers and constraints.

An *initializer* is a function that returns an array, or a pytree of them; wrapped here, it returns
them in a box. ``with_logical_constraint`` and ``logical_axis_rules`` are ``shardax.constrain`` and
``shardax.axis_rules`` under the names and in the order of arguments of Flax: one engine serves
both, and it serves pytrees here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import jax
from jax.sharding import PartitionSpec

from shardax.core.errors import ConstraintError
from shardax.partition.assignment import UNCONSTRAINED
from shardax.partition.constraints import constrain
from shardax.partition.mesh import AnyMesh
from shardax.partition.partitioned import LogicallyPartitioned, Partitioned
from shardax.partition.rules import RulesLike
from shardax.partition.scope import AxisRulesScope, OnNoMesh, axis_rules
from shardax.transforms.call import wraps

P = ParamSpec("P")


def with_partitioning(
    init_fn: Callable[P, Any], names: Any, mesh: AnyMesh | None = None
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
        MeshError: If ``mesh`` is no mesh.

    Example:
        >>> import jax
        >>> init = with_partitioning(jax.nn.initializers.lecun_normal(), (None, "model"))
        >>> init(jax.random.key(0), (4, 8), dtype="bfloat16")
        Partitioned(bfloat16[4, 8], names=(None, 'model'))
    """
    empty = Partitioned(None, names, mesh)

    @wraps(init_fn)
    def boxed(*args: P.args, **kwargs: P.kwargs) -> Partitioned[Any]:
        return empty.replace_boxed(init_fn(*args, **kwargs))

    return boxed


def with_logical_partitioning(
    init_fn: Callable[P, Any],
    names: Any,
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
        MeshError: If ``mesh`` is no mesh.
        RulesError: If ``rules`` are malformed.

    Example:
        >>> import jax
        >>> init = with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
        >>> init(jax.random.key(0), (4, 8))
        LogicallyPartitioned(float32[4, 8], names=('embed', 'mlp'))
    """
    empty = LogicallyPartitioned(None, names, mesh, rules)

    @wraps(init_fn)
    def boxed(*args: P.args, **kwargs: P.kwargs) -> LogicallyPartitioned[Any]:
        return empty.replace_boxed(init_fn(*args, **kwargs))

    return boxed


def with_logical_constraint(
    x: Any,
    names: Any,
    rules: RulesLike | None = None,
    mesh: AnyMesh | None = None,
    *,
    on_no_mesh: OnNoMesh | None = None,
) -> Any:
    """Lays out arrays by the logical names of their dimensions: ``constrain`` for pytrees.

    Args:
        x: An array, or a pytree of arrays.
        names: The names of an array, one per dimension; for a pytree, names for each array in a
            pytree that is a prefix of ``x``. None says nothing and leaves the array as it is.
        rules: Rules, pairs or a mapping; None for the current rules.
        mesh: The mesh; None for the one in scope, else the one that ``x`` is laid out over.
        on_no_mesh: What to do without a mesh, or without rules: ``"error"``, or ``"ignore"`` to
            return ``x`` as it is. None: as the rules in scope say, else ``"error"``.

    Returns:
        ``x`` with the same values, laid out.

    Raises:
        NoMeshError: If there is no mesh, under ``on_no_mesh="error"``.
        NoRulesError: If there are no rules, under ``on_no_mesh="error"``.
        ConstraintError: If an array cannot be laid out so, or ``names`` do not fit the pytree.
        AxisNamesError: If names are malformed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> x = {"tokens": jnp.ones((2, 3)), "mask": jnp.ones(2)}
        >>> names = {"tokens": ("batch", None), "mask": ("batch",)}
        >>> y = with_logical_constraint(x, names, {"batch": "data"}, mesh)
        >>> y["tokens"].sharding.spec, y["mask"].sharding.spec
        (P('data', None), P('data',))
    """

    def laid_out(its_names: Any, part: Any) -> Any:
        if its_names is None:
            return part
        return jax.tree.map(
            lambda leaf: constrain(leaf, its_names, mesh, rules, on_no_mesh=on_no_mesh), part
        )

    if hasattr(x, "shape"):  # an array's names may hold tuples, for merged dimensions
        return laid_out(names, x)
    try:
        per_array = jax.tree.structure(names, is_leaf=_is_names).flatten_up_to(x)
    except (TypeError, ValueError) as error:
        raise ConstraintError(
            f"The names {names!r} do not fit the pytree {jax.tree.structure(x)}: {error}. Give "
            "names for each array in a pytree of the same form, or once for all below a place."
        ) from error
    leaves, treedef = jax.tree.flatten(names, is_leaf=_is_names)
    return treedef.unflatten(map(laid_out, leaves, per_array))


def logical_axis_rules(rules: RulesLike, *, on_no_mesh: OnNoMesh | None = None) -> AxisRulesScope:
    """Makes ``rules`` the current rules in a ``with`` block or a decorated function.

    The name that Flax has for ``axis_rules``; the scope is the same.

    Args:
        rules: Rules, pairs or a mapping.
        on_no_mesh: As for ``axis_rules``.

    Returns:
        The context manager, which is also a decorator.

    Raises:
        RulesError: If the rules are malformed.
        ConstraintError: If ``on_no_mesh`` is no policy.

    Example:
        >>> import shardax as sx
        >>> with logical_axis_rules([("mlp", "model")]):
        ...     sx.partition.logical_to_mesh_axes(("embed", "mlp"))
        P(None, 'model')
    """
    return axis_rules(rules, on_no_mesh=on_no_mesh)


def _is_names(value: Any) -> bool:
    if value is None or isinstance(value, PartitionSpec):
        return True
    return isinstance(value, tuple) and all(
        entry is None or entry is UNCONSTRAINED or isinstance(entry, str) for entry in value
    )
