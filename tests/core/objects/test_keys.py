# SPDX-License-Identifier: Apache-2.0
"""Many keys at once are the keys that JAX gives one at a time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardax._core.init.keys import CHUNK, KeySource, key_words, known_key_words

SOURCES = st.builds(
    KeySource,
    st.sampled_from([0, 1, 2**31 - 1]),
    st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
)


def words_one_by_one(source: KeySource) -> list[int]:
    key = source.root_key()
    for number in source.folds:
        key = jax.random.fold_in(key, np.uint32(number))
    return jax.random.key_data(key).tolist()


@settings(max_examples=20)
@given(st.lists(SOURCES, max_size=6))
def test_key_words_equal_individually_folded_keys(sources: list[KeySource]) -> None:
    found = [words.tolist() for words in known_key_words(sources)]
    assert found == [words_one_by_one(source) for source in sources]


def test_keys_beyond_one_chunk_stay_in_order() -> None:
    sources = [KeySource(0, (number,)) for number in range(2 * CHUNK + 3)]
    words = [tuple(row.tolist()) for row in known_key_words(sources)]
    assert len(set(words)) == len(sources)
    for position in (0, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 2):
        assert list(words[position]) == words_one_by_one(sources[position])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_roots_may_be_keys_of_any_generator(impl: str) -> None:
    root = jax.random.key(9, impl=impl)
    sources = [KeySource(root), KeySource(root, (1, 2)), KeySource(4, (3,))]
    found = [words.tolist() for words in known_key_words(sources)]
    assert found == [words_one_by_one(source) for source in sources]
    assert [source.impl for source in sources] == [impl, impl, "threefry2x32"]


def test_words_inside_trace_are_traced() -> None:
    def draw(root: Any) -> jax.Array:
        return key_words([KeySource(root, (5,))])[0]

    root = jax.random.key(1)
    assert jax.jit(draw)(root).tolist() == words_one_by_one(KeySource(root, (5,)))
    seeded = jax.jit(lambda: key_words([KeySource(1, (5,))])[0])
    assert seeded().tolist() == words_one_by_one(KeySource(1, (5,)))


def test_mesh_in_scope_changes_nothing() -> None:
    sources = [KeySource(77, (1,)), KeySource(78)]
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        found = [words.tolist() for words in known_key_words(sources)]
    assert found == [words_one_by_one(source) for source in sources]


def test_seed_used_on_one_mesh_works_on_another() -> None:
    drawn = jax.jit(lambda: key_words([KeySource(79, (1,))])[0])
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        for count in (8, 4):
            mesh = jax.make_mesh((count,), ("data",), (kind,), devices=jax.devices()[:count])
            with jax.set_mesh(mesh):
                assert drawn().tolist() == words_one_by_one(KeySource(79, (1,)))
