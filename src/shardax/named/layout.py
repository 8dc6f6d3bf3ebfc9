# SPDX-License-Identifier: Apache-2.0
"""Layouts of named arrays over a mesh, by a mapping of names.

The names of a named array mean what a Variable's ``axes`` mean, so ``sx.shard(model, mesh, rules)``
takes trees with named arrays in them. The functions here hold a mapping to its word: a name that
nothing has is an error, and so are two names of one array that want one mesh axis.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeVar

from shardax import Module, Rules
from shardax import constrain as constrain_array
from shardax import shard as shard_by_rules
from shardax.extend import AnyMesh, Object, TreeInventory, axis_names_in
from shardax.named.base import NamedAxesError, label

T = TypeVar("T")


def shard(
    tree: T, mapping: Mapping[Any, Any], mesh: AnyMesh | None = None, *, allow_unused: bool = False
) -> T:
    """Lays a tree out over a mesh by the names of axes.

    Args:
        tree: A Module, a Variable, a named array, or a pytree that holds such.
        mapping: A mesh axis, a tuple of them, or None, by name. Names that it lacks are not split.
        mesh: The mesh; None for the one in scope.
        allow_unused: Whether the mapping may have names that the tree has not.

    Returns:
        ``tree`` itself, laid out in place. Named arrays cannot be changed in place: they are moved
        and stored in canonical order, and a pytree with such in it is rebuilt. An empty mapping
        replicates.

    Raises:
        NamedAxesError: If the mapping has a name that the tree has not; says which it has.
        PartitionCheckError: If an array cannot be laid out so; lists all of them by path, and
            nothing was moved.
        NoMeshError: If no mesh is given and none is in scope.

    Example:
        >>> import jax, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> x = sx.named.shard(sx.named.ones({"embed": 4, "batch": 8}), {"batch": "data"}, mesh)
        >>> x.dims, x.sharding.spec
        (('batch', 'embed'), P('data', None))
    """
    names = _names_in(tree)
    if not allow_unused:
        _check_known(mapping, names)
    used = {name: target for name, target in mapping.items() if label(name) in names}
    return shard_by_rules(tree, mesh, _rules(used))


def constrain(
    tree: T, mapping: Mapping[Any, Any], mesh: AnyMesh | None = None, *, allow_unused: bool = False
) -> T:
    """Lays a tree out inside a program by the names of axes.

    Args:
        tree: A named array, a Variable or Module, or a pytree that holds such. Arrays without names
            stay as they are.
        mapping: As for ``shard``. ``PartitionSpec.UNCONSTRAINED`` leaves a name to the compiler.
        mesh: The mesh; None for the one in scope.
        allow_unused: Whether the mapping may have names that the tree has not.

    Returns:
        The tree with the same values. Modules and Variables are written to, and are themselves.

    Raises:
        NamedAxesError: If the mapping has a name that the tree has not.
        PartitionError: If an array cannot be laid out so.
        NoMeshError: If there is no mesh.

    Example:
        >>> import jax, shardax as sx
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> @jax.jit
        ... def double(x):
        ...     return sx.named.constrain(2 * x, {"batch": "data"}, mesh)
        >>> double(sx.named.ones({"batch": 8, "embed": 4})).sharding.spec
        P('data', None)
    """
    if not allow_unused:
        _check_known(mapping, _names_in(tree))
    rules = _rules(mapping)

    inventory = TreeInventory(tree)
    values: list[Any] = []
    for leaf in inventory.leaves:
        value = leaf.value if leaf.variable is None else leaf.variable.value
        arrays: list[Any] = []
        for info, array in zip(leaf.arrays, leaf.arrays_in(value), strict=True):
            names = leaf.names_of(info)
            arrays.append(array if names is None else constrain_array(array, names, mesh, rules))

        constrained = leaf.with_arrays(value, arrays)
        if leaf.variable is not None:
            leaf.variable.value = constrained
        values.append(constrained)

    # Modules and Variables are themselves; what has no arrays stays as it is.
    return inventory.unflatten(
        lambda subtree: (
            subtree.value
            if isinstance(subtree.value, Object) or not subtree.leaves
            else subtree.filled(values)
        )
    )


class Constrain(Module):
    """Identity layer with a layout of its input by names.

    Insert it where the compiler shall be told: ``sx.select(model).at_instances_of(Block)
    .insert_after(Constrain({"batch": "data"}))``.

    Args:
        mapping: As for ``constrain``. Names that the input has not are left out.
        mesh: The mesh; None for the one in scope.

    Example:
        >>> import jax, shardax as sx
        >>> layer = sx.named.Constrain({"batch": "data"}, jax.make_mesh((1,), ("data",)))
        >>> jax.jit(layer)(sx.named.ones({"batch": 8})).sharding.spec
        P('data',)
    """

    def __init__(self, mapping: Mapping[Any, Any], mesh: AnyMesh | None = None) -> None:
        self.mapping = tuple(mapping.items())
        self.mesh = mesh

    def __call__(self, x: T) -> T:
        """Returns the input, a pytree of named arrays, laid out."""
        return constrain(x, dict(self.mapping), self.mesh, allow_unused=True)


def _rules(mapping: Mapping[Any, object]) -> Rules:
    pairs = [(label(name), target) for name, target in mapping.items()]
    return Rules(pairs, on_conflict="error")


def _names_in(tree: object) -> set[str]:
    """Returns the names of the axes of a tree's arrays."""
    axes = [leaf.names_of(info) or () for leaf, info, _ in TreeInventory(tree).arrays()]
    return {name for names in axes for name in axis_names_in(names)}


def _suggestion(unknown: Iterable[Any], names_known: Set[str]) -> str:
    """Returns a sentence with the most similar names, or nothing."""
    near = [
        match
        for name in unknown
        for match in difflib.get_close_matches(str(label(name)), sorted(map(str, names_known)), n=1)
    ]
    return f" Did you mean {', '.join(map(repr, near))}?" if near else ""


def _check_known(mapping: Mapping[Any, object], names_known: Set[str]) -> None:
    """Raises if the mapping has names of no array."""
    unknown = [name for name in mapping if label(name) not in names_known]
    if not unknown:
        return
    hint = _suggestion(unknown, names_known)
    names = ", ".join(map(repr, sorted(map(str, names_known)))) or "none"
    raise NamedAxesError(
        f"The mapping has {', '.join(map(repr, unknown))}, but no array has such an axis; the "
        f"names are {names}.{hint} allow_unused=True lets a mapping have more."
    )
