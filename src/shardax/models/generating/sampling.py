# SPDX-License-Identifier: Apache-2.0
"""The draw of the next token of each row.

A number is drawn from a key of the seed, the row and how many tokens the row has added; so a sample
depends neither on the mesh nor on how long it is to become.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax.distributed.processes import from_main
from shardax.extend import Options
from shardax.models.generating.arrays import bucket, by_rows
from shardax.models.generating.errors import GenerationError

_OPTIONS = Options(GenerationError)


class Filters(NamedTuple):
    """Static options of the program."""

    greedy: bool
    top_k: int | None
    top_p: bool
    min_p: bool
    penalty: bool


class Settings(NamedTuple):
    """Inputs of the programs that are no arrays of the model."""

    temperature: np.float32
    top_p: np.float32
    min_p: np.float32
    penalty: np.float32
    stop: np.ndarray
    seed: np.uint32
    total: np.int32  # how many tokens are added at most
    forced_start: np.ndarray  # of each row the first token, -1 for any
    forced_end: np.int32  # the last of all, -1 for any


class Progress(NamedTuple):
    """State from token to token, one row per prompt."""

    step: jax.Array  # how many tokens were added
    added: jax.Array  # (batch, bucket), -1 after a row has stopped
    last: jax.Array  # (batch,)
    stopped: jax.Array  # (batch,)
    failed: jax.Array  # (batch,), whether a logit was NaN
    seen: jax.Array | None  # (batch, vocab), where repetition has a penalty


def add_token(
    progress: Progress, logits: jax.Array, settings: Settings, filters: Filters
) -> Progress:
    """Samples the next token of each row."""
    step, added, _, stopped, failed, seen = progress
    failed |= jnp.isnan(logits).any(axis=-1) & ~stopped

    chosen = _sample(logits.astype(jnp.float32), step, seen, settings, filters)
    chosen = _forced(chosen, step, settings)
    chosen = jnp.where(stopped, -1, chosen)

    added = jax.lax.dynamic_update_slice_in_dim(added, chosen[:, None], step, axis=1)
    if seen is not None:
        vocab = jax.lax.broadcasted_iota(np.int32, (1, seen.shape[1]), 1)
        seen |= chosen[:, None] == vocab
    stopped |= jnp.any(chosen[:, None] == settings.stop[None], axis=1)
    return Progress(step + 1, added, jnp.maximum(chosen, 0), stopped, failed, seen)


def _forced(chosen: jax.Array, step: jax.Array, settings: Settings) -> jax.Array:
    """Puts the tokens that texts must begin and end with in the place of others."""
    first = by_rows(settings.forced_start)
    chosen = jnp.where((step == 0) & (first >= 0), first, chosen)
    is_last = (step + 1 == settings.total) & (settings.forced_end >= 0)
    return jnp.where(is_last, settings.forced_end, chosen)


def _sample(
    logits: jax.Array, step: jax.Array, seen, settings: Settings, filters: Filters
) -> jax.Array:
    """Draws one token per row from the filtered distribution."""
    if seen is not None:
        penalty = settings.penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if filters.greedy:
        return jnp.argmax(logits, axis=-1).astype(np.int32)

    # The largest of logits and Gumbel noise is a draw from their softmax.
    logits = filter_logits(logits / settings.temperature, settings.top_p, settings.min_p, filters)
    key = jax.random.key(settings.seed)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(logits)))
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.argmax(logits + by_rows(noise), axis=-1).astype(np.int32)


def filter_logits(
    logits: jax.Array,
    top_p: jax.Array | np.float32,
    min_p: jax.Array | np.float32,
    filters: Filters,
) -> jax.Array:
    """Sets logits of tokens not to be drawn to minus infinity."""
    if filters.top_k is not None:
        threshold = jax.lax.top_k(logits, min(filters.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)

    if filters.top_p:
        order = jnp.argsort(-logits, axis=-1)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        # The likeliest token is kept, however small ``top_p`` is.
        preceding = jnp.cumsum(probabilities, axis=-1) - probabilities
        is_kept = (preceding < top_p).at[:, 0].set(True)
        is_kept = jnp.take_along_axis(is_kept, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(is_kept, logits, -jnp.inf)

    if filters.min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def as_stop(stop: int | Sequence[int], vocabulary: int | None = None) -> np.ndarray:
    """Returns stop tokens, padded to a bucket's size.

    Args:
        stop: A token, or several.
        vocabulary: How many tokens there are; None if that is not known, or if the files of a model
            name the tokens, which may know more of them than its embedding.
    """
    tokens = np.atleast_1d(np.asarray(stop if np.size(stop) else np.zeros(0, np.int32)))
    fits = tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer) and (tokens >= 0).all()
    _OPTIONS.check("stop", stop, bool(fits), "tokens, integers of at least 0")

    # The programs count in int32, in which a larger number would be another token.
    size = 2**31 if vocabulary is None else vocabulary
    _OPTIONS.check("stop", stop, bool((tokens < size).all()), f"tokens, integers below {size}")
    padded = np.full(bucket(max(1, tokens.size)), -2, np.int32)
    padded[: tokens.size] = tokens
    return padded


def as_seed(seed: int | None, is_greedy: bool) -> np.uint32:
    """Returns the input of the programs that numbers are drawn from."""
    if seed is not None:
        fits = Options.is_integer(seed) and 0 <= seed < 2**32
        _OPTIONS.check("seed", seed, fits, "an integer from 0 to 2**32 - 1")

    if is_greedy:
        return np.uint32(0)
    if seed is None:
        return np.uint32(from_main(secrets.randbits(32), "seed of generate"))
    return np.uint32(seed)


def filters_of(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float | None,
) -> Filters:
    """Returns the filters of options, checked."""
    fits = 0 <= temperature < math.inf
    _OPTIONS.check("temperature", temperature, fits, "at least 0 and finite")
    if top_k is not None:
        _OPTIONS.integers(top_k=top_k)
    _OPTIONS.check("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1")
    _OPTIONS.check("min_p", min_p, min_p is None or 0 <= min_p <= 1, "from 0 to 1")

    fits = penalty is None or 0 < penalty < math.inf
    _OPTIONS.check("repetition_penalty", penalty, fits, "positive and finite")
    has_penalty = penalty is not None
    return Filters(temperature == 0, top_k, top_p is not None, min_p is not None, has_penalty)
