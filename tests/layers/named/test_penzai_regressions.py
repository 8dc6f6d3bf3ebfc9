# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in Penzai's named axes and their shardings comes out right here.

Each test is one entry of the list of failures seen in penzai 0.2.5; what is tested at length
elsewhere is only named.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import named
from shardax.named import NamedArray, nmap, wrap, zeros
from tests.layers.named.arrays import assert_same

X = NamedArray(jnp.arange(6.0).reshape(2, 3), ("a", "b"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: X.untag("b", "a"),
        lambda: X.order_as("b", "a"),
        lambda: X.untag("a").tag("c"),
        lambda: X.rename({"a": "c"}),
        lambda: nmap(jnp.sin)(X),
        lambda: X + 1,
        lambda: X[{"a": 0}],
        lambda: X.sum("a"),
        lambda: jax.jit(lambda x: x)(X),
    ],
)
def test_named_array_is_the_type_of_all_results(make):
    assert type(make()) is NamedArray


def test_axis_order_is_no_structure():
    assert jax.tree.structure(X) == jax.tree.structure(X.order_as("b", "a"))
    assert_same(jax.tree.map(jnp.add, X, X.order_as("b", "a")), X + X)


def test_names_may_be_integers():
    assert zeros({0: 2, 1: 3}).sum(0).axes == {1: 3}


def test_captured_array_gives_an_error():
    with pytest.raises(sx.errors.ClosureError):
        nmap(lambda v: v + X)(X)
    assert_same(X + 0, X)


def test_matmul_and_transpose_work():
    assert (X.untag("a", "b") @ X.untag("b", "a")).unwrap().shape == (2, 2)
    assert X.untag("a", "b").T.unwrap().tolist() == X.data.T.tolist()


def test_numpy_arrays_never_make_arrays_of_objects():
    for operand in (np.ones(3), np.ones((2, 3)), np.ones(1)):
        with pytest.raises(sx.errors.NamedAxesError):
            operand + X  # pyright: ignore[reportUnusedExpression]
    assert isinstance(np.float64(1) + X, NamedArray)
    assert isinstance(np.ones(2) * X.untag("a"), NamedArray)
    with pytest.raises(sx.errors.NamedAxesError, match=r"unwrap\('a', 'b'\)"):
        np.asarray(X)


def test_named_array_tells_shape_rank_size_and_sharding():
    assert (X.shape, X.ndim, X.size, X.sharding) == ((2, 3), 2, 6, X.data.sharding)


def test_masks_are_taken_invalid_positions_refused():
    assert X[{"b": np.array([True, False, True])}].axes == {"a": 2, "b": 2}
    with pytest.raises(sx.errors.NamedIndexError):
        X[{"b": 3}]


def test_array_bounds_of_slices_are_refused():
    with pytest.raises(sx.errors.NamedAxesError, match="arange"):
        X[{"b": slice(jnp.array(0), jnp.array(2))}]


def test_unfit_carry_and_unnamed_xs_are_errors():
    with pytest.raises(sx.errors.TransformError, match="gained 'b'"):
        named.scan(lambda c, v: (c + v, None), "a", zeros({}), X)
    with pytest.raises(sx.errors.NamedAxesError, match="wrap"):
        named.scan(lambda c, v: (c, v), "a", 0, jnp.ones(3))


def test_positional_dimensions_are_counted_in_specs(auto_mesh):
    x = NamedArray(jnp.zeros((4, 3, 8)), (None, None, "b"))
    assert sx.partition_specs(x, {"b": "model"}).data == P(None, None, "model")
    assert named.shard(x, {"b": "model"}, auto_mesh).sharding.spec == P(None, None, "model")


def test_live_model_is_laid_out(auto_mesh):
    layer = named.Linear({"embed": 8}, {"mlp": 16}, rngs=sx.Rngs(0))
    assert named.shard(layer, {"mlp": "model"}, auto_mesh) is layer
    assert layer.kernel.sharding.spec == P(None, "model")


def test_typo_in_the_mapping_is_reported(auto_mesh):
    with pytest.raises(sx.errors.NamedAxesError, match="'bb'"):
        named.shard(X, {"bb": "model"}, auto_mesh)


@pytest.mark.parametrize(
    "mapping", [{"a": "nowhere"}, {"a": "data", "b": "data"}, {"b": "model"}], ids=str
)
def test_impossible_layout_is_named_by_path(mapping, auto_mesh):
    with pytest.raises(sx.errors.PartitionCheckError, match=r"\.weights\.first"):
        named.shard({"weights": {"first": X}}, mapping, auto_mesh)


def test_gathering_has_a_verb(auto_mesh):
    placed = named.shard(X, {"a": "data"}, auto_mesh)
    assert len(placed.sharding.device_set) == 8
    assert len(sx.unshard(placed).sharding.device_set) == 1


def test_names_can_be_kept_inside_a_lifted_function():
    inner = nmap(lambda v: (v * named.arange({"c": 4})).sum("c"))
    assert_same(inner(X), X * 6)
    outer = nmap(lambda v: v * named.arange({"c": 4}))
    assert outer(X).axes == {"c": 4, "a": 2, "b": 3}


def test_plain_layer_is_mapped_along_names():
    layer = sx.nn.Linear(3, 5, rngs=sx.Rngs(0))
    found = nmap(layer)(X.untag("b")).tag("out")
    np.testing.assert_allclose(found.unwrap("a", "out"), layer(X.data), rtol=1e-6)
    np.testing.assert_allclose(found.unwrap("a", "out"), layer(wrap(X.data).unwrap()), rtol=1e-6)
