# SPDX-License-Identifier: Apache-2.0
"""Liveness: which inputs of a program its results depend on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardax._transforms.grad.liveness import used_inputs


def _first(x: Any, y: Any) -> Any:
    jnp.sin(y)  # computed, and then not used
    return x * 2


def _scanned(x: Any, y: Any) -> Any:
    return jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (x, y), length=1)[0][0]


def _printed(x: Any, y: Any) -> Any:
    jax.debug.print("{}", y)
    return x


@jax.custom_vjp
def _custom(x: Any, y: Any) -> Any:
    return x


_custom.defvjp(lambda x, y: (x, y), lambda y, ct: (ct, y))


@pytest.mark.parametrize(
    ("function", "used"),
    [
        (_first, [True, False]),
        (lambda x, y: (x, y), [True, True]),
        (lambda x, y: 1.0, [False, False]),
        (jax.jit(_first), [True, False]),
        (lambda x, y: jax.jit(lambda x, y: (x, y))(x, y)[0], [True, False]),
        (jax.checkpoint(_first), [True, False]),
        (_custom, [True, False]),
        (lambda x, y: jax.lax.cond(x > 0, lambda: y, lambda: -y), [True, True]),
        (_scanned, [True, True]),
        (_printed, [True, True]),
    ],
)
def test_inputs_of_dependent_results_are_live(function: Any, used: list[bool]) -> None:
    assert used_inputs(jax.make_jaxpr(function)(1.0, 2.0).jaxpr) == used
