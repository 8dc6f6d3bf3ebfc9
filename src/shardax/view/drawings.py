# SPDX-License-Identifier: Apache-2.0
"""Drawings of what is not a Module: States, structures, selections, meshes and shardings.

All of them become the drawing of ``core.printing``, so that text and HTML know one kind of tree.
A State is drawn as the Variables that its values came from, and a ``GraphDef`` as the model that it
describes, whose Variables have no values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax.core._jax import Tracer
from shardax.core.frames import owner_here
from shardax.core.layout_text import format_mesh
from shardax.core.paths import Path, format_path, path_step
from shardax.core.printing import Drawing, draw, leaf_text, parameter_count
from shardax.core.selection import Selection
from shardax.core.state import Origin, State
from shardax.core.structure import GraphDef, build
from shardax.core.variables import ArrayAttribute, Variable
from shardax.named import NamedArray
from shardax.partition.assignment import mesh_axes_of
from shardax.view.array_figure import as_figure


class NoValue:
    """The value of a Variable that is known by its structure alone."""

    def __repr__(self) -> str:
        return "no value"


NO_VALUE = NoValue()


def drawing_of(value: Any) -> Drawing:
    """Draws anything.

    Args:
        value: A Module, a Variable, a State, a ``GraphDef``, a selection, or anything else.

    Example:
        >>> import shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> [part.label for part in drawing_of(sx.state(layer)).parts]
        ["'kernel': ", "'bias': "]
        >>> drawing_of(sx.graphdef(layer)).name
        'GraphDef: Linear'
    """
    if isinstance(value, State):
        return _draw_state(value)
    if isinstance(value, GraphDef):
        return _draw_graphdef(value)
    if isinstance(value, Selection):
        return _draw_selection(value)
    return draw(value)


def _draw_state(state: State) -> Drawing:
    values, origins = state.flat(), state.origins()
    if all(map(_is_value, values.values())):
        values = {path: _as_variable(value, origins[path]) for path, value in values.items()}
    return draw(values[()]) if () in values else _nested(state, values)


def _nested(whole: Any, values: Mapping[Path, Any]) -> Drawing:
    """Draws values by their paths; what is on the way to them is called as the whole is."""
    root = Drawing("", "", (), whole)
    root.parts = []
    places: dict[Path, list[Drawing]] = {(): root.parts}
    for path, value in values.items():
        for depth in range(1, len(path)):
            if path[:depth] not in places:
                below = _entry(path[:depth], whole)
                places[path[: depth - 1]].append(below)
                below.parts = places[path[:depth]] = []
        places[path[:-1]].append(_entry(path, value))
    return root


def _entry(path: Path, value: Any) -> Drawing:
    return Drawing(f"{path[-1]!r}: ", f"[{path[-1]!r}]", path, value)


def _is_value(value: Any) -> bool:
    return all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))


def _as_variable(value: Any, origin: Origin) -> Variable[Any]:
    return origin.variable_type._make(value, origin.all_metadata, owner_here())


def _draw_graphdef(graphdef: GraphDef) -> Drawing:
    roots, _ = build(graphdef, [NO_VALUE] * len(graphdef.leaves), owner_here())
    drawing = draw(roots[0] if len(roots) == 1 else tuple(roots))
    drawing.name = f"GraphDef: {drawing.name}"
    return drawing


def _draw_selection(selection: Selection) -> Drawing:
    """Draws the tree, with what is selected marked; within a value, the Variable that holds it."""
    tree, paths = selection.tree, set(selection.keypaths())
    leading = {path[:end] for path in paths for end in range(len(path) + 1)}
    drawing = draw(tree)
    if drawing.parts is None and not isinstance(tree, Variable):  # a tree without objects
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        drawing = _nested(tree, {tuple(map(path_step, keys)): leaf for keys, leaf in leaves})
    objects = {id(place.holder) for place in selection._places if place.is_holder}
    for place in drawing.places():
        inside = place.parts is None and place.path in leading
        place.marked = place.path in paths or inside or id(place.value) in objects
    count = f"{len(paths)} place{'' if len(paths) == 1 else 's'}"
    drawing.name = f"Selection of {count} in {drawing.name}"
    return drawing


def describe(leaf: Drawing) -> str:
    """Returns the text of a leaf: its repr, and how it is laid out if it is.

    Example:
        >>> import shardax as sx
        >>> structure = sx.graphdef(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
        >>> describe(drawing_of(structure).parts[0])
        "Param(axes=('in', 'out'))"
    """
    value = leaf.value
    if isinstance(value, (jax.Array, np.ndarray, NamedArray)) and leaf.path:
        return as_figure(value).head
    if isinstance(value, (Mesh, AbstractMesh, NamedSharding)):
        return place_title(value)
    if not isinstance(value, Variable):
        return leaf_text(leaf)
    if isinstance(value._value, NoValue) and isinstance(value, ArrayAttribute):
        return "array"
    if isinstance(value._value, NoValue):
        return f"{leaf.name}({value._metadata!r})"
    place = known_sharding(value)
    text = leaf_text(leaf)
    if not isinstance(place, NamedSharding):
        return text
    layout = place_title(place)
    return f"{text[:-1]}, {layout})" if text.endswith(")") else f"{text}, {layout}"


def known_sharding(variable: Variable[Any]) -> Any:
    """Returns the sharding of a Variable's array, if it is one array that lies somewhere."""
    value = variable._here()._value
    return None if isinstance(value, Tracer) else getattr(value, "sharding", None)


def notes(drawing: Drawing) -> str:
    """Returns what is to be said of a place: the other places of what is shared, and its size.

    Example:
        >>> import shardax as sx
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> layer.same = layer.kernel
        >>> drawing = drawing_of(layer)
        >>> notes(drawing), notes(drawing.parts[0])
        ('  # 9 parameters', '  # also at .same')
    """
    is_tree = drawing.parts is not None and not drawing.path
    again = ", ".join(map(format_path, drawing.again))
    count = parameter_count(drawing) if is_tree else ""
    return count + (f"  # also at {again}" if again else "")


def example_array(place: Mesh | AbstractMesh | NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns the smallest array that a mesh, or a sharding, divides among all its devices.

    Args:
        place: A mesh, which stands for an array with a dimension for each of its axes; or a
            sharding.

    Example:
        >>> example_array(AbstractMesh((2, 4), ("data", "model"))).shape
        (2, 4)
    """
    if not isinstance(place, NamedSharding):
        place = NamedSharding(place, PartitionSpec(*place.axis_names))
    sizes = [
        math.prod(place.mesh.shape[axis] for axis in mesh_axes_of(entry)) for entry in place.spec
    ]
    return jax.ShapeDtypeStruct(sizes, np.int8, sharding=place)


def place_title(place: Mesh | AbstractMesh | NamedSharding) -> str:
    """Returns a mesh or a sharding in a line.

    Example:
        >>> place_title(AbstractMesh((2, 4), ("data", "model")))
        'mesh data=2, model=4'
    """
    if isinstance(place, NamedSharding):
        return f"{place.spec} over {format_mesh(place.mesh)}"
    return f"mesh {format_mesh(place)}"
