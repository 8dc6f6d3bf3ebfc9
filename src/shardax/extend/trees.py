# SPDX-License-Identifier: Apache-2.0
"""Trees: paths, objects with identity, and rows for types of one's own.

Two type aliases name what functions of trees take. A ``PyTree`` is any tree of the user's: what JAX
flattens, Modules and Variables, and any leaf. A ``Path`` is a tuple of attribute names, keys and
positions.

>>> from shardax import extend
>>> path: extend.Path = ("layers", 0, "kernel")
>>> tree: extend.PyTree = {"layers": [1.0, 2.0]}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from shardax._core.graph import flatten, handlers, paths
from shardax._core.graph.paths import Path as Path
from shardax._core.graph.paths import PyTree as PyTree
from shardax._core.object import epoch
from shardax._core.state import split_merge
from shardax._core.state.values_by_path import by_paths_of

T = TypeVar("T")


def format_path(path: Path) -> str:
    """Returns a path as the code that reaches its place.

    Args:
        path: Attribute names, keys and positions.

    Returns:
        The text; ``"(root)"`` for the empty path.

    Example:
        >>> from shardax import extend
        >>> extend.format_path(("layers", 0, "kernel"))
        '.layers[0].kernel'
    """
    return paths.format_path(path)


def path_of_keys(key_path: Sequence[Any]) -> Path:
    """Returns the path for a key path of JAX.

    Args:
        key_path: Entries as ``jax.tree_util.tree_flatten_with_path`` gives them.

    Returns:
        The path, by the same names, keys and positions.

    Example:
        >>> import jax
        >>> from shardax import extend
        >>> [(keys, _)] = jax.tree_util.tree_leaves_with_path({"layers": [1.0]})
        >>> extend.path_of_keys(keys)
        ('layers', 0)
    """
    return paths.plain_path(tuple(key_path))


def has_objects(tree: PyTree) -> bool:
    """Returns whether a tree holds a Module, a container or a Variable anywhere.

    It costs about as much as JAX's own flattening.

    Args:
        tree: Any tree.

    Returns:
        Whether there is such an object in it.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> extend.has_objects([sx.Param(jnp.ones(2))]), extend.has_objects([jnp.ones(2)])
        (True, False)
    """
    return flatten.has_objects(tree)


def structure_epoch() -> int:
    """Returns a number that grows whenever the structure of a known object changes.

    An object is known once something has walked over it: ``sx.state``, a compiled call. A change of
    structure is an attribute that is added, removed or replaced, a changed container, or changed
    metadata; the value of a Variable is none. What was computed from the structure of objects is
    valid while the number is the same.

    Returns:
        The number, which holds for the whole process.

    Example:
        >>> import shardax as sx
        >>> from shardax import extend
        >>> model = sx.nn.Sequential(sx.nn.Dropout(0.1, rngs=sx.Rngs(0)))
        >>> before, _ = extend.structure_epoch(), sx.state(model)
        >>> model.layers[0].rate = 0.2
        >>> extend.structure_epoch() > before
        True
    """
    return epoch.current


def values_by_path(entries: PyTree, paths: Collection[Path]) -> dict[Path, Any]:
    """Returns values that are arranged like a model, by path.

    Args:
        entries: A ``State``, a nested mapping by path, or containers like the model's, with None
            where there is no value. A bare value stands for the empty path.
        paths: The paths of the model's Variables, which say where an entry is a value.

    Returns:
        The values by path, without those that are None.

    Example:
        >>> from shardax import extend
        >>> extend.values_by_path({"up": {"kernel": 1.0, "bias": None}}, {("up", "kernel")})
        {('up', 'kernel'): 1.0}
    """
    return by_paths_of(entries, paths)


def describe_plain_arrays(tree: PyTree) -> str:
    """Returns a sentence about the arrays of a tree that are no Variables.

    Args:
        tree: A Module, a container, or a pytree of these.

    Returns:
        The sentence, with a space before it, to append to the text of an error; ``""`` if there is
        no such array of floating numbers.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> class Scale(sx.Module):
        ...     def __init__(self):
        ...         self.factor = jnp.ones(2)
        >>> extend.describe_plain_arrays(Scale())[:41]
        ' Plain arrays (.factor) are no parameters'
    """
    return split_merge.describe_plain_arrays(tree)


# --- containers and nodes of one's own -----------------------------------------------------------


def register_container(
    cls: type[T],
    *,
    name: str,
    children: Callable[[T], Sequence[tuple[Any, Any]]] | None = None,
    rebuild: Callable[[type[T], Sequence[tuple[Any, Any]]], T] | None = None,
    axes: Callable[[T], tuple[Any, ...] | None] | None = None,
) -> None:
    """Registers an immutable container whose parts are parts of the model that holds it.

    Modules, Variables and containers inside are found by every walk over a model. A class that JAX
    knows as a pytree node needs no registration, unless it knows the names of its array's
    dimensions. Rules, checks and tables then read the names from the value itself, and a Variable
    that holds it needs no ``axes``.

    Args:
        cls: The class; subclasses are such containers too.
        name: A name that no other kind of value has; pickles refer to it.
        children: Given a container, returns the key and the value of each part. A key is a step of
            a path: an attribute name, a dict's key or a position. None for a pytree node of JAX.
        rebuild: Given the class and other parts by the same keys, returns a new container. None for
            a pytree node of JAX.
        axes: For a pytree node of JAX that has one array: given a node, returns one name for each
            dimension (None: no name), or None if it holds no array.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> class Branches:
        ...     def __init__(self, **layers):
        ...         self.layers = layers
        >>> extend.register_container(
        ...     Branches,
        ...     name="branches",
        ...     children=lambda branches: list(branches.layers.items()),
        ...     rebuild=lambda kind, parts: kind(**dict(parts)),
        ... )
        >>> class Model(sx.Module):
        ...     def __init__(self, rngs):
        ...         self.branches = Branches(left=sx.nn.Linear(2, 2, use_bias=False, rngs=rngs))
        >>> list(sx.state(Model(sx.Rngs(0))).flat())
        [('branches', 'left', 'kernel')]

        A node that knows names:

        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass(frozen=True)
        ... class Batch:
        ...     rows: jax.Array
        >>> extend.register_container(Batch, name="rows", axes=lambda batch: ("batch", None))
        >>> batch = sx.Variable(Batch(jnp.ones((8, 3))))
        >>> sx.partition_specs(batch, {"batch": "data"}).rows
        P('data', None)
    """
    if children is None or rebuild is None:
        knows = handlers.NODE.axes if axes is None else axes
        handlers.register(cls, dataclasses.replace(handlers.NODE, name=name, axes=knows))
        return

    handler = handlers.Handler(
        name,
        children=children,
        rebuild=lambda kind, pairs: rebuild(kind, list(pairs)),
        in_models=True,
        stores_items=True,
    )
    handlers.register(cls, handler)
