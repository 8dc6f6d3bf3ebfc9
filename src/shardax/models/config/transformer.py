# SPDX-License-Identifier: Apache-2.0
"""The config of a transformer: its size, its parts and its dtypes."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from shardax.extend import Options
from shardax.models.config.attention import AttentionConfig
from shardax.models.config.checks import check_parts, check_rate, require_values, use_names
from shardax.models.config.feed_forward import ExpertsConfig, MLPConfig
from shardax.models.config.inputs import (
    EmbeddingConfig,
    FeaturesConfig,
    ImageConfig,
    PositionsConfig,
)
from shardax.models.config.norms import NormConfig
from shardax.models.config.outputs import OutputConfig, PoolConfig
from shardax.models.config.paths import read_field
from shardax.models.config.recurrent import RecurrenceConfig
from shardax.models.config.unknown_fields import lists_fields
from shardax.nn.errors import LayerConfigError
from shardax.nn.parameters import as_size
from shardax.nn.stack import Policy

HEADS = (None, "tokens", "first", "each", "span", "binary", "embedding")


@lists_fields
@dataclass(frozen=True)
class TransformerConfig:
    """Size, parts and dtypes of a transformer.

    Attributes:
        vocab_size: Number of tokens; 0 for a model of images or features.
        num_layers: Number of layers.
        embed_dim: Size of a token's vector.
        causal: Whether a position reads only from itself and earlier ones.
        activation: Function of ``jax.nn`` by name, or ``"exact_gelu"``, ``"quick_gelu"`` or
            ``"squared_relu"``, of MLPs and experts.
        head: What the model returns: ``"tokens"`` (logits of tokens at each position), ``"first"``
            (of classes, of the sequence), ``"each"`` (of classes at each position), ``"span"``
            (two at each position, for first and last of an answer), ``"binary"`` (one at each
            position), ``"embedding"`` (a projection of the sequence, without a bias), or None (the
            last layer's result).
        attention: Heads, positions and windows of attention.
        mlp: The feed-forward network; None where all layers are recurrent mixers alone.
        experts: Experts in its place; None for none.
        recurrence: The recurrent mixer of layers in place of attention; None for none.
        norms: Kind and places of norms.
        embedding: Size, factor and norm of the embedding.
        positions: Learned positions and distances.
        image: Sizes of images, in place of tokens; None for others.
        features: Sizes of frames, in place of tokens; None for others.
        output: Sizes and form of the output layer.
        pool: What one vector of a sequence is made of.
        parallel: Whether attention and MLP read the same input.
        layer_scale: Whether what attention and MLP add is multiplied by a learned vector.
        residual_scale: Multiplies what attention and MLP add.
        dropout: Rate of dropout on what each part adds, while training.
        scan_layers: Whether layers are stored stacked and run by a loop.
        remat: As for ``DecoderConfig``.
        dtype: Compute dtype, by name; that of the logits.
        param_dtype: Parameter dtype, by name.
        source: The ``config.json`` that it was read from, as text.

    Raises:
        LayerConfigError: If sizes are not positive or parts do not fit together.

    Example:
        >>> import shardax as sx
        >>> config = sx.models.TransformerConfig(
        ...     num_layers=1,
        ...     attention=sx.models.AttentionConfig(window=8),
        ...     norms=sx.models.NormConfig(placement="post"),
        ... )
        >>> model = sx.models.Transformer(config, rngs=sx.Rngs(0))
        >>> model.layers[0].attn_norm is None, model.layers[0].attn_post_norm.features
        (True, 64)
    """

    vocab_size: int = 256
    num_layers: int = 2
    embed_dim: int = 64
    _: KW_ONLY
    causal: bool = True
    activation: str = "silu"
    head: str | None = "tokens"
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mlp: MLPConfig | None = field(default_factory=MLPConfig)
    experts: ExpertsConfig | None = None
    recurrence: RecurrenceConfig | None = None
    norms: NormConfig = field(default_factory=NormConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    positions: PositionsConfig = field(default_factory=PositionsConfig)
    image: ImageConfig | None = None
    features: FeaturesConfig | None = None
    output: OutputConfig = field(default_factory=OutputConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    parallel: bool = False
    layer_scale: bool = False
    residual_scale: float | None = None
    dropout: float = 0.0
    scan_layers: bool = False
    remat: Policy = None
    dtype: str = "float32"
    param_dtype: str = "float32"
    source: str | None = None

    def __post_init__(self) -> None:
        where = type(self).__name__
        options = Options(LayerConfigError, where)
        check_parts(options, self)

        has_tokens = self.image is None and self.features is None
        for name in (*("vocab_size",) * has_tokens, "num_layers", "embed_dim"):
            as_size(where, name, getattr(self, name))
        options.choice("head", self.head, HEADS)
        check_rate(options, "dropout", self.dropout)
        use_names(self)

        # A boolean for each layer, where layers differ.
        for path in ("attention.local_layers", "attention.rope_layers", "recurrence.layers"):
            chosen = read_field(self, path)
            fits = chosen is None or len(chosen) == self.num_layers
            options.check(path, chosen, fits, f"{self.num_layers} booleans")

        self._check_layers(options)
        self._check_distances_and_context(options)
        if self.features is not None:
            self._check_features(options)
        if self.head in ("first", "each", "embedding"):
            size = "projection_dim" if self.head == "embedding" else "num_classes"
            as_size(f"{where} with head={self.head!r}", f"output.{size}", self.head_size)

    def _check_layers(self, options: Options) -> None:
        """Raises for an unfit combination of mixers, MLP and experts."""
        recurrence = self.recurrence
        if self.mlp is None:
            fits = recurrence is not None and recurrence.layers is None and self.experts is None
            fits = fits and self.pool.kind != "attention"
            need = "an MLPConfig, but where all layers are recurrent mixers alone"
            options.check("mlp", self.mlp, fits, need)
        elif self.experts is not None:
            fits = self.mlp.gate_scale == 1
            options.check("mlp.gate_scale", self.mlp.gate_scale, fits, "1, with experts")
        if recurrence is not None:
            options.check("causal", self.causal, self.causal, "True, with recurrence")
            plain = {"parallel": False, "positions.relative_buckets": 0, "image": None}
            require_values(options, self, plain, "recurrence")

    def _check_distances_and_context(self, options: Options) -> None:
        """Raises for unfit learned distances and contexts."""
        attention, positions = self.attention, self.positions
        if buckets := positions.relative_buckets:
            least = buckets // (2 if self.causal else 4) + 1
            farthest, fits = positions.farthest_distance, positions.farthest_distance >= least
            options.check("positions.farthest_distance", farthest, fits, f"at least {least}")
            fits = attention.latent is None and not (attention.window is not None and self.causal)
            options.check("positions.relative_buckets", buckets, fits, "0 with this attention")
        if attention.cross_attention:
            require_values(options, self, {"parallel": False}, "attention.cross_attention")

    def _check_features(self, options: Options) -> None:
        """Raises for parts of models of tokens and images."""
        positions = self.positions
        fits = positions.max_positions > 0 and positions.offset == 0 and not self.causal
        options.check("features", self.features, fits, "None if causal or without positions")
        plain = {"image": None, "embedding.token_types": 0, "embedding.dim": 0}
        plain |= {"embedding.norm": False, "embedding.scale": None, "head": None}
        plain |= {"positions.relative_buckets": 0, "positions.pad_token": -1}
        require_values(options, self, plain, "features")
        options.check("embed_dim", self.embed_dim, self.embed_dim % 2 == 0, "even, for sines")

    @property
    def head_size(self) -> int:
        """Number of logits of a head of classes."""
        sizes = {"span": 2, "binary": 1, "embedding": self.output.projection_dim}
        return sizes.get(str(self.head), self.output.num_classes)

    def states_of(self, length: int) -> int:
        """Number of states of inputs of a length."""
        return length // 2 if self.features is not None else length

    def kind_of(self, index: int) -> tuple[bool, bool]:
        """Whether a layer is local, and whether it has experts."""
        has_experts = self.experts is not None and self.experts.in_layer(index)
        return self.attention.is_local(index), has_experts

    def is_recurrent(self, index: int) -> bool:
        """Whether a layer has a recurrent mixer."""
        return self.recurrence is not None and self.recurrence.in_layer(index)

    def has_attention(self, index: int) -> bool:
        """Whether a layer has attention."""
        beside = self.recurrence is not None and self.recurrence.beside
        return beside or not self.is_recurrent(index)

    @property
    def period(self) -> int:
        """Number of layers before their kinds repeat."""
        kinds = [
            (
                self.kind_of(index),
                self.attention.has_rope(index),
                self.is_recurrent(index),
                index == 0 and not self.norms.first,
            )
            for index in range(self.num_layers)
        ]
        return next(
            period
            for period in range(1, self.num_layers + 1)
            if all(kinds[i] == kinds[i % period] for i in range(self.num_layers))
        )
