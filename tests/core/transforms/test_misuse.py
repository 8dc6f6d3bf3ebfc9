# SPDX-License-Identifier: Apache-2.0
"""Wrong options and arguments of ``jit`` and ``grad``: errors that name them, and what works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import DonationError, ModuleError, StaticArgumentError, TransformError
from tests.advice import run_advice


def _loss(w: Any, x: Any = 1.0) -> Any:
    return (w * x).sum()


def _weights() -> Any:
    return sx.Param(jnp.ones((2, 2)))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "compiler options": (
        lambda: sx.jit(_loss, compiler_options=5),  # pyright: ignore[reportArgumentType]
        TransformError,
        r"compiler_options=5 is of type int.*compiler_options=\{",
    ),
    "compiler options of a stage": (
        lambda: sx.jit(_loss).lower(_weights()).compile("x"),  # pyright: ignore[reportArgumentType]
        TransformError,
        r"compiler_options='x' is of type str",
    ),
    "no function": (lambda: sx.jit(5), TransformError, r"sx\.jit was given 5 of type int"),  # pyright: ignore[reportArgumentType]
    "no function to differentiate": (
        lambda: sx.value_and_grad([1]),
        TransformError,
        r"sx\.value_and_grad was given \[1\] of type list",
    ),
    "static position": (
        lambda: sx.jit(_loss, static_argnums="x"),  # pyright: ignore[reportArgumentType]
        StaticArgumentError,
        r"static_argnums='x' is of type str; positions are integers",
    ),
    "static name": (
        lambda: sx.jit(_loss, static_argnames=(1,)),  # pyright: ignore[reportArgumentType]
        StaticArgumentError,
        r"static_argnames=1 is of type int.*names are strings",
    ),
    "donated position": (
        lambda: sx.jit(_loss, donate_argnums=1.5),  # pyright: ignore[reportArgumentType]
        DonationError,
        r"donate_argnums=1\.5 is of type float",
    ),
    **{
        f"differentiated position {wrong!r}": (
            lambda wrong=wrong: sx.grad(_loss, argnums=wrong),
            TransformError,
            rf"argnums has {wrong!r} .*argnums=0",
        )
        for wrong in (None, "w", 1.5, True)
    },
}


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_option_raises_with_valid_values(
    call: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    if "sx.DiffState" in str(caught.value):
        run_advice(caught.value, "argnums=(0, sx.DiffState(1, sx.Param))", names := {"sx": sx})
        gradients = sx.grad(lambda x, w: (x * w).sum(), argnums=names["argnums"])
        assert gradients(2.0, sx.Param(3.0)) == (3.0, 2.0)


LAX: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "dot": (lambda w, x: jax.lax.dot(x, w), "rhs of jax.lax.dot"),
    "exp": (lambda w, x: jax.lax.exp(w), "x of jax.lax.exp"),
    "select": (lambda w, x: jax.lax.select(x > 0, w, x), "on_true of jax.lax.select"),
    "concatenate": (lambda w, x: jax.lax.concatenate([x, w], 0), "operands of jax.lax.concatenate"),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jit": sx.jit,
    "grad": lambda f: sx.grad(lambda w, x: f(w, x).sum()),
    "vmap": lambda f: sx.vmap(f, in_axes=None, axis_size=2),
    "jit of grad": lambda f: sx.jit(sx.grad(lambda w, x: f(w, x).sum())),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize(("call", "place"), LAX.values(), ids=LAX.keys())
def test_variable_in_lax_function_is_named(
    call: Callable[[Any, Any], Any], place: str, transform: Callable[[Any], Any]
) -> None:
    with pytest.raises(ModuleError, match=rf"argument {place} is a Param.*variable\.value"):
        transform(call)(_weights(), jnp.ones((2, 2)))


def test_jax_error_outside_transforms_explains_the_cause() -> None:
    with pytest.raises(TypeError, match="dot_general at position 0") as caught:
        jax.lax.dot(_weights(), jnp.ones((2, 2)))  # pyright: ignore[reportArgumentType]
    assert "argument lhs of jax.lax.dot is a Param(float32[2, 2])" in str(caught.value.__cause__)
    with pytest.raises(ModuleError, match=r"jax\.typeof is a Param"):
        jax.typeof(_weights())


def test_jax_numpy_functions_accept_variables() -> None:
    w, x = _weights(), jnp.full((2, 2), 2.0)
    assert jax.lax.dot(w.value, x).tolist() == jnp.dot(w, x).tolist() == (w @ x).tolist()
    assert str(w) == repr(w) == "Param(float32[2, 2])"


@pytest.mark.parametrize("unroll", ["x", 1.5, 0, -1, None])
def test_wrong_unroll_is_refused_by_name(unroll: Any) -> None:
    with pytest.raises(TransformError, match=r"unroll of sx\.scan is .* at least 1, or True"):
        sx.scan(lambda c, x: (c, x), unroll=unroll)
    if unroll is not None:
        with pytest.raises(TransformError, match=r"unroll of sx\.fori_loop is"):
            sx.fori_loop(0, 3, lambda i, c: c, 0.0, unroll=unroll)
    with pytest.raises(TransformError, match=r"reverse of sx\.scan is 'yes'"):
        sx.scan(lambda c, x: (c, x), reverse="yes")
    for right in (1, 2, np.int64(3), True, False):
        total, _ = sx.scan(lambda c, x: (c + x, x), unroll=right)(0.0, jnp.arange(4.0))
        assert float(total) == 6.0
