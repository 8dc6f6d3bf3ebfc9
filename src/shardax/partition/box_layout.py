# SPDX-License-Identifier: Apache-2.0
"""Where the values of a boxed tree go: specs, logical specs, and shardings.

The functions here give one entry per box, in its place: an entry is a prefix of the box, so the
result can be given to ``jax.jit`` as ``in_shardings`` and ``out_shardings``. Arrays without a box
are replicated, Variables count as boxes, a Module gives a ``State`` of entries, and what is no
array becomes None. They are ``partition_specs`` and ``shardings`` under the names that Flax has for
them, with two differences: the specs are also for constraints inside programs, so that
``UNCONSTRAINED`` stays in them; and logical names of Variables, too, are an error without rules.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardax.core.node import Object
from shardax.partition.boxes import AxisMetadata
from shardax.partition.mesh import AnyMesh
from shardax.partition.partitioned import LogicallyPartitioned
from shardax.partition.rules import RulesLike
from shardax.partition.survey import Survey
from shardax.partition.tree_layout import TreeLayout


def get_partition_spec(tree: Any) -> Any:
    """Returns the ``PartitionSpec`` of every box of a tree, as the boxes have it.

    Args:
        tree: A boxed tree, usually what ``jax.eval_shape(init, ...)`` returns, or an optimizer's
            state over one.

    Returns:
        The tree with a spec in place of each box: of mesh axes for a ``Partitioned``, of logical
        names for a ``LogicallyPartitioned`` or Variable (``logical_to_mesh`` maps these). ``P()``
        for arrays, None for what is no array.

    Raises:
        PartitionCheckError: If names are malformed; lists all, by path.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> weight = sx.Partitioned(jnp.ones((4, 8)), (None, "model"))
        >>> tree = {"w": weight, "n": jnp.ones(3), "s": 2}
        >>> get_partition_spec(tree)
        {'n': P(), 's': None, 'w': P(None, 'model')}
    """
    layout = TreeLayout(
        Survey(_boxed(tree)), None, None, placed=False, names_alone=True, over_mesh=False
    )
    return layout.checked().spec_entries()


def logical_to_mesh(tree: Any, rules: RulesLike | None = None) -> Any:
    """Maps the logical names in every spec of a tree to mesh axes.

    Args:
        tree: A tree of logical ``PartitionSpec``, as ``get_partition_spec`` returns it, or the
            boxed tree itself. Rules baked into a box have precedence.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The tree with specs of mesh axes. ``P()`` for arrays, None for what is no array.

    Raises:
        PartitionCheckError: If names are malformed, or break a policy of the rules; lists all.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> logical_to_mesh({"w": P("embed", "mlp"), "step": None}, {"mlp": "model"})
        {'step': None, 'w': P(None, 'model')}
    """
    survey = Survey(_boxed(tree))
    return TreeLayout(survey, None, rules, placed=False, over_mesh=False).checked().spec_entries()


def logical_to_mesh_sharding(
    tree: Any, mesh: AnyMesh | None = None, rules: RulesLike | None = None
) -> Any:
    """Maps the logical names in every spec of a tree to a sharding over a mesh.

    Args:
        tree: As for ``logical_to_mesh``.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The tree with ``NamedSharding``, None for what is no array.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        PartitionCheckError: If names cannot be mapped to the mesh; lists all, by path.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> logical_to_mesh_sharding(P("embed", "mlp"), mesh, {"mlp": "model"}).spec
        P(None, 'model')
    """
    function = "logical_to_mesh_sharding"
    layout = TreeLayout(
        Survey(_boxed(tree)), mesh, rules, function=function, placed=False, rules_for="all"
    )
    return layout.checked().sharding_entries()


def get_sharding(tree: Any, mesh: AnyMesh | None = None, rules: RulesLike | None = None) -> Any:
    """Returns the ``NamedSharding`` of every box of a tree.

    Args:
        tree: A boxed tree, usually what ``jax.eval_shape(init, ...)`` returns, or an optimizer's
            state over one.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.
        rules: Rules for logical names, unless the box has rules of its own; None for the current.

    Returns:
        The tree with a sharding in place of each box and array, and None for what is no array.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        NoRulesError: If boxes have logical names and there are no rules; names the first.
        PartitionCheckError: If an array cannot be laid out so; lists all, by path.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> tree = {"w": sx.Partitioned(jnp.ones((4, 8)), (None, "model")), "step": jnp.zeros(())}
        >>> [sharding.spec for sharding in get_sharding(tree, mesh).values()]
        [P(), P(None, 'model')]
    """
    layout = TreeLayout(Survey(tree), mesh, rules, function="get_sharding", rules_for="all")
    return layout.checked().sharding_entries()


def _boxed(tree: Any) -> Any:
    """The tree with an empty box, of the same logical names, in place of each spec."""
    return jax.tree.map(
        lambda leaf: LogicallyPartitioned(None, tuple(leaf)) if _is_spec(leaf) else leaf,
        tree,
        is_leaf=lambda value: isinstance(value, (AxisMetadata, Object)),
    )


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)
