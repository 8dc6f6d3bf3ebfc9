# SPDX-License-Identifier: Apache-2.0
"""Arrays as treescope draws them: with names on the dimensions, and their sharding.

A *figure* is an array together with what its dimensions are called. treescope asks the figure's
*adapter* for its numbers, and gets only as many as it draws. Drawing a large array therefore costs
no more than drawing a small one, and nothing is ever brought here that lies on other machines.

Drawings of what is not a Module: States, structures, selections, meshes and shardings.

All of them become the drawing of ``_core.module``, so that text and HTML know one kind of tree.
A State is drawn as the Variables that its values came from, and a ``GraphDef`` as the model that it
describes, whose Variables have no values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from shardax._core._jax import Tracer
from shardax._core.cross_process import format_mesh
from shardax._core.frames import owner_here
from shardax._core.graph.flatten import GraphDef, build
from shardax._core.graph.paths import Path, format_path, path_step
from shardax._core.module import (
    Drawing,
    draw,
    leaf_text,
    parameter_count,
)
from shardax._core.state.state import Origin, State
from shardax._core.variable import ArrayAttribute, Variable
from shardax._select.selection import Selection
from shardax.named import NamedArray
from shardax.partition.rules import mesh_axes_of
from shardax.view.pictures import platform_of, spans_by_device

# --- Array figure ---

_MOST_READ = 2**20  # elements; of larger arrays neither statistics nor a copy are made


class ArrayFigure:
    """An array to be drawn.

    Args:
        array: A JAX or NumPy array.
        names: What its dimensions are called, None for what has no name.
        positional: Whether dimensions are addressed by position all the same.

    Example:
        >>> import jax.numpy as jnp
        >>> figure = ArrayFigure(jnp.arange(6.0).reshape(2, 3), ("embed", None))
        >>> figure.summary()
        'float32[2, 3] mean 2.5, std 1.71, from 0 to 5'
    """

    __slots__ = ("array", "names", "positional")

    def __init__(self, array: Any, names: Sequence[Any] | None, positional: bool = True) -> None:
        self.array = array
        self.names = tuple(names or (None,) * array.ndim)
        self.positional = positional

    def __treescope_ndarray_adapter__(self) -> FigureAdapter:
        return ADAPTER

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """What is shown where no picture is drawn: of scalars, or because none was asked for."""
        from treescope import rendering_parts as parts

        text = parts.abbreviation_color(parts.text(f"<{self.summary()}>"))
        return parts.build_one_line_tree_node(text, path)

    @property
    def is_here(self) -> bool:
        """Whether this process can read the numbers."""
        array = self.array
        if not isinstance(array, jax.Array):
            return True
        return (
            not isinstance(array, Tracer) and not array.is_deleted() and array.is_fully_addressable
        )

    @property
    def head(self) -> str:
        """Dtype and shape, with the names where dimensions go by name."""
        sizes: Any = list(self.array.shape)
        if self.positional:
            return f"{self.array.dtype}{sizes}"
        pairs = zip(self.names, sizes, strict=True)
        named = ", ".join(str(size) if name is None else f"{name}: {size}" for name, size in pairs)
        return f"NamedArray {self.array.dtype}[{named}]"

    def summary(self) -> str:
        """Returns dtype, shape and, of an array of numbers, where these lie."""
        array, head = self.array, self.head
        if not self.is_here:
            return f"{head}{_why_absent(array)}"
        if not 0 < array.size <= _MOST_READ or not _is_real(array.dtype):
            return head
        numbers = np.asarray(array)
        if array.size == 1:
            return f"{head} {numbers.reshape(())[()]}"
        if numbers.dtype == np.bool_:
            return f"{head} {np.count_nonzero(numbers):,} of {array.size:,} true"
        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        strange = f", {array.size - finite.size:,} not finite" if finite.size < array.size else ""
        if not finite.size:
            return head + strange
        return (
            f"{head} mean {finite.mean():.3g}, std {finite.std():.3g}, "
            f"from {finite.min():.3g} to {finite.max():.3g}{strange}"
        )


def _why_absent(array: Any) -> str:
    if isinstance(array, Tracer):
        return ", traced"
    return ", deleted" if array.is_deleted() else ", in part on other machines"


def _is_real(dtype: Any) -> bool:
    kinds = (np.bool_, np.integer, np.floating)
    return any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)


def sharding_part(array: Any, names: Sequence[Any] | None) -> Any:
    """Draws which device holds which part of an array.

    Args:
        array: An array or ``jax.ShapeDtypeStruct`` with a sharding, over any mesh.
        names: What its dimensions are called.

    Returns:
        A treescope part; None for what treescope cannot draw: scalars, empty arrays, uneven parts.
    """
    import treescope

    known = [name for name in names or () if name is not None]
    figure = ArrayFigure(array, names, positional=len(set(known)) < len(known))
    if ADAPTER.get_sharding_info_for_array_data(figure) is None:
        return None
    return treescope.render_array_sharding(figure).treescope_part


def as_figure(array: Any) -> ArrayFigure:
    """Returns what to draw of an array.

    Args:
        array: A figure, a ``NamedArray``, or any other array.

    Example:
        >>> import shardax as sx
        >>> as_figure(sx.named.zeros({"batch": 2})).names
        ('batch',)
    """
    if isinstance(array, ArrayFigure):
        return array
    if isinstance(array, NamedArray):
        return ArrayFigure(array.data, array.dims, positional=False)
    return ArrayFigure(array, None)


class FigureAdapter:
    """What treescope asks of a figure or named array; the parameters' names are treescope's."""

    def get_axis_info_for_array_data(self, array: ArrayFigure | NamedArray) -> tuple[Any, ...]:
        """Returns the name, position and size of every dimension."""
        from treescope import ndarray_adapters as nda

        figure = as_figure(array)
        infos: list[Any] = []
        for name, size in zip(figure.names, figure.array.shape, strict=True):
            place = sum(not isinstance(info, nda.NamedPositionlessAxisInfo) for info in infos)
            if name is None:
                infos.append(nda.PositionalAxisInfo(place, size))
            elif figure.positional:
                infos.append(nda.NamedPositionalAxisInfo(place, name, size))
            else:
                infos.append(nda.NamedPositionlessAxisInfo(name, size))
        return tuple(infos)

    def get_array_data_with_truncation(
        self,
        array: ArrayFigure | NamedArray,
        mask: Any,
        edge_items_per_axis: tuple[int | None, ...],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers at both ends of every dimension, and which of them count."""
        numbers: Any = as_figure(array).array
        shape = numbers.shape
        if numbers.size <= _MOST_READ:  # else the ends are taken where the array lies
            numbers = np.asarray(numbers)
        counts = np.broadcast_to(True if mask is None else np.asarray(as_figure(mask).array), shape)
        for dimension, edge in enumerate(edge_items_per_axis):
            if edge is not None:
                kept = np.r_[0 : edge + 1, shape[dimension] - edge : shape[dimension]]
                place = (slice(None),) * dimension
                numbers, counts = numbers[(*place, kept)], counts[(*place, kept)].copy()
                counts[(*place, edge)] = False  # only there to show that something is left out
        return np.asarray(numbers), counts

    def get_array_summary(self, array: ArrayFigure | NamedArray, fast: bool) -> Any:
        """Returns the line above the picture."""
        from treescope import rendering_parts as parts

        figure = as_figure(array)
        text = parts.text(figure.head if fast else figure.summary())
        return parts.abbreviatable(text, parts.text(figure.head))

    def get_numpy_dtype(self, array: ArrayFigure | NamedArray) -> np.dtype | None:
        """Returns the dtype, or None if NumPy has none such."""
        dtype = as_figure(array).array.dtype
        return dtype if isinstance(dtype, np.dtype) else None

    def get_sharding_info_for_array_data(self, array: ArrayFigure | NamedArray) -> Any:
        """Returns what each device holds; None if it is unknown or cannot be drawn."""
        from treescope import ndarray_adapters as nda

        inner = as_figure(array).array
        shape, place = inner.shape, getattr(inner, "sharding", None)
        if isinstance(inner, Tracer) or not isinstance(place, Sharding) or 0 in shape:
            return None
        spans = spans_by_device(shape, place)
        sizes = {tuple(stop - start for start, stop in own) for own in spans.values()}
        if not shape or len(sizes) != 1:
            return None
        return nda.ShardingInfo(
            shard_shape=next(iter(sizes)),
            device_index_to_shard_slices={
                device: tuple(slice(*span) for span in own) for device, own in spans.items()
            },
            device_type=platform_of(place),
            fully_replicated=sizes == {tuple(shape)},
        )

    def should_autovisualize(self, array: ArrayFigure | NamedArray) -> bool:
        """Whether there is a picture to draw."""
        figure = as_figure(array)
        return figure.is_here and 0 not in figure.array.shape


ADAPTER = FigureAdapter()


# --- Drawings ---


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
