# SPDX-License-Identifier: Apache-2.0
"""Without rules, names of mesh axes are used as such, and other names are not silently ignored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import named, nn
from shardax.errors import MetadataError, PartitionError
from shardax.partition import (
    LogicallyPartitioned,
    batch_sharding,
    get_sharding,
    with_logical_constraint,
)


def linear(*axes: Any) -> Any:
    return nn.Linear(8, 16, kernel_axes=axes, rngs=sx.Rngs(0))


def codes(findings: Any) -> list[tuple[str, str, Any]]:
    return [(finding.severity, finding.code, finding.path) for finding in findings]


def test_mesh_axis_names_split_lazy_model_and_dependents(mesh: Mesh) -> None:
    model = linear("data", "model")
    expected = {("kernel",): P("data", "model"), ("bias",): P("model")}
    assert sx.check(model, mesh) == []
    assert {k: s.spec for k, s in sx.shardings(model, mesh).flat().items()} == expected
    assert sx.abstract(model, mesh).kernel.sharding == NamedSharding(mesh, P("data", "model"))
    with jax.set_mesh(mesh):
        assert sx.partition_specs(model).flat() == expected
    sx.shard(model, mesh)
    assert model.kernel.sharding == NamedSharding(mesh, P("data", "model"))
    assert model.bias.sharding == NamedSharding(mesh, P("model"))
    assert sx.check(model, mesh) == []


def test_specs_without_rules_or_mesh_keep_the_names(mesh: Mesh) -> None:
    model = linear("data", "model")
    specs = sx.partition_specs(model)
    assert specs.flat() == {("kernel",): P("data", "model"), ("bias",): P("model")}
    assert sx.partition_specs(model, {}).flat() == {("kernel",): P(None, None), ("bias",): P(None)}
    total = sx.shard_map(
        lambda m: jax.lax.psum(m.kernel.value.sum(), ("data", "model")),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P(),
    )(model)
    np.testing.assert_allclose(total, np.asarray(model.kernel.value).sum(), rtol=1e-5)


def test_mesh_axis_names_split_states_and_merged_dimensions(mesh: Mesh) -> None:
    merged = sx.Param(jnp.ones((8, 4)), axes=(("data", "model"), None))
    tree = {"state": sx.state(linear(None, "model")), "merged": merged}
    places = sx.shardings(tree, mesh)
    assert places["state"].kernel.spec == P(None, "model")
    assert places["merged"].spec == P(("data", "model"), None)
    assert sx.shard(named.ones({"model": 4, "x": 3}), mesh).sharding.spec == P("model", None)
    box = LogicallyPartitioned(jnp.ones((8, 4)), ("data", None))
    assert get_sharding({"box": box}, mesh)["box"].spec == P("data", None)
    with jax.set_mesh(mesh):
        assert sx.unbox(box).sharding == NamedSharding(mesh, P("data", None))
    assert batch_sharding(("data", None), mesh).spec == P("data", None)


def test_indivisible_mesh_axis_is_refused_as_by_rule(mesh: Mesh) -> None:
    weight = sx.Param(jnp.ones((6, 4)), axes=("model", None))
    assert codes(sx.check({"w": weight}, mesh)) == [("error", "indivisible", ("w",))]


def test_names_that_nothing_maps_are_findings_by_path(mesh: Mesh) -> None:
    model = linear("embed", "model")
    [finding] = sx.check(model, mesh)
    assert codes([finding]) == [("warning", "unmapped-name", ("kernel",))]
    assert str(finding).startswith(
        ".kernel: nothing maps the axis names 'embed': there are no rules, and the mesh has the "
        "axes (data=2, model=4)"
    )
    assert sx.shard(model, mesh).kernel.sharding.spec == P(None, "model")
    abstract = AbstractMesh((2, 4), ("data", "model"))
    assert codes(sx.check(model, abstract)) == [("warning", "unmapped-name", ("kernel",))]


def test_empty_rules_replicate_on_purpose(mesh: Mesh) -> None:
    model = linear("data", "model")
    assert sx.shard(model, mesh, {}).kernel.sharding.spec == P(None, None)


def test_given_rules_decide_and_omissions_are_findings(mesh: Mesh) -> None:
    model, rules = linear("embed", "model"), {"embed": "data"}
    assert sx.partition_specs(model, rules).kernel == P("data", None)
    assert codes(sx.check(model, mesh, rules)) == [
        ("warning", "unmapped-name", ("kernel",)),
        ("warning", "unmapped-name", ("bias",)),
    ]
    with sx.axis_rules(rules):
        assert sx.shardings(model, mesh).kernel.spec == P("data", None)


def test_constraints_accept_mesh_axes_without_rules(mesh: Mesh) -> None:
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P()))
    calls = [
        lambda x: sx.constrain(x, ("data", "model"), mesh),
        lambda x: with_logical_constraint(x, ("data", "model"), mesh=mesh),
    ]
    for call in calls:
        for run in (call, jax.jit(call)):
            with jax.set_mesh(mesh):
                assert run(x).sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    with pytest.raises(PartitionError, match=r"'embed' is no axis of the mesh \(data=2, model=4\)"):
        sx.constrain(x, ("data", "embed"), mesh)
    with pytest.raises(PartitionError, match="'batch' is no axis of the mesh"):
        batch_sharding(("batch", None), mesh)


def test_initialise_accepts_mesh_axes_and_keeps_empty_rules(mesh: Mesh) -> None:
    def init(key: jax.Array) -> Any:
        return {"w": sx.Param(jax.random.normal(key, (8, 4)), axes=("data", "model"))}

    made = sx.initialise(init, jax.random.key(0), mesh=mesh)["w"]
    assert made.sharding == NamedSharding(mesh, P("data", "model"))
    with pytest.raises(PartitionError, match=r"\.w: "):
        sx.initialise(init, jax.random.key(0), mesh=mesh, rules={})


def test_ignored_constraint_still_places_on_given_mesh(mesh: Mesh) -> None:
    for array in (np.ones((8, 4), np.float32), jnp.ones((8, 4))):
        free = sx.constrain(array, ["embed", "mlp"], mesh, None, on_no_mesh="ignore")
        assert free.sharding == NamedSharding(mesh, P(None, None))
        part = sx.constrain(array, ["data", "mlp"], mesh, None, on_no_mesh="ignore")
        assert part.sharding == NamedSharding(mesh, P("data", None))
        assert sx.constrain(array, ["embed", None], on_no_mesh="ignore").shape == (8, 4)


@pytest.mark.parametrize("option", ["names", "sharding", "sharding_names", "out_sharding"])
def test_wrong_keyword_for_names_is_refused_with_fix(option: str) -> None:
    value = jnp.ones((2, 3))
    for kind in (sx.Param, sx.Variable, sx.OptState):
        with pytest.raises(MetadataError, match=r"axes=\(None, 'model'\)\)"):
            kind(value, **{option: (None, "model")})
    with pytest.raises(MetadataError, match=r"axes=\('data',\)"):
        sx.Param(value, **{option: P("data")})
    variable = sx.Param(value)
    with pytest.raises(MetadataError, match="dimensions are named by axes="):
        variable.set_metadata(**{option: ("a", "b")})
    variable.set_metadata(**{option: None})
    assert dict(variable.metadata) == dict(sx.Param(value, **{option: None}).metadata) == {}
