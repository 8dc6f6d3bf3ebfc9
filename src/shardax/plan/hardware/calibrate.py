# SPDX-License-Identifier: Apache-2.0
"""Figures of this machine's virtual CPU devices, measured, so that times on them can be predicted.

Virtual devices share the machine's cores, memory and caches. So every figure is measured with all
of them at work, and is that of one device then: a product of matrices, an array that is read and
written, each kind of collective among all devices, and sums of a single number for the latency.
What a call costs that does nothing is taken off. The collectives copy from the memory of others, so
they are measured by their payload and one by one: a ring of links, of which wire bytes speak, does
not say what they take.

They say nothing of a TPU or GPU. They let the planner's ranking be checked against measured steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.hardware.known import find_hardware

_AXIS = "devices"
_SUMS = 16  # of a single number, for the latency


def calibrate_cpu(
    devices: int | None = None,
    *,
    matrix: int = 512,
    megabytes: float = 8.0,
    repeats: int = 25,
    clock: Callable[[], float] = time.perf_counter,
) -> Hardware:
    """Measures this machine's CPU devices, in a few seconds.

    Args:
        devices: How many virtual devices work together; None for all that the process has.
        matrix: Rows and columns of the matrices of a product, on each device.
        megabytes: Size of the arrays on each device, in 10^6 bytes of float32.
        repeats: How often each measurement is made, all in turn; the least counts, in which other
            work of the machine has the least part.
        clock: Seconds since some moment. Where much else runs, the processor time of this process
            over the number of cores says more than the time of day.

    Returns:
        Hardware called ``"cpu"`` of which ``sources`` says that it was measured, for
        ``plan.Target(hardware, (devices,))``.

    Raises:
        PlanInputError: If the process has fewer CPU devices.

    Example:
        >>> from shardax import plan
        >>> cpu = plan.calibrate_cpu(2, matrix=64, megabytes=0.1, repeats=1)
        >>> plan.Target(cpu, (2,)).text
        'cpu:2'
    """
    present = jax.devices("cpu")
    count = len(present) if devices is None else devices
    if not 1 <= count <= len(present):
        raise PlanInputError(
            f"This process has {len(present)} CPU devices, not {count}. Before anything else: "
            f"sx.configure(devices={count})."
        )
    mesh = Mesh(np.array(present[:count]), (_AXIS,))
    # Every device's array can be cut into as many parts as there are devices.
    numbers = max(1, int(megabytes * 1e6 / 4) // count) * count
    kinds = _collectives(count) if count > 1 else {}
    least = _least_seconds(mesh, _programs(mesh, kinds, matrix, numbers), repeats, clock)
    call = least["call"]

    def seconds(name: str, other: float = 0.0) -> float:
        return max(least[name] - call - other, 0.05 * least[name])

    product, stream = seconds("product"), seconds("stream")
    latency = seconds("latency") / _SUMS if kinds else 0.0
    copying = {kind: numbers * 4 / seconds(kind, latency) for kind in kinds}
    source = (
        f"measured on this machine by plan.calibrate_cpu, {count} devices at work, "
        f"jax {jax.__version__}"
    )
    known = find_hardware("cpu")
    wire = 2 * (count - 1) / count
    link = copying["all-reduce"] * wire if copying else known.link_bandwidth
    figures: dict[str, Any] = {
        "peak_flops": {"f32": 2 * matrix**3 / product},
        "memory_bandwidth": 2 * numbers * 4 / stream,
        "link_bandwidth": link,
        "network_bandwidth": link,
        "link_latency": latency,
        "copy_bandwidth": copying,
    }
    return known.like(**figures, sources={**known.sources, **dict.fromkeys(figures, source)})


_Program = tuple[Callable[[Any], Any], tuple[int, ...]]
"""A function of all devices' arrays, and the shape of that of each device."""


def _programs(
    mesh: Mesh, kinds: Mapping[str, Callable[[Any], Any]], matrix: int, numbers: int
) -> dict[str, _Program]:
    """What is measured, by name."""
    found: dict[str, _Program] = {
        "call": (_scaled, (1,)),
        "product": (_product, (matrix, matrix)),
        "stream": (_scaled, (numbers,)),
    }
    if kinds:
        found["latency"] = _sums(mesh), (1,)
    for kind, collective in kinds.items():
        own = numbers // mesh.devices.size if kind == "all-gather" else numbers
        found[kind] = _on_each(mesh, collective), (own,)
    return found


def _least_seconds(
    mesh: Mesh, programs: Mapping[str, _Program], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Runs programs on all devices at once, in turn, and takes the least time of each."""
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))

    # Ones: results are neither denormal nor infinite, which would take another time.
    starts = {
        shape: jax.device_put(np.full((mesh.devices.size, *shape), 1.0, np.float32), sharding)
        for shape in {shape for _, shape in programs.values()}
    }
    compiled = {
        name: (jax.jit(function).lower(starts[shape]).compile(), starts[shape])
        for name, (function, shape) in programs.items()
    }
    for run, given in compiled.values():
        jax.block_until_ready(run(given))
    least = dict.fromkeys(programs, math.inf)
    for _ in range(max(1, repeats)):
        for name, (run, given) in compiled.items():
            begun = clock()
            jax.block_until_ready(run(given))
            least[name] = min(least[name], clock() - begun)
    return {name: max(found, 1e-9) for name, found in least.items()}  # of a clock too coarse


def _product(x: jax.Array) -> jax.Array:
    return jnp.einsum("dij,djk->dik", x, x)


def _scaled(x: jax.Array) -> jax.Array:
    return x * 1.5 + 0.5


def _on_each(mesh: Mesh, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of what each device has, which is flat.

    Of a dimension that is not the first, collectives change the layout before and after, which is
    other work.
    """
    spec = PartitionSpec(_AXIS)

    def flat(x: jax.Array) -> jax.Array:
        return function(x[0])[None]

    # Every device returns its own copy, so that nothing else than the function is timed.
    return jax.shard_map(flat, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _sums(mesh: Mesh) -> Callable[[Any], Any]:
    """Sums over all devices, one after the other."""
    count = mesh.devices.size

    def repeatedly(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _SUMS, lambda _, y: jax.lax.psum(y, _AXIS) / count, x)

    return _on_each(mesh, repeatedly)


def _collectives(count: int) -> dict[str, Callable[[Any], Any]]:
    """Each kind, of flat arrays; a gather's payload is that of all devices together."""
    ring = [(i, (i + 1) % count) for i in range(count)]

    return {
        "all-reduce": lambda x: jax.lax.psum(x, _AXIS),
        "all-gather": lambda x: jax.lax.all_gather(x, _AXIS, tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, _AXIS, tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, _AXIS, 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, _AXIS, ring),
    }
