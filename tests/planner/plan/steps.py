# SPDX-License-Identifier: Apache-2.0
"""Small steps to plan, whose products are known by hand."""

from __future__ import annotations

from typing import Any

import jax

import shardax as sx
from shardax.models import Decoder, DecoderConfig, next_token_loss
from shardax.plan import NamedShape


def param(shape: tuple[int, ...], *axes: str) -> sx.Param[Any]:
    return sx.Param(sx.Init(jax.nn.initializers.ones, shape), axes=axes)


class Perceptron(sx.Module):
    """Two weights, and a constraint between layers."""

    def __init__(self, embed: int, mlp: int) -> None:
        self.up = param((embed, mlp), "embed", "mlp")
        self.down = param((mlp, embed), "mlp", "embed")

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ self.up.value)
        return sx.constrain(hidden @ self.down.value, ("batch", "embed"))


def perceptron_loss(model: Perceptron, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).sum()


def perceptron_step(model: Perceptron, x: jax.Array) -> jax.Array:
    loss, grads = sx.value_and_grad(perceptron_loss)(model, x)
    model.up.value -= 0.1 * grads["up"]
    model.down.value -= 0.1 * grads["down"]
    return loss


def perceptron(batch: int = 32, embed: int = 16, mlp: int = 64) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments; five products of 2 * batch * embed * mlp operations."""
    x = NamedShape((batch, embed), "float32", ("batch", "embed"))
    return perceptron_step, (Perceptron(embed, mlp), x)


def decoder_step(model: Decoder, batch: dict[str, jax.Array]) -> Any:
    return sx.value_and_grad(next_token_loss)(model, batch)


def decoder(**changes: Any) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of a decoder of two scanned layers, grouped heads, and its arguments."""
    given: dict[str, Any] = {
        "vocab_size": 64,
        "num_layers": 2,
        "embed_dim": 16,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
        "mlp_dim": 32,
        "scan_layers": True,
    }
    model = Decoder(DecoderConfig(**{**given, **changes}), rngs=sx.Rngs(0))
    tokens = NamedShape((8, 12), "int32", ("batch", "seq"))
    return decoder_step, (model, {"inputs": tokens, "targets": tokens})
