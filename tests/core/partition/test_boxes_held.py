# SPDX-License-Identifier: Apache-2.0
"""Boxes that Variables, States and Modules hold: laid out and shown as boxes in plain trees are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.partition import LogicallyPartitioned, Partitioned
from tests.core.partition.own_boxes import Split

RULES = sx.Rules({"embed": "data", "mlp": "model"})
ARRAY = np.arange(128.0, dtype=np.float32).reshape(8, 16)


def test_boxes_inside_variables_and_states_count(mesh: Mesh) -> None:
    variable = sx.OptState(Partitioned(ARRAY, ("data", None)))
    assert sx.shardings(variable, mesh) == NamedSharding(mesh, P("data", None))
    state = sx.State({"mu": {"w": LogicallyPartitioned(ARRAY, ("embed", "mlp"))}})
    assert sx.partition_specs(state, RULES).flat() == {("mu", "w"): P("data", "model")}
    sx.shard(variable, mesh)
    assert variable.value.value.sharding == NamedSharding(mesh, P("data", None))
    placed = sx.shard(state, mesh, RULES)["mu"]["w"]
    assert placed.names == ("embed", "mlp") and placed.value.sharding.spec == P("data", "model")


def test_boxes_in_modules_and_variables_are_laid_out(auto_mesh: Mesh) -> None:
    class Model(sx.Module):
        def __init__(self) -> None:
            self.weight = Partitioned(jnp.asarray(ARRAY), (None, "model"))
            self.split = [Split(jnp.asarray(ARRAY), "data")]
            self.moment = sx.OptState(LogicallyPartitioned(jnp.asarray(ARRAY), ("embed", "mlp")))

    model = Model()
    expected = {
        ("weight",): P(None, "model"),
        ("split", 0): P("data"),
        ("moment",): P("data", "model"),
    }
    assert sx.partition_specs(model, RULES).flat() == expected
    assert sx.abstract(model, auto_mesh, RULES).split[0].over == "data"
    further = {sx.PathContains("split"): P("data", "model")}
    sx.shard(model, auto_mesh, RULES, overrides=further)
    placed = {path: box.value.sharding.spec for path, box in sx.state(model).flat().items()}
    assert placed == {
        ("weight",): P(None, "model"),
        ("split", 0): P("data", "model"),
        ("moment",): P("data", "model"),
    }
    assert model.moment.value.names == ("embed", "mlp")
    rows = {row.path: (row.axes, row.shard_shape) for row in sx.view.sharding(model).rows}
    assert rows == {
        ("weight",): ((None, "model"), (8, 4)),
        ("split", 0): (("data", None), (4, 4)),
        ("moment",): (("embed", "mlp"), (4, 4)),
    }
    assert ".split[0]  8x16" in str(sx.view.sharding(model))
    assert str(sx.view.sharding(model.moment)).splitlines()[1].startswith(".value  8x16")
