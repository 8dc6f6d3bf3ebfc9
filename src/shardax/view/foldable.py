# SPDX-License-Identifier: Apache-2.0
"""Drawings by treescope: a tree to unfold, coloured by type, with pictures of arrays.

What a drawing knows is drawn here; what stands in its leaves (arrays, configuration, the user's own
classes) is left to treescope's renderer, and so to whatever the user has taught it. A large model
has pictures of its first arrays only: a page with thousands would neither be made nor read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardax._core.graph.paths import format_path
from shardax._core.init.lazy import LazyValue
from shardax._core.module import Drawing
from shardax._core.object import Shown
from shardax._core.variable import ArrayAttribute, Variable
from shardax.named import NamedArray
from shardax.view.figures import (
    ArrayFigure,
    NoValue,
    as_figure,
    describe,
    drawing_of,
    example_array,
    known_sharding,
    notes,
    place_title,
    sharding_part,
)

MOST_PICTURES = 100
"""How many arrays of one drawing are shown with their values."""

MOST_LEAVES = 2000
"""How many leaves a drawing has at most that is unfolded as its size suggests."""

_MARKED = "marked"
_GREY, _WIDTH = "#666", 80
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
Renderer = Callable[..., Any]


class Foldable:
    """Turns one drawing into treescope's parts.

    Args:
        drawing: The drawing.
        subtree_renderer: treescope's renderer for what stands in leaves.
    """

    def __init__(self, drawing: Drawing, subtree_renderer: Renderer) -> None:
        from treescope import formatting_util, rendering_parts

        self.parts = rendering_parts
        self.color = formatting_util.color_from_string
        self.root = drawing
        self.render_value = subtree_renderer
        self.large = is_large(drawing)
        self.pictures_left = MOST_PICTURES

    def part(self, path: str | None) -> Any:
        """Returns the part.

        Args:
            path: The code that leads to what is drawn, for buttons that copy it; None for none.
        """
        return self._render(self.root, path)

    def _render(self, drawing: Drawing, path: str | None) -> Any:
        if drawing.first is not None:
            same = self._abbreviation(f"<same {drawing.name} as {format_path(drawing.first.path)}>")
            return self.parts.build_one_line_tree_node(same, path)
        if drawing.parts is not None:
            return self._inner(drawing, drawing.parts, path)
        if isinstance(drawing.value, Variable):
            return self._variable(drawing, path)
        if isinstance(drawing.value, NamedArray):
            return self.render_value(as_figure(drawing.value), path=path)
        if isinstance(drawing.value, Shown):
            return self._line(drawing, path)
        return self.render_value(drawing.value, path=path)

    def _inner(self, drawing: Drawing, below: list[Drawing], path: str | None) -> Any:
        children = self._children(below, path)
        return self.parts.build_foldable_tree_node_from_children(
            prefix=f"{drawing.name}(",
            children=children,
            suffix=")",
            comma_separated=True,
            path=path,
            background_color=self.color(drawing.name),
            first_line_annotation=self._note(drawing),
        )

    def _line(self, drawing: Drawing, path: str | None) -> Any:
        text, color = describe(drawing), self.color(drawing.name)
        if self.large and not drawing.again:
            return self.parts.custom_style(
                self.parts.text(text), f"background: {color}; color: black"
            )
        node = self.parts.build_one_line_tree_node(text, path, background_color=color)
        return self.parts.siblings_with_annotations(node, extra_annotations=[self._note(drawing)])

    def _children(self, below: list[Drawing], path: str | None) -> list[Any]:
        """A line for each; plain configuration shares lines, of which there would be too many."""
        lines: list[Any] = []
        for child in below:
            if child.marked or child.parts is not None or type(child.value) not in _PLAIN:
                code = None if path is None else path + child.code
                node = self._render(child, code)
                label = self._mark(child.label) if child.marked else child.label
                lines.append(self.parts.siblings_with_annotations(label, node))
                continue
            text = f"{child.label}{child.value!r}"
            if lines and isinstance(lines[-1], str) and len(lines[-1]) + len(text) < _WIDTH:
                lines[-1] += f", {text}"
            else:
                lines.append(text)
        return lines

    def _variable(self, drawing: Drawing, path: str | None) -> Any:
        """A line that says all but the numbers; unfolded, the numbers and how they are laid out."""
        picture = self._picture(drawing.value, path)
        if isinstance(drawing.value, ArrayAttribute):
            return picture or self._abbreviation(f"<{describe(drawing)}>")
        if picture is None:
            return self._line(drawing, path)
        whole = self.parts.build_full_line_with_annotations(picture)
        for inner in whole.foldables_in_this_part():  # one click is enough to see the numbers
            inner.set_expand_state(self.parts.ExpandState.EXPANDED)
        return self.parts.build_foldable_tree_node_from_children(
            prefix=describe(drawing).removesuffix(")"),
            children=[self.parts.fold_condition(expanded=whole)],
            suffix=")",
            path=path,
            background_color=self.color(drawing.name),
            first_line_annotation=self._note(drawing),
        )

    def _picture(self, variable: Variable[Any], path: str | None) -> Any:
        """The numbers of a Variable, or the sharding of one without numbers; None for neither."""
        value, names = variable._here()._value, variable.axes
        if isinstance(value, (LazyValue, NoValue)):
            return None
        self.pictures_left -= 1
        if self.pictures_left < 0:
            return None
        if isinstance(value, jax.ShapeDtypeStruct):
            return None if known_sharding(variable) is None else sharding_part(value, names)
        shown = ArrayFigure(value, names) if isinstance(value, (jax.Array, np.ndarray)) else value
        return self.render_value(shown, path=None if path is None else f"{path}.value")

    def _note(self, drawing: Drawing) -> Any:
        text = notes(drawing)
        if drawing is self.root and self.pictures_left < 0:
            text += f"  # with the values of the first {MOST_PICTURES} arrays"
        return self.parts.custom_text_color(self.parts.text(text), _GREY)

    def _mark(self, label: str) -> Any:
        style = "background: #ffd54a; color: black; font-weight: bold"
        part = self.parts.custom_style(self.parts.text(f"➤ {label}"), style)
        return self.parts.with_layout_mark(part, _MARKED)

    def _abbreviation(self, text: str) -> Any:
        return self.parts.abbreviation_color(self.parts.text(text))


def is_large(drawing: Drawing) -> bool:
    """Whether a drawing is so large that it is better quick than handsome.

    Example:
        >>> is_large(drawing_of([1, 2]))
        False
    """
    return any(number > MOST_LEAVES for number, _ in enumerate(drawing.leaves()))


def draw_with_treescope(value: Any) -> str:
    """Draws anything.

    Args:
        value: As for ``sx.view.show``.

    Returns:
        HTML to stand in a page or a notebook.

    Raises:
        ImportError: If treescope is not installed.

    Example:
        >>> "treescope-container" in draw_with_treescope({"rate": 0.5})
        True
    """
    import treescope
    from treescope import layout_algorithms

    drawing = drawing_of(value)
    pictures = _Pictures()

    def handle(node: Any, path: str | None, subtree_renderer: Renderer) -> Any:
        if node is value and drawing.parts is not None:
            return Foldable(drawing, subtree_renderer).part(path)
        if isinstance(node, (jax.Array, np.ndarray, NamedArray)):
            return subtree_renderer(as_figure(node), path=path)
        if isinstance(node, (Mesh, AbstractMesh, NamedSharding)):
            return _place_part(node, unfolded=node is value) if pictures.take() else NotImplemented
        return NotImplemented

    renderer = treescope.active_renderer.get().extended_with(handlers=[handle])
    visualizer = treescope.active_autovisualizer.get() or pictures
    with ExitStack() as scopes:
        scopes.enter_context(treescope.active_renderer.set_scoped(renderer))
        scopes.enter_context(treescope.active_autovisualizer.set_scoped(visualizer))
        marked = sum(place.marked for place in drawing.places())
        if 0 < marked <= MOST_PICTURES:
            unfold = functools.partial(
                layout_algorithms.expand_to_layout_marks,
                marks=[_MARKED],
                collapse_weak_others=True,
            )
            scopes.enter_context(treescope.active_expansion_strategy.set_scoped(unfold))
        elif is_large(drawing):  # finding a balanced layout takes a quarter of the time
            unfold = functools.partial(layout_algorithms.expand_to_depth, depth=1)
            scopes.enter_context(treescope.active_expansion_strategy.set_scoped(unfold))
            scopes.enter_context(treescope.abbreviation_threshold.set_scoped(1))
        return treescope.render_to_html(value)


def draw_sharding(array: Any, names: Any) -> str | None:
    """Draws which device holds which part of an array.

    Args:
        array: An array or ``jax.ShapeDtypeStruct`` with a sharding.
        names: What its dimensions are called, or None.

    Returns:
        HTML to stand in a page; None for what treescope cannot draw.

    Example:
        >>> import jax.numpy as jnp
        >>> "treescope-container" in draw_sharding(jnp.zeros((2, 3)), ("in", "out"))
        True
    """
    from treescope import figures

    part = sharding_part(array, names)
    if part is None:
        return None
    return figures.figure_from_treescope_rendering_part(part)._repr_html_()


class _Pictures:
    """treescope's visualizer of arrays, for figures and as many as are to be drawn."""

    def __init__(self) -> None:
        import treescope

        self.draw = treescope.ArrayAutovisualizer()
        self.left = MOST_PICTURES

    def take(self) -> bool:
        """Whether one more may be drawn."""
        self.left -= 1
        return self.left >= 0

    def __call__(self, value: Any, path: str | None) -> Any:
        drawn = isinstance(value, ArrayFigure) and self.take()
        return self.draw(value, path) if drawn else None


def _place_part(place: Mesh | AbstractMesh | NamedSharding, unfolded: bool) -> Any:
    from treescope import rendering_parts as parts

    names = None if isinstance(place, NamedSharding) else place.axis_names
    picture = sharding_part(example_array(place), names) or parts.empty_part()
    return parts.build_custom_foldable_tree_node(
        label=parts.abbreviation_color(parts.text(f"<{place_title(place)}")),
        contents=parts.siblings(
            parts.fold_condition(expanded=parts.indented_children([picture])),
            parts.abbreviation_color(parts.text(">")),
        ),
        expand_state=(
            parts.ExpandState.EXPANDED if unfolded else parts.ExpandState.WEAKLY_COLLAPSED
        ),
    )
