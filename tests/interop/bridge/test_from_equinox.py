# SPDX-License-Identifier: Apache-2.0
"""An Equinox module inside a shardax Module does what it does in Equinox, its state kept."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.advice import run_advice


class Peer(eqx.Module):
    """Parameters, an integer array, state, a key and static fields."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    order: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array) -> None:
        self.first = eqx.nn.Linear(4, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", momentum=0.5, mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.order = jnp.arange(8)[::-1]
        self.activation = jax.nn.relu

    def __call__(self, x: jax.Array, state: Any, *, key: Any = None) -> Any:
        norm = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        x, state = norm(jax.vmap(self.first)(x), state)
        return self.dropout(self.activation(x)[:, self.order], key=key), state


X = jnp.arange(12.0).reshape(3, 4) / 12


def made() -> Any:
    return eqx.nn.make_with_state(Peer)(jax.random.key(0))


def bridged() -> Any:
    return sx.bridge.from_equinox(*made(), rngs=sx.Rngs(dropout=1))


def test_arrays_and_state_become_variables_of_their_kind() -> None:
    found = {
        path: type(variable) for path, variable in sx.iter_variables(bridged()) if path[0] != "rngs"
    }
    assert found == {
        ("variables", "first", "weight"): sx.Param,
        ("variables", "first", "bias"): sx.Param,
        ("variables", "norm", "weight"): sx.Param,
        ("variables", "norm", "bias"): sx.Param,
        ("variables", "order"): sx.Variable,
        ("state", "Peer.norm.batch_counter"): sx.BatchStat,
        ("state", "Peer.norm.batch_state_index", 0): sx.BatchStat,
        ("state", "Peer.norm.batch_state_index", 1): sx.BatchStat,
    }


def test_training_steps_equal_those_of_equinox() -> None:
    model, (peer, state), rngs = bridged(), made(), sx.Rngs(dropout=1)
    ours, theirs = sx.train.Optimizer(model, optax.adam(0.1)), optax.adam(0.1)
    memory = theirs.init(eqx.filter(peer, eqx.is_inexact_array))

    @sx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        loss, gradients = sx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(gradients)
        return loss

    @eqx.filter_jit
    def their_step(peer: Any, state: Any, memory: Any, key: jax.Array) -> Any:
        def loss(peer: Any) -> Any:
            result, new = peer(X, state, key=key)
            return jnp.mean((result - 1) ** 2), new

        (value, new), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(peer)
        updates, memory = theirs.update(gradients, memory)
        return value, eqx.apply_updates(peer, updates), new, memory

    for _ in range(4):
        expected, peer, state, memory = their_step(peer, state, memory, rngs.dropout())
        np.testing.assert_allclose(step(model, ours, X), expected, rtol=1e-5)
    np.testing.assert_allclose(
        model.variables["first"]["weight"], peer.first.weight, rtol=1e-5, atol=1e-6
    )
    mean, _ = state.get(peer.norm.batch_state_index)
    np.testing.assert_allclose(model.state["Peer.norm.batch_state_index"][0], mean, rtol=1e-5)
    model.eval()
    expected, _ = eqx.nn.inference_mode(peer)(X, state)
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-6)
    model.train()
    assert not jnp.array_equal(model(X), model(X))


def test_module_with_initial_state_is_bridged_alone() -> None:
    model = sx.bridge.from_equinox(Peer(jax.random.key(0)), rngs=sx.Rngs(dropout=1))
    np.testing.assert_array_equal(model(X), bridged()(X))
    module, state = made()
    with pytest.raises(sx.bridge.BridgeError, match="make_with_state") as caught:
        sx.bridge.from_equinox(module)
    names = {"sx": sx, "module": module, "state": state}
    run_advice(caught.value, "sx.bridge.from_equinox(module, state)", names)


def test_calls_under_named_vmap_keep_state() -> None:
    make = lambda: eqx.nn.BatchNorm(4, "batch", mode="ema")  # noqa: E731
    model = sx.bridge.from_equinox(make())
    peer, state = eqx.nn.make_with_state(make)()
    for _ in range(2):
        rows = sx.vmap(lambda model, x: model(x), in_axes=(None, 0), axis_name="batch")(model, X)
        batched = jax.vmap(peer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        expected, state = batched(X, state)
        np.testing.assert_allclose(rows, expected, rtol=1e-5)
    index: Any = peer.ema_state_index
    mean, _ = state.get(index)
    np.testing.assert_allclose(model.state["BatchNorm.ema_state_index"][0], mean, rtol=1e-6)


def mlp(seed: Any) -> Any:
    key = seed if isinstance(seed, jax.Array) else jax.random.key(seed)
    return sx.bridge.from_equinox(eqx.nn.MLP(4, 4, 8, 1, key=key))


def test_equal_modules_share_structure_and_compiled_program() -> None:
    assert sx.graphdef(mlp(0)) == sx.graphdef(mlp(1))
    traces = []

    @sx.jit
    def run(model: Any, x: jax.Array) -> Any:
        traces.append(0)
        return model(x)

    for seed in range(3):
        run(mlp(seed), X[0])
    assert len(traces) == 1


def test_bridged_models_are_vmapped_scanned_and_differentiated() -> None:
    ensemble = sx.vmap(lambda rngs: mlp(rngs()))(sx.Rngs(0).fork(split=3))
    assert ensemble.variables["layers"][0]["weight"].shape == (3, 8, 4)

    def step(x: jax.Array, layer: Any) -> Any:
        return layer(x), None

    result, _ = sx.scan(step)(X[0], ensemble)
    expected = X[0]
    weights = sx.state(ensemble)["variables"]["layers"].to_pure_dict()
    for i in range(3):
        hidden = jax.nn.relu(weights[0]["weight"][i] @ expected + weights[0]["bias"][i])
        expected = weights[1]["weight"][i] @ hidden + weights[1]["bias"][i]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-6)
    gradients = sx.grad(lambda model: model(X[0]).sum())(mlp(0))
    theirs = eqx.filter_grad(lambda peer: peer(X[0]).sum())(
        eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    )
    np.testing.assert_allclose(
        gradients["variables"]["layers"][0]["weight"], theirs.layers[0].weight, rtol=1e-6
    )


def test_bridged_model_is_sharded_and_restored_from_checkpoints(tmp_path: Any) -> None:
    model, mesh = mlp(0), jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    expected = jax.vmap(mlp(0))(X)
    model.variables["layers"][0]["weight"].set_metadata(axes=("mlp", "embed"))
    sx.shard(model, mesh, sx.Rules({"mlp": "model", "embed": None}))
    weight = model.variables["layers"][0]["weight"]
    assert weight.value.sharding.spec == P("model", None)
    run = sx.jit(lambda model, x: jax.vmap(model)(x))
    np.testing.assert_allclose(run(model, X), expected, rtol=1e-5)
    other = mlp(1)
    with sx.train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.restore(other)
    np.testing.assert_allclose(jax.vmap(other)(X), expected, rtol=1e-5)


def test_class_instead_of_module_is_refused() -> None:
    with pytest.raises(sx.bridge.BridgeError, match=r"the class .*Linear: make an instance"):
        sx.bridge.from_equinox(eqx.nn.Linear)


def test_results_without_the_state_are_refused() -> None:
    class Forgets(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __call__(self, x: jax.Array, state: Any) -> Any:
            return x

    model = sx.bridge.from_equinox(Forgets(eqx.nn.BatchNorm(2, "batch", mode="ema")))
    with pytest.raises(sx.bridge.BridgeError, match=r"returns \(result, state\)"):
        model(X)


def test_bridged_module_is_pickled() -> None:
    bridged, x = sx.bridge.from_equinox(Peer(jax.random.key(0)), rngs=sx.Rngs(0)), jnp.ones((2, 4))
    bridged.eval()
    copy = pickle.loads(pickle.dumps(bridged))
    assert sx.graphdef(copy) == sx.graphdef(bridged)
    np.testing.assert_array_equal(copy(x), bridged(x))
