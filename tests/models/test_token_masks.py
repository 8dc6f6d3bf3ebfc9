# SPDX-License-Identifier: Apache-2.0
"""Masks of tokens in models, pooling and losses: booleans or the integers 0 and 1, no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import models
from shardax.errors import LayerInputError
from tests.advice import run_advice

TOKENS = np.arange(12).reshape(2, 6)
REAL = np.array([[False, False, True, True, True, True], [True] * 6])
ADDITIVE = np.where(REAL, 0, -1e9).astype(np.float32)


def functions_of_masks() -> dict[str, Callable[[Any], Any]]:
    sizes: dict[str, Any] = {"vocab_size": 16, "num_layers": 1, "embed_dim": 16}
    attention = models.AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    sizes |= {"attention": attention, "mlp": models.MLPConfig(dim=16)}
    transformer = models.Transformer(models.TransformerConfig(**sizes), rngs=sx.Rngs(0))
    decoder = models.Decoder(
        models.DecoderConfig(vocab_size=16, num_layers=1, num_kv_heads=4), rngs=sx.Rngs(0)
    )
    pooled = models.TransformerConfig(
        **sizes,
        causal=False,
        head="first",
        output=models.OutputConfig(num_classes=3),
        pool=models.PoolConfig(kind="mean"),
    )
    classifier = models.Transformer(pooled, rngs=sx.Rngs(0))
    hidden = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)
    functions: dict[str, Callable[[Any], Any]] = {
        "Transformer": lambda mask: transformer(TOKENS, mask=mask),
        "Decoder": lambda mask: decoder(TOKENS, mask=mask),
        "hidden_states": lambda mask: transformer.hidden_states(TOKENS, mask=mask),
        "a head on a mean": lambda mask: classifier(TOKENS, mask=mask),
        "pool": lambda mask: classifier.pool(hidden.repeat(4, -1), TOKENS, mask),
    }
    for how in ("mean", "first", "last"):
        functions[f"pool_tokens, {how}"] = lambda mask, how=how: models.pool_tokens(
            hidden, mask, how
        )
    return functions


def test_models_take_masks_of_booleans_or_of_the_integers_0_and_1() -> None:
    for name, function in functions_of_masks().items():
        expected = function(REAL)
        np.testing.assert_array_equal(function(REAL.astype(int)), expected, err_msg=name)
        for numbers, code in ((ADDITIVE, "mask == 0"), (REAL.astype(np.float16), "mask > 0")):
            with pytest.raises(LayerInputError, match="takes a mask of booleans") as caught:
                function(numbers)
            taken = function(run_advice(caught.value, code, {"mask": numbers}))
            np.testing.assert_array_equal(taken, expected, err_msg=name)
        with pytest.raises(LayerInputError, match="takes a mask of booleans"):
            sx.jit(function)(ADDITIVE)
        with pytest.raises(LayerInputError, match=r"integers 0 and 1, .* number -1\. "):
            function(REAL.astype(int) - 1)


def test_encoder_decoder_takes_both_masks_of_booleans() -> None:
    attention = models.AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    sizes: dict[str, Any] = {"vocab_size": 16, "num_layers": 1, "embed_dim": 16}
    encoder = models.TransformerConfig(**sizes, attention=attention, causal=False, head=None)
    crossed = models.AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, cross_attention=True)
    decoder = models.TransformerConfig(**sizes, attention=crossed)
    config = models.EncoderDecoderConfig(encoder, decoder)
    model = models.EncoderDecoder(config, rngs=sx.Rngs(0))
    masks = {"input_mask": REAL, "mask": REAL[::-1]}
    expected = model(TOKENS, TOKENS, **masks)
    as_integers = {name: mask.astype(int) for name, mask in masks.items()}
    np.testing.assert_array_equal(model(TOKENS, TOKENS, **as_integers), expected)
    states = model.encode(TOKENS)
    for call in (
        lambda: model(TOKENS, TOKENS, input_mask=ADDITIVE),
        lambda: model(TOKENS, TOKENS, mask=ADDITIVE),
        lambda: model.decode(TOKENS, states, context_mask=ADDITIVE),
    ):
        with pytest.raises(LayerInputError, match=r"mask of booleans of shape \(2, 6\)"):
            call()
    with pytest.raises(LayerInputError, match=r"of shape \(2, 6\), but was given bool\[2, 5\]"):
        model.decode(TOKENS, states, context_mask=REAL[:, :5])


def test_losses_take_weights_that_are_not_negative() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)
    kernel = np.eye(16, dtype=np.float32)
    losses: dict[str, Callable[[Any], Any]] = {
        "cross_entropy": lambda mask: models.cross_entropy(logits, TOKENS, mask),
        "blockwise_cross_entropy": lambda mask: models.blockwise_cross_entropy(
            logits, kernel, TOKENS, mask, block_size=4
        ),
        "next_token_loss": lambda mask: models.next_token_loss(
            lambda tokens: logits, {"inputs": TOKENS, "targets": TOKENS, "mask": mask}
        ),
    }
    for name, loss in losses.items():
        expected = loss(REAL)
        for weights in (REAL.astype(int), 2 * REAL, 0.5 * REAL):
            np.testing.assert_allclose(loss(weights), expected, rtol=1e-5, err_msg=name)
        with pytest.raises(
            LayerInputError, match=r"weights of at least 0, .* number -1.*e"
        ) as caught:
            loss(ADDITIVE)
        weights = run_advice(caught.value, "mask == 0", {"mask": ADDITIVE})
        np.testing.assert_allclose(loss(weights), expected, rtol=1e-6, err_msg=name)

        # While a program is traced the numbers are not known, but never give another loss.
        assert jnp.isnan(sx.jit(loss)(ADDITIVE)), name
        np.testing.assert_allclose(sx.jit(loss)(0.5 * REAL), expected, rtol=1e-5, err_msg=name)
