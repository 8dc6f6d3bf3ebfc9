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
from shardax.errors import LayerConfigError, LayerInputError, TransformError
from tests.advice import run_advice

P = PartitionSpec
STATS = sx.StateAxes({sx.BatchStat: 0, ...: None})


def floats(*shape: int, seed: int = 5, offset: float = 1.0) -> np.ndarray:
    return (offset + np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def make(features: int = 4, **options: Any) -> sx.nn.BatchNorm:
    """Makes a layer none of whose values is like its default."""
    norm = sx.nn.BatchNorm(features, **options)
    for seed, variable in enumerate((norm.scale, norm.bias, norm.mean, norm.var)):
        if variable is not None:
            variable.value = (0.5 + np.abs(floats(features, seed=seed))).astype(variable.dtype)
    return norm


@sx.jit
def call(norm: Any, x: Any, **options: Any) -> Any:
    return norm(x, **options)


def statistics(norm: sx.nn.BatchNorm) -> list[np.ndarray]:
    return [np.asarray(norm.mean.value), np.asarray(norm.var.value)]


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance),
        found,
        expected,
    )


# --- against flax.linen ---

X = floats(3, 5, 4)
STATE = ["batch_stats"]


def linen(norm: sx.nn.BatchNorm, x: Any, mask: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    """Runs flax.linen's layer with the same values; returns result and running statistics."""
    model = flax.linen.BatchNorm(use_fast_variance=False, **options)
    params = {
        name: variable.value
        for name, variable in (("scale", norm.scale), ("bias", norm.bias))
        if variable is not None
    }
    stats = {"mean": norm.mean.value, "var": norm.var.value}
    run = jax.jit(lambda variables, x, mask: model.apply(variables, x, mask=mask, mutable=STATE))
    result, updates = run({"params": params, "batch_stats": stats}, x, mask)
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
def test_results_and_running_statistics_equal_flax(options: dict[str, Any], running: bool) -> None:
    x = floats(3, 4, 5) if "axis" in options else X
    norm = make(**options)
    expected, stats = linen(norm, x, use_running_average=running, **options)
    norm.use_running_average = running
    result = call(norm, x)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    close(np.float32(result), np.float32(expected), 1e-2 if "dtype" in options else 1e-5)
    close(statistics(norm), stats)


def test_masked_statistics_equal_flax() -> None:
    norm, mask = make(), np.arange(15).reshape(3, 5, 1) % 4 > 0
    expected, stats = linen(norm, X, mask, use_running_average=False)
    close(call(norm, X, mask=mask), expected)
    close(statistics(norm), stats)


def test_mask_that_hides_everything_changes_no_statistics() -> None:
    norm = make()
    before = statistics(norm)
    assert np.isfinite(call(norm, X, mask=np.zeros((3, 5, 1), bool))).all()
    close(statistics(norm), before, 0)


def test_gradients_equal_flax() -> None:
    x, norm = floats(8, 4), make()
    model = flax.linen.BatchNorm(use_running_average=False, use_fast_variance=False)
    params = {"scale": norm.scale.value, "bias": norm.bias.value}
    stats = {"mean": norm.mean.value, "var": norm.var.value}

    def theirs(params: Any, x: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        return jnp.sum(jnp.sin(model.apply(variables, x, mutable=["batch_stats"])[0]))

    def ours(norm: sx.nn.BatchNorm, x: Any) -> Any:
        return jnp.sum(jnp.sin(norm(x)))

    expected, expected_x = jax.jit(jax.grad(theirs, argnums=(0, 1)))(params, x)
    found, found_x = sx.jit(sx.grad(ours, argnums=(0, 1)))(norm, x)
    close({path[0]: value for path, value in found.flat().items()}, expected)
    close(found_x, expected_x)


# --- statistics ---


def test_train_eval_and_an_argument_choose_the_mode() -> None:
    norm, x = make(), floats(8, 4)
    norm.eval()
    before = statistics(norm)
    evaluated = call(norm, x)
    scale, bias = np.asarray(norm.scale.value), np.asarray(norm.bias.value)
    mean, variance = before
    close(evaluated, (x - mean) / np.sqrt(variance + 1e-5) * scale + bias)
    close(statistics(norm), before, 0)
    trained = norm(x, use_running_average=False)
    assert not np.allclose(evaluated, trained)
    assert not np.allclose(statistics(norm)[0], before[0])
    norm.train()
    close(call(norm, x), trained)


def test_running_statistics_converge_to_those_of_data() -> None:
    norm = sx.nn.BatchNorm(4, momentum=0.9)
    x = floats(64, 4, offset=3.0)
    for _ in range(150):
        call(norm, x)
    close(statistics(norm), [x.mean(0), x.var(0)], 1e-4)
    norm.eval()
    norm_of_x = np.asarray(call(norm, x))
    close(norm_of_x.mean(0), np.zeros(4), 1e-3)
    close(norm_of_x.std(0), np.ones(4), 1e-3)


def test_statistics_of_bfloat16_are_computed_in_float32() -> None:
    x = floats(64, 4, offset=300.0).astype(jnp.bfloat16)
    narrow, wide = make(param_dtype=jnp.bfloat16), make(param_dtype=jnp.bfloat16)
    result, exact = call(narrow, x), np.asarray(call(wide, x.astype(np.float32)))
    close(np.float32(result), np.float32(exact.astype(jnp.bfloat16)), 0)
    assert result.dtype == jnp.bfloat16 and narrow.var.dtype == jnp.float32
    close(statistics(narrow), statistics(wide), 0)


def test_large_offset_costs_no_precision() -> None:
    norm = sx.nn.BatchNorm(4)
    close(call(norm, floats(64, 4, offset=1000.0)), call(norm, floats(64, 4)), 2e-3)


@given(factor=st.floats(0.1, 10), offset=st.floats(-10, 10))
@settings(max_examples=15)
def test_training_forgets_scale_and_offset(factor: float, offset: float) -> None:
    norm = sx.nn.BatchNorm(4, epsilon=0.0)
    x = floats(64, 4)
    centered = (x - x.mean(0)) / x.std(0)
    close(call(norm, (factor * x + offset).astype(np.float32)), centered, 2e-3)


def test_building_computes_nothing_and_names_every_axis() -> None:
    norm = sx.nn.BatchNorm(4, axes=("mlp",))
    assert {path: (v.axes, v.is_lazy) for path, v in sx.iter_variables(norm)} == {
        (name,): (("mlp",), True) for name in ("mean", "var", "scale", "bias")
    }
    bare = sx.nn.BatchNorm(4, use_scale=False, use_bias=False)
    assert list(sx.state(bare).flat()) == [("mean",), ("var",)]
    assert list(sx.state(norm, sx.BatchStat).flat()) == [("mean",), ("var",)]


def test_unsuitable_options_and_inputs_are_refused() -> None:
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
    norm, x = sx.nn.BatchNorm(4, axis_name="batch"), floats(4, 4)
    with pytest.raises(LayerInputError, match="axis_name='batch'") as caught:
        norm(x)
    mapped = run_advice(caught.value, "sx.vmap(..., axis_name='batch')", {"sx": sx, "rest": norm})
    close(mapped(x), sx.nn.BatchNorm(4)(x))


# --- under transforms ---


def expected_after(x: np.ndarray, mask: Any = True) -> tuple[np.ndarray, list[np.ndarray]]:
    """Result and running statistics of one call of ``make()``, by formula."""
    norm, axes = make(), tuple(range(x.ndim - 1))
    where = np.broadcast_to(mask, x.shape)
    mean = x.mean(axes, where=where)
    variance = x.var(axes, where=where)
    scale, bias = np.asarray(norm.scale.value), np.asarray(norm.bias.value)
    result = (x - mean) / np.sqrt(variance + norm.epsilon) * scale + bias
    moved = zip(statistics(norm), (mean, variance), strict=True)
    return result, [norm.momentum * old + (1 - norm.momentum) * new for old, new in moved]


def test_eager_and_compiled_calls_equal_the_formula() -> None:
    x = floats(8, 4)
    result, stats = expected_after(x)
    for run in (lambda norm, x: norm(x), call):
        norm = make()
        close(run(norm, x), result)
        close(statistics(norm), stats)


def test_value_and_grad_carries_statistics_back() -> None:
    x, norm = floats(8, 4), make()
    result, stats = expected_after(x)
    step = sx.jit(sx.value_and_grad(lambda norm, x: norm(x).sum()))
    value, gradients = step(norm, x)
    close(value, result.sum(), 1e-4)
    close(statistics(norm), stats)
    assert set(gradients.flat()) == {("scale",), ("bias",)}


def test_lanes_with_axis_name_are_one_batch() -> None:
    x, norm = floats(6, 3, 4), make(axis_name="lanes")
    result, stats = expected_after(x)
    mapped = sx.vmap(lambda norm, x: norm(x), in_axes=(None, 0), axis_name="lanes")
    close(sx.jit(mapped)(norm, x), result)
    close(statistics(norm), stats)


def test_masks_of_lanes_count_every_element_once() -> None:
    x, mask = floats(6, 3, 4), np.arange(18).reshape(6, 3, 1) % 5 > np.arange(6)[:, None, None] % 3
    norm = make(axis_name="lanes")
    result, stats = expected_after(x, mask)
    mapped = sx.vmap(
        lambda norm, x, mask: norm(x, mask=mask), in_axes=(None, 0, 0), axis_name="lanes"
    )
    close(sx.jit(mapped)(norm, x, mask), result)
    close(statistics(norm), stats)


def test_lanes_without_axis_name_have_own_statistics() -> None:
    x, norm = floats(3, 8, 4), make()
    with pytest.raises(TransformError, match=r"BatchStat at \.norm\.mean"):
        sx.vmap(lambda norm, x: norm(x), in_axes=(None, 0))(norm, x)
    for name in ("mean", "var"):
        variable = getattr(norm, name)
        variable.set_metadata(axes=None)
        variable.value = np.stack([variable.value] * 3)
        variable.set_metadata(axes=(None, "embed"))
    found = sx.jit(sx.vmap(lambda norm, x: norm(x), in_axes=(STATS, 0)))(norm, x)
    for lane in range(3):
        result, stats = expected_after(x[lane])
        close(found[lane], result)
        close([rows[lane] for rows in statistics(norm)], stats)


def test_shards_with_axis_name_are_one_batch(mesh: Mesh) -> None:
    x, norm = floats(8, 4), make(axis_name="data")
    result, stats = expected_after(x)
    specs = sx.partition_specs(norm, {"embed": "model"})

    def call_of_shard(norm: sx.nn.BatchNorm, x: Any) -> Any:
        norm.features = x.shape[-1]  # this shard's
        return norm(x)

    whole = sx.shard_map(
        lambda norm, x: norm(x), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    close(sx.jit(whole)(norm, x), result)
    close(statistics(norm), stats)
    split = make(axis_name="data")
    run = sx.shard_map(
        call_of_shard, mesh=mesh, in_specs=(specs, P("data", "model")), out_specs=P("data", "model")
    )
    close(sx.jit(run)(split, x), result)
    close(statistics(split), stats)
    assert split.mean.value.sharding.spec[0] == "model"


def test_shards_without_axis_name_are_refused(auto_mesh: Mesh) -> None:
    run = sx.shard_map(
        lambda norm, x: norm(x), mesh=auto_mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    with pytest.raises(TransformError, match=r"BatchStat at \.norm\.mean .* 'data'"):
        sx.jit(run)(make(), floats(8, 4))


@pytest.mark.parametrize("rules", [{}, {"embed": "model"}, {"embed": "data"}], ids=str)
def test_layout_by_name_changes_no_result(mesh: Mesh, rules: dict[str, str]) -> None:
    x = floats(8, 4)
    result, (mean, variance) = expected_after(x)
    norm = sx.shard(make(), mesh, rules)
    before = sx.state(norm).flat()
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        close(call(norm, placed), result)
        close(statistics(norm), [mean, variance])
        close(call(norm, placed), result)
    after = sx.state(norm).flat()
    if mesh.axis_types[0].name == "Explicit":  # over Auto axes the compiler chooses
        assert {path: jax.typeof(value) for path, value in after.items()} == {
            path: jax.typeof(value) for path, value in before.items()
        }
    again = make()
    for _ in range(2):
        call(again, x)
    close(statistics(norm), statistics(again))


def test_batch_norm_moves_statistics_in_each_iteration_of_a_loop() -> None:
    xs, norm, looped = floats(3, 8, 4), make(), make()
    expected = [call(norm, x) for x in xs]

    def body(norm: sx.nn.BatchNorm, x: Any) -> tuple[Any, Any]:
        return norm, norm(x)

    loop = sx.scan(body, in_axes=(sx.Carry, 0), out_axes=(sx.Carry, 0))
    _, rows = loop(looped, xs)
    close(rows, np.stack(expected))
    close(statistics(looped), statistics(norm))


@pytest.mark.parametrize("training", [True, False])
def test_branch_taken_moves_statistics(training: bool) -> None:
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
    else:
        norm.eval()
        close(found, call(norm, x))
    close(statistics(norm), stats if training else before)


def test_remat_keeps_gradients_and_moves_statistics_once() -> None:
    x, norm, plain = floats(8, 4), make(), make()

    def loss(norm: sx.nn.BatchNorm, x: Any) -> Any:
        return jnp.sum(jnp.sin(norm(x)))

    found = sx.jit(sx.grad(sx.remat(loss)))(norm, x)
    expected = sx.jit(sx.grad(loss))(plain, x)
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
