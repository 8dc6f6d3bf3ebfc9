# SPDX-License-Identifier: Apache-2.0
"""Hardware: the table is consistent and has sources; own hardware, in code and in TOML."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax import plan
from shardax.errors import HardwareError, PlanFileError
from shardax.plan.compile.compilers import target_config
from shardax.plan.hardware.hardware import HARDWARE

TABLE = dict(HARDWARE)
NAMES = sorted(TABLE)
ACCELERATORS = [name for name in NAMES if TABLE[name].kind != "cpu"]


# --- the table ------------------------------------------------------------------------------------


def test_table_has_the_accelerators_that_are_documented() -> None:
    assert NAMES == [
        "a100-40", "a100-80", "b200", "b300", "cpu", "h100", "h200",
        "v4", "v5e", "v5p", "v6e", "v7x",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_hardware_figures_have_a_source(name: str) -> None:
    chip = TABLE[name]
    figures = [
        "peak_flops", "memory_bytes", "usable_bytes", "memory_bandwidth", "link_bandwidth",
        "network_bandwidth",
    ]  # fmt: skip
    if chip.link_latency:
        figures += ["link_latency", "network_latency"]
    if chip.chip_bandwidth:
        figures.append("chip_bandwidth")
    assert [each for each in figures if not chip.sources.get(each)] == []


@pytest.mark.parametrize("name", ACCELERATORS)
def test_bandwidths_follow_the_memory_hierarchy(name: str) -> None:
    chip = TABLE[name]
    assert chip.memory_bandwidth > chip.link_bandwidth > chip.network_bandwidth
    assert chip.usable_bytes < chip.memory_bytes
    # Operations per byte of memory: every one of these has between 100 and 600 in bf16.
    assert 100 < chip.peak("bf16") / chip.memory_bandwidth < 600
    assert chip.peak("f32") <= chip.peak("bf16") <= max(chip.peak_flops.values())


@pytest.mark.parametrize("name", ACCELERATORS)
def test_torus_has_shapes_and_switch_has_node_size(name: str) -> None:
    chip = TABLE[name]
    torus = chip.kind == "tpu"
    assert (chip.torus_dimensions > 0, bool(chip.shapes), chip.node_size == 0) == (torus,) * 3
    assert len(chip.pod) == chip.torus_dimensions


def test_figures_that_others_publish() -> None:
    """Two spot checks against the pages that the table names."""
    v5p, h100 = TABLE["v5p"], TABLE["h100"]
    assert (v5p.peak("bf16"), v5p.peak("int8")) == (4.59e14, 9.18e14)
    assert (h100.peak("bf16"), h100.peak("f8e4m3fn"), h100.peak("f32")) == (
        9.89e14, 1.979e15, 4.945e14,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_dtype_without_a_figure_has_the_lowest(name: str) -> None:
    assert TABLE[name].peak("c64") == min(TABLE[name].peak_flops.values())


@pytest.mark.parametrize(
    ("name", "shape", "around"),
    [
        ("v5e", (16, 16), [True, True]),
        ("v5e", (8, 16), [False, True]),
        ("v5e", (4, 4), [False, False]),
        ("v5p", (4, 4, 4), [True, True, True]),
        ("v5p", (2, 4, 4), [False, False, False]),
        ("v5p", (8, 12, 16), [True, True, True]),
        ("h100", (2, 8), [False, False]),
    ],
)
def test_which_dimensions_wrap_round(name: str, shape: tuple[int, ...], around: list[bool]) -> None:
    """Full axes of 16 in two dimensions; whole cubes of 4 in three."""
    assert [TABLE[name].wraps(shape, i) for i in range(len(shape))] == around


def test_hardware_is_hashed_and_pickled() -> None:
    chips = set(TABLE.values())
    assert len(chips) == len(TABLE)
    assert {pickle.loads(pickle.dumps(chip)) for chip in chips} == chips


@pytest.mark.parametrize("name", [n for n in NAMES if TABLE[n].kind == "gpu"])
def test_compiler_is_told_of_every_gpu(name: str) -> None:
    text = target_config(TABLE[name])
    assert f"device_memory_size: {TABLE[name].memory_bytes}" in text
    assert f"memory_bandwidth: {int(TABLE[name].memory_bandwidth)}" in text
    assert text.count("{") == text.count("}") == 3


# --- own hardware ---------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["a100", "Trillium", "ironwood", "tpu7x", "v5litepod", "H100"])
def test_find_hardware_knows_other_names(alias: str) -> None:
    assert plan.find_hardware(alias) in TABLE.values()


def test_unknown_hardware_error_lists_known_names() -> None:
    with pytest.raises(HardwareError, match=r"'h10'.*Did you mean 'h100'.*v5e, v5p"):
        plan.find_hardware("h10")


def test_derived_hardware_drops_sources_of_changed_figures() -> None:
    mine = TABLE["h100"].like(name="mine", network_bandwidth=1e10)
    assert mine.network_bandwidth == 1e10
    assert "network_bandwidth" not in mine.sources
    assert mine.sources["memory_bandwidth"] == TABLE["h100"].sources["memory_bandwidth"]


def test_unknown_hardware_attribute_error_lists_attributes() -> None:
    with pytest.raises(HardwareError, match=r"no attribute 'flops'; it has .*peak_flops"):
        TABLE["h100"].like(flops=1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "npu"}, "kind is 'npu'"),
        ({"memory_bandwidth": 0}, "memory_bandwidth is 0"),
        ({"memory_bandwidth": True}, "memory_bandwidth is True"),
        ({"network_bandwidth": "fast"}, "network_bandwidth is 'fast'"),
        ({"peak_flops": {}}, "peak_flops is {}"),
        ({"peak_flops": {"bf16": -1.0}}, "peak_flops is"),
        ({"usable_bytes": 10**15}, "more than memory_bytes"),
        ({"torus_dimensions": 4}, "torus_dimensions is 4"),
        ({"node_size": 0}, "node_size is missing"),
    ],
)
def test_figures_that_make_no_sense_are_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(HardwareError, match="'mine'") as caught:
        TABLE["h100"].like(name="mine", **changes)
    assert words in str(caught.value)


def test_hardware_that_is_registered_is_a_target() -> None:
    mine = plan.register_hardware(TABLE["v5e"].like(name="mine", link_bandwidth=9e10))
    try:
        assert plan.Target.parse("tpu:mine:4x4") == plan.Target(mine, (4, 4))
    finally:
        del HARDWARE["mine"]


@pytest.mark.parametrize("name", ["h100", "trillium", "a:b", ""])
def test_taken_or_unparsable_names_are_refused(name: str) -> None:
    with pytest.raises(HardwareError, match="give it another"):
        plan.register_hardware(TABLE["h100"].like(name=name))


# --- TOML -----------------------------------------------------------------------------------------


def _written(folder: pathlib.Path, text: str) -> pathlib.Path:
    file = folder / "mine.toml"
    file.write_text(text)
    return file


def test_file_says_what_differs(tmp_path: pathlib.Path) -> None:
    file = _written(
        tmp_path,
        'like = "v5e"\nname = "mine"\nlink_bandwidth = 9e10\nshapes = ["4x4"]\n'
        '[sources]\nlink_bandwidth = "measured"\n',
    )
    assert plan.load_hardware(file) == TABLE["v5e"].like(
        name="mine", link_bandwidth=9e10, shapes=("4x4",), sources={"link_bandwidth": "measured"}
    )
    assert plan.Target.parse(f"{file}:4x4").device_count == 16


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {_toml(each)}' for key, each in value.items()) + "}"
    return repr(value)


@given(name=st.sampled_from(NAMES))
def test_load_hardware_reads_every_known_chip_from_file(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    chip = TABLE[name]
    values = {each.name: getattr(chip, each.name) for each in dataclasses.fields(chip)}
    text = "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())
    assert plan.load_hardware(_written(tmp_path_factory.mktemp("toml"), text)) == chip


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ('name = \nkind = "gpu"\n', PlanFileError, "line 1"),
        ('like = "h100"\nlink_bandwith = 1.0\n', HardwareError, "Did you mean 'link_bandwidth'?"),
        ('like = "h100"\nlink_bandwidth = "fast"\n', HardwareError, "link_bandwidth is 'fast'"),
        ('like = "h100"\nmemory_bytes = 1.5\n', HardwareError, "a whole number"),
        ('like = "h100"\nshapes = "4x4"\n', HardwareError, "shapes is '4x4'"),
        ('like = "h100"\npeak_flops = 1e12\n', HardwareError, "{bf16 = 197e12}"),
        ('like = "h10"\n', HardwareError, "Did you mean 'h100'?"),
        ('name = "x"\nkind = "gpu"\n', HardwareError, "memory_bytes"),
        ('like = "h100"\nusable_bytes = 10000000000000\n', HardwareError, "more than memory"),
    ],
)
def test_invalid_hardware_file_error_names_the_file(
    tmp_path: pathlib.Path, text: str, error: type[Exception], words: str
) -> None:
    file = _written(tmp_path, text)
    with pytest.raises(error) as caught:
        plan.load_hardware(file)
    assert words in str(caught.value) and str(file) in str(caught.value)


def test_missing_hardware_file_is_refused() -> None:
    with pytest.raises(PlanFileError, match=r"no file 'none.toml'"):
        plan.Target.parse("none.toml:4x4")
