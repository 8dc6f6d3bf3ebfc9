# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: no part of the gradient of a Variable that arrives twice is lost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import TransformError


class Weight(sx.Module):
    def __init__(self, value: float) -> None:
        self.w = sx.Param(jnp.float32(value))


def product(a: Weight, b: Weight) -> jax.Array:
    return a.w * b.w


def _rule(*, nondiff: Any = (1,)) -> Any:
    """Returns a rule of the product that has a gradient for its first argument."""
    rule = sx.custom_vjp(product, nondiff_argnums=nondiff)
    bwd = lambda b, other, ct: ({"w": ct * other},)  # noqa: E731
    rule.defvjp(lambda a, b: (rule(a, b), b.w[...]), bwd)
    return rule


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit, sx.remat], ids=["", "jit", "remat"])
def test_variable_of_two_arguments_is_refused(wrap: Any) -> None:
    rule, model, other = _rule(), Weight(3.0), Weight(2.0)
    assert float(sx.grad(wrap(lambda m: rule(m, other)))(model)["w"]) == 2
    with pytest.raises(TransformError, match=r"\.w, .* twice: .*in the argument 'b'"):
        sx.grad(wrap(lambda m: rule(m, m)))(model)
    with pytest.raises(TransformError, match="in the argument 'b'"):
        sx.grad(wrap(lambda m: rule(m[0], m[1])))([model, model])
    assert float(wrap(lambda m: rule(m, m))(model)) == 9  # without a gradient


def test_custom_vjp_keeps_another_gradient_beside_one_arriving_twice() -> None:
    rule, model = _rule(), Weight(3.0)
    gradient = sx.grad(lambda x: rule(model, model) * x)(2.0)
    assert float(gradient) == 9


def test_part_of_the_other_argument_is_refused() -> None:
    class Outer(sx.Module):
        def __init__(self) -> None:
            self.inner = [Weight(3.0)]

        @property
        def w(self) -> Any:
            return self.inner[0].w

    rule, outer = _rule(), Outer()
    with pytest.raises(TransformError, match="twice"):
        sx.grad(lambda outer: rule(outer.inner[0], outer))(outer)


def test_two_differentiable_arguments_have_one_gradient() -> None:
    rule = sx.custom_vjp(product)  # as the error says
    fwd = lambda a, b: (product(a, b), (a.w[...], b.w[...]))  # noqa: E731
    rule.defvjp(fwd, lambda r, ct: ({"w": ct * (r[0] + r[1])}, None))
    assert float(sx.grad(lambda m: rule(m, m))(Weight(3.0))["w"]) == 6


def test_filter_that_excludes_the_variable_is_refused() -> None:
    rule = sx.custom_vjp(product, nondiff_argnums=(sx.DiffState(1, sx.BatchStat),))
    rule.defvjp(lambda a, b: (rule(a, b), b.w[...]), lambda r, ct: ({"w": ct * r}, None))
    with pytest.raises(TransformError, match="in the argument 'b'"):
        sx.grad(lambda m: rule(m, m))(Weight(3.0))


@pytest.mark.parametrize("where", ["function", "fwd"])
def test_variable_of_a_closure_is_refused(where: str) -> None:
    def squared(model: Weight) -> jax.Array:
        @sx.custom_vjp
        def rule(a: Weight) -> jax.Array:
            return a.w * model.w

        def fwd(a: Weight) -> Any:
            return (rule(a) if where == "function" else a.w * model.w), a.w[...]

        rule.defvjp(fwd, lambda residual, ct: ({"w": ct * residual},))
        return rule(model)

    model = Weight(3.0)
    assert float(squared(model)) == 9
    with pytest.raises(TransformError, match=r"twice: .* by a closure"):
        sx.grad(squared)(model)


def test_variable_of_a_callable_module_is_refused() -> None:
    class Times(sx.Module):
        def __init__(self) -> None:
            self.part = Weight(3.0)

        def __call__(self, a: Weight) -> jax.Array:
            return a.w * self.part.w

    def squared(model: Times) -> jax.Array:
        rule = sx.custom_vjp(model)
        rule.defvjp(lambda a: (a.w * 3.0, None), lambda residual, ct: ({"w": ct * 3.0},))
        return rule(model.part)

    with pytest.raises(TransformError, match="in the function itself"):
        sx.grad(squared)(Times())
