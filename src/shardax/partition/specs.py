# SPDX-License-Identifier: Apache-2.0
"""Specs, shardings and abstract copies of trees.

All of them are entries of a ``TreeLayout`` (``shardax.partition.tree.layout``). There is one entry
per leaf (``shardax.partition.tree.inventory``); a Module becomes a ``State``, which can stand
wherever JAX or shardax take one entry per array. Nothing is computed; lazy values stay lazy.

``get_partition_spec``, ``logical_to_mesh`` and so on are ``partition_specs`` and ``shardings``
under Flax's names, with two differences: the specs are also for constraints inside programs, so
that ``UNCONSTRAINED`` stays in them; and logical names of Variables, too, are an error without
rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.frames import owner_here
from shardax._core.graph.flatten import build, flatten_roots
from shardax._core.graph.handlers import is_box
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.object import Object
from shardax.partition import errors
from shardax.partition.boxes.partitioned import LogicallyPartitioned
from shardax.partition.context import current_rules
from shardax.partition.errors import raise_on_errors
from shardax.partition.mesh import AnyMesh, require_mesh, resolve_mesh
from shardax.partition.resolved import ResolvedRules
from shardax.partition.rules import RulesLike, check_names
from shardax.partition.tree.inventory import Subtree, TreeInventory
from shardax.partition.tree.layout import TreeLayout, named_sharding
from shardax.partition.tree.misspelt_names import warn_of_names
from shardax.partition.tree.overrides import MemoryKinds, OverridesLike


def partition_specs(
    tree: object, rules: RulesLike | None = None, *, overrides: OverridesLike | None = None
) -> PyTree:
    """Returns the ``PartitionSpec`` of every array of a tree.

    Args:
        tree: A Module, a Variable, a State, a box, or a pytree that holds such and arrays.
        rules: Rules, pairs or a mapping; None for the current rules. Without any, the names are
            those of mesh axes.
        overrides: Filter to spec or rules, before the rules (``shardax.partition.tree.overrides``).

    Returns:
        A State of specs for a Module; a pytree like ``tree`` otherwise, with one spec for a box.
        Arrays without names have ``P()``, and what is no array has None.

    Raises:
        PartitionCheckError: If names are malformed, or break a policy of the rules; lists all.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> class Scale(sx.Module):
        ...     def __init__(self):
        ...         self.weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
        ...         self.count = sx.Variable(0)
        >>> partition_specs(Scale(), {"mlp": "model"}).flat()
        {('weight',): P(None, 'model'), ('count',): P()}
        >>> partition_specs([Scale().weight, jnp.ones(3), "no array"], {"mlp": "model"})
        [P(None, 'model'), P(), None]
    """
    # Without rules a name is that of a mesh axis, which only a mesh can deny: it is kept, so that a
    # mesh that has no such axis is an error where the spec is used.
    inventory = TreeInventory(tree)
    used_rules = rules
    if rules is None and not current_rules() and resolve_mesh() is None:
        used_rules = inventory.identity_rules()

    layout = TreeLayout(inventory, None, used_rules, overrides, over_mesh=False)
    _check(layout, rules)
    return layout.entries(layout.specs)


def _check(layout: TreeLayout, rules: RulesLike | None) -> None:
    """Raises on errors of a layout, and warns of misspelt names if rules were given to the call."""
    layout.checked()
    if rules is not None:
        warn_of_names(layout)


def shardings(
    tree: PyTree,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
) -> PyTree:
    """Returns the ``NamedSharding`` of every array of a tree.

    Args:
        tree: A Module, a Variable, a State, a box, or a pytree that holds such and arrays.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: Filter to spec or rules, before the rules (``shardax.partition.tree.overrides``).
        memory_kind: Memory of the devices, or a mapping from filters to such; None for the default.

    Returns:
        As ``partition_specs``, with shardings.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        PartitionError: If a box has logical names, and there are no rules.
        PartitionCheckError: If an array cannot be laid out so; lists all.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> weight = sx.Param(jnp.ones((4, 8)), axes=("embed", "mlp"))
        >>> shardings({"weight": weight}, mesh, {"mlp": "model"})["weight"].spec
        P(None, 'model')
    """
    layout = TreeLayout(
        TreeInventory(tree), mesh, rules, overrides, memory_kind, function="shardings"
    )
    _check(layout, rules)
    return layout.entries(layout.shardings())


def abstract(
    tree: PyTree,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    overrides: OverridesLike | None = None,
    memory_kind: MemoryKinds | None = None,
) -> Leaf:
    """Returns a copy of a tree with abstract arrays and their shardings.

    It can be given to ``sx.jit(f).lower(...)``, ``jax.eval_shape`` or a checkpoint's restore.

    Args:
        tree: A Module, a Variable, a State, a box, or a pytree that holds such and arrays.
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope. Without any, arrays
            that already have a ``NamedSharding`` keep it and the others have none.
        rules: Rules, pairs or a mapping; None for the current rules.
        overrides: Filter to spec or rules, before the rules (``shardax.partition.tree.overrides``).
        memory_kind: Memory of the devices, or a mapping from filters to such; None for the default.

    Returns:
        The tree with new Modules, Variables and boxes, whose values are ``jax.ShapeDtypeStruct``.
        What was shared is shared.

    Raises:
        NoMeshError: If overrides or a memory kind are given and there is no mesh.
        PartitionError: If a box has logical names, and there are a mesh and no rules.
        PartitionCheckError: If an array cannot be laid out so; lists all.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (4, 8)), axes=("embed", "mlp"))
        >>> copy = abstract(weight, jax.make_mesh((1,), ("model",)), {"mlp": "model"})
        >>> copy.shape, copy.sharding.spec, copy.is_abstract, weight.is_lazy
        ((4, 8), P(None, 'model'), True, True)
    """
    inventory = TreeInventory(tree)
    leaves = inventory.leaves
    needs_mesh = overrides is not None or memory_kind is not None
    has_mesh = resolve_mesh(mesh) is not None or any(leaf.mesh for leaf in leaves)

    shardings: list[list[NamedSharding | None]]
    if needs_mesh or has_mesh:
        function = "abstract" if needs_mesh else None
        layout = TreeLayout(inventory, mesh, rules, overrides, memory_kind, function=function)
        _check(layout, rules)
        shardings = [list(of_leaf) for of_leaf in layout.shardings()]
    else:
        shardings = [[info.sharding for info in leaf.arrays] for leaf in leaves]

    abstract_values: list[Leaf] = []
    for leaf, shardings_of_leaf in zip(leaves, shardings, strict=True):
        # A box without arrays has a sharding nevertheless.
        structs = [
            jax.ShapeDtypeStruct(
                info.shape, info.dtype, sharding=sharding, weak_type=info.weak_type
            )
            for info, sharding in zip(leaf.arrays, shardings_of_leaf, strict=False)
        ]
        abstract_values.append(leaf.with_arrays(leaf.value, structs))

    # All objects are copied at once, so that what several subtrees share stays shared.
    objects = [subtree.value for subtree in inventory.subtrees if isinstance(subtree.value, Object)]
    flat = flatten_roots(objects)
    values_of_objects = [abstract_values[inventory.position(each)] for each in flat.leaves]
    copies = iter(build(flat.graphdef, values_of_objects, owner_here())[0])

    def fill(subtree: Subtree) -> PyTree:
        if isinstance(subtree.value, Object):
            return next(copies)
        return subtree.filled(abstract_values)

    return inventory.unflatten(fill)


def batch_sharding(
    axes: Iterable[object], mesh: AnyMesh | None = None, rules: RulesLike | None = None
) -> NamedSharding:
    """Returns the ``NamedSharding`` of one array by its axis names.

    Args:
        axes: One name per dimension (see ``logical_to_mesh_axes``).
        mesh: The mesh, also an ``AbstractMesh``; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Returns:
        The sharding.

    Raises:
        NoMeshError: If no mesh is given and none is in scope.
        PartitionError: If there are no rules, and a name that is no axis of the mesh.
        PartitionCheckError: If the names cannot be mapped to the mesh.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batch_sharding(("batch", "seq"), mesh, {"batch": "data"}).spec
        P('data', None)
    """
    mesh = require_mesh(mesh, "batch_sharding")
    resolved = ResolvedRules(mesh, rules)
    names = check_names(axes)
    unmapped = resolved.names_without_rules(names)
    if unmapped:
        raise errors.batch_without_rules(names, unmapped[0], mesh)

    # The size is not known yet, and 0 is divisible by everything: only the names are checked.
    spec, diagnostics = resolved.spec(names, (0,) * len(names))
    raise_on_errors(diagnostics)
    return named_sharding(mesh, spec)


def get_partition_spec(tree: object) -> Any:
    """Returns the ``PartitionSpec`` of every box of a tree, without rules.

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
    # Names alone, whatever rules a leaf has. A box around several arrays has one spec for them.
    inventory = TreeInventory(_with_boxes_for_specs(tree))
    for index, leaf in enumerate(inventory.leaves):
        has_one_spec = leaf.box is not None and len(leaf.arrays) > 1
        arrays = () if has_one_spec else leaf.arrays
        inventory.leaves[index] = leaf._replace(rules=None, arrays=arrays)

    rules = inventory.identity_rules()
    layout = TreeLayout(inventory, None, rules, over_mesh=False, in_program=True)
    return layout.entries(layout.checked().specs)


def logical_to_mesh(tree: object, rules: RulesLike | None = None) -> Any:
    """Maps the logical specs of a tree to mesh axes.

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
    inventory = TreeInventory(_with_boxes_for_specs(tree))
    layout = TreeLayout(inventory, None, rules, over_mesh=False, in_program=True)
    return layout.entries(layout.checked().specs)


def logical_to_mesh_sharding(
    tree: object, mesh: AnyMesh | None = None, rules: RulesLike | None = None
) -> Any:
    """Maps the logical specs of a tree to shardings over a mesh.

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
    layout = TreeLayout(
        TreeInventory(_with_boxes_for_specs(tree)),
        mesh,
        rules,
        function="logical_to_mesh_sharding",
        in_program=True,
        rules_required=True,
    )
    return layout.entries(layout.checked().shardings())


def get_sharding(tree: object, mesh: AnyMesh | None = None, rules: RulesLike | None = None) -> Any:
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
        PartitionError: If boxes have logical names and there are no rules; names the first.
        PartitionCheckError: If an array cannot be laid out so; lists all, by path.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> tree = {"w": sx.Partitioned(jnp.ones((4, 8)), (None, "model")), "step": jnp.zeros(())}
        >>> [sharding.spec for sharding in get_sharding(tree, mesh).values()]
        [P(), P(None, 'model')]
    """
    layout = TreeLayout(
        TreeInventory(tree), mesh, rules, function="get_sharding", rules_required=True
    )
    return layout.entries(layout.checked().shardings())


def _with_boxes_for_specs(tree: PyTree) -> PyTree:
    """Returns the tree with an empty box of the same names in place of each logical spec."""

    def as_box(leaf: PyTree) -> PyTree:
        if isinstance(leaf, PartitionSpec):
            return LogicallyPartitioned(None, tuple(leaf))
        return leaf

    return jax.tree.map(
        as_box, tree, is_leaf=lambda value: is_box(value) or isinstance(value, Object)
    )
