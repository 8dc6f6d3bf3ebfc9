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

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax._transforms.errors import LayerConfigError
from shardax.nn.attention import MultiHeadAttention, Rotation, attention_sizes, rotation
from shardax.nn.dropout import Dropout
from shardax.nn.embedding import Embed
from shardax.nn.linear import Linear, as_array
from shardax.nn.mlp import MLP
from shardax.nn.normalization import RMSNorm
from shardax.nn.parameters import as_size, refuse_input
from shardax.nn.stack import Stack, check_policy, rematerialised
from shardax.partition.constraints import constrain
from shardax.partition.context import current_rules
from shardax.partition.mesh import resolve_mesh
from shardax.partition.rules import UNCONSTRAINED, Rules, mesh_axes_of

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
            name of one of ``jax.checkpoint_policies``, such as ``"dots_saveable"``.
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
    remat: str | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "mlp_dim"):
            as_size("DecoderConfig", name, getattr(self, name))
        attention_sizes(
            self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim, self.rope_base
        )
        _check("dropout", self.dropout, 0 <= self.dropout < 1, "from 0 up to, but not, 1")
        _check("rope_base", self.rope_base, self.rope_base > 0, "positive")
        _check("norm_epsilon", self.norm_epsilon, self.norm_epsilon >= 0, "at least 0")
        named = self.remat is None or isinstance(self.remat, str)
        _check("remat", self.remat, named, "None or the name of a policy")
        check_policy("DecoderConfig", self.remat)
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, _dtype_name(name, getattr(self, name)))


def _check(name: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise LayerConfigError(f"DecoderConfig needs {name} to be {wanted}, but {name}={value!r}.")


def _dtype_name(name: str, dtype: Any) -> str:
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise LayerConfigError(f"DecoderConfig has {name}={dtype!r}, not a dtype.") from error
    if not jnp.issubdtype(found, jnp.floating):
        raise LayerConfigError(
            f"DecoderConfig has {name}={dtype!r}, but a decoder computes with floating dtypes, "
            f"such as 'float32' or 'bfloat16'."
        )
    return found.name


class DecoderLayer(Module):
    """Attention and MLP, each on a normalised input and added to it.

    Where rules in scope map ``batch``, its result is constrained to the layout of
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
        self.attn_norm = _norm(config)
        self.attn = MultiHeadAttention(
            config.embed_dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            causal=True,
            rope_base=config.rope_base,
            rngs=rngs,
            **_dtypes(config),
        )
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config.embed_dim, config.mlp_dim, rngs=rngs, **_dtypes(config))
        self.dropout = Dropout(config.dropout, rngs=rngs) if config.dropout else None

    def __call__(self, x: jax.Array, *, positions: Any = None) -> jax.Array:
        """Runs the layer.

        Args:
            x: Shape (batch, time, embed).
            positions: Integers of shape (time,) or (batch, time), or their ``Rotation``; None
                counts from 0.

        Returns:
            The same shape.
        """
        x = x + self._dropped(self.attn(self.attn_norm(x), positions=positions))
        return _constrain(x + self._dropped(self.mlp(self.mlp_norm(x))))

    def _dropped(self, x: jax.Array) -> jax.Array:
        return x if self.dropout is None else self.dropout(x)


class Decoder(Module):
    """A decoder language model.

    Its parameters are lazy: building it runs no JAX operation, and ``sx.shard(model, mesh,
    DECODER_RULES)`` makes them where they belong. It runs on meshes with Auto and with Explicit
    axes. Where rules in scope map ``batch``, activations between layers are constrained to the
    layout of ``("batch", "seq", "embed")``.

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
        dtypes = _dtypes(config)
        self.config = config
        self.embed = Embed(config.vocab_size, config.embed_dim, rngs=rngs, **dtypes)
        self.layers = (
            Stack(lambda: DecoderLayer(config, rngs=rngs), config.num_layers, remat=config.remat)
            if config.scan_layers
            else [DecoderLayer(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.final_norm = _norm(config)
        self.head = None
        if not config.tied_head:
            sizes, names = (config.embed_dim, config.vocab_size), ("embed", "vocab")
            self.head = Linear(*sizes, use_bias=False, kernel_axes=names, rngs=rngs, **dtypes)

    def __call__(self, tokens: Any, *, positions: Any = None) -> jax.Array:
        """Predicts the token after each.

        Args:
            tokens: Integers of shape (batch, time), or (time,).
            positions: Integers of shape (time,) or (batch, time); None counts from 0.

        Returns:
            Logits of shape (batch, time, vocab_size), in the compute dtype.

        Raises:
            LayerInputError: If the tokens are not integers of that rank.
        """
        tokens = as_array(tokens)
        if tokens.ndim not in (1, 2):
            refuse_input("Decoder", "tokens of shape (batch, time) or (time,)", tokens, "")
        turned = self._rotation(tokens, positions)
        x = _constrain(self.embed(tokens))
        if callable(self.layers):  # a stack
            x = self.layers(x, positions=turned)
        else:
            for layer in self.layers:
                x = rematerialised(layer, self.config.remat)(x, positions=turned)
        x = self.final_norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)

    def _rotation(self, tokens: jax.Array, positions: Any) -> Rotation:
        """Returns the rotation of every position, computed once for all layers."""
        if positions is None:
            positions = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
        return rotation(as_array(positions), self.config.head_dim, self.config.rope_base)


def _dtypes(config: DecoderConfig) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, **_dtypes(config))


def _constrain(x: jax.Array) -> jax.Array:
    """Lays activations out by rules in scope that map the batch."""
    # Rules about parameters alone leave activations to the compiler. So does a dimension that the
    # mesh does not divide, such as the batch of one while sampling.
    rules = current_rules()
    mesh = resolve_mesh() if "batch" in rules.names else None
    if mesh is None:
        return x
    names = ("batch", "seq", "embed")[-x.ndim :]
    parts = [
        math.prod(mesh.shape.get(axis, 1) for axis in mesh_axes_of(entry))
        for entry in rules.spec(names)
    ]
    kept = [
        name if size % count == 0 else UNCONSTRAINED
        for name, size, count in zip(names, x.shape, parts, strict=True)
    ]
    return constrain(x, kept, mesh)
