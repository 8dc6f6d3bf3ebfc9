# SPDX-License-Identifier: Apache-2.0
"""Memory traffic and matrix-product operations of a program.

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

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
        for each in inside.instructions
        if each.opcode not in _INSIDE
        for name in each.computations("calls", "to_apply", "called_computations")
    }
    total = 0
    for name in runs.keys() - inner:
        inside = program.computations[name]
        total += runs[name] * sum(_bytes(program, inside, each) for each in inside.instructions)
    return float(total)


def _bytes(program: Program, inside: Computation, each: Instruction) -> int:
    """Bytes that one run of an instruction reads and writes."""
    if each.opcode in _FREE or each.opcode.endswith(_LATER):
        return 0
    operands = inside.operands(each)
    if each.opcode == "fusion":
        (name,) = each.computations("calls")
        fused = program.computations[name]
        results = fused.operands(fused.root) if fused.root.opcode == "tuple" else (fused.root,)
        read = sum(
            _read(program, fused, fused.parameters[number], operand.bytes)
            for number, operand in enumerate(operands)
        )
        return read + sum(_written(fused, result) for result in results)
    if each.opcode in _SLICES:
        return 2 * each.bytes + _sum(operands[1:])
    if each.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes + _sum(operands[2:])
    if each.opcode == "scatter":
        arrays = len(operands) // 2
        return 3 * _sum(operands[arrays + 1 :]) + operands[arrays].bytes
    if each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
        return each.bytes  # its result holds what it takes too
    if each.opcode == "custom-call" and len(each.shapes) > 1 and each.shapes[-1].dtype == "s8":
        # The last result is room that a library's matrix product works in.
        return sum(shape.bytes for shape in each.shapes[:-1]) + _sum(operands)
    return each.bytes + _sum(operands)


def _sum(instructions: Iterable[Instruction]) -> int:
    return sum(each.bytes for each in instructions)


def _read(program: Program, inside: Computation, value: Instruction, whole: int) -> int:
    """Bytes of a value that a fusion reads: of slices, these."""
    total = 0
    for user in inside.instructions:
        if user.opcode in ("parameter", "constant") or value.name not in user.operands:
            continue
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
    """Bytes of a result that a fusion writes: of updates, the slice."""
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
    for each in buffers.scheduled():
        if each.opcode in _INSIDE:
            continue
        # Reductions of one array are mostly done together, as in a softmax: it is read once.
        read = reduced if each.opcode == "reduce" else {}
        for place, name in enumerate(each.inputs):
            if place > 0 or each.opcode not in UPDATES:
                limit = each.bytes if each.opcode in _SLICES and place == 0 else None
                _add_read(inside, buffers, inside.by_name[name], limit, read)
        written = each
        if each.opcode in UPDATES:
            written = inside.by_name[each.operands[-1 if each.opcode == "scatter" else 1]]
        total += written.bytes + (sum(read.values()) if read is not reduced else 0)
    return total + sum(reduced.values())


def _add_read(
    inside: Computation,
    buffers: BufferTable,
    each: Instruction,
    limit: int | None,  # of bytes: of an array that is sliced, those of the slice
    read: dict[str, int],
) -> None:
    """Adds the bytes read for a value, by buffer."""
    if each.opcode in VIEWS:
        _add_read(inside, buffers, inside.by_name[each.operands[0]], limit, read)
    elif each.opcode in ("parameter", "get-tuple-element") or buffers.fills_buffer(each):
        size = each.bytes if limit is None else min(limit, each.bytes)
        read[each.name] = max(size, read.get(each.name, 0))
    elif each.opcode not in ("constant", "tuple"):
        for place, name in enumerate(each.operands):
            least = limit
            if each.opcode in _SLICES and place == 0:
                least = each.bytes if limit is None else min(limit, each.bytes or limit)
            _add_read(inside, buffers, inside.by_name[name], least, read)


_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")
_DIGITS = re.compile(r"\d+")
_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:gemm|matmul)")
_CUDNN = re.compile(r"__cudnn\$conv(?:BiasActivation)?(Forward|BackwardInput|BackwardFilter)")
_GEMM_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d", ]*)\]')
_DOTS = ("dot", "scaled-dot", "ragged-dot")


def own_flops(inside: Computation, each: Instruction) -> float:
    """Counts operations of a matrix product or convolution itself."""
    if each.opcode in _DOTS:
        contracted = each.attribute("lhs_contracting_dims")
        if contracted is None:
            contracted = each.attribute("lhs_contracting_dimensions")
        return _dot(inside, each, contracted)
    if each.opcode == "convolution" or _cudnn(each):
        return _convolution(inside, each)
    if each.opcode == "custom-call" and _GEMM.match(each.call_target):
        found = _GEMM_CONTRACTED.search(each.attributes)
        return _dot(inside, each, found[1] if found else None)
    return 0.0


def is_counted(each: Instruction) -> bool:
    """Whether a custom call is a product or convolution of NVIDIA's libraries."""
    return bool(_GEMM.match(each.call_target) or _CUDNN.match(each.call_target))


def _cudnn(each: Instruction) -> str:
    """The kind of a convolution of cuDNN: Forward, BackwardInput, BackwardFilter, or ""."""
    found = _CUDNN.match(each.call_target)
    return found[1] if found else ""


def _dot(inside: Computation, each: Instruction, contracted: str | None) -> float:
    if contracted is None:
        raise _unread(each, "it names no contracted dimensions")
    left = _operand(inside, each, 0)
    dims = [int(dim) for dim in _DIGITS.findall(contracted)]
    if any(dim >= len(left.dims) for dim in dims):
        raise _unread(each, f"its left operand has no dimension {max(dims)}")
    products = math.prod(left.dims[dim] for dim in dims)
    times = 2.0 * each.shapes[0].size * products
    if each.opcode == "ragged-dot":
        # Each row meets one group's matrix, or each group sums its own rows.
        ragged = {int(dim) for dim in _DIGITS.findall(each.attribute("lhs_ragged_dims") or "")}
        if ragged & set(dims):
            return times / (_operand(inside, each, 2).size if len(each.operands) > 2 else 1)
    return times


@dataclass(frozen=True)
class _ConvolutionWindow:
    """A window along one spatial dimension."""

    size: int = 1
    stride: int = 1
    low: int = 0
    input_dilation: int = 1
    window_dilation: int = 1

    def places(self, inputs: int, outputs: int) -> int:
        """How often window places meet an element, over all outputs."""
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


def _convolution(inside: Computation, each: Instruction) -> float:
    labels = _LABELS.search(each.attribute("dim_labels") or "")
    left, right, out = _operand(inside, each, 0), _operand(inside, each, 1), each.shapes[0]
    kind = _cudnn(each)  # labels and window are those of the forward convolution
    if kind == "BackwardInput":
        left, out = out, left
    elif kind == "BackwardFilter":
        right, out = out, right
    pairs = list(zip(labels.groups() if labels else (), (left, right, out), strict=False))
    if not pairs or any(len(text) != len(shape.dims) for text, shape in pairs):
        raise _unread(each, f"its dim_labels are {each.attribute('dim_labels')!r}")
    given, kernel, result = [dict(zip(text, shape.dims, strict=True)) for text, shape in pairs]
    windows = _windows(each, len(left.dims) - 2)
    places = math.prod(
        window.places(given[str(index)], result[str(index)]) for index, window in enumerate(windows)
    )
    return 2.0 * places * result["b"] * result["f"] * kernel["i"]


def _windows(each: Instruction, count: int) -> list[_ConvolutionWindow]:
    text = (each.attribute("window") or "").strip("{}")
    fields = dict(field.split("=", 1) for field in text.split() if "=" in field)

    def numbers(key: str, default: int) -> list[int]:
        value = fields.get(key)
        return [int(part) for part in value.split("x")] if value else [default] * count

    pads = fields.get("pad")
    low = [int(part.split("_")[0]) for part in pads.split("x")] if pads else [0] * count
    sizes = numbers("size", 1)
    columns = [sizes, numbers("stride", 1), low, numbers("lhs_dilate", 1), numbers("rhs_dilate", 1)]
    if any(len(column) != count for column in columns):
        raise _unread(each, f"its window is {text!r}")
    return [_ConvolutionWindow(*row) for row in zip(*columns, strict=True)]


def _operand(inside: Computation, each: Instruction, number: int) -> ArrayShape:
    found = inside.by_name.get(each.operands[number]) if number < len(each.operands) else None
    if found is None or not found.shapes:
        raise _unread(each, f"operand {number} is not in computation {inside.name!r}")
    return found.shapes[0]


def _unread(each: Instruction, why: str) -> HloReadError:
    return HloReadError(
        f"The operations of {each.opcode} {each.name!r} cannot be counted: {why}. The text is cut "
        "or changed, or a version of XLA printed it that shardax does not know."
    )
