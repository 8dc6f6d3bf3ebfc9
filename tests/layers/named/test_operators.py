# SPDX-License-Identifier: Apache-2.0
"""Operators meet by name: what they compute is what plain arrays, aligned by hand, give."""

from __future__ import annotations

import operator

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.named import NamedArray, wrap, zeros
from tests.layers.named.arrays import (
    POSITIONAL,
    SIZES,
    assert_same,
    compiled,
    few,
    named_arrays,
    plain,
    restored,
)

FLOATS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
]
INTEGERS = [
    operator.and_,
    operator.or_,
    operator.xor,
    operator.lshift,
    operator.rshift,
    operator.pow,
]


@few
@given(st.data(), st.sampled_from([(np.float32, FLOATS), (np.int32, INTEGERS)]))
def test_operators_equal_those_of_aligned_plain_arrays(data, kind):
    dtype, operators = kind
    x, y = (data.draw(named_arrays(dtype=dtype)) for _ in range(2))
    reordered = [data.draw(restored(each)) for each in (x, y)]

    def run(x, y, *reordered):
        return [(each(x, y), each(*reordered)) for each in operators]

    for function, results in zip(operators, compiled(run, x, y, *reordered), strict=True):
        expected = function(plain(x), plain(y))
        for found in results:
            np.testing.assert_allclose(plain(found), expected, rtol=1e-6)
            assert found.axes.keys() == {*x.axes, *y.axes}
            assert len(found.positional_shape) == max(
                len(x.positional_shape), len(y.positional_shape)
            )


@few
@given(st.data())
def test_unnamed_array_on_either_side_is_positional(data):
    x = data.draw(named_arrays())
    count = len(x.positional_shape)
    shape = x.positional_shape[count - data.draw(st.integers(0, count)) :]
    array = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    operators = [operator.add, operator.sub, operator.pow, operator.lt]
    others = (array, jnp.asarray(array))

    def run(x):
        return [(f(other, x), f(x, other)) for f in operators for other in others]

    aligned = array.reshape(*(1,) * (len(POSITIONAL) - array.ndim), *shape, *(1,) * len(SIZES))
    expected = [f for f in operators for _ in others]
    for function, (left, right) in zip(expected, compiled(run, x), strict=True):
        for found, wanted in (
            (left, function(aligned, plain(x))),
            (right, function(plain(x), aligned)),
        ):
            np.testing.assert_allclose(plain(found), wanted, rtol=1e-6)
            assert (found.axes, found.positional_shape) == (x.axes, x.positional_shape)


@pytest.mark.parametrize("other", [2, 2.0, True, np.float32(2), np.array(2.0), jnp.array(2.0)])
def test_number_on_either_side_keeps_dims(other):
    data = jnp.arange(3.0)
    x = NamedArray(data, ("a",))
    for found, expected in ((x - other, data - other), (other - x, other - data)):
        assert isinstance(found, NamedArray)
        assert found.dims == ("a",)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.data, expected)


@pytest.mark.parametrize("array", [np.ones(3), jnp.ones(3)])
def test_unnamed_array_with_more_dimensions_is_refused(array):
    x = zeros({"a": 3})
    for function in (operator.add, operator.lt, operator.eq):
        for left, right in ((x, array), (array, x)):
            with pytest.raises(sx.errors.NamedAxesError, match=r"\(3,\).*'a': 3"):
                function(left, right)


def test_size_conflict_error_lists_both_operands():
    with pytest.raises(sx.errors.NamedAxesError) as error:
        zeros({"a": 2, "b": 3}) + zeros({"b": 1})
    assert "{'a': 2, 'b': 3}" in str(error.value)
    assert "{'b': 1}" in str(error.value)


def test_unbroadcastable_positional_dimensions_are_an_error():
    with pytest.raises(sx.errors.NamedAxesError, match="positional"):
        wrap(jnp.ones((2, 3)), None, "a") + wrap(jnp.ones(3))


def test_common_storage_order_is_kept():
    x = zeros({"b": 2, "a": 3})
    assert (x + x).dims == ("b", "a")
    assert (x + zeros({"c": 4})).dims == ("c", "b", "a")
    assert (x + wrap(jnp.ones(5))).dims == ("b", "a", None)


def test_operators_leave_other_operands_to_python():
    x = zeros({"a": 2})
    assert (x == "text") is False
    with pytest.raises(TypeError, match="NamedArray"):
        x + "text"  # pyright: ignore[reportUnusedExpression]


def test_variable_is_as_its_value():
    x = NamedArray(jnp.arange(3.0), ("a",))
    number, named = sx.Param(2.0), sx.Param(x)
    for found in (x * number, number * x, x * 2.0):
        assert_same(found, NamedArray(2 * jnp.arange(3.0), ("a",)))
    for found in (x + named, named + x):
        assert_same(found, NamedArray(2 * jnp.arange(3.0), ("a",)))


def test_unary_operators_and_divmod_keep_the_dims():
    data = jnp.array([-1.5, 2.5])
    x = NamedArray(data, ("a",))
    quotient, rest = divmod(x, 2)
    expected = divmod(data, 2)
    pairs = [(-x, -data), (abs(x), abs(data)), (+x, data), (round(x), round(data))]
    for found, plainly in [*pairs, (quotient, expected[0]), (rest, expected[1])]:
        assert found.dims == ("a",)
        np.testing.assert_array_equal(found.data, plainly)
    assert (~NamedArray(jnp.array([True, False]), ("a",))).data.tolist() == [False, True]


def test_matmul_multiplies_positional_dimensions_along_the_names():
    x = NamedArray(jnp.arange(12.0).reshape(2, 3, 2), ("a", None, None))
    y = NamedArray(jnp.arange(4.0).reshape(2, 2), (None, None))
    found = x @ y
    assert found.axes == {"a": 2}
    np.testing.assert_array_equal(found.untag("a").data.transpose(2, 0, 1), x.data @ y.data)
    np.testing.assert_array_equal((np.ones((2, 3)) @ x[{"a": 0}]).data, np.ones((2, 3)) @ x.data[0])
