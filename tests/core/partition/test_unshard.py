# SPDX-License-Identifier: Apache-2.0
"""``unshard``: the inverse of ``shard``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

import shardax as sx
from shardax.errors import ModuleError, PartitionCheckError, TransformError
from tests.advice import run_advice
from tests.core.partition.models import RULES, Tower, assert_same_bits, values


def devices_of(tree: Any) -> set[Any]:
    return {leaf.sharding for leaf in jax.tree.leaves(sx.state(tree))}


def test_arrays_are_gathered_bitwise_on_default_device(mesh: Mesh) -> None:
    model = sx.shard(Tower(), mesh, RULES)
    assert sx.unshard(model) is model
    assert devices_of(model) == {SingleDeviceSharding(jax.devices()[0])}
    assert_same_bits(values(model), values(Tower()))
    assert model.head is model.embed


def test_default_device_in_scope_is_the_default(mesh: Mesh) -> None:
    model = sx.shard(Tower(depth=1), mesh, RULES)
    with jax.default_device(jax.devices()[2]):
        sx.unshard(model)
    assert devices_of(model) == {SingleDeviceSharding(jax.devices()[2])}


def test_device_can_be_named(mesh: Mesh) -> None:
    model = sx.shard(Tower(depth=1), mesh, RULES)
    sx.unshard(model, jax.devices()[3])
    assert devices_of(model) == {SingleDeviceSharding(jax.devices()[3])}


def test_lazy_values_stay_lazy() -> None:
    model = Tower()
    sx.unshard(model)
    assert model.embed.is_lazy and model.layers[1].down.is_lazy
    assert model.stats.value["mean"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_plain_arrays_and_states_return_in_new_pytree(mesh: Mesh) -> None:
    model = Tower(depth=1)
    tree = {"state": sx.state(model), "step": jnp.int32(3), "model": model, "name": "run"}
    placed = sx.shard(tree, mesh, RULES)
    gathered = sx.unshard(placed)
    assert gathered["model"] is model and gathered["name"] == "run"
    assert int(gathered["step"]) == 3
    assert {leaf.sharding for leaf in jax.tree.leaves(gathered["state"])} == {
        SingleDeviceSharding(jax.devices()[0])
    }
    assert gathered["state"].origins() == tree["state"].origins()
    assert_same_bits(values(gathered["state"]), values(Tower(depth=1)))


def test_arrays_return_from_host_memory(auto_mesh: Mesh) -> None:
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    for kind in kinds:
        model = sx.shard(Tower(depth=1), auto_mesh, RULES, memory_kind=kind)
        sx.unshard(model)
        assert devices_of(model) == {SingleDeviceSharding(jax.devices()[0])}
        assert_same_bits(values(model), values(Tower(depth=1)))


def test_unshard_refuses_what_is_no_device(mesh: Mesh) -> None:
    model = sx.shard(Tower(depth=1), mesh, RULES)
    before = devices_of(model)
    with pytest.raises(TransformError, match=r"device='cpu' is of type str.*jax.devices"):
        sx.unshard(model, "cpu")
    assert devices_of(model) == before


def test_abstract_and_deleted_arrays_are_listed_unmoved(mesh: Mesh) -> None:
    gone = sx.Param(jnp.ones(8))
    model = {
        "fine": sx.shard(sx.Param(jnp.ones((8, 8)), axes=("embed", "mlp")), mesh, RULES),
        "shape": sx.Param(jax.ShapeDtypeStruct((8,), jnp.float32)),
        "gone": gone,
    }
    before = model["fine"].value
    gone.value.delete()
    with pytest.raises(PartitionCheckError) as caught:
        sx.unshard(model)
    live = sx.Param(jnp.ones(8))
    names = {"sx": sx, "jax": jax, "jnp": jnp, "copy": sx.clone(live)}
    code = "sx.update(copy, jax.tree.map(jnp.copy, sx.state(copy)))"
    run_advice(caught.value, code, names)
    live.value.delete()
    assert float(names["copy"].sum()) == 8
    assert {finding.path: finding.code for finding in caught.value.findings} == {
        ("gone",): "deleted",
        ("shape",): "abstract",
    }
    assert model["fine"].value is before


def test_inside_a_program_it_is_refused(auto_mesh: Mesh) -> None:
    weight = sx.shard(sx.Param(jnp.ones((8, 8)), axes=("embed", "mlp")), auto_mesh, RULES)
    with pytest.raises(PartitionCheckError, match="is being traced") as caught:
        sx.jit(sx.unshard)(weight)

    @sx.jit
    def whole(x: Any) -> Any:
        return run_advice(caught.value, "sx.constrain(x, (None,) * x.ndim)", {"sx": sx, "x": x})

    with jax.set_mesh(auto_mesh):
        assert whole(weight).is_fully_replicated
    with pytest.raises((PartitionCheckError, ModuleError)):
        jax.jit(lambda w: sx.unshard(w).value)(weight)
