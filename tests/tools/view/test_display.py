# SPDX-License-Identifier: Apache-2.0
"""Anything can be shown: as text, by treescope, in a notebook, and without treescope."""

from __future__ import annotations

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from hypothesis import given, settings
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.view import figures
from shardax.view.figures import describe, drawing_of
from tests.strategies import models


class Tied(sx.Module):
    def __init__(self) -> None:
        self.embed = sx.Param(sx.Init(jax.nn.initializers.ones, (4, 2)), axes=("vocab", "embed"))
        self.layers = [sx.BatchStat(jnp.zeros(2)), self.embed]
        self.head = self.embed
        self.scale = np.ones(3, np.float32)
        self.rate, self.name = 0.5, "tied"


# --- Text ---


def test_text_marks_shared_and_lazy_variables() -> None:
    model = Tied()
    assert sx.view.to_text(model) == (
        "Tied(  # 8 parameters\n"
        "  embed=Param(float32[4, 2], lazy, axes=('vocab', 'embed')),"
        "  # also at .layers[1], .head\n"
        "  layers=List(\n"
        "    BatchStat(float32[2]),\n"
        "    <same Param as .embed>,\n"
        "  ),\n"
        "  head=<same Param as .embed>,\n"
        "  rate=0.5,\n"
        "  name='tied',\n"
        "  scale=float32[3],\n"
        ")"
    )
    assert model.embed.is_lazy


def test_text_says_how_variables_are_laid_out(auto_mesh: Mesh) -> None:
    layer = sx.nn.Linear(4, 8, use_bias=False, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))
    line = "kernel=Param(float32[4, 8], {}axes=('embed', 'mlp'), P('data', 'model') over {}),"
    rules = {"embed": "data", "mlp": "model"}
    planned = sx.abstract(layer, auto_mesh, rules)
    assert line.format("", "data=2, model=4") in sx.view.to_text(planned)
    sx.shard(layer, auto_mesh, rules)
    assert line.format("", "data=2, model=4") in sx.view.to_text(layer)


def test_state_is_shown_with_its_variable_types() -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    assert sx.view.to_text(sx.state({"layers": [layer]})) == (
        "State(  # 9 parameters\n"
        "  'layers': State(\n"
        "    0: State(\n"
        "      'kernel': Param(float32[2, 3], axes=('in', 'out')),\n"
        "      'bias': Param(float32[3], axes=('out',)),\n"
        "    ),\n"
        "  ),\n"
        ")"
    )
    assert sx.view.to_text(sx.state(sx.Param(jnp.ones(2)))) == "Param(float32[2])"
    assert sx.view.to_text(sx.State({"a": 1})) == "State(\n  'a': 1,\n)"


def test_graphdef_is_shown_as_model_without_values() -> None:
    assert sx.view.to_text(sx.graphdef(Tied())) == (
        "GraphDef: Tied(\n"
        "  embed=Param(axes=('vocab', 'embed')),  # also at .layers[1], .head\n"
        "  layers=List(\n"
        "    BatchStat(),\n"
        "    <same Param as .embed>,\n"
        "  ),\n"
        "  head=<same Param as .embed>,\n"
        "  rate=0.5,\n"
        "  name='tied',\n"
        "  scale=array,\n"
        ")"
    )


def test_meshes_and_shardings_are_shown_with_a_picture() -> None:
    mesh = AbstractMesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    edge = "─" * 18
    picture = f"┌{edge}┬{edge}┐\n│{'device 0':^18}│{'device 1':^18}│\n└{edge}┴{edge}┘"
    assert sx.view.to_text(mesh) == f"mesh data=1, model=2\n{picture}"
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    assert sx.view.to_text(sharding) == f"P(None, 'model') over data=1, model=2\n{picture}"


def test_state_of_shardings_has_line_per_entry(auto_mesh: Mesh) -> None:
    layer = sx.nn.Linear(4, 8, use_bias=False, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))
    shardings = sx.shardings(layer, auto_mesh, {"mlp": "model"})
    line = "P(None, 'model') over data=2, model=4"
    assert sx.view.to_text(shardings) == f"State(\n  'kernel': {line},\n)"
    assert "treescope-container" in sx.view.to_html([shardings, auto_mesh.abstract_mesh])


def test_named_arrays_are_shown_by_their_names() -> None:
    values = {"x": sx.named.zeros({"batch": 2, "embed": 3}), "w": sx.Param(jnp.ones(2))}
    assert sx.view.to_text(values) == (
        "dict(  # 2 parameters\n"
        "  'x': NamedArray float32[batch: 2, embed: 3],\n"
        "  'w': Param(float32[2]),\n"
        ")"
    )


def test_selected_entries_are_marked() -> None:
    selection = sx.select(Tied()).at_instances_of(sx.Param)
    drawing = drawing_of(selection)
    assert drawing.name == "Selection of 1 place in Tied"
    marked = [place.path for place in drawing.places() if place.marked]
    assert marked == [("embed",), ("layers", 1), ("head",)]  # one Variable, wherever it is met
    assert sx.view.to_text(selection) == str(selection)
    plain = drawing_of(sx.select({"a": 1.0, "b": [2, 3.0]}).at_instances_of(float))
    assert [place.path for place in plain.places() if place.marked] == [("a",), ("b", 1)]


def test_tables_and_views_are_shown_as_they_print() -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    for value in (sx.view.table(layer), sx.view.sharding(layer)):
        assert sx.view.to_text(value) == str(value)
        assert value.html() in sx.view.to_html(value)
    table = sx.view.table(layer)
    assert table._repr_html_() == table.html()


def test_sharding_page_has_a_drawing_with_its_caption(auto_mesh: Mesh) -> None:
    layer = sx.nn.Linear(4, 8, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))
    view = sx.view.sharding(layer.kernel, auto_mesh, {"mlp": "model"})
    page = sx.view.to_html(view)
    assert view.html() in page and "CPU 3,7" in page
    assert f"<figcaption>{view.caption().replace(chr(39), '&#x27;')}</figcaption>" in page


def test_showing_outside_of_a_notebook_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    sx.view.show(Tied())
    drawn = sx.view.to_text(Tied()) + "\n"
    assert capsys.readouterr().out == drawn
    sx.view.show("A model:", Tied(), "and <its>\nstate", sx.State({"a": 1}), 3)
    others = [sx.view.to_text(sx.State({"a": 1})), "3\n"]
    expected = "\n".join(["and <its>\nstate", *others])
    assert capsys.readouterr().out == f"A model:\n{drawn}{expected}"
    sx.view.show()
    assert capsys.readouterr().out == ""


@given(model=models())
@settings(max_examples=10)
def test_to_text_and_to_html_leave_every_model_unchanged(model: Any) -> None:
    lazy = [variable.is_lazy for _, variable in sx.iter_variables(model)]
    before = sx.graphdef(model)
    for value in (model, before):
        assert sx.view.to_text(value).count("\n") >= 0
        assert "treescope-container" in sx.view.to_html(value)
    assert [variable.is_lazy for _, variable in sx.iter_variables(model)] == lazy
    assert sx.graphdef(model) == before


# --- treescope ---


def test_treescope_shows_models_inside_its_own_drawings() -> None:
    shown = treescope.render_to_text({"model": Tied()})
    assert "embed=Param(float32[4, 2], lazy, axes=('vocab', 'embed'))" in shown
    assert "# also at .layers[1], .head" in shown
    assert shown.count("<same Param as .embed>") == 2
    assert "rate=0.5, name='tied'," in shown
    assert "<float32[3] mean 1, std 0, from 1 to 1>" in shown


def test_states_structures_and_slots_are_shown_by_treescope() -> None:
    layer = sx.nn.Linear(2, 3, use_bias=False, rngs=sx.Rngs(0))
    slots, _ = sx.unbind(layer)
    assert "kernel=Slot(Param, .kernel)" in treescope.render_to_text(slots)
    assert treescope.render_to_text(slots.kernel) == "Slot(Param, .kernel)"
    assert treescope.render_to_text(sx.graphdef(layer)).startswith("GraphDef: Linear(")
    assert "'kernel': Param(float32[2, 3]" in treescope.render_to_text(sx.state(layer))


def test_model_is_shown_while_it_is_traced() -> None:
    seen: list[str] = []

    @sx.jit
    def forward(model: Any) -> None:
        seen.append(treescope.render_to_text(model) + sx.view.to_html(model))

    forward(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
    assert "Param(float32[2, 3], axes=('in', 'out'))" in seen[0]


def test_states_and_structures_display_while_tracing() -> None:
    outside = Tied()
    expected = [sx.view.to_text(sx.graphdef(outside)), sx.view.to_text(sx.state(outside))]
    seen: list[str] = []

    @sx.jit
    def forward(model: Any) -> Any:
        seen.extend(map(sx.view.to_text, (sx.graphdef(model), sx.state(model))))
        sx.view.to_html(outside)  # used through the closure
        return model.embed + 1

    forward(Tied())
    assert seen == expected


def test_treescope_repr_of_the_user_holds_for_leaves() -> None:
    class Config:
        def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
            return treescope.rendering_parts.text(f"Config at {path}")

    model = Tied()
    model.config = Config()
    assert "config=Config at .config" in treescope.render_to_text(model)


def test_pictures_are_drawn_of_the_first_arrays_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_PICTURES", 2)
    drawn: list[Any] = []

    def visualize(value: Any, path: str | None) -> None:
        if isinstance(value, figures.ArrayFigure):
            drawn.append(path)

    with treescope.active_autovisualizer.set_scoped(visualize):
        text = treescope.render_to_text(sx.List([sx.Param(jnp.ones(2)) for _ in range(4)]))
    assert drawn == ["[0].value", "[1].value"]
    assert "# with the values of the first 2 arrays" in text


def test_large_model_still_says_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_LEAVES", 1)
    assert "# also at .layers[1], .head" in treescope.render_to_text(Tied())
    assert "treescope-container" in sx.view.to_html(Tied())


def test_large_structures_show_named_arrays_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_LEAVES", 1)
    model = sx.nn.Sequential(sx.nn.Linear(2, 3, use_bias=False, rngs=sx.Rngs(0)))
    model.offset = sx.named.zeros({"y": 3})
    assert "offset=<NamedArray float32[y: 3] mean 0" in treescope.render_to_text(model)
    structure = treescope.render_to_text(sx.graphdef(model))
    assert "kernel=Param(axes=('in', 'out'))" in structure and "offset=<array>" in structure


# --- Notebooks, and without treescope ---


def test_notebook_gets_html_and_terminal_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    # Another test may have imported IPython, whose terminals are shown the repr alone.
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    bundle = model._repr_mimebundle_()
    assert bundle["text/plain"] == repr(model)
    assert "treescope-container" in bundle["text/html"]

    def run_under(kinds: list[str], *values: Any) -> list[Any]:
        shown: list[Any] = []
        formatter = types.SimpleNamespace(active_types=kinds)
        shell = types.SimpleNamespace(display_formatter=formatter)
        ipython = types.ModuleType("IPython")
        ipython.get_ipython = lambda: shell  # pyright: ignore[reportAttributeAccessIssue]
        display = types.ModuleType("IPython.display")
        display.display = lambda data, raw: shown.append(data)  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        sx.view.show(*values or (model,))
        return shown

    bundle = sx.select(model).at_instances_of(sx.Param)._repr_mimebundle_()
    assert bundle["text/plain"].startswith("Selection of 1 place in a Tied:")
    assert sx.named.zeros({"a": 2})._repr_mimebundle_().keys() == {"text/plain", "text/html"}

    (shown,) = run_under(["text/plain", "text/html"])
    assert shown.keys() == {"text/html", "text/plain"}
    text, drawing = run_under(["text/plain", "text/html"], "a < b", model)
    assert text["text/plain"] == "a < b" and "<pre>a &lt; b</pre>" in text["text/html"]
    assert drawing["text/plain"] == repr(model) and "treescope-container" in drawing["text/html"]
    assert run_under(["text/plain"]) == []
    assert model._repr_mimebundle_() is None


def test_ipython_shows_tables_and_views_as_they_print() -> None:
    from IPython.lib.pretty import pretty

    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    for value in (sx.view.table(layer), sx.view.sharding(layer)):
        assert pretty(value) == str(value)


def test_texts_are_the_same_in_every_process() -> None:
    """They name a function, and not its address."""
    model = sx.nn.MultiHeadAttention(4, 2, rngs=sx.Rngs(0))
    selection = sx.select(model).at_instances_of(sx.nn.Linear)
    for text in (repr(model), sx.view.to_text(model), str(selection)):
        assert "function softmax" in text
        assert " at 0x" not in text


def test_to_html_without_treescope_has_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "treescope", None)
    model = Tied()
    model.name = "<tied>"
    page = sx.view.to_html(model, title="A & B")
    assert "<title>A &amp; B</title>" in page
    assert "name=&#x27;&lt;tied&gt;&#x27;," in page
    assert "<pre>Tied(  # 8 parameters\n" in page


def test_describing_a_leaf_reads_nothing() -> None:
    lazy = sx.Param(sx.Init(jax.nn.initializers.ones, (2,)))
    assert describe(drawing_of(lazy)) == "Param(float32[2], lazy)"
    assert lazy.is_lazy
