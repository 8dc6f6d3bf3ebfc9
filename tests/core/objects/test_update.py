# SPDX-License-Identifier: Apache-2.0
"""Writing values into Variables and models: by path, by label, with dtypes checked."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import StateMismatchError


class Model(sx.Module):
    def __init__(self) -> None:
        self.w = sx.Param(jnp.zeros(2), axes=("embed",))
        self.b = sx.Param(jnp.zeros(2))
        self.mean = sx.BatchStat(jnp.zeros(()))
        self.count = sx.Variable(np.uint32(0))
        self.lazy = sx.Param(sx.Init(jax.nn.initializers.ones, (3,)))


def _values(model: Any) -> dict[Any, Any]:
    return {path: value.tolist() for path, value in sx.state(model).flat().items()}


# --- Variable.update ---


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones(2),
        np.ones(2, np.float32),
        sx.Param(jnp.ones(2)),
        sx.Param(jnp.ones(2), axes=("other",)).freeze(),
        sx.BatchStat(sx.Init(jax.nn.initializers.ones, (2,))),
    ],
    ids=["array", "NumPy", "Variable", "frozen", "lazy"],
)
def test_variable_accepts_value_of_its_shape_and_dtype(value: Any) -> None:
    w = sx.Param(jnp.zeros(2), axes=("embed",))
    w.update(value)
    assert w.value.tolist() == [1.0, 1.0] and w.axes == ("embed",)


@pytest.mark.parametrize("form", [lambda x: x, sx.Param, lambda x: sx.Param(x).freeze()])
@pytest.mark.parametrize(
    ("value", "difference"),
    [
        (jnp.ones(3), r"shape \(2,\), given \(3,\)"),
        (jnp.ones(2, jnp.bfloat16), "dtype float32, given bfloat16"),
        (jnp.ones(2, jnp.int32), "dtype float32, given int32"),
        (np.ones(2, np.float16), "dtype float32, given float16"),
    ],
)
def test_update_refuses_another_shape_or_dtype(form: Any, value: Any, difference: str) -> None:
    w = sx.Param(jnp.zeros(2))
    with pytest.raises(StateMismatchError, match=f"Param has {difference}; nothing was changed"):
        w.update(form(value))
    assert w.value.tolist() == [0.0, 0.0] and w.dtype == jnp.float32


@pytest.mark.parametrize("freeze", [False, True])
def test_frozen_value_of_another_label_is_refused(freeze: bool) -> None:
    model = Model()
    _, taken = sx.unbind(model, freeze=freeze)
    w, b = (each.freeze() for each in taken[:2])
    model.w.update(w)
    with pytest.raises(StateMismatchError, match=r"label \.b, given the frozen value of \.w"):
        model.b.update(w)
    model.b.update(b)


def test_frozen_value_cannot_be_updated() -> None:
    with pytest.raises(sx.errors.ModuleAttributeError):
        sx.Param(jnp.zeros(2)).freeze().update(jnp.ones(2))


# --- update ---


def test_frozen_values_update_paths_of_their_labels() -> None:
    model, source = Model(), Model()
    source.w[...], source.mean[...] = jnp.ones(2), 5.0
    _, frozen = sx.unbind(source, freeze=True)
    sx.update(model, frozen)
    assert _values(model) == _values(source)
    sx.update(model, frozen[1].replace(jnp.full(2, 7.0)), [frozen[2]])
    assert _values(model)["b",] == [7.0, 7.0]
    sx.update(model, {"w": frozen[0], "b": frozen[1].value})


def test_flat_state_updates_like_a_nested_one() -> None:
    model, source = {"a": [Model()]}, {"a": [Model()]}
    source["a"][0].w[...] = jnp.ones(2)
    state = sx.state(source)
    for given in (state, state.flat(), state.to_pure_dict()):
        fresh = sx.clone(model)
        sx.update(fresh, given)
        assert _values(fresh) == _values(source)
        assert _values(sx.merge(sx.graphdef(fresh), given)) == _values(source)
    keyed = {(0, 1): sx.Param(1.0)}
    sx.update(keyed, {(0, 1): 2.0})
    assert float(keyed[0, 1]) == 2.0


def test_update_refuses_other_dtype_unless_cast_allows_it() -> None:
    model = Model()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) + 1, sx.state(model, sx.Param))
    with pytest.raises(StateMismatchError, match="cast='param'") as refused:
        sx.update(model, half)
    assert str(refused.value).splitlines()[:2] == [
        "3 of 3 values do not fit; nothing was changed:",
        "  .w: has dtype float32, given bfloat16",
    ]
    sx.update(model, half, cast="param")
    assert model.w.dtype == model.lazy.dtype == jnp.float32
    assert model.w.value.tolist() == [1.0, 1.0]
    sx.update(model, half, cast="keep")
    assert model.w.dtype == model.lazy.dtype == jnp.bfloat16
    with pytest.raises(StateMismatchError, match="cast='yes' is none of"):
        sx.update(model, half, cast="yes")  # pyright: ignore[reportArgumentType]


def test_shape_given_to_an_abstract_model_is_cast() -> None:
    model = sx.abstract(Model())
    sx.update(model, {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}, cast="param")
    assert model.w.value == jax.ShapeDtypeStruct((2,), jnp.float32)


def test_python_numbers_and_weak_arrays_take_variable_dtype() -> None:
    model = Model()
    sx.update(model, {"count": 3, "mean": 2})
    assert (model.count.dtype, model.mean.dtype) == (jnp.uint32, jnp.float32)
    sx.update(model, {"mean": jnp.asarray(2.5)})
    assert (int(model.count), float(model.mean)) == (3, 2.5)
    with pytest.raises(StateMismatchError, match="has dtype uint32, given float32"):
        sx.update(model, {"count": math.pi})


def test_keys_are_never_cast() -> None:
    rngs = sx.Rngs(0)
    for cast in (None, "param"):
        with pytest.raises(StateMismatchError, match=r"default\.key: has dtype key"):
            sx.update(rngs, {"default": {"key": 3}}, cast=cast)


def test_strict_update_lists_all_mismatches() -> None:
    model = Model()
    before = _values(model)
    other = sx.BatchStat(jnp.zeros(2)).freeze()
    _, (misplaced, *_) = sx.unbind(Model(), freeze=True)
    with pytest.raises(StateMismatchError) as refused:
        sx.update(
            model,
            {"wheight": 1.0, "w": jnp.ones(3), "b": misplaced, "mean": "text"},
            {"count": jnp.ones(())},
            strict=True,
        )
    message = str(refused.value)
    for line in (
        "nothing was changed",
        "  .wheight",
        "1 value is missing",
        "  .lazy",
        "  .w: has shape (2,), given (3,)",
        "  .b: is given the frozen value of .w",
        "  .mean: A BatchStat holds arrays",
        "  .count: has dtype uint32, given float32",
    ):
        assert line in message
    with pytest.raises(StateMismatchError, match="b: is a Param, and given the frozen value of a"):
        sx.update(model, {"b": other})
    assert _values(model) == before
    sx.update(model, sx.state(model), strict=True)


@pytest.mark.parametrize("given", ["abc", 5, jnp.ones(2), (jnp.ones(2),), Model()])
def test_anything_else_names_what_can_be_given(given: Any) -> None:
    with pytest.raises(StateMismatchError, match=r"sx\.state\(model\)"):
        sx.update(Model(), given)


# --- frozen values ---


def test_two_frozen_values_of_one_label_are_refused() -> None:
    layer = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
    before = np.asarray(layer.kernel.value)
    kernel, bias = (v.freeze() for v in (layer.kernel, layer.bias))
    _, values = sx.unbind(layer, freeze=True)
    first, second = (jax.tree.map(lambda x, k=k: x + k, values[0]) for k in (1, 2))
    for given in ([[first, second]], [first, second], [(first, (second,))], [{"a": 1}, first]):
        with pytest.raises(sx.errors.ShardaxError) as caught:
            sx.update(layer, *given)
        assert isinstance(caught.value, (sx.errors.ModuleError, StateMismatchError))
        np.testing.assert_array_equal(layer.kernel.value, before)
    sx.update(layer, first, first)
    np.testing.assert_array_equal(layer.kernel.value, before + 1)
    assert (kernel.label, bias.label) == ((), ())


@pytest.mark.parametrize(
    "write",
    [
        lambda v, frozen: v.update(frozen),
        lambda v, frozen: setattr(v, "value", frozen),
        lambda v, frozen: v.__setitem__(..., frozen),
    ],
    ids=["update", "value", "index"],
)
def test_frozen_value_of_another_type_is_refused(write: Any) -> None:
    target, stats = sx.Param(jnp.zeros(2)), sx.BatchStat(jnp.ones(2))
    with pytest.raises(StateMismatchError, match="given the frozen value of a BatchStat"):
        write(target, stats.freeze())
    assert target.value.tolist() == [0.0, 0.0]
    target.value = stats.freeze().value
    write(target, sx.Param(jnp.full(2, 3.0)).freeze())
    assert target.value.tolist() == [3.0, 3.0]


class Copying:
    """A node whose flattening copies its Variable."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable


jax.tree_util.register_pytree_node(
    Copying,
    lambda node: ((type(node.variable)(node.variable.value),), None),
    lambda _, children: Copying(*children),
)


@pytest.mark.parametrize("place", [lambda n: n, lambda n: [n], lambda n: {"k": (n,)}])
def test_node_that_copies_its_variable_is_refused(place: Any) -> None:
    variable = sx.Param(jnp.zeros(3))
    with pytest.raises(sx.errors.ModuleError, match=r"Flattening a Copying, .* makes a new Param"):
        sx.update(place(Copying(variable)), {})

    class Holder(sx.Module):
        def __init__(self) -> None:
            self.held = place(Copying(variable))

    with pytest.raises(sx.errors.ModuleError, match="Flattening a Copying"):
        sx.state(Holder())
