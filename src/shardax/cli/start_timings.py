# SPDX-License-Identifier: Apache-2.0
"""Where the time goes until the first step is done: ``shardax train --timings``.

JAX tells how long it traced, lowered and compiled ``train_step``; before that, model and optimizer
are initialised, and after it the step runs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import jax

from shardax.train.progress import TrainingProgress

_PREPARED = "text, model, checks"
_STAGES = {
    "jaxpr_trace_duration": "trace the step",
    "jaxpr_to_mlir_module_duration": "lower the step",
    "backend_compile_duration": "compile the step, or load it",
}


class StartTimings:
    """Time of each stage until the end of the first step."""

    def __init__(self) -> None:
        self._start = _process_start()
        self._marks = [("Python, imports, command line", time.time())]
        self._told = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def prepared(self) -> None:
        """Notes the time just before the run."""
        self._marks.append((_PREPARED, time.time()))

    def display(self, first: int, total: int) -> TrainingProgress:
        """Returns a progress display that shows the stages after the first step."""
        return _TimedProgress(self, first, total)

    def lines(self) -> list[str]:
        """Returns the table, once."""
        if self._told:
            return []
        self._told = True
        jax.monitoring.unregister_event_duration_listener(self._listen)
        self._marks.append(("run the step", time.time()))

        spent: dict[str, float] = {}
        previous = self._start
        for stage, now in self._marks:
            spent[stage] = spent.get(stage, 0.0) + now - previous
            previous = now
        spent["the first step is done after"] = previous - self._start
        return ["", *(f"{stage:32}{seconds:8.2f} s" for stage, seconds in spent.items()), ""]

    def _listen(self, event: str, duration_secs: float, **kwargs: object) -> None:
        stage = _STAGES.get(event.rpartition("/")[2])
        of_step = kwargs.get("fun_name") in ("train_step", "jit(train_step)")
        if stage is None or not of_step or self._told:
            return

        # What passed between the checks and the first trace is the initialisation.
        now = time.time()
        last_stage, last_time = self._marks[-1]
        if last_stage == _PREPARED and now - duration_secs > last_time:
            self._marks.append(("initialise", now - duration_secs))
        self._marks.append((stage, now))


class _TimedProgress(TrainingProgress):
    """Progress display with a note on the first step."""

    def __init__(self, timings: StartTimings, first: int, total: int) -> None:
        super().__init__(first, total)
        self._timings = timings

    def step(self, step: int, loss: float | None, speed: str | None) -> None:
        super().step(step, loss, speed)
        for line in self._timings.lines():
            self.note(line)


def _process_start() -> float:
    """Returns when the process started, in seconds since the epoch."""
    # Elsewhere than on Linux without the time that it waited.
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return time.time() - time.process_time()
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
