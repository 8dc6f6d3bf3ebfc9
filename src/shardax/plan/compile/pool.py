# SPDX-License-Identifier: Apache-2.0
"""Evaluate layouts in-process or in a pool.

A compiler may crash, run out of memory or never end. So each slot of the pool is an executor with
one process: if it dies or takes too long, the layout that it was compiling has *failed*, with the
last lines that the process wrote, and a new process takes the slot. The processes end with the
pool, and with the program that made it, however that ends.

Starting a process takes seconds. A program for as many CPU devices as this process has is compiled
in this process, unless a number of processes is asked for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from shardax import configure
from shardax.errors import PickleReadError, PickleWriteError
from shardax.extend import Options
from shardax.host.pickling import Sources, dumps, loads, own_sources
from shardax.plan.compile.cache import ProgramCache, cache_folder
from shardax.plan.compile.compilers import compiler_for, temporary_environment
from shardax.plan.compile.evaluate import evaluate
from shardax.plan.errors import CompilerMissingError, PlanError, PlanInputError
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport

_LAST_LINES = 12  # of a process's output, in the report of a layout that it failed at
_STARTING = threading.Lock()  # of processes, one after another


Begun = Callable[[Layout], None]  # is told of each layout that is begun


def _ignore(layout: Layout) -> None:
    """No-op."""


class Evaluation(NamedTuple):
    """The report of one layout."""

    report: LayoutReport
    cached: bool  # whether the compiled program was in the cache


class LocalEvaluator:
    """Evaluates layouts in this process."""

    def __init__(self, inputs: Inputs, target: Target, compiler: str, cache: object) -> None:
        self._inputs = inputs
        self._options: dict[str, Any] = {"target": target, "compiler": compiler}
        self._cache = None if cache is None else ProgramCache(cache_folder(cache))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """No-op."""

    def take(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def evaluate(
        self, layouts: Iterable[Layout], effort: str = "screen", *, begun: Begun = _ignore
    ) -> Iterator[Evaluation]:
        for layout in layouts:
            begun(layout)
            yield _evaluate_with(self._cache, self._inputs, layout, effort, self._options)


def _evaluate_with(
    cache: ProgramCache | None,
    inputs: Inputs,
    layout: Layout,
    effort: str,
    options: Mapping[str, Any],
) -> Evaluation:
    hits = cache.found if cache else 0
    report = evaluate(inputs, layout, effort=effort, cache=cache, **options)
    return Evaluation(report, bool(cache and cache.found > hits))


class PoolEvaluator:
    """Evaluates layouts of a step in several processes."""

    def __init__(
        self,
        inputs: Inputs,
        target: Target,
        *,
        compiler: str = "auto",
        processes: int | None = None,  # at most; None for one per core
        cache: object = "default",
        seconds: float | None = 1800.0,  # for one layout, and the start of its process if needed
    ) -> None:
        if processes is not None and (not Options.is_integer(processes) or processes < 1):
            raise PlanInputError(
                f"processes={processes!r}: give a positive number, or None for one per core."
            )

        # What each process needs: the environment before it imports jax, then settings.
        target_compiler = compiler_for(target, compiler=compiler)
        folder = None if cache is None else str(cache_folder(cache))
        self._options = ({"target": target, "compiler": compiler}, folder)
        self._env = target_compiler.environment()
        self._settings = {k: v for k, v in configure().settings.items() if v is not None}
        self._settings["platform"] = "cpu"
        if target_compiler.devices_needed:
            self._settings["devices"] = target_compiler.devices_needed
        self._digests = own_sources(sys.modules.copy())

        # The cores of this process where the platform tells them, else those of the machine.
        affinity = getattr(os, "sched_getaffinity", None)
        self._processes = processes or (len(affinity(0)) if affinity else os.cpu_count() or 1)
        self._seconds = seconds
        self._slots: dict[int, _PoolProcess] = {}

        # A step that cannot be sent leaves no folder.
        data = self._pickled(inputs)
        self._folder = Path(tempfile.mkdtemp(prefix="shardax-plan-"))
        self._write(data)

    def take(self, inputs: Inputs) -> None:
        """Replaces the step for the layouts evaluated from now on."""
        self._write(self._pickled(inputs))

    def _pickled(self, inputs: Inputs) -> bytes:
        shapes = inputs.abstract()  # which are all that a compiler needs
        args = tuple(shapes[name] for name in inputs.names)
        try:
            return dumps((inputs.step, args, *self._options))
        except PickleWriteError as error:
            raise _not_sent(error) from error

    def _write(self, data: bytes) -> None:
        # In a file, because a process that dies while it is sent much can block its executor.
        self._task = self._folder / f"{hashlib.sha256(data).hexdigest()}.task"
        self._task.write_bytes(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes."""
        for slot in self._slots.values():
            slot.process.kill()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def evaluate(
        self, layouts: Iterable[Layout], effort: str = "screen", *, begun: Begun = _ignore
    ) -> Iterator[Evaluation]:
        """Yields evaluations as they are done; layouts are begun in order."""
        waiting = list(layouts)[::-1]
        running: dict[Future[Evaluation], tuple[int, Layout, float]] = {}
        idle = list(range(min(self._processes, len(waiting))))[::-1]
        limit = float("inf") if self._seconds is None else self._seconds
        while waiting or running:
            # Every idle slot gets a layout.
            while waiting and idle:
                layout, number = waiting.pop(), idle.pop()
                begun(layout)
                future = self._submit(number, layout, effort)
                running[future] = number, layout, time.monotonic() + limit

            # Until one is done, or the first has had its time.
            left = min(deadline for *_, deadline in running.values()) - time.monotonic()
            timeout = None if self._seconds is None else max(0.0, left)
            done, _ = concurrent.futures.wait(
                running, timeout, return_when=concurrent.futures.FIRST_COMPLETED
            )

            now = time.monotonic()
            for future, (number, layout, deadline) in list(running.items()):
                if future not in done and deadline > now:
                    continue
                del running[future]
                idle.append(number)
                try:
                    if future in done:
                        yield future.result()
                    else:
                        reason = f"it took longer than {limit:g} seconds"
                        yield Evaluation(self._failed(number, layout, reason), False)
                except BrokenProcessPool:
                    yield Evaluation(self._failed(number, layout), False)
                except PickleReadError as error:
                    raise _not_sent(error) from error

    def _submit(self, number: int, layout: Layout, effort: str) -> Future[Evaluation]:
        slot = self._slots.get(number)
        if slot is None or not slot.process.is_alive():
            if slot is not None:
                slot.close()
            log = self._folder / f"{number}.log"
            slot = _PoolProcess(self._env, log, self._settings, self._digests)
            self._slots[number] = slot
        return slot.executor.submit(_evaluate, str(self._task), layout, effort)

    def _failed(self, number: int, layout: Layout, reason: str = "") -> LayoutReport:
        """Ends a process; returns the report of its failed layout."""
        slot = self._slots.pop(number)
        slot.close()
        code = slot.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        reason = reason or f"its process ({slot.process.pid}) {how}"
        lines = [line for line in slot.log.read_text(errors="replace").splitlines() if line.strip()]
        reason += "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])
        return LayoutReport(layout, "failed", reason)


def make_evaluator(
    inputs: Inputs, target: Target, compiler: str, processes: int | None, cache: object
) -> LocalEvaluator | PoolEvaluator:
    """Returns the evaluator for a target, a context manager."""
    needed = compiler_for(target, compiler=compiler).devices_needed
    if processes is None and 0 < needed <= len(jax.devices("cpu")):
        return LocalEvaluator(inputs, target, compiler, cache)
    return PoolEvaluator(inputs, target, compiler=compiler, processes=processes, cache=cache)


class _PoolProcess:
    """One process and its executor."""

    def __init__(
        self, env: Mapping[str, str], log: Path, settings: dict[str, Any], digests: Sources
    ) -> None:
        self.log = log
        log.write_bytes(b"")
        self.executor = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _start, (str(log), settings, digests)
        )
        with _STARTING:
            older = set(multiprocessing.active_children())
            with _spawning(env):
                self.executor.submit(os.getpid)  # starts the process
            (self.process,) = set(multiprocessing.active_children()) - older

    def close(self) -> None:
        self.process.kill()
        self.executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _spawning(env: Mapping[str, str]) -> Generator[None]:
    """Prepares this process for starting another as a copy."""
    # Without a file of the main module, which spawned processes would run again: steps of a script
    # travel by value, so it needs no guard.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    # Ctrl-C in a terminal is for this process alone; a process that it starts keeps it blocked.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with temporary_environment(env):  # it is read while jax is imported
            yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


# What follows runs in the processes.


_digests: Sources = {}  # of source files, when the pool was made


def _start(log: str, settings: dict[str, Any], digests: Sources) -> None:
    """Initializes a process."""
    # For reading too, because compilers' messages are read from it.
    file = os.open(log, os.O_RDWR | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _digests.update(digests)
    configure(**settings)


@functools.lru_cache(maxsize=4)
def _read_task(path: str) -> tuple[Inputs, dict[str, Any], ProgramCache | None]:
    step, args, options, folder = loads(Path(path).read_bytes())
    inputs = Inputs(step, args)
    for name, digest in own_sources(sys.modules.copy()).items():
        if _digests.get(name, digest) != digest:
            raise PlanInputError(
                "A source file has changed since the search began, so the layouts would be of "
                "different programs. Start again: programs that are still the same are taken from "
                f"the cache. The file is that of the module {name}."
            )
    return inputs, options, None if folder is None else ProgramCache(Path(folder))


def _evaluate(task: str, layout: Layout, effort: str) -> Evaluation:
    inputs, options, cache = _read_task(task)
    try:
        return _evaluate_with(cache, inputs, layout, effort, options)
    except (PlanError, CompilerMissingError):
        raise
    except Exception as error:  # noqa: BLE001 (one layout that breaks a compiler ends no search)
        return Evaluation(LayoutReport(layout, "failed", f"{type(error).__name__}: {error}"), False)


def _not_sent(error: Exception) -> PlanInputError:
    missing = importlib.util.find_spec("cloudpickle") is None
    install = " without cloudpickle (pip install 'shardax[plan]')" if missing else ""
    return PlanInputError(
        f"Layouts are compiled in other processes, to which the step cannot be sent{install}: "
        f"{error} A step that is defined at the top of a module, and makes what it needs itself, "
        "can always be sent."
    )
