# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention over latent vectors, and its compressed cache.

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
2024, section 2.1. Of a position only a latent and one rotated key are kept, for all heads together:

    latent = norm(down(x))                                (latent_dim)
    key    = [up_key(latent) of each head, rotated key of all heads]
    value  = up_value(latent) of each head

Where few queries read a long cache, keys and values are not made at all: the query goes through the
transposed ``up_key`` and meets the latents themselves, and what is read goes through ``up_value``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Cache, Init, Rngs
from shardax._parallel.ring_attention import ring_axes
from shardax.extend import ScopeSettings, gathered
from shardax.nn.arithmetic import as_array, at_least_float32, einsum
from shardax.nn.attention.cache import AttentionCache
from shardax.nn.attention.dot_product import repeat_heads
from shardax.nn.attention.multi_head import MultiHeadAttention, QueryKeyValue
from shardax.nn.errors import LayerConfigError
from shardax.nn.linear import Linear
from shardax.nn.masks import as_mask
from shardax.nn.normalization import RMSNorm
from shardax.nn.parameters import Initializer, as_axes, as_size, refuse_input
from shardax.nn.rope import Rope, Rotation, rotate


class MultiHeadLatentAttention(MultiHeadAttention):
    """Attention whose keys and values are made of one latent per position.

    Args:
        features: Size of the last dimension of input and output.
        num_heads: Number of heads.
        head_dim: Size of a head of queries and keys.
        rope_dim: How many of them, the last ones, are rotated; even. Those of the key are the same
            for all heads.
        value_dim: Size of a head of values.
        latent_dim: Size of the latent that keys and values are made of.
        query_latent_dim: Size of a latent that the queries are made of; None for none.
        rope: The rotary position embedding; None for ``Rope()``.
        causal: As for ``MultiHeadAttention``.
        window: As for ``MultiHeadAttention``.
        use_bias: Whether the projections to the latents and that of the result have biases.
        scale: Factor of the scores; None for ``head_dim ** -0.5``.
        norm_epsilon: That of the norms of the latents.
        dropout: As for ``MultiHeadAttention``.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernels; None for LeCun normal.
        axes: Axis names of features, heads, head dimension and latents.
        rngs: Random streams; ``params`` is used, and ``dropout`` where weights are dropped.

    Attributes:
        q: ``Linear`` with a kernel of shape (features, num_heads, head_dim); not there with a
            latent of queries.
        q_down: ``Linear`` with a kernel of shape (features, query_latent_dim); only there with it.
        q_latent_norm: Norm of the latent of queries; only there with it.
        q_up: ``Linear`` with a kernel of shape (query_latent_dim, num_heads, head_dim); only there
            with it.
        kv_down: ``Linear`` with a kernel of shape (features, latent_dim + rope_dim).
        latent_norm: Norm of the latent.
        kv_up: ``Linear`` with a kernel of shape (latent_dim, num_heads, head_dim - rope_dim +
            value_dim): keys, then values.
        out: ``Linear`` with a kernel of shape (num_heads, value_dim, features).

    Raises:
        LayerConfigError: If a size is not positive, or ``rope_dim`` is odd or above ``head_dim``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> attention = sx.nn.MultiHeadLatentAttention(
        ...     16, 4, head_dim=6, rope_dim=2, value_dim=4, latent_dim=8, causal=True,
        ...     rngs=sx.Rngs(0))
        >>> cache = sx.nn.LatentCache(2, 5, latent_dim=8, rope_dim=2)
        >>> attention(jnp.ones((2, 5, 16)), cache=cache).shape, cache.value.shape
        ((2, 5, 16), (2, 5, 1, 8))
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        head_dim: int,
        rope_dim: int,
        value_dim: int,
        latent_dim: int,
        query_latent_dim: int | None = None,
        rope: Rope | None = None,
        causal: bool = False,
        window: int | None = None,
        use_bias: bool = False,
        scale: float | None = None,
        norm_epsilon: float = 1e-6,
        dropout: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        axes: Sequence[str | None] = ("embed", "heads", "head_dim", "latent"),
        rngs: Rngs | None,
    ) -> None:
        name = type(self).__name__
        embed, heads, head, latent = as_axes(name, "axis names", axes, 4)
        self.rope_dim = as_size(name, "rope_dim", rope_dim)
        self.value_dim = as_size(name, "value_dim", value_dim)
        self.latent_dim = as_size(name, "latent_dim", latent_dim)
        if self.rope_dim % 2 or self.rope_dim >= head_dim:
            raise LayerConfigError(
                f"{name} rotates an even part of a head and leaves another as it is, but was given "
                f"rope_dim={rope_dim} of head_dim={head_dim}."
            )
        layer: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        layer["kernel_init"] = kernel_init
        super().__init__(
            features,
            num_heads,
            head_dim=head_dim,
            causal=causal,
            window=window,
            scale=head_dim**-0.5 if scale is None else scale,
            dropout=dropout,
            axes=(embed, heads, heads, head),
            **layer,
        )
        self._take_rope(None, Rope() if rope is None else rope)
        del self.k, self.v

        norm = partial(
            RMSNorm, epsilon=norm_epsilon, dtype=dtype, param_dtype=param_dtype, axes=(latent,)
        )
        down: dict[str, Any] = {"use_bias": use_bias, "kernel_axes": (embed, latent), **layer}
        up: dict[str, Any] = {"use_bias": False, "kernel_axes": (latent, heads, head), **layer}
        if query_latent_dim is not None:
            del self.q
            size = as_size(name, "query_latent_dim", query_latent_dim)
            self.q_down, self.q_latent_norm = Linear(features, size, **down), norm(size)
            self.q_up = Linear(size, (num_heads, head_dim), **up)
        self.kv_down = Linear(features, self.latent_dim + self.rope_dim, **down)
        self.latent_norm = norm(self.latent_dim)
        made = head_dim - self.rope_dim + self.value_dim
        self.kv_up = Linear(self.latent_dim, (num_heads, made), **up)
        outputs = (num_heads, self.value_dim)
        names = (heads, head, embed)
        self.out = Linear(outputs, features, use_bias=use_bias, kernel_axes=names, **layer)

    def project(
        self, x: jax.Array, context: Any = None, positions: Any = None, others: Any = None
    ) -> QueryKeyValue:
        """Computes queries and latents with positions; first half of a call.

        Args:
            x: As for calling.
            context: As for calling.
            positions: As for calling.
            others: ``context_positions`` for calling.

        Returns:
            The queries; as key the rotated one of all heads, (..., other time, 1, rope_dim); as
            value the latent, (..., other time, 1, latent_dim).
        """
        if any(x is not None for x in (self.query_norm, self.key_norm, self.query_growth)):
            raise LayerConfigError(
                "MultiHeadLatentAttention has norms of its latents, and none of heads, but was "
                "given a query_norm, key_norm or query_growth. Set them to None."
            )

        source = x if context is None else context
        has_latent = hasattr(self, "q_down")
        query = self.q_up(self.q_latent_norm(self.q_down(x))) if has_latent else self.q(x)

        latent, rotated = _parts(self.kv_down(source), self.latent_dim)
        latent = self.latent_norm(latent).astype(query.dtype)

        plain, turned = _parts(query, self._plain_dim)
        rotation = self._rotation(x, positions)
        interleaved = self._rope().interleaved
        turned = rotate(turned, rotation, interleaved=interleaved)

        rotation = rotation if context is None else self._rotation(source, others)
        key = rotate(rotated[..., None, :], rotation, interleaved=interleaved)
        query = jnp.concatenate([plain, turned], axis=-1)
        return QueryKeyValue(query, key, latent[..., None, :])

    def attend(
        self,
        qkv: QueryKeyValue,
        mask: Any = None,
        *,
        segment_ids: tuple[jax.Array, jax.Array] | None = None,
        bias: Any = None,
        ordered: bool = True,
    ) -> jax.Array:
        """Weighs the values of the latents; second half of a call.

        Args:
            qkv: What ``project`` returned.
            mask: As for calling.
            segment_ids: As for ``MultiHeadAttention.attend``.
            bias: As for calling.
            ordered: As for ``MultiHeadAttention.attend``.

        Returns:
            Shape (..., time, num_heads, value_dim).
        """
        query, rotated, latent = qkv
        mask = None if mask is None else as_mask("MultiHeadLatentAttention", mask)
        is_masked = mask is not None and segment_ids is None and bias is None and not ordered
        is_plain = is_masked and query.ndim == 4 and self._is_plain()
        if is_plain and self._reads_latents(query.shape[-3], latent.shape[-3]):
            return self._attend_latents(query, rotated, latent[..., 0, :], mask)

        made = self.kv_up(latent[..., 0, :])
        plain, value = _parts(made, self._plain_dim)
        rotated = gathered(rotated, -1)  # that of a cache may be split
        key = jnp.concatenate([plain, repeat_heads(plain, rotated)], axis=-1)
        qkv = QueryKeyValue(query, key, value)
        if ordered and ring_axes(query):  # a ring sends keys and values of one size
            size = max(self.head_dim, self.value_dim)
            qkv = QueryKeyValue(*(_widened(heads, size) for heads in qkv))

        options: dict[str, Any] = {"segment_ids": segment_ids, "bias": bias, "ordered": ordered}
        return super().attend(qkv, mask, **options)[..., : self.value_dim]

    @property
    def _plain_dim(self) -> int:
        """Size of the part of a head that is not rotated."""
        return self.head_dim - self.rope_dim

    def _rotation(self, x: jax.Array, positions: Any) -> Rotation:
        if isinstance(positions, Rotation):
            return positions
        if positions is None:
            positions = jnp.arange(x.shape[-2], dtype=jnp.int32)
        return self._rope().rotation(as_array(positions), self.rope_dim)

    def _is_plain(self) -> bool:
        """Whether nothing is set that the latents are not read with."""
        # An adapter around the projection, or a bias of it, is no part of its kernel.
        is_linear = type(self.kv_up) is Linear and self.kv_up.bias is None
        options = (self.attention_fn, self.softcap, self.sinks)
        options += (self.precision, self.kv_up.precision)
        kernel = self.implementation or ScopeSettings.current().attention
        return is_linear and options == (None,) * 5 and kernel in (None, "auto", "xla")

    def _reads_latents(self, time: int, length: int) -> bool:
        """Whether reading latents is less work than making keys and values."""
        sizes = self._plain_dim + self.value_dim
        read = time * length * (2 * self.latent_dim + self.rope_dim)
        made = time * length * (sizes + self.rope_dim)
        return read + time * self.latent_dim * sizes < made + length * self.latent_dim * sizes

    def _attend_latents(self, query, rotated, latent, mask) -> jax.Array:
        """Reads the latents themselves."""
        kernel = self.kv_up.kernel.value.astype(query.dtype)
        to_key, to_value = _parts(kernel, self._plain_dim)
        plain, turned = _parts(query, self._plain_dim)
        plain = einsum("bthd,rhd->bthr", plain, to_key)

        wide = {"preferred_element_type": at_least_float32(query.dtype)}
        scores = einsum("bthr,bsr->bhts", plain, latent, **wide)
        scores += einsum("bthd,bsd->bhts", turned, rotated[..., 0, :], **wide)

        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scores = scores * jnp.asarray(scale, scores.dtype)
        scores = jnp.where(mask, scores, -0.7 * jnp.finfo(scores.dtype).max)

        weights = self.softmax(scores)
        weights = weights if self.dropout is None else self.dropout(weights)

        read = einsum("bhts,bsr->bthr", weights.astype(query.dtype), latent)
        return einsum("bthr,rhd->bthd", read, to_value)


class LatentCache(AttentionCache):
    """Latents and rotated keys of one latent attention, kept between calls.

    A slot holds ``latent_dim + rope_dim`` numbers for all heads together.

    Args:
        batch: How many rows.
        length: How many slots each row has.
        latent_dim: Size of a latent.
        rope_dim: Size of the rotated key.
        dtype: Dtype of both, a floating one.
        num_layers: Size of a leading dimension, for the layers of a ``Stack``; None for one layer.
        axis_name: Name of that dimension; that of the ``Stack``.

    Attributes:
        key: ``Cache`` of shape (batch, length, 1, rope_dim): the rotated keys.
        value: ``Cache`` of shape (batch, length, 1, latent_dim): the latents.
        position: As of ``AttentionCache``.
        count: As of ``AttentionCache``.

    Raises:
        LayerConfigError: If a size is not positive, or for a dtype of integers.

    Example:
        >>> import shardax as sx
        >>> cache = sx.nn.LatentCache(2, 16, latent_dim=8, rope_dim=2)
        >>> cache.key.shape, cache.value.shape
        ((2, 16, 1, 2), (2, 16, 1, 8))
    """

    def __init__(
        self,
        batch: int,
        length: int,
        latent_dim: int,
        rope_dim: int,
        *,
        dtype: Any = np.float32,
        num_layers: int | None = None,
        axis_name: str = "layers",
    ) -> None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise LayerConfigError(
                f"LatentCache has dtype={jnp.dtype(dtype)}, but it must be a floating dtype: a "
                f"latent is read by all heads, and has one scale for them together."
            )
        options: dict[str, Any] = {"dtype": dtype, "num_layers": num_layers}
        super().__init__(batch, length, 1, rope_dim, axis_name=axis_name, **options)
        leading = () if num_layers is None else (num_layers,)
        names = (*(axis_name,) * len(leading), "batch", "cache", None)

        def zeros(size: int, axis: str) -> Cache[Any]:
            shape = (*leading, batch, length, 1, size)
            init = Init(jax.nn.initializers.zeros, shape, dtype, rngs=None)
            return Cache(init, axes=(*names, axis))

        self.key = zeros(rope_dim, "head_dim")
        self.value = zeros(as_size("LatentCache", "latent_dim", latent_dim), "latent")

    def check(self, attention: MultiHeadAttention, batch: int) -> None:
        """Raises if it does not fit an attention and its rows.

        Args:
            attention: The attention.
            batch: Rows of its input.
        """
        sizes = (batch, self.length, getattr(attention, "latent_dim", 0))
        sizes = (*sizes, getattr(attention, "rope_dim", 0))
        shape = (*self.value.shape[:2], self.value.shape[-1], self.key.shape[-1])
        if shape != sizes:
            refuse_input(
                type(attention).__name__,
                f"a LatentCache with latents of shape {(*sizes[:2], 1, sizes[2])}",
                self.value,
                f"Make it with nn.LatentCache{sizes}, one for each layer.",
            )


def _parts(x: jax.Array, size: int) -> list[jax.Array]:
    """Cuts the last dimension in two behind a size."""
    # Over Explicit mesh axes it is gathered: where devices hold equal parts of the whole, they do
    # not of its parts.
    return jnp.split(gathered(x, -1), [size], axis=-1)


def _widened(heads: jax.Array, size: int) -> jax.Array:
    """Returns heads with zeros behind them, up to a size."""
    return jnp.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, size - heads.shape[-1])])
