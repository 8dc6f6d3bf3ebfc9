# SPDX-License-Identifier: Apache-2.0
"""Numbers of devices that a step's sizes do not divide into, and the next one that they do.

A layout splits dimensions evenly. The batch takes as many devices as divide its rows; the others
must split dimensions of parameters. A number of devices with factors that no size has leaves few
layouts, or none but pipelines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from shardax.extend import axis_names_in
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs
from shardax.plan.searching.dimensions import DimensionModel
from shardax.plan.searching.space import SearchSpace

_FURTHEST = 4  # times as many devices are looked at


def division_note(
    dimensions: DimensionModel, inputs: Inputs, space: SearchSpace, target: Target
) -> str:
    """Returns a sentence about sizes that do not divide the devices, and "" if they do."""
    sizes = {name: math.gcd(*dimensions.sizes_of(name)) for name in dimensions.names}
    rows = math.prod(sizes[name] for name in inputs.batch_names if name in sizes) or 1

    # What splits each parameter, and what splits all of them beside their dimensions.
    stored = set(inputs.names_on("parameters"))
    parameters = [
        [sizes[name] for name in axis_names_in(names) if name not in dimensions.looped]
        for _, names in dimensions.arguments
        if stored & set(axis_names_in(names))
    ]
    beside: list[int] = []
    if "context" in space.mesh_axes and "seq" in sizes:
        beside.append(sizes["seq"])
    if "stage" in space.mesh_axes:
        beside += [sizes[name] for name in space.staged]

    # Parameters, optimizer state and gradients need so many devices at the least.
    held = 2 * inputs.whole_bytes("parameters") + inputs.whole_bytes("optimizer", "other")
    needed = max(1, math.ceil(held / (target.limit_bytes or math.inf)))

    def most_ways(devices: int) -> int:
        return max((_ways(devices, of_array) for of_array in parameters), default=1)

    def divides(devices: int) -> bool:
        left = devices // math.gcd(devices, rows)
        if all(_ways(left, [*of_array, *beside]) < left for of_array in parameters or [[]]):
            return False
        return most_ways(devices) >= needed

    devices = target.device_count
    if divides(devices) or needed > devices:  # of so few devices no number helps
        return ""

    named = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    text = (
        f"{devices:,} devices are {_factors(devices)}, which the step's sizes do not divide "
        f"({named}): the batch splits over at most {math.gcd(devices, rows):,} of them, and a "
        f"parameter over {most_ways(devices):,} (beside stages), of {needed:,} that have the "
        "memory."
    )
    step = target.hardware.devices_per_chip
    if target.kind == "gpu":  # whole nodes
        step *= target.topology[-1]
    further = range(devices // step * step + step, _FURTHEST * devices, step)
    following = next((number for number in further if divides(number)), None)
    if following is not None:
        text += f" The next number of devices that they divide is {following:,}."
    return text


def _ways(devices: int, sizes: Sequence[int]) -> int:
    """Returns over how many of some devices dimensions of these sizes split evenly, together."""
    left = devices
    for size in sorted(sizes, reverse=True):
        left //= math.gcd(left, size)
    return devices // left


def _factors(number: int) -> str:
    """Returns a number as its primes."""
    powers = Counter(_primes(number))
    return " x ".join(
        f"{prime}^{count}" if count > 1 else str(prime) for prime, count in powers.items()
    )


def _primes(number: int) -> Iterator[int]:
    candidate = 2
    while candidate * candidate <= number:
        while number % candidate == 0:
            yield candidate
            number //= candidate
        candidate += 1
    if number > 1:
        yield number
