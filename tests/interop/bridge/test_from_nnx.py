# SPDX-License-Identifier: Apache-2.0
"""An NNX module inside a shardax Module does what it does in Flax, under every transform."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.advice import run_advice


class Peer(nnx.Module):
    """A layer of each kind of state: parameters, statistics, random streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        with_axes = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        with nnx.use_eager_sharding(False):
            self.layers = nnx.List([nnx.Linear(4, 8, kernel_init=with_axes, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(jax.nn.relu(self.norm(self.layers[0](x)))))


class Model(sx.Module):
    def __init__(self, body: Any) -> None:
        self.body = body

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.body(x)


def pair() -> tuple[Peer, Model]:
    make = lambda: Peer(nnx.Rngs(0, dropout=1))  # noqa: E731
    return make(), Model(sx.bridge.from_nnx(make()))


X = jnp.arange(12.0).reshape(3, 4) / 12


def test_variables_have_kinds_axes_and_paths_of_peer() -> None:
    _, model = pair()
    found = {
        path[2:]: (type(variable), variable.axes) for path, variable in sx.iter_variables(model)
    }
    assert found == {
        ("dropout", "rngs", "count"): (sx.RngState, None),
        ("dropout", "rngs", "key"): (sx.RngState, None),
        ("layers", 0, "bias"): (sx.Param, None),
        ("layers", 0, "kernel"): (sx.Param, ("embed", "mlp")),
        ("norm", "bias"): (sx.Param, None),
        ("norm", "mean"): (sx.BatchStat, None),
        ("norm", "scale"): (sx.Param, None),
        ("norm", "var"): (sx.BatchStat, None),
        ("out", "bias"): (sx.Param, None),
        ("out", "kernel"): (sx.Param, None),
    }


def test_calls_equal_peer_and_update_its_state() -> None:
    peer, model = pair()
    compiled = sx.jit(lambda model, x: model(x))
    for _ in range(3):
        np.testing.assert_allclose(compiled(model, X), peer(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.body.variables["norm"]["mean"].value, peer.norm.mean[...])
    assert int(model.body.variables["dropout"]["rngs"].count.value) == 3


def test_eval_and_train_reach_peer_layers() -> None:
    peer, model = pair()
    for each in (model, peer):
        each(X)
        each.eval()
    np.testing.assert_array_equal(model(X), peer(X))
    np.testing.assert_array_equal(model(X), model(X))
    model.train()
    peer.train()
    np.testing.assert_array_equal(model(X), peer(X))


def test_call_compiles_once() -> None:
    _, model = pair()
    traces = []

    @sx.jit
    def run(model: Model, x: jax.Array) -> jax.Array:
        traces.append(0)
        return model(x)

    for _ in range(3):
        run(model, X)
    assert len(traces) == 1


def test_training_steps_equal_those_of_nnx() -> None:
    peer, model = pair()
    theirs = nnx.Optimizer(peer, optax.adam(0.1), wrt=nnx.Param)
    ours = sx.train.Optimizer(model, optax.adam(0.1))

    @nnx.jit
    def their_step(peer: Peer, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda peer: jnp.mean((peer(x) - 1) ** 2))(peer)
        optimizer.update(peer, gradients)
        return loss

    @sx.jit
    def our_step(model: Model, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradients = sx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(gradients)
        return loss

    for _ in range(4):
        np.testing.assert_allclose(our_step(model, ours, X), their_step(peer, theirs, X), rtol=1e-5)
    for path, value in nnx.to_flat_state(nnx.state(peer, nnx.Param)):
        mine = sx.state(model).flat()["body", "variables", *path]
        np.testing.assert_allclose(mine, value[...], rtol=1e-5, atol=1e-6)


def test_streams_of_the_peer_split_under_vmap() -> None:
    model = sx.bridge.from_nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    split = sx.StateAxes([(sx.RngState, 0), (..., None)])
    rows = sx.vmap(lambda model, x: model(x), in_axes=(split, 0))(model, jnp.ones((2, 64)))
    assert not jnp.array_equal(rows[0], rows[1])
    assert int(model.variables["rngs"].count.value) == 1


def test_bridged_layers_are_vmapped_scanned_and_stacked() -> None:
    make = lambda rngs: sx.bridge.from_nnx(nnx.Linear(4, 4, rngs=nnx.Rngs(rngs())))  # noqa: E731
    ensemble = sx.vmap(make)(sx.Rngs(0).fork(split=3))
    assert ensemble.variables["kernel"].shape == (3, 4, 4)
    rows = sx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(ensemble, X)
    kernels = ensemble.variables["kernel"].value
    np.testing.assert_allclose(rows, jnp.einsum("be,nef->nbf", X, kernels), rtol=1e-5)

    def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return layer(x), None

    result, _ = sx.scan(step)(X, ensemble)
    np.testing.assert_allclose(result, X @ kernels[0] @ kernels[1] @ kernels[2], rtol=1e-4)


def test_bridged_model_is_sharded_by_rules() -> None:
    _, model = pair()
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    peer, _ = pair()
    sx.shard(model, mesh, sx.Rules({"mlp": "model", "embed": None}))
    kernel = model.body.variables["layers"][0]["kernel"]
    assert kernel.value.sharding.spec == P(None, "model")
    np.testing.assert_allclose(sx.jit(lambda m, x: m(x))(model, X), peer(X), atol=1e-5)


def test_checkpoints_restore_a_bridged_model(tmp_path: Any) -> None:
    _, model = pair()
    model(X)
    _, other = pair()
    with sx.train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.restore(other)
    np.testing.assert_array_equal(other(X), model(X))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_of_a_bridged_model_compute(copied: Any) -> None:
    _, model = pair()
    model.eval()
    other = copied(model)
    np.testing.assert_array_equal(other(X), model(X))
    for _, variable in sx.iter_variables(other, sx.Param):
        variable.value = 0 * variable.value
    assert np.abs(model(X)).max() > 0 and not np.asarray(other(X)).any()


class Sows(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "seen", x)
        return x


@pytest.mark.filterwarnings("ignore:Using 'Module:DeprecationWarning")
def test_values_sown_by_the_peer_are_popped() -> None:
    model = sx.bridge.from_nnx(Sows())
    for x in (1.0, 2.0):
        model(jnp.float32(x))
    assert [float(x) for x in sx.pop(model, sx.Intermediate)["variables"]["seen"]] == [1.0, 2.0]
    model(jnp.float32(3))
    assert [float(x) for x in sx.pop(model, sx.Intermediate)["variables"]["seen"]] == [3.0]


def test_caches_that_a_method_makes_are_variables() -> None:
    attention = lambda: nnx.MultiHeadAttention(  # noqa: E731
        2, 4, decode=True, rngs=nnx.Rngs(0)
    )
    peer, model = attention(), sx.bridge.from_nnx(attention())
    peer.init_cache((1, 5, 4))
    model.call("init_cache", (1, 5, 4))
    assert {path[1] for path, _ in sx.iter_variables(model, sx.Cache)} >= {"cached_key"}
    for x in jnp.eye(4)[:3]:
        np.testing.assert_allclose(model(x[None, None]), peer(x[None, None]), rtol=1e-6)


def test_shared_variables_of_the_peer_are_one() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.second = self.first

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(self.first(x))

    model = sx.bridge.from_nnx(Tied())
    assert len(list(sx.iter_variables(model))) == 2
    x = jnp.ones((1, 2))
    gradients = sx.grad(lambda model: model(x).sum())(model)
    theirs = nnx.grad(lambda peer: peer(x).sum())(Tied())
    np.testing.assert_allclose(
        gradients["variables"]["first"]["kernel"], theirs["first"]["kernel"][...], rtol=1e-6
    )


def test_user_variable_kinds_are_selected_by_name() -> None:
    model = sx.bridge.from_nnx(nnx.LoRA(2, 1, 2, rngs=nnx.Rngs(0)))
    assert [type(v) for _, v in sx.iter_variables(model, "LoRAParam")] == [sx.Param, sx.Param]


def test_class_instead_of_module_is_refused() -> None:
    with pytest.raises(sx.bridge.BridgeError, match=r"the class .*Linear: make an instance"):
        sx.bridge.from_nnx(nnx.Linear)


def test_missing_flax_error_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flax.nnx", None)
    with pytest.raises(ImportError, match=r"from_nnx needs flax: pip install 'flax>=0.12.8'"):
        sx.bridge.from_nnx(object())


class Holder(sx.Module):
    def __init__(self, part: Any) -> None:
        self.part = part


FOREIGN = {
    "attribute 'part' of Holder": lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    "item 1 of a list in attribute 'part' of Holder": lambda: [1, nnx.Param(jnp.ones(2))],
    "entry 'a' of a dict in attribute 'part' of Holder": lambda: {"a": (nnx.BatchStat(1.0), 2)},
}


@pytest.mark.parametrize(("where", "make"), FOREIGN.items(), ids=FOREIGN)
def test_module_refuses_parts_of_flax_by_place(where: str, make: Any) -> None:
    with pytest.raises(sx.errors.StaticAttributeError, match=f"of Flax as {where}: no transform"):
        Holder(make())


def test_module_says_how_a_part_of_flax_is_taken() -> None:
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    holder = Holder([])
    with pytest.raises(sx.errors.StaticAttributeError) as caught:
        holder.part.append(module.kernel)
    names = {"sx": sx, "module": module, "variable": module.kernel}
    layer = run_advice(caught.value, "sx.bridge.from_nnx(module)", names)
    parameter = run_advice(caught.value, "sx.Param(variable[...])", names)
    streams = run_advice(caught.value, "sx.Rngs(0)", names)
    model = Holder([layer, parameter, streams])
    assert [*sx.state(model, sx.Param).flat()][-1] == ("part", 1)
    assert (model.part[0](jnp.ones((1, 2))) == module(jnp.ones((1, 2)))).all()
