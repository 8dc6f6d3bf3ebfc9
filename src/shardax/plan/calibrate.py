# SPDX-License-Identifier: Apache-2.0
"""Figures of this machine's virtual CPU devices, measured, so that times on them can be predicted.

Virtual devices share the machine's cores, memory and caches. So every figure is measured with all
of them at work, and is that of one device then: a product of matrices, an array that is read and
written, an all-reduce among all devices, and one of a single number for the latency.

They say nothing of a TPU or GPU. They let the planner's ranking be checked against measured steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax.core.errors import PlanInputError
from shardax.plan.hardware import Hardware
from shardax.plan.hardware_table import find_hardware

_AXIS = "devices"


def calibrate_cpu(
    devices: int | None = None,
    *,
    matrix: int = 512,
    megabytes: float = 8.0,
    repeats: int = 7,
) -> Hardware:
    """Measures this machine's CPU devices, in a few seconds.

    Args:
        devices: How many virtual devices work together; None for all that the process has.
        matrix: Rows and columns of the matrices of a product, on each device.
        megabytes: Size of the arrays on each device, in 10^6 bytes of float32.
        repeats: How often each measurement is made; the median counts.

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
    timer = _Timer(mesh, repeats)
    numbers = max(1, int(megabytes * 1e6 / 4))
    product = timer.seconds(_product, (matrix, matrix))
    stream = timer.seconds(_stream, (numbers,))
    reduced = timer.seconds(_all_reduce(mesh), (numbers,))
    alone = timer.seconds(_all_reduce(mesh), (1,))
    wire = 2 * (count - 1) / count * numbers * 4
    source = (
        f"measured on this machine by plan.calibrate_cpu, {count} devices at work, "
        f"jax {jax.__version__}"
    )
    known = find_hardware("cpu")
    link = wire / max(reduced - alone, 0.05 * reduced) if count > 1 else known.link_bandwidth
    figures = {
        "peak_flops": {"f32": 2 * matrix**3 / product},
        "memory_bandwidth": 2 * numbers * 4 / stream,
        "link_bandwidth": link,
        "network_bandwidth": link,
        "link_latency": alone if count > 1 else 0.0,
    }
    return known.like(**figures, sources={**known.sources, **dict.fromkeys(figures, source)})


class _Timer:
    """Runs a function on all devices at once and takes the median time."""

    def __init__(self, mesh: Mesh, repeats: int) -> None:
        self._mesh = mesh
        self._repeats = max(1, repeats)

    def seconds(self, function: Callable[[Any], Any], shape: tuple[int, ...]) -> float:
        """Time of one run; each device has an array of ``shape``."""
        count = self._mesh.devices.size
        sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        # Ones: results are neither denormal nor infinite, which would take another time.
        start = jax.device_put(np.full((count, *shape), 1.0, np.float32), sharding)
        compiled = jax.jit(function, out_shardings=sharding).lower(start).compile()
        jax.block_until_ready(compiled(start))
        times = []
        for _ in range(self._repeats):
            begun = time.perf_counter()
            jax.block_until_ready(compiled(start))
            times.append(time.perf_counter() - begun)
        return float(np.median(times))


def _product(x: jax.Array) -> jax.Array:
    return jnp.einsum("dij,djk->dik", x, x)


def _stream(x: jax.Array) -> jax.Array:
    return x * 1.5 + 0.5


def _all_reduce(mesh: Mesh) -> Callable[[Any], Any]:
    """A sum over all devices, of which each gets the whole."""

    def summed(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, _AXIS)

    spec = PartitionSpec(_AXIS)
    # Every device returns its copy, so that nothing else than the sum is timed.
    return jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
