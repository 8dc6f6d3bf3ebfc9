# SPDX-License-Identifier: Apache-2.0
"""Generating tokens from a language model, one at a time.

Each token is sampled from the model's distribution over a *window*: the last tokens, at a fixed
length so that one program serves every position. The whole window is computed anew for each token,
which suits small models and short samples.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.errors import GenerationError
from shardax.transforms.jit import jit


def generate(
    model: Any, prompt: Any, length: int, *, window: int, temperature: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Continues a prompt.

    Layers that draw random numbers in training mode (dropout) do so here too: call ``model.eval()``
    first.

    Args:
        model: A Module, called as ``model(tokens)`` with int32 tokens of shape (1, window); returns
            logits of shape (1, window, vocab). Causal: logits at a position depend on tokens up to
            it.
        prompt: Tokens, a sequence of at least one integer.
        length: How many tokens to add.
        window: How many of the last tokens the model sees.
        temperature: Divides the logits; 0 always takes the likeliest token.
        seed: Seed of the sampling; equal seeds give equal samples.

    Returns:
        int32 array of shape (len(prompt) + length,).

    Raises:
        GenerationError: If the prompt is empty or holds other than integers, or ``length``,
            ``window`` or ``temperature`` is out of range.

    Example:
        >>> import jax, shardax as sx
        >>> class Successor(sx.Module):
        ...     def __call__(self, tokens):
        ...         return jax.nn.one_hot((tokens + 1) % 10, 10)
        >>> sx.models.generate(Successor(), [7], 4, window=4, temperature=0).tolist()
        [7, 8, 9, 0, 1]
    """
    tokens = _as_tokens(prompt)
    if length < 0 or window < 1 or not 0 <= temperature < math.inf:
        raise GenerationError(
            f"length={length}, window={window}, temperature={temperature}: length and temperature "
            "must not be negative, temperature must be finite, and window must be at least 1."
        )
    result = np.zeros(tokens.size + length, np.int32)
    result[: tokens.size] = tokens
    key = jax.random.key(seed)
    for position in range(tokens.size, result.size):
        seen = result[max(0, position - window) : position]
        padded = np.zeros((1, window), np.int32)
        padded[0, : seen.size] = seen
        result[position] = _next_token(
            model, padded, np.int32(seen.size - 1), key, np.int32(position), np.float32(temperature)
        )
    return result


def _as_tokens(prompt: Any) -> np.ndarray:
    tokens = np.asarray(prompt)
    if tokens.size == 0:
        raise GenerationError("The prompt is empty; give at least one token to continue from.")
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise GenerationError(
            f"The prompt must be a sequence of integers, one per token, but was given an array of "
            f"shape {tokens.shape} and dtype {tokens.dtype}. Of a text take list(text.encode())."
        )
    return tokens.astype(np.int32)


@jit
def _next_token(
    model: Any, tokens: Any, last: Any, key: Any, position: Any, temperature: Any
) -> Any:
    logits = model(tokens)[0, last].astype(jnp.float32)
    noise = jax.random.gumbel(jax.random.fold_in(key, position), logits.shape)
    return jnp.argmax(logits + noise * temperature)
