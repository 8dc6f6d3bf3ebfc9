# SPDX-License-Identifier: Apache-2.0
"""Figures of the devices of this machine, measured.

Every figure is of a small program with all devices at work, less the cost of an empty call: a
product of matrices for each dtype, an element-wise pass over a long array for the bandwidth of the
memory, and each kind of collective. Of several runs the least counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.hardware import SHORT_NAMES, Hardware, find_hardware, hardware_of

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
    if count < 1:
        raise PlanInputError(f"devices={count}, but what is measured is at least one CPU device.")
    if count > len(present):
        raise PlanInputError(
            f"This process has {len(present)} CPU devices, not {count}. Before anything else: "
            f"sx.configure(devices={count})."
        )

    measured = _measure(present[:count], ("float32",), matrix, megabytes, repeats, clock)
    template = find_hardware("cpu")
    link = measured.link_bandwidth or template.link_bandwidth

    figures: dict[str, Any] = {
        "peak_flops": measured.peak_flops,
        "memory_bandwidth": measured.memory_bandwidth,
        "link_bandwidth": link,
        "network_bandwidth": link,
        "link_latency": measured.latency,
        "copy_bandwidth": measured.copy_bandwidth,
    }
    return _calibrated(template, figures, "plan.calibrate_cpu", count)


def calibrate_gpu(
    devices: int | None = None,
    *,
    like: str | None = None,
    matrix: int = 8192,
    megabytes: float = 512.0,
    repeats: int = 25,
    clock: Callable[[], float] = time.perf_counter,
) -> Hardware:
    """Measures this machine's GPUs, in less than a minute.

    Peaks are of products in float32, at JAX's default precision, and in bfloat16; other dtypes keep
    the figures of the data sheet. The bandwidth of a link is that of an all-reduce. One GPU has no
    link to measure. The network between nodes is not measured.

    Args:
        devices: How many GPUs of this process work together; None for all.
        like: The known hardware whose other figures are kept, such as ``"h100"``; None for that
            which JAX names.
        matrix: Rows and columns of the matrices of a product, on each device.
        megabytes: Size of the arrays on each device, in 10^6 bytes of float32.
        repeats: How often each measurement is made, all in turn; the least counts.
        clock: Seconds since some moment.

    Returns:
        Hardware under the name of what it is like, of which ``sources`` says what was measured, for
        ``plan.Target(hardware, (1, devices))``. Its usable memory is the limit of JAX's allocator.

    Raises:
        PlanInputError: The process has fewer GPUs, or none; or JAX names one that is not known.
        HardwareError: There is no hardware ``like``.

    Example:
        >>> from shardax import plan
        >>> plan.calibrate_gpu()
        Traceback (most recent call last):
            ...
        shardax.errors.PlanInputError: This process has 0 GPUs, but cpu. It needs JAX for ...
    """
    present = [
        device for device in jax.local_devices() if device.platform in ("gpu", "cuda", "rocm")
    ]
    count = len(present) if devices is None else devices
    if not 1 <= count <= len(present):
        kinds = ", ".join(sorted({device.device_kind for device in jax.local_devices()}))
        excess = f"not {count}" if devices is not None else f"but {kinds}"
        raise PlanInputError(
            f"This process has {len(present)} GPUs, {excess}. It needs JAX for the GPUs, "
            "pip install 'shardax[cuda]', and no JAX_PLATFORMS=cpu. For CPU devices: "
            "plan.calibrate_cpu()."
        )

    template = hardware_of(present[0]) if like is None else find_hardware(like)
    if template is None:
        raise PlanInputError(
            f"JAX calls these GPUs {present[0].device_kind!r}, which is not known. Name what is "
            "most like them: plan.calibrate_gpu(like='h100')."
        )

    # Other dtypes keep the figures of the data sheet, and one GPU those of the links.
    dtypes = ("float32", "bfloat16")
    measured = _measure(present[:count], dtypes, matrix, megabytes, repeats, clock)
    figures: dict[str, Any] = {
        "peak_flops": {**template.peak_flops, **measured.peak_flops},
        "memory_bandwidth": measured.memory_bandwidth,
    }
    if measured.link_bandwidth is not None:
        figures |= {"link_bandwidth": measured.link_bandwidth, "link_latency": measured.latency}
    limit = (present[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        figures |= {
            "usable_bytes": int(limit),
            "memory_bytes": max(template.memory_bytes, int(limit)),
        }
    return _calibrated(template, figures, "plan.calibrate_gpu", count)


def _calibrated(known: Hardware, figures: dict[str, object], function: str, count: int) -> Hardware:
    """Known hardware with measured figures."""
    source = f"measured on this machine by {function}, {count} devices at work, "
    source += f"jax {jax.__version__}"
    return known.like(**figures, sources={**known.sources, **dict.fromkeys(figures, source)})


class _DeviceFigures(NamedTuple):
    """Figures of devices at work together."""

    peak_flops: dict[str, float]
    memory_bandwidth: float
    latency: float
    copy_bandwidth: dict[str, float]  # bytes of payload a second, by kind
    link_bandwidth: float | None  # of an all-reduce; None for one device


def _measure(
    devices: Sequence[object],
    dtypes: Sequence[str],
    matrix: int,
    megabytes: float,
    repeats: int,
    clock: Callable[[], float],
) -> _DeviceFigures:
    """Measures devices, all at work."""
    count = len(devices)
    mesh = Mesh(np.array(devices), (_AXIS,))
    # Every device's array can be cut into as many parts as there are devices.
    numbers = max(1, int(megabytes * 1e6 / 4) // count) * count
    kinds = _collectives(count) if count > 1 else {}

    def scaled(x: jax.Array) -> jax.Array:
        return x * 1.5 + 0.5

    def product(x: jax.Array) -> jax.Array:
        return jnp.einsum("dij,djk->dik", x, x)

    def sums(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _SUMS, lambda _, y: jax.lax.psum(y, _AXIS) / count, x)

    # Functions of all devices' arrays, and what each device has.
    programs: dict[str, _Probe] = {
        "call": _Probe(scaled, (1,)),
        "stream": _Probe(scaled, (numbers,)),
        **{dtype: _Probe(product, (matrix, matrix), dtype) for dtype in dtypes},
    }
    if kinds:
        programs["latency"] = _Probe(_on_each(mesh, sums), (1,))
    for kind, collective in kinds.items():
        share = numbers // count if kind == "all-gather" else numbers
        programs[kind] = _Probe(_on_each(mesh, collective), (share,))
    least = _least_seconds(mesh, programs, repeats, clock)
    call = least["call"]

    def seconds(name: str, overhead: float = 0.0) -> float:
        return max(least[name] - call - overhead, 0.05 * least[name])

    latency = seconds("latency") / _SUMS if kinds else 0.0
    copying = {kind: numbers * 4 / seconds(kind, latency) for kind in kinds}
    wire = 2 * (count - 1) / count
    return _DeviceFigures(
        {SHORT_NAMES[dtype]: 2 * matrix**3 / seconds(dtype) for dtype in dtypes},
        2 * numbers * 4 / seconds("stream"),
        latency,
        copying,
        copying["all-reduce"] * wire if copying else None,
    )


class _Probe(NamedTuple):
    """A function of all arrays, and each device's share."""

    function: Callable[[Any], Any]
    shape: tuple[int, ...]
    dtype: str = "float32"


def _least_seconds(
    mesh: Mesh, programs: Mapping[str, _Probe], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Runs programs on all devices in turn; returns least times."""
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    random = np.random.default_rng(0)

    def start(shape: tuple[int, ...], dtype: str) -> jax.Array:
        # Neither denormal nor infinite, nor all equal: multipliers of GPUs take less power, and run
        # faster, on numbers that do not change.
        numbers = random.uniform(0.5, 1.5, shape).astype(np.float32)
        every = np.broadcast_to(numbers, (mesh.devices.size, *shape)).astype(jnp.dtype(dtype))
        return jax.device_put(every, sharding)

    shapes = {(shape, dtype) for _, shape, dtype in programs.values()}
    starts = {form: start(*form) for form in sorted(shapes)}
    compiled = {}
    for name, (function, shape, dtype) in programs.items():
        argument = starts[shape, dtype]
        compiled[name] = jax.jit(function).lower(argument).compile(), argument
    for run, argument in compiled.values():
        jax.block_until_ready(run(argument))
    least = dict.fromkeys(programs, math.inf)
    for _ in range(max(1, repeats)):
        for name, (run, argument) in compiled.items():
            begun = clock()
            jax.block_until_ready(run(argument))
            least[name] = min(least[name], clock() - begun)
    return {name: max(seconds, 1e-9) for name, seconds in least.items()}  # of a clock too coarse


def _on_each(mesh: Mesh, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of each device's own flat array."""
    # Of a dimension that is not the first, collectives change the layout before and after, which is
    # other work.
    spec = PartitionSpec(_AXIS)

    def flat(x: jax.Array) -> jax.Array:
        return function(x[0])[None]

    # Every device returns its own copy, so that nothing else than the function is timed.
    return jax.shard_map(flat, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _collectives(count: int) -> dict[str, Callable[[Any], Any]]:
    """Each kind, of flat arrays; a gather's payload is the whole."""
    ring = [(i, (i + 1) % count) for i in range(count)]

    return {
        "all-reduce": lambda x: jax.lax.psum(x, _AXIS),
        "all-gather": lambda x: jax.lax.all_gather(x, _AXIS, tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, _AXIS, tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, _AXIS, 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, _AXIS, ring),
    }
