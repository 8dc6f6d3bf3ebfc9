# SPDX-License-Identifier: Apache-2.0
"""Predicted training steps: seconds with a band, memory and bottleneck."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardax.extend import Options
from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.figures import figures_of, find_chip
from shardax.plan.timing.memory import memory_bytes
from shardax.plan.timing.step import StepParts, step_parts
from shardax.plan.timing.transformer import SOFTWARE, TrainingStep, TransformerShape
from shardax.plan.timing.workload import band_of

_OPTIONS = Options(PlanInputError)


@dataclass(frozen=True)
class StepEstimate:
    """Prediction of a training step.

    Attributes:
        seconds: Of the step.
        low: Lower end of the band, whose width is that of errors on sources that were not fitted.
        high: Its upper end.
        memory_bytes: Of a device.
        fits: Whether the device's memory has room for them.
        parts: Seconds by what takes them.
        mfu: Operations of the model over those of the devices at their peak in bf16; recomputation
            does not count.
        tokens_per_second_per_chip: Throughput.

    Example:
        >>> from shardax import plan
        >>> llama = plan.TransformerShape(
        ...     layers=32, embed=4096, mlp_hidden=14336, heads=32, kv_heads=8, vocab=128256
        ... )
        >>> step = plan.TrainingStep(global_batch=128, sequence=8192, data=8, zero=3)
        >>> estimate = plan.predict(llama, step, "h100")
        >>> estimate.fits, estimate.memory_bytes > 80e9  # nothing is recomputed
        (False, True)
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
        """Name of the longest wait."""
        return self.parts.longest_wait


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
            ``"pytorch-compile"``, as their developers tune them; ``"untuned"`` for anything else,
            or for these as others run them.
        figures: Figures of the time model that replace those of the hardware and of the library,
            by name.

    Returns:
        Seconds with a band, memory, and seconds by part.

    Raises:
        HardwareError: The hardware is unknown.
        PlanInputError: The software or a figure is unknown, or the model cannot be laid out so.

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
    _OPTIONS.choice("software", software, SOFTWARE)
    _check_layout(model, step)
    chip = find_chip(hardware) if isinstance(hardware, str) else hardware
    values = figures_of(chip, figures)
    remedy = "plan.compare(target='cpu:8') compiles for virtual devices of a CPU."
    _OPTIONS.check("hardware", chip.name, chip.kind != "cpu", "a GPU or TPU", remedy)

    parts = step_parts(model, step, chip, software, values)
    expected = band_of(
        parts,
        values,
        sparse=bool(model.experts),
        is_known=software != "untuned",
        says_overlap=_says_overlap(step),
    )
    seconds = expected.seconds
    memory = memory_bytes(model, step, chip, software, values)

    # Throughput, of the model's own operations.
    reachable = seconds * step.device_count * chip.peak("bf16")
    tokens = step.global_batch * step.sequence
    chips = step.device_count / chip.devices_per_chip
    return StepEstimate(
        seconds=seconds,
        low=expected.low,
        high=expected.high,
        memory_bytes=memory,
        fits=memory <= chip.memory_bytes,
        parts=parts,
        mfu=model_operations(model, step) / reachable,
        tokens_per_second_per_chip=tokens / seconds / chips,
    )


def _says_overlap(step: TrainingStep) -> bool:
    """Returns whether a step says of all its collectives what they run beside."""
    says_tensor = step.tensor == 1 or step.overlap_tensor is not None
    says_gradients = step.data * step.context == 1 or step.overlap_gradients is not None
    return says_tensor and says_gradients and (step.expert == 1 or step.overlap_experts)


def _check_layout(model: TransformerShape, step: TrainingStep) -> None:
    """Refuses a layout that a model does not divide into."""
    layers, heads, experts = model.layers, model.heads, model.experts
    _OPTIONS.check("pipeline", step.pipeline, step.pipeline <= layers, f"at most {layers} layers")
    _OPTIONS.check("tensor", step.tensor, heads % step.tensor == 0, f"a divisor of {heads} heads")
    divides = experts % step.expert == 0 if experts else step.expert == 1
    expected = f"a divisor of {experts} experts" if experts else "1, as the model has no experts"
    _OPTIONS.check("expert", step.expert, divides, expected)
    offloaded = step.offloaded_layers
    expected = f"at most {layers} layers"
    _OPTIONS.check("offloaded_layers", offloaded, offloaded <= layers, expected)
    # Ulysses gives each shard of the sequence whole heads, of those of its tensor shard.
    own = heads // step.tensor
    divides = step.context_kind != "ulysses" or own % step.context == 0
    expected = f"a divisor of the {own} heads of a tensor shard, for context_kind='ulysses'"
    _OPTIONS.check("context", step.context, divides, expected)


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
