# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, held-out evaluation, checkpoints, log, progress, stopping on request.

A run is determined by its model, optimizer, data and settings. After each step its whole state is
the Variables of model and optimizer and the position in the data. That is what a checkpoint holds,
so a run that was killed and resumed ends in the same parameters, to the last bit, as one that was
not.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax.core.errors import TrainerError
from shardax.partition.mesh import resolve_mesh
from shardax.partition.placement import shard
from shardax.partition.scope import axis_rules, logical_to_mesh_axes
from shardax.train.accumulation import accumulated_value_and_grad
from shardax.train.checkpoint import Checkpoints
from shardax.train.log import JsonlLog
from shardax.train.prefetch import Prefetch, put_batch
from shardax.train.progress import Display, make_display
from shardax.train.signals import StopRequest
from shardax.transforms.jit import jit

Loss = Callable[[Any, Any], Any]
"""``loss(model, batch)``: the mean loss over the batch's targets (those where ``mask`` is true)."""


@dataclass(frozen=True)
class TrainerSettings:
    """How long to train and what to do along the way.

    Attributes:
        steps: Number of optimizer steps of the whole run, resumed parts included.
        log_every: Steps between log records of the training loss.
        eval_every: Steps between held-out evaluations; 0: only at the end.
        checkpoint_every: Steps between checkpoints; 0: only at the end.
        keep_checkpoints: How many checkpoints to keep.
        grad_accumulation: Parts into which each batch is split to save memory; the update is that
            of the whole batch.

    Example:
        >>> TrainerSettings(steps=100, checkpoint_every=25).log_every
        10
    """

    steps: int
    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    grad_accumulation: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "log_every", "keep_checkpoints", "grad_accumulation"):
            if getattr(self, name) < 1:
                raise TrainerError(f"{name}={getattr(self, name)}, but it must be at least 1.")
        for name in ("eval_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise TrainerError(f"{name}={getattr(self, name)}; give 0 for only at the end.")


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        step: Last step done.
        loss: Training loss of that step.
        eval_loss: Held-out loss at the end; None without held-out data or when stopped.
        stopped: The signal that stopped the run early, or None.
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


class Trainer:
    """Trains a model: places it on the mesh, runs the loop, and keeps what is needed to resume.

    Args:
        model: The model, usually still lazy.
        optimizer: Its ``Optimizer``.
        loss: ``loss(model, batch)``, the mean loss over the batch's targets.
        batches: Endless host batches that can be saved and restored, such as ``TrainBatches``.
        directory: Where checkpoints and the log go.
        settings: See ``TrainerSettings``.
        held_out: Batches with a ``mask`` for held-out evaluation, such as ``EvalBatches``.
        mesh: The mesh to train on; by default the one in scope, else the default device.
        rules: Rules from axis names to mesh axes. The batch has the axes ``("batch", "seq")``.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, shardax as sx
        >>> text = sx.train.ByteText.from_bytes(b"so it goes. " * 200)
        >>> train, held_out = text.split(0.1)
        >>> rngs = sx.Rngs(0)
        >>> embed, head = sx.nn.Embed(256, 8, rngs=rngs), sx.nn.Linear(8, 256, rngs=rngs)
        >>> model = sx.nn.Sequential(embed, head)
        >>> trainer = sx.train.Trainer(
        ...     model, sx.train.Optimizer(model, optax.adam(1e-2)), sx.models.next_token_loss,
        ...     sx.train.TrainBatches(train, batch_size=4, seq_len=16),
        ...     directory=tempfile.mkdtemp(), settings=sx.train.TrainerSettings(steps=3))
        >>> trainer.run().step  # doctest: +ELLIPSIS
        step 3/3  loss ...
        3
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Loss,
        batches: Any,
        *,
        directory: str | Path,
        settings: TrainerSettings,
        held_out: Iterable[Any] | None = None,
        mesh: Any = None,
        rules: Any = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.batches = batches
        self.held_out = held_out
        self.settings = settings
        self.directory = Path(directory)
        found = resolve_mesh(mesh)
        if found is not None and not isinstance(found, Mesh):
            raise TrainerError(
                "A Trainer needs a mesh of devices, but was given an abstract one. Make one with "
                "jax.make_mesh((2, 4), ('data', 'model'))."
            )
        self.mesh = found
        self.rules = rules
        self.train_step = jit(
            _make_train_step(loss, settings.grad_accumulation), donate_argnums=(0, 1)
        )
        self.eval_step = jit(loss)

    @property
    def log_path(self) -> Path:
        """The log: one JSON object a line."""
        return self.directory / "log.jsonl"

    @property
    def checkpoint_directory(self) -> Path:
        """Where the checkpoints are."""
        return self.directory / "checkpoints"

    # --- running ---------------------------------------------------------------------------------

    def run(
        self, *, resume: bool = False, display: Callable[[int, int], Display] = make_display
    ) -> RunResult:
        """Trains until ``settings.steps``, or until SIGINT or SIGTERM asks to stop.

        Args:
            resume: Whether to go on from the last checkpoint of ``directory``, if there is one.
            display: Makes the progress display from (first step, last step).

        Returns:
            How it ended. After a request to stop, the state is saved and ``stopped`` tells the
            signal.

        Raises:
            TrainerError: If the directory already holds a run and ``resume`` is False, or the loss
                is not finite.
        """
        with self._scope(), contextlib.closing(self._open_checkpoints()) as checkpoints:
            first = self._start(checkpoints, resume)
            resume_step = first if first else -1
            with (
                JsonlLog(self.log_path, resume_step=resume_step) as log,
                Prefetch(self.batches, self._batch_sharding()) as source,
                display(first, self.settings.steps) as shown,
                StopRequest() as stop,
            ):
                return self._loop(first, checkpoints, log, source, shown, stop)

    def _loop(
        self,
        first: int,
        checkpoints: Checkpoints,
        log: JsonlLog,
        source: Any,
        shown: Display,
        stop: StopRequest,
    ) -> RunResult:
        settings = self.settings
        step, saved, loss = first, first if first else -1, math.nan
        clock = _Clock()
        pending: Any = None
        while step < settings.steps and not stop:
            batch = next(source)
            pending = self.train_step(self.model, self.optimizer, batch)
            step += 1
            clock.count(batch)
            if step % settings.log_every == 0 or step == settings.steps:
                loss = self._record(step, pending, clock, log, shown)
            else:
                shown.step(step, None, None)
            if _due(step, settings.eval_every) and step < settings.steps:
                self._evaluate_and_record(step, log, shown)
                clock.restart()
            if _due(step, settings.checkpoint_every):
                self._save(checkpoints, step, source)
                saved = step
        if saved != step:
            self._save(checkpoints, step, source)
        checkpoints.wait()
        if stop:
            shown.note(
                f"stopped by {stop.signal.name if stop.signal else 'request'}; saved at step {step}"
            )
        done = step >= settings.steps
        eval_loss = (
            self._evaluate_and_record(step, log, shown)
            if done and self.held_out is not None
            else None
        )
        if math.isnan(loss) and pending is not None:
            loss = float(pending)
        return RunResult(step, loss, eval_loss, stop.signal, checkpoints.path(step), self.log_path)

    def _record(
        self, step: int, pending: Any, clock: _Clock, log: JsonlLog, shown: Display
    ) -> float:
        loss = float(pending)
        speed = clock.speed()
        log.write(step=step, loss=loss, tokens_per_second=speed)
        shown.step(step, loss, speed)
        if not math.isfinite(loss):
            raise TrainerError(
                f"The loss at step {step} is {loss}. The last good state is the checkpoint before; "
                f"lower the learning rate, or look for the "
                f"operation with jax.config.update('jax_debug_nans', True)."
            )
        return loss

    # --- evaluation ------------------------------------------------------------------------------

    def evaluate(self) -> float:
        """Returns the mean held-out loss per target, with the model in evaluation mode.

        Raises:
            TrainerError: If there is no held-out data.
        """
        if self.held_out is None:
            raise TrainerError("This Trainer has no held-out data; pass held_out=EvalBatches(...).")
        total, count = 0.0, 0
        self.model.eval()
        try:
            with self._scope():
                sharding = self._batch_sharding()
                for batch in self.held_out:
                    targets = int(np.sum(batch["mask"]))
                    total += float(self.eval_step(self.model, put_batch(batch, sharding))) * targets
                    count += targets
        finally:
            self.model.train()
        return total / count

    def _evaluate_and_record(self, step: int, log: JsonlLog, shown: Display) -> float | None:
        if self.held_out is None:
            return None
        eval_loss = self.evaluate()
        log.write(step=step, eval_loss=eval_loss)
        shown.note(f"step {step}: held-out loss {eval_loss:.4f}")
        return eval_loss

    # --- placement and checkpoints ---------------------------------------------------------------

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.rules is not None:
                stack.enter_context(axis_rules(self.rules))
            if self.mesh is not None:
                stack.enter_context(jax.set_mesh(self.mesh))
            yield

    def _batch_sharding(self) -> Any:
        if self.mesh is None:
            return None
        spec = logical_to_mesh_axes(("batch", "seq"), self.rules) or PartitionSpec()
        return NamedSharding(self.mesh, spec)

    def _open_checkpoints(self) -> Checkpoints:
        return Checkpoints(self.checkpoint_directory, keep=self.settings.keep_checkpoints)

    def _start(self, checkpoints: Checkpoints, resume: bool) -> int:
        """Places model and optimizer, from the last checkpoint or fresh; returns the step."""
        latest = checkpoints.latest()
        if latest is not None and not resume:
            raise TrainerError(
                f"{self.directory} already holds a run, at step {latest}. Go on with it "
                f"(resume=True, on the command line --resume), or choose "
                f"another directory."
            )
        if latest is None:
            if self.mesh is not None:
                shard((self.model, self.optimizer), self.mesh, self.rules)
            return 0
        extra = checkpoints.restore(
            (self.model, self.optimizer), latest, mesh=self.mesh, rules=self.rules
        )
        self.batches.restore(extra["data"])
        return latest

    def _save(self, checkpoints: Checkpoints, step: int, source: Any) -> None:
        checkpoints.save(step, (self.model, self.optimizer), extra={"data": source.state()})


class _Clock:
    """Counts targets per second since it was last asked."""

    def __init__(self) -> None:
        self._targets = 0
        self._since = time.perf_counter()

    def count(self, batch: Any) -> None:
        self._targets += int(np.prod(batch["targets"].shape))

    def restart(self) -> None:
        self._targets, self._since = 0, time.perf_counter()

    def speed(self) -> float:
        now = time.perf_counter()
        speed = self._targets / max(now - self._since, 1e-9)
        self.restart()
        return speed


def _make_train_step(loss: Loss, parts: int) -> Callable[..., Any]:
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, gradients = accumulated_value_and_grad(loss, parts)(model, batch)
        optimizer.update(gradients)
        return value

    return train_step


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
