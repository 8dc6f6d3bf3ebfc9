# SPDX-License-Identifier: Apache-2.0
"""Targets: text and back, what exists, meshes over them, and the links that mesh axes use."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax import plan
from shardax.errors import TargetError
from shardax.plan.hardware.hardware import HARDWARE
from shardax.plan.hardware.targets import factorizations, nearest_topologies, topology_exists

FLAT = ["1x1", "2x2", "2x4", "4x2", "4x4", "4x8", "8x8", "8x16", "16x8", "16x16"]
SOLID = ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "8x8x8", "4x8x12", "16x16x16"]

slices = st.integers(1, 4).map(lambda count: f"{count}*" if count > 1 else "")
texts = st.one_of(
    st.integers(1, 64).map(lambda count: f"cpu:{count}"),
    st.builds("tpu:{}:{}{}".format, st.sampled_from(["v5e", "v6e"]), slices, st.sampled_from(FLAT)),
    st.builds(
        "tpu:{}:{}{}".format, st.sampled_from(["v4", "v5p", "v7x"]), slices, st.sampled_from(SOLID)
    ),
    st.builds(
        "gpu:{}:{}x{}{}".format,
        st.sampled_from(["a100-40", "a100-80", "h100", "h200", "b200"]),
        st.integers(1, 64),
        st.integers(1, 8),
        st.sampled_from(["", "@0.9", "@0.5"]),
    ),
)


# --- text -----------------------------------------------------------------------------------------


@given(text=texts)
def test_target_is_written_as_it_is_read(text: str) -> None:
    target = plan.Target.parse(text)
    assert target.text == str(target) == text
    assert plan.Target.parse(target) is target
    assert pickle.loads(pickle.dumps(target)) == target


@pytest.mark.parametrize(
    ("text", "devices", "gib"),
    [
        ("tpu:v5e:4x4", 16, 15.75),
        ("tpu:v5e:2*4x4", 32, 15.75),
        ("tpu:v5p:8x8x8", 512, 95.74),
        ("tpu:v7x:2x2x1", 8, 94.75),  # two devices a chip
        ("gpu:h100:8x8", 64, 0.75 * 84942979072 / 2**30),
        ("gpu:h100:8x8@0.9", 64, 0.9 * 84942979072 / 2**30),
    ],
)
def test_devices_and_memory_of_targets(text: str, devices: int, gib: float) -> None:
    target = plan.Target.parse(text)
    assert target.device_count == devices
    assert target.limit_bytes / 2**30 == pytest.approx(gib, abs=1e-8)


def test_cpu_devices_share_the_memory_of_this_machine() -> None:
    one, eight = plan.Target.parse("cpu:1"), plan.Target.parse("cpu:8")
    assert one.limit_bytes // 8 == eight.limit_bytes > 0


def test_machine_that_hides_its_memory_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf_names", {}, raising=False)
    memory = plan.find_hardware("cpu").memory_bytes
    assert plan.Target.parse("cpu:8").limit_bytes == memory // 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'tpu:v5e:4x4'"),
        ("v5e-256", "Targets are written like 'cpu:8'"),
        ("tp:v5e:4x4", "Did you mean 'tpu'?"),
        ("tpu:4x4", "Targets are written like"),
        ("tpu:v5:4x4", "tpu hardware is v4, v5e, v5p, v6e, v7x"),
        ("gpu:v5e:1x8", "gpu hardware is a100-40"),
        ("gpu:h10:1x8", "Did you mean 'h100'?"),
        ("tpu:v5e:4", "two sizes, such as 4x4"),
        ("tpu:v5p:4x4", "three sizes, such as 4x4x4"),
        ("gpu:h100:64", "nodes times GPUs of a node, such as 2x8"),
        ("gpu:h100:1x64", "a node of h100 has 8 GPUs, and the shape is nodes x GPUs: 8x8"),
        ("gpu:h100:2*8x8", "only tori have slices"),
        ("cpu:2x4", "a number of devices, such as 8"),
        ("tpu:v5e:0x4", "sizes are numbers from 1"),
        ("cpu:99999999", "a plan is for at most 8,192 CPU devices"),
        ("tpu:v5e:99999*16x16", "a plan is for at most 65,536 TPU devices"),
        ("tpu:v5p:999999999x4x4", "a plan is for at most 65,536 TPU devices"),
        ("gpu:h100:999999999x8", "a plan is for at most 65,536 GPU devices"),
        (f"cpu:{'9' * 5000}", "Targets are written like 'cpu:8'"),
        ("tpu:v5e:3x4", "of about its size are 4x4, 2x4"),
        ("tpu:v5e:32x32", "of about its size are 16x16"),
        ("tpu:v5p:4x4x6", "of about its size are 4x4x8, 4x4x4"),
        ("tpu:v5p:16x20x32", "no slice of this shape"),
        ("tpu:v5e:4x4@0.9", "a GPU's memory"),
        ("gpu:h100:8x8@2", "above 0 and at most 1"),
        ("gpu:h100:8x8@much", "'much' is no share"),
    ],
)
def test_invalid_target_error_suggests_valid_ones(text: str, words: str) -> None:
    with pytest.raises(TargetError) as caught:
        plan.Target.parse(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


def test_target_parse_refuses_what_is_no_text() -> None:
    with pytest.raises(TargetError, match="this is a list"):
        plan.Target.parse(["tpu:v5e:4x4"])  # pyright: ignore[reportArgumentType]


@given(
    name=st.sampled_from(["v4", "v5e", "v5p", "v6e", "v7x"]),
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
)
def test_shapes_that_errors_name_exist(name: str, sizes: list[int]) -> None:
    chip = HARDWARE[name]
    shape = tuple(sizes[: chip.torus_dimensions])
    near = nearest_topologies(chip, shape)
    assert len(near) == 4
    assert all(plan.Target.parse(f"tpu:{name}:{each}").slices == 1 for each in near)
    if topology_exists(chip, shape):
        assert math.prod(map(int, near[0].split("x"))) == math.prod(shape)


# --- meshes ---------------------------------------------------------------------------------------


@given(number=st.integers(1, 64), parts=st.integers(1, 3))
def test_factorizations_are_all_products(number: int, parts: int) -> None:
    found = factorizations(number, parts)
    assert len(set(found)) == len(found)
    assert all(math.prod(each) == number and len(each) == parts for each in found)
    divisors = sum(number % each == 0 for each in range(1, number + 1))
    assert parts != 2 or len(found) == divisors


def test_mesh_of_wrong_size_error_suggests_one() -> None:
    target = plan.Target.parse("tpu:v5e:4x4")
    with pytest.raises(TargetError, match=r"data=3, model=4 has 12.*has 16.*data=4, model=4"):
        target.check_mesh({"data": 3, "model": 4})


@pytest.mark.parametrize("sizes", [{}, {"data": 0}, {"data": 2.0}, {"data": True}])
def test_check_mesh_refuses_what_is_no_mesh(sizes: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match=r"A mesh is sizes by axis, such as \{'data': 16\}"):
        plan.Target.parse("tpu:v5e:4x4").check_mesh(sizes)


def test_slices_are_split_over_the_leading_axes() -> None:
    target = plan.Target.parse("tpu:v5e:2*4x4")
    apart = target.links({"slice": 2, "data": 4, "model": 4})
    assert {name: (link.outer, link.inner) for name, link in apart.items()} == {
        "slice": (2, 1),
        "data": (1, 4),
        "model": (1, 4),
    }
    across = target.links({"data": 8, "model": 4})
    assert [(link.outer, link.inner) for link in across.values()] == [(2, 4), (1, 4)]


def test_mesh_not_divisible_by_slices_is_refused() -> None:
    target = plan.Target.parse("tpu:v5e:3*4x4")
    with pytest.raises(TargetError, match=r"3 slices.*\{'slice': 3, \.\.\.\}"):
        target.check_mesh({"data": 16, "model": 3})


@pytest.mark.parametrize("text", ["tpu:v5e:2*4x4", "tpu:v7x:2x2x2", "gpu:h100:4x8", "cpu:8"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_law_arrangement_has_each_device_once_slices_contiguous(text: str, axes: int) -> None:
    target = plan.Target.parse(text)
    sizes = {f"axis_{i}": 2 for i in range(axes - 1)} | {"last": target.device_count >> (axes - 1)}
    places = target.arrangement(sizes).places
    assert len(set(places)) == len(places) == target.device_count
    assert [place[0] for place in places] == sorted(place[0] for place in places)


# --- links ----------------------------------------------------------------------------------------


def _bandwidths(text: str, **sizes: int) -> dict[str, float]:
    """Bytes a second along each axis, in 10^9."""
    links = plan.Target.parse(text).links(sizes)
    return {name: link.bandwidth / 1e9 for name, link in links.items()}


def test_line_uses_one_direction_and_ring_both() -> None:
    """v5e has 45 GB/s a link and direction, and wraps round at 16 only."""
    assert _bandwidths("tpu:v5e:4x4", data=4, model=4) == {"data": 45, "model": 45}
    assert _bandwidths("tpu:v5e:16x16", data=16, model=16) == {"data": 90, "model": 90}


def test_axis_over_several_dimensions_uses_all_their_links() -> None:
    assert _bandwidths("tpu:v5e:16x16", data=256) == {"data": 180}
    assert _bandwidths("tpu:v5p:8x8x8", data=64, model=8) == {"data": 360, "model": 180}


def test_axes_that_share_a_dimension_share_its_links() -> None:
    """Of 16x16 as 64 and 4, the 4 are a line of neighbours, the 64 a whole ring and part of one.

    In the dimension that they share, ``data`` has rings of every fourth device, four on each link.
    """
    assert _bandwidths("tpu:v5e:16x16", data=64, model=4) == {"data": 90 / 4 + 90, "model": 45}


def test_two_cores_of_chip_have_own_link() -> None:
    links = plan.Target.parse("tpu:v7x:4x4x4").links({"data": 64, "core": 2})
    assert (links["core"].bandwidth, links["core"].inner) == (6e11, 2)
    assert links["data"].bandwidth == 3 * 2 * 5e10


def test_groups_of_whole_chips_have_all_links() -> None:
    whole = plan.Target.parse("tpu:v7x:4x4x4").route({"data": 64, "core": 2}, ["data", "core"])
    assert whole.bandwidth == 3 * 2 * 1e11


def test_gpus_use_switch_within_node_network_between() -> None:
    links = plan.Target.parse("gpu:h100:8x8").links({"data": 16, "model": 4})
    data, model = links["data"], links["model"]
    assert (model.inner, model.outer, model.bandwidth, model.crosses) == (4, 1, 4.5e11, False)
    assert (data.inner, data.outer, data.network_bandwidth, data.crosses) == (2, 8, 5e10, True)


def test_target_of_one_device_has_no_links() -> None:
    alone = plan.Target.parse("tpu:v5e:1x1").links({"data": 1})["data"]
    assert (alone.group_size, alone.bandwidth, alone.dimensions) == (1, 0, ())


def test_unknown_mesh_axis_is_refused_with_suggestion() -> None:
    with pytest.raises(TargetError, match=r"no axis 'modle'. Did you mean 'model'"):
        plan.Target.parse("tpu:v5e:4x4").route({"data": 4, "model": 4}, ["modle"])


@given(
    text=st.sampled_from(["tpu:v5e:4x4", "tpu:v5e:16x16", "tpu:v5p:4x4x8", "gpu:h100:4x8"]),
    data=st.data(),
)
def test_law_no_group_exceeds_a_devices_link_bandwidth(text: str, data: st.DataObject) -> None:
    target = plan.Target.parse(text)
    sizes = data.draw(st.sampled_from(factorizations(target.device_count, 3)))
    mesh = dict(zip("abc", sizes, strict=True))
    chip = target.hardware
    most = chip.link_bandwidth * max(1, 2 * chip.torus_dimensions)
    for name, link in target.links(mesh).items():
        assert link.group_size == mesh[name]
        assert link.bandwidth <= most
        assert (link.bandwidth > 0) == (link.inner > 1)
