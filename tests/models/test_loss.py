# SPDX-License-Identifier: Apache-2.0
"""cross_entropy: its formula, masks, precision, and layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerInputError
from shardax.models import blockwise_cross_entropy, cross_entropy, next_token_loss
from tests.advice import run_advice
from tests.values import with_values

LOGITS = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32) * 3
TARGETS = np.random.default_rng(1).integers(0, 8, (4, 6), np.int32)
MASK = np.random.default_rng(2).random((4, 6)) > 0.5


def surprises() -> np.ndarray:
    """Negative log-likelihood of each target, in float64."""
    wide = LOGITS.astype(np.float64)
    log_normaliser = np.log(np.exp(wide).sum(-1))
    return log_normaliser - np.take_along_axis(wide, TARGETS[..., None], -1)[..., 0]


def test_loss_is_the_weighted_mean_of_targets():
    assert float(cross_entropy(LOGITS, TARGETS)) == pytest.approx(surprises().mean(), rel=1e-5)
    masked = float(cross_entropy(LOGITS, TARGETS, MASK))
    assert masked == pytest.approx(surprises()[MASK].mean(), rel=1e-5)
    weights = np.where(MASK, 0.25, 0.01)
    weighted = float(cross_entropy(LOGITS, TARGETS, weights))
    assert weighted == pytest.approx(np.average(surprises(), weights=weights), rel=1e-5)


def test_everything_masked_is_no_loss_and_no_gradient():
    loss, gradient = jax.value_and_grad(cross_entropy)(jnp.asarray(LOGITS), TARGETS, MASK & False)
    assert (float(loss), float(jnp.abs(gradient).max())) == (0, 0)


def test_loss_of_bfloat16_logits_is_in_float32():
    small = jnp.asarray(LOGITS, jnp.bfloat16)
    found = cross_entropy(small, TARGETS)
    assert found.dtype == jnp.float32
    assert found == cross_entropy(small.astype(jnp.float32), TARGETS)


@pytest.mark.parametrize("spec", [PartitionSpec("data", None, "model"), PartitionSpec("data")])
def test_split_logits_give_the_same_loss_and_gradient(mesh: Mesh, spec: PartitionSpec):
    step = jax.jit(jax.value_and_grad(cross_entropy))
    expected = step(jnp.asarray(LOGITS), TARGETS, MASK)
    with jax.set_mesh(mesh):
        logits = jax.device_put(LOGITS, NamedSharding(mesh, spec))
        found = step(logits, TARGETS, MASK)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_next_token_loss_calls_model_on_inputs():
    model = with_values(sx.nn.Sequential(sx.nn.Embed(8, 8, rngs=sx.Rngs(0))))
    batch = {"inputs": TARGETS[:, ::-1], "targets": TARGETS}

    @sx.jit
    def run(model):
        masked = batch | {"mask": MASK}
        by_hand = [cross_entropy(model(batch["inputs"]), TARGETS, mask) for mask in (None, MASK)]
        return [next_token_loss(model, batch), next_token_loss(model, masked)], by_hand

    (found, of_mask), (expected, expected_of_mask) = run(model)
    assert (found, of_mask) == (expected, expected_of_mask)
    assert of_mask != found


def test_next_token_loss_names_what_a_batch_lacks():
    model = with_values(sx.nn.Sequential(sx.nn.Embed(8, 8, rngs=sx.Rngs(0))))
    expected = next_token_loss(model, {"inputs": TARGETS[:, :-1], "targets": TARGETS[:, 1:]})
    batches = {
        "tokens": {"tokens": TARGETS},
        "of transformers": {"input_ids": TARGETS},
        "with labels": {"input_ids": TARGETS, "labels": TARGETS},
    }
    for batch in batches.values():
        with pytest.raises(LayerInputError, match="reads inputs and targets of a batch") as caught:
            next_token_loss(model, batch)
        names = {"batch": batch, "tokens": TARGETS}
        run_advice(caught.value, str(caught.value).partition("one position on: ")[2], names)
        assert next_token_loss(model, names["batch"]) == expected
    with pytest.raises(LayerInputError, match=r"takes a mapping.*was given a ndarray") as caught:
        next_token_loss(model, TARGETS)
    code = 'next_token_loss(model, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})'
    names = {"next_token_loss": next_token_loss, "model": model, "tokens": TARGETS}
    assert run_advice(caught.value, code, names) == expected


def test_next_token_loss_gives_the_model_the_mask_of_inputs():
    decoder = sx.models.Decoder(
        sx.models.DecoderConfig(vocab_size=8, num_layers=1, num_kv_heads=4), rngs=sx.Rngs(0)
    )
    padded = np.pad(TARGETS, ((0, 0), (3, 0)))
    real = np.pad(np.ones_like(TARGETS), ((0, 0), (3, 0)))
    alone = {"inputs": TARGETS[:, :-1], "targets": TARGETS[:, 1:]}
    of_transformers = {"input_ids": padded, "attention_mask": real}
    with pytest.raises(LayerInputError, match="has 'input_ids', 'attention_mask'") as caught:
        next_token_loss(decoder, of_transformers)
    names = {"batch": of_transformers}
    run_advice(caught.value, str(caught.value).partition("one position on: ")[2], names)
    batch = names["batch"]
    batch["mask"] = batch["mask"] & (np.arange(8) > 2)  # the first token follows padding
    found, expected = (next_token_loss(decoder, part) for part in (batch, alone))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(LayerInputError, match="has input_mask, but calling a function"):
        next_token_loss(lambda tokens: decoder(tokens), batch)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(LayerInputError, match=r"\(4, 6, 8\) and targets of shape \(4, 5\)"):
        cross_entropy(LOGITS, TARGETS[:, 1:])
    with pytest.raises(LayerInputError, match=r"mask of shape \(4,\)"):
        cross_entropy(LOGITS, TARGETS, MASK[:, 0])


def _logits_loss(targets, mask=None, **options):
    return cross_entropy(jnp.asarray(LOGITS), targets, mask, **options)


def _blocks_loss(targets, mask=None, **options):
    hidden = jnp.asarray(LOGITS)
    kernel = jnp.eye(8)
    return blockwise_cross_entropy(hidden, kernel, targets, mask, block_size=4, **options)


def _model_loss(targets, mask=None, **options):
    batch = {"inputs": np.zeros((4, 6), np.int32), "targets": targets}
    batch |= {} if mask is None else {"mask": mask}
    return next_token_loss(lambda tokens: jnp.asarray(LOGITS), batch, **options)


@pytest.mark.parametrize("loss", [_logits_loss, _blocks_loss, _model_loss])
def test_targets_of_the_ignore_index_are_left_out(loss):
    mean = pytest.approx(surprises()[MASK].mean(), rel=1e-5)
    assert float(loss(np.where(MASK, TARGETS, -100))) == mean
    assert float(loss(np.where(MASK, TARGETS, -1), ignore_index=-1)) == mean
    assert float(loss(np.full((4, 6), -100))) == 0
    half = np.arange(24).reshape(4, 6) % 2 == 0
    both = pytest.approx(surprises()[MASK & half].mean(), rel=1e-5)
    assert float(loss(np.where(MASK, TARGETS, -100), half)) == both


@pytest.mark.parametrize("loss", [_logits_loss, _blocks_loss, _model_loss])
def test_cross_entropy_of_other_targets_out_of_range_is_nan(loss):
    for bad in (-1, -8, 8, -101):
        targets = TARGETS.copy()
        targets[0, 0] = bad
        assert np.isnan(loss(targets)), bad
        mask = targets == TARGETS
        expected = pytest.approx(surprises()[mask].mean(), rel=1e-5)
        assert float(loss(targets, mask)) == expected
    targets[0, 0] = -100
    assert np.isnan(loss(targets, ignore_index=None))
    assert float(loss(TARGETS.astype(np.uint8))) == pytest.approx(surprises().mean(), rel=1e-5)


def test_ignored_targets_have_no_gradient():
    targets = np.where(MASK, TARGETS, -100)
    expected = jax.grad(cross_entropy)(jnp.asarray(LOGITS), TARGETS, MASK)
    gradient = jax.grad(cross_entropy)(jnp.asarray(LOGITS), targets)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    blocks = jax.grad(blockwise_cross_entropy)(jnp.asarray(LOGITS), jnp.eye(8), targets)
    np.testing.assert_allclose(blocks, expected, rtol=1e-5, atol=1e-7)
