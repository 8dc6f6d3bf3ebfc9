# SPDX-License-Identifier: Apache-2.0
"""Positions, values and counts of named arrays, slices anywhere, padding: by NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from shardax import named
from shardax.errors import NamedAxesError, NamedIndexError, PartitionError
from shardax.named import NamedArray, wrap
from tests.advice import run_advice

NUMBERS = np.array([[3, 0, 1], [0, 3, -1]])
X = wrap(NUMBERS, "a", "b")
TURNED = X.order_as("b", "a")  # the same array, stored otherwise
BOTH = pytest.mark.parametrize("x", [X, TURNED], ids=["stored", "turned"])


@BOTH
def test_one_hot_puts_the_new_axis_last(x: NamedArray) -> None:
    vectors = named.one_hot(x, {"vocab": 4})
    expected = NUMBERS[..., None] == np.arange(4)
    assert vectors.dims == (*x.dims, "vocab")
    assert vectors.dtype == jnp.float32
    np.testing.assert_array_equal(vectors.unwrap("a", "b", "vocab"), expected)
    assert named.one_hot(x.untag("a"), {"vocab": 4}, jnp.bfloat16).dims.count(None) == 1


@BOTH
def test_nonzero_is_an_index_in_canonical_order(x: NamedArray) -> None:
    places = named.nonzero(x, "hit")
    expected = dict(zip("ab", np.nonzero(NUMBERS), strict=True))
    assert places.keys() == expected.keys()
    for name, place in places.items():
        np.testing.assert_array_equal(place.unwrap("hit"), expected[name])
    np.testing.assert_array_equal(x[places].unwrap("hit"), NUMBERS[NUMBERS != 0])
    inside = jax.jit(lambda x: named.nonzero(x > 1, "hit", size=3, fill_value=1))(x)
    assert {name: place.unwrap("hit").tolist() for name, place in inside.items()} == {
        "a": [0, 1, 1],
        "b": [0, 1, 1],
    }


@BOTH
def test_unique_returns_values_inverse_and_counts(x: NamedArray) -> None:
    values, inverse, counts = named.unique(x, "value", return_inverse=True, return_counts=True)
    expected = np.unique(NUMBERS, return_inverse=True, return_counts=True)
    np.testing.assert_array_equal(values.unwrap("value"), expected[0])
    np.testing.assert_array_equal(inverse.unwrap("a", "b"), expected[1].reshape(NUMBERS.shape))
    np.testing.assert_array_equal(counts.unwrap("value"), expected[2])
    sized = jax.jit(lambda x: named.unique(x, "value", size=6))(x)
    assert sized.unwrap("value").tolist() == [-1, 0, 1, 3, -1, -1]
    few = jax.jit(lambda x: named.unique(x, "value", size=2, fill_value=9))(x)
    assert few.unwrap("value").tolist() == [-1, 0]


@BOTH
def test_bincount_leaves_out_what_is_out_of_range(x: NamedArray) -> None:
    counts = jax.jit(lambda x: named.bincount(x, {"bin": 3}))(x)
    assert (counts.unwrap("bin").tolist(), counts.dtype) == ([2, 1, 0], jnp.int32)
    weights = wrap(np.array([1.0, 10.0, 100.0], np.float32), "b")
    weighted = named.bincount(x, {"bin": 4}, weights=weights)
    assert weighted.unwrap("bin").tolist() == [11.0, 100.0, 0.0, 11.0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_searchsorted_meets_values_by_name(side: str) -> None:
    edges = np.sort(np.array([[4, 1, 7], [2, 2, 9]]), axis=1)
    values = np.array([[1, 4, 8], [2, 9, 0]])
    found = named.searchsorted(wrap(edges, "a", "edge"), wrap(values, "a", "b"), "edge", side=side)
    expected = [np.searchsorted(*pair, side=side) for pair in zip(edges, values, strict=True)]
    np.testing.assert_array_equal(found.unwrap("a", "b"), expected)
    single = named.searchsorted(wrap(edges, "a", "edge"), 2, "edge", side)
    assert single.axes == {"a": 2}


# --- slices anywhere ---

LONG = np.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize("dims", [("a", "b", "c"), ("c", "a", "b"), (None, "b", "c")], ids=str)
def test_dynamic_slices_begin_where_a_program_says(dims: Any) -> None:
    names = [name or "a" for name in ("a", "b", "c")]
    x = wrap(LONG, *names).order_as(*(name or "a" for name in dims))
    x = x.untag("a") if None in dims else x
    run = jax.jit(lambda x, b, c: named.dynamic_slice(x, {"b": b, "c": c}, {"b": 2, "c": 1}))
    part = run(x, 1, 3)
    part = part.tag("a") if None in dims else part
    np.testing.assert_array_equal(part.unwrap("a", "b", "c"), LONG[:, 1:3, 3:4])
    part = named.dynamic_slice(x, {"c": -2}, {"c": 2})
    np.testing.assert_array_equal(
        part.unwrap("b", "c") if None in dims else part.unwrap("a", "b", "c"), LONG[..., 2:]
    )


def test_named_starts_take_a_part_for_each_position() -> None:
    x, starts = wrap(LONG, "a", "b", "c"), wrap(np.array([2, 0]), "a")
    part = named.dynamic_slice(x, {"c": starts}, {"c": 2})
    expected = [LONG[0, :, 2:], LONG[1, :, :2]]
    np.testing.assert_array_equal(part.unwrap("a", "b", "c"), expected)
    several = named.dynamic_slice(x, {"c": starts.rename({"a": "draw"}), "b": 1}, {"c": 2, "b": 1})
    np.testing.assert_array_equal(
        several.unwrap("draw", "a", "b", "c"), [LONG[:, 1:2, 2:], LONG[:, 1:2, :2]]
    )
    assert named.dynamic_slice(x.untag("b"), {"c": starts}, {"c": 2}).positional_shape == (3,)


def test_dynamic_updates_replace_a_part() -> None:
    x, part = wrap(LONG, "a", "b", "c"), wrap(np.array([[-1.0, -2.0], [-3.0, -4.0]]), "c", "a")
    expected = LONG.copy()
    expected[:, :, 1:3] = np.array([[-1, -3], [-2, -4]])[:, None]
    result = jax.jit(named.dynamic_update_slice)(x, part, {"c": 1})
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result.unwrap("a", "b", "c"), expected)
    starts = wrap(np.array([2, 0]), "a")
    expected = LONG.copy()
    expected[0, :, 2:], expected[1, :, :2] = [-1, -3], [-2, -4]
    result = named.dynamic_update_slice(x.order_as("c", "b", "a"), part, {"c": starts})
    np.testing.assert_array_equal(result.unwrap("a", "b", "c"), expected)


@pytest.mark.parametrize(
    ("options", "dims"),
    [({}, ("a", "b")), ({"mode": "wrap"}, ("b", "a")), ({"constant_values": 7}, ("a", "b"))],
)
def test_pad_makes_named_axes_longer(options: Any, dims: Any) -> None:
    padded = named.pad(X.order_as(*dims), {"b": (1, 2)}, **options)
    np.testing.assert_array_equal(
        padded.unwrap("a", "b"), np.pad(NUMBERS, ((0, 0), (1, 2)), **options)
    )
    positional = named.pad(X.untag("a"), {0: 1, "b": 1}, **options)
    np.testing.assert_array_equal(positional.unwrap("b"), np.pad(NUMBERS, 1, **options))


def test_tile_repeats_named_axes() -> None:
    np.testing.assert_array_equal(
        named.tile(TURNED, {"a": 2, "b": 3}).unwrap("a", "b"), np.tile(NUMBERS, (2, 3))
    )
    np.testing.assert_array_equal(
        named.tile(X.untag("a"), {0: 2}).unwrap("b"), np.tile(NUMBERS, (2, 1))
    )


START = wrap(np.array([0, 1]), "b")


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (lambda: named.one_hot(X * 1.0, {"v": 3}), NamedAxesError, "takes integers.*float32"),
        (lambda: named.one_hot(X, {"v": 3, "w": 2}), NamedAxesError, "makes one axis"),
        (lambda: named.one_hot(X, {"a": 3}), PartitionError, "'a' more than once"),
        (lambda: named.nonzero(X.untag("a"), "hit"), NamedAxesError, "Name all dimensions"),
        (lambda: named.nonzero(wrap(3), "hit"), NamedAxesError, "Name all dimensions"),
        (lambda: named.searchsorted(X.untag("a"), 3, "b"), NamedAxesError, "positional"),
        (lambda: named.searchsorted(X, X, "c"), NamedAxesError, "no axis 'c'"),
        (lambda: named.dynamic_slice(X, {"b": 0}, {"a": 1}), NamedAxesError, "a start and a size"),
        (lambda: named.dynamic_slice(X, {"b": 0}, {"b": 4}), NamedAxesError, "array has 3"),
        (
            lambda: named.dynamic_slice(X, {"b": 2}, {"b": 2}),
            NamedIndexError,
            "begins at 1 at most",
        ),
        (lambda: named.dynamic_slice(X, {"b": -4}, {"b": 1}), NamedIndexError, "begins at -4"),
        (
            lambda: named.dynamic_slice(X, {"b": 1.0}, {"b": 1}),
            NamedAxesError,
            "begins at integers",
        ),
        (lambda: named.dynamic_update_slice(X, X, {"c": 0}), NamedAxesError, "each of these names"),
        (
            lambda: named.dynamic_update_slice(X, named.ones({"b": 1, "d": 2}), {"b": 0}),
            NamedAxesError,
            "others of the array",
        ),
        (lambda: named.pad(X, {"c": 1}), NamedAxesError, "no axis 'c'"),
        (lambda: named.pad(X, {"b": -1}), NamedAxesError, "-1 for 'b'"),
        (lambda: named.tile(X, {"b": 1.5}), NamedAxesError, "1.5"),
        (lambda: named.softmax(X, ["a", "a"]), NamedAxesError, "an axis twice"),
        (lambda: named.logsumexp(X, None), NamedAxesError, "no axis None"),
    ],
)
def test_named_functions_refuse_what_does_not_fit(refused: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        refused()


def test_errors_advise_code_that_works() -> None:
    names: dict[str, Any] = {"named": named, "x": X, "starts": np.array([0, 1]), "values": X}
    with pytest.raises(NamedAxesError, match="begins at integers") as caught:
        named.dynamic_slice(X, {"b": names["starts"]}, {"b": 1})
    starts = run_advice(caught.value, "named.wrap(starts, 'batch')", names)
    assert named.dynamic_slice(X, {"b": starts}, {"b": 1}).axes == {"a": 2, "b": 1, "batch": 2}
    with pytest.raises(NamedAxesError, match="one is sliced") as caught:
        named.dynamic_slice(X, {"b": START}, {"b": 1})
    names |= {"starts": START, "old": "b", "new": "draw"}
    assert run_advice(caught.value, "starts.rename({old: new})", names).axes == {"draw": 2}
    with pytest.raises(NamedAxesError, match="which the values have too") as caught:
        named.searchsorted(X, X, "b")
    values = run_advice(caught.value, "values.rename({'b': 'value'})", names)
    assert named.searchsorted(X, values, "b").axes == {"a": 2, "value": 3}
    with pytest.raises(NamedAxesError, match="'c' is not in") as caught:
        named.tile(X, {"c": 2})
    assert run_advice(caught.value, "x.broadcast_axes({'c': 2})", names).axes["c"] == 2
    with pytest.raises(NamedAxesError, match="takes integers") as caught:
        named.bincount(X * 1.0, {"bin": 3})
    assert run_advice(caught.value, "x.astype(int)", {"x": X * 1}).dtype == X.dtype
    for function in (named.nonzero, named.unique):
        with pytest.raises(NamedAxesError, match=r"inside of a trace.*size=8"):
            jax.jit(lambda x, function=function: function(x, "new"))(X)


# --- einsum with an ellipsis, softmax over several axes ---

LEFT = wrap(np.arange(6.0, dtype=np.float32).reshape(2, 3), "b", "e")
RIGHT = wrap(np.arange(12.0, dtype=np.float32).reshape(3, 4), "e", "m")


@pytest.mark.parametrize(
    ("subscripts", "dims"),
    [
        ("... e, e m -> ... m", ("b", "m")),
        ("...e, e m -> m...", ("m", "b")),
        ("... e, ... e -> ...", ("b", "m")),
        ("e, e m -> m", ("b", "m")),
        ("e, e m -> m ...", ("m", "b")),
    ],
)
def test_ellipsis_stands_for_further_names(subscripts: str, dims: Any) -> None:
    product = named.einsum(subscripts, LEFT, RIGHT)
    assert product.dims == dims
    expected = LEFT.unwrap("b", "e") @ RIGHT.unwrap("e", "m")
    np.testing.assert_array_equal(product.unwrap("b", "m"), expected)


@pytest.mark.parametrize(
    ("subscripts", "right", "message"),
    [
        ("... e, e m -> b m", RIGHT, "write it in the result too"),
        ("... ... e, e m -> ... m", RIGHT, "does not fit"),
        ("... e, e ... -> ...", np.ones((3, 4)), r"'e \.\.\.' for"),
    ],
)
def test_unfit_ellipses_are_refused(subscripts: str, right: Any, message: str) -> None:
    with pytest.raises(NamedAxesError, match=message):
        named.einsum(subscripts, LEFT, right)


@pytest.mark.parametrize("dims", [("a", "b", "c"), ("c", "b", "a")])
@pytest.mark.parametrize("axis", ["b", ("a", "c"), ["b"], ("a", "b", "c")], ids=str)
def test_softmax_is_over_several_axes(axis: Any, dims: Any) -> None:
    numbers = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    places = tuple("abc".index(name) for name in axis)
    powers = np.exp(numbers.astype(np.float64))
    total = powers.sum(places, keepdims=True)
    x = wrap(numbers, "a", "b", "c").order_as(*dims)
    share, log, logs = jax.jit(
        lambda x: [f(x, axis) for f in (named.softmax, named.log_softmax, named.logsumexp)]
    )(x)
    close = lambda left, right: np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)  # noqa: E731
    close(share.unwrap("a", "b", "c"), powers / total)
    close(log.unwrap("a", "b", "c"), np.log(powers / total))
    remaining = [name for name in "abc" if name not in axis]
    close(logs.unwrap(*remaining), np.log(total).squeeze(places))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_stays_under_strict_promotion(dtype: Any) -> None:
    x, right = LEFT.astype(dtype), RIGHT.astype(dtype)
    functions: list[Any] = [
        lambda: named.softmax(x, ("b", "e")),
        lambda: named.log_softmax(x, ("b", "e")),
        lambda: named.logsumexp(x, ("b", "e")),
        lambda: named.einsum("... e, e m -> ... m", x, right),
        lambda: named.pad(x, {"b": 1}),
        lambda: named.tile(x, {"b": 2}),
        lambda: named.dynamic_update_slice(x, named.ones({"e": 1}), {"e": jnp.int32(1)}),
        lambda: named.bincount(X, {"bin": 3}, weights=x.sum()),
        lambda: named.one_hot(X, {"v": 3}, dtype),
    ]
    with jax.numpy_dtype_promotion("strict"):
        results = jax.jit(lambda: [function() for function in functions])()
    assert [result.dtype for result in results] == [dtype] * len(functions)


# --- over Explicit mesh axes ---

SPLIT = wrap(np.arange(32).reshape(4, 8) % 11, "a", "b")
SEARCHES: dict[str, Any] = {
    "one_hot": lambda x: named.one_hot(x, {"v": 4}),
    "bincount": lambda x: named.bincount(x, {"v": 4}),
    "bincount, weights": lambda x: named.bincount(x, {"v": 4}, weights=named.arange({"b": 8})),
    "nonzero": lambda x: named.nonzero(x > 3, "hit", size=30)["b"],
    "unique": lambda x: named.unique(x, "v", size=9, return_inverse=True)[1],
    "searchsorted": lambda x: named.searchsorted(named.arange({"edge": 9}), x, "edge"),
    "searchsorted, both": lambda x: named.searchsorted(
        named.arange({"edge": 9}) + 0 * x, x, "edge"
    ),
    "dynamic_slice": lambda x: named.dynamic_slice(x, {"b": jnp.int32(2)}, {"b": 3}),
    "dynamic_slice, named": lambda x: named.dynamic_slice(
        x, {"b": named.arange({"a": 4})}, {"b": 3}
    ),
    "dynamic_update_slice": lambda x: named.dynamic_update_slice(x, named.ones({"b": 3}), {"b": 2}),
    "dynamic_update_slice, named": lambda x: named.dynamic_update_slice(
        x, named.ones({"b": 3}), {"b": named.arange({"a": 4})}
    ),
    "permutation": lambda x: named.permutation(jax.random.key(0), x, "b", independent=True),
    "logsumexp": lambda x: named.logsumexp(x / 2, ("b",)),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_run_over_explicit_mesh_axes(name: str, explicit_mesh: Mesh) -> None:
    function = SEARCHES[name]
    expected = jax.jit(function)(SPLIT)
    with jax.set_mesh(explicit_mesh):
        layouts = (
            [{"a": "data"}] if "named" in name else [{"a": "data"}, {"a": "data", "b": "model"}]
        )
        for layout in layouts:
            x = named.shard(SPLIT, layout, explicit_mesh)
            result = jax.jit(function)(x)
            assert result.axes == expected.axes
            names = tuple(expected.axes)
            np.testing.assert_allclose(result.unwrap(*names), expected.unwrap(*names), rtol=1e-6)
