# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step, from its work on one device.

The work is counted in a traced step for a layout (``searching.traced``) or in a compiled program
(``workload_of_program``); the seconds are those of the same kernels and links either way, and of
``plan.predict``.

A transfer has a *role*, which decides what it hides behind. Parameters and gradients travel beside
arithmetic, at a price (``contention``); tensor shards wait for most of theirs, as far as the
software does not split products (``tensor_hidden``); a ring over the sequence hides behind
attention; experts wait for their tokens, stages for half of their messages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardax.hlo import Collective, MatrixProduct, ProgramFacts
from shardax.plan.hardware.hardware import SHORT_NAMES, Hardware
from shardax.plan.timing.figures import figures_of
from shardax.plan.timing.kernels import Kernels, Links
from shardax.plan.timing.step import StepParts, straggling

_SOFTWARE = "xla"
_UNSURE = ("tensor", "experts", "host", "gradients", "bubble")  # parts that widen the band
_CONTEXT_EXPOSED = 0.2  # of the messages of a ring over the sequence, at the least
_STAGE_EXPOSED = 0.5  # of the messages between stages
_KERNEL_WIDTH = 128  # of a head, for fused kernels that say their operations alone
_PRECISIONS = {"f32": "f32", "f16": "fp16", "s8": "int8", "f8": "fp8", "f4": "nvfp4"}


@dataclass(frozen=True)
class ExpectedTime:
    """Expected seconds of a step, with a band.

    Attributes:
        seconds: Of the step.
        low: Lower end of the band, whose width is that of errors on sources that were not fitted.
        high: Its upper end.
        parts: Seconds by what takes them.

    Example:
        >>> from shardax import plan
        >>> parts = plan.StepParts(*[0.0] * 11)
        >>> plan.ExpectedTime(1.0, 0.9, 1.1, parts).waits_for
        'nothing'
    """

    seconds: float
    low: float
    high: float
    parts: StepParts

    @property
    def waits_for(self) -> str:
        """Name of the longest wait, or "nothing"."""
        return self.parts.longest_wait


def band_of(
    parts: StepParts,
    figures: Mapping[str, float],
    *,
    sparse: bool = False,
    is_known: bool = True,
    says_overlap: bool = False,
) -> ExpectedTime:
    """Returns the sum of parts with its band.

    Args:
        parts: Seconds of the step by part.
        figures: Figures of the time model.
        sparse: Whether the model has experts.
        is_known: Whether the software is known, which has measured steps.
        says_overlap: Whether the step says of all its collectives what they run beside.

    Returns:
        The expected time.
    """
    by_part = dataclasses.asdict(parts)
    seconds = sum(by_part.values())

    # The width is that of all steps of a kind; else it grows with the parts that are hard to know.
    if not is_known:
        width = figures["band.unknown"]
    elif says_overlap:
        width = figures["band.said"]
    else:
        widths = [figures["band.known"]]
        for name in _UNSURE if seconds else ():
            widths.append(figures[f"band.{name}"] * (by_part[name] / seconds))
        if sparse:
            widths.append(figures["band.sparse"])
        width = min(figures["band.unknown"], math.hypot(*widths))
    return ExpectedTime(seconds, seconds / math.exp(width), seconds * math.exp(width), parts)


@dataclass(frozen=True)
class Transfer:
    """A collective of one device, in all its runs."""

    kind: str  # as of ``hlo.Collective``
    role: str  # "parameters", "gradients", "tensor", "context", "experts" or "stages"
    payload: float  # bytes of one run, as of ``hlo.Collective``
    size: int  # devices of a group
    stride: int  # distance of neighbors in the mesh
    runs: float = 1.0


@dataclass(frozen=True)
class Workload:
    """The work of one device in a step."""

    products: Sequence[MatrixProduct]
    memory_bytes: float  # traffic beside the operands of products
    transfers: Sequence[Transfer]


def expected_time(
    work: Workload,
    chip: Hardware,
    mesh: Mapping[str, int],
    *,
    slices: int = 1,
    sparse: bool = False,
    figures: Mapping[str, float] | None = None,
) -> ExpectedTime:
    """Returns the expected seconds of a step's work."""
    values = figures_of(chip, figures)
    if chip.kind == "cpu":
        return band_of(_cpu_parts(work, chip), values, sparse=sparse)

    # Arithmetic, by the kernels of each product's precision.
    kernels = functools.cache(functools.partial(Kernels, chip, values))
    products = attention = 0.0
    for product in work.products:
        dtype = SHORT_NAMES.get(product.dtype, product.dtype)
        kernel = kernels(_PRECISIONS.get(dtype, "bf16"))
        if product.fused:
            width = product.depth if product.depth > 1 else _KERNEL_WIDTH
            attention += product.flops / kernel.attention_rate(width)
        else:
            seconds = kernel.product(product.rows, product.columns, product.depth)
            products += product.runs * product.batch * seconds
    memory = kernels("bf16").streamed(work.memory_bytes)
    arithmetic = products + attention + memory

    # Parameters and gradients travel beside arithmetic, at a price.
    devices = math.prod(mesh.values())
    seconds_by_role = _transfer_seconds(work.transfers, Links(chip, values, devices, slices))
    beside = seconds_by_role["parameters"] + seconds_by_role["gradients"]
    hidden = min(beside, arithmetic)
    exposed = beside - hidden + values[f"{_SOFTWARE}.contention"] * hidden
    share = exposed / beside if beside else 0.0

    # Tensor shards wait for most of theirs, and a ring hides behind attention.
    ring = seconds_by_role["context"]
    tensor = seconds_by_role["tensor"] * (1 - values[f"{_SOFTWARE}.tensor_hidden"])
    tensor += max(_CONTEXT_EXPOSED * ring, ring - 0.1 * arithmetic)

    parts = {
        "products": products,
        "attention": attention,
        "memory": memory,
        "tensor": tensor,
        "experts": seconds_by_role["experts"],
        "parameters": share * seconds_by_role["parameters"],
        "gradients": share * seconds_by_role["gradients"],
        "bubble": _STAGE_EXPOSED * seconds_by_role["stages"],
        # What a run does beside its program, such as logs, is no layout's; the optimizer's products
        # and traffic are among the others.
        "host": 0.0,
        "optimizer": 0.0,
    }
    waiting = sum(parts.values()) * straggling(chip, devices, slices, values)
    return band_of(StepParts(**parts, stragglers=waiting), values, sparse=sparse)


def _cpu_parts(work: Workload, chip: Hardware) -> StepParts:
    """Returns seconds on virtual CPU devices, without overlap."""
    rates = chip.copy_bandwidth or {"": chip.link_bandwidth}
    slowest = min(rates.values())
    seconds_by_role: dict[str, float] = {}
    for transfer in work.transfers:
        if transfer.size > 1:
            rate = rates.get(transfer.kind, slowest)
            seconds = transfer.runs * (transfer.payload / rate + chip.link_latency)
            seconds_by_role[transfer.role] = seconds_by_role.get(transfer.role, 0.0) + seconds

    parts = dict.fromkeys([part.name for part in dataclasses.fields(StepParts)], 0.0)
    for product in work.products:
        parts["products"] += product.flops / chip.peak(product.dtype)
    parts["memory"] = work.memory_bytes / chip.memory_bandwidth
    for role, seconds in seconds_by_role.items():
        part = {"stages": "bubble", "context": "tensor"}.get(role, role)
        parts[part] += seconds
    return StepParts(**parts)


def _transfer_seconds(transfers: Sequence[Transfer], links: Links) -> dict[str, float]:
    """Returns the seconds of transfers by role, one after another."""
    roles = ("parameters", "gradients", "tensor", "context", "experts", "stages")
    seconds_by_role: dict[str, float] = dict.fromkeys(roles, 0.0)
    for transfer in transfers:
        if transfer.size < 2:
            continue

        match transfer.kind:
            case "all-reduce":
                seconds = links.reduce(transfer.payload, transfer.size, transfer.stride)
            case "all-to-all":
                seconds = links.exchange(transfer.payload, transfer.size, transfer.stride)
            case "collective-permute":
                seconds = links.send(transfer.payload, transfer.stride)
            case _:
                seconds = links.gather(transfer.payload, transfer.size, transfer.stride)

        seconds_by_role[transfer.role] += transfer.runs * seconds
    return seconds_by_role


def group_stride(mesh: Mapping[str, int], axes: Sequence[str]) -> int:
    """Returns the distance of neighbors of a group along mesh axes."""
    names = list(mesh)
    last = max((names.index(axis) for axis in axes), default=-1)
    return math.prod(mesh[name] for name in names[last + 1 :])


def workload_of_program(
    facts: ProgramFacts, mesh: Mapping[str, int], batch_axes: frozenset[str]
) -> Workload:
    """Returns the work of a compiled program."""
    # Each product passes its operands and its result through the memory, meanwhile.
    moved = sum(product.runs * operand_bytes(product) for product in facts.products)
    return Workload(
        facts.products,
        max(0.0, facts.hbm_bytes - moved),
        [_transfer(collective, mesh, batch_axes) for collective in facts.collectives],
    )


def operand_bytes(product: MatrixProduct) -> float:
    """Returns bytes of a product's operands and result."""
    if product.fused:
        return 0.0
    width = 4.0 if product.dtype in ("f32", "float32") else 2.0
    sides = product.rows * product.depth + product.depth * product.columns
    return width * product.batch * (sides + product.rows * product.columns)


def role_of(kind: str, axes: Sequence[str], batch_axes: frozenset[str]) -> str:
    """Returns the role of a collective along mesh axes."""
    if "context" in axes:
        return "context"
    if kind in ("all-to-all", "collective-permute"):
        return "experts" if kind == "all-to-all" else "stages"
    if not axes or not set(axes) <= batch_axes:
        return "tensor"
    return "gradients" if kind in ("all-reduce", "reduce-scatter") else "parameters"


def _transfer(
    collective: Collective, mesh: Mapping[str, int], batch_axes: frozenset[str]
) -> Transfer:
    axes = collective.axes
    role = role_of(collective.kind, axes, batch_axes)
    stride = group_stride(mesh, axes) if axes else 1
    size = collective.group_size
    return Transfer(collective.kind, role, collective.payload, size, stride, collective.runs)
