# SPDX-License-Identifier: Apache-2.0
"""Laws of ``vmap``, for any model: it is a stack of calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from tests.strategies import Edit, apply_edit, assert_equal_values, assert_same_model, edits, models

COUNTS = st.sampled_from([1, 3])
"""Numbers of lanes."""


def _is_float(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)


def _bump(model: Any) -> Any:
    """Writes every floating Variable and returns what it saw of the first array of each."""
    seen = {}
    for path, variable in sx.iter_variables(model):
        if _is_float(variable.value):
            seen[str(path)] = variable.value.astype(jnp.float32).sum()
            variable.value = variable.value * 2
    return seen


def _lane_models(model: Any, count: int) -> list[Any]:
    """Copies of a model whose floating values differ."""
    lanes = []
    for lane in range(count):
        copy = sx.clone(model)
        for _, variable in sx.iter_variables(copy):
            if _is_float(variable.value):
                moved = np.asarray(variable.value) + variable.dtype.type(lane)
                variable.value = jnp.asarray(moved)
        lanes.append(copy)
    return lanes


def _stacked(lanes: list[Any], axes: dict[Any, int | None] | None = None) -> Any:
    """Puts lanes together along axis 0, or the axis of each path; None takes the first."""
    graphdef, _ = sx.split(lanes[0])
    states = [sx.state(lane).flat() for lane in lanes]
    whole = {}
    for path, first in states[0].items():
        axis = 0 if axes is None else axes[path]
        rows = [state[path] for state in states]
        whole[path] = first if axis is None else jax.tree.map(_stack_along(axis), *rows)
    return sx.merge(graphdef, sx.State.from_flat(whole))


def _stack_along(axis: int) -> Any:
    """Stacks arrays by NumPy: ``jnp.stack`` would compile programs for each number of lanes."""

    def stack(*rows: Any) -> Any:
        if jnp.issubdtype(rows[0].dtype, jax.dtypes.prng_key):
            at = axis if axis >= 0 else axis - 1  # the last dimension of the data is the key's own
            data = np.stack([jax.random.key_data(row) for row in rows], at)
            return jax.random.wrap_key_data(jnp.asarray(data))
        return jnp.asarray(np.stack(rows, axis))

    return stack


def _assert_stacked(result: Any, rows: list[Any]) -> None:
    """Asserts that a result has the structure of each row, and the rows as its lanes."""
    assert all(jax.tree.structure(result) == jax.tree.structure(row) for row in rows)
    leaves = [jax.tree.leaves(row) for row in rows]
    for found, *expected in zip(jax.tree.leaves(result), *leaves, strict=True):
        np.testing.assert_allclose(found, np.stack(expected), rtol=1e-5, atol=1e-8)


def _unnamed(model: Any) -> Any:
    for _, variable in sx.iter_variables(model):
        variable.set_metadata(axes=None)
    return model


@given(models(), COUNTS)
@settings(max_examples=25)
def test_vmap_is_a_stack_of_calls(model: Any, count: int) -> None:
    lanes = _lane_models(_unnamed(model), count)
    whole = _stacked(lanes)
    result = sx.vmap(_bump, axis_size=count)(whole)
    expected = [_bump(lane) for lane in lanes]
    _assert_stacked(result, expected)
    assert_same_model(whole, _stacked(lanes))


@given(models(), edits(), COUNTS)
@settings(max_examples=25)
def test_edits_in_batch_elements_are_edits_of_every_batch_element(
    model: Any, changes: list[Edit], count: int
) -> None:
    lanes = _lane_models(_unnamed(model), count)
    whole = _stacked(lanes)

    def change(m: Any) -> None:
        for edit in changes:
            apply_edit(m, edit)

    sx.vmap(change, axis_size=count)(whole)
    for lane in lanes:
        change(lane)
    assert_same_model(whole, _stacked(lanes))


@given(models(), COUNTS, st.data())
@settings(max_examples=25)
def test_vmap_maps_every_variable_along_its_own_axis(
    model: Any, count: int, data: st.DataObject
) -> None:
    lanes = _lane_models(_unnamed(model), count)
    axes: dict[Any, int | None] = {}
    for path, value in sx.state(model).flat().items():
        rank = min(map(jnp.ndim, jax.tree.leaves(value)), default=0)
        axes[path] = data.draw(
            st.sampled_from([None, *range(-rank - 1, rank + 1)]), label=str(path)
        )
        for lane in lanes[1:] if axes[path] is None else []:
            sx.update(lane, sx.state(lanes[0], lambda at, _, path=path: at == path))
    whole = _stacked(lanes, axes)
    prefix = sx.State.from_flat(axes)
    in_axes = data.draw(st.sampled_from([prefix, sx.StateAxes(prefix)]))
    result = sx.vmap(_bump, in_axes=in_axes, axis_size=count)(whole)
    expected = [_bump(lane) for lane in lanes]
    _assert_stacked(result, expected)
    assert_same_model(whole, _stacked(lanes, axes))


@given(models(), COUNTS)
@settings(max_examples=25)
def test_lifted_is_plain_vmap_of_the_pure_function(model: Any, count: int) -> None:
    whole = _stacked(_lane_models(_unnamed(model), count))
    graphdef, state = sx.split(whole)

    def pure(state: Any) -> Any:
        copy = sx.merge(graphdef, state)
        return _bump(copy), sx.state(copy)

    expected, after = jax.vmap(pure, axis_size=count)(state)
    assert_equal_values(sx.vmap(_bump, axis_size=count)(whole), expected)
    assert_equal_values(sx.state(whole), after)


@given(models(), COUNTS)
@settings(max_examples=25)
def test_sharing_everything_is_calling_once(model: Any, count: int) -> None:
    once = sx.clone(model)
    expected = _bump(once)
    out = sx.vmap(lambda m, i: _bump(m), in_axes=(None, 0), out_axes=None)(model, jnp.arange(count))
    assert_equal_values(out, expected)
    assert_same_model(model, once)


def _read(model: Any) -> Any:
    """Returns a number of every floating Variable."""
    return [v.value.sum() for _, v in sx.iter_variables(model) if _is_float(v.value)]


@given(models(), COUNTS)
@settings(max_examples=25)
def test_closed_over_is_the_same_as_passed_in(model: Any, count: int) -> None:
    lanes = jnp.arange(count)
    passed = sx.vmap(lambda m, i: (_read(m), i), in_axes=(None, 0))(model, lanes)
    assert_equal_values(sx.vmap(lambda i: (_read(model), i))(lanes), passed)
    assert_equal_values(sx.jit(lambda x: sx.vmap(lambda i: (_read(model), i))(x))(lanes), passed)


@given(models())
@settings(max_examples=25)
def test_mapped_identity_keeps_identity_structure_and_values(model: Any) -> None:
    whole = _stacked([model, model])
    before = sx.clone(whole)
    assert sx.vmap(lambda m: m, axis_size=2)(_unnamed(whole)) is whole
    assert_same_model(whole, _unnamed(before))


_ARRAYS = st.sampled_from([(1, 2), (3, 2)]).map(
    lambda shape: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
)


@given(_ARRAYS, st.sampled_from([0, 1, -1, -2]), st.sampled_from([0, 1, -1, -2]))
@settings(max_examples=30)
def test_vmap_of_a_pure_function_is_jaxs(x: Any, into: int, out: int) -> None:
    def pure(x: Any, tree: Any) -> Any:
        return jnp.tanh(x) * tree["scale"], (jnp.flip(x), jnp.ones(2))

    tree = {"scale": 2.0}
    options: dict[str, Any] = {"in_axes": (into, None), "out_axes": (out, (0, -1))}
    assert_equal_values(sx.vmap(pure, **options)(x, tree), jax.vmap(pure, **options)(x, tree))
