# SPDX-License-Identifier: Apache-2.0
"""Steps that are not finite: where a run stops, what it names, what it skips and counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax.errors import TrainError
from tests.training.train.small_runs import Quiet


class Line(sx.Module):
    """Two Params, a mask that is infinite, and a mean of what it has seen."""

    def __init__(self) -> None:
        self.slope = sx.Param(jnp.array([1.0, 2.0]))
        self.offset = sx.Param(jnp.zeros(()))
        self.mask = sx.Param(jnp.array([0.0, -jnp.inf]))
        self.mean = sx.Variable(jnp.zeros(()))
        self.calls = sx.Variable(jnp.zeros((), jnp.int32))


class Counts:
    """Batches of four rows whose number is that of the batch, from 1."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Counts:
        return self

    def __next__(self) -> dict[str, Any]:
        self.at += 1
        return {"x": np.full((4,), self.at, np.float32)}

    def state(self) -> Any:
        return {"at": self.at}

    def restore(self, state: Any) -> None:
        self.at = state["at"]


def loss_spoiled_at(*steps: int, gradient_only: bool = False) -> Any:
    """A loss that is NaN for some batches, or only its gradient by ``slope``."""

    def loss(model: Line, batch: Any) -> Any:
        number = batch["x"][0]
        is_bad = jnp.isin(number, jnp.array(steps, jnp.float32))
        model.calls += 1
        model.mean.value = jnp.where(is_bad, jnp.nan, number)
        weights = jax.nn.softmax(model.mask.value)
        value = jnp.sum(weights * (model.slope.value - 3) ** 2) + (model.offset.value + 1) ** 2
        if not gradient_only:
            return value * jnp.where(is_bad, jnp.nan, 1.0)
        model.mean.value = number
        zero = jnp.where(is_bad, jnp.sum(model.slope.value) * 0, 1.0)
        return value + 0 * jnp.sqrt(zero)

    return loss


def run_line(
    folder: Path, steps: int, loss: Any, tx: Any = None, resume: bool = False, **options: Any
) -> tuple[Any, Line, Quiet]:
    """The result, model and display of a run."""
    model, display = Line(), Quiet()
    settings = {"log_every": 100, **options}
    more = {name: settings.pop(name) for name in ("mesh", "ema", "callbacks") if name in settings}
    trainer = sx.train.Trainer(
        model,
        sx.train.Optimizer(model, optax.sgd(0.1) if tx is None else tx),
        loss,
        Counts(),
        directory=folder,
        settings=sx.train.TrainerSettings(steps=steps, **settings),
        **more,
    )
    return trainer.run(resume=resume, display=display), model, display


def checkpoints_of(folder: Path) -> list[int]:
    return sx.train.Checkpoints(folder / "checkpoints").steps()


@pytest.mark.parametrize("log_every", [1, 7, 100])
def test_gradient_not_finite_stops_at_its_step(tmp_path: Path, log_every: int) -> None:
    loss = loss_spoiled_at(3, gradient_only=True)
    with pytest.raises(TrainError) as stopped:
        run_line(tmp_path, 9, loss, log_every=log_every, checkpoint_every=2)
    text = str(stopped.value)
    assert "The loss at step 3 is 2.048, but" in text
    assert "The gradients of model.slope are not finite." in text
    assert "Values of model.slope are no longer finite." in text
    assert "TrainerSettings(..., max_skipped_steps=10)" in text
    assert checkpoints_of(tmp_path) == [2]
    result, model, _ = run_line(tmp_path, 9, loss, resume=True, max_skipped_steps=10)
    assert result.step == 9 and np.isfinite(model.slope.value).all()


@pytest.mark.parametrize("steps", [1, 3])
def test_last_step_is_not_saved_if_spoiled(tmp_path: Path, steps: int) -> None:
    loss = loss_spoiled_at(steps, gradient_only=True)
    with pytest.raises(TrainError, match=f"loss at step {steps} is"):
        run_line(tmp_path, steps, loss, log_every=1 if steps == 1 else 100)
    assert checkpoints_of(tmp_path) == []


def test_update_not_finite_names_values_and_stops(tmp_path: Path) -> None:
    tx = optax.sgd(lambda count: jnp.where(count == 2, jnp.inf, 0.1))
    with pytest.raises(TrainError, match=r"step 3 is 2\.048, but") as stopped:
        run_line(tmp_path, 9, loss_spoiled_at(), tx, max_skipped_steps=5)
    assert "Values of model.slope, model.offset" in str(stopped.value)
    assert "gradients of" not in str(stopped.value)


@pytest.mark.parametrize("log_every", [1, 7, 30])
def test_apply_if_finite_runs_however_often_logged(tmp_path: Path, log_every: int) -> None:
    loss = loss_spoiled_at(2, 3, 7, 14, 30)
    tx = optax.apply_if_finite(optax.adam(0.1), 2)
    seen: list[float] = []
    result, model, _ = run_line(
        tmp_path,
        30,
        lambda model, batch: loss_of_values_only(loss, model, batch),
        tx,
        log_every=log_every,
        callbacks=[lambda event: seen.append(event.step) if event.kind == "step" else None],
    )
    assert (result.step, seen) == (30, list(range(1, 31)))
    assert np.isfinite(model.slope.value).all() and checkpoints_of(tmp_path) == [30]


def loss_of_values_only(loss: Any, model: Line, batch: Any) -> Any:
    """A loss that leaves the model's mean alone, as optax protects what is trained only."""
    value = loss(model, batch)
    model.mean.value = batch["x"][0]
    return value


def test_apply_if_finite_stops_after_its_own_limit(tmp_path: Path) -> None:
    loss = loss_spoiled_at(2, 3, 4)
    with pytest.raises(TrainError, match=r"loss at step 4 is nan.*model\.slope"):
        run_line(
            tmp_path,
            9,
            lambda model, batch: loss_of_values_only(loss, model, batch),
            optax.apply_if_finite(optax.sgd(0.1), 2),
        )


def test_skipped_steps_are_counted_and_change_nothing(tmp_path: Path) -> None:
    records = []
    for folder, loss, steps in (
        (tmp_path / "skipped", loss_spoiled_at(2, 5, 6), 7),
        (tmp_path / "plain", loss_spoiled_at(), 4),
    ):
        model_before = Line()
        tx = optax.adam(0.1)
        _, model, display = run_line(folder, steps, loss, tx, max_skipped_steps=2, log_every=1)
        assert not np.array_equal(model.slope.value, model_before.slope.value)
        log = sx.train.read_jsonl(folder / "log.jsonl")
        records.append((model, display.notes, [record["skipped_steps"] for record in log]))
    (model, notes, counts), (plain, no_notes, no_counts) = records
    assert (counts, no_counts, no_notes) == ([0, 1, 1, 1, 2, 3, 3], [0] * 4, [])
    assert [note[:12] for note in notes if "skipped" in note] == [
        f"step {step} was s" for step in (2, 5, 6)
    ]
    np.testing.assert_array_equal(model.slope.value, plain.slope.value)
    np.testing.assert_array_equal(model.offset.value, plain.offset.value)
    assert (float(model.mean.value), int(model.calls.value)) == (7.0, 7)


def test_skipping_ends_at_its_limit_also_resumed(tmp_path: Path) -> None:
    loss = loss_spoiled_at(2, 4, 5, 6)
    with pytest.raises(TrainError, match="3 steps in a row were skipped") as stopped:
        run_line(tmp_path / "whole", 9, loss, max_skipped_steps=2)
    assert "loss at step 6 is nan" in str(stopped.value)
    run_line(tmp_path / "parts", 5, loss, max_skipped_steps=2)
    with pytest.raises(TrainError, match=r"loss at step 6 is nan.*3 steps in a row"):
        run_line(tmp_path / "parts", 9, loss, resume=True, max_skipped_steps=2)
    with pytest.raises(TrainError, match=r"max_skipped_steps=-1.*0: the first step"):
        sx.train.TrainerSettings(steps=1, max_skipped_steps=-1)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_skipping_over_a_mesh_with_ema(tmp_path: Path, kind: Any) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    model = Line()
    ema = sx.train.EMA(model, 0.5)
    trainer = sx.train.Trainer(
        model,
        sx.train.Optimizer(model, optax.adam(0.1)),
        loss_spoiled_at(1, 3),
        Counts(),
        directory=tmp_path,
        settings=sx.train.TrainerSettings(steps=4, max_skipped_steps=1),
        mesh=mesh,
        rules={"batch": None},
        overrides={sx.OptState: {"slope": None}},
        ema=ema,
    )
    trainer.run(display=Quiet())
    _, plain, _ = run_line(tmp_path / "plain", 2, loss_spoiled_at(), optax.adam(0.1))
    np.testing.assert_array_equal(np.asarray(model.slope.value), plain.slope.value)
    assert np.isfinite(np.asarray(ema.model.slope.value)).all()
    assert int(trainer.optimizer.step.value) == 2
