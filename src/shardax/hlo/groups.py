# SPDX-License-Identifier: Apache-2.0
"""Which devices a collective connects, and along which mesh axes.

A *group* is the numbers of devices that exchange data with each other; a device's number is its
position in the mesh, row-major. XLA prints groups in four forms: as lists, as the numbers from 0
on reshaped and transposed (*iota*), as axes of a mesh of its own (which is not the user's), and,
of a permutation, as pairs of a source and a target.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardax.core.errors import HloReadError
from shardax.hlo.program import Instruction

_LISTS = re.compile(r"\{(?:\{[\d, ]*\}(?:, *)?)*\}")
_LIST = re.compile(r"\{([\d, ]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, *device_ids=\((.*)\))? *\{([^}]*)\}")
_AXIS = re.compile(r"'?([^'=:,]+)'?=(\d+)")
_REFERENCE = re.compile(r"'?([^':,(]+)'?(?::\((\d+)\)(\d+))?")

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Groups:
    """Groups of one collective.

    Attributes:
        devices: Numbers of the devices, a row for each group; of groups of different sizes, and of
            permutations, -1 fills the row.
        pairs: Of a permutation its pairs of a source and a target, else None.
    """

    devices: Array
    pairs: Array | None = None

    @property
    def size(self) -> int:
        """Number of devices of the largest group."""
        return int((self.devices >= 0).sum(axis=1).max(initial=0))

    def lists(self) -> list[list[int]]:
        """Returns the groups as lists of device numbers."""
        return [[device for device in group if device >= 0] for group in self.devices.tolist()]

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes along which devices of one group differ, in the mesh's order."""
        shape = tuple(mesh.values())
        links = self.devices if self.pairs is None else self.pairs
        first = np.broadcast_to(links[:, :1], links.shape)
        places = np.unravel_index(np.where(links < 0, first, links), shape)
        return tuple(
            name
            for name, place in zip(mesh, places, strict=True)
            if bool((place != place[:, :1]).any())
        )

    def crosses(self, block: int) -> bool:
        """Whether a group holds devices of several blocks of so many consecutive devices."""
        links = self.devices if self.pairs is None else self.pairs
        blocks = np.where(links < 0, links[:, :1], links) // block
        return bool((blocks != blocks[:, :1]).any())


def groups_of(instruction: Instruction, devices: int) -> Groups:
    """Reads the groups of a collective.

    Args:
        instruction: The collective.
        devices: How many devices run the program.

    Returns:
        Its groups; all devices are one if it names none.

    Raises:
        HloReadError: If the groups cannot be read, or hold devices that do not run the program.

    Example:
        >>> attributes = "replica_groups=[2,4]<=[4,2]T(1,0)"
        >>> groups_of(Instruction("a", "all-reduce", (), (), attributes), 8).lists()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    pairs = instruction.attribute("source_target_pairs")
    if pairs is not None:
        return _permutation(_lists(pairs, instruction), instruction, devices)
    text = _text(instruction)
    if text is None or text in ("{}", "{{}}"):
        return Groups(np.arange(devices, dtype=np.int64)[None])
    for read in (_iota, _mesh):
        found = read(text)
        if found is not None:
            return Groups(_checked(found, instruction, devices))
    return Groups(_checked(_rows(_lists(text, instruction)), instruction, devices))


def _text(instruction: Instruction) -> str | None:
    """The text of ``replica_groups``, which in one form holds a comma outside brackets."""
    start = instruction.attributes.find("replica_groups=mesh[")
    if start < 0:
        return instruction.attribute("replica_groups")
    start += len("replica_groups=")
    found = _MESH.match(instruction.attributes, start)
    return found[0] if found else instruction.attributes[start:]


def _lists(text: str, instruction: Instruction) -> list[list[int]]:
    if not _LISTS.fullmatch(text):
        raise _unread(instruction, text)
    return [_numbers(inner) for inner in _LIST.findall(text[1:-1])]


def _iota(text: str) -> Array | None:
    found = _IOTA.fullmatch(text)
    if found is None:
        return None
    shape, reshaped = _numbers(found[1]), _numbers(found[2])
    if math.prod(shape) != math.prod(reshaped):
        return None
    numbers = np.arange(math.prod(reshaped), dtype=np.int64).reshape(reshaped)
    if found[3] is not None:
        order = _numbers(found[3])
        if sorted(order) != list(range(len(reshaped))):
            return None
        numbers = numbers.transpose(order)
    return numbers.reshape(shape[0], -1) if len(shape) == 2 else numbers.reshape(1, -1)


def _mesh(text: str) -> Array | None:
    """Groups along axes, or parts of axes, of the mesh that the text describes."""
    found = _MESH.fullmatch(text)
    if found is None:
        return None
    sizes = {name: int(size) for name, size in _AXIS.findall(found[1])}
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    references = [
        (name.strip(), int(before or 1), int(size) if size else sizes.get(name.strip(), 0))
        for name, before, size in _REFERENCE.findall(found[3])
        if name.strip()
    ]
    for name, before, size in references:
        if name not in sizes or not size or sizes[name] % (before * size):
            return None
        cuts[name] |= {before, before * size}
    for name in sizes:  # each axis becomes the parts between its cuts
        ordered = sorted(cuts[name])
        for before, after in itertools.pairwise(ordered):
            if after % before:
                return None
            place[name, before] = len(shape)
            shape.append(after // before)
    numbers = _mesh_devices(found[2], math.prod(sizes.values()))
    if numbers is None:
        return None
    grouped = [
        index
        for name, before, size in references
        for (other, start), index in sorted(place.items())
        if other == name and before <= start < before * size
    ]
    rest = [index for index in range(len(shape)) if index not in grouped]
    size = math.prod(shape[index] for index in grouped)
    return numbers.reshape(shape).transpose([*rest, *grouped]).reshape(-1, size)


def _mesh_devices(text: str | None, count: int) -> Array | None:
    """Devices of the mesh in a form of XLA's, in order."""
    if text is None:
        return np.arange(count, dtype=np.int64)
    found = _IOTA.fullmatch(text)
    if found is None and re.fullmatch(r"\[[\d,]+\](?:T\([\d,]+\))?", text):
        text = f"[{count}]<={text}"
    iota = _iota(text)
    numbers = iota.reshape(-1) if iota is not None else np.array(_numbers(text), np.int64)
    return numbers if sorted(numbers.tolist()) == list(range(count)) else None


def _permutation(pairs: list[list[int]], instruction: Instruction, devices: int) -> Groups:
    if any(len(pair) != 2 for pair in pairs):
        raise _unread(instruction, str(pairs))
    array = _checked(np.array(pairs, np.int64).reshape(-1, 2), instruction, devices)
    array = array[array[:, 0] != array[:, 1]]
    return Groups(_rows(_linked(array.tolist())), array)


def _linked(pairs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sets of devices that a chain of pairs connects."""
    group: dict[int, list[int]] = {}
    for source, target in pairs:
        left, right = group.setdefault(source, [source]), group.setdefault(target, [target])
        if left is right:
            continue
        if len(left) < len(right):
            left, right = right, left
        left.extend(right)
        for device in right:
            group[device] = left
    return [sorted(each) for each in {id(each): each for each in group.values()}.values()]


def _rows(lists: Sequence[Sequence[int]]) -> Array:
    width = max(map(len, lists), default=0)
    rows = [[*each, *[-1] * (width - len(each))] for each in lists]
    return np.array(rows, np.int64).reshape(len(rows), width)


def _checked(array: Array, instruction: Instruction, devices: int) -> Array:
    if array.size and int(array.max()) >= devices:
        raise HloReadError(
            f"{instruction.opcode} {instruction.name!r} connects device {int(array.max())}, but "
            f"the program runs on {devices} devices (numbers 0 to {devices - 1}). Pass the mesh "
            "that it was compiled for."
        )
    return array


def _numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]


def _unread(instruction: Instruction, text: str) -> HloReadError:
    shown = text if len(text) <= 100 else f"{text[:97]}..."
    return HloReadError(
        f"The groups of {instruction.opcode} {instruction.name!r} cannot be read: {shown!r}. The "
        "forms known are {{0,1},{2,3}}, [4,2]<=[2,4]T(1,0) and mesh['a'=2,'b'=4] {'a'}; a newer "
        "XLA may print another."
    )
