# SPDX-License-Identifier: Apache-2.0
"""Facts of a compiled program: its collectives, operations and bytes.

The program is the compiler's own, or for an *estimate* that of XLA's CPU compiler right after its
partitioner. Partitioning is the same code for every kind of device, so that program has the data
types and collectives with which the compilers of TPUs and GPUs start; the optimized CPU program has
not, as it widens small floats and merges nothing.

What an instruction takes is read and what it gives is written, once each, for every run; inside a
*fusion* nothing is written but its result. Of an array that is only sliced, or of which only a
slice is updated, the slice counts. It is an *estimate*: caches, which keep what is read again, and
what compilers keep in faster memory are left out.

A product and the sum that takes it are two operations. TPU compilers write matrix products as
convolutions, in which a batch may stand as a spatial dimension with a window that meets one
element of each; so of a convolution only those places of the window are counted that meet an
element, as XLA's own cost analysis does, and not padding or the holes of a dilation.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax.extend import mesh_text
from shardax.hlo import program as hlo
from shardax.hlo.attribution import attribute
from shardax.hlo.collectives import KINDS, Collective, find_collectives, groups_of, wire_bytes
from shardax.hlo.estimate import rewritten
from shardax.hlo.execution_counts import ExecutionCounts, called, count_executions
from shardax.hlo.live_memory import UPDATES, VIEWS, BufferTable
from shardax.hlo.program import ArrayShape, Computation, HloReadError, Instruction, Program

_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert"),
        *("after-all", "add-dependency", "domain", "opt-barrier", "optimization-barrier"),
        *("partition-id", "replica-id", "while", "call", "conditional"),
        # A copy that brings data closer ahead of time; what uses the copy counts as reading it.
        "copy-start",
    }
)
# The later parts of what runs meanwhile; the first has read and written.
_LATER = ("-done", "-update")
_FUSED_VIEWS = frozenset({"bitcast", "reshape", "copy"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_INSIDE = ("while", "call", "conditional")


def hbm_bytes(program: Program, runs: Mapping[str, int]) -> float:
    """Counts bytes of memory traffic of a compiled program."""
    # Computations that run within an instruction do not read or write memory themselves.
    inner = {
        name
        for inside in program.computations.values()
        for op in inside.instructions
        if op.opcode not in _INSIDE
        for name in op.computations("calls", "to_apply", "called_computations")
    }
    total = 0
    for name in runs.keys() - inner:
        inside = program.computations[name]
        total += runs[name] * sum(_bytes(program, inside, op) for op in inside.instructions)
    return float(total)


def _bytes(program: Program, inside: Computation, op: Instruction) -> int:
    """Bytes read and written by one run of an instruction."""
    if op.opcode in _FREE or op.opcode.endswith(_LATER):
        return 0
    operands = inside.operands(op)
    if op.opcode == "fusion":
        (name,) = op.computations("calls")
        fused = program.computations[name]
        results = fused.operands(fused.root) if fused.root.opcode == "tuple" else (fused.root,)
        read = sum(
            _read(program, fused, fused.parameters[number], operand.bytes)
            for number, operand in enumerate(operands)
        )
        return read + sum(_written(fused, result) for result in results)
    if op.opcode in _SLICES:
        return 2 * op.bytes + _sum(operands[1:])
    if op.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes + _sum(operands[2:])
    if op.opcode == "scatter":
        arrays = len(operands) // 2
        return 3 * _sum(operands[arrays + 1 :]) + operands[arrays].bytes
    if op.opcode.endswith("-start") and op.opcode != "all-reduce-start":
        return op.bytes  # its result holds what it takes too
    if op.opcode == "custom-call" and (said := _COST_BYTES.search(op.attributes)):
        return int(said[1])
    if op.opcode == "custom-call" and len(op.shapes) > 1 and op.shapes[-1].dtype == "s8":
        # The last result is room that a library's matrix product works in.
        return sum(shape.bytes for shape in op.shapes[:-1]) + _sum(operands)
    return op.bytes + _sum(operands)


def _sum(instructions: Iterable[Instruction]) -> int:
    return sum(op.bytes for op in instructions)


def _read(program: Program, inside: Computation, value: Instruction, whole: int) -> int:
    """Bytes of a value read by a fusion: of slices, these."""
    total = 0
    for user in inside.users[value.name]:
        first = user.operands[0] == value.name and user.operands.count(value.name) == 1
        if first and user.opcode == "dynamic-update-slice":
            continue  # updated in place; what is written counts as the result
        if first and user.opcode in _SLICES:
            total += user.bytes
        elif user.opcode in _FUSED_VIEWS:
            total += _read(program, inside, user, whole)
        elif user.opcode == "fusion":
            (name,) = user.computations("calls")
            called = program.computations[name]
            total += sum(
                _read(program, called, called.parameters[number], whole)
                for number, operand in enumerate(user.operands)
                if operand == value.name
            )
        else:
            return whole
    return min(total, whole)


def _written(inside: Computation, result: Instruction) -> int:
    """Bytes of a result written by a fusion: of updates, the slice."""
    while result.opcode in _FUSED_VIEWS:
        (result,) = inside.operands(result)
    if result.opcode == "dynamic-update-slice":
        return inside.by_name[result.operands[1]].bytes
    return result.bytes


def estimated_hbm_bytes(program: Program, runs: Mapping[str, int]) -> float:
    """Estimates bytes of memory traffic of a partitioned program, best after ``rewritten``."""
    return float(sum(runs[name] * _estimated_bytes(program.computations[name]) for name in runs))


def _estimated_bytes(inside: Computation) -> int:
    buffers = BufferTable(inside, {})
    total = 0
    reduced: dict[str, int] = {}
    for op in buffers.scheduled():
        if op.opcode in _INSIDE:
            continue
        # Reductions of one array are mostly done together, as in a softmax: it is read once.
        read = reduced if op.opcode == "reduce" else {}
        for place, name in enumerate(op.inputs):
            if place > 0 or op.opcode not in UPDATES:
                limit = op.bytes if op.opcode in _SLICES and place == 0 else None
                _add_read(inside, buffers, inside.by_name[name], limit, read)
        written = op
        if op.opcode in UPDATES:
            written = inside.by_name[op.operands[-1 if op.opcode == "scatter" else 1]]
        total += written.bytes + (sum(read.values()) if read is not reduced else 0)
    return total + sum(reduced.values())


def _add_read(
    inside: Computation,
    buffers: BufferTable,
    op: Instruction,
    limit: int | None,  # of bytes: of an array that is sliced, those of the slice
    read: dict[str, int],
) -> None:
    """Adds the bytes read for a value, by buffer."""
    if op.opcode in VIEWS:
        _add_read(inside, buffers, inside.by_name[op.operands[0]], limit, read)
    elif op.opcode in ("parameter", "get-tuple-element") or buffers.fills_buffer(op):
        size = op.bytes if limit is None else min(limit, op.bytes)
        read[op.name] = max(size, read.get(op.name, 0))
    elif op.opcode not in ("constant", "tuple"):
        for place, name in enumerate(op.operands):
            least = limit
            if op.opcode in _SLICES and place == 0:
                least = op.bytes if limit is None else min(limit, op.bytes or limit)
            _add_read(inside, buffers, inside.by_name[name], least, read)


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")
_DIGITS = re.compile(r"\d+")
_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:gemm|matmul)")
_CUDNN = re.compile(r"__cudnn\$conv(?:BiasActivation)?(Forward|BackwardInput|BackwardFilter)")
_GEMM_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d", ]*)\]')
_ATTENTION = re.compile(r"__cudnn\$fmha")
_SCORES = re.compile(r'"intermediate_tensor_shape": *\{[^{}]*"dimensions": *\[([\d", ]*)\]')
_CAUSAL = re.compile(r'"mask_type": *"(?:PADDING_)?CAUSAL')
_WINDOW = re.compile(r'"sliding_window_length": *"?(\d+)')
# Pallas's kernels say what they cost, if their authors did.
_COST = re.compile(r'"cost_estimate": *\{[^{}]*"flops": *"?(\d+)')
_COST_BYTES = re.compile(r'"cost_estimate": *\{[^{}]*"bytes_accessed": *"?(\d+)')
# Splash attention of TPUs says no cost; scopes around it, those of shardax.nn, say its mask.
_SPLASH = re.compile(r"/splash_m[hq]a_(fwd|dq|dkv)")
_SPLASH_MASK = re.compile(r"splash\[(full|causal)?,?(?:window=(\d+))?\]")
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}  # scores and the values'; backward again
# Kernels of tokamax for rows of groups on GPUs: the scope around, that of nn.MoE, says so.
_RAGGED_TOKAMAX = re.compile(r"tokamax\[experts\]")
_TRITON = "__gpu$xla.gpu.triton"
# XLA for TPU has a kernel for rows of groups, and a call before it that says where groups start.
_RAGGED_KERNEL = re.compile(r"ragged-dot-(none|metadata)")
_GEMM_BATCH = re.compile(r'"lhs_batch_dimensions":\[([\d", ]*)\]')
_DOTS = ("dot", "scaled-dot", "ragged-dot")


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product or convolution of one device.

    Attributes:
        operations: Of one run, two for a product and a sum.
        rows: Of the left operand.
        columns: Of the right operand.
        depth: What is summed over; of convolutions that meet padding the mean.
        batch: Products of this shape at a time.
        dtype: Of the left operand, as HLO names it.
        runs: How often it runs; of an estimate the mean over devices.
        fused: Whether it is all products of a fused kernel, such as attention's: then rows are
            queries, columns keys, and operations those that a mask leaves. A kernel that says its
            operations alone has no shape: ones.

    Example:
        >>> MatrixProduct(48.0, rows=2, columns=4, depth=3, dtype="f32", runs=10).flops
        480.0
    """

    operations: float
    rows: float
    columns: float
    depth: float
    batch: float = 1.0
    dtype: str = "bf16"
    runs: float = 1
    fused: bool = False

    @property
    def flops(self) -> float:
        """Operations of all runs."""
        return self.operations * self.runs


def own_product(inside: Computation, op: Instruction) -> MatrixProduct | None:
    """Returns an instruction as a matrix product, or None."""
    if op.opcode in _DOTS:
        contracted = op.attribute("lhs_contracting_dims")
        batch = op.attribute("lhs_batch_dims") or op.attribute("lhs_batch_dimensions")
        if contracted is None:
            contracted = op.attribute("lhs_contracting_dimensions")
        return _dot(inside, op, contracted, batch)
    if op.opcode == "convolution" or _cudnn(op):
        return _convolution(inside, op)
    if op.opcode == "custom-call" and _GEMM.match(op.call_target):
        contraction = _GEMM_CONTRACTED.search(op.attributes)
        batch = _GEMM_BATCH.search(op.attributes)
        return _dot(inside, op, contraction and contraction[1], batch and batch[1])
    return _fused_kernel(inside, op) if op.opcode == "custom-call" else None


def own_flops(inside: Computation, op: Instruction) -> float:
    """Counts operations of a matrix product or convolution itself."""
    product = own_product(inside, op)
    return 0.0 if product is None else product.flops


def _fused_kernel(inside: Computation, op: Instruction) -> MatrixProduct | None:
    """Returns the products of a fused kernel of known cost."""
    if kernel := _ragged_kernel(op):
        return _grouped(inside, op) if kernel == "none" else None
    if _is_tokamax_ragged(op):
        return _tokamax_ragged(inside, op)
    if said := _COST.search(op.attributes):
        return MatrixProduct(float(said[1]), 1, 1, 1, fused=True)
    if _is_splash(op):
        return _splash(inside, op)
    scores = _SCORES.search(op.attributes)
    if not _ATTENTION.match(op.call_target) or not scores:
        return None
    batch, heads, queries, keys = map(int, _DIGITS.findall(scores[1]))
    operand = _operand(inside, op, 0)
    depth, pairs = operand.dims[-1], float(queries * keys)
    window = int(found[1]) if (found := _WINDOW.search(op.attributes)) else 0
    if _CAUSAL.search(op.attributes):
        pairs = float(sum(min(row + 1, keys, window or keys) for row in range(queries)))
    # Scores and values; backward their four derivatives, and scores again.
    count = 5 if op.call_target.endswith(("Backward", "BackwardF8")) else 2
    operations = 2.0 * batch * heads * pairs * depth * count
    return MatrixProduct(operations, queries, keys, depth, batch * heads, operand.dtype, fused=True)


def _ragged_kernel(op: Instruction) -> str:
    """The part of XLA's kernel of ragged products for TPU, or ""."""
    part = _RAGGED_KERNEL.search(op.op_name) if op.call_target == "tpu_custom_call" else None
    return part[1] if part else ""


def _grouped(inside: Computation, op: Instruction) -> MatrixProduct:
    """Returns a product of rows with the matrices of their groups."""
    count = len(op.operands)
    left, right = (_operand(inside, op, place) for place in (count - 2, count - 1))
    columns, groups = op.shapes[0].dims[-1], right.dims[0]
    rows, depth = left.size / left.dims[-1], left.dims[-1]
    operations = 2.0 * rows * columns * depth
    return MatrixProduct(operations, rows / groups, columns, depth, groups, left.dtype)


def _is_tokamax_ragged(op: Instruction) -> bool:
    return op.call_target == _TRITON and bool(_RAGGED_TOKAMAX.search(op.op_name))


def _tokamax_ragged(inside: Computation, op: Instruction) -> MatrixProduct:
    """Returns a product by group, or its matrices' gradient."""
    left, result = _operand(inside, op, 0), op.shapes[0]
    rows, depth = left.dims[0], left.dims[-1]
    columns = result.dims[-1]
    groups = result.dims[0] if len(result.dims) == 3 else _operand(inside, op, 1).dims[0]
    operations = 2.0 * rows * depth * columns
    return MatrixProduct(operations, rows / groups, columns, depth, groups, left.dtype)


def _pairs(queries: int, keys: int, causal: bool, window: int) -> float:
    """Counts pairs of query and key; a window of 0 is none."""
    rows = np.arange(queries)
    last = rows if causal else rows + window - 1 if window else np.full(queries, keys)
    first = rows - window + 1 if window else np.zeros(queries, int)
    counts = np.minimum(last + 1, keys) - np.clip(first, 0, keys)
    return float(np.maximum(counts, 0).sum())


def _is_splash(op: Instruction) -> bool:
    return op.call_target == "tpu_custom_call" and bool(_SPLASH.search(op.op_name))


def _splash(inside: Computation, op: Instruction) -> MatrixProduct:
    """Returns the products of a kernel of splash attention."""
    operands = [_operand(inside, op, place) for place in range(len(op.operands))]
    query, key = [shape for shape in operands if re.match(r"b?f\d", shape.dtype)][:2]
    mask = _SPLASH_MASK.search(op.op_name)
    causal = mask is not None and mask[1] == "causal"
    window = int(mask[2] or 0) if mask else 0
    *batch, queries, depth = query.dims
    keys, count = key.dims[-2], math.prod(batch)
    kernel = _SPLASH.search(op.op_name)
    products = _SPLASH_PRODUCTS[kernel[1]] if kernel else 0
    operations = 2.0 * count * _pairs(queries, keys, causal, window) * depth * products
    return MatrixProduct(operations, queries, keys, depth, count, query.dtype, fused=True)


def is_counted(op: Instruction) -> bool:
    """Whether the operations of a custom call are known."""
    if _ATTENTION.match(op.call_target) and _SCORES.search(op.attributes):
        return True
    is_library = _GEMM.match(op.call_target) or _CUDNN.match(op.call_target) or _is_splash(op)
    is_library = is_library or _is_tokamax_ragged(op)
    return bool(is_library or _ragged_kernel(op) or _COST.search(op.attributes))


def _cudnn(op: Instruction) -> str:
    """The kind of a convolution of cuDNN: Forward, BackwardInput, BackwardFilter, or ""."""
    target = _CUDNN.match(op.call_target)
    return target[1] if target else ""


def _dot(
    inside: Computation, op: Instruction, contracted: str | None, batch_dims: str | None
) -> MatrixProduct:
    if contracted is None:
        raise _unread(op, "it names no contracted dimensions")
    left = _operand(inside, op, 0)
    dims = [int(dim) for dim in _DIGITS.findall(contracted)]
    if any(dim >= len(left.dims) for dim in dims):
        raise _unread(op, f"its left operand has no dimension {max(dims)}")
    depth = math.prod(left.dims[dim] for dim in dims)
    batch = math.prod(
        left.dims[dim] for dim in map(int, _DIGITS.findall(batch_dims or "")) if dim not in dims
    )
    operations = 2.0 * op.shapes[0].size * depth
    rows = left.size / max(1, depth * batch)
    columns = op.shapes[0].size / max(1.0, rows * batch)
    if op.opcode == "ragged-dot" and len(op.operands) > 2:
        groups = _operand(inside, op, 2).size
        # Each row meets one group's matrix, or each group sums its own rows.
        ragged = {int(dim) for dim in _DIGITS.findall(op.attribute("lhs_ragged_dims") or "")}
        if ragged & set(dims):
            columns = op.shapes[0].size / max(1.0, rows * groups)
            operations /= groups
            return MatrixProduct(operations, rows, columns, depth / groups, groups, left.dtype)
        rows, batch = rows / groups, groups * batch
    return MatrixProduct(operations, rows, columns, depth, batch, left.dtype)


@dataclass(frozen=True)
class _ConvolutionWindow:
    """A window along one spatial dimension."""

    size: int = 1
    stride: int = 1
    low: int = 0
    input_dilation: int = 1
    window_dilation: int = 1

    def places(self, inputs: int, outputs: int) -> int:
        """Number of meetings of window places and elements, over all outputs."""
        last = (inputs - 1) * self.input_dilation
        common = math.gcd(self.stride, self.input_dilation)
        period = self.input_dilation // common
        inverse = pow(self.stride // common, -1, period) if period > 1 else 0
        count = 0
        for index in range(self.size):
            offset = index * self.window_dilation - self.low
            if offset % common:
                continue
            low = max(0, -(offset // self.stride))
            high = min(outputs - 1, (last - offset) // self.stride)
            first = (-(offset // common) * inverse) % period
            first += -(-(low - first) // period) * period if low > first else 0
            count += max(0, (high - first) // period + 1)
        return count


def _convolution(inside: Computation, op: Instruction) -> MatrixProduct:
    labels = _LABELS.search(op.attribute("dim_labels") or "")
    left, right, out = _operand(inside, op, 0), _operand(inside, op, 1), op.shapes[0]
    kind = _cudnn(op)  # labels and window are those of the forward convolution
    if kind == "BackwardInput":
        left, out = out, left
    elif kind == "BackwardFilter":
        right, out = out, right
    pairs = list(zip(labels.groups() if labels else (), (left, right, out), strict=False))
    if not pairs or any(len(text) != len(shape.dims) for text, shape in pairs):
        raise _unread(op, f"its dim_labels are {op.attribute('dim_labels')!r}")
    input_dims, kernel_dims, output_dims = [
        dict(zip(text, shape.dims, strict=True)) for text, shape in pairs
    ]
    windows = _windows(op, len(left.dims) - 2)
    rows, depth, batch = float(output_dims["b"]), float(kernel_dims["i"]), 1.0
    operations = 2.0 * rows * output_dims["f"] * depth
    for index, window in enumerate(windows):
        inputs, outputs = input_dims[str(index)], output_dims[str(index)]
        places = window.places(inputs, outputs)
        operations *= places
        if places == inputs == outputs == window.size:  # one element meets one: a batch
            batch *= outputs
            continue
        rows *= outputs
        depth *= places / max(outputs, 1)
    return MatrixProduct(operations, rows, output_dims["f"], depth, batch, left.dtype)


def _windows(op: Instruction, count: int) -> list[_ConvolutionWindow]:
    text = (op.attribute("window") or "").strip("{}")
    fields = dict(field.split("=", 1) for field in text.split() if "=" in field)

    def numbers(key: str, default: int) -> list[int]:
        value = fields.get(key)
        return [int(part) for part in value.split("x")] if value else [default] * count

    pads = fields.get("pad")
    low = [int(part.split("_")[0]) for part in pads.split("x")] if pads else [0] * count
    sizes = numbers("size", 1)
    columns = [sizes, numbers("stride", 1), low, numbers("lhs_dilate", 1), numbers("rhs_dilate", 1)]
    if any(len(column) != count for column in columns):
        raise _unread(op, f"its window is {text!r}")
    return [_ConvolutionWindow(*row) for row in zip(*columns, strict=True)]


def _operand(inside: Computation, op: Instruction, number: int) -> ArrayShape:
    operand = inside.by_name.get(op.operands[number]) if number < len(op.operands) else None
    if operand is None or not operand.shapes:
        raise _unread(op, f"operand {number} is not in computation {inside.name!r}")
    return operand.shapes[0]


def _unread(op: Instruction, why: str) -> HloReadError:
    return HloReadError(
        f"The operations of {op.opcode} {op.name!r} cannot be counted: {why}. The text is cut "
        "or changed, or a version of XLA printed it that shardax does not know."
    )


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
    text: str | hlo.Program,
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

    def cost(inside: hlo.Computation, op: hlo.Instruction) -> float:
        operations = own_flops(inside, op)
        base = op.opcode.removesuffix("-start")
        if base in KINDS:
            sent = wire_bytes(KINDS[base], op.bytes, groups_of(op, devices).size)
            operations += _OPERATIONS_PER_BYTE * sent
        return operations

    runs = count_executions(program, cost)
    located = find_collectives(program, runs, mesh, slices, device_ids)
    products = _products(program, runs)
    return ProgramFacts(
        attribute(program, located, arguments),
        sum(product.flops for product in products),
        (estimated_hbm_bytes if estimate else hbm_bytes)(program, runs.counts),
        (*runs.warnings, *_uncounted(program, runs)),
        products,
    )


def _products(program: hlo.Program, runs: ExecutionCounts) -> tuple[MatrixProduct, ...]:
    """Returns the matrix products of a program, equal ones merged."""
    counts: Counter[MatrixProduct] = Counter()
    for name, count in runs.counts.items():
        inside = program.computations[name]
        for op in inside.instructions:
            product = own_product(inside, op)
            if product is not None and product.flops:
                counts[product] += count
    merged = [dataclasses.replace(product, runs=count) for product, count in counts.items()]
    return tuple(sorted(merged, key=lambda product: -product.flops))


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
    return sum(product.flops for product in _products(program, runs))


class ModelFlops(NamedTuple):
    """Matrix products and convolutions of a lowered step, on all devices together."""

    by_dtype: Mapping[str, float]  # operations by the dtype of the left operand, as HLO names it
    uncounted: tuple[str, ...]  # what else computes or is not known, a sentence each


def model_flops(program: hlo.Program) -> ModelFlops:
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
    copies, warnings = _copies(program), [*runs.warnings, *_uncounted(program, runs)]
    by_dtype: dict[str, float] = {}
    for name, count in runs.counts.items():
        inside = program.computations[name]
        for op in inside.instructions:
            flops = own_flops(inside, op)
            if flops and _RECOMPUTED not in op.op_name:
                dtype = inside.operands(op)[0].shapes[0].dtype
                by_dtype[dtype] = by_dtype.get(dtype, 0.0) + count * copies.get(name, 1) * flops
    return ModelFlops(by_dtype, tuple(warnings))


_RECOMPUTED = "rematted_computation"
_MANUAL_BODY = "xla.sdy.manual_computation_body"
_MESH_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_QUOTED = re.compile(r'"([^"]+)"')


def _copies(program: hlo.Program) -> dict[str, int]:
    """Returns the number of devices of each ``shard_map``, by computation."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(program.header)}
    copies: dict[str, int] = {}
    for computation in program.computations.values():
        for op in computation.instructions:
            bodies = [name for name in called(op) if name.startswith(_MANUAL_BODY)]
            if op.opcode != "call" or not bodies:
                continue
            manual = _manual_axes(computation, op)
            axes = _QUOTED.findall(manual.replace("\\", ""))
            if absent := [axis for axis in axes if axis not in sizes]:
                raise _unread(op, f"the size of the mesh axis {absent[0]!r} is not known")
            mesh_size = math.prod(sizes[axis] for axis in axes)
            waiting, seen = bodies, set[str]()
            while waiting:
                if (name := waiting.pop()) in seen:
                    continue
                seen.add(name)
                copies[name] = copies.get(name, 1) * mesh_size
                inside = program.computations[name]
                waiting += [callee for e in inside.instructions for callee in called(e)]
    return copies


def _manual_axes(computation: hlo.Computation, op: hlo.Instruction) -> str:
    """The axes of a ``shard_map``, by an instruction beside the call."""
    neighbors = [*computation.operands(op), *computation.users.get(op.name, ())]
    neighbors += [operand for neighbor in neighbors for operand in computation.operands(neighbor)]
    neighbors += [
        user for neighbor in neighbors for user in computation.users.get(neighbor.name, ())
    ]
    for neighbor in neighbors:
        if "manual_axes{" in neighbor.attributes:
            return neighbor.attributes.partition("manual_axes{")[2].partition("}")[0]
    raise _unread(op, "it does not say over which mesh axes it runs")


def _uncounted(program: hlo.Program, runs: ExecutionCounts) -> list[str]:
    """Warnings of parts of a program without a known cost."""
    calls: Counter[str] = Counter()
    ragged = promoted = 0
    for name in runs.counts:
        for op in program.computations[name].instructions:
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


# What comes after the partitioner is thrown away, so its cheapest form will do. The last flag is of
# GPUs alone; as its value is another each time, JAX's persistent cache, which does not tell
# programs by the dump flags, finds no program that was compiled before and is not written again.
# Versions of XLA differ in the flags that they know.
_CHEAP: tuple[dict[str, Any], ...] = (
    {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    },
    {"xla_backend_optimization_level": 0},
    {},
)
_IGNORED = "xla_gpu_all_reduce_combine_threshold_bytes"
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
            if cheap:
                options[_IGNORED] = random.getrandbits(62)
            try:
                lowered.compile(compiler_options=options)
            except Exception as error:  # of jaxlib's own class
                if number + 1 < len(_CHEAP) and _UNKNOWN_OPTION.search(str(error)):
                    continue
                raise hlo.CompilerFailedError(f"XLA's CPU compiler ended with: {error}") from error
            folder = Path(name)
            for pattern in _WRITTEN:
                # Small programs that JAX compiles on the way may be there too; the step is last.
                paths = sorted(folder.glob(pattern))
                if paths:
                    return paths[-1].read_text()
            raise hlo.CompilerFailedError(
                "XLA compiled the program but did not write it after partitioning; the folder "
                f"holds {sorted(path.name for path in folder.iterdir())[:5]}. A persistent "
                "compilation cache can be why: "
                'jax.config.update("jax_enable_compilation_cache", False).'
            )
    raise AssertionError("the last options are none")
