# SPDX-License-Identifier: Apache-2.0
"""Models as JAX pytrees.

A Module (or tracked container) is one pytree node: its children are the values of its Variables,
each shared Variable once, and its structure is static. So ``jax.jit``, ``jax.grad``,
``jax.tree.map`` and the rest work on models as they are, and tied weights get their one summed
gradient. A Variable on its own is a node with its value as the child.

What JAX rebuilds inside a plain transform is a *read-only copy*: reading works, but a write would
be lost when the function returns, so it is refused (``core.frames.READ_ONLY``). What JAX rebuilds
outside, from concrete arrays, is an ordinary model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from shardax.core._jax import Tracer
from shardax.core.arraylike import realise_all
from shardax.core.frames import READ_ONLY, local, owner_here, resolve
from shardax.core.lazy import LazyValue
from shardax.core.metadata import EMPTY, Metadata
from shardax.core.node import Object
from shardax.core.paths import PathKey
from shardax.core.structure import GraphDef, build, flatten, walk_objects

M = TypeVar("M")


def has_objects(tree: Any) -> bool:
    """Whether a pytree holds a Module, container or Variable anywhere.

    Runs at the speed of JAX's own flattening. It does not stop at the first object: JAX's
    flattening counts its depth and loses count when it is left by an exception.
    """
    local.probing, local.found = True, False
    try:
        jax.tree.structure(tree)
        return local.found
    finally:
        local.probing = False


def flatten_plain(tree: Any) -> tuple[list[Any], Any] | None:
    """Flattens a pytree, as ``jax.tree.flatten``; None if there are objects anywhere in it."""
    local.probing, local.found = True, False
    try:
        flat = jax.tree.flatten(tree)
        return None if local.found else flat
    finally:
        local.probing = False


def is_object(value: Any) -> bool:
    """Whether ``value`` is a Module, container or Variable; for ``is_leaf=``."""
    return isinstance(value, Object)


def values_of(leaves: Iterable[Any]) -> list[Any]:
    """Reads the values of Variables as seen from the current frame, as JAX arrays.

    Lazy ones materialise, NumPy ones convert.
    """
    frame = local.frame
    targets = [v if frame is None else resolve(v, frame) for v in leaves]
    values = [target._value for target in targets]
    if any(isinstance(value, (LazyValue, np.ndarray)) for value in values):
        realise_all(targets)
        values = [target.value for target in targets]
    return values


def _lock_for(children: Sequence[Any]) -> str | None:
    traced = any(isinstance(leaf, Tracer) for child in children for leaf in jax.tree.leaves(child))
    return READ_ONLY if traced else None


_PROBED = GraphDef((), ())
"""What flattening gives while a pytree is only being searched; nobody looks at it."""


def _flatten_graph(root: Any) -> tuple[list[Any], GraphDef]:
    if local.probing:
        local.found = True
        return [], _PROBED
    flat = flatten(root)
    return values_of(flat.leaves), flat.graphdef


def _flatten_graph_with_keys(root: Any) -> tuple[list[tuple[PathKey, Any]], GraphDef]:
    values, graphdef = _flatten_graph(root)
    return list(zip(map(PathKey, flatten(root).leaf_paths), values, strict=True)), graphdef


def _unflatten_graph(graphdef: GraphDef, children: Iterable[Any]) -> Any:
    values = list(children)
    return build(graphdef, values, owner_here(), _lock_for(values))[0][0]


def register_graph(cls: type) -> None:
    """Registers a Module or container class with JAX as one node."""
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten_graph_with_keys, _unflatten_graph, _flatten_graph
    )


def register_variable(cls: Any) -> None:
    """Registers a Variable class with JAX: the value is the child, type and metadata are static."""

    def flatten_variable(variable: Any) -> tuple[list[Any], Metadata]:
        if local.probing:
            local.found = True
            return [], EMPTY
        return values_of((variable,)), resolve(variable, local.frame)._metadata

    def flatten_with_keys(variable: Any) -> tuple[list[tuple[PathKey, Any]], Metadata]:
        values, metadata = flatten_variable(variable)
        return [(PathKey(("value",)), values[0])], metadata

    def unflatten_variable(metadata: Metadata, children: Iterable[Any]) -> Any:
        values = list(children)
        return cls._make(values[0], metadata, owner_here(), _lock_for(values))

    jax.tree_util.register_pytree_with_keys(
        cls, flatten_with_keys, unflatten_variable, flatten_variable
    )


def mutable(tree: M) -> M:
    """Makes copies that JAX rebuilt inside a plain transform writable, in place.

    Use it when the function returns the copy; a write to a copy that is not returned is lost.

    Args:
        tree: A Module, Variable, container, or pytree of them.

    Returns:
        The same objects, writable.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> @jax.jit
        ... def double(w):
        ...     w = sx.mutable(w)
        ...     w[...] = 2 * w
        ...     return w
        >>> double(sx.Param(jnp.ones(2))).value.tolist()
        [2.0, 2.0]
    """
    for root in jax.tree.leaves(tree, is_leaf=is_object):
        if isinstance(root, Object):
            for item in walk_objects((root,)):
                if item._lock is READ_ONLY:
                    item._lock = None
    return tree
