# SPDX-License-Identifier: Apache-2.0
"""Laws: shard_map on one device is the function; sums over shards are sums over the whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import shardax as sx
from tests.core.transforms.sharded import P, close
from tests.strategies import Edit, apply_edit, assert_same_model, edits, models

ONE = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
FEW = settings(max_examples=6)


@given(models(), edits())
@FEW
def test_on_one_device_shard_map_is_the_function(model: Any, changes: list[Edit]) -> None:
    expected = sx.clone(model)

    def change(m: Any) -> Any:
        for edit in changes:
            apply_edit(m, edit)
        return m

    change(expected)
    run = sx.shard_map(change, mesh=ONE, in_specs=P(), out_specs=P())
    assert sx.jit(run)(model) is model
    assert_same_model(model, expected)


def _numbers(model: Any) -> list[Any]:
    leaves = [leaf for _, v in sx.iter_variables(model) for leaf in jax.tree.leaves(v.value)]
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.number)]


def _total(model: Any) -> Any:
    """Reads every number of a model."""
    return sum((leaf.astype(np.float32).sum() for leaf in _numbers(model)), start=np.float32(0))


@given(models())
@FEW
def test_closed_over_is_the_same_as_passed_in(model: Any) -> None:
    # jax.shard_map (0.10) does not compile where all its arrays, two or more, are empty.
    assume(any(leaf.size for leaf in _numbers(model)))
    two = jax.make_mesh((2,), ("data",))
    expected = _total(model)
    passed = sx.jit(sx.shard_map(_total, mesh=two, in_specs=P(), out_specs=P()))(model)
    captured = sx.jit(sx.shard_map(lambda: _total(model), mesh=two, in_specs=(), out_specs=P()))()
    close(passed, expected)
    close(captured, expected)


SIZES = st.sampled_from([1, 2, 4, 8])


@given(st.integers(1, 3), SIZES, st.integers(0, 100), st.booleans())
@FEW
def test_sums_over_shards_are_sums_over_the_whole(
    count: int, size: int, seed: int, grow: bool
) -> None:
    """A model of several Variables, split or not, on a mesh of any size."""
    draw = np.random.default_rng(seed)
    split = [bool(draw.integers(2)) for _ in range(count)]
    mesh = jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,))

    def make() -> Any:
        values = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
        return sx.List(
            [
                sx.Param(value, axes=("rows" if s else None,))
                for value, s in zip(values, split, strict=True)
            ]
        )

    def total(x: Any, over_mesh: bool) -> Any:
        return jax.lax.psum(x, "data") if over_mesh else x

    def call(model: Any, x: Any, over_mesh: bool) -> Any:
        seen = total((x**2).sum(), over_mesh)
        for variable, is_split in zip(list(model), split, strict=True):
            own = variable.value.sum()
            seen = seen + (total(own, over_mesh) if is_split else own)
            variable[...] = variable * seen
        if grow:
            model.append(sx.Variable(seen))
        return seen

    whole, parts = make(), make()
    x = jnp.asarray(draw.normal(size=8), jnp.float32)
    specs = sx.StateSharding(
        [(lambda path, v: bool(v.axes) and v.axes == ("rows",), P("data")), (..., P())]
    )
    run = sx.shard_map(
        functools.partial(call, over_mesh=True),
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=P(),
    )
    close(sx.jit(run)(parts, x), call(whole, x, False))
    assert sx.graphdef(parts) == sx.graphdef(whole)
    jax.tree.map(close, sx.state(parts), sx.state(whole))
