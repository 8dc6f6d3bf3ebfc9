# SPDX-License-Identifier: Apache-2.0
"""Callbacks: which events they see, stopping a run, the best checkpoint, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import optax
import pytest
from tests.train.small_runs import Quiet, eval_batches, make_trainer, state_of

import shardax as sx
from shardax.errors import TrainerError
from shardax.train import BestCheckpoint, EarlyStopping, Event


def worsening() -> dict[str, Any]:
    """Options of a run whose held-out loss falls first and then rises."""
    tx = optax.sgd(
        optax.join_schedules([optax.constant_schedule(2.0), optax.constant_schedule(-2.0)], [4])
    )
    return {
        "tx": tx,
        "held_out": eval_batches(),
        "eval_every": 2,
        "log_every": 2,
        "checkpoint_every": 3,
        "keep_checkpoints": 1,
    }


def test_events_come_in_the_order_of_the_run_with_the_numbers_of_the_log(tmp_path: Path) -> None:
    seen: list[tuple[str, int, list[str]]] = []

    def note(event: Event) -> None:
        seen.append((event.kind, event.step, sorted(event.metrics)))

    trainer = make_trainer(
        tmp_path,
        4,
        callbacks=[note],
        log_every=4,
        eval_every=2,
        checkpoint_every=3,
        held_out=eval_batches(),
    )
    trainer.run(display=Quiet())
    step = ["grad_norm", "learning_rate", "loss"]
    last = ["checkpoint_seconds", "grad_norm", "learning_rate", "loss", "tokens_per_second"]
    assert [each for each in seen if each[1] < 4] == [
        ("step", 1, step),
        ("step", 2, step),
        ("eval", 2, ["eval_loss"]),
        ("step", 3, step),
        ("checkpoint", 3, step),
    ]
    kinds = ["step", "checkpoint", "eval", "end"]
    assert [(kind, metrics) for kind, at, metrics in seen if at == 4] == [
        (kind, {"eval": ["eval_loss"], "end": sorted([*last, "eval_loss"])}.get(kind, last))
        for kind in kinds
    ]


def test_a_callback_that_stops_ends_the_run_with_a_checkpoint_and_an_evaluation(
    tmp_path: Path,
) -> None:
    def at_three(event: Event) -> None:
        if event.step == 3:
            event.stop()

    shown = Quiet()
    trainer = make_trainer(tmp_path, 9, callbacks=[at_three], held_out=eval_batches())
    result = trainer.run(display=shown)
    assert (result.step, result.stopped, result.checkpoint.exists()) == (3, None, True)
    assert result.eval_loss == trainer.evaluate()
    assert "stopped by a callback; saved at step 3" in shown.notes
    resumed = make_trainer(tmp_path, 9, held_out=eval_batches())
    assert resumed.run(resume=True, display=Quiet()).step == 9
    whole = make_trainer(tmp_path / "whole", 9)
    whole.run(display=Quiet())
    assert state_of(resumed) == state_of(whole)


@pytest.mark.parametrize("cut", [5, 7, 8])
def test_early_stopping_and_the_best_checkpoint_are_the_same_in_a_resumed_run(
    tmp_path: Path, cut: int
) -> None:
    def make(folder: str) -> tuple[Any, Any, Any]:
        early, best = EarlyStopping("eval_loss", patience=3), BestCheckpoint("eval_loss")
        trainer = make_trainer(tmp_path / folder, 40, callbacks=(early, best), **worsening())
        return trainer, early, best

    whole, early, best = make("whole")
    result = whole.run(display=Quiet())
    records = [r for r in sx.train.read_jsonl(whole.log_path) if "eval_loss" in r]
    losses = {record["step"]: record["eval_loss"] for record in records}
    assert best.step == min(losses, key=lambda step: losses[step]) < result.step
    assert (result.step, early.stopped, early.best) == (best.step + 6, True, losses[best.step])

    def die(step: int) -> None:
        if step == cut:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make("cut")[0].run(display=Quiet(die))
    resumed, again, second = make("cut")
    assert resumed.run(resume=True, display=Quiet()).step == result.step
    assert state_of(resumed) == state_of(whole)
    assert (again.state(), second.state()) == (early.state(), best.state())
    for trainer in (whole, resumed):
        steps = sx.train.Checkpoints(trainer.checkpoint_directory).steps()
        assert steps == [best.step, result.step]
    once_more, _, third = make("cut")
    assert once_more.run(resume=True, display=Quiet()).step == result.step
    assert third.step == best.step


def test_the_best_checkpoint_holds_the_model_of_the_best_evaluation(tmp_path: Path) -> None:
    best = BestCheckpoint("eval_loss")
    trainer = make_trainer(tmp_path, 10, callbacks=[best], **worsening())
    trainer.run(display=Quiet())
    folder = sx.train.Checkpoints(trainer.checkpoint_directory)
    folder.restore((trainer.model,), best.step, partial=True)
    assert trainer.evaluate() == pytest.approx(best.best, rel=1e-6)


def test_a_metric_to_be_large_and_one_of_training_can_be_watched() -> None:
    early = EarlyStopping("accuracy", patience=1, mode="max")
    stops = []
    for step, share in enumerate([0.1, 0.3, float("nan")]):
        event = Event("step", step, {"accuracy": share})
        early(event)
        stops.append(early.stopped)
    assert (stops, early.best) == ([False, False, True], 0.3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping("eval_loss", patience=0), "patience=0"),
        (lambda: BestCheckpoint("loss"), "begins with eval_"),
        (lambda: BestCheckpoint("eval_loss", mode=cast("Any", "least")), "mode='least'"),
        (lambda: make_trainer(Path(), 1, callbacks=print), "in a tuple or list"),
        (
            lambda: EarlyStopping("eval_x", patience=1)(Event("eval", 2, {"eval_loss": 1.0})),
            "does not measure. At step 2 there are: eval_loss",
        ),
    ],
)
def test_callbacks_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        make()
