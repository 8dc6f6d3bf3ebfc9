# SPDX-License-Identifier: Apache-2.0
"""Collectives between slices of TPUs, which go through the host.

A *slice* is devices that have links of their own; several slices are joined by the network of the
data centre. The program of one slice says of such a collective its type, and its *target*: either
slices, numbered from 1, and the numbers of devices in each (``{1,2}x{0:3}``), of which those with
the same number exchange data, or groups of device ids (``{{100000,200000}}``), or pairs of ids
(``{{100000->200000}}``). An id is the slice's number times 100,000 and the device's in its slice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from shardax.core.errors import HloReadError
from shardax.hlo.groups import Groups, groups_of
from shardax.hlo.program import Instruction

_TYPE = re.compile(r'_xla_megascale_transfer_type="?(\w+)"?')
_TARGET = re.compile(r'_xla_megascale_target=(?:"([^"]*)"|(\{\{.*?\}\}))')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="?([^",}]+)"?')
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")
_SLICE = 100_000
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "RAGGED_ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


def is_between_slices(each: Instruction) -> bool:
    """Whether an instruction sends data to other slices."""
    return each.opcode == "send" and "_xla_megascale_" in each.attributes


def rendezvous(each: Instruction) -> str:
    """Returns the name that a send and a receive through the host have in common, or ""."""
    found = _RENDEZVOUS.search(each.attributes)
    return found[1] if found else ""


def slice_kind(each: Instruction) -> str:
    """Returns the kind of a collective between slices.

    Raises:
        HloReadError: If it is not known.
    """
    found = _TYPE.search(each.attributes)
    if found is None or found[1] not in _KINDS:
        raise HloReadError(
            f"{each.opcode} {each.name!r} exchanges data between slices as "
            f"{found[1] if found else 'nothing known'!r}; known are {', '.join(_KINDS)}."
        )
    return _KINDS[found[1]]


def slice_groups(
    each: Instruction, devices: int, slices: int, device_ids: Sequence[int] = ()
) -> Groups:
    """Reads the groups of a collective between slices.

    Args:
        each: The ``send`` that begins it.
        devices: How many devices the mesh has.
        slices: Of how many slices it is.
        device_ids: Ids of the mesh's devices, in its order; without them, a device's number in its
            slice counts as its position in the slice's part of the mesh.

    Returns:
        Its groups, as positions in the mesh.

    Raises:
        HloReadError: If they cannot be read.
    """
    found = _TARGET.search(each.attributes)
    text = (found[1] or found[2]) if found else ""
    block = devices // slices
    products = _PRODUCT.findall(text)
    if products and _PRODUCT.sub("", text).strip(", ") == "":
        ids = [
            [number * _SLICE + device for number in _range(numbers)]
            for numbers, members in products
            for device in _range(members)
        ]
    else:
        ids = [
            [int(number) for number in re.findall(r"\d+", group)]
            for group in re.findall(r"\{([\d,\->]+)\}", text)
        ]
    positions = {each: position for position, each in enumerate(device_ids)} or {
        (number + 1) * _SLICE + device: number * block + device
        for number in range(slices)
        for device in range(block)
    }
    groups = [[positions.get(number, -1) for number in group] for group in ids]
    if not groups or any(position < 0 for group in groups for position in group):
        raise HloReadError(
            f"The target of {each.opcode} {each.name!r}, which exchanges data between slices, "
            f"cannot be read: {text!r}. The mesh has {slices} slices of {block} devices."
        )
    key = "source_target_pairs" if "->" in text else "replica_groups"
    return groups_of(_named(key, groups, each), devices)


def _range(text: str) -> list[int]:
    """Numbers of a list in which ``0:3`` stands for 0 to 3."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers.extend(np.arange(int(first), int(last or first) + 1).tolist())
    return numbers


def _named(key: str, groups: list[list[int]], each: Instruction) -> Instruction:
    text = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    return Instruction(each.name, each.opcode, (), (), f"{key}={{{text}}}")
