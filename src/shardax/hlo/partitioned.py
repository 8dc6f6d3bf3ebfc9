# SPDX-License-Identifier: Apache-2.0
"""The program of one device as XLA's partitioner makes it, before a compiler fits it to hardware.

Partitioning is the same code for every kind of device, so this program, made on virtual CPU
devices, has the data types and collectives with which the compilers of TPUs and GPUs start. The
optimized CPU program has not: there small floats are widened, and nothing is merged.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import jax

from shardax.core.errors import CompilerFailedError

# What comes after the partitioner is thrown away, so its cheapest form will do. The last flag names
# what is written of a part that is not wanted; as it is another each time, JAX's persistent cache,
# which does not tell programs by the other dump flags, finds no program that was compiled before
# and is not written again. Versions of XLA differ in the flags that they know.
_CHEAP: tuple[dict[str, Any], ...] = (
    {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
        "xla_dump_emitter_re": "",
    },
    {"xla_backend_optimization_level": 0},
    {},
)
_UNKNOWN_OPTION = re.compile(r"No such compile option|option.*(unknown|not recognized)", re.I)
# A program of one device is not partitioned; then what its functions call is put in their place.
_PASSES = "spmd-partitioning|call-inliner"
_WRITTEN = (
    "*.after_spmd-partitioning.*.txt",
    "*.after_call-inliner.*.txt",
    "*.before_optimizations.txt",
)


def partitioned_text(lowered: jax.stages.Lowered) -> str:
    """Returns the program of one device as it is right after XLA's partitioner.

    It is compiled for the CPU devices that it was lowered for, about 1.5 s for a train step of a
    scanned decoder. Nothing is run.

    Args:
        lowered: A function, lowered for a mesh of CPU devices.

    Returns:
        The program's text; for one device, where there is nothing to partition, that before its
        first optimization.

    Raises:
        CompilerFailedError: If XLA cannot compile it, or did not write the program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> lowered = jax.jit(lambda x: x.sum()).lower(jnp.ones(4))
        >>> partitioned_text(lowered).startswith("HloModule jit__lambda")
        True
    """
    for number, cheap in enumerate(_CHEAP):
        with tempfile.TemporaryDirectory(prefix="shardax-") as folder:
            options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": _PASSES} | cheap
            if "xla_dump_emitter_re" in cheap:
                options["xla_dump_emitter_re"] = folder
            try:
                lowered.compile(compiler_options=options)
            except Exception as error:  # of jaxlib's own class
                if number + 1 < len(_CHEAP) and _UNKNOWN_OPTION.search(str(error)):
                    continue
                raise CompilerFailedError(f"XLA's CPU compiler ended with: {error}") from error
            return _read(Path(folder))
    raise AssertionError("the last options are none")


def _read(folder: Path) -> str:
    for pattern in _WRITTEN:
        # Small programs that JAX compiles on the way may have been written too; the step is last.
        found = sorted(folder.glob(pattern))
        if found:
            return found[-1].read_text()
    raise CompilerFailedError(
        "XLA compiled the program but did not write it after partitioning; the folder holds "
        f"{sorted(each.name for each in folder.iterdir())[:5]}. A persistent compilation cache can "
        'be why: jax.config.update("jax_enable_compilation_cache", False).'
    )
