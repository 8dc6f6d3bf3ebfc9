# SPDX-License-Identifier: Apache-2.0
"""The global random stream, for eager random numbers without keys.

The *stream* is a base key and a count: the n-th draw uses the base key with n folded in, as a
stream of ``Rngs`` does. So ``seed(s)`` followed by draws gives the keys of ``Rngs(s)``. Its *state*
is a few integers. A stream that was never seeded starts from 128 bits of the operating system, so
processes started at the same moment differ.

One stream serves all threads, under a lock, so no two draws share a key; which thread gets which is
up to their timing. *Isolated* code draws from a stream of its own, which belongs to the context
(thread or ``asyncio`` task) that entered it, so its numbers do not depend on timing.

While a transform is tracing, a draw would happen once and its numbers stay in the program as
constants, and a tracer could end up in the stream; so there it raises, and ``Rngs`` is the way.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import numpy as np

from shardax._core.frames import is_eager
from shardax._core.init import keys, lazy
from shardax._core.init.rng import key_value, seed_source
from shardax.random import errors

WORD = 2**32  # a word of a key is below


@dataclass(frozen=True)
class StreamState:
    """The state of a stream: plain integers, for pickle and JSON.

    Attributes:
        impl: Name of the random generator, as in ``jax.random.key(seed, impl=...)``.
        words: The words of the base key, each in [0, 2**32).
        count: How many draws were taken.

    Raises:
        ModuleError: If they are not the words of a key of that generator, or not a count.

    Example:
        >>> import dataclasses, json, shardax as sx
        >>> sx.random.seed(7)
        >>> state = sx.random.get_state()
        >>> state
        StreamState(impl='threefry2x32', words=(0, 7), count=0)
        >>> sx.random.StreamState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state
        True
    """

    impl: str
    words: tuple[int, ...]
    count: int

    def __post_init__(self) -> None:
        words = tuple(self.words)
        object.__setattr__(self, "words", words)

        word_count = key_size(self.impl)
        are_integers = all(type(number) is int for number in (*words, self.count))
        if (
            not are_integers
            or not all(0 <= word < WORD for word in words)
            or self.count < 0
            or len(words) != word_count
        ):
            raise errors.impossible_state(self.impl, words, self.count, word_count)


@functools.lru_cache(maxsize=16)
def key_size(impl: str) -> int:
    """Returns the number of words of a random generator's key."""
    try:
        return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).size
    except (ValueError, TypeError) as error:
        raise errors.unknown_generator(impl, error) from error


class KeyStream:
    """A stream that threads may share.

    Args:
        source: Where it starts; None for a seed of the operating system, taken at the first draw.
    """

    def __init__(self, source: keys.KeySource | StreamState | None) -> None:
        self._lock = threading.Lock()
        self.restart(source)

    def restart(self, source: keys.KeySource | StreamState | None) -> None:
        """Starts anew."""
        with self._lock:
            self._source = source
            self._base: tuple[str, np.ndarray] | None = None
            self._count = source.count if isinstance(source, StreamState) else 0

    @contextlib.contextmanager
    def drawing(self) -> Generator[tuple[str, np.ndarray, tuple[np.uint32, ...]]]:
        """Yields generator, words of the base key, and what to fold in; counts the draw at the end.

        A block that raises has taken no draw.
        """
        with self._lock:
            impl, words = self._base_key()
            high, low = divmod(self._count, WORD)
            folds = (low, high) if high else (low,)
            yield impl, words, tuple(np.uint32(fold) for fold in folds)
            self._count += 1

    def state(self) -> StreamState:
        """Returns the present state."""
        with self._lock:
            impl, words = self._base_key()
            return StreamState(impl, tuple(words.tolist()), self._count)

    def _base_key(self) -> tuple[str, np.ndarray]:
        """Returns generator and words of the base key, computed once; under the lock."""
        if self._base is None:
            self._base = self._compute_base_key()
        return self._base

    def _compute_base_key(self) -> tuple[str, np.ndarray]:
        source = self._source
        if isinstance(source, StreamState):
            return source.impl, np.asarray(source.words, np.uint32)

        if source is None:
            if jax.process_count() > 1:
                raise errors.never_seeded(jax.process_count())
            source = seed_source(secrets.randbits(128))
        (words,) = keys.known_key_words([source])
        return str(source.impl), words


_of_all_threads = KeyStream(None)
_isolated: ContextVar[KeyStream | None] = ContextVar("shardax_random_stream", default=None)


def current_stream(function: str) -> KeyStream:
    """Returns the stream of this context, for a public function; raises while tracing."""
    if not is_eager():
        raise errors.drawn_while_tracing(function)
    return _isolated.get() or _of_all_threads


def as_source(seed: int | jax.Array | StreamState) -> keys.KeySource | StreamState:
    """Returns the start of a stream, from a seed, key or state."""
    if isinstance(seed, StreamState):
        return seed

    key = key_value(seed)
    if isinstance(key, lazy.LazyKey):
        return key.source
    if key.ndim:
        raise errors.several_keys(key)
    return keys.KeySource(key)


def seed(seed: int | jax.Array) -> None:
    """Restarts the stream from a seed.

    Inside ``isolated`` code it restarts the stream there. Equal seeds give equal numbers in every
    process, on every platform, with 64 bits enabled or not. An integer runs no JAX operation.

    Args:
        seed: An integer of any size, or a random key of shape ().

    Raises:
        ModuleError: If it is neither.
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> sx.random.seed(0)
        >>> first = sx.random.normal(3)
        >>> sx.random.seed(0)
        >>> bool((sx.random.normal(3) == first).all())
        True
    """
    current_stream("seed").restart(as_source(seed))


def get_state() -> StreamState:
    """Returns the state of the stream; starts JAX's backend.

    Returns:
        Plain integers, see ``StreamState``.

    Raises:
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> saved = sx.random.get_state()
        >>> numbers = sx.random.uniform(4)
        >>> sx.random.set_state(saved)
        >>> bool((sx.random.uniform(4) == numbers).all())
        True
    """
    return current_stream("get_state").state()


def set_state(state: StreamState) -> None:
    """Continues the stream from a state.

    Args:
        state: A result of ``get_state``, in this process or another.

    Raises:
        ModuleError: If it is not a state.
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> sx.random.set_state(sx.random.StreamState("threefry2x32", (0, 7), count=3))
        >>> sx.random.get_state().count
        3
    """
    stream = current_stream("set_state")
    if not isinstance(state, StreamState):
        raise errors.not_a_state(state)
    stream.restart(state)


@contextlib.contextmanager
def isolated(seed: int | jax.Array | StreamState) -> Generator[None]:
    """Draws from a separate stream in a ``with`` block or function.

    The stream belongs to the context that enters the block: other threads and tasks do not see it.

    Args:
        seed: An integer, a random key of shape (), or a ``StreamState``.

    Yields:
        Nothing.

    Raises:
        ModuleError: If it is none of these.
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> sx.random.seed(0)
        >>> with sx.random.isolated(1):
        ...     evaluation = sx.random.permutation(5)
        >>> sx.random.get_state().count
        0
    """
    current_stream("isolated")
    token = _isolated.set(KeyStream(as_source(seed)))
    try:
        yield
    finally:
        _isolated.reset(token)
