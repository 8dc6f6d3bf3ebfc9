# SPDX-License-Identifier: Apache-2.0
"""BatchNorm against flax.linen's, and under every transform."""

from __future__ import annotations

from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError, SharedWriteError

P = PartitionSpec
STATS = sx.StateAxes({sx.BatchStat: 0, ...: None})


def floats(*shape: int, seed: int = 5, offset: float = 1.0) -> np.ndarray:
    return (offset + np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def make(features: int = 4, **options: Any) -> sx.nn.BatchNorm:
    """Makes a layer none of whose values is like its default."""
    norm = sx.nn.BatchNorm(features, **options)
    for seed, variable in enumerate((norm.scale, norm.bias, norm.mean, norm.var)):
        if variable is not None:
            variable.value = 0.5 + jnp.abs(floats(features, seed=seed)).astype(variable.dtype)
    return norm


def statistics(norm: sx.nn.BatchNorm) -> list[np.ndarray]:
    return [np.asarray(norm.mean.value), np.asarray(norm.var.value)]


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance),
        found,
        expected,
    )


# --- against flax.linen ---


def linen(norm: sx.nn.BatchNorm, x: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Runs flax.linen's layer with the same values; returns result and running statistics."""
    model = flax.linen.BatchNorm(use_fast_variance=False, **options)
    params = {
        name: variable.value
        for name, variable in (("scale", norm.scale), ("bias", norm.bias))
        if variable is not None
    }
    stats = {"mean": norm.mean.value, "var": norm.var.value}
    result, updates = model.apply(
        {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
    )
    return result, [updates["batch_stats"]["mean"], updates["batch_stats"]["var"]]


@pytest.mark.parametrize("running", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.3, "epsilon": 0.1},
        {"use_scale": False},
        {"use_bias": False},
        {"axis": 1},
        {"dtype": jnp.bfloat16},
    ],
    ids=str,
)
def test_results_and_running_statistics_are_flaxs(options: dict[str, Any], running: bool) -> None:
    x = floats(3, 4, 5) if "axis" in options else floats(3, 5, 4)
    norm = make(**options)
    expected, stats = linen(norm, x, use_running_average=running, **options)
    norm.use_running_average = running
    result = norm(x)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    close(np.float32(result), np.float32(expected), 1e-2 if "dtype" in options else 1e-5)
    close(statistics(norm), stats)


def test_masked_statistics_are_flaxs_and_nothing_masked_in_changes_nothing() -> None:
    x, mask = floats(3, 5, 4), np.arange(15).reshape(3, 5, 1) % 4 > 0
    norm = make()
    model = flax.linen.BatchNorm(use_running_average=False, use_fast_variance=False)
    params = {"scale": norm.scale.value, "bias": norm.bias.value}
    stats = {"mean": norm.mean.value, "var": norm.var.value}
    expected, updates = model.apply(
        {"params": params, "batch_stats": stats}, x, mask=mask, mutable=["batch_stats"]
    )
    close(norm(x, mask=mask), expected)
    close(statistics(norm), [updates["batch_stats"]["mean"], updates["batch_stats"]["var"]])
    before = statistics(norm)
    assert np.isfinite(norm(x, mask=np.zeros((3, 5, 1), bool))).all()
    close(statistics(norm), before, 0)


def test_gradients_are_flaxs() -> None:
    x, norm = floats(6, 4), make()
    model = flax.linen.BatchNorm(use_running_average=False, use_fast_variance=False)
    params = {"scale": norm.scale.value, "bias": norm.bias.value}
    stats = {"mean": norm.mean.value, "var": norm.var.value}

    def theirs(params: Any, x: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        return jnp.sum(jnp.sin(model.apply(variables, x, mutable=["batch_stats"])[0]))

    def ours(norm: sx.nn.BatchNorm, x: Any) -> Any:
        return jnp.sum(jnp.sin(norm(x)))

    expected, expected_x = jax.grad(theirs, argnums=(0, 1))(params, x)
    found, found_x = sx.grad(ours, argnums=(0, 1))(norm, x)
    close({path[0]: value for path, value in found.flat().items()}, expected)
    close(found_x, expected_x)


# --- statistics ---


def test_modes_are_chosen_by_train_and_eval_and_for_one_call() -> None:
    norm, x = make(), floats(8, 4)
    norm.eval()
    before = statistics(norm)
    evaluated = norm(x)
    close(statistics(norm), before, 0)
    trained = norm(x, use_running_average=False)
    assert not np.allclose(evaluated, trained)
    assert not np.allclose(statistics(norm)[0], before[0])
    norm.train()
    close(norm(x), trained)


def test_running_statistics_come_to_those_of_the_data() -> None:
    norm = sx.nn.BatchNorm(4, momentum=0.9)
    step = sx.jit(lambda norm, x: norm(x))
    x = floats(64, 4, offset=3.0)
    for _ in range(150):
        step(norm, x)
    close(statistics(norm), [x.mean(0), x.var(0)], 1e-4)
    norm.eval()
    norm_of_x = norm(x)
    close(norm_of_x.mean(0), np.zeros(4), 1e-3)
    close(norm_of_x.std(0), np.ones(4), 1e-3)


def test_statistics_of_bfloat16_are_computed_in_float32() -> None:
    x = floats(64, 4, offset=300.0).astype(jnp.bfloat16)
    narrow, wide = make(param_dtype=jnp.bfloat16), make(param_dtype=jnp.bfloat16)
    result = narrow(x)
    close(np.float32(result), np.float32(wide(x.astype(np.float32)).astype(jnp.bfloat16)), 0)
    assert result.dtype == jnp.bfloat16 and narrow.var.dtype == jnp.float32
    close(statistics(narrow), statistics(wide), 0)


def test_a_large_offset_costs_no_precision() -> None:
    norm = sx.nn.BatchNorm(4)
    close(norm(floats(64, 4, offset=1000.0)), norm(floats(64, 4)), 2e-3)


@given(factor=st.floats(0.1, 10), offset=st.floats(-10, 10))
@settings(max_examples=15)
def test_training_forgets_scale_and_offset_of_the_batch(factor: float, offset: float) -> None:
    norm = sx.nn.BatchNorm(4, epsilon=0.0)
    x = floats(16, 4)
    close(norm((factor * x + offset).astype(np.float32)), norm(x), 2e-3)


def test_building_computes_nothing_and_names_every_axis() -> None:
    norm = sx.nn.BatchNorm(4, axes=("mlp",))
    assert {path: (v.axes, v.is_lazy) for path, v in sx.iter_variables(norm)} == {
        (name,): (("mlp",), True) for name in ("mean", "var", "scale", "bias")
    }
    bare = sx.nn.BatchNorm(4, use_scale=False, use_bias=False)
    assert list(sx.state(bare).flat()) == [("mean",), ("var",)]
    assert list(sx.state(norm, sx.BatchStat).flat()) == [("mean",), ("var",)]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LayerInputError, match=r"BatchNorm\(4\) .* dimension -1 has size 4"):
        sx.nn.BatchNorm(4)(floats(4, 5))
    with pytest.raises(LayerInputError, match="dimension 3"):
        sx.nn.BatchNorm(4, axis=3)(floats(4, 4))
    with pytest.raises(LayerConfigError, match="features=0"):
        sx.nn.BatchNorm(0)
    with pytest.raises(LayerConfigError, match=r"momentum=1\.5"):
        sx.nn.BatchNorm(4, momentum=1.5)
    with pytest.raises(LayerConfigError, match="epsilon=-1"):
        sx.nn.BatchNorm(4, epsilon=-1)
    with pytest.raises(LayerInputError, match="axis_name='batch'"):
        sx.nn.BatchNorm(4, axis_name="batch")(floats(4, 4))


# --- under transforms ---


def expected_after(x: Any, **options: Any) -> tuple[Any, list[np.ndarray]]:
    """Result and statistics of one eager call."""
    norm = make(**options)
    return norm(x), statistics(norm)


def test_compiled_it_is_the_same() -> None:
    x, norm = floats(8, 4), make()
    result, stats = expected_after(x)
    close(sx.jit(lambda norm, x: norm(x))(norm, x), result)
    close(statistics(norm), stats)


def test_statistics_are_carried_back_from_value_and_grad() -> None:
    x, norm = floats(8, 4), make()
    result, stats = expected_after(x)
    value, gradients = sx.value_and_grad(lambda norm, x: norm(x).sum())(norm, x)
    close(value, result.sum(), 1e-4)
    close(statistics(norm), stats)
    assert set(gradients.flat()) == {("scale",), ("bias",)}


def test_a_batch_over_lanes_is_one_batch_with_axis_name() -> None:
    x, norm = floats(6, 3, 4), make(axis_name="lanes")
    result, stats = expected_after(x)
    found = sx.vmap(lambda norm, x: norm(x), in_axes=(None, 0), axis_name="lanes")(norm, x)
    close(found, result)
    close(statistics(norm), stats)


def test_masks_that_differ_between_lanes_count_every_element_once() -> None:
    x, mask = floats(6, 3, 4), np.arange(18).reshape(6, 3, 1) % 5 > np.arange(6)[:, None, None] % 3
    norm, whole = make(axis_name="lanes"), make()
    expected = whole(x, mask=mask)
    found = sx.vmap(
        lambda norm, x, mask: norm(x, mask=mask), in_axes=(None, 0, 0), axis_name="lanes"
    )(norm, x, mask)
    close(found, expected)
    close(statistics(norm), statistics(whole))


def test_without_axis_name_lanes_have_statistics_of_their_own() -> None:
    x, norm = floats(3, 8, 4), make()
    with pytest.raises(SharedWriteError, match=r"BatchStat at \.norm\.mean"):
        sx.vmap(lambda norm, x: norm(x), in_axes=(None, 0))(norm, x)
    for name in ("mean", "var"):
        variable = getattr(norm, name)
        variable.set_metadata(axes=None)
        variable.value = jnp.stack([variable.value] * 3)
        variable.set_metadata(axes=(None, "embed"))
    found = sx.vmap(lambda norm, x: norm(x), in_axes=(STATS, 0))(norm, x)
    for lane in range(3):
        result, stats = expected_after(x[lane])
        close(found[lane], result)
        close([rows[lane] for rows in statistics(norm)], stats)


def test_over_shards_a_batch_is_one_batch_with_axis_name(mesh: Mesh) -> None:
    x, norm = floats(8, 4), make(axis_name="data")
    result, stats = expected_after(x)
    specs = sx.partition_specs(norm, {"embed": "model"})

    def call(norm: sx.nn.BatchNorm, x: Any) -> Any:
        norm.features = x.shape[-1]  # this shard's
        return norm(x)

    whole = sx.shard_map(
        lambda norm, x: norm(x), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    close(sx.jit(whole)(norm, x), result)
    close(statistics(norm), stats)
    split = make(axis_name="data")
    run = sx.shard_map(
        call, mesh=mesh, in_specs=(specs, P("data", "model")), out_specs=P("data", "model")
    )
    close(run(split, x), result)
    close(statistics(split), stats)
    assert split.mean.value.sharding.spec[0] == "model"


def test_over_shards_without_axis_name_the_statistics_that_differ_are_named(
    auto_mesh: Mesh,
) -> None:
    run = sx.shard_map(
        lambda norm, x: norm(x), mesh=auto_mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    with pytest.raises(SharedWriteError, match=r"BatchStat at \.norm\.mean .* 'data'"):
        run(make(), floats(8, 4))


@pytest.mark.parametrize("rules", [{}, {"embed": "model"}, {"embed": "data"}], ids=str)
def test_laid_out_by_name_it_is_the_same_on_meshes_of_either_kind(
    mesh: Mesh, rules: dict[str, str]
) -> None:
    x = floats(8, 4)
    result, _ = expected_after(x)
    norm = sx.shard(make(), mesh, rules)
    before = sx.state(norm).flat()
    step = sx.jit(lambda norm, x: norm(x))
    with jax.set_mesh(mesh):
        close(step(norm, jax.device_put(x, NamedSharding(mesh, P("data")))), result)
        evaluated = step(norm, jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert evaluated.shape == x.shape
    after = sx.state(norm).flat()
    if mesh.axis_types[0].name == "Explicit":  # over Auto axes the compiler chooses
        assert {path: jax.typeof(value) for path, value in after.items()} == {
            path: jax.typeof(value) for path, value in before.items()
        }
    again = make()
    again(x)
    again(x)
    close(statistics(norm), statistics(again))


def test_in_a_loop_every_iteration_moves_the_statistics() -> None:
    xs, norm, looped = floats(3, 8, 4), make(), make()
    expected = [norm(x) for x in xs]

    def body(norm: sx.nn.BatchNorm, x: Any) -> tuple[Any, Any]:
        return norm, norm(x)

    loop = sx.scan(body, in_axes=(sx.Carry, 0), out_axes=(sx.Carry, 0))
    _, rows = loop(looped, xs)
    close(rows, jnp.stack(expected))
    close(statistics(looped), statistics(norm))


@pytest.mark.parametrize("training", [True, False])
def test_in_a_branch_the_statistics_of_the_branch_taken_are_kept(training: bool) -> None:
    x, norm = floats(8, 4), make()
    result, stats = expected_after(x)
    before = statistics(norm)
    found = sx.cond(
        training,
        lambda norm, x: norm(x),
        lambda norm, x: norm(x, use_running_average=True),
        norm,
        x,
    )
    if training:
        close(found, result)
    close(statistics(norm), stats if training else before)


def test_rematerialised_it_has_the_same_gradient_and_moves_once() -> None:
    x, norm, plain = floats(8, 4), make(), make()

    def loss(norm: sx.nn.BatchNorm, x: Any) -> Any:
        return jnp.sum(jnp.sin(norm(x)))

    found = sx.grad(sx.remat(loss))(norm, x)
    expected = sx.grad(loss)(plain, x)
    close(found.flat(), expected.flat())
    close(statistics(norm), statistics(plain))


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_features_masked_whole_use_running_statistics(wrap: Any) -> None:
    x, norm = floats(8, 2), sx.nn.BatchNorm(2, epsilon=0.0)
    mean, var = np.array([0.5, 2.0], np.float32), np.array([4.0, 9.0], np.float32)
    norm.mean[...], norm.var[...] = mean, var
    run = wrap(lambda norm, x, mask: norm(x, mask=mask))
    expected = (x - np.array([x[:, 0].mean(), 2.0])) / np.array([x[:, 0].std(), 3.0])
    close(run(norm, x, np.array([[True, False]])), expected)
    close(norm.mean[1], 2.0)
    norm.mean[...], norm.var[...] = mean, var
    close(run(norm, x, np.zeros((8, 1), bool)), (x - mean) / np.sqrt(var))
    close((norm.mean.value, norm.var.value), (mean, var))
