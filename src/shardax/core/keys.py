# SPDX-License-Identifier: Apache-2.0
"""Key sources: recipes of random keys, and how many of them become keys at once.

A *key source* is a root (an integer seed or a key) and the integers to fold into it. It needs no
JAX operation until its key is asked for. The *words* of a key are its raw numbers, ``uint32[k]``,
on the host; with the name of the generator (*impl*) they are the key.

Keys are folded apart from the programs that use them, many in one call of one small program. That
program has a fixed size, so a deep model calls it more often but never compiles another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from shardax.core._jax import Tracer, is_eager

CHUNK = 64
"""Keys made by one call of the folding program."""

NO_MESH = AbstractMesh((), ())
"""For ``jax.sharding.use_abstract_mesh``: as if no mesh were in scope."""


class KeySource(NamedTuple):
    """The recipe of a random key.

    Attributes:
        root: An integer seed or a typed key array of shape ().
        folds: Integers folded into the root, in order (``jax.random.fold_in``).
    """

    root: Any
    folds: tuple[int, ...] = ()

    def fold(self, *data: int) -> KeySource:
        """Returns the source with more integers folded in."""
        return KeySource(self.root, self.folds + data)

    def root_key(self) -> jax.Array:
        """Returns the root as a typed key array of shape ()."""
        if not isinstance(self.root, int):
            return self.root
        # Words are kept, not keys: an array belongs to the mesh in scope when it was made.
        words = jax.numpy.asarray(_seed_words(self.root, prng_name()))
        return jax.random.wrap_key_data(words, impl=prng_name())

    @property
    def impl(self) -> Any:
        """The random generator that the key is for, as ``jax.random.key(seed, impl=...)``."""
        return prng_name() if isinstance(self.root, int) else jax.random.key_impl(self.root)


def prng_name() -> str:
    """Returns the name of JAX's default random generator."""
    # JAX makes its settings attributes at run time, so the type checker cannot know them.
    return str(jax.config.jax_default_prng_impl)  # pyright: ignore[reportAttributeAccessIssue]


def words_of(sources: Sequence[KeySource]) -> list[Any]:
    """Returns the words of several keys, folded together where no transform is tracing.

    Args:
        sources: The recipes; roots may be tracers.

    Returns:
        ``uint32[k]`` for each, in order, as ``key_words`` gives them.
    """
    if is_eager() and not any(isinstance(source.root, Tracer) for source in sources):
        return list(all_key_words(sources))
    return [key_words(source) for source in sources]


def key_words(source: KeySource) -> Any:
    """Returns the words of one key.

    Args:
        source: The recipe; its root may be a tracer.

    Returns:
        ``uint32[k]``: a NumPy array, or a tracer while a transform is tracing.
    """
    if is_eager() and not isinstance(source.root, Tracer):
        return all_key_words([source])[0]
    folds = np.asarray(source.folds, np.uint32)
    key = source.root_key()
    for position in range(len(source.folds)):
        key = jax.random.fold_in(key, folds[position])
    return jax.random.key_data(key)


def all_key_words(sources: Sequence[KeySource]) -> list[np.ndarray]:
    """Returns the words of many keys, folded in chunks. Only outside of traces.

    Args:
        sources: Recipes with concrete roots.

    Returns:
        ``uint32[k]`` for each, in order; the same words as folding one key at a time.

    Example:
        >>> import jax
        >>> words = all_key_words([KeySource(0, (1, 2)), KeySource(7)])
        >>> key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), 2)
        >>> words[0].tolist() == jax.random.key_data(key).tolist()
        True
    """
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return _fold_all(sources)


def _fold_all(sources: Sequence[KeySource]) -> list[np.ndarray]:
    roots: dict[int, np.ndarray] = {}
    words: list[Any] = [None] * len(sources)
    groups: dict[tuple[Any, int], list[int]] = {}
    for position, source in enumerate(sources):
        root = source.root
        if isinstance(root, int):
            words[position] = _seed_words(root, prng_name())
        else:
            if id(root) not in roots:
                roots[id(root)] = np.asarray(jax.random.key_data(root))
            words[position] = roots[id(root)]
        if source.folds:
            groups.setdefault((source.impl, len(source.folds)), []).append(position)
    pending = [
        (
            chunk,
            _fold_chunk(impl, count, [words[i] for i in chunk], [sources[i].folds for i in chunk]),
        )
        for (impl, count), positions in groups.items()
        for chunk in (positions[at : at + CHUNK] for at in range(0, len(positions), CHUNK))
    ]
    for chunk, folded in pending:
        rows = np.asarray(folded)
        for position, row in zip(chunk, rows, strict=False):  # the last rows are padding
            words[position] = row
    return words


def _fold_chunk(
    impl: Any, count: int, roots: Sequence[np.ndarray], folds: Sequence[tuple[int, ...]]
) -> jax.Array:
    padded = np.zeros((CHUNK, len(roots[0])), np.uint32)
    padded[: len(roots)] = roots
    data = np.zeros((CHUNK, count), np.uint32)
    data[: len(folds)] = folds
    return _fold_program(impl, count)(padded, data)


@functools.lru_cache(maxsize=64)
def _fold_program(impl: Any, count: int) -> Callable[[Any, Any], jax.Array]:
    def fold(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        words, data = row
        key = jax.random.wrap_key_data(words, impl=impl)
        for position in range(count):
            key = jax.random.fold_in(key, data[position])
        return jax.random.key_data(key)

    # A loop, not vmap: some generators give other numbers when they are batched.
    return jax.jit(lambda words, data: jax.lax.map(fold, (words, data)))


@functools.lru_cache(maxsize=256)
def _seed_words(seed: int, impl: str) -> np.ndarray:
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(NO_MESH):
        return np.asarray(jax.random.key_data(jax.random.key(seed, impl=impl)))
