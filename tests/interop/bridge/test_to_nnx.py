# SPDX-License-Identifier: Apache-2.0
"""A shardax model inside NNX: its arrays are nnx.Variables, which the transforms of NNX train."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardax as sx


class Model(sx.Module):
    """Parameters with axes in a list, statistics, dropout, a plain array."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.layers = [sx.nn.Linear(4, 8, rngs=rngs), sx.nn.Linear(8, 2, rngs=rngs)]
        self.norm = sx.nn.BatchNorm(8, momentum=0.5)
        self.dropout = sx.nn.Dropout(0.5, rngs=rngs)
        self.shift = jnp.ones((1, 2))

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = self.dropout(jax.nn.relu(self.norm(self.layers[0](x))))
        return self.layers[1](hidden) + self.shift


X = jnp.arange(12.0).reshape(3, 4) / 12


def model() -> Model:
    return Model(sx.Rngs(0))


def test_variables_have_kinds_paths_and_axes_of_model() -> None:
    found = {
        path[1:]: (type(variable), variable.get_metadata().get("out_sharding"))
        for path, variable in nnx.to_flat_state(nnx.state(sx.bridge.to_nnx(model())))
    }
    names: Any = model().layers[0].kernel.axes
    assert found == {
        ("dropout", "stream", "count"): (nnx.RngState, None),
        ("dropout", "stream", "key"): (nnx.RngState, None),
        ("layers", "0", "bias"): (nnx.Param, names[1:]),
        ("layers", "0", "kernel"): (nnx.Param, names),
        ("layers", "1", "bias"): (nnx.Param, names[1:]),
        ("layers", "1", "kernel"): (nnx.Param, names),
        ("norm", "bias"): (nnx.Param, ("embed",)),
        ("norm", "mean"): (nnx.BatchStat, ("embed",)),
        ("norm", "scale"): (nnx.Param, ("embed",)),
        ("norm", "var"): (nnx.BatchStat, ("embed",)),
        ("shift",): (nnx.Variable, None),
    }


def test_training_steps_of_nnx_equal_those_of_shardax() -> None:
    ours, theirs = model(), sx.bridge.to_nnx(model())
    our_optimizer = sx.train.Optimizer(ours, optax.adam(0.1))
    their_optimizer = nnx.Optimizer(theirs, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def their_step(peer: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda peer: jnp.mean((peer(x) - 1) ** 2))(peer)
        optimizer.update(peer, gradients)
        return loss

    @sx.jit
    def our_step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = sx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(gradients)
        return loss

    for _ in range(4):
        np.testing.assert_allclose(
            their_step(theirs, their_optimizer, X), our_step(ours, our_optimizer, X), rtol=1e-5
        )
    for path, value in sx.state(ours).flat().items():
        part: Any = theirs.variables
        for key in path:
            part = getattr(part, str(key))
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            assert bool(part.get_value() == value)
        else:
            np.testing.assert_allclose(part.get_value(), value, rtol=1e-5, atol=1e-6)


def test_model_is_not_changed() -> None:
    given = model()
    peer = sx.bridge.to_nnx(given)
    peer(X)
    assert given.norm.mean.value.tolist() == [0.0] * 8
    assert peer.variables.norm.mean.get_value().tolist() != [0.0] * 8


def test_round_trip_keeps_results_and_axes() -> None:
    there = sx.bridge.to_nnx(model())
    back = sx.bridge.from_nnx(there)
    expected = model()
    for _ in range(3):
        np.testing.assert_allclose(sx.jit(lambda m: m(X))(back), expected(X), rtol=1e-6)
    kernel = back.variables["variables"]["layers"]["0"]["kernel"]
    assert (type(kernel), kernel.axes) == (sx.Param, expected.layers[0].kernel.axes)

    peer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    again = sx.bridge.to_nnx(sx.bridge.from_nnx(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    np.testing.assert_array_equal(again(jnp.ones((1, 2))), peer(jnp.ones((1, 2))))


def test_states_of_nnx_are_loaded_into_it() -> None:
    trained, fresh = sx.bridge.to_nnx(model()), sx.bridge.to_nnx(Model(sx.Rngs(5)))
    nnx.update(fresh, nnx.state(trained))
    np.testing.assert_array_equal(fresh(X), trained(X))


def test_nnx_vmaps_over_models() -> None:
    @nnx.vmap
    def make(seed: jax.Array) -> Any:
        return sx.bridge.to_nnx(sx.nn.Linear(4, 2, rngs=sx.Rngs(jax.random.key(seed))))

    rows = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(make(jnp.arange(3)), X)
    expected = [sx.nn.Linear(4, 2, rngs=sx.Rngs(jax.random.key(i)))(X) for i in range(3)]
    np.testing.assert_allclose(rows, jnp.stack(expected), rtol=1e-5)


def test_sown_values_become_nnx_intermediates() -> None:
    class Sows(sx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow("seen", x)
            return x

    peer = sx.bridge.to_nnx(Sows())
    peer(jnp.float32(1))
    peer(jnp.float32(2))
    seen = dict(nnx.to_flat_state(nnx.pop(peer, nnx.Intermediate)))["variables", "seen"]
    assert [float(x) for x in seen.get_value()] == [1.0, 2.0]
    peer(jnp.float32(3))
    seen = dict(nnx.to_flat_state(nnx.pop(peer, nnx.Intermediate)))["variables", "seen"]
    assert [float(x) for x in seen.get_value()] == [3.0]


def test_class_instead_of_module_is_refused() -> None:
    with pytest.raises(sx.bridge.BridgeError, match=r"the class .*Linear: make an instance"):
        sx.bridge.to_nnx(cast(Any, sx.nn.Linear))


@pytest.mark.parametrize("name", ["items", "update", "_hidden"])
def test_layer_may_have_any_name(name: str) -> None:
    class Model(sx.Module):
        def __init__(self) -> None:
            setattr(self, name, sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return getattr(self, name)(x)

    model, x = Model(), jnp.ones((1, 2))
    peer = sx.bridge.to_nnx(model)
    assert (peer(x) == model(x)).all()
    gradients = nnx.grad(lambda peer: peer(x).sum())(peer)
    assert gradients["variables"][name]["kernel"].get_value().tolist() == [[1.0] * 3] * 2


def test_keys_of_equal_nnx_names_are_refused() -> None:
    model = sx.nn.Sequential()
    model.table = {0: sx.Param(jnp.ones(2)), "0": sx.Param(jnp.zeros(2))}
    with pytest.raises(sx.bridge.BridgeError, match=r"\.table\[0\] and \.table\['0'\]"):
        sx.bridge.to_nnx(model)
