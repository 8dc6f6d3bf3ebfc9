# SPDX-License-Identifier: Apache-2.0
"""A layer of a transformer: its parts are chosen by a config.

A layer adds attention and a feed-forward network to what goes through it. Where norms stand:

    pre        x + part(norm(x))
    post       x + norm(part(x))
    sandwich   x + norm(part(norm(x)))
    after      norm(x + part(x))

A parallel layer adds all parts at once, each of the same input. ``PARTS`` lists the parts that a
layer may have; a config makes some of them, and a call is a loop over these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

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
            scale = read_field(config, path)
            if scale != 1:
                setattr(self, name, scale)

        self.norm_after, self.parallel = norms.placement == "after", config.parallel
        has_mlp = config.mlp is not None
        has_pre_norm = norms.placement in ("pre", "sandwich")
        has_post_norm = norms.placement != "pre"

        def norm(exists: bool) -> Any:
            return make_norm(norms, size, options) if exists else None

        # Attention, a recurrent mixer in its place, or both.
        self.attn_norm = norm(has_pre_norm and (index > 0 or norms.first))
        self.attn: Any = None
        if config.recurrence is not None and config.is_recurrent(index):
            self.mixer = config.recurrence.mixer.make(config, rngs)
        if config.has_attention(index):
            self.attn = _attention(
                attention, size, index, norms=norms, causal=config.causal, rngs=rngs, **options
            )
        self.attn_post_norm = norm(has_post_norm)

        if attention.cross_attention:
            self.cross_norm = norm(has_pre_norm)
            self.cross_attn = _cross_attention(attention, size, rngs=rngs, **options)
            self.cross_post_norm = norm(has_post_norm)

        self.mlp_norm = norm(has_pre_norm and has_mlp and not norms.shared)
        self._make_mlp(config, rngs)
        self.mlp_post_norm = norm(has_post_norm and has_mlp)

        # Learned factors of what is added, which begin as ones.
        scale = (ones, (size,), config.param_dtype, ("embed",), None)
        self.attn_scale = make_parameter(*scale) if config.layer_scale else None
        self.mlp_scale = make_parameter(*scale) if config.layer_scale and has_mlp else None
        self.dropout = Dropout(config.dropout, rngs=rngs) if config.dropout else None

    def _make_mlp(self, config: TransformerConfig, rngs: Rngs) -> None:
        """Makes the MLP, or the experts and what stands beside them."""
        size, experts, options = config.embed_dim, config.experts, dtypes(config)
        mlp = partial(make_mlp, activation=config.activation, rngs=rngs, **options)

        self.mlp: Any = None
        if config.mlp is None:
            return
        if experts is None or not self.has_experts:
            self.mlp = mlp(config.mlp, size)
            return

        self.mlp = _experts(experts, size, activation=config.activation, rngs=rngs, **options)
        if experts.shared_dim:
            self.shared_mlp = mlp(replace(config.mlp, dim=experts.shared_dim), size)
        if experts.shared_dim and experts.shared_gate:
            names = ("embed", None)
            self.shared_gate = Linear(
                size, 1, use_bias=False, kernel_axes=names, rngs=rngs, **options
            )

    @property
    def parts(self) -> list[LayerPart]:
        """The parts that the layer has, in the order in which they add to what goes through it."""
        return [part for part in PARTS if part.is_in(self)]

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
        # Without a rotary embedding positions still say which chunk a token is of.
        positions = positions if self.has_rope else getattr(positions, "positions", None)

        options = {"positions": positions, "mask": mask}
        if bias is not None:
            options["bias"] = bias
        if segment_ids is not None:
            options["segment_ids"] = segment_ids
        real = mask if segment_ids is None else self._real_tokens(mask, segment_ids)
        inputs = PartInputs(options, real, context, context_mask, cache)

        # A part reads what those before it have added to. All parts of a parallel layer read its
        # input; one without a norm reads what the one before it did, which may have been taken out.
        x = checkpoint_name(x, "layer_input")
        source = normed = x
        for part in PARTS if self.parallel else self.parts:
            if not self.parallel:
                source = normed = x
            norm = part.norm_of(self)
            if norm is not None:
                normed = norm(source)
            if not part.is_in(self):
                continue
            added = self._scaled_part(part.read(self, normed, inputs), part)
            x = self._joined(x, added, part.post_norm_of(self))
        return lay_out_activations(x)

    def _real_tokens(self, mask: Any, segment_ids: Any) -> Any:
        """Returns the mask of tokens that are no padding, which count for experts."""
        in_segments = (segment_ids != 0)[..., None, None, :]
        is_of_tokens = mask is not None and mask.shape[-3:] == in_segments.shape[-3:]
        return as_mask(type(self).__name__, mask) & in_segments if is_of_tokens else in_segments

    def _scaled_part(self, x: jax.Array, part: LayerPart) -> jax.Array:
        """Returns the result of a part as it is added: scaled, normalised, dropped out."""
        x = checkpoint_name(x, part.checkpoint)
        scale, norm = part.scale_of(self), part.post_norm_of(self)
        if scale is not None:
            aligned = align(scale.value.astype(x.dtype), x, (x.ndim - 1,))
            x = x * jax.lax.expand_dims(aligned, range(x.ndim - 1))

        if norm is not None and not self.norm_after:
            x = norm(x)
        if self.residual_scale is not None:
            x = x * jnp.asarray(self.residual_scale, x.dtype)
        return x if self.dropout is None else self.dropout(x)

    def _joined(self, x: jax.Array, added: jax.Array, norm: Any) -> jax.Array:
        # Parallel parts are added to one sum, which no norm of a part is of.
        is_normed = self.norm_after and not self.parallel
        return norm(x + added) if is_normed else x + added


class PartInputs(NamedTuple):
    """What the parts of a layer read beside the states."""

    attention_options: dict[str, Any]
    real: Any  # the mask of real tokens, for experts
    context: Any
    context_mask: Any
    cache: Any

    def cache_option(self, name: str) -> dict[str, Any]:
        """Returns the keyword argument with the cache of the module of a name, if there is one."""
        if self.cache is None:
            return {}
        is_several = isinstance(self.cache, LayerCaches)
        return {"cache": getattr(self.cache, name) if is_several else self.cache}


class LayerPart(NamedTuple):
    """A part of a layer, by the names of its attributes.

    Modules are looked up when the layer is called, so that an edit of the layer is an edit of the
    part: what stands in the place of a module is called, and None is left out.
    """

    name: str  # its norms and its scale are ``{name}_norm``, ``{name}_post_norm``, ``{name}_scale``
    modules: tuple[str, ...]
    checkpoint: str  # the name of its result in ``remat``
    read: Callable[[TransformerLayer, jax.Array, PartInputs], jax.Array]

    def is_in(self, layer: TransformerLayer) -> bool:
        """Whether the layer has one of its modules."""
        return any(getattr(layer, name) is not None for name in self.modules)

    def norm_of(self, layer: TransformerLayer) -> Any:
        """Returns the norm of what the part reads, or None; also if the part was taken out."""
        return getattr(layer, f"{self.name}_norm", None)

    def post_norm_of(self, layer: TransformerLayer) -> Any:
        """Returns the norm of its result, or of the sum with it, or None."""
        return getattr(layer, f"{self.name}_post_norm")

    def scale_of(self, layer: TransformerLayer) -> Any:
        """Returns the learned scale of its result, or None."""
        return getattr(layer, f"{self.name}_scale", None)


def _read_sequence(layer: TransformerLayer, x: jax.Array, inputs: PartInputs) -> jax.Array:
    """Calls attention and the mixer, and adds their results."""
    results = list[jax.Array]()
    for name, module, in_scale, out_scale in (
        ("attn", layer.attn, layer.attention_in_scale, layer.attention_out_scale),
        ("mixer", layer.mixer, layer.recurrent_in_scale, layer.recurrent_out_scale),
    ):
        if module is not None:
            options = inputs.attention_options | inputs.cache_option(name)
            results.append(_scaled(module(_scaled(x, in_scale), **options), out_scale))
    return results[0] if len(results) == 1 else results[0] + results[1]


def _read_context(layer: TransformerLayer, x: jax.Array, inputs: PartInputs) -> jax.Array:
    """Calls cross-attention."""
    option = inputs.cache_option("cross_attn")
    return layer.cross_attn(x, inputs.context, mask=inputs.context_mask, **option)


def _feed_forward(layer: TransformerLayer, x: jax.Array, inputs: PartInputs) -> jax.Array:
    """Calls the MLP, or the experts and the one for all tokens."""
    option = dict[str, Any]()
    real = inputs.real
    if layer.has_experts and real is not None and real.shape[-3:] == (1, 1, x.shape[-2]):
        option["mask"] = real[..., 0, 0, :]  # padding does not count in the loss of experts
    result = _scaled(layer.mlp(x, **option), layer.mlp_out_scale)
    if layer.shared_mlp is None:
        return result

    shared = layer.shared_mlp(x)
    if layer.shared_gate is not None:
        shared = jax.nn.sigmoid(layer.shared_gate(x)) * shared
    return result + _scaled(shared, layer.mlp_out_scale)


PARTS = (
    LayerPart("attn", ("attn", "mixer"), "attention", _read_sequence),
    LayerPart("cross", ("cross_attn",), "attention", _read_context),
    LayerPart("mlp", ("mlp",), "mlp", _feed_forward),
)
"""The parts that a layer may have, in the order in which they add to what goes through it."""


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
