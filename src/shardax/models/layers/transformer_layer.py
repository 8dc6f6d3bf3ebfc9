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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax.models.config import SCALES, TransformerConfig
from shardax.models.layers.activations import ACTIVATIONS, exact_gelu
from shardax.models.layers.experts import ClippedMoE, GroupedMoE, GroupedSoftmaxMoE, InputScaledMoE
from shardax.models.layers.norms import HeadsRMSNorm, dtypes, make_norm
from shardax.nn.attention.latent import MultiHeadLatentAttention
from shardax.nn.attention.multi_head import MultiHeadAttention
from shardax.nn.conv import Conv
from shardax.nn.dropout import Dropout
from shardax.nn.linear import Linear
from shardax.nn.mlp import MLP, find_activation
from shardax.nn.moe import MoE
from shardax.nn.normalization import RMSNorm
from shardax.nn.parameters import make_parameter, ones
from shardax.partition.constraints import constrain_activations as _constrain
from shardax.partition.explicit import align


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
        self.is_local, experts = config.kind_of(index)
        # Set only where they say more: a plain layer has no such attributes.
        if config.rope is not None and not config.has_rope(index):
            self.has_rope = False
        if config.residual_scale is not None:
            self.residual_scale = config.residual_scale
        for name in SCALES:
            if getattr(config, name) != 1:
                setattr(self, name, getattr(config, name))
        self.norm_after, self.parallel = config.norm_placement == "after", config.parallel
        has_pre_norm = config.norm_placement in ("pre", "sandwich")
        behind = config.norm_placement != "pre"
        has_first_norm = has_pre_norm and (index > 0 or config.first_norm)
        self.attn_norm: Any = make_norm(config) if has_first_norm else None
        self.attn: Any = None
        if config.recurrent is not None and config.is_recurrent(index):
            self.mixer = config.recurrent.make(config, rngs)
        if config.has_attention(index):
            self.attn = _attention(config, index, rngs)
        self.attn_post_norm = make_norm(config) if behind else None
        if config.cross_attention:
            self.cross_norm: Any = make_norm(config) if has_pre_norm else None
            self.cross_attn = _cross_attention(config, rngs)
            self.cross_post_norm = make_norm(config) if behind else None
        has_mlp = experts or config.mlp_dim > 0
        has_mlp_norm = has_pre_norm and has_mlp and not config.shared_norm
        self.mlp_norm = make_norm(config) if has_mlp_norm else None
        self.mlp: Any = (_experts if experts else make_mlp)(config, rngs) if has_mlp else None
        self.has_experts = experts
        if experts and config.shared_expert_dim:
            self.shared_mlp = make_mlp(config, rngs, config.shared_expert_dim)
            if config.shared_expert_gate:
                names, size = ("embed", None), config.embed_dim
                options = {"use_bias": False, "kernel_axes": names, **dtypes(config)}
                self.shared_gate = Linear(size, 1, rngs=rngs, **options)
        self.mlp_post_norm = make_norm(config) if behind and has_mlp else None
        scale = (ones, (config.embed_dim,), config.param_dtype, ("embed",), None)
        self.attn_scale = make_parameter(*scale) if config.layer_scale else None
        self.mlp_scale = make_parameter(*scale) if config.layer_scale and has_mlp else None
        self.dropout = Dropout(config.dropout, rngs=rngs) if config.dropout else None

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
            mask = (segment_ids != 0)[..., None, None, :]  # which tokens count for experts
        x = checkpoint_name(x, "layer_input")
        normed = x if self.attn_norm is None else self.attn_norm(x)
        read = self._read(normed, attention_options, cache)
        added = self._added(read, "attention", self.attn_post_norm, self.attn_scale)
        if self.parallel:
            normed = normed if self.mlp_norm is None else self.mlp_norm(x)
            result = self._mlp(normed, mask)
            more = self._added(result, "mlp", self.mlp_post_norm, self.mlp_scale)
            return _constrain(x + added + more)
        x = self._joined(x, added, self.attn_post_norm)
        if self.cross_attn is not None:
            x = self._with_context(x, context, context_mask, cache)
        if self.mlp is None:
            return _constrain(x)
        normed = x if self.mlp_norm is None else self.mlp_norm(x)
        result = self._mlp(normed, mask)
        added = self._added(result, "mlp", self.mlp_post_norm, self.mlp_scale)
        return _constrain(self._joined(x, added, self.mlp_post_norm))

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

    def __init__(self, config: TransformerConfig, *, rngs: Rngs) -> None:
        options = {"padding": 1, "kernel_axes": (None, None, "embed"), "rngs": rngs}
        options |= dtypes(config)
        self.conv1 = Conv(config.feature_size, config.embed_dim, 3, **options)
        self.conv2 = Conv(config.embed_dim, config.embed_dim, 3, strides=2, **options)

    def __call__(self, features: jax.Array) -> jax.Array:
        return exact_gelu(self.conv2(exact_gelu(self.conv1(features))))


def _attention(config: TransformerConfig, index: int, rngs: Rngs) -> MultiHeadAttention:
    def norm(heads: int, axis: str) -> Callable[[], Any] | None:
        if config.qk_norm is None or (config.qk_norm == "unscaled" and rope is None):
            return None
        if config.qk_norm == "unscaled":
            options = {"epsilon": config.norm_epsilon, "use_scale": False, **dtypes(config)}
            return lambda: RMSNorm(config.head_dim, **options)
        if config.qk_norm == "head":
            return lambda: make_norm(config, config.head_dim, ("head_dim",))
        names, epsilon = (axis, "head_dim"), config.norm_epsilon
        return lambda: HeadsRMSNorm(heads, config.head_dim, names, epsilon, dtypes(config))

    is_local = config.kind_of(index)[0]
    rope = config.local_rope if is_local and config.local_rope else config.rope
    rope = rope if config.has_rope(index) else None
    options: dict[str, Any] = {
        "head_dim": config.head_dim,
        "causal": config.causal,
        "rope": rope,
        "use_bias": config.qkv_bias,
        "window": config.window if is_local else None,
        "scale": config.attention_scale,
        "dropout": config.attention_dropout,
        "rngs": rngs,
        **dtypes(config),
    }
    if config.latent_dim:
        return MultiHeadLatentAttention(
            config.embed_dim,
            config.num_heads,
            rope_dim=config.rope_dim,
            value_dim=config.value_dim,
            latent_dim=config.latent_dim,
            query_latent_dim=config.query_latent_dim,
            **options,
        )
    return MultiHeadAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        out_bias=config.out_bias,
        key_bias=config.key_bias and config.qkv_bias,
        chunked=config.chunked and is_local,
        query_growth=None if config.has_rope(index) else config.query_growth,
        softcap=config.attention_softcap,
        sinks=config.attention_sinks,
        gated=config.attention_gate,
        query_norm=norm(config.num_heads, "heads"),
        key_norm=norm(config.num_kv_heads, "kv_heads"),
        **options,
    )


def _cross_attention(config: TransformerConfig, rngs: Rngs) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        use_bias=config.qkv_bias,
        out_bias=config.out_bias,
        key_bias=config.key_bias and config.qkv_bias,
        scale=config.attention_scale,
        dropout=config.attention_dropout,
        rngs=rngs,
        **dtypes(config),
    )


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def make_mlp(config: TransformerConfig, rngs: Rngs, hidden: int | None = None) -> MLP:
    """Makes the feed-forward network of a layer."""
    make: Callable[..., MLP] = MLP
    if config.mlp_gate_scale != 1:
        make = partial(ScaledGateMLP, gate_scale=config.mlp_gate_scale)
    return make(
        config.embed_dim,
        config.mlp_dim if hidden is None else hidden,
        activation=ACTIVATIONS.get(config.activation, config.activation),
        gated=config.gated,
        use_bias=config.mlp_bias,
        rngs=rngs,
        **dtypes(config),
    )


def _experts(config: TransformerConfig, rngs: Rngs) -> MoE:
    make: Callable[..., MoE] = MoE
    if config.expert_scores == "input_sigmoid":
        make = InputScaledMoE
    elif config.expert_scores != "softmax":
        make = partial(
            GroupedMoE if config.expert_scores == "sigmoid" else GroupedSoftmaxMoE,
            num_groups=config.expert_groups,
            top_groups=config.groups_per_token,
            scale=config.expert_scale,
        )
    elif config.expert_limit is not None:
        make = partial(ClippedMoE, limit=config.expert_limit)
    return make(
        config.embed_dim,
        config.expert_dim,
        num_experts=config.num_experts,
        top_k=config.experts_per_token,
        dispatch=config.expert_dispatch,
        normalise=config.normalise_experts,
        activation=ACTIVATIONS.get(config.activation, config.activation),
        use_bias=config.expert_bias,
        rngs=rngs,
        **dtypes(config),
    )
