# SPDX-License-Identifier: Apache-2.0
"""The compilers that are installed here, each with devices to compile for."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.needs import needs_compiler
from tests.planner.hlo.cases import CASES, SLICES, Case

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  fpus_per_core: 128
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  l2_cache_size: 52428800
  memory_bandwidth: 3352000000000
  device_memory_size: 84978434048
  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class InstalledCompiler:
    """A compiler for one kind of hardware.

    Attributes:
        kind: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
        package: What brings it.
        dtype: What the cases compute in.
        topology: What describes its devices.
        cases: What it compiles, by name.
    """

    kind: str
    package: str
    dtype: Any
    topology: dict[str, Any]
    cases: dict[str, Case]

    @property
    def installed(self) -> bool:
        """Whether it can be used here."""
        try:
            importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return False
        return True

    @property
    def marks(self) -> Sequence[pytest.MarkDecorator]:
        """Of a test that asks it."""
        return [] if self.kind == "cpu" else [needs_compiler(self.kind)]

    @property
    def version(self) -> str:
        """Its package and version."""
        return f"{self.package}-{importlib.metadata.version(self.package)}"

    @cached_property
    def devices(self) -> Sequence[Any]:
        """Its devices, absent but for CPU."""
        if self.kind == "cpu":
            return jax.devices("cpu")
        from jax.experimental import topologies

        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        return topologies.get_topology_desc(**self.topology).devices

    def text(self, name: str) -> str:
        """Returns the program that it makes of a case."""
        return self.cases[name].lower(self.devices, self.dtype).compile().as_text() or ""


def _tpu(topology: str, cases: dict[str, Case], **more: Any) -> InstalledCompiler:
    named = {"platform": "tpu", "topology_name": topology, **more}
    return InstalledCompiler("tpu", "libtpu", jnp.bfloat16, named, cases)


_H100S = {"topology_name": "", "platform": "cuda", "target_config": H100, "topology": "1x1x8"}
_TRAINED = {name: CASES[name] for name in ("fully_sharded", "decoder")}
_OFFLOADED = {name: CASES[name] for name in ("decoder", "psum", "psum_scatter")}

COMPILERS = {
    "cpu": InstalledCompiler("cpu", "jaxlib", jnp.float32, {}, CASES),
    "v5e": _tpu("v5e:2x4", CASES),
    "v4": _tpu("v4:2x2x2", _TRAINED, chip_config_name="megacore"),
    # Its compiler runs collectives on cores of their own, in computations that are called.
    "tpu7x": _tpu("tpu7x:2x2x1", _OFFLOADED),
    "v5e-slices": _tpu("v5e:2x2", SLICES, num_slices=2),
    "h100": InstalledCompiler("gpu", "jax-cuda12-plugin", jnp.bfloat16, _H100S, CASES),
}
"""All compilers, installed or not, by the name of the hardware."""
