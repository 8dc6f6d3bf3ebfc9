# SPDX-License-Identifier: Apache-2.0
"""Indexing by name, reading and updating, is NumPy's on aligned arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.named import NamedArray, wrap, zeros
from tests.layers.named.arrays import (
    SIZES,
    assert_same,
    compiled,
    few,
    named_arrays,
    restored,
    unwrapped,
)


@st.composite
def entries(draw, name):
    """An index of one axis that needs no other name."""
    size = SIZES[name]
    positions = st.integers(-size, size - 1)
    kind = draw(st.sampled_from(["int", "slice", "list", "mask", "traced"]))
    if kind == "int":
        return draw(positions)
    if kind == "slice":
        bound = st.none() | st.integers(-size - 1, size + 1)
        step = st.sampled_from([None, 1, 2, -1])
        return slice(draw(bound), draw(bound), draw(step))
    if kind == "list":
        return np.array(draw(st.lists(positions, max_size=3)), dtype=np.int32)
    if kind == "mask":
        return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    return jnp.asarray(draw(positions))


@st.composite
def indexed(draw):
    """An array and an index for some of its names."""
    x = draw(named_arrays(positional=1))
    names = draw(st.lists(st.sampled_from(list(x.axes) or [None]), unique=True, max_size=2))
    return x, {name: draw(entries(name)) for name in names if name is not None}


def by_hand(x, index):
    """NumPy's result, one axis after another, and its dims."""
    data, dims = np.asarray(x.data), list(x.dims)
    for name, entry in index.items():
        place = dims.index(name)
        data = data[
            (slice(None),) * place + (np.asarray(entry) if not isinstance(entry, slice) else entry,)
        ]
        if np.ndim(entry) == 0 and not isinstance(entry, slice):
            dims.remove(name)
    return NamedArray(data, dims)


@few
@given(st.data(), indexed())
def test_reading_equals_numpy_in_any_storage_order(data, case):
    x, index = case
    y = data.draw(restored(x))
    expected = by_hand(x, index)
    for found in compiled(lambda x, y: (x[index], y[index]), x, y):
        assert_same(found, expected)


NUMPYS = {
    "set": lambda old, new: new,
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "min": np.minimum,
    "max": np.maximum,
}


@few
@given(st.data(), indexed())
def test_updates_change_exactly_what_the_index_reads(data, case):
    x, index = case
    unique = {
        key: np.unique(entry % x.axes[key])
        if isinstance(entry, np.ndarray) and entry.dtype != bool
        else entry
        for key, entry in index.items()
    }
    part = by_hand(x, unique)
    lacking = data.draw(st.sampled_from([None, *part.axes]))
    given, dims = np.asarray(part.data) + 1, part.dims
    if lacking is not None:  # it is repeated along the name
        along = dims.index(lacking)
        given, dims = given.sum(along), (*dims[:along], *dims[along + 1 :])
    value = NamedArray(jnp.asarray(given), dims)

    def update(x, value):
        return {name: getattr(x.at[unique], name)(value) for name in NUMPYS}

    places = NamedArray(np.arange(x.size).reshape(x.shape), x.dims)
    touched = np.asarray(by_hand(places, unique).data)
    if lacking is not None:
        given = np.expand_dims(given, along)
    for name, found in compiled(update, data.draw(restored(x)), value).items():
        expected = np.array(x.data).ravel()
        expected[touched] = NUMPYS[name](expected[touched], given)
        assert found.axes == x.axes
        found = unwrapped(found, *x.axes)
        expected = unwrapped(NamedArray(expected.reshape(x.shape), x.dims), *x.axes)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_named_integers_add_their_axes():
    x = NamedArray(jnp.arange(12).reshape(3, 4), ("a", "b"))
    at = NamedArray(jnp.array([[2, 0], [1, 1]]), ("c", "d"))
    found = x[{"a": at}]
    assert found.axes == {"c": 2, "d": 2, "b": 4}
    np.testing.assert_array_equal(found.unwrap("c", "d", "b"), np.asarray(x.data)[at.data])


def test_integers_that_share_a_name_go_together():
    x = NamedArray(jnp.arange(12).reshape(3, 4), ("a", "b"))
    rows, columns = wrap(jnp.array([0, 2]), "pair"), wrap(jnp.array([1, 3]), "pair")
    assert x[{"a": rows, "b": columns}].unwrap("pair").tolist() == [1, 11]
    # A name that the array has too pairs each position with its own.
    best = x.argmax("b")
    assert x[{"b": best}].unwrap("a").tolist() == x.max("b").unwrap("a").tolist()
    assert_same(x.order_as("b", "a")[{"b": best}], x[{"b": best}])


def test_updates_at_integers_with_names():
    x = zeros({"a": 3, "b": 2})
    rows = wrap(jnp.array([0, 2]), "k")
    found = x.at[{"a": rows}].set(wrap(jnp.array([1.0, 2.0]), "k"))
    assert found.unwrap("a", "b").tolist() == [[1, 1], [0, 0], [2, 2]]
    again = x.at[{"a": wrap(jnp.array([1, 1]), "k")}].add(1)
    assert again.unwrap("a", "b").tolist() == [[0, 0], [2, 2], [0, 0]]
    assert x.at[{"a": 1}].apply(jnp.exp)[{"a": 1}].sum().item() == 2.0
    assert x.at[{"a": jnp.array(9)}].get(mode="fill", fill_value=7).sum().item() == 14.0


def test_positional_indices_equal_numpy_along_names():
    data = np.arange(24).reshape(2, 3, 4)
    x = NamedArray(jnp.asarray(data), (None, "a", None))
    rows = np.moveaxis(data, 1, 0)
    indices = [
        0,
        (..., 1),
        (0, slice(1, 3)),
        (slice(None), np.array([3, 0])),
        np.array([1, 0, 1]),
        (np.array([0, 1]), np.array([2, 3])),
        np.array([True, False]),
        rows[0] > 5,
    ]
    found = compiled(lambda x: [x[index] for index in indices], x)
    for index, part in zip(indices, found, strict=True):
        np.testing.assert_array_equal(unwrapped(part, "a"), np.stack([r[index] for r in rows], -1))
    assert x.at[..., 0].set(0)[..., 0].sum().data.tolist() == [0, 0, 0]


def test_mask_may_be_named_by_its_axis():
    x = NamedArray(jnp.arange(6).reshape(2, 3), ("a", "b"))
    assert x[{"b": x[{"a": 0}] != 1}].unwrap("a", "b").tolist() == [[0, 2], [3, 5]]
    assert x.at[{"b": x[{"a": 0}] != 1}].set(9).unwrap("a", "b").tolist() == [[9, 1, 9], [9, 4, 9]]


def test_none_adds_an_axis_by_name():
    x = NamedArray(jnp.arange(2), ("a",))
    assert x[{"new": None, "a": slice(1)}].axes == {"new": 1, "a": 1}
    with pytest.raises(sx.errors.PartitionError, match="'a'"):
        x[{"a": None}]


@pytest.mark.parametrize("index", [{"a": 2}, {"a": -3}, {"a": np.array([0, 2])}, {"a": [5]}])
def test_known_position_out_of_range_is_an_error(index):
    x = zeros({"a": 2, "b": 3})
    for call in (lambda: x[index], lambda: x.at[index].set(1)):
        with pytest.raises(sx.errors.NamedIndexError, match="'a' of size 2"):
            call()


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"z": 0}, "no axis 'z'"),
        ({"a": 1.5}, "1.5"),
        ({"a": jnp.array([1.0])}, "float32"),
        ({"a": jnp.zeros((2, 2), int)}, r"\(2, 2\)"),
        ({"a": np.array([True])}, "booleans"),
        ({"a": NamedArray(jnp.ones((2, 3), bool), ("a", "b"))}, "named.where"),
        ({"a": slice(0, jnp.array(1))}, "arange"),
        (0, "0 positional"),
        ((..., ...), "Ellipsis"),
        (None, "new"),
        ({"b": slice(2), "a": NamedArray(jnp.array([0, 1]), ("b",))}, "twice"),
    ],
)
def test_unfit_index_is_an_error(index, text):
    with pytest.raises(sx.errors.NamedAxesError, match=text):
        zeros({"a": 2, "b": 3})[index]


def test_traced_mask_error_offers_where():
    with pytest.raises(sx.errors.NamedAxesError, match=r"named\.where"):
        jax.jit(lambda x, mask: x[{"a": mask}])(zeros({"a": 2}), jnp.array([True, False]))


def test_value_with_more_axes_is_an_error():
    x = zeros({"a": 2, "b": 3})
    with pytest.raises(sx.errors.NamedAxesError, match=r"'a': 2.*'b': 3"):
        x.at[{"a": 0}].set(x)
    with pytest.raises(sx.errors.NamedAxesError, match="text"):
        x.at[{"a": 0}].set("text")
