# SPDX-License-Identifier: Apache-2.0
"""The decoder of `raw_decoder` written with Flax NNX's own layers, as one of its users would.

Opponent for trace time and for sharded initialisation. Axis names are NNX's `out_sharding`
metadata, mapped to mesh axes by `nnx.logical_axis_rules`; NNX takes a name without a rule for a
mesh axis, so the rules must map every name.

    >>> from flax import nnx
    >>> with nnx.use_eager_sharding(False):  # no mesh here to lay the variables over
    ...     model = Decoder(raw_decoder.Config(layers=1), nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8), "int32")).shape
    (2, 8, 256)
"""

from typing import Any

import jax
import jax.numpy as jnp
import raw_decoder
from flax import nnx


def _named(*names: str) -> dict[str, Any]:
    """NNX metadata that names the axes of a parameter."""
    return {"out_sharding": names}


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary embedding."""

    def __init__(self, config: raw_decoder.Config, rngs: nnx.Rngs) -> None:
        def project(heads: int, name: str) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                config.embed,
                (heads, config.head_dim),
                use_bias=False,
                dtype=jnp.dtype(config.dtype),
                param_dtype=jnp.dtype(config.param_dtype),
                kernel_metadata=_named("embed", name, "head_dim"),
                rngs=rngs,
            )

        self.q = project(config.heads, "heads")
        self.k = project(config.kv_heads, "kv_heads")
        self.v = project(config.kv_heads, "kv_heads")
        self.out = nnx.LinearGeneral(
            (config.heads, config.head_dim),
            config.embed,
            axis=(-2, -1),
            use_bias=False,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            kernel_metadata=_named("heads", "head_dim", "embed"),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
        q = raw_decoder.rotate(self.q(x), turn)
        k = raw_decoder.rotate(self.k(x), turn)
        return self.out(jax.nn.dot_product_attention(q, k, self.v(x), is_causal=True))


class MLP(nnx.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: raw_decoder.Config, rngs: nnx.Rngs) -> None:
        def project(inputs: int, outputs: int, *names: str) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=False,
                dtype=jnp.dtype(config.dtype),
                param_dtype=jnp.dtype(config.param_dtype),
                kernel_metadata=_named(*names),
                rngs=rngs,
            )

        self.gate = project(config.embed, config.mlp, "embed", "mlp")
        self.up = project(config.embed, config.mlp, "embed", "mlp")
        self.down = project(config.mlp, config.embed, "mlp", "embed")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def _norm(config: raw_decoder.Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Root-mean-square normalisation over the embedding."""
    return nnx.RMSNorm(
        config.embed,
        epsilon=raw_decoder.NORM_EPSILON,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        scale_metadata=_named("embed"),
        rngs=rngs,
    )


class Block(nnx.Module):
    """One residual layer: attention, then feed-forward."""

    def __init__(self, config: raw_decoder.Config, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """The decoder language model of `raw_decoder`."""

    def __init__(self, config: raw_decoder.Config, rngs: nnx.Rngs) -> None:
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        self.head_dim = config.head_dim
        self.embedding = nnx.Embed(
            config.vocab,
            config.embed,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_metadata=_named("vocab", "embed"),
            rngs=rngs,
        )
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.final_norm = _norm(config, rngs)
        head = None
        if not config.tied:
            head = nnx.Linear(
                config.embed,
                config.vocab,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_metadata=_named("embed", "vocab"),
                rngs=rngs,
            )
        self.head = nnx.data(head)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        turn = raw_decoder.rotation(positions, self.head_dim)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        x = self.final_norm(x)
        return self.embedding.attend(x) if self.head is None else self.head(x)
