# SPDX-License-Identifier: Apache-2.0
"""Seconds of kernels and collectives.

A product takes operations over the peak that large ones reach, less by its shape: a GPU computes
tiles in waves over its cores, a TPU pads to its matrix unit, and either needs a depth to get going.
It takes at least the time of its operands in memory.

The group of a collective is ``size`` devices at a ``stride``: neighbors have stride 1, and the
groups of the outermost axis the largest. On GPUs a group lies within a node as far as that has
room, and then each device sends its own part over its adapter. On TPUs it takes its share of the
torus's dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.figures import PEAK_NAMES, generation, gpu_cores, product_peak

_TILE = (128, 256)  # rows and columns that a core of a GPU computes at a time
_NARROW = {"fp8": 1.0, "fp8-row": 1.0, "mxfp8": 1.03, "nvfp4": 0.56, "int8": 1.0}
_ATTENTION_BLOCK = 128  # keys of a block of fused attention; causal blocks are computed whole
_RAMP_RATE = 9.89e14 / 132  # operations a second of a core of an H100, whose ramp the figure is
_ALIGNED = 8  # elements in 16 bits that tensor cores read at a time


@dataclass(frozen=True)
class Kernels:
    """Kernels of one device."""

    chip: Hardware
    figures: Mapping[str, float]
    precision: str = "bf16"  # of the products of layers
    software: str = ""

    @functools.cached_property
    def family(self) -> str:
        """Generation of the device."""
        return generation(self.chip.name, self.chip.kind)

    @functools.cached_property
    def wide_peak(self) -> float:
        """Operations a second that large products in at least 16 bits reach."""
        wide = self.precision if self.precision in ("f32", "fp16") else "bf16"
        return self._reached * product_peak(self.chip, wide, self.figures)

    @functools.cached_property
    def narrow_peak(self) -> float:
        """Operations a second that large products of layers reach."""
        return self._reached * product_peak(self.chip, self.precision, self.figures)

    @property
    def _reached(self) -> float:
        # Shapes and kernels that nobody chose for this hardware reach less of what it can do.
        return self.figures.get(f"{self.software}.products", 1.0)

    @functools.cached_property
    def stream(self) -> float:
        """Bytes a second that kernels move between the memory and the device."""
        return self.chip.memory_bandwidth * self.figures["kernels.memory_share"]

    def product(self, rows: float, columns: float, depth: float, *, wide: bool = False) -> float:
        """Returns the seconds of one product; ``wide`` keeps it in bf16."""
        if min(rows, columns, depth) <= 0:
            return 0.0
        narrow = self.precision in _NARROW and not wide
        peak = self.narrow_peak if narrow else self.wide_peak
        ramp = self.figures["kernels.depth_ramp"]
        if narrow:  # the same start, in fewer seconds
            narrow_peak = self.chip.peak(PEAK_NAMES.get(self.precision, self.precision))
            ramp *= narrow_peak / self.chip.peak("bf16")

        # What is computed in tiles that the product does not fill.
        cores = gpu_cores(self.family)
        if cores:
            # A core's start takes the same time on all GPUs, and the faster compute more in it.
            ramp *= self.chip.peak("bf16") / cores / _RAMP_RATE
            tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
            tiles = min(tiles, math.ceil(rows / _TILE[1]) * math.ceil(columns / _TILE[0]))
            waves = max(rows * columns / (_TILE[0] * _TILE[1]) / cores, 1e-3)
            padded = math.ceil(tiles / cores) / waves
            used = 1 + self.figures["kernels.wave_share"] * min(padded - 1, 4.0)
        else:
            unit = 256 if self.family == "mxu256" else 128
            used = _padding(columns, unit) * _padding(depth, unit) * _padding(rows, 8)

        # At least, operands and result pass through the memory.
        seconds = 2 * rows * columns * depth / peak * used * (1 + ramp / depth)
        width = _NARROW[self.precision] if narrow else 2.0
        moved = width * (rows * depth + depth * columns) + 2.0 * rows * columns
        return max(seconds, moved / self.stream)

    def quantization(self, elements: float) -> float:
        """Returns the seconds to narrow operands of products."""
        if self.precision not in _NARROW or not elements:
            return 0.0
        passes = self.figures["kernels.row_quantize"] if self.precision == "fp8-row" else 1.0
        return elements * passes * self.figures["kernels.quantize_bytes"] / self.stream

    def attention(
        self,
        tokens: float,
        context: float,
        heads: float,
        key_width: int,
        value_width: int,
        kernel: str = "",
    ) -> float:
        """Returns the seconds of fused attention, forward, by one of its kernels."""
        operations = 2 * tokens * (context + _ATTENTION_BLOCK / 2) * heads
        widths = key_width + value_width
        rate = self.attention_rate(widths / 2)

        # The software's own kernel, or one by name, as far as it was measured on this hardware.
        own = self.figures.get(f"{self.software}.attention", 1.0)
        if kernel == "cudnn":  # that of Megatron's figure
            own = self.figures["megatron.attention"]
        measured = self.figures.get(f"attention.{kernel}_{self.family}")
        if measured is not None:
            own = measured / self.figures[f"{self.family}.attention_share"]
        return operations * widths / (rate * own)

    def attention_rate(self, width: float) -> float:
        """Returns the operations a second of fused attention, by a head's width."""
        ramp = self.figures["kernels.attention_ramp"]
        share = self.figures[f"{self.family}.attention_share"] * (128 + ramp) / 128
        share = min(share * width / (width + ramp), 0.95)
        return self.chip.peak("bf16") * share

    def attention_backward(self, forward: float) -> float:
        """Seconds of the derivative of fused attention: five products for two."""
        return 2.5 * forward * self.figures["kernels.attention_backward"]

    def plain_attention(
        self, tokens: float, length: float, heads: float, key_width: int, value_width: int
    ) -> float:
        """Returns the seconds of unfused attention forward."""
        # Its products are of whole squares, and its scores pass through the memory.
        operations = 2 * tokens * length * heads * (key_width + value_width)
        ramp = 1 + self.figures["kernels.depth_ramp"] / key_width
        passes = self.figures["kernels.scores_passes"] / 3
        scores = tokens * length * heads * 2.0 * passes
        seconds = operations * ramp / self.wide_peak + scores / self.stream
        if gpu_cores(self.family) and key_width % _ALIGNED:
            seconds *= self.figures["kernels.unaligned_heads"]
        return seconds

    def streamed(self, bytes_: float) -> float:
        """Returns the seconds to move bytes between the memory and the device."""
        return bytes_ / self.stream


@dataclass(frozen=True)
class Links:
    """Links between the devices of a job."""

    chip: Hardware
    figures: Mapping[str, float]
    devices: int
    slices: int = 1

    def members(self, size: int, stride: int) -> tuple[int, int]:
        """Devices of a group within a node or slice, and their number."""
        if self.chip.kind == "tpu":
            room = max(1, self.devices // self.slices)
        else:
            room = max(1, self.chip.node_size)
        inner = min(size, max(1, room // stride))
        return inner, math.ceil(size / inner)

    def gather(
        self, result_bytes: float, size: int, stride: int = 1, *, is_tree: bool = False
    ) -> float:
        """Returns the seconds of an all-gather, or of a reduce-scatter of its operand."""
        # Messages go round a ring of the nodes, or up and down a tree, as NCCL has it for
        # all-reduces: its depth is the logarithm.
        if size < 2 or not result_bytes:
            return 0.0
        inner, outer = self.members(size, stride)
        fabric = network = latency = 0.0
        if inner > 1:
            fabric = result_bytes * (inner - 1) / inner / self._fabric(inner)
            latency += self.figures["links.switch_latency"]
        if outer > 1:
            network = result_bytes / inner * (outer - 1) / outer / self._network()
            hops = min(outer, 2 * math.log2(outer)) if is_tree else outer
            latency += self.figures["links.network_latency"] * hops
        return max(fabric, network) + latency

    def reduce(self, bytes_: float, size: int, stride: int = 1) -> float:
        """Returns the seconds of an all-reduce."""
        return 2 * self.gather(bytes_, size, stride, is_tree=True)

    def exchange(
        self, bytes_: float, size: int, stride: int = 1, copies: int = 1, most_nodes: int = 0
    ) -> float:
        """Returns the seconds of an all-to-all of a device's bytes."""
        # ``copies`` is how often each token is among the bytes; a node gets it once, and no more
        # than ``most_nodes`` get it.
        if size < 2 or not bytes_:
            return 0.0
        share = self.figures["links.exchange_share"]
        if self.chip.kind == "tpu":
            per_dimension = max(2.0, size ** (1 / self.chip.torus_dimensions))
            return bytes_ * per_dimension / 4 / (self._fabric(size) * share)

        inner, outer = self.members(size, stride)
        fabric = bytes_ * (inner - 1) / inner / (self.chip.link_bandwidth * share)
        network = 0.0
        if outer > 1:
            nodes = outer * (1 - (1 - 1 / outer) ** copies)  # of a token's experts
            if most_nodes:
                nodes = min(nodes, most_nodes)
            sent = bytes_ / copies * nodes * (outer - 1) / outer
            network = sent / (self.chip.network_bandwidth * share)
        return max(fabric, network) + 2 * self.figures["links.switch_latency"]

    def send(self, bytes_: float, stride: int) -> float:
        """Seconds of a message to the next device of an axis."""
        if self.chip.kind == "tpu":
            bandwidth = self.chip.link_bandwidth * self.figures["links.torus_share"]
        elif stride < self.chip.node_size and self.devices <= self.chip.node_size:
            bandwidth = self.chip.link_bandwidth * self.figures["links.switch_share"]
        else:
            bandwidth = self._network()
        return bytes_ / bandwidth + self.figures["links.switch_latency"]

    def broadcast(self, bytes_: float, size: int, stride: int) -> float:
        """Returns the seconds of a message from one device to its group."""
        if size < 2:
            return 0.0
        inner, outer = self.members(size, stride)
        if outer == 1:
            return bytes_ / self._fabric(inner) + self.figures["links.switch_latency"]
        latency = self.figures["links.network_latency"] * outer
        return bytes_ / inner / self._network() + latency

    def between_slices(self, bytes_: float) -> float:
        """Seconds of an all-reduce of a device's bytes between TPU slices."""
        if self.slices < 2:
            return 0.0
        return 2 * bytes_ * (self.slices - 1) / self.slices / self._network()

    def _fabric(self, size: int) -> float:
        """Bytes a second of a device's links, by group size."""
        if self.chip.kind != "tpu":
            share = self.figures["links.switch_share"]
            if self.chip.direct_peers:
                # Without a switch a pair has the links between the two, of all of a device's.
                share *= min(1.0, (size - 1) / self.chip.direct_peers)
            return self.chip.link_bandwidth * share
        chips = max(2, self.devices // self.slices)
        dimensions = self.chip.torus_dimensions
        used = max(1.0, dimensions * min(1.0, math.log(size) / math.log(chips)))
        # Both ways round where the torus closes, which small slices do not.
        closed = chips >= (256 if dimensions == 2 else 64)
        directions = 2.0 if closed else 1.0
        return self.chip.link_bandwidth * used * directions * self.figures["links.torus_share"]

    def _network(self) -> float:
        name = "links.slices_share" if self.chip.kind == "tpu" else "links.network_share"
        return self.chip.network_bandwidth * self.figures[name]


def _padding(size: float, unit: int) -> float:
    return math.ceil(size / unit) * unit / size


def both(first: float, second: float) -> float:
    """Returns the seconds of two things at a time, smoothly the longer."""
    longer, shorter = max(first, second), min(first, second)
    return longer * (1 + (shorter / longer) ** 4) ** 0.25 if longer else 0.0
