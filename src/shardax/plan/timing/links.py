# SPDX-License-Identifier: Apache-2.0
"""Seconds of collectives, by algorithm, size, group and network.

A group is ``size`` devices at a ``stride``: neighbors have stride 1, and the groups of the
outermost axis the largest. On GPUs a group lies within a node as far as that has room, and then
each device sends its own part over its adapter. On TPUs it takes its share of the torus's
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardax.plan.hardware.hardware import Hardware


@dataclass(frozen=True)
class Links:
    """Links between the devices of a job.

    Attributes:
        chip: The hardware.
        figures: Of links, by name.
        devices: Of the job.
        slices: TPU slices of the job.
    """

    chip: Hardware
    figures: Mapping[str, float]
    devices: int
    slices: int = 1

    def members(self, size: int, stride: int) -> tuple[int, int]:
        """Returns the devices of a group within a node or slice, and the nodes or slices."""
        if self.chip.kind == "tpu":
            room = max(1, self.devices // self.slices)
        else:
            room = max(1, self.chip.node_size)
        inner = min(size, max(1, room // stride))
        return inner, math.ceil(size / inner)

    def gather(self, result_bytes: float, size: int, stride: int = 1) -> float:
        """Returns the seconds of an all-gather, or of a reduce-scatter of its operand."""
        if size < 2 or not result_bytes:
            return 0.0
        inner, outer = self.members(size, stride)
        fabric = network = latency = 0.0
        if inner > 1:
            fabric = result_bytes * (inner - 1) / inner / self._fabric(inner)
            latency += self.figures["links.switch_latency"]
        if outer > 1:
            network = result_bytes / inner * (outer - 1) / outer / self._network()
            latency += self.figures["links.network_latency"] * outer
        return max(fabric, network) + latency

    def reduce(self, bytes_: float, size: int, stride: int = 1) -> float:
        """Returns the seconds of an all-reduce."""
        return 2 * self.gather(bytes_, size, stride)

    def exchange(self, bytes_: float, size: int, stride: int = 1, copies: int = 1) -> float:
        """Returns the seconds of an all-to-all of a device's bytes.

        Args:
            bytes_: That a device has for all others together.
            size: Of the group.
            stride: Of the group.
            copies: Times that each token is among the bytes; a node gets it once.
        """
        if size < 2 or not bytes_:
            return 0.0
        inner, outer = self.members(size, stride)
        share = self.figures["links.exchange_share"]
        if self.chip.kind == "tpu":
            per_dimension = max(2.0, size ** (1 / self.chip.torus_dimensions))
            return bytes_ * per_dimension / 4 / (self._fabric(size) * share)
        fabric = bytes_ * (inner - 1) / inner / (self.chip.link_bandwidth * share)
        network = 0.0
        if outer > 1:
            nodes = outer * (1 - (1 - 1 / outer) ** copies)  # of a token's experts
            sent = bytes_ / copies * nodes * (outer - 1) / outer
            network = sent / (self.chip.network_bandwidth * share)
        latency = self.figures["links.switch_latency"] * 2
        return max(fabric, network) + latency

    def send(self, bytes_: float, stride: int) -> float:
        """Returns the seconds of a message to the next device of an axis."""
        if self.chip.kind == "tpu":
            bandwidth = self.chip.link_bandwidth * self.figures["links.torus_share"]
        elif stride < self.chip.node_size and self.devices <= self.chip.node_size:
            bandwidth = self.chip.link_bandwidth * self.figures["links.switch_share"]
        else:
            bandwidth = self._network()
        return bytes_ / bandwidth + self.figures["links.switch_latency"]

    def between_slices(self, bytes_: float) -> float:
        """Returns the seconds of an all-reduce between TPU slices of a device's bytes."""
        if self.slices < 2:
            return 0.0
        return 2 * bytes_ * (self.slices - 1) / self.slices / self._network()

    def _fabric(self, size: int) -> float:
        """Bytes a second of a device's links, for a group of a size."""
        if self.chip.kind != "tpu":
            return self.chip.link_bandwidth * self.figures["links.switch_share"]
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
