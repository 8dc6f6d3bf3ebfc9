# SPDX-License-Identifier: Apache-2.0
"""What arrays, meshes and decorated functions become in a pickle, and how meshes are written."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.cross_process import (
    PickledArray,
    PickledByName,
    format_mesh,
    name_of,
    restored_mesh,
)
from shardax._core.text import columns, format_axes, layout_text
from shardax.errors import PickleReadError, PickleWriteError


def test_stand_in_of_array_is_an_array_again() -> None:
    array = jnp.ones(2)
    first, second = PickledArray.in_tree([{"w": array}, array])
    assert first["w"] is second
    one, other = pickle.loads(pickle.dumps([first, second]))
    assert one["w"].tolist() == [1.0, 1.0] and other is one["w"]


def test_landing_on_reads_pickled_mesh_as_given_mesh() -> None:
    written = pickle.dumps(jax.make_mesh((1,), ("data",)))
    here = jax.make_mesh((1, 1), ("data", "model"))
    with PickledArray.landing_on(here):
        assert pickle.loads(written) == here
    with (
        PickledArray.landing_on(jax.make_mesh((1,), ("other",))),
        pytest.raises(PickleReadError, match="data"),
    ):
        pickle.loads(written)


def test_mesh_of_local_devices_is_restored() -> None:
    mesh = restored_mesh(("data",), (1,), ("Auto",), ((jax.devices()[0].platform, 0),))
    assert dict(mesh.shape) == {"data": 1}


def test_importable_functions_are_referred_to_by_name() -> None:
    assert isinstance(sx.jit(len), PickledByName)
    assert name_of(jax.nn.relu) == "relu"
    assert name_of(jax.custom_jvp(lambda x: x)) is None


def test_meshes_and_axes_as_text() -> None:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), auto)
    assert format_mesh(mesh) == "data=2, model=4"
    explicit = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    assert format_mesh(explicit) == "data=1 (Explicit)"
    assert format_axes(("embed", None)) == "embed, -" and format_axes(None) == ""


def test_layouts_as_text() -> None:
    assert columns([["path", "bytes"], [".up", "1"]], right=[1]) == ["path  bytes", ".up       1"]
    spec = jax.sharding.PartitionSpec(None, "model")
    assert layout_text([(("up", "kernel"), ("embed", "mlp"), spec)]) == (
        "State of specs\n  path        axes        spec\n  .up.kernel  embed, mlp  P(None, 'model')"
    )
    assert layout_text([(("w",), None, 1.0)]) is None and layout_text([]) is None


def test_pickling_a_donated_array_is_refused_with_advice() -> None:
    state = sx.state(sx.Param(jnp.ones(2)))
    jax.tree.leaves(state)[0].delete()
    with pytest.raises(PickleWriteError) as caught:
        pickle.dumps(state)
    assert str(caught.value) == (
        "Cannot pickle the array float32[2]: it was deleted, usually by being donated to a "
        "compiled function. Pickle what that function returned."
    )
