# SPDX-License-Identifier: Apache-2.0
"""A named array: its names, what it tells, and how it refuses to lose them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.named import NamedArray, wrap, zeros
from tests.layers.named.arrays import assert_same, few, named_arrays, restored


@dataclasses.dataclass(frozen=True)
class Axis:
    """A name of the user's own."""

    letter: str


class Opaque:
    """A name that does not tell itself apart."""

    def __repr__(self):
        return "Opaque()"


def test_attributes_and_repr_are_those_of_the_array():
    x = NamedArray(jnp.zeros((2, 3, 4), jnp.bfloat16), ("b", None, "a"))
    assert x.dims == ("b", None, "a")
    assert x.axes == {"b": 2, "a": 4}
    assert (x.shape, x.positional_shape, x.ndim, x.size) == ((2, 3, 4), (3,), 3, 24)
    assert (x.dtype, x.nbytes) == (jnp.bfloat16, 48)
    assert x.sharding == x.data.sharding
    assert repr(NamedArray(jnp.arange(2), ("a",))) == (
        "NamedArray(Array([0, 1], dtype=int32), dims=('a',))"
    )


@pytest.mark.parametrize("name", ["a", 3, -1, 2.5, ("a", 0), Axis("x"), frozenset({1}), np.float32])
def test_name_is_anything_hashable(name):
    x = NamedArray(jnp.arange(6).reshape(2, 3), (name, "b"))
    y = x.order_as("b", name)
    np.testing.assert_array_equal((x + y).unwrap(name, "b"), 2 * x.data)
    assert jax.tree.structure(x) == jax.tree.structure(y)
    assert y.sum(name).axes == {"b": 3}
    assert x[{name: 1}].unwrap("b").tolist() == [3, 4, 5]
    assert sx.named.nmap(jnp.sin)(y).axes == {name: 2, "b": 3}
    if not isinstance(name, (int, float, tuple)):  # which mean other things to collectives
        assert sx.named.nmap(lambda v: jax.lax.psum(v, name))(y).axes == {name: 2, "b": 3}


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        (("a", "a"), "'a' more than once"),
        (([], "a"), "of type list"),
        ((Opaque(), Opaque()), "__repr__"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(dims, text):
    with pytest.raises(sx.errors.PartitionError, match=text):
        NamedArray(jnp.zeros((2, 3)), dims)


@pytest.mark.parametrize("dims", [("a",), ("a", "b", "c"), ()])
def test_named_array_needs_one_entry_per_dimension(dims):
    with pytest.raises(sx.errors.NamedAxesError, match=r"\(2, 3\)"):
        NamedArray(jnp.zeros((2, 3)), dims)


def test_named_array_is_not_wrapped_twice():
    with pytest.raises(sx.errors.NamedAxesError, match="tag"):
        wrap(zeros({"a": 2}), "b")


# --- names come and go ---


@few
@given(st.data())
def test_unwrap_undoes_wrap_in_any_order(data):
    x = data.draw(named_arrays(positional=0))
    names = data.draw(st.permutations(x.dims))
    assert_same(wrap(x.unwrap(*names), *names), x)
    np.testing.assert_array_equal(wrap(x.data, *x.dims).unwrap(*x.dims), x.data)


@few
@given(st.data())
def test_tag_undoes_untag_in_any_order(data):
    x = data.draw(named_arrays(positional=0))
    names = data.draw(st.lists(st.sampled_from(x.dims or ("a",)), unique=True))
    names = [name for name in names if name in x.dims]
    y = data.draw(restored(x)).untag(*names)
    assert y.positional_shape == tuple(x.axes[name] for name in names)
    assert_same(y.tag(*names), x)


@few
@given(st.data())
def test_untagged_axes_follow_the_positional_ones(data):
    x = data.draw(named_arrays(names=("a", "b")))
    names = data.draw(st.permutations(list(x.axes)))
    expected = (*x.positional_shape, *(x.axes[name] for name in names))
    assert x.untag(*names).unwrap().shape == expected
    np.testing.assert_array_equal(x.untag(*names).unwrap(), x.unwrap(*names))


@few
@given(st.data())
def test_order_as_and_canonical_change_storage_only(data):
    x = data.draw(named_arrays())
    assert_same(data.draw(restored(x)), x)
    assert_same(x.canonical(), x)
    once = x.canonical()
    assert once.canonical() is once
    assert x.order_as(*x.dims) is x


def test_rename_swaps_and_tag_names_in_order():
    x = NamedArray(jnp.arange(6).reshape(2, 3), ("a", "b"))
    assert x.rename({"a": "b", "b": "a"}).dims == ("b", "a")
    assert x.untag("b", "a").tag("c", None).axes == {"c": 3}
    assert x.untag("b", "a").tag("c", "d").dims == ("c", "d")
    assert x.broadcast_axes({"c": 2, "a": 2}).axes == {"c": 2, "a": 2, "b": 3}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda x: x.tag("c"), "NamedAxesError", "1 names"),
        (lambda x: x.untag("c"), "NamedAxesError", "no axis 'c'"),
        (lambda x: x.untag("a", "a"), "NamedAxesError", "twice"),
        (lambda x: x.unwrap("a"), "NamedAxesError", r"x\.unwrap\('a', 'b'\)"),
        (lambda x: x.unwrap("a", "b", "a"), "NamedAxesError", "twice"),
        (lambda x: x.order_as("a"), "NamedAxesError", r"\('a', 'b'\)"),
        (lambda x: x.order_as("a", "b", None), "NamedAxesError", r"\('a', 'b'\)"),
        (lambda x: x.rename({"c": "d"}), "NamedAxesError", "no axis 'c'"),
        (lambda x: x.rename({"a": "b"}), "PartitionError", "'b' more than once"),
        (lambda x: x.broadcast_axes({"a": 5}), "NamedAxesError", "size 2, not 5"),
    ],
)
def test_missing_or_lost_names_are_errors(change, error, text):
    with pytest.raises(getattr(sx.errors, error), match=text):
        change(zeros({"a": 2, "b": 3}))


# --- beside plain arrays ---


def test_array_without_names_converts_to_numpy():
    x = wrap(jnp.arange(6.0).reshape(2, 3))
    assert np.asarray(x).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(x, np.int32), np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(jnp.asarray(x), x.data)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (len(x), [row.tolist() for row in x], 3 in x[0]) == (2, x.tolist(), False)
    assert zeros({"a": 2}).sum().item() == 0.0
    assert [float(x.sum()), int(x.sum()), complex(x.sum())] == [15.0, 15, 15 + 0j]
    assert [10, 20, 30][wrap(jnp.array(1))] == 20
    assert bool((x < 9).all())


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        np.array,
        jnp.asarray,
        lambda x: np.concatenate([x, x]),
        len,
        list,
        lambda x: 1 in x,
        lambda x: x.tolist(),
        bool,
        float,
        int,
        complex,
        lambda x: x.item(),
        lambda x: range(3)[x],
    ],
)
def test_conversion_that_loses_names_is_an_error(use):
    with pytest.raises(sx.errors.NamedAxesError, match="'a': 2, 'b': 3"):
        use(zeros({"a": 2, "b": 3}))


@pytest.mark.parametrize("use", [np.sin, jnp.sin, jax.lax.sin, lambda x: jnp.stack([x, x]), hash])
def test_functions_of_plain_arrays_refuse_named_ones(use):
    with pytest.raises(TypeError, match="NamedArray"):
        use(zeros({"a": 2}))


def test_elementwise_methods_keep_the_dims():
    x = NamedArray(jnp.array([1 + 2j, 3 - 1j]), ("a",))
    for found, expected in ((x.real, [1, 3]), (x.imag, [2, -1]), (x.conj(), [1 - 2j, 3 + 1j])):
        assert found.dims == ("a",)
        assert found.data.tolist() == expected
    assert x.real.astype(jnp.int32).dtype == jnp.int32
    assert x.block_until_ready() is x
