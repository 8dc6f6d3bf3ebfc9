# SPDX-License-Identifier: Apache-2.0
"""The CPU compiler: for CPU devices as it is, and for others as an estimate.

*Virtual devices* are parts of one CPU that JAX treats as devices. A process has as many as it was
told before its first computation.

For CPU targets the program is XLA's own. For TPUs and GPUs it is the program right after XLA's
partitioner, which is the same code for all of them; ``shardax.hlo`` rewrites what their compilers
are known to rewrite, and estimates the memory from what is live. A step that asks for the platform
that it is lowered for gets the answer "cpu".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shardax.plan.compile.compilers import (
    CompiledProgram,
    Compiler,
    failed,
    known_compilers,
    required_bytes,
    with_options,
)
from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.targets import Target

_FAST = {"xla_backend_optimization_level": 0}
"""Without LLVM's optimizations; the program in HLO and its memory stay as they are."""


class CpuCompiler(Compiler):
    """XLA for the CPU devices of a process."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.label = known_compilers()[0].label

    def environment(self) -> dict[str, str]:
        return super().environment() | {"JAX_NUM_CPU_DEVICES": str(self.target.device_count)}

    @property
    def devices_needed(self) -> int:
        return self.target.device_count

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
        needed, devices = self.devices_needed, jax.devices("cpu")
        if len(devices) < needed:
            raise PlanInputError(
                f"To plan for {self.target.text!r} with {self.label} this process needs {needed} "
                f"CPU devices and has {len(devices)}. Before anything else: sx.configure(devices="
                f"{needed}), or JAX_NUM_CPU_DEVICES={needed} in the environment. plan.compare and "
                "plan.search do it in processes of their own."
            )
        found = np.empty(needed, dtype=object)
        found[:] = devices[:needed]
        return found.reshape(tuple(sizes.values()))

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompiledProgram:
        start = time.perf_counter()
        try:
            compiled = with_options(lowered, _FAST if effort == "screen" else {})
        except Exception as error:  # of jaxlib's own class
            raise failed(self.label, error) from error
        seconds = time.perf_counter() - start
        peak, temporaries = required_bytes(compiled)
        return CompiledProgram(compiled.as_text(), peak, temporaries, None, seconds)


class EstimateCompiler(CpuCompiler):
    """XLA's partitioner on virtual CPU devices, in place of the compiler of a TPU or GPU."""

    tier = "cpu estimate"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.label = f"{self.label}, estimate"

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompiledProgram:
        from shardax.hlo.analyze import partitioned_text
        from shardax.hlo.estimate import rewritten
        from shardax.hlo.live_memory import peak_bytes
        from shardax.hlo.program import parse

        del effort  # the partitioner has one
        start = time.perf_counter()
        text = partitioned_text(lowered)
        seconds = time.perf_counter() - start
        peak = peak_bytes(rewritten(parse(text)))
        return CompiledProgram(text, peak, None, None, seconds, estimate=True)
