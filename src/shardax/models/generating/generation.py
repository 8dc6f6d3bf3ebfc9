# SPDX-License-Identifier: Apache-2.0
"""Generation of tokens with a cache.

Prompts of different lengths are padded on the left to one length. Two programs continue them:

    prefill         reads all prompts into a new cache and samples the first token of each row
    decode_loop     samples all others, over a cache that is donated to it

Each is compiled once, as by any ``jit``, for one model in one scope, for the shapes that follow
from ``Sizes``, and for the kinds of sampling (``Filters``). Of the sizes, the number of prompts is
as it is; the length of prompts, and the room for new tokens, are rounded up to powers of two of at
least 16, but for prompts of one token, whose length is 1. How many tokens are wanted is an input of
the loop: another number of them within the room compiles nothing, and a stream is the same loop,
run until there is one more token. Where one token is wanted in all, the loop is not run.

The cache is made by the first program and handed to the second one as arrays with their
``GraphDef``: a compiled call flattens an object that it has not seen, and a cache is new at every
call, which would take longer than some models need for a token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Quantized, iter_variables, jit, kernels, merge, select, split, while_loop
from shardax.extend import Options, is_eager
from shardax.models.encoder_decoder import EncoderDecoder
from shardax.models.generating import errors
from shardax.models.generating.arrays import (
    bucket,
    by_rows,
    lay_out_cache,
    model_layout_scope,
    to_host,
)
from shardax.models.generating.checks import (
    check_head,
    check_length,
    check_logits,
    check_vocabulary,
    vocabulary_of,
)
from shardax.models.generating.config import GenerationConfig, config_of_texts
from shardax.models.generating.errors import GenerationError
from shardax.models.generating.inputs import Inputs, as_inputs, beginnings, forced_starts
from shardax.models.generating.prompts import TokenMask, TokenRows, read_rows, warn_of_padding
from shardax.models.generating.sampling import (
    Filters,
    Progress,
    Settings,
    add_token,
    as_seed,
    as_stop,
    filters_of,
)
from shardax.models.generating.uncached import Uncached, uncached
from shardax.models.words import refuses_other_words
from shardax.nn.attention.dot_product import AttentionKernel

_OPTIONS = Options(GenerationError)


class Sizes(NamedTuple):
    """Sizes of the arrays of a generation, for which its programs are compiled.

    Two prompts of 3 and 20 tokens that get up to 5 more have tokens of shape (2, 32) and room for
    16 tokens, in a cache of 48 positions: keys and values of an ordinary layer are of shape (2, 48,
    kv_heads, head_dim), of one with a window of fewer positions than 48 as long as that. Stacked
    layers have a dimension more in front; latent and recurrent layers have shapes of their own.
    """

    batch: int  # how many prompts
    prompt: int  # length that prompts are padded to
    room: int  # how many tokens can be added
    cache_options: tuple[tuple[str, Any], ...]  # further ones of ``make_cache``

    @classmethod
    def of(cls, rows: list[np.ndarray], max_new: int, cache_options: dict[str, Any]) -> Sizes:
        """Returns the sizes for prompts and the number of tokens to add."""
        longest = max(row.size for row in rows)
        # A token alone, such as the start of an EncoderDecoder's text, is computed once and not
        # sixteen times.
        prompt = 1 if longest == 1 else bucket(longest)
        return cls(len(rows), prompt, bucket(max_new), tuple(cache_options.items()))

    def pad(self, rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens padded on the left, of shape (batch, prompt), and their mask."""
        tokens = np.zeros((self.batch, self.prompt), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for index, row in enumerate(rows):
            tokens[index, self.prompt - row.size :] = row
            mask[index, self.prompt - row.size :] = True
        return tokens, mask

    def make_cache(self, model: Any) -> Any:
        """Makes the cache of (batch, prompt + room) positions, laid out over the mesh in scope."""
        cache = model.make_cache(self.batch, self.prompt + self.room, **dict(self.cache_options))
        lay_out_cache(cache)
        return cache


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
    context = as_inputs(model, inputs, input_mask)
    if prompts is None:
        if mask is not None:
            raise errors.mask_of_inputs()
        rows = read_rows(beginnings(model, context, texts))
    else:
        rows = read_rows(prompts, mask)
        if mask is None and context is None:
            warn_of_padding(prompts, texts.pad, texts.stop, "prompts")
    if context is not None and len(rows) != len(context[0]):
        raise GenerationError(f"There are {len(rows)} prompts, but {len(context[0])} inputs.")

    # Whether the model can do it.
    check_head(model)
    _OPTIONS.integers(0, max_new_tokens=max_new_tokens)
    check_length(model, max(row.size for row in rows) + max_new_tokens)
    check_vocabulary(model, rows)

    # How.
    filters = filters_of(temperature, top_k, top_p, min_p, repetition_penalty)
    settings = Settings(
        temperature=np.float32(temperature),
        top_p=np.float32(1 if top_p is None else top_p),
        min_p=np.float32(0 if min_p is None else min_p),
        penalty=np.float32(1 if repetition_penalty is None else repetition_penalty),
        stop=as_stop(texts.stop) if stop is None else as_stop(stop, vocabulary_of(model)),
        seed=as_seed(seed, filters.greedy),
        total=np.int32(max_new_tokens),
        forced_start=forced_starts(texts, rows, context),
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


class _Steps:
    """One generation: its cache and progress."""

    def __init__(
        self,
        model: Any,
        rows: list[np.ndarray],
        max_new: int,
        filters: Filters,
        settings: Settings,
        attention: AttentionKernel | None,
    ) -> None:
        self.attention: AttentionKernel | None = attention
        self.model = model if hasattr(model, "make_cache") else uncached(model)
        self.rows, self.max_new = rows, max_new
        self.filters, self.settings = filters, settings

        # Of the model's ``make_cache``, set below.
        self.cache_options: dict[str, Any] = {}
        self.inputs: Inputs | None = None

    def set_inputs(self, inputs: Inputs | None) -> None:
        """Sets what an encoder reads, and the size of its cache."""
        if inputs is not None:
            self.inputs = inputs
            length = self.model.config.encoder.states_of(inputs[0].shape[1])
            self.cache_options["input_length"] = length

    def set_cache_dtype(self, dtype: jax.typing.DTypeLike) -> None:
        """Sets the dtype of the cache, or raises if there is none."""
        if isinstance(self.model, Uncached):
            raise GenerationError(
                f"cache_dtype={dtype!r} is that of cached keys and values, and "
                f"{type(self.model.model).__name__} has no make_cache. Leave it out."
            )
        self.cache_options["dtype"] = dtype

    def run(self) -> np.ndarray:
        """Returns the added tokens, -1 after a row's end."""
        if self.max_new == 0:
            return np.zeros((len(self.rows), 0), np.int32)

        with kernels(attention=self.attention), model_layout_scope(self.model, len(self.rows)):
            cache, progress = self._start()
            if self.max_new > 1:
                _, progress = self._advance(cache, progress, self.max_new)
            return self._added(progress)[:, : self.max_new]

    def stream(self) -> Iterator[np.ndarray]:
        """Yields the next token of each row, -1 after its end."""
        cache: Any = None
        progress: Any = None
        for step in range(self.max_new):
            with kernels(attention=self.attention), model_layout_scope(self.model, len(self.rows)):
                if step == 0:
                    cache, progress = self._start()
                else:
                    cache, progress = self._advance(cache, progress, step + 1)
                added = self._added(progress)[:, step]
            if (added < 0).all():
                return
            yield added

    def _added(self, progress: Progress) -> np.ndarray:
        """Returns the tokens so far, or raises if logits were NaN."""
        failed = np.flatnonzero(to_host(progress.failed))
        if failed.size:
            raise GenerationError(
                f"The model returned logits that are NaN for the prompts {failed.tolist()}, so no "
                f"token of them is likelier than another. Its parameters are NaN or too large for "
                f"its dtype, or it does not know a token or position that it was given."
            )
        return to_host(progress.added)

    def _start(self) -> tuple[Any, Progress]:
        """Reads the prompts and samples the first token."""
        sizes = Sizes.of(self.rows, self.max_new, self.cache_options)
        tokens, mask = sizes.pad(self.rows)
        return prefill(
            self.model, tokens, mask, self.settings, self.inputs, sizes=sizes, filters=self.filters
        )

    def _advance(self, cache: Any, progress: Progress, until: int) -> tuple[Any, Progress]:
        count = np.int32(until)
        return decode_loop(self.model, cache, progress, count, self.settings, filters=self.filters)


@functools.partial(jit, static_argnames=("sizes", "filters"))
def prefill(
    model: Any,
    tokens: jax.Array,
    mask: jax.Array,
    settings: Settings,
    inputs: tuple[jax.Array, jax.Array | None] | None,
    *,
    sizes: Sizes,
    filters: Filters,
) -> tuple[Any, Progress]:
    """Reads the prompts into a new cache and samples the first token."""
    cache = sizes.make_cache(model)
    tokens, mask = by_rows(tokens), by_rows(mask)

    if inputs is None:
        logits = model(tokens, mask=mask, cache=cache)
    else:
        values, real = (None if part is None else by_rows(part) for part in inputs)
        states = model.encode(values, mask=real)
        logits = model.decode(tokens, states, context_mask=real, mask=mask, cache=cache)
    check_logits(model, logits, tokens.shape[:1])
    logits = by_rows(logits[:, -1])  # padding is on the left, so these are of each row's last token

    seen = None
    if filters.penalty:
        # Padding is beyond the vocabulary, which the scatter drops.
        columns = jnp.where(mask, tokens, logits.shape[-1])
        empty = by_rows(jnp.zeros(logits.shape, bool))
        seen = jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(empty, columns)

    progress = Progress(
        step=jnp.int32(0),
        added=by_rows(jnp.full((sizes.batch, sizes.room), -1, np.int32)),
        last=tokens[:, -1],
        stopped=by_rows(jnp.zeros(sizes.batch, bool)),
        failed=by_rows(jnp.zeros(sizes.batch, bool)),
        seen=seen,
    )
    lay_out_cache(cache)
    return split(cache), add_token(progress, logits, settings, filters)


@functools.partial(jit, static_argnames=("filters",), donate_argnames=("parts", "progress"))
def decode_loop(
    model: Any,
    parts: Any,
    progress: Progress,
    until: jax.Array | np.int32,
    settings: Settings,
    *,
    filters: Filters,
) -> tuple[Any, Progress]:
    """Adds tokens until there are ``until`` of them or all rows have stopped."""
    cache = merge(*parts)

    def goes_on(progress: Progress) -> jax.Array:
        return (progress.step < until) & ~jnp.all(progress.stopped | progress.failed)

    def body(progress: Progress) -> Progress:
        last, step_model = _within_step(model, progress.last)
        decoder = step_model.decoder if isinstance(step_model, EncoderDecoder) else step_model
        logits = decoder(last[:, None], cache=cache)[:, -1]
        return add_token(progress, by_rows(logits), settings, filters)

    progress = while_loop(goes_on, body, progress)
    return split(cache), progress


def _within_step(model: Any, last: jax.Array) -> tuple[jax.Array, Any]:
    """Keeps compilers from dequantizing kernels once, before all steps."""
    quantized = [variable for _, variable in iter_variables(model, Quantized)]
    if not quantized:
        return last, model

    # Dequantized before the loop, kernels would take the memory that their integers save.
    values = [variable.value for variable in quantized]
    last, values = jax.lax.optimization_barrier((last, values))
    pairs = zip(quantized, values, strict=True)
    new = {id(variable): variable.replace(value) for variable, value in pairs}
    chosen = select(model).at_instances_of(Quantized)
    return last, chosen.apply(lambda _, variable: new[id(variable)])
