# SPDX-License-Identifier: Apache-2.0
"""A training run trains, evaluates, logs, saves, stops on request, and goes on where it was."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import shardax as sx
from shardax.errors import DataError, PartitionCheckError, TrainError
from shardax.models import next_token_loss
from tests.training.train.small_runs import (
    BATCH,
    HELD_OUT,
    SEQ,
    TRAIN,
    Bigram,
    Quiet,
    eval_batches,
    make_trainer,
    state_of,
)

STEPS = 12


def auto(shape: tuple[int, ...] = (2, 4)) -> Mesh:
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def log_of(trainer: sx.train.Trainer, name: str) -> list[tuple[int, Any]]:
    records = sx.train.read_jsonl(trainer.log_path)
    return [(record["step"], record[name]) for record in records if name in record]


def kill_at(step: int, number: signal.Signals) -> Quiet:
    return Quiet(lambda done: os.kill(os.getpid(), number) if done == step else None)


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


class Run:
    """An uninterrupted run over 8 devices, with dropout, and the losses that it was traced for."""

    def __init__(self, directory: Path) -> None:
        self.traces: list[bool] = []
        self.display = Quiet()
        self.trainer = make_trainer(
            directory,
            STEPS,
            model=Bigram(dropout=0.1),
            loss=self.loss,
            held_out=eval_batches(),
            mesh=auto(),
            log_every=5,
            eval_every=4,
            checkpoint_every=3,
        )
        with sx.explain_retraces(file=False) as self.retraces:
            self.result = self.trainer.run(display=self.display)
        self.state = state_of(self.trainer)

    def loss(self, model: Any, batch: Any) -> Any:
        self.traces.append(model.dropout.deterministic)
        return next_token_loss(model, batch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("whole"))


def like_whole(directory: Path, **changes: Any) -> sx.train.Trainer:
    """A trainer of the same run, its model built anew and lazy."""
    defaults: dict[str, Any] = {
        "model": Bigram(dropout=0.1),
        "held_out": eval_batches(),
        "mesh": auto(),
        "steps": STEPS,
        "log_every": 5,
        "eval_every": 4,
        "checkpoint_every": 3,
    }
    return make_trainer(directory, **{**defaults, **changes})


# --- what a run leaves ----------------------------------------------------------------------------


def test_loss_falls_on_a_repetitive_text(tmp_path: Path) -> None:
    model = Bigram(init=jax.nn.initializers.normal(0.25))
    trainer = make_trainer(tmp_path, 60, model=model, tx=optax.adam(3e-2))
    result = trainer.run(display=Quiet())
    losses = [loss for _, loss in log_of(trainer, "loss")]
    assert losses[0] > 3 and losses[-1] < 1
    assert losses == sorted(losses, reverse=True)
    assert result.loss == losses[-1]


def test_log_has_losses_speeds_and_evaluations_at_steps(whole: Run) -> None:
    losses, speeds = log_of(whole.trainer, "loss"), log_of(whole.trainer, "tokens_per_second")
    evaluations = log_of(whole.trainer, "eval_loss")
    assert [step for step, _ in losses] == [5, 10, 12]
    assert [step for step, _ in speeds] == [5, 10, 12]
    assert [step for step, _ in evaluations] == [4, 8, 12]
    # What saves held up the loop, in the record after them: of step 3, then of steps 6 and 9.
    held_up = log_of(whole.trainer, "checkpoint_seconds")
    assert [step for step, _ in held_up] == [5, 10]
    assert all(0 < number < math.inf for _, number in losses + speeds + evaluations + held_up)
    assert whole.result == sx.train.RunResult(
        step=STEPS,
        loss=losses[-1][1],
        eval_loss=evaluations[-1][1],
        stopped=None,
        checkpoint=whole.trainer.checkpoint_directory / "00000012",
        log=whole.trainer.log_path,
    )


def test_display_shows_every_step_and_evaluation(whole: Run) -> None:
    assert whole.display.span == (0, STEPS)
    assert whole.display.steps == list(range(1, STEPS + 1))
    assert whole.display.notes == [
        f"step {step}: held-out loss {loss:.4f}"
        for step, loss in log_of(whole.trainer, "eval_loss")
    ]


def test_last_due_checkpoints_and_final_one_are_kept(whole: Run, tmp_path: Path) -> None:
    assert sx.train.Checkpoints(whole.trainer.checkpoint_directory).steps() == [9, 12]
    trainer = make_trainer(tmp_path, 5, checkpoint_every=2, keep_checkpoints=9)
    trainer.run(display=Quiet())
    assert sx.train.Checkpoints(trainer.checkpoint_directory).steps() == [2, 4, 5]


def test_trainer_compiles_each_step_once_whatever_comes_between(whole: Run) -> None:
    assert whole.retraces == []
    # Training is traced with dropout, evaluation without; once each.
    assert sorted(whole.traces) == [False, True]


def test_held_out_loss_averages_over_every_target_byte(whole: Run) -> None:
    model = whole.trainer.model
    logits = np.asarray(model.embed.embedding.value, np.float64) @ np.asarray(
        model.head.kernel.value, np.float64
    ) + np.asarray(model.head.bias.value)
    log_sum = np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    counts = np.zeros((256, 256))
    for segment in HELD_OUT.segments():
        np.add.at(counts, (segment[:-1], segment[1:]), 1)
    by_hand = np.sum(counts * (log_sum - logits)) / np.sum(counts)
    assert whole.result.eval_loss == pytest.approx(by_hand, rel=1e-6)
    assert whole.trainer.evaluate() == whole.result.eval_loss
    assert eval_batches().targets == np.sum(counts)
    assert eval_batches().targets % (BATCH * SEQ) != 0  # so that padding would be seen


def test_evaluation_leaves_modes_and_random_streams_unchanged(whole: Run, tmp_path: Path) -> None:
    model = whole.trainer.model
    assert model.dropout.deterministic is False
    unevaluated = like_whole(tmp_path, held_out=None)
    unevaluated.run(display=Quiet())
    assert state_of(unevaluated) == whole.state


def test_evaluation_keeps_a_frozen_module_frozen(tmp_path: Path) -> None:
    model = Bigram(dropout=0.5)
    model.eval()
    trainer = make_trainer(tmp_path, 1, model=model, held_out=eval_batches(max_batches=1))
    trainer.evaluate()
    assert model.dropout.deterministic is True


def test_evaluation_restores_the_mode_of_each_module(tmp_path: Path) -> None:
    model = Bigram(dropout=0.1)
    model.frozen = sx.nn.Dropout(0.5, deterministic=True)
    modes = []

    def loss(model: Any, batch: Any) -> Any:
        modes.append((model.dropout.deterministic, model.frozen.deterministic))
        return next_token_loss(model, batch)

    make_trainer(tmp_path, 1, model=model, loss=loss, held_out=eval_batches()).evaluate()
    assert modes == [(True, True)]
    assert (model.dropout.deterministic, model.frozen.deterministic) == (False, True)


def test_evaluation_places_a_lazy_model_first(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, held_out=eval_batches(max_batches=1), mesh=auto())
    assert trainer.evaluate() == pytest.approx(math.log(256), abs=0.2)
    assert trainer.model.head.kernel.sharding.spec == jax.sharding.PartitionSpec(None, "model")


def test_batches_without_a_mask_count_by_their_rows(tmp_path: Path) -> None:
    sizes = [2, 6]
    held_out = [
        {"x": np.full((size, 3), value)} for size, value in zip(sizes, [1.0, 5.0], strict=True)
    ]
    trainer = make_trainer(
        tmp_path, 1, loss=lambda model, batch: jnp.mean(batch["x"]), held_out=held_out
    )
    assert trainer.evaluate() == (2 * 1.0 + 6 * 5.0) / 8


def test_accumulated_gradients_train_as_the_whole_batch_does(tmp_path: Path) -> None:
    trainers = [
        make_trainer(tmp_path / str(parts), 5, mesh=auto(), grad_accumulation=parts)
        for parts in (1, 2)
    ]
    results = [trainer.run(display=Quiet()) for trainer in trainers]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    one, two = (dict(sx.iter_variables(trainer.model, sx.Param)) for trainer in trainers)
    for path in one:
        np.testing.assert_allclose(one[path].value, two[path].value, rtol=1e-3, atol=1e-5)


# --- stopping and going on ------------------------------------------------------------------------


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_run_after_the_step_saved(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    display = kill_at(2, number)
    result = make_trainer(tmp_path, 5, held_out=eval_batches()).run(display=display)
    assert (result.step, result.stopped, result.eval_loss) == (2, number, None)
    assert result.checkpoint == tmp_path / "checkpoints" / "00000002"
    assert sx.train.Checkpoints(tmp_path / "checkpoints").latest() == 2
    assert display.notes == [f"stopped by {number.name}; saved at step 2"]
    assert signal.getsignal(number) is before


class Stalling(sx.train.TrainBatches):
    """Asks the process to stop when its fourth batch is read, and waits for ever."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(TRAIN, batch_size=BATCH, seq_len=SEQ)
        self.number = number

    def __next__(self) -> Any:
        return ask_and_wait(self.number) if self.step == 3 else super().__next__()


def ask_and_wait(number: signal.Signals = signal.SIGTERM) -> Any:
    os.kill(os.getpid(), number)
    threading.Event().wait()


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_run_whose_source_waits(tmp_path: Path, number: signal.Signals) -> None:
    display = Quiet()
    trainer = make_trainer(tmp_path, 6, batches=Stalling(number))
    result = trainer.run(display=display)
    assert (result.step, result.stopped) == (3, number)
    assert sx.train.Checkpoints(tmp_path / "checkpoints").latest() == 3
    stopped, left = display.notes
    assert stopped == f"stopped by {number.name}; saved at step 3"
    assert left.startswith("The batches still wait for data. They are left where they are;")
    with pytest.raises(DataError, match=r"The batches \(Stalling\) are still being read"):
        trainer.run(resume=True)
    resumed, whole = make_trainer(tmp_path, 6), make_trainer(tmp_path / "whole", 6)
    resumed.run(resume=True, display=Quiet())
    whole.run(display=Quiet())
    assert state_of(resumed) == state_of(whole)


class HeldOut:
    """Held-out data that asks the process to stop at its second pass, and waits for ever."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(eval_batches()) if self.passes < 3 else iter(ask_and_wait, None)


class Tracker:
    """Waits for ever at the record of step 2."""

    closed = False

    def write(self, **record: Any) -> None:
        if record["step"] == 2:
            ask_and_wait()

    def close(self) -> None:
        self.closed = True


def wait_at_step_2(event: sx.train.Event) -> None:
    if (event.kind, event.step) == ("step", 2):
        ask_and_wait()


def display_that_waits(step: int) -> None:
    if step == 2:
        ask_and_wait()


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("a callback", lambda: {"callbacks": (wait_at_step_2,)}),
        ("Tracker", lambda: {"layout": {"trackers": (Tracker(),)}}),
        ("the held-out data", lambda: {"held_out": HeldOut(), "eval_every": 2}),
        ("the display", dict),
    ],
)
def test_signal_ends_a_run_that_waits_for_code_of_others(
    what: str, options: Any, tmp_path: Path
) -> None:
    display = Quiet(display_that_waits if what == "the display" else None)
    given = {"log_every": 1, "stop_within": 0.05, **options()}
    result = make_trainer(tmp_path, 6, **given).run(display=display)
    assert (result.step, result.stopped) == (2, signal.SIGTERM)
    assert sx.train.Checkpoints(tmp_path / "checkpoints").latest() == 2
    assert display.notes == [
        f"stopped by SIGTERM; saved at step 2, without waiting any longer for {what}"
    ]
    logged = [record["step"] for record in sx.train.read_jsonl(tmp_path / "log.jsonl")]
    assert logged == [1, 2]


class StartingTracker(Tracker):
    """Waits for ever before its first record."""

    def resume(self, step: int) -> None:
        ask_and_wait()


def test_signal_ends_a_run_that_waits_before_its_first_step(tmp_path: Path) -> None:
    layout = {"trackers": (StartingTracker(),)}
    result = make_trainer(tmp_path, 6, layout=layout, stop_within=0.05).run(display=Quiet())
    assert (result.step, result.stopped, math.isnan(result.loss)) == (0, signal.SIGTERM, True)
    assert sx.train.Checkpoints(tmp_path / "checkpoints").steps() == []
    assert make_trainer(tmp_path, 1).run(resume=True, display=Quiet()).step == 1


def test_run_without_time_for_others_saves_and_rewinds(tmp_path: Path) -> None:
    source = sx.train.TrainBatches(TRAIN, batch_size=BATCH, seq_len=SEQ)
    display = kill_at(2, signal.SIGTERM)
    result = make_trainer(tmp_path, 6, batches=source, stop_within=0).run(display=display)
    assert (result.step, result.stopped) == (2, signal.SIGTERM)
    assert sx.train.Checkpoints(tmp_path / "checkpoints").latest() == 2
    resumed, whole = make_trainer(tmp_path, 4), make_trainer(tmp_path / "whole", 4)
    resumed.run(resume=True, display=Quiet())
    whole.run(display=Quiet())
    assert state_of(resumed) == state_of(whole)
    with pytest.raises(TrainError, match="needs stop_within to be a number of seconds, 0 or more"):
        sx.train.TrainerSettings(steps=1, stop_within=-1.0)


def test_source_that_waits_after_the_last_batch_holds_up_no_run(tmp_path: Path) -> None:
    result = make_trainer(tmp_path, 3, batches=Stalling(signal.SIGTERM)).run(display=Quiet())
    assert (result.step, result.stopped) == (3, None)


def test_run_resumes_bit_for_bit_after_a_signal(whole: Run, tmp_path: Path) -> None:
    assert like_whole(tmp_path).run(display=kill_at(7, signal.SIGTERM)).step == 7
    resumed = like_whole(tmp_path)
    assert all(variable.is_lazy for _, variable in sx.iter_variables(resumed.model, sx.Param))
    display = Quiet()
    result = resumed.run(resume=True, display=display)
    assert display.span == (7, STEPS) and display.steps == [8, 9, 10, 11, 12]
    assert state_of(resumed) == whole.state
    assert (result.loss, result.eval_loss) == (whole.result.loss, whole.result.eval_loss)
    for name in ("loss", "eval_loss"):
        assert log_of(resumed, name) == log_of(whole.trainer, name)


def test_crashed_run_repeats_steps_since_the_last_checkpoint(whole: Run, tmp_path: Path) -> None:
    class PowerCutError(Exception):
        pass

    def cut(step: int) -> None:
        if step == 8:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        like_whole(tmp_path, log_every=1).run(display=Quiet(cut))
    resumed = like_whole(tmp_path, log_every=1)
    assert [step for step, _ in log_of(resumed, "loss")] == list(range(1, 9))
    display = Quiet()
    resumed.run(resume=True, display=display)
    assert display.span == (6, STEPS)
    assert [step for step, _ in log_of(resumed, "loss")] == list(range(1, STEPS + 1))
    assert [step for step, _ in log_of(resumed, "eval_loss")] == [4, 8, 12]
    assert state_of(resumed) == whole.state


def test_resuming_a_finished_run_changes_nothing(whole: Run, tmp_path: Path) -> None:
    trainer = like_whole(whole.trainer.directory)
    before = files_of(trainer.directory)
    result = trainer.run(resume=True, display=(display := Quiet()))
    assert result == whole.result
    assert display.steps == [] and display.notes == []
    assert files_of(trainer.directory) == before
    assert state_of(trainer) == whole.state


@pytest.mark.parametrize("shape", [(8, 1), (1, 2)])
def test_run_can_go_on_over_another_mesh(whole: Run, shape: tuple[int, int]) -> None:
    trainer = like_whole(whole.trainer.directory, mesh=auto(shape))
    trainer.run(resume=True, display=Quiet())
    assert state_of(trainer) == whole.state
    assert trainer.model.head.kernel.sharding.mesh.devices.shape == shape


def test_run_can_go_on_without_a_mesh(whole: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(whole.trainer.directory, tmp_path / "copy")
    sx.train.Checkpoints(copy / "checkpoints").rewind(9)
    trainer = like_whole(copy, mesh=None)
    result = trainer.run(resume=True, display=Quiet())
    assert result.step == STEPS
    assert result.loss == pytest.approx(whole.result.loss, rel=1e-5)
    assert len(trainer.model.head.kernel.value.devices()) == 1


def test_resuming_where_nothing_is_starts_from_the_beginning(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, 1).run(resume=True, display=Quiet()).step == 1


# --- what is refused ------------------------------------------------------------------------------


def test_used_directory_is_refused_unchanged(whole: Run, tmp_path: Path) -> None:
    before = files_of(whole.trainer.directory)
    again = like_whole(whole.trainer.directory)
    with pytest.raises(TrainError, match=r"already holds a run, saved at step 12.*resume=True"):
        again.run(display=Quiet())
    assert files_of(whole.trainer.directory) == before
    assert again.model.head.kernel.is_lazy

    (tmp_path / "log.jsonl").write_text('{"step":1,"loss":2.0}\n')
    with pytest.raises(TrainError, match="already holds a run"):
        make_trainer(tmp_path, 3).run(display=Quiet())
    assert files_of(tmp_path) == {"log.jsonl": b'{"step":1,"loss":2.0}\n'}


@pytest.mark.parametrize(
    ("batch_size", "parts", "shape", "message"),
    [
        (5, 1, (2, 4), r"5 along 'batch'.* mesh axis 'data' of size 2.*multiple of 2, such as 6"),
        (6, 4, (2, 4), r"shape \(6, 16\).*grad_accumulation=4.*multiple of 8, such as 8"),
        (6, 2, (2, 4), r"in 2 parts: 3 along 'batch'.* of size 2.*multiple of 4, such as 8"),
        (6, 4, None, r"grad_accumulation=4.*multiple of 4, such as 8"),
    ],
)
def test_indivisible_batches_are_refused_before_anything_is_made(
    tmp_path: Path, batch_size: int, parts: int, shape: Any, message: str
) -> None:
    trainer = make_trainer(
        tmp_path / "run",
        3,
        batch_size=batch_size,
        grad_accumulation=parts,
        mesh=None if shape is None else auto(shape),
    )
    with pytest.raises(TrainError, match=rf"(?s)training batch.*\['inputs'\].*{message}"):
        trainer.run(display=Quiet())
    assert trainer.model.head.kernel.is_lazy and not trainer.directory.exists()
    assert trainer.batches.step == 0


def test_indivisible_held_out_batches_are_refused_at_start(tmp_path: Path) -> None:
    held_out = sx.train.EvalBatches(HELD_OUT, batch_size=7, seq_len=SEQ)
    trainer = make_trainer(tmp_path / "run", 3, held_out=held_out, mesh=auto())
    with pytest.raises(TrainError, match="held-out batch cannot be laid out"):
        trainer.run(display=Quiet())
    assert not trainer.directory.exists()


def test_model_without_valid_layout_is_refused_at_start(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", 3, mesh=jax.make_mesh((8,), ("data",)))
    with pytest.raises(PartitionCheckError, match="'model'"):
        trainer.run(display=Quiet())
    assert not trainer.directory.exists()


class OnceOnly:
    """Batches that cannot be saved."""

    def __iter__(self) -> Any:
        return iter([{"inputs": np.zeros((8, 4), np.int32), "targets": np.zeros((8, 4), np.int32)}])


class Few(sx.train.TrainBatches):
    """Batches that come to an end."""

    def __next__(self) -> Any:
        if self.step >= 3:
            raise StopIteration
        return super().__next__()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": OnceOnly()}, r"OnceOnly\) have no state\(\) and restore\(\)"),
        ({"held_out": iter([])}, "can be read once"),
        ({"held_out": []}, "held_out has no batches"),
    ],
)
def test_batches_without_state_or_second_pass_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    trainer = make_trainer(tmp_path / "run", 3, **change)
    with pytest.raises(TrainError, match=message):
        trainer.run(display=Quiet())
    assert not trainer.directory.exists()


def test_batches_ending_early_raise_naming_the_step(tmp_path: Path) -> None:
    batches = Few(TRAIN, batch_size=BATCH, seq_len=SEQ)
    trainer = make_trainer(tmp_path, 5, batches=batches, checkpoint_every=2)
    with pytest.raises(TrainError, match=r"ended after step 3 of 5.*checkpoints of steps \[2\]"):
        trainer.run(display=Quiet())


@pytest.mark.parametrize("options", [{"log_every": 1}, {"log_every": 9, "checkpoint_every": 3}])
def test_loss_not_finite_stops_the_run_unsaved(tmp_path: Path, options: dict[str, int]) -> None:
    def spoiled(model: Any, batch: Any) -> Any:
        return next_token_loss(model, batch) * jnp.where(model.calls.value < 3, 1.0, jnp.nan)

    model = Bigram()
    model.calls = sx.Variable(jnp.int32(0))

    def counting(model: Any, batch: Any) -> Any:
        model.calls += 1
        return spoiled(model, batch)

    trainer = make_trainer(tmp_path, 9, model=model, loss=counting, **options)
    with pytest.raises(TrainError, match=r"loss at step 3 is nan.*There is no checkpoint yet"):
        trainer.run(display=Quiet())
    assert sx.train.Checkpoints(trainer.checkpoint_directory).steps() == []


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps=0"),
    ({"steps": 2.5}, "steps=2.5"),
    ({"steps": 1, "log_every": 0}, "log_every=0"),
    ({"steps": 1, "keep_checkpoints": 0}, "keep_checkpoints=0"),
    ({"steps": 1, "grad_accumulation": True}, "grad_accumulation=True"),
    ({"steps": 1, "eval_every": -1}, "eval_every=-1.*0: only at the end"),
    ({"steps": 1, "checkpoint_every": -5}, "checkpoint_every=-5.*0: only at the end"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        sx.train.TrainerSettings(**settings)


def test_evaluating_without_held_out_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="held_out=EvalBatches"):
        make_trainer(tmp_path, 1).evaluate()


def test_abstract_mesh_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"jax.make_mesh"):
        make_trainer(tmp_path, 1, mesh=auto().abstract_mesh)
