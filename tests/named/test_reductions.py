# SPDX-License-Identifier: Apache-2.0
"""Reductions along names: NumPy's numbers, whatever the storage order."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.named.arrays import assert_same, few, named_arrays, restored

import shardax as sx
from shardax.named import NamedArray, wrap, zeros

REDUCTIONS = ["sum", "prod", "mean", "std", "var", "max", "min", "all", "any"]
ALONG = ["argmax", "argmin", "cumsum", "cumprod", "sort", "argsort"]


@few
@given(st.data(), st.sampled_from(REDUCTIONS))
def test_a_reduction_is_numpys_along_the_dimension_of_that_name(data, name):
    x = data.draw(named_arrays(positional=0))
    axes = data.draw(st.lists(st.sampled_from(x.dims or (None,)), unique=True))
    axes = [axis for axis in axes if axis is not None]
    found = getattr(x, name)(axes)
    expected = getattr(np.asarray(x.data), name)(axis=tuple(map(x.dims.index, axes)))
    assert found.dims == tuple(each for each in x.dims if each not in axes)
    np.testing.assert_allclose(found.data, expected, rtol=1e-5, atol=1e-6)


@few
@given(st.data(), st.sampled_from([*REDUCTIONS, *ALONG]))
def test_storage_order_does_not_matter(data, name):
    x = data.draw(named_arrays())
    y = data.draw(restored(x))
    for axis in x.axes:
        found, expected = getattr(y, name)(axis), getattr(x, name)(axis)
        assert found.axes == expected.axes
        np.testing.assert_allclose(
            found.unwrap(*expected.axes), expected.unwrap(*expected.axes), rtol=1e-5, atol=1e-6
        )


@few
@given(st.data(), st.sampled_from(ALONG))
def test_what_works_along_an_axis_is_numpys(data, name):
    x = data.draw(named_arrays(positional=0))
    for axis in x.axes:
        found = getattr(x, name)(axis)
        expected = getattr(jnp, name)(x.data, axis=x.dims.index(axis))
        np.testing.assert_array_equal(found.data, expected)
        kept = tuple(each for each in x.dims if each != axis or not name.startswith("arg"))
        assert found.dims == (x.dims if name == "argsort" else kept)


def test_without_an_axis_positional_dimensions_are_reduced_and_otherwise_all():
    x = NamedArray(jnp.arange(6.0).reshape(2, 3), ("a", None))
    assert x.sum().axes == {"a": 2}
    assert x.sum(0).data.tolist() == x.sum(-1).data.tolist() == [3.0, 12.0]
    assert x.tag("b").sum().item() == 15.0
    assert_same(x.tag("b").untag("b").max(), x.tag("b").max("b"))


def test_a_tuple_that_is_a_name_is_that_name():
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
def test_an_axis_that_there_is_not_is_an_error(axis):
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
