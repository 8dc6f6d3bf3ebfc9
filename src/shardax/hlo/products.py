# SPDX-License-Identifier: Apache-2.0
"""Matrix products and convolutions of a program, and their operations.

A product and the sum that takes it are two operations. TPU compilers write matrix products as
convolutions, in which a batch may stand as a spatial dimension with a window that meets one
element of each; so of a convolution only those places of the window are counted that meet an
element, as XLA's own cost analysis does, and not padding or the holes of a dilation.

A *kernel* is a custom call that computes products: of a library (cuBLAS, cuDNN), of XLA for TPU, or
of Pallas's. ``_kernel`` tells which are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardax.hlo import errors
from shardax.hlo.program import ArrayShape, Computation, Instruction

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
_PALLAS_TPU = "tpu_custom_call"
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


def own_flops(computation: Computation, op: Instruction) -> float:
    """Counts operations of a matrix product or convolution itself."""
    product = own_product(computation, op)
    return 0.0 if product is None else product.flops


def own_product(computation: Computation, op: Instruction) -> MatrixProduct | None:
    """Returns an instruction as a matrix product, or None."""
    if op.opcode in _DOTS:
        contracted = op.attribute("lhs_contracting_dims")
        if contracted is None:
            contracted = op.attribute("lhs_contracting_dimensions")
        batch = op.attribute("lhs_batch_dims") or op.attribute("lhs_batch_dimensions")
        return _dot(computation, op, contracted, batch)
    if op.opcode == "convolution":
        return _convolution(computation, op)
    kernel = _kernel(op)
    return kernel(computation, op) if kernel else None


def is_counted(op: Instruction) -> bool:
    """Whether the operations of a custom call are known."""
    return _kernel(op) is not None


Kernel = Callable[[Computation, Instruction], MatrixProduct | None]
"""Reads the products of a custom call; None of one that computes none."""


def _kernel(op: Instruction) -> Kernel | None:
    """Returns what reads a custom call; None if its operations are not known."""
    if op.opcode != "custom-call":
        return None
    target = op.call_target
    if _GEMM.match(target):
        return _gemm
    if _CUDNN.match(target):
        return _convolution

    ragged = _RAGGED_KERNEL.search(op.op_name) if target == _PALLAS_TPU else None
    if ragged:
        return _grouped if ragged[1] == "none" else _no_product
    if target == _TRITON and _RAGGED_TOKAMAX.search(op.op_name):
        return _tokamax_ragged
    if _COST.search(op.attributes):
        return _said
    if target == _PALLAS_TPU and _SPLASH.search(op.op_name):
        return _splash
    if _ATTENTION.match(target) and _SCORES.search(op.attributes):
        return _attention
    return None


def _no_product(computation: Computation, op: Instruction) -> None:
    """A call before another, which says where groups start."""


def _said(computation: Computation, op: Instruction) -> MatrixProduct:
    """Returns the products of a kernel that says its operations alone."""
    del computation
    (operations,) = _COST.findall(op.attributes)[:1]
    return MatrixProduct(float(operations), 1, 1, 1, fused=True)


def _gemm(computation: Computation, op: Instruction) -> MatrixProduct:
    """Returns a product of cuBLAS."""
    contraction = _GEMM_CONTRACTED.search(op.attributes)
    batch = _GEMM_BATCH.search(op.attributes)
    return _dot(computation, op, contraction and contraction[1], batch and batch[1])


def _dot(
    computation: Computation, op: Instruction, contracted: str | None, batch_dims: str | None
) -> MatrixProduct:
    if contracted is None:
        raise errors.uncounted_operations(op, "it names no contracted dimensions")
    left, result = _operand(computation, op, 0), op.shapes[0]
    dims = [int(dim) for dim in _DIGITS.findall(contracted)]
    if any(dim >= len(left.dims) for dim in dims):
        why = f"its left operand has no dimension {max(dims)}"
        raise errors.uncounted_operations(op, why)

    kept_dims = [int(dim) for dim in _DIGITS.findall(batch_dims or "") if int(dim) not in dims]
    depth = math.prod(left.dims[dim] for dim in dims)
    batch = math.prod(left.dims[dim] for dim in kept_dims)
    operations = 2.0 * result.size * depth
    rows = left.size / max(1, depth * batch)
    columns = result.size / max(1.0, rows * batch)
    if op.opcode != "ragged-dot" or len(op.operands) < 3:
        return MatrixProduct(operations, rows, columns, depth, batch, left.dtype)

    # Each row meets one group's matrix, or each group sums its own rows.
    groups = _operand(computation, op, 2).size
    ragged = {int(dim) for dim in _DIGITS.findall(op.attribute("lhs_ragged_dims") or "")}
    if not ragged & set(dims):
        return MatrixProduct(operations, rows / groups, columns, depth, groups * batch, left.dtype)
    columns = result.size / max(1.0, rows * groups)
    return MatrixProduct(operations / groups, rows, columns, depth / groups, groups, left.dtype)


def _grouped(computation: Computation, op: Instruction) -> MatrixProduct:
    """Returns a product of rows with the matrices of their groups."""
    count = len(op.operands)
    left, right = _operand(computation, op, count - 2), _operand(computation, op, count - 1)
    columns, groups = op.shapes[0].dims[-1], right.dims[0]
    rows, depth = left.size / left.dims[-1], left.dims[-1]
    operations = 2.0 * rows * columns * depth
    return MatrixProduct(operations, rows / groups, columns, depth, groups, left.dtype)


def _tokamax_ragged(computation: Computation, op: Instruction) -> MatrixProduct:
    """Returns a product by group, or its matrices' gradient."""
    left, result = _operand(computation, op, 0), op.shapes[0]
    rows, depth, columns = left.dims[0], left.dims[-1], result.dims[-1]
    groups = result.dims[0] if len(result.dims) == 3 else _operand(computation, op, 1).dims[0]
    operations = 2.0 * rows * depth * columns
    return MatrixProduct(operations, rows / groups, columns, depth, groups, left.dtype)


# Attention.


def _attention(computation: Computation, op: Instruction) -> MatrixProduct | None:
    """Returns the products of cuDNN's attention."""
    (scores,) = _SCORES.findall(op.attributes)[:1]
    batch, heads, queries, keys = map(int, _DIGITS.findall(scores))
    window = _WINDOW.search(op.attributes)
    most = int(window[1]) if window else 0
    pairs = float(queries * keys)
    if _CAUSAL.search(op.attributes):
        pairs = float(sum(min(row + 1, keys, most or keys) for row in range(queries)))

    # Scores and values; backward their four derivatives, and scores again.
    count = 5 if op.call_target.endswith(("Backward", "BackwardF8")) else 2
    operand = _operand(computation, op, 0)
    depth = operand.dims[-1]
    operations = 2.0 * batch * heads * pairs * depth * count
    return MatrixProduct(operations, queries, keys, depth, batch * heads, operand.dtype, fused=True)


def _splash(computation: Computation, op: Instruction) -> MatrixProduct:
    """Returns the products of a kernel of splash attention."""
    operands = [_operand(computation, op, number) for number in range(len(op.operands))]
    query, key = [shape for shape in operands if re.match(r"b?f\d", shape.dtype)][:2]
    *batch, queries, depth = query.dims
    keys, count = key.dims[-2], math.prod(batch)

    mask = _SPLASH_MASK.search(op.op_name)
    causal = mask is not None and mask[1] == "causal"
    window = int(mask[2] or 0) if mask else 0
    (kernel,) = _SPLASH.findall(op.op_name)[:1]
    products = _SPLASH_PRODUCTS[kernel]
    operations = 2.0 * count * _pairs(queries, keys, causal, window) * depth * products
    return MatrixProduct(operations, queries, keys, depth, count, query.dtype, fused=True)


def _pairs(queries: int, keys: int, causal: bool, window: int) -> float:
    """Counts pairs of query and key; a window of 0 is none."""
    rows = np.arange(queries)
    last = rows if causal else rows + window - 1 if window else np.full(queries, keys)
    first = rows - window + 1 if window else np.zeros(queries, int)
    counts = np.minimum(last + 1, keys) - np.clip(first, 0, keys)
    return float(np.maximum(counts, 0).sum())


# Convolutions.


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

        # Of each place, the outputs whose place meets an element, one in each period.
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


def _convolution(computation: Computation, op: Instruction) -> MatrixProduct:
    # Labels and window of cuDNN's derivatives are those of the forward convolution.
    left, right, result = _operand(computation, op, 0), _operand(computation, op, 1), op.shapes[0]
    cudnn = _CUDNN.match(op.call_target)
    inputs, kernel, outputs = left, right, result
    if cudnn and cudnn[1] == "BackwardInput":
        inputs, outputs = result, left
    elif cudnn and cudnn[1] == "BackwardFilter":
        kernel, outputs = result, right

    labels = _LABELS.search(op.attribute("dim_labels") or "")
    pairs = list(zip(labels.groups() if labels else (), (inputs, kernel, outputs), strict=False))
    if not pairs or any(len(text) != len(shape.dims) for text, shape in pairs):
        why = f"its dim_labels are {op.attribute('dim_labels')!r}"
        raise errors.uncounted_operations(op, why)
    input_dims, kernel_dims, output_dims = [
        dict(zip(text, shape.dims, strict=True)) for text, shape in pairs
    ]

    rows, depth, batch = float(output_dims["b"]), float(kernel_dims["i"]), 1.0
    operations = 2.0 * rows * output_dims["f"] * depth
    for index, window in enumerate(_windows(op, len(inputs.dims) - 2)):
        input_size, output_size = input_dims[str(index)], output_dims[str(index)]
        places = window.places(input_size, output_size)
        operations *= places
        if places == input_size == output_size == window.size:  # one element meets one: a batch
            batch *= output_size
        else:
            rows *= output_size
            depth *= places / max(output_size, 1)
    return MatrixProduct(operations, rows, output_dims["f"], depth, batch, inputs.dtype)


def _windows(op: Instruction, count: int) -> list[_ConvolutionWindow]:
    """Returns the window along each of so many spatial dimensions."""
    text = (op.attribute("window") or "").strip("{}")
    fields = dict(field.split("=", 1) for field in text.split() if "=" in field)

    def numbers(key: str, default: int) -> list[int]:
        value = fields.get(key)
        if value is None:
            return [default] * count
        return [int(part.split("_")[0]) for part in value.split("x")]  # of padding, the lower

    columns = [
        numbers("size", 1),
        numbers("stride", 1),
        numbers("pad", 0),
        numbers("lhs_dilate", 1),
        numbers("rhs_dilate", 1),
    ]
    if any(len(column) != count for column in columns):
        raise errors.uncounted_operations(op, f"its window is {text!r}")
    return [_ConvolutionWindow(*row) for row in zip(*columns, strict=True)]


def _operand(computation: Computation, op: Instruction, number: int) -> ArrayShape:
    operand = computation.by_name.get(op.operands[number]) if number < len(op.operands) else None
    if operand is None or not operand.shapes:
        why = f"operand {number} is not in computation {computation.name!r}"
        raise errors.uncounted_operations(op, why)
    return operand.shapes[0]
