# SPDX-License-Identifier: Apache-2.0
"""Scopes on a line of their own change nothing, and say so once."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from tests.advice import run_advice

SCOPES: dict[str, Callable[[], Any]] = {
    "kernels": lambda: sx.kernels(attention="xla"),
    "axis_rules": lambda: sx.axis_rules({"embed": None}),
    "parallel": lambda: sx.parallel(microbatches=2),
}


@pytest.mark.parametrize("name", SCOPES)
def test_scope_that_is_dropped_warns_with_the_block_to_write(name: str) -> None:
    with pytest.warns(UserWarning, match=f"sx.{name}.* changes nothing on a line") as caught:
        SCOPES[name]()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_advice_of_a_dropped_scope_runs() -> None:
    with pytest.warns(UserWarning, match="changes nothing") as caught:
        sx.kernels(attention="xla")
    names = {"sx": sx, "rest": "xla", "body": lambda: 5}
    text = str(caught[0].message)
    assert run_advice(text, "with sx.kernels(attention=...):", names) == 5


@pytest.mark.parametrize("name", SCOPES)
def test_scope_that_is_used_is_silent(name: str) -> None:
    with warnings.catch_warnings(action="error"):
        with SCOPES[name]():
            pass

        @SCOPES[name]()
        def decorated() -> int:
            return 3

        scope = SCOPES[name]()
        assert decorated() == 3
        pickle.loads(pickle.dumps(scope))
        copy.copy(scope)
        with scope:
            pass
        del scope


def test_call_of_a_model_leaves_no_unused_scope() -> None:
    model = sx.models.Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))
    with warnings.catch_warnings(action="error"):
        sx.models.generate(model, [[1]], max_new_tokens=0)
        sx.models.generate(model, [[1]], max_new_tokens=2, stream=True)  # never read
        model(jnp.array([[1]]))
