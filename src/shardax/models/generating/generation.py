# SPDX-License-Identifier: Apache-2.0
"""Generation of tokens with a cache.

Prompts of different lengths are padded on the left to one length. One program reads them all into
the cache and samples the first token; a second one is the loop over all others, over a cache that
it is given for good. Both are compiled for a batch size and *buckets* of lengths, powers of two.
How many tokens are wanted is an input of the loop, so that another number compiles nothing, and a
stream is the same loop, run for one token at a time.

A number is drawn from a key of the seed, the row and how many tokens the row has added; so a sample
depends neither on the mesh nor on how long it is to become.

The cache is made by the first program and handed to the second one as arrays with their
``GraphDef``. An object that is new at every call would be looked through at every call, which takes
longer than some models need for a token.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardax import (
    Cache,
    Module,
    Quantized,
    axis_rules,
    constrain,
    iter_variables,
    jit,
    kernels,
    merge,
    select,
    split,
    while_loop,
)
from shardax.distributed.processes import from_main
from shardax.errors import StaticAttributeError
from shardax.extend import Options, is_eager, mesh_axes_of
from shardax.models.config.transformer import TransformerConfig
from shardax.models.convnext import ConvNeXtConfig
from shardax.models.dual_encoder import DualEncoderConfig
from shardax.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from shardax.models.generating import errors
from shardax.models.generating.config import GenerationConfig, config_of_texts
from shardax.models.generating.errors import GenerationError
from shardax.models.generating.prompts import TokenMask, TokenRows, read_rows, warn_of_padding
from shardax.models.words import refuses_other_words
from shardax.nn.attention.dot_product import AttentionKernel
from shardax.partition import current_rules, resolve_mesh

_OPTIONS = Options(GenerationError)


class _Filters(NamedTuple):
    """Static options of the program."""

    greedy: bool
    top_k: int | None
    top_p: bool
    min_p: bool
    penalty: bool


class _Settings(NamedTuple):
    """Inputs of the programs that are no arrays of the model."""

    temperature: np.float32
    top_p: np.float32
    min_p: np.float32
    penalty: np.float32
    stop: np.ndarray
    seed: np.uint32
    total: np.int32  # how many tokens are added at most
    forced_start: np.ndarray  # of each row the first token, -1 for any
    forced_end: np.int32  # the last of all, -1 for any


class _CacheSizes(NamedTuple):
    """How a model's cache is made, as a static argument."""

    batch: int
    length: int
    room: int  # of the length, for tokens that are added
    options: tuple[tuple[str, Any], ...]

    def make(self, model: Any) -> Any:
        """Makes the cache, laid out over the mesh in scope."""
        cache = model.make_cache(self.batch, self.length, **dict(self.options))
        _lay_out_cache(cache)
        return cache


class _Progress(NamedTuple):
    """State from token to token, one row per prompt."""

    step: jax.Array  # how many tokens were added
    added: jax.Array  # (batch, bucket), -1 after a row has stopped
    last: jax.Array  # (batch,)
    stopped: jax.Array  # (batch,)
    failed: jax.Array  # (batch,), whether a logit was NaN
    seen: jax.Array | None  # (batch, vocab), where repetition has a penalty


@refuses_other_words("generate")
def generate(
    model: object,
    prompts: TokenRows | None = None,
    *,
    max_new_tokens: int,
    mask: TokenMask = None,
    inputs: Any = None,
    input_mask: TokenMask = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: int | Sequence[int] | None = None,
    seed: int | None = None,
    stream: bool = False,
    attention: AttentionKernel | None = None,
    cache_dtype: jax.typing.DTypeLike | None = None,
) -> Any:
    """Continues prompts.

    Options apply in the order of the arguments' list here: penalty, temperature, ``top_k``,
    ``top_p``, ``min_p``. Layers that draw random numbers in training mode (dropout) do so here too:
    call ``model.eval()`` first.

    A model on a mesh stays where it is: the cache is split over it as the kernels of ``kv_heads``
    are, and as rules in scope (``sx.axis_rules``) say of ``batch``.

    Args:
        model: A causal Module with ``make_cache(batch, length)``, called as ``model(tokens, mask=,
            cache=)``, such as ``Decoder``; or one that is only called as ``model(tokens)``, whose
            whole sequence is then computed anew for each token.
        prompts: Sequences of at least one integer each, of any lengths; or an array that is padded
            on the left or on the right, with a mask. Of an ``EncoderDecoder`` what its texts begin
            with; None for ``config.start_token`` in each row.
        max_new_tokens: How many tokens to add to each at most.
        mask: Of padded prompts True, or 1, for real tokens, such as the ``attention_mask`` of a
            tokenizer. Padding is left out: the texts are those of the real tokens alone.
        inputs: What an ``EncoderDecoder`` reads, a row for each prompt: sequences of integers, of
            any lengths; or of an encoder of other inputs the array that it takes.
        input_mask: The mask of inputs that are padded.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Draw from this many of the likeliest tokens only.
        top_p: Draw from the fewest tokens, likeliest first, that have this probability together.
        min_p: Draw from tokens that have this share of the likeliest one's probability at least.
        repetition_penalty: Logits of tokens that the row has are divided by it if positive, and
            multiplied if negative.
        stop: Tokens after which a row ends. None for those of ``model.generation_config``, which
            ``from_pretrained`` reads; ``()`` for none.
        seed: Seed of the sampling, from 0 to 2**32 - 1; equal seeds give equal samples. None draws
            another one at every call, from the operating system; processes of one run have the
            same.
        stream: Whether to return an iterator, which computes as it is read.
        attention: The kernel of attention, as for ``sx.kernels``; None for that of the scope. A
            cache is read by a mask, which ``"auto"`` takes into account and ``"splash"`` refuses.
        cache_dtype: Dtype of cached keys and values, given to ``make_cache`` as ``dtype=``;
            ``"int8"`` takes half the memory of bfloat16. None for the model's own.

    Returns:
        A list of int32 arrays, one for each prompt: the prompt and what was added, with the stop
        token if one came. With ``stream``, an iterator over int32 arrays of shape (batch,), the
        next token of each row, -1 in rows that have ended.

    Raises:
        GenerationError: If a prompt is empty or holds other than integers of the vocabulary, a mask
            has padding between real tokens, an option is out of range, the model has no head of
            tokens or no cache to have a dtype, or it returns NaN, or no logits; or if it is called
            while a function is traced.
        TypeError: For an option that there is not; names ours for one of ``transformers``.

    Example:
        >>> import jax, shardax as sx
        >>> model = sx.models.Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))
        >>> options = {"max_new_tokens": 4, "temperature": 0}
        >>> short, long = sx.models.generate(model, [[7], [1, 2, 3]], **options)
        >>> short.shape, long.shape
        ((5,), (7,))
        >>> [list(map(int, tokens)) for tokens in zip(
        ...     *sx.models.generate(model, [[7]], **options, stream=True))] == [short[1:].tolist()]
        True
    """
    if not is_eager():
        raise errors.inside_a_program()
    texts = config_of_texts(model) or GenerationConfig()

    # What is read.
    context = _as_inputs(model, inputs, input_mask)
    if prompts is None:
        if mask is not None:
            raise errors.mask_of_inputs()
        rows = read_rows(_beginnings(model, context, texts))
    else:
        rows = read_rows(prompts, mask)
        if mask is None and context is None:
            warn_of_padding(prompts, texts.pad, texts.stop, "prompts")
    if context is not None and len(rows) != len(context[0]):
        raise GenerationError(f"There are {len(rows)} prompts, but {len(context[0])} inputs.")

    # Whether the model can do it.
    _check_head(model)
    _OPTIONS.integers(0, max_new_tokens=max_new_tokens)
    _check_length(model, max(row.size for row in rows) + max_new_tokens)
    _check_vocabulary(model, rows)

    # How.
    filters = _filters_of(temperature, top_k, top_p, min_p, repetition_penalty)
    settings = _Settings(
        temperature=np.float32(temperature),
        top_p=np.float32(1 if top_p is None else top_p),
        min_p=np.float32(0 if min_p is None else min_p),
        penalty=np.float32(1 if repetition_penalty is None else repetition_penalty),
        stop=_as_stop(texts.stop) if stop is None else _as_stop(stop, _vocabulary_of(model)),
        seed=_as_seed(seed, filters.greedy),
        total=np.int32(max_new_tokens),
        forced_start=_forced_starts(texts, rows, context),
        forced_end=np.int32(-1 if texts.forced_end is None else texts.forced_end),
    )
    steps = _Steps(model, rows, max_new_tokens, filters, settings, attention)
    steps.set_inputs(context)
    if cache_dtype is not None:
        steps.set_cache_dtype(cache_dtype)
    if stream:
        return steps.stream()
    added = steps.run()
    return [np.concatenate([row, more[more >= 0]]) for row, more in zip(rows, added, strict=True)]


# What an encoder reads, and which of it is real (None for all).
_Inputs = tuple[Any, Any]


class _Steps:
    """One generation: its cache and progress."""

    def __init__(
        self,
        model: Any,
        rows: list[np.ndarray],
        limit: int,
        filters: _Filters,
        settings: _Settings,
        attention: AttentionKernel | None,
    ) -> None:
        self.attention: AttentionKernel | None = attention
        self.model = model if hasattr(model, "make_cache") else _uncached(model)
        self.rows, self.limit, self.filters, self.settings = rows, limit, filters, settings
        self.cache_options: dict[str, Any] = {}
        self.inputs: _Inputs | None = None

    def set_inputs(self, inputs: _Inputs | None) -> None:
        """Sets what an encoder reads, and the size of its cache."""
        if inputs is not None:
            self.inputs = inputs
            length = self.model.config.encoder.states_of(inputs[0].shape[1])
            self.cache_options["input_length"] = length

    def set_cache_dtype(self, dtype: jax.typing.DTypeLike) -> None:
        """Sets the dtype of the cache, or raises if there is none."""
        if isinstance(self.model, _Uncached):
            raise GenerationError(
                f"cache_dtype={dtype!r} is that of cached keys and values, and "
                f"{type(self.model.model).__name__} has no make_cache. Leave it out."
            )
        self.cache_options["dtype"] = dtype

    def run(self) -> np.ndarray:
        """Returns the added tokens, -1 after a row's end."""
        if self.limit == 0:
            return np.zeros((len(self.rows), 0), np.int32)
        with kernels(attention=self.attention), self._scope():
            cache, progress = self._start()
            if self.limit > 1:
                _, progress = self._advance(cache, progress, self.limit)
            return self._added(progress)[:, : self.limit]

    def stream(self) -> Iterator[np.ndarray]:
        """Yields the next token of each row, -1 after its end."""
        cache: Any = None
        progress: Any = None
        for step in range(self.limit):
            with kernels(attention=self.attention), self._scope():
                if step == 0:
                    cache, progress = self._start()
                else:
                    cache, progress = self._advance(cache, progress, step + 1)
                added = self._added(progress)[:, step]
            if (added < 0).all():
                return
            yield added

    def _added(self, progress: _Progress) -> np.ndarray:
        """Returns the tokens so far, or raises if logits were NaN."""
        failed = np.flatnonzero(_host(progress.failed))
        if failed.size:
            raise GenerationError(
                f"The model returned logits that are NaN for the prompts {failed.tolist()}, so no "
                f"token of them is likelier than another. Its parameters are NaN or too large for "
                f"its dtype, or it does not know a token or position that it was given."
            )
        return _host(progress.added)

    def _start(self) -> tuple[Any, _Progress]:
        """Reads the prompts and samples the first token."""
        longest, room = max(row.size for row in self.rows), _bucket(self.limit)
        # A token alone, such as the start of an EncoderDecoder's text, is computed once and not
        # sixteen times.
        length = 1 if longest == 1 else _bucket(longest)
        tokens = np.zeros((len(self.rows), length), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for place, row in enumerate(self.rows):
            tokens[place, length - row.size :], mask[place, length - row.size :] = row, True
        options = tuple(self.cache_options.items())
        sizes = _CacheSizes(len(self.rows), length + room, room, options)
        return prefill(
            self.model, tokens, mask, self.settings, self.inputs, sizes=sizes, filters=self.filters
        )

    def _advance(self, cache: Any, progress: _Progress, limit: int) -> tuple[Any, _Progress]:
        until = np.int32(limit)
        return decode_loop(self.model, cache, progress, until, self.settings, filters=self.filters)

    @contextlib.contextmanager
    def _scope(self) -> Generator[None]:
        """Enters the model's mesh, with rules for the cache."""
        entries: dict[str, Any] = {"kv_heads": None, "head_dim": None, "layers": None}
        mesh: Any = resolve_mesh()
        for _, variable in iter_variables(self.model):
            sharding = getattr(variable, "sharding", None)
            if isinstance(sharding, NamedSharding) and variable.axes is not None:
                mesh = sharding.mesh if mesh is None else mesh
                names = zip(variable.axes, sharding.spec, strict=False)
                entries |= {name: entry for name, entry in names if name in entries}
        if mesh is None:
            yield
            return
        rules = current_rules()
        if "batch" in rules.names:
            parts = [mesh.shape.get(axis, 1) for axis in mesh_axes_of(rules.spec(("batch",))[0])]
            if len(self.rows) % math.prod(parts):
                entries["batch"] = None
        else:
            entries["batch"] = None
        with contextlib.ExitStack() as stack:
            if resolve_mesh() is None:
                stack.enter_context(jax.set_mesh(mesh))
            stack.enter_context(axis_rules(rules.override(entries)))
            yield


@functools.partial(jit, static_argnames=("sizes", "filters"))
def prefill(
    model: Any,
    tokens: jax.Array,
    mask: jax.Array,
    settings: _Settings,
    inputs: tuple[jax.Array, jax.Array | None] | None,
    *,
    sizes: _CacheSizes,
    filters: _Filters,
) -> tuple[Any, _Progress]:
    """Reads the prompts into a new cache and samples the first token."""
    cache = sizes.make(model)
    tokens, mask = _by_rows(tokens), _by_rows(mask)
    if inputs is None:
        logits = model(tokens, mask=mask, cache=cache)
    else:
        values, real = (None if part is None else _by_rows(part) for part in inputs)
        states = model.encode(values, mask=real)
        logits = model.decode(tokens, states, context_mask=real, mask=mask, cache=cache)
    _check_logits(model, logits, tokens.shape[:1])
    logits = _by_rows(logits[:, -1])
    seen = None
    if filters.penalty:
        places = jnp.where(mask, tokens, logits.shape[-1])
        empty = _by_rows(jnp.zeros(logits.shape, bool))
        seen = jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(empty, places)
    batch = tokens.shape[0]
    progress = _Progress(
        jnp.int32(0),
        _by_rows(jnp.full((batch, sizes.room), -1, np.int32)),
        tokens[:, -1],
        _by_rows(jnp.zeros(batch, bool)),
        _by_rows(jnp.zeros(batch, bool)),
        seen,
    )
    _lay_out_cache(cache)
    return split(cache), _add(progress, logits, settings, filters)


@functools.partial(jit, static_argnames=("filters",), donate_argnames=("parts", "progress"))
def decode_loop(
    model: Any,
    parts: Any,
    progress: _Progress,
    limit: jax.Array | np.int32,
    settings: _Settings,
    *,
    filters: _Filters,
) -> tuple[Any, _Progress]:
    """Adds tokens until there are ``limit`` or all rows have stopped."""
    cache = merge(*parts)

    def goes_on(progress: _Progress) -> jax.Array:
        return (progress.step < limit) & ~jnp.all(progress.stopped | progress.failed)

    def body(progress: _Progress) -> _Progress:
        last, step_model = _within_step(model, progress.last)
        decoder = step_model.decoder if isinstance(step_model, EncoderDecoder) else step_model
        logits = decoder(last[:, None], cache=cache)[:, -1]
        return _add(progress, _by_rows(logits), settings, filters)

    progress = while_loop(goes_on, body, progress)
    return split(cache), progress


def _within_step(model: Any, last: jax.Array) -> tuple[jax.Array, Any]:
    """Keeps compilers from dequantizing kernels once, before all steps."""
    kernels = [v for _, v in iter_variables(model, Quantized)]
    if not kernels:
        return last, model
    last, values = jax.lax.optimization_barrier((last, [v.value for v in kernels]))
    new = {id(v): v.replace(value) for v, value in zip(kernels, values, strict=True)}
    chosen = select(model).at_instances_of(Quantized)
    return last, chosen.apply(lambda _, v: new[id(v)])


def _lay_out_cache(cache: Any) -> None:
    """Lays a cache out as rules in scope say of its axes."""
    mesh = resolve_mesh()
    if mesh is None:
        return
    for _, variable in iter_variables(cache, Cache):
        if variable.axes is not None:
            variable.value = constrain(variable.value, variable.axes, mesh)


def _add(
    progress: _Progress, logits: jax.Array, settings: _Settings, filters: _Filters
) -> _Progress:
    """Samples the next token of each row."""
    step, added, _, stopped, failed, seen = progress
    failed |= jnp.isnan(logits).any(axis=-1) & ~stopped
    chosen = _sample(logits.astype(jnp.float32), step, seen, settings, filters)
    chosen = _forced(chosen, step, settings)
    chosen = jnp.where(stopped, -1, chosen)
    added = jax.lax.dynamic_update_slice_in_dim(added, chosen[:, None], step, axis=1)
    if seen is not None:
        vocab = jax.lax.broadcasted_iota(np.int32, (1, seen.shape[1]), 1)
        seen |= chosen[:, None] == vocab
    stopped |= jnp.any(chosen[:, None] == settings.stop[None], axis=1)
    return _Progress(step + 1, added, jnp.maximum(chosen, 0), stopped, failed, seen)


def _forced(chosen: jax.Array, step: jax.Array, settings: _Settings) -> jax.Array:
    """Puts the tokens that texts must begin and end with in the place of others."""
    first = _by_rows(settings.forced_start)
    chosen = jnp.where((step == 0) & (first >= 0), first, chosen)
    is_last = (step + 1 == settings.total) & (settings.forced_end >= 0)
    return jnp.where(is_last, settings.forced_end, chosen)


def _sample(
    logits: jax.Array, step: jax.Array, seen, settings: _Settings, filters: _Filters
) -> jax.Array:
    """Draws one token per row from the filtered distribution."""
    if seen is not None:
        penalty = settings.penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if filters.greedy:
        return jnp.argmax(logits, axis=-1).astype(np.int32)
    logits = filter_logits(logits / settings.temperature, settings.top_p, settings.min_p, filters)
    key = jax.random.key(settings.seed)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(logits)))
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.argmax(logits + _by_rows(noise), axis=-1).astype(np.int32)


def filter_logits(
    logits: jax.Array,
    top_p: jax.Array | np.float32,
    min_p: jax.Array | np.float32,
    filters: _Filters,
) -> jax.Array:
    """Sets logits of tokens not to be drawn to minus infinity."""
    if filters.top_k is not None:
        threshold = jax.lax.top_k(logits, min(filters.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if filters.top_p:
        order = jnp.argsort(-logits, axis=-1)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        preceding = jnp.cumsum(probabilities, axis=-1) - probabilities
        is_kept = (preceding < top_p).at[:, 0].set(True)
        is_kept = jnp.take_along_axis(is_kept, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(is_kept, logits, -jnp.inf)
    if filters.min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


class _ReadTokens(Module):
    """Tokens read by a model without a cache."""

    def __init__(self, batch: int, length: int) -> None:
        self.tokens = Cache(jnp.zeros((batch, length), np.int32), axes=("batch", "cache"))
        self.count = Cache(jnp.zeros(batch, np.int32), axes=("batch",))


def _uncached(model: Any) -> _Uncached:
    """Returns a model with the calls of one that has a cache, or raises for a function of one."""
    try:
        return _Uncached(model)
    except StaticAttributeError as error:
        raise GenerationError(
            f"generate takes a model, but {_name_of(model)} is a function that holds one. Make the "
            "function the call of a Module with the model as an attribute."
        ) from error


class _Uncached(Module):
    """A model without cache, with the calls of one."""

    def __init__(self, model) -> None:
        self.model = model

    def make_cache(self, batch: int, length: int) -> _ReadTokens:
        return _ReadTokens(batch, length)

    def __call__(self, tokens: Any, *, mask: Any = None, cache: Any = None) -> jax.Array:
        length = cache.tokens.shape[1]
        mask = jnp.ones_like(tokens, bool) if mask is None else mask
        count = cache.count.value[:, None]
        places = jnp.where(mask, count + jnp.cumsum(mask, 1, dtype=np.int32) - 1, length)
        slots = jax.lax.broadcasted_iota(np.int32, (1, length, 1), 1)
        hits = places[:, None, :] == slots
        written = jnp.sum(jnp.where(hits, tokens[:, None, :], 0), -1, dtype=np.int32)
        cache.tokens.value = jnp.where(hits.any(-1), written, cache.tokens.value)
        count = count + jnp.sum(mask, 1, keepdims=True, dtype=np.int32)
        cache.count.value = count[:, 0]
        logits = self.model(cache.tokens.value)
        _check_logits(self.model, logits, cache.tokens.shape)
        logits = _by_rows(logits)
        at = jax.lax.broadcasted_iota(np.int32, (1, length), 1) == count - 1
        return jnp.sum(jnp.where(at[..., None], logits, 0), axis=1, keepdims=True)


def _by_rows(x: jax.typing.ArrayLike) -> jax.Array:
    """Lays rows out as rules say of ``batch``."""
    mesh = resolve_mesh()
    x = jnp.asarray(x)
    return x if mesh is None else constrain(x, ("batch", *[None] * (x.ndim - 1)), mesh)


@jit
def _whole(x: jax.Array) -> jax.Array:
    return constrain(x, (None,) * x.ndim, resolve_mesh())


def _host(x: jax.Array) -> np.ndarray:
    return np.asarray(x if x.is_fully_addressable else _whole(x))


def _bucket(size: int) -> int:
    """Returns the length that rows are padded to, so that few programs serve all lengths."""
    return max(16, 1 << (size - 1).bit_length())


def _as_inputs(model: Any, inputs: Any, mask: TokenMask) -> _Inputs | None:
    """Returns what an encoder reads, padded on the right, and its mask."""
    if isinstance(model, EncoderDecoder) == (inputs is None):
        said = "reads inputs, and was given none" if inputs is None else "takes no inputs"
        raise GenerationError(
            f"{type(model).__name__} {said}. generate(model, inputs=...) is for an EncoderDecoder, "
            f"generate(model, prompts) for others."
        )
    if inputs is None:
        if mask is not None:
            raise GenerationError("input_mask= is of inputs, and there are none; of prompts mask=.")
        return None
    if model.encoder.embed is None:
        features = np.asarray(inputs)
        if features.ndim != 3:
            raise GenerationError(
                f"The inputs of this {type(model).__name__} are an array of shape (batch, frames, "
                f"features), but one of shape {features.shape} was given."
            )
        if mask is not None:
            raise GenerationError(
                "input_mask= is of tokens; an encoder of features reads them all."
            )
        return features, None
    rows = read_rows(inputs, mask, name="input")
    if mask is None:
        texts = config_of_texts(model) or GenerationConfig()
        warn_of_padding(inputs, texts.pad, texts.stop, "inputs")
    _check_vocabulary(model.encoder, rows, "input")
    longest, config = max(row.size for row in rows), model.config.encoder
    most = config.positions.max_positions - config.positions.offset
    if config.positions.max_positions and longest > most:
        raise GenerationError(f"An input has {longest} tokens, but its encoder takes {most}.")
    tokens = np.zeros((len(rows), _bucket(longest)), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : row.size] = row
    lengths = np.array([row.size for row in rows])
    return tokens, np.arange(tokens.shape[1]) < lengths[:, None]


def _beginnings(model: Any, inputs: _Inputs | None, texts: GenerationConfig) -> list[list[int]]:
    """Returns the start token for each input."""
    start = None if inputs is None else model.config.start_token
    start = texts.start if start is None else start
    if inputs is None or start is None:
        raise GenerationError(
            "There are no prompts, and no config.start_token to begin with. Give a list of "
            "prompts, each a sequence of integers."
        )
    return [[start]] * len(inputs[0])


def _as_stop(stop, vocabulary: int | None = None) -> np.ndarray:
    """Returns stop tokens, padded to a bucket's size.

    Args:
        stop: A token, or several.
        vocabulary: How many tokens there are; None if that is not known, or if the files of a model
            name the tokens, which may know more of them than its embedding.
    """
    tokens = np.atleast_1d(np.asarray(stop if np.size(stop) else np.zeros(0, np.int32)))
    fits = tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer) and (tokens >= 0).all()
    _OPTIONS.check("stop", stop, bool(fits), "tokens, integers of at least 0")

    # The programs count in int32, in which a larger number would be another token.
    size = 2**31 if vocabulary is None else vocabulary
    _OPTIONS.check("stop", stop, bool((tokens < size).all()), f"tokens, integers below {size}")
    padded = np.full(_bucket(max(1, tokens.size)), -2, np.int32)
    padded[: tokens.size] = tokens
    return padded


def _as_seed(seed: int | None, is_greedy: bool) -> np.uint32:
    """Returns the input of the programs that numbers are drawn from."""
    if seed is not None:
        fits = Options.is_integer(seed) and 0 <= seed < 2**32
        _OPTIONS.check("seed", seed, fits, "an integer from 0 to 2**32 - 1")

    if is_greedy:
        return np.uint32(0)
    if seed is None:
        return np.uint32(from_main(secrets.randbits(32), "seed of generate"))
    return np.uint32(seed)


def _forced_starts(
    texts: GenerationConfig, rows: Sequence[np.ndarray], context: _Inputs | None
) -> np.ndarray:
    """Returns the first token that is added to each row, -1 for any."""
    forced = np.full(len(rows), -1, np.int32)
    if context is not None and texts.forced_start is not None:
        # Behind the start token alone; a prompt that goes on has its own.
        forced[[row.size == 1 for row in rows]] = texts.forced_start
    return forced


def _filters_of(temperature: float, top_k, top_p, min_p, penalty) -> _Filters:
    """Returns the filters of options, checked."""
    fits = 0 <= temperature < math.inf
    _OPTIONS.check("temperature", temperature, fits, "at least 0 and finite")
    if top_k is not None:
        _OPTIONS.integers(top_k=top_k)
    _OPTIONS.check("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1")
    _OPTIONS.check("min_p", min_p, min_p is None or 0 <= min_p <= 1, "from 0 to 1")
    fits = penalty is None or 0 < penalty < math.inf
    _OPTIONS.check("repetition_penalty", penalty, fits, "positive and finite")
    has_penalty = penalty is not None
    return _Filters(temperature == 0, top_k, top_p is not None, min_p is not None, has_penalty)


def max_positions_of(model: object) -> int:
    """Returns the number of learned positions of a model; 0 for none."""
    config = getattr(model, "config", None)
    positions = config.positions if isinstance(config, TransformerConfig) else config
    return getattr(positions, "max_positions", 0)


def _check_length(model: object, length: int) -> None:
    """Raises if a model with learned positions has too few."""
    most = max_positions_of(model)
    if most and length > most:
        raise GenerationError(
            f"Prompt and max_new_tokens make {length} tokens, but the model has max_positions="
            f"{most}."
        )


def _check_head(model: object) -> None:
    """Raises for a published model whose results are no logits of tokens."""
    config = getattr(model, "config", None)
    published = (TransformerConfig, ConvNeXtConfig, DualEncoderConfig, EncoderDecoderConfig)
    head = config.head if isinstance(config, published) else "tokens"
    if head != "tokens":
        raise GenerationError(
            f"A {type(model).__name__} with head={head!r} returns no logits of tokens, so it "
            f"cannot continue prompts; generate needs a model with head='tokens'."
        )


def _check_logits(model: object, logits: object, shape: tuple[int, ...]) -> None:
    """Raises for a result that is no logits of tokens of a shape, as far as that is known."""
    if isinstance(logits, jax.Array):
        is_floating = jnp.issubdtype(logits.dtype, np.floating)
        if is_floating and logits.ndim == 3 and logits.shape[: len(shape)] == shape:
            return
        returned = f"{logits.dtype}{list(logits.shape)}"
        hint = "A model of features needs a head of tokens"
    else:
        returned = f"a {type(logits).__name__}"
        hint = (
            "Of what sx.surgery.record made, use its own method, recording.generate(prompts, ...); "
            "of a model with further results, a Module whose call returns the logits alone"
        )
    known = ", ".join(map(str, shape)) if len(shape) == 2 else f"{shape[0]}, time"
    raise GenerationError(
        f"generate continues prompts by logits, floats of shape ({known}, vocab), but "
        f"{_name_of(model)} returned {returned}. {hint}."
    )


def _name_of(model: object) -> str:
    kind = type(model)
    return getattr(model, "__name__", kind.__name__) if callable(model) else kind.__name__


def _vocabulary_of(model: object) -> int | None:
    """Returns how many tokens a model's embedding has; None where it has none that is known."""
    holder = model.decoder if isinstance(model, EncoderDecoder) else model
    size = getattr(getattr(holder, "embed", None), "num_embeddings", None)
    return size if isinstance(size, int) else None


def _check_vocabulary(model: object, rows: list[np.ndarray], name: str = "prompt") -> None:
    """Raises for tokens outside the model's embedding."""
    size = _vocabulary_of(model)
    if size is None:
        return  # what it does not know gives NaN
    for place, row in enumerate(rows):
        if row.max() >= size:
            raise GenerationError(
                f"The {name} {place} has the token {row.max()}, but the model knows {size} tokens, "
                f"0 to {size - 1}. Is it the tokenizer of another model?"
            )
