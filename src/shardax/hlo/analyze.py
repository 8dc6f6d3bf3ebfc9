# SPDX-License-Identifier: Apache-2.0
"""Facts of a compiled program: its collectives, operations and bytes.

The program is the compiler's own, or for an *estimate* that of XLA's CPU compiler right after its
partitioner (``partitioner.py``). Operations are those of ``products.py``, bytes those of
``memory_traffic.py``, and collectives those of ``collectives.py``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardax.extend import mesh_text
from shardax.hlo import errors
from shardax.hlo.attribution import attribute
from shardax.hlo.collectives import KINDS, Collective, find_collectives, wire_bytes
from shardax.hlo.estimate import rewritten
from shardax.hlo.execution_counts import ExecutionCounts, count_executions
from shardax.hlo.groups import groups_of
from shardax.hlo.memory_traffic import estimated_hbm_bytes, hbm_bytes
from shardax.hlo.products import MatrixProduct, is_counted, own_flops, own_product
from shardax.hlo.program import Computation, Instruction, Program, parse

# Operations that take as long as sending a byte: of today's accelerators 2,000 to 10,000.
_OPERATIONS_PER_BYTE = 4000.0

# Custom calls of compilers' own helpers, which hold no matrix product: words in capitals run
# together, but for factorisations, and a few more.
_HELPER = re.compile(
    r"(?:[A-Z][a-z0-9]*)+|annotate_device_placement|xla\.sdy\.\w+|SPMD\w*|X64\w*|cu_threefry2x32\w*|__gpu\$TopK|"
    r"xla_(?:ffi_)?(?:partitioned_)?python_\w*callback\w*"
)
_FACTORISATION = re.compile(r"Cholesky|Qr|Eigh?|LuDecomposition|Svd|Schur|Triangular|Fft")


@dataclass(frozen=True)
class ProgramFacts:
    """The work of one device in one run of a program.

    Attributes:
        collectives: All of them, in the program's order.
        matmul_flops: Operations of matrix products and convolutions, two for a product and a sum.
        hbm_bytes: Bytes read from and written to the device's memory; an estimate.
        warnings: What could not be told, such as a loop of unknown length.
        products: The matrix products, equal ones merged, those with most operations first.

    Example:
        >>> sums = Collective("all-reduce", "ar.1", "f32", 4, 7.0, 8, ("data",))
        >>> ProgramFacts((sums, sums), matmul_flops=0.0, hbm_bytes=0.0).wire_bytes()
        14.0
    """

    collectives: tuple[Collective, ...]
    matmul_flops: float
    hbm_bytes: float
    warnings: tuple[str, ...] = ()
    products: tuple[MatrixProduct, ...] = ()

    def wire_bytes(self) -> float:
        """Returns the wire bytes of all collectives."""
        return sum(collective.wire_bytes for collective in self.collectives)


def read_program(
    text: str | Program,
    mesh: Mapping[str, int],
    *,
    arguments: Sequence[str] = (),
    slices: int = 1,
    device_ids: Sequence[int] = (),
    estimate: bool = False,
) -> ProgramFacts:
    """Reads one device's work in one run of a compiled program.

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
    program = parse(text) if isinstance(text, str) else text
    if estimate:
        program = rewritten(program)
    devices = math.prod(mesh.values())
    if slices < 1 or devices % slices:
        raise errors.uneven_slices(devices, mesh_text(mesh), slices)
    if program.device_count not in (devices, devices // slices):
        raise errors.other_mesh(program.device_count, mesh_text(mesh), devices)

    def cost(computation: Computation, op: Instruction) -> float:
        """What an instruction takes, to choose between the branches of a conditional."""
        operations = own_flops(computation, op)
        base = op.opcode.removesuffix("-start")
        if base in KINDS:
            sent = wire_bytes(KINDS[base], op.bytes, groups_of(op, devices).size)
            operations += _OPERATIONS_PER_BYTE * sent
        return operations

    runs = count_executions(program, cost)
    located = find_collectives(program, runs, mesh, slices, device_ids)
    products = _products(program, runs)
    count_bytes = estimated_hbm_bytes if estimate else hbm_bytes
    return ProgramFacts(
        collectives=attribute(program, located, arguments),
        matmul_flops=sum(product.flops for product in products),
        hbm_bytes=count_bytes(program, runs.counts),
        warnings=(*runs.warnings, *_uncounted(program, runs)),
        products=products,
    )


def _running(
    program: Program, runs: ExecutionCounts
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yields the instructions that run, with their computations and numbers of runs."""
    for name, count in runs.counts.items():
        computation = program.computations[name]
        for op in computation.instructions:
            yield computation, op, count


def _products(program: Program, runs: ExecutionCounts) -> tuple[MatrixProduct, ...]:
    """Returns the matrix products of a program, equal ones merged."""
    counts: Counter[MatrixProduct] = Counter()
    for computation, op, count in _running(program, runs):
        product = own_product(computation, op)
        if product is not None and product.flops:
            counts[product] += count
    merged = [dataclasses.replace(product, runs=count) for product, count in counts.items()]
    return tuple(sorted(merged, key=lambda product: -product.flops))


def matmul_flops(program: Program) -> float:
    """Counts the operations of all matrix products and convolutions of a program.

    Args:
        program: A compiled program, then of one device, or one that is only lowered
            (``parse(lowered.as_text("hlo"))``), then of all devices together.

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
    runs = count_executions(program, own_flops)
    return sum(product.flops for product in _products(program, runs))


class ModelFlops(NamedTuple):
    """Matrix products and convolutions of a lowered step, on all devices together."""

    by_dtype: Mapping[str, float]  # operations by the dtype of the left operand, as HLO names it
    uncounted: tuple[str, ...]  # what else computes or is not known, a sentence each


def model_flops(program: Program) -> ModelFlops:
    """Counts the operations of a lowered program, without recomputed ones.

    Args:
        program: One that is only lowered: ``parse(lowered.as_text("hlo", debug_info=True))``. What
            ``shard_map`` runs on each device counts for each.

    Returns:
        Operations of matrix products and convolutions by dtype, and warnings of what is uncounted.

    Raises:
        HloReadError: If the text is of a version of XLA that is not known.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax.hlo import parse
        >>> f = jax.value_and_grad(jax.checkpoint(lambda w, x: jnp.sin(x @ w).sum()))
        >>> lowered = jax.jit(f).lower(jnp.ones((3, 4)), jnp.ones((2, 3)))
        >>> model_flops(parse(lowered.as_text("hlo", debug_info=True))).by_dtype
        {'f32': 96.0}
    """
    runs = count_executions(program, own_flops)
    copies = _copies(program)
    by_dtype: dict[str, float] = {}
    for computation, op, count in _running(program, runs):
        flops = own_flops(computation, op)
        if flops and _RECOMPUTED not in op.op_name:
            dtype = computation.operands(op)[0].shapes[0].dtype
            flops *= count * copies.get(computation.name, 1)
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flops
    return ModelFlops(by_dtype, (*runs.warnings, *_uncounted(program, runs)))


_RECOMPUTED = "rematted_computation"
_MANUAL_BODY = "xla.sdy.manual_computation_body"
_MESH_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_QUOTED = re.compile(r'"([^"]+)"')


def _copies(program: Program) -> dict[str, int]:
    """Returns the number of devices of each ``shard_map``, by computation."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(program.header)}
    copies: dict[str, int] = {}
    for computation in program.computations.values():
        for op in computation.instructions:
            bodies = [name for name in op.called if name.startswith(_MANUAL_BODY)]
            if op.opcode != "call" or not bodies:
                continue

            axes = _QUOTED.findall(_manual_axes(computation, op).replace("\\", ""))
            absent = [axis for axis in axes if axis not in sizes]
            if absent:
                why = f"the size of the mesh axis {absent[0]!r} is not known"
                raise errors.uncounted_operations(op, why)
            devices = math.prod(sizes[axis] for axis in axes)
            for name in program.reached(bodies):
                copies[name] = copies.get(name, 1) * devices
    return copies


def _manual_axes(computation: Computation, op: Instruction) -> str:
    """The axes of a ``shard_map``, by an instruction beside the call."""
    neighbors = [*computation.operands(op), *computation.users[op.name]]
    neighbors += [operand for neighbor in neighbors for operand in computation.operands(neighbor)]
    neighbors += [user for neighbor in neighbors for user in computation.users[neighbor.name]]
    for neighbor in neighbors:
        if "manual_axes{" in neighbor.attributes:
            return neighbor.attributes.partition("manual_axes{")[2].partition("}")[0]
    raise errors.uncounted_operations(op, "it does not say over which mesh axes it runs")


def _uncounted(program: Program, runs: ExecutionCounts) -> list[str]:
    """Warnings of parts of a program without a known cost."""
    calls: Counter[str] = Counter()
    ragged = promoted = 0
    for _, op, _ in _running(program, runs):
        if op.opcode == "custom-call" and not is_counted(op):
            target = op.call_target
            if not _HELPER.fullmatch(target) or _FACTORISATION.search(target):
                calls[target] += 1
        ragged += op.opcode in ("ragged-all-to-all", "ragged-all-to-all-start")
        promoted += "_promoted," in op.attributes and op.opcode in KINDS

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
