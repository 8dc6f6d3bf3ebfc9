# SPDX-License-Identifier: Apache-2.0
"""Published training steps near a planned one.

The table ``published.json`` holds measured steps of public tables, each with its source; it is
written by ``benchmarks/published.py --table``.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardax.extend import Options
from shardax.plan.errors import PlanInputError
from shardax.plan.timing.figures import find_chip, generation

_OPTIONS = Options(PlanInputError)
_OTHER_CHIP = 1.0  # distance of hardware of the same generation
_CHIPS = 0.25  # weight of the logarithm of the number of chips


@dataclass(frozen=True)
class PublishedStep:
    """A published measurement of a training step.

    Attributes:
        model: As its source names it.
        parameters: Of the model.
        hardware: Name of the hardware.
        chips: Number of chips.
        layout: Forms of parallelism, such as ``"FSDP"``.
        sequence: Tokens of a row.
        precision: Of the products of layers.
        tokens_per_second_per_chip: Measured.
        mfu: Operations of the model over those at the peak in bf16, without recomputation.
        source: Repository and file.

    Example:
        >>> from shardax import plan
        >>> step = plan.published_steps("v5e", parameters=8e9, chips=256)[0]
        >>> step.hardware, 0.2 < step.mfu < 0.8, step.summary.startswith(step.model)
        ('v5e', True, True)
    """

    model: str
    parameters: float
    hardware: str
    chips: int
    layout: str
    sequence: int
    precision: str
    tokens_per_second_per_chip: float
    mfu: float
    source: str

    @property
    def summary(self) -> str:
        """The measurement in one line."""
        return (
            f"{self.model} ({_short(self.parameters)}) on {self.chips} x {self.hardware}, "
            f"{self.layout}, rows of {self.sequence:,}, {self.precision}: "
            f"{self.tokens_per_second_per_chip:,.0f} tokens/s/chip, {self.mfu:.0%} MFU "
            f"({self.source})"
        )


def published_steps(
    hardware: str, parameters: float, chips: int, *, count: int = 3
) -> tuple[PublishedStep, ...]:
    """Returns published steps near a planned one, the nearest first.

    Args:
        hardware: Name of the hardware.
        parameters: Of the model.
        chips: Number of chips.
        count: How many at most; of one model the nearest alone.

    Returns:
        Measured steps on this hardware, then on other hardware of its generation; those of models
        and jobs of similar size first. None for CPU.

    Raises:
        HardwareError: The hardware is unknown.
        PlanInputError: A size is not positive.

    Example:
        >>> from shardax import plan
        >>> [step.hardware for step in plan.published_steps("h100", 7e10, 64, count=2)]
        ['h100', 'h100']
    """
    _OPTIONS.check("parameters", parameters, parameters > 0, "a number above 0")
    _OPTIONS.check("chips", chips, chips > 0, "a number above 0")
    chip = find_chip(hardware)
    family = generation(chip.name, chip.kind)

    def distance(step: PublishedStep) -> float:
        far = abs(math.log(step.parameters / parameters))
        far += _CHIPS * abs(math.log(step.chips / chips))
        return far + (_OTHER_CHIP if step.hardware != chip.name else 0.0)

    alike = [
        step
        for step in _table()
        if chip.kind != "cpu" and generation(step.hardware, chip.kind) == family
    ]
    nearest: dict[tuple[str, str], PublishedStep] = {}
    for step in sorted(alike, key=distance):
        nearest.setdefault((step.model, step.hardware), step)
    return tuple(nearest.values())[:count]


@functools.cache
def _table() -> tuple[PublishedStep, ...]:
    text = Path(__file__).with_name("published.json").read_text(encoding="utf-8")
    rows: list[list[Any]] = json.loads(text)["rows"]
    return tuple(
        PublishedStep(
            model, 1e9 * billions, chip, chips, layout, length, precision, rate, mfu / 100, source
        )
        for model, billions, chip, chips, layout, length, precision, rate, mfu, source in rows
    )


def _short(parameters: float) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
