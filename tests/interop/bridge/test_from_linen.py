# SPDX-License-Identifier: Apache-2.0
"""A Linen module inside a shardax Module does what it does in Flax, its collections kept."""

from __future__ import annotations

from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx


class Peer(linen.Module):
    """Parameters with names, statistics and dropout."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        x = linen.Dense(8, kernel_init=init)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = linen.Dropout(0.5, deterministic=not train)(jax.nn.relu(x))
        return linen.Dense(2)(x)


X = jnp.arange(12.0).reshape(3, 4) / 12
SEEDS = {"params": 0, "dropout": 1}


def bridged() -> Any:
    return sx.bridge.from_linen(Peer(), X, rngs=sx.Rngs(**SEEDS))


def apply(variables: Any, x: jax.Array, **options: Any) -> Any:
    return Peer().apply(variables, x, **options)


def peer_variables() -> Any:
    """What Linen makes with the same keys, the first ones of the same streams."""
    rngs = sx.Rngs(**SEEDS)
    return linen.unbox(Peer().init({"params": rngs.params(), "dropout": rngs.dropout()}, X))


def test_collections_become_variables_with_axes_of_boxes() -> None:
    found = {
        path[1:]: (type(variable), variable.axes)
        for path, variable in sx.iter_variables(bridged())
        if path[0] == "variables"
    }
    assert found == {
        ("batch_stats", "BatchNorm_0", "mean"): (sx.BatchStat, None),
        ("batch_stats", "BatchNorm_0", "var"): (sx.BatchStat, None),
        ("params", "BatchNorm_0", "bias"): (sx.Param, None),
        ("params", "BatchNorm_0", "scale"): (sx.Param, None),
        ("params", "Dense_0", "bias"): (sx.Param, None),
        ("params", "Dense_0", "kernel"): (sx.Param, ("embed", "mlp")),
        ("params", "Dense_1", "bias"): (sx.Param, None),
        ("params", "Dense_1", "kernel"): (sx.Param, None),
    }


def test_initial_variables_equal_those_of_linen() -> None:
    jax.tree.map(
        np.testing.assert_array_equal,
        sx.state(bridged())["variables"].to_pure_dict(),
        peer_variables(),
    )


def test_training_steps_equal_those_of_linen() -> None:
    model, variables, rngs = bridged(), peer_variables(), sx.Rngs(**SEEDS)
    rngs.dropout()  # the one of the initialisation
    optimizer = sx.train.Optimizer(model, optax.sgd(0.1))

    @sx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        loss, gradients = sx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(gradients)
        return loss

    @jax.jit
    def their_step(variables: Any, key: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            result, written = apply(
                {**variables, "params": params}, X, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            return jnp.mean((result - 1) ** 2), written

        (value, written), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradients)
        return value, {"params": params, **written}

    for _ in range(4):
        expected, variables = their_step(variables, rngs.dropout())
        np.testing.assert_allclose(step(model, optimizer, X), expected, rtol=1e-5)
    jax.tree.map(
        lambda mine, theirs: np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6),
        sx.state(model)["variables"].to_pure_dict(),
        variables,
    )
    np.testing.assert_allclose(
        model(X, train=False), apply(variables, X, train=False), rtol=1e-5, atol=1e-6
    )


def test_call_writes_nothing_that_linen_leaves_alone() -> None:
    model = sx.bridge.from_linen(linen.Dense(3), X, rngs=sx.Rngs(0))
    before = dict(sx.iter_variables(model))
    values = {path: variable.value for path, variable in before.items()}
    model(X)
    assert all(variable.value is values[path] for path, variable in before.items())


def test_default_stream_is_drawn_only_when_needed() -> None:
    model = sx.bridge.from_linen(Peer(), X, rngs=sx.Rngs(0))
    drawn = int(model.rngs.default.count.value)
    model(X, train=False)
    assert int(model.rngs.default.count.value) == drawn
    first, second = model(X), model(X)
    assert int(model.rngs.default.count.value) == drawn + 2
    assert not jnp.array_equal(first, second)


def test_missing_stream_raises_the_error_of_linen() -> None:
    model = sx.bridge.from_linen(linen.Dropout(0.5, deterministic=False).bind({}))
    with pytest.raises(Exception, match=r"needs PRNG"):
        model(X)


def test_bound_modules_keep_their_variables() -> None:
    variables = peer_variables()
    model = sx.bridge.from_linen(Peer().bind(variables))
    np.testing.assert_array_equal(model(X, train=False), apply(variables, X, train=False))


def test_caches_are_written_by_each_call() -> None:
    attention = linen.MultiHeadDotProductAttention(2, decode=True)
    model = sx.bridge.from_linen(attention, jnp.ones((1, 5, 4)), rngs=sx.Rngs(params=0))
    variables = sx.state(model)["variables"].to_pure_dict()
    assert {path[2] for path, _ in sx.iter_variables(model, sx.Cache)} == {
        "cache_index",
        "cached_key",
        "cached_value",
    }
    run = sx.jit(lambda model, x: model(x))
    for x in jnp.eye(4)[:3, None, None]:
        expected, written = attention.apply(variables, x, mutable=["cache"])
        variables = {**variables, **written}
        np.testing.assert_allclose(run(model, x), expected, rtol=1e-6)


class Sows(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("losses", "size", x)
        self.sow("intermediates", "seen", x)
        self.put_variable("calls", "last", x)
        return self.perturb("inner", x) ** 2


def test_sown_values_are_popped_other_collections_tagged() -> None:
    model = sx.bridge.from_linen(Sows(), jnp.float32(0), rngs=sx.Rngs(params=0))
    sx.pop(model, sx.Intermediate)
    for x in (1.0, 3.0):
        model(jnp.float32(x))
    assert [float(v.value) for _, v in sx.iter_variables(model, "calls")] == [3.0]
    assert sx.pop(model, sx.Intermediate).to_pure_dict() == {
        "variables": {"losses": {"size": (1.0, 3.0)}}
    }
    gradients = sx.grad(lambda model: model(jnp.float32(3)), wrt=sx.Perturbation)(model)
    assert float(gradients["variables"]["perturbations"]["inner"]) == 6.0


def test_from_linen_calls_other_methods_by_name() -> None:
    model = sx.bridge.from_linen(linen.Embed(5, 2), jnp.int32([0]), rngs=sx.Rngs(0))
    table = model.variables["params"]["embedding"].value
    np.testing.assert_allclose(model.call("attend", jnp.ones((1, 2))), table.sum(1)[None])


def test_bridged_model_is_sharded_by_rules_and_vmapped() -> None:
    model = bridged()
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    sx.shard(model, mesh, sx.Rules({"mlp": "model", "embed": None}))
    kernel = model.variables["params"]["Dense_0"]["kernel"]
    assert kernel.value.sharding.spec == P(None, "model")
    np.testing.assert_allclose(
        sx.jit(lambda model: model(X, train=False))(model),
        apply(peer_variables(), X, train=False),
        atol=1e-5,
    )
    dense = lambda rngs: sx.bridge.from_linen(linen.Dense(4), X, rngs=rngs)  # noqa: E731
    ensemble = sx.vmap(dense)(sx.Rngs(0).fork(split=3))
    rows = sx.vmap(lambda layer: layer(X))(ensemble)
    np.testing.assert_allclose(
        rows, jnp.einsum("be,nef->nbf", X, ensemble.variables["params"]["kernel"]), rtol=1e-5
    )


def test_models_are_initialised_into_shards() -> None:
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    rules = sx.Rules({"mlp": "model", "embed": None})
    model = sx.initialise(bridged, mesh=mesh, rules=rules)
    kernel = model.variables["params"]["Dense_0"]["kernel"].value
    assert kernel.sharding.spec == P(None, "model")
    np.testing.assert_allclose(kernel, peer_variables()["params"]["Dense_0"]["kernel"], rtol=1e-6)


def test_from_linen_refuses_what_is_no_linen_module() -> None:
    with pytest.raises(sx.bridge.BridgeError, match=r"the class .*Dense: make an instance"):
        sx.bridge.from_linen(linen.Dense)
    with pytest.raises(sx.errors.ModuleError, match=r"sx.Rngs\(0\)"):
        sx.bridge.from_linen(linen.Dense(2), X, rngs=0)
