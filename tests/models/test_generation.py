# SPDX-License-Identifier: Apache-2.0
"""Generation continues a prompt by what the model says of the last tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardax as sx
from shardax.models import Decoder, DecoderConfig, generate
from shardax.models.generation import GenerationError

PROMPT = [104, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = DecoderConfig(num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8)
    return Decoder(config, rngs=sx.Rngs(0))


class Echo(sx.Module):
    """Predicts the oldest token that it sees; all others are less likely the higher they are."""

    def __call__(self, tokens: Any) -> Any:
        oldest = jax.nn.one_hot(tokens[:, :1], 256) * 1000.0
        return jnp.broadcast_to(oldest, (*tokens.shape, 256)) - jnp.arange(256)[None, None]


class Weights(sx.Module):
    """Gives three tokens fixed probabilities, whatever it sees."""

    probabilities = np.array([0.5, 0.3, 0.2], np.float32)

    def __call__(self, tokens: Any) -> Any:
        logits = jnp.log(self.probabilities)
        return jnp.broadcast_to(logits, (*tokens.shape, 3))


def test_greedy_generation_takes_the_likeliest_token_of_the_whole_model_each_time(
    model: Decoder,
) -> None:
    found = generate(model, PROMPT, 10, window=32, temperature=0)
    assert found.dtype == np.int32 and found.shape == (15,)
    assert found[:5].tolist() == PROMPT
    # The model is causal: one call tells what it says after every prefix.
    likeliest = np.argmax(model(jnp.asarray(found[None]))[0], axis=-1)
    assert found[5:].tolist() == likeliest[4:-1].tolist()


def test_past_its_size_the_window_slides(model: Decoder) -> None:
    found = generate(model, PROMPT, 8, window=4, temperature=0)
    windows = np.stack([found[end - 4 : end] for end in range(5, 13)])
    likeliest = np.argmax(model(jnp.asarray(windows))[:, -1], axis=-1)
    assert found[5:].tolist() == likeliest.tolist()
    assert generate(Echo(), [1, 2, 3], 6, window=2, temperature=0).tolist() == [
        1, 2, 3, 2, 3, 2, 3, 2, 3,
    ]  # fmt: skip


def test_equal_seeds_give_equal_samples_and_others_do_not(model: Decoder) -> None:
    one, same, other = (generate(model, PROMPT, 20, window=16, seed=seed) for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()
    assert one[: len(PROMPT)].tolist() == other[: len(PROMPT)].tolist() == PROMPT


def test_a_longer_sample_begins_as_the_shorter(model: Decoder) -> None:
    short, long = (generate(model, PROMPT, length, window=8, seed=3) for length in (5, 9))
    assert long[: short.size].tolist() == short.tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_come_as_often_as_the_tempered_probabilities_say(temperature: float) -> None:
    drawn = generate(Weights(), [0], 2000, window=1, temperature=temperature)[1:]
    expected = Weights.probabilities ** (1 / temperature)
    found = np.bincount(drawn, minlength=3) / drawn.size
    # Three standard deviations of a frequency over 2000 draws are at most 0.034.
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.034)


def test_every_token_is_served_by_one_program(model: Decoder) -> None:
    generate(model, PROMPT, 1, window=8)
    with sx.explain_retraces(file=False) as retraces:
        generate(model, PROMPT * 3, 12, window=8, temperature=0.3, seed=9)
    assert retraces == []


def test_a_sharded_model_generates_the_same(model: Decoder, mesh: Mesh) -> None:
    expected = generate(model, PROMPT, 6, window=8, temperature=0)
    sharded = sx.shard(sx.clone(model), mesh, sx.models.DECODER_RULES)
    with jax.set_mesh(mesh), sx.axis_rules(sx.models.DECODER_RULES):
        found = generate(sharded, PROMPT, 6, window=8, temperature=0)
    assert found.tolist() == expected.tolist()


def test_nothing_to_add_gives_the_prompt_back(model: Decoder) -> None:
    assert generate(model, np.array(PROMPT, np.int64), 0, window=4).tolist() == PROMPT


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1.5], {}, r"dtype float64\..*list\(text.encode\(\)\)"),
        ("hello", {}, "sequence of integers"),
        ([[1, 2]], {}, r"shape \(1, 2\)"),
        ([1], {"length": -1}, "length=-1"),
        ([1], {"window": 0}, "window=0"),
        ([1], {"temperature": -0.1}, r"temperature=-0\.1"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"temperature": float("inf")}, "temperature must be finite"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GenerationError, match=message):
        generate(Weights(), prompt, **{"length": 1, "window": 2, **options})
