# SPDX-License-Identifier: Apache-2.0
"""Experts of published models: chosen in groups, or with clipped units.

The routing of DeepSeek-V3 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2): a
bias is added to an expert's score where experts are chosen, and not in their weights. Training
moves it against the load of the expert, in place of a loss. DeepSeek-V2 chooses by a softmax
without a bias (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.2.2). gpt-oss clips what its gated units
multiply (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.1). Llama 4 multiplies
what an expert reads by a sigmoid.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardax import Rngs
from shardax.extend import align
from shardax.nn.moe import MoE
from shardax.nn.parameters import make_parameter, zeros


class ChoiceOfGroups(MoE):
    """Experts of the best groups alone."""

    least_size = 1  # of a group, where there are several

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
        self.num_groups, self.top_groups, self.scale = num_groups, top_groups, float(scale)

    def _in_groups(self, scores: jax.Array) -> jax.Array:
        """Returns scores that are minus infinity outside of the best groups."""
        if self.num_groups == 1:
            return scores
        groups = scores.reshape(len(scores), self.num_groups, -1)
        sums = jax.lax.top_k(groups, self.least_size)[0].sum(axis=-1)
        chosen = jax.lax.top_k(sums, self.top_groups)[1]
        allowed = jax.nn.one_hot(chosen, self.num_groups, dtype=bool).any(axis=1)
        return jnp.where(allowed[..., None], groups, -jnp.inf).reshape(scores.shape)

    def _weights(self, scores: jax.Array, experts: jax.Array) -> jax.Array:
        """Returns the weights of chosen experts."""
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * self.scale

    @property
    def _routing(self) -> tuple[Any, ...]:
        return (self.num_groups, self.top_groups, self.scale)


class GroupedMoE(ChoiceOfGroups):
    """Experts with the largest sigmoids, of the best groups."""

    # Of a group counts the sum of its two largest scores. No gradient reaches the bias.
    least_size = 2

    def __init__(self, features: int, hidden: int, *, rngs: Rngs | None, **options: Any) -> None:
        super().__init__(features, hidden, rngs=rngs, **options)
        count, dtype = int(options["num_experts"]), options.get("param_dtype")
        names = (None if self.gate.axes is None else self.gate.axes[0],)
        self.choice_bias = make_parameter(zeros, (count,), dtype or jnp.float32, names, rngs)

    def _scores(self, x: jax.Array) -> jax.Array:
        scores = jax.nn.sigmoid(self.router(x))
        bias = align(self.choice_bias.value.astype(scores.dtype), scores, (scores.ndim - 1,))
        bias = jax.lax.stop_gradient(bias)
        return jnp.stack([scores, scores + bias.reshape((1,) * (scores.ndim - 1) + bias.shape)], -1)

    def _choose(self, logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores, by_choice = jnp.unstack(logits.reshape(-1, count, 2), axis=-1)
        experts = jax.lax.top_k(self._in_groups(by_choice), self.top_k)[1]
        shares = scores / scores.sum(axis=-1, keepdims=True)
        return shares, self._weights(scores, experts), experts


class GroupedSoftmaxMoE(ChoiceOfGroups):
    """Experts with the largest probabilities, of the groups with the largest one."""

    def _choose(self, logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = jax.nn.softmax(logits.reshape(-1, count), axis=-1)
        experts = jax.lax.top_k(self._in_groups(scores), self.top_k)[1]
        return scores, self._weights(scores, experts), experts


class ClippedMoE(MoE):
    """Experts of clipped gated units: ``activation(gate) * (up + 1)``.

    With a ``gate_factor`` the activation is ``gate * sigmoid(gate_factor * gate)``.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        limit: float,
        gate_factor: float | None = None,
        rngs: Rngs | None,
        **options: Any,
    ) -> None:
        super().__init__(features, hidden, rngs=rngs, **options)
        self.limit, self.gate_factor = float(limit), gate_factor

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit) + 1
        if self.gate_factor is None:
            return super()._gated(gate, up)
        return gate * jax.nn.sigmoid(self.gate_factor * gate) * up

    @property
    def _routing(self) -> tuple[Any, ...]:
        return (self.limit, self.gate_factor)


class InputScaledMoE(MoE):
    """Experts with the largest scores, whose sigmoids multiply their inputs."""

    _scales_inputs = True
    _may_normalise = False

    def _choose(self, logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = logits.reshape(-1, count)
        scores, experts = jax.lax.top_k(logits, self.top_k)
        return jax.nn.softmax(logits, axis=-1), jax.nn.sigmoid(scores), experts
