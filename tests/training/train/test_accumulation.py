# SPDX-License-Identifier: Apache-2.0
"""Accumulating over microbatches gives the value, gradient and update of the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import TrainError, TransformError
from shardax.train import accumulated_value_and_grad
from shardax.train.accumulation import split_batch
from tests.advice import run_advice
from tests.values import with_values


class Net(sx.Module):
    def __init__(self, seed: int = 0, dtype: Any = np.float32) -> None:
        self.rngs = sx.Rngs(params=seed, dropout=1)
        normal = jax.nn.initializers.normal(1.0)
        self.kernel = sx.Param(sx.Init(normal, (4, 8), dtype, rngs=self.rngs))
        self.calls = sx.BatchStat(0)
        self.mean = sx.BatchStat(jnp.zeros(8))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        hidden = x @ self.kernel
        self.mean[...] = 0.5 * self.mean + 0.5 * hidden.mean(0).astype(jnp.float32)
        return jnp.tanh(hidden)


def net() -> Net:
    return with_values(Net())


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_batch(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 4)).astype(np.float32),
        "y": rng.normal(size=(rows, 8)).astype(np.float32),
    }


@sx.jit
def whole(model: Any, batch: Any) -> Any:
    """The value and gradient of the whole batch."""
    return sx.value_and_grad(loss)(model, batch)


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
@pytest.mark.parametrize("compiled", [True, False])
def test_value_and_gradient_equal_those_of_the_batch(steps: int, compiled: bool) -> None:
    accumulated = accumulated_value_and_grad(loss, steps)
    batch = make_batch(12)
    value, grads = (sx.jit(accumulated) if compiled else accumulated)(net(), batch)
    whole_value, whole_grads = whole(net(), batch)
    np.testing.assert_allclose(value, whole_value, rtol=1e-6)
    assert list(grads.flat()) == [("kernel",)]
    np.testing.assert_allclose(grads["kernel"], whole_grads["kernel"], rtol=1e-4, atol=1e-6)


def test_state_goes_from_one_microbatch_to_the_next() -> None:
    batch = make_batch(12)
    model, by_hand = net(), net()
    sx.jit(accumulated_value_and_grad(loss, 3))(model, batch)
    step = sx.jit(loss)
    for i in range(3):
        step(by_hand, {name: rows[i::3] for name, rows in batch.items()})
    assert int(model.calls) == 3
    np.testing.assert_allclose(model.mean.value, by_hand.mean.value, rtol=1e-5)


def test_microbatches_draw_different_random_numbers() -> None:
    def noisy(model: Any, batch: Any) -> Any:
        key = model.rngs.dropout()
        return model(batch["x"]).mean(), jax.random.uniform(key)

    model = net()
    step = sx.jit(accumulated_value_and_grad(noisy, 4, has_aux=True))
    (_, drawn), _ = step(model, make_batch(8))
    again = net()
    assert drawn.tolist() == [float(jax.random.uniform(again.rngs.dropout())) for _ in range(4)]
    assert int(model.rngs.dropout.count) == 4


@pytest.mark.parametrize("steps", [1, 3])
def test_aux_is_stacked(steps: int) -> None:
    def with_aux(model: Any, batch: Any) -> Any:
        return loss(model, batch), {"rows": batch["x"].sum(1)}

    batch = make_batch(6)
    accumulated = accumulated_value_and_grad(with_aux, steps, has_aux=True)
    (_, aux), _ = sx.jit(accumulated)(net(), batch)
    expected = np.stack([batch["x"][i::steps].sum(1) for i in range(steps)])
    np.testing.assert_allclose(aux["rows"], expected, rtol=1e-6)


def test_later_arguments_stay_whole_and_modules_are_updated() -> None:
    counter = sx.Variable(0)

    def weighted(model: Any, batch: Any, weights: Any, counter: Any) -> Any:
        counter += 1
        return loss(model, batch) * weights.sum()

    step = sx.jit(accumulated_value_and_grad(weighted, 2))
    value, _ = step(net(), make_batch(4), np.ones(3, np.float32), counter)
    np.testing.assert_allclose(value, 3 * whole(net(), make_batch(4))[0], rtol=1e-6)
    assert int(counter) == 2


def test_sums_add_up() -> None:
    def total(model: Any, batch: Any) -> Any:
        return jnp.sum((model(batch["x"]) - batch["y"]) ** 2)

    step = sx.jit(accumulated_value_and_grad(total, 4, reduce="sum"))
    value, grads = step(net(), make_batch(8))
    whole_value, whole_grads = sx.jit(sx.value_and_grad(total))(net(), make_batch(8))
    np.testing.assert_allclose(value, whole_value, rtol=1e-5)
    np.testing.assert_allclose(grads["kernel"], whole_grads["kernel"], rtol=1e-4, atol=1e-5)


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    model = sx.Param(jnp.ones((), jnp.bfloat16))

    def linear(weight: Any, x: Any) -> Any:
        return (weight * x.astype(jnp.bfloat16)).sum()

    # In bfloat16, 256 + 1 is 256: summing there would lose every microbatch after the first.
    x = np.array([256.0] + [1.0] * 63, np.float32)
    _, gradient = sx.jit(accumulated_value_and_grad(linear, 64, reduce="sum"))(model, x)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient) == float(jnp.bfloat16(256 + 63))


def test_function_is_traced_once_however_many_microbatches() -> None:
    traces = []

    def counted(model: Any, batch: Any) -> Any:
        traces.append(1)
        return loss(model, batch)

    step = sx.jit(accumulated_value_and_grad(counted, 6))
    model = net()
    for _ in range(3):
        step(model, make_batch(12))
    assert len(traces) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_stay_on_their_devices(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.device_put(make_batch(32), rows)
    model = net()
    for _, variable in sx.iter_variables(model):
        variable.value = jax.device_put(variable.value, NamedSharding(mesh, PartitionSpec()))

    def value_of(model: Any, batch: Any) -> Any:
        return accumulated_value_and_grad(loss, 2)(model, batch)

    step = sx.jit(value_of)
    with jax.set_mesh(mesh):
        compiled = step.lower(model, batch).compile()
        value, grads = step(model, batch)
    moves = ("all-to-all", "collective-permute", "all-gather")
    assert [name for name in moves if name in compiled.as_text()] == []
    whole_value, whole_grads = whole(net(), make_batch(32))
    np.testing.assert_allclose(value, whole_value, rtol=1e-5)
    np.testing.assert_allclose(grads["kernel"], whole_grads["kernel"], rtol=1e-4, atol=1e-6)


def test_gradients_keep_the_shardings_of_parameters(mesh: Mesh) -> None:
    def squares(model: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ model.kernel) ** 2)

    model = net()
    kernel = NamedSharding(mesh, PartitionSpec(None, "model"))
    for path, variable in sx.iter_variables(model):
        whole = NamedSharding(mesh, PartitionSpec())
        variable.value = jax.device_put(variable.value, kernel if path == ("kernel",) else whole)
    batch = jax.device_put(make_batch(8), NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        _, grads = sx.jit(accumulated_value_and_grad(squares, 2))(model, batch)
    assert grads["kernel"].sharding.is_equivalent_to(kernel, 2)


@settings(max_examples=12)  # each shape compiles anew
@given(parts=st.integers(1, 5), steps=st.integers(1, 5))
def test_split_batch_puts_every_row_in_one_microbatch(parts: int, steps: int) -> None:
    rows = np.arange(parts * steps)
    found = split_batch({"rows": rows}, steps)["rows"]
    assert found.shape == (steps, parts)
    assert np.asarray(found).tolist() == [rows[i::steps].tolist() for i in range(steps)]


# --- errors ---------------------------------------------------------------------------------------


def test_rows_that_do_not_divide_are_listed() -> None:
    batch = {"x": jnp.ones((6, 2)), "y": jnp.ones((8, 2)), "scale": jnp.float32(1)}
    with pytest.raises(TrainError) as caught:
        accumulated_value_and_grad(loss, 4)(net(), batch)
    assert "batch['scale'] of shape (), batch['x'] of shape (6, 2)." in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "reduce"), [(0, "mean"), (1.5, "mean"), (True, "mean"), (2, "max")]
)
def test_settings_are_checked_when_it_is_made(steps: Any, reduce: str) -> None:
    with pytest.raises(TrainError):
        accumulated_value_and_grad(loss, steps, reduce=reduce)


def test_model_in_the_batch_is_refused() -> None:
    with pytest.raises(TrainError, match="second argument"):
        accumulated_value_and_grad(loss, 2)(net(), {"x": sx.Variable(jnp.ones(2))})


def test_sown_values_are_stacked_other_structural_changes_refused() -> None:
    def sows(model: Any, batch: Any) -> Any:
        model.sow("seen", batch["x"])
        return loss(model, batch)

    def replaces(model: Any, batch: Any) -> Any:
        model.mean = sx.BatchStat(jnp.ones(8))
        return loss(model, batch)

    model, batch = net(), make_batch(4)
    sx.jit(accumulated_value_and_grad(sows, 2))(model, batch)
    rows = np.stack([batch["x"][i::2] for i in range(2)])
    np.testing.assert_array_equal(np.stack(model.seen.value), rows[None])
    with pytest.raises(TransformError):
        accumulated_value_and_grad(replaces, 2)(model, batch)
    assert int(model.calls) == 2


def test_captured_variable_carries_over_between_microbatches() -> None:
    outside = sx.Variable(jnp.zeros(()))

    def writes(model: Any, batch: Any) -> Any:
        outside[...] = outside + 1
        return loss(model, batch)

    accumulated_value_and_grad(writes, 2)(net(), make_batch(4))
    assert float(outside) == 2


def test_later_arguments_may_be_static() -> None:
    def scaled(model: Any, batch: Any, how: str, power: int, none: None) -> Any:
        return loss(model, batch) * (2.0 if how == "twice" else 1.0) ** power

    value, _ = accumulated_value_and_grad(scaled, 2)(net(), make_batch(4), "twice", 3, None)
    np.testing.assert_allclose(value, 8 * whole(net(), make_batch(4))[0], rtol=1e-6)


def test_state_that_changes_dtype_is_refused_by_path() -> None:
    def widens(model: Any, batch: Any) -> Any:
        model.calls.value = model.calls.value + 0.5
        return loss(model, batch)

    with pytest.raises(TransformError, match=r"\.calls.*int32.*float32"):
        accumulated_value_and_grad(widens, 2)(net(), make_batch(4))


def masked_batch(masks: str, rows: int = 12) -> dict[str, Any]:
    """Rows of tokens of which the first microbatches have few targets, or none."""
    rng = np.random.default_rng(0)
    batch: dict[str, Any] = {
        name: rng.integers(0, 8, (rows, 5), dtype=np.int32) for name in ("inputs", "targets")
    }
    lengths = np.resize([0, 1, 4], rows)  # of microbatch i of 3, as its rows are i, i + 3, ...
    mask = np.arange(5) < lengths[:, None]
    if masks in ("ignored", "both"):
        batch["targets"] = np.where(mask, batch["targets"], -100)
    if masks in ("mask", "both"):
        batch["mask"] = mask.astype(np.float32) if masks == "mask" else np.arange(5) < 3
        batch["mask"] = np.broadcast_to(batch["mask"], (rows, 5))
    return batch


def tagger() -> Any:
    return with_values(
        sx.nn.Sequential(sx.nn.Embed(8, 4, rngs=sx.Rngs(0)), sx.nn.Linear(4, 8, rngs=sx.Rngs(1)))
    )


@pytest.mark.parametrize("masks", ["mask", "ignored", "both", "all"])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_parts_are_weighted_by_their_targets(masks: str, steps: int) -> None:
    batch = masked_batch(masks)
    function = sx.models.next_token_loss
    accumulated = sx.jit(accumulated_value_and_grad(function, steps))
    value, grads = accumulated(tagger(), batch)
    whole_value, whole_grads = sx.jit(sx.value_and_grad(function))(tagger(), batch)
    np.testing.assert_allclose(value, whole_value, rtol=1e-6)
    for path, gradient in whole_grads.flat().items():
        np.testing.assert_allclose(grads.flat()[path], gradient, rtol=1e-5, atol=1e-7)


def test_count_weights_parts_of_own_losses() -> None:
    def masked(weight: Any, batch: Any) -> Any:  # NaN where the mask leaves nothing
        return jnp.sum(weight * batch["x"] * batch["loss_mask"]) / jnp.sum(batch["loss_mask"])

    x, kept = np.arange(6, dtype=np.float32), np.array([0, 1, 1, 0, 1, 0], bool)
    count = lambda part: part["loss_mask"].sum()  # noqa: E731
    accumulated = accumulated_value_and_grad(masked, 3, count=count)
    value, gradient = accumulated(sx.Param(jnp.float32(2)), {"x": x, "loss_mask": kept})
    assert (float(value), float(gradient)) == pytest.approx((2 * 7 / 3, 7 / 3))
    unweighted = accumulated_value_and_grad(masked, 3)
    assert np.isnan(unweighted(sx.Param(jnp.float32(2)), {"x": x, "loss_mask": kept})[0])


def test_masks_of_inputs_weigh_nothing() -> None:
    def classify(model: Any, batch: Any) -> Any:
        weights = batch["mask"][..., None]
        pooled = (model(batch["inputs"]) * weights).sum(1) / weights.sum(1)
        return sx.models.cross_entropy(pooled, batch["targets"])

    batch = masked_batch("mask", 6)
    mask = np.arange(5) < np.array([[1], [2], [3], [4], [5], [2]])
    batch |= {"targets": batch["targets"][:, 0], "mask": mask.astype(np.int32)}
    value, _ = sx.jit(accumulated_value_and_grad(classify, 3))(tagger(), batch)
    np.testing.assert_allclose(value, sx.jit(classify)(tagger(), batch), rtol=1e-6)


def test_nothing_to_count_is_as_the_whole() -> None:
    batch = masked_batch("ignored") | {"targets": np.full((12, 5), -100, np.int32)}
    value, grads = accumulated_value_and_grad(sx.models.next_token_loss, 3)(tagger(), batch)
    assert float(value) == 0 and not any(x.any() for x in jax.tree.leaves(grads))


def test_bad_counts_are_refused() -> None:
    refused: list[tuple[Any, str]] = [(3, "mean"), (len, "sum")]
    for count, reduce in refused:
        with pytest.raises(TrainError, match=r"count=.* must be .*means are weighted"):
            accumulated_value_and_grad(loss, 2, reduce=reduce, count=count)
    accumulated = accumulated_value_and_grad(loss, 2, count=lambda part: part["x"][:, 0])
    with pytest.raises(TrainError, match=r"count returned float32\[2\]") as caught:
        accumulated(net(), make_batch(4))
    names = {"microbatch": {"mask": np.ones(3)}}
    run_advice(caught.value, 'microbatch["mask"].sum()', names)
