# SPDX-License-Identifier: Apache-2.0
"""Draws give the numbers of ``jax.random``, in every layout; what makes no sense is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import shardax as sx
from shardax.errors import DrawError, ModuleError, ShardaxError
from shardax.random.programs import _program

SHAPE = (8, 16)
LOGITS = np.linspace(-3, 3, 8 * 16 * 3, dtype=np.float32).reshape(8, 16, 3)
TABLE = np.arange(8 * 16, dtype=np.float32).reshape(SHAPE)
WEIGHTS = np.arange(10, dtype=np.float32) / 45

# Each draw with placement, and the same with a key.
PAIRS: dict[str, tuple[Callable[..., jax.Array], Callable[[jax.Array], jax.Array]]] = {
    "bits": (lambda **at: sx.random.bits(SHAPE, **at), lambda k: jax.random.bits(k, SHAPE)),
    "uniform": (
        lambda **at: sx.random.uniform(SHAPE, minval=-0.3, maxval=0.7, **at),
        lambda k: jax.random.uniform(k, SHAPE, minval=-0.3, maxval=0.7),
    ),
    "uniform, a bound each": (
        lambda **at: sx.random.uniform(SHAPE, jnp.float16, 0, np.arange(1, 17), **at),
        lambda k: jax.random.uniform(k, SHAPE, jnp.float16, 0, np.arange(1, 17, dtype=np.float16)),
    ),
    "normal": (lambda **at: sx.random.normal(SHAPE, **at), lambda k: jax.random.normal(k, SHAPE)),
    "normal, complex": (
        lambda **at: sx.random.normal(SHAPE, complex, **at),
        lambda k: jax.random.normal(k, SHAPE, jnp.complex64),
    ),
    "truncated_normal": (
        lambda **at: sx.random.truncated_normal(-2, [[1.0] * 16] * 8, **at),
        lambda k: jax.random.truncated_normal(k, -2.0, jnp.ones(SHAPE)),
    ),
    "randint": (
        lambda **at: sx.random.randint(SHAPE, -5, 100, **at),
        lambda k: jax.random.randint(k, SHAPE, -5, 100),
    ),
    "randint, the whole range": (
        lambda **at: sx.random.randint(SHAPE, 0, 256, "uint8", **at),
        lambda k: jax.random.randint(k, SHAPE, 0, 256, "uint8"),
    ),
    "bernoulli": (
        lambda **at: sx.random.bernoulli(0.3, SHAPE, **at),
        lambda k: jax.random.bernoulli(k, 0.3, SHAPE),
    ),
    "categorical": (
        lambda **at: sx.random.categorical(LOGITS, **at),
        lambda k: jax.random.categorical(k, LOGITS),
    ),
    "choice": (
        lambda **at: sx.random.choice(1000, SHAPE, replace=False, **at),
        lambda k: jax.random.choice(k, 1000, SHAPE, replace=False),
    ),
    "choice, weighted": (
        lambda **at: sx.random.choice(np.arange(10.0), SHAPE, p=WEIGHTS, **at),
        lambda k: jax.random.choice(k, np.arange(10, dtype=np.float32), SHAPE, p=WEIGHTS),
    ),
    "permutation": (
        lambda **at: sx.random.permutation(TABLE, 1, independent=True, **at),
        lambda k: jax.random.permutation(k, TABLE, 1, independent=True),
    ),
}


def nth_key(n: int, key: Any = None) -> jax.Array:
    return jax.random.fold_in(jax.random.key(0) if key is None else key, n)


@functools.cache
def numbers_of_jax(name: str, n: int, impl: str = "threefry2x32") -> jax.Array:
    """What the function of ``jax.random`` gives for the n-th key."""
    return PAIRS[name][1](nth_key(n, jax.random.key(0, impl=impl)))


def assert_same(drawn: jax.Array, expected: jax.Array) -> None:
    assert drawn.dtype == expected.dtype
    np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("name", PAIRS)
def test_nth_draw_equals_jax_random_with_nth_key(name: str) -> None:
    for n in range(2):
        assert_same(PAIRS[name][0](), numbers_of_jax(name, n))


@pytest.mark.parametrize(
    ("name", "impl"), [*((name, "threefry2x32") for name in PAIRS), ("choice", "rbg")]
)
def test_numbers_are_the_same_for_every_sharding(name: str, impl: str, mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    sx.random.seed(jax.random.key(0, impl=impl))
    split = PAIRS[name][0](sharding=sharding)
    assert split.sharding == sharding
    assert_same(split, numbers_of_jax(name, 0, impl))


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(), (2, 4, 5)]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_normal_numbers_equal_jax_random(seed: int, shape: tuple[int, ...], dtype: str) -> None:
    sx.random.seed(seed)
    expected = jax.random.normal(jax.random.fold_in(jax.random.key(seed), 0), shape, dtype)
    assert_same(sx.random.normal(shape, dtype), expected)


def test_partition_spec_uses_the_mesh_in_scope(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        split = sx.random.normal(SHAPE, sharding=PartitionSpec("model"))
        whole = sx.random.normal(SHAPE)
    assert split.sharding == NamedSharding(mesh, PartitionSpec("model"))
    assert_same(split, jax.random.normal(nth_key(0), SHAPE))
    assert_same(whole, jax.random.normal(nth_key(1), SHAPE))


def test_device_is_an_object_name_or_sharding() -> None:
    third = jax.devices()[3]
    for place in (third, "cpu:3", SingleDeviceSharding(third)):
        sx.random.seed(0)
        drawn = sx.random.uniform(5, device=place)
        assert drawn.devices() == {third} and drawn.committed
        assert_same(drawn, jax.random.uniform(nth_key(0), 5))


def test_unplaced_numbers_mix_with_any_device() -> None:
    there = sx.random.normal(3, device="cpu:3")
    here = sx.random.normal(3)
    assert not here.committed
    assert (here + there).devices() == {jax.devices()[3]}


def test_bounds_and_probabilities_change_without_compiling_again() -> None:
    def draw(bound: float) -> None:
        sx.random.uniform(3, maxval=bound)
        sx.random.randint(3, 0, int(bound) + 1)
        sx.random.bernoulli(bound / 100)

    draw(1.0)
    before = _program.cache_info().misses
    for bound in range(1, 20):
        draw(float(bound))
    assert _program.cache_info().misses == before


def test_variables_and_arrays_on_devices_are_operands() -> None:
    logits = sx.Param(jnp.asarray(LOGITS))
    assert_same(sx.random.categorical(logits), jax.random.categorical(nth_key(0), LOGITS))
    low, high = jnp.asarray(3), sx.Param(jnp.asarray(9))
    assert_same(sx.random.randint(4, low, high), jax.random.randint(nth_key(1), 4, 3, 9))


def test_drawn_key_serves_functions_of_jax_random() -> None:
    key = sx.random.key()
    assert key.dtype == jax.random.key(0).dtype and key.shape == ()
    assert_same(jax.random.gumbel(key, (3,)), jax.random.gumbel(nth_key(0), (3,)))


def test_floats_have_the_default_dtype_of_jax() -> None:
    assert sx.random.normal().dtype == jnp.float32
    with jax.enable_x64(True):
        for drawn in (sx.random.normal(), sx.random.uniform(3, "float64")):
            assert drawn.dtype == jnp.float64
        assert sx.random.randint(3, 0, 2**40).dtype == jnp.int64


# Each draw that makes no sense, its error, and what the message says.
WRONG: dict[str, tuple[Callable[[], Any], type[ShardaxError], str]] = {
    "reversed range": (lambda: sx.random.randint(3, 5, 2), DrawError, "minval=5 and maxval=2"),
    "empty range": (lambda: sx.random.randint(3, 5, 5), DrawError, "no interval"),
    "a bound that wraps": (
        lambda: sx.random.randint(3, 0, 2**31),
        DrawError,
        "maxval=2147483648, but int32 allows -2147483648 to 2147483647",
    ),
    "a bound above uint8": (lambda: sx.random.randint(3, 0, 257, "uint8"), DrawError, "uint8"),
    "a bound below uint8": (lambda: sx.random.randint(3, -1, 2, "uint8"), DrawError, "minval=-1"),
    "a float bound": (lambda: sx.random.randint(3, 0, 2.5), DrawError, "maxval=2.5 of dtype"),
    "reversed interval": (lambda: sx.random.uniform(3, None, 2.0, 1.0), DrawError, "minval=2.0"),
    "no interval": (lambda: sx.random.truncated_normal(1, 1), DrawError, "lower=1.0"),
    "an endless interval": (lambda: sx.random.uniform(maxval=np.inf), DrawError, "maxval=inf"),
    "too wide an interval": (lambda: sx.random.uniform(3, None, -3e38, 3e38), DrawError, "finite"),
    "a probability above 1": (lambda: sx.random.bernoulli(1.5), DrawError, "p=1.5"),
    "NaN as probability": (lambda: sx.random.bernoulli(float("nan")), DrawError, "p=nan"),
    "weights": (lambda: sx.random.choice(3, p=[3, 1, 1]), DrawError, "divide them by their sum"),
    "a sum below 1": (lambda: sx.random.choice(2, p=[0.5, 0.25]), DrawError, r"adds up to 0\.75"),
    "a shape of floats": (lambda: sx.random.normal((2.0, 3)), DrawError, r"shape \(2.0, 3\)"),
    "a negative shape": (lambda: sx.random.normal(-1), DrawError, "shape -1"),
    "64 bits": (lambda: sx.random.normal(3, "float64"), ModuleError, r"configure\(x64=True\)"),
    "64 bits by NumPy": (lambda: sx.random.bits(3, np.uint64), ModuleError, "uint64 needs 64 bits"),
    "no dtype": (lambda: sx.random.normal(3, "flaot32"), ModuleError, "'flaot32' is not a dtype"),
    "no platform": (lambda: sx.random.normal(3, device="tpu"), ModuleError, "platform 'tpu'"),
    "no such device": (lambda: sx.random.normal(3, device="cpu:8"), ModuleError, "cpu:0 to cpu:7"),
    "no device": (lambda: sx.random.normal(3, device=0), ModuleError, "0 does not name a device"),
    "a spec without a mesh": (
        lambda: sx.random.normal(3, sharding=PartitionSpec("data")),
        DrawError,
        r"jax\.set_mesh\(mesh\)",
    ),
    "a device as sharding": (
        lambda: sx.random.normal(3, sharding="cpu"),
        DrawError,
        "for a device there is device=",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_draws_are_refused_and_take_nothing(name: str) -> None:
    wrong, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        wrong()
    assert sx.random.get_state().count == 0


def test_two_places_and_undividable_shapes_are_refused(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    with pytest.raises(DrawError, match="give one of them"):
        sx.random.normal(4, device="cpu", sharding=sharding)
    with pytest.raises(DrawError, match=r"cannot lay out float32\[6\] by"):
        sx.random.normal(6, sharding=sharding)
    assert sx.random.get_state().count == 0


@pytest.mark.parametrize(
    "refused_by_jax",
    [
        lambda: sx.random.normal(3, int),
        lambda: sx.random.randint(3, 0, 2, float),
        lambda: sx.random.choice(3, 4, replace=False),
        lambda: sx.random.choice(3, p=[0.5, 0.5]),
        lambda: sx.random.uniform((2,), minval=np.zeros(3)),
    ],
)
def test_draws_refused_by_jax_take_nothing(refused_by_jax: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        refused_by_jax()
    assert sx.random.get_state().count == 0
