# SPDX-License-Identifier: Apache-2.0
"""Drawings of models as text, and by treescope as foldable trees.

A State is drawn as the Variables that its values came from, a ``GraphDef`` as the model that it
describes. Nothing here reads a lazy value. A *figure* is an array with the names of its dimensions,
of which treescope's *adapter* gets only the numbers that are drawn, and none from other machines. A
large model has pictures of its first arrays only: a page with thousands would be neither made nor
read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from shardax import Selection, Variable
from shardax.extend import (
    Drawing,
    LazyValue,
    Origin,
    format_path,
    mesh_axes_of,
    mesh_text,
    path_of_keys,
    stored_value,
)
from shardax.named import NamedArray
from shardax.view.shardings import platform_of, spans_by_device

MOST_PICTURES = 100  # arrays of one drawing that are shown with their values
MOST_LEAVES = 2000  # of a drawing that is unfolded as its size suggests

_MOST_READ = 2**20  # elements; of larger arrays neither statistics nor a copy are made
_MARKED = "marked"
_GREY, _WIDTH = "#666", 80
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
PLACES = (Mesh, AbstractMesh, NamedSharding)

Renderer = Callable[..., Any]


# --- drawings ---


def drawing_of(value: object) -> Drawing:
    """Draws a model, State, ``GraphDef``, selection, or anything else."""
    return _draw_selection(value) if isinstance(value, Selection) else Drawing.of(value)


def _draw_selection(selection: Selection) -> Drawing:
    """Draws the tree with marks on the selection."""
    # For a selection inside a value, the Variable that holds it is marked.
    tree, paths = selection.tree, set(selection.keypaths())
    leading = {path[:end] for path in paths for end in range(len(path) + 1)}
    drawing = Drawing.of(tree)
    if drawing.parts is None and not isinstance(tree, Variable):  # a tree without objects
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        drawing = Drawing.by_path(tree, {path_of_keys(keys): leaf for keys, leaf in leaves})
    for place in drawing.places():
        inside = place.parts is None and place.path in leading
        place.marked = inside or not paths.isdisjoint(place.paths)
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
        return leaf.text
    if leaf.is_array_attribute and leaf.is_without_value:
        return "array"
    if leaf.is_without_value:
        return f"{leaf.name}({Origin.of(value).all_metadata!r})"

    place, text = known_sharding(value), leaf.text
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


def known_sharding(variable: Variable) -> Any:
    """Returns the sharding of a Variable's array, or None."""
    value = stored_value(variable)
    return None if isinstance(value, Tracer) else getattr(value, "sharding", None)


def comment(drawing: Drawing) -> str:
    """Returns the comment behind a place: size, other places."""
    is_tree = drawing.parts is not None and not drawing.path
    paths = ", ".join(map(format_path, drawing.again))
    count = drawing.parameter_count if is_tree else 0
    text = f"  # {count:,} parameters" if count else ""
    return f"{text}  # also at {paths}" if paths else text


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
        return f"{place.spec} over {mesh_text(place.mesh)}"
    return f"mesh {mesh_text(place)}"


# --- arrays as figures of treescope ---


class ArrayFigure:
    """An array to be drawn, with names of its dimensions."""

    __slots__ = ("array", "head", "names", "positional")

    def __init__(self, array: Any, names: Sequence[Any] | None, positional: bool = True) -> None:
        self.array = array
        self.head = array_text(array)
        self.names = tuple(names or (None,) * array.ndim)
        self.positional = positional  # whether dimensions have positions beside their names

    def __treescope_ndarray_adapter__(self) -> FigureAdapter:
        return ADAPTER

    def __treescope_repr__(self, path: str | None, subtree_renderer: object) -> Any:
        """The text of scalars, and of arrays without a picture."""
        from treescope import rendering_parts as parts

        text = parts.abbreviation_color(parts.text(f"<{self.summary()}>"))
        return parts.build_one_line_tree_node(text, path)

    def absence(self) -> str:
        """Returns why this process cannot read the numbers; "" if it can."""
        array = self.array
        if not isinstance(array, jax.Array):
            return ""
        if isinstance(array, Tracer):
            return "traced"
        if array.is_deleted():
            return "deleted"
        return "" if array.is_fully_addressable else "in part on other machines"

    def summary(self) -> str:
        """Returns dtype, shape and statistics of numbers in this process."""
        array, head, absence = self.array, self.head, self.absence()
        if absence:
            return f"{head}, {absence}"
        kinds = (np.bool_, np.integer, np.floating)
        is_real = any(jax.numpy.issubdtype(array.dtype, kind) for kind in kinds)
        if not is_real or not 0 < array.size <= _MOST_READ:
            return head

        numbers = np.asarray(array)
        if array.size == 1:
            return f"{head} {numbers.reshape(())[()]}"
        if numbers.dtype == np.bool_:
            return f"{head} {np.count_nonzero(numbers):,} of {array.size:,} true"

        numbers = numbers.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        nonfinite = f", {array.size - finite.size:,} not finite" if finite.size < array.size else ""
        if not finite.size:
            return head + nonfinite
        return (
            f"{head} mean {finite.mean():.3g}, std {finite.std():.3g}, "
            f"from {finite.min():.3g} to {finite.max():.3g}{nonfinite}"
        )


def as_figure(array: object) -> ArrayFigure:
    """Returns the figure of a figure, a ``NamedArray``, or any other array."""
    if isinstance(array, ArrayFigure):
        return array
    if not isinstance(array, NamedArray):
        return ArrayFigure(array, None)
    figure = ArrayFigure(array.data, array.dims, positional=False)
    figure.head = array_text(array)
    return figure


class FigureAdapter:
    """treescope's adapter for figures and named arrays; the parameters' names are treescope's."""

    def get_axis_info_for_array_data(self, array: ArrayFigure | NamedArray) -> tuple[Any, ...]:
        """Returns the name, position and size of every dimension."""
        from treescope import ndarray_adapters as nda

        figure = as_figure(array)
        infos: list[Any] = []
        positions = itertools.count()
        for name, size in zip(figure.names, figure.array.shape, strict=True):
            if name is None:
                infos.append(nda.PositionalAxisInfo(next(positions), size))
            elif figure.positional:
                infos.append(nda.NamedPositionalAxisInfo(next(positions), name, size))
            else:
                infos.append(nda.NamedPositionlessAxisInfo(name, size))
        return tuple(infos)

    def get_array_data_with_truncation(
        self,
        array: ArrayFigure | NamedArray,
        mask: Any,
        edge_items_per_axis: tuple[int | None, ...],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers at both ends of every dimension, with a mask."""
        numbers: Any = as_figure(array).array
        shape = numbers.shape
        if numbers.size <= _MOST_READ:  # else the ends are taken where the array lies
            numbers = np.asarray(numbers)
        counts = np.broadcast_to(True if mask is None else np.asarray(as_figure(mask).array), shape)
        for dimension, edge in enumerate(edge_items_per_axis):
            if edge is not None:
                ends = np.r_[0 : edge + 1, shape[dimension] - edge : shape[dimension]]
                place = (slice(None),) * dimension
                numbers, counts = numbers[(*place, ends)], counts[(*place, ends)].copy()
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
        """Returns the parts of devices, or None if they cannot be drawn."""
        from treescope import ndarray_adapters as nda

        inner = as_figure(array).array
        shape, place = inner.shape, getattr(inner, "sharding", None)
        if isinstance(inner, Tracer) or not isinstance(place, Sharding) or 0 in shape:
            return None
        spans = spans_by_device(shape, place)
        sizes = {tuple(stop - start for start, stop in part) for part in spans.values()}
        if not shape or len(sizes) != 1:
            return None
        return nda.ShardingInfo(
            shard_shape=next(iter(sizes)),
            device_index_to_shard_slices={
                device: tuple(slice(*span) for span in part) for device, part in spans.items()
            },
            device_type=platform_of(place),
            fully_replicated=sizes == {tuple(shape)},
        )

    def should_autovisualize(self, array: ArrayFigure | NamedArray) -> bool:
        """Whether there is a picture to draw."""
        figure = as_figure(array)
        return not figure.absence() and 0 not in figure.array.shape


ADAPTER = FigureAdapter()


def sharding_part(array: object, names: Sequence[Any] | None) -> Any:
    """Draws an array's sharding; None for scalars, empty arrays, and uneven parts."""
    import treescope

    named = [name for name in names or () if name is not None]
    figure = ArrayFigure(array, names, positional=len(set(named)) < len(named))
    if ADAPTER.get_sharding_info_for_array_data(figure) is None:
        return None
    return treescope.render_array_sharding(figure).treescope_part


# --- trees ---


class FoldableTree:
    """Turns a drawing into treescope's parts; ``subtree_renderer`` draws its leaves."""

    def __init__(self, drawing: Drawing, subtree_renderer: Renderer) -> None:
        from treescope import formatting_util, rendering_parts

        self.parts = rendering_parts
        self.color = formatting_util.color_from_string
        self.root = drawing
        self.render_value = subtree_renderer
        self.large = is_large(drawing)
        self.pictures_left = MOST_PICTURES

    def part(self, path: str | None) -> Any:
        """Returns the part; ``path`` is code for copy buttons."""
        return self._render(self.root, path)

    def _render(self, drawing: Drawing, path: str | None):
        value = drawing.value
        if drawing.first is not None:
            link = self._abbreviation(f"<same {drawing.name} as {format_path(drawing.first.path)}>")
            return self.parts.build_one_line_tree_node(link, path)

        if drawing.parts is not None:
            return self.parts.build_foldable_tree_node_from_children(
                prefix=f"{drawing.name}(",
                children=self._children(drawing.parts, path),
                suffix=")",
                comma_separated=True,
                path=path,
                background_color=self.color(drawing.name),
                first_line_annotation=self._comment(drawing),
            )

        if isinstance(value, Variable):
            return self._variable(drawing, path)
        if isinstance(value, NamedArray):
            return self.render_value(as_figure(value), path=path)
        if drawing.is_shown_by_us:
            return self._line(drawing, path)
        return self.render_value(value, path=path)

    def _children(self, below: list[Drawing], path: str | None) -> list[Any]:
        """A line for each child; plain configuration shares lines."""
        lines: list[Any] = []
        for child in below:
            if child.marked or child.parts is not None or type(child.value) not in _PLAIN:
                node = self._render(child, None if path is None else path + child.code)
                label = child.label
                if child.marked:
                    style = "background: #ffd54a; color: black; font-weight: bold"
                    label = self.parts.custom_style(self.parts.text(f"➤ {label}"), style)
                    label = self.parts.with_layout_mark(label, _MARKED)
                lines.append(self.parts.siblings_with_annotations(label, node))
                continue

            text = f"{child.label}{child.value!r}"
            if lines and isinstance(lines[-1], str) and len(lines[-1]) + len(text) < _WIDTH:
                lines[-1] += f", {text}"
            else:
                lines.append(text)
        return lines

    def _line(self, drawing: Drawing, path: str | None):
        text, color = describe(drawing), self.color(drawing.name)
        if self.large and not drawing.again:
            style = f"background: {color}; color: black"
            return self.parts.custom_style(self.parts.text(text), style)
        node = self.parts.build_one_line_tree_node(text, path, background_color=color)
        annotations = [self._comment(drawing)]
        return self.parts.siblings_with_annotations(node, extra_annotations=annotations)

    def _variable(self, drawing: Drawing, path: str | None):
        """A line without the numbers; unfolded, numbers and layout."""
        picture = None if drawing.is_without_value else self._picture(drawing.value, path)
        if drawing.is_array_attribute:
            return picture or self._abbreviation(f"<{describe(drawing)}>")
        if picture is None:
            return self._line(drawing, path)

        line = self.parts.build_full_line_with_annotations(picture)
        for inner in line.foldables_in_this_part():  # one click is enough to see the numbers
            inner.set_expand_state(self.parts.ExpandState.EXPANDED)
        return self.parts.build_foldable_tree_node_from_children(
            prefix=describe(drawing).removesuffix(")"),
            children=[self.parts.fold_condition(expanded=line)],
            suffix=")",
            path=path,
            background_color=self.color(drawing.name),
            first_line_annotation=self._comment(drawing),
        )

    def _picture(self, variable: Variable, path: str | None):
        """The numbers of a Variable, or its sharding, or None."""
        value, names = stored_value(variable), variable.axes
        if isinstance(value, LazyValue):
            return None
        self.pictures_left -= 1
        if self.pictures_left < 0:
            return None
        if isinstance(value, jax.ShapeDtypeStruct):
            placed = known_sharding(variable) is not None
            return sharding_part(value, names) if placed else None
        figure = ArrayFigure(value, names) if isinstance(value, (jax.Array, np.ndarray)) else value
        return self.render_value(figure, path=None if path is None else f"{path}.value")

    def _comment(self, drawing: Drawing):
        text = comment(drawing)
        if drawing is self.root and self.pictures_left < 0:
            text += f"  # with the values of the first {MOST_PICTURES} arrays"
        return self.parts.custom_text_color(self.parts.text(text), _GREY)

    def _abbreviation(self, text: str):
        return self.parts.abbreviation_color(self.parts.text(text))


def is_large(drawing: Drawing) -> bool:
    """Whether a drawing is better quick than handsome."""
    return any(number > MOST_LEAVES for number, _ in enumerate(drawing.leaves()))


def tree_html(value: object) -> str:
    """Draws anything with treescope, as HTML for a page or a notebook."""
    import treescope
    from treescope import layout_algorithms

    drawing = drawing_of(value)
    pictures = _Pictures()

    def handle(node: object, path: str | None, subtree_renderer: Renderer):
        if node is value and drawing.parts is not None:
            return FoldableTree(drawing, subtree_renderer).part(path)
        if isinstance(node, (jax.Array, np.ndarray, NamedArray)):
            return subtree_renderer(as_figure(node), path=path)
        if isinstance(node, PLACES):
            return _place_part(node, unfolded=node is value) if pictures.take() else NotImplemented
        return NotImplemented

    renderer = treescope.active_renderer.get().extended_with(handlers=[handle])
    visualizer = treescope.active_autovisualizer.get() or pictures
    with ExitStack() as scopes:
        scopes.enter_context(treescope.active_renderer.set_scoped(renderer))
        scopes.enter_context(treescope.active_autovisualizer.set_scoped(visualizer))
        marked = sum(place.marked for place in drawing.places())
        unfold = None
        if 0 < marked <= MOST_PICTURES:
            to_marks = layout_algorithms.expand_to_layout_marks
            unfold = functools.partial(to_marks, marks=[_MARKED], collapse_weak_others=True)
        elif is_large(drawing):  # finding a balanced layout takes a quarter of the time
            unfold = functools.partial(layout_algorithms.expand_to_depth, depth=1)
            scopes.enter_context(treescope.abbreviation_threshold.set_scoped(1))
        if unfold is not None:
            scopes.enter_context(treescope.active_expansion_strategy.set_scoped(unfold))
        return treescope.render_to_html(value)


class _Pictures:
    """treescope's visualizer of arrays, for the first figures."""

    def __init__(self) -> None:
        import treescope

        self.draw = treescope.ArrayAutovisualizer()
        self.left = MOST_PICTURES

    def take(self) -> bool:
        """Whether one more may be drawn."""
        self.left -= 1
        return self.left >= 0

    def __call__(self, value: object, path: str | None) -> Any:
        drawn = isinstance(value, ArrayFigure) and self.take()
        return self.draw(value, path) if drawn else None


def _place_part(place: Mesh | AbstractMesh | NamedSharding, unfolded: bool):
    from treescope import rendering_parts as parts

    names = None if isinstance(place, NamedSharding) else place.axis_names
    picture = sharding_part(example_array(place), names) or parts.empty_part()
    state = parts.ExpandState.EXPANDED if unfolded else parts.ExpandState.WEAKLY_COLLAPSED
    return parts.build_custom_foldable_tree_node(
        label=parts.abbreviation_color(parts.text(f"<{place_title(place)}")),
        contents=parts.siblings(
            parts.fold_condition(expanded=parts.indented_children([picture])),
            parts.abbreviation_color(parts.text(">")),
        ),
        expand_state=state,
    )
