# SPDX-License-Identifier: Apache-2.0
"""Functions over a mesh run over other devices, and keep their layout."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ExportError, TransformError
from tests.tools.host.exported_models import run_python


class Summing(sx.Module):
    """A layer split over ``model`` with statistics that are split alike."""

    def __init__(self) -> None:
        self.linear = sx.nn.Linear(4, 8, rngs=sx.Rngs(0), kernel_axes=("in", "out"))
        self.sums = sx.Variable(jnp.zeros(8), axes=("out",))

    def __call__(self, x: Any) -> Any:
        y = self.linear(x)
        self.sums += y.sum(0)
        return jnp.tanh(y)


RULES = [("in", None), ("out", "model")]
X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)


def exported(mesh: Mesh, path: pathlib.Path, **options: Any) -> tuple[Summing, pathlib.Path]:
    """Returns a model over a mesh and its artifact."""
    model = Summing()
    sx.shard(model, mesh, RULES)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        return model, sx.host.export(model, x, to=path, **options)


@functools.cache
def expected(calls: int) -> tuple[np.ndarray, np.ndarray]:
    """Result and sums after some calls of the model on one device."""
    model = Summing()
    results = [model(jnp.asarray(X)) for _ in range(calls)]
    return np.asarray(results[-1]), np.asarray(model.sums.value)


def check(loaded: Any, x: Any = X) -> None:
    """Calls twice, and compares result, state, and where the state is."""
    places = {path: v.value.sharding for path, v in loaded.variables.items()}
    results = [loaded(x), loaded(x)]
    result, sums = expected(2)
    np.testing.assert_allclose(results[-1], result, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loaded.variables[".sums"].value, sums, rtol=1e-5, atol=1e-6)
    assert {path: v.value.sharding for path, v in loaded.variables.items()} == places


def test_state_is_laid_out_as_it_was(mesh: Mesh, tmp_path: pathlib.Path) -> None:
    model, path = exported(mesh, tmp_path / "model")
    loaded = sx.host.load(path)
    own = sx.state(model).flat()
    assert {p: v.value.sharding for p, v in loaded.variables.items()} == {
        ".linear.kernel": own[("linear", "kernel")].sharding,
        ".linear.bias": own[("linear", "bias")].sharding,
        ".sums": own[("sums",)].sharding,
    }
    check(loaded)
    check(sx.host.load(path), jax.device_put(X, NamedSharding(mesh, P("data"))))


@pytest.mark.parametrize(("sizes", "names"), [((8,), ("z",)), ((4, 2), ("a", "b"))])
def test_load_takes_another_mesh_of_equal_size(
    mesh: Mesh, tmp_path: pathlib.Path, sizes: Any, names: Any
) -> None:
    _, path = exported(mesh, tmp_path / "model")
    other = Mesh(np.array(jax.devices()[::-1]).reshape(sizes), names)
    loaded = sx.host.load(path, other)
    kernel = loaded.variables[".linear.kernel"].value
    assert kernel.sharding.spec == P(None, "model")
    assert list(kernel.sharding.mesh.devices.flat) == jax.devices()[::-1]
    check(loaded)


def test_dynamic_batch_over_a_mesh(auto_mesh: Mesh, tmp_path: pathlib.Path) -> None:
    _, path = exported(auto_mesh, tmp_path / "model", dynamic={"batch": 0})
    loaded = sx.host.load(path)
    check(loaded)
    assert loaded(np.concatenate([X, X])).shape == (8, 8)


def test_load_in_another_process_takes_its_own_devices(
    auto_mesh: Mesh, tmp_path: pathlib.Path
) -> None:
    _, path = exported(auto_mesh, tmp_path / "model")
    code = """
import json, sys, numpy, jax
jax.config.update("jax_num_cpu_devices", 8)
import shardax as sx
loaded = sx.host.load(sys.argv[1])
x = numpy.linspace(-1, 1, 16, dtype=numpy.float32).reshape(4, 4)
loaded(x)
print(json.dumps([loaded(x).tolist(), loaded.variables[".sums"].value.tolist()]))
"""
    result, sums = json.loads(run_python(code, path))
    np.testing.assert_allclose(result, expected(2)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, expected(2)[1], rtol=1e-5, atol=1e-6)


def test_load_names_other_numbers_of_devices(auto_mesh: Mesh, tmp_path: pathlib.Path) -> None:
    _, path = exported(auto_mesh, tmp_path / "model")
    with pytest.raises(ExportError, match="8 devices, and in the mesh are 4"):
        sx.host.load(path, Mesh(np.array(jax.devices()[:4]), ("x",)))
    with pytest.raises(TransformError, match="make_mesh"):
        sx.host.load(path, AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,)))  # pyright: ignore[reportArgumentType]


def test_load_takes_one_chosen_device(tmp_path: pathlib.Path) -> None:
    weight = sx.Param(jnp.float32(3.0))
    path = sx.host.export(lambda x: x * weight, 1.0, to=tmp_path / "f")
    last = jax.devices()[-1]
    loaded = sx.host.load(path, Mesh(np.array([last]), ("x",)))
    assert (loaded(2.0).devices(), float(loaded(2.0))) == ({last}, 6.0)
