# SPDX-License-Identifier: Apache-2.0
"""make_jaxpr: the program behind a function over Modules; nothing runs, nothing changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import shardax as sx
from shardax.errors import ShardaxError, StaticArgumentError, TransformError
from tests.core.transforms.examples import Scale, Tied, values
from tests.core.transforms.pure import pure_of, touch
from tests.strategies import assert_same_model, models


def _avals(variables: Any) -> list[str]:
    return [item.aval.str_short(short_dtypes=True) for item in variables]


def _run(jaxpr: Any, *inputs: Any) -> list[Any]:
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *inputs)


def _grow(model: Scale, x: Any, *, by: Any) -> Any:
    model.factor += by
    model.seen = sx.Intermediate(x)
    return model(x)


def test_inputs_and_outputs_have_documented_order() -> None:
    model = Scale()
    jaxpr = sx.make_jaxpr(_grow)(model, jnp.ones(2), by=1.0)
    assert isinstance(jaxpr, type(jax.make_jaxpr(jnp.sin)(1.0)))
    assert _avals(jaxpr.jaxpr.invars) == ["f32[2]", "i32[]", "f32[2]", "f32[]"]
    assert _avals(jaxpr.jaxpr.outvars) == ["f32[2]", "f32[2]", "i32[]", "f32[2]"]
    found = _run(jaxpr, jnp.ones(2), jnp.int32(5), jnp.full(2, 3.0), 1.0)
    assert [x.tolist() for x in found] == [[3.0, 3.0], [2.0, 2.0], 6, [3.0, 3.0]]


def test_nothing_is_changed_and_nothing_runs() -> None:
    model, counter, ran = Scale(), sx.Variable(0), []

    def function(m: Scale, x: Any) -> Any:
        counter[...] += 1
        jax.debug.callback(lambda: ran.append(1))
        return _grow(m, x, by=1.0)

    sx.make_jaxpr(function)(model, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}
    assert not hasattr(model, "seen") and int(counter) == 0 and ran == []


def test_lazy_and_abstract_models_stay_so() -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    abstract = sx.eval_shape(lambda: sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
    closed = sx.make_jaxpr(lambda x: layer(x))(jnp.ones(2))
    for model in (layer, abstract):
        jaxpr = sx.make_jaxpr(lambda m, x: m(x))(model, jnp.ones(2))
        assert _avals(jaxpr.jaxpr.invars) == ["f32[2,3]", "f32[3]", "f32[2]"]
    assert layer.kernel.is_lazy and abstract.kernel.is_abstract
    assert _avals(closed.jaxpr.invars) == ["f32[2]"]


def test_shared_variable_is_one_input() -> None:
    model = Tied(3.0)
    jaxpr = sx.make_jaxpr(lambda a, b: a.embed * b.head * model.head)(model, model)
    assert _avals(jaxpr.jaxpr.invars) == ["f32[]"] and jaxpr.consts == []


def test_captured_variables_are_constants_written_ones_outputs() -> None:
    counter = sx.Variable(jnp.float32(5))

    def function(x: Any) -> Any:
        counter[...] += x
        return x * 2

    jaxpr = sx.make_jaxpr(function)(1.0)
    assert [x.tolist() for x in _run(jaxpr, 3.0)] == [6.0, 8.0] and float(counter) == 5.0


def test_shapes_come_with_it_on_request() -> None:
    model = Scale()
    _, shape = sx.make_jaxpr(lambda m, x: {"m": m, "y": m(x)}, return_shape=True)(model, 1.0)
    assert shape["y"] == jax.ShapeDtypeStruct((2,), jnp.float32)
    assert shape["m"].factor.is_abstract and shape["m"] is not model
    assert sx.graphdef(shape["m"]) == sx.graphdef(model)


def test_static_arguments_and_decorator_forms() -> None:
    @sx.make_jaxpr(static_argnums=(1,))
    def function(m: Scale, mode: str) -> Any:
        return m.factor * 2 if mode == "one" else (m.factor * 2, m.factor * 3)

    assert len(function(Scale(), "one").jaxpr.outvars) == 1
    assert len(function(Scale(), mode="two").jaxpr.outvars) == 2

    class Model(Scale):
        @sx.make_jaxpr
        def program(self, x: Any) -> Any:
            return self(x)

    assert len(Model().program(1.0).jaxpr.invars) == 3
    assert len(sx.make_jaxpr(Scale())(1.0).jaxpr.invars) == 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sx.make_jaxpr(lambda x: "a")(1.0), TransformError, r"sx\.make_jaxpr returned 'a'"),
        (
            lambda: sx.make_jaxpr(lambda m: m.factor, static_argnums=0)(Scale()),
            StaticArgumentError,
            r"'m' is static, but a Scale was passed",
        ),
    ],
)
def test_make_jaxpr_refuses_wrong_calls(call: Any, error: type[ShardaxError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@given(models())
@settings(max_examples=10)
def test_program_computes_what_the_function_does(model: Any) -> None:
    before = sx.clone(model)
    jaxpr, shape = sx.make_jaxpr(touch, return_shape=True)(model)
    assert_same_model(model, before)
    pure, state, _ = pure_of(touch, model)
    expected = pure(state)
    leaves = jax.tree.leaves(expected)
    found = _run(jaxpr, *jax.tree.leaves(state))[: len(leaves)]
    for a, b in zip(found, leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
    forms = jax.tree.map(lambda x: f"{x.dtype}{x.shape}", (shape, expected))
    assert forms[0] == forms[1]
