# SPDX-License-Identifier: Apache-2.0
"""Shardings as text and HTML: of arrays, of models, and of what is not there yet."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PartitionCheckError, ViewError
from tests.advice import run_advice
from tests.tools.view.drawings import text_of

RULES = sx.Rules({"embed": "data", "mlp": "model"})


class Layer(sx.Module):
    """Two lazy parameters, one of them without names."""

    def __init__(self) -> None:
        self.up = sx.Param(sx.Init(jax.nn.initializers.ones, (8, 16)), axes=("embed", "mlp"))
        self.shift = sx.Param(sx.Init(jax.nn.initializers.zeros, (16,)))


class Tower(sx.Module):
    """Layers in a list, and a parameter that two paths reach."""

    def __init__(self) -> None:
        self.layers = [Layer() for _ in range(3)]
        self.head = sx.Param(sx.Init(jax.nn.initializers.ones, (16, 8)), axes=("mlp", None))
        self.tied = self.head


TABLE = """\
path                shape  dtype    split                    shard  copies  bytes/device
.layers[0-2].up     8x16   float32  embed: data, mlp: model  4x4         1      3 x 64 B
.layers[0-2].shift  16     float32                           16          8      3 x 64 B
.head               16x8   float32  mlp: model               4x8         2         128 B
mesh data=2, model=4; 512 B per device, 2.2 KiB in all"""


# --- a model -------------------------------------------------------------------------------------


def test_lazy_model_shows_future_layout_and_stays_lazy(auto_mesh: Mesh) -> None:
    model = Tower()
    assert str(sx.view.sharding(model, auto_mesh, RULES)) == TABLE
    assert str(sx.view.sharding(model, auto_mesh.abstract_mesh, RULES)) == TABLE
    with jax.set_mesh(auto_mesh), sx.axis_rules(RULES):
        assert str(sx.view.sharding(model)) == TABLE
    assert all(variable.is_lazy for _, variable in sx.iter_variables(model))


def test_live_model_shows_actual_layout_regardless_of_scope(auto_mesh: Mesh) -> None:
    model = sx.shard(Tower(), auto_mesh, RULES)
    other = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(other), sx.axis_rules({"embed": "rows"}):
        assert str(sx.view.sharding(model)) == TABLE
        assert "embed: rows" in str(sx.view.sharding(model, other))


def test_sharding_shows_size_per_device_of_every_array(auto_mesh: Mesh) -> None:
    view = sx.view.sharding(Tower(), auto_mesh, RULES)
    assert [(row.path, row.shard_shape, row.copies, row.bytes_per_device) for row in view.rows] == [
        *(
            entry
            for i in range(3)
            for entry in (
                (("layers", i, "up"), (4, 4), 1, 64),
                (("layers", i, "shift"), (16,), 8, 64),
            )
        ),
        (("head",), (4, 8), 2, 128),
    ]
    assert view.bytes_per_device == 512


def test_differently_placed_layers_have_separate_rows(auto_mesh: Mesh) -> None:
    model = sx.shard(Tower(), auto_mesh, RULES)
    middle: Any = model.layers[1]
    sx.shard(middle, auto_mesh, {})
    lines = [line.split()[0] for line in str(sx.view.sharding(model)).splitlines()]
    assert lines[1:5] == [".layers[0-2].up", ".layers[0-2].shift", ".layers[1].up", ".head"]


def test_sharding_without_mesh_shows_no_splits() -> None:
    text = str(sx.view.sharding(Tower()))
    assert "no mesh; 2.2 KiB per device, 2.2 KiB in all" in text
    assert "model" not in text


def test_pytrees_states_streams_and_pytree_values_have_tables(auto_mesh: Mesh) -> None:
    array = jax.device_put(np.zeros((8, 4), np.float32), NamedSharding(auto_mesh, P("data")))
    view = sx.view.sharding({"plain": array, "stats": sx.Variable({"mean": jnp.ones(3)})})
    assert [(row.path, row.split) for row in view.rows] == [
        (("plain",), "0: data"),
        (("stats", "mean"), ""),
    ]
    assert len(sx.view.sharding(sx.state(Layer())).rows) == 2
    assert len(sx.view.sharding(sx.Rngs(0)).rows) == 2


def test_model_html_has_row_with_picture_per_line(auto_mesh: Mesh) -> None:
    view = sx.view.sharding(Tower(), auto_mesh, RULES)
    page = ElementTree.fromstring(f"<div>{view.html()}</div>")
    rows = list(page.iter("tr"))
    cells = [[cell.text or "" for cell in row][:-1] for row in rows]
    assert cells[1] == [
        ".layers[0-2].up", "8x16", "float32", "embed: data, mlp: model", "4x4", "1", "3 x 64 B",
    ]  # fmt: skip
    assert [len(list(row.iter("span"))) for row in rows] == [0, 8, 1, 4]
    labels = [[span.text.strip() for span in row.iter("span") if span.text] for row in rows]
    assert labels[1:] == [list("01234567"), ["0-7"], ["0,4", "1,5", "2,6", "3,7"]]
    assert view._repr_html_() == view.html()
    assert "<script" not in view.html()


def test_unplaceable_array_is_reported_by_path(auto_mesh: Mesh) -> None:
    narrow = sx.Param(jnp.ones((8, 15)), axes=("embed", "mlp"))
    with pytest.raises(PartitionCheckError, match=r"\.narrow"):
        sx.view.sharding({"narrow": narrow}, auto_mesh, RULES)


# --- one array -----------------------------------------------------------------------------------


def test_array_is_a_picture_with_a_caption(auto_mesh: Mesh) -> None:
    array = jax.device_put(np.zeros((8, 8), np.float32), NamedSharding(auto_mesh, P("data")))
    view = sx.view.sharding(array)
    caption = "float32[8, 8] as [4, 8] on each device, 4 copies; P('data',) over data=2, model=4"
    assert str(view) == f"{caption}\n{text_of(array)}"
    assert str(sx.view.sharding(sx.Param(array))) == str(view)
    figure = ElementTree.fromstring(view.html())
    assert figure[-1].text == caption
    assert len({span.attrib["style"] for span in figure.iter("span")}) == 2


def test_lazy_variable_shows_future_layout(auto_mesh: Mesh) -> None:
    up = Layer().up
    expected = "float32[8, 16] as [4, 4] on each device, 1 copy; P('data', 'model')"
    assert str(sx.view.sharding(up, auto_mesh, RULES)).startswith(expected)
    with jax.set_mesh(auto_mesh), sx.axis_rules(RULES):
        assert str(sx.view.sharding(up)).startswith(expected)
    assert up.is_lazy


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("x",), P("x")),
        (("x",), P(None, "x")),
        (("x", "y"), P("y", "x")),
        (("x", "y"), P(("y", "x"))),
        (("x", "y", "z"), P(("z", "x"), "y")),
        (("x", "y", "z"), P(None, ("y", "x"))),
        (("x", "y", "z"), P()),
    ],
)
def test_abstract_mesh_has_picture_of_concrete_one(axes: Any, spec: P) -> None:
    sizes = {1: (8,), 2: (2, 4), 3: (2, 2, 2)}[len(axes)]
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
    real, planned = (
        jax.ShapeDtypeStruct((8, 16), np.float32, sharding=NamedSharding(where, spec))
        for where in (mesh, mesh.abstract_mesh)
    )
    labels = re.compile(r"(?:CPU|device) ([\d,-]+)")
    assert labels.findall(text_of(planned)) == labels.findall(text_of(real))
    pages = [sx.view.sharding_html(array) for array in (planned, real)]
    fills, labels_of_pages = (
        [pattern.findall(page) for page in pages]
        for pattern in (re.compile("background-color: #[0-9a-f]+"), labels)
    )
    assert labels_of_pages[0] == labels_of_pages[1] and set(fills[0]) == set(fills[1])


def test_middle_devices_are_elided_on_large_meshes() -> None:
    mesh = AbstractMesh((64, 16), ("data", "model"))
    sharding = NamedSharding(mesh, P("data", "model"))
    array = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=sharding)
    lines = text_of(array).splitlines()
    assert {len(line) for line in lines} == {99}
    assert len(lines) == 2 * 16 + 1
    labels = [[text.strip() for text in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert labels[0] == [*(f"device {i}" for i in range(5)), "…", "device 15"]
    assert set(labels[-2]) == {"…"}
    assert labels[-1] == [*(f"device {1008 + i}" for i in range(5)), "…", "device 1023"]
    page = sx.view.sharding_html(array)
    assert "device 1023" in page and "device 500" not in page and "…" in page
    (row,) = re.findall("<tr>.*?</tr>", sx.view.sharding({"large": array}).html(), re.DOTALL)[1:]
    assert row.count("background-color") == 12 and "1023" in row and "500" not in row


def test_sharding_refuses_what_is_not_laid_out(auto_mesh: Mesh) -> None:
    for value in (Layer().up, jax.ShapeDtypeStruct((3,), np.float32)):
        with pytest.raises(ViewError, match="no sharding to show") as caught:
            sx.view.sharding(value)
    names = {"sx": sx, "model": Layer().up, "mesh": auto_mesh, "rules": RULES}
    planned = run_advice(caught.value, "sx.view.sharding(model, mesh, rules)", names)
    run_advice(caught.value, "sx.shard(model, mesh, rules)", names)
    assert str(sx.view.sharding(names["model"])) == str(planned)
    with pytest.raises(ViewError, match="inspect_array_sharding"):
        jax.jit(lambda x: (sx.view.sharding(x), x)[1])(jnp.ones(3))


# --- States of shardings -------------------------------------------------------------------------


def test_state_of_shardings_or_specs_prints_as_table(auto_mesh: Mesh) -> None:
    layer = Layer()
    assert str(sx.shardings(layer, auto_mesh, RULES)) == (
        "State of shardings over the mesh data=2, model=4\n"
        "  path    axes        spec\n"
        "  .up     embed, mlp  P('data', 'model')\n"
        "  .shift              P()"
    )
    assert repr(sx.partition_specs(layer, RULES)) == (
        "State of specs\n"
        "  path    axes        spec\n"
        "  .up     embed, mlp  P('data', 'model')\n"
        "  .shift              P()"
    )


def test_shardings_over_several_meshes_say_over_which() -> None:
    kinds = (AxisType.Auto, AxisType.Explicit)
    small = AbstractMesh((2,), ("x",), axis_types=kinds[:1])
    large = AbstractMesh((2, 4), ("x", "y"), axis_types=kinds)
    state = sx.State(
        {
            "a": NamedSharding(small, P("x")),
            "b": {"c": (NamedSharding(large, P("y")), NamedSharding(large, P()))},
        }
    )
    assert str(state) == (
        "State of shardings\n"
        "  path     axes  spec     mesh\n"
        "  .a             P('x',)  x=2\n"
        "  .b.c[0]        P('y',)  x=2, y=4 (Explicit)\n"
        "  .b.c[1]        P()      x=2, y=4 (Explicit)"
    )


def test_state_of_other_values_prints_them() -> None:
    assert str(sx.State({"a": jnp.ones(2)})) == "State(\n  .a: float32[2]\n)"
    assert str(sx.State()) == "State()"
