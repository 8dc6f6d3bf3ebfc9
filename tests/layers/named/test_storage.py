# SPDX-License-Identifier: Apache-2.0
"""Storage order is not structure: to JAX, arrays that differ only in it are the same."""

from __future__ import annotations

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.named import NamedArray, wrap, zeros
from tests.layers.named.arrays import assert_same, compiled, few, named_arrays, restored


@few
@given(st.data())
def test_pytrees_and_tree_map_ignore_storage_order(data):
    x = data.draw(named_arrays())

    def run(x, y):
        (leaf,), treedef = jax.tree.flatten(x)
        (other,), same = jax.tree.flatten(y)
        assert treedef == same
        assert hash(treedef) == hash(same)
        added = jax.tree.map(jnp.add, x, y), jax.tree.map(jnp.add, y, x)
        return leaf, other, treedef.unflatten([leaf]), added

    leaf, other, back, added = compiled(run, x, data.draw(restored(x)))
    np.testing.assert_array_equal(leaf, other)
    assert_same(back, x)
    for found in added:
        assert_same(found, NamedArray(2 * np.asarray(x.data), x.dims))


@few
@given(st.data(), st.sampled_from([jax.jit, sx.jit]))
def test_storage_orders_share_one_compiled_program(data, jit):
    traces = 0

    @jit
    def double(x):
        nonlocal traces
        traces += 1
        return 2 * x

    x = data.draw(named_arrays())
    for _ in range(3):
        found = double(data.draw(restored(x)))
        assert_same(found, NamedArray(2 * np.asarray(x.data), x.dims))
    assert traces == 1


@few
@given(st.data())
def test_branches_and_carries_leave_any_storage_order(data):
    x = data.draw(named_arrays())

    def run(x, y, z):
        chosen = [cond(True, lambda: y, lambda: z + 1) for cond in (jax.lax.cond, sx.cond)]
        summed, _ = jax.lax.scan(lambda c, _: (z + c, None), y, None, length=2)
        looped = jax.lax.while_loop(lambda c: jnp.bool_(False), lambda c: c + z, y)
        return [*chosen, looped], summed

    same, summed = compiled(run, x, data.draw(restored(x)), data.draw(restored(x)))
    for found in same:
        assert_same(found, x)
    assert_same(summed, NamedArray(3 * np.asarray(x.data), x.dims))


def test_canonical_storage_is_passed_on_without_an_operation():
    x = NamedArray(jnp.zeros((4, 2, 3)), (None, "a", "b"))
    assert jax.tree.leaves(x)[0] is x.data
    assert jax.tree.leaves(jax.jit(lambda x: x + 1)(x.order_as("b", "a")))[0].shape == (4, 2, 3)


def program_of(function, *args):
    """The program before compilation, without the names of results."""
    return re.sub(r"jax.result_info = [^}]*", "", jax.jit(function).lower(*args).as_text())


def test_named_program_is_that_of_plain_arrays():
    def named(x, bias):
        def program(x, bias):
            return (x * x + bias).sum("b") - 1

        return program_of(program, x, bias)

    def raw(x, bias):
        def program(x, bias):
            return jnp.sum(x * x + jax.lax.expand_dims(bias, (0,)), axis=1) - 1

        return program_of(program, x, bias)

    x, bias = zeros({"a": 4, "b": 3}), zeros({"b": 3})
    assert named(x, bias) == raw(x.data, bias.data)


def test_abstract_arrays_are_reordered_with_their_sharding(auto_mesh):
    spec = jax.sharding.PartitionSpec("data", "model")
    sharding = jax.sharding.NamedSharding(auto_mesh, spec)
    struct = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    (leaf,) = jax.tree.leaves(NamedArray(struct, ("b", "a")))
    assert (leaf.shape, leaf.sharding.spec) == ((4, 8), jax.sharding.PartitionSpec("model", "data"))
    found = jax.eval_shape(lambda x: x.sum("b"), NamedArray(struct, ("b", "a")))
    assert (found.axes, found.dtype) == ({"a": 4}, jnp.float32)


# --- positional dimensions and plain JAX transforms ---


def test_vmap_takes_and_gives_positional_dimensions():
    x = NamedArray(jnp.arange(6.0).reshape(2, 3), ("a", None))
    assert_same(jax.vmap(lambda row: row + row)(x), x + x)
    assert jax.vmap(lambda row: row.sum("a"))(x).dims == (None,)
    assert jax.vmap(lambda i: i * zeros({"a": 2}))(jnp.arange(3.0)).axes == {"a": 2}


def test_scan_slices_positional_dimensions_and_stacks_them():
    x = NamedArray(jnp.arange(6.0).reshape(2, 3), ("a", None))
    last, sums = jax.lax.scan(lambda c, row: (c + row, c + row), zeros({"a": 2}), x)
    assert_same(last, x.sum(0))
    assert_same(sums, x.cumsum(0))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: jax.vmap(lambda row: row + row)(x),
        lambda x: jax.tree.map(jnp.sum, x) + 1,
        lambda x: jax.tree.map(lambda leaf: leaf[:, :1], x).axes,
        lambda x: jax.tree.map(lambda leaf: "text", x).dims,
    ],
    ids=["vmap over a name", "rank", "size", "no array"],
)
def test_node_with_unfit_array_fails_when_used(spoil):
    with pytest.raises(sx.errors.NamedAxesError, match="'a': 2, 'b': 3"):
        spoil(zeros({"a": 2, "b": 3}))


def test_node_without_array_is_shown_and_mapped_back():
    x = zeros({"a": 2})
    described = jax.tree.map(lambda leaf: "text", x)
    assert repr(described) == "NamedArray(text, axes={'a': 2})"
    assert_same(jax.tree.map(lambda _, leaf: leaf, described, x), x)


# --- copies ---


@few
@given(st.data())
def test_pickling_and_copying_keep_storage_dims_and_numbers(data):
    x = data.draw(named_arrays())
    for same in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
        assert same.dims == x.dims
        np.testing.assert_array_equal(same.data, x.data)


# --- in Variables ---


class Scale(sx.Module):
    """A Module whose parameter is a named array."""

    def __init__(self):
        self.weight = sx.Param(NamedArray(jnp.arange(6.0).reshape(2, 3), ("b", "a")))
        self.calls = sx.Variable(0)

    def __call__(self, x):
        self.calls += 1
        return (self.weight.value * x).sum("a")


def test_variable_holds_named_array_through_every_transform():
    scale = Scale()
    x = zeros({"b": 2, "a": 3}) + 1
    assert scale.weight.value.dims == ("a", "b")
    expected = scale(x)
    for call in (
        sx.jit(lambda m, x: m(x)),
        sx.remat(lambda m, x: m(x)),
        lambda m, x: sx.clone(m)(x),
    ):
        assert_same(call(scale, x), expected)
    assert int(scale.calls) == 3
    gradient = sx.grad(lambda m: m(x).sum().unwrap())(scale)
    assert_same(gradient["weight"], x)
    graphdef, state = sx.split(scale)
    assert_same(sx.merge(graphdef, state).weight.value, scale.weight.value)


def test_loss_may_be_a_named_scalar():
    x = NamedArray(jnp.arange(3.0), ("a",))
    loss, gradient = sx.value_and_grad(lambda w: (w.value * x).mean())(sx.Param(x))
    assert float(loss) == pytest.approx(5 / 3)
    assert_same(gradient, x / 3)
    with pytest.raises(sx.errors.TransformError, match=r"float32\[3\]"):
        sx.grad(lambda w: w.value * x)(sx.Param(x))


def test_keys_of_random_streams_can_be_named():
    keys = wrap(jax.random.split(jax.random.key(0), (2, 3)), "b", "a")
    (leaf,) = jax.tree.leaves(keys)
    assert leaf.shape == (3, 2)
    words = map(jax.random.key_data, (keys.unwrap("a", "b"), leaf))
    np.testing.assert_array_equal(*words)
