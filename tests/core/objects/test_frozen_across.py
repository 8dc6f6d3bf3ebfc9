# SPDX-License-Identifier: Apache-2.0
"""Frozen values and slots in what stands above the core: optimizers, stacks, layouts, loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import shardax as sx
from shardax.errors import ModuleAttributeError
from shardax.nn.stack import stack_layers, unstack_layers

X = jnp.ones((2, 4))
RULES = [("embed", None), ("mlp", "model")]


def mlp(seed: Any = 0) -> sx.nn.MLP:
    return sx.nn.MLP(4, 8, rngs=sx.Rngs(seed))


def loss(model: Any) -> Any:
    return (model(X) ** 2).mean()


def test_optimizer_trains_what_is_not_frozen() -> None:
    model = sx.freeze(mlp(), sx.PathContains("up"))
    optimizer = sx.train.Optimizer(model, optax.sgd(0.1))

    @sx.jit
    def step(model: Any, optimizer: Any) -> Any:
        gradients = sx.grad(loss)(model)
        optimizer.update(gradients)
        return gradients

    up, down = model.up.kernel.value, model.down.kernel.value
    assert list(step(model, optimizer)) == ["gate", "down"]
    assert model.up.kernel.value is up
    assert not np.array_equal(model.down.kernel.value, down)


def test_frozen_values_are_what_optax_trains() -> None:
    slots, params = sx.unbind(mlp(), freeze=True)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradients = jax.grad(lambda params: loss(sx.bind(slots, params)))(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    live = mlp()
    optimizer = sx.train.Optimizer(live, tx)
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
        sx.jit(lambda m, o: o.update(sx.grad(loss)(m)))(live, optimizer)
    trained = sx.thaw(sx.bind(slots, params))
    assert np.allclose(trained.up.kernel.value, live.up.kernel.value, atol=1e-6)


def test_optax_state_layout_follows_frozen_values() -> None:
    _, params = sx.unbind(mlp(), sx.PathContains("down"), freeze=True)
    specs = sx.partition_specs(optax.adam(1e-2).init(params), RULES)
    assert specs[0].mu == specs[0].nu == (PartitionSpec("model", None),)


def test_initialise_writes_frozen_values_into_their_shards(auto_mesh: Any) -> None:
    def init(key: Any) -> Any:
        return sx.unbind(mlp(key), freeze=True)

    slots, frozen = sx.initialise(init, jax.random.key(0), mesh=auto_mesh, rules=RULES)
    model = sx.thaw(sx.bind(slots, frozen))
    assert model.up.kernel.sharding.spec == PartitionSpec(None, "model")
    assert np.allclose(model.up.kernel.value, mlp(jax.random.key(0)).up.kernel.value)


def test_abstract_model_keeps_its_forms(auto_mesh: Any) -> None:
    half = sx.freeze(sx.unbind(mlp(), sx.PathContains("gate"))[0], sx.PathContains("down"))
    shapes = sx.abstract(half, auto_mesh, RULES)
    assert type(shapes.gate.kernel) is sx.Slot
    assert type(shapes.down.kernel) is sx.FrozenVariable and shapes.down.kernel.is_abstract
    assert shapes.down.kernel.sharding.spec == PartitionSpec("model", None)
    assert half.down.kernel.is_lazy


def test_stack_can_be_frozen_or_contain_frozen_layers() -> None:
    rngs = sx.Rngs(0)
    stack = sx.nn.Stack(lambda: sx.nn.MLP(4, 8, rngs=rngs), 3)
    frozen = sx.freeze(stack)
    assert np.array_equal(frozen(X), stack(X))
    assert frozen.stacked.up.kernel.axes == ("layers", "embed", "mlp")
    assert frozen[1].up.kernel.axes == ("embed", "mlp")
    with pytest.raises(ModuleAttributeError):
        frozen[1].up.kernel[...] = jnp.zeros((4, 8))
    layers = [sx.freeze(mlp(seed)) for seed in range(3)]
    again = stack_layers(layers)
    assert type(again.stacked.up.kernel) is sx.FrozenVariable
    assert again.stacked.up.kernel.axes == ("layers", "embed", "mlp")
    assert unstack_layers(again)[2].up.kernel == layers[2].up.kernel


@pytest.mark.parametrize("around", [sx.Jitted, sx.Remat])
def test_stack_can_be_made_of_wrapped_layers(around: Any) -> None:
    def build(wrap: Any) -> Any:
        rngs = sx.Rngs(0)
        return sx.nn.Stack(lambda: wrap(sx.nn.MLP(4, 8, rngs=rngs)), 3)

    wrapped, plain = build(around), build(lambda layer: layer)
    assert np.allclose(wrapped(X), plain(X), atol=1e-6)
    ours, theirs = sx.grad(loss)(wrapped), sx.grad(loss)(plain)
    assert np.allclose(ours.stacked.body.up.kernel, theirs.stacked.up.kernel, atol=1e-6)


def test_loops_and_choices_read_frozen_models() -> None:
    model = mlp()
    frozen = sx.freeze(model)
    expected = model(model(X))
    once = lambda x, m: m(x)  # noqa: E731
    looped = sx.fori_loop(0, 2, lambda i, x: frozen(x), X)
    scanned, _ = sx.scan(
        lambda x, i, m: (m(x), i), in_axes=(sx.Carry, 0, None), out_axes=(sx.Carry, 0)
    )(X, jnp.arange(2), frozen)
    chosen = sx.cond(True, once, lambda x, m: x, sx.cond(True, once, once, X, frozen), frozen)
    for result in (looped, scanned, chosen):
        assert np.allclose(result, expected, atol=1e-6)
