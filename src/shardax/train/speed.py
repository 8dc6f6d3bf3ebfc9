# SPDX-License-Identifier: Apache-2.0
"""Speed of a run, and traces of its time.

Throughput counts what a batch has: tokens, images or rows. Model FLOPs utilization (MFU) is the
share of the devices' peak that the step's matrix products and convolutions take, as PaLM's authors
defined it (arXiv:2204.02311, appendix B): what is computed again to save memory (``remat``) does
not count. The products are counted in the step as it is lowered, for the whole batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from shardax._module_scopes import compiled_with_names
from shardax.extend import Options, PyTree
from shardax.train.errors import TrainError

THROUGHPUTS = ("tokens_per_second", "images_per_second", "rows_per_second")


# --- Throughput ---


class Throughput:
    """Work trained on per second, since the last report."""

    # The first step compiles, so counting starts after it.

    def __init__(self) -> None:
        self.kind = "rows"
        self.ideal: float | None = None  # seconds of a step at the devices' peak
        self._counted = self._steps = 0
        self._since: float | None = None

    def count(self, batch: object, pending: object) -> None:
        """Counts the batch of a step with the loss ``pending``."""
        if self._since is None:
            jax.block_until_ready(pending)
            self._since = time.perf_counter()
            return
        self.kind, number = counted(batch)
        self._counted += number
        self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Leaves out the time of a ``with`` block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += time.perf_counter() - started

    def numbers(self) -> dict[str, float]:
        """Returns throughput and utilization by name, if steps were counted."""
        if self._since is None or self._steps == 0:
            return {}
        seconds = max(time.perf_counter() - self._since, 1e-9)
        rates = {f"{self.kind}_per_second": self._counted / seconds}
        if self.ideal is not None:
            rates["mfu"] = self.ideal * self._steps / seconds
        self._counted, self._steps, self._since = 0, 0, time.perf_counter()
        return rates


def counted(batch: PyTree) -> tuple[str, int]:
    """Returns the contents of a batch, in the plural, and their number."""
    named: Mapping[str, PyTree] = batch if isinstance(batch, Mapping) else {}
    targets = named.get("targets", named.get("inputs", 0.0))
    if np.ndim(targets) >= 2 and np.issubdtype(np.dtype(targets.dtype), np.integer):
        return "tokens", int(targets.size)
    leaves = jax.tree.leaves(batch)
    rows = int(np.shape(leaves[0])[0]) if leaves and np.ndim(leaves[0]) else 1
    return ("images" if any(np.ndim(leaf) == 4 for leaf in leaves) else "rows"), rows


def throughput_text(numbers: Mapping[str, float]) -> str | None:
    """Returns a throughput as it is shown: ``12,000 tokens/s``."""
    for name in THROUGHPUTS:
        if name in numbers:
            return f"{numbers[name]:,.0f} {name.removesuffix('_per_second')}/s"
    return None


# --- Utilization ---


def utilization_of(step: Any, devices: Any, peak: float | None) -> tuple[float | None, str]:
    """Returns the seconds of a step at the peak, or why not."""
    # ``step`` lowers the train step; where no peak is known it is not called.
    if peak is None and devices[0].platform == "cpu":
        return None, ""
    from shardax.hlo import model_flops, parse
    from shardax.hlo.errors import HloReadError
    from shardax.plan.hardware.hardware import hardware_of

    hardware = hardware_of(devices[0])
    if peak is None and hardware is None:
        return None, ""
    try:
        flops = model_flops(parse(step().as_text("hlo", debug_info=True)))
    except HloReadError as error:
        return None, f"MFU is not logged: {error}"
    if flops.uncounted:
        return None, f"MFU is not logged: {' '.join(flops.uncounted)}"
    seconds = sum(
        count / (peak or (hardware.peak(dtype) if hardware else math.inf))
        for dtype, count in flops.by_dtype.items()
    )
    return seconds / len(devices), ""


# --- Traces ---


class Profile:
    """A trace of some steps, by ``jax.profiler``; operations carry paths of Modules."""

    def __init__(self, steps: Any, of: int, folder: Path) -> None:
        fits = isinstance(steps, tuple | list) and len(steps) == 2
        fits = fits and all(type(step) is int for step in steps) and 1 <= steps[0] <= steps[1] <= of
        expected = f"the first and the last step to trace, of 1 to {of}"
        example = f"profile=({min(10, of)}, {min(13, of)})"
        Options(TrainError).check("profile", steps, fits, f"{expected}: {example}")
        self.first, self.last = steps
        several = jax.process_count() > 1
        self.folder = folder / f"process-{jax.process_index()}" if several else folder
        self._is_tracing = False

    @contextlib.contextmanager
    def step(self, number: int) -> Generator[None]:
        """Traces a step if it is one of those to trace."""
        if not self.first <= number <= self.last:
            yield
            return
        if not self._is_tracing:
            jax.profiler.start_trace(self.folder)
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield

    def ends(self, number: int, pending: object) -> bool:
        """Ends the trace after its last step; whether it did."""
        if not self._is_tracing or number < self.last:
            return False
        jax.block_until_ready(pending)
        self.close()
        return True

    def close(self) -> None:
        """Ends the trace if one is being made."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(compiled_with_names())
            stack.callback(self.close)
            self._until_exit = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._until_exit.close()
