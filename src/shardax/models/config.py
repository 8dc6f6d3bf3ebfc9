# SPDX-License-Identifier: Apache-2.0
"""The config of a transformer: its sizes, parts and dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from shardax._core.checks import Options
from shardax.models.layers.norms import NORMS
from shardax.models.layers.recurrent import RecurrentConfig
from shardax.nn.attention.multi_head import attention_sizes
from shardax.nn.errors import LayerConfigError
from shardax.nn.moe import Dispatch
from shardax.nn.parameters import as_size
from shardax.nn.rope import Rope
from shardax.nn.stack import Policy, check_policy

PLAIN_ROPE = Rope()
PLACEMENTS = ("pre", "post", "sandwich", "after")
HEADS = (None, "tokens", "first", "each", "span", "binary", "embedding")
POOLINGS = ("first", "mean", "first_and_mean", "last", "end", "highest", "attention")
# Factors of what the parts of a layer read and return.
SCALES = ("attention_in_scale", "attention_out_scale", "recurrent_in_scale")
SCALES += ("recurrent_out_scale", "mlp_out_scale")
QK_NORMS = (None, "head", "all", "unscaled")


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes, parts and dtypes of a transformer.

    Attributes:
        vocab_size: Number of tokens; 0 for a model of images or features.
        num_layers: Number of layers.
        embed_dim: Size of a token's vector.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads``.
        head_dim: Size of a head of queries and keys.
        latent_dim: Size of the latent that keys and values of a position are made of, in
            ``nn.MultiHeadLatentAttention``; 0 for plain attention. The following three are its.
        query_latent_dim: Size of the latent that queries are made of; None for none.
        rope_dim: How many of ``head_dim`` are rotated.
        value_dim: Size of a head of values.
        recurrent: The recurrent mixer that layers have in place of attention; None for none.
        recurrent_layers: Which layers have it; None for all.
        recurrent_beside: Whether these have attention too, which reads the same; what both return
            is added.
        mlp_dim: Size of the MLP's hidden layer; 0 for none, where all layers are recurrent.
        causal: Whether a position reads only from itself and earlier ones.
        norm: ``"rms"``, ``"rms_offset"`` (the scale is added to 1), ``"layer"``,
            ``"layer_offset"`` or ``"layer_unbiased"`` (without a bias).
        norm_placement: ``"pre"``, ``"post"``, ``"sandwich"`` or ``"after"``.
        first_norm: Whether the first layer has a norm before attention.
        layer_scale: Whether what attention and MLP add is multiplied by a learned vector.
        norm_epsilon: Added to mean squares before dividing by their root.
        parallel: Whether attention and MLP read the same input.
        shared_norm: Whether a parallel layer has one norm for both.
        qk_norm: Norm of queries and keys: None, ``"head"`` (of each head), ``"all"`` (of all
            heads together) or ``"unscaled"`` (of each head, without a scale, in layers with a
            rotary embedding).
        activation: Function of ``jax.nn`` by name, or ``"exact_gelu"``, ``"quick_gelu"`` or
            ``"squared_relu"``.
        gated: Whether the MLP is gated.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        key_bias: Whether, with ``qkv_bias``, the projection to keys has one too.
        out_bias: Whether attention's output projection has one.
        mlp_bias: Whether the MLP has biases.
        head_bias: Whether the head has one.
        rope: The rotary embedding; None for none.
        local_rope: That of layers with a window; None for the same.
        rope_layers: Which layers have a rotary embedding; None for all.
        max_positions: Number of learned positions; 0 for none.
        position_offset: Rows of the learned positions before that of the first token.
        pad_token: A token of padding: it has the learned position of its number, and the others
            are counted behind it, without padding. -1 for positions that count from row 0.
        relative_buckets: Number of learned distances, whose biases are added to the scores of all
            layers; 0 for none. If causal, all of them are for positions behind.
        farthest_distance: Distance from which on all positions share the last bucket.
        cross_attention: Whether layers also read a context, such as the states of an encoder,
            between attention and MLP.
        window: How many positions a position of a local layer reads, on each side if not causal;
            None for all.
        chunked: Whether the window of local layers is a chunk, one of those that positions are cut
            into.
        local_layers: Which layers are local; None for all.
        query_growth: A factor and a length: queries of layers without a rotary embedding grow with
            their position, as for ``nn.MultiHeadAttention``.
        attention_scale: Multiplies the scores; None for ``head_dim ** -0.5``.
        attention_softcap: Bound of the scores, by tanh.
        attention_sinks: Whether each head has a learned score beside those of its keys.
        attention_gate: Whether what attention reads is multiplied by the sigmoid of a linear map,
            as ``gated`` of ``nn.MultiHeadAttention``.
        final_softcap: Bound of the logits, by tanh.
        token_dim: Size of embeddings that a linear layer makes ``embed_dim`` of; 0 for that size.
        embed_scale: Multiplies the embedding.
        residual_scale: Multiplies what attention and MLP add.
        attention_in_scale: Multiplies what attention reads.
        attention_out_scale: Multiplies what attention returns.
        recurrent_in_scale: Multiplies what the recurrent mixer reads.
        recurrent_out_scale: Multiplies what the recurrent mixer returns.
        mlp_gate_scale: Multiplies the gate of the MLP, before the activation.
        mlp_out_scale: Multiplies what the MLP returns.
        logit_scale: Multiplies the logits, before a bound.
        embed_norm: Whether the embedding is normalised.
        pooled_norm: Whether the last norm stands behind the pooling, and the last layer's result
            has none.
        token_types: Number of kinds of tokens that have an embedding.
        num_experts: Number of experts of a layer; 0 for none.
        experts_per_token: How many of them a token goes to.
        expert_dim: Size of an expert's hidden layer.
        normalise_experts: Whether the weights of a token's experts add up to 1.
        expert_scores: ``"softmax"``, ``"sigmoid"`` with a bias of the choice, or
            ``"grouped_softmax"``, or ``"input_sigmoid"``, which multiplies what experts read.
        expert_groups: But of a plain softmax: number of groups of experts.
        groups_per_token: But of a plain softmax: how many of them a token's experts are of.
        expert_scale: But of a plain softmax: multiplies the weights.
        expert_bias: Whether the router and the experts have biases.
        expert_limit: Bound of an expert's gate, and on both sides of what it multiplies, to which 1
            is added then; None for plain gated units.
        shared_expert_dim: Size of the hidden layer of an expert for all tokens; 0 for none.
        shared_expert_gate: Whether what it adds is multiplied by the sigmoid of a linear map.
        expert_dispatch: How tokens get to them, as for ``MoE``.
        load_balance_weight: What a training loss multiplies ``sx.nn.load_balance_loss`` by.
        dense_layers: The layers that have an MLP nevertheless.
        feature_size: Size of a frame of features, in the place of tokens; 0 for others. Two
            convolutions make one position of two frames, of which there are ``2 * max_positions``.
        image_size: Height and width of images; 0 for a model of tokens.
        patch_size: Height and width of the patches of an image.
        channels: Channels of images.
        patch_bias: Whether the map from patches to embeddings has a bias.
        first_vector: Whether a learned vector stands before the patches.
        mask_patch: Whether there is a learned vector that hides a patch, in pretraining only.
        head: ``"tokens"`` (logits of tokens at each position), ``"first"`` (of classes, of the
            sequence), ``"each"`` (of classes at each position), ``"span"`` (two at each position,
            for first and last of an answer), ``"binary"`` (one at each position),
            ``"embedding"`` (a projection of the sequence, without a bias), or None (the last
            layer's result).
        num_classes: Number of classes of the heads ``"first"`` and ``"each"``.
        projection_dim: Size of what the head ``"embedding"`` returns.
        head_transform: Whether a dense layer, an activation and a norm stand before the head.
        head_transform_norm: Whether the norm is there.
        head_transform_bias: Whether the dense layer has a bias.
        head_activation: The activation there; None for that of the MLP.
        pooling: What ``pool`` makes one vector of, and so the heads ``"first"`` and
            ``"embedding"`` read: the ``"first"`` position, the ``"mean"``,
            ``"first_and_mean"``, one behind the other, the mean of the others then, the
            ``"last"`` position, that of the first ``"end"`` token, of the ``"highest"`` token, or
            ``"attention"`` of a learned query to all.
        end_token: The token of the pooling ``"end"``.
        pooler: Whether there is a dense layer on what is pooled.
        pooler_dim: Size of what it returns; 0 for ``embed_dim``.
        pooler_activation: Its activation, by name.
        tied_head: Whether the head is the transposed embedding.
        dropout: Rate of dropout on what each part adds, while training.
        embed_dropout: Rate of dropout on the embedding.
        attention_dropout: Rate of dropout on the weights of attention.
        scan_layers: Whether layers are stored stacked and run by a loop.
        remat: As for ``DecoderConfig``.
        dtype: Compute dtype, by name; that of the logits.
        param_dtype: Parameter dtype, by name.
        source: The ``config.json`` that it was read from, as text.

    Raises:
        LayerConfigError: If sizes are not positive or do not fit together.

    Example:
        >>> import shardax as sx
        >>> config = sx.models.TransformerConfig(num_layers=1, window=8, norm_placement="post")
        >>> model = sx.models.Transformer(config, rngs=sx.Rngs(0))
        >>> model.layers[0].attn_norm is None, model.layers[0].attn_post_norm.features
        (True, 64)
    """

    vocab_size: int = 256
    num_layers: int = 2
    embed_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    latent_dim: int = 0
    query_latent_dim: int | None = None
    rope_dim: int = 0
    value_dim: int = 0
    recurrent: RecurrentConfig | None = None
    recurrent_layers: tuple[bool, ...] | None = None
    recurrent_beside: bool = False
    mlp_dim: int = 192
    causal: bool = True
    norm: str = "rms"
    norm_placement: str = "pre"
    layer_scale: bool = False
    first_norm: bool = True
    norm_epsilon: float = 1e-6
    parallel: bool = False
    shared_norm: bool = False
    qk_norm: str | None = None
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    key_bias: bool = True
    mlp_bias: bool = False
    head_bias: bool = False
    rope: Rope | None = PLAIN_ROPE
    local_rope: Rope | None = None
    rope_layers: tuple[bool, ...] | None = None
    max_positions: int = 0
    position_offset: int = 0
    pad_token: int = -1
    relative_buckets: int = 0
    farthest_distance: int = 128
    cross_attention: bool = False
    window: int | None = None
    chunked: bool = False
    query_growth: tuple[float, float] | None = None
    local_layers: tuple[bool, ...] | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    attention_gate: bool = False
    final_softcap: float | None = None
    token_dim: int = 0
    embed_scale: float | None = None
    residual_scale: float | None = None
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    recurrent_in_scale: float = 1.0
    recurrent_out_scale: float = 1.0
    mlp_gate_scale: float = 1.0
    mlp_out_scale: float = 1.0
    logit_scale: float | None = None
    embed_norm: bool = False
    pooled_norm: bool = False
    token_types: int = 0
    num_experts: int = 0
    experts_per_token: int = 2
    expert_dim: int = 0
    normalise_experts: bool = True
    expert_scores: str = "softmax"
    expert_groups: int = 1
    groups_per_token: int = 1
    expert_scale: float = 1.0
    expert_bias: bool = False
    expert_limit: float | None = None
    shared_expert_dim: int = 0
    shared_expert_gate: bool = False
    expert_dispatch: Dispatch = "dense"
    load_balance_weight: float = 0.0
    dense_layers: tuple[int, ...] = ()
    feature_size: int = 0
    image_size: int = 0
    patch_size: int = 0
    channels: int = 3
    patch_bias: bool = True
    first_vector: bool = True
    mask_patch: bool = False
    head: str | None = "tokens"
    num_classes: int = 0
    projection_dim: int = 0
    head_transform: bool = False
    head_transform_norm: bool = True
    head_transform_bias: bool = True
    head_activation: str | None = None
    pooling: str = "first"
    end_token: int = -1
    pooler: bool = False
    pooler_dim: int = 0
    pooler_activation: str = "tanh"
    tied_head: bool = False
    dropout: float = 0.0
    embed_dropout: float = 0.0
    attention_dropout: float = 0.0
    scan_layers: bool = False
    remat: Policy = None
    dtype: str = "float32"
    param_dtype: str = "float32"
    source: str | None = None

    def __post_init__(self) -> None:
        check_config(self)
        where = type(self).__name__
        options = Options(LayerConfigError, where)
        for name, choices in (
            ("norm", NORMS),
            ("norm_placement", PLACEMENTS),
            ("head", HEADS),
            ("pooling", POOLINGS),
        ):
            options.choice(name, getattr(self, name), choices)
        scores = ("softmax", "sigmoid", "grouped_softmax", "input_sigmoid")
        options.choice("expert_scores", self.expert_scores, scores)
        if self.num_experts and self.expert_scores != "softmax":
            groups, count = self.expert_groups, self.num_experts
            least = 2 if self.expert_scores == "sigmoid" else 1
            fits = groups == 1 or (groups > 0 and count % groups == 0 and count >= least * groups)
            need = f"a divisor of {count}" + " with two experts a group" * (least == 2)
            options.check("expert_groups", groups, fits, need)
            least = math.ceil(self.experts_per_token * groups / count)
            fits = least <= self.groups_per_token <= groups
            need = f"from {least} up to {groups}, for {self.experts_per_token} experts"
            options.check("groups_per_token", self.groups_per_token, fits, need)
        if self.expert_limit is not None:
            fits, need = self.expert_limit > 0, "positive"
            if self.expert_scores != "softmax":
                fits, need = False, f"None with expert_scores={self.expert_scores!r}"
            options.check("expert_limit", self.expert_limit, fits, need)
        if self.latent_dim:
            size = self.rope_dim
            fits = 0 < size < self.head_dim and size % 2 == 0 and self.rope is not None
            options.check("rope_dim", size, fits, f"even and below head_dim={self.head_dim}")
            options.check("value_dim", self.value_dim, self.value_dim > 0, "positive")
            fits = self.num_kv_heads == self.num_heads
            options.check("num_kv_heads", self.num_kv_heads, fits, f"{self.num_heads}, of a latent")
            plain = {"attention_softcap": None, "qk_norm": None, "out_bias": self.qkv_bias}
            plain |= {"local_rope": None, "rope_layers": None, "attention_sinks": False}
            plain |= {"attention_gate": False}
            plain |= {"chunked": False, "query_growth": None, "key_bias": True}
        else:
            plain = {"query_latent_dim": None, "rope_dim": 0, "value_dim": 0}
        form = "latent" if self.latent_dim else "plain"
        self._require(options, plain, f"with {form} attention")
        options.check("qk_norm", self.qk_norm, self.qk_norm in QK_NORMS, "a kind")
        if self.image_size:
            fits = 0 < self.patch_size <= self.image_size
            options.check("patch_size", self.patch_size, fits, f"from 1 up to {self.image_size}")
        needs_end = self.pooling == "end"
        options.check("end_token", self.end_token, self.end_token >= 0 or not needs_end, "a token")
        for name in ("local_layers", "rope_layers", "recurrent_layers"):
            chosen = getattr(self, name)
            if chosen is not None:
                fits = len(chosen) == self.num_layers
                options.check(name, chosen, fits, f"{self.num_layers} booleans")
        if self.window is not None:
            as_size(where, "window", self.window)
        options.check("pad_token", self.pad_token, self.pad_token >= -1, "a token, or -1")
        self._check_recurrent(options)
        self._check_distances_and_context(options)

    def _require(self, options: Options, values: Mapping[str, object], condition: str) -> None:
        """Raises for options with other values than a part has room for."""
        for name, value in values.items():
            held = getattr(self, name)
            options.check(name, held, held == value, f"{value!r} {condition}")

    def _check_recurrent(self, options: Options) -> None:
        """Raises for options that do not fit mixers and factors."""
        if self.recurrent is not None:
            for name in ("causal", "parallel", "relative_buckets", "image_size"):
                held = getattr(self, name)
                need = f"{name == 'causal'}, with recurrent layers"
                options.check(name, held, bool(held) == (name == "causal"), need)
        else:
            plain = {"recurrent_beside": False, "recurrent_in_scale": 1, "recurrent_out_scale": 1}
            self._require(options, plain, "without a recurrent mixer")
        fits = self.mlp_gate_scale == 1 or (self.gated and not self.num_experts)
        options.check("mlp_gate_scale", self.mlp_gate_scale, fits, "1 of experts, and ungated")

    def _check_distances_and_context(self, options: Options) -> None:
        """Raises for parts of encoder-decoders that do not fit."""
        if self.relative_buckets:
            even = self.relative_buckets >= 4 and self.relative_buckets % 2 == 0
            options.check("relative_buckets", self.relative_buckets, even, "even and at least 4")
            least = self.relative_buckets // (2 if self.causal else 4) + 1
            fits = self.farthest_distance >= least
            options.check("farthest_distance", self.farthest_distance, fits, f"at least {least}")
            fits = not self.latent_dim and not (self.window is not None and self.causal)
            options.check("relative_buckets", self.relative_buckets, fits, "0 with this attention")
        if self.cross_attention:
            fits = not self.parallel
            options.check("parallel", self.parallel, fits, "False with cross_attention")
        fits = 0 <= self.position_offset <= self.max_positions
        options.check("position_offset", self.position_offset, fits, "within max_positions")
        if self.feature_size:
            fits = self.max_positions > 0 and self.position_offset == 0 and not self.causal
            options.check(
                "feature_size", self.feature_size, fits, "0 if causal or without positions"
            )
            plain = {"image_size": 0, "token_types": 0, "token_dim": 0, "relative_buckets": 0}
            plain |= {"embed_norm": False, "embed_scale": None, "head": None, "pad_token": -1}
            self._require(options, plain, "with feature_size")
            options.check("embed_dim", self.embed_dim, self.embed_dim % 2 == 0, "even, for sines")

    @property
    def head_size(self) -> int:
        """Number of logits of a head of classes."""
        sizes = {"span": 2, "binary": 1, "embedding": self.projection_dim}
        return sizes.get(str(self.head), self.num_classes)

    def states_of(self, length: int) -> int:
        """Number of states of inputs of a length."""
        return length // 2 if self.feature_size else length

    def kind_of(self, index: int) -> tuple[bool, bool]:
        """Whether a layer is local, and whether it has experts."""
        local = self.window is not None and (self.local_layers is None or self.local_layers[index])
        return local, self.num_experts > 0 and index not in self.dense_layers

    def is_recurrent(self, index: int) -> bool:
        """Whether a layer has a recurrent mixer."""
        chosen = self.recurrent_layers
        return self.recurrent is not None and (chosen is None or chosen[index])

    def has_attention(self, index: int) -> bool:
        """Whether a layer has attention."""
        return self.recurrent_beside or not self.is_recurrent(index)

    def has_rope(self, index: int) -> bool:
        """Whether a layer has a rotary embedding."""
        return self.rope is not None and (self.rope_layers is None or self.rope_layers[index])

    @property
    def period(self) -> int:
        """Number of layers before their kinds repeat."""
        kinds = [
            (
                self.kind_of(index),
                self.has_rope(index),
                self.is_recurrent(index),
                index == 0 and not self.first_norm,
            )
            for index in range(self.num_layers)
        ]
        return next(
            period
            for period in range(1, self.num_layers + 1)
            if all(kinds[i] == kinds[i % period] for i in range(self.num_layers))
        )


def check_config(config: Any) -> None:
    """Raises if sizes of a model's config do not fit."""
    where = type(config).__name__
    options = Options(LayerConfigError, where)
    no_tokens = getattr(config, "image_size", 0) or getattr(config, "feature_size", 0)
    recurrent = getattr(config, "recurrent", None)
    has_mlp = config.mlp_dim != 0 or recurrent is None or config.recurrent_layers is not None
    names = (*("vocab_size",) * (not no_tokens), "num_layers", *("mlp_dim",) * has_mlp)
    for name in names:
        as_size(where, name, getattr(config, name))
    rope = getattr(config, "rope", None)
    base = getattr(config, "rope_base", None if rope is None else rope.base)
    whole = (rope is None or rope.fraction == 1) and not getattr(config, "latent_dim", 0)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    attention_sizes(config.embed_dim, *heads, base if whole else None)
    for name in ("dropout", "embed_dropout", "attention_dropout"):
        rate = getattr(config, name, 0.0)
        options.check(name, rate, 0 <= rate < 1, "from 0 up to, but not, 1")
    if base is not None:
        options.check("rope_base", base, base > 0, "positive")
    options.check("norm_epsilon", config.norm_epsilon, config.norm_epsilon >= 0, "at least 0")
    scale = getattr(config, "logit_scale", None)
    options.check("logit_scale", scale, scale is None or scale != 0, "another number than 0")
    options.check("remat", config.remat, not callable(config.remat), "no function but its name")
    _use_names(config, where)


def _use_names(config: Any, where: str) -> None:
    """Normalises policy and dtypes of a config to names."""
    names = ("layer_input", "attention", "mlp")
    object.__setattr__(config, "remat", check_policy(where, config.remat, names))
    for name in ("dtype", "param_dtype"):
        object.__setattr__(config, name, dtype_name(where, name, getattr(config, name)))


def dtype_name(where: str, name: str, dtype: Any) -> str:
    """Returns the name of a floating dtype, or raises."""
    try:
        normal_dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise LayerConfigError(f"{where} has {name}={dtype!r}, not a dtype.") from error
    if not jnp.issubdtype(normal_dtype, jnp.floating):
        raise LayerConfigError(
            f"{where} has {name}={dtype!r}, but a model computes with floating dtypes, such as "
            f"'float32' or 'bfloat16'."
        )
    return normal_dtype.name
