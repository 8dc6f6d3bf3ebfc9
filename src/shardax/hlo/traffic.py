# SPDX-License-Identifier: Apache-2.0
"""Bytes that a device reads from its memory and writes to it.

What an instruction takes is read and what it gives is written, once each, for every run; inside a
*fusion* nothing is written but its result. Of an array that is only sliced, or of which only a
slice is updated, the slice counts. It is an *estimate*: caches, which keep what is read again, and
what compilers keep in faster memory are left out.

Bytes that a device would read and write for a partitioned program, were it compiled.

Operations of matrix products and convolutions.

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

from shardax.hlo.live_memory import Buffers
from shardax.hlo.program import ArrayShape, Computation, HloReadError, Instruction, Program

# --- Memory traffic ---

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
_VIEWS = frozenset({"bitcast", "reshape", "copy"})
_INSIDE = ("while", "call", "conditional")


def hbm_bytes(program: Program, runs: Mapping[str, int]) -> float:
    """Counts bytes read and written."""
    inner = _inner(program)
    return float(
        sum(
            runs.get(name, 0) * sum(_bytes(program, inside, each) for each in inside.instructions)
            for name, inside in program.computations.items()
            if name not in inner
        )
    )


def _inner(program: Program) -> set[str]:
    """Computations that run within an instruction, without reading or writing memory themselves."""
    return {
        name
        for inside in program.computations.values()
        for each in inside.instructions
        if each.opcode not in _INSIDE
        for name in each.computations("calls", "to_apply", "called_computations")
    }


def _bytes(program: Program, inside: Computation, each: Instruction) -> int:
    """Bytes that one run of an instruction reads and writes."""
    if each.opcode in _FREE or each.opcode.endswith(_LATER):
        return 0
    operands = inside.operands(each)
    if each.opcode == "fusion":
        return _of_fusion(program, each, operands)
    return _touched(each, operands)


def _touched(each: Instruction, operands: tuple[Instruction, ...]) -> int:
    if each.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * each.bytes + _sum(operands[1:])
    if each.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes + _sum(operands[2:])
    if each.opcode == "scatter":
        arrays = len(operands) // 2
        return 3 * _sum(operands[arrays + 1 :]) + operands[arrays].bytes
    if each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
        return each.bytes  # its result holds what it takes too
    return _result_bytes(each) + _sum(operands)


def _result_bytes(each: Instruction) -> int:
    """Bytes of results, without the room that a library's matrix product works in."""
    if each.opcode == "custom-call" and len(each.shapes) > 1 and each.shapes[-1].dtype == "s8":
        return sum(shape.bytes for shape in each.shapes[:-1])
    return each.bytes


def _sum(instructions: Iterable[Instruction]) -> int:
    return sum(each.bytes for each in instructions)


def _of_fusion(program: Program, each: Instruction, operands: tuple[Instruction, ...]) -> int:
    (name,) = each.computations("calls")
    inside = program.computations[name]
    read = sum(
        _read(program, inside, inside.parameters[number], operand.bytes)
        for number, operand in enumerate(operands)
    )
    root = inside.root
    results = inside.operands(root) if root.opcode == "tuple" else (root,)
    return read + sum(_written(inside, result) for result in results)


def _read(program: Program, inside: Computation, value: Instruction, whole: int) -> int:
    """Bytes of a value that a fused computation reads: the slices, if it only takes slices."""
    total = 0
    for user in inside.instructions:
        if user.opcode in ("parameter", "constant") or value.name not in user.operands:
            continue
        first = user.operands[0] == value.name and user.operands.count(value.name) == 1
        if first and user.opcode == "dynamic-update-slice":
            continue  # updated in place; what is written counts as the result
        if first and user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.bytes
        elif user.opcode in _VIEWS:
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
    """Bytes that a fused computation writes of a result: the slice, of an update in place."""
    while result.opcode in _VIEWS:
        (result,) = inside.operands(result)
    if result.opcode == "dynamic-update-slice":
        return inside.by_name[result.operands[1]].bytes
    return result.bytes


# --- Estimate traffic ---

_NAMES = frozenset({"parameter", "tuple", "get-tuple-element", "while", "call", "conditional"})
_ESTIMATE_TRAFFIC_VIEWS = frozenset(
    {"bitcast", "copy", "opt-barrier", "optimization-barrier", "reshape"}
)
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})


def estimated_hbm_bytes(program: Program, runs: Mapping[str, int]) -> float:
    """Estimates the bytes read and written by a program that is not compiled yet."""
    # What is computed on the way to something else is neither written nor read (see
    # ``shardax.hlo.live_memory``).
    return float(sum(runs[name] * _of_computation(program.computations[name]) for name in runs))


def _of_computation(inside: Computation) -> int:
    buffers = Buffers(inside, {}, None)
    total = 0
    reduced: dict[str, int] = {}
    for each in inside.instructions:
        if each.opcode in _NAMES or not buffers.is_done(each):
            continue
        # Reductions of one array are mostly done together, as in a softmax: it is read once.
        read = reduced if each.opcode == "reduce" else {}
        for place, name in enumerate(each.operands if each.opcode != "constant" else ()):
            if place > 0 or each.opcode not in _UPDATES:
                _estimate_traffic_read(
                    inside, buffers, inside.by_name[name], _limit(each, place), read
                )
        written = each
        if each.opcode in _UPDATES:
            written = inside.by_name[each.operands[-1 if each.opcode == "scatter" else 1]]
        total += written.bytes + (sum(read.values()) if read is not reduced else 0)
    return total + sum(reduced.values())


def _limit(user: Instruction, place: int) -> int | None:
    """The most bytes that a user reads of an operand: of an array that it slices, the slice."""
    return user.bytes if user.opcode in _SLICES and place == 0 else None


def _estimate_traffic_read(
    inside: Computation,
    buffers: Buffers,
    each: Instruction,
    limit: int | None,
    read: dict[str, int],
) -> None:
    """Adds what is read for a value, by the name of what is in memory."""
    if each.opcode in _ESTIMATE_TRAFFIC_VIEWS:
        _estimate_traffic_read(inside, buffers, inside.by_name[each.operands[0]], limit, read)
    elif each.opcode in ("parameter", "get-tuple-element") or buffers.is_done(each):
        size = each.bytes if limit is None else min(limit, each.bytes)
        read[each.name] = max(size, read.get(each.name, 0))
    elif each.opcode not in ("constant", "tuple"):
        for place, name in enumerate(each.operands):
            own = _limit(each, place)
            least = own if limit is None else min(limit, own or limit)
            _estimate_traffic_read(inside, buffers, inside.by_name[name], least, read)


# --- Flops ---

_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")
_DIGITS = re.compile(r"\d+")
_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:gemm|matmul)")
_CUDNN = re.compile(r"__cudnn\$conv(?:BiasActivation)?(Forward|BackwardInput|BackwardFilter)")
_GEMM_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d", ]*)\]')
_DOTS = ("dot", "scaled-dot", "ragged-dot")


def own_flops(inside: Computation, each: Instruction) -> float:
    """Counts the operations of a matrix product or convolution."""
    if each.opcode in _DOTS:
        contracted = each.attribute("lhs_contracting_dims")
        if contracted is None:
            contracted = each.attribute("lhs_contracting_dimensions")
        return _dot(inside, each, contracted)
    if each.opcode == "convolution" or _cudnn(each):
        return _convolution(inside, each)
    if each.opcode == "custom-call" and is_gemm(each):
        found = _GEMM_CONTRACTED.search(each.attributes)
        return _dot(inside, each, found[1] if found else None)
    return 0.0


def is_counted(each: Instruction) -> bool:
    """Whether a custom call is a product or convolution that ``own_flops`` counts."""
    return is_gemm(each) or bool(_cudnn(each))


def is_gemm(each: Instruction) -> bool:
    """Whether a custom call is a matrix product of one of NVIDIA's libraries."""
    return bool(_GEMM.match(each.call_target))


def _cudnn(each: Instruction) -> str:
    """What convolution of NVIDIA's library a custom call is: Forward, BackwardInput, ..., or ""."""
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
    if each.opcode == "ragged-dot":
        return _ragged(inside, each, left, products)
    return 2.0 * each.shapes[0].size * products


def _ragged(inside: Computation, each: Instruction, left: ArrayShape, products: int) -> float:
    """A product of which each row meets one group's matrix, or each group sums its own rows."""
    ragged = {int(dim) for dim in _DIGITS.findall(each.attribute("lhs_ragged_dims") or "")}
    dims = {int(dim) for dim in _DIGITS.findall(each.attribute("lhs_contracting_dims") or "")}
    groups = _operand(inside, each, 2).size if len(each.operands) > 2 else 1
    times = 2.0 * each.shapes[0].size * products
    return times / groups if ragged & dims else times


@dataclass(frozen=True)
class _Window:
    """A window along one spatial dimension."""

    size: int = 1
    stride: int = 1
    low: int = 0
    input_dilation: int = 1
    window_dilation: int = 1

    def places(self, inputs: int, outputs: int) -> int:
        """How often a place of the window, over all outputs, meets an element of the input."""
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
    match _cudnn(each):  # labels and window are those of the forward convolution
        case "BackwardInput":
            left, out = out, left
        case "BackwardFilter":
            right, out = out, right
        case _:
            pass
    if labels is None or [len(text) for text in labels.groups()] != [
        len(shape.dims) for shape in (left, right, out)
    ]:
        raise _unread(each, f"its dim_labels are {each.attribute('dim_labels')!r}")
    dims = [
        dict(zip(text, shape.dims, strict=True))
        for text, shape in zip(labels.groups(), (left, right, out), strict=True)
    ]
    windows = _windows(each, len(left.dims) - 2)
    places = math.prod(
        window.places(dims[0][str(index)], dims[2][str(index)])
        for index, window in enumerate(windows)
    )
    return 2.0 * places * dims[2]["b"] * dims[2]["f"] * dims[1]["i"]


def _windows(each: Instruction, count: int) -> list[_Window]:
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
    return [_Window(*row) for row in zip(*columns, strict=True)]


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
