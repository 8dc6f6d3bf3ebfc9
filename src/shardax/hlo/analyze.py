# SPDX-License-Identifier: Apache-2.0
"""Facts of a compiled program: its collectives, operations and bytes.

The program is the compiler's own, or for an *estimate* that of XLA's CPU compiler right after its
partitioner. Partitioning is the same code for every kind of device, so that program has the data
types and collectives with which the compilers of TPUs and GPUs start; the optimized CPU program has
not, as it widens small floats and merges nothing.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardax.hlo import program as hlo
from shardax.hlo.attribution import attribute
from shardax.hlo.collectives import KINDS, Collective, find_collectives, groups_of, wire_bytes
from shardax.hlo.estimate import rewritten
from shardax.hlo.execution_counts import ExecutionCounts, count_executions
from shardax.hlo.traffic import estimated_hbm_bytes, hbm_bytes, is_counted, own_flops
from shardax.partition.mesh import mesh_text

# Operations that take as long as sending a byte: of today's accelerators 2,000 to 10,000.
_OPERATIONS_PER_BYTE = 4000.0

# Custom calls of compilers' own helpers, which hold no matrix product: words in capitals run
# together, but for factorisations, and a few more.
_HELPER = re.compile(
    r"(?:[A-Z][a-z0-9]*)+|annotate_device_placement|SPMD\w*|X64\w*|cu_threefry2x32\w*|__gpu\$TopK|"
    r"xla_(?:ffi_)?(?:partitioned_)?python_\w*callback\w*"
)
_FACTORISATION = re.compile(r"Cholesky|Qr|Eigh?|LuDecomposition|Svd|Schur|Triangular|Fft")


@dataclass(frozen=True)
class ProgramFacts:
    """What one device does in one run of a program.

    Attributes:
        collectives: All of them, in the program's order.
        matmul_flops: Operations of matrix products and convolutions, two for a product and a sum.
        hbm_bytes: Bytes read from and written to the device's memory; an estimate.
        warnings: What could not be told, such as a loop of unknown length.

    Example:
        >>> sums = Collective("all-reduce", "ar.1", "f32", 4, 7.0, 8, ("data",))
        >>> ProgramFacts((sums, sums), matmul_flops=0.0, hbm_bytes=0.0).wire_bytes()
        14.0
    """

    collectives: tuple[Collective, ...]
    matmul_flops: float
    hbm_bytes: float
    warnings: tuple[str, ...] = ()

    def wire_bytes(self) -> float:
        """Returns the wire bytes of all collectives."""
        return sum(each.wire_bytes for each in self.collectives)


def read_program(
    text: str | hlo.Program,
    mesh: Mapping[str, int],
    *,
    arguments: Sequence[str] = (),
    slices: int = 1,
    device_ids: Sequence[int] = (),
    estimate: bool = False,
) -> ProgramFacts:
    """Reads what one device does in one run of a compiled program.

    Args:
        text: The program, as ``compiled.as_text()`` gives it, or read by ``parse``.
        mesh: Sizes of the axes of the mesh that it was compiled for, in order. A device's number in
            the program is its position in the mesh, row-major.
        arguments: Paths of the program's parameters, in order, for ``Collective.parameters``.
        slices: Of how many slices the mesh is; each is consecutive in the mesh.
        device_ids: Ids of the mesh's devices in its order (``[d.id for d in mesh.devices.flat]``);
            programs for several slices of TPUs name devices by them.
        estimate: Whether the text is that of XLA's CPU compiler just after the partitioner; then
            what other compilers do to collectives after it is done to it here.

    Returns:
        Its collectives, operations and bytes.

    Raises:
        HloReadError: If the text is not a whole program, or holds a collective that is not known.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> sharding = jax.sharding.NamedSharding(mesh, P("data"))
        >>> x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=sharding)
        >>> program = jax.jit(lambda x: x.sum()).lower(x).compile()
        >>> [each] = read_program(program.as_text(), {"data": 8}).collectives
        >>> each.kind, each.axes, each.payload, each.wire_bytes  # 2 x 7/8 x 4 bytes
        ('all-reduce', ('data',), 4, 7.0)
    """
    program = hlo.parse(text) if isinstance(text, str) else text
    program = rewritten(program) if estimate else program
    devices = math.prod(mesh.values())
    sizes = mesh_text(mesh)
    if slices < 1 or devices % slices:
        raise hlo.HloReadError(
            f"A mesh of {devices} devices ({sizes}) cannot be of {slices} slices of as many "
            "devices each."
        )
    if program.device_count not in (devices, devices // slices):
        raise hlo.HloReadError(
            f"The program runs on {program.device_count} devices, and the mesh ({sizes}) "
            f"has {devices}. Pass the mesh that it was compiled for."
        )

    def cost(inside: hlo.Computation, each: hlo.Instruction) -> float:
        operations = own_flops(inside, each)
        base = each.opcode.removesuffix("-start")
        if base in KINDS:
            sent = wire_bytes(KINDS[base], each.bytes, groups_of(each, devices).size)
            operations += _OPERATIONS_PER_BYTE * sent
        return operations

    runs = count_executions(program, cost)
    found = find_collectives(program, runs, mesh, slices, device_ids)
    return ProgramFacts(
        attribute(program, found, arguments),
        matmul_flops(program, runs),
        (estimated_hbm_bytes if estimate else hbm_bytes)(program, runs.counts),
        (*runs.warnings, *_uncounted(program, runs)),
    )


def matmul_flops(program: hlo.Program, runs: ExecutionCounts | None = None) -> float:
    """Counts the operations of all matrix products and convolutions of a program.

    Args:
        program: A compiled program, then of one device, or one that is only lowered
            (``parse(lowered.as_text("hlo"))``), then of all devices together.
        runs: How often its computations run, if that is known already.

    Returns:
        Operations, two for a product and a sum. What a compiler turned into elementwise operations,
        as GPU and TPU compilers do with the product of a matrix and a vector, is none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax.hlo import parse
        >>> lowered = jax.jit(jnp.dot).lower(jnp.ones((2, 3)), jnp.ones((3, 4)))
        >>> matmul_flops(parse(lowered.as_text("hlo")))  # 2 x 4 sums of 3 products
        48.0
    """
    runs = runs or count_executions(program, own_flops)
    inside = program.computations
    return sum(
        count * sum(own_flops(inside[name], each) for each in inside[name].instructions)
        for name, count in runs.counts.items()
    )


def _uncounted(program: hlo.Program, runs: ExecutionCounts) -> list[str]:
    """Warnings of what is in a program and counts as nothing."""
    calls: Counter[str] = Counter()
    ragged = promoted = 0
    for name in runs.counts:
        for each in program.computations[name].instructions:
            if each.opcode == "custom-call" and not is_counted(each):
                target = each.call_target
                if not _HELPER.fullmatch(target) or _FACTORISATION.search(target):
                    calls[target] += 1
            ragged += each.opcode in ("ragged-all-to-all", "ragged-all-to-all-start")
            promoted += "_promoted," in each.attributes and each.opcode in KINDS
    warnings = [f"What {name!r} computes is not counted ({n} calls)." for name, n in calls.items()]
    if ragged:
        warnings.append(
            f"{ragged} ragged all-to-alls count as if all of their operands were sent; how much is "
            "depends on the data."
        )
    if promoted:
        warnings.append(
            f"{promoted} collectives send float32 where the program says bfloat16 or float16, as "
            "XLA's CPU compiler has it; on accelerators they send half."
        )
    return warnings


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
    """Returns the program of one device right after XLA's partitioner."""
    # It was lowered for a mesh of CPU devices; for one device, where there is nothing to partition,
    # the program is that before its first optimization.
    for number, cheap in enumerate(_CHEAP):
        with tempfile.TemporaryDirectory(prefix="shardax-") as name:
            options = {"xla_dump_to": name, "xla_dump_hlo_pass_re": _PASSES} | cheap
            if "xla_dump_emitter_re" in cheap:
                options["xla_dump_emitter_re"] = name
            try:
                lowered.compile(compiler_options=options)
            except Exception as error:  # of jaxlib's own class
                if number + 1 < len(_CHEAP) and _UNKNOWN_OPTION.search(str(error)):
                    continue
                raise hlo.CompilerFailedError(f"XLA's CPU compiler ended with: {error}") from error
            folder = Path(name)
            for pattern in _WRITTEN:
                # Small programs that JAX compiles on the way may be there too; the step is last.
                found = sorted(folder.glob(pattern))
                if found:
                    return found[-1].read_text()
            raise hlo.CompilerFailedError(
                "XLA compiled the program but did not write it after partitioning; the folder "
                f"holds {sorted(each.name for each in folder.iterdir())[:5]}. A persistent "
                "compilation cache can be why: "
                'jax.config.update("jax_enable_compilation_cache", False).'
            )
    raise AssertionError("the last options are none")
