# SPDX-License-Identifier: Apache-2.0
"""Groups of devices: the forms that XLA prints, and the mesh axes that they run along."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.errors import HloReadError
from shardax.hlo.groups import Groups, groups_of
from shardax.hlo.program import Instruction


def groups(attributes: str, devices: int = 8) -> Groups:
    return groups_of(Instruction("all-reduce.1", "all-reduce", (), (), attributes), devices)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0, 2}, {1, 3}}", [[0, 2], [1, 3]]),
        ("{{7}}", [[7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh[a=2,b=4] {a,b}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[3, 1], [2, 0]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_groups_are_read_in_each_form(text: str, expected: list[list[int]]) -> None:
    read = groups(f"channel_id=1, replica_groups={text}, use_global_device_ids=true")
    assert sorted(map(sorted, read.lists())) == sorted(map(sorted, expected))
    assert read.size == max(map(len, expected))


def test_collective_without_groups_connects_all_devices() -> None:
    assert groups("channel_id=1").lists() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_groups_of_different_sizes_count_the_largest() -> None:
    read = groups("replica_groups={{0,1,2},{3,4},{5}}")
    assert read.lists() == [[0, 1, 2], [3, 4], [5]]
    assert read.size == 3


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SIZES, st.data())
def test_group_notations_along_mesh_axes_agree(sizes: list[int], data: st.DataObject):
    """Groups along a set of axes, printed in each form, are read alike and found along them."""
    names = [f"axis_{index}" for index in range(len(sizes))]
    along = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, max_size=4))
    rest = [index for index in range(len(sizes)) if index not in along]
    count, width = math.prod(sizes), math.prod(sizes[index] for index in along)
    order = [*rest, *along]
    numbers = np.arange(count).reshape(sizes).transpose(order).reshape(-1, width).tolist()
    lists = ",".join("{" + ",".join(map(str, row)) + "}" for row in numbers)
    axes = ",".join(f"'{names[index]}'" for index in along)
    mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    iota = (
        f"[{count // width},{width}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    )
    for text in (f"{{{lists}}}", iota, f"mesh[{mesh}] {{{axes}}}"):
        read = groups(f"replica_groups={text}, dimensions={{0}}", count)
        assert sorted(map(sorted, read.lists())) == sorted(map(sorted, numbers))
        expected = tuple(names[index] for index in sorted(along) if sizes[index] > 1)
        assert read.axes(dict(zip(names, sizes, strict=True))) == expected


def test_axes_are_those_along_which_members_differ() -> None:
    mesh = {"data": 2, "model": 4}
    assert groups("replica_groups={{0,1},{2,3},{4,5},{6,7}}").axes(mesh) == ("model",)  # a part
    assert groups("replica_groups={{0,5},{1,4},{2,7},{3,6}}").axes(mesh) == ("data", "model")
    assert groups("replica_groups={{0},{1},{2},{3}}").axes(mesh) == ()


def test_permutation_axes_are_those_its_pairs_cross() -> None:
    mesh = {"data": 2, "model": 4}
    ring = groups("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}")
    assert (ring.size, ring.lists(), ring.axes(mesh)) == (
        4,
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        ("model",),
    )
    swap = groups("source_target_pairs={{0,4},{4,0},{1,1},{2,2}}")
    assert (swap.size, swap.lists(), swap.axes(mesh)) == (2, [[0, 4]], ("data",))
    # Device 3 and 4 are neighbours in number but not in the mesh.
    assert groups("source_target_pairs={{3,4}}").axes(mesh) == ("data", "model")
    nothing = groups("source_target_pairs={{0,0}}")
    assert (nothing.size, nothing.axes(mesh)) == (0, ())


def test_groups_cross_blocks_of_consecutive_devices() -> None:
    assert groups("replica_groups=[2,4]<=[8]").crosses(4) is False
    assert groups("replica_groups=[4,2]<=[2,4]T(1,0)").crosses(4) is True
    assert groups("source_target_pairs={{3,4}}").crosses(4) is True
    assert groups("source_target_pairs={{2,3},{4,5}}").crosses(4) is False


@pytest.mark.parametrize(
    "text",
    [
        "{{0,1},{2,3}",
        "{{0,x}}",
        "0,1",
        "[4,2]<=[2,3]",
        "[4,2]<=[2,4]T(1,1)",
        "mesh['a'=2,'b'=4] {'c'}",
        "mesh['a'=2,'b'=4] {'b':(3)2}",
        "mesh['a'=2,'b'=2], device_ids=(3,1,2,7) {'b'}",
        "mesh['a'=8]",
        "some_new_form<8>",
    ],
)
def test_unreadable_groups_error_names_the_collective(text: str) -> None:
    with pytest.raises(HloReadError, match=r"all-reduce 'all-reduce\.1' cannot be read"):
        groups(f"replica_groups={text}")


def test_devices_beyond_the_mesh_are_an_error() -> None:
    with pytest.raises(HloReadError, match="connects device 7, but the program runs on 4 devices"):
        groups("replica_groups=[2,4]<=[8]", 4)
    with pytest.raises(HloReadError, match="device 9"):
        groups("source_target_pairs={{9,0}}")


def test_groups_of_8192_devices_are_read_quickly() -> None:
    pairs = ",".join(f"{{{i},{(i + 64) % 8192}}}" for i in range(8192))
    lists = ",".join("{" + ",".join(map(str, range(start, 8192, 64))) + "}" for start in range(64))
    start = time.process_time()
    read = [
        groups(text, 8192)
        for text in (
            "replica_groups=[64,128]<=[128,64]T(1,0)",
            "replica_groups=mesh['x'=128,'y'=64] {'x'}",
            f"replica_groups={{{lists}}}",
            f"source_target_pairs={{{pairs}}}",
        )
    ]
    mesh = {"data": 128, "model": 64}
    assert [(each.size, each.axes(mesh)) for each in read] == list(
        itertools.repeat((128, ("data",)), 4)
    )
    assert time.process_time() - start < 2.0
