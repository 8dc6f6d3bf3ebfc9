# SPDX-License-Identifier: Apache-2.0
"""Dot-product attention without parameters, and masks for it.

The weighting itself is ``jax.nn.dot_product_attention``, which picks the device's fused kernel
where there is one; what that cannot do is computed from scores.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import Partial

from shardax._parallel.attention_kernels import (
    AttentionCall,
    AttentionChoice,
    Operands,
    choose,
    region_of,
    run_kernel,
)
from shardax._parallel.kernels import platform_in_scope
from shardax.extend import (
    INLINE,
    ScopeSettings,
    align,
    explicit_entries,
    gathered,
    joined_sharding,
    with_layout,
)
from shardax.nn.arithmetic import as_array, at_least_float32, cast_all
from shardax.nn.embedding import look_up
from shardax.nn.errors import LayerInputError
from shardax.nn.masks import as_mask
from shardax.nn.parameters import refuse_input

# What errors say where the kernel that was asked for cannot run.
OTHER_KERNEL = (
    'For the best kernel that each layer can run: sx.kernels(attention="auto"), or '
    'implementation="auto" on the layer.'
)

AttentionKernel = Literal["auto", "xla", "cudnn", "splash", "tokamax"]
"""The implementations of attention."""


def softmax(scores: jax.Array) -> jax.Array:
    """Returns the softmax over the last dimension, the weights of attention."""
    return jax.nn.softmax(scores, axis=-1)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    segment_ids: Any = None,
    implementation: AttentionKernel | None = None,
    precision: Any = None,
) -> jax.Array:
    """Weighs values by the softmax of products of queries and keys.

    Args:
        query: Shape (..., time, heads, head_dim).
        key: Shape (..., other time, kv heads, head_dim); ``kv heads`` divides ``heads``.
        value: Shape (..., other time, kv heads, value_dim).
        bias: Added to the scores; broadcasts to (..., heads, time, other time).
        mask: Booleans of as many dimensions as ``query`` that broadcast to (..., heads, time, other
            time): what may be read. A position that may read nothing gets the mean of all values,
            with sinks zeros.
        causal: Whether a position reads only from itself and earlier ones.
        window: How many positions a position reads at most: itself and those before it, without
            ``causal`` as many behind it, too.
        scale: Factor of the scores; None for ``head_dim ** -0.5``.
        softcap: Scores become ``softcap * tanh(scores / softcap)``, before the bias.
        sinks: Numbers of shape (heads,), as if each head had one key more, with this score and a
            value of zeros: the weights of a position add up to less than 1.
        dropout: A function of the weights, such as a ``Dropout`` layer.
        segment_ids: Integers of shape (..., time), of queries and keys: only positions of the same
            segment are read. Of another sequence a pair, those of queries and those of keys.
        implementation: As in ``sx.kernels(attention=...)``; None for that of the scope.
        precision: As in ``jax.lax.dot_general``.

    Returns:
        Shape (..., time, heads, value_dim), in the widest of the three dtypes. Scores and their
        softmax are computed in float32 or wider.

    Raises:
        LayerInputError: If shapes do not fit, the mask is not of booleans, or the kernel asked for
            cannot run this call.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> query, key = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8))
        >>> real = sx.nn.make_attention_mask(jnp.ones((2, 5)) > 0, jnp.arange(7) < 6)
        >>> sx.nn.dot_product_attention(query, key, key, mask=real).shape
        (2, 5, 4, 8)
    """
    name = "dot_product_attention"
    query, key, value = cast_all(None, *map(as_array, (query, key, value)))
    shapes = f"queries {query.shape}, keys {key.shape} and values {value.shape}"

    fits = (
        query.ndim >= 3
        and query.ndim == key.ndim
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[:-3] == key.shape[:-3]
        and query.shape[-1] == key.shape[-1]
        and not query.shape[-2] % max(key.shape[-2], 1)
    )
    if not fits:
        raise LayerInputError(
            f"{name} takes queries of shape (..., time, heads, head_dim), and keys and values of "
            f"shape (..., other time, kv heads, head_dim), but was given {shapes}. Move the "
            f"dimension of heads before the last: jnp.swapaxes(query, -2, -3)."
        )

    if mask is not None:
        mask = check_mask(name, mask, query.ndim - 1)
    if bias is not None:
        bias = jnp.expand_dims(bias, tuple(range(query.ndim - np.ndim(bias))))
    if sinks is not None:
        sinks = as_array(sinks)
        if sinks.shape != query.shape[-2:-1]:
            refuse_input(name, f"sinks of shape {query.shape[-2:-1]}", sinks, "One for each head.")

    return weighted_values(
        name,
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        segments=None if segment_ids is None else segment_pair(segment_ids),
        implementation=implementation,
        precision=precision,
    )


def choose_attention(
    query: Any,
    key: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    implementation: AttentionKernel = "auto",
) -> AttentionChoice:
    """Chooses the kernel of a call of attention, without calling it.

    It depends on the scopes around: the mesh and its platform, rules, ``sx.kernels``.

    Args:
        query: Queries, or what has their shape and dtype.
        key: Keys, likewise; values are taken to be alike.
        bias: As for ``dot_product_attention``.
        mask: As for ``dot_product_attention``.
        segment_ids: As for ``dot_product_attention``.
        causal: As for ``dot_product_attention``.
        window: As for ``dot_product_attention``.
        softcap: As for ``dot_product_attention``.
        sinks: As for ``dot_product_attention``.
        implementation: As for ``dot_product_attention``.

    Returns:
        The kernel, and for each faster one why it was not taken.

    Raises:
        LayerInputError: If a kernel asked for by name cannot run the call.

    Example:
        >>> import jax, shardax as sx
        >>> heads = jax.ShapeDtypeStruct((2, 256, 8, 128), "bfloat16")
        >>> choice = sx.nn.choose_attention(heads, heads, causal=True)
        >>> choice.implementation, choice.reasons["cudnn"]
        ('xla', 'it runs on NVIDIA GPUs, and this is cpu')
    """
    queries, keys = (
        array if isinstance(array, jax.Array) else jax.ShapeDtypeStruct(array.shape, array.dtype)
        for array in (query, key)
    )

    pair = isinstance(segment_ids, tuple)
    call = _call_of(
        queries,
        keys,
        keys,
        options=_options_of(mask=mask is not None, bias=bias is not None, sinks=sinks is not None),
        segments="" if segment_ids is None else "pair" if pair else "one",
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return _chosen("dot_product_attention", implementation, call)


def _options_of(**present: bool) -> tuple[str, ...]:
    return tuple(name.replace("_", " ") for name, is_given in present.items() if is_given)


def _call_of(
    query: Any,
    key: Any,
    value: Any,
    names: tuple[str | None, str | None] = ("batch", "heads"),
    **facts: Any,
) -> AttentionCall:
    """The facts of a call, with those of the scopes around."""
    return AttentionCall(
        platform_in_scope(),
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        region=region_of(query, names),
        interpret=ScopeSettings.current().interpret,
        **facts,
    )


def segment_pair(segment_ids: Any) -> tuple[jax.Array, jax.Array]:
    """Segments of queries and of keys, one array where equal."""
    if isinstance(segment_ids, tuple):
        query_ids, key_ids = map(as_array, segment_ids)
        return query_ids, key_ids
    ids = as_array(segment_ids)
    return ids, ids


def within_segments(query_ids: jax.Array, key_ids: jax.Array, mask: Any) -> jax.Array:
    """Narrows a mask to positions of the same segment."""
    same = query_ids[..., None, :, None] == gathered(key_ids, -1)[..., None, None, :]
    return same if mask is None else mask & same


def combine_masks(*masks: Any) -> jax.Array | None:
    """Returns where all masks allow reading.

    Args:
        *masks: Booleans, or integers of 0 and 1, of as many dimensions, which broadcast; None for
            no mask.

    Returns:
        Booleans, or None if there is no mask.

    Raises:
        LayerInputError: If a mask has other numbers, or shapes do not broadcast.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> real = jnp.array([[True, True, False]])
        >>> mask = sx.nn.combine_masks(
        ...     sx.nn.make_attention_mask(real, real), sx.nn.make_causal_mask(real), None)
        >>> mask[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    """
    arrays = [as_mask("combine_masks", mask) for mask in masks if mask is not None]
    shapes = [array.shape for array in arrays]
    sizes = [{size for size in dims if size != 1} for dims in zip(*shapes, strict=False)]
    if len(set(map(len, shapes))) > 1 or any(len(dim_sizes) > 1 for dim_sizes in sizes):
        raise LayerInputError(
            f"combine_masks takes masks of as many dimensions, which broadcast, but was given the "
            f"shapes {shapes}. Give dimensions to broadcast the size 1: mask[:, None, None, :]."
        )
    return functools.reduce(jnp.logical_and, arrays) if arrays else None


def make_attention_mask(
    query: object, key: object, pairwise: Callable[[Any, Any], Any] = jnp.multiply
) -> jax.Array:
    """Returns a mask from a function of each query and each key.

    Args:
        query: Shape (..., time), such as which positions are real.
        key: Shape (..., other time).
        pairwise: Elementwise function, true where the query may read the key. ``jnp.equal`` makes
            a mask of segments from their numbers.

    Returns:
        Booleans of shape (..., 1, time, other time).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> segments = jnp.array([0, 0, 1])
        >>> sx.nn.make_attention_mask(segments, segments, jnp.equal)[0].astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    query, key = as_array(query), as_array(key)
    pair = [query[..., :, None], key[..., None, :]]
    rank = max(array.ndim for array in pair)
    pair = [jnp.expand_dims(array, tuple(range(rank - array.ndim))) for array in pair]
    return jnp.expand_dims(pairwise(*pair).astype(bool), -3)


def make_causal_mask(x: object) -> jax.Array:
    """Returns the mask by which positions read themselves and earlier ones.

    Args:
        x: Shape (..., time); only the shape counts.

    Returns:
        Booleans of shape (..., 1, time, time).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.nn.make_causal_mask(jnp.zeros((1, 3)))[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    shape = as_array(x).shape
    return jnp.broadcast_to(
        reading_order(shape[-1], shape[-1], True, None), (*shape[:-1], 1, *shape[-1:] * 2)
    )


def reading_order(time: int, other_time: int, causal: bool, window: int | None) -> jax.Array:
    """Returns which positions a position reads."""
    last = 0 if causal or window is None else window - 1
    order = jnp.tri(time, other_time, k=last, dtype=bool)
    if window is not None:
        order &= ~jnp.tri(time, other_time, k=-window, dtype=bool)
    return order


def weighted_values(
    layer: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    to_weights: Callable[[jax.Array], jax.Array] = softmax,
    sinks: jax.Array | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    names: tuple[str | None, str | None] = ("batch", "heads"),
    implementation: Any = None,
    precision: Any = None,
) -> jax.Array:
    """Weighs values, by the kernel of the layer or the scope."""
    if (implementation or ScopeSettings.current().attention) not in (None, "xla"):
        arrays = Operands(
            gathered(query, -1), gathered(key, -1), gathered(value, -1), bias, mask, segments
        )
        unusual = _options_of(
            other_softmax=to_weights is not softmax,
            sinks=sinks is not None,
            dropout=dropout is not None,
            precision=precision is not None,
        )
        order = {"causal": causal, "window": window, "softcap": softcap}
        result, implementation = _by_kernel(
            layer, implementation, arrays, names, scale, unusual, order
        )
        if result is not None:
            return result

    if any(_splits_last(array) for array in (query, key, value)):
        # Scores are then sums over devices, which the compiler plans as over Auto axes. A function
        # that is called there could not read arrays of its own, nor write a state: it gets heads
        # that are whole.
        if to_weights is softmax and dropout is None:
            weigh = functools.partial(
                weighted_values,
                layer,
                causal=causal,
                window=window,
                scale=scale,
                softcap=softcap,
                names=names,
                implementation=implementation,
                precision=precision,
            )

            def run(query, key, value, bias, mask, sinks, segments) -> jax.Array:
                arrays = {"bias": bias, "mask": mask, "sinks": sinks, "segments": segments}
                return weigh(query, key, value, **arrays)

            last = query.ndim - 1
            layout = joined_sharding(((query, range(last)), (value, (last,))))
            return with_layout(run, layout, query, key, value, bias, mask, sinks, segments)

        query, key, value = (gathered(array, -1) for array in (query, key, value))

    if segments is not None:
        mask = within_segments(*segments, mask)

    # Compiled for CPU or TPU, that of JAX has no float16; gradients of its bfloat16 cannot be
    # compiled where a user forbids promotion.
    config: Any = jax.config
    is_strict = config.jax_numpy_dtype_promotion == "strict"
    unfused = (jnp.float16, jnp.bfloat16) if is_strict else (jnp.float16,)
    has_kernel = query.ndim <= 4 and key.shape == value.shape and softcap is None and sinks is None
    is_plain = to_weights is softmax and dropout is None and has_kernel
    if is_plain and (query.dtype not in unfused or implementation == "cudnn"):
        options = causal, scale, window, implementation
        return _fused(layer, query, key, value, bias, mask, precision, *options)

    if implementation == "cudnn":
        refuse_input(
            f'{layer}(implementation="cudnn")',
            "the default softmax, without sinks, softcap and dropout of weights",
            query,
            f"cuDNN keeps its weights to itself. {OTHER_KERNEL}",
        )

    if key.shape[-2] < query.shape[-2]:
        key, value = repeat_heads(query, key), repeat_heads(query, value)

    scores = jnp.einsum(
        "...tnh,...snh->...nts",
        query,
        key,
        precision=precision,
        preferred_element_type=at_least_float32(query.dtype),
    ) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)

    if causal or window is not None:
        order = reading_order(scores.shape[-2], scores.shape[-1], causal, window)
        order = jnp.expand_dims(order, tuple(range(scores.ndim - 2)))
        mask = order if mask is None else mask & order
    if mask is not None:  # what may not be read has the weight 0, as in jax.nn
        scores = _mask_scores(scores, mask)

    weights = to_weights(scores) if sinks is None else _softmax_beside(scores, sinks)
    weights = weights if dropout is None else dropout(weights)
    weights = weights.astype(value.dtype)
    return jnp.einsum("...nts,...snh->...tnh", weights, value, precision=precision)


def _splits_last(array: jax.Array) -> bool:
    """Whether Explicit mesh axes split the last dimension."""
    entries = explicit_entries(array)
    return entries is not None and entries[-1] is not None


def _softmax_beside(scores: jax.Array, sinks: jax.Array) -> jax.Array:
    """Softmax of scores and a further one of each head."""
    sinks = align(sinks.astype(scores.dtype), scores, (scores.ndim - 3,))
    sinks = jax.lax.expand_dims(sinks, (*range(scores.ndim - 3), scores.ndim - 2, scores.ndim - 1))
    largest = jnp.maximum(scores.max(axis=-1, keepdims=True), sinks)
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(scores - largest)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - largest))


def _by_kernel(
    layer: str,
    implementation: str | None,
    arrays: Operands,
    names: tuple[str | None, str | None],
    scale: float | None,
    unusual: tuple[str, ...],
    order: dict[str, Any],
) -> tuple[jax.Array | None, str]:
    """Returns a kernel's result, None for ``jax.nn``, and its name."""
    segments = arrays.segments
    kind = "" if segments is None else "one" if segments[0] is segments[1] else "pair"
    options = _options_of(mask=arrays.mask is not None, bias=arrays.bias is not None)
    operands = arrays.query, arrays.key, arrays.value
    call = _call_of(*operands, names, options=(*options, *unusual), segments=kind, **order)

    chosen = _chosen(layer, implementation, call).implementation
    if chosen not in ("splash", "tokamax"):
        return None, chosen

    if segments is not None and chosen == "splash":
        arrays = arrays._replace(segments=segments[0])
    elif segments is not None:
        arrays = arrays._replace(
            mask=within_segments(segments[0], segments[1], arrays.mask), segments=None
        )
    return run_kernel(chosen, call, arrays, scale=scale), chosen


def _chosen(layer: str, implementation: str | None, call: AttentionCall) -> AttentionChoice:
    """Chooses a kernel, or raises if the one asked for cannot run."""
    choice = choose(layer, implementation, call)
    name = choice.implementation
    if name in choice.reasons and name != "cudnn":  # JAX says what cuDNN lacks, and knows it best
        raise LayerInputError(
            f'{layer}(implementation="{name}") does not run for queries '
            f"{call.dtype}{list(call.query)} on {call.platform}: {choice.reasons[name]}. "
            f"{OTHER_KERNEL}"
        )
    return choice


def _fused(
    layer: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    precision: object,
    causal: bool,
    scale: float | None,
    window: int | None,
    implementation: object,
) -> jax.Array:
    """Runs ``jax.nn.dot_product_attention``."""
    near = None if window is None else (window - 1, 0 if causal else window - 1)
    scope = contextlib.nullcontext()
    if precision is not None:
        scope = jax.default_matmul_precision(jax.lax.Precision(precision).name.lower())
    options = causal, scale, near, implementation

    try:
        with scope:
            return _dot_product_attention(query, key, value, bias, mask, *options)
    except Exception as error:
        if implementation != "cudnn":
            raise
        description = f"{query.dtype}{list(query.shape)} on {platform_in_scope()}"
        raise LayerInputError(
            f'{layer}(implementation="cudnn") does not run for queries '
            f"{description}: {str(error).rstrip('.')}. cuDNN takes float16 and bfloat16 on NVIDIA "
            f"GPUs. {OTHER_KERNEL}"
        ) from error


# Units, as eager arrays over Explicit axes need their mesh where masks are broadcast.
@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8), inline=INLINE)
def _dot_product_attention(
    query: jax.Array, key, value, bias, mask, causal: bool, scale, near, how
) -> jax.Array:
    # All three have one dtype; what JAX promotes within, also where a user forbids it, are scores.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask=mask,
            scale=scale,
            is_causal=causal,
            local_window_size=near,
            implementation=how,
        )


@functools.partial(jax.jit, inline=INLINE)
def _mask_scores(scores: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, scores, -0.7 * jnp.finfo(scores.dtype).max)


def check_mask(layer: str, mask: object, ndim: int) -> jax.Array:
    """Returns a mask as booleans, or raises if it has another rank or dtype."""
    batch = "batch, " if ndim == 3 else ""
    shape = f"that broadcasts to ({batch}heads, time, other time)"
    meaning = "True is where a position may read."
    booleans = as_mask(layer, mask, shape, meaning)
    if booleans.ndim != ndim + 1:
        hint = f"{meaning} Give dimensions to broadcast the size 1: mask[None, None]."
        refuse_input(layer, f"a mask of booleans {shape}", booleans, hint)
    return booleans


def repeat_heads(query: jax.Array, key: jax.Array) -> jax.Array:
    """Repeats kv heads for each query head, with its layout."""
    repeats = query.shape[-2] // key.shape[-2]
    queries = explicit_entries(query)
    if queries is None and explicit_entries(key) is None:
        return jnp.repeat(key, repeats, axis=-2)
    query_spec, key_spec = (tuple(jax.typeof(array).sharding.spec) for array in (query, key))
    mesh = jax.typeof(query if queries is not None else key).sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec(*key_spec[:-2], None, key_spec[-1]))
    split = NamedSharding(mesh, PartitionSpec(*key_spec[:-2], query_spec[-2], key_spec[-1]))
    repeated = jnp.repeat(jax.sharding.reshard(key, whole), repeats, axis=-2)
    return jax.sharding.reshard(repeated, split)


# --- learned biases by distance -------------------------------------------------------------------

# Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
# Transformer", 2020. Half of the buckets hold one distance, and the others ever more of them, up to
# the farthest distance: all positions from there on share the last one.


def distance_buckets(
    length: int, count: int, farthest: int = 128, causal: bool = False
) -> jax.Array:
    """Returns the bucket of each pair of positions, by their distance."""
    position = np.arange(length)
    distance = position[None, :] - position[:, None]
    if causal:
        return jnp.asarray(_bucket_behind(np.maximum(-distance, 0), count, farthest), jnp.int32)

    # Half of the buckets are for positions behind.
    half = count // 2
    bucket = _bucket_behind(np.abs(distance), half, farthest)
    return jnp.asarray(bucket + half * (distance > 0), jnp.int32)


def _bucket_behind(distance: np.ndarray, count: int, farthest: int) -> np.ndarray:
    """Returns the buckets of distances to one side."""
    exact = count // 2
    growth = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(farthest / exact)
    )
    far = np.minimum(exact + (growth * (count - exact)).astype(np.int32), count - 1)
    return np.where(distance < exact, distance, far).astype(np.int32)


@functools.lru_cache(maxsize=64)
def _bucket_starts(count: int, farthest: int) -> np.ndarray:
    """Returns the first distance of each bucket but that of the distance 0."""
    # By halving, as the farthest distance of a config.json may be any number.
    bucket = np.arange(1, count)
    first, last = np.zeros(count - 1, np.int64), np.full(count - 1, farthest, np.int64)
    while (first < last).any():
        middle = (first + last) // 2
        is_reached = _bucket_behind(middle, count, farthest) >= bucket
        first, last = np.where(is_reached, first, middle + 1), np.where(is_reached, middle, last)
    return np.minimum(first, np.iinfo(np.int32).max).astype(np.int32)


def bias_behind(by_bucket: jax.Array, farthest: int) -> Callable[..., jax.Array]:
    """Returns a bias for a cache, by biases of shape (buckets, heads)."""
    starts = jnp.asarray(_bucket_starts(by_bucket.shape[0], farthest))
    return Partial(_bias_between, by_bucket, starts)


def _bias_between(by_bucket: jax.Array, starts: jax.Array, places: Any, others: Any) -> jax.Array:
    """Returns biases of shape (batch, heads, time, slots)."""
    distance = places[:, :, None] - others[:, None, :]
    starts = starts.reshape((1,) * distance.ndim + (-1,))
    buckets = jnp.sum(distance[..., None] >= starts, -1, dtype=jnp.int32)
    return jnp.moveaxis(look_up(by_bucket, buckets), -1, 1)
