# SPDX-License-Identifier: Apache-2.0
"""Devices and meshes are what the command line says, or the message says what would work."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from shardax.cli.inputs import is_target, parse_mesh, use_devices
from shardax.errors import CommandError

AXES = ("data", "model")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,model=4", {"data": 2, "model": 4}),
        ("model=4,data=2", {"model": 4, "data": 2}),
        (" data = 8 ", {"data": 8, "model": 1}),
        ("model=2", {"model": 2, "data": 1}),
    ],
)
def test_mesh_has_given_axes_others_of_size_1(text: str, sizes: dict[str, int]) -> None:
    mesh = parse_mesh(text, AXES)
    assert mesh is not None
    assert list(mesh.shape.items()) == list(sizes.items())
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_empty_text_is_no_mesh() -> None:
    assert parse_mesh("", AXES) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data", "'data' is not name=size, as in --mesh data=2,model=4"),
        ("data=", "'data=' is not name=size"),
        ("data=x", "'data=x' is not name=size"),
        ("data=0", "'data=0' is not name=size"),
        ("data=-2", "'data=-2' is not name=size"),
        ("data=2,", "'' is not name=size"),
        ("=2", "'=2' is not name=size"),
        ("data=2,data=4", "the axis 'data' is given twice"),
        ("dta=2", "no rule .* axis 'dta'; the axes are data, model. Did you mean 'data'?"),
        ("data=3,model=4", "needs 12 devices, but there are 8.*add --devices 12"),
    ],
)
def test_invalid_mesh_is_refused_with_reason(text: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        parse_mesh(text, AXES)


def test_target_is_a_module_and_a_name() -> None:
    texts = ("my_package.models:make_model", "runs/demo", "tiny", ":make", "a-b:c")
    assert [is_target(text) for text in texts] == [True, False, False, False, False]


def test_existing_number_of_devices_is_accepted() -> None:
    use_devices(None)
    use_devices(jax.device_count())
    assert jax.device_count() == 8


@pytest.mark.parametrize(
    ("count", "message"),
    [(0, "give a number from 1 to 4,096"), (3, "already runs with 8.*in a new process")],
)
def test_use_devices_refuses_another_number_of_devices(count: int, message: str) -> None:
    with pytest.raises(CommandError, match=rf"--devices {count}.*{message}"):
        use_devices(count)


def test_new_process_gets_the_requested_devices() -> None:
    program = (
        "from shardax.cli.inputs import use_devices; use_devices(3); use_devices(3)\n"
        "import jax; print([str(device.platform) for device in jax.devices()])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['cpu', 'cpu', 'cpu']"
