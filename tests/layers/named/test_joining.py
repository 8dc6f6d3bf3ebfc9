# SPDX-License-Identifier: Apache-2.0
"""Making named arrays, putting them together, taking them apart, scanning along a name."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax import named
from shardax.errors import NamedAxesError
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

# --- making ---


def test_wrap_takes_the_axes_of_a_variable():
    weight = sx.Param(jnp.zeros((2, 3, 4)), axes=("a", None, "b"))
    assert wrap(weight).dims == ("a", None, "b")
    assert wrap(weight, "x", "y", "z").dims == ("x", "y", "z")
    assert wrap(sx.Param(jnp.zeros(2))).dims == wrap(np.zeros(2)).dims == (None,)
    assert wrap(3).dims == ()


def test_constants_are_stored_in_given_axis_order():
    assert zeros({"b": 2, "a": 3}).dims == named.ones({"b": 2, "a": 3}).dims == ("b", "a")
    assert named.full({"a": 2}, 1.5).data.tolist() == [1.5, 1.5]
    assert named.zeros({"a": 2}, jnp.int32).dtype == jnp.int32
    assert named.arange({"a": 3}, 1.5, 0.5).data.tolist() == [1.5, 2.0, 2.5]
    assert named.arange({"a": 3}, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "draw",
    [
        lambda key, axes: named.normal(key, axes),
        lambda key, axes: named.uniform(key, axes, minval=2, maxval=3),
        lambda key, axes: named.randint(key, axes, 0, 100),
        lambda key, axes: named.random(jax.random.gumbel, key, axes),
    ],
)
def test_random_numbers_are_independent_of_axis_order(draw):
    key = jax.random.key(0)
    one, other = draw(key, {"a": 4, "b": 5}), draw(key, {"b": 5, "a": 4})
    assert_same(one, other)
    assert np.unique(np.asarray(one.data)).size > 1
    assert_same(draw(wrap(key), {"a": 4, "b": 5}), one)


@pytest.mark.parametrize("axes", [("a", 2), {"a": 1.5}, {"a": -1}, {None: 2}])
def test_axes_are_sizes_by_name(axes):
    with pytest.raises(sx.errors.NamedAxesError, match="Axes"):
        zeros(axes)


def test_arange_makes_one_axis():
    with pytest.raises(sx.errors.NamedAxesError, match="one axis"):
        named.arange({"a": 2, "b": 3})


# --- together and apart ---


@few
@given(st.data())
def test_concatenate_and_stack_undo_split_and_unstack(data):
    x = data.draw(named_arrays().filter(lambda x: x.axes))
    name = data.draw(st.sampled_from(list(x.axes)))
    first = data.draw(st.integers(0, SIZES[name]))
    orders = [data.draw(st.permutations(x.dims)) for _ in range(2)]
    shorter = [tuple(each for each in order if each != name) for order in orders]

    def run(x):
        parts = named.split(x, name, [first, SIZES[name] - first])
        assert [part.axes[name] for part in parts] == [first, SIZES[name] - first]
        reordered = [part.order_as(*dims) for part, dims in zip(parts, orders, strict=True)]
        slices = named.unstack(x, name)
        assert [part.axes for part in slices] == [x.sum(name).axes] * SIZES[name]
        dims = itertools.cycle(shorter)
        stacked = named.stack([part.order_as(*next(dims)) for part in slices], name)
        return named.concatenate(reordered, name), stacked

    for found in compiled(run, x):
        assert_same(found, x)


def test_concatenate_and_stack_repeat_what_lacks_an_axis():
    x, y = zeros({"a": 2, "b": 3}), named.ones({"a": 1})
    joined = named.concatenate([y, x], "a")
    assert joined.axes == {"a": 3, "b": 3}
    assert joined.sum("b").unwrap("a").tolist() == [3, 0, 0]
    assert named.stack([x, 1.0], "part").axes == {"part": 2, "a": 2, "b": 3}
    assert [part.axes for part in named.split(x, "b", 3)] == [{"a": 2, "b": 1}] * 3


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: named.concatenate([x, zeros({"b": 3})], "a"), "NamedAxesError", "'a'"),
        (lambda x: named.concatenate([x, zeros({"a": 2, "b": 4})], "a"), "NamedAxesError", "'b'"),
        (lambda x: named.concatenate([], "a"), "NamedAxesError", "at least one"),
        (lambda x: named.stack([x, x], "a"), "PartitionError", "'a' more than once"),
        (lambda x: named.stack([x, jnp.ones(3)], "c"), "NamedAxesError", r"\(3,\)"),
        (lambda x: named.split(x, "b", 2), "NamedAxesError", "size 3"),
        (lambda x: named.split(x, "b", [1, 1]), "NamedAxesError", r"\(1, 1\)"),
        (lambda x: named.split(x, "c", 1), "NamedAxesError", "no axis 'c'"),
        (lambda x: named.unstack(x, "c"), "NamedAxesError", "no axis 'c'"),
        (lambda x: named.unstack(jnp.ones(3), "c"), "NamedAxesError", r"unstack.*\(3,\)"),
        (lambda x: named.split(3, "c", 1), "NamedAxesError", "split.*int"),
        (lambda x: named.dot(x, jnp.ones(3), "b"), "NamedAxesError", r"dot.*\(3,\)"),
        (lambda x: named.dot(x, x.untag("a"), "a"), "NamedAxesError", "'a'"),
        (lambda x: named.dot(x.untag("a"), x.untag("a"), "b"), "NamedAxesError", "positional"),
        (lambda x: named.softmax([1.0], "b"), "NamedAxesError", "softmax.*list"),
        (lambda x: named.where(True, 1, 2), "NamedAxesError", "jnp.where"),
        (lambda x: named.where(x, "text", 2), "NamedAxesError", "'text'"),
    ],
)
def test_unfit_arguments_are_errors(call, error, text):
    with pytest.raises(getattr(sx.errors, error), match=text):
        call(zeros({"a": 2, "b": 3}))


@few
@given(st.data())
def test_where_meets_by_name(data):
    x, y = data.draw(named_arrays()), data.draw(named_arrays())
    x, y = data.draw(restored(x)), data.draw(restored(y))
    found = compiled(lambda x, y: named.where(x > 3, y, -1.0), x, y)
    np.testing.assert_array_equal(plain(found), np.where(plain(x) > 3, plain(y), -1.0))
    assert found.axes.keys() == {*x.axes, *y.axes}
    assert found.dtype == np.float32


@few
@given(st.data())
def test_dot_is_the_sum_of_products(data):
    x = data.draw(named_arrays(positional=0).filter(lambda x: x.axes))
    y = data.draw(named_arrays(positional=1))
    names = [name for name in x.axes if name in y.axes]
    x, y = data.draw(restored(x)), data.draw(restored(y))
    found = compiled(lambda x, y: named.dot(x, y, names), x, y)
    along = tuple(len(POSITIONAL) + list(SIZES).index(name) for name in names)
    expected = (plain(x) * plain(y)).sum(along, keepdims=True)
    np.testing.assert_array_equal(plain(found), expected)
    assert found.axes.keys() == {*x.axes, *y.axes} - {*names}
    assert found.positional_shape == y.positional_shape


def test_dot_takes_one_name_or_variables():
    x, weight = named.ones({"a": 2, "b": 3}), sx.Param(named.ones({"b": 3}))
    assert_same(named.dot(x, weight, "b"), named.full({"a": 2}, 3.0))
    assert named.dot(x, weight, "b", dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_softmax_is_normalized_along_its_axis():
    numbers = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    x = wrap(numbers, "a", "b")
    by_name, by_place = jax.jit(
        lambda x: (named.softmax(x, "b"), named.softmax(x.untag("b"), 0).tag("b"))
    )(x)
    expected = np.exp(numbers) / np.exp(numbers).sum(1, keepdims=True)
    for found in (by_name, by_place):
        np.testing.assert_allclose(found.unwrap("a", "b"), expected, rtol=1e-6)


# --- scan ---


@few
@given(st.data())
def test_scan_along_a_name_loops_over_slices(data):
    x = data.draw(named_arrays(positional=1).filter(lambda x: x.axes))
    name = data.draw(st.sampled_from(list(x.axes)))
    dims = []

    def step(total, now):
        total = (total + now).order_as(*reversed(total.dims)) if now.ndim > 1 else total + now
        return total, {"total": total, "one": 1}

    def run(x, y):
        start = x.sum(name) * 0
        last, results = named.scan(step, name, start, y)
        dims.extend([last.dims, start.dims])
        return last, results

    last, results = compiled(run, x, data.draw(restored(x)))
    assert_same(last, by_numpy(x, name, np.sum))
    assert_same(results["total"], by_numpy(x, name, np.cumsum))
    assert_same(results["one"], NamedArray(np.ones(SIZES[name], np.int32), (name,)))
    assert dims[0] == dims[1]


def by_numpy(x, name, function):
    """The sum or running sums along a name."""
    place = x.dims.index(name)
    found = function(np.asarray(x.data), place)
    return NamedArray(
        found, x.dims if found.ndim == x.ndim else x.dims[:place] + x.dims[place + 1 :]
    )


def test_scan_goes_backwards_and_without_slices():
    x = named.arange({"t": 3})
    _, rows = named.scan(lambda c, v: (c + v, c), "t", 0, x, reverse=True)
    assert rows.unwrap("t").tolist() == [3, 2, 0]
    last, rows = named.scan(lambda c, _: (2 * c, c), "t", zeros({"a": 2}) + 1, length=3)
    assert (last.data.tolist(), rows.axes) == ([8, 8], {"t": 3, "a": 2})


def test_scan_reads_and_writes_variables_in_order():
    count = sx.Variable(0)

    def step(carry, now):
        count[...] = count + 1
        return carry, now * count.value

    _, rows = named.scan(step, "t", None, named.ones({"t": 3}))
    assert rows.unwrap("t").tolist() == [1, 2, 3]
    assert int(count) == 3


def test_scan_transposes_no_carry_whatever_its_storage():
    def program(start, steps):
        carry, xs = wrap(start, "b", "a"), wrap(steps, "t")
        return named.scan(lambda c, v: (c * v, None), "t", carry, xs)[0].data

    text = str(jax.make_jaxpr(program)(jnp.ones((2, 3)), jnp.ones(4)))
    assert "scan" in text
    assert "transpose" not in text


def test_scan_can_be_compiled_and_differentiated():
    x = named.arange({"t": 3}) * 1.0

    @jax.jit
    @jax.grad
    def gradient(start):
        return named.scan(lambda c, v: (c * v + c, None), "t", start, x)[0].unwrap()

    assert_same(gradient(zeros({})), zeros({}) + 6)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda c, v: (c + v, None), r"carry\['c'\].*gained 'b'.*broadcast_axes\(\{'b': 2\}\)"),
        (lambda c, v: (c.sum("a"), None), r"'a': 3\} and is returned as float32\{\}"),
        (lambda c, v: (c.astype(int), None), "astype"),
        (lambda c, v: (c.data, None), r"float32\[3\]"),
        (lambda c, v: (c.at[{"a": 0}].get(), None), "carry"),
    ],
)
def test_changed_carry_error_names_its_axes(step, text):
    def inside(carry, now):
        new, result = step(carry["c"], now)
        return {"c": new}, result

    with pytest.raises(sx.errors.TransformError, match=text):
        named.scan(inside, "t", {"c": zeros({"a": 3})}, zeros({"t": 4, "b": 2}))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda f: named.scan(f, "t", 0, {"x": zeros({"a": 2})}), "NamedAxesError", r"xs\['x'\]"),
        (lambda f: named.scan(f, "t", 0, [jnp.ones(3)]), "NamedAxesError", r"xs\[0\].*wrap"),
        (
            lambda f: named.scan(f, "t", 0, [zeros({"t": 2}), zeros({"t": 3})]),
            "NamedAxesError",
            r"2 at xs\[0\], 3 at xs\[1\]",
        ),
        (
            lambda f: named.scan(lambda c, x: c, "t", 0, zeros({"t": 2})),
            "TransformError",
            r"\(carry, None\)",
        ),
    ],
)
def test_unfit_inputs_and_results_of_scan_are_errors(call, error, text):
    with pytest.raises(getattr(sx.errors, error), match=text):
        call(lambda c, x: (0, x))


def test_result_with_the_scanned_axis_is_an_error():
    x = NamedArray(jnp.zeros(3), ("t",))
    with pytest.raises(sx.errors.PartitionError, match="'t' more than once"):
        named.scan(lambda c, v: (c, x), "t", 0, x)


def test_named_bounds_meet_draws_by_name() -> None:
    key = jax.random.key(0)
    low = named.wrap(np.array([[0.0, 10.0, 20.0]], np.float32).T, "b", "c")  # (3, 1)
    high = sx.Param(named.wrap(np.array([5.0, 6.0], np.float32), "a"))
    drawn = named.uniform(key, {"b": 3, "a": 2, "c": 1}, minval=low, maxval=high.value + 20)
    plain = jax.random.uniform(
        key,
        (2, 3, 1),
        minval=np.array([[[0.0], [10.0], [20.0]]]),
        maxval=np.array([[[25.0]], [[26.0]]]),
    )
    np.testing.assert_array_equal(drawn.unwrap("a", "b", "c"), plain)
    least = named.arange({"a": 2}) * 100
    integers = named.randint(key, {"b": 3, "a": 2}, least, least + 2).unwrap("a", "b")
    np.testing.assert_array_equal(
        integers, jax.random.randint(key, (2, 3), np.array([[0], [100]]), np.array([[2], [102]]))
    )
    signs = named.random(
        jax.random.bernoulli, key, {"a": 2}, p=sx.Param(named.arange({"a": 2}, dtype=float))
    )
    assert signs.unwrap("a").tolist() == [False, True]


def test_named_bounds_of_several_keys() -> None:
    keys = named.random_split(jax.random.key(0), {"batch": 2})
    low = named.wrap(np.array([[0.0, 10.0, 20.0], [100.0, 110.0, 120.0]]), "batch", "b")
    draw = sx.jit(lambda keys, low: named.uniform(keys, {"b": 3}, minval=low, maxval=low + 1))
    drawn = draw(keys, low).unwrap("batch", "b")
    for number, key in enumerate(keys.unwrap("batch")):
        row = low.unwrap("batch", "b")[number]
        expected = jax.random.uniform(key, (3,), minval=row, maxval=row + 1)
        np.testing.assert_array_equal(drawn[number], expected)


@pytest.mark.parametrize(
    "bound", [named.zeros({"other": 2}), named.zeros({"a": 3}), named.wrap(np.zeros(2))]
)
def test_bounds_of_other_axes_are_refused(bound: Any) -> None:
    message = r"minval has the dimensions .*, but numbers are drawn along {'a': 2}"
    with pytest.raises(NamedAxesError, match=message):
        named.uniform(jax.random.key(0), {"a": 2}, minval=bound)
    with pytest.raises(NamedAxesError, match=message):
        named.randint(jax.random.key(0), {"a": 2}, bound, 3)
