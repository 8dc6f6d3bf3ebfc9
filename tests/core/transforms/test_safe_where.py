# SPDX-License-Identifier: Apache-2.0
"""``safe_where``: values are those of a choice, derivatives those of the chosen side alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import TransformError
from tests.advice import run_advice

# function, its derivative, whether a number is in the domain, a stand-in
SINGULAR: dict[str, tuple[Any, Any, Callable[[Any], Any], float]] = {
    "log": (jnp.log, lambda x: 1 / x, lambda x: x > 0, 1.0),
    "sqrt": (jnp.sqrt, lambda x: 0.5 / np.sqrt(x), lambda x: x > 0, 1.0),
    "reciprocal": (lambda x: 1 / x, lambda x: -1 / x**2, lambda x: x != 0, 1.0),
    "arccos": (jnp.arccos, lambda x: -1 / np.sqrt(1 - x * x), lambda x: abs(x) < 1, 0.0),
    "exp": (jnp.exp, np.exp, lambda x: x < 5, 0.0),
}
NUMBERS = st.sampled_from([-1e30, -3.0, -1.0, -0.5, -0.0, 0.0, 0.25, 1.0, 2.0, 1e30])


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    """Returns the value and both derivatives in a direction, as one program."""
    function, _, inside, stand_in = SINGULAR[name]

    def chosen(x: Any) -> Any:
        return sx.safe_where(inside(x), function, x, otherwise=-7.0, stand_in=stand_in)

    @jax.jit
    def run(x: Any, direction: Any) -> Any:
        value, forward = jax.jvp(chosen, (x,), (direction,))
        return value, jax.vjp(chosen, x)[1](direction)[0], forward

    return run


@pytest.mark.parametrize("name", SINGULAR)
@settings(max_examples=20, deadline=None)
@given(numbers=st.lists(NUMBERS, min_size=4, max_size=4), seed=st.integers(0, 9))
def test_values_and_derivatives_match_the_chosen_side(
    name: str, numbers: list[float], seed: int
) -> None:
    function, derivative, inside, _ = SINGULAR[name]
    x = np.array(numbers, np.float32)
    direction = np.random.default_rng(seed).normal(size=4).astype(np.float32)

    with np.errstate(all="ignore"):
        value = np.where(inside(x), np.asarray(function(x)), np.float32(-7))
        slope = np.where(inside(x), derivative(x), np.float32(0))
    found, backward, forward = _compiled(name)(x, direction)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    np.testing.assert_allclose(backward, slope * direction, rtol=2e-5)
    np.testing.assert_allclose(forward, slope * direction, rtol=2e-5)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: sx.jit(sx.grad(lambda x: f(x).sum(), argnums=0)),
        lambda f: jax.vmap(jax.grad(f)),
        lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
        lambda f: jax.grad(lambda x: sx.remat(f)(x).sum()),
    ],
    ids=["grad", "jit of grad", "vmap of grad", "grad of vmap", "remat"],
)
def test_plain_where_gives_nan_safe_where_not(transformed: Any) -> None:
    x = jnp.array([0.0, 4.0])
    wrong = jax.jit(transformed(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0)))(x)
    safe = lambda x: sx.safe_where(x > 0, jnp.sqrt, x, otherwise=0.0, stand_in=1.0)  # noqa: E731
    right = sx.jit(transformed(safe))(x)
    np.testing.assert_array_equal(wrong, [np.nan, 0.25])
    np.testing.assert_array_equal(right, [0.0, 0.25])


def test_gradient_of_cond_under_vmap_is_finite() -> None:
    x = jnp.array([0.0, 4.0])
    one = lambda x: sx.cond(x > 0, jnp.sqrt, jnp.zeros_like, x)  # noqa: E731
    assert jax.jit(jax.vmap(jax.grad(one)))(x).tolist() == [0.0, 0.25]
    assert jax.jit(jax.grad(lambda x: sx.vmap(one)(x).sum()))(x).tolist() == [0.0, 0.25]


def test_second_derivatives_are_finite_too() -> None:
    def chosen(x: Any) -> Any:
        return sx.safe_where(x > 0, jnp.log, x, otherwise=0.0, stand_in=1.0)

    second = jax.jit(jax.vmap(jax.grad(jax.grad(chosen))))
    assert second(jnp.array([0.0, -1.0, 2.0])).tolist() == [0.0, 0.0, -0.25]


def test_otherwise_may_be_a_guarded_function() -> None:
    def sinc(x: Any) -> Any:
        small = jnp.abs(x) < 1e-3
        return sx.safe_where(
            ~small,
            lambda x: jnp.sin(x) / x,
            x,
            otherwise=lambda x: 1 - x * x / 6 + 0 * jnp.sqrt(2e-3 - x),  # no root of 3 - 2
            stand_in=1e-3,
        )

    x = jnp.array([0.0, 3.0])
    np.testing.assert_allclose(jax.jit(sinc)(x), [1.0, np.sin(3.0) / 3], rtol=1e-6)
    slope = (3 * np.cos(3.0) - np.sin(3.0)) / 9
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(sinc)))(x), [0.0, slope], rtol=1e-5)


def test_safe_where_broadcasts_several_operands() -> None:
    def ratio(a: Any, b: Any) -> Any:
        return sx.safe_where(b != 0, lambda a, b: a / b, a, b, otherwise=9.0, stand_in=1.0)

    a, b = jnp.ones((2, 3)), jnp.array([[0.0, 1.0, 2.0]])
    assert ratio(a, b).tolist() == [[9.0, 1.0, 0.5]] * 2
    found = jax.jit(jax.grad(lambda a, b: ratio(a, b).sum(), (0, 1)))(a, b)
    assert [g.tolist() for g in found] == [[[0.0, 1.0, 0.5]] * 2, [[0.0, -2.0, -0.5]]]


def test_norm_has_a_finite_gradient_at_zero() -> None:
    def unit(v: Any) -> Any:
        nonzero = (v != 0).any(-1, keepdims=True)
        return sx.safe_where(
            nonzero,
            lambda v: v / jnp.linalg.norm(v, axis=-1, keepdims=True),
            v,
            otherwise=0.0,
            stand_in=1.0,
        )

    v = jnp.array([[0.0, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(jax.jit(unit)(v), [[0.0, 0.0], [0.6, 0.8]], rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda v: unit(v)[:, 0].sum()))(v)
    np.testing.assert_allclose(gradient, [[0.0, 0.0], [0.128, -0.096]], rtol=1e-5)


def test_variables_are_operands_and_may_be_written() -> None:
    scale, calls = sx.Param(jnp.array([0.0, 2.0])), sx.Variable(jnp.int32(0))

    @sx.jit
    def run(scale: Any) -> Any:
        def log(x: Any) -> Any:
            calls[...] = calls + 1
            return jnp.log(x)

        return sx.safe_where(scale > 0, log, scale, otherwise=0.0, stand_in=1.0)

    np.testing.assert_allclose(run(scale), [0.0, np.log(2.0)], rtol=1e-6)
    assert int(calls) == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_dtypes_are_kept(dtype: Any) -> None:
    x = jnp.array([0, 4], dtype)
    found = sx.safe_where(x != 0, jnp.sqrt, x, otherwise=0.0, stand_in=1.0)
    assert (found.dtype, found.tolist()) == (dtype, [0, 2])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((jnp.ones(2), jnp.log, jnp.ones(2)), TransformError, "dtype float32"),
        ((True, lambda: 1.0), TransformError, "no operands"),
        ((True, jnp.log, jnp.ones(2), jnp.int32(3)), TransformError, "Operand 1 .* int32 .* 0.5"),
    ],
)
def test_unsupported_operands_are_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        sx.safe_where(*arguments, otherwise=0.0, stand_in=0.5)
    if message == "no operands":
        code = "sx.safe_where(x > 0, jnp.log, x, otherwise=0, stand_in=1)"
        names = {"sx": sx, "jnp": jnp, "x": jnp.array([-1.0, 1.0])}
        assert run_advice(caught.value, code, names).tolist() == [0, 0]
