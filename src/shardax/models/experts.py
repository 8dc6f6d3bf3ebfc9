# SPDX-License-Identifier: Apache-2.0
"""Experts chosen by sigmoids, with a bias and in groups.

The routing of DeepSeek-V3 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2): a
bias is added to an expert's score where experts are chosen, and not in their weights. Training
moves it against the load of the expert, in place of a loss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardax._core.init.rng import Rngs
from shardax.nn.errors import LayerConfigError
from shardax.nn.moe import MoE
from shardax.nn.parameters import make_parameter, zeros
from shardax.partition.explicit import align


class GroupedMoE(MoE):
    """Experts with the largest sigmoids, of the best groups."""

    # Of a group counts the sum of its two largest scores. No gradient reaches the bias.

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        rngs: Rngs | None,
        **options: Any,
    ) -> None:
        super().__init__(features, hidden, rngs=rngs, **options)
        count, dtype = int(options["num_experts"]), options.get("param_dtype")
        size, remainder = divmod(count, num_groups) if num_groups > 0 else (0, 0)
        places = size * top_groups
        if size < 1 or remainder or not 0 < top_groups <= num_groups or places < self.top_k:
            raise LayerConfigError(
                f"GroupedMoE cannot choose top_k={self.top_k} of {count} experts in top_groups="
                f"{top_groups} of num_groups={num_groups}."
            )
        if num_groups > 1 and size < 2:
            raise LayerConfigError(
                f"GroupedMoE compares groups by two experts, but num_groups={num_groups} of "
                f"{count} experts have {size}."
            )
        names = (None if self.gate.axes is None else self.gate.axes[0],)
        self.choice_bias = make_parameter(zeros, (count,), dtype or jnp.float32, names, rngs)
        self.num_groups, self.top_groups, self.scale = num_groups, top_groups, float(scale)

    def _scores(self, x: jax.Array) -> jax.Array:
        scores = jax.nn.sigmoid(self.router(x))
        bias = align(self.choice_bias.value.astype(scores.dtype), scores, (scores.ndim - 1,))
        bias = jax.lax.stop_gradient(bias)
        return jnp.stack([scores, scores + bias.reshape((1,) * (scores.ndim - 1) + bias.shape)], -1)

    def _choose(self, logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores, by_choice = jnp.unstack(logits.reshape(-1, count, 2), axis=-1)
        if self.num_groups > 1:
            groups = by_choice.reshape(len(scores), self.num_groups, -1)
            sums = jax.lax.top_k(groups, 2)[0].sum(axis=-1)
            chosen = jax.lax.top_k(sums, self.top_groups)[1]
            allowed = jax.nn.one_hot(chosen, self.num_groups, dtype=bool).any(axis=1)
            groups = jnp.where(allowed[..., None], groups, -jnp.inf)
            by_choice = groups.reshape(scores.shape)
        experts = jax.lax.top_k(by_choice, self.top_k)[1]
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        shares = scores / scores.sum(axis=-1, keepdims=True)
        return shares, weights * self.scale, experts

    @property
    def _routing(self) -> tuple[Any, ...]:
        return (self.num_groups, self.top_groups, self.scale)
