# SPDX-License-Identifier: Apache-2.0
"""The form of values that loops carry and branches return.

A loop is one program for all iterations, and a choice one program for all branches. So what goes
from one iteration to the next, or comes out of every branch, has one *form*: pytree structure,
shapes and dtypes, and over Explicit mesh axes the layout. Inside ``shard_map``, the mesh axes over
which a value *varies* (differs between shards) belong to its type, too; ``vary_alike`` adapts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardax._core._jax import varying_axes
from shardax._core.array_ops import is_weakly_typed
from shardax._core.graph.differences import Difference, Text
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.state.state import State
from shardax._transforms.lift.prefixes import one_level


def abstract_eval(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Returns shapes and dtypes of what a function returns, with layouts over Explicit axes.

    A function made by ``jax.jit`` keeps the trace, so that a later call does not trace again.
    """
    traceable: Any = function if hasattr(function, "trace") else jax.jit(function)
    traced = traceable.trace(*args)
    shapes, treedef = jax.tree.flatten(traced.out_info)
    types = zip(shapes, traced.jaxpr.out_avals, strict=True)
    return treedef.unflatten([_with_layout(shape, aval) for shape, aval in types])


def _with_layout(shape: jax.ShapeDtypeStruct, aval: object) -> jax.ShapeDtypeStruct:
    layout = getattr(aval, "sharding", None)
    if shape.sharding is not None or layout is None or layout.mesh.empty:
        return shape
    # JAX reads over which Manual axes a value varies beside the mesh that has them.
    is_typed = any(axis_type is not AxisType.Auto for axis_type in layout.mesh.axis_types)
    return shape.update(sharding=layout) if is_typed else shape


def vary_alike(leaf: Leaf, like: Leaf) -> Leaf:
    """Returns an array that also varies over the manual mesh axes over which another varies."""
    missing = varying_axes(like) - varying_axes(leaf)
    return jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf


def form_difference(old: PyTree, new: PyTree, path: Path) -> Difference | None:
    """Returns how the form of a value changed; None if it is the same."""
    if jax.tree.structure(old) == jax.tree.structure(new):
        pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if all(_keeps_type(old_leaf, new_leaf) for old_leaf, new_leaf in pairs):
            return None
    return Difference(path, form_text(old), form_text(new))


def _keeps_type(old: Leaf, new: Leaf) -> bool:
    if jnp.shape(old) != jnp.shape(new) or explicit_spec(old) != explicit_spec(new):
        return False
    old_dtype, new_dtype = jnp.result_type(old), jnp.result_type(new)
    if old_dtype == new_dtype:
        return True
    # What starts as a Python number takes the dtype of what the body makes of it, as in JAX.
    return is_weakly_typed(old) and jnp.result_type(old, new) == new_dtype


def form_text(value: PyTree) -> Text:
    """Returns the form of a value for messages, like ``float32[2,3]``."""
    texts = jax.tree.map(
        lambda leaf: f"{jnp.result_type(leaf)}[{','.join(map(str, jnp.shape(leaf)))}]", value
    )
    text = texts if isinstance(texts, str) else str(texts).replace("'", "")
    specs = {explicit_spec(leaf) for leaf in jax.tree.leaves(value)} - {""}
    return Text(text + "".join(f" sharded as {spec}" for spec in sorted(specs)))


def explicit_spec(leaf: Leaf) -> str:
    """Returns an array's spec over Explicit mesh axes, or an empty text."""
    spec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", None)
    return "" if spec is None or all(entry is None for entry in spec) else str(spec)


# An *outline* is a tree with an integer for every leaf: this one for an array, for an object its
# position, or this one too where only the structure counts.
ARRAY = -1


def outline_difference(first: PyTree, second: PyTree, path: Path) -> Difference | None:
    """Returns the outermost difference of two outlines, or None."""
    if jax.tree.structure(first) == jax.tree.structure(second):
        return None

    # The outermost place: containers that are alike are compared by their children.
    first_children, second_children = one_level(first), one_level(second)
    first_keys = [key for key, _ in first_children]
    second_keys = [key for key, _ in second_children]
    if type(first) is type(second) and first_keys == second_keys:
        for (key, first_child), (_, second_child) in zip(
            first_children, second_children, strict=True
        ):
            difference = outline_difference(first_child, second_child, (*path, *key))
            if difference is not None:
                return difference

    first_text = _outline_text(first, first_keys)
    second_text = _outline_text(second, second_keys)
    if first_text == second_text:
        second_text += " with other static fields"
    return Difference(path, Text(first_text), Text(second_text))


def _outline_text(outline: PyTree, keys: Sequence[Path]) -> str:
    if isinstance(outline, int):
        return "an array" if outline == ARRAY else "an object"
    if outline is None:
        return "None"
    kind = type(outline).__name__
    if isinstance(outline, (dict, State)):
        listed = ", ".join(repr(key) for (key,) in keys)
        return f"a {kind} with keys {listed or '(none)'}"
    return f"a {kind} of {len(keys)}"
