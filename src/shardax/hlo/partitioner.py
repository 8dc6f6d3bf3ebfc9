# SPDX-License-Identifier: Apache-2.0
"""Programs as XLA's partitioner leaves them.

Partitioning is the same code for every kind of device, so that the program of XLA's CPU compiler
right after it has the data types and collectives with which the compilers of TPUs and GPUs start;
the optimized CPU program has not, as it widens small floats and merges nothing.
"""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path
from typing import Any

import jax

from shardax.hlo import errors

# What comes after the partitioner is thrown away, so its cheapest form will do. Versions of XLA
# differ in the flags that they know.
_CHEAP: tuple[dict[str, Any], ...] = (
    {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    },
    {"xla_backend_optimization_level": 0},
    {},
)
# A flag of GPUs alone; as its value is another each time, JAX's persistent cache, which does not
# tell programs by the dump flags, finds no program that was compiled before and is not written
# again.
_IGNORED = "xla_gpu_all_reduce_combine_threshold_bytes"
_UNKNOWN_OPTION = re.compile(r"No such compile option|option.*(unknown|not recognized)", re.I)

# A program of one device is not partitioned; then what its functions call is put in their place.
_PASSES = "spmd-partitioning|call-inliner"
# One without functions is that before its first optimization.
_WRITTEN = (
    "*.after_spmd-partitioning.*.txt",
    "*.after_call-inliner.*.txt",
    "*.before_optimizations.txt",
)


def partitioned_text(lowered: jax.stages.Lowered) -> str:
    """Returns the program of one device right after XLA's partitioner.

    Args:
        lowered: A function lowered for a mesh of CPU devices, or for one.
    """
    *fast, plain = _CHEAP
    for flags in fast:
        try:
            return _dumped_text(lowered, flags | {_IGNORED: random.getrandbits(62)})
        except errors.CompilerFailedError as error:
            if not _UNKNOWN_OPTION.search(str(error.__cause__)):
                raise
    return _dumped_text(lowered, plain)


def _dumped_text(lowered: jax.stages.Lowered, flags: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory(prefix="shardax-") as name:
        options = {"xla_dump_to": name, "xla_dump_hlo_pass_re": _PASSES} | flags
        try:
            lowered.compile(compiler_options=options)
        except Exception as error:  # of jaxlib's own class
            raise errors.partitioner_failed(error) from error

        folder = Path(name)
        for pattern in _WRITTEN:
            # Small programs that JAX compiles on the way may be there too; the step is last.
            paths = sorted(folder.glob(pattern))
            if paths:
                return paths[-1].read_text()
        raise errors.partitioned_program_missing([path.name for path in folder.iterdir()])
