# SPDX-License-Identifier: Apache-2.0
"""Pickles read elsewhere: on fewer devices, on another mesh, in a process without the code."""

from __future__ import annotations

import json
import pickle
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import (
    LayoutLostWarning,
    PickleReadError,
    PickleWriteError,
    PrecisionLostWarning,
)
from tests.advice import run_advice
from tests.strategies import assert_equal_values, assert_same_model
from tests.tools.host.pickled import Holder, Placed, run

RULES = {"embed": "data", "mlp": "model"}


@pytest.fixture
def placed(auto_mesh: Any) -> Placed:
    """A model over data=2, model=4, with its mesh and a sharding as configuration."""
    place = NamedSharding(auto_mesh, P("data", "model"))
    return sx.shard(Placed(auto_mesh, place), auto_mesh, RULES)


def test_reading_runs_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.write_text, (tmp_path / "ran", "code")

    data = sx.host.dumps([Evil(), jnp.ones(2)], by_value=False)
    assert not (tmp_path / "ran").exists()
    sx.host.loads(data)
    assert (tmp_path / "ran").read_text() == "code"  # so bytes are to be trusted


# --- where it lands ---


def test_given_mesh_restores_layout_by_axis_names(placed: Placed) -> None:
    small = jax.make_mesh((1, 2, 2), ("pipe", "model", "data"), axis_types=(AxisType.Auto,) * 3)
    twin = sx.host.loads(sx.host.dumps(placed), mesh=small)
    assert twin.mesh == small
    assert twin.kernel.sharding == NamedSharding(small, P("data", "model"))
    assert_equal_values(sx.state(twin).kernel, sx.state(placed).kernel)
    with pytest.raises(PickleReadError, match=r"'data', 'model'.*\('rows',\)") as caught:
        sx.host.loads(sx.host.dumps(placed), mesh=jax.make_mesh((2,), ("rows",)))
    rules = {"in": "model", "out": "data"}
    names = {"sx": sx, "model": sx.host.loads(sx.host.dumps(placed)), "mesh": small, "rules": rules}
    run_advice(caught.value, "sx.shard(model, mesh, rules)", names)
    assert names["model"].kernel.sharding.mesh == small


def test_indivisible_array_is_replicated_with_a_warning(placed: Placed) -> None:
    odd = jax.make_mesh((3, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.warns(LayoutLostWarning, match=r"float32\[4, 8\].*data=3, model=1"):
        twin = sx.host.loads(sx.host.dumps(placed), mesh=odd)
    assert len(twin.kernel.sharding.device_set) == 1
    assert_equal_values(sx.state(twin).kernel, sx.state(placed).kernel)


def test_mesh_in_scope_with_same_axes_is_used(placed: Placed) -> None:
    devices = np.array(jax.devices())[::-1].reshape(2, 4)
    other = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    data = pickle.dumps(placed)
    with jax.set_mesh(other):
        assert pickle.loads(data).mesh == other
    assert pickle.loads(data).mesh == placed.mesh != other


SCRIPT = """
import json, pathlib, pickle, warnings
import jax, shardax as sx
from jax.sharding import AxisType, PartitionSpec as P

data = pathlib.Path("model.pickle").read_bytes()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = sx.host.loads(data)
    plain = pickle.loads(data)
print(json.dumps({
    "warnings": [(w.category.__name__, str(w.message)) for w in caught],
    "kernel": model.kernel.value.tolist(),
    "devices": len(model.kernel.sharding.device_set),
    "tied": model.kernel is model.tied and plain.kernel is plain.tied,
    "axes": model.kernel.axes,
    "mesh": [type(model.mesh).__name__, dict(model.mesh.shape)],
    "spec": [str(place.spec) for place in model.places],
}))
mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
again = sx.shard(model, mesh, {"embed": "data", "mlp": "model"})
print(again.kernel.sharding.spec == P("data", "model"), again.kernel.sharding.mesh == mesh)
there = sx.host.loads(data, mesh=mesh)
print(there.kernel.sharding == again.kernel.sharding)
try:
    there.local
except AttributeError:
    pass
print(json.dumps(sx.jit(lambda m: (m.kernel * 2).sum())(there).tolist()))
"""


def test_sharded_model_loads_on_fewer_devices(placed: Placed, tmp_path: Path) -> None:
    (tmp_path / "model.pickle").write_bytes(sx.host.dumps(placed))
    first, again, there, total = run(SCRIPT, 2, tmp_path).splitlines()
    found = json.loads(first)
    kinds = [kind for kind, _ in found.pop("warnings")]
    assert kinds == ["LayoutLostWarning"] * 2
    assert found == {
        "kernel": placed.kernel.value.tolist(),
        "devices": 1,
        "tied": True,
        "axes": ["embed", "mlp"],
        "mesh": ["AbstractMesh", {"data": 2, "model": 4}],
        "spec": ["P('data', 'model')"] * 2,
    }
    assert (again, there, json.loads(total)) == ("True True", "True", 992.0)


OTHER_WAY = """
import pathlib, sys
import shardax as sx
source = pathlib.Path("made_here.py").write_text('''
import shardax as sx, jax.numpy as jnp
class Net(sx.Module):
    def __init__(self):
        self.w = sx.Param(jnp.arange(3.0))
    def __call__(self, x):
        return self.scale(self.w * x)
''')
sys.path.insert(0, ".")
import made_here
def make(factor):
    class Local(made_here.Net):
        pass
    net = Local()
    net.scale = lambda x: factor * x
    return net
pathlib.Path("named.pickle").write_bytes(sx.host.dumps(made_here.Net()))
sys.path.pop(0)
pathlib.Path("valued.pickle").write_bytes(sx.host.dumps(make(3)))
"""


def test_importable_code_must_exist_other_code_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(OTHER_WAY, 1, tmp_path)
    for name in ("named", "valued"):
        with pytest.raises(PickleReadError, match="made_here"):
            sx.host.loads((tmp_path / f"{name}.pickle").read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    net = sx.host.loads((tmp_path / "valued.pickle").read_bytes())
    assert net(jnp.ones(3)).tolist() == [0.0, 3.0, 6.0]
    assert sx.graphdef(net) == sx.graphdef(sx.clone(net))
    assert sx.host.loads((tmp_path / "named.pickle").read_bytes()).w.value.tolist() == [0, 1, 2]


# --- bytes that are not what was written ---


def test_code_is_not_read_by_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    named = sx.host.dumps(Holder(act=len))
    valued = sx.host.dumps(Holder(act=lambda x: x))
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    assert sx.host.loads(named).act is len
    with pytest.raises(PickleReadError, match=r"Python 3\.99"):
        sx.host.loads(valued)


DATA = sx.host.dumps({"numbers": np.arange(5), "kind": "l2"})


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_law_damaged_bytes_are_refused_before_unpickling(drawn: st.DataObject) -> None:
    kind = drawn.draw(st.sampled_from(["cut", "flip", "other"]))
    position = drawn.draw(st.integers(0, len(DATA) - 1))
    data = bytearray(DATA)
    if kind == "cut":
        data = data[:position]
    elif kind == "flip":
        data[position] ^= drawn.draw(st.integers(1, 255))
    else:
        data = bytearray(drawn.draw(st.binary(max_size=80)))
    with pytest.raises(PickleReadError):
        sx.host.loads(bytes(data))


def test_narrowing_of_64_bit_numbers_is_reported(auto_mesh: Any) -> None:
    with jax.enable_x64(True):
        whole = sx.Param(jnp.arange(8.0), axes=("embed",))
        split = sx.shard(sx.Param(jnp.arange(8), axes=("embed",)), auto_mesh, {"embed": "data"})
        data = [sx.host.dumps(variable) for variable in (whole, split)]
        assert [str(sx.host.loads(each).dtype) for each in data] == ["float64", "int64"]
    for each, kind in zip(data, ("float", "int"), strict=True):
        with pytest.warns(PrecisionLostWarning, match=rf"{kind}64\[8\] was read as {kind}32.*x64"):
            assert str(sx.host.loads(each).dtype) == f"{kind}32"


def test_foreign_pickles_are_refused_naming_their_reader() -> None:
    with pytest.raises(PickleReadError, match=r"pickle\.loads"):
        sx.host.loads(pickle.dumps([1, 2]))
    for length in (2**40, 3):
        tail = struct.pack("<QI16s", length, zlib.crc32(b"{}x"), b"shardax pickle 1")
        with pytest.raises(PickleReadError):
            sx.host.loads(b"x" * 10 + tail)


def test_loads_reads_all_kinds_of_bytes(placed: Placed) -> None:
    data = sx.host.dumps(placed)
    for form in (bytes, bytearray, memoryview):
        assert_same_model(sx.host.loads(form(data)), placed)


def test_code_by_value_needs_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(PickleWriteError, match="cloudpickle"):
        sx.host.dumps(1, by_value=True)
    assert sx.host.loads(sx.host.dumps({"x": 1})) == {"x": 1}
    with pytest.raises(PickleWriteError, match=r"\.act.*cloudpickle"):
        sx.host.dumps(Holder(act=lambda x: x))
