# SPDX-License-Identifier: Apache-2.0
"""A model without a cache, with the calls of one that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Cache, Module
from shardax.errors import StaticAttributeError
from shardax.models.generating.arrays import by_rows
from shardax.models.generating.checks import check_logits, name_of
from shardax.models.generating.errors import GenerationError


class _ReadTokens(Module):
    """Tokens read by a model without a cache."""

    def __init__(self, batch: int, length: int) -> None:
        self.tokens = Cache(jnp.zeros((batch, length), np.int32), axes=("batch", "cache"))
        self.count = Cache(jnp.zeros(batch, np.int32), axes=("batch",))


def uncached(model: Any) -> Uncached:
    """Returns a model with the calls of one that has a cache, or raises for a function of one."""
    try:
        return Uncached(model)
    except StaticAttributeError as error:
        raise GenerationError(
            f"generate takes a model, but {name_of(model)} is a function that holds one. Make the "
            "function the call of a Module with the model as an attribute."
        ) from error


class Uncached(Module):
    """A model without cache, with the calls of one."""

    def __init__(self, model: Callable[[jax.Array], jax.Array]) -> None:
        self.model = model

    def make_cache(self, batch: int, length: int) -> _ReadTokens:
        return _ReadTokens(batch, length)

    def __call__(self, tokens: Any, *, mask: Any = None, cache: Any = None) -> jax.Array:
        length = cache.tokens.shape[1]
        mask = jnp.ones_like(tokens, bool) if mask is None else mask

        # Real tokens are written behind those that were read before; padding goes to no slot.
        count = cache.count.value[:, None]
        positions = jnp.where(mask, count + jnp.cumsum(mask, 1, dtype=np.int32) - 1, length)
        slots = jax.lax.broadcasted_iota(np.int32, (1, length, 1), 1)
        hits = positions[:, None, :] == slots
        written = jnp.sum(jnp.where(hits, tokens[:, None, :], 0), -1, dtype=np.int32)
        cache.tokens.value = jnp.where(hits.any(-1), written, cache.tokens.value)
        count = count + jnp.sum(mask, 1, keepdims=True, dtype=np.int32)
        cache.count.value = count[:, 0]

        # All tokens are computed anew, and the logits of the last one returned.
        logits = self.model(cache.tokens.value)
        check_logits(self.model, logits, cache.tokens.shape)
        logits = by_rows(logits)
        at = jax.lax.broadcasted_iota(np.int32, (1, length), 1) == count - 1
        return jnp.sum(jnp.where(at[..., None], logits, 0), axis=1, keepdims=True)
