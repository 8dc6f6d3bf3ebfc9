# SPDX-License-Identifier: Apache-2.0
"""The loss of language models: how surprised the model is by the tokens that did follow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardax.core.errors import LayerInputError
from shardax.partition.explicit import align, explicit_entries


def cross_entropy(logits: jax.Array, targets: jax.Array, mask: Any = None) -> jax.Array:
    """Mean negative log-likelihood of the targets, in nats; the log-softmax is in float32.

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
                f"{jnp.shape(array)}; {name} must have the shape of the logits without the last "
                f"dimension, {logits.shape[:-1]}."
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
    """Returns the entries at the targets, with a last dimension of size one."""
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
