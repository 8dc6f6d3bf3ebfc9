# SPDX-License-Identifier: Apache-2.0
"""Callbacks: which events they see, stopping a run, the best checkpoint, resuming."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax.errors import TrainError
from shardax.train import BestCheckpoint, EarlyStopping, Event
from tests.training.train.small_runs import Quiet, eval_batches, make_trainer, state_of


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


def test_events_come_in_order_with_the_logged_numbers(tmp_path: Path) -> None:
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
    evaluated = sorted([*last, "eval_loss"])
    assert [each for each in seen if each[1] < 4] == [
        ("step", 1, step),
        ("step", 2, step),
        ("eval", 2, ["eval_loss"]),
        ("step", 3, step),
        ("checkpoint", 3, step),
    ]
    kinds = ["step", "eval", "checkpoint", "end"]
    assert [(kind, metrics) for kind, at, metrics in seen if at == 4] == [
        (kind, {"step": last, "eval": ["eval_loss"]}.get(kind, evaluated)) for kind in kinds
    ]


def test_stop_by_callback_saves_a_checkpoint_and_evaluates(tmp_path: Path) -> None:
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


def watched(folder: Path) -> tuple[Any, Any, Any]:
    """A trainer of such a run, and callbacks that stop it and keep its best checkpoint."""
    early, best = EarlyStopping("eval_loss", patience=3), BestCheckpoint("eval_loss")
    return make_trainer(folder, 40, callbacks=(early, best), **worsening()), early, best


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any, Any]:
    """The same after a run that was stopped early, with its result."""
    trainer, early, best = watched(tmp_path_factory.mktemp("whole"))
    return trainer, early, best, trainer.run(display=Quiet())


def test_early_stopping_keeps_the_checkpoint_of_best_evaluation(
    tmp_path: Path, whole: tuple[Any, Any, Any, Any]
) -> None:
    trainer, early, best, result = whole
    records = [r for r in sx.train.read_jsonl(trainer.log_path) if "eval_loss" in r]
    losses = {record["step"]: record["eval_loss"] for record in records}
    assert best.step == min(losses, key=lambda step: losses[step]) < result.step
    assert (result.step, early.stopped, early.best) == (best.step + 6, True, losses[best.step])
    folder = sx.train.Checkpoints(trainer.checkpoint_directory)
    assert folder.steps() == [best.step, result.step]
    restored = make_trainer(tmp_path, 1, held_out=eval_batches())
    folder.restore((restored.model,), best.step, partial=True)
    assert restored.evaluate() == pytest.approx(best.best, rel=1e-6)


@pytest.mark.parametrize("cut", [5, 7, 8])
def test_resumed_run_has_same_stop_and_best_checkpoint(
    tmp_path: Path, whole: tuple[Any, Any, Any, Any], cut: int
) -> None:
    def die(step: int) -> None:
        if step == cut:
            raise KeyboardInterrupt

    trainer, early, best, result = whole
    with pytest.raises(KeyboardInterrupt):
        watched(tmp_path)[0].run(display=Quiet(die))
    resumed, again, second = watched(tmp_path)
    assert resumed.run(resume=True, display=Quiet()).step == result.step
    assert state_of(resumed) == state_of(trainer)
    assert (again.state(), second.state()) == (early.state(), best.state())
    steps = sx.train.Checkpoints(resumed.checkpoint_directory).steps()
    assert steps == [best.step, result.step]
    once_more, _, third = watched(tmp_path)
    assert once_more.run(resume=True, display=Quiet()).step == result.step
    assert third.step == best.step


def test_training_metric_can_be_watched_for_its_maximum() -> None:
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
    with pytest.raises(TrainError, match=message):
        make()


class Steps:
    """Batches of ones with a position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> dict[str, Any]:
        self.at += 1
        return {"x": np.ones((2,), np.float32)}

    def state(self) -> Any:
        return {"at": self.at}

    def restore(self, state: Any) -> None:
        self.at = state["at"]


class Counter(sx.Module):
    """A Param that counts steps, as its training loss falls by it."""

    def __init__(self) -> None:
        self.value = sx.Param(jnp.zeros(()))


def run_counter(
    folder: Path, steps: int, low: int, *, resume: bool = False, eval_every: int = 1
) -> tuple[int, Any, Any]:
    """A run whose held-out loss is lowest after ``low`` steps; returns step and states."""

    def loss(model: Counter, batch: Any) -> Any:
        count = model.value.value
        return jnp.abs(count - low) if "mask" in batch else -count

    model = Counter()
    early, best = EarlyStopping("eval_loss", patience=2), BestCheckpoint("eval_loss")
    trainer = sx.train.Trainer(
        model,
        sx.train.Optimizer(model, optax.sgd(1.0)),
        loss,
        Steps(),
        directory=folder,
        held_out=[{"x": np.ones((2,), np.float32), "mask": np.ones((2,), np.float32)}],
        callbacks=[early, best],
        settings=sx.train.TrainerSettings(
            steps=steps, eval_every=eval_every, checkpoint_every=1, log_every=1
        ),
    )
    result = trainer.run(resume=resume, display=Quiet())
    return result.step, early.state(), best.state()


@pytest.fixture(scope="module")
def whole_count(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run in one go returns, and the steps of its checkpoints; once for all tests."""

    @functools.cache
    def run(low: int, eval_every: int = 1) -> tuple[tuple[int, Any, Any], Any]:
        folder = tmp_path_factory.mktemp("whole")
        result = run_counter(folder, 12, low, eval_every=eval_every)
        return result, sx.train.Checkpoints(folder / "checkpoints").steps()

    return run


@pytest.mark.parametrize(
    ("low", "cut", "eval_every"), [(3, 4, 1), (3, 3, 1), (6, 4, 1), (4, 3, 2), (4, 4, 2)]
)
def test_extended_run_stops_as_whole_run_does(
    tmp_path: Path, whole_count: Any, low: int, cut: int, eval_every: int
) -> None:
    whole, steps = whole_count(low, eval_every)
    run_counter(tmp_path / "parts", cut, low, eval_every=eval_every)
    # Resuming a finished run, too, changes nothing that an extension counts.
    run_counter(tmp_path / "parts", cut, low, eval_every=eval_every, resume=True)
    parts = run_counter(tmp_path / "parts", 12, low, eval_every=eval_every, resume=True)
    assert parts == whole
    assert sx.train.Checkpoints(tmp_path / "parts" / "checkpoints").steps() == steps


def test_extension_evaluates_what_its_start_owes(tmp_path: Path, whole_count: Any) -> None:
    whole, _ = whole_count(3)
    run_counter(tmp_path / "parts", 1, 3, eval_every=5)
    assert run_counter(tmp_path / "parts", 12, 3, resume=True) == whole
