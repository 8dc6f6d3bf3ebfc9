# SPDX-License-Identifier: Apache-2.0
"""Reductions along names: NumPy's numbers, whatever the storage order."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.named import NamedArray, wrap, zeros
from tests.layers.named.arrays import assert_same, compiled, few, named_arrays, plain, restored

REDUCTIONS = ["sum", "prod", "mean", "std", "var", "max", "min", "all", "any"]
ALONG = ["argmax", "argmin", "cumsum", "cumprod", "sort", "argsort"]


def few_of(names):
    return st.lists(st.sampled_from(names), unique=True, min_size=2, max_size=2)


@few
@given(st.data(), few_of(REDUCTIONS))
def test_reductions_along_names_equal_numpy(data, names):
    x = data.draw(named_arrays(positional=0))
    axes = data.draw(st.lists(st.sampled_from(x.dims), unique=True)) if x.dims else []
    kept = tuple(each for each in x.dims if each not in axes)
    dims = []

    def run(x, y):
        found = [(getattr(x, name)(axes), getattr(y, name)(axes)) for name in names]
        dims.extend(one.dims for one, _ in found)
        return found

    found = compiled(run, x, data.draw(restored(x)))
    for name, results in zip(names, found, strict=True):
        expected = getattr(np.asarray(x.data), name)(axis=tuple(map(x.dims.index, axes)))
        assert_numbers(results, NamedArray(expected, kept))
    assert dims == [kept] * len(names)


@few
@given(st.data(), few_of([*REDUCTIONS, *ALONG]))
def test_functions_along_one_name_equal_numpy(data, names):
    x = data.draw(named_arrays().filter(lambda x: x.axes))
    axis = data.draw(st.sampled_from([*x.axes]))
    dims = []

    def run(x, y):
        found = [(getattr(x, name)(axis), getattr(y, name)(axis)) for name in names]
        dims.extend(one.dims for one, _ in found)
        return found

    found = compiled(run, x, data.draw(restored(x)))
    shorter = tuple(each for each in x.dims if each != axis)
    for name, results, dims_of_result in zip(names, found, dims, strict=True):
        options = {"kind": "stable"} if name == "argsort" else {}
        expected = getattr(np, name)(np.asarray(x.data), axis=x.dims.index(axis), **options)
        assert dims_of_result == (shorter if expected.ndim < x.ndim else x.dims)
        assert_numbers(results, NamedArray(expected, dims_of_result))


def assert_numbers(results, expected):
    for found in results:
        assert found.axes == expected.axes
        assert found.positional_shape == expected.positional_shape
        np.testing.assert_allclose(plain(found), plain(expected), rtol=1e-5, atol=1e-6)


def test_positional_dimensions_are_reduced_by_default():
    x = NamedArray(jnp.arange(6.0).reshape(2, 3), ("a", None))
    assert x.sum().axes == {"a": 2}
    assert x.sum(0).data.tolist() == x.sum(-1).data.tolist() == [3.0, 12.0]
    assert x.tag("b").sum().item() == 15.0
    assert_same(x.tag("b").untag("b").max(), x.tag("b").max("b"))


def test_tuple_that_is_a_name_is_reduced():
    x = NamedArray(jnp.ones((2, 3)), (("a", "b"), "a"))
    assert x.sum(("a", "b")).axes == {"a": 3}
    assert x.sum([("a", "b"), "a"]).dims == ()


def test_where_meets_by_name():
    x = NamedArray(jnp.arange(6.0).reshape(2, 3), ("a", "b"))
    mask = NamedArray(jnp.array([True, False, True]), ("b",))
    assert x.sum("b", where=mask).data.tolist() == [2.0, 8.0]
    assert x.max("a", where=mask, initial=-1).data.tolist() == [3.0, -1.0, 5.0]
    with pytest.raises(sx.errors.NamedAxesError, match="'c'"):
        x.sum("b", where=NamedArray(jnp.array([True]), ("c",)))


def test_keepdims_is_for_positional_dimensions():
    x = NamedArray(jnp.ones((2, 3)), ("a", None))
    assert x.mean(keepdims=True).shape == (2, 1)
    with pytest.raises(sx.errors.NamedAxesError, match=r"\['a'\].*not needed"):
        x.mean("a", keepdims=True)


@pytest.mark.parametrize("axis", ["c", 1, -2, None, ("a", "a"), True])
def test_unknown_axis_is_an_error(axis):
    x = NamedArray(jnp.ones((2, 3)), ("a", None))
    if axis is None:
        with pytest.raises(sx.errors.NamedAxesError, match="argmax works along one axis"):
            zeros({"a": 2, "b": 3}).argmax()
    else:
        with pytest.raises(sx.errors.NamedAxesError, match="axis"):
            x.sum(axis)


def test_dtypes_and_degrees_of_freedom_are_passed_on():
    x = wrap(np.array([1, 2, 4]), "a")
    assert x.sum(dtype=np.float32).dtype == np.float32
    np.testing.assert_allclose(x.var("a", ddof=1).item(), np.var([1, 2, 4], ddof=1), rtol=1e-6)
