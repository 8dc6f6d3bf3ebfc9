# SPDX-License-Identifier: Apache-2.0
"""Drawings of States, structures, selections, meshes and shardings, for text and HTML.

All of them become the ``Drawing`` of ``_core.module``, one kind of tree. A State is drawn as the
Variables that its values came from, a ``GraphDef`` as the model that it describes, whose Variables
have no values. Nothing here reads a lazy value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.cross_process import format_mesh
from shardax._core.frames import owner_here
from shardax._core.graph.flatten import GraphDef, build
from shardax._core.graph.paths import Path, format_path, plain_path
from shardax._core.module import Drawing, draw, leaf_text, parameter_count
from shardax._core.state.state import State
from shardax._core.variable import ArrayAttribute, Variable
from shardax._select.selection import Selection
from shardax.named import NamedArray
from shardax.partition.rules import mesh_axes_of

PLACES = (Mesh, AbstractMesh, NamedSharding)


class NoValue:
    """The value of a Variable that is known by its structure alone."""

    def __repr__(self) -> str:
        return "no value"


NO_VALUE = NoValue()


def drawing_of(value: Any) -> Drawing:
    """Draws a model, State, ``GraphDef``, selection, or anything else."""
    if isinstance(value, State):
        return _draw_state(value)
    if isinstance(value, GraphDef):
        roots, _ = build(value, [NO_VALUE] * len(value.leaves), owner_here())
        drawing = draw(roots[0] if len(roots) == 1 else tuple(roots))
        drawing.name = f"GraphDef: {drawing.name}"
        return drawing
    return _draw_selection(value) if isinstance(value, Selection) else draw(value)


def _draw_state(state: State) -> Drawing:
    values, origins = state.flat(), state.origins()
    if all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(list(values.values()))):
        values = {
            path: origins[path].variable_type._make(value, origins[path].all_metadata, owner_here())
            for path, value in values.items()
        }
    return draw(values[()]) if () in values else _nested(state, values)


def _nested(whole: Any, values: Mapping[Path, Any]) -> Drawing:
    """Draws values by their paths; inner places are named like the whole."""
    root = Drawing("", "", (), whole)
    root.parts = []
    places: dict[Path, list[Drawing]] = {(): root.parts}
    for path, value in values.items():
        for depth in range(1, len(path) + 1):
            here = path[:depth]
            if here in places:
                continue
            entry = Drawing(f"{here[-1]!r}: ", f"[{here[-1]!r}]", here, whole)
            places[here[:-1]].append(entry)
            if depth == len(path):
                entry.value, entry.name = value, type(value).__name__
            else:
                entry.parts = places[here] = []
    return root


def _draw_selection(selection: Selection) -> Drawing:
    """Draws the tree with marks on what is selected."""
    # Of what is selected within a value, the Variable that holds it is marked.
    tree, paths = selection.tree, set(selection.keypaths())
    leading = {path[:end] for path in paths for end in range(len(path) + 1)}
    drawing = draw(tree)
    if drawing.parts is None and not isinstance(tree, Variable):  # a tree without objects
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        drawing = _nested(tree, {plain_path(keys): leaf for keys, leaf in leaves})
    objects = {id(place.holder) for place in selection._places if place.is_holder}
    for place in drawing.places():
        inside = place.parts is None and place.path in leading
        place.marked = place.path in paths or inside or id(place.value) in objects
    count = f"{len(paths)} place{'' if len(paths) == 1 else 's'}"
    drawing.name = f"Selection of {count} in {drawing.name}"
    return drawing


def describe(leaf: Drawing) -> str:
    """Returns the text of a leaf: its repr, and its layout."""
    value = leaf.value
    if isinstance(value, (jax.Array, np.ndarray, NamedArray)) and leaf.path:
        return array_text(value)
    if isinstance(value, PLACES):
        return place_title(value)
    if not isinstance(value, Variable):
        return leaf_text(leaf)
    if isinstance(value._value, NoValue):
        is_array = isinstance(value, ArrayAttribute)
        return "array" if is_array else f"{leaf.name}({value._metadata!r})"
    place, text = known_sharding(value), leaf_text(leaf)
    if not isinstance(place, NamedSharding):
        return text
    layout = place_title(place)
    return f"{text[:-1]}, {layout})" if text.endswith(")") else f"{text}, {layout}"


def array_text(array: Any) -> str:
    """Returns dtype and shape of an array, named or not."""
    if not isinstance(array, NamedArray):
        return f"{array.dtype}{list(array.shape)}"
    pairs = zip(array.dims, array.data.shape, strict=True)
    sizes = ", ".join(str(size) if name is None else f"{name}: {size}" for name, size in pairs)
    return f"NamedArray {array.data.dtype}[{sizes}]"


def known_sharding(variable: Variable[Any]) -> Any:
    """Returns the sharding of a Variable's array, or None."""
    value = variable._here()._value
    return None if isinstance(value, Tracer) else getattr(value, "sharding", None)


def comment(drawing: Drawing) -> str:
    """Returns the comment behind a place: size, other places."""
    is_tree = drawing.parts is not None and not drawing.path
    again = ", ".join(map(format_path, drawing.again))
    return (parameter_count(drawing) if is_tree else "") + (f"  # also at {again}" if again else "")


def example_array(place: Mesh | AbstractMesh | NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the smallest array for all devices of a place."""
    if not isinstance(place, NamedSharding):
        place = NamedSharding(place, PartitionSpec(*place.axis_names))
    axes = place.mesh.shape
    sizes = [math.prod(axes[axis] for axis in mesh_axes_of(entry)) for entry in place.spec]
    return jax.ShapeDtypeStruct(sizes, np.int8, sharding=place)


def place_title(place: Mesh | AbstractMesh | NamedSharding) -> str:
    """Returns a mesh or a sharding in a line."""
    if isinstance(place, NamedSharding):
        return f"{place.spec} over {format_mesh(place.mesh)}"
    return f"mesh {format_mesh(place)}"
