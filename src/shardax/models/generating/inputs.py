# SPDX-License-Identifier: Apache-2.0
"""What an encoder reads, and what texts begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardax.models.encoder_decoder import EncoderDecoder
from shardax.models.generating.arrays import bucket
from shardax.models.generating.checks import check_vocabulary
from shardax.models.generating.config import GenerationConfig, config_of_texts
from shardax.models.generating.errors import GenerationError
from shardax.models.generating.prompts import TokenMask, read_rows, warn_of_padding

# What an encoder reads, and which of it is real (None for all).
Inputs = tuple[Any, Any]


def as_inputs(model: Any, inputs: Any, mask: TokenMask) -> Inputs | None:
    """Returns what an encoder reads, padded on the right, and its mask."""
    if isinstance(model, EncoderDecoder) == (inputs is None):
        said = "reads inputs, and was given none" if inputs is None else "takes no inputs"
        raise GenerationError(
            f"{type(model).__name__} {said}. generate(model, inputs=...) is for an EncoderDecoder, "
            f"generate(model, prompts) for others."
        )
    if inputs is None:
        if mask is not None:
            raise GenerationError("input_mask= is of inputs, and there are none; of prompts mask=.")
        return None

    # Inputs that are no tokens are of one size.
    if model.encoder.embed is None:
        features = np.asarray(inputs)
        if features.ndim != 3:
            raise GenerationError(
                f"The inputs of this {type(model).__name__} are an array of shape (batch, frames, "
                f"features), but one of shape {features.shape} was given."
            )
        if mask is not None:
            raise GenerationError(
                "input_mask= is of tokens; an encoder of features reads them all."
            )
        return features, None

    rows = read_rows(inputs, mask, name="input")
    if mask is None:
        texts = config_of_texts(model) or GenerationConfig()
        warn_of_padding(inputs, texts.pad, texts.stop, "inputs")
    check_vocabulary(model.encoder, rows, "input")

    longest, config = max(row.size for row in rows), model.config.encoder
    most = config.positions.max_positions - config.positions.offset
    if config.positions.max_positions and longest > most:
        raise GenerationError(f"An input has {longest} tokens, but its encoder takes {most}.")

    tokens = np.zeros((len(rows), bucket(longest)), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : row.size] = row
    lengths = np.array([row.size for row in rows])
    return tokens, np.arange(tokens.shape[1]) < lengths[:, None]


def beginnings(model: Any, inputs: Inputs | None, texts: GenerationConfig) -> list[list[int]]:
    """Returns the start token for each input."""
    start = None if inputs is None else model.config.start_token
    start = texts.start if start is None else start
    if inputs is None or start is None:
        raise GenerationError(
            "There are no prompts, and no config.start_token to begin with. Give a list of "
            "prompts, each a sequence of integers."
        )
    return [[start]] * len(inputs[0])


def forced_starts(
    texts: GenerationConfig, rows: Sequence[np.ndarray], context: Inputs | None
) -> np.ndarray:
    """Returns the first token that is added to each row, -1 for any."""
    forced = np.full(len(rows), -1, np.int32)
    if context is not None and texts.forced_start is not None:
        # Behind the start token alone; a prompt that goes on has its own.
        forced[[row.size == 1 for row in rows]] = texts.forced_start
    return forced
