# SPDX-License-Identifier: Apache-2.0
"""Training loop with evaluation, checkpoints, log, progress and stop on request.

After each step a run's whole state is the Variables of model and optimizer and the position in the
data. That is what a checkpoint holds, so a run that was killed and resumed ends in the same
parameters, to the last bit, as one that was not.

The held-out loss is the mean over all targets, with the model in evaluation mode. Batches may count
different numbers of targets (the last one is padded), so each batch's mean loss is weighted by its
number of targets: where it has a ``mask``, those that the mask leaves, else its rows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardax import axis_rules, distributed, explain_retraces, iter_modules, jit, shard, shardings
from shardax._module_scopes import module_scopes
from shardax.distributed.processes import from_main, noting_other_processes
from shardax.extend import Options, PyTree, ScopeSettings
from shardax.partition import resolve_mesh
from shardax.train import agreement, step_numbers
from shardax.train.accumulation import accumulated_value_and_grad
from shardax.train.callbacks import Callbacks, Event
from shardax.train.checkpoint import (
    Checkpoints,
    MemoryKinds,
    OverridesLike,
    restore_verified,
    unchecked,
)
from shardax.train.checkpoint_files import set_aside, verify
from shardax.train.checkpoint_format import check_fit, contents_of, stored_arrays
from shardax.train.data import prefetch, sources
from shardax.train.ema import EMA
from shardax.train.errors import CheckpointDamagedError, TrainError
from shardax.train.gradients.data_parallel import data_parallel_value_and_grad
from shardax.train.gradients.finite import FiniteCheck, current_values, step_flags
from shardax.train.log import Trackers, as_trackers, read_jsonl
from shardax.train.optimizer import Optimizer, gradient_layout
from shardax.train.progress import (
    BoundedDisplay,
    OverdueError,
    SilentProgress,
    StopRequest,
    TrainingProgress,
)
from shardax.train.run_folder import RunFolder, differences, settings_of
from shardax.train.speed import Profile, Throughput, throughput_text, utilization_of

Loss = Callable[[Any, Any], Any]
"""``loss(model, batch)``: the mean loss over the batch's targets (those where ``mask`` is true).

It may return ``(loss, metrics)``, with real numbers by name.
"""


@dataclass(frozen=True)
class TrainerSettings:
    """Length of a run, and settings of its steps.

    Attributes:
        steps: Number of optimizer steps of the whole run, resumed parts included.
        log_every: Steps between log records of the training loss.
        eval_every: Steps between held-out evaluations; 0: only at the end.
        checkpoint_every: Steps between checkpoints; 0: only at the end.
        keep_checkpoints: How many checkpoints to keep.
        grad_accumulation: Parts into which each batch is split to save memory; the update is that
            of the whole batch: parts are weighted by the targets that a ``mask`` in the batch and
            the ignore index -100 leave, or by ``count``.
        count: Called on a part of a batch; returns the number of targets of which the loss is the
            mean, by which parts, devices of ``reduce_over`` and held-out batches are weighted:
            ``lambda part: part["loss_mask"].sum()``. None: as ``mask`` and -100 say.
        reduce_over: Data axes of the mesh, the slowest link first, over which each step sums the
            gradients of devices once, as ``data_parallel_value_and_grad`` does. They are left split
            as the optimizer's state is. Empty: the compiler sums them.
        reduce_dtype: ``"bfloat16"`` to send gradients so along ``reduce_over``.
        max_skipped_steps: How many steps in a row may be skipped because loss or gradients are not
            finite; 0: the first one stops the run. A skipped step changes neither parameters
            nor the optimizer's state; the log counts them as ``skipped_steps``.
        check_replicas_every: Steps between comparisons, by checksum, of the copies of arrays that
            several processes hold; 0: only before the first step.
        peak_flops: Operations per second of a device at its peak, for ``mfu`` in the log; by
            default those of known TPUs and GPUs, for the dtypes of the products.
        stop_within: Seconds that code of others (callbacks, trackers, the display, batches) may
            take after SIGINT or SIGTERM, before the run saves its steps and ends without it.

    Raises:
        TrainError: If one is not a number of its type, or is too small.

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
    count: Callable[[PyTree], PyTree] | None = None
    reduce_over: tuple[str, ...] = ()
    reduce_dtype: str | None = None
    max_skipped_steps: int = 0
    check_replicas_every: int = 0
    peak_flops: float | None = None
    stop_within: float = 10.0

    def __post_init__(self) -> None:
        at_zero = {
            "eval_every": "0: only at the end.",
            "checkpoint_every": "0: only at the end.",
            "check_replicas_every": "0: only at the start.",
            "max_skipped_steps": "0: the first step that is not finite stops the run.",
        }
        options = Options(TrainError, "TrainerSettings")
        peak, over, dtype = self.peak_flops, self.reduce_over, self.reduce_dtype
        is_peak = peak is None or (isinstance(peak, int | float) and peak > 0)
        options.check("peak_flops", peak, is_peak, "a number above 0, such as 989e12, or None")
        is_counter = self.count is None or callable(self.count)
        example = 'count=lambda part: part["loss_mask"].sum()'
        expected = f"a function of a part of a batch: {example}"
        options.check("count", self.count, is_counter, expected)
        expected, remedy = "a tuple of mesh axes, not one string", f"Write reduce_over=({over!r},)."
        options.check("reduce_over", over, not isinstance(over, str), expected, remedy)
        expected = 'None without axes along which gradients are summed: reduce_over=("data",)'
        options.check("reduce_dtype", dtype, dtype is None or bool(over), expected)
        is_time = isinstance(self.stop_within, int | float) and self.stop_within >= 0
        options.check("stop_within", self.stop_within, is_time, "a number of seconds, 0 or more")
        other_types = ("count", "peak_flops", "reduce_over", "reduce_dtype", "stop_within")
        for name, value in vars(self).items():
            if name not in other_types:
                least = 0 if name in at_zero else 1
                fits = type(value) is int and value >= least
                expected = f"an integer of at least {least}"
                options.check(name, value, fits, expected, at_zero.get(name, ""))


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


class Trainer:
    """Training run of a model over a mesh, with checkpoints and log.

    Args:
        model: The model, usually still lazy.
        optimizer: Its ``Optimizer``.
        loss: ``loss(model, batch)``, the mean loss over the batch's targets; or ``(loss,
            metrics)`` with real numbers by name, which go to the log.
        batches: Endless host batches with a position to save and restore: ``TrainBatches``, or
            what has ``state()`` and ``restore()``, an iterator of grain, an ``IterableDataset`` of
            ``datasets``, a ``StatefulDataLoader`` of torchdata, which starts its next epoch itself.
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
        eval_metrics: What else to measure on held-out data, by name: a metric such as
            ``metrics.Accuracy()``, a pair of a metric and a function ``(model, batch)`` that
            returns the arguments of its ``update``, or a function ``(model, batch)`` that returns a
            mean over targets. Logged as ``eval_<name>``, as are the metrics of the loss.
        callbacks: Functions of an ``Event``: ``event.kind`` is ``"step"``, ``"eval"``,
            ``"checkpoint"`` or ``"end"``, ``event.metrics`` has numbers by name, ``event.stop()``
            ends the run. Such as ``EarlyStopping`` and ``BestCheckpoint``. All processes call them.
        trackers: Where records go beside the log, such as ``TensorBoardLog(folder)``: see
            ``Tracker``. The main process writes them.
        ema: ``EMA(model, decay)`` to update after each step. Held-out data is evaluated with its
            model, and checkpoints have it. Its paths begin with 2.
        profile: First and last step of a trace by ``jax.profiler``, such as ``(10, 13)``, written
            to ``profile`` in the directory; its operations carry paths of Modules.
        resumable: False takes batches without a position; a resumed run starts them anew and says
            so.

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
        model: PyTree,
        optimizer: Any,
        loss: Loss,
        batches: PyTree,
        *,
        directory: str | Path,
        settings: TrainerSettings,
        held_out: Iterable[Any] | None = None,
        mesh: Any = None,
        rules: Any = None,
        overrides: OverridesLike | None = None,
        memory_kind: MemoryKinds | None = None,
        eval_metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Event], Any]] = (),
        trackers: Sequence[Any] = (),
        ema: EMA | None = None,
        profile: tuple[int, int] | None = None,
        resumable: bool = True,
    ) -> None:
        options = Options(TrainError, "a Trainer")
        options.instance("optimizer", optimizer, Optimizer, "Optimizer(model, tx)")
        options.instance("loss", loss, Callable, "a function: loss(model, batch)")
        options.instance("settings", settings, TrainerSettings, "TrainerSettings(...)")
        options.instance("ema", ema, (EMA, type(None)), "EMA(model, decay=0.999)")
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.batches = sources.adapted(batches, resumable)
        self.resumable = resumable
        self.held_out = held_out
        self.settings = settings
        self.directory = Path(directory)
        self.folder = RunFolder(self.directory)
        # Settings before the first step: some schedules change a number of their own when called.
        self.ema = ema
        self.run_settings = settings_of(model, optimizer, ema)
        mesh = resolve_mesh(mesh)
        if mesh is not None and not isinstance(mesh, Mesh):
            raise TrainError(
                "A Trainer needs a mesh of devices, but was given an abstract one. Make one with "
                "jax.make_mesh((2, 4), ('data', 'model'))."
            )
        self.where: dict[str, Any] = {"overrides": overrides, "memory_kind": memory_kind}
        mesh_options = [name for name, value in self.where.items() if value is not None]
        if mesh is None and mesh_options:
            raise TrainError(
                f"A Trainer was given {' and '.join(mesh_options)}, but no mesh to lay arrays out "
                "over. Pass one, mesh=jax.make_mesh((2, 4), ('data', 'model')), or none of these."
            )
        lacking = set(settings.reduce_over) - set(() if mesh is None else mesh.axis_names)
        if lacking:
            raise TrainError(
                f"TrainerSettings has reduce_over={settings.reduce_over}, but the Trainer's mesh "
                f"has no axis {', '.join(map(repr, sorted(lacking)))}. Pass one that has: mesh=..."
            )
        self.mesh = mesh
        self.rules = rules
        # A run lays the same objects out several times, and says once which names look misspelt.
        self._told_names: set[Hashable] = set()

        self.callbacks = Callbacks(callbacks)
        self.trackers = as_trackers(trackers)
        folder = self.directory / "profile"
        self.profile = None if profile is None else Profile(profile, settings.steps, folder)
        self.eval_numbers = step_numbers.EvalNumbers(eval_metrics or {}, settings.count)
        numbers = self.eval_numbers

        @jit
        def eval_step(
            model: object, metrics: object, batch: object
        ) -> tuple[PyTree, PyTree, PyTree]:
            """Mean loss of a batch, its number of targets, and further means."""
            with prefetch.in_device_memory(model):
                return numbers.measure(model, metrics, batch, step_numbers.with_metrics(loss))

        self.eval_step = eval_step

    @property
    def log_path(self) -> Path:
        """Path of the log: one JSON object a line."""
        return self.directory / "log.jsonl"

    @property
    def checkpoint_directory(self) -> Path:
        """Folder of the checkpoints."""
        return self.directory / "checkpoints"

    @functools.cached_property
    def train_step(self) -> Callable[..., PyTree]:
        """Compiled step: ``train_step(*trained, batch)`` returns (loss, numbers)."""
        parts, count = self.settings.grad_accumulation, self.settings.count
        loss = step_numbers.with_counts(self.loss, count)
        options: dict[str, Any] = {"has_aux": True, "wrt": self.optimizer.wrt, "count": count}
        gradient = accumulated_value_and_grad(loss, parts, **options)
        if self.settings.reduce_over:
            places = self._layout()[1]
            gradient = data_parallel_value_and_grad(
                loss,
                self.settings.reduce_over,
                steps=parts,
                layout=gradient_layout(self.optimizer, places),
                reduce_dtype=self.settings.reduce_dtype,
                **options,
            )

        skip = self.settings.max_skipped_steps > 0
        scopes = contextlib.nullcontext if self.profile is None else module_scopes

        def train_step(*args):
            model, optimizer, *averages, batch = args
            with prefetch.in_device_memory(args[:-1]), scopes(model):
                old_values = current_values(args[:-1])
                (value, (metrics, counts)), gradients = gradient(model, batch)
                count = optimizer.step.value
                with jax.named_scope("optimizer"):
                    optimizer.update(gradients)
                    for ema in averages:
                        ema.update(model)
                numbers = step_numbers.means_of_parts(metrics, counts)
                numbers["grad_norm"] = step_numbers.gradient_norm(gradients)
                numbers |= step_numbers.learning_rate_of(optimizer, count)
                numbers["not_finite"] = step_flags(
                    optimizer, old_values, value, gradients, skip=skip, mesh=self.mesh
                )
            return value, numbers

        donated = tuple(range(len(self.trained)))
        if self.mesh is None:
            return jit(train_step, donate_argnums=donated)
        # Over Auto axes the compiler would otherwise choose a layout where that of the optimizer's
        # state is another than the parameters'.
        return jit(train_step, donate_argnums=donated, in_shardings=(*self._layout(), None))

    def _layout(self) -> tuple[PyTree, ...]:
        with ScopeSettings.telling_once(self._told_names):
            return shardings(self.trained, self.mesh, self.rules, **self.where)

    @property
    def trained(self) -> tuple[Any, ...]:
        """Objects changed by training: model, optimizer, and the EMA if any."""
        return (self.model, self.optimizer, *(() if self.ema is None else (self.ema,)))

    @property
    def evaluated(self) -> PyTree:
        """The model for held-out data: the EMA's, if there is one."""
        return self.model if self.ema is None else self.ema.model

    def check(self, *, resume: bool = False, fallback: bool = True, override: bool = False) -> None:
        """Raises the refusals of ``run`` before its first step; changes nothing.

        Of checkpoints it reads the descriptions and the sizes of files, not yet the arrays.

        Args:
            resume: As for ``run``.
            fallback: As for ``run``.
            override: As for ``run``.

        Raises:
            TrainError: If the directory already holds a run and ``resume`` is False, the run was
                trained with other settings, or the batches cannot be resumed or cannot be divided
                over the mesh.
            CheckpointDamagedError: As for ``run``.
            CheckpointError: If the checkpoint does not fit model and optimizer.
            DataError: If the batches are of other data, seed or sizes.
            PartitionCheckError: If model and optimizer cannot be laid out over the mesh.
            ModuleNotFoundError: If orbax-checkpoint is missing.
        """
        self._check(resume=resume, fallback=fallback, override=override)

    def _check(self, *, resume: bool, fallback: bool, override: bool) -> PyTree:
        """Returns the shardings of training batches, or raises."""
        # Without it the first checkpoint would fail, after many steps. It is imported then: that
        # takes as long as the first step.
        if importlib.util.find_spec("orbax.checkpoint") is None:
            raise ModuleNotFoundError("No module named 'orbax.checkpoint'", name="orbax.checkpoint")

        agreement.check_mesh(self.mesh)
        prefetch.require_unread(self.batches)
        sources.require_position(self.batches)
        steps = self._open_checkpoints().all_steps()
        records = read_jsonl(self.log_path) if self.log_path.exists() else []
        if resume:
            start = self._find_start(fallback=fallback, override=override, sizes_only=True)
            if start.description is not None:
                saved = start.description["extra"]["data"]
                position = sources.position_of(self.batches)
                sources.go_to(self.batches, saved, resumable=self.resumable)
                sources.go_back(self.batches, position)
        elif steps or records:
            reached = f", saved at step {steps[-1]}" if steps else ""
            raise TrainError(
                f"{self.directory} already holds a run{reached}. Go on with it (resume=True, on "
                "the command line --resume), choose another directory, or delete it."
            )
        with self._scope():
            if self.mesh is not None:
                self._layout()
            places = self._train_shardings()
            self._held_out_shardings()
        return places

    def _train_shardings(self):
        sources.require_savable(self.batches)
        with sources.peeking(self.batches):
            first = prefetch.first_batch(self.batches)
        if first is None:
            raise TrainError("The training batches are empty; give an endless iterator.")
        parts = self.settings.grad_accumulation
        return prefetch.batch_shardings(
            first, self.mesh, self.rules, parts=parts, of="training batch"
        )

    def _held_out_shardings(self):
        if self.held_out is None:
            return None
        if isinstance(self.held_out, Iterator):
            raise TrainError(
                f"held_out is a {type(self.held_out).__name__}, which can be read once, but every "
                "evaluation reads it anew. Give EvalBatches or a list of batches."
            )
        first = prefetch.first_batch(self.held_out)
        if first is None:
            raise TrainError("held_out has no batches; give None to train without evaluation.")
        return prefetch.batch_shardings(first, self.mesh, self.rules, parts=1, of="held-out batch")

    def run(
        self,
        *,
        resume: bool = False,
        fallback: bool = True,
        override: bool = False,
        display: Callable[[int, int], Any] = TrainingProgress,
        verbose_processes: bool = False,
    ) -> RunResult:
        """Trains until ``settings.steps``, or until SIGINT or SIGTERM asks to stop.

        Args:
            resume: Whether to go on from the last checkpoint of ``directory``, if there is one.
            fallback: Whether to go on from the newest good checkpoint if the last is damaged. The
                damaged ones are renamed to end in ``.damaged``.
            override: Whether to go on though model or optimizer have other settings (a dtype, a
                learning rate) than those that the checkpoint was trained with.
            display: Makes the progress display from (first step, last step): a context manager
                with ``step(step, loss, speed)``, whose last two may be None (a speed is a text,
                such as ``"12,000 tokens/s"``), and ``note(message)``. Of several processes the
                main one has it.
            verbose_processes: Whether the other processes have a display too.

        Returns:
            How it ended. After a request to stop, the state is saved and ``stopped`` tells the
            signal: at once while it waits for a batch, and ``settings.stop_within`` seconds after
            the request also where a callback, a tracker, the display or held-out data has not
            returned. A request to one of several processes stops all at one step.

        Raises:
            TrainError: What ``check`` refuses; if another process trains in the directory, or the
                directory is removed or moved; if the loss or what is trained is no longer finite
                and more steps would be skipped than ``max_skipped_steps``; or if the batches end
                too early.
            CheckpointDamagedError: If no checkpoint to go on from is good, or the last is not and
                ``fallback`` is False.
            CheckpointWriteError: If a checkpoint cannot be written.
            PartitionCheckError: As for ``check``.
            DistributedError: In every process, if they differ in packages, settings, seeds,
                shardings, data, checkpoint or program, or if copies of an array differ.
        """
        places = self._check(resume=resume, fallback=fallback, override=override)
        with self.folder.held(), noting_other_processes():
            shows = distributed.is_main() or verbose_processes
            try:
                return self._run(
                    places, fallback, override, display if shows else lambda *_: SilentProgress()
                )
            except OSError:
                self.folder.check()
                raise

    def _run(
        self, places: PyTree, fallback: bool, override: bool, display: Callable[[int, int], Any]
    ) -> RunResult:
        start = self._find_start(fallback=fallback, override=override)
        with self._scope(), self._open_checkpoints() as checkpoints:
            if jax.process_count() > 1:
                agreement.agree_to_start(self, start)
            checkpoints.remove_leftovers()
            first = max(start.step, 0)
            with (
                display(first, self.settings.steps) as shown,
                StopRequest(self.settings.stop_within) as stop,
            ):
                screen = BoundedDisplay(shown, stop)
                try:
                    return self._run_from(start, places, checkpoints, screen, stop)
                except OverdueError:  # before the first step: later ones end in ``_leave``
                    path = checkpoints.path(first)
                    return RunResult(first, math.nan, None, stop.signal, path, self.log_path)

    def _run_from(
        self,
        start: _Start,
        places: PyTree,
        checkpoints: Checkpoints,
        screen: BoundedDisplay,
        stop: StopRequest,
    ) -> RunResult:
        """Runs from the checkpoint that was chosen, or from the beginning."""
        for note in start.take(checkpoints):
            screen.note(note)
        if start.description is None and self.log_path.exists():
            screen.note("There is no checkpoint to go on from: starting again at step 0.")
        if not self._place(start, stop):
            screen.note("The batches have no position to go on from: they start anew.")
        if jax.process_count() > 1:
            agreement.compare_programs(self, places)
            agreement.compare_copies(self, "after placing, before the first step")

        first = max(start.step, 0)
        with (
            self._prefetched(places, self.settings.steps - first, screen, stop) as source,
            Trackers(self.log_path, self.trackers, start.step, stop)
            if distributed.is_main()
            else SilentProgress() as log,
            self.profile or contextlib.nullcontext(),
            explain_retraces(file=False) as retraces,
        ):
            extra = {} if start.description is None else start.description["extra"]
            limit = self.settings.max_skipped_steps
            finite = FiniteCheck(self.trained, limit, extra.get("skipped_steps"))
            run = _Run(checkpoints, log, source, screen, stop, retraces, finite, first, start.step)
            try:
                if extra.get("evaluated"):
                    run.evaluated = run.step
                elif extra.get("evaluated") is False and first < self.settings.steps:
                    self._evaluate_what_is_due(run)
                self._loop(run)
                return self._finish(run)
            except OverdueError as overdue:
                return self._leave(run, overdue)

    @contextlib.contextmanager
    def _prefetched(
        self, places: PyTree, steps: int, screen: BoundedDisplay, stop: StopRequest
    ) -> Generator[prefetch.Prefetch]:
        """Reads the batches ahead; a request to stop ends the wait for one."""
        source = prefetch.Prefetch(self.batches, places, limit=max(0, steps))
        stop.wake = source.interrupt
        try:
            yield source
        except KeyboardInterrupt:  # by a second SIGINT
            source.close(0.0)
            raise
        except BaseException:
            self._close(source, screen, stop)
            raise
        self._close(source, screen, stop)

    def _close(self, source: prefetch.Prefetch, screen: BoundedDisplay, stop: StopRequest) -> None:
        """Waits for a batch that is being read, or leaves the source."""
        # A signal ends the first wait, the end of the time the second. Where it ended the wait of
        # the loop there is no other.
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

    def _find_start(self, *, fallback: bool, override: bool, sizes_only: bool = False) -> _Start:
        """Finds the newest good checkpoint."""
        checkpoints = self._open_checkpoints()
        damaged: list[tuple[int, str]] = []
        for step in reversed(checkpoints.all_steps()):
            path = checkpoints.path(step)
            try:
                description = verify(path, sizes_only=sizes_only)
            except CheckpointDamagedError as error:
                if not fallback:
                    raise
                damaged.append((step, error.problems))
                continue
            saved = (description["extra"] or {}).get("settings")
            changed = [] if saved is None else differences(saved, self.run_settings)
            if changed and not override:
                omitted = f"; and {len(changed) - 8} more" if len(changed) > 8 else ""
                raise TrainError(
                    f"The checkpoint {path} was trained with other settings: "
                    f"{'; '.join(changed[:8])}{omitted}. Put them back, or go on with the new "
                    "ones: override=True (on the command line --override)."
                )
            contents, positions = contents_of(self.trained), description["positions"]
            stored = stored_arrays(description)
            check_fit(stored, contents, positions, str(path), partial=False, cast=False)
            return _Start(step, path, description, damaged)
        if damaged:
            raise CheckpointDamagedError(
                f"No checkpoint in {self.checkpoint_directory} is good: "
                + "; ".join(f"step {step}: {problems}" for step, problems in damaged)
                + ". Put back the files, or start another run in another directory."
            )
        return _Start()

    def _loop(self, run: _Run) -> None:
        settings = self.settings
        callbacks = self.callbacks
        while run.step < settings.steps and not (callbacks.stopping or run.stop.reached()):
            try:
                batch = next(run.source)
            except prefetch.Interrupted:  # as a signal came while there was no batch
                break
            except StopIteration:
                raise TrainError(
                    f"The training batches ended after step {run.step} of {settings.steps}; give "
                    f"an endless iterator, or fewer steps. {_last_saved(run)}"
                ) from None
            self._step(run, batch)
            run.record = {"loss": run.pending, **run.numbers}
            _require_finite(run, behind=1)
            recorded = run.step % settings.log_every == 0 or run.step == settings.steps
            if recorded:
                loss, speeds = float(run.pending), run.throughput.numbers()
                numbers = self._numbers(run) | speeds
                if run.saving:
                    numbers["checkpoint_seconds"], run.saving = run.saving, 0.0
                self.folder.check()
                if callbacks.functions:
                    numbers = from_main(numbers, "the numbers of a step")
                run.record = {"loss": loss, **numbers}
                problem = run.finite.problem()
                if settings.max_skipped_steps:
                    run.record["skipped_steps"] = run.finite.skipped
                run.log.write(step=run.step, **run.record)
                run.screen.step(run.step, loss, throughput_text(speeds))
                _require_finite(run, problem)
            else:
                run.screen.step(run.step, None, None)
            with run.throughput.paused():
                self._fire(run, "step", run.record, recorded)
                if _due(run.step, settings.check_replicas_every) and jax.process_count() > 1:
                    agreement.compare_copies(self, f"after step {run.step}")
                if _due(run.step, settings.eval_every):
                    _require_finite(run)
                    self._evaluate_and_record(run)
                if _due(run.step, settings.checkpoint_every) or callbacks.saving:
                    self._save(run)
        if run.saved != run.step:
            self._save(run)
        run.checkpoints.wait()

    def _step(self, run: _Run, batch: object) -> None:
        """Takes a step, and tells of a finished trace and of retraces."""
        number, is_first = run.step + 1, run.pending is None
        with contextlib.nullcontext() if self.profile is None else self.profile.step(number):
            run.pending, run.numbers = self.train_step(*self.trained, batch)
        run.finite.add(number, run.pending, run.numbers.pop("not_finite"))
        run.step = number
        run.throughput.count(batch, run.pending)
        if self.profile is not None and self.profile.ends(number, run.pending):
            steps = f"{self.profile.first} to {self.profile.last}"
            run.screen.note(f"the trace of steps {steps} is in {self.profile.folder}")
        if run.retraces:
            self._tell_retraces(run)
        if is_first and distributed.is_main():
            with run.throughput.paused():
                step: Any = self.train_step
                devices = jax.devices()[:1] if self.mesh is None else [*self.mesh.devices.flat]
                run.throughput.ideal, reason = utilization_of(
                    lambda: step.lower(*self.trained, batch), devices, self.settings.peak_flops
                )
                if reason:
                    run.screen.note(reason)

    def _tell_retraces(self, run: _Run) -> None:
        """Says why a step was compiled again, once for each."""
        for retrace in run.retraces:
            name = retrace.function.rpartition(".")[2]
            if retrace.function.startswith("Trainer.") and name not in run.retraced:
                run.retraced.add(name)
                reasons = "; ".join(retrace.reasons[:4])
                run.screen.note(
                    f"step {run.step}: {name} was compiled again, because {reasons} (said once)"
                )
        run.retraces.clear()

    def _numbers(self, run: _Run) -> dict[str, Any]:
        """Returns the numbers logged with a loss."""
        numbers = {name: float(number) for name, number in jax.device_get(run.numbers).items()}
        memory = step_numbers.device_memory()
        return numbers if memory is None else numbers | {"memory": memory}

    def _finish(self, run: _Run) -> RunResult:
        stop, loss, eval_loss = run.stop, math.nan, None
        if stop:
            name = stop.signal.name if stop.signal else "request"
            run.screen.note(f"stopped by {name}; saved at step {run.step}")
        elif self.callbacks.stopping and run.step < self.settings.steps:
            run.screen.note(f"stopped by a callback; saved at step {run.step}")
        # A finished run does not measure or log again what it has already measured.
        logged = self._logged(run)
        loss = float(logged.get("loss", math.nan) if run.pending is None else run.pending)
        if run.step >= self.settings.steps or (self.callbacks.stopping and not stop):
            eval_loss = logged.get("eval_loss")
            if eval_loss is None:
                eval_loss = self._evaluate_and_record(run)
            elif run.evaluated != run.step:  # logged past the checkpoint
                numbers = {k: v for k, v in logged.items() if k.startswith("eval_")}
                self._fire(run, "eval", numbers)
        run.checkpoints.pinned = self.callbacks.pinned(ended=True)
        run.checkpoints.wait()
        self._fire(run, "end", {"loss": loss, **run.record})
        self.folder.check()
        path = run.checkpoints.path(run.step)
        return RunResult(run.step, loss, eval_loss, stop.signal, path, self.log_path)

    def _leave(self, run: _Run, overdue: OverdueError) -> RunResult:
        """Saves the steps that are done, and calls no code of others any more."""
        stop, screen = run.stop, run.screen
        assert stop.signal is not None
        run.screen = SilentProgress()
        if run.saved != run.step:
            self._write_checkpoint(run)
        run.checkpoints.pinned = self.callbacks.pinned(ended=True)
        run.checkpoints.wait()
        self.folder.check()

        stop.grant()
        with contextlib.suppress(OverdueError):
            screen.note(
                f"stopped by {stop.signal.name}; saved at step {run.step}, without waiting any "
                f"longer for {overdue.what}"
            )
        loss = math.nan if run.pending is None else float(run.pending)
        path = run.checkpoints.path(run.step)
        return RunResult(run.step, loss, None, stop.signal, path, self.log_path)

    def _fire(self, run: _Run, kind: str, numbers: Mapping[str, Any], agreed: bool = True) -> None:
        """Calls the callbacks."""
        if not self.callbacks.functions:
            return
        with run.stop.bounded("a callback"):
            self.callbacks.fire(kind, run.step, numbers, agreed)

    def _logged(self, run: _Run) -> dict[str, Any]:
        """Returns the log's numbers of the run's step."""
        logged: dict[str, Any] = {}
        for record in read_jsonl(self.log_path) if distributed.is_main() else ():
            if record.get("step") == run.step:
                logged.update(record)
        return from_main(logged, "the end of the log")

    def _evaluate_what_is_due(self, run: _Run) -> None:
        """Evaluates the step of a checkpoint saved without its evaluation."""
        # The run before ended or was stopped there, and may have logged it since. The checkpoint
        # is there already, so none is saved for BestCheckpoint.
        if self.held_out is None or not _due(run.step, self.settings.eval_every):
            return
        numbers = {k: v for k, v in self._logged(run).items() if k.startswith("eval_")}
        if not numbers:
            self._evaluate_and_record(run)
        else:
            run.evaluated = run.step
            self._fire(run, "eval", numbers)
        run.checkpoints.pinned = self.callbacks.pinned()

    def evaluate(self) -> float:
        """Returns the mean held-out loss per target.

        The model is in evaluation mode meanwhile, and placed on the mesh first.

        Raises:
            TrainError: If there is no held-out data.
        """
        if self.held_out is None:
            raise TrainError("This Trainer has no held-out data; pass held_out=EvalBatches(...).")
        with self._scope():
            if self.mesh is not None:
                # In a tuple, so that overrides find it at the path that it has in training.
                placed = (self.model,) if self.ema is None else self.trained
                shard(placed, self.mesh, self.rules, **self.where)
            numbers = self._evaluate(None)
        assert numbers is not None  # nothing stopped it
        return numbers["eval_loss"]

    def _evaluate(self, stop: StopRequest | None) -> dict[str, float] | None:
        """Returns held-out numbers by name; None if it was stopped."""
        totals, count = dict[str, float](), 0.0
        metrics = self.eval_numbers.reset()
        with _evaluation_mode(self.evaluated):
            for batch in self._held_out_batches(stop):
                if stop is not None and stop.reached():
                    return None
                mean, targets, means = jax.device_get(
                    self.eval_step(self.evaluated, metrics, batch)
                )
                if targets:  # the mean over nothing may be anything
                    for name, number in {"loss": mean, **means}.items():
                        totals[name] = totals.get(name, 0.0) + float(number) * float(targets)
                    count += float(targets)
        if count == 0:
            raise TrainError(
                "The held-out batches hold no target. Every evaluation reads them anew: give "
                "EvalBatches or a list, not a generator."
            )
        numbers = {name: total / count for name, total in totals.items()}
        numbers |= self.eval_numbers.computed()
        return {f"eval_{name}": number for name, number in numbers.items()}

    def _held_out_batches(self, stop: StopRequest | None) -> Iterator[PyTree]:
        """Yields the held-out batches, on the devices."""

        def bounded() -> contextlib.AbstractContextManager[None]:
            if stop is None:
                return contextlib.nullcontext()
            return stop.bounded("the held-out data")

        with bounded():
            batches = prefetch.placed_batches(self.held_out, self._held_out_shardings())
        while True:
            with bounded():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _evaluate_and_record(self, run: _Run) -> float | None:
        if self.held_out is None:
            return None
        numbers = self._evaluate(run.stop)
        if numbers is None:
            return None
        run.log.write(step=run.step, **numbers)
        run.record = {**run.record, **numbers}
        run.evaluated = run.step
        self._tell_retraces(run)
        self._fire(run, "eval", numbers)
        metrics = [f"  {name[5:]} {number:.4f}" for name, number in numbers.items()][1:]
        run.screen.note(
            f"step {run.step}: held-out loss {numbers['eval_loss']:.4f}{''.join(metrics)}"
        )
        return numbers["eval_loss"]

    @contextlib.contextmanager
    def _scope(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(ScopeSettings.telling_once(self._told_names))
            if self.rules is not None:
                stack.enter_context(axis_rules(self.rules))
            if self.mesh is not None:
                stack.enter_context(jax.set_mesh(self.mesh))
            yield

    def _open_checkpoints(self) -> Checkpoints:
        return Checkpoints(self.checkpoint_directory, keep=self.settings.keep_checkpoints)

    def _place(self, start: _Start, stop: StopRequest) -> bool:
        """Places model and optimizer; returns False if only the data starts anew."""
        if start.description is not None:
            extra = restore_verified(
                self.trained, start.path, start.description, self.mesh, self.rules, self.where
            )
            with stop.bounded("a callback"):
                self.callbacks.begin(extra.get("callbacks"))
            with stop.bounded("the batches"):
                return sources.go_to(self.batches, extra["data"], resumable=self.resumable)
        self.callbacks.begin(None)
        if self.mesh is not None:
            shard(self.trained, self.mesh, self.rules, **self.where)
        return True

    def _save(self, run: _Run) -> None:
        self._write_checkpoint(run)
        self._fire(run, "checkpoint", run.record)

    def _write_checkpoint(self, run: _Run) -> None:
        _require_finite(run)
        self.folder.check()
        position = sources.saved_position(self.batches, run.source.state())
        extra = {"data": position, "settings": self.run_settings}
        extra["evaluated"] = run.evaluated == run.step
        if self.settings.max_skipped_steps:
            extra["skipped_steps"] = run.finite.state()
        if self.callbacks.functions:
            extra["callbacks"] = self.callbacks.states()
        run.checkpoints.pinned = self.callbacks.pinned()
        # The step has ended, as its loss was read: what follows holds up the loop.
        begin = time.perf_counter()
        run.checkpoints.save(run.step, self.trained, extra=extra)
        run.saving += time.perf_counter() - begin
        run.saved = run.step


class _Start(NamedTuple):
    """The checkpoint a run goes on from, if there is one."""

    step: int = -1
    path: Any = None
    description: dict[str, Any] | None = None
    damaged: Sequence[tuple[int, str]] = ()  # newer steps, and what is wrong with them

    def take(self, checkpoints: Checkpoints) -> Iterator[str]:
        """Sets the damaged checkpoints aside; yields messages about them."""
        for step, problems in self.damaged:
            place = set_aside(checkpoints.path(step)) if jax.process_index() == 0 else ""
            yield (
                f"The checkpoint of step {step} is damaged: {problems}. Going on from step "
                f"{self.step}; the damaged one is now {place}."
            )
        if self.description is not None and "files" not in self.description:
            yield f"{unchecked(self.path)} Going on from it, unchecked."


@dataclass
class _Run:
    """State of one call of ``Trainer.run``."""

    checkpoints: Checkpoints
    log: Any
    source: prefetch.Prefetch
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


def _require_finite(run: _Run, problem: str = "", *, behind: int = 0) -> None:
    """Raises if a step was not finite; tells of skipped ones."""
    problem = problem or run.finite.problem(behind)
    for note in run.finite.notes:
        run.screen.note(note)
    run.finite.notes.clear()
    if problem:
        raise TrainError(
            f"{problem} Lower the learning rate or clip the gradients; "
            "jax.config.update('jax_debug_nans', True) finds the operation. "
            f"{_last_saved(run)} What went wrong may have begun a step before a checkpoint: "
            f"Checkpoints({str(run.checkpoints.directory)!r}).rewind(step) goes back further."
        )


def _last_saved(run: _Run) -> str:
    run.checkpoints.wait()
    steps = run.checkpoints.steps()
    return f"There are checkpoints of steps {steps}." if steps else "There is no checkpoint yet."


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextlib.contextmanager
def _evaluation_mode(model: object) -> Generator[None]:
    """Puts all Modules into evaluation mode for a block."""
    # As Module.eval sets them.
    modes = {"deterministic": True, "use_running_average": True}
    old_modes = [
        (module, name, getattr(module, name))
        for _, module in iter_modules(model)
        for name in modes
        if name in vars(module) and getattr(module, name) != modes[name]
    ]
    for module, name, _ in old_modes:
        setattr(module, name, modes[name])
    try:
        yield
    finally:
        for module, name, mode in old_modes:
            setattr(module, name, mode)
