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
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from shardax import axis_rules, distributed, iter_modules, jit, shard, shardings
from shardax._module_scopes import module_scopes
from shardax.distributed.processes import noting_other_processes
from shardax.extend import Options, PyTree, ScopeSettings
from shardax.partition import resolve_mesh
from shardax.train import agreement, step_numbers
from shardax.train.accumulation import accumulated_value_and_grad
from shardax.train.callbacks import Callbacks, Event
from shardax.train.checkpoint import Checkpoints, MemoryKinds, OverridesLike
from shardax.train.data import prefetch, sources
from shardax.train.ema import EMA
from shardax.train.errors import TrainError
from shardax.train.gradients.data_parallel import data_parallel_value_and_grad
from shardax.train.gradients.finite import current_values, step_flags
from shardax.train.log import as_trackers, read_jsonl
from shardax.train.optimizer import Optimizer, gradient_layout
from shardax.train.progress import (
    BoundedDisplay,
    OverdueError,
    SilentProgress,
    StopRequest,
    TrainingProgress,
)
from shardax.train.run.start import RunStart
from shardax.train.run.steps import RunResult, train_from
from shardax.train.run_folder import RunFolder, settings_of
from shardax.train.speed import Profile

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

        checkpoints = self._open_checkpoints()
        steps = checkpoints.all_steps()
        records = read_jsonl(self.log_path) if self.log_path.exists() else []
        if resume:
            start = RunStart.find(
                self, checkpoints, fallback=fallback, override=override, sizes_only=True
            )
            if start.description is not None:
                # Not by ``peeking``: a source that refuses a position stays where it is by itself.
                position = sources.position_of(self.batches)
                sources.go_to(self.batches, start.extra["data"], resumable=self.resumable)
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
        """Runs in the folder that is held; ``places`` are the shardings of the batches."""
        checkpoints = self._open_checkpoints()
        start = RunStart.find(self, checkpoints, fallback=fallback, override=override)
        with self._scope(), checkpoints:
            if jax.process_count() > 1:
                agreement.agree_to_start(self, start)
            checkpoints.remove_leftovers()

            steps = start.steps_done, self.settings.steps
            with display(*steps) as shown, StopRequest(self.settings.stop_within) as stop:
                screen = BoundedDisplay(shown, stop)
                try:
                    return train_from(
                        start,
                        self,
                        places=places,
                        checkpoints=checkpoints,
                        screen=screen,
                        stop=stop,
                        evaluate=self._evaluate,
                    )
                except OverdueError:  # before the first step: later ones end within the run
                    path = checkpoints.path(start.steps_done)
                    log, signal = self.log_path, stop.signal
                    return RunResult(start.steps_done, math.nan, None, signal, path, log)

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
