# SPDX-License-Identifier: Apache-2.0
"""Laws: a lifted transform does to any model what the plain one does to its values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from tests.strategies import (
    Edit,
    apply_edit,
    assert_equal_values,
    assert_same_model,
    edits,
    models,
    objects_of,
)

FEW = settings(max_examples=15)


@given(models())
@FEW
def test_compiled_identity_returns_the_model_and_its_objects(model: Any) -> None:
    def identity(m: Any) -> Any:
        parts = [item for item in objects_of(m) if not type(item).__name__.startswith("Array")]
        return m, parts

    before, objects, expected = sx.clone(model), objects_of(model), identity(model)[1]
    compiled = sx.jit(identity)
    for _ in range(2):
        same, parts = compiled(model)
        assert same is model
        assert list(map(id, parts)) == list(map(id, expected))
    assert_same_model(model, before)
    assert list(map(id, objects_of(model))) == list(map(id, objects))


@given(models(), edits())
@FEW
def test_edits_inside_jit_are_the_same_edits_outside(model: Any, changes: list[Edit]) -> None:
    outside = sx.clone(model)

    def change(m: Any) -> None:
        for edit in changes:
            apply_edit(m, edit)

    change(outside)
    sx.jit(change)(model)
    assert_same_model(model, outside)


@given(models(), edits(), edits())
@settings(max_examples=10)
def test_edits_inside_and_outside_may_alternate(
    model: Any, inner: list[Edit], outer: list[Edit]
) -> None:
    expected = sx.clone(model)
    run = sx.jit(lambda m: [apply_edit(m, edit) for edit in inner] and None)
    for _ in range(2):
        run(model)
        for edit in inner:
            apply_edit(expected, edit)
        for edit in outer:
            apply_edit(model, edit)
            apply_edit(expected, edit)
    assert_same_model(model, expected)


def _touch(model: Any) -> Any:
    """Reads every number of a model and writes the floating ones."""
    # A sum for each: XLA leaves out the addition of a zero, but only where it compiles both, and a
    # number below the normal ones is zero after it.
    sums = []
    for _, variable in sx.iter_variables(model):
        if jax.tree_util.all_leaves((variable.value,)) and _is_float(variable.value):
            sums.append(variable.value.astype(jnp.float32).sum())
            variable.value = variable.value * 2
    return sums


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


@given(models())
@FEW
def test_captured_passed_and_eager_models_agree(model: Any) -> None:
    passed, eager = sx.clone(model), sx.clone(model)
    results = [sx.jit(lambda: _touch(model))(), sx.jit(_touch)(passed), _touch(eager)]
    assert_equal_values(results[0], results[1])
    assert_equal_values(results[0], results[2])
    assert_same_model(model, passed)
    assert_same_model(model, eager)


@given(models())
@FEW
def test_eval_shape_keeps_structure_shapes_and_sharing(model: Any) -> None:
    shapes = sx.eval_shape(lambda m: m, model)
    assert sx.graphdef(shapes) == sx.graphdef(model)
    assert sx.find_duplicates(shapes) == sx.find_duplicates(model)
    pairs = zip(jax.tree.leaves(sx.state(shapes)), jax.tree.leaves(sx.state(model)), strict=True)
    assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


@given(models())
@FEW
def test_compiled_program_serves_models_of_equal_structure(model: Any) -> None:
    other = sx.clone(model)
    compiled = sx.jit(_touch).lower(model).compile()
    assert_equal_values(compiled(other), _touch(model))
    assert_same_model(other, model)


# --- pure functions ---

# Of one shape: it is not what these laws are about, and each is compiled for.
_FLOATS = st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=2).map(
    lambda numbers: np.array(numbers, np.float32)
)
_TREES = st.recursive(
    _FLOATS,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
        st.lists(inner, max_size=2),
        st.tuples(inner, inner),
        st.none(),
    ),
    max_leaves=4,
)


def _pure(tree: Any, scale: Any) -> Any:
    return jax.tree.map(lambda x: jnp.tanh(scale * x), tree), scale * 2


@given(_TREES, st.floats(-1, 1, width=32))
@FEW
def test_jit_of_a_pure_function_is_jaxs(tree: Any, scale: float) -> None:
    assert_equal_values(sx.jit(_pure)(tree, scale), jax.jit(_pure)(tree, scale))
    assert sx.eval_shape(_pure, tree, scale) == jax.eval_shape(_pure, tree, scale)
    assert str(sx.jit(_pure).trace(tree, scale).jaxpr) == str(
        jax.jit(_pure).trace(tree, scale).jaxpr
    )


@given(_TREES, st.floats(-1, 1, width=32))
@FEW
def test_grad_of_a_pure_function_is_jaxs(tree: Any, scale: float) -> None:
    def loss(tree: Any, scale: Any) -> Any:
        return jnp.sum(scale) + sum(jnp.sum(jnp.sin(scale * x)) for x in jax.tree.leaves(tree))

    for argnums in (0, 1, (1, 0)):
        mine = sx.value_and_grad(loss, argnums=argnums)(tree, scale)
        assert_equal_values(mine, jax.value_and_grad(loss, argnums=argnums)(tree, scale))


@given(st.lists(_FLOATS, min_size=1, max_size=4), st.data())
@FEW
def test_gradients_are_summed_over_ties(arrays: list[Any], data: st.DataObject) -> None:
    params = [sx.Param(array) for array in arrays]
    uses = data.draw(st.lists(st.integers(0, len(params) - 1), min_size=1, max_size=6))
    model = sx.List([params[i] for i in uses])

    def loss(items: Any) -> Any:
        return sum((k + 1) * jnp.sum(jnp.sin(item[...])) for k, item in enumerate(items))

    def plain(values: Any) -> Any:
        return sum((k + 1) * jnp.sum(jnp.sin(values[i])) for k, i in enumerate(uses))

    expected = jax.grad(plain)(arrays)
    found = sx.grad(loss)(model).flat()
    first_use = {i: (uses.index(i),) for i in uses}
    assert set(found) == set(first_use.values())
    for i, path in first_use.items():
        np.testing.assert_allclose(found[path], expected[i], rtol=1e-6, atol=1e-8)
