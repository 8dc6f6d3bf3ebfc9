# SPDX-License-Identifier: Apache-2.0
"""Drawings by treescope: a tree to unfold, coloured by type, with pictures of arrays.

What a drawing knows is drawn here; what stands in its leaves (arrays, configuration, the user's own
classes) is left to treescope's renderer, and so to whatever the user has taught it. A large model
has pictures of its first arrays only: a page with thousands would neither be made nor read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardax.core.lazy import LazyValue
from shardax.core.paths import format_path
from shardax.core.printing import Drawing, parameter_count
from shardax.core.variables import ArrayAttribute, Variable
from shardax.view.array_figure import ArrayFigure, sharding_part
from shardax.view.drawings import (
    NoValue,
    describe,
    drawing_of,
    example_array,
    known_sharding,
    place_title,
    shared_note,
)

MOST_PICTURES = 100
"""How many arrays of one drawing are shown with their values."""

_GREY = "#666"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
Renderer = Callable[..., Any]


class Foldable:
    """Turns one drawing into treescope's parts.

    Args:
        subtree_renderer: treescope's renderer for what stands in leaves.
    """

    def __init__(self, subtree_renderer: Renderer) -> None:
        from treescope import formatting_util, rendering_parts

        self.parts = rendering_parts
        self.render_value = subtree_renderer
        self.color = formatting_util.color_from_string
        self.pictures_left = MOST_PICTURES

    def render(self, drawing: Drawing, path: str | None) -> Any:
        """Returns the part of a drawing.

        Args:
            drawing: What to draw.
            path: The code that leads there, for the button that copies it; None for no button.
        """
        parts = self.parts
        if drawing.first is not None:
            same = f"<same {drawing.name} as {format_path(drawing.first.path)}>"
            return parts.build_one_line_tree_node(self._remark(same), path)
        if drawing.parts is not None:
            return self._inner(drawing, drawing.parts, path)
        if isinstance(drawing.value, Variable):
            return self._variable(drawing, path)
        return self.render_value(drawing.value, path=path)

    def _inner(self, drawing: Drawing, below: list[Drawing], path: str | None) -> Any:
        note = parameter_count(drawing) if not drawing.path else ""
        return self.parts.build_foldable_tree_node_from_children(
            prefix=f"{drawing.name}(",
            children=[self._child(child, path) for child in below],
            suffix=")",
            comma_separated=True,
            path=path,
            background_color=self.color(drawing.name),
            first_line_annotation=self._note(note + shared_note(drawing)),
        )

    def _child(self, child: Drawing, path: str | None) -> Any:
        if type(child.value) in _PLAIN and child.parts is None:  # most lines of a large model
            return f"{child.label}{child.value!r}"
        below = None if path is None else path + child.code
        return self.parts.siblings_with_annotations(child.label, self.render(child, below))

    def _variable(self, drawing: Drawing, path: str | None) -> Any:
        """A line that says all but the numbers; unfolded, the numbers and how they are laid out."""
        picture = self._picture(drawing.value, path)
        line, color = describe(drawing), self.color(drawing.name)
        note = self._note(shared_note(drawing))
        if isinstance(drawing.value, ArrayAttribute):
            return picture or self._remark(f"<{line}>")
        if picture is None:
            node = self.parts.build_one_line_tree_node(line, path, background_color=color)
            return self.parts.siblings_with_annotations(node, extra_annotations=[note])
        whole = self.parts.build_full_line_with_annotations(picture)
        return self.parts.build_foldable_tree_node_from_children(
            prefix=line.removesuffix(")"),
            children=[self.parts.fold_condition(expanded=whole)],
            suffix=")",
            path=path,
            background_color=color,
            first_line_annotation=note,
        )

    def _picture(self, variable: Variable[Any], path: str | None) -> Any:
        """The numbers of a Variable, or the sharding of one without numbers; None for neither."""
        value, names = variable._value, variable._metadata.axes
        if isinstance(value, (LazyValue, NoValue)) or self.pictures_left <= 0:
            return None
        self.pictures_left -= 1
        if isinstance(value, jax.ShapeDtypeStruct):
            return None if known_sharding(variable) is None else sharding_part(value, names)
        shown = ArrayFigure(value, names) if isinstance(value, (jax.Array, np.ndarray)) else value
        return self.render_value(shown, path=None if path is None else f"{path}.value")

    def _note(self, text: str) -> Any:
        if not text:
            return self.parts.empty_part()
        return self.parts.custom_text_color(self.parts.text(text), _GREY)

    def _remark(self, text: str) -> Any:
        return self.parts.abbreviation_color(self.parts.text(text))


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

    drawing = drawing_of(value)

    def handle(node: Any, path: str | None, subtree_renderer: Renderer) -> Any:
        if node is value and drawing.parts is not None:
            return Foldable(subtree_renderer).render(drawing, path)
        if isinstance(node, (jax.Array, np.ndarray)):
            return subtree_renderer(ArrayFigure(node, None), path=path)
        if isinstance(node, (Mesh, AbstractMesh, NamedSharding)):
            return _place_part(node)
        return NotImplemented

    renderer = treescope.active_renderer.get().extended_with(handlers=[handle])
    visualizer = treescope.active_autovisualizer.get() or _Pictures()
    with (
        treescope.active_renderer.set_scoped(renderer),
        treescope.active_autovisualizer.set_scoped(visualizer),
    ):
        return treescope.render_to_html(value)


class _Pictures:
    """treescope's visualizer of arrays, for figures and as many as are to be drawn."""

    def __init__(self) -> None:
        import treescope

        self.draw = treescope.ArrayAutovisualizer()
        self.left = MOST_PICTURES

    def __call__(self, value: Any, path: str | None) -> Any:
        if not isinstance(value, ArrayFigure) or self.left <= 0:
            return None
        self.left -= 1
        return self.draw(value, path)


def _place_part(place: Mesh | AbstractMesh | NamedSharding) -> Any:
    from treescope import rendering_parts as parts

    names = None if isinstance(place, NamedSharding) else place.axis_names
    picture = sharding_part(example_array(place), names) or parts.empty_part()
    return parts.build_custom_foldable_tree_node(
        label=parts.abbreviation_color(parts.text(f"<{place_title(place)}")),
        contents=parts.siblings(
            parts.fold_condition(expanded=parts.indented_children([picture])),
            parts.abbreviation_color(parts.text(">")),
        ),
        expand_state=parts.ExpandState.EXPANDED,
    )
