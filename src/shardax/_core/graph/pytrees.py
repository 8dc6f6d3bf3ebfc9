# SPDX-License-Identifier: Apache-2.0
"""Models and Variables as pytrees of JAX.

To JAX a Module (or tracked container) is one pytree: its leaves are the values of its Variables,
each shared Variable once, in nodes for the steps of their paths (``_core.graph.key_levels``), and
its structure is static. So ``jax.jit``, ``jax.grad``, ``jax.tree.map`` and the rest work on models
as they are, and tied weights get their one summed gradient. A Variable on its own is a node with
its value as the child.

What JAX rebuilds inside a plain transform is a *read-only copy*, whatever it holds: a write would
be lost when the function returns, so it is refused (``_core.frames.READ_ONLY``); ``mutable`` lifts
that. What JAX rebuilds outside, from concrete arrays, is an ordinary model.

While a tree is only *probed* for objects (``_core.graph.flatten.has_objects``), each is a node
without children, and notes that it was met.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from shardax._core._jax import Tracer, rebuilds_arguments
from shardax._core.frames import READ_ONLY, Frame, PlainTrace, local, owner_here, resolve
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.flatten import build, flatten, is_object, walk_objects
from shardax._core.graph.key_levels import Child
from shardax._core.graph.paths import KeyEntry, Leaf, attribute_key
from shardax._core.graph.static import EMPTY, Metadata
from shardax._core.init.lazy import LazyValue, materialize_all
from shardax._core.object import Object

if TYPE_CHECKING:
    from shardax._core.variable import Variable

Tree = TypeVar("Tree")


# --- Modules and containers -----------------------------------------------------------------------


def register_graph(cls: type[Object]) -> None:
    """Registers a Module or container class with JAX as one node."""
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten_graph_with_keys, _unflatten_graph, _flatten_graph
    )


class ModelForm:
    """What JAX knows of a model besides its Branches and values."""

    __slots__ = ("graphdef",)

    def __init__(self, graphdef: GraphDef) -> None:
        self.graphdef = graphdef

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelForm):
            return NotImplemented
        if self.graphdef == other.graphdef:
            return True
        # Where Branches differ, the models do. JAX shall find it there, and name the place.
        level, other_level = self.graphdef.key_level, other.graphdef.key_level
        return level.keys == other_level.keys and level != other_level

    def __hash__(self) -> int:
        return hash(self.graphdef.key_level.keys)

    def __repr__(self) -> str:
        keys = "".join(map(str, self.graphdef.key_level.keys))
        return f"{self.graphdef!r} of {keys}"


def _flatten_graph(root: Object) -> tuple[Sequence[Child], ModelForm | None]:
    if local.probing:
        local.found = True
        return [], None

    flat = flatten(root)
    graphdef = flat.graphdef
    return graphdef.key_level.children(values_of(flat.leaves)), ModelForm(graphdef)


def _flatten_graph_with_keys(root: Object) -> tuple[list[tuple[KeyEntry, Child]], ModelForm | None]:
    children, form = _flatten_graph(root)
    if form is None:
        return [], None
    return list(zip(form.graphdef.key_level.keys, children, strict=True)), form


def _unflatten_graph(form: ModelForm | None, children: Iterable[Child]) -> Object:
    assert form is not None  # what was only probed is not rebuilt
    values = form.graphdef.key_level.leaves(children)
    roots, _ = build(form.graphdef, values, *_owner_and_lock(values))
    return roots[0]


def values_of(leaves: Iterable[Leaf]) -> list[Leaf]:
    """Returns the values of Variables as seen from the current frame; lazy ones materialize."""
    frame = local.frame
    targets = [leaf if frame is None else resolve(leaf, frame) for leaf in leaves]
    values = [target._value for target in targets]

    if any(isinstance(value, (LazyValue, np.ndarray)) for value in values):
        materialize_all(targets)
        values = [target._read() for target in targets]
    return values


def _owner_and_lock(values: Sequence[object]) -> tuple[Frame | None, str | None]:
    """Returns owner and lock of what JAX rebuilds here from some values."""
    owner = owner_here()
    is_read_only = (
        isinstance(owner, PlainTrace)
        or any(isinstance(leaf, Tracer) for value in values for leaf in jax.tree.leaves(value))
        or (owner is None and rebuilds_arguments())
    )
    return owner, READ_ONLY if is_read_only else None


# --- Variables ------------------------------------------------------------------------------------


def register_variable(cls: type[Any]) -> None:
    """Registers a Variable class with JAX; the value is its child."""

    def flatten_variable(variable: Variable) -> tuple[list[Leaf], Metadata]:
        if local.probing:
            local.found = True
            return [], EMPTY
        return values_of((variable,)), resolve(variable, local.frame)._metadata

    def flatten_with_keys(variable: Variable) -> tuple[list[tuple[KeyEntry, Leaf]], Metadata]:
        values, metadata = flatten_variable(variable)
        return [(attribute_key("value"), value) for value in values], metadata

    def unflatten_variable(metadata: Metadata, children: Iterable[Leaf]) -> Variable:
        (value,) = children
        return cls._make(value, metadata, *_owner_and_lock([value]))

    jax.tree_util.register_pytree_with_keys(
        cls, flatten_with_keys, unflatten_variable, flatten_variable
    )


# --- read-only copies -----------------------------------------------------------------------------


def mutable(tree: Tree) -> Tree:
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
        if not isinstance(root, Object):
            continue
        for item in walk_objects((root,)):
            if item._lock is READ_ONLY:
                object.__setattr__(item, "_lock", None)
    return tree
