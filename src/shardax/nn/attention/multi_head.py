# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention.

Vaswani et al., "Attention Is All You Need", 2017. Grouped-query attention (Ainslie et al., 2023)
has fewer heads of keys and values than heads of queries; consecutive query heads share one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Module, Rngs, iter_variables
from shardax._parallel.ring_attention import make_ring, ring_attention, ring_axes
from shardax.extend import Options, ScopeSettings, explicit_entries, gathered
from shardax.nn.arithmetic import as_array, at_least_float32, cast_all
from shardax.nn.attention.cache import AttentionCache, ContextCache, readable
from shardax.nn.attention.dot_product import (
    OTHER_KERNEL,
    AttentionKernel,
    check_mask,
    combine_masks,
    reading_order,
    repeat_heads,
    segment_pair,
    softmax,
    weighted_values,
    within_segments,
)
from shardax.nn.dropout import Dropout
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.linear import Linear
from shardax.nn.masks import as_mask
from shardax.nn.parameters import Initializer, as_axes, as_size, make_parameter, refuse_input, zeros
from shardax.nn.rope import PlacedRotation, Rope, Rotation, check_head_dim, rotate


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
        out_features: Size of the last dimension of the result; None for ``features``.
        causal: Whether a position reads only from itself and earlier ones.
        rope_base: Base of the rotary position embedding (``shardax.nn.rope``); None for no
            positions.
        rope: The whole embedding instead, where it is scaled or turns a part of a head.
        use_bias: Whether the projections of queries, keys and values have biases.
        out_bias: Whether the projection of the result has one; None for as ``use_bias``.
        key_bias: Whether that of the keys has one; None for as ``use_bias``.
        window: How many positions a position reads at most: itself and those before it, and as
            many behind it if not ``causal``; None for all.
        chunked: Whether the window is a chunk instead: positions are cut into chunks of ``window``,
            and each reads itself and those before it in its own.
        query_growth: Two numbers, a factor and a length: queries are multiplied by ``1 + factor *
            log(1 + floor((position + 1) / length))``, so that scores do not flatten in long texts;
            None for queries as they are.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None for scores as they are.
        sinks: Whether each head has a learned score beside those of its keys, that of a key whose
            value is zeros, so that it may read little (Xiao et al., arXiv:2309.17453). Only the
            kernel ``"xla"`` has them.
        gated: Whether what is read is multiplied by the sigmoid of a linear map of ``x``, before
            the projection of the result (Qiu et al., arXiv:2505.06708).
        scale: Factor of the scores; None for ``head_dim ** -0.5``.
        query_norm: Makes the norm of the queries, a function without arguments that returns a
            Module for shape (..., heads, head_dim): ``lambda: nn.RMSNorm(head_dim)``. It comes
            after the projection, whose dtype its result is cast to, and before the rotation.
        key_norm: Likewise of the keys.
        dropout: Rate of dropout on the weights, while training.
        implementation: As in ``sx.kernels(attention=...)``; None for that of the scope.
        attention_fn: What weighs the values instead, called as ``attention_fn(query, key, value,
            mask=mask)``: all of shape (..., time, heads, head_dim), keys and values repeated to the
            heads of the queries, and with a mask that also says what ``causal``, ``window`` and
            segments allow, or None. It returns the shape of the queries.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernels; None for LeCun normal.
        bias_init: Initializer of the biases.
        axes: Axis names of features, heads, kv heads and head dimension.
        rngs: Random streams; ``params`` is used, and ``dropout`` where weights are dropped.
        precision: That of ``jax.lax.dot_general`` in projections and attention; or ``"fp8"``
            or ``"fp8-delayed"``, in which projections are computed, as in ``Linear``.
        preferred_element_type: Likewise, in the projections.

    Attributes:
        q: ``Linear`` with a kernel of shape (features, num_heads, head_dim).
        k: ``Linear`` with a kernel of shape (features, num_kv_heads, head_dim).
        v: Likewise.
        out: ``Linear`` with a kernel of shape (num_heads, head_dim, out_features).
        query_norm: Norm of the queries, or None.
        key_norm: Norm of the keys, or None.
        dropout: ``Dropout`` of the weights, or None.
        sinks: ``Param`` of shape (num_heads,), zeros at first, or None.
        gate: ``Linear`` with a kernel of the shape of ``q``'s, and a bias as that has, or None.
        softmax: Function from scores of shape (..., heads, time, other time) to weights. With
            another than the default the scores are computed as an array of their own. To replace
            it: ``sx.select(model).at_instances_of(nn.MultiHeadAttention).at(lambda a: a.softmax)``.

    Raises:
        LayerConfigError: If sizes are not positive or do not divide, or options do not go together.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> attention = sx.nn.MultiHeadAttention(
        ...     16, 4, num_kv_heads=2, causal=True, rope_base=10_000.0, rngs=sx.Rngs(0))
        >>> attention(jnp.ones((2, 5, 16))).shape, attention.k.kernel.shape
        ((2, 5, 16), (16, 2, 4))
    """

    rope: Rope | None = None
    attention_fn: Callable[..., Any] | None = None
    sinks: Any = None
    gate: Any = None
    chunked: bool = False
    query_growth: tuple[float, float] | None = None

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        causal: bool = False,
        rope_base: float | None = None,
        rope: Rope | None = None,
        use_bias: bool = False,
        out_bias: bool | None = None,
        key_bias: bool | None = None,
        window: int | None = None,
        chunked: bool = False,
        query_growth: tuple[float, float] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gated: bool = False,
        scale: float | None = None,
        query_norm: Callable[[], Any] | None = None,
        key_norm: Callable[[], Any] | None = None,
        dropout: float = 0.0,
        implementation: AttentionKernel | None = None,
        attention_fn: Callable[..., Any] | None = None,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        axes: Sequence[str | None] = ("embed", "heads", "kv_heads", "head_dim"),
        rngs: Rngs | None,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> None:
        sizes = attention_sizes(features, num_heads, num_kv_heads, head_dim, rope_base)
        heads, kv_heads, head_dim = sizes
        embed, queries, keys, head = as_axes("MultiHeadAttention", "axis names", axes, 4)

        linear = functools.partial(
            Linear,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            **_given(precision=precision, preferred_element_type=preferred_element_type),
        )

        inner = functools.partial(linear, features, use_bias=use_bias)
        self.q = inner((heads, head_dim), kernel_axes=(embed, queries, head))
        of_keys = {"use_bias": use_bias if key_bias is None else key_bias}
        self.k = inner((kv_heads, head_dim), kernel_axes=(embed, keys, head), **of_keys)
        self.v = inner((kv_heads, head_dim), kernel_axes=(embed, keys, head))

        outer = use_bias if out_bias is None else out_bias
        names = (queries, head, embed)
        outputs = features if out_features is None else out_features
        outputs = as_size("MultiHeadAttention", "out_features", outputs)
        self.out = linear((heads, head_dim), outputs, use_bias=outer, kernel_axes=names)

        self.query_norm = None if query_norm is None else query_norm()
        self.key_norm = None if key_norm is None else key_norm()
        self.dropout = Dropout(dropout, rngs=rngs) if dropout else None

        self.features, self.num_heads, self.num_kv_heads = features, heads, kv_heads
        self.head_dim = head_dim
        self.causal = bool(causal)
        self._take_rope(rope_base, rope)
        self.window = None if window is None else as_size("MultiHeadAttention", "window", window)
        self.softcap, self.scale = softcap, scale
        self.precision = None if precision in ("fp8", "fp8-delayed") else precision
        self.implementation = implementation

        if attention_fn is not None:  # set only where given, as take_precision does
            self.attention_fn = attention_fn
        if chunked:
            self.chunked = True
        if query_growth is not None:
            self.query_growth = query_growth
        if gated:
            self.gate = inner((heads, head_dim), kernel_axes=(embed, queries, head))
        if sinks:
            self.sinks = make_parameter(zeros, (heads,), param_dtype, (queries,), rngs)

        self.softmax: Callable[[jax.Array], jax.Array] = softmax
        self._check_options()

    def __call__(
        self,
        x: Any,
        context: Any = None,
        *,
        mask: Any = None,
        bias: Any = None,
        segment_ids: Any = None,
        positions: Any = None,
        context_positions: Any = None,
        cache: AttentionCache | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Attends.

        Args:
            x: Shape (batch, time, features), or (time, features): where queries come from.
            context: Shape (batch, other time, features): where keys and values come from; None for
                ``x``.
            mask: Booleans that broadcast to (batch, heads, time, other time): what may be read. A
                position that may read nothing, such as padding, gets the mean of all values, with
                sinks zeros.
                With a cache, of shape (batch, 1, 1, time): which of the new positions are real, so
                that this call and later ones may read them; with a ``ContextCache``, likewise of
                the context.
            bias: Numbers that broadcast to (batch, heads, time, other time), added to the scores,
                such as those of relative positions. With a cache, a function that returns them,
                called with the positions of queries, (batch, time), and of keys, (batch, slots).
            segment_ids: Integers of shape (batch, time); only positions of the same segment are
                read. With a context, a pair of them.
            positions: Integers of shape (time,) or (batch, time), for the rotary embedding and the
                cache, where -1 is padding; or their ``Rotation``, computed once for many layers,
                unless ``chunked`` or ``query_growth`` need the positions themselves.
                None counts from 0, with a cache from the last position of each row.
            context_positions: Likewise for ``context``.
            cache: Keys and values of earlier calls. Those of this call are written to it, and all
                that it then holds is read. A ``ContextCache`` holds those of a context, which later
                calls read without one.
            out_sharding: Sharding of the result over Explicit mesh axes; by default that of ``x``
                in all but the last dimension.

        Returns:
            Shape (..., time, out_features), in the compute dtype. Where a compiled program writes
            more to a cache than it has slots for, or reads a ``ContextCache`` that holds nothing,
            NaN.

        Raises:
            LayerInputError: If a shape or the mask's dtype does not fit, or the cache is full.
        """
        x = as_array(x)
        self._check(x, "x")
        if context is not None:
            context = as_array(context)
            self._check(context, "context", x.ndim)
        if mask is not None:
            mask = check_mask("MultiHeadAttention", mask, x.ndim)

        if isinstance(cache, ContextCache):
            unsupported = {"segment ids": segment_ids, "a bias": bias, "positions": positions}
            read = self._read_context_cache(x, context, unsupported, mask, cache)
            return self.out(self._gated(read, x), out_sharding=out_sharding)

        if cache is not None:
            unsupported = {"a context": context, "segment ids": segment_ids}
            read = self._read_cache(x, unsupported, mask, positions, cache, bias)
            return self.out(self._gated(read, x), out_sharding=out_sharding)

        # Chunks are segments, within those that were given.
        if self.chunked:
            chunks = self._chunks(x, context, positions)
            if segment_ids is None:
                segment_ids = chunks
            else:
                mask = within_segments(chunks, chunks, mask)

        segments = None if segment_ids is None else _pair_of_segments(x, context, segment_ids)
        qkv = self.project(x, context, positions, context_positions)
        read = self.attend(qkv, mask, segment_ids=segments, bias=bias)
        return self.out(self._gated(read, x), out_sharding=out_sharding)

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

        query, key = _normed(self.query_norm, query), _normed(self.key_norm, key)
        query, key, value = cast_all(None, query, key, value)

        if self.query_growth is not None:
            grown = query.astype(at_least_float32(query.dtype)) * self._growth(x, positions)
            query = grown.astype(query.dtype)

        if self.rope_base is None and not isinstance(positions, Rotation):
            return QueryKeyValue(query, key, value)
        query_rotation = self._rotation(x, positions)
        key_rotation = query_rotation if context is None else self._rotation(source, others)
        turn = functools.partial(rotate, interleaved=self._rope().interleaved)
        return QueryKeyValue(turn(query, query_rotation), turn(key, key_rotation), value)

    def attend(
        self,
        qkv: QueryKeyValue,
        mask: Any = None,
        *,
        segment_ids: tuple[jax.Array, jax.Array] | None = None,
        bias: Any = None,
        ordered: bool = True,
    ) -> jax.Array:
        """Weighs the values; second half of a call, before the output projection.

        Args:
            qkv: Queries, keys and values.
            mask: As for calling.
            segment_ids: Those of the queries and those of the keys, (batch, time).
            bias: As for calling.
            ordered: Whether ``causal`` and ``window`` hold by the order of queries and keys; False
                where the mask says all that may be read.

        Returns:
            The shape of the queries.
        """
        query, key, value = qkv
        mask = None if mask is None else as_mask("MultiHeadAttention", mask)
        if self.sinks is not None and not (self.softmax is softmax and self.attention_fn is None):
            raise LayerInputError(
                "MultiHeadAttention with sinks has a softmax of its own, but was given another "
                "softmax or attention_fn. Leave these as they are, or take the sinks away: "
                "layer.sinks = None."
            )

        axes = ring_axes(query) if ordered else ()
        if axes and (bias is not None or (self.window is not None and not self.causal)):
            refuse_input(
                f'MultiHeadAttention with context="{ScopeSettings.current().context}"',
                "no bias of the scores, and no window to both sides",
                query,
                'Gather keys and values: sx.parallel(context="all-gather").',
            )
        if axes:
            return self._read_around(query, key, value, mask, segment_ids, axes)

        key, value = gathered(key, -3), gathered(value, -3)
        mask = None if mask is None else gathered(mask, -1)
        if bias is not None:
            bias = as_array(bias).astype(query.dtype)
            bias = gathered(jnp.expand_dims(bias, tuple(range(query.ndim - bias.ndim))), -1)
        key, value = _meet_heads(query, key), _meet_heads(query, value)

        causal = self.causal and ordered
        window = self.window if ordered else None
        if self.attention_fn is not None:
            order = None
            if segment_ids is not None:
                mask = within_segments(*segment_ids, mask)
            if bias is not None:
                raise LayerInputError(
                    "MultiHeadAttention with attention_fn takes no bias of scores: the function "
                    "gets a mask alone. Add the bias in the function, or leave attention_fn out."
                )
            if causal or window is not None:
                order = reading_order(query.shape[-3], key.shape[-3], causal, window)
                order = jnp.expand_dims(order, tuple(range(query.ndim - 2)))
            return self._read_by_function(query, key, value, combine_masks(mask, order))

        is_dropped = self.dropout is not None and not self.dropout.deterministic
        return weighted_values(
            "MultiHeadAttention",
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            causal=causal,
            window=window,
            scale=self.scale,
            softcap=self.softcap,
            to_weights=self.softmax,
            sinks=None if self.sinks is None else self.sinks.value,
            dropout=self.dropout if is_dropped else None,
            segments=segment_ids,
            names=("batch", self._heads_name()),
            implementation=self.implementation,
            precision=self.precision,
        )

    def _gated(self, read: jax.Array, x: jax.Array) -> jax.Array:
        """Multiplies a result by the gate, if there is one."""
        return read if self.gate is None else read * jax.nn.sigmoid(self.gate(x))

    def _growth(self, x: jax.Array, positions: Any) -> jax.Array:
        """Returns the factors of queries, by position."""
        factor, length = self.query_growth or (0.0, 1.0)
        integers = _integers(x, positions).astype(np.float32)
        growth = 1 + factor * jnp.log1p(jnp.floor((integers + 1) / length))
        growth = jax.lax.expand_dims(growth, (integers.ndim, integers.ndim + 1))
        return growth if growth.ndim == x.ndim + 1 else jnp.expand_dims(growth, 0)

    def _chunks(self, x: jax.Array, context: Any, positions: Any) -> jax.Array:
        """Returns the chunk of each position."""
        if context is not None or self.window is None or not self.causal:
            refuse_input(
                "MultiHeadAttention(chunked=True)",
                "no context, and is causal with a window, the size of a chunk",
                x,
                "",
            )
        return jnp.broadcast_to(_integers(x, positions) // self.window, x.shape[:-1])

    def _read_by_function(self, query: Any, key: Any, value: Any, mask: Any) -> jax.Array:
        """Weighs the values by the user's function."""
        function: Any = self.attention_fn
        if key.shape[-2] < query.shape[-2]:
            key, value = repeat_heads(query, key), repeat_heads(query, value)

        # What the function does with a head is not known.
        query, key, value = (gathered(heads, -1) for heads in (query, key, value))
        read = as_array(function(query, key, value, mask=mask))

        if read.shape != query.shape:
            refuse_input(
                "MultiHeadAttention with attention_fn",
                f"a result of the shape of the queries, {query.shape}",
                read,
                "The function takes and returns (..., time, heads, head_dim).",
            )
        return read.astype(query.dtype)

    def _read_around(
        self, query: Any, key: Any, value: Any, mask: Any, segments: Any, axes: tuple[str, ...]
    ) -> jax.Array:
        """Reads keys and values sent round a mesh axis."""
        settings = ScopeSettings.current()
        context = settings.context
        kernel = self.implementation or settings.attention
        if kernel not in (None, "auto", "xla"):
            refuse_input(
                f'MultiHeadAttention(implementation="{kernel}") with context="{context}"',
                "a sequence that is not sent round, as that has a computation of its own",
                query,
                'Choose by layer: sx.kernels(attention="auto").',
            )

        dropped = self.dropout is not None and not self.dropout.deterministic
        is_default = self.softmax is softmax and self.attention_fn is None
        if dropped or not is_default or self.precision or self.sinks is not None:
            refuse_input(
                f'MultiHeadAttention with context="{context}"',
                "the default softmax and precision, without sinks, dropout or attention_fn",
                query,
                'Gather keys and values: sx.parallel(context="all-gather").',
            )

        axis, *more_axes = axes
        if more_axes:
            refuse_input(
                'Attention with context="ring"',
                "a sequence that is split over one mesh axis",
                query,
                f"It is split over {', '.join(axes)}: map seq to one of them.",
            )
        ring = make_ring(
            query,
            key,
            axis,
            causal=self.causal,
            window=self.window,
            scale=1 / math.sqrt(self.head_dim) if self.scale is None else self.scale,
            softcap=self.softcap,
        )

        for array in (query, key):
            if array.shape[-3] % ring.parts:
                twice = "twice " if ring.zigzag else ""
                refuse_input(
                    f'Attention with context="{context}"',
                    f"sequences of a length divisible by {ring.parts}, {twice}the devices of "
                    f"{ring.axis!r}",
                    array,
                    "Pad them, and mask the padding.",
                )

        query, key, value = (gathered(heads, -1) for heads in (query, key, value))
        key, value = _meet_heads(query, key), _meet_heads(query, value)
        return ring_attention(ring, query, key, value, mask, segments)

    def _read_context_cache(
        self, x: Any, context: Any, unsupported: dict[str, Any], mask: Any, cache: ContextCache
    ) -> jax.Array:
        """Reads a cache, after writing a given context to it."""
        batch = _check_cache_call(x, unsupported)
        plain = (self.causal, self.window, self.rope_base, self.query_growth)
        if plain != (False, None, None, None):
            hint = "Positions of a context are not those of x. Leave the cache out."
            refuse_input("A ContextCache", "attention without positions and order", x, hint)

        cache.check(self, batch)
        if context is None:
            query = _normed(self.query_norm, self.q(x))
        else:
            query, key, value = self.project(x, context)
            cache.write(key, value, _mask_of_new(mask, batch, context.shape[1]))

        keys, values, allowed, is_empty = cache.read(query.dtype)
        read = self.attend(QueryKeyValue(query, keys, values), allowed, ordered=False)
        return read if context is not None else jnp.where(is_empty, jnp.nan, read)

    def _read_cache(
        self, x: Any, unsupported: dict[str, Any], mask: Any, positions: Any, cache: Any, bias: Any
    ) -> jax.Array:
        """Writes this call's keys and values to the cache and reads it."""
        if self.window is not None and not self.causal:
            unsupported = {**unsupported, "a window to both sides": self.window}
        if not callable(bias):
            unsupported = {**unsupported, "a bias that is no function of positions": bias}

        batch, time = _check_cache_call(x, unsupported), x.shape[1]
        mask = _mask_of_new(mask, batch, time)
        cache.check(self, batch)

        has_rotation = isinstance(positions, (Rotation, PlacedRotation))
        integers = None if has_rotation else positions
        places = cache.places(time, integers, mask)
        if positions is None and (self.rope_base is not None or self.query_growth is not None):
            positions = places

        query, key, value = self.project(x, None, positions)
        held = [(v, v.value) for _, v in iter_variables(cache)]
        keys, values, positions_held, is_full = cache.update(key, value, places, self.window)

        allowed = readable(positions_held, places, self.causal, self.window)
        if self.chunked and self.window is not None:
            own_chunk = places[:, None, :, None] // self.window
            allowed &= positions_held[:, None, None, :] // self.window == own_chunk

        # A call that fails leaves the cache as it was.
        qkv = QueryKeyValue(query, keys.astype(query.dtype), values.astype(query.dtype))
        try:
            added = bias(places, positions_held) if callable(bias) else None
            read = self.attend(qkv, allowed, bias=added, ordered=False)
        except Exception:  # such as of a kernel that takes no mask
            for variable, value_before in held:
                variable.value = value_before
            raise
        return read if is_full is None else jnp.where(is_full, jnp.nan, read)

    def _check_options(self) -> None:
        """Raises if options do not go together."""
        name = "MultiHeadAttention"
        options = Options(LayerConfigError, name)
        fits = self.softcap is None or self.softcap > 0
        options.check("softcap", self.softcap, fits, "positive")
        options.choice(
            "implementation", self.implementation, (None, *ScopeSettings.choices("attention"))
        )

        weighing = {
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout": self.dropout,
            "implementation": self.implementation,
        }
        unread = [option for option, value in weighing.items() if value is not None]
        if self.attention_fn is not None and unread:
            raise LayerConfigError(
                f"{name} leaves the weights of values to attention_fn, so it cannot follow "
                f"{', '.join(unread)}. Give these to the function: "
                f"functools.partial(sx.nn.dot_product_attention, scale=0.5)."
            )

        if self.implementation == "cudnn" and self.softcap is not None:
            raise LayerConfigError(
                f'{name}(softcap={self.softcap}) does not run with implementation="cudnn", which '
                f"has no soft cap. {OTHER_KERNEL}"
            )

    def _take_rope(self, rope_base: float | None, rope: Rope | None) -> None:
        """Sets the rotary position embedding, or raises if it cannot be."""
        if rope is not None and rope_base is not None:
            raise LayerConfigError(
                f"MultiHeadAttention has rope_base={rope_base} and rope={rope}: give one of them."
            )
        self.rope_base = rope_base if rope is None else rope.base

        # Set only where it says more: a layer with a plain one looks as it did before.
        if rope is not None and rope != Rope(rope.base):
            self.rope = rope
            size = rope.rotated_size(self.head_dim)
            if size % 2 or not 0 < size <= self.head_dim:
                raise LayerConfigError(
                    f"MultiHeadAttention turns an even part of a head, but rope.fraction="
                    f"{rope.fraction} of head_dim={self.head_dim} is {size}."
                )

    def _heads_name(self) -> str | None:
        """The axis name of heads of queries."""
        axes = getattr(getattr(self.out, "kernel", None), "axes", None)  # of heads, head_dim, embed
        return axes[-3] if axes and len(axes) > 2 else None

    def _rope(self) -> Rope:
        base = Rope.base if self.rope_base is None else self.rope_base
        return Rope(base) if self.rope is None else self.rope

    def _rotation(self, x: jax.Array, positions: Any) -> Rotation:
        if isinstance(positions, Rotation):
            return positions
        if isinstance(positions, PlacedRotation):
            return Rotation(positions.cosine, positions.sine)
        if positions is None:
            positions = jnp.arange(x.shape[-2], dtype=jnp.int32)
        return self._rope().rotation(as_array(positions), self.head_dim)

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


def _integers(x: jax.Array, positions: Any) -> jax.Array:
    """Returns positions as integers, counted from 0 where none are given."""
    if positions is None:
        return jnp.arange(x.shape[-2], dtype=jnp.int32)
    if isinstance(positions, Rotation):
        raise LayerInputError(
            "MultiHeadAttention with chunked or query_growth needs integer positions, but was "
            "given their rotation. Give the positions themselves."
        )
    return positions.positions if isinstance(positions, PlacedRotation) else as_array(positions)


def _normed(norm: Any, heads: jax.Array) -> jax.Array:
    """Applies a norm to queries or keys, in their dtype."""
    return heads if norm is None else norm(heads).astype(heads.dtype)


def _check_cache_call(x: jax.Array, unsupported: dict[str, Any]) -> int:
    """Returns the number of rows, or raises for what no cache takes."""
    for name, value in unsupported.items():
        if value is not None or x.ndim == 2:
            reason = name if value is not None else "an input without batch"
            refuse_input(
                "A cache of MultiHeadAttention", f"no call with {reason}", x, "Call it without."
            )
    return x.shape[0]


def _mask_of_new(mask: Any, batch: int, time: int) -> Any:
    """Returns which new positions are real, of shape (batch, time), or None."""
    if mask is None:
        return None
    if mask.shape != (batch, 1, 1, time):
        hint = "It says which of the new positions are real."
        refuse_input("A cache", f"a mask of shape {(batch, 1, 1, time)}", mask, hint)
    return mask[:, 0, 0]


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _pair_of_segments(x: jax.Array, context: Any, segment_ids: Any) -> tuple[Any, Any]:
    """Returns the segments of queries and of keys."""
    is_pair = isinstance(segment_ids, tuple)
    sources = (x, x if context is None else context)
    if is_pair != (context is not None) or (is_pair and len(segment_ids) != 2):
        raise LayerInputError(
            "MultiHeadAttention takes segment_ids as an array, and with a context as a pair, those "
            "of x and of the context."
        )

    query_ids, key_ids = segment_pair(segment_ids)
    for ids, source in zip((query_ids, key_ids), sources, strict=True):
        if ids.shape != source.shape[:-1] or not jnp.issubdtype(ids.dtype, np.integer):
            refuse_input(
                "MultiHeadAttention",
                f"segment_ids, integers of shape {source.shape[:-1]}",
                ids,
                "There is one for each position.",
            )
    return query_ids, key_ids


def positions_within(segment_ids: jax.Array) -> jax.Array:
    """Returns positions from the beginning of each segment."""
    positions = jnp.cumsum(jnp.ones_like(segment_ids, jnp.int32), axis=-1, dtype=jnp.int32) - 1
    is_first = jnp.diff(segment_ids, axis=-1, prepend=segment_ids[..., :1] - 1) != 0
    return positions - jax.lax.cummax(jnp.where(is_first, positions, 0), axis=segment_ids.ndim - 1)


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


def _meet_heads(query: jax.Array, key: jax.Array) -> jax.Array:
    """Repeats kv heads, if Explicit mesh axes split heads differently."""
    # A split of query heads that cuts through a group has no counterpart among the kv heads.
    if explicit_entries(query) is None and explicit_entries(key) is None:
        return key
    specs = [jax.typeof(array).sharding.spec for array in (query, key)]
    return key if specs[0][-2] == specs[1][-2] else repeat_heads(query, key)
