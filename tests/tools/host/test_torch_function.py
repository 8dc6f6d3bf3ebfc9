# SPDX-License-Identifier: Apache-2.0
"""PyTorch functions compute in JAX programs what they compute by themselves."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import shardax as sx
from shardax.errors import HostFunctionError, TransformError
from tests.advice import run_advice

if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is missing: pip install torch==2.13.0", allow_module_level=True)

import torch

from_torch = sx.host.from_torch

LOGITS = jax.random.normal(jax.random.key(0), (4, 5))
LABELS = jnp.array([0, 1, 4, 2])

cross_entropy = from_torch(torch.nn.functional.cross_entropy)


def in_jax(logits: Any, labels: Any) -> Any:
    rows = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -rows.mean()


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit, sx.jit], ids=["eager", "jit", "sx.jit"])
@pytest.mark.parametrize("integer", ["int32", "int8", "uint8", "uint16"])
def test_loss_and_gradient_equal_those_of_jax(compiled: Any, integer: str) -> None:
    """PyTorch itself refuses labels of JAX's integers."""
    value, gradient = compiled(jax.value_and_grad(cross_entropy))(LOGITS, LABELS.astype(integer))
    expected, slope = jax.value_and_grad(in_jax)(LOGITS, LABELS)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_of_floats_stays(dtype: str) -> None:
    logits = LOGITS.astype(dtype)
    value, gradient = jax.jit(jax.value_and_grad(cross_entropy))(logits, LABELS)
    assert (value.dtype, gradient.dtype) == (dtype, dtype)
    wide = logits.astype("float32")
    np.testing.assert_allclose(value.astype("float32"), in_jax(wide, LABELS), rtol=1e-2)
    slope = jax.grad(in_jax)(wide, LABELS)
    np.testing.assert_allclose(gradient.astype("float32"), slope, atol=4e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_and_narrow_dtypes_work_with_x64(dtype: str) -> None:
    with jax.enable_x64(True):
        logits, labels = jnp.asarray(LOGITS, dtype), jnp.asarray(LABELS, "int64")
        value, gradient = jax.jit(jax.value_and_grad(cross_entropy))(logits, labels)
        assert (value.dtype, gradient.dtype) == (dtype, dtype)
        np.testing.assert_allclose(gradient, jax.grad(in_jax)(logits, labels), atol=1e-6)
        if dtype == "float64":
            check_grads(lambda x: cross_entropy(x, labels), (logits,), order=3, modes=["rev"])


def test_gradients_of_every_order_check_out() -> None:
    check_grads(jax.jit(lambda x: cross_entropy(x, LABELS)), (LOGITS,), 2, modes=["rev"], atol=1e-2)
    third = jax.grad(jax.grad(jax.grad(from_torch(lambda x: x**4))))
    assert (float(third(2.0)), float(jax.jit(third)(2.0))) == (48.0, 48.0)


def test_lanes_of_gradients_are_gradients_of_lanes() -> None:
    rows = jax.vmap(jax.grad(cross_entropy))(LOGITS[:, None], LABELS[:, None])
    np.testing.assert_allclose(rows[:, 0] / 4, jax.grad(in_jax)(LOGITS, LABELS), atol=1e-6)


def test_what_is_passed_by_name_reaches_the_gradient() -> None:
    summed = jax.jit(jax.grad(lambda x: cross_entropy(x, LABELS, reduction="sum")))(LOGITS)
    np.testing.assert_allclose(summed, 4 * jax.grad(in_jax)(LOGITS, LABELS), atol=1e-6)


def test_models_of_pytorch_are_functions_of_their_input() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh())
    apply = from_torch(model, out=lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], 3), x.dtype))
    weight, bias = (p.detach().numpy() for p in model.parameters())

    def expected(x: Any) -> Any:
        return jnp.tanh(x @ weight.T + jnp.broadcast_to(bias, (4, 3)))

    np.testing.assert_allclose(jax.jit(apply)(LOGITS), expected(LOGITS), atol=1e-6)
    mine, theirs = (jax.vjp(f, LOGITS)[1](jnp.ones((4, 3)))[0] for f in (apply, expected))
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_weights_that_are_arguments_are_trained() -> None:
    @from_torch
    def loss(params: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.mse_loss(x @ params["w"] + params["b"], y)

    class Line(sx.Module):
        def __init__(self) -> None:
            self.w = sx.Param(jnp.zeros(5))
            self.b = sx.Param(jnp.zeros(()))

    def of_line(line: Line) -> Any:
        return loss({"w": line.w, "b": line.b}, LOGITS, jnp.ones(4))

    gradient = sx.jit(sx.grad(of_line))(Line())
    np.testing.assert_allclose(gradient["w"], -2 * LOGITS.mean(0), atol=1e-6)
    assert float(gradient["b"]) == -2.0


def test_trees_with_integers_in_them_go_both_ways() -> None:
    function = from_torch(
        lambda tree: {"scaled": tree["x"] * tree["n"], "n": tree["n"] + 1},
        out=lambda tree: {"scaled": tree["x"], "n": tree["n"]},
    )
    result = jax.jit(function)({"x": 2.0, "n": 3})
    assert (float(result["scaled"]), int(result["n"]), result["n"].dtype) == (6.0, 4, "int32")
    gradient = jax.jit(jax.grad(lambda x: function({"x": x, "n": 3})["scaled"]))(2.0)
    assert float(gradient) == 3.0


def test_complex_gradients_are_those_of_jax() -> None:
    z = jnp.array([1 + 2j, 3 - 1j])
    size = from_torch(lambda z: (z * z).abs().sum(), out=jax.ShapeDtypeStruct((), float))
    expected = jax.grad(lambda z: jnp.abs(z * z).sum())(z)
    np.testing.assert_allclose(jax.grad(size)(z), expected, rtol=1e-5)
    turned = from_torch(lambda z: z * z * (1 + 2j), out=lambda z: z)
    mine, theirs = (jax.vjp(f, z)[1](z)[0] for f in (turned, lambda z: z * z * (1 + 2j)))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_unused_torch_input_has_zero_gradient() -> None:
    function = from_torch(lambda x, y: (x**2).sum())
    assert [g.tolist() for g in jax.grad(function, argnums=(0, 1))(2.0, 3.0)] == [4.0, 0.0]
    constant = from_torch(lambda x: torch.ones(()))
    assert float(jax.grad(constant)(2.0)) == 0.0


@pytest.mark.parametrize("hessian", [sx.hessian, jax.hessian], ids=["sx", "jax"])
def test_hessian_names_the_way_backward_twice(hessian: Any) -> None:
    function = from_torch(lambda x: (x**3).sum())
    with pytest.raises(TransformError, match=r"host function .* cannot be") as caught:
        hessian(function)(LOGITS[0])
    second = run_advice(caught.value, "sx.jacrev(sx.jacrev(f))", {"sx": sx, "f": function})
    np.testing.assert_allclose(second(LOGITS[0]), np.diag(6 * LOGITS[0]), rtol=1e-5)


def test_errors_of_pytorch_come_as_they_are() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy(LOGITS, LABELS + 10)
    with pytest.raises(IndexError, match="out of bounds"), sx.host.host_exceptions():
        jax.jit(cross_entropy)(LOGITS, LABELS + 10).block_until_ready()
    with pytest.raises(HostFunctionError):
        from_torch(torch.sin, vmap="loop")
