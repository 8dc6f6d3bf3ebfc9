# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention and rotary position embedding.

Vaswani et al., "Attention Is All You Need", 2017. Grouped-query attention (Ainslie et al., 2023)
has fewer heads of keys and values than heads of queries; consecutive query heads share one. The
weighting itself is ``jax.nn.dot_product_attention``, which picks the device's fused kernel where
there is one.

Rotary position embedding (Su et al., "RoFormer: Enhanced Transformer with Rotary Position
Embedding", 2021) in the half-split form: the first half of a head is the real part and the second
half the imaginary part of ``head_dim / 2`` complex numbers. The i-th is turned by the angle
``position * base ** (-2 * i / head_dim)``, so that the product of a query and a key depends on the
difference of their positions alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.init.lazy import Initializer
from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax._transforms.errors import LayerConfigError
from shardax.nn.linear import Linear, as_array, at_least_float32, explicit_entries
from shardax.nn.parameters import LayerInputError, as_axes, as_size, refuse_input, zeros


class Rotation(NamedTuple):
    """Cosine and sine of the angles of positions.

    Each is float32 of shape (batch or 1, time, 1, head_dim / 2); the 1 before the last dimension is
    for the heads.

    Example:
        >>> import jax.numpy as jnp
        >>> rotation(jnp.arange(8), 16).cosine.shape
        (1, 8, 1, 8)
    """

    cosine: jax.Array
    sine: jax.Array


def rotation(positions: jax.Array, head_dim: int, base: float = 10_000.0) -> Rotation:
    """Computes the rotations of positions.

    Args:
        positions: Integers of shape (time,) or (batch, time).
        head_dim: Size of a head, even.
        base: Sets the longest wavelength, ``2 * pi * base`` positions nearly.

    Returns:
        The rotation of each position.

    Raises:
        LayerConfigError: If ``head_dim`` is odd.
        LayerInputError: If the positions have another rank.

    Example:
        >>> rotation(jnp.arange(5), head_dim=8).cosine.shape
        (1, 5, 1, 4)
    """
    check_head_dim("Rotary position embedding", head_dim)
    if positions.ndim not in (1, 2):
        raise LayerInputError(
            f"Rotary position embedding takes positions of shape (time,) or (batch, time), but was "
            f"given {positions.dtype}{list(positions.shape)}."
        )
    half = head_dim // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    new = (0, 2, 3) if positions.ndim == 1 else (2, 3)
    spread = jax.lax.expand_dims(positions.astype(jnp.float32), new)
    angles = spread * jax.lax.expand_dims(frequencies, (0, 1, 2))
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Turns queries or keys, in float32.

    Args:
        x: Shape (batch, time, heads, head_dim), or without the batch.
        by: The rotations of the positions; those of a batch only with a batch.

    Returns:
        The shape and dtype of ``x``.

    Example:
        >>> x = jnp.ones((2, 5, 3, 8))
        >>> y = rotate(x, rotation(jnp.arange(5), head_dim=8))
        >>> y.shape, bool(jnp.allclose(y[:, 0], x[:, 0]))
        ((2, 5, 3, 8), True)
    """
    cosine, sine = by
    if x.ndim == 3:
        cosine, sine = jnp.squeeze(cosine, 0), jnp.squeeze(sine, 0)
    real, imaginary = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [real * cosine - imaginary * sine, imaginary * cosine + real * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def softmax(scores: jax.Array) -> jax.Array:
    """Returns the softmax over the last dimension, the weights of attention."""
    return jax.nn.softmax(scores, axis=-1)


def check_head_dim(layer: str, head_dim: int) -> None:
    """Raises if heads of this size cannot be split into halves."""
    if head_dim % 2:
        raise LayerConfigError(
            f"{layer} needs an even head_dim, to split heads into halves, but head_dim={head_dim}."
        )


class QueryKeyValue(NamedTuple):
    """Queries, keys and values of attention.

    Attributes:
        query: Shape (..., time, heads, head_dim).
        key: Shape (..., other time, kv heads, head_dim).
        value: The shape of ``key``.

    Example:
        >>> import jax.numpy as jnp
        >>> heads = jnp.zeros((8, 4, 16))
        >>> QueryKeyValue(heads, heads[:, :2], heads[:, :2]).key.shape
        (8, 2, 16)
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array


class MultiHeadAttention(Module):
    """Attention with several heads, to the sequence itself or to another.

    Args:
        features: Size of the last dimension of input and output.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads``; None for as many.
        head_dim: Size of a head; None for ``features / num_heads``.
        causal: Whether a position reads only from itself and earlier ones.
        rope_base: Base of the rotary position embedding (``shardax.nn.attention``); None for no
            positions.
        use_bias: Whether the four projections have biases.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernels; None for LeCun normal.
        bias_init: Initializer of the biases.
        axes: Axis names of features, heads, kv heads and head dimension.
        rngs: Random streams; ``params`` is used.

    Attributes:
        q: ``Linear`` with a kernel of shape (features, num_heads, head_dim).
        k: ``Linear`` with a kernel of shape (features, num_kv_heads, head_dim).
        v: Likewise.
        out: ``Linear`` with a kernel of shape (num_heads, head_dim, features).
        softmax: Function from scores of shape (..., heads, time, other time) to weights. With
            another than the default the scores are computed as an array of their own.

    Raises:
        LayerConfigError: If sizes are not positive or do not divide.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> attention = sx.nn.MultiHeadAttention(
        ...     16, 4, num_kv_heads=2, causal=True, rope_base=10_000.0, rngs=sx.Rngs(0))
        >>> attention(jnp.ones((2, 5, 16))).shape, attention.k.kernel.shape
        ((2, 5, 16), (16, 2, 4))
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        rope_base: float | None = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        axes: Sequence[str | None] = ("embed", "heads", "kv_heads", "head_dim"),
        rngs: Rngs | None,
    ) -> None:
        sizes = attention_sizes(features, num_heads, num_kv_heads, head_dim, rope_base)
        heads, kv_heads, head_dim = sizes
        embed, queries, keys, head = as_axes("MultiHeadAttention", "axis names", axes, 4)
        linear = functools.partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.q = linear(features, (heads, head_dim), kernel_axes=(embed, queries, head))
        self.k = linear(features, (kv_heads, head_dim), kernel_axes=(embed, keys, head))
        self.v = linear(features, (kv_heads, head_dim), kernel_axes=(embed, keys, head))
        self.out = linear((heads, head_dim), features, kernel_axes=(queries, head, embed))
        self.features, self.num_heads, self.num_kv_heads = features, heads, kv_heads
        self.head_dim = head_dim
        self.causal = bool(causal)
        self.rope_base = rope_base
        self.softmax: Callable[[jax.Array], jax.Array] = softmax

    def __call__(
        self,
        x: Any,
        context: Any = None,
        *,
        mask: Any = None,
        positions: Any = None,
        context_positions: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Attends.

        Args:
            x: Shape (batch, time, features), or (time, features): where queries come from.
            context: Shape (batch, other time, features): where keys and values come from; None for
                ``x``.
            mask: Booleans that broadcast to (batch, heads, time, other time): what may be read.
            positions: Integers of shape (time,) or (batch, time), for the rotary embedding; or
                their ``Rotation``, computed once for many layers. None counts from 0.
            context_positions: Likewise for ``context``.
            out_sharding: Sharding of the result over Explicit mesh axes; by default that of ``x``
                in all but the last dimension.

        Returns:
            The shape of ``x``, in the compute dtype.

        Raises:
            LayerInputError: If a shape or the mask's dtype does not fit.
        """
        x = as_array(x)
        self._check(x, "x")
        if context is not None:
            context = as_array(context)
            self._check(context, "context", x.ndim)
        if mask is not None:
            mask = _check_mask(as_array(mask), x.ndim)
        qkv = self.project(x, context, positions, context_positions)
        return self.out(self.attend(qkv, mask), out_sharding=out_sharding)

    def project(
        self, x: jax.Array, context: Any = None, positions: Any = None, others: Any = None
    ) -> QueryKeyValue:
        """Computes queries, keys and values with positions; first half of a call.

        Args:
            x: As for calling.
            context: As for calling.
            positions: As for calling.
            others: ``context_positions`` for calling.

        Returns:
            Queries, keys and values.
        """
        source = x if context is None else context
        query, key, value = self.q(x), self.k(source), self.v(source)
        if self.rope_base is None:
            return QueryKeyValue(query, key, value)
        turned = self._rotation(x, positions)
        other = turned if context is None else self._rotation(source, others)
        return QueryKeyValue(rotate(query, turned), rotate(key, other), value)

    def attend(self, qkv: QueryKeyValue, mask: Any = None) -> jax.Array:
        """Weighs the values; second half of a call, before the output projection.

        Args:
            qkv: Queries, keys and values.
            mask: As for calling.

        Returns:
            The shape of the queries.
        """
        query, key, value = qkv
        key, value = _meet_heads(query, key), _meet_heads(query, value)
        if self.softmax is softmax:
            return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=self.causal)
        if key.shape[-2] < query.shape[-2]:
            key, value = _repeat_heads(query, key), _repeat_heads(query, value)
        scores = jnp.einsum(
            "...tnh,...snh->...nts",
            query,
            key,
            preferred_element_type=at_least_float32(query.dtype),
        ) / math.sqrt(self.head_dim)
        if self.causal:
            earlier = jnp.tri(*scores.shape[-2:], dtype=bool)
            earlier = jnp.expand_dims(earlier, tuple(range(scores.ndim - 2)))
            mask = earlier if mask is None else mask & earlier
        if mask is not None:  # what may not be read has the weight 0, as in jax.nn
            scores = jnp.where(mask, scores, -0.7 * jnp.finfo(scores.dtype).max)
        weights = self.softmax(scores).astype(value.dtype)
        return jnp.einsum("...nts,...snh->...tnh", weights, value)

    def _rotation(self, x: jax.Array, positions: Any) -> Rotation:
        if isinstance(positions, Rotation):
            return positions
        base = 10_000.0 if self.rope_base is None else self.rope_base
        if positions is None:
            positions = jnp.arange(x.shape[-2], dtype=jnp.int32)
        return rotation(as_array(positions), self.head_dim, base)

    def _check(self, x: jax.Array, name: str, ndim: int | None = None) -> None:
        ranks = (2, 3) if ndim is None else (ndim,)
        if x.ndim not in ranks or x.shape[-1] != self.features:
            shapes = {2: f"(time, {self.features})", 3: f"(batch, time, {self.features})"}
            refuse_input(
                f"MultiHeadAttention({self.features}, {self.num_heads})",
                f"{name} of shape {' or '.join(shapes[rank] for rank in ranks)}",
                x,
                "Reshape further batch dimensions into one, or use vmap.",
            )


def attention_sizes(
    features: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    rope_base: float | None,
) -> tuple[int, int, int]:
    """Returns heads, kv heads and head dimension, or raises."""
    name = "MultiHeadAttention"
    features = as_size(name, "features", features)
    heads = as_size(name, "num_heads", num_heads)
    kv_heads = heads if num_kv_heads is None else as_size(name, "num_kv_heads", num_kv_heads)
    if heads % kv_heads:
        raise LayerConfigError(
            f"{name} shares each kv head among equally many heads, but num_heads={heads} is not "
            f"divisible by num_kv_heads={kv_heads}."
        )
    if head_dim is None and features % heads:
        raise LayerConfigError(
            f"{name} cannot split features={features} into num_heads={heads} equal heads. Choose "
            f"sizes that divide, or give head_dim=."
        )
    size = features // heads if head_dim is None else as_size(name, "head_dim", head_dim)
    if rope_base is not None:
        check_head_dim(f"{name} with rope_base", size)
    return heads, kv_heads, size


def _check_mask(mask: jax.Array, ndim: int) -> jax.Array:
    if mask.dtype != jnp.bool_ or mask.ndim != ndim + 1:
        batch = "batch, " if ndim == 3 else ""
        refuse_input(
            "MultiHeadAttention",
            f"a mask of booleans that broadcasts to ({batch}heads, time, other time)",
            mask,
            "True is where a position may read. Give dimensions to broadcast the size 1: "
            "mask[None, None].",
        )
    return mask


def _meet_heads(query: jax.Array, key: jax.Array) -> jax.Array:
    """Repeats kv heads where Explicit mesh axes split heads differently."""
    # A split of query heads that cuts through a group has no counterpart among the kv heads.
    if explicit_entries(query) is None and explicit_entries(key) is None:
        return key
    specs = [jax.typeof(array).sharding.spec for array in (query, key)]
    return key if specs[0][-2] == specs[1][-2] else _repeat_heads(query, key)


def _repeat_heads(query: jax.Array, key: jax.Array) -> jax.Array:
    """Repeats kv heads for each query head, with its layout."""
    repeats = query.shape[-2] // key.shape[-2]
    queries = explicit_entries(query)
    if queries is None and explicit_entries(key) is None:
        return jnp.repeat(key, repeats, axis=-2)
    wanted, have = (tuple(jax.typeof(array).sharding.spec) for array in (query, key))
    mesh = jax.typeof(query if queries is not None else key).sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec(*have[:-2], None, have[-1]))
    split = NamedSharding(mesh, PartitionSpec(*have[:-2], wanted[-2], have[-1]))
    repeated = jnp.repeat(jax.sharding.reshard(key, whole), repeats, axis=-2)
    return jax.sharding.reshard(repeated, split)
