# SPDX-License-Identifier: Apache-2.0
"""Groups of the devices that exchange data in a collective.

A *group* is the numbers of devices that exchange data; a device's number is its position in the
mesh, row-major. XLA prints groups as lists, as the numbers from 0 on reshaped and transposed
(*iota*), as axes of a mesh of its own (which is not the user's), and, of a permutation, as pairs of
a source and a target.

A *slice* is TPUs with links of their own; several are joined by the network of the data centre, to
which programs send through the host. Such a send has a *target*: slices, numbered from 1, and the
numbers of devices in each (``{1,2}x{0:3}``), of which those with the same number exchange data; or
groups of device ids (``{{100000,200000}}``), or pairs (``{{100000->200000}}``). An id is the
slice's number times 100,000 and the device's in it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardax.hlo import errors
from shardax.hlo.program import Instruction

Array = np.ndarray[Any, np.dtype[np.int64]]

_LISTS = re.compile(r"\{(?:\{[\d, ]*\}(?:, *)?)*\}")
_LIST = re.compile(r"\{([\d, ]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_IOTA_OF_MESH = re.compile(r"\[[\d,]+\](?:T\([\d,]+\))?")  # the first part is its size
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, *device_ids=\((.*)\))? *\{([^}]*)\}")
_AXIS = re.compile(r"'?([^'=:,]+)'?=(\d+)")
_REFERENCE = re.compile(r"'?([^':,(]+)'?(?::\((\d+)\)(\d+))?")

_TARGET = re.compile(r'_xla_megascale_target=(?:"([^"]*)"|(\{\{.*?\}\}))')
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")
_IDS = re.compile(r"\{([\d,\->]+)\}")
_SLICE = 100_000


@dataclass(frozen=True)
class Groups:
    """Groups of one collective."""

    # numbers of the devices, a row for each group; of groups of different sizes, and of
    # permutations, -1 fills the row
    devices: Array
    pairs: Array | None = None  # of a permutation its pairs of a source and a target, else None

    @property
    def size(self) -> int:
        """Number of devices of the largest group."""
        return int((self.devices >= 0).sum(axis=1).max(initial=0))

    def lists(self) -> list[list[int]]:
        """Returns the groups as lists of device numbers."""
        return [[device for device in group if device >= 0] for group in self.devices.tolist()]

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes of groups, in order."""
        coordinates = np.unravel_index(self._links(), tuple(mesh.values()))
        by_axis = zip(mesh, coordinates, strict=True)
        return tuple(axis for axis, numbers in by_axis if _differ(numbers))

    def crosses(self, block: int) -> bool:
        """Whether a group holds devices of several blocks."""
        return _differ(self._links() // block)

    def _links(self) -> Array:
        """Rows of devices in exchange, filled up with their first."""
        links = self.devices if self.pairs is None else self.pairs
        return np.where(links < 0, links[:, :1], links)


def _differ(rows: Array) -> bool:
    """Whether a row holds different numbers."""
    return bool((rows != rows[:, :1]).any())


def groups_of(op: Instruction, devices: int) -> Groups:
    """Reads the groups of a collective; by default of all devices."""
    pairs = op.attribute("source_target_pairs")
    if pairs is not None:
        return read_pairs(pairs, op, devices)

    text = op.attribute("replica_groups")
    if text is not None and text.startswith("mesh["):  # this form holds a comma outside brackets
        text = op.attributes.partition("replica_groups=")[2]
        match = _MESH.match(text)
        text = match[0] if match else text
    if text is None or text in ("{}", "{{}}"):
        return Groups(np.arange(devices, dtype=np.int64)[None])

    array = _iota(text)
    if array is None:
        array = _mesh(text)
    if array is None:
        array = _rows(_lists(text, op))
    return Groups(_checked(array, op, devices))


def read_pairs(text: str, op: Instruction, devices: int) -> Groups:
    """Reads the groups of a permutation from its pairs of a source and a target."""
    return _permutation(_lists(text, op), op, devices)


def slice_groups_of(
    op: Instruction, devices: int, slices: int, device_ids: Sequence[int] = ()
) -> Groups:
    """Reads the groups of a send between slices, as mesh positions."""
    match = _TARGET.search(op.attributes)
    text = (match[1] or match[2]) if match else ""
    products = _PRODUCT.findall(text)
    if products and not _PRODUCT.sub("", text).strip(", "):
        ids = [
            [number * _SLICE + device for number in _range(numbers)]
            for numbers, members in products
            for device in _range(members)
        ]
    else:
        ids = [_numbers(group) for group in _IDS.findall(text)]

    # Without ids, a device's number in its slice is its position in the slice's part of the mesh.
    block = devices // slices
    positions = {device_id: position for position, device_id in enumerate(device_ids)}
    if not device_ids:
        for position in range(slices * block):
            number, device = divmod(position, block)
            positions[(number + 1) * _SLICE + device] = position
    groups = [[positions.get(device_id, -1) for device_id in group] for group in ids]

    if not groups or any(position < 0 for group in groups for position in group):
        raise errors.unread_slices(op, text, slices, block)
    if "->" in text:
        return _permutation(groups, op, devices)
    return Groups(_checked(_rows(groups), op, devices))


def _range(text: str) -> list[int]:
    """Numbers of a list with ranges, ``0:3`` for 0 to 3."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _lists(text: str, op: Instruction) -> list[list[int]]:
    if not _LISTS.fullmatch(text):
        raise errors.unread_groups(op, text)
    return [_numbers(inner) for inner in _LIST.findall(text[1:-1])]


def _iota(text: str) -> Array | None:
    """Groups of the numbers from 0 on, reshaped and transposed; None if these do not fit."""
    match = _IOTA.fullmatch(text)
    if match is None:
        return None
    shape, reshaped = _numbers(match[1]), _numbers(match[2])
    if math.prod(shape) != math.prod(reshaped):
        return None

    numbers = np.arange(math.prod(reshaped), dtype=np.int64).reshape(reshaped)
    if match[3] is not None:
        order = _numbers(match[3])
        if sorted(order) != list(range(len(reshaped))):
            return None
        numbers = numbers.transpose(order)
    return numbers.reshape(shape[0] if len(shape) == 2 else 1, -1)


def _mesh(text: str) -> Array | None:
    """Groups along axes, or parts of axes, of a printed mesh; None if these do not fit."""
    match = _MESH.fullmatch(text)
    if match is None:
        return None
    sizes = {name: int(size) for name, size in _AXIS.findall(match[1])}

    # ``'a':(2)4`` is the part of an axis between 2 and 8, where numbers up to its size are cut.
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    parts: list[tuple[str, int, int]] = []
    for text_name, divisor_text, size in _REFERENCE.findall(match[3]):
        name = text_name.strip()
        if not name:
            continue
        start = int(divisor_text or 1)
        end = start * (int(size) if size else sizes.get(name, 0))
        if name not in sizes or not end or sizes[name] % end:
            return None
        cuts[name] |= {start, end}
        parts.append((name, start, end))

    # Each axis becomes as many dimensions as it has parts between its cuts.
    shape: list[int] = []
    dimensions: dict[tuple[str, int], int] = {}
    for name in sizes:
        for inner, outer in itertools.pairwise(sorted(cuts[name])):
            if outer % inner:
                return None
            dimensions[name, inner] = len(shape)
            shape.append(outer // inner)

    devices = _mesh_devices(match[2], math.prod(shape))
    if devices is None:
        return None
    grouped = [
        dimension
        for name, start, end in parts
        for (axis, cut), dimension in sorted(dimensions.items())
        if axis == name and start <= cut < end
    ]
    others = [dimension for dimension in range(len(shape)) if dimension not in grouped]
    size = math.prod(shape[dimension] for dimension in grouped)
    return devices.reshape(shape).transpose([*others, *grouped]).reshape(-1, size)


def _mesh_devices(text: str | None, count: int) -> Array | None:
    """Devices of the mesh in a form of XLA's, in order; None if these are not its devices."""
    if text is None:
        return np.arange(count, dtype=np.int64)
    if _IOTA_OF_MESH.fullmatch(text):
        text = f"[{count}]<={text}"
    iota = _iota(text)
    numbers = np.array(_numbers(text), np.int64) if iota is None else iota.reshape(-1)
    return numbers if sorted(numbers.tolist()) == list(range(count)) else None


def _permutation(lists: Sequence[Sequence[int]], op: Instruction, devices: int) -> Groups:
    """Returns the groups that chains of pairs connect."""
    if any(len(pair) != 2 for pair in lists):
        raise errors.unread_groups(op, str(lists))
    pairs = _checked(np.array(lists, np.int64).reshape(-1, 2), op, devices)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]

    # The smaller of two groups goes into the larger, so that long chains take no long time.
    group_of: dict[int, list[int]] = {}
    for source, target in pairs.tolist():
        left = group_of.setdefault(source, [source])
        right = group_of.setdefault(target, [target])
        small, large = sorted((left, right), key=len)
        if small is not large:
            large.extend(small)
            group_of.update(dict.fromkeys(small, large))
    groups = {id(group): sorted(group) for group in group_of.values()}
    return Groups(_rows(groups.values()), pairs)


def _rows(lists: Collection[Sequence[int]]) -> Array:
    """Returns lists as rows, filled up with -1."""
    width = max(map(len, lists), default=0)
    rows = [[*numbers, *[-1] * (width - len(numbers))] for numbers in lists]
    return np.array(rows, np.int64).reshape(len(rows), width)


def _checked(array: Array, op: Instruction, devices: int) -> Array:
    if array.size and int(array.max()) >= devices:
        raise errors.device_beyond_mesh(op, int(array.max()), devices)
    return array
