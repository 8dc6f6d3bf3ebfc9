# SPDX-License-Identifier: Apache-2.0
"""Processes that ask compilers about layouts, several at a time.

A compiler may crash, run out of memory or never end; in a process of its own it takes down nothing
but that. The layout that it was asked about has *failed*, with the last lines that the process
wrote, and another process takes its place. The processes end with the pool, and with the program
that made it, however that ends.

What a process of the planner does: reads a step once, and asks a compiler about layouts of it.

A *task* is a step, its arguments as shapes, a target and how to compile, in the bytes of
``shardax.host.dumps``; it is known by a digest of them.

Who asks the compiler: processes of their own, or this process where it has the devices itself.

Starting processes takes seconds each. A program for as many CPU devices as this process has is
compiled here, unless a number of processes is asked for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

from shardax._core.errors import PickleReadError, PickleWriteError
from shardax._core.object import Object
from shardax.host.errors import StaleModuleError, WorkerCrashedError, WorkerTimeoutError
from shardax.host.pickling import dumps, loads
from shardax.host.workers.worker import Worker
from shardax.partition.boxes.boxes import AxisMetadata, LogicallyPartitioned
from shardax.partition.specs import abstract
from shardax.plan.compile.cache import ProgramCache, cache_folder
from shardax.plan.compile.compilers import compiler_for
from shardax.plan.compile.evaluate import evaluate
from shardax.plan.errors import CompilerMissingError, PlanError, PlanInputError
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs, NamedShape
from shardax.plan.records import Layout, LayoutReport, from_data, to_data

# --- Worker ---


@functools.lru_cache(maxsize=4)
def _task(data: bytes) -> tuple[Inputs, dict[str, Any], ProgramCache | None]:
    step, args, options, folder = loads(data)
    return Inputs(step, args), options, None if folder is None else ProgramCache(Path(folder))


def ask(data: bytes, layout: Layout, effort: str) -> tuple[Mapping[str, Any], bool]:
    """Asks a compiler about a layout.

    Args:
        data: The task.
        layout: The layout.
        effort: ``"screen"`` or ``"full"``.

    Returns:
        The report, as JSON data; whether the compiled program was kept from before.

    Raises:
        PlanError: If the step or its arguments are at fault, whatever the layout.
        CompilerMissingError: If the compiler is not installed.
    """
    inputs, options, cache = _task(data)
    before = cache.found if cache else 0
    try:
        report = evaluate(
            inputs.step, (), layout, effort=effort, inputs=inputs, cache=cache, **options
        )
    except (PlanError, CompilerMissingError):
        raise
    except Exception as error:  # noqa: BLE001 (one layout that breaks a compiler ends no search)
        report = LayoutReport(layout, "failed", f"{type(error).__name__}: {error}")
    return to_data(report), bool(cache and cache.found > before)


# --- Pool ---

LAST_LINES = 12
"""How many lines of what a process wrote are in the report of a layout that it failed at."""

_KILL_AFTER = 5.0  # seconds that a call may go on after it was interrupted


@dataclass(frozen=True)
class Answer:
    """What a process said of a layout.

    Attributes:
        index: The layout's position among those asked about.
        report: The report.
        kept: Whether the compiled program was kept from before.
    """

    index: int
    report: LayoutReport
    kept: bool


class Pool:
    """Processes that ask a compiler about layouts of one step.

    Args:
        step: The step.
        args: Its positional arguments.
        target: The hardware.
        compiler: ``"auto"``, ``"target"`` or ``"estimate"``.
        processes: How many there are at the most; None for one per core.
        cache: Folder for compiled programs, ``"default"``, or None.
        seconds: How long one layout may take; None for ever.
        inputs: The step and its arguments, prepared; instead of them.

    Raises:
        PlanInputError: If the step cannot be sent to another process; says what to do.
        CompilerMissingError: If ``compiler="target"`` and it is not installed.

    Example:
        >>> import jax, shardax as sx
        >>> from shardax import plan
        >>> def apply(weight, x):
        ...     return x @ weight.value
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
        >>> x = plan.NamedShape((32, 64), "float32", ("batch", "embed"))
        >>> target = plan.Target.parse("cpu:2")
        >>> layout = plan.Layout("tp", (("mlp", "model"),), (("model", 2),))
        >>> with Pool(apply, (weight, x), target, processes=1, cache=None) as pool:
        ...     [report.outcome for report in pool.evaluate([layout])]
        ['fits']
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        target: Target,
        *,
        compiler: str = "auto",
        processes: int | None = None,
        cache: Any = "default",
        seconds: float | None = 1800.0,
        inputs: Inputs | None = None,
    ) -> None:
        if processes is not None and (not isinstance(processes, int) or processes < 1):
            raise PlanInputError(
                f"processes={processes!r}: give a positive number, or None for one per core."
            )
        asked = compiler_for(target, compiler=compiler)
        folder = cache_folder(cache)
        self._options = ({"target": target, "compiler": compiler}, folder and str(folder))
        self._task = b""
        self.take(inputs or Inputs(step, args))
        self._env = asked.environment()
        self._devices = asked.devices_needed
        self._processes = processes or len(os.sched_getaffinity(0))
        self._seconds = seconds
        self._workers: dict[int, Worker] = {}
        self._logs = Path(tempfile.mkdtemp(prefix="shardax-plan-"))

    def take(self, inputs: Inputs) -> None:
        """Takes another step, for the layouts that are asked about from now on.

        Args:
            inputs: The step and its arguments.

        Raises:
            PlanInputError: If it cannot be sent to another process; says what to do.
        """
        try:
            self._task = dumps((*_sendable(inputs), *self._options))
        except PickleWriteError as error:
            raise _not_sent(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, at once."""
        with concurrent.futures.ThreadPoolExecutor(max(1, len(self._workers))) as together:
            list(together.map(_end, self._workers.values()))
        self._workers.clear()
        shutil.rmtree(self._logs, ignore_errors=True)

    def evaluate(self, layouts: Iterable[Layout], effort: str = "screen") -> Iterator[LayoutReport]:
        """Yields a report per layout, as they are done.

        Args:
            layouts: The layouts; they are begun in this order.
            effort: ``"screen"`` or ``"full"``.

        Raises:
            PlanInputError: If the step or its arguments are at fault, whatever the layout.
        """
        for answer in self.answers(layouts, effort):
            yield answer.report

    def answers(
        self,
        layouts: Iterable[Layout],
        effort: str = "screen",
        *,
        begun: Callable[[Layout], None] | None = None,
    ) -> Iterator[Answer]:
        """Yields what is said of each layout, as it is done.

        Args:
            layouts: The layouts; they are begun in this order.
            effort: ``"screen"`` or ``"full"``.
            begun: Told when a layout is begun.

        Raises:
            PlanInputError: If the step or its arguments are at fault, whatever the layout, or
                source files change meanwhile.
        """
        waiting = list(enumerate(layouts))[::-1]
        running: dict[concurrent.futures.Future[Any], tuple[int, int, Layout]] = {}
        idle = list(range(min(self._processes, len(waiting))))[::-1]
        while waiting or running:
            while waiting and idle:
                index, layout = waiting.pop()
                place = idle.pop()
                if begun is not None:
                    begun(layout)
                running[self._begin(place, layout, effort)] = (index, place, layout)
            done, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in sorted(done, key=lambda each: running[each][0]):
                index, place, layout = running.pop(future)
                idle.append(place)
                yield self._answer(future, index, place, layout)

    def _begin(self, place: int, layout: Layout, effort: str) -> concurrent.futures.Future[Any]:
        worker = self._workers.get(place)
        if worker is None:
            worker = self._workers[place] = self._start(place)
        return worker.request(ask, (self._task, layout, effort), timeout=self._seconds)

    def _start(self, place: int) -> Worker:
        log = self._log(place)
        log.write_bytes(b"")
        configure: dict[str, Any] = {"platform": "cpu"}
        if self._devices:
            configure["devices"] = self._devices
        return Worker(
            env=self._env, configure=configure, restarts=0, kill_after=_KILL_AFTER, log=log
        )

    def _log(self, place: int) -> Path:
        return self._logs / f"{place}.log"

    def _answer(
        self, future: concurrent.futures.Future[Any], index: int, place: int, layout: Layout
    ) -> Answer:
        try:
            data, kept = future.result()
        except (WorkerCrashedError, WorkerTimeoutError) as error:
            worker = self._workers.pop(place, None)
            if worker is not None:
                _end(worker)
            reason = str(error).partition(". It was not run again")[0]
            if isinstance(error, WorkerTimeoutError):
                reason = f"it took longer than {self._seconds:g} seconds"
            reason += _last_lines(self._log(place))
            return Answer(index, LayoutReport(layout, "failed", reason), False)
        except PickleReadError as error:
            raise _not_sent(error) from error
        except StaleModuleError as error:
            raise PlanInputError(
                "A source file has changed since the first layout was compiled, so the others "
                "would be of another program. Start again: programs that are still the same are "
                f"taken from the cache. {str(error).partition('. ')[0]}."
            ) from error
        return Answer(index, from_data(data), kept)


class _Kept(LogicallyPartitioned[Any]):
    """A ``NamedShape`` while arguments are made abstract, which would take its names."""


def _sendable(inputs: Inputs) -> tuple[Any, tuple[Any, ...]]:
    """The step, and its arguments as shapes, which are all that a compiler needs."""
    boxed = jax.tree.map(
        lambda leaf: _Kept(leaf.struct, leaf.axes) if isinstance(leaf, NamedShape) else leaf,
        inputs.args,
        is_leaf=lambda leaf: isinstance(leaf, (NamedShape, AxisMetadata, Object)),
    )
    args = jax.tree.map(
        lambda leaf: _named_again(leaf) if isinstance(leaf, _Kept) else leaf,
        abstract(boxed),
        is_leaf=lambda leaf: isinstance(leaf, (AxisMetadata, Object)),
    )
    return inputs.step, args


def _named_again(box: _Kept) -> NamedShape:
    return NamedShape(box.value.shape, box.value.dtype, box.names or ())


def _not_sent(error: Exception) -> PlanInputError:
    """What is said of a step that cannot be written, or not be read there."""
    missing = importlib.util.find_spec("cloudpickle") is None
    install = " without cloudpickle (pip install 'shardax[plan]')" if missing else ""
    return PlanInputError(
        f"Layouts are compiled in other processes, to which the step cannot be sent{install}: "
        f"{error} A step that is defined at the top of a module, and makes what it needs itself, "
        "can always be sent."
    )


def _end(worker: Worker) -> None:
    with contextlib.suppress(Exception):  # it may have ended already, in any way
        worker.stop()


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    kept = [line for line in lines if line.strip()][-LAST_LINES:]
    return "".join(f"\n  {line}" for line in kept)


# --- Search here ---


class Here:
    """Like a ``Pool``, in this process.

    Args:
        inputs: The step and its arguments.
        target: The hardware.
        compiler: ``"auto"``, ``"target"`` or ``"estimate"``.
        cache: Folder for compiled programs, ``"default"``, or None.
    """

    def __init__(self, inputs: Inputs, target: Target, compiler: str, cache: Any) -> None:
        folder = cache_folder(cache)
        self._inputs = inputs
        self._options: dict[str, Any] = {"target": target, "compiler": compiler}
        self._cache = None if folder is None else ProgramCache(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends nothing."""

    def take(self, inputs: Inputs) -> None:
        """See ``Pool``."""
        self._inputs = inputs

    def answers(
        self,
        layouts: Iterable[Layout],
        effort: str = "screen",
        *,
        begun: Callable[[Layout], None] | None = None,
    ) -> Iterator[Answer]:
        """See ``Pool``."""
        for index, layout in enumerate(layouts):
            if begun is not None:
                begun(layout)
            before = self._cache.found if self._cache else 0
            report = evaluate(
                self._inputs.step,
                (),
                layout,
                effort=effort,
                inputs=self._inputs,
                cache=self._cache,
                **self._options,
            )
            yield Answer(index, report, bool(self._cache and self._cache.found > before))


def asker(
    inputs: Inputs, target: Target, compiler: str, processes: int | None, cache: Any
) -> Here | Pool:
    """Returns who asks the compiler, as a context manager.

    Args:
        inputs: The step and its arguments.
        target: The hardware.
        compiler: ``"auto"``, ``"target"`` or ``"estimate"``.
        processes: How many processes; None for one per core, or none where none is needed.
        cache: Folder for compiled programs, ``"default"``, or None.
    """
    needed = compiler_for(target, compiler=compiler).devices_needed
    if processes is None and 0 < needed <= len(jax.devices("cpu")):
        return Here(inputs, target, compiler, cache)
    return Pool(
        inputs.step, (), target, compiler=compiler, processes=processes, cache=cache, inputs=inputs
    )
