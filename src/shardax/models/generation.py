# SPDX-License-Identifier: Apache-2.0
"""Loss of language models, and generation of tokens one at a time.

Each token is sampled from the model's distribution over a window: the last tokens, at a fixed
length so that one program serves every position. The whole window is computed anew for each token,
which suits small models and short samples.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.errors import ShardaxError
from shardax._transforms.jit.jit import jit
from shardax.nn.linear import align, explicit_entries
from shardax.nn.parameters import LayerInputError


class GenerationError(ShardaxError, ValueError):
    """Tokens cannot be generated.

    The prompt is empty, or a length, window or temperature is out of range.
    """


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


def cross_entropy(logits: jax.Array, targets: jax.Array, mask: Any = None) -> jax.Array:
    """Mean negative log-likelihood of the targets, in nats.

    The log-softmax is in float32.

    Args:
        logits: Shape (..., vocab), floating.
        targets: Integers of shape (...).
        mask: Booleans or weights of shape (...): the mean is over the targets where it is not
            zero, weighted by it. None: over all.

    Returns:
        A float32 scalar; 0 if everything is masked.

    Raises:
        LayerInputError: If the shapes do not fit.

    Example:
        >>> logits = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
        >>> print(f"{cross_entropy(logits, jnp.array([0, 0])):.4f} = (log 2 + log 4) / 2")
        1.0397 = (log 2 + log 4) / 2
    """
    for name, array in (("targets", targets), ("mask", mask)):
        if array is not None and jnp.shape(array) != logits.shape[:-1]:
            raise LayerInputError(
                f"cross_entropy was given logits of shape {logits.shape} and {name} of shape "
                f"{jnp.shape(array)}, which must be {logits.shape[:-1]}."
            )
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # Over Explicit axes the logits, which are large, stay where they are.
    leading = range(logits.ndim - 1)
    if explicit_entries(logits) is not None:
        targets = align(jnp.asarray(targets), logits, leading)
    chosen = _pick(log_probabilities, targets)
    if mask is None:
        return -jnp.mean(chosen)
    weights = align(jnp.asarray(mask, jnp.float32), logits, leading)
    total = jnp.sum(weights)
    return -jnp.sum(chosen[..., 0] * weights) / jnp.where(total > 0, total, 1)


def _pick(log_probabilities: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the entries at the targets, with a last dimension of one."""
    if explicit_entries(log_probabilities) is None:
        return jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)
    # JAX cannot look up along a dimension that Explicit mesh axes may split. A sum in which all
    # terms but one are zero is exact, and each device sums what it has.
    vocab = jax.lax.broadcasted_iota(
        targets.dtype, (*(1,) * targets.ndim, log_probabilities.shape[-1]), targets.ndim
    )
    hits = jnp.where(vocab == targets[..., None], log_probabilities, 0)
    return jnp.sum(hits, axis=-1, keepdims=True)


def next_token_loss(model: Any, batch: Any) -> jax.Array:
    """The training loss of a language model on one batch.

    Args:
        model: Called on the inputs; returns logits of shape (batch, time, vocab).
        batch: A mapping with ``inputs`` and ``targets``, integers of shape (batch, time), the
            targets being the inputs one position on; and optionally ``mask`` of that shape, as for
            ``cross_entropy``.

    Returns:
        The mean loss in nats per token, a float32 scalar.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.Sequential(
        ...     sx.nn.Embed(256, 8, rngs=sx.Rngs(0)), sx.nn.Linear(8, 256, rngs=sx.Rngs(1)))
        >>> tokens = jnp.arange(20).reshape(2, 10)
        >>> batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        >>> bool(next_token_loss(model, batch) > 0)
        True
    """
    return cross_entropy(model(batch["inputs"]), batch["targets"], batch.get("mask"))
