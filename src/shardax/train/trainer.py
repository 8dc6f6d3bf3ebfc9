# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, held-out evaluation, checkpoints, log, progress, stopping on request.

A run is determined by its model, optimizer, data and settings. After each step its whole state is
the Variables of model and optimizer and the position in the data. That is what a checkpoint holds,
so a run that was killed and resumed ends in the same parameters, to the last bit, as one that was
not.

What a training run is told before it starts, and what it tells when it ends.

Stopping on request: SIGINT and SIGTERM end a run after the current step.

How a batch is divided over a mesh, and whether it can be.

The arrays of a batch have the axes ``("batch", "seq")``, as many of them as they have dimensions,
and rules map these names to mesh axes. A *part* is one of the microbatches that gradient
accumulation cuts a batch into: each is divided over the mesh by itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardax._transforms.jit.jit import jit
from shardax.partition.checker import spec_for
from shardax.partition.context import axis_rules, resolve_rules
from shardax.partition.mesh import resolve_mesh
from shardax.partition.overrides import MemoryKinds, OverridesLike
from shardax.partition.placement import shard
from shardax.partition.rules import RulesLike, mesh_axes_of
from shardax.partition.specs import shardings
from shardax.train.accumulation import accumulated_value_and_grad
from shardax.train.checkpoint import Checkpoints
from shardax.train.errors import TrainerError
from shardax.train.evaluation import evaluation_mode, held_out_loss, make_eval_step
from shardax.train.log import JsonlLog, read_jsonl
from shardax.train.prefetch import Positioned, Prefetch, in_device_memory
from shardax.train.progress import Clock, Display, make_display

# --- Settings ---


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

    Raises:
        TrainerError: If one is not an integer, or is too small.

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
        least: dict[str, int] = {"eval_every": 0, "checkpoint_every": 0}
        for name, value in vars(self).items():
            if type(value) is not int or value < least.get(name, 1):
                hint = "; 0: only at the end" if name in least else ""
                raise TrainerError(
                    f"TrainerSettings has {name}={value!r}, but it must be an integer of at least "
                    f"{least.get(name, 1)}{hint}."
                )


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


# --- Signals ---


class StopRequest:
    """Notes SIGINT and SIGTERM while its ``with`` block runs.

    A second SIGINT interrupts at once, as usual. A signal that the process ignores (SIGINT in a
    background job of a shell) stays ignored. Outside the main thread, where Python delivers no
    signals, it does nothing.

    Attributes:
        signal: The signal that was received, or None.

    Example:
        >>> import os, signal
        >>> with StopRequest() as stop:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     stop.signal
        <Signals.SIGTERM: 15>
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                # None: set by other than Python code, which could not be put back.
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


# --- Batch layout ---

BATCH_AXES = ("batch", "seq")


def batch_shardings(
    batch: Any, mesh: Mesh | None, rules: RulesLike | None, *, parts: int, of: str
) -> Any:
    """Returns the sharding of every array of a batch.

    Args:
        batch: One process's rows of a global batch: a pytree of arrays with rows in their first
            dimension.
        mesh: The mesh; None for one device.
        rules: Rules from axis names to mesh axes; None for those in scope.
        parts: Number of microbatches.
        of: What the batch is, for messages.

    Returns:
        A tree like the batch, of ``NamedSharding``; without a mesh, None.

    Raises:
        TrainerError: If the sizes of the batch cannot be divided so; lists every array.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batch = {"inputs": np.zeros((4, 8)), "labels": np.zeros(4)}
        >>> places = batch_shardings(batch, mesh, {"batch": "data"}, parts=1, of="training batch")
        >>> places["inputs"].spec, places["labels"].spec
        (P('data', None), P('data',))
    """
    problems: list[str] = []
    entries, treedef = jax.tree_util.tree_flatten_with_path(batch)
    shardings = []
    for key_path, array in entries:
        name, shape = jax.tree_util.keystr(key_path), _global_shape(array)
        if parts > 1 and (not shape or shape[0] % parts):
            problems.append(
                f"{name} of shape {shape} cannot be cut into grad_accumulation={parts} parts"
            )
        elif mesh is not None:
            sharding = _sharding(shape, mesh, rules)
            problems += [
                f"{name} of shape {shape}{', in ' + str(parts) + ' parts' if parts > 1 else ''}: "
                f"{problem}"
                for problem in _indivisible(shape, sharding, parts)
            ]
            shardings.append(sharding)
    if problems:
        step = _rows_step(mesh, rules, parts)
        rows = next((shape[0] for _, a in entries if (shape := _global_shape(a))), 0)
        raise TrainerError(
            f"The {of} cannot be laid out:\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + f"Use a batch size that is a multiple of {step}, such as {-(-rows // step) * step}"
            + (", another mesh, or other rules." if mesh is not None else ".")
        )
    return treedef.unflatten(shardings) if mesh is not None else None


def _global_shape(array: Any) -> tuple[int, ...]:
    shape = np.shape(array)
    return (shape[0] * jax.process_count(), *shape[1:]) if shape else ()


def _sharding(shape: tuple[int, ...], mesh: Mesh, rules: RulesLike | None) -> NamedSharding:
    names = BATCH_AXES[: len(shape)]
    # What the rules leave to the compiler is not split: these arrays come from the host.
    spec, _ = spec_for(names, shape[: len(names)], mesh, resolve_rules(rules))
    return NamedSharding(mesh, spec)


def _indivisible(shape: tuple[int, ...], sharding: NamedSharding, parts: int) -> list[str]:
    found = []
    for position, entry in enumerate(sharding.spec):
        axes = mesh_axes_of(entry)
        count = math.prod(sharding.mesh.shape[axis] for axis in axes)
        size = shape[position] // parts if position == 0 else shape[position]
        if size % count:
            where = " x ".join(f"{axis!r} of size {sharding.mesh.shape[axis]}" for axis in axes)
            found.append(
                f"{size} along {BATCH_AXES[position]!r} cannot be divided over the mesh axis "
                f"{where}"
            )
    return found


def _rows_step(mesh: Mesh | None, rules: RulesLike | None, parts: int) -> int:
    """Returns the number whose multiples are the batch sizes that fit."""
    if mesh is None:
        return parts
    entry = _sharding((0,), mesh, rules).spec[0]
    return parts * math.prod(mesh.shape[axis] for axis in mesh_axes_of(entry))


# --- Trainer ---

Loss = Callable[[Any, Any], Any]
"""``loss(model, batch)``: the mean loss over the batch's targets (those where ``mask`` is true)."""


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
        overrides: What lies otherwise than the rules say, as for ``shardax.shard``:
            ``{sx.OptState: {"embed": "data"}}`` splits the optimizer's state further than the
            parameters. Paths begin with 0 for the model and 1 for the optimizer.
        memory_kind: Memory of the devices, as for ``shardax.shard``: with ``{sx.OptState:
            "pinned_host"}`` the optimizer's state is on the devices during a step only.

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
        overrides: OverridesLike | None = None,
        memory_kind: MemoryKinds | None = None,
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
        self._where: dict[str, Any] = {"overrides": overrides, "memory_kind": memory_kind}
        given = [name for name, value in self._where.items() if value is not None]
        if found is None and given:
            raise TrainerError(
                f"A Trainer was given {' and '.join(given)}, but no mesh to lay arrays out over. "
                "Pass one, mesh=jax.make_mesh((2, 4), ('data', 'model')), or none of these."
            )
        self.mesh = found
        self.rules = rules
        self.eval_step = make_eval_step(_from_device_memory(loss))

    @property
    def log_path(self) -> Path:
        """The log: one JSON object a line."""
        return self.directory / "log.jsonl"

    @property
    def checkpoint_directory(self) -> Path:
        """Where the checkpoints are."""
        return self.directory / "checkpoints"

    @functools.cached_property
    def train_step(self) -> Callable[..., Any]:
        """The compiled step: ``train_step(model, optimizer, batch)`` returns the loss.

        It is told the layout, because over Auto axes the compiler would otherwise choose one where
        that of the optimizer's state is another than the parameters'.
        """
        step = _make_train_step(self.loss, self.settings.grad_accumulation)
        if self.mesh is None:
            return jit(step, donate_argnums=(0, 1))
        places = shardings(self._trained, self.mesh, self.rules, **self._where)
        return jit(step, donate_argnums=(0, 1), in_shardings=(*places, None))

    @property
    def _trained(self) -> tuple[Any, Any]:
        return self.model, self.optimizer

    # --- before training -------------------------------------------------------------------------

    def check(self, *, resume: bool = False) -> None:
        """Raises what ``run`` would refuse before its first step; changes nothing.

        Args:
            resume: As for ``run``.

        Raises:
            TrainerError: If the directory already holds a run and ``resume`` is False, or the
                batches cannot be resumed or cannot be divided over the mesh.
            PartitionCheckError: If model and optimizer cannot be laid out over the mesh.
            ModuleNotFoundError: If orbax-checkpoint is missing.
        """
        # Without it the first checkpoint would fail, after many steps.
        import orbax.checkpoint  # noqa: F401

        with contextlib.closing(self._open_checkpoints()) as checkpoints:
            latest = checkpoints.latest()
        records = read_jsonl(self.log_path) if self.log_path.exists() else []
        if not resume and (latest is not None or records):
            reached = "" if latest is None else f", saved at step {latest}"
            raise TrainerError(
                f"{self.directory} already holds a run{reached}. Go on with it (resume=True, on "
                "the command line --resume), choose another directory, or delete it."
            )
        with self._scope():
            if self.mesh is not None:
                shardings(self._trained, self.mesh, self.rules, **self._where)
            self._train_shardings()
            self._held_out_shardings()

    def _train_shardings(self) -> Any:
        source = self.batches
        if not isinstance(source, Positioned):
            raise TrainerError(
                f"The batches ({type(source).__name__}) have no state() and restore(), so the run "
                "could not be resumed. Use TrainBatches, or give your iterator these two methods."
            )
        position = source.state()
        first = next(iter(self.batches), None)
        source.restore(position)
        if first is None:
            raise TrainerError("The training batches are empty; give an endless iterator.")
        parts = self.settings.grad_accumulation
        return batch_shardings(first, self.mesh, self.rules, parts=parts, of="training batch")

    def _held_out_shardings(self) -> Any:
        if self.held_out is None:
            return None
        if isinstance(self.held_out, Iterator):
            raise TrainerError(
                f"held_out is a {type(self.held_out).__name__}, which can be read once, but every "
                "evaluation reads it anew. Give EvalBatches or a list of batches."
            )
        first = next(iter(self.held_out), None)
        if first is None:
            raise TrainerError("held_out has no batches; give None to train without evaluation.")
        return batch_shardings(first, self.mesh, self.rules, parts=1, of="held-out batch")

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
            TrainerError: What ``check`` refuses; if the loss is not finite (it is looked at before
                every checkpoint and log record); or if the batches end too early.
            PartitionCheckError: As for ``check``.
        """
        self.check(resume=resume)
        with self._scope(), contextlib.closing(self._open_checkpoints()) as checkpoints:
            latest = checkpoints.latest()
            first, saved = latest or 0, -1 if latest is None else latest
            with display(first, self.settings.steps) as shown, StopRequest() as stop:
                self._place(checkpoints)
                with (
                    JsonlLog(self.log_path, resume_step=saved) as log,
                    Prefetch(self.batches, self._train_shardings()) as source,
                ):
                    run = _Run(checkpoints, log, source, shown, stop, first, saved)
                    self._loop(run)
                    return self._finish(run)

    def _loop(self, run: _Run) -> None:
        settings = self.settings
        while run.step < settings.steps and not run.stop:
            batch = self._next_batch(run)
            run.pending = self.train_step(self.model, self.optimizer, batch)
            run.step += 1
            run.clock.count(batch, run.pending)
            if run.step % settings.log_every == 0 or run.step == settings.steps:
                self._record(run)
            else:
                run.shown.step(run.step, None, None)
            with run.clock.paused():
                self._pause_for(run)
        if run.saved != run.step:
            self._save(run)
        run.checkpoints.wait()

    def _pause_for(self, run: _Run) -> None:
        """Does what is due after a step besides training."""
        if _due(run.step, self.settings.eval_every) and run.step < self.settings.steps:
            self._evaluate_and_record(run)
        if _due(run.step, self.settings.checkpoint_every):
            self._save(run)

    def _next_batch(self, run: _Run) -> Any:
        batch = next(run.source, None)
        if batch is None:
            raise TrainerError(
                f"The training batches ended after step {run.step} of {self.settings.steps}; give "
                f"an endless iterator, or fewer steps. {_last_saved(run)}"
            )
        return batch

    def _finish(self, run: _Run) -> RunResult:
        stop, loss, eval_loss = run.stop, math.nan, None
        if stop:
            name = stop.signal.name if stop.signal else "request"
            run.shown.note(f"stopped by {name}; saved at step {run.step}")
        # What a finished run has already measured is neither measured nor logged twice.
        logged: dict[str, Any] = {}
        for record in read_jsonl(self.log_path):
            if record.get("step") == run.step:
                logged.update(record)
        loss = float(logged.get("loss", math.nan) if run.pending is None else run.pending)
        if run.step >= self.settings.steps:
            eval_loss = logged.get("eval_loss")
            if eval_loss is None:
                eval_loss = self._evaluate_and_record(run)
        path = run.checkpoints.path(run.step)
        return RunResult(run.step, loss, eval_loss, stop.signal, path, self.log_path)

    def _record(self, run: _Run) -> None:
        loss, speed = float(run.pending), run.clock.speed()
        known = {} if speed is None else {"tokens_per_second": speed}
        run.log.write(step=run.step, loss=loss, **known)
        run.shown.step(run.step, loss, speed)
        _require_finite(run)

    # --- evaluation ------------------------------------------------------------------------------

    def evaluate(self) -> float:
        """Returns the mean held-out loss per target, with the model in evaluation mode.

        Raises:
            TrainerError: If there is no held-out data.
        """
        if self.held_out is None:
            raise TrainerError("This Trainer has no held-out data; pass held_out=EvalBatches(...).")
        with self._scope():
            if self.mesh is not None:
                # In a tuple, so that overrides find it at the path that it has in training.
                shard((self.model,), self.mesh, self.rules, **self._where)
            loss = self._evaluate(lambda: False)
        assert loss is not None  # nothing stopped it
        return loss

    def _evaluate(self, should_stop: Callable[[], bool]) -> float | None:
        assert self.held_out is not None
        places = self._held_out_shardings()
        with evaluation_mode(self.model):
            return held_out_loss(self.eval_step, self.model, self.held_out, places, should_stop)

    def _evaluate_and_record(self, run: _Run) -> float | None:
        if self.held_out is None:
            return None
        eval_loss = self._evaluate(lambda: bool(run.stop))
        if eval_loss is not None:
            run.log.write(step=run.step, eval_loss=eval_loss)
            run.shown.note(f"step {run.step}: held-out loss {eval_loss:.4f}")
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

    def _open_checkpoints(self) -> Checkpoints:
        return Checkpoints(self.checkpoint_directory, keep=self.settings.keep_checkpoints)

    def _place(self, checkpoints: Checkpoints) -> None:
        """Places model and optimizer, from the last checkpoint or fresh."""
        latest = checkpoints.latest()
        if latest is not None:
            extra = checkpoints.restore(self._trained, latest, self.mesh, self.rules, **self._where)
            self.batches.restore(extra["data"])
        elif self.mesh is not None:
            shard(self._trained, self.mesh, self.rules, **self._where)

    def _save(self, run: _Run) -> None:
        _require_finite(run)
        data = {"data": run.source.state()}
        run.checkpoints.save(run.step, self._trained, extra=data)
        run.saved = run.step


@dataclass
class _Run:
    """What one call of ``run`` works with.

    ``pending`` is the loss of the last step, still on its devices; ``saved`` the last step of which
    there is a checkpoint, or -1.
    """

    checkpoints: Checkpoints
    log: JsonlLog
    source: Prefetch
    shown: Display
    stop: StopRequest
    step: int
    saved: int
    pending: Any = None
    clock: Clock = field(default_factory=Clock)


def _require_finite(run: _Run) -> None:
    """Raises if the last loss is not finite, so that no checkpoint is saved after it."""
    if run.pending is not None and not math.isfinite(loss := float(run.pending)):
        raise TrainerError(
            f"The loss at step {run.step} is {loss}. Lower the learning rate or clip the "
            "gradients; jax.config.update('jax_debug_nans', True) finds the operation. "
            f"{_last_saved(run)} What went wrong may have begun a step before a checkpoint: "
            f"Checkpoints({str(run.checkpoints.directory)!r}).rewind(step) goes back further."
        )


def _last_saved(run: _Run) -> str:
    run.checkpoints.wait()
    steps = run.checkpoints.steps()
    return f"There are checkpoints of steps {steps}." if steps else "There is no checkpoint yet."


def _make_train_step(loss: Loss, parts: int) -> Callable[..., Any]:
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        with in_device_memory((model, optimizer)):
            value, gradients = accumulated_value_and_grad(loss, parts)(model, batch)
            optimizer.update(gradients)
        return value

    return train_step


def _from_device_memory(loss: Loss) -> Loss:
    def loss_in_device_memory(model: Any, batch: Any) -> Any:
        with in_device_memory(model):
            return loss(model, batch)

    return loss_in_device_memory


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
