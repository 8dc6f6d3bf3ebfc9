# SPDX-License-Identifier: Apache-2.0
"""``shardax.numpy`` creates arrays with the default dtype and device, outside of programs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ModuleError

FLOATS: dict[str, Callable[..., jax.Array]] = {
    "zeros": lambda **more: sx.numpy.zeros((2, 3), **more),
    "ones": lambda **more: sx.numpy.ones((2, 3), **more),
    "empty": lambda **more: sx.numpy.empty((2, 3), **more),
    "full": lambda **more: sx.numpy.full((2, 3), 0.5, **more),
    "eye": lambda **more: sx.numpy.eye(2, 3, 1, **more),
    "identity": lambda **more: sx.numpy.identity(3, **more),
    "arange": lambda **more: sx.numpy.arange(1.0, 3.0, 0.5, **more),
    "linspace": lambda **more: sx.numpy.linspace(0, 1, 5, **more),
    "array": lambda **more: sx.numpy.array([[1.0, 2], [3, 4]], **more),
    "asarray": lambda **more: sx.numpy.asarray(0.5, **more),
    "nothing": lambda **more: sx.numpy.array([], **more),
    "zeros_like": lambda **more: sx.numpy.zeros_like(0.5, **more),
    "ones_like": lambda **more: sx.numpy.ones_like(0.5, shape=(2,), **more),
    "empty_like": lambda **more: sx.numpy.empty_like(0.5, **more),
    "full_like": lambda **more: sx.numpy.full_like(0.5, 2, **more),
    "logspace": lambda **more: sx.numpy.logspace(0, 3, 4, base=2, **more),
    "geomspace": lambda **more: sx.numpy.geomspace(1, 1, 4, **more),
    "tri": lambda **more: sx.numpy.tri(2, 3, 1, **more),
    "fromfunction": lambda **more: sx.numpy.fromfunction(lambda i, j: i + j, (2, 3), **more),
    "astype": lambda dtype=None, **more: sx.numpy.astype(np.arange(3), dtype, **more),
    "fromstring": lambda **more: sx.numpy.fromstring("1 2.5", sep=" ", **more),
}
EXPECTED = {
    "zeros": np.zeros((2, 3)),
    "ones": np.ones((2, 3)),
    "empty": np.zeros((2, 3)),
    "full": np.full((2, 3), 0.5),
    "eye": np.eye(2, 3, 1),
    "identity": np.eye(3),
    "arange": np.arange(1.0, 3.0, 0.5),
    "linspace": np.linspace(0, 1, 5),
    "array": np.array([[1.0, 2], [3, 4]]),
    "asarray": np.array(0.5),
    "nothing": np.array([]),
    "zeros_like": np.zeros(()),
    "ones_like": np.ones(2),
    "empty_like": np.zeros(()),
    "full_like": np.full((), 2.0),
    "logspace": np.logspace(0, 3, 4, base=2),
    "geomspace": np.ones(4),
    "tri": np.tri(2, 3, 1),
    "fromfunction": np.fromfunction(lambda i, j: i + j, (2, 3)),
    "astype": np.arange(3.0),
    "fromstring": np.array([1.0, 2.5]),
}

# Functions of ``jax.numpy`` with a dtype that compute from arrays, where these are.
COMPUTING = {
    *("argsort", "concatenate", "corrcoef", "cov", "dstack", "hstack", "isdtype", "mean", "prod"),
    *("cumprod", "cumsum", "cumulative_prod", "cumulative_sum", "nancumprod", "nancumsum"),
    *("nanmean", "nanprod", "nanstd", "nansum", "nanvar", "ravel_multi_index", "stack", "std"),
    *("sum", "trace", "var", "vstack"),
}
each_of_floats = pytest.mark.parametrize("name", list(FLOATS))


@pytest.fixture
def process_defaults() -> Iterator[None]:
    sx.configure(dtype="float16", create_on="cpu:7")
    yield
    sx.configure(dtype="default", create_on="default")


def test_every_creation_function_of_jax_is_there() -> None:
    found: dict[str, list[str]] = {}
    for name, function in vars(jnp).items():
        if name[0] == "_" or not callable(function) or isinstance(function, type):
            continue
        with contextlib.suppress(TypeError, ValueError):  # ufuncs have no signature
            found[name] = list(inspect.signature(function).parameters)
    creating = {name for name, params in found.items() if {"dtype", "device"} & {*params}}
    assert {name for name in creating if not hasattr(sx.numpy, name)} == COMPUTING
    assert {name for name in COMPUTING if "device" in found[name]} == set()
    for name in creating - COMPUTING:
        mine = inspect.signature(getattr(sx.numpy, name)).parameters
        assert {"device", "sharding"} <= {*mine}, name
        assert ("dtype" in found[name]) <= ("dtype" in mine), name


@each_of_floats
def test_floats_have_dtype_and_device_in_scope(name: str) -> None:
    plain = FLOATS[name]()
    assert plain.dtype == jnp.float32 and np.array_equal(plain, EXPECTED[name])
    with sx.default_dtype("bfloat16"), sx.default_device("cpu:3"):
        found = FLOATS[name]()
    assert found.dtype == jnp.bfloat16 and found.devices() == {jax.devices()[3]}
    assert np.array_equal(found.astype(np.float32), EXPECTED[name])


@each_of_floats
@pytest.mark.usefixtures("process_defaults")
def test_arguments_override_blocks_and_blocks_the_process(name: str) -> None:
    assert FLOATS[name]().dtype == jnp.float16 and FLOATS[name]().devices() == {jax.devices()[7]}
    with sx.default_dtype("bfloat16"), sx.default_device("cpu:3"):
        given = FLOATS[name](dtype="float32", device="cpu:1")
        assert FLOATS[name]().devices() == {jax.devices()[3]}
    assert given.dtype == jnp.float32 and given.devices() == {jax.devices()[1]}
    assert sx.numpy.random.normal(2).dtype == jnp.float16


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: sx.numpy.arange(3), "int32"),
        (lambda: sx.numpy.full(2, 7), "int32"),
        (lambda: sx.numpy.full(2, True), "bool"),
        (lambda: sx.numpy.array([1, 2]), "int32"),
        (lambda: sx.numpy.array([True]), "bool"),
        (lambda: sx.numpy.array([1j]), "complex64"),
        (lambda: sx.numpy.array(np.ones(2, np.float32)), "float32"),
        (lambda: sx.numpy.asarray(jnp.ones(2, "float16")), "float16"),
        (lambda: sx.numpy.linspace(jnp.zeros(2, "float16"), 1, 3), "float16"),
        (lambda: sx.numpy.zeros_like(jnp.ones(2, "float16")), "float16"),
        (lambda: sx.numpy.full_like(jax.ShapeDtypeStruct((2,), "int8"), 3), "int8"),
        (lambda: sx.numpy.ones_like(np.ones(2, bool)), "bool"),
        (lambda: sx.numpy.indices((2, 3)), "int32"),
        (lambda: sx.numpy.indices((2, 3), sparse=True)[1], "int32"),
        (lambda: sx.numpy.from_dlpack(np.ones(2, np.float16)), "float16"),
        (lambda: sx.numpy.frombuffer(b"abcd", "float16"), "float16"),
        (lambda: sx.numpy.frombuffer(np.ones(2).tobytes()), "float32"),
        (lambda: sx.numpy.astype(jnp.ones(2), "int8"), "int8"),
        (lambda: sx.numpy.fromstring("1,2", "int16", sep=","), "int16"),
    ],
)
def test_default_dtype_leaves_other_values_as_they_are(make: Any, dtype: str) -> None:
    with sx.default_dtype("bfloat16"):
        assert make().dtype.name == dtype


def test_arrays_like_others_stay_with_them(mesh: Mesh) -> None:
    place = NamedSharding(mesh, P("model"))
    kept = jax.device_put(jnp.ones(8), place)
    assert sx.numpy.frombuffer(np.arange(3.0).tobytes()).tolist() == [0.0, 1.0, 2.0]
    with sx.default_device("cpu:3"):
        for made in (sx.numpy.zeros_like(kept), sx.numpy.astype(kept, "int32")):
            assert made.sharding.is_equivalent_to(place, 1)
        assert sx.numpy.from_dlpack(np.ones(2)).devices() == {jax.devices()[0]}
    assert sx.numpy.full_like(1.0, 2, shape=8, sharding=place).sharding == place
    assert sx.numpy.tri(8, sharding=NamedSharding(mesh, P("data"))).sharding.spec == P("data")
    assert sx.numpy.indices((8, 2), device="cpu:2").devices() == {jax.devices()[2]}
    assert jax.jit(lambda x: sx.numpy.zeros_like(x))(jnp.ones(8)).tolist() == [0.0] * 8


def test_arrays_are_created_in_their_shards(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        rows = sx.numpy.zeros((8, 2), sharding=P("data"))
    assert rows.sharding == NamedSharding(mesh, P("data"))
    place = NamedSharding(mesh, P("model"))
    assert sx.numpy.array(np.ones(8), device=place).sharding == place
    kept = jax.device_put(jnp.ones(8), place)
    assert sx.numpy.asarray(kept) is kept


def test_dtype_must_be_given_inside_programs() -> None:
    for call in (lambda: sx.numpy.zeros(3), lambda: sx.numpy.array([0.5])):
        with pytest.raises(ModuleError, match=r"inside a program.*dtype=\.\.\."):
            jax.jit(call)()
    with sx.default_dtype("bfloat16"):
        run = sx.jit(lambda x: sx.numpy.zeros(3, "float32") + sx.numpy.array(x))
        assert run(jnp.ones(3)).dtype == jnp.float32


def test_invalid_dtypes_and_places_are_refused() -> None:
    with pytest.raises(ModuleError, match="64 bits"):
        sx.numpy.zeros(3, "float64")
    with pytest.raises(ModuleError, match="no device 'moon'"):
        sx.numpy.ones(3, device="moon")
    with pytest.raises(ModuleError, match=r"shardax\.numpy\.full was given device='cpu' and"):
        sx.numpy.full(3, 1.0, device="cpu", sharding=P())
    with pytest.raises(ModuleError, match="needs a mesh"):
        sx.numpy.eye(3, sharding=P("data"))
