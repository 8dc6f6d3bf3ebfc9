# SPDX-License-Identifier: Apache-2.0
"""Walks over the parts of a model, and models made by a function of every part."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given

import shardax as sx
from shardax.errors import ModuleError, VariableValueError
from tests.advice import run_advice
from tests.strategies import Node, Pair, assert_equal_values, models


def _model() -> Node:
    model, shared = Node(), sx.Param(jnp.ones(2), axes=("embed",), tag="slow")
    model.layers = [Node(), Node()]
    model.layers[0].kernel = model.layers[1].kernel = shared
    model.pair = Pair(sx.BatchStat(jnp.zeros(())), "text")
    model.scale = jnp.full(3, 2.0)
    return model


PARTS = [
    ((), "Node"),
    (("layers", 0), "Node"),
    (("layers", 0, "kernel"), "Param"),
    (("layers", 1), "Node"),
    (("pair", 0), "BatchStat"),
    (("scale",), "ArrayImpl"),
]


def _double(path: Any, part: Any) -> Any:
    return part * 2


def test_iter_graph_yields_each_part_once() -> None:
    model = _model()
    parts = list(sx.iter_graph(model))
    assert [(path, type(part).__name__) for path, part in parts] == PARTS
    assert parts[2][1] is model.layers[1].kernel
    assert [path for path, _ in sx.iter_graph({"a": model, "b": (model, 3)})][:2] == [
        ("a",),
        ("a", "layers", 0),
    ]
    with pytest.raises(ModuleError, match=r"sx\.iter_graph takes a model"):
        next(sx.iter_graph(Node))


def test_map_keeps_types_metadata_and_sharing() -> None:
    model = _model()
    new = sx.map(_double, model)
    assert sx.graphdef(new) == sx.graphdef(model)
    assert new.layers[0].kernel is new.layers[1].kernel is not model.layers[0].kernel
    assert [new.layers[0].kernel.tolist(), new.scale.tolist()] == [[2.0, 2.0], [4.0] * 3]
    assert (model.scale.tolist(), new.layers[0].kernel.axes) == ([2.0] * 3, ("embed",))


def test_map_takes_variables_of_other_types() -> None:
    model = _model()
    kept = sx.map(lambda path, part: part, model)
    assert kept.layers[0].kernel is not model.layers[0].kernel
    fixed = sx.map(
        lambda path, v: sx.Variable(v) if isinstance(v, sx.Param) else v, {"m": model, "n": 3}
    )
    assert (type(fixed["m"].layers[1].kernel), fixed["n"]) == (sx.Variable, 3)
    with pytest.raises(VariableValueError, match="holds arrays, but was given 'text'"):
        sx.map(lambda path, part: "text", model)


def test_map_is_carried_back_by_jit() -> None:
    model = _model()
    new = sx.jit(lambda model: sx.map(_double, model))(model)
    assert new.layers[0].kernel is new.layers[1].kernel
    assert (new.scale.tolist(), model.scale.tolist()) == ([4.0] * 3, [2.0] * 3)


@given(models())
def test_map_of_values_is_tree_map_of_state(model: Any) -> None:
    new = sx.map(lambda path, part: part, model)
    assert sx.graphdef(new) == sx.graphdef(model)
    assert_equal_values(sx.state(new), sx.state(model))


def test_recursive_map_replaces_from_inside_out() -> None:
    model, paths = _model(), []

    def replace(path: Any, part: Any) -> Any:
        paths.append(path)
        if isinstance(part, Node) and path == ("layers", 1):
            return sx.Dict(inner=part)
        return -part if path == ("scale",) else part

    new = sx.recursive_map(replace, model)
    assert paths == [
        ("layers", 0, "kernel"),
        ("layers", 0),
        ("layers", 1),
        ("pair", 0),
        ("scale",),
        (),
    ]
    assert new is not model and new.layers[0] is not model.layers[0]
    assert new.layers[0].kernel is new.layers[1]["inner"].kernel is model.layers[0].kernel
    assert (new.scale.tolist(), model.scale.tolist()) == ([-2.0] * 3, [2.0] * 3)
    assert isinstance(model.layers[1], Node) and new.pair.second == "text"


def test_recursive_map_may_change_kinds_of_parts() -> None:
    new = sx.recursive_map(
        lambda path, part: (
            "none" if path == ("scale",) else part.axes if path[-1:] == ("kernel",) else part
        ),
        _model(),
    )
    assert (new.scale, new.layers[0].kernel) == ("none", ("embed",))
    assert list(sx.state(new).flat()) == [("pair", 0)]


def test_recursive_map_refuses_cycles_by_path() -> None:
    model = Node()
    model.child = Node()
    model.child.parent = model.child
    text = r"cannot replace the Node at \.child from .* holds itself"
    with pytest.raises(ModuleError, match=text) as caught:
        sx.recursive_map(lambda path, part: part, model)
    names = {"sx": sx, "fn": lambda path, part: part, "model": model}
    new = run_advice(caught.value, "sx.map(fn, model)", names)
    assert new.child.parent is new.child is not model.child
