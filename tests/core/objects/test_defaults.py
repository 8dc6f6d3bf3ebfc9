# SPDX-License-Identifier: Apache-2.0
"""Defaults of dtype and device: of a block, of the process, of JAX."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.init import defaults
from shardax.errors import ModuleError


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Defaults of the process end with the test."""
    yield
    defaults.set_process_dtype(None)
    defaults.set_process_device(None)


def devices_of_a_draw() -> set[Any]:
    return sx.random.normal(3).devices()


def test_innermost_dtype_applies_unless_one_is_given() -> None:
    assert sx.random.normal().dtype == jnp.float32
    defaults.set_process_dtype("float16")
    assert sx.random.normal().dtype == jnp.float16
    with sx.default_dtype(jnp.bfloat16) as dtype:
        assert sx.random.uniform().dtype == dtype == jnp.bfloat16
        with sx.default_dtype("float32"):
            assert sx.random.truncated_normal(-1, 1).dtype == jnp.float32
        assert sx.random.normal(3, jnp.float16).dtype == jnp.float16
        assert jnp.zeros(3).dtype == jnp.float32
    assert sx.random.normal().dtype == jnp.float16


def test_innermost_device_applies_and_process_default_only_creates() -> None:
    first, *_, seventh, last = jax.devices()
    assert devices_of_a_draw() == {first}
    defaults.set_process_device("cpu:7")
    assert devices_of_a_draw() == {last}
    assert not sx.random.normal(3).committed
    assert jnp.zeros(3).devices() == {first}
    assert (sx.random.normal(3) * jax.device_put(2.0, first)).devices() == {first}
    with sx.default_device("cpu:6") as device:
        assert device == seventh
        assert devices_of_a_draw() == jnp.zeros(3).devices() == {seventh}
        with sx.default_device(first):
            assert devices_of_a_draw() == {first}
    assert sx.random.normal(3, device=seventh).devices() == {seventh}


def test_scopes_end_on_exceptions_and_decorate_functions() -> None:
    @sx.default_dtype("bfloat16")
    @sx.default_device("cpu:1")
    def draw() -> Any:
        return sx.random.normal(3)

    assert draw().dtype == jnp.bfloat16 and draw().devices() == {jax.devices()[1]}
    with pytest.raises(KeyError), sx.default_dtype("float16"), sx.default_device("cpu:1"):
        raise KeyError
    drawn = sx.random.normal(3)
    assert drawn.dtype == jnp.float32 and drawn.devices() == {jax.devices()[0]}


def test_blocks_belong_to_their_thread() -> None:
    found: list[Any] = []
    with sx.default_dtype("bfloat16"), sx.default_device("cpu:1"):
        thread = threading.Thread(target=lambda: found.append(sx.random.normal(3)))
        thread.start()
        thread.join()
    (drawn,) = found
    assert drawn.dtype == jnp.float32 and drawn.devices() == {jax.devices()[0]}


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float64", r"float64 needs 64 bits.*configure\(x64=True\)"),
        ("int32", "default dtype of floats cannot be int32"),
        ("complex64", "cannot be complex64"),
        ("flaot32", "'flaot32' is not a dtype"),
    ],
)
def test_non_floating_default_dtype_is_refused(dtype: str, message: str) -> None:
    with pytest.raises(ModuleError, match=message), sx.default_dtype(dtype):
        pass
    with pytest.raises(ModuleError, match=message):
        defaults.set_process_dtype(dtype)
    assert sx.random.normal().dtype == jnp.float32


def test_with_64_bits_the_default_may_have_them() -> None:
    with jax.enable_x64(True), sx.default_dtype("float64"):
        assert sx.random.normal().dtype == jnp.float64


@pytest.mark.parametrize("name", ["", "cpu:", "cpu:x", "cpu:-1", ":1", "cpu 1", 0, None])
def test_default_device_refuses_what_names_no_device(name: Any) -> None:
    with pytest.raises(ModuleError, match="does not name a device"), sx.default_device(name):
        pass
    if name is not None:
        with pytest.raises(ModuleError, match="does not name a device"):
            defaults.set_process_device(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("cpu:8", "cpu:0 to cpu:7"), ("tpu", r"without the platform 'tpu'.*configure\(platform")],
)
def test_device_that_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModuleError, match=message), sx.default_device(name):
        pass


def test_dtypes_and_devices_by_name() -> None:
    assert defaults.exact_dtype("bfloat16") == jnp.bfloat16
    assert defaults.exact_dtype(float) == jnp.zeros(()).dtype
    assert defaults.parse_device("cpu") == ("cpu", 0)
    assert defaults.parse_device("gpu:1") == ("gpu", 1)
