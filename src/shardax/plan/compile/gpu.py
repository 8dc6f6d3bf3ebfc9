# SPDX-License-Identifier: Apache-2.0
"""The GPU compiler, XLA with JAX's CUDA plugin, for GPUs that are not there.

It needs the plugin's wheels only: no GPU, driver or CUDA toolkit. ``jax.experimental.topologies``
describes the GPU to it by the fields of XLA's *target config*.

Without a GPU kernels are not tried out against each other, so those chosen need not be the ones
that will run. A program that does not fit is compiled all the same; what it needs is compared with
the target's memory, from which what CUDA, NCCL and cuDNN take for themselves is not deducted.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shardax.hlo.program import CompilerFailedError
from shardax.plan.compile.compilers import (
    CompiledProgram,
    Compiler,
    failed,
    known_compilers,
    required_bytes,
    with_options,
)
from shardax.plan.errors import TargetError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.hardware.targets import Target

_NEEDED = (
    "major",
    "core_count",
    "fpus_per_core",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
    "l2_cache_size",
    "clock_rate_ghz",
)
# The same for every GPU since compute capability 8.
_COMMON = {
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


class GpuCompiler(Compiler):
    """XLA with the CUDA plugin."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.label = next(each.label for each in known_compilers() if each.kind == "gpu")

    def environment(self) -> dict[str, str]:
        return super().environment() | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

    def _devices(self, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
        devices = np.array(_topology(self.target), dtype=object)
        return devices.reshape(tuple(sizes.values()))

    def _compile(self, lowered: jax.stages.Lowered, effort: str) -> CompiledProgram:
        start = time.perf_counter()
        try:
            compiled = with_options(lowered, {})
        except Exception as error:  # of jaxlib's own class
            raise failed(self.label, error) from error
        seconds = time.perf_counter() - start
        peak, temporaries = required_bytes(compiled)
        limit = self.target.limit_bytes
        verdict = None
        if peak > limit:
            verdict = (
                f"The program needs {peak / 2**30:.2f} GiB of a GPU's memory, and a program may "
                f"use {limit / 2**30:.2f} GiB ({limit / self.target.hardware.memory_bytes:.0%}; "
                "XLA_PYTHON_CLIENT_MEM_FRACTION sets it, and @0.9 after a target says it here)."
            )
        return CompiledProgram(compiled.as_text(), peak, temporaries, verdict, seconds)


def target_config(chip: Hardware) -> str:
    """Returns the description of a GPU that XLA's compiler takes, as protocol buffer text.

    Args:
        chip: A GPU.

    Raises:
        TargetError: The hardware does not say what the compiler must know.
    """
    missing = [name for name in _NEEDED if name not in chip.compiler]
    if missing:
        raise TargetError(
            f"The GPU {chip.name!r} cannot be described to its compiler: {', '.join(missing)} "
            'missing in `compiler`. Start from a GPU that is known: like = "h100" in TOML, or '
            "plan.find_hardware('h100').like(...)."
        )
    fields = _COMMON | {name: chip.compiler[name] for name in _NEEDED if name != "major"}
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
def _topology(target: Target) -> tuple[Any, ...]:
    """The absent devices of a target, by node and GPU."""
    from jax.experimental import topologies

    config = target_config(target.hardware)
    nodes, gpus = target.topology
    skip = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    added = skip not in os.environ
    os.environ.setdefault(skip, "1")
    try:
        described = topologies.get_topology_desc(
            "", platform="cuda", target_config=config, topology=f"1x{nodes}x{gpus}"
        )
    except Exception as error:  # of jaxlib's own class
        raise CompilerFailedError(
            f"The CUDA plugin does not take the description of {target.text!r}: {error}"
        ) from error
    finally:
        if added:
            os.environ.pop(skip, None)
    return tuple(sorted(described.devices, key=lambda device: device.id))
