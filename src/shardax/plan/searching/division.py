# SPDX-License-Identifier: Apache-2.0
"""Numbers of devices that a step's sizes do not divide into, and the next one that they do.

A layout splits dimensions evenly. The batch takes as many devices as divide its rows; the others
must split dimensions of parameters. A number of devices with factors that no size has leaves few
layouts, or none but pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardax.extend import axis_names_in
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs
from shardax.plan.searching.candidates import SearchSpace, names_of_parameters
from shardax.plan.searching.dimensions import DimensionModel

_FURTHEST = 4  # times as many devices are looked at


def division_note(
    dimensions: DimensionModel, inputs: Inputs, space: SearchSpace, target: Target
) -> str:
    """Returns a sentence about sizes that do not divide the devices, and "" if they do."""
    sizes = {
        name: math.gcd(*dimensions.sizes_of(name))
        for name in dimensions.names
        if dimensions.sizes_of(name)
    }
    stored = set(names_of_parameters(inputs))
    rows = math.prod(sizes[name] for name in inputs.batch_names if name in sizes) or 1
    names = [
        [name for name in axis_names_in(names) if name in sizes and name not in dimensions.looped]
        for _, names in dimensions.arguments
        if stored & set(axis_names_in(names))
    ]
    arrays = [[sizes[name] for name in of_array] for of_array in names]
    beside: list[int] = []  # of parameters, what splits too
    if _has_axis(space, "context"):
        beside += [sizes[name] for name in ("seq",) if name in sizes]
    if _has_axis(space, "stage"):
        beside += [sizes[name] for name in space.staged if name in sizes]

    # Parameters, optimizer state and gradients need so many devices at the least.
    whole = inputs.whole_bytes
    held = whole["parameters"] * 2 + whole["optimizer"] + whole["other"]
    limit = target.limit_bytes or math.inf
    needed = max(1, math.ceil(held / limit))

    def divides(devices: int) -> bool:
        left = devices // math.gcd(devices, rows)
        if all(_ways(left, [*array, *beside]) < left for array in arrays or [[]]):
            return False
        return max((_ways(devices, array) for array in arrays), default=1) >= needed

    devices = target.device_count
    if divides(devices) or needed > devices:  # of so few devices no number helps
        return ""
    shared = max((_ways(devices, array) for array in arrays), default=1)
    named = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    text = (
        f"{devices:,} devices are {_factors(devices)}, which the step's sizes do not divide "
        f"({named}): the batch splits over at most {math.gcd(devices, rows):,} of them, and a "
        f"parameter over {shared:,} (beside stages), of {needed:,} that have the memory."
    )
    step = target.topology[-1] if target.kind == "gpu" else 1
    step *= target.hardware.devices_per_chip
    further = range(devices // step * step + step, _FURTHEST * devices, step)
    following = next((number for number in further if divides(number)), None)
    if following is not None:
        text += f" The next number of devices that they divide is {following:,}."
    return text


def _has_axis(space: SearchSpace, axis: str) -> bool:
    return any(name == axis for mesh in space.meshes for name, _ in mesh)


def _ways(devices: int, sizes: Sequence[int]) -> int:
    """Returns over how many of some devices dimensions of these sizes split evenly, together."""
    left = devices
    for size in sorted(sizes, reverse=True):
        left //= math.gcd(left, size)
    return devices // left


def _factors(number: int) -> str:
    """Returns a number as its primes."""
    powers: dict[int, int] = {}
    for prime in _primes(number):
        powers[prime] = powers.get(prime, 0) + 1
    return " x ".join(
        f"{prime}^{count}" if count > 1 else str(prime) for prime, count in powers.items()
    )


def _primes(number: int) -> Iterable[int]:
    candidate = 2
    while candidate * candidate <= number:
        while number % candidate == 0:
            yield candidate
            number //= candidate
        candidate += 1
    if number > 1:
        yield number
