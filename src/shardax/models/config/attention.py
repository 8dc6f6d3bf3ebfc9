# SPDX-License-Identifier: Apache-2.0
"""The config of attention, plain or latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from shardax.extend import Options
from shardax.models.config.checks import check_parts, check_rate, require_values
from shardax.models.config.paths import ConfigPart
from shardax.nn.attention.multi_head import attention_sizes
from shardax.nn.errors import LayerConfigError
from shardax.nn.parameters import as_size
from shardax.nn.rope import Rope

PLAIN_ROPE = Rope()
QK_NORMS = (None, "head", "all", "unscaled")


@dataclass(frozen=True)
class LatentConfig(ConfigPart):
    """Sizes of ``nn.MultiHeadLatentAttention``.

    Attributes:
        dim: Size of the latent that keys and values of a position are made of.
        rope_dim: How many components of a head of queries and keys are rotated.
        value_dim: Size of a head of values.
        query_dim: Size of the latent that queries are made of; None for none.

    Raises:
        LayerConfigError: If a size is not positive, or ``rope_dim`` is odd.

    Example:
        >>> import shardax as sx
        >>> latent = sx.models.LatentConfig(dim=32, rope_dim=8, value_dim=16)
        >>> sx.models.AttentionConfig(num_heads=4, num_kv_heads=4, latent=latent).latent.dim
        32
    """

    dim: int
    rope_dim: int
    value_dim: int
    query_dim: int | None = None
    absent: ClassVar = {"dim": 0, "rope_dim": 0, "value_dim": 0}

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("dim", "rope_dim", "value_dim"):
            as_size(where, name, getattr(self, name))
        if self.query_dim is not None:
            as_size(where, "query_dim", self.query_dim)
        options = Options(LayerConfigError, where)
        options.check("rope_dim", self.rope_dim, self.rope_dim % 2 == 0, "even")


@dataclass(frozen=True)
class AttentionConfig(ConfigPart):
    """Heads, positions and windows of attention.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads``.
        head_dim: Size of a head of queries and keys.
        latent: Sizes of latent attention; None for plain attention.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        key_bias: Whether, with ``qkv_bias``, the projection to keys has one too.
        out_bias: Whether the output projection has one.
        qk_norm: Norm of queries and keys: None, ``"head"`` (of each head), ``"all"`` (of all
            heads together) or ``"unscaled"`` (of each head, without a scale, in layers with a
            rotary embedding).
        scale: Multiplies the scores; None for ``head_dim ** -0.5``.
        softcap: Bound of the scores, by tanh.
        sinks: Whether each head has a learned score beside those of its keys.
        gate: Whether what is read is multiplied by the sigmoid of a linear map, as ``gated`` of
            ``nn.MultiHeadAttention``.
        rope: The rotary embedding; None for none.
        local_rope: That of layers with a window; None for the same.
        rope_layers: Which layers have a rotary embedding; None for all.
        query_growth: A factor and a length: queries of layers without a rotary embedding grow with
            their position, as for ``nn.MultiHeadAttention``.
        window: How many positions a position of a local layer reads, on each side if not causal;
            None for all.
        chunked: Whether the window is a chunk, one of those that positions are cut into.
        local_layers: Which layers are local; None for all.
        cross_attention: Whether layers also read a context, such as the states of an encoder,
            between attention and MLP.
        in_scale: Multiplies what attention reads.
        out_scale: Multiplies what attention returns.
        dropout: Rate of dropout on the weights, while training.

    Raises:
        LayerConfigError: If sizes are not positive, heads do not divide, or latent attention has
            no such option.

    Example:
        >>> import shardax as sx
        >>> attention = sx.models.AttentionConfig(num_heads=8, window=16, qk_norm="head")
        >>> config = sx.models.TransformerConfig(num_layers=1, attention=attention)
        >>> sx.models.Transformer(config, rngs=sx.Rngs(0)).layers[0].attn.window
        16
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    latent: LatentConfig | None = None
    qkv_bias: bool = False
    key_bias: bool = True
    out_bias: bool = False
    qk_norm: str | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    gate: bool = False
    rope: Rope | None = PLAIN_ROPE
    local_rope: Rope | None = None
    rope_layers: tuple[bool, ...] | None = None
    query_growth: tuple[float, float] | None = None
    window: int | None = None
    chunked: bool = False
    local_layers: tuple[bool, ...] | None = None
    cross_attention: bool = False
    in_scale: float = 1.0
    out_scale: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        where = type(self).__name__
        options = Options(LayerConfigError, where)
        check_parts(options, self)
        for name in ("rope", "local_rope"):
            rope = getattr(self, name)
            options.instance(name, rope, (Rope, type(None)), "an object of sx.models.Rope, or None")

        # A rope that turns whole heads splits them into halves.
        is_whole = self.rope is not None and self.rope.fraction == 1 and self.latent is None
        base = self.rope.base if is_whole and self.rope is not None else None
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        attention_sizes(self.head_dim, *heads, base)

        if self.rope is not None:
            options.check("rope.base", self.rope.base, self.rope.base > 0, "positive")
        options.check("qk_norm", self.qk_norm, self.qk_norm in QK_NORMS, "a kind")
        if self.window is not None:
            as_size(where, "window", self.window)
        check_rate(options, "dropout", self.dropout)
        if self.latent is not None:
            self._check_latent(options, self.latent)

    def _check_latent(self, options: Options, latent: LatentConfig) -> None:
        """Raises for options of plain attention alone."""
        fits = latent.rope_dim < self.head_dim
        options.check("latent.rope_dim", latent.rope_dim, fits, f"below head_dim={self.head_dim}")
        options.check("rope", self.rope, self.rope is not None, "a Rope, with latent")
        fits = self.num_kv_heads == self.num_heads
        options.check("num_kv_heads", self.num_kv_heads, fits, f"{self.num_heads}, with latent")
        plain: dict[str, Any] = {"softcap": None, "qk_norm": None, "out_bias": self.qkv_bias}
        plain |= {"local_rope": None, "rope_layers": None, "sinks": False, "gate": False}
        plain |= {"chunked": False, "query_growth": None, "key_bias": True}
        require_values(options, self, plain, "latent")

    def is_local(self, index: int) -> bool:
        """Returns whether a layer has a window.

        Args:
            index: Which layer.

        Returns:
            Whether it has.
        """
        return self.window is not None and (self.local_layers is None or self.local_layers[index])

    def has_rope(self, index: int) -> bool:
        """Returns whether a layer has a rotary embedding.

        Args:
            index: Which layer.

        Returns:
            Whether it has.
        """
        return self.rope is not None and (self.rope_layers is None or self.rope_layers[index])
