# SPDX-License-Identifier: Apache-2.0
"""Whether a model can continue given prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from shardax.models.config.transformer import TransformerConfig
from shardax.models.convnext import ConvNeXtConfig
from shardax.models.dual_encoder import DualEncoderConfig
from shardax.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from shardax.models.generating.errors import GenerationError


def max_positions_of(model: object) -> int:
    """Returns the number of learned positions of a model; 0 for none."""
    config = getattr(model, "config", None)
    positions = config.positions if isinstance(config, TransformerConfig) else config
    return getattr(positions, "max_positions", 0)


def check_length(model: object, length: int) -> None:
    """Raises if a model with learned positions has too few."""
    most = max_positions_of(model)
    if most and length > most:
        raise GenerationError(
            f"Prompt and max_new_tokens make {length} tokens, but the model has max_positions="
            f"{most}."
        )


def check_head(model: object) -> None:
    """Raises for a published model whose results are no logits of tokens."""
    config = getattr(model, "config", None)

    published = (TransformerConfig, ConvNeXtConfig, DualEncoderConfig, EncoderDecoderConfig)
    head = config.head if isinstance(config, published) else "tokens"
    if head != "tokens":
        raise GenerationError(
            f"A {type(model).__name__} with head={head!r} returns no logits of tokens, so it "
            f"cannot continue prompts; generate needs a model with head='tokens'."
        )


def check_logits(model: object, logits: object, shape: tuple[int, ...]) -> None:
    """Raises for a result that is no logits of tokens of a shape, as far as that is known."""
    if isinstance(logits, jax.Array):
        is_floating = jnp.issubdtype(logits.dtype, np.floating)
        if is_floating and logits.ndim == 3 and logits.shape[: len(shape)] == shape:
            return

        returned = f"{logits.dtype}{list(logits.shape)}"
        hint = "A model of features needs a head of tokens"
    else:
        returned = f"a {type(logits).__name__}"
        hint = (
            "Of what sx.surgery.record made, use its own method, recording.generate(prompts, ...); "
            "of a model with further results, a Module whose call returns the logits alone"
        )

    known = ", ".join(map(str, shape)) if len(shape) == 2 else f"{shape[0]}, time"
    raise GenerationError(
        f"generate continues prompts by logits, floats of shape ({known}, vocab), but "
        f"{name_of(model)} returned {returned}. {hint}."
    )


def name_of(model: object) -> str:
    """Returns what an error calls a model: its class, or the name of a function."""
    kind = type(model)
    return getattr(model, "__name__", kind.__name__) if callable(model) else kind.__name__


def vocabulary_of(model: object) -> int | None:
    """Returns how many tokens a model's embedding has; None where it has none that is known."""
    holder = model.decoder if isinstance(model, EncoderDecoder) else model
    size = getattr(getattr(holder, "embed", None), "num_embeddings", None)
    return size if isinstance(size, int) else None


def check_vocabulary(model: object, rows: list[np.ndarray], name: str = "prompt") -> None:
    """Raises for tokens outside the model's embedding."""
    size = vocabulary_of(model)
    if size is None:
        return  # what it does not know gives NaN
    for index, row in enumerate(rows):
        if row.max() >= size:
            raise GenerationError(
                f"The {name} {index} has the token {row.max()}, but the model knows {size} tokens, "
                f"0 to {size - 1}. Is it the tokenizer of another model?"
            )
