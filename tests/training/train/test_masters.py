# SPDX-License-Identifier: Apache-2.0
"""Optimizer(master_dtype=): narrow parameters, trained as their wide copies."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import shardax as sx
from shardax.errors import TransformError
from shardax.models import Decoder, blockwise_cross_entropy, next_token_loss
from shardax.train import Optimizer, accumulated_value_and_grad, checkpoint
from tests.models.small import BATCH, SMALL
from tests.training.train.towers import PATHS, RULES, TRANSFORMATIONS, Tower, X, loss, train_step
from tests.values import with_values


def narrow(**options: Any) -> Optimizer:
    options = {"tx": optax.adam(1e-2), "master_dtype": jnp.float32} | options
    return Optimizer(with_values(Tower(dtype=jnp.bfloat16)), options.pop("tx"), **options)


def flat(tree: Any) -> dict[Any, Any]:
    return {path: np.asarray(variable.value) for path, variable in sx.iter_variables(tree)}


def assert_rounded(optimizer: Optimizer) -> None:
    """Asserts that every parameter is its master, rounded."""
    masters = flat(optimizer.masters)
    for path in PATHS:
        param = sx.state(optimizer.model, sx.Param).flat()[path]
        assert (param.dtype, masters[path].dtype) == (jnp.bfloat16, np.float32)
        np.testing.assert_array_equal(np.asarray(param), masters[path].astype(param.dtype))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_masters_train_as_float32_parameters(name: str) -> None:
    optimizer = narrow(tx=TRANSFORMATIONS[name]())
    tx = optax.with_extra_args_support(TRANSFORMATIONS[name]())

    def step(optimizer: Optimizer, wide: Any, state: Any) -> Any:
        """Trains, and returns copies in float32 that are trained with the same gradients."""
        value, grads = sx.value_and_grad(loss)(optimizer.model, X)
        optimizer.update(grads, value=value)
        plain: Any = [grads.flat()[path].astype(jnp.float32) for path in PATHS]
        updates, state = tx.update(plain, state, wide, value=value)
        return optax.apply_updates(wide, updates), state

    def steps(optimizer: Optimizer, wide: Any, state: Any) -> Any:
        for _ in range(4):
            wide, state = step(optimizer, wide, state)
        return wide

    params = sx.state(optimizer.model, sx.Param).flat()
    wide: Any = [np.asarray(params[path], np.float32) for path in PATHS]
    if name == "static leaves":  # which are no arguments of a compiled function
        wide = sx.jit(lambda optimizer: steps(optimizer, wide, tx.init(wide)))(optimizer)
    else:
        step = sx.jit(step)
        wide = steps(optimizer, wide, tx.init(wide))
    masters = flat(optimizer.masters)
    for path, expected in zip(PATHS, wide, strict=True):
        np.testing.assert_allclose(masters[path], expected, rtol=2e-5, atol=1e-6)
    assert_rounded(optimizer)
    states = [leaf.dtype for leaf in jax.tree.leaves(sx.state(optimizer.opt_state))]
    assert jnp.bfloat16 not in states


def test_eager_updates_of_masters_equal_compiled_ones() -> None:
    gradient, update = sx.jit(sx.grad(loss)), sx.jit(lambda optimizer, g: optimizer.update(g))
    eager, compiled = narrow(tx=optax.adamw(1e-2)), narrow(tx=optax.adamw(1e-2))
    for _ in range(3):
        gradients = gradient(eager.model, X)
        eager.update(gradients)
        update(compiled, gradients)
    for path, master in flat(eager.masters).items():
        np.testing.assert_allclose(master, flat(compiled.masters)[path], rtol=2e-5, atol=1e-6)
    assert_rounded(eager)


def test_updates_too_small_for_bfloat16_add_up() -> None:
    def train(**options: Any) -> float:
        weight = sx.Param(jnp.ones((), jnp.bfloat16))
        optimizer = Optimizer(weight, optax.sgd(1e-3), **options)
        step = sx.jit(lambda optimizer: optimizer.update(jnp.ones((), jnp.bfloat16)))
        for _ in range(100):
            step(optimizer)
        return float(weight.value)

    assert train() == 1
    assert train(master_dtype="float32") == pytest.approx(0.9, abs=1 / 256)


def test_model_trains_as_in_float32() -> None:
    def train(dtype: str, master_dtype: Any = None) -> list[float]:
        config = dataclasses.replace(SMALL, param_dtype=dtype)
        model = with_values(Decoder(config, rngs=sx.Rngs(0)))
        optimizer = Optimizer(model, optax.adam(1e-3), master_dtype=master_dtype)

        @sx.jit
        def step(model: Any, optimizer: Any, batch: Any) -> Any:
            value, grads = sx.value_and_grad(next_token_loss)(model, batch)
            optimizer.update(grads)
            return value

        return [float(step(model, optimizer, BATCH)) for _ in range(60)]

    wide, mastered = train("float32"), train("bfloat16", "float32")
    assert wide[-1] < wide[0] / 2
    assert abs(mastered[-1] - wide[-1]) < 0.05 * wide[-1]
    assert abs(train("bfloat16")[-1] - wide[-1]) > abs(mastered[-1] - wide[-1])


def test_masters_are_kept_of_narrower_parameters_only() -> None:
    class Mixed(sx.Module):
        def __init__(self) -> None:
            self.narrow = sx.Param(jnp.ones(2, jnp.float16))
            self.wide = sx.Param(jnp.ones(2))

    optimizer = Optimizer(Mixed(), optax.adam(0.1), master_dtype=jnp.float32)
    assert [path for path, _ in sx.iter_variables(optimizer.masters)] == [("narrow",)]
    optimizer.update({"narrow": jnp.ones(2, jnp.float16), "wide": jnp.ones(2)})
    np.testing.assert_allclose(optimizer.model.wide.value, 0.9, rtol=1e-5)
    np.testing.assert_allclose(optimizer.masters["narrow"].value, 0.9, rtol=1e-5)
    same = Optimizer(Tower(), optax.adam(0.1), master_dtype=jnp.float32)
    assert flat(same.masters) == {}
    train_step(same.model, same, X)


def test_masters_are_lazy_with_names_and_axes() -> None:
    optimizer = narrow()
    assert all(variable.is_lazy for _, variable in sx.iter_variables(optimizer, sx.OptState))
    found = {path: (v.axes, str(v.dtype)) for path, v in sx.iter_variables(optimizer.masters)}
    assert found == {
        ("layers", 0, "kernel"): (("embed", "mlp"), "float32"),
        ("layers", 0, "bias"): (("mlp",), "float32"),
        ("head",): (("mlp", "embed"), "float32"),
    }
    moments = [path for path, _ in sx.iter_variables(optimizer.opt_state)]
    assert moments == [
        path for path, _ in sx.iter_variables(Optimizer(Tower(), optax.adam(1)).opt_state)
    ]
    optimizer.model.head.value = jnp.full((8, 4), 7, jnp.bfloat16)  # before it is first used
    assert (flat(optimizer.masters)[("head",)] == 7).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("compiled", [True, False])
def test_changed_parameter_becomes_the_value_of_its_master(dtype: str, compiled: bool) -> None:
    # Numbers of every size, normal and not, and none that an update of 0 would change.
    numbers = np.concatenate([[0, 1, -3], 10.0 ** np.arange(-9, 5)]).astype(np.float32)
    weight = sx.Param(jnp.asarray(numbers, dtype))
    optimizer = Optimizer(weight, optax.sgd(1.0), master_dtype=jnp.float32)
    update = sx.jit(lambda optimizer, grads: optimizer.update(grads)) if compiled else None
    update = update or (lambda optimizer, grads: optimizer.update(grads))
    tiny = np.asarray(numbers * 1e-4, np.float32)  # less than a rounding
    update(optimizer, tiny)
    kept = np.asarray(optimizer.masters.value)
    weight.value = weight.value.at[1].set(5)
    update(optimizer, np.zeros_like(tiny))
    masters = np.asarray(optimizer.masters.value)
    assert (masters[1], float(weight.value[1])) == (5, 5)
    np.testing.assert_array_equal(np.delete(masters, 1), np.delete(kept, 1))
    assert (kept != numbers).sum() > len(numbers) / 2


def test_masters_go_where_their_parameters_are_and_stay(mesh: Mesh) -> None:
    sharded, alone = narrow(), narrow()
    sx.shard((sharded.model, sharded), mesh, RULES)
    with jax.set_mesh(mesh):
        for _ in range(3):
            train_step(sharded.model, sharded, X)
    for _ in range(3):
        train_step(alone.model, alone, X)
    params = dict(sx.iter_variables(sharded.model, sx.Param))
    for path, master in sx.iter_variables(sharded.masters):
        assert master.value.sharding.is_equivalent_to(params[path].value.sharding, master.ndim)
        np.testing.assert_allclose(master.value, flat(alone.masters)[path], rtol=0.05, atol=0.02)
    assert_rounded(sharded)


def test_masters_may_be_split_further_than_their_parameters(mesh: Mesh) -> None:
    optimizer = narrow()
    sx.shard(optimizer.model, mesh, RULES)
    further = sx.Rules({"embed": None, "mlp": ("model", "data")})
    sx.shard((optimizer.masters, optimizer.opt_state), mesh, further)
    params, masters = optimizer.model.layers[0].kernel, optimizer.masters["layers"][0]["kernel"]
    places = [params.value.sharding, masters.value.sharding]
    assert not places[0].is_equivalent_to(places[1], 2)
    gradient = sx.jit(sx.grad(loss))
    with jax.set_mesh(mesh):
        for _ in range(2):
            train_step(optimizer.model, optimizer, X)
            optimizer.update(gradient(optimizer.model, X))
    found = [params.value.sharding, masters.value.sharding]
    # Over Auto axes a compiled step leaves the layouts of its results to the compiler.
    explicit = AxisType.Explicit in mesh.axis_types
    for one, other in zip(found, places, strict=True):
        assert one.is_equivalent_to(other, 2) or not explicit
    assert_rounded(optimizer)


def test_masters_are_in_checkpoints_pickles_and_clones(tmp_path: Any) -> None:
    optimizer = narrow()
    for _ in range(3):
        train_step(optimizer.model, optimizer, X)
    checkpoint.save((optimizer.model, optimizer), tmp_path / "run")
    restored = narrow()
    checkpoint.restore((restored.model, restored), tmp_path / "run")
    for other in (restored, sx.clone(optimizer), sx.host.loads(sx.host.dumps(optimizer))):
        train_step(other.model, other, X)
    train_step(optimizer.model, optimizer, X)
    for path, value in flat(optimizer.masters).items():
        assert (value != value.astype(jnp.bfloat16)).any()
        np.testing.assert_array_equal(value, flat(restored.masters)[path])


def test_optimizer_is_made_and_donated_in_compiled_functions() -> None:
    made = sx.jit(lambda model: Optimizer(model, optax.adam(1e-2), master_dtype="float32"))(
        with_values(Tower(dtype=jnp.bfloat16))
    )
    step = sx.jit(train_step, donate_argnames=("model", "optimizer"))
    reference = narrow()
    for _ in range(2):
        step(made.model, made, X)
        train_step(reference.model, reference, X)
    for path, value in flat(made.masters).items():
        np.testing.assert_array_equal(value, flat(reference.masters)[path])


@pytest.mark.parametrize("dtype", [int, "nonsense", jnp.complex64])
def test_dtype_that_is_not_floating_is_refused(dtype: Any) -> None:
    with pytest.raises(TransformError, match=r"master_dtype=.*master_dtype=jnp\.float32"):
        narrow(master_dtype=dtype)


def test_accumulated_blockwise_loss_trains_masters_as_the_batch() -> None:
    def blockwise(model: Any, batch: Any) -> Any:
        hidden = model.hidden_states(batch["inputs"])
        return blockwise_cross_entropy(hidden, model.head_kernel, batch["targets"], block_size=5)

    def train(function: Any, steps: int) -> dict[Any, Any]:
        config = dataclasses.replace(SMALL, param_dtype="bfloat16", dtype="float32")
        model = with_values(Decoder(config, rngs=sx.Rngs(0)))
        optimizer = Optimizer(model, optax.sgd(0.1), master_dtype="float32")

        @sx.jit
        def step(model: Any, optimizer: Any, batch: Any) -> None:
            _, grads = accumulated_value_and_grad(function, steps)(model, batch)
            optimizer.update(grads)

        for _ in range(2):
            step(model, optimizer, BATCH)
        return flat(optimizer.masters)

    expected = train(next_token_loss, 1)
    for path, value in train(blockwise, 2).items():
        np.testing.assert_allclose(value, expected[path], rtol=0.01, atol=2e-4)
