# SPDX-License-Identifier: Apache-2.0
"""Sources and words of random keys.

A *key source* is a root (an integer seed or a key) and the integers to fold into it. It needs no
JAX operation until its key is asked for, so a model is built without one.

The *words* of a key are its raw numbers, ``uint32[k]``, on the host. Together with the name of the
random generator (*impl*) they are the key. Words are kept where keys could be, since a key is an
array and belongs to the mesh that was in scope when it was made.

Many keys are folded at once: those of JAX's default generator by NumPy, those of any other one by a
small program of a fixed size. So a deep model calls that program more often and compiles no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from shardax._core._jax import Tracer
from shardax._core.frames import is_eager

# The name of a random generator, as ``jax.random.key(seed, impl=...)`` takes it.
KeyImpl = Hashable
# ``uint32[k]``, on the host or traced.
Words = np.ndarray | jax.Array

CHUNK = 64  # keys made by one call of the folding program

# For ``jax.sharding.use_abstract_mesh``: as if no mesh were in scope.
NO_MESH = AbstractMesh((), ())

# The generator that NumPy computes here (``threefry_fold``), which is JAX's default.
_THREEFRY = "threefry2x32"


class KeySource(NamedTuple):
    """How to make a random key: a root, and the integers to fold into it."""

    root: int | jax.Array  # an integer seed, or a typed key array of shape ()
    folds: tuple[int, ...] = ()  # folded into it in this order

    def fold(self, *data: int) -> KeySource:
        """Returns the source with more integers folded in."""
        return KeySource(self.root, self.folds + data)

    @property
    def is_traced(self) -> bool:
        """Whether the root is a tracer, so that the key is known inside of that trace only."""
        return isinstance(self.root, Tracer)

    @property
    def impl(self) -> KeyImpl:
        """The random generator that the key is for."""
        if isinstance(self.root, int):
            return default_impl()
        return jax.random.key_impl(self.root)

    def root_key(self) -> jax.Array:
        """Returns the root as a typed key array of shape ()."""
        if not isinstance(self.root, int):
            return self.root

        words = jnp.asarray(seed_words(self.root, default_impl()))
        return jax.random.wrap_key_data(words, impl=default_impl())


# JAX makes its settings attributes at run time, so type checkers cannot know them.
_DEFAULT_PRNG = "jax_default_prng_impl"


def default_impl() -> str:
    """Returns the name of JAX's default random generator."""
    return str(getattr(jax.config, _DEFAULT_PRNG))


def key_words(sources: Sequence[KeySource]) -> list[Words]:
    """Returns the words of keys: inside of a trace by its operations, else all together."""
    if is_eager() and not any(source.is_traced for source in sources):
        return list(known_key_words(sources))
    return [_traced_key_words(source) for source in sources]


def _traced_key_words(source: KeySource) -> jax.Array:
    key = source.root_key()
    for data in np.asarray(source.folds, np.uint32):
        key = jax.random.fold_in(key, data)
    return jax.random.key_data(key)


def known_key_words(sources: Sequence[KeySource]) -> list[np.ndarray]:
    """Returns the words of many keys, none of them traced, outside of traces."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        words = _root_words(sources)

        # Keys of one generator with equally many folds are folded together.
        groups: dict[tuple[KeyImpl, int], list[int]] = {}
        for position, source in enumerate(sources):
            if source.folds:
                groups.setdefault((source.impl, len(source.folds)), []).append(position)

        for (impl, _), positions in groups.items():
            roots = np.stack([words[position] for position in positions])
            folds = np.array([sources[position].folds for position in positions], np.uint32)
            folded = _fold_all(impl, roots, folds)
            for position, key in zip(positions, folded, strict=True):
                words[position] = key

    return words


def _root_words(sources: Sequence[KeySource]) -> list[np.ndarray]:
    """Returns the words of the roots; each key array is fetched once."""
    fetched: dict[int, np.ndarray] = {}
    words = []
    for source in sources:
        root = source.root
        if isinstance(root, int):
            words.append(seed_words(root, default_impl()))
            continue
        if id(root) not in fetched:
            fetched[id(root)] = np.asarray(jax.random.key_data(root))
        words.append(fetched[id(root)])
    return words


def _fold_all(impl: KeyImpl, keys: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Returns keys ``(n, k)`` with the integers ``(n, count)`` folded in, one column at a time."""
    if str(impl) == _THREEFRY:
        for column in folds.T:
            keys = threefry_fold(keys, column)
        return keys

    # All chunks are on their way before the first one is fetched.
    program = _fold_program(impl)
    chunks = [
        program(_padded(keys[start : start + CHUNK]), _padded(folds[start : start + CHUNK]))
        for start in range(0, len(keys), CHUNK)
    ]
    return np.concatenate([np.asarray(chunk) for chunk in chunks])[: len(keys)]


def _padded(rows: np.ndarray) -> np.ndarray:
    """Returns rows with zeros below them, ``CHUNK`` in all."""
    padded = np.zeros((CHUNK, rows.shape[1]), np.uint32)
    padded[: len(rows)] = rows
    return padded


def threefry_fold(keys: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Folds ``data`` (n,) into keys (n, 2), as ``jax.random.fold_in``."""
    # Threefry-2x32 with 20 rounds (J. Salmon and others, "Parallel random numbers: as easy as 1, 2,
    # 3", 2011), on the host: the program for it takes longer to load than the first model to draw.
    schedule = (keys[:, 0], keys[:, 1], keys[:, 0] ^ keys[:, 1] ^ np.uint32(0x1BD11BDA))
    left = schedule[0].copy()
    right = data.astype(np.uint32) + schedule[1]

    for group in range(5):
        for shift in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            left = left + right
            right = (right << np.uint32(shift) | right >> np.uint32(32 - shift)) ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + np.uint32(group + 1)

    return np.stack([left, right], axis=1)


@functools.lru_cache(maxsize=64)
def _fold_program(impl: KeyImpl) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """Returns the compiled function of keys ``(CHUNK, k)`` and integers ``(CHUNK, count)``."""

    def fold(key_and_data: tuple[jax.Array, jax.Array]) -> jax.Array:
        words, data = key_and_data
        key = jax.random.wrap_key_data(words, impl=impl)
        for position in range(data.shape[0]):
            key = jax.random.fold_in(key, data[position])
        return jax.random.key_data(key)

    # A loop, not vmap: some generators give other numbers when they are batched.
    return jax.jit(lambda words, data: jax.lax.map(fold, (words, data)))


@functools.lru_cache(maxsize=256)
def seed_words(seed: int, impl: str) -> np.ndarray:
    """Returns the words of the key of a seed."""
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(NO_MESH):
        return np.asarray(jax.random.key_data(jax.random.key(seed, impl=impl)))


@functools.lru_cache(maxsize=16)
def words_type(impl: KeyImpl) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the words of one key."""
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    # Kept for all calls, so without its sharding: that is over the mesh in scope now.
    return jax.ShapeDtypeStruct(words.shape, words.dtype)


@functools.lru_cache(maxsize=8)
def key_dtype(impl: str) -> jax.typing.DTypeLike:
    """Returns the dtype of the typed keys of a generator."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
