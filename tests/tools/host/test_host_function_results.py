# SPDX-License-Identifier: Apache-2.0
"""Results are held against the promise, and exceptions come out as they were raised."""

from __future__ import annotations

import re
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import HostFunctionError
from tests.advice import run_advice
from tests.tools.host.ways import FLOAT, same
from tests.tools.host.ways import way as way

host_function = sx.host.host_function

INT = jax.ShapeDtypeStruct((), "int32")
ROW = jax.ShapeDtypeStruct((3,), "float32")


class Pair(NamedTuple):
    left: Any
    right: Any


def returning(value: Any, out: Any) -> Any:
    return host_function(lambda: value, out=out)()


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "out", "told"),
    [
        (np.zeros(4), ROW, r"promises float32\[3\], but returned float64\[4\]"),
        ({"a": (1.0, np.zeros(2))}, {"a": (FLOAT, ROW)}, r"float32\[3\] at \.a\[1\].*float64\[2\]"),
        (1.5, INT, r"promises int32\[\], but returned float64\[\]"),
        (1j, FLOAT, r"returned complex128\[\]"),
        (True, ROW, r"returned bool\[\]"),
        (2**31, INT, r"numbers from 2147483648 to 2147483648"),
        (-1, jax.ShapeDtypeStruct((), "uint8"), r"numbers from -1 to -1"),
        ("text", FLOAT, r"returned a str"),
        ([[1.0], [1.0, 2.0]], ROW, r"returned a list"),
        (None, FLOAT, r"returned a NoneType"),
        ((1.0, 2.0, 3.0), (FLOAT, FLOAT), r"promises a tuple of 2, but returned 3 values"),
        (np.zeros(2), (FLOAT, FLOAT), r"promises a tuple of 2, but returned a ndarray"),
        ({"a": 1.0}, {"a": FLOAT, "b": FLOAT}, r"keys \['a', 'b'\].*returned.*keys \['a'\]"),
        ({"a": 1.0, "c": 2.0}, {"a": FLOAT}, r"keys \['a', 'c'\]"),
        ({"a": 1.0, "b": 1.0}, {"a": None, "b": FLOAT}, r"promises None at \.a of the result"),
        (Pair(1.0, 2), Pair(FLOAT, ROW), r"float32\[3\] at \.right"),
    ],
)
def test_host_function_result_other_than_promised_names_the_leaf(
    value: Any, out: Any, told: str
) -> None:
    with pytest.raises(HostFunctionError, match=told):
        returning(value, out)


def test_host_function_converts_results_that_fit_the_promise() -> None:
    promised = {
        "float": FLOAT,
        "half": jax.ShapeDtypeStruct((), "bfloat16"),
        "int": INT,
        "pair": (FLOAT, FLOAT),
        "named": Pair(FLOAT, INT),
        "list": [FLOAT],
        "none": None,
    }
    returned = {
        "list": (np.float64(1.5),),
        "float": 3,
        "half": 0.1,
        "int": np.int64(-7),
        "pair": [1.0, True],
        "named": (2.0, False),
        "none": None,
    }
    result = returning(returned, promised)
    assert jax.tree.map(lambda leaf: leaf.dtype.name, result) == jax.tree.map(
        lambda form: form.dtype.name, promised
    )
    assert (float(result["float"]), int(result["int"]), result["named"].right.tolist()) == (
        3,
        -7,
        0,
    )
    assert float(result["half"]) == float(jnp.bfloat16(0.1))


def test_float_overflow_in_results_becomes_infinity() -> None:
    assert returning(1e300, FLOAT).tolist() == float("inf")


def test_jax_array_result_is_refused_to_avoid_deadlock() -> None:
    with pytest.raises(HostFunctionError, match="computes with JAX"):
        host_function(jnp.sin, out=same)(1.0)


def test_vectorized_result_must_have_one_row_per_lane() -> None:
    flat = host_function(lambda x: x.sum(), out=FLOAT, vmap="vectorized")
    with pytest.raises(HostFunctionError, match=r"float32\[5\]"), sx.host.host_exceptions():
        jax.vmap(flat)(jnp.ones((5, 3)))


# --- exceptions -----------------------------------------------------------------------------------


class LibraryError(Exception):
    """An exception of a library."""


def failing(x: np.ndarray) -> np.ndarray:
    raise LibraryError("no such material")


FAILING = host_function(failing, out=same)
WITH_RULE = host_function(failing, out=same, vjp=lambda args, result, ct: (ct,))


@pytest.mark.parametrize("function", [FAILING, WITH_RULE], ids=["plain", "with a derivative"])
def test_exception_outside_programs_is_raised_unchanged(function: Any) -> None:
    with pytest.raises(LibraryError, match="no such material") as caught:
        function(jnp.ones(2))
    assert [frame.name for frame in caught.traceback][-1] == "failing"
    assert caught.value.__notes__[0] == ("In the host function failing, called with float32[2].")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "call",
    [
        lambda: jax.jit(FAILING)(1.0),
        lambda: sx.jit(FAILING)(1.0),
        lambda: jax.vmap(FAILING)(jnp.ones(3)),
        lambda: jax.lax.map(FAILING, jnp.ones(3)),
    ],
    ids=["jit", "sx.jit", "vmap", "map"],
)
def test_exception_inside_program_is_reported_and_linked(call: Any) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(call())
    told = str(caught.value)
    assert re.search(r"host function failing raised LibraryError: no such material", told)
    assert 'raise LibraryError("no such material")' in told
    names = {"sx": sx, "error": caught.value, "body": lambda: jax.block_until_ready(call())}
    original = run_advice(caught.value, "sx.host.host_exception(error)", names)
    with pytest.raises(LibraryError):
        run_advice(caught.value, "with sx.host.host_exceptions():", names)
    assert type(original) is LibraryError
    assert traceback.extract_tb(original.__traceback__)[-1].name == "failing"


def test_exception_itself_is_raised_on_request() -> None:
    with pytest.raises(LibraryError), sx.host.host_exceptions():
        jax.jit(FAILING)(1.0).block_until_ready()
    inverse = jax.jit(host_function(np.linalg.inv, out=same))
    with pytest.raises(np.linalg.LinAlgError), sx.host.host_exceptions():
        jax.block_until_ready(inverse(jnp.zeros((2, 2))))


def test_host_exception_leaves_other_errors_alone() -> None:
    assert sx.host.host_exception(ValueError("[host exception 0]")) is None
    with pytest.raises(ZeroDivisionError), sx.host.host_exceptions():
        raise ZeroDivisionError


def test_host_exception_keeps_only_the_latest_exceptions() -> None:
    errors = []
    for _ in range(20):
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.jit(FAILING)(1.0).block_until_ready()
        errors.append(caught.value)
    found = [sx.host.host_exception(error) is not None for error in errors]
    assert found == [False] * 4 + [True] * 16


def test_program_runs_again_after_a_failure() -> None:
    def checked(x: np.ndarray) -> np.ndarray:
        if x < 0:
            raise LibraryError("negative")
        return np.sqrt(x)

    root = jax.jit(host_function(checked, out=same))
    with pytest.raises(LibraryError, match="negative"), sx.host.host_exceptions():
        root(-1.0).block_until_ready()
    assert float(root(4.0)) == 2.0
