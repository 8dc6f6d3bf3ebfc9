# SPDX-License-Identifier: Apache-2.0
"""Runs held against their plans: predicted and measured seconds of a step, side by side.

A run says the seconds of its steps and not those of their parts. So the rates of the hardware are
measured anew, each by a small program (``plan.calibrate_cpu``, ``plan.calibrate_gpu``): what a part
of the plan takes at these rates is its measured time. The rest of a step, which none of the parts
accounts for, is the host's: data, launches, logs, and what else runs on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardax.extend import align_columns
from shardax.hlo import ProgramFacts
from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.cost import time_band
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.hardware.targets import Target
from shardax.plan.records import LayoutReport, TimeBand
from shardax.plan.timing.rows import Row
from shardax.plan.timing.runs import read_run

PARTS = ("arithmetic", "memory", "wire", "host")
_BANDS = {"arithmetic": "compute", "memory": "memory", "wire": "communication"}
_EXPECTED = {
    "arithmetic": ("products", "attention"),
    "memory": ("memory", "optimizer"),
    "wire": ("tensor", "experts", "parameters", "gradients", "bubble"),
    "host": ("host", "stragglers"),
}
_AS_PLANNED = 0.05  # of the predicted step: a difference that needs no part to blame


@dataclass(frozen=True)
class RunCheck:
    """A run's step beside the predicted one.

    Attributes:
        layout: Name of the planned layout.
        predicted: Seconds by part; their sum is the predicted step.
        measured: Seconds by part, at the rates measured on this machine; their sum is the measured
            step. Empty where rates were not measured.
        seconds: The measured step.
        row: The run as ``plan.calibrate`` takes it.

    Example:
        >>> from shardax.plan.report.measured import RunCheck
        >>> predicted = dict(arithmetic=0.3, memory=0.1, wire=0.1, host=0.0)
        >>> measured = dict(arithmetic=0.3, memory=0.1, wire=0.1, host=0.4)
        >>> check = RunCheck("fsdp", predicted, measured, 0.9, {})
        >>> check.off
        'host'
        >>> print(check)
        Step of the layout fsdp, in seconds
                    predicted  measured
        arithmetic      0.300     0.300
        memory          0.100     0.100
        wire            0.100     0.100
        host            0.000     0.400
        step            0.500     0.900
        The step took 1.80 times the predicted one, most of it by host (+0.400 s).
    """

    layout: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    seconds: float
    row: Row

    @property
    def predicted_seconds(self) -> float:
        """Seconds of the predicted step."""
        return sum(self.predicted.values())

    @property
    def off(self) -> str:
        """The part that differs most, or "" if none does or parts were not measured."""
        if not self.measured:
            return ""
        if abs(self.seconds - self.predicted_seconds) <= _AS_PLANNED * self.predicted_seconds:
            return ""
        return max(PARTS, key=lambda part: abs(self.measured[part] - self.predicted[part]))

    def __str__(self) -> str:
        rows = [["", "predicted", "measured"]]
        for part in PARTS:
            measured = f"{self.measured[part]:.3f}" if self.measured else "-"
            rows.append([part, f"{self.predicted[part]:.3f}", measured])
        rows.append(["step", f"{self.predicted_seconds:.3f}", f"{self.seconds:.3f}"])

        title = f"Step of the layout {self.layout}, in seconds"
        return "\n".join([title, *align_columns(rows, right=(1, 2)), self._verdict()])

    def _verdict(self) -> str:
        ratio = self.seconds / self.predicted_seconds if self.predicted_seconds else 0.0
        text = f"The step took {ratio:.2f} times the predicted one"
        if not self.measured:
            return f"{text}; rates of this hardware are not measured, so no part can be named."
        if not self.off:
            return f"{text}: as planned."
        difference = self.measured[self.off] - self.predicted[self.off]
        return f"{text}, most of it by {self.off} ({difference:+.3f} s)."


def check_run(
    folder: str | os.PathLike[str],
    report: LayoutReport,
    target: str | Target,
    *,
    measured: Hardware | None = None,
) -> RunCheck:
    """Holds a run of ``shardax train`` against the plan of its layout.

    Args:
        folder: The run's folder, with its settings and its log.
        report: The planned layout, of a plan that compiled it.
        target: What it was planned for.
        measured: The hardware with rates measured on this machine, by ``plan.calibrate_cpu`` or
            ``plan.calibrate_gpu``; None compares the whole step alone.

    Returns:
        Predicted and measured seconds by part, and the run's row.

    Raises:
        PlanInputError: The layout has no predicted time.
        PlanFileError: There is no run in the folder, or its files are damaged.
        TargetError: There is no such target.

    Example:
        >>> from shardax import plan
        >>> layout = plan.Layout("dp", (("batch", "data"),), (("data", 8),))
        >>> plan.check_run("runs/none", plan.LayoutReport(layout, "failed"), "cpu:8")
        Traceback (most recent call last):
            ...
        shardax.errors.PlanInputError: The layout 'dp' has no predicted time ...
    """
    target = Target.parse(target)
    predicted = _predicted_parts(report)
    row = read_run(folder, target.hardware)
    seconds = row["step_seconds"]
    parts: dict[str, float] = {}
    if measured is not None and report.time is not None:
        parts = _measured_parts(report, predicted, target, measured)
        parts["host"] = seconds - sum(parts.values())
    return RunCheck(report.layout.name, predicted, parts, seconds, row)


def _predicted_parts(report: LayoutReport) -> dict[str, float]:
    """Returns a plan's seconds by part."""
    if report.expected is not None:
        by_name = vars(report.expected.parts)
        return {part: sum(by_name[name] for name in names) for part, names in _EXPECTED.items()}
    if report.time is None:
        raise PlanInputError(
            f"The layout {report.layout.name!r} has no predicted time ({report.outcome}); hold a "
            "run against a layout that fits."
        )
    return {**_of_band(report.time), "host": 0.0}


def _of_band(band: TimeBand) -> dict[str, float]:
    return {part: getattr(band, name) for part, name in _BANDS.items()}


def _measured_parts(
    report: LayoutReport, predicted: Mapping[str, float], target: Target, measured: Hardware
) -> dict[str, float]:
    """Returns the seconds of the parts at measured rates, without the host's."""
    facts = ProgramFacts(report.collectives, matmul_flops=report.flops, hbm_bytes=report.hbm_bytes)
    here = Target(measured, target.topology, target.slices)
    dtype = "float32" if target.kind == "cpu" else "bfloat16"
    now = _of_band(time_band(facts, here, report.layout.sizes, dtype))
    assert report.time is not None
    planned = _of_band(report.time)
    return {
        part: predicted[part] * now[part] / planned[part] if planned[part] else 0.0 for part in now
    }
