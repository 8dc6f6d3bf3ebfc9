# SPDX-License-Identifier: Apache-2.0
"""The global stream: seeds, saved state, isolation, threads, processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax._core.init.keys import seed_words
from shardax._core.init.rng import seed_source
from shardax.errors import ModuleError
from shardax.random import StreamState
from shardax.random.stream import KeyStream


def words(key: jax.Array) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def next_words(draws: int = 1) -> list[tuple[int, ...]]:
    return [words(sx.random.key()) for _ in range(draws)]


# --- seeds ---


def test_equal_seeds_repeat_numbers_and_others_differ() -> None:
    sx.random.seed(5)
    first = next_words(3)
    sx.random.seed(5)
    assert next_words(3) == first
    sx.random.seed(6)
    assert not set(next_words(3)) & set(first)


@pytest.mark.parametrize(
    "seed",
    [0, 7, -1, 2**32 - 1, 2**40, np.int64(2**40), np.asarray(3), jnp.asarray(3), jax.random.key(3)],
    ids=["0", "7", "negative", "32 bits", "wide", "numpy", "numpy array", "array", "key"],
)
def test_keys_equal_those_of_rngs(seed: Any) -> None:
    sx.random.seed(seed)
    rngs = sx.Rngs(seed)
    assert next_words(2) == [words(rngs()), words(rngs())]


def test_seeds_beyond_32_bits_stay_apart() -> None:
    seeds = [0, 2**32, 2**33, 2**64, 2**64 + 2**32, -(2**32), 2**128, 1, 2**32 + 1]
    assert words(jax.random.key(2**32)) == words(jax.random.key(0))  # the trap
    streams, named = set(), set()
    for seed in seeds:
        sx.random.seed(seed)
        streams.add(next_words()[0])
        named.add(words(sx.Rngs(noise=seed).noise()))
    assert len(streams) == len(named) == len(seeds)


@given(st.integers(), st.integers())
def test_sources_of_different_seeds_differ(one: int, other: int) -> None:
    assert (seed_source(one) == seed_source(other)) == (one == other)


@pytest.mark.parametrize("seed", [2**40, 2**32 - 2, -2])
def test_seeds_give_equal_keys_with_64_bits(seed: int) -> None:
    sx.random.seed(seed)
    narrow = next_words()
    seed_words.cache_clear()
    with jax.enable_x64(True):
        sx.random.seed(seed)
        assert next_words() == narrow


@pytest.mark.parametrize("seed", [None, True, 1.5, "seed", (0, 1)], ids=repr)
def test_invalid_seeds_are_refused_and_change_nothing(seed: Any) -> None:
    before = sx.random.get_state()
    with pytest.raises(ModuleError, match="integer seed or a random key"):
        sx.random.seed(seed)
    with pytest.raises(ModuleError), sx.random.isolated(seed):
        pass
    assert sx.random.get_state() == before


def test_seed_refuses_many_keys() -> None:
    with pytest.raises(ModuleError, match=r"4 of shape \(2, 2\).*key\[0\]"):
        sx.random.seed(jax.random.split(jax.random.key(0), (2, 2)))


# --- saved state ---


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_saved_state_resumes_after_json_and_pickle(impl: str) -> None:
    sx.random.seed(jax.random.key(3, impl=impl))
    sx.random.normal(2)
    saved = sx.random.get_state()
    assert (saved.impl, saved.count) == (impl, 1)
    following = next_words(2)
    through_json = StreamState(**json.loads(json.dumps(dataclasses.asdict(saved))))
    for state in (saved, pickle.loads(pickle.dumps(saved)), through_json):
        sx.random.set_state(state)
        assert next_words(2) == following


def test_counts_beyond_32_bits_have_own_keys() -> None:
    state = sx.random.get_state()
    keys = []
    for count in (2**32 - 1, 2**33 - 1):
        sx.random.set_state(dataclasses.replace(state, count=count))
        keys += next_words(2)
    sx.random.set_state(state)
    assert len({*keys, *next_words(2)}) == 6


@pytest.mark.parametrize(
    ("impl", "key", "count"),
    [
        ("threefry2x32", (0, 1, 2), 0),
        ("rbg", (0, 1), 0),
        ("threefry2x32", (0, 2**32), 0),
        ("threefry2x32", (0, -1), 0),
        ("threefry2x32", (0, 1.0), 0),
        ("threefry2x32", (0, 1), -1),
        ("threefry2x32", (0, 1), True),
        ("mersenne", (0, 1), 0),
    ],
)
def test_invalid_states_are_refused(impl: str, key: Any, count: Any) -> None:
    with pytest.raises(ModuleError, match=impl):
        StreamState(impl, key, count)


def test_seed_is_no_state() -> None:
    with pytest.raises(ModuleError, match=r"given 0 of type int.*shardax\.random\.seed"):
        sx.random.set_state(0)  # pyright: ignore[reportArgumentType]


# --- isolated code ---


def test_isolated_code_leaves_the_outer_stream_alone() -> None:
    expected = next_words(4)
    sx.random.seed(0)
    outside = next_words()
    with sx.random.isolated(1):
        inside = next_words()
        with sx.random.isolated(sx.random.get_state()):
            inner = next_words()
            sx.random.seed(9)
        inside += next_words()
    with pytest.raises(KeyError), sx.random.isolated(2):
        raise KeyError(sx.random.normal())
    assert outside + next_words(3) == expected
    sx.random.seed(1)
    assert inside == next_words(2) and inner == inside[1:]


def test_isolated_function_starts_anew_at_every_call() -> None:
    @sx.random.isolated(3)
    def draw() -> list[tuple[int, ...]]:
        return next_words(2)

    assert draw() == draw()
    assert sx.random.get_state().count == 0


def test_isolated_tasks_do_not_see_one_another() -> None:
    async def draw(seed: int) -> list[tuple[int, ...]]:
        with sx.random.isolated(seed):
            drawn = []
            for _ in range(3):
                drawn += next_words()
                await asyncio.sleep(0)
            return drawn

    async def together() -> list[list[tuple[int, ...]]]:
        return await asyncio.gather(*map(draw, range(3)))

    assert asyncio.run(together()) == [asyncio.run(draw(seed)) for seed in range(3)]


# --- threads ---


def test_threads_share_the_stream_without_repeated_keys() -> None:
    with ThreadPoolExecutor(8) as pool:
        drawn = [key for keys in pool.map(next_words, [25] * 8) for key in keys]
    sx.random.seed(0)
    assert sorted(drawn) == sorted(next_words(200))


def test_isolated_threads_do_not_depend_on_timing() -> None:
    def draw(seed: int) -> list[tuple[int, ...]]:
        with sx.random.isolated(seed):
            return next_words(10)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw, range(4))) == list(map(draw, range(4)))


# --- processes ---


def test_key_stream_of_several_processes_needs_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ModuleError, match=r"runs in 4 processes.*seed\(0\)"):
        KeyStream(None).state()
    sx.random.seed(0)
    assert sx.random.normal().shape == ()
