# SPDX-License-Identifier: Apache-2.0
"""Pictures of models: one line per Variable, sharing and cycles shown, never a value."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings

import shardax as sx
from tests.strategies import Node, OtherNode, models


class Pair(NamedTuple):
    first: Any
    second: Any


def test_model_prints_as_tree_with_parameter_count() -> None:
    model = Node()
    lazy = sx.Init(jax.nn.initializers.ones, (1000, 3))
    model.kernel = sx.Param(lazy, axes=("embed", None))
    model.rate, model.table, model.calls = 0.5, np.ones(3, np.float32), sx.Variable(0)
    model.layers = [OtherNode(), model.kernel]
    model.sizes, model.entries = [1, 2], {"en-us": sx.Param(1.0)}
    assert (
        repr(model)
        == """\
Node(  # 3,001 parameters
  kernel=Param(float32[1000, 3], lazy, axes=('embed', None)),
  rate=0.5,
  calls=Variable(int32[]),
  layers=List(
    OtherNode(),
    <same Param as .kernel>,
  ),
  sizes=List([1, 2]),
  entries=Dict(
    'en-us': Param(float32[]),
  ),
  table=float32[3],
)"""
    )


def test_cycles_through_containers_methods_and_partials_end() -> None:
    model = OtherNode()
    model.w = sx.Param(jnp.ones(2))
    model.pair = Pair((model, 1), [model])
    model.method = model.act
    model.partial = functools.partial(max, model.w, key=model)
    assert (
        repr(model)
        == """\
OtherNode(  # 2 parameters
  w=Param(float32[2]),
  pair=Pair(
    first=tuple(
      <same OtherNode as (root)>,
      1,
    ),
    second=List(
      <same OtherNode as (root)>,
    ),
  ),
  method=method act(
    <same OtherNode as (root)>,
  ),
  partial=partial(
    <built-in function max>,
    <same Param as .w>,
    key=<same OtherNode as (root)>,
  ),
)"""
    )


def test_long_model_is_cut_with_a_hint() -> None:
    model = Node()
    model.items = [sx.Param(1.0) for _ in range(300)]
    lines = repr(model).splitlines()
    assert len(lines) == 201
    assert lines[-1] == "... 104 more lines (sx.view.to_text shows all)"


def test_model_without_parameters_has_no_count() -> None:
    assert repr(Node()) == "Node()"
    model = Node()
    model.n = sx.Variable(0)
    assert repr(model) == "Node(\n  n=Variable(int32[]),\n)"


def test_printing_materialises_nothing_and_works_while_tracing() -> None:
    model = Node()
    model.w = sx.Param(sx.Init(jax.nn.initializers.ones, (2,)))
    repr(model)
    assert model.w.is_lazy
    seen: list[str] = []
    jax.jit(lambda m: seen.append(repr(m)) or m.w.value)(model)
    assert seen == ["Node(  # 2 parameters\n  w=Param(float32[2]),\n)"]


@given(model=models())
@settings(max_examples=20)
def test_repr_of_a_model_shows_each_object_once(model: Any) -> None:
    text = repr(model)
    drawn = text.count("Param(") + text.count("Custom(")
    kinds = [v for _, v in sx.iter_variables(model) if isinstance(v, sx.Param)]
    assert drawn == len(kinds) or "more lines" in text


def test_model_of_mapped_strings_prints() -> None:
    variable = sx.Param(jnp.ones(2))
    mapped = jax.tree.map(lambda leaf: "frozen", variable)
    assert repr(mapped) == "Param('frozen')"
