# SPDX-License-Identifier: Apache-2.0
"""An optimizer without ``wrt`` says once where it trains hardly what is meant."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import shardax as sx
from shardax.train import Optimizer
from tests.advice import run_advice


def small() -> Any:
    return sx.nn.MLP(8, 16, rngs=sx.Rngs(0))


def loss(model: Any) -> Any:
    return (model(jnp.ones((2, 8))) ** 2).sum()


def test_adapters_trained_with_the_rest_are_told() -> None:
    adapted = sx.surgery.lora(sx.select(small()), rank=2)
    with pytest.warns(UserWarning, match="adapters with 144 parameters, and 384 others") as caught:
        Optimizer(adapted, optax.sgd(0.1))
    assert len(caught) == 1
    text = str(caught[0].message)
    for wrt in ('"lora"', "sx.Param"):
        assert f"wrt={wrt}" in text
        with warnings.catch_warnings(action="error"):
            optimizer = eval(f"Optimizer(adapted, optax.sgd(0.1), wrt={wrt})", {
                "Optimizer": Optimizer, "adapted": adapted, "optax": optax, "sx": sx,
            })  # fmt: skip
            optimizer.update(sx.grad(loss, wrt=optimizer.wrt)(adapted))


def test_quantized_model_is_trained_by_what_the_warning_says() -> None:
    model = sx.nn.Sequential(sx.quantize(small(), "int8"), sx.nn.LayerNorm(8))
    with pytest.warns(
        UserWarning, match=r"3 quantized kernels, such as .*\.gate\.kernel"
    ) as caught:
        Optimizer(model, optax.sgd(0.1))
    text = str(caught[0].message)
    assert "only the other 16 parameters are trained" in text

    names: dict[str, Any] = {"sx": sx, "model": model}
    run_advice(text, "model = sx.surgery.lora(sx.select(model), rank=8)", names)
    with warnings.catch_warnings(action="error"):
        optimizer = Optimizer(names["model"], optax.sgd(0.1), wrt="lora")
        optimizer.update(sx.grad(loss, wrt="lora")(names["model"]))

        numbers: dict[str, Any] = {"sx": sx, "model": model}
        run_advice(text, "model = sx.dequantize(model)", numbers)
        trained = Optimizer(numbers["model"], optax.sgd(0.1))
        trained.update(sx.grad(loss)(numbers["model"]))

        Optimizer(model, optax.sgd(0.1), wrt=sx.Param)  # as it is meant
        Optimizer(small(), optax.sgd(0.1))
