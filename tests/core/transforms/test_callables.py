# SPDX-License-Identifier: Apache-2.0
"""Functions that hold what cannot be hashed: partials with arrays, instances without a hash."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from tests.core.transforms.examples import Scale


@dataclasses.dataclass
class Affine:
    """A callable that compares by value, so Python gives it no hash."""

    offset: Any

    def __call__(self, x: Any) -> Any:
        return x * x + self.offset


def _weigh(model: Scale, weights: Any, x: Any, *, parts: Any = ()) -> Any:
    return (model(x) * weights).sum() + sum(part["w"].sum() * part["m"](x).sum() for part in parts)


def test_partial_may_hold_arrays_lists_and_modules() -> None:
    model, other = Scale(), Scale()
    parts = [{"w": jnp.ones(2), "m": other}]
    bound = functools.partial(_weigh, model, jnp.array([1.0, 3.0]), parts=parts)
    for transform in (lambda f: f, sx.jit, lambda f: sx.value_and_grad(f, wrt=...)):
        result = transform(bound)(jnp.ones(2))
        value = result[0] if isinstance(result, tuple) else result
        assert float(value) == 2.0 + 2.0
    assert (int(model.calls), int(other.calls)) == (3, 3)


@pytest.mark.parametrize("held", [Affine(jnp.float32(1)), functools.partial(Affine(1.0))])
def test_callable_without_a_hash_can_be_transformed(held: Any) -> None:
    assert float(sx.jit(held)(3.0)) == 10.0
    assert float(sx.grad(held)(3.0)) == 6.0
    assert sx.vmap(held)(jnp.arange(2.0)).tolist() == [1.0, 2.0]
    assert float(sx.cond(True, held, lambda x: x, 2.0)) == 5.0


def test_held_callable_is_traced_once() -> None:
    traced = []

    def count(array: Any, x: Any) -> Any:
        traced.append(1)
        return array * x

    compiled = sx.jit(functools.partial(count, jnp.float32(2)))
    assert [float(compiled(x)) for x in (1.0, 2.0)] == [2.0, 4.0] and len(traced) == 1
