# SPDX-License-Identifier: Apache-2.0
"""One vector of a sequence, by its states or a query."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from shardax import Module, Rngs
from shardax.models.config.checks import Dtypes
from shardax.models.config.norms import NormConfig
from shardax.models.config.outputs import PoolConfig
from shardax.models.layers.norms import make_norm
from shardax.nn.arithmetic import add_bias, as_array, at_least_float32
from shardax.nn.attention.multi_head import MultiHeadAttention
from shardax.nn.errors import LayerInputError
from shardax.nn.masks import as_mask
from shardax.nn.mlp import MLP
from shardax.nn.parameters import make_parameter


def pool_tokens(hidden: object, mask: object = None, how: str = "mean") -> jax.Array:
    """Embeds sequences by the states of their tokens.

    Args:
        hidden: Shape (batch, time, embed): what a model without a head returns.
        mask: Booleans of shape (batch, time), True for real tokens; None for all.
        how: ``"mean"`` of the real tokens, the ``"first"`` of them, or the ``"last"``.

    Returns:
        Shape (batch, embed); of a row without real tokens, zeros for the mean.

    Raises:
        LayerInputError: If ``how`` is another, or the mask has another shape, or numbers.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> hidden = jnp.arange(6.0).reshape(1, 3, 2)
        >>> sx.models.pool_tokens(hidden, jnp.array([[True, True, False]])).tolist()
        [[1.0, 2.0]]
    """
    hidden = as_array(hidden)
    real = jnp.ones(hidden.shape[:-1], bool)
    if mask is not None:
        real = as_mask("pool_tokens", mask, f"of shape {hidden.shape[:-1]}")

    if how not in ("mean", "first", "last") or real.shape != hidden.shape[:-1]:
        raise LayerInputError(
            f"pool_tokens takes how='mean', 'first' or 'last' and a mask of shape "
            f"{hidden.shape[:-1]}, but was given how={how!r} and a mask of shape {real.shape}. "
            f"Give the mask that the model was called with."
        )

    if how == "mean":
        wide = hidden.astype(at_least_float32(hidden.dtype))
        total = jnp.sum(jnp.where(real[..., None], wide, 0), -2)
        count = jnp.maximum(jnp.sum(real, -1, keepdims=True), 1)
        return (total / count.astype(wide.dtype)).astype(hidden.dtype)

    last = real.shape[-1] - 1
    place = jnp.argmax(real, -1) if how == "first" else last - jnp.argmax(real[..., ::-1], -1)
    return _state_at(hidden, place)


def pool_states(config: PoolConfig, hidden: jax.Array, tokens: object, mask: object) -> jax.Array:
    """Pools states, in one of the ways of positions or tokens."""
    if config.kind == "mean":
        return pool_tokens(hidden, mask)
    if config.kind == "first_and_mean":
        rest = None if mask is None else as_array(mask)[..., 1:]
        return jnp.concatenate([hidden[..., 0, :], pool_tokens(hidden[..., 1:, :], rest)], -1)
    if config.kind in ("end", "highest"):
        return _pool_end(config, hidden, tokens)
    return hidden[..., -1 if config.kind == "last" else 0, :]


def _pool_end(config: PoolConfig, hidden: jax.Array, tokens: object) -> jax.Array:
    if tokens is None or (tokens := as_array(tokens)).shape != hidden.shape[:-1]:
        raise LayerInputError(
            f"A model with pool.kind={config.kind!r} pools by tokens of shape "
            f"{hidden.shape[:-1]}: model.pool(model(tokens), tokens)."
        )
    if config.kind == "highest":
        return _state_at(hidden, jnp.argmax(tokens, -1))

    is_end = tokens == config.end_token
    has_end = jnp.any(is_end, -1)
    if not isinstance(has_end, Tracer) and has_end.is_fully_addressable and not has_end.all():
        raise LayerInputError(
            f"A sequence is pooled at its token {config.end_token}, but one has none. Append it: "
            f"numpy.pad(tokens, ((0, 0), (0, 1)), constant_values={config.end_token})."
        )
    return jnp.where(has_end[..., None], _state_at(hidden, jnp.argmax(is_end, -1)), jnp.nan)


def _state_at(hidden: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.take_along_axis(hidden, place[..., None, None], axis=-2)[..., 0, :]


class AttentionPooling(Module):
    """A learned query that reads all states, and an MLP."""

    def __init__(
        self, size: int, num_heads: int, norms: NormConfig, mlp: MLP, *, dtypes: Dtypes, rngs: Rngs
    ) -> None:
        initializer = jax.nn.initializers.normal(size**-0.5)
        self.query = make_parameter(initializer, (size,), dtypes["param_dtype"], ("embed",), rngs)
        self.attn = MultiHeadAttention(size, num_heads, use_bias=True, rngs=rngs, **dtypes)
        self.norm = make_norm(norms, size, dtypes)
        self.mlp = mlp

    def __call__(self, hidden: jax.Array) -> jax.Array:
        query = add_bias(jnp.zeros_like(hidden[..., :1, :]), self.query.value)
        x: Any = self.attn(query, hidden)
        return (x + self.mlp(self.norm(x)))[..., 0, :]
