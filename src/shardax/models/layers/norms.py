# SPDX-License-Identifier: Apache-2.0
"""The norms of published models, by their kind in a config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardax import Module
from shardax.extend import align
from shardax.models.config.checks import Dtypes
from shardax.models.config.norms import NormConfig
from shardax.nn.arithmetic import at_least_float32, result_dtype, uses_tokamax
from shardax.nn.normalization import LayerNorm, RMSNorm
from shardax.nn.parameters import make_parameter, ones, zeros


class OffsetRMSNorm(RMSNorm):
    """Root mean square normalization with 1 added to the scale."""

    _scale_offset = 1.0

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(features, scale_init=zeros, **options)

    def _scaled(self, x: jax.Array, normed: jax.Array, dimension: int | None = None) -> jax.Array:
        return _with_offset(self, x, normed, super()._scaled(normed, normed, dimension))


class OffsetLayerNorm(LayerNorm):
    """Normalization by mean and standard deviation with 1 added to the scale."""

    _scale_offset = 1.0

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(features, scale_init=zeros, **options)

    def _scaled(self, x: jax.Array, normed: jax.Array, dimension: int | None = None) -> jax.Array:
        return _with_offset(self, x, normed, super()._scaled(normed, normed, dimension))


def _with_offset(
    norm: RMSNorm | LayerNorm, x: jax.Array, normed: jax.Array, scaled: jax.Array
) -> jax.Array:
    """Returns what a norm scaled, with 1 added to the scale."""
    scale = None if norm.scale is None else norm.scale.value
    return (normed + scaled.astype(normed.dtype)).astype(result_dtype(norm.dtype, x, scale))


class HeadsRMSNorm(Module):
    """Root mean square normalization over all heads together."""

    def __init__(
        self, heads: int, head_dim: int, axes: tuple[str, str], epsilon: float, dtypes: Dtypes
    ) -> None:
        self.scale = make_parameter(ones, (heads, head_dim), dtypes["param_dtype"], axes, None)
        self.epsilon = epsilon
        self.dtype = dtypes["dtype"]

    def __call__(self, x: jax.Array) -> jax.Array:
        uses_tokamax("norms", "HeadsRMSNorm", x, lambda: "it norms one dimension, and not two")
        wide = x.astype(at_least_float32(x.dtype))
        mean_square = jnp.mean(jnp.square(wide), axis=(-2, -1), keepdims=True)
        places = (x.ndim - 2, x.ndim - 1)
        scale = align(self.scale.value.astype(wide.dtype), wide, places)
        scale = jax.lax.expand_dims(scale, range(x.ndim - 2))
        scaled = wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale
        return scaled.astype(result_dtype(self.dtype, x, self.scale.value))


def make_norm(config: NormConfig, features: int, dtypes: Dtypes, axes: Any = ("embed",)) -> Any:
    """Makes a norm of the config's kind."""
    kinds: dict[str, Callable[..., Any]] = {
        "rms": RMSNorm,
        "rms_offset": OffsetRMSNorm,
        "layer": LayerNorm,
        "layer_offset": OffsetLayerNorm,
        "layer_unbiased": partial(LayerNorm, use_bias=False),
    }
    return kinds[config.kind](features, epsilon=config.epsilon, axes=axes, **dtypes)
