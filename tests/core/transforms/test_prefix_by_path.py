# SPDX-License-Identifier: Apache-2.0
"""``sx.prefix``: axes and shardings of a model by path or filter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import PrefixError, TransformError
from tests.advice import run_advice
from tests.strategies import Node


def _model() -> Node:
    model = Node()
    model.w, model.stat = sx.Param(jnp.arange(4.0)), sx.BatchStat(jnp.float32(2))
    model.inner = {"scale": jnp.ones(4)}
    return model


def _scaled(model: Any) -> Any:
    model.stat.value = model.stat.value + 0
    return model.w * model.stat * model.inner["scale"]


def test_prefix_by_path_and_filter_maps_alike() -> None:
    by_path = sx.prefix(_model(), lambda path, part: None if path == ("stat",) else 0)
    by_filter = sx.prefix(_model(), {sx.BatchStat: None, ...: 0})
    assert by_path.flat() == by_filter.flat() == {("w",): 0, ("stat",): None, ("inner", "scale"): 0}
    results = [
        sx.vmap(_scaled, in_axes=(axes,))(_model()).tolist()
        for axes in (by_path, sx.StateAxes(by_path), {"w": 0, "stat": None, "inner": {"scale": 0}})
    ]
    assert results == [[0.0, 2.0, 4.0, 6.0]] * 3


def test_prefix_of_container_keeps_its_form() -> None:
    axes = sx.prefix((_model(), sx.Param(jnp.ones(4)), jnp.ones(3)), {sx.Param: 0, ...: None})
    assert (axes[0].flat()[("w",)], axes[1:]) == (0, (0, None))


def test_prefix_as_module_is_one_for_jax() -> None:
    def scaled(tree: Any) -> Any:
        return tree["model"].w.value * tree["model"].stat.value * tree["x"]

    tree = {"model": _model(), "x": jnp.ones(4)}
    tree["model"].tied = tree["model"].w
    axes = sx.prefix(tree, {sx.BatchStat: None, ...: 0}, as_module=True)
    assert type(axes["model"]) is Node and axes["model"].tied is axes["model"].w
    assert jax.vmap(scaled, in_axes=(axes,))(tree).tolist() == [0.0, 2.0, 4.0, 6.0]
    others = sx.prefix(tree, {sx.BatchStat: None, ...: 0})
    assert sx.vmap(scaled, in_axes=(others,))(tree).tolist() == [0.0, 2.0, 4.0, 6.0]
    with pytest.raises(PrefixError, match=r"is a Node\. Give one entry, a State of entries"):
        sx.vmap(scaled, in_axes=(axes,))(tree)


def test_prefix_of_a_state_goes_by_what_its_values_were() -> None:
    state = sx.state(_model())
    by_filter = sx.prefix([state], {sx.BatchStat: None, ...: 0})
    by_path = sx.prefix([state], lambda path, part: None if path == (0, "stat") else 0)
    assert by_filter[0].flat() == {("w",): 0, ("stat",): None, ("inner", "scale"): 0}
    assert by_filter == by_path
    for vmap in (jax.vmap, sx.vmap):
        run = vmap(lambda states: states[0].w * states[0].stat, in_axes=(by_filter,))
        assert run([state]).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_prefix_of_shardings_lays_out(auto_mesh: Mesh) -> None:
    over = NamedSharding(auto_mesh, PartitionSpec("model"))
    model = _model()
    shardings = sx.prefix(model, lambda path, part: over if path == ("w",) else None)
    sx.jit(lambda model: model.w.sum(), in_shardings=(shardings,))(model)
    assert model.w.sharding == over


def test_prefix_without_one_entry_is_refused() -> None:
    with pytest.raises(PrefixError, match=r"No filter matches the BatchStat at \.stat"):
        sx.prefix(_model(), {sx.Param: 0})
    axis: Any = 0
    with pytest.raises(PrefixError, match="takes a mapping from filters to entries") as caught:
        sx.prefix(_model(), axis)
    model = _model()
    names = {"sx": sx, "model": model, "rest": ...}
    axes = run_advice(caught.value, "sx.prefix(model, {sx.Param: 0, ...: None})", names)
    assert axes.flat() == {("w",): 0, ("stat",): None, ("inner", "scale"): None}
    model.tied = model.w
    with pytest.raises(TransformError, match=r"\.w: 0\n.*\.tied: None"):
        sx.prefix(model, lambda path, part: None if path == ("tied",) else 0)
    assert jax.tree.leaves(sx.prefix(model, lambda path, part: 0)) == [0, 0, 0]
