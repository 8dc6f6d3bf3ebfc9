# SPDX-License-Identifier: Apache-2.0
"""Metrics over batches are those of all values together, in compiled code too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import shardax as sx
from shardax.errors import TrainError
from shardax.train.metrics import Accuracy, Average, MultiMetric, Perplexity, Welford
from shardax.train.step_numbers import EvalNumbers, count_targets

ROWS = 12  # one size, since each compiles anew; weights of zero make it smaller
VALUES = hnp.arrays(np.float32, ROWS, elements=st.floats(-1e3, 1e3, width=32))
WEIGHTS = hnp.arrays(np.float32, ROWS, elements=st.sampled_from([0.0, 1.0, 2.5]))


@given(values=VALUES, weights=WEIGHTS, cut=st.sampled_from([0, 5, ROWS]))
def test_batches_and_merges_give_weighted_mean_and_deviation(
    values: Any, weights: Any, cut: int
) -> None:
    in_batches, first, second = Welford(), Welford(), Welford()
    for metric, part in ((first, slice(0, cut)), (second, slice(cut, None))):
        for target in (metric, in_batches):
            target.update(values=values[part], weights=weights[part])
    first.merge(second)
    for metric in (in_batches, first):
        found = metric.compute()
        if weights.sum() == 0:
            assert np.isnan(found["mean"]) and np.isnan(found["std"])
            continue
        wide, w = values.astype(np.float64), weights.astype(np.float64)
        mean = np.average(wide, weights=w)
        deviation = np.sqrt(np.average((wide - mean) ** 2, weights=w))
        np.testing.assert_allclose(found["mean"], mean, rtol=1e-4, atol=1e-2)
        np.testing.assert_allclose(found["std"], deviation, rtol=1e-3, atol=1e-2)


def test_mean_stays_exact_beyond_float32_counts() -> None:
    average = Average()
    average.weight.value = jnp.float32(2.0**25)
    average.mean.value = jnp.float32(1.0)
    for _ in range(64):
        average.update(values=jnp.full(2**20, 3.0))
    np.testing.assert_allclose(average.compute(), (2**25 + 3 * 2**26) / (2**25 + 2**26), rtol=1e-5)


def test_metrics_are_updated_inside_compiled_functions_without_retracing() -> None:
    metrics = MultiMetric(loss=Average("loss"), perplexity=Perplexity(), accuracy=Accuracy())
    traces = []

    @sx.jit
    def evaluate(metrics: Any, loss: Any, logits: Any, labels: Any) -> None:
        traces.append(1)
        metrics.update(loss=loss, logits=logits, labels=labels)

    logits = jnp.array([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    evaluate(metrics, jnp.array([1.0, 2.0, 3.0]), logits, jnp.array([1, 0, 0]))
    evaluate(metrics, jnp.array([4.0, 5.0, 6.0]), logits, jnp.array([1, 1, 1]))
    found = {name: float(value) for name, value in metrics.compute().items()}
    np.testing.assert_allclose(found["loss"], 3.5)
    np.testing.assert_allclose(found["perplexity"], np.exp(3.5), rtol=1e-6)
    np.testing.assert_allclose(found["accuracy"], 4 / 6, rtol=1e-6)
    assert len(traces) == 1


def test_masked_values_do_not_count_even_if_nan() -> None:
    average = Average()
    average.update(values=jnp.array([1.0, jnp.nan, 3.0]), weights=jnp.array([True, False, True]))
    assert float(average.compute()) == 2.0


def test_weights_of_rows_count_whole_rows() -> None:
    average = Average()
    average.update(values=jnp.array([[1.0, 2.0], [30.0, 40.0]]), weights=jnp.array([1, 0]))
    assert float(average.compute()) == 1.5


def test_accuracy_takes_weights() -> None:
    accuracy = Accuracy()
    logits = jnp.array([[[2.0, 1.0], [0.0, 1.0]]])
    accuracy.update(logits=logits, labels=jnp.array([[0, 0]]), weights=jnp.array([[1, 0]]))
    assert float(accuracy.compute()) == 1.0


def test_accuracy_with_threshold_takes_two_classes() -> None:
    accuracy = Accuracy(threshold=0.5)
    logits, labels = jnp.array([[0.2, 0.7], [0.9, 0.5]]), jnp.array([[0, 1], [0, 1]])
    accuracy.update(logits=logits, labels=labels)
    assert float(accuracy.compute()) == 0.75
    accuracy.update(logits=logits[0], labels=labels[0] > 0, weights=jnp.array([1, 3]))
    assert float(accuracy.compute()) == 0.875
    with pytest.raises(TrainError, match=r"labels 0 and 1 of that shape, but was given float32"):
        accuracy.update(logits=logits, labels=logits)
    with pytest.raises(TrainError, match="threshold=True must be a number or None"):
        Accuracy(threshold=True)


def test_mask_and_weights_count_together() -> None:
    values, mask = jnp.array([[1.0, jnp.nan], [3.0, 5.0]]), jnp.array([[True, False], [True, True]])
    average, masked = Average(), Average()
    average.update(values=values, mask=mask, weights=jnp.array([3, 1]))
    masked.update(values=values, mask=mask)
    assert (float(average.compute()), float(masked.compute())) == (pytest.approx(2.2), 3.0)
    with pytest.raises(TrainError, match="mask= has dtype int32"):
        masked.update(values=values, mask=jnp.ones(2, int))


def test_reset_metric_is_nan_until_updated() -> None:
    metrics = MultiMetric(loss=Average("loss"), spread=Welford("loss"))
    metrics.update(loss=jnp.ones(3))
    metrics.reset()
    assert all(np.isnan(leaf) for leaf in jax.tree.leaves(metrics.compute()))
    metrics.update(loss=5.0)
    assert jax.tree.map(float, metrics.compute()) == {
        "loss": 5.0,
        "spread": {"mean": 5.0, "std": 0.0},
    }


def test_metrics_hold_only_metric_state() -> None:
    kinds = {
        type(variable) for _, variable in sx.iter_variables(MultiMetric(a=Average(), b=Welford()))
    }
    assert kinds == {sx.MetricState}


def test_multi_metrics_merge_by_name() -> None:
    a, b = MultiMetric(loss=Average("loss")), MultiMetric(loss=Average("loss"))
    a.update(loss=1.0)
    b.update(loss=jnp.array([4.0, 4.0]))
    a.merge(b)
    assert float(a.compute()["loss"]) == 3.0


def test_misuse_is_named() -> None:
    with pytest.raises(TrainError, match=r"needs loss=.*given logits"):
        Average("loss").update(logits=1.0)
    with pytest.raises(TrainError, match="labels float32"):
        Accuracy().update(logits=jnp.ones((2, 3)), labels=jnp.ones((2, 3)))
    with pytest.raises(TrainError, match=r"\(3,\) do not fit values of shape \(2, 3\)"):
        Average().update(values=jnp.ones((2, 3)), weights=jnp.ones(3))
    with pytest.raises(TrainError, match="Cannot merge a Welford into a Average"):
        Average().merge(Welford())
    with pytest.raises(TrainError, match="'update'"):
        MultiMetric(update=Average())
    with pytest.raises(TrainError, match="named"):
        MultiMetric(a=Average()).merge(MultiMetric(b=Average()))


@pytest.mark.parametrize(
    ("metric", "given", "message"),
    [
        (Average("loss"), {"loss": 1.0, "weigths": 0.0}, "no weigths.*Did you mean 'weights'"),
        (
            Welford(),
            {"values": 1.0, "loss": 1.0},
            r"takes no loss=\.\.\., but mask=\.\.\., values=\.\.\.",
        ),
        (
            Accuracy(),
            {"logits": jnp.ones((1, 2)), "labels": jnp.zeros(1, int), "masks": 1},
            "no masks",
        ),
        (MultiMetric(a=Average("loss"), b=Accuracy()), {"loss": 1.0, "lables": 1}, "'labels'"),
        (MultiMetric(a=MultiMetric(b=Average("loss"))), {"los": 1.0}, "'loss'"),
    ],
)
def test_keyword_that_no_metric_takes_is_refused(
    metric: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainError, match=message):
        metric.update(**given)


def test_subclass_may_take_any_keyword() -> None:
    class Rows(Average):
        def update(self, **kwargs: Any) -> None:
            super().update(values=jnp.asarray(kwargs["rows"]), weights=kwargs.get("weights"))

    both = MultiMetric(rows=Rows(), loss=Average("loss"))
    both.update(rows=[1.0, 3.0], loss=5.0, more="ignored")
    assert {name: float(value) for name, value in both.compute().items()} == {"rows": 2, "loss": 5}


def test_ignored_targets_count_in_no_metric() -> None:
    logits = jnp.asarray([[[0.0, 1.0]] * 4])
    batch = {"inputs": jnp.zeros((1, 4), int), "targets": jnp.array([[1, 0, -100, -100]])}
    numbers = EvalNumbers({"accuracy": Accuracy()})
    metrics = numbers.reset()
    loss = lambda model, batch: (jnp.float32(1), {})  # noqa: E731
    _, count, _ = numbers.measure(lambda tokens: logits, metrics, batch, loss)
    assert float(count) == 0.5  # of a row
    assert float(metrics["accuracy"].compute()) == 0.5
    batch["mask"] = jnp.array([[1, 0, 1, 1]])
    assert float(count_targets(batch)) == 1


def test_multi_metric_takes_masks_by_name_of_metric() -> None:
    metrics = MultiMetric(loss=Average("loss"), accuracy=Accuracy())
    batch = {"loss": jnp.array([1.0, 5.0]), "logits": jnp.eye(2), "labels": jnp.array([0, 0])}
    metrics.update(**batch, mask={"loss": jnp.array([True, False])})
    assert {name: float(value) for name, value in metrics.compute().items()} == {
        "loss": 1.0,
        "accuracy": 0.5,
    }
    with pytest.raises(sx.errors.ShardaxError, match="'los': ...} is of no metric: they are named"):
        metrics.update(**batch, mask={"los": jnp.array([True, False])})
