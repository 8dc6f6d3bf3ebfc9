# SPDX-License-Identifier: Apache-2.0
"""An assignment to ``__call__`` of one Module would change nothing, and is refused."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import ModuleAttributeError
from tests.advice import run_advice


class Scaled(sx.Module):
    def __init__(self) -> None:
        self.weight = sx.Param(jnp.full(3, 2.0))

    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        return x * self.weight


def test_assignment_to_the_call_of_an_instance_is_refused() -> None:
    model = Scaled()
    with pytest.raises(ModuleAttributeError, match="this Scaled would be called as before") as e:
        model.__call__ = lambda x: 100 * x
    assert model(jnp.ones(3)).tolist() == [2, 2, 2]
    names = {"sx": sx, "model": model, "function": lambda x: 100 * x}
    run_advice(e.value, "model = sx.nn.Sequential(model, function)", names)
    assert names["model"](jnp.ones(3)).tolist() == [200, 200, 200]
    assert sx.jit(names["model"])(jnp.ones(3)).tolist() == [200, 200, 200]
