# SPDX-License-Identifier: Apache-2.0
"""Derivatives of ``bounded_while_loop``: exact in both modes, and what they keep in memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import shardax as sx
from tests.core.transforms.examples import Box

MODES = ("no", "store", "recompute")
every_mode = pytest.mark.parametrize("mode", MODES)


def _decay(mode: Any, weight: Any, x: Any) -> Any:
    """A loop whose number of steps depends on its input, with its history."""
    result = sx.bounded_while_loop(
        lambda c: c[0].sum() > 0.5,
        lambda c: (jnp.sin(weight @ c[0]), c[1] + 1),
        (x, 0),
        max_steps=7,
        history=lambda c: c[0],
        differentiable=mode,
    )
    return result.final[0], result.history


def _example() -> tuple[Any, Any]:
    return np.array([[0.6, 0.1], [0.2, 0.5]], np.float32), np.array([0.9, 0.7], np.float32)


@every_mode
def test_forward_mode_is_exact(mode: Any) -> None:
    decay = jax.jit(functools.partial(_decay, mode))
    check_grads(decay, _example(), order=2, modes=["fwd"], rtol=2e-2)


@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_reverse_mode_is_exact(mode: Any) -> None:
    decay = jax.jit(functools.partial(_decay, mode))
    check_grads(decay, _example(), order=2, modes=["rev"], rtol=2e-2)


def _starts() -> Any:
    x = _example()[1]
    return np.stack([x, x / 2, x * np.float32(1.3)])


@functools.cache
def _unrolled_gradients() -> list[Any]:
    """Gradients of the square of the final value, by backpropagation in NumPy."""
    weight, gradients = _example()[0], []
    for x in _starts():
        xs = [x]
        while xs[-1].sum() > 0.5:
            xs.append(np.sin(weight @ xs[-1]))
        of_weight, of_x = np.zeros_like(weight), 2 * xs[-1]
        for before in reversed(xs[:-1]):
            of_sum = of_x * np.cos(weight @ before)
            of_weight += np.outer(of_sum, before)
            of_x = weight.T @ of_sum
        gradients.append((of_weight, of_x))
    return gradients


@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_reverse_mode_is_that_of_the_unrolled_loop(mode: Any) -> None:
    weight, xs = _example()[0], _starts()
    loss = lambda weight, x: (_decay(mode, weight, x)[0] ** 2).sum()  # noqa: E731
    gradient = jax.grad(loss, argnums=(0, 1))
    one = jax.jit(gradient)
    lanes = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))(weight, xs)
    for i, expected in enumerate(_unrolled_gradients()):
        for found, lane, by_hand in zip(one(weight, xs[i]), lanes, expected, strict=True):
            np.testing.assert_allclose(found, by_hand, rtol=1e-5, atol=1e-8)
            np.testing.assert_allclose(lane[i], by_hand, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_gradients_go_through_modules(mode: Any) -> None:
    model = Box()
    model.weight, model.state = sx.Param(jnp.float32(2)), sx.Variable(jnp.float32(1))

    def body(model: Box) -> Box:
        model.state[...] = model.state * model.weight
        return model

    def loss(model: Box) -> Any:
        result = sx.bounded_while_loop(
            lambda m: m.state < 5, body, model, max_steps=10, differentiable=mode
        )
        return result.final.state.value

    value, gradient = sx.jit(sx.value_and_grad(loss))(model)
    assert float(value) == float(model.state) == 8.0
    assert float(gradient["weight"]) == 3 * 2.0**2


def _memory_of_the_gradient(mode: Any, max_steps: int, size: int = 64) -> int:
    """Returns the bytes of temporary memory of a compiled gradient."""

    def loss(weight: Any, x: Any) -> Any:
        result = sx.bounded_while_loop(
            lambda x: x.sum() > -1e9,
            lambda x: jnp.tanh(weight @ x),
            x,
            max_steps=max_steps,
            differentiable=mode,
        )
        return result.final.sum()

    shapes = jax.ShapeDtypeStruct((size, size), "float32"), jax.ShapeDtypeStruct((size,), "float32")
    analysis = jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize(("mode", "growth"), [("store", 16), ("recompute", 4)])
def test_gradient_memory_grows_linearly_or_by_root(mode: Any, growth: int) -> None:
    at = {steps: _memory_of_the_gradient(mode, steps) for steps in (256, 4096, 65536)}
    first, second = at[4096] - at[256], at[65536] - at[4096]
    assert 0.9 * growth < second / first < 1.1 * growth, at
    carry = 64 * 4
    kept = {"store": 65536, "recompute": 2 * 256}[mode]
    assert second <= 1.5 * kept * carry, at
