# SPDX-License-Identifier: Apache-2.0
"""XLA's compilers of CPUs, TPUs and GPUs, for absent devices too.

TPU slices are described to libtpu, and GPUs to JAX's CUDA plugin, by
``jax.experimental.topologies``; neither hardware, driver nor toolkit is needed. The *CPU estimate*
takes the program right after XLA's partitioner, which is the same code for all compilers;
``shardax.hlo`` applies the rewrites that they are known to make, and estimates memory from what is
live.

Fast compiles of libtpu (``"screen"``) leave operations and collectives as they are; their peak was
4 to 21 % lower for a decoder's training step (libtpu 0.0.42.1). A program that does not fit is an
error of libtpu; one for GPUs is compiled, and compared with the target's memory, from which what
CUDA, NCCL and cuDNN take is not deducted. Without a GPU kernels are not autotuned.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from shardax.hlo.analyze import partitioned_text
from shardax.hlo.estimate import rewritten
from shardax.hlo.live_memory import peak_bytes
from shardax.hlo.program import CompilerFailedError, parse
from shardax.plan.compile import compilers
from shardax.plan.errors import PlanInputError, TargetError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.hardware.targets import Target


class CpuCompiler(compilers.TargetCompiler):
    """XLA for the CPU devices of a process."""

    # Without LLVM's optimizations; the program in HLO and its memory stay as they are.
    screen_options: ClassVar = {"xla_backend_optimization_level": 0}

    def environment(self) -> dict[str, str]:
        return super().environment() | {"JAX_NUM_CPU_DEVICES": str(self.target.device_count)}

    @property
    def devices_needed(self) -> int:
        return self.target.device_count

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
        needed, devices = self.devices_needed, jax.devices("cpu")
        if len(devices) < needed:
            raise PlanInputError(
                f"To plan for {self.target.text!r} with {self.label} this process needs {needed} "
                f"CPU devices and has {len(devices)}. Before anything else: sx.configure(devices="
                f"{needed}), or JAX_NUM_CPU_DEVICES={needed} in the environment. plan.compare and "
                "plan.search do it in processes of their own."
            )
        found = np.empty(needed, dtype=object)
        found[:] = devices[:needed]
        return found.reshape(tuple(sizes.values()))


class EstimateCompiler(CpuCompiler):
    """XLA's partitioner in place of the compiler of a TPU or GPU."""

    tier = "cpu estimate"

    @property
    def label(self) -> str:
        return f"{compilers.known_compilers()[0].label}, estimate"

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> compilers.CompileResult:
        del effort  # the partitioner has one
        start = time.perf_counter()
        text = partitioned_text(lowered)
        seconds = time.perf_counter() - start
        peak = peak_bytes(rewritten(parse(text)))
        return compilers.CompileResult(text, peak, None, None, seconds, estimate=True)


_LIBTPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Read for the machine's own TPU only, of which there is none; without it libtpu complains.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    # Warnings to the error stream, where they are read, and nothing into files of libtpu's own.
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_LOG_DIR": "disabled",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REQUESTED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", re.I),
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM", re.I),
)


class TpuCompiler(compilers.TargetCompiler):
    """XLA with libtpu."""

    screen_options: ClassVar = {"exec_time_optimization_effort": -1.0}

    def environment(self) -> dict[str, str]:
        return super().environment() | _LIBTPU_ENVIRONMENT

    def devices(self) -> list[Any]:
        """Returns the target's devices in libtpu's order."""
        return list(_tpu_devices(self.target).values())

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
        by_place = _tpu_devices(self.target)
        places = self.target.arrangement(sizes).places
        devices = np.empty(len(places), dtype=object)
        for number, place in enumerate(places):
            devices[number] = by_place[place]
        return devices.reshape(tuple(sizes.values()))

    def _requested_bytes(self, message: str) -> int | None:
        for pattern in _REQUESTED:
            found = pattern.search(message)
            if found:
                return round(float(found[1]) * _UNITS[found[2].upper()])
        return None

    def _memory(self, compiled: Any) -> tuple[int, int]:
        found = compiled.memory_analysis()
        return int(found.peak_memory_in_bytes), int(found.temp_size_in_bytes)


@functools.lru_cache(maxsize=8)
def _tpu_devices(target: Target) -> dict[tuple[int, ...], Any]:
    """Devices by slice, coordinates and core of the chip."""
    from jax.experimental import topologies

    chip = target.hardware
    named = ("topology", "device_kind")
    options = {name: value for name, value in chip.compiler.items() if name not in named}
    if "topology" not in chip.compiler:
        raise TargetError(
            f"The hardware {chip.name!r} does not say what libtpu calls it: "
            "compiler={'topology': 'v5e'}, or like='v5e'."
        )
    if len(target.topology) == 2 and (target.topology[0] < 2 or target.topology[1] < 2):
        options["chips_per_host_bounds"] = [*target.topology, 1]
    if target.slices > 1:
        options["num_slices"] = target.slices
    name = f"{chip.compiler['topology']}:{'x'.join(map(str, target.topology))}"
    try:
        # libtpu reads it when it is loaded.
        with compilers.temporary_environment(_LIBTPU_ENVIRONMENT, override=False):
            devices = topologies.get_topology_desc(
                platform="tpu", topology_name=name, **options
            ).devices
    except Exception as error:  # of jaxlib's own class
        raise TargetError(
            f"libtpu has no topology {name!r} for {target.text!r}: {str(error).strip()}"
        ) from error
    width = len(target.topology)
    places: dict[tuple[int, ...], Any] = {}
    for device in devices:
        coords = (*tuple(device.coords)[:width], *(0,) * (3 - width))
        number = getattr(device, "slice_index", 0) or 0
        places[number, *coords, device.core_on_chip] = device
    return places


_CUDA_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_DESCRIBED = (
    "major",
    "core_count",
    "fpus_per_core",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
    "l2_cache_size",
    "clock_rate_ghz",
)
# The same for every GPU since compute capability 8.
_SINCE_AMPERE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}


class GpuCompiler(compilers.TargetCompiler):
    """XLA with the CUDA plugin."""

    def environment(self) -> dict[str, str]:
        return super().environment() | _CUDA_ENVIRONMENT

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
        devices = np.array(_gpu_devices(self.target), dtype=object)
        return devices.reshape(tuple(sizes.values()))

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> compilers.CompileResult:
        result = super()._compile(lowered, effort)
        peak, limit = result.peak_bytes or 0, self.target.limit_bytes
        if peak <= limit:
            return result
        message = (
            f"The program needs {peak / 2**30:.2f} GiB of a GPU's memory, and a program may "
            f"use {limit / 2**30:.2f} GiB ({limit / self.target.hardware.memory_bytes:.0%}; "
            "XLA_PYTHON_CLIENT_MEM_FRACTION sets it, and @0.9 after a target says it here)."
        )
        return dataclasses.replace(result, out_of_memory=message)


def target_config(chip: Hardware) -> str:
    """Returns XLA's description of a GPU, as protocol buffer text."""
    missing = [name for name in _DESCRIBED if name not in chip.compiler]
    if missing:
        raise TargetError(
            f"The GPU {chip.name!r} cannot be described to its compiler: {', '.join(missing)} "
            'missing in `compiler`. Start from a GPU that is known: like = "h100" in TOML, or '
            "plan.find_hardware('h100').like(...)."
        )
    fields = _SINCE_AMPERE | {name: chip.compiler[name] for name in _DESCRIBED if name != "major"}
    fields |= {
        "memory_bandwidth": int(chip.memory_bandwidth),
        "device_memory_size": int(chip.memory_bytes),
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    minor = chip.compiler.get("minor", 0)
    return (
        "gpu_device_info {\n"
        f"  cuda_compute_capability {{ major: {chip.compiler['major']} minor: {minor} }}\n"
        f"{lines}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\n"
        f'device_description_str: "{chip.compiler.get("description", chip.name)}"\n'
    )


@functools.lru_cache(maxsize=8)
def _gpu_devices(target: Target) -> tuple[Any, ...]:
    """Devices in the order of nodes and their GPUs."""
    from jax.experimental import topologies

    config = target_config(target.hardware)
    nodes, gpus = target.topology
    try:
        with compilers.temporary_environment(_CUDA_ENVIRONMENT, override=False):
            described = topologies.get_topology_desc(
                "", platform="cuda", target_config=config, topology=f"1x{nodes}x{gpus}"
            )
    except Exception as error:  # of jaxlib's own class
        raise CompilerFailedError(
            f"The CUDA plugin does not take the description of {target.text!r}: {error}"
        ) from error
    return tuple(sorted(described.devices, key=lambda device: device.id))
