# SPDX-License-Identifier: Apache-2.0
"""One run of a Trainer, from its first step to its result.

A run begins with everything in place: model and optimizer on the mesh, batches at their position.
It takes steps until the last one or a request to stop, and writes what is due after each: the log,
the evaluation, the checkpoint. Code of others (callbacks, trackers, the display, batches) that does
not return after a request to stop is left, and the run saves the steps that are done.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

import jax

from shardax import distributed, explain_retraces
from shardax.distributed.processes import from_main
from shardax.extend import PyTree
from shardax.train import agreement, step_numbers
from shardax.train.checkpoint import Checkpoints
from shardax.train.data import prefetch, sources
from shardax.train.errors import TrainError
from shardax.train.gradients.finite import FiniteCheck
from shardax.train.log import Trackers, read_jsonl
from shardax.train.progress import BoundedDisplay, OverdueError, SilentProgress, StopRequest
from shardax.train.run.start import RunStart
from shardax.train.speed import Throughput, throughput_text, utilization_of

if TYPE_CHECKING:
    from shardax.train.trainer import Trainer

Evaluate = Callable[[StopRequest], dict[str, float] | None]
"""Measures held-out numbers by name; None where it was stopped."""


@dataclass(frozen=True)
class RunResult:
    """End of a run.

    Attributes:
        step: Last step done.
        loss: Training loss of that step.
        eval_loss: Held-out loss at the end; None without held-out data or when stopped.
        stopped: The signal that stopped the run early, or None. With several processes SIGTERM in
            all of them, whichever got which signal.
        checkpoint: The last checkpoint's directory.
        log: The log file.

    Example:
        >>> from pathlib import Path
        >>> RunResult(10, 2.0, 2.1, None, Path("checkpoints/10"), Path("log.jsonl")).eval_loss
        2.1
    """

    step: int
    loss: float
    eval_loss: float | None
    stopped: Signals | None
    checkpoint: Path
    log: Path


def train_from(
    start: RunStart,
    trainer: Trainer,
    *,
    places: PyTree,
    checkpoints: Checkpoints,
    screen: BoundedDisplay,
    stop: StopRequest,
    evaluate: Evaluate,
) -> RunResult:
    """Runs from the checkpoint that was chosen, or from the beginning.

    Args:
        start: The checkpoint, or none.
        trainer: Settings of the run, and what is trained; placed on the mesh here.
        places: Shardings of the training batches.
        checkpoints: The open folder of checkpoints.
        screen: The display, whose calls end after a request to stop.
        stop: The request to stop, by a signal or a callback.
        evaluate: Measures held-out numbers.

    Returns:
        How the run ended, also after a request to stop.
    """
    for note in start.take(checkpoints):
        screen.note(note)
    if start.description is None and trainer.log_path.exists():
        screen.note("There is no checkpoint to go on from: starting again at step 0.")
    if not start.place(trainer, stop):
        screen.note("The batches have no position to go on from: they start anew.")
    if jax.process_count() > 1:
        agreement.compare_programs(trainer, places)
        agreement.compare_copies(trainer, "after placing, before the first step")

    steps = trainer.settings.steps - start.steps_done
    with (
        _prefetched(trainer.batches, places, steps, screen, stop) as source,
        _opened_log(trainer, start, stop) as log,
        trainer.profile or contextlib.nullcontext(),
        explain_retraces(file=False) as retraces,
    ):
        finite = FiniteCheck(
            trainer.trained, trainer.settings.max_skipped_steps, start.extra.get("skipped_steps")
        )
        run = _Run(
            trainer=trainer,
            evaluate=evaluate,
            checkpoints=checkpoints,
            source=source,
            log=log,
            screen=screen,
            stop=stop,
            retraces=retraces,
            finite=finite,
            step=start.steps_done,
            saved=start.step,
        )
        return run.to_end(was_evaluated=start.extra.get("evaluated"))


def _opened_log(trainer: Trainer, start: RunStart, stop: StopRequest) -> Trackers | SilentProgress:
    """Returns the destinations of records, which the main process writes."""
    if not distributed.is_main():
        return SilentProgress()
    return Trackers(trainer.log_path, trainer.trackers, start.step, stop)


@contextlib.contextmanager
def _prefetched(
    batches: PyTree, places: PyTree, steps: int, screen: BoundedDisplay, stop: StopRequest
) -> Generator[prefetch.Prefetch]:
    """Reads the batches ahead; a request to stop ends the wait for one."""
    source = prefetch.Prefetch(batches, places, limit=max(0, steps))
    stop.wake = source.interrupt
    try:
        yield source
    except KeyboardInterrupt:  # by a second SIGINT
        source.close(0.0)
        raise
    except BaseException:
        _close(source, screen, stop)
        raise
    _close(source, screen, stop)


def _close(source: prefetch.Prefetch, screen: BoundedDisplay, stop: StopRequest) -> None:
    """Waits for a batch that is being read, or leaves the source."""
    # A signal ends the first wait, the end of the time the second. Where it ended the wait of the
    # loop there is no other.
    is_closed = False
    with contextlib.suppress(OverdueError), stop.bounded("the batches"):
        is_closed = source.close() or source.close()
    if is_closed or source.close(0.0):
        return

    stop.grant()
    with contextlib.suppress(OverdueError):
        screen.note(
            "The batches still wait for data. They are left where they are; the checkpoint has "
            "the position to go on from."
        )


@dataclass
class _Run:
    """State of one call of ``Trainer.run``, and what follows each step."""

    trainer: Trainer
    evaluate: Evaluate
    checkpoints: Checkpoints
    source: prefetch.Prefetch
    log: Any
    screen: Any
    stop: StopRequest
    retraces: list[Any]  # that were not looked at yet
    finite: FiniteCheck
    step: int
    saved: int  # the last step of which there is a checkpoint, or -1
    evaluated: int = -1  # the last step of which callbacks know the evaluation
    pending: Any = None  # the loss of the last step, still on its devices
    numbers: Any = field(default_factory=dict)  # what else that step found, also on devices
    record: dict[str, Any] = field(default_factory=dict)  # all numbers of that step
    saving: float = 0.0  # seconds that saves held up the loop since the last record
    throughput: Throughput = field(default_factory=Throughput)
    retraced: set[str] = field(default_factory=set)  # which steps were said to be compiled again

    def to_end(self, was_evaluated: bool | None) -> RunResult:
        """Takes the steps that are left, and returns how the run ended.

        Args:
            was_evaluated: Whether callbacks know the evaluation of the checkpoint that the run goes
                on from; None: there is no checkpoint.
        """
        try:
            if was_evaluated:
                self.evaluated = self.step
            elif was_evaluated is False and self.step < self.trainer.settings.steps:
                self._evaluate_what_is_due()
            self._take_steps()
            return self._finish()
        except OverdueError as overdue:
            return self._leave(overdue)

    # --- Steps ---

    def _take_steps(self) -> None:
        settings, callbacks = self.trainer.settings, self.trainer.callbacks
        while self.step < settings.steps and not (callbacks.stopping or self.stop.reached()):
            try:
                batch = next(self.source)
            except prefetch.Interrupted:  # as a signal came while there was no batch
                break
            except StopIteration:
                raise TrainError(
                    f"The training batches ended after step {self.step} of {settings.steps}; give "
                    f"an endless iterator, or fewer steps. {self._last_saved()}"
                ) from None

            self._take_step(batch)
            self.record = {"loss": self.pending, **self.numbers}
            self._require_finite(behind=1)

            # A record reads the loss from the devices, and waits for the step; other steps are only
            # queued.
            is_recorded = self.step % settings.log_every == 0 or self.step == settings.steps
            if is_recorded:
                self._write_record()
            else:
                self.screen.step(self.step, None, None)
            with self.throughput.paused():
                self._do_what_is_due(is_recorded)

        # The last step is saved whatever the intervals say, so that the run can go on from it.
        if self.saved != self.step:
            self._save()
        self.checkpoints.wait()

    def _take_step(self, batch: PyTree) -> None:
        """Takes a step, and tells of a finished trace and of retraces."""
        trainer, profile = self.trainer, self.trainer.profile
        number, is_first = self.step + 1, self.pending is None
        with contextlib.nullcontext() if profile is None else profile.step(number):
            self.pending, self.numbers = trainer.train_step(*trainer.trained, batch)
        self.finite.add(number, self.pending, self.numbers.pop("not_finite"))
        self.step = number
        self.throughput.count(batch, self.pending)

        if profile is not None and profile.ends(number, self.pending):
            steps = f"{profile.first} to {profile.last}"
            self.screen.note(f"the trace of steps {steps} is in {profile.folder}")
        self._tell_retraces()

        # How busy the devices are follows from the program, which the first step has compiled.
        if is_first and distributed.is_main():
            with self.throughput.paused():
                step: Any = trainer.train_step
                mesh = trainer.mesh
                devices = jax.devices()[:1] if mesh is None else [*mesh.devices.flat]
                self.throughput.ideal, reason = utilization_of(
                    lambda: step.lower(*trainer.trained, batch),
                    devices,
                    trainer.settings.peak_flops,
                )
                if reason:
                    self.screen.note(reason)

    def _tell_retraces(self) -> None:
        """Says why a step was compiled again, once for each."""
        for retrace in self.retraces:
            name = retrace.function.rpartition(".")[2]
            if retrace.function.startswith("Trainer.") and name not in self.retraced:
                self.retraced.add(name)
                reasons = "; ".join(retrace.reasons[:4])
                self.screen.note(
                    f"step {self.step}: {name} was compiled again, because {reasons} (said once)"
                )
        self.retraces.clear()

    def _write_record(self) -> None:
        """Logs and shows the loss and the other numbers of the step."""
        trainer = self.trainer
        loss, speeds = float(self.pending), self.throughput.numbers()
        numbers = {name: float(number) for name, number in jax.device_get(self.numbers).items()}
        memory = step_numbers.device_memory()
        if memory is not None:
            numbers["memory"] = memory
        numbers |= speeds
        if self.saving:
            numbers["checkpoint_seconds"], self.saving = self.saving, 0.0

        trainer.folder.check()
        if trainer.callbacks.functions:
            numbers = from_main(numbers, "the numbers of a step")
        self.record = {"loss": loss, **numbers}
        problem = self.finite.problem()
        if trainer.settings.max_skipped_steps:
            self.record["skipped_steps"] = self.finite.skipped

        # A loss that ends the run is logged and shown before.
        self.log.write(step=self.step, **self.record)
        self.screen.step(self.step, loss, throughput_text(speeds))
        self._require_finite(problem)

    def _require_finite(self, problem: str = "", *, behind: int = 0) -> None:
        """Raises if a step was not finite; tells of skipped ones."""
        problem = problem or self.finite.problem(behind)
        for note in self.finite.notes:
            self.screen.note(note)
        self.finite.notes.clear()
        if problem:
            raise TrainError(
                f"{problem} Lower the learning rate or clip the gradients; "
                "jax.config.update('jax_debug_nans', True) finds the operation. "
                f"{self._last_saved()} What went wrong may have begun a step before a checkpoint: "
                f"Checkpoints({str(self.checkpoints.directory)!r}).rewind(step) goes back further."
            )

    # --- What is due after a step ---

    def _do_what_is_due(self, is_recorded: bool) -> None:
        """Calls the callbacks, compares copies, evaluates and saves, as settings say."""
        trainer, settings = self.trainer, self.trainer.settings
        self._fire("step", self.record, is_recorded)
        if _divides(settings.check_replicas_every, self.step) and jax.process_count() > 1:
            agreement.compare_copies(trainer, f"after step {self.step}")
        if _divides(settings.eval_every, self.step):
            self._require_finite()
            self._evaluate_and_record()
        if _divides(settings.checkpoint_every, self.step) or trainer.callbacks.saving:
            self._save()

    def _fire(self, kind: str, numbers: Mapping[str, Any], agreed: bool = True) -> None:
        """Calls the callbacks."""
        if self.trainer.callbacks.functions:
            with self.stop.bounded("a callback"):
                self.trainer.callbacks.fire(kind, self.step, numbers, agreed)

    def _evaluate_and_record(self) -> float | None:
        """Returns the held-out loss; None without held-out data or when stopped."""
        numbers = None if self.trainer.held_out is None else self.evaluate(self.stop)
        if numbers is None:
            return None

        self.log.write(step=self.step, **numbers)
        self.record = {**self.record, **numbers}
        self.evaluated = self.step
        self._tell_retraces()
        self._fire("eval", numbers)

        metrics = [f"  {name[5:]} {number:.4f}" for name, number in numbers.items()][1:]
        self.screen.note(
            f"step {self.step}: held-out loss {numbers['eval_loss']:.4f}{''.join(metrics)}"
        )
        return numbers["eval_loss"]

    def _evaluate_what_is_due(self) -> None:
        """Evaluates the step of a checkpoint saved without its evaluation."""
        # The run before ended or was stopped there, and may have logged it since. The checkpoint
        # is there already, so none is saved for BestCheckpoint.
        trainer = self.trainer
        if trainer.held_out is None or not _divides(trainer.settings.eval_every, self.step):
            return
        numbers = _held_out_numbers(self._logged())
        if not numbers:
            self._evaluate_and_record()
        else:
            self.evaluated = self.step
            self._fire("eval", numbers)
        self.checkpoints.pinned = trainer.callbacks.pinned()

    def _logged(self) -> dict[str, Any]:
        """Returns the log's numbers of the run's step."""
        logged: dict[str, Any] = {}
        for record in read_jsonl(self.trainer.log_path) if distributed.is_main() else ():
            if record.get("step") == self.step:
                logged.update(record)
        return from_main(logged, "the end of the log")

    def _save(self) -> None:
        self._write_checkpoint()
        self._fire("checkpoint", self.record)

    def _write_checkpoint(self) -> None:
        trainer = self.trainer
        self._require_finite()
        trainer.folder.check()

        extra = {
            "data": sources.saved_position(trainer.batches, self.source.state()),
            "settings": trainer.run_settings,
            "evaluated": self.evaluated == self.step,
        }
        if trainer.settings.max_skipped_steps:
            extra["skipped_steps"] = self.finite.state()
        if trainer.callbacks.functions:
            extra["callbacks"] = trainer.callbacks.states()
        self.checkpoints.pinned = trainer.callbacks.pinned()

        # The step has ended, as its loss was read: what follows holds up the loop.
        begin = time.perf_counter()
        self.checkpoints.save(self.step, trainer.trained, extra=extra)
        self.saving += time.perf_counter() - begin
        self.saved = self.step

    def _last_saved(self) -> str:
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        if not steps:
            return "There is no checkpoint yet."
        return f"There are checkpoints of steps {steps}."

    # --- The end ---

    def _finish(self) -> RunResult:
        """Evaluates a run that is done, and says how a stopped one ended."""
        trainer, stop = self.trainer, self.stop
        is_done = self.step >= trainer.settings.steps
        if stop:
            name = stop.signal.name if stop.signal else "request"
            self.screen.note(f"stopped by {name}; saved at step {self.step}")
        elif trainer.callbacks.stopping and not is_done:
            self.screen.note(f"stopped by a callback; saved at step {self.step}")

        # A finished run does not measure or log again what it has already measured.
        logged = self._logged()
        loss = float(logged.get("loss", math.nan) if self.pending is None else self.pending)
        eval_loss = None
        if is_done or (trainer.callbacks.stopping and not stop):
            eval_loss = logged.get("eval_loss")
            if eval_loss is None:
                eval_loss = self._evaluate_and_record()
            elif self.evaluated != self.step:  # logged past the checkpoint
                self._fire("eval", _held_out_numbers(logged))

        self._wait_for_checkpoints()
        self._fire("end", {"loss": loss, **self.record})
        return self._result(loss, eval_loss)

    def _leave(self, overdue: OverdueError) -> RunResult:
        """Saves the steps that are done, and calls no code of others any more."""
        stop, screen = self.stop, self.screen
        assert stop.signal is not None
        self.screen = SilentProgress()
        if self.saved != self.step:
            self._write_checkpoint()
        self._wait_for_checkpoints()
        result = self._result(math.nan if self.pending is None else float(self.pending), None)

        stop.grant()
        with contextlib.suppress(OverdueError):
            screen.note(
                f"stopped by {stop.signal.name}; saved at step {self.step}, without waiting any "
                f"longer for {overdue.what}"
            )
        return result

    def _wait_for_checkpoints(self) -> None:
        self.checkpoints.pinned = self.trainer.callbacks.pinned(ended=True)
        self.checkpoints.wait()

    def _result(self, loss: float, eval_loss: float | None) -> RunResult:
        self.trainer.folder.check()
        path, log = self.checkpoints.path(self.step), self.trainer.log_path
        return RunResult(self.step, loss, eval_loss, self.stop.signal, path, log)


def _held_out_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of an evaluation in a record of the log."""
    return {name: number for name, number in record.items() if name.startswith("eval_")}


def _divides(every: int, step: int) -> bool:
    """Whether something that is done every so many steps is due; 0: never."""
    return every > 0 and step % every == 0
