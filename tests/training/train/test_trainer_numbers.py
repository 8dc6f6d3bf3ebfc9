# SPDX-License-Identifier: Apache-2.0
"""What a run logs beside its loss: metrics of the loss, of held-out data, gradients, rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax.errors import TrainError
from shardax.models import next_token_loss
from shardax.train import metrics
from tests.training.train.small_runs import (
    TRAIN,
    Bigram,
    Quiet,
    eval_batches,
    make_trainer,
    state_of,
)


def with_accuracy(model: Any, batch: Any) -> Any:
    hits = jnp.argmax(model(batch["inputs"]), -1) == batch["targets"]
    weights = batch.get("mask", jnp.ones(hits.shape))
    return next_token_loss(model, batch), {"accuracy": jnp.sum(hits * weights) / weights.sum()}


def log_of(trainer: sx.train.Trainer) -> list[dict[str, Any]]:
    return sx.train.read_jsonl(trainer.log_path)


@pytest.mark.parametrize("parts", [1, 2])
def test_loss_metrics_are_logged_and_averaged_in_evaluation(tmp_path: Path, parts: int) -> None:
    options: dict[str, Any] = {"held_out": eval_batches(), "log_every": 1}
    plain = make_trainer(tmp_path / "plain", 3, grad_accumulation=parts, **options)
    both = make_trainer(
        tmp_path / "both", 3, loss=with_accuracy, grad_accumulation=parts, **options
    )
    results = [trainer.run(display=Quiet()) for trainer in (plain, both)]
    assert state_of(plain) == state_of(both)
    assert results[0].eval_loss == results[1].eval_loss
    trained, held_out = log_of(both)[:-1], log_of(both)[-1]
    assert [sorted(r.keys() - {"tokens_per_second"}) for r in trained] == [
        ["accuracy", "grad_norm", "learning_rate", "loss", "step"]
    ] * 3
    assert sorted(held_out) == ["eval_accuracy", "eval_loss", "step"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_held_out_metrics_equal_those_of_all_targets(tmp_path: Path, kind: Any) -> None:
    held_out, model = eval_batches(), Bigram()
    measured = {
        "accuracy": metrics.Accuracy(),
        "perplexity": metrics.Perplexity(),
        "half": lambda model, batch: next_token_loss(model, batch) / 2,
        "logit": (
            metrics.Welford("logit"),
            lambda model, batch: {"logit": model(batch["inputs"]), "weights": batch["mask"]},
        ),
    }
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    trainer = make_trainer(tmp_path, 1, model=model, held_out=held_out, mesh=mesh, eval=measured)
    result = trainer.run(display=Quiet())
    batches = [jax.tree.map(jnp.asarray, batch) for batch in held_out]
    weights = np.concatenate([batch["mask"] for batch in batches]).astype(bool)
    sx.unshard(model)
    run = sx.jit(model)
    logits = np.concatenate([run(batch["inputs"]) for batch in batches])
    targets = np.concatenate([batch["targets"] for batch in batches])
    assert result.eval_loss is not None
    record = log_of(trainer)[-1]
    assert record == pytest.approx(
        {
            "step": 1,
            "eval_loss": result.eval_loss,
            "eval_half": result.eval_loss / 2,
            "eval_accuracy": (logits.argmax(-1) == targets)[weights].mean(),
            "eval_perplexity": np.exp(result.eval_loss),
            "eval_logit_mean": logits[weights].mean(),
            "eval_logit_std": logits[weights].std(),
        },
        rel=1e-4,
        abs=1e-6,
    )


def test_gradient_norm_is_that_of_the_batch(tmp_path: Path) -> None:
    batches = sx.train.TrainBatches(TRAIN, batch_size=8, seq_len=16)
    start = batches.state()
    batch = next(iter(batches))
    batches.restore(start)
    gradients = sx.jit(sx.grad(next_token_loss))(Bigram(), batch)
    for parts in (1, 4):
        trainer = make_trainer(tmp_path / str(parts), 1, batches=batches, grad_accumulation=parts)
        trainer.run(display=Quiet())
        batches.restore(start)
        expected = float(optax.tree.norm(jax.tree.leaves(gradients)))
        assert log_of(trainer)[0]["grad_norm"] == pytest.approx(expected, rel=1e-5)


DECAY = optax.linear_schedule(0.1, 0.0, 10)


@pytest.mark.parametrize(
    ("tx", "rates"),
    [
        (optax.sgd(0.1), [0.1, 0.1]),
        (optax.chain(optax.clip(1.0), optax.scale(0.5), optax.adamw(DECAY)), [0.1, 0.09]),
        (optax.inject_hyperparams(optax.adam)(learning_rate=DECAY), [0.1, 0.09]),
        (optax.scale_by_adam(), [None, None]),
        (optax.chain(optax.sgd(0.1), optax.scale(-1.0)), [None, None]),
    ],
    ids=["number", "schedule", "injected", "none", "two"],
)
def test_learning_rate_of_the_optimizer_is_logged(
    tmp_path: Path, tx: Any, rates: list[float | None]
) -> None:
    trainer = make_trainer(tmp_path, 2, tx=tx, log_every=1)
    trainer.run(display=Quiet())
    assert [record.get("learning_rate") for record in log_of(trainer)] == [
        rate if rate is None else pytest.approx(rate) for rate in rates
    ]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: (next_token_loss(m, b), 1.0), "a tuple of"),
        (lambda m, b: (next_token_loss(m, b), {"loss": 1.0}), "named 'loss'"),
        (lambda m, b: (next_token_loss(m, b), {"hits": jnp.ones(3)}), r"'hits' as float32\[3\]"),
    ],
)
def test_loss_with_unloggable_metrics_is_refused(tmp_path: Path, loss: Any, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        make_trainer(tmp_path, 1, loss=loss).run(display=Quiet())


def test_invalid_held_out_metrics_are_refused(tmp_path: Path) -> None:
    for number, (given, error, message) in enumerate(
        [
            ({"loss": metrics.Accuracy()}, TrainError, "named 'loss'"),
            ({"accuracy": 3}, TrainError, "is a int"),
            ({"accuracy": metrics.Accuracy()}, TrainError, "both have 'accuracy'"),
            ({"spread": metrics.Welford()}, TrainError, "takes mask=..., values=..., weights=..."),
            ({"all": lambda model, batch: jnp.ones(2)}, TrainError, r"shape \(2,\)"),
        ]
    ):
        with pytest.raises(error, match=message):
            make_trainer(
                tmp_path / str(number), 1, loss=with_accuracy, held_out=eval_batches(), eval=given
            ).run(display=Quiet())


def test_device_memory_is_logged_where_known(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1)
    trainer.run(display=Quiet())
    stats = jax.devices()[0].memory_stats()
    assert ("memory" in log_of(trainer)[0]) == (stats is not None)
    if stats is not None:
        assert 0 < log_of(trainer)[0]["memory"] <= stats["peak_bytes_in_use"]


@pytest.mark.parametrize("over", [(), ("data",)], ids=str)
def test_numbers_of_masked_parts_are_the_batch(tmp_path: Path, over: tuple[str, ...]) -> None:
    class Masked:
        """Batches whose rows have few targets or many."""

        def __iter__(self) -> Any:
            for batch in sx.train.TrainBatches(TRAIN, batch_size=8, seq_len=16):
                lengths = np.array([1, 3, 16, 9, 2, 5, 7, 0])
                yield {**batch, "mask": np.arange(16) < lengths[:, None]}

    options: dict[str, Any] = {"loss": with_accuracy, "log_every": 1, "resumable": False}
    if over:
        mesh = jax.make_mesh((2, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        options |= {"mesh": mesh, "reduce_over": over}
    logs = []
    for parts in (1, 4):
        options["grad_accumulation"] = parts
        trainer = make_trainer(tmp_path / str(parts), 2, batches=Masked(), **options)
        trainer.run(display=Quiet())
        logs.append(log_of(trainer))
    for first, second in zip(*logs, strict=True):
        for name in ("loss", "grad_norm", "accuracy"):
            assert second[name] == pytest.approx(first[name], rel=1e-5)


def loss_by_own_mask(model: Any, batch: Any) -> Any:
    weights = batch["loss_mask"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["inputs"]), batch["targets"]
    )
    mean = jnp.sum(losses * weights) / jnp.sum(weights)  # NaN where nothing counts
    return mean, {"twice": 2 * mean}


class OwnMask:
    """Batches of which a mask of another name leaves few targets, or many."""

    def __iter__(self) -> Any:
        for batch in sx.train.TrainBatches(TRAIN, batch_size=8, seq_len=16):
            lengths = np.array([1, 3, 16, 9, 2, 5, 7, 0])
            yield {**batch, "loss_mask": (np.arange(16) < lengths[:, None]).astype(np.float32)}


def own_count(part: Any) -> Any:
    return part["loss_mask"].sum()


@pytest.mark.parametrize("over", [(), ("data",)], ids=str)
def test_count_setting_weights_parts_of_own_masks(tmp_path: Path, over: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"loss": loss_by_own_mask, "log_every": 1, "resumable": False}
    whole = make_trainer(tmp_path / "whole", 2, batches=OwnMask(), **options)
    if over:
        mesh = jax.make_mesh((2, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        options |= {"mesh": mesh, "reduce_over": over}
    options |= {"grad_accumulation": 4, "count": own_count}
    parts = make_trainer(tmp_path / "parts", 2, batches=OwnMask(), **options)
    for trainer in (whole, parts):
        trainer.run(display=Quiet())
    for first, second in zip(log_of(whole), log_of(parts), strict=True):
        for name in ("loss", "grad_norm", "twice"):
            assert second[name] == pytest.approx(first[name], rel=1e-5)


def test_count_setting_weights_held_out_batches(tmp_path: Path) -> None:
    inputs = np.arange(32, dtype=np.int32).reshape(4, 8)
    mask = np.arange(8) < np.array([1, 8, 3, 2])[:, None]
    whole = {"inputs": inputs, "targets": inputs + 1, "loss_mask": mask.astype(np.float32)}
    halves = [{name: array[rows] for name, array in whole.items()} for rows in ([0, 1], [2, 3])]
    loss, _ = loss_by_own_mask(Bigram(), whole)
    options: dict[str, Any] = {"loss": loss_by_own_mask, "held_out": halves}
    trainer = make_trainer(tmp_path, 1, count=own_count, **options)
    assert trainer.evaluate() == pytest.approx(float(loss), rel=1e-6)
    assert make_trainer(tmp_path, 1, **options).evaluate() != pytest.approx(float(loss), rel=1e-4)


def test_count_settings_that_count_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r'count=lambda part: part\["loss_mask"\].sum\(\)'):
        sx.train.TrainerSettings(steps=1, count="loss_mask")  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {"loss": loss_by_own_mask, "resumable": False}
    trainer = make_trainer(
        tmp_path, 1, batches=OwnMask(), count=lambda part: part["loss_mask"], **options
    )
    with pytest.raises(TrainError, match=r"count returned float32\[8, 16\]"):
        trainer.run(display=Quiet())
