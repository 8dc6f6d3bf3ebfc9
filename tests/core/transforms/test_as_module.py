# SPDX-License-Identifier: Apache-2.0
"""Gradients and tangents that are Modules of the model's structure."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import example, given

import shardax as sx
from shardax import nn, train
from shardax.errors import TrainError, TransformError
from tests.strategies import Node, assert_equal_values, models


def _model() -> Node:
    model = Node()
    model.layers = [nn.Linear(2, 2, rngs=sx.Rngs(0))]
    model.tied = model.layers[0].kernel
    model.stat, model.scale, model.name = sx.BatchStat(jnp.ones(())), jnp.ones(2), "net"
    return model


def _loss(model: Any, x: Any) -> Any:
    model.stat.value = model.stat + 1
    return (model.layers[0](x) @ model.tied.value * model.scale).sum()


def _counter() -> Node:
    model = Node()
    model.count = sx.Param(jnp.array(3))
    return model


X = jnp.array([1.0, 2.0])


@pytest.mark.parametrize("around", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_gradient_module_has_the_models_structure(around: Any) -> None:
    model = _model()
    value, grads = around(sx.value_and_grad(_loss, as_module=True))(model, X)
    assert sx.graphdef(grads) == sx.graphdef(model)
    assert grads.tied is grads.layers[0].kernel is not model.tied
    assert (grads.stat.value, grads.scale, float(model.stat)) == (None, None, 2.0)
    expected = sx.grad(_loss)(model, X)
    assert_equal_values(sx.state(grads, sx.Param), expected)
    assert float(value) == float(_loss(model, X))


def test_gradients_of_other_arguments_keep_their_form() -> None:
    def loss(pair: Any, w: Any, x: Any) -> Any:
        return _loss(pair["m"], x) * w * pair["x"]

    pair, w = {"m": _model(), "x": jnp.float32(3)}, sx.Param(jnp.float32(2))
    grads, of_w, of_x = sx.grad(loss, argnums=(0, 1, 2), as_module=True)(pair, w, X)
    assert (type(grads["m"]), grads["x"].shape, type(of_w), of_x.shape) == (
        Node,
        (),
        sx.Param,
        (2,),
    )
    assert float(of_w) == pytest.approx(float(grads["x"]) * 1.5)
    _, pullback = sx.vjp(loss, pair, w, X, as_module=True)
    again, *_ = pullback(jnp.float32(1))
    assert_equal_values(sx.state(again["m"], sx.Param), sx.state(grads["m"], sx.Param))


def test_gradient_module_is_a_tangent() -> None:
    model = _model()
    grads = sx.grad(_loss, as_module=True)(model, X)
    as_state = sx.grad(_loss)(model, X)
    by_module = sx.jvp(_loss, (model, X), (grads, None))[1]
    assert float(by_module) == float(sx.jvp(_loss, (model, X), (as_state, None))[1]) > 0


def test_module_of_integers_and_keys_moves_floats_alone() -> None:
    model = nn.Dropout(0.5, rngs=sx.Rngs(0))
    model.shift = sx.Param(jnp.ones(4))
    tangent = sx.jvp(lambda m: m(m.shift.value), (model,), (model,))[1]
    assert set(tangent.tolist()) <= {0.0, 2.0}
    wrong = sx.clone(model)
    wrong.other = sx.Param(jnp.ones(()))
    with pytest.raises(TransformError, match=r"\.other"):
        sx.jvp(lambda m: m.shift.sum(), (model,), (wrong,))


def test_custom_rule_may_return_a_module() -> None:
    @sx.custom_vjp
    def doubled(layer: Any, x: Any) -> Any:
        return layer(x)

    def bwd(residuals: Any, ct: Any) -> Any:
        layer, x = residuals
        grads = sx.grad(lambda layer: (layer(x) * ct).sum(), as_module=True)(layer)
        return sx.map(lambda path, v: 2 * v.value, grads), None

    doubled.defvjp(lambda layer, x: (layer(x), (layer, x)), bwd)
    layer = nn.Linear(2, 2, rngs=sx.Rngs(0))
    grads = sx.grad(lambda layer: doubled(layer, X).sum())(layer)
    assert grads["kernel"].tolist() == [[2.0, 2.0], [4.0, 4.0]]


def test_optimizer_takes_gradient_modules() -> None:
    models = [_model(), _model()]
    for model, as_module in zip(models, (True, False), strict=True):
        optimizer = train.Optimizer(model, optax.sgd(0.1))
        optimizer.update(sx.grad(_loss, as_module=as_module)(model, X))
    assert_equal_values(sx.state(models[0]), sx.state(models[1]))
    optimizer = train.Optimizer(models[0], optax.sgd(0.1))
    with pytest.raises(TransformError, match="takes the gradients alone"):
        optimizer.update(models[0])
    with pytest.raises(TrainError, match=r"stat"):
        optimizer.update(sx.clone(models[0]))


@given(models())
@example(_counter())  # the gradient is a NumPy array of dtype float0
def test_gradient_module_holds_the_state_of_gradients(model: Any) -> None:
    def square(model: Any) -> Any:
        params = [v for _, v in sx.iter_variables(model, sx.Param)]
        leaves = [x for x in jax.tree.leaves([v.value for v in params]) if x.dtype == jnp.float32]
        return sum(((x**2).sum() for x in leaves), jnp.float32(0))

    if not sx.state(model, sx.Param).flat():
        return
    grads = sx.grad(square, as_module=True, allow_int=True)(model)
    assert sx.graphdef(grads) == sx.graphdef(model)
    expected = sx.grad(square, allow_int=True)(model)
    assert_equal_values(sx.state(grads, sx.Param), expected)


@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_jacobian_module_has_dimensions_of_the_result_first(name: str) -> None:
    model = {"layer": nn.Linear(2, 3, rngs=sx.Rngs(0))}

    def f(model: Any, x: Any) -> Any:
        return [model["layer"](x)]

    (jacobian,) = getattr(sx, name)(f, as_module=True)(model, X)
    layer = jacobian["layer"]
    assert (type(layer), layer.kernel.axes) == (nn.Linear, (None, "in", "out"))
    (expected,) = getattr(sx, name)(f)(model, X)
    assert_equal_values(sx.state(layer).flat(), expected["layer"].flat())


def test_hessian_holds_modules_by_path() -> None:
    layer = nn.Linear(2, 1, rngs=sx.Rngs(0))
    square = lambda layer, x: (layer(x) ** 2).sum()  # noqa: E731
    second, expected = (
        sx.hessian(square, as_module=flag)(layer, X)["kernel"] for flag in (True, False)
    )
    assert (type(second), second.bias.axes) == (nn.Linear, (None, None, "out"))
    assert_equal_values(sx.state(second).flat(), expected.flat())
    assert "Linear(" in repr(sx.hessian(square, as_module=True)(layer, X))
