# SPDX-License-Identifier: Apache-2.0
"""A layer of a transformer: its parts are chosen by a config.

A layer adds attention and a feed-forward network to what goes through it. Where norms stand:

    pre        x + part(norm(x))
    post       x + norm(part(x))
    sandwich   x + norm(part(norm(x)))
    after      norm(x + part(x))

A parallel layer adds both parts at once, each of the same input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardax import Module, Rngs
from shardax.extend import align
from shardax.models.config.attention import AttentionConfig
from shardax.models.config.checks import Dtypes, dtypes
from shardax.models.config.feed_forward import ExpertsConfig, MLPConfig
from shardax.models.config.norms import NormConfig
from shardax.models.config.paths import read_field
from shardax.models.config.transformer import TransformerConfig
from shardax.models.layers.activation_layout import lay_out_activations
from shardax.models.layers.activations import ACTIVATIONS, exact_gelu
from shardax.models.layers.experts import ClippedMoE, GroupedMoE, GroupedSoftmaxMoE, InputScaledMoE
from shardax.models.layers.norms import HeadsRMSNorm, make_norm
from shardax.nn.attention.latent import MultiHeadLatentAttention
from shardax.nn.attention.multi_head import MultiHeadAttention
from shardax.nn.conv import Conv
from shardax.nn.dropout import Dropout
from shardax.nn.linear import Linear
from shardax.nn.masks import as_mask
from shardax.nn.mlp import MLP, find_activation
from shardax.nn.moe import MoE
from shardax.nn.normalization import RMSNorm
from shardax.nn.parameters import make_parameter, ones

# Factors of what the parts of a layer read and return, with their paths in a config.
SCALES = {
    "attention_in_scale": "attention.in_scale",
    "attention_out_scale": "attention.out_scale",
    "recurrent_in_scale": "recurrence.in_scale",
    "recurrent_out_scale": "recurrence.out_scale",
    "mlp_out_scale": "mlp.out_scale",
}


class TransformerLayer(Module):
    """Attention and MLP or experts, each with norms, added to the input.

    Args:
        config: The model's sizes and parts.
        index: Which layer it is, as layers may differ.
        rngs: Random streams.

    Example:
        >>> import shardax as sx
        >>> layer = TransformerLayer(TransformerConfig(), rngs=sx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 64))).shape
        (2, 8, 64)
    """

    has_rope = True
    residual_scale: float | None = None
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    recurrent_in_scale: float = 1.0
    recurrent_out_scale: float = 1.0
    mlp_out_scale: float = 1.0
    cross_attn: Any = None
    mixer: Any = None
    shared_mlp: Any = None
    shared_gate: Any = None

    def __init__(self, config: TransformerConfig, index: int = 0, *, rngs: Rngs) -> None:
        attention, norms, size = config.attention, config.norms, config.embed_dim
        options = dtypes(config)
        self.is_local, self.has_experts = config.kind_of(index)
        # Set only where they say more: a plain layer has no such attributes.
        if attention.rope is not None and not attention.has_rope(index):
            self.has_rope = False
        if config.residual_scale is not None:
            self.residual_scale = config.residual_scale
        for name, path in SCALES.items():
            if (scale := read_field(config, path)) != 1:
                setattr(self, name, scale)
        self.norm_after, self.parallel = norms.placement == "after", config.parallel
        has_pre_norm = norms.placement in ("pre", "sandwich")

        def norm(exists: bool) -> Any:
            return make_norm(norms, size, options) if exists else None

        behind = norms.placement != "pre"
        self.attn_norm = norm(has_pre_norm and (index > 0 or norms.first))
        self.attn: Any = None
        if config.recurrence is not None and config.is_recurrent(index):
            self.mixer = config.recurrence.mixer.make(config, rngs)
        if config.has_attention(index):
            self.attn = _attention(
                attention, size, index, norms=norms, causal=config.causal, rngs=rngs, **options
            )
        self.attn_post_norm = norm(behind)
        if attention.cross_attention:
            self.cross_norm = norm(has_pre_norm)
            self.cross_attn = _cross_attention(attention, size, rngs=rngs, **options)
            self.cross_post_norm = norm(behind)
        has_mlp = config.mlp is not None
        self.mlp_norm = norm(has_pre_norm and has_mlp and not norms.shared)
        self._make_mlp(config, rngs)
        self.mlp_post_norm = norm(behind and has_mlp)
        scale = (ones, (size,), config.param_dtype, ("embed",), None)
        self.attn_scale = make_parameter(*scale) if config.layer_scale else None
        self.mlp_scale = make_parameter(*scale) if config.layer_scale and has_mlp else None
        self.dropout = Dropout(config.dropout, rngs=rngs) if config.dropout else None

    def _make_mlp(self, config: TransformerConfig, rngs: Rngs) -> None:
        """Makes the MLP, or the experts and what stands beside them."""
        size, experts, options = config.embed_dim, config.experts, dtypes(config)
        mlp = partial(make_mlp, activation=config.activation, rngs=rngs, **options)
        self.mlp: Any = None
        if config.mlp is not None and not self.has_experts:
            self.mlp = mlp(config.mlp, size)
        elif config.mlp is not None and experts is not None:
            self.mlp = _experts(experts, size, activation=config.activation, rngs=rngs, **options)
            if experts.shared_dim:
                self.shared_mlp = mlp(replace(config.mlp, dim=experts.shared_dim), size)
                if experts.shared_gate:
                    names = ("embed", None)
                    self.shared_gate = Linear(
                        size, 1, use_bias=False, kernel_axes=names, rngs=rngs, **options
                    )

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: Any = None,
        local_positions: Any = None,
        mask: Any = None,
        bias: Any = None,
        segment_ids: Any = None,
        cache: Any = None,
        context: Any = None,
        context_mask: Any = None,
    ) -> jax.Array:
        """Runs the layer.

        Args:
            x: Shape (batch, time, embed).
            positions: As for attention.
            local_positions: Those of a layer with a window; None for the same.
            mask: As for attention.
            bias: As for attention.
            segment_ids: As for attention, 0 for padding.
            cache: The ``AttentionCache`` of this layer, or that of its recurrent mixer; all of its
                caches where it has several, also of cross-attention.
            context: Shape (batch, other time, embed), what cross-attention reads; None for that
                which an earlier call wrote to the cache.
            context_mask: As the mask of attention, of the context.

        Returns:
            The same shape.
        """
        if self.is_local and local_positions is not None:
            positions = local_positions
        positions = positions if self.has_rope else getattr(positions, "positions", None)
        attention_options = {"positions": positions, "mask": mask}
        if bias is not None:
            attention_options["bias"] = bias
        if segment_ids is not None:
            attention_options["segment_ids"] = segment_ids
            in_segments = (segment_ids != 0)[..., None, None, :]  # which count for experts
            is_of_tokens = mask is not None and mask.shape[-3:] == in_segments.shape[-3:]
            mask = as_mask(type(self).__name__, mask) & in_segments if is_of_tokens else in_segments
        x = checkpoint_name(x, "layer_input")
        normed = x if self.attn_norm is None else self.attn_norm(x)
        read = self._read(normed, attention_options, cache)
        added = self._added(read, "attention", self.attn_post_norm, self.attn_scale)
        if self.parallel:
            normed = normed if self.mlp_norm is None else self.mlp_norm(x)
            result = self._mlp(normed, mask)
            more = self._added(result, "mlp", self.mlp_post_norm, self.mlp_scale)
            return lay_out_activations(x + added + more)
        x = self._joined(x, added, self.attn_post_norm)
        if self.cross_attn is not None:
            x = self._with_context(x, context, context_mask, cache)
        if self.mlp is None:
            return lay_out_activations(x)
        normed = x if self.mlp_norm is None else self.mlp_norm(x)
        result = self._mlp(normed, mask)
        added = self._added(result, "mlp", self.mlp_post_norm, self.mlp_scale)
        return lay_out_activations(self._joined(x, added, self.mlp_post_norm))

    def _read(self, x: jax.Array, options: dict[str, Any], cache: Any) -> jax.Array:
        """Calls attention and the mixer, and adds their results."""
        results = []
        for name, part, before, behind in (
            ("attn", self.attn, self.attention_in_scale, self.attention_out_scale),
            ("mixer", self.mixer, self.recurrent_in_scale, self.recurrent_out_scale),
        ):
            if part is not None:
                own = getattr(cache, name) if isinstance(cache, LayerCaches) else cache
                option = {} if cache is None else {"cache": own}
                results.append(_scaled(part(_scaled(x, before), **options, **option), behind))
        return results[0] if len(results) == 1 else results[0] + results[1]

    def _with_context(self, x: jax.Array, context, mask, cache) -> jax.Array:
        """Adds what cross-attention reads of the context."""
        normed = x if self.cross_norm is None else self.cross_norm(x)
        option = {} if cache is None else {"cache": cache.cross_attn}
        read = self.cross_attn(normed, context, mask=mask, **option)
        added = self._added(read, "attention", self.cross_post_norm, None)
        return self._joined(x, added, self.cross_post_norm)

    def _mlp(self, x: jax.Array, mask: object) -> jax.Array:
        y = _scaled(self._experts(x, mask), self.mlp_out_scale)
        if self.shared_mlp is None:
            return y
        shared = self.shared_mlp(x)
        if self.shared_gate is not None:
            shared = jax.nn.sigmoid(self.shared_gate(x)) * shared
        return y + _scaled(shared, self.mlp_out_scale)

    def _experts(self, x: jax.Array, mask) -> jax.Array:
        if not self.has_experts or mask is None or mask.shape[-3:] != (1, 1, x.shape[-2]):
            return self.mlp(x)
        return self.mlp(x, mask=mask[..., 0, 0, :])  # padding does not count in the loss

    def _added(self, x: jax.Array, name: str, norm, scale) -> jax.Array:
        x = checkpoint_name(x, name)
        if scale is not None:
            aligned = align(scale.value.astype(x.dtype), x, (x.ndim - 1,))
            x = x * jax.lax.expand_dims(aligned, range(x.ndim - 1))
        x = x if norm is None or self.norm_after else norm(x)
        if self.residual_scale is not None:
            x = x * jnp.asarray(self.residual_scale, x.dtype)
        return x if self.dropout is None else self.dropout(x)

    def _joined(self, x: jax.Array, added: jax.Array, norm) -> jax.Array:
        return norm(x + added) if self.norm_after else x + added


class TransformerBlock(Module):
    """Layers of different kinds, as one repeated layer of a stack."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    def __call__(self, x: jax.Array, *, cache: Any = None, **options: Any) -> jax.Array:
        for index, layer in enumerate(self.layers):
            x = layer(x, cache=None if cache is None else cache.layers[index], **options)
        return x


class BlockCache(Module):
    """The cache of stacked blocks, and of the layers left over."""

    def __init__(self, stacked: TransformerBlock, remaining: list[Any]) -> None:
        self.stacked = stacked
        self.rest = remaining


class LayerCaches(Module):
    """Several caches of a layer, by the names of its parts."""

    def __init__(self, **caches: Any) -> None:
        for name, cache in caches.items():
            setattr(self, name, cache)


class ScaledGateMLP(MLP):
    """A gated MLP with a factor of the gate before the activation."""

    def __init__(self, *sizes: int, gate_scale: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.gate_scale = float(gate_scale)

    def __call__(self, x: Any, *, out_sharding: Any = None) -> jax.Array:
        gate: Any = self.gate
        gate = find_activation(self.activation)(_scaled(gate(x), self.gate_scale))
        return self.down(gate * self.up(x), out_sharding=out_sharding)


class FrameEmbedding(Module):
    """Embeds frames of features by two convolutions, of two frames one."""

    def __init__(self, features: int, size: int, *, rngs: Rngs, **dtypes: Unpack[Dtypes]) -> None:
        names = (None, None, "embed")
        conv = partial(Conv, kernel_size=3, padding=1, kernel_axes=names, rngs=rngs, **dtypes)
        self.conv1 = conv(features, size)
        self.conv2 = conv(size, size, strides=2)

    def __call__(self, features: jax.Array) -> jax.Array:
        return exact_gelu(self.conv2(exact_gelu(self.conv1(features))))


def _attention(
    config: AttentionConfig,
    features: int,
    index: int,
    *,
    norms: NormConfig,
    causal: bool,
    rngs: Rngs,
    **dtypes: Unpack[Dtypes],
) -> MultiHeadAttention:
    is_local, has_rope = config.is_local(index), config.has_rope(index)
    rope = config.local_rope if is_local and config.local_rope else config.rope
    options: dict[str, Any] = {
        "head_dim": config.head_dim,
        "causal": causal,
        "rope": rope if has_rope else None,
        "use_bias": config.qkv_bias,
        "window": config.window if is_local else None,
        "scale": config.scale,
        "dropout": config.dropout,
        "rngs": rngs,
        **dtypes,
    }
    if config.latent is not None:
        return MultiHeadLatentAttention(
            features,
            config.num_heads,
            rope_dim=config.latent.rope_dim,
            value_dim=config.latent.value_dim,
            latent_dim=config.latent.dim,
            query_latent_dim=config.latent.query_dim,
            **options,
        )
    norm = partial(_head_norm, config, norms, has_rope, dtypes)
    return MultiHeadAttention(
        features,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        out_bias=config.out_bias,
        key_bias=config.key_bias and config.qkv_bias,
        chunked=config.chunked and is_local,
        query_growth=None if has_rope else config.query_growth,
        softcap=config.softcap,
        sinks=config.sinks,
        gated=config.gate,
        query_norm=norm(config.num_heads, "heads"),
        key_norm=norm(config.num_kv_heads, "kv_heads"),
        **options,
    )


def _head_norm(
    config: AttentionConfig,
    norms: NormConfig,
    has_rope: bool,
    dtypes: Dtypes,
    heads: int,
    axis: str,
) -> Callable[[], Any] | None:
    """Returns what makes the norm of queries or keys, or None."""
    size = config.head_dim
    if config.qk_norm is None or (config.qk_norm == "unscaled" and not has_rope):
        return None
    if config.qk_norm == "unscaled":
        return lambda: RMSNorm(size, epsilon=norms.epsilon, use_scale=False, **dtypes)
    if config.qk_norm == "head":
        return lambda: make_norm(norms, size, dtypes, ("head_dim",))
    return lambda: HeadsRMSNorm(heads, size, (axis, "head_dim"), norms.epsilon, dtypes)


def _cross_attention(
    config: AttentionConfig, features: int, *, rngs: Rngs, **dtypes: Unpack[Dtypes]
) -> MultiHeadAttention:
    return MultiHeadAttention(
        features,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        use_bias=config.qkv_bias,
        out_bias=config.out_bias,
        key_bias=config.key_bias and config.qkv_bias,
        scale=config.scale,
        dropout=config.dropout,
        rngs=rngs,
        **dtypes,
    )


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def make_mlp(
    config: MLPConfig, features: int, *, activation: str, rngs: Rngs, **dtypes: Unpack[Dtypes]
) -> MLP:
    """Makes the feed-forward network of a layer."""
    make: Callable[..., MLP] = MLP
    if config.gate_scale != 1:
        make = partial(ScaledGateMLP, gate_scale=config.gate_scale)
    return make(
        features,
        config.dim,
        activation=ACTIVATIONS.get(activation, activation),
        gated=config.gated,
        use_bias=config.bias,
        rngs=rngs,
        **dtypes,
    )


def _experts(
    config: ExpertsConfig, features: int, *, activation: str, rngs: Rngs, **dtypes: Unpack[Dtypes]
) -> MoE:
    make: Callable[..., MoE] = MoE
    if config.scores == "input_sigmoid":
        make = InputScaledMoE
    elif config.scores != "softmax":
        make = partial(
            GroupedMoE if config.scores == "sigmoid" else GroupedSoftmaxMoE,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            scale=config.scale,
        )
    elif config.limit is not None:
        make = partial(ClippedMoE, limit=config.limit, gate_factor=config.gate_factor)
    return make(
        features,
        config.dim,
        num_experts=config.num_experts,
        top_k=config.top_k,
        dispatch=config.dispatch,
        normalise=config.normalise,
        activation=ACTIVATIONS.get(activation, activation),
        use_bias=config.bias,
        rngs=rngs,
        **dtypes,
    )
