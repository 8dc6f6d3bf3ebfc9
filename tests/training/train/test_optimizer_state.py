# SPDX-License-Identifier: Apache-2.0
"""The state of an Optimizer is lazy, named like the parameters, and goes where they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.partition.resolved import ResolvedRules
from shardax.train import Optimizer
from tests.training.train.towers import (
    RULES,
    TRANSFORMATIONS,
    Tower,
    X,
    loss,
    params_of,
    train_step,
)

# --- laziness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "MultiSteps", "copies of the parameters", "factored"])
def test_making_one_for_a_lazy_model_allocates_nothing(name: str) -> None:
    before = {id(array) for array in jax.live_arrays()}
    model = Tower()
    optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []
    assert all(variable.is_lazy for _, variable in sx.iter_variables(optimizer, sx.OptState))
    assert all(variable.is_lazy for _, variable in sx.iter_variables(model, sx.Param))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_lazy_state_becomes_what_init_computes(name: str) -> None:
    model = Tower()
    tx = TRANSFORMATIONS[name]()
    optimizer = Optimizer(model, tx)
    found = jax.tree.leaves(sx.state(optimizer.opt_state))
    leaves = jax.tree.leaves(tx.init(sx.state(model, sx.Param)))
    expected = [leaf for leaf in leaves if not isinstance(leaf, str) and not callable(leaf)]
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == jnp.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def test_state_uses_parameter_values_at_first_use() -> None:
    model = Tower()
    optimizer = Optimizer(model, optax.contrib.schedule_free_adamw(0.1))
    model.head.value = jnp.full((8, 4), 7.0)  # as when a checkpoint is restored into a lazy model
    copies = [
        v for p, v in sx.iter_variables(optimizer.opt_state) if p[-1:] == ("head",) and "z" in p
    ]
    assert [bool((copy == 7).all()) for copy in copies] == [True]


def test_state_has_names_axes_and_shapes_of_parameters() -> None:
    optimizer = Optimizer(Tower(), optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    found = {
        path: (variable.axes, variable.shape, str(variable.dtype))
        for path, variable in sx.iter_variables(optimizer.opt_state)
    }
    assert found == {
        (0, "count"): (None, (), "int32"),
        (0, "mu", "layers", 0, "kernel"): (("embed", "mlp"), (4, 8), "bfloat16"),
        (0, "mu", "layers", 0, "bias"): (("mlp",), (8,), "bfloat16"),
        (0, "mu", "head"): (("mlp", "embed"), (8, 4), "bfloat16"),
        (0, "nu", "layers", 0, "kernel"): (("embed", "mlp"), (4, 8), "float32"),
        (0, "nu", "layers", 0, "bias"): (("mlp",), (8,), "float32"),
        (0, "nu", "head"): (("mlp", "embed"), (8, 4), "float32"),
    }


def test_state_of_another_rank_keeps_remaining_axes() -> None:
    factored = Optimizer(Tower(), optax.adafactor(0.1, min_dim_size_to_factor=2)).opt_state[0]
    assert factored["v_row"]["layers"][0]["kernel"].axes == ("embed",)
    assert factored["v_col"]["layers"][0]["kernel"].axes == ("mlp",)
    assert factored["v"]["layers"][0]["kernel"].axes is None  # a placeholder of shape (1,)
    history = Optimizer(Tower(), optax.lbfgs(0.1, memory_size=3, linesearch=None)).opt_state[0]
    assert history["diff_params_memory"]["head"].axes == (None, "mlp", "embed")


# --- shardings ------------------------------------------------------------------------------------


def shardings_of(tree: Any) -> dict[Any, PartitionSpec]:
    """Returns specs without trailing None, by path."""
    found = {}
    for path, variable in sx.iter_variables(tree):
        entries = list(variable.value.sharding.spec)
        while entries and entries[-1] is None:
            entries.pop()
        found[path] = PartitionSpec(*entries)
    return found


@pytest.mark.parametrize(
    "name", ["adamw", "copies of the parameters", "factored", "distance from the start"]
)
def test_state_goes_straight_into_shards_beside_its_parameters(name: str, mesh: Mesh) -> None:
    model, plain = Tower(), Tower()
    optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    sx.shard((model, optimizer), mesh, RULES)
    unsharded = Optimizer(plain, TRANSFORMATIONS[name]())
    for (path, a), (_, b) in zip(
        sx.iter_variables(optimizer, sx.OptState),
        sx.iter_variables(unsharded, sx.OptState),
        strict=True,
    ):
        spec, findings = ResolvedRules(mesh, RULES).spec(a.axes, a.shape, path)
        assert findings == [] and a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)
        np.testing.assert_array_equal(a.value, b.value)


@pytest.mark.parametrize("name", ["adamw", "copies of the parameters", "history", "random key"])
@pytest.mark.parametrize("order", ["model sharded first", "optimizer made first"])
def test_state_follows_the_shardings_of_the_parameters(name: str, order: str, mesh: Mesh) -> None:
    model = Tower()
    if order == "model sharded first":
        sx.shard(model, mesh, RULES)
        optimizer = Optimizer(model, TRANSFORMATIONS[name]())
    else:
        optimizer = Optimizer(model, TRANSFORMATIONS[name]())
        sx.shard(model, mesh, RULES)
    for path, variable in sx.iter_variables(optimizer, sx.OptState):
        spec, _ = ResolvedRules(mesh, RULES).spec(variable.axes, variable.shape, path)
        sharding = variable.value.sharding
        assert sharding.is_equivalent_to(NamedSharding(mesh, spec), variable.ndim), path


def test_sharded_step_equals_one_device_and_keeps_shardings(mesh: Mesh) -> None:
    traces = []

    @sx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        traces.append(1)
        value, grads = sx.value_and_grad(loss)(model, x)
        optimizer.update(grads)
        return value

    model, plain = Tower(), Tower()
    optimizer, unsharded = Optimizer(model, optax.adamw(1e-2)), Optimizer(plain, optax.adamw(1e-2))
    sx.shard((model, optimizer), mesh, RULES)
    before = shardings_of((model, optimizer))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        for _ in range(3):
            step(model, optimizer, x)
    assert shardings_of((model, optimizer)) == before
    assert len(traces) == 1
    for _ in range(3):
        train_step(plain, unsharded, X)
    for path, value in params_of(model).items():
        np.testing.assert_allclose(value, params_of(plain)[path], rtol=1e-4, atol=1e-6)
