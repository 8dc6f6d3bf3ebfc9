# SPDX-License-Identifier: Apache-2.0
"""Where each device slices an array: offsets that a program computes from the device's number.

A program is the same for all devices, so a device finds the part of an array that is its own by its
number (*partition id*), by arithmetic on it or in a table.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardax.hlo.estimate_graph import Graph, Groups
from shardax.hlo.program import Instruction

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_NUMBER = re.compile(r"-?\d+|true|false")
_ARITHMETIC = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
}


def scattered_dimension(graph: Graph, cut: Instruction, groups: Groups) -> int | None:
    """Finds the dimension along which the devices of every group share an array out.

    Args:
        graph: The computation.
        cut: A dynamic slice in it.
        groups: Numbers of the devices of each group, which all hold the same array.

    Returns:
        The dimension, if each device of a group keeps another of as many equal parts as the group
        has devices, and nothing else is cut; else None.
    """
    array, *starts = graph.operands(cut)
    whole, part = array.shapes[0].dims, cut.shapes[0].dims
    dimensions = [d for d, (all_, some) in enumerate(zip(whole, part, strict=True)) if all_ != some]
    size = len(groups[0])
    if len(dimensions) != 1 or any(len(group) != size for group in groups):
        return None
    (dimension,) = dimensions
    if part[dimension] * size != whole[dimension]:
        return None
    devices = np.arange(graph.device_count)
    offsets = _values(graph, starts[dimension], devices)
    if offsets is None:
        return None
    expected = np.arange(size) * part[dimension]
    parts = np.sort(np.broadcast_to(offsets, devices.shape)[np.array(groups)], axis=1)
    return dimension if (parts == expected).all() else None


def is_cut_alike(graph: Graph, cut: Instruction, groups: Groups) -> bool:
    """Whether the devices of every group keep the same part of an array.

    Args:
        graph: The computation.
        cut: A dynamic slice in it.
        groups: Numbers of the devices of each group.
    """
    devices = np.arange(graph.device_count)
    for start in graph.operands(cut)[1:]:
        offsets = _values(graph, start, devices)
        if offsets is None:
            return False
        everywhere = np.broadcast_to(offsets, devices.shape)
        if any(len(set(everywhere[list(group)].tolist())) > 1 for group in groups):
            return False
    return True


def _values(graph: Graph, scalar: Instruction, devices: Numbers) -> Numbers | None:
    """The value of an integer on each device, as far as it depends on the device's number alone."""
    if scalar.opcode == "partition-id":
        return devices
    if scalar.opcode == "constant":
        numbers = _numbers(scalar)
        return np.array(numbers[0]) if numbers and len(numbers) == 1 else None
    operands = graph.operands(scalar)
    if scalar.opcode == "dynamic-slice" and operands[0].opcode == "constant" and len(operands) == 2:
        table, place = _numbers(operands[0]), _values(graph, operands[1], devices)
        if table is None or place is None:
            return None
        return np.array(table)[np.clip(place, 0, len(table) - 1)]
    values = [found for each in operands if (found := _values(graph, each, devices)) is not None]
    if not values or len(values) < len(operands):
        return None
    return _arithmetic(scalar.opcode, values)


def _arithmetic(opcode: str, values: list[Numbers]) -> Numbers | None:
    if opcode in ("reshape", "convert", "copy", "bitcast"):
        return values[0]
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](*values)
    if opcode in ("divide", "remainder") and np.all(values[1] != 0):
        # Of numbers that are not negative, as these are, HLO's are those of Python.
        return (np.floor_divide if opcode == "divide" else np.mod)(*values)
    if opcode == "clamp":
        least, value, most = values
        return np.clip(value, least, most)
    return None


def _numbers(constant: Instruction) -> list[int] | None:
    """The integers of a constant of at most one dimension; None if it is not one of these."""
    (shape,) = constant.shapes
    if len(shape.dims) > 1 or "..." in constant.literal or shape.dtype[0] not in "su":
        return None
    return [int(each) for each in _NUMBER.findall(constant.literal)]
