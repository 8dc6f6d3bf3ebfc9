# SPDX-License-Identifier: Apache-2.0
"""Overrides: places by filter apart from the rules, and states split further than parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import train
from shardax.errors import FilterError, PartitionCheckError, PartitionError, TransformError
from tests.advice import run_advice
from tests.core.partition.models import RULES, Layer, Tower, assert_same_bits, values

PARAMETER_RULES = {"mlp": "model", "batch": "data"}
ZERO = {sx.OptState: {"embed": "data"}}


def specs_of(tree: Any) -> dict[Any, Any]:
    return {path: value.sharding.spec for path, value in sx.state(tree).flat().items()}


# --- what an override can be ----------------------------------------------------------------------


def test_spec_override_replaces_rules_for_matches_only(mesh: Mesh) -> None:
    model = sx.shard(Layer(sx.Rngs(0)), mesh, RULES, overrides={sx.PathContains("up"): P("data")})
    assert model.up.sharding == NamedSharding(mesh, P("data"))
    assert model.down.sharding == NamedSharding(mesh, P("model", "data"))
    assert_same_bits(values(model), values(Layer(sx.Rngs(0))))


def test_sharding_may_have_another_mesh_and_memory(auto_mesh: Mesh) -> None:
    other = jax.make_mesh((2,), ("pair",), devices=jax.devices()[6:])
    place = NamedSharding(other, P(None, "pair"), memory_kind="device")
    model = sx.shard(Layer(sx.Rngs(0)), auto_mesh, RULES, overrides=[(is_down, place)])
    assert model.down.sharding == place
    assert model.up.sharding == NamedSharding(auto_mesh, P("data", "model"))


def is_down(path: Any, variable: Any) -> bool:
    return path[-1] == "down"


def test_rules_come_before_those_of_the_layout(mesh: Mesh) -> None:
    more: list[Any] = [{"mlp": None}, [("mlp", None)], sx.Rules({"mlp": None})]
    for rules in more:
        model = sx.shard(Layer(sx.Rngs(0)), mesh, RULES, overrides={is_down: rules})
        assert specs_of(model) == {("up",): P("data", "model"), ("down",): P(None, "data")}


def test_none_keeps_rules_and_first_filter_wins(mesh: Mesh) -> None:
    overrides = {is_down: None, sx.Param: P()}
    model = sx.shard(Layer(sx.Rngs(0)), mesh, RULES, overrides=overrides)
    assert specs_of(model) == {("up",): P(), ("down",): P("model", "data")}


def test_state_sharding_or_state_of_specs_is_accepted(mesh: Mesh) -> None:
    for overrides in (sx.StateSharding({is_down: P()}), sx.State({"down": P()})):
        model = sx.shard(Layer(sx.Rngs(0)), mesh, RULES, overrides=overrides)
        assert specs_of(model) == {("up",): P("data", "model"), ("down",): P()}


def test_overrides_ask_every_path_of_a_shared_variable(mesh: Mesh) -> None:
    model = sx.shard(Tower(), mesh, RULES, overrides={sx.PathContains("head"): P(None, "data")})
    assert model.embed.sharding.spec == P(None, "data")


def test_value_of_several_arrays_accepts_one_spec(mesh: Mesh) -> None:
    model = sx.shard(Tower(), mesh, RULES, overrides={sx.BatchStat: P("data")})
    assert {leaf.sharding.spec for leaf in model.stats.value.values()} == {P("data")}


def test_states_and_arrays_match_by_their_origin(mesh: Mesh) -> None:
    tree = {"state": sx.state(Layer(sx.Rngs(0))), "extra": jnp.ones(8)}
    overrides = {sx.Param: P(), sx.PathContains("extra"): P("model")}
    placed = sx.shard(tree, mesh, RULES, overrides=overrides)
    assert placed["extra"].sharding.spec == P("model")
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(placed["state"])} == {P()}


def test_specs_shardings_abstract_and_check_know_overrides(mesh: Mesh) -> None:
    model, overrides = Layer(sx.Rngs(0)), {is_down: P("data")}
    expected = {("up",): P("data", "model"), ("down",): P("data")}
    assert sx.partition_specs(model, RULES, overrides=overrides).flat() == expected
    shardings = sx.shardings(model, mesh, RULES, overrides=overrides, memory_kind="device")
    assert shardings.flat() == {
        path: NamedSharding(mesh, spec, memory_kind="device") for path, spec in expected.items()
    }
    assert specs_of(sx.abstract(model, mesh, RULES, overrides=overrides)) == expected
    assert [f.code for f in sx.check(model, mesh, RULES, overrides={is_down: P("dat")})] == [
        "unknown-mesh-axis",
        "unused-rule",
    ]
    assert model.up.is_lazy


# --- what is refused ------------------------------------------------------------------------------

MALFORMED: dict[str, Any] = {
    "a number": 3,
    "a string": "model",
    "no pairs": [sx.Param],
    "a place that is a string": {sx.Param: "model"},
    "a place that is a tuple": {sx.Param: ("data", None)},
    "a place that is a mesh": {sx.Param: AbstractMesh((2,), ("data",))},
    "rules that are malformed": {sx.Param: {"embed": 3}},
}


@pytest.mark.parametrize("overrides", MALFORMED.values(), ids=MALFORMED)
def test_malformed_overrides_are_refused_before_anything_is_computed(
    mesh: Mesh, overrides: Any
) -> None:
    model = Layer(sx.Rngs(0))
    with pytest.raises(PartitionError, match="overrides=") as caught:
        sx.shard(model, mesh, RULES, overrides=overrides)
    assert model.up.is_lazy and model.down.is_lazy
    if "list of pairs" in str(caught.value):
        names = {"sx": sx, "PartitionSpec": PartitionSpec}
        example = "{sx.OptState: {'embed': 'data'}, sx.PathContains('bias'): PartitionSpec()}"
        example = run_advice(caught.value, example, names)
        findings = sx.check(model, mesh, RULES, overrides=example)
        assert "error" not in {finding.severity for finding in findings}


def test_overrides_refuse_what_is_no_filter(mesh: Mesh) -> None:
    with pytest.raises(FilterError, match="3 of type int is not a filter"):
        sx.shard(Layer(sx.Rngs(0)), mesh, RULES, overrides={3: P()})


IMPOSSIBLE: dict[str, tuple[Any, list[str]]] = {
    "indivisible": (P(None, ("data", "model")), ["dimension 1 has size 12", "divisible by 8"]),
    "unknown-mesh-axis": (P("dat"), ["no mesh axis 'dat'", "Did you mean 'data'?"]),
    "mesh-axis-conflict": (P("data", "data"), ["mesh axis 'data' stands twice"]),
    "rank-mismatch": (P(None, None, "data"), ["has 3 entries for an array of 2 dimensions"]),
    "unconstrained": (P(PartitionSpec.UNCONSTRAINED), ["dimension 0 is UNCONSTRAINED"]),
}


@pytest.mark.parametrize("code", IMPOSSIBLE)
def test_invalid_override_is_found_before_anything_moves(mesh: Mesh, code: str) -> None:
    place, facts = IMPOSSIBLE[code]
    model = {"fine": sx.Param(jnp.ones((8, 8))), "odd": sx.Param(jnp.ones((4, 12)))}
    before = [v.value for v in model.values()]
    with pytest.raises(PartitionCheckError) as caught:
        sx.shard(model, mesh, RULES, overrides={sx.PathContains("odd"): place})
    assert [(f.code, f.path) for f in caught.value.findings] == [(code, ("odd",))]
    text = str(caught.value)
    assert [fact for fact in [*facts, "override", "'odd'"] if fact not in text] == [], text
    assert all(v.value is old for v, old in zip(model.values(), before, strict=True))


def test_sharding_without_devices_is_refused(mesh: Mesh) -> None:
    place = NamedSharding(AbstractMesh((2,), ("data",)), P())
    with pytest.raises(TransformError, match="no devices"):
        sx.shard(Layer(sx.Rngs(0)), mesh, RULES, overrides={...: place})


def test_conflicting_overrides_of_shared_variable_are_refused(mesh: Mesh) -> None:
    overrides = {sx.PathContains("head"): P("data"), sx.PathContains("embed"): P()}
    with pytest.raises(PartitionCheckError) as caught:
        sx.shard(Tower(), mesh, RULES, overrides=overrides)
    [finding] = caught.value.findings
    assert finding.code == "override-conflict"
    assert ".head" in str(finding) and ".embed" in str(finding)


def test_override_that_matches_nothing_is_a_warning(mesh: Mesh) -> None:
    found = sx.check(Layer(sx.Rngs(0)), mesh, RULES, overrides={sx.PathContains("bais"): P()})
    warned = [f for f in found if f.code == "unused-override"]
    assert [(f.severity, f.path) for f in warned] == [("warning", ())]
    assert "bais" in str(warned[0])


# --- states of optimizers split further than the parameters ---------------------------------------


class Regression(sx.Module):
    """Two layers and a scale, which no mesh axis can split."""

    def __init__(self) -> None:
        rngs = sx.Rngs(0)
        self.layers = [Layer(rngs), Layer(rngs)]
        self.scale = sx.Param(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale.value


def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = sx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(grads)
    return loss


def trained(mesh: Mesh, overrides: Any) -> tuple[list[float], Any, Any]:
    """Losses of five steps, model and optimizer, the layout being declared to the compiler."""
    model = Regression()
    optimizer = train.Optimizer(model, optax.adamw(1e-2))
    sx.shard((model, optimizer), mesh, PARAMETER_RULES, overrides=overrides)
    places = sx.shardings((model, optimizer), mesh, PARAMETER_RULES, overrides=overrides)
    step = sx.jit(train_step, in_shardings=(*places, None))
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    batch = sx.partition.batch_sharding(("batch", None), mesh, PARAMETER_RULES)
    losses = [float(step(model, optimizer, jax.device_put(x, batch))) for _ in range(5)]
    return losses, model, optimizer


def test_moments_split_over_data_train_identically(auto_mesh: Mesh) -> None:
    plain, model, _ = trained(auto_mesh, None)
    zero, zero_model, optimizer = trained(auto_mesh, ZERO)
    assert zero == pytest.approx(plain, rel=1e-6)
    assert zero[-1] < zero[0]
    for one, other in zip(values(zero_model), values(model), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    after = specs_of(zero_model)
    assert after == sx.partition_specs(zero_model, PARAMETER_RULES).flat()
    moments = sx.state(optimizer, sx.OptState).flat()
    for path, value in moments.items():
        expected = {"up": P("data", "model"), "down": P("model", "data")}.get(path[-1], P())
        assert value.sharding.is_equivalent_to(NamedSharding(auto_mesh, expected), value.ndim), path


class Curve(sx.Module):
    """One matrix, with products that are clear on every mesh."""

    def __init__(self) -> None:
        init = sx.Init(jax.nn.initializers.lecun_normal(), (8, 16), rngs=sx.Rngs(0))
        self.weight = sx.Param(init, axes=("embed", "mlp"))
        self.scale = sx.Param(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ self.weight.value) * self.scale.value


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_explicit_layout_persists_outside_programs_undeclared(
    explicit_mesh: Mesh, compiled: bool
) -> None:
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    batch = sx.partition.batch_sharding(("batch", None), explicit_mesh, PARAMETER_RULES)
    losses = []
    for overrides in (None, ZERO):
        model = Curve()
        optimizer = train.Optimizer(model, optax.adamw(1e-2))
        pair = (model, optimizer)
        sx.shard(pair, explicit_mesh, PARAMETER_RULES, overrides=overrides)
        places = sx.shardings(pair, explicit_mesh, PARAMETER_RULES, overrides=overrides)
        step = sx.jit(train_step) if compiled else train_step
        with jax.set_mesh(explicit_mesh):
            put = jax.device_put(x, batch)
            losses.append([float(step(model, optimizer, put)) for _ in range(3)])
        for part, place in zip(pair, places, strict=True):
            for path, value in sx.state(part).flat().items():
                assert value.sharding.is_equivalent_to(place.flat()[path], value.ndim), path
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0][-1] < losses[0][0]


def test_moments_split_over_data_save_device_memory(auto_mesh: Mesh) -> None:
    model = Regression()
    optimizer = train.Optimizer(model, optax.adamw(1e-2))
    sx.shard((model, optimizer), auto_mesh, PARAMETER_RULES, overrides=ZERO)
    moment = optimizer.opt_state[0]["mu"]["layers"][1]["up"]
    parameter = model.layers[1].up
    share = [v.sharding.shard_shape(v.shape) for v in (parameter, moment)]
    assert share == [(8, 4), (4, 4)]


def test_moments_can_live_in_host_memory(auto_mesh: Mesh) -> None:
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else "device"
    model = Regression()
    optimizer = train.Optimizer(model, optax.adamw(1e-2))
    pair = (model, optimizer)
    sx.shard(pair, auto_mesh, PARAMETER_RULES, overrides=ZERO, memory_kind={sx.OptState: kind})
    assert {v.sharding.memory_kind for _, v in sx.iter_variables(optimizer.opt_state)} == {kind}
    assert {v.sharding.memory_kind for _, v in sx.iter_variables(model)} == {"device"}
