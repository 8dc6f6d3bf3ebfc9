# SPDX-License-Identifier: Apache-2.0
"""Decoder language model: tokens in, logits of the next token out.

For tokens of shape (batch, time):

    x = embedding[tokens]                                     (batch, time, embed)
    for each layer:
        x = x + attention(rms_norm(x))                        causal, grouped queries, rotary
        x = x + mlp(rms_norm(x))                              gated by silu
    logits = rms_norm(x) @ head                               (batch, time, vocab)

without biases. A tied head is the transposed embedding. The same mathematics by hand, without any
library, is in ``benchmarks/raw_decoder.py``; both compile to the same program. With scanned layers
(``shardax.nn.Stack``) the program is that of one layer in a loop, and compiles in a time that does
not grow with depth; parameters and results are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardax import Rngs, Rules
from shardax.extend import Options
from shardax.models.config.attention import AttentionConfig
from shardax.models.config.checks import check_rate, use_names
from shardax.models.config.feed_forward import MLPConfig
from shardax.models.config.norms import NormConfig
from shardax.models.config.outputs import OutputConfig
from shardax.models.config.transformer import TransformerConfig
from shardax.models.layers.transformer_layer import TransformerLayer
from shardax.models.transformer import Transformer
from shardax.nn.attention.multi_head import attention_sizes
from shardax.nn.errors import LayerConfigError
from shardax.nn.parameters import as_size, check_epsilon
from shardax.nn.rope import Rope
from shardax.nn.stack import Policy

DECODER_RULES = Rules(
    [
        ("batch", "data"),
        ("seq", None),
        ("vocab", "model"),
        ("heads", "model"),
        ("kv_heads", "model"),
        ("mlp", "model"),
        ("embed", None),
        ("head_dim", None),
        ("layers", None),
    ]
)
"""Data parallel over the mesh axis ``data``, tensor parallel over ``model``.

Heads, kv heads, hidden and vocabulary sizes must be divisible by the size of ``model``. For fewer
kv heads than that, keep them whole: ``DECODER_RULES.override({"kv_heads": None})``.
"""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and dtypes of a decoder, by default small enough for tests.

    Attributes:
        vocab_size: Number of tokens.
        num_layers: Number of layers, each attention and MLP.
        embed_dim: Size of a token's vector.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads``.
        head_dim: Size of a head, even.
        mlp_dim: Size of the MLP's hidden layer.
        tied_head: Whether the head is the transposed embedding.
        dropout: Rate of dropout on what each attention and MLP adds, while training.
        rope_base: Base of the rotary position embedding.
        norm_epsilon: Added to mean squares before dividing by their root.
        scan_layers: Whether the layers are stored stacked and run by a loop.
        remat: What of a layer the backward pass computes anew: None for nothing, ``"full"``, or the
            name of one of ``jax.checkpoint_policies``, such as ``"dots_saveable"``. Or where values
            are kept by name, ``{"attention": "device", "layer_input": "pinned_host"}``: in the
            device's memory or the host's. The names are ``layer_input``, ``attention`` and ``mlp``
            (what these two return); what is not named is computed anew.
        dtype: Compute dtype, by name; that of the logits.
        param_dtype: Parameter dtype, by name.

    Raises:
        LayerConfigError: If sizes are not positive or do not fit together.

    Example:
        >>> DecoderConfig(num_layers=1, dtype="bfloat16").dtype
        'bfloat16'
    """

    vocab_size: int = 256
    num_layers: int = 2
    embed_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    mlp_dim: int = 192
    tied_head: bool = False
    dropout: float = 0.0
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    scan_layers: bool = False
    remat: Policy = None
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("vocab_size", "num_layers", "mlp_dim"):
            as_size(where, name, getattr(self, name))
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        attention_sizes(self.embed_dim, *heads, self.rope_base)
        options = Options(LayerConfigError, where)
        check_rate(options, "dropout", self.dropout)
        options.check("rope_base", self.rope_base, self.rope_base > 0, "positive")
        check_epsilon(where, self.norm_epsilon, "norm_epsilon")
        use_names(self)

    @property
    def transformer(self) -> TransformerConfig:
        """The config of the ``Transformer``."""
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)

        return TransformerConfig(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            attention=AttentionConfig(*heads, rope=Rope(self.rope_base)),
            mlp=MLPConfig(self.mlp_dim),
            norms=NormConfig(epsilon=self.norm_epsilon),
            output=OutputConfig(tied=self.tied_head),
            dropout=self.dropout,
            scan_layers=self.scan_layers,
            remat=self.remat,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )


class DecoderLayer(TransformerLayer):
    """Attention and MLP, each on a normalised input and added to it.

    Where rules in scope map ``batch`` or ``seq``, its result is constrained to the layout of
    ``("batch", "seq", "embed")``.

    Args:
        config: The decoder's sizes.
        rngs: Random streams; ``params`` is used, and ``dropout`` if the config asks for it.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = DecoderLayer(DecoderConfig(), rngs=sx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 64))).shape
        (2, 8, 64)
    """

    def __init__(self, config: DecoderConfig, *, rngs: Rngs) -> None:
        super().__init__(config.transformer, rngs=rngs)


class Decoder(Transformer):
    """A decoder language model.

    Its parameters are lazy: building it runs no JAX operation, and ``sx.shard(model, mesh,
    DECODER_RULES)`` makes them where they belong. It runs on meshes with Auto and with Explicit
    axes. Where rules in scope map ``batch`` or ``seq``, activations between layers are constrained
    to the layout of ``("batch", "seq", "embed")``.

    Args:
        config: Sizes and dtypes.
        rngs: Random streams; ``params`` is used, and ``dropout`` if the config asks for it.

    Attributes:
        embed: The ``Embed``.
        layers: The layers, each a ``DecoderLayer``: a list, or a ``Stack`` of them.
        final_norm: The ``RMSNorm`` before the head.
        head: ``Linear`` from embed to vocabulary, or None if tied.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> model = sx.models.Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))
        >>> model(jnp.zeros((2, 8), int)).shape
        (2, 8, 256)
    """

    def __init__(self, config: DecoderConfig, *, rngs: Rngs) -> None:
        super().__init__(config, rngs=rngs)

    def _make_layer(self, index: int, rngs: Rngs):
        return DecoderLayer(self.config, rngs=rngs)
