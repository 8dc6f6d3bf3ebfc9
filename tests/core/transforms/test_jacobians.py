# SPDX-License-Identifier: Apache-2.0
"""``jacfwd``, ``jacrev``, ``hessian`` and ``checkify`` over Modules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

import shardax as sx
from shardax.errors import TransformError
from tests.strategies import Node

JACOBIANS = pytest.mark.parametrize("name", ["jacfwd", "jacrev"])


def _model(shared: bool = True) -> Node:
    model = Node()
    model.a = sx.Param(jnp.array([1.0, 2.0]))
    model.b = model.a if shared else sx.Param(jnp.array([3.0, 4.0]))
    model.count = sx.Variable(jnp.float32(0))
    return model


def _outputs(model: Any, x: Any) -> Any:
    model.count.value = model.count + model.a.sum()
    model.note = "run"
    return {"y": model.a * model.b * x, "z": (model.a**2).sum()}


@JACOBIANS
def test_jacobian_of_shared_variable_sums_its_uses(name: str) -> None:
    model = _model()
    jacobian = getattr(sx, name)(_outputs)(model, jnp.array([1.0, 10.0]))
    assert {key: list(part.flat()) for key, part in jacobian.items()} == {
        "y": [("a",)],
        "z": [("a",)],
    }
    assert jacobian["y"]["a"].tolist() == [[2.0, 0.0], [0.0, 40.0]]
    assert jacobian["z"]["a"].tolist() == [2.0, 4.0]
    assert (float(model.count), model.note) == (3.0, "run")


@JACOBIANS
def test_jacobian_of_several_arguments_with_aux(name: str) -> None:
    def f(model: Any, x: Any) -> Any:
        y = _outputs(model, x)["y"]
        return y, (model, {"y": y})

    model, x = _model(shared=False), jnp.array([1.0, 10.0])
    run = sx.jit(
        getattr(sx, name)(f, argnums=(1, sx.DiffState(0, sx.PathContains("b"))), has_aux=True)
    )
    (of_x, of_model), (same, aux) = run(model, x)
    assert same is model and aux["y"].tolist() == [3.0, 80.0]
    assert of_x.tolist() == [[3.0, 0.0], [0.0, 8.0]]
    assert {p: v.tolist() for p, v in of_model.flat().items()} == {
        ("b",): [[1.0, 0.0], [0.0, 20.0]]
    }


def test_hessian_is_a_gradient_of_gradients() -> None:
    model = _model(shared=False)

    def f(model: Any, x: Any) -> Any:
        return (_outputs(model, x)["y"]).sum()

    second = sx.hessian(f, argnums=(0, 1))(model, jnp.array([1.0, 10.0]))
    (of_model, of_x) = second
    assert of_model["a"][0]["b"].tolist() == [[1.0, 0.0], [0.0, 10.0]]
    assert of_model["a"][0]["a"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert of_model["a"][1].tolist() == [[3.0, 0.0], [0.0, 4.0]]
    assert of_x[0]["b"].tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert float(model.count) == 3.0


@settings(max_examples=6)
@given(
    st.sampled_from(["jacfwd", "jacrev", "hessian"]),
    st.sampled_from([0, 1, (0,), (1, 0)]),
    st.booleans(),
)
def test_derivatives_of_pure_functions_are_those_of_jax(
    name: str, argnums: Any, compiled: bool
) -> None:
    def f(x: Any, y: Any) -> Any:
        return jnp.sin(x["a"]) * y.sum(), [y**2]

    x, y = {"a": jnp.array([0.5, 2.0])}, jnp.array([1.0, 3.0])
    ours = getattr(sx, name)(f, argnums=argnums)
    result = (sx.jit(ours) if compiled else ours)(x, y)
    expected = getattr(jax, name)(f, argnums=argnums)(x, y)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), result, expected)


def test_jacobian_misuse_is_refused_by_path() -> None:
    model = _model()
    with pytest.raises(TransformError, match=r"\.model\.count|has no Variable"):
        sx.jacrev(lambda model: model.a.value, wrt=sx.Cache)(model)
    with pytest.raises(TransformError, match=r"given to sx\.jacfwd returned a Node"):
        sx.jacfwd(lambda model: model)(model)
    model.steps = sx.Param(jnp.int32(1))
    with pytest.raises(TransformError, match=r"Param at \.model\.steps has dtype int32"):
        sx.hessian(lambda model: model.a.sum())(model)


# --- checkify ---


def _checked(model: Any, x: Any) -> Any:
    checkify.check(x > 0, "x is {x}", x=x)
    model.count.value = model.count + x
    model.new = sx.Param(x)
    return model, x / 2


@pytest.mark.parametrize("around", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_checkify_returns_error_and_carries_effects(around: Any) -> None:
    model, run = _model(), around(sx.checkify(_checked))
    error, (same, half) = run(model, jnp.float32(4))
    assert (error.get(), same is model, float(half), float(model.new)) == (None, True, 2.0, 4.0)
    error, _ = run(model, jnp.float32(-1))
    assert error.get().startswith("x is -1.0") and float(model.count) == 3.0
    with pytest.raises(checkify.JaxRuntimeError, match=r"x is -1\.0"):
        error.throw()


def test_checkify_reaches_into_scans_and_closures() -> None:
    model = _model()

    def total(xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            model.count.value = model.count + jnp.log(x)
            return carry + x, x

        return sx.scan(body)(jnp.float32(0), xs)[0]

    error, result = sx.checkify(total, errors=checkify.float_checks)(jnp.array([1.0, -1.0]))
    assert "nan generated by primitive" in error.get() and float(result) == 0.0
    assert np.isnan(float(model.count))
    with pytest.raises(TransformError, match=r"\.xs of sx\.checkify is a str"):
        sx.checkify(total)("text")
