# SPDX-License-Identifier: Apache-2.0
"""Predicted training steps: seconds with a band, memory, and what the step waits for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.figures import default_figures, find_chip
from shardax.plan.timing.memory import memory_bytes
from shardax.plan.timing.step import StepParts, step_parts
from shardax.plan.timing.transformer import SOFTWARE, TrainingStep, TransformerShape

# Half-widths of the band, as logarithms: of every step, and of parts that are least sure.
_BAND = 0.12
_UNSURE = {"host": 0.35, "experts": 0.35, "parameters": 0.25, "gradients": 0.25, "bubble": 0.2}


@dataclass(frozen=True)
class StepEstimate:
    """Prediction of a training step.

    Attributes:
        seconds: Of the step.
        low: Lower end of the band that holds nine measured steps of ten.
        high: Its upper end.
        memory_bytes: Of a device.
        fits: Whether the device's memory has room for them.
        parts: Seconds by what takes them.
        mfu: Operations of the model over those of the devices at their peak in bf16; recomputation
            does not count.
        tokens_per_second_per_chip: Throughput.
    """

    seconds: float
    low: float
    high: float
    memory_bytes: float
    fits: bool
    parts: StepParts
    mfu: float
    tokens_per_second_per_chip: float

    @property
    def waits_for(self) -> str:
        """Name of the largest part that is no arithmetic."""
        seconds = dataclasses.asdict(self.parts)
        for name in ("products", "attention", "memory"):
            del seconds[name]
        return max(seconds, key=lambda name: seconds[name])


def predict(
    model: TransformerShape,
    step: TrainingStep,
    hardware: str | Hardware,
    *,
    software: str = "xla",
    figures: Mapping[str, float] | None = None,
) -> StepEstimate:
    """Predicts a training step from sizes, layout and hardware, without compiling.

    Args:
        model: Sizes of the transformer.
        step: Layout of the step.
        hardware: A name of known hardware, or the hardware.
        software: What runs the step: ``"xla"``, ``"megatron"``, ``"pytorch"`` or
            ``"pytorch-compile"``.
        figures: Figures of the time model that replace those of the library, by name.

    Returns:
        Seconds with a band, memory, and seconds by part.

    Raises:
        HardwareError: The hardware is unknown.
        PlanInputError: The software or a figure is unknown.

    Example:
        >>> from shardax import plan
        >>> llama = plan.TransformerShape(
        ...     layers=32, embed=4096, mlp_hidden=14336, heads=32, kv_heads=8, vocab=128256
        ... )
        >>> step = plan.TrainingStep(
        ...     global_batch=512, sequence=8192, data=128, zero=3, recompute="full"
        ... )
        >>> estimate = plan.predict(llama, step, "v5e")
        >>> estimate.low < estimate.seconds < estimate.high
        True
        >>> 0.3 < estimate.mfu < 0.7
        True
    """
    if software not in SOFTWARE:
        raise PlanInputError(
            f"software is {software!r}; it is one of {', '.join(map(repr, SOFTWARE))}."
        )
    values = default_figures()
    if figures:
        if unknown := sorted(set(figures) - set(values)):
            raise PlanInputError(
                f"There are no figures {', '.join(unknown)}; there are {', '.join(values)}."
            )
        values = {**values, **figures}
    chip = find_chip(hardware) if isinstance(hardware, str) else hardware
    parts = step_parts(model, step, chip, software, values)
    by_part = dataclasses.asdict(parts)
    seconds = sum(by_part.values())
    unsure = sum((width * by_part[name] / seconds) ** 2 for name, width in _UNSURE.items())
    width = math.exp(math.sqrt(_BAND**2 + unsure))
    memory = memory_bytes(model, step, chip)
    tokens = step.global_batch * step.sequence
    chips = step.device_count / chip.devices_per_chip
    return StepEstimate(
        seconds,
        seconds / width,
        seconds * width,
        memory,
        memory <= chip.memory_bytes,
        parts,
        model_operations(model, step) / (seconds * step.device_count * chip.peak("bf16")),
        tokens / seconds / chips,
    )


def model_operations(model: TransformerShape, step: TrainingStep) -> float:
    """Returns the operations of a step that the model needs, without recomputation."""
    tokens = step.global_batch * step.sequence
    tables = model.vocab * model.embed
    products = model.active_parameters - model.embedding_parameters + tables
    products += model.extra_layers * tables
    attention = (
        (model.layers + model.extra_layers)
        * model.mean_context(step.sequence)
        * model.heads
        * (model.key_width + model.value_width)
    )
    return 6 * tokens * (products + attention)
