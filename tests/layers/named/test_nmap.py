# SPDX-License-Identifier: Apache-2.0
"""``nmap`` runs a function of plain arrays along all names of its arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax import named
from shardax.named import NamedArray, nmap, random_split, wrap, zeros
from tests.layers.named.arrays import assert_same, compiled, few, named_arrays, plain, restored


@few
@given(st.data())
def test_elementwise_functions_equal_the_operators(data):
    x, y = (data.draw(restored(data.draw(named_arrays(positional=0)))) for _ in range(2))
    found = compiled(nmap(lambda a, b: a * b + 1), x, y)
    np.testing.assert_array_equal(plain(found), plain(x) * plain(y) + 1)
    assert found.axes.keys() == {*x.axes, *y.axes}


@few
@given(st.data())
def test_function_of_vectors_sees_the_untagged_axis(data):
    x = data.draw(named_arrays(positional=0).filter(lambda x: x.dims))
    name = data.draw(st.sampled_from(x.dims))
    y = data.draw(restored(x))
    found = compiled(lambda y: nmap(jnp.cumsum)(y.untag(name)).tag(name), y)
    assert_same(found, NamedArray(np.asarray(x.data).cumsum(x.dims.index(name)), x.dims))


def test_arguments_and_results_may_be_pytrees():
    x = NamedArray(jnp.arange(3.0), ("a",))

    @nmap
    def mixed(tree, plain, *, flag, scale):
        assert plain.shape == (2,)
        assert flag == "on"
        return {"sum": tree["x"] + plain.sum(), "none": None, "pair": (scale * plain, 7)}

    found = mixed({"x": x}, jnp.ones(2), flag="on", scale=NamedArray(jnp.arange(2.0), ("b",)))
    assert found["none"] is None
    assert_same(found["sum"], (x + 2).broadcast_axes({"b": 2}))
    assert found["pair"][0].axes == {"a": 3, "b": 2}
    assert found["pair"][0].positional_shape == (2,)
    assert found["pair"][1].axes == {"a": 3, "b": 2}


def test_collectives_find_the_names():
    x = NamedArray(jnp.arange(6.0).reshape(2, 3), ("a", "b"))
    found = nmap(lambda v: v / jax.lax.psum(v, "b") + jax.lax.axis_index("a"))(x)
    expected = x / x.sum("b") + named.arange({"a": 2})
    np.testing.assert_allclose(found.unwrap("a", "b"), expected.unwrap("a", "b"), rtol=1e-6)


def test_functions_methods_partials_and_modules_are_decorated():
    class Twice(sx.Module):
        def __call__(self, x):
            return 2 * x

        def thrice(self, x):
            return 3 * x

    x = NamedArray(jnp.arange(3.0), ("a",))
    twice = Twice()
    calls = [nmap(twice), nmap(functools.partial(jnp.multiply, 2)), nmap(lambda v: 2 * v)]
    for call in calls:
        assert_same(call(x), x + x)
    assert_same(nmap(twice.thrice)(x), x + x + x)
    assert nmap(jnp.sin).__name__ == "sin"


def test_nmap_works_under_jit_and_grad():
    x = NamedArray(jnp.arange(3.0), ("a",))
    square = nmap(lambda v: v**2)
    assert_same(jax.jit(square)(x), x * x)
    assert_same(jax.grad(lambda x: square(x).sum().unwrap())(x), x + x)


def test_size_conflict_lists_every_argument():
    with pytest.raises(sx.errors.NamedAxesError) as error:
        nmap(jnp.add)(zeros({"a": 2, "b": 3}), zeros({"a": 4}))
    text = str(error.value)
    assert "argument 0 has {'a': 2, 'b': 3}; argument 1 has {'a': 4}" in text


# --- what is captured ---


def test_captured_array_with_mapped_name_is_an_error():
    x = NamedArray(jnp.arange(3.0), ("a",))
    captured = NamedArray(jnp.ones((3, 2)), ("a", "b"))
    for use in (
        lambda v: v + captured,
        lambda v: captured * 2,
        lambda v: captured.sum("b").sum(),
        lambda v: captured[{"b": 0}],
        lambda v: captured,
        lambda v: nmap(jnp.sin)(captured),
        lambda v: v + captured.order_as("b", "a"),
    ):
        with pytest.raises(sx.errors.ClosureError, match="'a'"):
            nmap(use)(x)
    assert_same(captured + 1, captured * 2)  # and it is as it was


def test_captured_array_may_be_unwrapped_or_renamed():
    x = NamedArray(jnp.arange(3.0), ("a",))
    captured = NamedArray(jnp.arange(3.0), ("a",))
    assert_same(nmap(lambda v: v * captured.unwrap("a").sum())(x), x * 3)
    other = captured.rename({"a": "b"})
    assert_same(nmap(lambda v: v * other)(x), x * other)
    assert_same(nmap(lambda v: (v * other).sum("b"))(x), x * 3)


def test_nmap_refuses_results_that_are_no_arrays():
    with pytest.raises(sx.errors.NamedAxesError, match="'text'"):
        nmap(lambda v: "text")(zeros({"a": 2}))


# --- Modules ---


class Counter(sx.Module):
    """A Module with state."""

    def __init__(self):
        self.weight = sx.Param(jnp.float32(3))
        self.calls = sx.Variable(0)
        self.last = sx.Variable(jnp.float32(0))

    def __call__(self, x):
        self.calls += 1
        return self.weight * x

    def remember(self, x):
        self.last[...] = x
        return x


@pytest.mark.parametrize(
    "call", [lambda m, x: nmap(m)(x), lambda m, x: nmap(lambda m, v: m(v))(m, x)]
)
def test_module_is_shared_and_its_writes_kept(call):
    counter = Counter()
    x = NamedArray(jnp.arange(6.0).reshape(2, 3), ("a", "b"))
    assert_same(call(counter, x), 3 * x)
    assert int(counter.calls) == 1


def test_variable_stands_for_its_named_array():
    weight = sx.Param(NamedArray(jnp.arange(3.0), ("a",)))
    assert_same(nmap(jnp.add)(weight, 1.0), weight.value + 1)


def test_writing_what_differs_between_positions_is_an_error():
    counter = Counter()
    with pytest.raises(sx.errors.TransformError, match="last"):
        nmap(counter.remember)(NamedArray(jnp.arange(2.0), ("a",)))
    assert float(counter.last) == 0


def test_writing_a_captured_module_is_an_error():
    counter = Counter()
    with pytest.raises(sx.errors.TraceLeakError):
        nmap(lambda v: counter(v))(NamedArray(jnp.arange(2.0), ("a",)))
    assert int(counter.calls) == 0


# --- randomness ---


def test_noise_varies_along_split_keys_only():
    draw = nmap(lambda v, key: v + jax.random.normal(key))
    x = zeros({"a": 3, "b": 2})

    @jax.jit
    def all_draws(x, key):
        keys = key, random_split(key, {"b": 2, "a": 3}), random_split(key, {"a": 3})
        return [draw(x, each) for each in keys]

    same, each, along_a = all_draws(x, jax.random.key(0))
    assert np.unique(np.asarray(same.data)).size == 1
    assert np.unique(np.asarray(each.data)).size == 6
    assert [np.unique(row).size for row in np.asarray(along_a.unwrap("a", "b"))] == [1, 1, 1]


def test_keys_are_independent_of_axis_order():
    one = random_split(jax.random.key(0), {"a": 2, "b": 3})
    other = random_split(jax.random.key(0), {"b": 3, "a": 2})
    np.testing.assert_array_equal(
        *(jax.random.key_data(keys.unwrap("a", "b")) for keys in (one, other))
    )


def test_methods_that_count_dimensions_run_along_the_names():
    x = NamedArray(jnp.arange(12.0).reshape(2, 3, 2), ("a", None, None))
    assert x.T.positional_shape == (2, 3)
    assert x.reshape(6).positional_shape == x.ravel().positional_shape == (6,)
    assert_same(x.T.T, x)
    assert_same(x.clip(2, 5), wrap(jnp.clip(x.data, 2, 5), "a", None, None))
    assert x.swapaxes(0, 1).axes == {"a": 2}
