# SPDX-License-Identifier: Apache-2.0
"""Operations of matrix products and convolutions.

A product and the sum that takes it are two operations. TPU compilers write matrix products as
convolutions, in which a batch may stand as a spatial dimension with a window that meets one
element of each; so of a convolution only those places of the window are counted that meet an
element, as XLA's own cost analysis does, and not padding or the holes of a dilation.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shardax.core.errors import HloReadError
from shardax.hlo.program import ArrayShape, Computation, Instruction

_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")
_DIGITS = re.compile(r"\d+")
_GEMM = re.compile(r"__cublas\$(?:lt\$)?(?:gemm|matmul)")
_CUDNN = re.compile(r"__cudnn\$conv(?:BiasActivation)?(Forward|BackwardInput|BackwardFilter)")
_GEMM_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d", ]*)\]')
_DOTS = ("dot", "scaled-dot", "ragged-dot")


def own_flops(inside: Computation, each: Instruction) -> float:
    """Counts the operations of a matrix product or convolution.

    Args:
        inside: The computation that holds the instruction.
        each: Any instruction.

    Returns:
        Operations of one run; 0 of other instructions. What an instruction calls is not counted.

    Raises:
        HloReadError: If it is a product whose dimensions cannot be read.
    """
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
    return bool(_GEMM.match((each.attribute("custom_call_target") or "").strip('"')))


def _cudnn(each: Instruction) -> str:
    """What convolution of NVIDIA's library a custom call is: Forward, BackwardInput, ..., or ""."""
    found = _CUDNN.match((each.attribute("custom_call_target") or "").strip('"'))
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
